"""The life of a buffer: one state and one reason, which every part of it looks at."""

from __future__ import annotations

import asyncio
import enum
import functools
import os
import weakref
from typing import TYPE_CHECKING, cast

from asyncbuf.errors import AsyncBufError, BufferClosedError, BufferFailedError, WrongLoopError

if TYPE_CHECKING:
    from collections.abc import Callable

_NOT_OPEN = "the buffer is not open: use `async with buffer:` or `await buffer.open()` first"
_CLOSED = "the buffer was closed"
_CANCELLED = (
    "its tasks were cancelled, as asyncio.run() does with all that is left when it ends. Close the buffer before that, "
    "best by `async with buffer:`; open() lets it go on where it was"
)
_INHERITED = (
    "expected the process that made the buffer, found a child that it was copied into when it was forked: what is done "
    "here would not be seen there. Make the buffer in the process that uses it, send items to that process through a "
    "queue or pipe, or hand pickle.dumps(buffer) to a process that goes on with a copy"
)


class State(enum.Enum):
    """Where a buffer is in its life."""

    NEW = "new"
    OPEN = "open"
    FAILED = "failed"
    CLOSING = "closing"
    CLOSED = "closed"
    INHERITED = "inherited by a forked process"


# The event loop of another process, which is never the running one.
_ELSEWHERE = cast("asyncio.AbstractEventLoop", object())
_ALIVE: weakref.WeakSet[Lifecycle] = weakref.WeakSet()


class Lifecycle:
    """State and reason, shared by all parts of a buffer. Changes nothing but itself.

    In a forked child, that of every buffer becomes INHERITED, and stays so. Nobody has to ask whether a fork happened.

    Attributes:
        state: where the buffer is.
        reason: makes the error of a call that needs an open buffer; None while it is open.
        loop: the event loop that it belongs to; None before it is opened and after it was closed.
    """

    __slots__ = ("__weakref__", "loop", "reason", "state")

    def __init__(self) -> None:
        self.state = State.NEW
        self.reason: Callable[[], Exception] | None = functools.partial(BufferClosedError, _NOT_OPEN)
        self.loop: asyncio.AbstractEventLoop | None = None
        _ALIVE.add(self)

    def inherited(self) -> None:
        """Any state to INHERITED: the process was forked, and this is the child."""
        self.state = State.INHERITED
        self.reason = functools.partial(AsyncBufError, _INHERITED)
        self.loop = _ELSEWHERE

    @property
    def is_idle(self) -> bool:
        """Whether no background work belongs to the buffer."""
        return self.state is State.NEW or self.state is State.CLOSED

    @property
    def is_orphaned(self) -> bool:
        """Whether the event loop was closed while the buffer was open: what waited there will never go on."""
        if self.is_idle or self.state is State.INHERITED:
            return False
        return self.loop is not None and self.loop.is_closed()

    def opened(self) -> None:
        """NEW or CLOSED to OPEN.

        Raises:
            AsyncBufError: it is in another state.
            RuntimeError: no event loop is running; nothing has changed.
        """
        if self.state is State.INHERITED:
            raise AsyncBufError(_INHERITED)
        if not self.is_idle:
            raise AsyncBufError(f"open: expected a buffer that is not open, found one that is {self.state.value}")
        self.loop = asyncio.get_running_loop()
        self.state = State.OPEN
        self.reason = None

    def failed(self, error: BaseException) -> None:
        """OPEN to FAILED: the background work has ended by an error."""

        def reason() -> Exception:
            why = f"; {_CANCELLED}" if isinstance(error, asyncio.CancelledError) else ""
            failure = BufferFailedError(f"the background work of the buffer ended: {error!r}{why}")
            failure.__cause__ = error
            return failure

        self.state = State.FAILED
        self.reason = reason

    def closing(self) -> None:
        """OPEN or FAILED to CLOSING. A buffer that has failed goes on saying why."""
        if self.reason is None:
            self.reason = functools.partial(BufferClosedError, _CLOSED)
        self.state = State.CLOSING

    def closed(self) -> None:
        """To CLOSED: no task and no thread is left."""
        self.state = State.CLOSED
        self.loop = None
        if self.reason is None:
            self.reason = functools.partial(BufferClosedError, _CLOSED)

    def check_loop(self) -> None:
        """Refuse a call from another event loop than the one that opened the buffer.

        Raises:
            WrongLoopError: it is another one, or none is running.
            AsyncBufError: it is another process.
        """
        if self.state is State.INHERITED:
            raise AsyncBufError(_INHERITED)
        running = asyncio._get_running_loop()
        if self.loop is None or self.loop is running:
            return
        found = "no running event loop" if running is None else f"another one, {_named(running)}"
        raise WrongLoopError(
            f"expected the event loop that opened the buffer, {_named(self.loop)}; found {found} "
            "(asyncio.run_coroutine_threadsafe reaches it from another thread)"
        )


def _named(loop: asyncio.AbstractEventLoop) -> str:
    """A loop in words that tell it from others, whose ``repr`` is often the same."""
    state = "closed" if loop.is_closed() else "running" if loop.is_running() else "not running"
    return f"{type(loop).__name__} {id(loop):#x} ({state})"


def _after_fork() -> None:
    for life in list(_ALIVE):
        life.inherited()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
