"""Files that are written or read by other threads while the next ones are being made or used."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from asyncbuf._runtime.threads import COPIERS, in_new_thread, started

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

T = TypeVar("T")

# Files on their way; a larger one is on its way alone.
MOST_BYTES = 48 * 1024 * 1024
MOST_JOBS = max(2, COPIERS)


class Pipeline:
    """Runs jobs in threads, and lets whoever gives them wait while there is too much to do.

    Each job has a thread of its own, which is gone when it is done: next to what is done to a file, starting one is
    nothing. Where none can be started, as at the end of the interpreter, a job runs in the thread that gives it.

    Attributes:
        turns: to be held by jobs, and by whoever gives them, while they need a processor. One processor is left to the
            program: a thread that has the interpreter's lock and waits for a processor holds up everybody.
    """

    def __init__(self) -> None:
        self.turns = threading.Semaphore(max(1, COPIERS - 1))
        self._jobs: deque[tuple[Future[Any], int]] = deque()
        self._nbytes = 0

    def add(self, nbytes: int, function: Callable[..., object], *args: object) -> None:
        """Give a job; may wait for earlier ones.

        Args:
            nbytes: the memory that it keeps.
            function: what to run.
            *args: its arguments.

        Raises:
            BaseException: what an earlier job raised.
        """
        while self._jobs and (
            self._jobs[0][0].done() or len(self._jobs) >= MOST_JOBS or self._nbytes + nbytes > MOST_BYTES
        ):
            self._settle()
        self._jobs.append((begin(function, *args), nbytes))
        self._nbytes += nbytes

    def finish(self) -> None:
        """Wait for all jobs.

        Raises:
            BaseException: what the first of them raised that failed.
        """
        while self._jobs:
            self._settle()

    def _settle(self) -> None:
        future, nbytes = self._jobs.popleft()
        self._nbytes -= nbytes
        future.result()

    def give_up(self) -> None:
        """Wait for all jobs, whatever becomes of them."""
        while self._jobs:
            self._jobs.popleft()[0].exception()


def begin(function: Callable[..., T], *args: object) -> Future[T]:
    """Run something in a thread of its own."""
    return started(in_new_thread, function, *args)
