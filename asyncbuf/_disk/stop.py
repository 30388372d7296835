"""Giving up what a thread is at."""

from __future__ import annotations

import threading


class StoppedError(Exception):
    """It was given up while its thread was at work."""


class Stop:
    """Says once, from any thread, that work is to end. Whoever works looks, and whoever waits wakes up."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._is_late = False

    def set(self) -> bool:
        """Give up.

        Returns:
            False if it is too late for that: then nothing has happened.
        """
        with self._lock:
            if not self._is_late:
                self._event.set()
            return not self._is_late

    def too_late(self) -> None:
        """From now on nobody gives up any more, until ``in_time``.

        Raises:
            StoppedError: it was given up.
        """
        with self._lock:
            self.check()
            self._is_late = True

    def in_time(self) -> None:
        """It may be given up again."""
        with self._lock:
            self._is_late = False

    def check(self) -> None:
        """Look.

        Raises:
            StoppedError: it was given up.
        """
        if self._event.is_set():
            raise StoppedError

    def wait(self, seconds: float) -> None:
        """Let time pass; ends at once, with an error, when it is given up.

        Raises:
            StoppedError: it was given up.
        """
        if self._event.wait(seconds):
            raise StoppedError
