"""Which rows are valid, once some were removed: an index that is kept up to date in O(1) a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from asyncbuf.rows import SCATTERED, Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncbuf.rows import BoolArray, Int64Array, Placement, RowRange


class SparseRows:
    """Valid rows with gaps between them, at positions 0 to ``size - 1``.

    Rows that are added take the positions at the end. Where rows leave, the last ones move into their positions: the
    order depends on the history of writes and removals, and on nothing else. Memory is zero at first, and zero means
    "as when the rows were dense"; so it takes no time to begin, and becomes real only where rows change.

    Args:
        capacity: number of rows.
        dense: how many rows are valid now, from row 0 on, each at the position of its number.

    Attributes:
        size: number of valid rows.
    """

    def __init__(self, capacity: int, dense: int) -> None:
        self._capacity = capacity
        self._dense = dense
        self.size = dense
        self._row_offset = np.zeros(capacity, np.int64)  # by position: its row, less the position
        self._position_offset = np.zeros(capacity, np.int64)  # by row: its position, less the row
        self._flipped = np.zeros(capacity, np.bool_)  # by row: whether it is valid now but was not, or the reverse

    @classmethod
    def of(cls, capacity: int, rows: Int64Array) -> Self:
        """Different rows, at positions in this order."""
        sparse = cls(capacity, 0)
        sparse.add(rows)
        return sparse

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """The rows at some positions: int64, in the shape of ``positions``."""
        where = positions.numpy()
        return torch.from_numpy(np.asarray(where + self._row_offset[where]))

    def contains(self, rows: torch.Tensor) -> torch.Tensor:
        """Which rows are valid: bool, in the shape of ``rows``."""
        found = rows.numpy()
        in_range = (found >= 0) & (found < self._capacity)
        return torch.from_numpy(in_range & self._holds(np.where(in_range, found, 0)))

    def _holds(self, rows: Int64Array) -> BoolArray:
        held: BoolArray = (rows < self._dense) ^ self._flipped[rows]
        return held

    def missing(self, rows: Int64Array) -> Int64Array:
        """Those of some rows that are not valid."""
        return rows[~self._holds(rows)]

    def add(self, rows: Int64Array) -> None:
        """Make rows valid, each of which is given once; those that are valid stay where they are."""
        rows = self.missing(rows)
        self._put(np.arange(self.size, self.size + len(rows)), rows)
        self._flipped[rows] ^= True
        self.size += len(rows)

    def remove(self, rows: Int64Array) -> None:
        """Make valid rows invalid, each of which is given once."""
        size = self.size - len(rows)
        positions = rows + self._position_offset[rows]
        stays = np.ones(len(rows), np.bool_)
        stays[positions[positions >= size] - size] = False
        last = size + np.flatnonzero(stays)
        self._put(np.sort(positions[positions < size]), last + self._row_offset[last])
        self._flipped[rows] ^= True
        self.size = size

    def _put(self, positions: Int64Array, rows: Int64Array) -> None:
        self._row_offset[positions] = rows - positions
        self._position_offset[rows] = positions - rows


class RowsAfterWrite:
    """Valid rows as they will be after a write that has not happened yet.

    Args:
        before: the valid rows before it.
        size: how many those are.
        added: the rows that the write makes valid.
    """

    def __init__(self, before: SparseRows, size: int, added: Int64Array) -> None:
        self._before = before
        self._size = size
        self._added = added

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """The rows at some positions: int64, in the shape of ``positions``."""
        where = positions.numpy()
        is_new = where >= self._size
        rows = self._before.at(torch.from_numpy(np.where(is_new, 0, where))).numpy()
        rows[is_new] = self._added[where[is_new] - self._size]
        return torch.from_numpy(rows)

    def contains(self, rows: torch.Tensor) -> torch.Tensor:
        """Which rows are valid: bool, in the shape of ``rows``."""
        return self._before.contains(rows) | torch.from_numpy(np.isin(rows.numpy(), self._added))


class ValidIndex:
    """Which rows are valid: 0 to ``size - 1``, until a row is removed or a writer leaves a gap.

    Args:
        capacity: number of rows.

    Attributes:
        sparse: the valid rows, once there are gaps.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._size = 0
        self.sparse: SparseRows | None = None

    @classmethod
    def of(cls, capacity: int, size: int, rows: Int64Array | None) -> Self:
        """An index of so many rows: those from 0 on, or different ones, at positions in this order."""
        index = cls(capacity)
        index._size = size
        index.sparse = None if rows is None else SparseRows.of(capacity, rows)
        return index

    @property
    def size(self) -> int:
        """Number of valid rows."""
        return self._size if self.sparse is None else self.sparse.size

    def rows(self, write_count: int) -> Rows:
        """What there is to draw from now."""
        sparse = self.sparse
        if sparse is None:
            return Rows(self._size, self._capacity, write_count)
        return Rows(sparse.size, self._capacity, write_count, sparse)

    def rows_after(self, placement: Placement, write_count: int) -> Rows:
        """What there will be to draw from after a write."""
        if self.sparse is None and (size := _dense_size(self._size, placement.runs)) is not None:
            return Rows(size, self._capacity, write_count)
        before = SparseRows(self._capacity, self._size) if self.sparse is None else self.sparse
        added = before.missing(placement.rows)
        after = RowsAfterWrite(before, before.size, added)
        return Rows(before.size + len(added), self._capacity, write_count, after)

    def wrote(self, placement: Placement) -> int:
        """Rows were written: how many of them were not valid before."""
        runs, before = placement.runs, self._size
        if self.sparse is None and type(runs) is tuple and len(runs) == 1 and runs[0].row <= before:
            stop = runs[0].row + runs[0].count  # the short way of most writes
            if stop <= before:
                return 0
            self._size = stop
            return stop - before
        before = self.size
        if self.sparse is None and (size := _dense_size(self._size, runs)) is not None:
            self._size = size
        else:
            self._make_sparse().add(placement.rows)
        return self.size - before

    def remove(self, rows: Int64Array) -> None:
        """Valid rows leave, each of which is given once."""
        self._make_sparse().remove(rows)

    def _make_sparse(self) -> SparseRows:
        if self.sparse is None:
            self.sparse = SparseRows(self._capacity, self._size)
        return self.sparse

    def clear(self) -> None:
        """Every row is invalid now."""
        self._size = 0
        self.sparse = None

    def by_position(self) -> Int64Array:
        """The valid rows in the order of their positions: int64 ``[size]``."""
        positions = np.arange(self.size)
        return positions if self.sparse is None else self.sparse.at(torch.from_numpy(positions)).numpy()


def _dense_size(size: int, runs: Sequence[RowRange]) -> int | None:
    """How many rows are valid after a write to rows of which ``size`` are; None if there are gaps then."""
    if type(runs) is not tuple and isinstance(runs, SCATTERED):
        new = runs.rows[runs.rows >= size]
        stop = size + len(new)
        return stop if int(new.max(initial=-1)) < stop else None
    for run in runs if len(runs) < 2 else sorted(runs, key=_row):
        if run.row > size:
            return None
        stop = run.row + run.count
        if stop > size:
            size = stop
    return size


def _row(run: RowRange) -> int:
    return run.row
