"""Nobody waits for himself: refuses calls that only their own caller could answer.

A transform that awaits a batch of its own buffer waits for the ticket that it is at work on. Functions of the user
therefore run in a context that says for whom. Tasks and threads that they start by asyncio's means inherit it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar, cast

from asyncbuf._runtime.shield import shielded, shielded_wait
from asyncbuf.errors import AsyncBufError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

T = TypeVar("T")


class Job:
    """A function of the user at work.

    Args:
        guard: that of the buffer that it works for.

    Attributes:
        is_over: whether it has ended. Tasks that it started and left behind may call what they like.
        called_out: whether it, or a task that it started, has called a buffer.
    """

    __slots__ = ("called_out", "guard", "is_over")

    def __init__(self, guard: ReentryGuard) -> None:
        self.guard = guard
        self.is_over = self.called_out = False

    def run(self, function: Callable[..., T], *args: object) -> T:
        """Call the function, or one that it consists of, shielded (see ``shield.shielded``)."""
        return cast("T", shielded(_within, self, function, *args))

    async def wait(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Call a function that returns an awaitable, and await that, shielded; the job is over then."""
        try:
            return cast("T", await shielded_wait(_within, self, function, *args))
        finally:
            self.is_over = True


_job: ContextVar[Job | None] = ContextVar("asyncbuf-job", default=None)
_NOBODY = nullcontext()

current_job = _job.get
"""The function of the user within which a call is made; None for any other call. Takes 20 ns."""


class ReentryGuard:
    """Knows which calls of a buffer come from within the work that has to answer them.

    A call from within a transform of another buffer is fine, unless a transform of this one waits for that buffer. So
    each guard keeps the guards of the buffers that its functions wait for.
    """

    def __init__(self) -> None:
        self._waits: list[tuple[Job, ReentryGuard]] = []

    def check(self, call: str) -> None:
        """Refuse a call that would wait for its own caller. Not needed where ``current_job()`` is None.

        Args:
            call: name of the method, for the message.

        Raises:
            AsyncBufError: it comes from within a function that this buffer waits for.
        """
        job = _job.get()
        if job is None or job.is_over:
            return
        job.called_out = True
        if job.guard is self:
            raise AsyncBufError(
                f"{call}() was called from within a transform or collate_fn of the same buffer: it would wait for the "
                "batch that this function is making, and so for ever. Call it where the batches are consumed"
            )
        if self._reaches(job.guard):
            raise AsyncBufError(
                f"{call}() was called from within a transform of another buffer, and a transform of this buffer waits "
                "for that one: each would wait for the other, for ever. Only one of them may sample from the other"
            )

    def waiting(self) -> AbstractContextManager[None]:
        """A call waits for this buffer, for as long as the block lasts."""
        job = _job.get()
        return _NOBODY if job is None else self._waited_for(job)

    @contextmanager
    def _waited_for(self, job: Job) -> Iterator[None]:
        edge = (job, self)
        job.guard._waits.append(edge)
        try:
            yield
        finally:
            job.guard._waits.remove(edge)

    def _reaches(self, other: ReentryGuard) -> bool:
        """Whether functions of this buffer wait, through any number of buffers, for another one."""
        seen: set[ReentryGuard] = set()
        left = [self]
        while left:
            guard = left.pop()
            if guard is other:
                return True
            if guard not in seen:
                seen.add(guard)
                left += [waited_for for job, waited_for in guard._waits if not job.is_over]
        return False


def _within(job: Job, function: Callable[..., Any], *args: object) -> Any:
    _job.set(job)
    return function(*args)
