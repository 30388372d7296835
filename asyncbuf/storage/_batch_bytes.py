"""Memory for batches of any size that is used again once nobody can see it any more.

As in ``_recycling``, for batches of which no two have the same size. A tensor of a batch is laid over a view of a piece
of memory, and that view holds a reference to the piece for as long as anything can reach the memory. So a piece is free
when its reference count is what it was at first.
"""

from __future__ import annotations

import threading
from sys import getrefcount
from typing import Any

import numpy as np

# A piece is that much larger than what it is first needed for, so that it also serves batches that are a little larger.
_ROOM = 4
# A piece that is more than so many times as large as what is needed is left for others.
_MOST_ROOM = 3


class _Piece:
    """Memory for one field of a batch."""

    __slots__ = ("memory", "unseen")

    def __init__(self, nbytes: int) -> None:
        self.memory = [np.empty(nbytes, np.uint8)]
        self.unseen = [*map(getrefcount, self.memory)]

    def suits(self, nbytes: int) -> bool:
        """Whether nobody sees it, and it is of the right size."""
        size = self.memory[0].nbytes
        return nbytes <= size <= _MOST_ROOM * nbytes and [*map(getrefcount, self.memory)] == self.unseen


class BatchBytes:
    """Pieces of memory for the batches of a storage. Several threads may ask.

    Attributes:
        most: how many pieces are kept.
    """

    def __init__(self) -> None:
        self.most = 0
        self._lock = threading.Lock()
        self._pieces: list[_Piece] = []

    def take(self, count: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """An array ``[count, *shape]`` that nobody else sees, with anything in it."""
        size = count
        for length in shape:
            size *= length
        nbytes = size * dtype.itemsize
        if not nbytes:
            return np.empty((count, *shape), dtype)
        with self._lock:
            piece = self._free(nbytes) or _Piece(nbytes + nbytes // _ROOM)
            array = np.ndarray((count, *shape), dtype, piece.memory[0])
            self._pieces.append(piece)
            if len(self._pieces) > self.most:
                del self._pieces[0]
        return array

    def _free(self, nbytes: int) -> _Piece | None:
        # The one that was used last first: it is in the cache of the processor.
        pieces = self._pieces
        for number in range(len(pieces) - 1, -1, -1):
            if pieces[number].suits(nbytes):
                return pieces.pop(number)
        return None
