"""Calls of sample() given up at a chosen moment: no batch is lost and nobody waits for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from asyncbuf import Batch, PrefetchError, ReplayBuffer, TensorStorage
from tests.cancellation.helpers import later
from tests.helpers import Crew, Stop, jitter, outcomes, rows, seeded, turns, within

# How threads and cancellations meet is a matter of the event loop.
pytestmark = pytest.mark.every_loop


@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize("steps", range(6))
async def test_cancelled_in_the_step_in_which_the_batch_becomes_ready(steps: int, consumers: int) -> None:
    tasks: list[asyncio.Task[Batch]] = []

    async def transform(data: Any) -> Any:
        await asyncio.sleep(0)
        if tasks:
            later(steps, tasks[0].cancel)
        return data

    buffer = ReplayBuffer(TensorStorage(50), batch_size=4, transform=transform, generator=seeded(0))
    await buffer.extend(rows(50))
    async with buffer, Crew() as crew:
        received: list[int] = []
        for _ in range(30):
            tasks = [crew.start(buffer.sample()) for _ in range(consumers)]
            ends = await outcomes(*tasks)
            received += [end.number for end in ends if isinstance(end, Batch)]
        tasks = []
        received += [(await buffer.sample()).number for _ in range(buffer.stats().queued)]
    assert received == list(range(len(received)))


async def test_cancelled_first_in_line_hands_the_turn_on() -> None:
    stop = Stop()

    def transform(data: Any) -> Any:
        stop()
        return data

    buffer = ReplayBuffer(TensorStorage(50), batch_size=4, transform=transform)
    await buffer.extend(rows(50))
    async with buffer, Crew() as crew:
        first, second = crew.start(buffer.sample()), crew.start(buffer.sample())
        await stop.come.reached()
        first.cancel()
        await turns()
        stop.go.set()
        assert (await within(second)).number == 0


async def test_cancelled_in_the_middle_of_the_line() -> None:
    stop = Stop()

    def transform(data: Any) -> Any:
        stop()
        return data

    buffer = ReplayBuffer(TensorStorage(50), batch_size=4, transform=transform, workers=2)
    await buffer.extend(rows(50))
    async with buffer, Crew() as crew:
        tasks = [crew.start(buffer.sample()) for _ in range(5)]
        await stop.come.reached()
        tasks[1].cancel()
        tasks[3].cancel()
        await turns()
        stop.go.set()
        ends = await outcomes(*tasks)
        assert [end.number for end in ends if isinstance(end, Batch)] == [0, 1, 2]
        assert [(await buffer.sample()).number for _ in range(2)] == [3, 4]


async def test_first_come_first_served() -> None:
    stop = Stop()

    def transform(data: Any) -> Any:
        stop()
        jitter()
        return data

    buffer = ReplayBuffer(TensorStorage(50), batch_size=4, transform=transform, workers=4, prefetch=2)
    await buffer.extend(rows(50))
    async with buffer, Crew() as crew:
        tasks = [crew.start(buffer.sample()) for _ in range(20)]
        await stop.come.reached()
        stop.go.set()
        assert [batch.number for batch in await outcomes(*tasks)] == list(range(20))


async def test_calls_that_give_up_while_there_is_no_data_draw_nothing() -> None:
    generator = seeded(0)
    buffer = ReplayBuffer(TensorStorage(50), batch_size=4, prefetch=2, generator=generator)
    async with buffer:
        for _ in range(20):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await buffer.sample()
        await buffer.extend(rows(50))
        await turns()
        assert buffer.stats().drawn == 0
        assert generator.get_state().equal(seeded(0).get_state())
        assert (await buffer.sample()).number == 0


@pytest.mark.parametrize("depth", [0, 3])
async def test_a_cancelled_call_takes_its_count_back(depth: int) -> None:
    """However many calls give up, no more tickets are drawn than a patient consumer and the depth call for."""
    stop = Stop()

    def transform(data: Any) -> Any:
        stop()
        return data

    buffer = ReplayBuffer(TensorStorage(50), batch_size=4, prefetch=depth, transform=transform)
    await buffer.extend(rows(50))
    async with buffer, Crew() as crew:
        task = crew.start(buffer.sample())
        await stop.come.reached()
        for _ in range(20):
            task.cancel()
            await turns()
            task = crew.start(buffer.sample())
            await turns()
        assert buffer.stats().drawn == 1 + depth
        stop.go.set()
        assert (await within(task)).number == 0


async def test_a_shielded_scope_lets_the_call_end() -> None:
    stop = Stop()

    def transform(data: Any) -> Any:
        stop()
        return data

    buffer = ReplayBuffer(TensorStorage(50), batch_size=4, transform=transform)
    await buffer.extend(rows(50))
    received: list[int] = []
    async with buffer, Crew() as crew:

        async def consume() -> None:
            with anyio.CancelScope() as outer:
                outer.cancel()
                with anyio.CancelScope(shield=True):
                    received.append((await buffer.sample()).number)
                await buffer.sample()
                received.append(-1)

        task = crew.start(consume())
        await stop.come.reached()
        stop.go.set()
        await within(task)
        assert received == [0]
        assert (await buffer.sample()).number == 1


async def test_a_task_group_that_fails_loses_nothing() -> None:
    stop = Stop()

    def transform(data: Any) -> Any:
        stop()
        return data

    buffer = ReplayBuffer(TensorStorage(50), batch_size=4, transform=transform, prefetch=1)
    await buffer.extend(rows(50))

    async def fail() -> None:
        await stop.come.reached()
        raise LookupError

    async def consume() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(buffer.sample())
            group.create_task(buffer.sample())
            group.create_task(fail())

    async with buffer:
        with pytest.raises(ExceptionGroup):
            await consume()
        stop.go.set()
        assert [(await within(buffer.sample())).number for _ in range(4)] == [0, 1, 2, 3]


async def test_cancelled_with_a_failed_batch_leaves_the_failure_to_the_next() -> None:
    failures = [1]

    async def transform(data: Any) -> Any:
        if failures[0]:
            failures[0] -= 1
            tasks[0].cancel()
            raise ValueError("once")
        return data

    buffer = ReplayBuffer(TensorStorage(50), batch_size=4, transform=transform)
    await buffer.extend(rows(50))
    async with buffer, Crew() as crew:
        tasks = [crew.start(buffer.sample())]
        assert isinstance((await outcomes(*tasks))[0], asyncio.CancelledError)
        with pytest.raises(PrefetchError):
            await within(buffer.sample())
        assert (await within(buffer.sample())).number == 0


async def test_a_cancelled_call_for_another_size_keeps_its_ticket() -> None:
    stop = Stop()

    async def transform(data: Any) -> Any:
        if len(data["number"]) == 3:
            stop.come.set()
            await stop.go.reached()
        return data

    buffer = ReplayBuffer(TensorStorage(50), batch_size=4, prefetch=2, workers=2, transform=transform)
    await buffer.extend(rows(50))
    async with buffer, Crew() as crew:
        assert (await buffer.sample()).number == 0
        task = crew.start(buffer.sample(3))
        await stop.come.reached()
        task.cancel()
        await turns()
        stop.go.set()
        assert [(await within(buffer.sample())).number for _ in range(2)] == [1, 2]
        batch = await within(buffer.sample(3))
        assert (batch.number, len(batch)) == (3, 3)
