"""The life of a buffer: one state and one reason, which every part of it looks at."""

from __future__ import annotations

import asyncio
import enum
import functools
from typing import TYPE_CHECKING

from asyncbuf.errors import AsyncBufError, BufferClosedError, BufferFailedError, WrongLoopError

if TYPE_CHECKING:
    from collections.abc import Callable

_NOT_OPEN = "the buffer is not open: use `async with buffer:` or `await buffer.open()` first"
_CLOSED = "the buffer was closed"


class State(enum.Enum):
    """Where a buffer is in its life."""

    NEW = "new"
    OPEN = "open"
    FAILED = "failed"
    CLOSING = "closing"
    CLOSED = "closed"


class Lifecycle:
    """State and reason, shared by all parts of a buffer. Changes nothing but itself.

    Attributes:
        state: where the buffer is.
        reason: makes the error of a call that needs an open buffer; None while it is open.
        loop: the event loop that it belongs to; None before it is opened and after it was closed.
    """

    __slots__ = ("loop", "reason", "state")

    def __init__(self) -> None:
        self.state = State.NEW
        self.reason: Callable[[], Exception] | None = functools.partial(BufferClosedError, _NOT_OPEN)
        self.loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no background work belongs to the buffer."""
        return self.state is State.NEW or self.state is State.CLOSED

    @property
    def is_orphaned(self) -> bool:
        """Whether the event loop was closed while the buffer was open: what waited there will never go on."""
        return not self.is_idle and self.loop is not None and self.loop.is_closed()

    def opened(self) -> None:
        """NEW or CLOSED to OPEN.

        Raises:
            AsyncBufError: it is in another state.
            RuntimeError: no event loop is running; nothing has changed.
        """
        if not self.is_idle:
            raise AsyncBufError(f"open: expected a buffer that is not open, found one that is {self.state.value}")
        self.loop = asyncio.get_running_loop()
        self.state = State.OPEN
        self.reason = None

    def failed(self, error: BaseException) -> None:
        """OPEN to FAILED: the background work has ended by an error."""

        def reason() -> Exception:
            failure = BufferFailedError(f"the background work of the buffer ended: {error!r}")
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
        """
        running = asyncio._get_running_loop()
        if self.loop is None or self.loop is running:
            return
        found = "no running event loop" if running is None else f"{running!r}"
        raise WrongLoopError(
            f"expected the event loop that opened the buffer, {self.loop!r}; found {found} "
            "(asyncio.run_coroutine_threadsafe reaches it from another thread)"
        )
