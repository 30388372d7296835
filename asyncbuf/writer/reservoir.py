"""A uniform sample of everything that was ever written, for continual learning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from asyncbuf._plain.counter_hash import CounterHash
from asyncbuf._plain.state import Seed, fields, same
from asyncbuf._runtime.arguments import count
from asyncbuf.errors import CheckpointCorruptError
from asyncbuf.rows import Placement, RowRange, highest_of, placed
from asyncbuf.writer.base import Writer

if TYPE_CHECKING:
    from asyncbuf.rows import Int64Array, Rows


class ReservoirWriter(Writer):
    """Keeps a uniform random sample of all items that were ever written: each is in it with the same chance.

    Reservoir sampling by algorithm R (Vitter, Random Sampling with a Reservoir, 1985). The first ``capacity`` items
    are kept. Of those that follow, the one with n items before it draws a number from 0 to n: if that is a row, it
    replaces the item there; if not, it is not kept, and ``add`` returns None.

    Which row an item draws follows from the seed and its item number alone: a write of many items does the same as
    the items one by one, and a resumed run goes on exactly. Global generators are never used.

    A row whose item was removed stays free until an item draws it: so what is left, and what comes, stays a uniform
    sample. After ``empty()`` the sample begins anew, with the items that are written then.

    Args:
        seed: fixes which items are kept, from 0 to 2**63 - 1.

    Raises:
        TypeError: the seed is not an int.
        ValueError: it is out of range.
    """

    trusted: ClassVar[bool] = True

    def __init__(self, seed: int = 0) -> None:
        self._seed = count(seed, "seed", 0, most=2**63 - 1)
        self._hash = CounterHash(seed)
        self._size = 0
        self._first = 0  # number of the first item that the sample is of
        self._write_count = 0

    @property
    def size(self) -> int:
        """Number of rows that were ever written, since ``clear``."""
        return self._size

    @property
    def write_count(self) -> int:
        """Number of items ever handed in, kept or not."""
        return self._write_count

    def place(self, count: int, capacity: int) -> Placement:
        """The rows that items draw; where several draw one, it is for the last of them."""
        seen = self._write_count - self._first
        if seen + count <= capacity:
            return Placement(count, (RowRange(seen, 0, count),))
        if count == 1:
            row = self._hash.at(self._write_count) % (seen + 1)
            return Placement(1, (RowRange(row, 0, 1),) if row < capacity else ())
        rows = self._drawn(count, capacity)
        items = np.flatnonzero(rows < capacity)
        rows = rows[items]
        # The last item of each row: the first one from the end.
        _, from_end = np.unique(rows[::-1], return_index=True)
        kept = np.sort(len(rows) - 1 - from_end)
        return placed(count, rows[kept], items[kept])

    def _drawn(self, count: int, capacity: int) -> Int64Array:
        """The numbers that items draw: int64 ``[count]``."""
        seen = self._write_count - self._first
        # A remainder favours small numbers by less than n / 2**64, which no test of any length could find.
        before = np.arange(seen, seen + count)
        drawn = self._hash.of(before + self._first) % (before + 1).astype(np.uint64)
        return np.where(before < capacity, before, drawn.astype(np.int64))

    def commit(self, placement: Placement, capacity: int) -> None:
        """Count the items."""
        self._write_count += placement.offered
        self._size = min(self._write_count - self._first, capacity)

    def clear(self) -> None:
        """Begin a sample of what is written from now on."""
        self._first = self._write_count
        self._size = 0

    def state_dict(self) -> dict[str, Any]:
        """Seed and three numbers: the random numbers follow from those."""
        return {"seed": self._seed, "first": self._first, "size": self._size, "write_count": self._write_count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the saved number."""
        name = type(self).__name__
        seed, first, size, write_count = fields(state, name, seed=Seed, first=int, size=int, write_count=int)
        same(seed, self._seed, f"{name}: seed")
        if first + size > write_count:
            raise CheckpointCorruptError(
                f"{name}: expected first + size <= write_count, found {first}, {size} and {write_count}"
            )
        self._first, self._size, self._write_count = first, size, write_count

    def verify(self, rows: Rows) -> None:
        """Refuse rows that no item can have drawn yet, and a sample of another size."""
        name = type(self).__name__
        seen = self._write_count - self._first
        expected = min(seen, rows.capacity)
        if self._size != expected:
            raise CheckpointCorruptError(
                f"{name}: expected a size of {expected} after {seen} items, found {self._size}"
            )
        if highest_of(rows) >= expected or (rows.valid is None and rows.size != expected):
            raise CheckpointCorruptError(f"{name}: expected the rows 0 to {expected - 1}, found others in the table")
