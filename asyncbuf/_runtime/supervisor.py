"""The tasks behind an open buffer: one supervisor that owns a task group of workers.

Opening and closing only signal the supervisor, so they may happen in different tasks (the task group is entered and
left within the supervisor alone). Whatever ends a worker unexpectedly ends all of them and is reported once.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import traceback
from typing import TYPE_CHECKING, TypeVar

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

E = TypeVar("E", bound=BaseException)
FAILURES = (Exception, asyncio.CancelledError, GeneratorExit)
"""What code that was called may raise without ending more than itself. All else, such as KeyboardInterrupt, goes on to
whoever is there."""
logger = logging.getLogger("asyncbuf")


class Supervisor:
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
        self._reported = self._is_abandoned = False
        self._stop = asyncio.Event()
        self._started = asyncio.Event()
        # In a context of its own: what the workers do must not depend on who opened the buffer.
        self._task = asyncio.create_task(self._supervise(), name="asyncbuf-supervisor", context=contextvars.Context())

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

    def abandon(self) -> None:
        """The event loop was closed: the tasks will never go on."""
        self._is_abandoned = True

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
        except (asyncio.CancelledError, KeyboardInterrupt) as error:
            self._report(type(error)(*error.args))  # not the one that goes on, which collects frames on its way
            raise
        except BaseException as error:
            self._report(error)
        finally:
            self._started.set()
            if not self._is_abandoned:
                await self._closed()

    def _report(self, error: BaseException) -> None:
        """Tell of the first error at once; other workers may take long to end, if a thread holds them up."""
        if not self.stopping and not self._reported:
            self._reported = True
            self._crashed(detached(_first(error)))

    async def _serve(self) -> None:
        try:
            await self._work()
            ended = "a background task of the buffer ended"
        except asyncio.CancelledError:
            # Where the supervisor is being cancelled too, as when asyncio.run ends, it is the one to tell.
            if self.stopping or self._reported or self._task.cancelling():
                return  # the task would keep the error, and the error the frames of the work
            # A task group takes a cancelled child for a finished one. Waiting consumers would never hear of it.
            ended = "a background task of the buffer was cancelled from outside"
        except KeyboardInterrupt as error:
            self._report(type(error)(*error.args))
            raise
        except BaseException as error:
            # Not raised as it is: an event loop lets SystemExit end the program.
            self._report(error)
            ended = f"a background task of the buffer ended: {error!r}"
        if not self.stopping:
            self._report(RuntimeError(ended))
            raise RuntimeError(ended)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def as_failure(error: BaseException) -> BaseException:
    """The error, in a form that may be raised out of a call, which a cancellation would end without a word."""
    if isinstance(error, Exception) or not isinstance(error, FAILURES):
        return error
    failure = RuntimeError(f"expected an Exception, found {error!r}")
    failure.__cause__ = error
    return failure


def detached(error: E) -> E:
    """The error without its traceback, which goes into a note as text.

    A traceback holds frames, these hold those that called them, and so on to tickets and buffers. An error that a
    ticket or buffer keeps must not hold them in turn.
    """
    if error.__traceback__ is not None:
        lines = traceback.format_tb(error.__traceback__)
        error.add_note("raised in (most recent call last):\n" + "".join(lines).rstrip())
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
