"""Memory that is used again once nobody can see it any more: the first touch of memory is dear."""

from __future__ import annotations

from sys import getrefcount

import numpy as np
import numpy.typing as npt


class SpareMemory:
    """A few pieces of memory for what comes and goes, such as chunks on their way to a file. For one thread at a time.

    A piece is free when there is no other reference to it. A view of it, and a tensor over it, hold one for as long as
    anything can reach the memory.

    Args:
        most: how many pieces are kept; more are made where these are in use.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._pieces: list[npt.NDArray[np.uint8]] = []

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory ``[nbytes]`` that nobody else sees, with anything in it."""
        for piece in self._pieces:
            if piece.nbytes >= nbytes and _is_free(piece):
                return piece[:nbytes]
        made = np.empty(max(nbytes, 1), np.uint8)
        self._pieces = [piece for piece in self._pieces if not _is_free(piece) or piece.nbytes > nbytes]
        if len(self._pieces) < self._most:
            self._pieces.append(made)
        return made[:nbytes]


def _is_free(piece: npt.NDArray[np.uint8]) -> bool:
    return getrefcount(piece) <= _UNSEEN


def _unseen() -> int:
    """The references to a piece that is in a list and looked at, as the interpreter at hand counts them."""
    pieces = [np.empty(1, np.uint8)]
    return next(_count(piece) for piece in pieces)


def _count(piece: npt.NDArray[np.uint8]) -> int:
    return getrefcount(piece)


_UNSEEN = _unseen()
