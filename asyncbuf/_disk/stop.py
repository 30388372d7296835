"""Giving up what a thread is at."""

from __future__ import annotations

import threading


class StoppedError(Exception):
    """It was given up while its thread was at work."""


class Stop:
    """Says once, from any thread, that work is to end. Whoever works looks, and whoever waits wakes up."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Give up."""
        self._event.set()

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
