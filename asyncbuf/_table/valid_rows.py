"""Which rows are valid, once some were removed: an index that is kept up to date in O(1) a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

if TYPE_CHECKING:
    from asyncbuf.rows import Int64Array

    BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


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
