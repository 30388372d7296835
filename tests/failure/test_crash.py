"""The background work ends: everyone who waits is told, and the buffer opens again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import BufferFailedError, ReplayBuffer, SamplerWithoutReplacement, TensorStorage
from tests.failure.helpers import AT_ONCE, Interrupt, in_order
from tests.helpers import (
    Crew,
    Stop,
    ThreadedStorage,
    background_tasks,
    outcomes,
    rows,
    turns,
    until,
    within,
    worker_tasks,
)

if TYPE_CHECKING:
    import asyncio


async def check_told_of_the_crash(*waiting: asyncio.Task[Any], cause: type[BaseException]) -> None:
    for end in await outcomes(*waiting, seconds=AT_ONCE):
        assert isinstance(end, BufferFailedError)
        assert isinstance(end.__cause__, cause)
        assert repr(end.__cause__) in str(end)


async def check_failed_and_opens_again(buffer: ReplayBuffer, number: int) -> None:
    with pytest.raises(BufferFailedError):
        await buffer.sample()
    with pytest.raises(BufferFailedError):
        await buffer.extend(rows(1))
    await within(buffer.aclose())
    assert not background_tasks()
    async with buffer:
        assert (await within(buffer.sample())).number == number


async def test_a_crash_reaches_five_consumers_and_two_writers() -> None:
    stop = Stop()
    storage = ThreadedStorage(80)
    buffer = ReplayBuffer(storage, batch_size=4, transform=lambda data: data, workers=2)
    async with Crew() as crew:
        await buffer.open()
        await buffer.extend(rows(80))
        storage.on_gather = stop
        consumers = [crew.start(buffer.sample()) for _ in range(5)]
        await stop.come.reached()
        writers = [crew.start(buffer.extend(rows(1))) for _ in range(2)]
        await turns()
        worker_tasks()[1].cancel()
        await check_told_of_the_crash(*consumers, *writers, cause=RuntimeError)
        stop.go.set()
        await check_failed_and_opens_again(buffer, 0)


async def test_a_crash_reaches_consumers_that_wait_for_data() -> None:
    buffer = ReplayBuffer(TensorStorage(80), batch_size=4)
    async with buffer, Crew() as crew:
        consumers = [crew.start(buffer.sample()) for _ in range(5)]
        await turns()
        worker_tasks()[0].cancel()
        await check_told_of_the_crash(*consumers, cause=RuntimeError)


async def test_a_crash_reaches_consumers_while_a_transform_hangs() -> None:
    stop = Stop()

    def transform(data: Any) -> Any:
        if int(data["number"][0]) == 0:
            stop()
        return data

    buffer = in_order(transform, workers=2)
    await buffer.extend(rows(80))
    async with Crew() as crew:
        await buffer.open()
        consumers = [crew.start(buffer.sample()) for _ in range(5)]
        await stop.come.reached()
        await until(lambda: buffer.stats().in_flight == 1)
        try:
            for task in worker_tasks():  # one of them waits for the thread that hangs, the other for work
                task.cancel()
            await check_told_of_the_crash(*consumers, cause=RuntimeError)
        finally:
            stop.go.set()
        await check_failed_and_opens_again(buffer, 0)


async def test_a_cancelled_supervisor_is_a_crash() -> None:
    buffer = ReplayBuffer(TensorStorage(80), batch_size=4, workers=2)
    async with buffer, Crew() as crew:
        consumers = [crew.start(buffer.sample()) for _ in range(5)]
        await turns()
        next(task for task in background_tasks() if task.get_name() == "asyncbuf-supervisor").cancel()
        await check_told_of_the_crash(*consumers, cause=BaseException)


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_transform_that_raises_no_exception_but_an_interrupt(kind: str) -> None:
    stop = Stop()

    def sync(data: Any) -> Any:
        if not stop.come.is_set:
            stop()
            raise Interrupt("stop it all")
        return data

    async def coroutine(data: Any) -> Any:
        if not stop.come.is_set:
            stop.come.set()
            await stop.go.reached()
            raise Interrupt("stop it all")
        return data

    buffer = in_order(sync if kind == "sync" else coroutine)
    await buffer.extend(rows(80))
    async with Crew() as crew:
        await buffer.open()
        consumers = [crew.start(buffer.sample()) for _ in range(5)]
        await stop.come.reached()
        stop.go.set()
        await check_told_of_the_crash(*consumers, cause=Interrupt)
        await check_failed_and_opens_again(buffer, 0)


async def test_iteration_raises_after_a_crash() -> None:
    buffer = ReplayBuffer(TensorStorage(80), sampler=SamplerWithoutReplacement(), batch_size=4)

    async def iterate(stream: Any) -> None:
        async for _ in stream:
            pass

    async with buffer, Crew() as crew:
        waiting = [crew.start(iterate(stream)) for stream in (buffer, buffer.epoch())]
        await turns()
        worker_tasks()[0].cancel()
        await check_told_of_the_crash(*waiting, cause=RuntimeError)
        for stream in (buffer, buffer.epoch()):
            with pytest.raises(BufferFailedError):
                await iterate(stream)
