"""Memory for batches of any size that is used again once nobody can see it any more.

As in ``_recycling``, for batches of which no two have the same size. A tensor of a batch is laid over a view of a piece
of memory, and that view holds a reference to the piece for as long as anything can reach the memory. So a piece is free
when its reference count is what it was at first.
"""

from __future__ import annotations

import math
import threading
from sys import getrefcount
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from asyncbuf.storage._leaf import Field

# A piece is that much larger than what it is first needed for, so that it also serves batches that are a little larger.
_ROOM = 4
# A piece that is more than so many times as large as what is needed is left for others.
_MOST_ROOM = 3


class _Piece:
    """Memory for one field of a batch."""

    __slots__ = ("memory", "nbytes", "unseen")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory = [np.empty(nbytes, np.uint8)]
        self.unseen = [*map(getrefcount, self.memory)]


class BatchBytes:
    """Pieces of memory for the batches of a storage. Several threads may ask.

    Args:
        field: what a token is.

    Attributes:
        most: how many pieces are kept.
    """

    def __init__(self, field: Field) -> None:
        self.most = 0
        self._bits = field.bits
        self._shape = field.shape
        self._token_nbytes = field.nbytes
        self._lock = threading.Lock()
        self._pieces: list[_Piece] = []

    def take(self, *lead: int) -> np.ndarray[Any, Any]:
        """An array ``[*lead, *token]`` that nobody else sees, with anything in it."""
        nbytes = math.prod(lead) * self._token_nbytes
        if not nbytes:
            return np.empty(lead + self._shape, self._bits)
        with self._lock:
            pieces = self._pieces
            # The one that was used last first: it is in the cache of the processor.
            for number in range(len(pieces) - 1, -1, -1):
                piece = pieces[number]
                if nbytes <= piece.nbytes <= _MOST_ROOM * nbytes and [*map(getrefcount, piece.memory)] == piece.unseen:
                    del pieces[number]
                    break
            else:
                piece = _Piece(nbytes + nbytes // _ROOM)
            array: np.ndarray[Any, Any] = np.ndarray(lead + self._shape, self._bits, piece.memory[0])
            pieces.append(piece)
            if len(pieces) > self.most:
                del pieces[0]
        return array
