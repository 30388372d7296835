"""Writes that are cancelled are whole or have not happened."""

from __future__ import annotations

import asyncio
import random

import anyio
import pytest

from asyncbuf import ReplayBuffer, SamplerWithoutReplacement, Storage, TensorStorage
from tests.cancellation.helpers import later, moment
from tests.helpers import Crew, DiarySampler, Stop, ThreadedStorage, jitter, numbers, outcomes, rows, turns, within

# How threads and cancellations meet is a matter of the event loop.
pytestmark = pytest.mark.every_loop


async def check_cancelled_writes(calls: int, threads: bool) -> None:
    block = 5
    storage: Storage = TensorStorage(calls * block)
    if threads:
        storage = ThreadedStorage(calls * block, on_write=jitter, on_gather=jitter)
    buffer = ReplayBuffer(storage, sampler=SamplerWithoutReplacement(shuffle=False), batch_size=block, workers=2)
    asked = 0
    returned: dict[int, list[int]] = {}
    running = True

    async def write(start: int) -> None:
        returned[start] = (await buffer.extend(rows(block, start))).tolist()

    async def producer() -> None:
        nonlocal asked
        while asked < calls:
            start = asked * block
            asked += 1
            way = random.randrange(4)
            try:
                if way == 0:
                    await asyncio.wait_for(write(start), moment())
                elif way == 1:
                    with anyio.move_on_after(moment()):
                        await write(start)
                elif way == 2:
                    task = asyncio.create_task(write(start))
                    await turns(random.randrange(8))
                    task.cancel()
                    await task
                else:
                    await write(start)
            except (TimeoutError, asyncio.CancelledError):
                pass

    async def consumer() -> None:
        while running:
            await buffer.sample(block)

    async with buffer, Crew() as crew:
        await buffer.extend(rows(block, -block))
        consumers = [crew.start(consumer()) for _ in range(2)]
        await within(asyncio.gather(*(producer() for _ in range(4))), 500)
        running = False
        await outcomes(*consumers)
        await buffer.extend(rows(block, asked * block))  # it goes on
        assert buffer.stats().waiting_writers == 0
        assert len(buffer) == buffer.write_count
        found: list[int] = []
        async for batch in buffer.epoch():
            found += numbers(batch)
        found = []
        async for batch in buffer.epoch():
            assert len(set(number // block for number in numbers(batch))) == 1  # a whole write, or nothing of it
            found += numbers(batch)
    assert len(found) == len(set(found)) == len(buffer)
    # Besides those that returned: the first block and the last. A thread that was copying when its call was cancelled
    # has written more; whether there was one is for chance to say, and below there is one for sure.
    written = block * (len(returned) + 2)
    assert written <= len(buffer) <= block * (asked + 2)
    if not threads:
        assert len(buffer) == written
    for start, where in returned.items():
        assert [found[row] for row in where] == list(range(start, start + block))


@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
@pytest.mark.parametrize("calls", [400, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_a_cancelled_write_has_written_everything_or_nothing(calls: int, threads: bool) -> None:
    await check_cancelled_writes(calls, threads)


async def test_a_write_cancelled_before_its_turn_writes_nothing() -> None:
    stop = Stop()
    buffer = ReplayBuffer(ThreadedStorage(50, on_gather=stop), batch_size=4)
    async with buffer, Crew() as crew:
        await buffer.extend(rows(10))
        sample = crew.start(buffer.sample())
        await stop.come.reached()
        writes = [crew.start(buffer.extend(rows(1, 100 + i))) for i in range(3)]
        await turns()
        writes[1].cancel()
        await turns()
        stop.go.set()
        ends = await outcomes(sample, *writes)
        assert isinstance(ends[2], asyncio.CancelledError)
        assert [int(ends[1]), int(ends[3])] == [10, 11]
        assert len(buffer) == 12


async def test_a_write_cancelled_while_a_thread_copies_is_whole() -> None:
    stop = Stop()
    storage = ThreadedStorage(50)
    buffer = ReplayBuffer(storage, sampler=SamplerWithoutReplacement(shuffle=False), batch_size=50)
    async with buffer, Crew() as crew:
        await buffer.extend(rows(10))
        storage.on_write = stop
        write = crew.start(buffer.extend(rows(5, 10)))
        await stop.come.reached()
        for _ in range(5):  # however often
            write.cancel()
            await turns()
        assert not write.done()
        sample = crew.start(buffer.sample())
        await turns()
        assert not sample.done()
        stop.go.set()
        assert isinstance((await outcomes(write))[0], asyncio.CancelledError)
        assert numbers(await within(sample)) == list(range(15))


@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
async def test_a_write_cancelled_in_the_step_of_its_turn(threads: bool, steps: int) -> None:
    stop = Stop()
    storage = ThreadedStorage(50)
    buffer = ReplayBuffer(storage, batch_size=4)
    async with buffer, Crew() as crew:
        await buffer.extend(rows(10))
        storage.on_gather = stop
        sample = crew.start(buffer.sample())
        await stop.come.reached()
        storage.writes_in_threads = threads
        write = crew.start(buffer.extend(rows(5)))
        await turns()
        sample.add_done_callback(lambda _: later(steps, write.cancel))
        stop.go.set()
        await outcomes(sample, write)
        assert len(buffer) in (10, 15)
        if not threads:
            assert len(buffer) == (10 if write.cancelled() else 15)
        await within(buffer.extend(rows(1)))
        await within(buffer.sample())


async def test_a_cancelled_priority_update_does_not_stop_those_behind_it() -> None:
    stop, sampler = Stop(), DiarySampler()
    storage = ThreadedStorage(50)
    buffer = ReplayBuffer(storage, sampler=sampler, batch_size=4)
    async with buffer, Crew() as crew:
        await buffer.extend(rows(10))
        storage.on_write = stop
        write = crew.start(buffer.extend(rows(1)))
        await stop.come.reached()
        updates = [crew.start(buffer.update_priority([0], float(i))) for i in range(3)]
        await turns()
        updates[1].cancel()
        await turns()
        stop.go.set()
        await outcomes(write, *updates)
        assert [entry for entry in sampler.diary if entry[0] == "priority"] == [("priority", 0), ("priority", 2)]
