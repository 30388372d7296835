"""Fixed data: written once, and not again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from asyncbuf._plain.state import fields, same
from asyncbuf._runtime.arguments import count
from asyncbuf.errors import CheckpointCorruptError, ReadOnlyError, SchemaError
from asyncbuf.rows import Placement, RowRange
from asyncbuf.writer.base import Writer

if TYPE_CHECKING:
    from asyncbuf.rows import Int64Array, Rows


class ImmutableDatasetWriter(Writer):
    """Takes one write, the whole data set, and refuses every later one with ``ReadOnlyError``.

    Item n is in row n. Items can be removed, such as bad ones; their rows stay free. After ``empty()`` another data set
    can be written.

    Args:
        items: how many items the storage holds from the start, for a storage of its own kind that has its data already;
            then nothing is ever written.

    Raises:
        TypeError: ``items`` is not an int.
        ValueError: it is negative.
    """

    computes_numbers: ClassVar[bool] = True
    trusted: ClassVar[bool] = True

    def __init__(self, items: int = 0) -> None:
        self._given = count(items, "items", 0)
        self._total = self._size = self._write_count = items

    @property
    def size(self) -> int:
        """Number of rows that hold items."""
        return self._size

    @property
    def write_count(self) -> int:
        """Number of items ever written."""
        return self._write_count

    def place(self, count: int, capacity: int) -> Placement:
        """The rows from 0 on, once.

        Raises:
            ReadOnlyError: there is a data set already.
            SchemaError: it does not fit.
        """
        if self._total:
            raise ReadOnlyError(
                f"expected no write to a buffer of fixed data, which has its {self._total} items; found one of {count}"
            )
        if count > capacity:
            raise SchemaError(f"expected a data set of at most {capacity} items, the capacity, found {count}")
        return Placement(count, (RowRange(0, 0, count),))

    def commit(self, placement: Placement, capacity: int) -> None:
        """The data set is complete."""
        self._total = self._size = placement.offered
        self._write_count += placement.offered

    def numbers(self, rows: Int64Array, capacity: int) -> Int64Array:
        """Item numbers of valid rows: int64 in the shape of ``rows``."""
        return rows + (self._write_count - self._total)

    def removed(self, rows: torch.Tensor, capacity: int) -> None:
        """Count the rows that are left."""
        self._size -= len(rows)

    def clear(self) -> None:
        """Take another data set."""
        self._total = self._size = 0

    def state_dict(self) -> dict[str, Any]:
        """How many items the data set has, how many of them are left, and how many were ever written."""
        return {"total": self._total, "size": self._size, "write_count": self._write_count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the numbers."""
        name = type(self).__name__
        total, size, write_count = fields(state, name, total=int, size=int, write_count=int)
        if not size <= total <= write_count:
            raise CheckpointCorruptError(
                f"{name}: expected size <= total <= write_count, found {size}, {total}, {write_count}"
            )
        if self._given:
            same(total, self._given, f"{name}: number of items")
        self._total, self._size, self._write_count = total, size, write_count

    def verify(self, rows: Rows) -> None:
        """Refuse other rows than those of the data set."""
        name = type(self).__name__
        if rows.size != self._size or self._total > rows.capacity:
            raise CheckpointCorruptError(
                f"{name}: expected {rows.size} rows of at most {rows.capacity}, as in the table, found {self._size} of "
                f"{self._total}"
            )
        held = rows.at(torch.arange(rows.size, device="cpu"))
        if (rows.valid is None and self._size < self._total) or int(held.max() if len(held) else -1) >= self._total:
            raise CheckpointCorruptError(
                f"{name}: expected rows 0 to {self._total - 1}, {self._size} of them, found others in the table"
            )
