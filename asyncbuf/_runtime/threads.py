"""The buffer's own threads, and waiting for them without ever leaving one behind."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import sys
import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

# anyio loads it with the first cancel scope, which takes tens of milliseconds: not on a running event loop.
with contextlib.suppress(ImportError):
    importlib.import_module("anyio._backends._asyncio")

# One core cannot use up what memory can do, and a few can.
COPIERS = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
_NICE = 5
PART_BYTES = 2 * 1024 * 1024


async def finish(future: Future[T], on_cancel: Callable[[], object] | None = None) -> asyncio.CancelledError | None:
    """Wait for a thread, however often the waiting task is cancelled; memory that it uses is free only then.

    Args:
        future: what the thread does.
        on_cancel: called when the waiting task is cancelled, to make the thread end sooner.

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
                if on_cancel is not None:
                    on_cancel()
    if not wrapped.cancelled():
        wrapped.exception()  # seen: the caller asks the thread's own future
    try:
        return cancelled
    finally:
        del cancelled  # the error holds this frame, which must not hold the error


async def in_thread(function: Callable[..., T], *args: object, on_cancel: Callable[[], object] | None = None) -> T:
    """Run something long, such as writing a checkpoint, in a thread that is gone when this returns.

    The threads of the program go before it, and before those that it starts. Where no thread can be started, as at the
    end of the interpreter, it runs in this one.

    Args:
        function: what to run.
        *args: its arguments.
        on_cancel: called when the waiting task is cancelled, to make the function end sooner.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="asyncbuf-once", initializer=_give_way)
    try:
        future = started(pool.submit, function, *args)
        cancelled = await finish(future, on_cancel)
    finally:
        pool.shutdown(wait=True)
    try:
        if cancelled is not None:
            raise cancelled
    finally:
        del cancelled
    return future.result()


def _give_way() -> None:
    """Let other threads go before this one, and those that it starts, where the system tells threads apart.

    A thread of a batch job does not interrupt others when it wakes. It gets a third of the time that others get which
    want the same processor: less would be dangerous, as it needs the interpreter's lock now and then.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, 0, min(19, os.getpriority(os.PRIO_PROCESS, 0) + _NICE))


def started(start: Callable[[Callable[[], None]], object], function: Callable[..., T], *args: object) -> Future[T]:
    """Run something in another thread. If none can be started, run it at once in this one.

    Args:
        start: has a thread call what it gets; ``submit`` of a pool, or ``in_new_thread``.
        function: what to run.
        *args: its arguments.
    """
    future: Future[T] = Future()
    once = _Once(_Job(function, args), future)
    try:
        start(once)
    except RuntimeError:
        once()  # unless a thread is at it already: a pool keeps what it could not start a thread for
    return future


def in_new_thread(call: Callable[[], None]) -> None:
    """Let a thread call something that ends soon.

    Raises:
        RuntimeError: no thread can be started.
    """
    threading.Thread(target=call, name="asyncbuf-disk").start()


class _Once(Generic[T]):
    """Runs a job for whoever calls first."""

    def __init__(self, job: _Job[T], future: Future[T]) -> None:
        self._job = job
        self._futures = [future]

    def __call__(self) -> None:
        try:
            future = self._futures.pop()
        except IndexError:
            return
        try:
            future.set_result(self._job())
        except BaseException as error:
            future.set_exception(error)
        finally:
            del future  # the error holds this frame, which must not hold what holds the error


class _Job(Generic[T]):
    """What a thread does.

    Attributes:
        is_withdrawn: whether whoever asked for it was told that it could not begin.
    """

    __slots__ = ("_args", "_function", "is_withdrawn")

    def __init__(self, function: Callable[..., T], args: tuple[object, ...]) -> None:
        self._function = function
        self._args = args
        self.is_withdrawn = False

    def __call__(self) -> T:
        if self.is_withdrawn:
            raise CancelledError
        try:
            return self._function(*self._args)
        except StopIteration as error:
            # As in a coroutine (PEP 479); a future would refuse it, and those that wait would wait for ever.
            raise RuntimeError(f"a function raised {error!r}") from error


class Threads:
    """Small pools: one copies rows and never runs code of the user, one helps it, one runs transforms.

    They are separate so that a transform that hangs stops neither writes nor gathers; and so that copies that nobody
    waits for are made by the same threads again and again, which an operating system then keeps apart from the one of
    the event loop. A pool starts its threads when it is first used.

    Args:
        workers: most threads that copy, and that transform. Those that help are at most ``COPIERS - 1``.
    """

    def __init__(self, workers: int) -> None:
        self._sizes = {"copy": workers, "share": max(1, COPIERS - 1), "transform": workers}
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._running: set[Future[object]] = set()

    def copy(self, function: Callable[..., T], *args: object) -> Future[T]:
        """Start copying rows."""
        return self._start("copy", function, *args)

    def parts(self, nbytes: int) -> int:
        """How many threads should share a copy of so many bytes."""
        return max(1, min(COPIERS, nbytes // PART_BYTES))

    def copy_together(self, functions: Sequence[Callable[[], object]]) -> Future[Any]:
        """Start copying rows in several threads: done when all have ended, with the error of one if one failed.

        Raises:
            ValueError: there is no function.
        """
        if not functions:
            raise ValueError("expected at least one function that copies, found none")
        if len(functions) == 1:
            return self.copy(functions[0])
        whole: Future[Any] = Future()
        left = threading.Semaphore(len(functions) - 1)

        def ended(_: Future[object]) -> None:
            if left.acquire(blocking=False):
                return  # others are still at it
            done = list(futures)
            futures.clear()  # each of them refers to this function
            errors = [CancelledError() if future.cancelled() else future.exception() for future in done]
            error = next(filter(None, errors), None)
            if error is None:
                whole.set_result(None)
            else:
                whole.set_exception(error)

        futures: list[Future[Any]] = []
        for function in functions:
            try:
                futures.append(self._start("share" if futures else "copy", function))
            except BaseException as error:  # some have begun: they must end before that is told
                futures.append(Future())
                futures[-1].set_exception(error)
        for future in futures:
            future.add_done_callback(ended)
        return whole

    def transform(self, function: Callable[..., T], *args: object) -> Future[T]:
        """Start code of the user."""
        return self._start("transform", function, *args)

    def _start(self, name: str, function: Callable[..., T], *args: object) -> Future[T]:
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = ThreadPoolExecutor(self._sizes[name], thread_name_prefix=f"asyncbuf-{name}")
        job = _Job(function, args)
        try:
            return self._tracked(pool.submit(job))
        except BaseException:
            job.is_withdrawn = True  # no thread could be started, but the pool has kept it
            raise

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
        pools, self._pools = self._pools, {}
        for pool in pools.values():
            # With nothing left to run, joining takes microseconds: the threads only have to wake and leave.
            pool.shutdown(wait=wait, cancel_futures=True)
