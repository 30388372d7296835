"""Whether functions are quick enough to run on the event loop."""

from __future__ import annotations

INLINE_SECONDS = 200e-6
# The first run of a function is slow for reasons of its own, so judge from this number of runs on.
_LEAST_RUNS = 3
# What waits for a lock, a file or the event loop itself must not do so on the event loop. While it waits, the processor
# is not at work for it. Functions that only compute stay far below both of these.
_MOST_WAITING = 0.1
_MOST_WAITING_SECONDS = 5e-6


class Pace:
    """Averages over the last few runs, in seconds."""

    def __init__(self) -> None:
        self._runs = 0
        self._seconds = self._waiting = 0.0

    def note(self, seconds: float, at_work: float) -> None:
        """Take a run into account.

        Args:
            seconds: how long it took.
            at_work: for how long of that the processor was at work for it.
        """
        weight = 1.0 if self._runs < _LEAST_RUNS - 1 else 0.2
        self._seconds += weight * (seconds - self._seconds)
        self._waiting += weight * (max(0.0, seconds - at_work) - self._waiting)
        self._runs += 1

    @property
    def is_quick(self) -> bool:
        """Whether a thread would cost more than it saves."""
        waits = self._waiting > max(_MOST_WAITING_SECONDS, _MOST_WAITING * self._seconds)
        return self._runs >= _LEAST_RUNS and self._seconds < INLINE_SECONDS and not waits
