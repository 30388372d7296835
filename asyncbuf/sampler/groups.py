"""Groups of items, such as the answers to one prompt: handed out whole, once, and gone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from asyncbuf._plain.state import fields, same
from asyncbuf._runtime.arguments import count, field_path, field_paths, refuse_coroutine, shown
from asyncbuf.batch import Draw
from asyncbuf.errors import SchemaError
from asyncbuf.rows import NotYet
from asyncbuf.sampler._group_rows import Arrival, GroupRows, Stage
from asyncbuf.sampler._items import verify_items
from asyncbuf.sampler._kept_columns import KeptColumns
from asyncbuf.sampler._loss import warn_of_loss
from asyncbuf.sampler.base import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncbuf.rows import Answer, Int64Array, Rows, WriteEvent

    Column = np.ndarray[Any, np.dtype[Any]]
    Filter = Callable[[dict[str, Column]], bool | np.bool_ | torch.Tensor]
    OnDrop = Callable[[int, str], object]

_MOST = 2**31 - 1


class _Coming(NamedTuple):
    """What is known of a write before it happens.

    Attributes:
        first: number of the first item.
        stop: that of the item behind the last one.
        rows: the rows that will be written, int64 ``[kept]``.
        missed: keys of the items that are not kept, each once.
        verdicts: of each group that it completes, by the number of the last item, what the filter says.
        arrival: how its items come into groups, if that was found out.
    """

    first: int
    stop: int
    rows: Int64Array
    missed: list[int]
    verdicts: dict[int, bool]
    arrival: Arrival | None = None


class GroupSampler(Sampler):
    """Hands out whole groups, in the order in which they became complete; each once. Then their items leave.

    For GRPO and the like, where ``size`` answers to one prompt are compared with each other. An integer field of the
    items tells groups apart. Members come in any order and mixed with those of other groups. Every leaf of a batch has
    shape ``[groups, size, *item]``, and ``batch_size`` is groups times size::

        sampler = GroupSampler("prompt", 8, filter=lambda group: np.ptp(group["reward"]) > 0, filter_keys="reward")
        buffer = ReplayBuffer(RaggedStorage(4096, ["tokens"]), sampler=sampler, batch_size=16 * 8)

    ``batch.info["group"]`` has the key of each group, int64 ``[groups]``, and ``batch.info["number"]`` item numbers,
    int64 ``[groups, size]``. Members are in the order in which they were written.

    Items leave when a consumer has got their batch. If a ticket is dropped instead (by ``skip``, ``flush``), its groups
    are the next ones to be drawn, in their order.

    *More members than* ``size``: the first ones are a group, and those that follow begin the next group of that key.
    *Members that are overwritten or removed*, or that the writer does not keep, before their group was drawn: the group
    is lost, and its other members leave. Members that come later begin a new group of that key. A limiter that holds
    writers back while no row is free keeps groups from being overwritten.

    Args:
        group_key: path of the integer field with the key of the group.
        size: how many members a group has.
        filter: says of each group, once, when it becomes complete, whether it is worth training on, as in the dynamic
            sampling of DAPO (Yu et al., 2025, arXiv 2503.14476). It gets the fields of ``filter_keys`` by path, as
            arrays ``[size, *field]`` of bool, int64 or float64, and must depend on nothing else. The items of a group
            that it refuses leave at once. What it raises refuses the write that would have completed the group. A
            write that fails after that asks it again.
        filter_keys: path of the field that the filter gets; or several such.
        on_drop: called with the key of a group that will not be handed out, and why: ``"filter"`` or ``"lost"``; in the
            very step, so that a prompt that is put back is in the same checkpoint. It must be quick and not fail.

    A write asks the filter of all groups that it completes in one step of the event loop.

    Raises:
        TypeError, ValueError: an argument is not of the kind or in the range that is expected.
    """

    trusted: bool = True

    def __init__(
        self,
        group_key: str,
        size: int,
        *,
        filter: Filter | None = None,
        filter_keys: str | Sequence[str] = (),
        on_drop: OnDrop | None = None,
    ) -> None:
        self._key = field_path(group_key, "group_key", example="prompt")
        self._size = count(size, "size", 1, most=_MOST, example=8)
        paths = field_paths(filter_keys, "filter_keys", example="reward")
        for name, function in (("filter", filter), ("on_drop", on_drop)):
            if function is not None and not callable(function):
                raise TypeError(f"{name}: expected a function or None, found {shown(function)}")
        if (filter is None) != (not paths):
            expected = "the fields that the filter gets" if filter else "none, because there is no filter"
            raise ValueError(f"filter_keys: expected {expected}, found {shown(filter_keys)}")
        self._filter = filter
        self._on_drop = on_drop
        self.columns: tuple[str, ...] = tuple(dict.fromkeys((self._key, *paths)))
        self._groups = GroupRows(self._size, 0)
        self._kept = KeptColumns(tuple(dict.fromkeys(paths)))
        self._coming = _Coming(0, 0, np.empty(0, np.int64), [], {})
        self._lost = self._refused = 0

    # -- what is there ------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """How many members a group has."""
        return self._size

    @property
    def draw_unit(self) -> int:
        """The size of a group: a batch size is a multiple of it."""
        return self._size

    @property
    def waiting(self) -> int:
        """Number of complete groups that may be drawn."""
        return self._groups.waiting

    @property
    def unread(self) -> int:
        """Number of items of these groups, for limiters."""
        return self._groups.waiting * self._size

    @property
    def incomplete(self) -> int:
        """Number of groups of which members are missing."""
        return len(self._groups.open)

    @property
    def lost(self) -> int:
        """Number of groups so far of which a member left before they were drawn."""
        return self._lost

    @property
    def refused(self) -> int:
        """Number of groups so far that the filter refused."""
        return self._refused

    # -- writes -------------------------------------------------------------------------------------------------------

    def check(self, capacity: int, batch_size: int) -> None:
        """Refuse a batch size that is not one of whole groups, or of more items than there are rows."""
        if batch_size % self._size:
            raise ValueError(f"batch_size: expected a multiple of the group size {self._size}, found {batch_size}")
        if batch_size > capacity:
            raise ValueError(f"batch_size: expected at most the capacity {capacity}, found {batch_size}")

    def check_write(self, event: WriteEvent) -> None:
        """Refuse items that do not say which group they belong to; ask the filter of groups that become complete.

        Raises:
            SchemaError: a field is not of the kind that is expected.
            TypeError: the filter returned something else than a bool.
        """
        column = event.offered[self._key]
        if column.size != len(column) or column.dtype.kind not in "iu":
            found = f"{column.dtype} of shape {list(column.shape[1:])}"
            raise SchemaError(f"{self._key}: expected one integer per item, the key of its group; found {found}")
        if column.dtype.kind == "u" and column.size and int(column.max()) >= 2**63:
            raise SchemaError(f"{self._key}: expected keys below 2**63, found {column.max()}")
        rows = event.rows.numpy()
        missed: list[int] = []
        if len(rows) < len(column):
            is_kept = event.row_of_each >= 0
            missed = np.unique(_keys(column)[~is_kept]).tolist()
        self._kept.check(event.offered)
        self._coming = _Coming(event.first, event.first + len(column), rows, missed, {})
        if self._filter is not None and len(rows):
            keys = _keys(event.columns[self._key])
            arrival = self._groups.arrival(keys, gone=(*self._groups.open_among(rows), *missed))
            self._coming = self._coming._replace(verdicts=self._judged(event, keys, arrival), arrival=arrival)

    def _judged(self, event: WriteEvent, keys: Int64Array, arrival: Arrival) -> dict[int, bool]:
        """What the filter says of the groups that a write will complete."""
        columns = event.columns
        completing = arrival.completing
        if not len(completing):
            return {}
        numbers, new = event.numbers.numpy(), self._kept.values(columns)
        verdicts = {}
        for place in completing[arrival.order[completing].argsort()].tolist():
            members = arrival.order[max(0, place - self._size + 1) : place + 1]
            members = members[keys[members] == keys[members[-1]]]
            last, earlier = self._groups.open.get(int(keys[members[0]]), -1), np.empty(0, np.int64)
            if len(members) < self._size:
                earlier = self._groups.chains(np.array([last]))
            group = self._kept.together(earlier, new, members)
            verdicts[int(numbers[members[-1]])] = self._verdict(group)
        return verdicts

    def _verdict(self, group: dict[str, Column]) -> bool:
        assert self._filter is not None
        verdict: Any = self._filter(group)
        if isinstance(verdict, bool | np.bool_):
            return bool(verdict)
        refuse_coroutine(verdict, "filter")
        if isinstance(verdict, torch.Tensor) and verdict.dtype is torch.bool and verdict.ndim == 0:
            return bool(verdict)
        raise TypeError(f"filter: expected a function that returns True or False, found {shown(verdict)}")

    def wrote(self, event: WriteEvent) -> None:
        """See which groups are complete now, and which never will be."""
        groups, coming = self._groups, self._coming
        if not groups.capacity:
            groups = self._groups = GroupRows(self._size, event.table.capacity)
        lost: list[int] = []
        if event.first == coming.first:  # all rows of the write, of which this may be the first part
            lost = groups.forget(coming.rows)
            groups.lose(coming.missed)
            lost += coming.missed
        rows, columns, stop = event.rows.numpy(), event.columns, event.first + len(event.offered[self._key])
        self._kept.keep(rows, columns, groups.capacity)
        arrival = coming.arrival if event.first == coming.first and stop == coming.stop else None
        refused = groups.join(rows, event.numbers.numpy(), _keys(columns[self._key]), coming.verdicts, arrival)
        if stop >= coming.stop:
            self._coming = coming._replace(rows=rows[:0], missed=[], verdicts={}, arrival=None)
        self._refused += len(refused)
        if lost and not self._lost:
            warn_of_loss(type(self).__name__, f"items of {len(lost)} group(s) left")
        self._gone(lost)
        self._tell(refused, "filter")

    def _gone(self, lost: list[int]) -> None:
        self._lost += len(lost)
        self._tell(lost, "lost")

    def _tell(self, keys: list[int], cause: str) -> None:
        if self._on_drop is not None:
            for key in keys:
                self._on_drop(key, cause)

    def removed(self, indices: torch.Tensor, rows: Rows) -> None:
        """See which groups will never be complete."""
        self._gone(self._groups.forget(indices.numpy()))

    def leaving(self) -> torch.Tensor | None:
        """The items of groups that are not handed out."""
        leaving = self._groups.taken_leave()
        return torch.from_numpy(leaving) if len(leaving) else None

    def clear(self) -> None:
        """No item is there."""
        self._groups = GroupRows(self._size, self._groups.capacity)
        self._kept.clear()

    # -- drawing ------------------------------------------------------------------------------------------------------

    def may_draw(self, rows: Rows, batch_size: int) -> Answer:
        """Not before as many groups are complete."""
        wanted, waiting = batch_size // self._size, self._groups.waiting
        if waiting >= wanted:
            return True
        return NotYet(
            f"{waiting} of {wanted} groups of {self._size} are complete; of {len(self._groups.open)} others members "
            "are missing"
        )

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        """The groups that became complete first.

        Raises:
            ValueError: fewer groups are complete.
        """
        wanted, groups = batch_size // self._size, self._groups
        if wanted > groups.waiting:
            raise ValueError(f"batch size: expected at most {groups.waiting} groups, found {wanted}")
        members = groups.take(wanted)
        info = {
            "group": torch.from_numpy(groups.keys.take(members[:, -1])),
            "number": torch.from_numpy(groups.numbers.take(members) - 1),
        }
        return Draw(torch.from_numpy(members.reshape(-1)), info, shape=members.shape)

    def handed_over(self, draw: Draw) -> torch.Tensor | None:
        """Its items leave."""
        rows, is_there = self._under_way(draw)
        leaving = rows[is_there]
        return torch.from_numpy(leaving) if len(leaving) else None

    def dropped(self, draw: Draw) -> None:
        """Its groups are drawn again, but for those of which a member has left."""
        rows, is_there = self._under_way(draw)
        if len(rows):
            self._gone(self._groups.give_back(rows, is_there))

    def _under_way(self, draw: Draw) -> tuple[Int64Array, np.ndarray[Any, np.dtype[np.bool_]]]:
        """The rows of a draw as ``[groups, size]``, and which of them still have its items."""
        rows: Int64Array = draw.indices.numpy()
        numbers = draw.info.get("number")
        is_ours = isinstance(numbers, torch.Tensor) and numbers.numel() == len(rows) and not len(rows) % self._size
        if not is_ours or len(np.unique(rows)) < len(rows):
            rows = rows[:0]  # a draw of another sampler, out of a checkpoint
            return rows.reshape(0, self._size), rows.reshape(0, self._size) > 0
        assert isinstance(numbers, torch.Tensor)
        rows = rows.reshape(-1, self._size)
        is_there = self._groups.numbers.take(rows) == numbers.numpy().reshape(rows.shape) + 1
        return rows, is_there & (self._groups.stages.take(rows) == Stage.DRAWN)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The members of each group, and what the filter will have to know of those that are not complete."""
        groups = self._groups.state_dict()
        open_rows = self._groups.chains(self._groups.open_lasts())
        return {
            "size": self._size,
            "lost": self._lost,
            "refused": self._refused,
            "groups": groups,
            "columns": self._kept.state_dict(open_rows),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the groups that were saved."""
        name = type(self).__name__
        kinds: dict[str, type] = dict(size=int, lost=int, refused=int, groups=dict, columns=dict)
        size, lost, refused, saved, columns = fields(state, name, **kinds)
        same(size, self._size, f"{name}: size")
        groups = GroupRows.of(self._size, saved, name)
        kept = self._kept.of(columns, groups.chains(groups.open_lasts()), groups.capacity, name)
        self._groups, self._kept, self._lost, self._refused = groups, kept, lost, refused

    def verify(self, rows: Rows) -> None:
        """Refuse other items than those of the table."""
        verify_items(type(self).__name__, self._groups.numbers, self._groups.stages > 0, rows)


def _keys(column: Column) -> Int64Array:
    return column.reshape(-1).astype(np.int64)
