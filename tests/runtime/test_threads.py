"""Waiting for threads without ever leaving one behind."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import gc
import threading
import weakref
from typing import TYPE_CHECKING

import anyio
import pytest

from asyncbuf._runtime.threads import COPIERS, PART_BYTES, Threads, finish
from tests.helpers import SECONDS, within

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from concurrent.futures import Future

# How threads and cancellations meet is a matter of the event loop.
pytestmark = pytest.mark.every_loop


class Result:
    """Something to find again, and to see die."""


class Work:
    """What a thread does: says that it has begun, waits until it may end, and returns a fresh result."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.ended = False

    def __call__(self) -> Result:
        self.begun.set()
        assert self.may_end.wait(SECONDS)
        self.ended = True
        return Result()


@pytest.fixture
async def threads() -> AsyncIterator[Threads]:
    made = Threads(2)
    yield made
    await made.close()


@pytest.fixture
def work() -> Iterator[Work]:
    made = Work()
    yield made
    made.may_end.set()


async def settle() -> None:
    """Let everything happen that can."""
    for _ in range(6):
        await asyncio.sleep(0)


def names() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("asyncbuf"))


# -- finish ------------------------------------------------------------------------------------------------------------


async def test_finish_waits_and_leaves_the_result_in_place(threads: Threads) -> None:
    future = threads.copy(Result)
    assert await finish(future) is None
    assert isinstance(future.result(timeout=0), Result)
    assert await finish(future) is None  # again


async def test_finish_leaves_the_error_of_the_thread_to_the_caller(threads: Threads) -> None:
    def fail() -> None:
        raise LookupError("in the thread")

    future = threads.copy(fail)
    assert await finish(future) is None
    with pytest.raises(LookupError, match="in the thread"):
        future.result(timeout=0)


async def test_error_of_a_thread_that_nobody_asks_for_is_not_complained_about(
    threads: Threads, caplog: pytest.LogCaptureFixture
) -> None:
    await finish(threads.copy(int, "no number"))
    gc.collect()
    await settle()
    assert not caplog.records


@pytest.mark.parametrize("times", [1, 2, 7])
async def test_finish_goes_on_however_often_it_is_cancelled(threads: Threads, work: Work, times: int) -> None:
    future = threads.copy(work)
    seen: list[asyncio.CancelledError | None] = []

    async def caller() -> None:
        cancelled = await finish(future)
        assert work.ended
        seen.append(cancelled)
        if cancelled is not None:
            raise cancelled

    task = asyncio.create_task(caller())
    await settle()
    for i in range(times):
        task.cancel(f"cancellation {i}")
        await settle()
        assert not task.done()
    assert not future.done()
    work.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelling() == times
    assert isinstance(seen[0], asyncio.CancelledError)
    assert isinstance(future.result(timeout=0), Result)


async def test_finish_cancelled_several_times_in_one_step(threads: Threads, work: Work) -> None:
    future = threads.copy(work)
    task = asyncio.create_task(finish(future))
    await settle()
    for _ in range(3):
        task.cancel()
    await settle()
    assert not task.done()
    work.may_end.set()
    assert isinstance(await task, asyncio.CancelledError)


async def test_finish_cancelled_before_it_began(threads: Threads, work: Work) -> None:
    future = threads.copy(work)
    task = asyncio.create_task(finish(future))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task  # it never ran, so it is not the one to wait
    assert not future.cancelled()


async def test_finish_cancelled_in_the_step_in_which_the_thread_has_ended(threads: Threads, work: Work) -> None:
    future = threads.copy(work)
    task = asyncio.create_task(finish(future))
    await settle()
    work.may_end.set()
    concurrent.futures.wait([future])  # without a turn of the loop, which cannot know of it yet
    task.cancel()
    assert isinstance(await task, asyncio.CancelledError)
    assert isinstance(future.result(timeout=0), Result)


async def test_finish_within_a_cancelled_scope(threads: Threads, work: Work) -> None:
    future = threads.copy(work)
    loop = asyncio.get_running_loop()
    reached: list[str] = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        # Not before the scope has had many chances to cancel what it holds.
        asyncio.create_task(settle()).add_done_callback(lambda _: loop.call_soon(work.may_end.set))
        assert await finish(future) is None
        assert isinstance(future.result(timeout=0), Result)
        reached.append("kept")
        await anyio.lowlevel.checkpoint()
        reached.append("went on")
    assert reached == ["kept"]
    assert scope.cancelled_caught


