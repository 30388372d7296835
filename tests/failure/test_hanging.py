"""Transforms that hang, are cancelled or call the buffer themselves hold up nobody else."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from asyncbuf import BufferClosedError, PrefetchError
from tests.failure.helpers import in_order
from tests.helpers import SECONDS, Crew, Stop, ThreadedStorage, outcomes, rows, turns, until, within

# How threads and cancellations meet is a matter of the event loop.
pytestmark = pytest.mark.every_loop


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_hanging_transform_stops_neither_writers_nor_other_batches(kind: str) -> None:
    stop = Stop()

    def sync(data: Any) -> Any:
        if int(data["number"][0]) == 0:
            stop()
        return data

    async def coroutine(data: Any) -> Any:
        if int(data["number"][0]) == 0:
            stop.come.set()
            await stop.go.reached()
        return data

    buffer = in_order(sync if kind == "sync" else coroutine, storage=ThreadedStorage(80), prefetch=3, workers=2)
    await buffer.extend(rows(80))
    async with buffer, Crew() as crew:
        first = crew.start(buffer.sample())
        await stop.come.reached()
        for _ in range(10):
            await within(buffer.extend(rows(8, 1000)))
        await until(lambda: buffer.stats().in_flight == 1)
        others = [crew.start(buffer.sample()) for _ in range(3)]
        await turns()
        assert not any(task.done() for task in (first, *others))
        stop.go.set()
        assert [batch.number for batch in await outcomes(first, *others)] == [0, 1, 2, 3]


@pytest.mark.parametrize("depth", [0, 2])
async def test_a_transform_that_raises_a_cancellation(depth: int) -> None:
    failures = [2]

    async def transform(data: Any) -> Any:
        if int(data["number"][0]) == 4 and failures[0]:
            failures[0] -= 1
            raise asyncio.CancelledError("from within")
        return data

    buffer = in_order(transform, prefetch=depth)
    await buffer.extend(rows(80))
    async with buffer:
        assert (await within(buffer.sample())).number == 0
        for _ in range(2):
            with pytest.raises(PrefetchError, match="cancelled from within"):
                await within(buffer.sample())
        assert [(await within(buffer.sample())).number for _ in range(4)] == [1, 2, 3, 4]


async def test_a_sync_transform_that_raises_a_cancellation() -> None:
    failures = [1]

    def transform(data: Any) -> Any:
        if failures[0]:
            failures[0] -= 1
            raise asyncio.CancelledError
        return data

    buffer = in_order(transform)
    await buffer.extend(rows(80))
    async with buffer:
        with pytest.raises(PrefetchError):
            await within(buffer.sample())
        assert (await within(buffer.sample())).number == 0


@pytest.mark.parametrize("way", ["asyncio.timeout", "wait_for", "fail_after", "future", "group"])
async def test_a_transform_with_a_time_limit_of_its_own(way: str) -> None:
    failures = [1]

    async def forever() -> None:
        await asyncio.Event().wait()

    async def transform(data: Any) -> Any:
        if not failures[0]:
            return data
        failures[0] -= 1
        if way == "asyncio.timeout":
            async with asyncio.timeout(0.001):
                await forever()
        elif way == "wait_for":
            await asyncio.wait_for(forever(), 0.001)
        elif way == "fail_after":
            with anyio.fail_after(0.001):
                await forever()
        elif way == "future":
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            future.cancel()
            await future
        else:
            async with asyncio.TaskGroup() as group:
                group.create_task(forever())
                raise ValueError
        return data

    buffer = in_order(transform)
    await buffer.extend(rows(80))
    async with buffer:
        with pytest.raises(PrefetchError):
            await within(buffer.sample())
        assert [(await within(buffer.sample())).number for _ in range(3)] == [0, 1, 2]


# -- code of the user that calls the buffer ---------------------------------------------------------------------------


async def test_a_transform_may_write() -> None:
    async def transform(data: Any) -> Any:
        await buffer.extend(rows(1, 1000))
        await buffer.update_priority([0], 1.0)
        assert buffer.stats().delivered >= 0
        assert "wait" in buffer.why_blocked()
        return data

    for depth, workers in ((0, 1), (3, 2)):
        buffer = in_order(transform, storage=ThreadedStorage(80), prefetch=depth, workers=workers)
        await buffer.extend(rows(80))
        async with buffer:
            assert [(await within(buffer.sample())).number for _ in range(5)] == list(range(5))


async def test_a_transform_may_ask_for_a_batch_of_another_size() -> None:
    async def transform(data: Any) -> Any:
        if len(data["number"]) == 4:
            other = await buffer.sample(2)
            assert len(other) == 2
        return data

    buffer = in_order(transform, workers=2)
    await buffer.extend(rows(80))
    async with buffer:
        for _ in range(5):
            assert len(await within(buffer.sample())) == 4


async def test_a_sync_transform_may_write_through_the_event_loop() -> None:
    loop = asyncio.get_running_loop()

    def transform(data: Any) -> Any:
        asyncio.run_coroutine_threadsafe(buffer.extend(rows(1, 1000)), loop).result(SECONDS)
        return data

    buffer = in_order(transform, storage=ThreadedStorage(80), prefetch=1, workers=2)
    await buffer.extend(rows(80))
    async with buffer:
        assert [(await within(buffer.sample())).number for _ in range(6)] == list(range(6))


async def test_a_transform_may_close_the_buffer() -> None:
    async def transform(data: Any) -> Any:
        await buffer.aclose()
        return data

    buffer = in_order(transform)
    await buffer.extend(rows(80))
    await buffer.open()
    with pytest.raises(BufferClosedError):
        await within(buffer.sample())
    await within(buffer.aclose())
