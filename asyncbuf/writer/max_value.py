"""The best items: those with the largest value of a field."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from asyncbuf._plain.integers import are_distinct
from asyncbuf._plain.savable import tensor_problem
from asyncbuf._plain.state import fields, int64s, same
from asyncbuf._runtime.arguments import shown
from asyncbuf.errors import CheckpointCorruptError, SchemaError
from asyncbuf.rows import Placement, RowRange, placed
from asyncbuf.writer._least import LeastRows
from asyncbuf.writer.base import Writer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncbuf.rows import Float64Array, Int64Array, Rows

_NO_ITEM = -1


class MaxValueWriter(Writer):
    """Keeps the items with the largest value of a field, as many as there are rows.

    While there is a free row, an item takes it. After that, an item whose value is larger than the smallest stored one
    takes the row of that; any other is not kept, and ``add`` returns None. Of equal values the older item stays: a new
    one does not replace it, and of several that are smallest, the newest makes room. A write of many items does the
    same as the items one by one.

    Removed rows are free: the next items take them, whatever their values are.

    Args:
        rank_key: path of the field, such as ``"score"`` or ``"meta/score"``: one number for each item, compared as
            float64. A write with a NaN in it is refused with ``SchemaError``.

    Raises:
        TypeError: the path is not a str.
    """

    computes_numbers: ClassVar[bool] = True
    trusted: ClassVar[bool] = True

    def __init__(self, rank_key: str) -> None:
        if not isinstance(rank_key, str):
            raise TypeError(f"rank_key: expected the path of a field as a str, found {shown(rank_key)}")
        self._rank_key = rank_key
        self.columns: tuple[str, ...] = (rank_key,)
        self._write_count = 0
        self._used = 0  # rows from this one on were never written
        self._freed = np.empty(0, np.int64)  # removed rows, in the order in which they are taken again
        self._rows = LeastRows(1)

    @property
    def size(self) -> int:
        """Number of rows that hold items."""
        return self._used - len(self._freed)

    @property
    def write_count(self) -> int:
        """Number of items ever handed in, kept or not."""
        return self._write_count

    def numbers(self, rows: Int64Array, capacity: int) -> Int64Array:
        """Item numbers of valid rows: int64 in the shape of ``rows``."""
        return self._rows.numbers[rows]

    # -- placing ------------------------------------------------------------------------------------------------------

    def place_values(self, count: int, capacity: int, columns: Mapping[str, np.ndarray[Any, Any]]) -> Placement:
        """Free rows, as long as there are some, and then those of smaller values.

        Raises:
            SchemaError: the field is not one number for each item, or one is NaN.
        """
        values = self._ranks(columns[self._rank_key])
        if count == 1 and self._used == capacity and not len(self._freed):
            row, least = self._sized(capacity).least
            runs = (RowRange(row, 0, 1),) if values[0] > least else ()
            return Placement(1, runs, values)
        free = self._free(count, capacity)
        filled = len(free)
        if filled == count:
            return placed(count, free, np.arange(count), values)
        floor = self._sized(capacity).least[1] if self.size else np.inf
        floor = min(floor, float(values[:filled].min(initial=np.inf)))
        larger = filled + np.flatnonzero(values[filled:] > floor)
        rows, items = self._replacing(values, free, larger) if len(larger) else (free, np.arange(filled))
        return placed(count, rows, items, values[items])

    def _ranks(self, column: np.ndarray[Any, Any]) -> Float64Array:
        """The values of items: float64 ``[items]``."""
        name = self._rank_key
        if column.size != len(column) or column.dtype.kind not in "biuf":
            raise SchemaError(
                f"{name}: expected one real number per item, found {column.dtype} of shape {list(column.shape[1:])}"
            )
        values = column.reshape(-1).astype(np.float64)
        if np.isnan(values.min()):
            raise SchemaError(
                f"{name}: expected values that can be compared, found NaN in item {int(np.isnan(values).argmax())}"
            )
        return values

    def _free(self, count: int, capacity: int) -> Int64Array:
        """The rows that the next items take without replacing any: int64, at most ``count``."""
        freed = self._freed[:count]
        return np.concatenate([freed, np.arange(self._used, min(capacity, self._used + count - len(freed)))])

    def _sized(self, capacity: int) -> LeastRows:
        if self._rows.capacity != capacity:
            before, self._rows = self._rows, LeastRows(capacity)
            rows = np.flatnonzero(before.numbers >= 0)
            self._rows.set(rows, before.values[rows], before.numbers[rows])
        return self._rows

    def _replacing(self, values: Float64Array, free: Int64Array, larger: Int64Array) -> tuple[Int64Array, Int64Array]:
        """What is kept of items that fill free rows and then replace others, and of each other.

        Only so many stored items can be replaced as there are items to replace them: the least ones. With these and
        the items in one order, the replacements are pushes to a heap of ranks. An item that is replaced hands its row
        on: the row of the last one is where that chain begins.

        Args:
            values: of all items.
            free: the rows of the first ones.
            larger: positions of those of the others that can be kept.

        Returns:
            Rows, and positions of the items that go there, ascending.
        """
        first = np.arange(len(free))
        old = self._rows.some_least(min(len(larger), self.size))
        known = np.concatenate([old, free])
        items = np.concatenate([first, larger])
        ranked = np.concatenate([self._rows.values[old], values[items]])
        numbers = np.concatenate([self._rows.numbers[old], self._write_count + items])
        order = np.lexsort((-numbers, ranked))
        ranks = np.empty_like(order)
        ranks[order] = np.arange(len(order))
        heap = np.sort(ranks[: len(known)]).tolist()
        pushed = map(heapq.heappushpop, itertools.repeat(heap), ranks[len(known) :].tolist())
        replaced = order[np.fromiter(pushed, np.int64, len(larger))]
        begins = np.arange(len(order))
        begins[len(known) :] = replaced
        while not np.array_equal(further := begins[begins], begins):
            begins = further
        stays = np.ones(len(order), np.bool_)
        stays[replaced] = False
        kept = len(old) + np.flatnonzero(stays[len(old) :])
        return known[begins[kept]], items[kept - len(old)]

    # -- what happens to rows -----------------------------------------------------------------------------------------

    def commit(self, placement: Placement, capacity: int) -> None:
        """Note the values and numbers of the items."""
        if placement.runs:
            taken = min(placement.offered, len(self._freed))
            if taken:
                self._freed = self._freed[taken:].copy()
            self._used = min(capacity, self._used + placement.offered - taken)
            self._sized(capacity).set(placement.rows, placement.note, self._write_count + placement.items)
        self._write_count += placement.offered

    def removed(self, rows: torch.Tensor, capacity: int) -> None:
        """Note which rows are free now."""
        gone = rows.numpy()
        self._sized(capacity).set(gone.copy(), np.inf, _NO_ITEM)
        self._freed = np.concatenate([self._freed, gone])

    def clear(self) -> None:
        """Start over at row 0."""
        self._used = 0
        self._freed = np.empty(0, np.int64)
        self._rows = LeastRows(1)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Values and item numbers of the used rows, infinite and -1 for a free one; the free ones in their order."""
        return {
            "rank_key": self._rank_key,
            "write_count": self._write_count,
            "values": torch.from_numpy(self._rows.values[: self._used].copy()),
            "numbers": torch.from_numpy(self._rows.numbers[: self._used].copy()),
            "free": torch.from_numpy(self._freed.copy()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the values that were saved."""
        name = type(self).__name__
        kinds: dict[str, type] = dict(rank_key=str, write_count=int)
        kinds |= dict.fromkeys(("values", "numbers", "free"), torch.Tensor)
        rank_key, write_count, saved, *arrays = fields(state, name, **kinds)
        same(rank_key, self._rank_key, f"{name}: rank_key")
        values = _float64s(saved, name)
        numbers, free = (int64s(array, f"{name}: expected numbers and free rows") for array in arrays)
        used = len(values)
        if len(numbers) != used or not are_distinct(free, used):
            raise CheckpointCorruptError(
                f"{name}: expected {used} item numbers, as there are values, and different free rows, found others"
            )
        rows = np.flatnonzero(numbers != _NO_ITEM)
        is_free = np.zeros(used, np.bool_)
        is_free[free] = True
        if len(rows) + len(free) != used or is_free[rows].any() or not (values[free] == np.inf).all():
            raise CheckpointCorruptError(f"{name}: expected an item in each row that is not free, found others")
        if not are_distinct(numbers[rows], write_count):
            raise CheckpointCorruptError(f"{name}: expected different item numbers below {write_count}, found others")
        stored = LeastRows(max(1, used))
        stored.set(rows, values[rows], numbers[rows])
        self._rows, self._used, self._freed, self._write_count = stored, used, free.copy(), write_count

    def verify(self, rows: Rows) -> None:
        """Refuse values of other rows than the valid ones."""
        name = type(self).__name__
        held = np.flatnonzero(self._rows.numbers != _NO_ITEM)
        if self._used > rows.capacity or len(held) != rows.size or not rows.contains(torch.from_numpy(held)).all():
            raise CheckpointCorruptError(
                f"{name}: expected values of the {rows.size} valid rows, found them of {len(held)} rows"
            )


def _float64s(tensor: torch.Tensor, name: str) -> Float64Array:
    """Values out of a checkpoint, if they can be compared."""
    is_column = tensor_problem(tensor) is None and tensor.dtype is torch.float64 and tensor.ndim == 1
    if not is_column or bool(torch.isnan(tensor).any()):
        raise CheckpointCorruptError(f"{name}: expected values as float64 [rows] without NaN, found others")
    found: Float64Array = tensor.detach().cpu().numpy()
    return found
