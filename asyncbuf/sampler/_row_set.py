"""A set of rows that one can draw from at random, and that changes in O(1) a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from asyncbuf.rows import BoolArray, Int64Array

    RowArray = np.ndarray[Any, np.dtype[Any]]


def row_type(capacity: int) -> type[np.signedinteger[Any]]:
    """The integers that rows are kept in: half of the memory, where the rows are not too many for that."""
    return np.int32 if capacity < 2**31 else np.int64


def grown(array: RowArray, capacity: int) -> RowArray:
    """An array with zeros behind it, up to a length. Memory of zeros becomes real only where it is written."""
    kind = np.promote_types(array.dtype, row_type(capacity)) if array.dtype.kind == "i" else array.dtype
    larger = np.zeros(capacity, kind)
    larger[: len(array)] = array
    return larger


class RowSet:
    """Rows at positions 0 to ``size - 1``.

    Rows that are added take the positions at the end. Where rows are discarded, the last ones move into their
    positions: the order depends on the history and on nothing else. What is at a position tells whether a row is in
    the set (Briggs and Torczon, An efficient representation for sparse sets, 1993), so that memory needs no set-up.

    Args:
        capacity: number of rows that there can be.

    Attributes:
        size: number of rows in the set.
    """

    def __init__(self, capacity: int) -> None:
        self.size = 0
        self._rows: RowArray = np.zeros(capacity, row_type(capacity))  # by position
        self._positions: RowArray = np.zeros(capacity, row_type(capacity))  # by row

    def reserve(self, capacity: int) -> None:
        """Have room for so many rows."""
        if capacity > len(self._rows):
            self._rows, self._positions = grown(self._rows, capacity), grown(self._positions, capacity)

    def clear(self) -> None:
        """Discard all."""
        self.size = 0

    @property
    def rows(self) -> Int64Array:
        """The rows by position: int64 ``[size]``, in memory of its own."""
        return self._rows[: self.size].astype(np.int64)

    def take(self, positions: Int64Array) -> Int64Array:
        """The rows at some positions: int64, in the shape of ``positions``."""
        return self._rows.take(positions).astype(np.int64)

    def holds(self, rows: RowArray) -> BoolArray:
        """Which rows are in the set: bool, in the shape of ``rows``."""
        positions = self._positions.take(rows)
        held: BoolArray = (positions < self.size) & (self._rows.take(positions) == rows)
        return held

    def holds_one(self, row: int) -> bool:
        """Whether a row is in the set."""
        position = self._positions.item(row)
        return position < self.size and bool(self._rows.item(position) == row)

    def add(self, rows: RowArray) -> None:
        """Add different rows that are not in the set."""
        stop = self.size + len(rows)
        self._rows[self.size : stop] = rows
        self._positions[rows] = np.arange(self.size, stop)
        self.size = stop

    def add_one(self, row: int) -> None:
        """Add a row that is not in the set."""
        self._rows[self.size] = row
        self._positions[row] = self.size
        self.size += 1

    def discard(self, rows: RowArray) -> None:
        """Discard different rows that are in the set."""
        size = self.size - len(rows)
        positions = self._positions.take(rows)
        stays = np.ones(len(rows), np.bool_)
        stays[positions[positions >= size] - size] = False
        moved, holes = self._rows[size : self.size][stays], np.sort(positions[positions < size])
        self._rows[holes] = moved
        self._positions[moved] = holes
        self.size = size

    def discard_one(self, row: int) -> None:
        """Discard a row that is in the set."""
        self.size -= 1
        position, last = self._positions.item(row), self._rows.item(self.size)
        self._rows[position] = last
        self._positions[last] = position

    # -- as the valid rows of a table ---------------------------------------------------------------------------------

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """As ``take``."""
        return torch.from_numpy(self.take(positions.numpy()))

    def contains(self, rows: torch.Tensor) -> torch.Tensor:
        """As ``holds``; rows may be out of range."""
        found = rows.numpy()
        in_range = (found >= 0) & (found < len(self._rows))
        return torch.from_numpy(in_range & self.holds(np.where(in_range, found, 0)))


class NotedRowSet(RowSet):
    """A set that notes which rows were added and discarded, for who has to do something about them.

    Args:
        capacity: number of rows that there can be.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._added: list[RowArray] = []
        self._discarded: list[RowArray] = []

    def add(self, rows: RowArray) -> None:
        """Add different rows that are not in the set."""
        super().add(rows)
        self._added.append(rows)

    def add_one(self, row: int) -> None:
        """Add a row that is not in the set."""
        super().add_one(row)
        self._added.append(np.array([row]))

    def discard(self, rows: RowArray) -> None:
        """Discard different rows that are in the set."""
        super().discard(rows)
        self._discarded.append(rows)

    def discard_one(self, row: int) -> None:
        """Discard a row that is in the set."""
        super().discard_one(row)
        self._discarded.append(np.array([row]))

    def noted(self) -> tuple[Int64Array, Int64Array]:
        """The rows that were added and those that were discarded since this was last asked.

        A row that was first discarded and then added is in both.
        """
        added, discarded = _joined(self._added), _joined(self._discarded)
        self._added, self._discarded = [], []
        return added, discarded


_NONE = np.empty(0, np.int64)


def _joined(parts: list[RowArray]) -> Int64Array:
    if len(parts) < 2:
        return parts[0].astype(np.int64) if parts else _NONE
    return np.concatenate([_NONE, *parts])
