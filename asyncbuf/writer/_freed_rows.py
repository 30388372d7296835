"""What a ring becomes when rows are removed from it: free rows that are taken again, and the age of all others.

Every call takes time in proportion to the rows that it is about, on average, and the first removal takes no time at
all: memory is zero at first, and zero means "as it was in the ring".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch

from asyncbuf._plain.integers import are_distinct
from asyncbuf._plain.state import int64s
from asyncbuf.errors import CheckpointCorruptError
from asyncbuf.rows import BoolArray, Int64Array, Placement, RowRange, ScatteredRows, runs_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncbuf.rows import Rows

    Live = Callable[[Int64Array, Int64Array], BoolArray]

_LEAST_CHUNK, _MOST_CHUNK = 64, 1 << 16
# Fewer rows than this to a run, on average, are written by their numbers, and not run by run.
_FEW = 16


class SavedRows(NamedTuple):
    """Freed rows and ages as plain data.

    Attributes:
        used: rows from this one on were never used.
        order: the rows that hold items, the oldest first: int64 ``[size]``.
        numbers: the numbers of these items: int64 ``[size]``.
        free: the free rows among the used ones, in the order in which they are taken: int64 ``[free]``.
    """

    used: int
    order: Int64Array
    numbers: Int64Array
    free: Int64Array

    @classmethod
    def checked(cls, name: str, size: int, write_count: int, used: int, *tensors: torch.Tensor) -> Self:
        """What was loaded, in memory of its own.

        Raises:
            CheckpointCorruptError: it contradicts itself.
        """
        expected = f"{name}: expected order, numbers and free rows"
        order, numbers, free = (int64s(tensor, expected).copy() for tensor in tensors)
        if len(order) != size or len(numbers) != size:
            raise CheckpointCorruptError(
                f"{name}: expected {size} rows in order and {size} numbers, found {len(order)} and {len(numbers)}"
            )
        if size and not (numbers[0] >= 0 and numbers[-1] < write_count and (np.diff(numbers) > 0).all()):
            raise CheckpointCorruptError(f"{name}: expected ascending item numbers below {write_count}, found others")
        if not are_distinct(np.concatenate([order, free]), used):
            raise CheckpointCorruptError(f"{name}: expected different rows below {used}, found others")
        return cls(used, order, numbers, free)

    def copied(self) -> Self:
        """The same in memory of its own."""
        return self._replace(order=self.order.copy(), numbers=self.numbers.copy(), free=self.free.copy())

    def state(self) -> dict[str, Any]:
        """The way back: entries of a state dict."""
        arrays = {"order": self.order, "numbers": self.numbers, "free": self.free}
        return {"used": self.used, **{name: torch.from_numpy(array) for name, array in arrays.items()}}

    def verify(self, name: str, rows: Rows) -> None:
        """Refuse rows that are not the valid ones of a table of the same size.

        Raises:
            CheckpointCorruptError: they are others.
        """
        if self.used > rows.capacity or not rows.contains(torch.from_numpy(self.order)).all():
            raise CheckpointCorruptError(f"{name}: expected the valid rows of the table by age, found other rows")


class FreedRows:
    """Rows of a ring from which some were removed.

    Args:
        capacity: number of rows.
        cursor: the row that came next in the ring.
        size: number of rows that held items: those before the cursor.
        write_count: number of items written by then.

    Attributes:
        size: number of rows that hold items.
    """

    def __init__(self, capacity: int, cursor: int = 0, size: int = 0, write_count: int = 0) -> None:
        self._capacity = capacity
        self._ring = _Ring(capacity, cursor, size, write_count)
        self.size = self._used = size
        self._free_count = 0
        self._frees = 0  # how many rows were ever freed: the next key in the queue of the free ones
        # By row. 0: as in the ring, n + 1: it holds item n, -(k + 1): it is free, with key k.
        self._state = np.zeros(capacity, np.int64)
        self._by_age = _RowQueue()
        self._free = _RowQueue()

    @classmethod
    def of(cls, capacity: int, saved: SavedRows) -> Self:
        """As it was saved."""
        freed = cls(capacity)
        freed._used = saved.used
        freed.wrote(saved.order, saved.numbers)
        freed._push_free(saved.free)
        return freed

    def saved(self) -> SavedRows:
        """Everything, in memory of its own."""
        parts = [self._ring.entries(self._state == 0), self._by_age.entries(self._holds)]
        order, numbers = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        return SavedRows(self._used, order, numbers, self._free.entries(self._is_free)[0])

    def numbers(self, rows: Int64Array) -> Int64Array:
        """Item numbers of rows that hold items; of free ones a negative number."""
        state = self._state[rows]
        return np.where(state == 0, self._ring.numbers(rows), state - 1)

    def _holds(self, rows: Int64Array, numbers: Int64Array) -> BoolArray:
        holds: BoolArray = self.numbers(rows) == numbers
        return holds

    def _is_free(self, rows: Int64Array, keys: Int64Array) -> BoolArray:
        is_free: BoolArray = self._state[rows] == -1 - keys
        return is_free

    def place(self, count: int) -> Placement:
        """Rows for so many items: free ones, then unused ones, then those of the oldest items."""
        kept = min(count, self._capacity)
        free = self._free.peek(min(kept, self._free_count), self._is_free)
        if kept == len(free) == 1:
            return Placement(count, (RowRange(int(free[0]), count - 1, 1),))
        unused = np.arange(self._used, min(self._capacity, self._used + kept - len(free)))
        oldest = self._oldest(kept - len(free) - len(unused))
        # In the order of the rows, so that neighbours are written together.
        rows = np.sort(np.concatenate([free, unused, oldest]))
        if len(rows) > _FEW and np.count_nonzero(np.diff(rows) != 1) > len(rows) // _FEW:
            return Placement(count, ScatteredRows(rows, count - kept))
        return Placement(count, tuple(runs_of(rows, count - kept)))

    def _oldest(self, count: int) -> Int64Array:
        found = self._ring.peek(count, self._holds)
        return np.concatenate([found, self._by_age.peek(count - len(found), self._holds)])

    def wrote(self, rows: Int64Array, numbers: Int64Array) -> None:
        """Rows hold new items now, in the order of their numbers."""
        if not len(rows):
            return
        state = self._state[rows]
        freed = int(np.count_nonzero(state < 0))
        held = int(np.count_nonzero((state > 0) | ((state == 0) & (rows < self._ring.size))))
        self._state[rows] = numbers + 1
        self._by_age.push(rows, numbers, self._holds)
        self.size += len(rows) - held
        self._free_count -= freed
        self._used = max(self._used, int(rows.max()) + 1)

    def free(self, rows: Int64Array) -> None:
        """Rows that hold items do so no longer."""
        self.size -= len(rows)
        self._push_free(rows)

    def _push_free(self, rows: Int64Array) -> None:
        keys = np.arange(self._frees, self._frees + len(rows))
        self._frees += len(rows)
        self._free_count += len(rows)
        self._state[rows] = -1 - keys
        self._free.push(rows, keys, self._is_free)


def ring_numbers(rows: Int64Array, capacity: int, cursor: int, write_count: int) -> Int64Array:
    """The numbers of the items in rows of a ring: int64, in the shape of ``rows``."""
    age = cursor - 1 - rows
    return write_count - 1 - np.where(age < 0, age + capacity, age)


class _Ring:
    """The rows of a ring by age, as they were when the first was removed. Computed, not stored."""

    def __init__(self, capacity: int, cursor: int, size: int, write_count: int) -> None:
        self._capacity = capacity
        self._cursor = cursor
        self.size = size
        self._write_count = write_count
        self._head = 0

    def numbers(self, rows: Int64Array) -> Int64Array:
        """The numbers of the items that rows held."""
        return ring_numbers(rows, self._capacity, self._cursor, self._write_count)

    def entries(self, untouched: BoolArray) -> tuple[Int64Array, Int64Array]:
        """The rows that still hold what they held, the oldest first, and the numbers of their items.

        Args:
            untouched: by row, whether it was left alone.
        """
        first = self._write_count - self.size
        if self.size < self._capacity:
            rows = np.flatnonzero(untouched[: self.size])
            return rows, rows + first
        older, newer = np.flatnonzero(untouched[self._cursor :]), np.flatnonzero(untouched[: self._cursor])
        numbers = np.concatenate([older, newer])
        numbers[: len(older)] += first
        numbers[len(older) :] += first + self._capacity - self._cursor
        older += self._cursor
        return np.concatenate([older, newer]), numbers

    def peek(self, count: int, live: Live) -> Int64Array:
        """The oldest rows that still hold what they held: int64, at most ``count``."""
        found, self._head = _first_live(self._entries, self._head, self.size, count, live)
        return found

    def _entries(self, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        ages = np.arange(start, stop)
        rows = (self._cursor - self.size + ages) % self._capacity
        return rows, self._write_count - self.size + ages


class _RowQueue:
    """Rows in the order in which they came, each with a key that tells whether the entry still holds.

    Entries that do not are passed over, and dropped when there is no room. What tells them apart comes with each call:
    this object does not refer to the one that has it.
    """

    def __init__(self) -> None:
        self._entries = np.empty((2, 0), np.int64)
        self._head = self._tail = 0

    def push(self, rows: Int64Array, keys: Int64Array, live: Live) -> None:
        """Add rows at the end."""
        stop = self._tail + len(rows)
        if stop > self._entries.shape[1]:
            self._make_room(len(rows), live)
            stop = self._tail + len(rows)
        self._entries[0, self._tail : stop] = rows
        self._entries[1, self._tail : stop] = keys
        self._tail = stop

    def _make_room(self, count: int, live: Live) -> None:
        entries = self._entries[:, self._head : self._tail]
        entries = entries[:, live(entries[0], entries[1])]
        self._head, self._tail = 0, entries.shape[1]
        # As much room again as is taken: so rows are moved once each, on average.
        self._entries = np.empty((2, max(_LEAST_CHUNK, 2 * (self._tail + count))), np.int64)
        self._entries[:, : self._tail] = entries

    def entries(self, live: Live) -> tuple[Int64Array, Int64Array]:
        """The rows whose entries hold, in their order, and their keys."""
        rows, keys = self._slice(self._head, self._tail)
        held = live(rows, keys)
        return rows[held], keys[held]

    def peek(self, count: int, live: Live) -> Int64Array:
        """The first rows whose entries hold: int64, at most ``count``."""
        found, self._head = _first_live(self._slice, self._head, self._tail, count, live)
        return found

    def _slice(self, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        return self._entries[0, start:stop], self._entries[1, start:stop]


def _first_live(
    entries: Callable[[int, int], tuple[Int64Array, Int64Array]], head: int, tail: int, count: int, live: Live
) -> tuple[Int64Array, int]:
    """The rows of the first entries that hold, and where the first of them is."""
    found: list[Int64Array] = [np.empty(0, np.int64)]
    start, chunk = head, max(_LEAST_CHUNK, min(count, _MOST_CHUNK))
    while count > 0 and start < tail:
        stop = min(tail, start + chunk)
        rows, keys = entries(start, stop)
        where = np.flatnonzero(live(rows, keys))
        if len(found) == 1:
            head = start + int(where[0]) if len(where) else stop
        if len(where):
            found.append(rows[where[:count]])
            count -= len(found[-1])
        start, chunk = stop, min(2 * chunk, _MOST_CHUNK)
    return np.concatenate(found), head
