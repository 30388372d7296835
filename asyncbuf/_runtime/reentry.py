"""Nobody waits for himself: refuses calls that only their own caller could answer.

A transform that awaits a batch of its own buffer waits for the ticket that it is at work on. Functions of the user
therefore run in a context that says for whom. Tasks and threads that they start by asyncio's means inherit it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from asyncbuf._runtime.shield import shielded, shielded_wait
from asyncbuf.errors import AsyncBufError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

T = TypeVar("T")


class Job:
    """A function of the user at work.

    Args:
        guard: that of the buffer that it works for.
        queue: in which of its queues the batch stands that it makes.
        in_thread: whether it runs in a thread of the buffer, which closing the buffer waits for.

    Attributes:
        is_over: whether it has ended. Tasks that it started and left behind may call what they like.
        called_out: whether it, or a task that it started, has called a buffer.
    """

    __slots__ = ("called_out", "guard", "in_thread", "is_over", "queue")

    def __init__(self, guard: ReentryGuard, queue: object = None, *, in_thread: bool = False) -> None:
        self.guard = guard
        self.queue = queue
        self.in_thread = in_thread
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
_ALL = object()
_WAITS = "it would wait for the batch that this function is making"

current_job = _job.get
"""The function of the user within which a call was made; None for any other call. Takes 20 ns."""


class _Wait(NamedTuple):
    """A call from within a job that waits for a queue of a buffer, or for all of them."""

    job: Job
    guard: ReentryGuard
    queue: object


class ReentryGuard:
    """Knows which calls of a buffer come from within the work that has to answer them.

    A function of the user may wait for a batch of another queue: of another buffer, or of another size. It must not
    wait for one behind its own: in its own queue, or in one whose functions wait for its own in turn. And somebody must
    be left to make the batch. So each guard keeps what its jobs wait for.

    Attributes:
        helpers: how many jobs may wait for batches of their own buffer at once, because others can make these.
    """

    def __init__(self) -> None:
        self.helpers = 0
        self._waits: list[_Wait] = []

    def check(self, call: str, queue: object = _ALL, why: str = _WAITS) -> None:
        """Refuse a call that would wait for its own caller. Not needed where ``current_job()`` is None.

        Args:
            call: name of the method, for the message.
            queue: for which queue it waits; by default, for everything that is at work in the buffer.
            why: in words, what it would wait for.

        Raises:
            AsyncBufError: it comes from within a function that this buffer waits for.
        """
        job = _job.get()
        if job is None or job.is_over:
            return
        job.called_out = True
        if job.guard is self:
            own = sum(wait.guard is self and not wait.job.is_over for wait in self._waits)
            if queue is _ALL or own >= self.helpers or self._reaches(queue, job):
                raise AsyncBufError(
                    f"{call}() was called from within a transform or collate_fn of the same buffer: {why}, and so "
                    "for ever. Call it where the batches are consumed"
                )
        elif self._reaches(queue, job):
            raise AsyncBufError(
                f"{call}() was called from within a transform of another buffer, and a transform of this buffer waits "
                "for that one: each would wait for the other, for ever. Only one of them may sample from the other"
            )

    def check_close(self) -> None:
        """Refuse to close a buffer from within one of its threads: it would wait for that thread.

        An async function may close the buffer. It is cancelled.

        Raises:
            AsyncBufError: the call comes from within such a thread.
        """
        job = _job.get()
        if job is not None and not job.is_over and job.guard is self and job.in_thread:
            raise AsyncBufError(
                "aclose() was called from within a sync transform or collate_fn of the same buffer: it would wait for "
                "this function to end, and so for ever. Call it where the batches are consumed"
            )

    def waiting(self, call: str, queue: object = _ALL, why: str = _WAITS) -> AbstractContextManager[None]:
        """A call waits for this buffer, for as long as the block lasts; otherwise as ``check``."""
        job = _job.get()
        return _NOBODY if job is None else self._waited_for(job, call, queue, why)

    @contextmanager
    def _waited_for(self, job: Job, call: str, queue: object, why: str) -> Iterator[None]:
        self.check(call, queue, why)  # again: others may have begun to wait since
        wait = _Wait(job, self, queue)
        job.guard._waits.append(wait)
        try:
            yield
        finally:
            job.guard._waits.remove(wait)

    def _reaches(self, queue: object, job: Job) -> bool:
        """Whether the functions that make the batches of a queue wait, through any number of others, for a job."""
        seen: set[tuple[ReentryGuard, object]] = set()
        left: list[tuple[ReentryGuard, object]] = [(self, queue)]
        while left:
            place = left.pop()
            guard, among = place
            if guard is job.guard and (among is _ALL or among == job.queue):
                return True
            if place not in seen:
                seen.add(place)
                of_place = [wait for wait in guard._waits if among is _ALL or wait.job.queue == among]
                left += [(wait.guard, wait.queue) for wait in of_place if not wait.job.is_over]
        return False


def _within(job: Job, function: Callable[..., Any], *args: object) -> Any:
    _job.set(job)
    return function(*args)
