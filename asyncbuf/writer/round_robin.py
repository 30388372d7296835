"""The ring: the oldest item makes room for the newest."""

from __future__ import annotations

from typing import Any

from asyncbuf._plain.state import fields
from asyncbuf.errors import CheckpointCorruptError
from asyncbuf.rows import Placement, RowRange
from asyncbuf.writer.base import Writer


class RoundRobinWriter(Writer):
    """Fills row after row and starts over at row 0.

    Of more items than the capacity in one write, the last ``capacity`` are kept, in the rows that a ring would have
    left them in.
    """

    def __init__(self) -> None:
        self._cursor = 0
        self._size = 0
        self._write_count = 0

    @property
    def cursor(self) -> int:
        """The row that the next item takes."""
        return self._cursor

    @property
    def size(self) -> int:
        """Number of valid rows."""
        return self._size

    @property
    def write_count(self) -> int:
        """Number of items ever written."""
        return self._write_count

    def place(self, count: int, capacity: int) -> Placement:
        """Rows from the cursor on, in one run or, across the end of the ring, in two."""
        if self._cursor + count <= capacity:
            return Placement(count, (RowRange(self._cursor, 0, count),))
        skipped = max(0, count - capacity)
        kept = count - skipped
        start = (self._cursor + skipped) % capacity
        first = min(kept, capacity - start)
        if first == kept:
            return Placement(count, (RowRange(start, skipped, kept),))
        return Placement(count, (RowRange(start, skipped, first), RowRange(0, skipped + first, kept - first)))

    def commit(self, placement: Placement, capacity: int) -> None:
        """Move the cursor past the items."""
        self._cursor = (self._cursor + placement.offered) % capacity
        self._size = min(capacity, self._size + placement.offered)
        self._write_count += placement.offered

    def state_dict(self) -> dict[str, Any]:
        """Cursor, number of valid rows and number of writes."""
        return {"cursor": self._cursor, "size": self._size, "write_count": self._write_count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the saved cursor."""
        cursor, size, count = fields(state, type(self).__name__, cursor=int, size=int, write_count=int)
        if size > count or cursor > size:
            raise CheckpointCorruptError(
                f"{type(self).__name__}: expected cursor <= size <= write_count, found {cursor}, {size}, {count}"
            )
        self._cursor, self._size, self._write_count = cursor, size, count

    def clear(self) -> None:
        """Start over at row 0."""
        self._cursor = self._size = 0
