"""The tasks behind an open buffer: one supervisor that owns a task group of workers.

Opening and closing only signal the supervisor, so they may happen in different tasks (the task group is entered and
left within the supervisor alone). Whatever ends a worker unexpectedly ends all of them and is reported once.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    import types
    from collections.abc import Awaitable, Callable

logger = logging.getLogger("asyncbuf")


class Background:
    """Workers under one supervisor.

    Args:
        work: run by each worker; serves forever.
        workers: how many.
        crashed: told at once what ended the work, if it was not ``stop``.
        closed: awaited at the very end, whatever happened; must not rely on the workers.
    """

    def __init__(
        self,
        work: Callable[[], Awaitable[None]],
        workers: int,
        *,
        crashed: Callable[[BaseException], None],
        closed: Callable[[], Awaitable[None]],
    ) -> None:
        self._work = work
        self._workers = workers
        self._crashed = crashed
        self._closed = closed
        self._stop = asyncio.Event()
        self._started = asyncio.Event()
        self._task = asyncio.create_task(self._supervise(), name="asyncbuf-supervisor")

    @property
    def stopping(self) -> bool:
        """Whether the end is wanted."""
        return self._stop.is_set()

    async def started(self) -> None:
        """Wait until the workers run."""
        await self._started.wait()

    def stop(self) -> None:
        """Let the workers end; returns at once."""
        self._stop.set()

    async def stopped(self, seconds: float | None) -> bool:
        """Wait until everything has ended.

        Args:
            seconds: how long at most; None for as long as it takes.

        Returns:
            Whether it has. A cancelled wait leaves the end under way.
        """
        done, _ = await asyncio.wait({self._task}, timeout=seconds)
        return bool(done)

    async def _supervise(self) -> None:
        try:
            async with anyio.create_task_group() as group:
                for number in range(self._workers):
                    group.start_soon(self._serve, name=f"asyncbuf-worker-{number}")
                self._started.set()
                await self._stop.wait()
                group.cancel_scope.cancel()
        except BaseException as error:
            if not self.stopping:
                self._crashed(_first(error))
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._started.set()
            await self._closed()
            # The callbacks belong to the pipeline, which holds this object: leave no cycle.
            del self._work, self._crashed, self._closed

    async def _serve(self) -> None:
        try:
            await self._work()
        except asyncio.CancelledError:
            if self.stopping:
                raise
            # A task group takes a cancelled child for a finished one. Waiting consumers would never hear of it.
            raise RuntimeError("a background task of the buffer was cancelled from outside") from None
        if not self.stopping:
            raise RuntimeError("a background task of the buffer ended")


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return without_own_frames(error)


_OWN = {f"asyncbuf.{name}" for name in ("background", "buffer", "gate", "making", "pipeline", "stream")}


def without_own_frames(error: BaseException) -> BaseException:
    """The error, its traceback cut to what lies below the machinery of this package.

    Those frames hold tickets and buffers. An error that a ticket or buffer keeps must not hold them in turn.
    """
    kept: types.TracebackType | None = error.__traceback__
    step = kept
    while step is not None:
        name = step.tb_frame.f_globals.get("__name__", "")
        is_coroutine = step.tb_frame.f_code.co_flags & inspect.CO_COROUTINE
        if name in _OWN or (is_coroutine and name.startswith("asyncbuf.")):
            kept = step.tb_next
        step = step.tb_next
    return error.with_traceback(kept)
