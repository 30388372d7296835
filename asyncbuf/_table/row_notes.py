"""What is noted of each row for limiters that ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from asyncbuf.rows import BoolArray, Int64Array


class RowBytes:
    """How many bytes the item of each row has.

    Args:
        capacity: number of rows.

    Attributes:
        total: those of all rows together.
    """

    def __init__(self, capacity: int) -> None:
        self.total = 0
        self._each: Int64Array = np.zeros(capacity, np.int64)

    def wrote(self, rows: Int64Array, nbytes: int) -> None:
        """Rows have items of so many bytes each now."""
        self.total += nbytes * len(rows) - int(self._each[rows].sum())
        self._each[rows] = nbytes

    def removed(self, rows: Int64Array) -> None:
        """Rows have no items any more."""
        self.wrote(rows, 0)

    def clear(self) -> None:
        """No row has an item."""
        self.load(np.zeros_like(self._each))

    def saved(self) -> Int64Array:
        """Bytes by row: int64 ``[capacity]``, in memory of its own."""
        return self._each.copy()

    def load(self, each: Int64Array) -> None:
        """Take over what ``saved`` gave out."""
        self._each, self.total = each, int(each.sum())

    def of(self, rows: Int64Array) -> Int64Array:
        """Those of some rows: int64 ``[rows]``."""
        found: Int64Array = self._each[rows]
        return found


class UnreadRows:
    """Which rows hold an item that no ticket was drawn for.

    Args:
        capacity: number of rows.
    """

    def __init__(self, capacity: int) -> None:
        self._is_unread: BoolArray = np.zeros(capacity, np.bool_)

    def wrote(self, rows: Int64Array) -> None:
        """Rows have new items."""
        self._is_unread[rows] = True

    def drawn(self, rows: Any) -> None:
        """Rows were drawn, or have no items any more."""
        self._is_unread[rows] = False

    def clear(self) -> None:
        """No row has an item."""
        self._is_unread = np.zeros_like(self._is_unread)

    def count(self, rows: Int64Array) -> int:
        """How many of some rows are."""
        return int(np.count_nonzero(self._is_unread[rows]))

    def rows(self) -> Int64Array:
        """Which they are, ascending: int64 ``[unread]``."""
        return np.flatnonzero(self._is_unread)

    def load(self, rows: Int64Array) -> None:
        """These and no others are."""
        self.clear()
        self._is_unread[rows] = True
