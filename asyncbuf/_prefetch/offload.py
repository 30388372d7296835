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

# A trial: each way is timed for so many draws, after some that pass until the line is in step. Where neither is clearly
# faster, both are timed for twice as many, up to the most.
_PASSED = 8
_TIMED = 16
_MOST_TIMED = 128
# A thread that has to wait for a core makes few draws very slow, so slow draws count. One that took so many times the
# usual was a consumer that was elsewhere.
_ELSEWHERE = 32
# How many draws go by until the ways are tried again, at first and at most.
_LEAST_KEPT = 512
_MOST_KEPT = 8192


class Offload:
    """The offload for batches of one size.

    Attributes:
        here: whether rows are gathered on the event loop at present.
    """

    __slots__ = ("_kept", "_last", "_left", "_passing", "_stage", "_times", "_was_here", "here")

    def __init__(self) -> None:
        self.here = True
        self._kept = _LEAST_KEPT
        self._last = 0.0
        self._begin()

    def gathers_here(self, nbytes: int) -> bool:
        """Whether the next batch, of so many bytes, is gathered on the event loop."""
        return nbytes <= INLINE_BYTES or (self.here and nbytes <= THREAD_BYTES)

    def drawn(self, nbytes: int) -> None:
        """A batch was drawn."""
        if not INLINE_BYTES < nbytes <= THREAD_BYTES:
            return
        if self._left:
            self._left -= 1
            if not self._left:
                self._begin()
            return
        now = time.perf_counter()
        if self._passing:
            self._passing -= 1
        else:
            self._times[self.here].append(now - self._last)
        self._last = now
        if len(self._times[self.here]) == self._stage:
            self._look()

    def _begin(self) -> None:
        """Begin a trial, with the way that is in use."""
        self._was_here = self.here
        self._left = 0
        self._stage = _TIMED
        self._passing = _PASSED
        self._times: dict[bool, list[float]] = {True: [], False: []}

    def _look(self) -> None:
        """A way was timed for long enough."""
        if len(self._times[not self.here]) < self._stage:
            self.here = not self.here
            self._passing = _PASSED
            return
        seconds = {here: _usual(times) for here, times in self._times.items()}
        if self._stage < _MOST_TIMED and max(seconds.values()) < min(seconds.values()) * (1 + 8 / self._stage):
            self._stage *= 2
            return
        self.here = self._was_here if seconds[self._was_here] <= seconds[not self._was_here] else not self._was_here
        self._kept = min(2 * self._kept, _MOST_KEPT) if self.here == self._was_here else _LEAST_KEPT
        self._left = self._kept


def _usual(times: list[float]) -> float:
    """The mean, without those of a consumer that was elsewhere."""
    ordered = sorted(times)
    most = _ELSEWHERE * ordered[len(ordered) // 2]
    counted = [seconds for seconds in ordered if seconds <= most] or ordered  # none only by a clock that went back
    return sum(counted) / len(counted)
