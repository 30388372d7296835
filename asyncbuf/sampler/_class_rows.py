"""Rows by the class of their items: sets that one can draw from at random, and that change in O(1) a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from asyncbuf.sampler._row_set import row_type

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncbuf.rows import Int64Array
    from asyncbuf.sampler._row_set import RowArray

_LEAST_ROOM = 16


class ClassRows:
    """The rows of each class at positions 0 to ``size - 1``.

    Rows that are added take the positions at the end of their class. Where rows are discarded, the last ones of their
    class move into their positions: the order depends on the history and on nothing else.

    A class has a slot, and a piece of one array for its rows. Pieces that are full get another place with twice the
    room. So all classes of a write or a batch are served by the same few calls. A class without rows is forgotten, and
    its slot is for the next one.

    Args:
        capacity: number of rows that there can be.
        kept: classes that are not forgotten.

    Attributes:
        values: the class of each slot; of a slot without a class, one that it had.
        sizes: number of rows by slot, int64 ``[slots]``.
        changes: how often a class came, or got its first row, or lost its last.
        fresh: slots that got a class since somebody emptied this list.
    """

    def __init__(self, capacity: int, kept: Iterable[int] = ()) -> None:
        self.values: list[int] = []
        self.fresh: list[int] = []
        self._kept = frozenset(kept)
        self._free: list[int] = []  # slots without a class
        self.sizes: Int64Array = np.zeros(0, np.int64)
        self.changes = 0
        self._slots: dict[int, int] = {}
        self._starts: Int64Array = np.zeros(0, np.int64)  # of pieces, by slot
        self._rooms: Int64Array = np.zeros(0, np.int64)
        self._end = 0  # of all pieces
        self._rows: RowArray = np.zeros(0, row_type(capacity))  # by place in the pieces
        self._slot: RowArray = np.zeros(capacity, np.int32)  # by row: the slot of its class, and 1; 0 for none
        self._position: RowArray = np.zeros(capacity, row_type(capacity))  # by row

    @property
    def capacity(self) -> int:
        """For how many rows there is room."""
        return len(self._slot)

    @property
    def known(self) -> Int64Array:
        """All rows, ascending: int64."""
        return np.flatnonzero(self._slot)

    def slot(self, value: int) -> int:
        """The slot of a class, which may be a new one."""
        found = self._slots.get(value, -1)
        if found >= 0:
            return found
        if self._free:
            found = self._free.pop()
            self.values[found] = value
        else:
            found = len(self.values)
            self.values.append(value)
            for name in ("sizes", "_starts", "_rooms"):
                setattr(self, name, np.append(getattr(self, name), 0))
        self._slots[value] = found
        self.fresh.append(found)
        self.changes += 1
        return found

    @property
    def slots(self) -> list[int]:
        """The slots that have a class, in the order of the classes."""
        return [slot for _, slot in sorted(self._slots.items())]

    def _forget(self, slots: Iterable[int]) -> None:
        """These have no rows any more."""
        for slot in slots:
            value = self.values[slot]
            if value not in self._kept:
                del self._slots[value]
                self._free.append(slot)

    def clear(self) -> None:
        """Discard all rows."""
        self._forget([slot for slot in self.slots if self.sizes.item(slot)])
        self.sizes[:] = 0
        self._slot = np.zeros(len(self._slot), np.int32)  # takes no time, where filling would
        self.changes += 1

    def rows(self, slot: int) -> Int64Array:
        """The rows of a class by position: int64 ``[size]``."""
        start = int(self._starts[slot])
        return self._rows[start : start + int(self.sizes[slot])].astype(np.int64)

    def take(self, slots: Int64Array, positions: Int64Array) -> Int64Array:
        """The rows at some positions of some classes: int64, in the shape of both."""
        return self._rows.take(self._starts.take(slots) + positions).astype(np.int64)

    # -- rows that come -----------------------------------------------------------------------------------------------

    def add(self, rows: Int64Array, classes: Int64Array) -> None:
        """Add different rows that are not there, each with its class."""
        if len(rows) == 1:
            self._add_one(int(rows[0]), int(classes[0]))
            return
        different, which = np.unique(classes, return_inverse=True)
        slots = np.array([self.slot(value) for value in different.tolist()], np.int64)
        counts = np.bincount(which)
        sizes = self.sizes[slots]
        if (sizes + counts > self._rooms[slots]).any():
            self._make_room(slots, sizes + counts)
        order = which.argsort(kind="stable")
        sorted_slots = np.repeat(slots, counts)
        positions = np.arange(len(rows)) + np.repeat(sizes - np.cumsum(counts) + counts, counts)
        rows = rows[order]
        self._rows[self._starts.take(sorted_slots) + positions] = rows
        self._slot[rows] = sorted_slots + 1
        self._position[rows] = positions
        self.sizes[slots] = sizes + counts
        self.changes += int(np.count_nonzero(sizes == 0))

    def _add_one(self, row: int, value: int) -> None:
        slot = self.slot(value)
        size = self.sizes.item(slot)
        if size >= self._rooms.item(slot):
            self._make_room(np.array([slot]), np.array([size + 1]))
        self._rows[self._starts.item(slot) + size] = row
        self._slot[row] = slot + 1
        self._position[row] = size
        self.sizes[slot] = size + 1
        self.changes += not size

    def _make_room(self, slots: Int64Array, sizes: Int64Array) -> None:
        """Give some slots the room for so many rows, and as much again, where they have too little."""
        asked, wanted = slots, sizes
        small = sizes > self._rooms[slots]
        slots, rooms = slots[small], np.maximum(2 * sizes[small], _LEAST_ROOM)
        if self._end + int(rooms.sum()) > len(self._rows):
            # A new array for all, in which each piece has some room. Those that need it move below.
            every = np.maximum(self.sizes + self.sizes // 2, _LEAST_ROOM)
            every[asked] = np.maximum(every[asked], wanted)  # also where there was enough, and is less now
            total = int(every.sum() + rooms.sum())
            array = np.zeros(2 * total, self._rows.dtype)
            self._end = 0
            self._move(np.arange(len(self.sizes)), every, array)
            self._rows = array
        self._move(slots, rooms, self._rows)

    def _move(self, slots: Int64Array, rooms: Int64Array, array: RowArray) -> None:
        """Put the rows of some slots into pieces behind all others."""
        starts, sizes = self._end + np.cumsum(rooms) - rooms, self.sizes[slots]
        within = _ranges(sizes)
        array[np.repeat(starts, sizes) + within] = self._rows[np.repeat(self._starts[slots], sizes) + within]
        self._starts[slots], self._rooms[slots] = starts, rooms
        self._end += int(rooms.sum())

    # -- rows that leave ----------------------------------------------------------------------------------------------

    def discard(self, rows: Int64Array) -> None:
        """Discard those of different rows that are there."""
        if len(rows) == 1:
            self._discard_one(int(rows[0]))
            return
        slots = self._slot.take(rows).astype(np.int64) - 1
        if slots.min(initial=0) < 0:
            rows, slots = rows[slots >= 0], slots[slots >= 0]
        if not len(rows):
            return
        order = slots.argsort(kind="stable")
        rows, slots = rows[order], slots[order]
        positions = self._position.take(rows).astype(np.int64)
        changed, counts = np.unique(slots, return_counts=True)
        sizes = self.sizes[changed] - counts
        # Of each class as many rows at the end as are discarded, all that are not discarded themselves, move into
        # the places of those that are discarded and are not at the end.
        ends = np.repeat(self._starts[changed] + sizes, counts) + _ranges(counts)
        stays = np.ones(len(rows), np.bool_)
        firsts, size_of = np.repeat(np.cumsum(counts) - counts, counts), np.repeat(sizes, counts)
        at_end = positions >= size_of
        stays[(firsts + positions - size_of)[at_end]] = False
        moved = self._rows[ends[stays]]
        hole_slots, holes = slots[~at_end], positions[~at_end]
        ascending = np.lexsort((holes, hole_slots))
        hole_slots, holes = hole_slots[ascending], holes[ascending]
        self._rows[self._starts.take(hole_slots) + holes] = moved
        self._position[moved] = holes
        self._slot[rows] = 0
        self.sizes[changed] = sizes
        if (emptied := changed[sizes == 0]).size:
            self._forget(emptied.tolist())
            self.changes += emptied.size

    def _discard_one(self, row: int) -> None:
        slot = self._slot.item(row) - 1
        if slot < 0:
            return
        start, size = self._starts.item(slot), self.sizes.item(slot) - 1
        position, last = self._position.item(row), self._rows.item(start + size)
        self._rows[start + position] = last
        self._position[last] = position
        self._slot[row] = 0
        self.sizes[slot] = size
        if not size:
            self._forget([slot])
            self.changes += 1


def _ranges(counts: Int64Array) -> Int64Array:
    """From 0 up to each count, one after the other: int64."""
    stops = np.cumsum(counts)
    return np.arange(int(stops[-1]) if len(stops) else 0) - np.repeat(stops - counts, counts)
