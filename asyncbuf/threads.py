"""The buffer's own threads, and waiting for them without ever leaving one behind."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


async def finish(future: Future[T]) -> asyncio.CancelledError | None:
    """Wait for a thread, however often the waiting task is cancelled; memory that it uses is free only then.

    Returns:
        The cancellation that came meanwhile, for the caller to raise once it has kept what the thread did; else None.
    """
    wrapped = asyncio.wrap_future(future)
    cancelled = None
    with anyio.CancelScope(shield=True):
        while not wrapped.done():
            try:
                # wait() leaves the future alone when it is cancelled itself.
                await asyncio.wait({wrapped})
            except asyncio.CancelledError as error:
                cancelled = error
    if not wrapped.cancelled():
        wrapped.exception()  # seen: the caller asks the thread's own future
    return cancelled


class Threads:
    """Two small pools: one copies rows and never runs code of the user, the other runs transforms.

    They are separate so that a transform that hangs stops neither writes nor gathers. A pool starts its threads when it
    is first used.

    Args:
        workers: most threads of either pool.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._copy: ThreadPoolExecutor | None = None
        self._transform: ThreadPoolExecutor | None = None
        self._running: set[Future[object]] = set()

    def copy(self, function: Callable[..., T], *args: object) -> Future[T]:
        """Start copying rows."""
        if self._copy is None:
            self._copy = ThreadPoolExecutor(self._workers, thread_name_prefix="asyncbuf-copy")
        return self._tracked(self._copy.submit(function, *args))

    def transform(self, function: Callable[..., T], *args: object) -> Future[T]:
        """Start code of the user."""
        if self._transform is None:
            self._transform = ThreadPoolExecutor(self._workers, thread_name_prefix="asyncbuf-transform")
        return self._tracked(self._transform.submit(function, *args))

    def _tracked(self, future: Future[T]) -> Future[T]:
        self._running.add(future)  # type: ignore[arg-type]
        future.add_done_callback(self._running.discard)
        return future

    async def close(self) -> None:
        """Wait for what runs, then end the threads."""
        for future in list(self._running):
            await finish(future)
        self.abandon(wait=True)

    def abandon(self, *, wait: bool = False) -> None:
        """End the threads as soon as each has done what it is at."""
        pools, self._copy, self._transform = (self._copy, self._transform), None, None
        for pool in pools:
            if pool is not None:
                # With nothing left to run, joining takes microseconds: the threads only have to wake and leave.
                pool.shutdown(wait=wait, cancel_futures=True)
