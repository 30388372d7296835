"""Opening, closing and iterating, cancelled at any moment."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anyio

from asyncbuf import Batch, BufferClosedError, ReplayBuffer, TensorStorage
from tests.helpers import Crew, Latch, Stop, ThreadedStorage, jitter, outcomes, rows, turns, wander, within

if TYPE_CHECKING:
    from collections.abc import Awaitable


async def test_a_cancelled_aclose_goes_on_and_may_be_repeated() -> None:
    stop = Stop()

    def transform(data: Any) -> Any:
        stop()
        return data

    buffer = ReplayBuffer(TensorStorage(50), batch_size=4, transform=transform)
    await buffer.extend(rows(50))
    async with Crew() as crew:
        await buffer.open()
        sample = crew.start(buffer.sample())
        await stop.come.reached()
        close = crew.start(buffer.aclose())
        await turns()
        close.cancel()
        assert [type(end) for end in await outcomes(close, sample)] == [asyncio.CancelledError, BufferClosedError]
        again = crew.start(buffer.aclose())
        await turns()
        assert not again.done()
        stop.go.set()
        await within(again)
        async with buffer:
            assert (await within(buffer.sample())).number == 0


async def test_opening_may_be_cancelled() -> None:
    for steps in range(6):
        buffer = ReplayBuffer(TensorStorage(50), batch_size=4, transform=lambda data: data, workers=2)
        await buffer.extend(rows(50))
        opening = asyncio.create_task(buffer.open())
        await turns(steps)
        opening.cancel()
        await outcomes(opening)
        await within(buffer.aclose())
        async with buffer:
            assert (await within(buffer.sample())).number == 0


async def test_a_scope_that_ends_around_an_open_buffer() -> None:
    stop = Latch()

    def transform(data: Any) -> Any:
        stop.wait()
        return data

    buffer = ReplayBuffer(TensorStorage(50), batch_size=4, transform=transform)
    await buffer.extend(rows(50))
    with anyio.move_on_after(0.01):
        async with buffer:
            await buffer.sample()
    stop.set()
    await within(buffer.aclose())
    async with buffer:
        assert (await within(buffer.sample())).number == 0


async def test_cancelled_iteration_loses_nothing() -> None:
    buffer = ReplayBuffer(
        ThreadedStorage(50, on_gather=jitter), batch_size=4, prefetch=2, workers=2, transform=lambda data: data
    )
    await buffer.extend(rows(50))
    received: list[int] = []

    async def consume() -> None:
        async for batch in buffer:
            received.append(batch.number)

    async with buffer:
        for _ in range(60):
            tasks = [asyncio.create_task(consume()) for _ in range(2)]
            await wander()
            for task in tasks:
                task.cancel()
            await outcomes(*tasks)
        queued = buffer.stats().queued
        received += [(await buffer.sample()).number for _ in range(queued)]
    assert received == list(range(len(received)))


async def test_awaitables_of_the_callers_kind(  # a plain future, a task, a shield: none of them is special
) -> None:
    buffer = ReplayBuffer(TensorStorage(50), batch_size=4)
    await buffer.extend(rows(50))
    async with buffer:
        waits: list[Awaitable[Batch]] = [
            asyncio.ensure_future(buffer.sample()),
            asyncio.shield(buffer.sample()),
            buffer.sample(),
        ]
        assert {(await wait).number for wait in waits} == {0, 1, 2}
