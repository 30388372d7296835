"""Items that stand in a line, and are taken from its front or its end."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from asyncbuf.rows import Int64Array

# Entries of a block, and how many of them are looked at together at least.
_BLOCK, _LEAST = 1 << 14, 64
_NONE = np.empty(0, np.int64)


class _Block:
    """A piece of the line.

    Attributes:
        entries: rows and keys, int64 ``[2, n]``.
        head, tail: where its items begin and end.
    """

    __slots__ = ("entries", "head", "tail")

    def __init__(self, entries: Int64Array, tail: int) -> None:
        self.entries = entries
        self.head = 0
        self.tail = tail

    def found(self, start: int, stop: int, keys: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The rows of the items among some entries, and where those are, counted from the first."""
        rows = self.entries[0, start:stop]
        where = np.flatnonzero(keys.take(rows) == self.entries[1, start:stop])
        return rows[where], where


class Line:
    """Items, each as its row and a key that tells it from the other items that have had that row.

    An item whose row has another key by now has left. It is passed over. The line is in blocks, and whenever one is
    begun, two of the others are rid of items that have left. So each call takes time in proportion to the items that it
    is about, and none has to move all of them. The keys by row come with each call: this object does not own them.
    """

    def __init__(self) -> None:
        self._blocks: deque[_Block] = deque()
        self._swept = 0  # which block is the next to be looked through

    def push(self, rows: Int64Array, keys: Int64Array) -> None:
        """Add items at the end.

        Args:
            rows: their rows, int64 ``[items]``.
            keys: the keys of all rows, int64 ``[capacity]``.
        """
        start = 0
        while start < len(rows):
            if not self._blocks or self._blocks[-1].tail == self._blocks[-1].entries.shape[1]:
                self._sweep(keys)
                self._blocks.append(_Block(np.empty((2, _BLOCK), np.int64), 0))
            block = self._blocks[-1]
            part = rows[start : start + block.entries.shape[1] - block.tail]
            stop = block.tail + len(part)
            block.entries[0, block.tail : stop] = part
            block.entries[1, block.tail : stop] = keys.take(part)
            block.tail = stop
            start += len(part)

    def _sweep(self, keys: Int64Array) -> None:
        """Look through two blocks: one that has no items any more is dropped, one with few takes less memory."""
        for _ in range(min(2, len(self._blocks))):
            self._swept %= len(self._blocks)
            block = self._blocks[self._swept]
            rows, where = block.found(block.head, block.tail, keys)
            if not len(rows):
                del self._blocks[self._swept]
                continue
            if 2 * len(rows) <= block.entries.shape[1]:
                entries = block.entries[:, block.head : block.tail][:, where]
                self._blocks[self._swept] = _Block(entries, len(rows))
            self._swept += 1

    def rows(self, keys: Int64Array) -> Int64Array:
        """The rows of all items in the line, from its front on: int64 ``[items]``."""
        return _joined([block.found(block.head, block.tail, keys)[0] for block in self._blocks])

    def take_first(self, count: int, keys: Int64Array) -> Int64Array:
        """Take at most so many items from the front: their rows, int64, the first of the line before the others."""
        parts: list[Int64Array] = []
        while count > 0 and self._blocks:
            block = self._blocks[0]
            start, stop = block.head, min(block.tail, block.head + max(_LEAST, count))
            rows, where = block.found(start, stop, keys)
            block.head = start + int(where[count - 1]) + 1 if len(rows) >= count else stop
            parts.append(rows[:count])
            count -= len(parts[-1])
            if block.head == block.tail:
                self._blocks.popleft()
        return _joined(parts)

    def take_last(self, count: int, keys: Int64Array) -> Int64Array:
        """Take at most so many items from the end: their rows, int64, the last of the line before the others."""
        parts: list[Int64Array] = []
        while count > 0 and self._blocks:
            block = self._blocks[-1]
            start, stop = max(block.head, block.tail - max(_LEAST, count)), block.tail
            rows, where = block.found(start, stop, keys)
            block.tail = start + int(where[-count]) if len(rows) >= count else start
            parts.append(rows[::-1][:count].copy())
            count -= len(parts[-1])
            if block.head == block.tail:
                self._blocks.pop()
        return _joined(parts)


def _joined(parts: list[Int64Array]) -> Int64Array:
    return parts[0] if len(parts) == 1 else np.concatenate([_NONE, *parts])
