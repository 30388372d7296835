"""Long work in a thread, in pieces: none keeps the interpreter's lock for long, and the lock is given away between."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")

# A call of C that makes as many Python objects of numbers, or the way back, takes less than a millisecond.
PIECE = 16_384
_WORK_SECONDS = 0.001
# A thread that lets go of the lock and takes it again at once has it back before those that wait for it are awake.
_REST_SECONDS = 0.000_02


class GiveWay:
    """Called now and then by a thread that works long: lets others have the interpreter's lock, at most once a while.

    Without, each of them waits for the switch interval (5 ms) whenever it needs the lock.
    """

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until = time.perf_counter() + _WORK_SECONDS

    def __call__(self) -> None:
        """Rest, if that was long ago."""
        if time.perf_counter() > self._until:
            time.sleep(_REST_SECONDS)
            self._until = time.perf_counter() + _WORK_SECONDS

    def pieces(self, values: Sequence[T], size: int = PIECE) -> Iterator[Sequence[T]]:
        """A sequence in slices, with a rest between them where it is due."""
        if len(values) <= size:
            yield values
            return
        for start in range(0, len(values), size):
            yield values[start : start + size]
            self()

    def mapped(self, function: Callable[[Any], T], values: Sequence[Any], size: int = PIECE // 16) -> list[T]:
        """A function of each value."""
        found: list[T] = []
        for piece in self.pieces(values, size):
            found.extend(map(function, piece))
        return found
