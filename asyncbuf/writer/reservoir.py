"""A uniform sample of everything that was ever written, for continual learning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from asyncbuf._plain.counter_hash import CounterHash
from asyncbuf._plain.state import Seed, fields, same
from asyncbuf._runtime.arguments import count
from asyncbuf.errors import CheckpointCorruptError
from asyncbuf.rows import Placement, RowRange, placed
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
        self._capacity: int | None = None
        self._first = 0  # number of the first item that the sample is of
        self._write_count = 0

    @property
    def size(self) -> int:
        """Number of rows that were ever written, since ``clear``."""
        seen = self._write_count - self._first
        return seen if self._capacity is None else min(seen, self._capacity)

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
        self._capacity = capacity
        self._write_count += placement.offered

    def clear(self) -> None:
        """Begin a sample of what is written from now on."""
        self._first = self._write_count

    def state_dict(self) -> dict[str, Any]:
        """Seed and two numbers: the random numbers follow from those."""
        return {
            "seed": self._seed,
            "first": self._first,
            "write_count": self._write_count,
            "capacity": self._capacity,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the saved number."""
        name = type(self).__name__
        is_new = isinstance(state, dict) and state.get("capacity", 0) is None
        kinds: dict[str, type] = dict(seed=Seed, first=int, write_count=int, capacity=type(None) if is_new else int)
        seed, first, write_count, capacity = fields(state, name, **kinds)
        same(seed, self._seed, f"{name}: seed")
        if first > write_count or (is_new and write_count):
            raise CheckpointCorruptError(
                f"{name}: expected first <= write_count, and a capacity once items were written, found {first}, "
                f"{write_count} and {capacity}"
            )
        self._first, self._write_count, self._capacity = first, write_count, capacity

    def verify(self, rows: Rows) -> None:
        """Refuse rows that no item can have drawn yet, and a sample of another size."""
        name = type(self).__name__
        if self._capacity not in (None, rows.capacity):
            raise CheckpointCorruptError(
                f"{name}: expected a sample of {rows.capacity} rows, the capacity, found one of {self._capacity}"
            )
        held = rows.at(torch.arange(rows.size, device="cpu"))
        if rows.size > self.size or int(held.max() if len(held) else -1) >= self.size:
            raise CheckpointCorruptError(f"{name}: expected the rows 0 to {self.size - 1}, found others in the table")
        if rows.valid is None and rows.size != self.size:
            raise CheckpointCorruptError(f"{name}: expected a size of {rows.size}, as in the table, found {self.size}")