async def test_finish_in_a_task_group_that_is_cancelled_meanwhile(threads: Threads, work: Work) -> None:
    future = threads.copy(work)
    kept: list[Result] = []

    async def caller() -> None:
        assert await finish(future) is None
        kept.append(future.result(timeout=0))
        await anyio.sleep_forever()

    async with anyio.create_task_group() as group:
        group.start_soon(caller)
        await settle()
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await settle()
            assert not kept
            work.may_end.set()
    assert len(kept) == 1


async def test_native_cancel_within_a_cancelled_scope(threads: Threads, work: Work) -> None:
    future = threads.copy(work)
    kept: list[object] = []

    async def caller() -> None:
        with anyio.CancelScope() as scope:
            scope.cancel()
            cancelled = await finish(future)
            kept.append(future.result(timeout=0))
            assert cancelled is not None
            raise cancelled

    task = asyncio.create_task(caller())
    await settle()
    task.cancel()
    await settle()
    assert not task.done()
    work.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(kept) == 1


async def test_finish_within_a_timeout(threads: Threads, work: Work) -> None:
    future = threads.copy(work)
    kept: list[object] = []
    asyncio.create_task(settle()).add_done_callback(lambda _: work.may_end.set())

    async def caller() -> None:
        async with asyncio.timeout(0):
            cancelled = await finish(future)
            kept.append(future.result(timeout=0))
            assert cancelled is not None
            raise cancelled

    with pytest.raises(TimeoutError):
        await caller()
    assert len(kept) == 1


async def test_finish_of_a_thread_that_was_never_started(threads: Threads) -> None:
    blockers = [Work(), Work()]
    running = [threads.copy(blocker) for blocker in blockers]
    queued = threads.copy(Result)
    assert queued.cancel()
    assert await finish(queued) is None
    assert queued.cancelled()
    for blocker in blockers:
        blocker.may_end.set()
    for future in running:
        await finish(future)


async def test_finish_leaves_no_reference_cycle(threads: Threads, work: Work) -> None:
    future: Future[Result] | None = threads.copy(work)
    assert future is not None
    task: asyncio.Task[asyncio.CancelledError | None] | None = asyncio.create_task(finish(future))
    await settle()
    assert task is not None
    task.cancel()
    await settle()
    work.may_end.set()
    cancelled = await task
    assert cancelled is not None
    alive = weakref.ref(future.result())
    gc.collect()
    gc.disable()
    try:
        del future, task, cancelled
        await settle()
        # What a thread made may be large: it must not wait for the garbage collector.
        assert alive() is None
    finally:
        gc.enable()


# -- the pools ---------------------------------------------------------------------------------------------------------


async def test_no_thread_before_the_first_use() -> None:
    threads = Threads(4)
    assert names() == []
    await threads.close()


async def test_pools_are_separate() -> None:
    threads, hanging = Threads(1), Work()
    stuck = threads.transform(hanging)
    try:
        await finish(threads.copy(Result))
        assert not stuck.done()
        assert names() == ["asyncbuf-copy_0", "asyncbuf-transform_0"]
    finally:
        hanging.may_end.set()
        await threads.close()
    assert names() == []


@pytest.mark.parametrize("pool", ["copy", "transform"])
@pytest.mark.parametrize("workers", [1, 3])
async def test_as_many_threads_as_workers(workers: int, pool: str) -> None:
    threads = Threads(workers)
    works = [Work() for _ in range(workers + 1)]
    futures = [getattr(threads, pool)(work) for work in works]
    assert all(work.begun.wait(SECONDS) for work in works[:workers])
    assert not works[-1].begun.is_set()
    works[0].may_end.set()
    assert works[-1].begun.wait(SECONDS)
    for work in works:
        work.may_end.set()
    for future in futures:
        await finish(future)
    await threads.close()
    assert names() == []


async def test_arguments_and_results() -> None:
    threads = Threads(1)
    copied, transformed = threads.copy(divmod, 17, 5), threads.transform(str, b"x", "ascii")
    await threads.close()
    assert copied.result(timeout=0) == (3, 2)
    assert transformed.result(timeout=0) == "x"


