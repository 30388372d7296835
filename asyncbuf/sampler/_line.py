"""Items that stand in a line, and are taken from its front or its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from asyncbuf.rows import Int64Array

_LEAST = 64
_NONE = np.empty(0, np.int64)


class Line:
    """Items, each as its row and a key that tells it from the other items that have had that row.

    An item whose row has another key by now has left. It is passed over, and dropped when there is no room. So each
    call takes time in proportion to the items that it is about, on average. The keys by row come with each call: this
    object does not own them.
    """

    def __init__(self) -> None:
        self._entries = np.empty((2, 0), np.int64)  # rows and keys
        self._head = self._tail = 0

    def push(self, rows: Int64Array, keys: Int64Array) -> None:
        """Add items at the end.

        Args:
            rows: their rows, int64 ``[items]``.
            keys: the keys of all rows, int64 ``[capacity]``.
        """
        stop = self._tail + len(rows)
        if stop > self._entries.shape[1]:
            self._make_room(len(rows), keys)
            stop = self._tail + len(rows)
        self._entries[0, self._tail : stop] = rows
        self._entries[1, self._tail : stop] = keys.take(rows)
        self._tail = stop

    def _make_room(self, count: int, keys: Int64Array) -> None:
        entries = self._entries[:, self._head : self._tail]
        entries = entries[:, keys.take(entries[0]) == entries[1]]
        self._head, self._tail = 0, entries.shape[1]
        # As much room again as is taken: so items are moved once each, on average.
        self._entries = np.empty((2, max(_LEAST, 2 * (self._tail + count))), np.int64)
        self._entries[:, : self._tail] = entries

    def rows(self, keys: Int64Array) -> Int64Array:
        """The rows of all items in the line, from its front on: int64 ``[items]``."""
        return self._found(self._head, self._tail, keys)[0]

    def _found(self, start: int, stop: int, keys: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The rows of the items among some entries, and where those are, counted from the first."""
        rows = self._entries[0, start:stop]
        where = np.flatnonzero(keys.take(rows) == self._entries[1, start:stop])
        return rows[where], where

    def take_first(self, count: int, keys: Int64Array) -> Int64Array:
        """Take at most so many items from the front: their rows, int64, the first of the line before the others."""
        parts: list[Int64Array] = []
        while count > 0 and self._head < self._tail:
            start, stop = self._head, min(self._tail, self._head + max(_LEAST, count))
            rows, where = self._found(start, stop, keys)
            self._head = start + int(where[count - 1]) + 1 if len(rows) >= count else stop
            parts.append(rows[:count])
            count -= len(parts[-1])
        return _joined(parts)

    def take_last(self, count: int, keys: Int64Array) -> Int64Array:
        """Take at most so many items from the end: their rows, int64, the last of the line before the others."""
        parts: list[Int64Array] = []
        while count > 0 and self._head < self._tail:
            start, stop = max(self._head, self._tail - max(_LEAST, count)), self._tail
            rows, where = self._found(start, stop, keys)
            self._tail = start + int(where[-count]) if len(rows) >= count else start
            parts.append(rows[::-1][:count].copy())
            count -= len(parts[-1])
        return _joined(parts)


def _joined(parts: list[Int64Array]) -> Int64Array:
    return parts[0] if len(parts) == 1 else np.concatenate([_NONE, *parts])
