"""The ring: the oldest item makes room for the newest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from asyncbuf._plain.state import fields
from asyncbuf.errors import CheckpointCorruptError
from asyncbuf.rows import Placement, RowRange
from asyncbuf.writer._freed_rows import FreedRows, SavedRows, ring_numbers
from asyncbuf.writer.base import Writer

if TYPE_CHECKING:
    from asyncbuf.rows import Int64Array, Rows


class RoundRobinWriter(Writer):
    """Fills row after row and starts over at row 0.

    Of more items than the capacity in one write, the last ``capacity`` are kept, in the rows that a ring would have
    left them in.

    Once rows were removed, new items take those first, the longest free ones before the others, then rows that were
    never used, then the rows of the oldest items. That ends with ``clear``: then it is a plain ring again.
    """

    computes_numbers: ClassVar[bool] = True
    trusted: ClassVar[bool] = True

    def __init__(self) -> None:
        self._cursor = 0
        self._size = 0
        self._write_count = 0
        self._is_ring = True
        self._freed: FreedRows | None = None
        self._saved: SavedRows | None = None  # what was loaded, until the capacity is known

    @property
    def cursor(self) -> int:
        """The row that the next item takes, while no row was removed."""
        return self._cursor

    @property
    def size(self) -> int:
        """Number of valid rows."""
        return self._size if self._freed is None else self._freed.size

    @property
    def write_count(self) -> int:
        """Number of items ever written."""
        return self._write_count

    def place(self, count: int, capacity: int) -> Placement:
        """Rows from the cursor on, in one run or, across the end of the ring, in two."""
        if not self._is_ring:
            return self._free_rows(capacity).place(count)
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
        runs = placement.runs
        if not self._is_ring:
            self._free_rows(capacity).wrote(placement.rows, self._write_count + placement.items)
        elif runs:
            kept = runs[0].count if len(runs) == 1 else sum([run.count for run in runs])
            self._cursor = (runs[-1].row + runs[-1].count) % capacity
            self._size = min(capacity, self._size + kept)
        self._write_count += placement.offered

    def removed(self, rows: torch.Tensor, capacity: int) -> None:
        """Note which rows are free now."""
        self._free_rows(capacity).free(rows.numpy())

    def numbers(self, rows: Int64Array, capacity: int) -> Int64Array:
        """Item numbers of valid rows: int64 in the shape of ``rows``."""
        if not self._is_ring:
            return self._free_rows(capacity).numbers(rows)
        return ring_numbers(rows, capacity, self._cursor, self._write_count)

    def _free_rows(self, capacity: int) -> FreedRows:
        freed = self._freed
        if freed is None:
            if self._saved is None:
                freed = FreedRows(capacity, self._cursor, self._size, self._write_count)
            else:
                freed = FreedRows.of(capacity, self._saved)
            self._freed, self._saved, self._is_ring = freed, None, False
        return freed

    def state_dict(self) -> dict[str, Any]:
        """Cursor, number of valid rows and number of writes; after a removal also the order of the rows by age."""
        state = {"cursor": self._cursor, "size": self.size, "write_count": self._write_count}
        if self._saved is not None:
            return {**state, **self._saved.copied().state()}
        return state if self._freed is None else {**state, **self._freed.saved().state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the saved cursor."""
        name = type(self).__name__
        is_ring = not isinstance(state, dict) or "order" not in state
        kinds: dict[str, type] = dict(cursor=int, size=int, write_count=int)
        if not is_ring:
            kinds |= dict(used=int, order=torch.Tensor, numbers=torch.Tensor, free=torch.Tensor)
        cursor, size, count, *freed = fields(state, name, **kinds)
        if size > count or (is_ring and cursor > size):
            raise CheckpointCorruptError(
                f"{name}: expected cursor <= size <= write_count, found {cursor}, {size}, {count}"
            )
        saved = None if is_ring else SavedRows.checked(name, size, count, *freed)
        self._cursor, self._size, self._write_count = cursor, size, count
        self._freed, self._saved, self._is_ring = None, saved, is_ring

    def verify(self, rows: Rows) -> None:
        """Refuse a cursor that is not where the items end, and rows that the table does not have."""
        if not self.trusted:
            return  # a subclass may place items otherwise
        name = type(self).__name__
        if self._cursor > rows.capacity:
            raise CheckpointCorruptError(
                f"{name}: expected a cursor of at most {rows.capacity}, the capacity, found {self._cursor}"
            )
        if self.size != rows.size:
            raise CheckpointCorruptError(f"{name}: expected a size of {rows.size}, as in the table, found {self.size}")
        if self._saved is not None:
            self._saved.verify(name, rows)
        elif self._freed is None:
            ends = self._cursor == self._size if self._size < rows.capacity else self._cursor < rows.capacity
            if not ends or rows.valid is not None:
                raise CheckpointCorruptError(
                    f"{name}: expected the cursor behind the {self._size} rows of a ring, found it at {self._cursor}"
                )

    def clear(self) -> None:
        """Start over at row 0."""
        self._cursor = self._size = 0
        self._freed = self._saved = None
        self._is_ring = True
