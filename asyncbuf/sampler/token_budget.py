"""Batches of so many tokens, whatever the number of items."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from asyncbuf._plain.integers import are_distinct
from asyncbuf._plain.state import fields, int64s
from asyncbuf._runtime.arguments import count, field_path
from asyncbuf.batch import Draw
from asyncbuf.errors import CheckpointCorruptError, CheckpointMismatchError, SchemaError
from asyncbuf.rows import NotYet
from asyncbuf.sampler._items import verify_items
from asyncbuf.sampler._line import Line
from asyncbuf.sampler._loss import warn_of_loss
from asyncbuf.sampler.base import Sampler

if TYPE_CHECKING:
    from asyncbuf.rows import Answer, Int64Array, Rows, WriteEvent

_MOST = 2**31 - 1
_FREE, _WAITING, _DRAWN = 0, 1, 2
_NONE = np.empty(0, np.int64)


class _Packed(NamedTuple):
    """The next batch.

    Attributes:
        batch_size: the most items that it may have.
        rows: its rows.
        is_full: whether it is the same whatever comes later.
    """

    batch_size: int
    rows: Int64Array
    is_full: bool


class TokenBudgetSampler(Sampler):
    """Hands every item out once, in batches of at most ``tokens`` tokens. Then it leaves.

    An integer field has the length of each item, such as the lengths of ``RaggedStorage``. A batch has at most
    ``batch_size`` items, and as many as fit into the budget::

        sampler = TokenBudgetSampler(16_384, "lengths")
        buffer = ReplayBuffer(RaggedStorage(4096, ["tokens"], layout="packed"), sampler=sampler, batch_size=256)

    *Packing.* Items are looked at in the order in which they were written. Each that still fits is taken, and one that
    does not is passed over, up to ``look_ahead`` of them. A batch is full when it has all its tokens or items, or would
    have to pass over one item more. Until then, consumers wait. So a batch depends on the items and on their order
    alone, not on when they came. The oldest item is always taken: none is passed over for ever.

    After ``buffer.finish()`` the last batch is what is left. It has fewer tokens.

    Items leave when a consumer has got their batch. If a ticket is dropped instead (by ``skip``, ``flush``), they stand
    in line again where they stood. Items that are overwritten, or not kept, before they were drawn are counted in
    ``lost``.

    ``batch.info["number"]`` and ``batch.info["length"]`` have the item number and the length of each row, int64
    ``[batch]``. With ``ranks``, rows are in the order of ``batch.info["rank"]``, and ``batch.lengths`` has the number
    of items of each rank, int64 ``[ranks]``. The longest item comes first, each to the rank with the fewest tokens so
    far (Graham, Bounds on multiprocessing timing anomalies, 1969): none has more than 4/3 of what is possible.

    Args:
        tokens: the budget. An item that is longer is refused when it is written.
        key: path of the field with the length of an item: an integer from 0 on.
        look_ahead: how many items may be passed over for a batch. 0 keeps strictly to the order.
        ranks: over how many ranks the items of a batch are balanced; None for no ranks.

    Raises:
        TypeError, ValueError: an argument is not of the kind or in the range that is expected.
    """

    trusted: bool = True

    def __init__(self, tokens: int, key: str, *, look_ahead: int = 16, ranks: int | None = None) -> None:
        self._tokens = count(tokens, "tokens", 1, most=_MOST, example=16_384)
        self._key = field_path(key, "key", example="lengths")
        self._look_ahead = count(look_ahead, "look_ahead", 0, most=_MOST, example=16)
        self._ranks = None if ranks is None else count(ranks, "ranks", 1, most=_MOST, example=8)
        self.columns: tuple[str, ...] = (self._key,)
        self._is_finished = False
        self._lost = 0
        self._allocate(0)

    def _allocate(self, capacity: int) -> None:
        self._keys: Int64Array = np.zeros(capacity, np.int64)  # by row: the number of its item, and 1; 0 for none
        self._lengths: Int64Array = np.zeros(capacity, np.int64)
        self._stages: np.ndarray[Any, np.dtype[np.int8]] = np.zeros(capacity, np.int8)
        self._waiting = 0
        self._front = _NONE, _NONE  # rows and keys of items that are before all those in the line, in order
        self._line = Line()
        self._packed: _Packed | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: a buffer that comes out of a pickle takes items again."""
        return {**vars(self), "_is_finished": False, "_packed": None}

    # -- what is there ------------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """The budget."""
        return self._tokens

    @property
    def waiting(self) -> int:
        """Number of items that may be drawn."""
        return self._waiting

    @property
    def unread(self) -> int:
        """The same, for limiters."""
        return self._waiting

    @property
    def lost(self) -> int:
        """Number of items so far that were overwritten, or not kept at all, before they were drawn."""
        return self._lost

    # -- what happens to rows -----------------------------------------------------------------------------------------

    def check(self, capacity: int, batch_size: int) -> None:
        """Refuse a batch size with which a full storage might not fill a batch."""
        if batch_size + self._look_ahead > capacity:
            raise ValueError(
                f"batch_size: expected at most the capacity {capacity} without the {self._look_ahead} items that may "
                f"be passed over, found {batch_size}"
            )

    def check_write(self, event: WriteEvent) -> None:
        """Refuse items without a length, and those that fit into no batch.

        Raises:
            SchemaError: the length of an item is no integer, or out of range.
        """
        lengths = event.offered[self._key]
        if lengths.size != len(lengths) or lengths.dtype.kind not in "iu":
            found = f"{lengths.dtype} of shape {list(lengths.shape[1:])}"
            raise SchemaError(f"{self._key}: expected one integer per item, its length; found {found}")
        least, most = int(lengths.min(initial=0)), int(lengths.max(initial=0))
        if least < 0 or most > self._tokens:
            raise SchemaError(
                f"{self._key}: expected lengths from 0 to {self._tokens}, the tokens of a batch; found "
                f"{least if least < 0 else most}"
            )

    def wrote(self, event: WriteEvent) -> None:
        """New items wait."""
        if not len(self._keys):
            self._allocate(event.table.capacity)
        rows, offered = event.rows.numpy(), event.offered[self._key]
        if lost := self._forget(rows) + len(offered) - len(rows):
            self._lose(lost)
        self._keys[rows] = event.numbers.numpy() + 1
        self._lengths[rows] = event.columns[self._key].reshape(-1)
        self._stages[rows] = _WAITING
        self._waiting += len(rows)
        self._line.push(rows, self._keys)

    def _lose(self, count: int) -> None:
        is_first, self._lost = not self._lost, self._lost + count
        if is_first:
            warn_of_loss(type(self).__name__, f"{count} item(s) left")

    def removed(self, indices: torch.Tensor, rows: Rows) -> None:
        """Items have left."""
        self._forget(indices.numpy())

    def _forget(self, rows: Int64Array) -> int:
        """Rows have other items now, or none: how many waited there."""
        waited = int(np.count_nonzero(self._stages.take(rows) == _WAITING))
        self._keys[rows] = 0
        self._stages[rows] = _FREE
        self._waiting -= waited
        self._packed = None
        return waited

    def clear(self) -> None:
        """No item is there."""
        self._allocate(len(self._keys))

    def finished(self) -> None:
        """What is left makes the last batch."""
        self._is_finished = True
        self._packed = None

    # -- drawing ------------------------------------------------------------------------------------------------------

    def may_draw(self, rows: Rows, batch_size: int) -> Answer:
        """Not before a batch is full; after the end of the data, while there are items."""
        packed = self._next(batch_size)
        if packed.is_full or (self._is_finished and self._waiting):
            return True
        return NotYet(
            f"{self._waiting} items wait, and {int(self._lengths.take(packed.rows).sum())} tokens of them fit into a "
            f"batch, which is full with {self._tokens} tokens or {batch_size} items"
        )

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        """The items that fit.

        Raises:
            ValueError: there is no full batch.
        """
        packed = self._next(batch_size)
        if not packed.is_full and not (self._is_finished and self._waiting):
            raise ValueError(f"batch size: expected items for a full batch, found {self._waiting}, which fill none")
        found, self._packed = packed.rows, None
        self._stages[found] = _DRAWN
        self._waiting -= len(found)
        ranks = parts = None
        if self._ranks is not None:
            ranks = balanced(self._lengths.take(found), self._ranks)
            parts = torch.from_numpy(np.bincount(ranks, minlength=self._ranks))
            order = ranks.argsort(kind="stable")
            found, ranks = found[order], ranks[order]
        info = {
            "number": torch.from_numpy(self._keys.take(found) - 1),
            "length": torch.from_numpy(self._lengths.take(found)),
        }
        if ranks is not None:
            info["rank"] = torch.from_numpy(ranks)
        return Draw(torch.from_numpy(found), info, lengths=parts)

    def _next(self, batch_size: int) -> _Packed:
        packed = self._packed
        if packed is None or packed.batch_size != batch_size:
            rows = self._first(batch_size + self._look_ahead)
            places, is_full = self._fitting(self._lengths.take(rows), batch_size)
            packed = self._packed = _Packed(batch_size, rows[places], is_full)
        return packed

    def _first(self, wanted: int) -> Int64Array:
        """The rows of so many items that are first in line, or of all."""
        rows, keys = self._front
        is_there = (self._keys.take(rows) == keys) & (self._stages.take(rows) == _WAITING)
        rows = rows[is_there]
        if len(rows) < wanted:
            rows = np.concatenate([rows, self._line.take_first(wanted - len(rows), self._keys)])
        self._front = rows, self._keys.take(rows)
        return rows[:wanted]

    def _fitting(self, lengths: Int64Array, batch_size: int) -> tuple[Int64Array, bool]:
        """Which items make a batch, and whether it is full."""
        parts, start, passed, tokens, items = [_NONE], 0, 0, self._tokens, batch_size
        while True:
            sums = lengths[start : start + items].cumsum()
            fitting = int(sums.searchsorted(tokens))
            fitting += bool((sums[fitting : fitting + 1] == tokens).any())  # the first one that uses up all tokens
            if fitting:
                parts.append(np.arange(start, start + fitting))
                tokens -= int(sums[fitting - 1])
                items -= fitting
                start += fitting
            if not items or not tokens:
                return np.concatenate(parts), True
            if start >= len(lengths):
                return np.concatenate(parts), False
            passed, start = passed + 1, start + 1
            if passed > self._look_ahead:
                return np.concatenate(parts), True

    def handed_over(self, draw: Draw) -> torch.Tensor | None:
        """Its items leave."""
        rows = self._under_way(draw)
        return torch.from_numpy(rows) if len(rows) else None

    def dropped(self, draw: Draw) -> None:
        """Its items are drawn again."""
        back = self._under_way(draw)
        self._stages[back] = _WAITING
        self._waiting += len(back)
        rows, keys = self._front
        rows = np.concatenate([rows[self._keys.take(rows) == keys], back])
        rows = rows[np.unique(self._keys.take(rows), return_index=True)[1]]
        self._front, self._packed = (rows, self._keys.take(rows)), None

    def _under_way(self, draw: Draw) -> Int64Array:
        """The rows of a draw that still have its items."""
        rows: Int64Array = draw.indices.numpy()
        numbers = draw.info.get("number")
        if not isinstance(numbers, torch.Tensor) or numbers.shape != rows.shape:
            return rows[:0]  # a draw of another sampler, out of a checkpoint
        found: Int64Array = rows[(self._keys.take(rows) == numbers.numpy() + 1) & (self._stages.take(rows) == _DRAWN)]
        return found

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Of every item its row, number and length; which were drawn."""
        rows = np.flatnonzero(self._keys)
        columns = {
            "rows": rows,
            "numbers": self._keys.take(rows) - 1,
            "lengths": self._lengths.take(rows),
            "drawn": np.flatnonzero(self._stages == _DRAWN),
        }
        state: dict[str, Any] = {name: torch.from_numpy(column) for name, column in columns.items()}
        return {"lost": self._lost, "capacity": len(self._keys), **state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the items that were saved."""
        name = type(self).__name__
        names = ("rows", "numbers", "lengths", "drawn")
        kinds: dict[str, type] = dict(lost=int, capacity=int)
        lost, capacity, *tensors = fields(state, name, **kinds, **dict.fromkeys(names, torch.Tensor))
        rows, numbers, lengths, drawn = (
            int64s(tensor, f"{name}: expected {each}").copy() for each, tensor in zip(names, tensors, strict=True)
        )
        if not len(rows) == len(numbers) == len(lengths) or (lengths < 0).any():
            raise CheckpointCorruptError(f"{name}: expected as many numbers and lengths as rows, found others")
        if lengths.max(initial=0) > self._tokens:
            raise CheckpointMismatchError(
                f"{name}: expected items of at most {self._tokens} tokens, as in this buffer; the checkpoint has one "
                f"of {lengths.max()}"
            )
        is_sound = are_distinct(rows, capacity) and are_distinct(numbers, 2**62) and are_distinct(drawn, capacity)
        if not is_sound or not np.isin(drawn, rows).all():
            raise CheckpointCorruptError(f"{name}: expected different rows and item numbers, found others")
        _refuse_huge(capacity, name)
        self._allocate(capacity)
        self._lost = lost
        self._keys[rows], self._lengths[rows], self._stages[rows] = numbers + 1, lengths, _WAITING
        self._stages[drawn] = _DRAWN
        self._waiting = len(rows) - len(drawn)
        waiting = rows[numbers.argsort()]
        waiting = waiting[self._stages.take(waiting) == _WAITING]
        # Those that are older than one that was drawn must stay before it, if that one comes back.
        is_early = self._keys.take(waiting) < self._keys.take(drawn).max(initial=0)
        early = waiting[is_early]
        self._front = early, self._keys.take(early)
        self._line.push(waiting[~is_early], self._keys)

    def verify(self, rows: Rows) -> None:
        """Refuse other items than those of the table."""
        verify_items(type(self).__name__, self._keys, self._keys > 0, rows)


def _refuse_huge(capacity: int, name: str) -> None:
    try:
        np.zeros(capacity, np.int64)
    except (MemoryError, ValueError) as error:
        raise CheckpointCorruptError(f"{name}: expected a capacity that fits memory, found {capacity}") from error


def balanced(lengths: Int64Array, ranks: int) -> Int64Array:
    """Items over ranks, so that each has about as many tokens: longest first, each to the rank that has the fewest.

    Args:
        lengths: of the items, int64 ``[items]``.
        ranks: how many ranks there are. Of those with as few tokens, the one with the fewest items, then the first.

    Returns:
        The rank of each item: int64 ``[items]``.
    """
    found = np.zeros(len(lengths), np.int64)
    sums = [(0, 0, rank) for rank in range(ranks)]
    for item in (-lengths).argsort(kind="stable").tolist():
        tokens, items, rank = sums[0]
        found[item] = rank
        heapq.heapreplace(sums, (tokens + int(lengths[item]), items + 1, rank))
    return found