@pytest.mark.parametrize("pool", ["copy", "transform"])
async def test_close_waits_for_what_runs_and_for_what_is_queued(pool: str) -> None:
    threads, works = Threads(1), [Work() for _ in range(3)]
    futures = [getattr(threads, pool)(work) for work in works]
    closing = asyncio.create_task(threads.close())
    await settle()
    # The loop goes on, which is why the threads may end.
    assert not closing.done()
    for work in works:
        work.may_end.set()
    await closing
    assert all(isinstance(future.result(timeout=0), Result) for future in futures)
    assert names() == []


async def test_close_goes_on_when_it_is_cancelled() -> None:
    threads, work = Threads(1), Work()
    future = threads.copy(work)
    closing = asyncio.create_task(threads.close())
    for _ in range(3):
        await settle()
        closing.cancel()
    await settle()
    assert not closing.done()
    work.may_end.set()
    await asyncio.wait([closing])
    assert names() == []
    assert future.done()


async def test_closed_threads_can_be_used_again() -> None:
    threads = Threads(1)
    await threads.close()
    for _ in range(2):
        future = threads.copy(Result)
        await threads.close()
        assert isinstance(future.result(timeout=0), Result)
        assert names() == []


async def test_abandon_does_not_wait_and_lets_nothing_new_begin() -> None:
    threads, work = Threads(1), Work()
    running, queued = threads.transform(work), threads.transform(Result)
    assert work.begun.wait(SECONDS)
    threads.abandon()
    assert not running.done()
    assert queued.cancelled()
    work.may_end.set()
    await finish(running)
    assert isinstance(running.result(timeout=0), Result)
    # The thread leaves by itself; the fixture that watches threads sees to it that it does.


async def test_results_are_let_go() -> None:
    threads = Threads(1)
    future: Future[Result] | None = threads.copy(Result)
    assert future is not None
    await finish(future)
    alive = weakref.ref(future.result())
    gc.collect()
    gc.disable()
    try:
        del future
        await finish(threads.copy(int))  # the thread itself forgets its last task at the next one
        await settle()
        assert alive() is None
    finally:
        gc.enable()
        await threads.close()


# -- sharing a copy ---------------------------------------------------------------------------------------------------


async def test_copies_together_all_happen(threads: Threads) -> None:
    for count in range(1, 6):
        made: list[int] = []
        whole = threads.copy_together([functools.partial(made.append, i) for i in range(count)])
        await finish(whole)
        assert sorted(made) == list(range(count))
    with pytest.raises(ValueError, match="at least one function"):
        threads.copy_together([])


async def test_an_error_of_one_copy_is_told_when_all_have_ended(threads: Threads) -> None:
    work = Work()

    def fails() -> Result:
        raise ValueError("one")

    functions: list[Callable[[], Result]] = [fails, work]
    whole = threads.copy_together(functions)
    assert work.begun.wait(SECONDS)
    await settle()
    assert not whole.done()
    work.may_end.set()
    with pytest.raises(ValueError, match="one"):
        await within(asyncio.wrap_future(whole))
    assert work.ended


async def test_copies_that_never_began_end_as_cancelled(work: Work) -> None:
    threads = Threads(1)
    count = max(1, COPIERS) + 1
    whole = threads.copy_together([work] * count)
    assert work.begun.wait(SECONDS)
    threads.abandon()
    work.may_end.set()
    with pytest.raises(concurrent.futures.CancelledError):
        whole.result(SECONDS)
    await threads.close()


async def test_what_copies_together_hold_dies_at_once(threads: Threads) -> None:
    gc.collect()
    gc.disable()
    try:
        held = [Result() for _ in range(3)]
        references = [weakref.ref(result) for result in held]
        whole = threads.copy_together([functools.partial(id, result) for result in held])
        del held
        await finish(whole)
        await threads.close()
        del whole
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()


def test_a_small_copy_is_not_shared() -> None:
    threads = Threads(1)
    assert [threads.parts(nbytes) for nbytes in (0, 1, PART_BYTES, 2 * PART_BYTES - 1)] == [1, 1, 1, 1]
    assert threads.parts(100 * PART_BYTES) == COPIERS
