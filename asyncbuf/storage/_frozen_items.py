"""The items of a list at one point of the history, to be read while the history goes on."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

from asyncbuf._plain.codec import check
from asyncbuf._plain.columns import to_columns
from asyncbuf._runtime.collector import collections_paused
from asyncbuf.storage._frozen import Chunk, ChunkVersions
from asyncbuf.storage._weight import mean_weight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

# A chunk has at most so many items, and fewer where they are large.
_CHUNK_ITEMS = 4096
_CHUNK_BYTES = 16 * 1024 * 1024
# How finely it is noted which items were written.
_NOTED_ITEMS = 64
# References that are copied aside together when one of them is about to be replaced.
_SEGMENT_ITEMS = 1024


def new_versions() -> ChunkVersions:
    """What notes which items are written."""
    return ChunkVersions(min(_NOTED_ITEMS, _CHUNK_ITEMS))


class FrozenItems:
    """References to the items that were there.

    They are taken from the live list. Before a write replaces some, it has those that stand there copied aside. A copy
    of the whole list would take long, and the garbage collector would look at each element of a new list.

    Args:
        items: the live list. Elements are replaced and added; where it is to become shorter, another takes its place.
        identity: says that of the chunk of some of the items.
    """

    def __init__(self, items: list[Any], identity: Callable[[int, int], str]) -> None:
        self._items = items
        self._count = len(items)
        self._identity = identity
        self._lock = threading.Lock()
        self._kept: dict[int, list[Any]] = {}
        self.meta = {"items": self._count}

    def before_write(self, start: int, stop: int) -> None:
        """Keep what is about to be replaced in rows ``start`` to ``stop - 1``. Called by whoever replaces it."""
        for segment in range(start // _SEGMENT_ITEMS, -(-min(stop, self._count) // _SEGMENT_ITEMS)):
            with self._lock:
                if segment not in self._kept:
                    self._kept[segment] = self._live(segment)

    def chunks(self) -> Iterator[Chunk]:
        """Items in columns, some thousands or some megabytes at a time."""
        for first in range(0, self._count, _CHUNK_ITEMS):
            last = min(first + _CHUNK_ITEMS, self._count)
            # Where a chunk ends follows from what is in it, so that it is the same with every save.
            step = _chunk_items(mean_weight(self._between(first, last)))
            for start in range(first, last, step):
                stop = min(start + step, last)
                yield Chunk(self._identity(start, stop), functools.partial(self._tensors, start, stop))

    def _tensors(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        items = self._between(start, stop)
        with collections_paused():
            return to_columns(items, lambda position: check(items[position], f"item {start + position}"))

    def _between(self, start: int, stop: int) -> list[Any]:
        first = start // _SEGMENT_ITEMS
        found: list[Any] = []
        for segment in range(first, -(-stop // _SEGMENT_ITEMS)):
            with self._lock:
                found += self._kept.get(segment) or self._live(segment)
        skipped = first * _SEGMENT_ITEMS
        return found[start - skipped : stop - skipped]

    def _live(self, segment: int) -> list[Any]:
        start = segment * _SEGMENT_ITEMS
        return self._items[start : min(start + _SEGMENT_ITEMS, self._count)]


def _chunk_items(nbytes: float) -> int:
    """How many items of such a size go into a chunk."""
    count = _CHUNK_ITEMS
    while count > 1 and count * nbytes > _CHUNK_BYTES:
        count = -(-count // 2)
    return count
