"""Where rows are gathered: on the event loop, or in a thread.

A small gather costs less than handing it to a thread and back, and a large one would hold the event loop up. In between
it depends: a thread is worth its price if the consumer does something else meanwhile and a core is free, and no rule
knows that beforehand. So both are tried, a few draws at a time, and the way in which draws follow each other faster is
kept. What is drawn does not depend on it.
"""

from __future__ import annotations

import time

INLINE_BYTES = 128 * 1024
THREAD_BYTES = 2 * 1024 * 1024
"""Up to the one, rows are gathered on the event loop; beyond the other, in a thread."""
WRITE_INLINE_BYTES = 1024 * 1024
"""Up to this, rows are written on the event loop: a write is waited for, so a thread would only add its price."""

# A trial: draws that pass until the line is in step, then draws that are timed, of which the slowest do not count.
_PASSED = 8
_TIMED = 16
_COUNTED = 13
# How many draws go by until the other way is tried again, at first and at most.
_LEAST_KEPT = 512
_MOST_KEPT = 8192


class Choice:
    """The choice for batches of one size."""

    __slots__ = ("_best", "_kept", "_last", "_left", "_times", "_trial", "here")

    def __init__(self) -> None:
        self.here = True
        self._trial = True
        self._left = _PASSED + _TIMED
        self._times: list[float] = []
        self._best: float | None = None
        self._kept = _LEAST_KEPT
        self._last = 0.0

    def gathers_here(self, nbytes: int) -> bool:
        """Whether the next batch, of so many bytes, is gathered on the event loop."""
        return nbytes <= INLINE_BYTES or (self.here and nbytes <= THREAD_BYTES)

    def drawn(self, nbytes: int) -> None:
        """A batch was drawn."""
        if not INLINE_BYTES < nbytes <= THREAD_BYTES:
            return
        self._left -= 1
        if self._trial and self._left < _TIMED:
            now = time.perf_counter()
            if self._left < _TIMED - 1:
                self._times.append(now - self._last)
            self._last = now
        if not self._left:
            self._next()

    def _next(self) -> None:
        """A trial is over, or a way was kept for long."""
        if self._trial:
            seconds = sum(sorted(self._times)[:_COUNTED])
            self._times.clear()
            if self._best is None:
                self._best = seconds  # this way was tried; now the other
                self.here = not self.here
                self._left = _PASSED + _TIMED
                return
            if seconds > self._best:
                self.here = not self.here
                self._kept = min(2 * self._kept, _MOST_KEPT)
            else:
                self._kept = _LEAST_KEPT
            self._best, self._trial, self._left = None, False, self._kept
        else:
            self._trial, self._left = True, _PASSED + _TIMED
