"""Taken means handed over: a cancelled or timed-out call loses nothing, repeats nothing and reorders nothing."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

from asyncbuf import (
    Batch,
    BufferClosedError,
    PrefetchError,
    ReplayBuffer,
    SamplerWithoutReplacement,
    Storage,
    TensorStorage,
)
from tests.helpers import (
    Crew,
    DiarySampler,
    Latch,
    Stop,
    ThreadedStorage,
    check_same,
    fingerprint,
    numbers,
    outcomes,
    rows,
    seeded,
    take,
    turns,
    within,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable

    from asyncbuf.buffer import Transform


def jitter() -> None:
    time.sleep(random.choice((0.0, 0.0, 0.0, 0.0002, 0.001)))


# -- sample() cancelled at random -------------------------------------------------------------------------------------


class Chaos:
    """Calls of ``sample()``, most of which are given up in one way or another.

    Args:
        buffer: the buffer.
        calls: how many.
    """

    def __init__(self, buffer: ReplayBuffer, calls: int) -> None:
        self._buffer = buffer
        self._left = calls
        self._waiting: deque[asyncio.Task[Any]] = deque()
        self.received: list[Hashable] = []
        self.given_up = 0

    def strike(self) -> None:
        """Something has just become ready, or is about to: cancel the first who waits, now or some turns later."""
        if self._waiting:
            _later(random.randrange(6), self._waiting[0].cancel)

    async def consume(self) -> None:
        ways = (self._timeout, self._wait_for, self._move_on, self._cancelled_task, self._struck, self._patient)
        while self._left > 0:
            self._left -= 1
            try:
                await random.choice(ways)()
            except (TimeoutError, asyncio.CancelledError):
                self.given_up += 1

    async def _sample(self) -> None:
        # In one step with the return of sample(): the order here is the order in which batches were handed over.
        self.received.append(fingerprint(await self._buffer.sample()))

    async def _timeout(self) -> None:
        async with asyncio.timeout(_moment()):
            await self._sample()

    async def _wait_for(self) -> None:
        await asyncio.wait_for(self._sample(), _moment())

    async def _move_on(self) -> None:
        with anyio.move_on_after(_moment()) as scope:
            await self._sample()
        self.given_up += scope.cancelled_caught

    async def _cancelled_task(self) -> None:
        task = asyncio.create_task(self._sample())
        await turns(random.randrange(8))
        task.cancel()
        await task

    async def _struck(self) -> None:
        task = asyncio.create_task(self._sample())
        self._waiting.append(task)
        try:
            await task
        finally:
            self._waiting.remove(task)

    async def _patient(self) -> None:
        await self._sample()


def _moment() -> float:
    return random.choice((0.0, 0.0001, 0.0005, 0.002))


def _later(steps: int, call: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    if steps:
        loop.call_soon(_later, steps - 1, call)
    else:
        call()


async def check_chaos(calls: int, *, consumers: int, depth: int, workers: int, threads: bool, kind: str) -> None:
    chaos: Chaos | None = None

    def sync(data: Any, *, generator: torch.Generator) -> Any:
        jitter()
        if chaos is not None and random.random() < 0.3:
            loop.call_soon_threadsafe(chaos.strike)
        return {**data, "noise": torch.rand(4, generator=generator)}

    async def coroutine(data: Any, *, generator: torch.Generator) -> Any:
        await asyncio.sleep(random.choice((0, 0, 0.0005)))
        if chaos is not None:
            chaos.strike()  # the batch is ready in this very step
        return {**data, "noise": torch.rand(4, generator=generator)}

    def make(depth: int, workers: int) -> ReplayBuffer:
        storage: Storage = ThreadedStorage(50, on_gather=jitter) if threads else TensorStorage(50)
        transform: Transform | None = {"none": None, "sync": sync, "async": coroutine}[kind]
        return ReplayBuffer(
            storage,
            sampler=SamplerWithoutReplacement(),
            batch_size=4,
            prefetch=depth,
            workers=workers,
            transform=transform,
            generator=seeded(0),
        )

    loop = asyncio.get_running_loop()
    buffer = make(depth, workers)
    await buffer.extend(rows(50))
    async with buffer:
        chaos = Chaos(buffer, calls)
        await within(asyncio.gather(*(chaos.consume() for _ in range(consumers))), 500)
        rest = buffer.stats().queued
        assert buffer.stats().waiting_consumers == 0
        # Both happen often, or this would show nothing.
        assert min(chaos.given_up, len(chaos.received)) > calls // 20
        found = chaos.received + await take(buffer, rest)
    chaos = None
    reference = make(0, 1)
    await reference.extend(rows(50))
    async with reference:
        check_same(found, await take(reference, len(found)), "received and then taken")


CASES = [
    # consumers, depth, workers, threads, kind
    (1, 0, 1, False, "async"),
    (1, 4, 2, True, "sync"),
    (3, 0, 2, True, "none"),
    (3, 1, 1, False, "sync"),
    (5, 3, 4, True, "async"),
    (3, 8, 3, False, "async"),
]


@pytest.mark.parametrize(("consumers", "depth", "workers", "threads", "kind"), CASES)
async def test_batches_received_are_the_stream_whoever_gives_up(
    consumers: int, depth: int, workers: int, threads: bool, kind: str
) -> None:
    await check_chaos(800, consumers=consumers, depth=depth, workers=workers, threads=threads, kind=kind)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("consumers", "depth", "workers", "threads", "kind"), CASES)
async def test_batches_received_are_the_stream_in_10000_calls(
    consumers: int, depth: int, workers: int, threads: bool, kind: str
) -> None:
    await check_chaos(10_000, consumers=consumers, depth=depth, workers=workers, threads=threads, kind=kind)


# -- sample() cancelled at a chosen moment ----------------------------------------------------------------------------


@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize("steps", range(6))
async def test_cancelled_in_the_step_in_which_the_batch_becomes_ready(steps: int, consumers: int) -> None:
    tasks: list[asyncio.Task[Batch]] = []

    async def transform(data: Any) -> Any:
        await asyncio.sleep(0)
        if tasks:
            _later(steps, tasks[0].cancel)
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


# -- writes -----------------------------------------------------------------------------------------------------------


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
                    await asyncio.wait_for(write(start), _moment())
                elif way == 1:
                    with anyio.move_on_after(_moment()):
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
    # has written more.
    written = block * (len(returned) + 2)
    assert len(buffer) > written if threads else len(buffer) == written
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
        sample.add_done_callback(lambda _: _later(steps, write.cancel))
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


# -- closing ----------------------------------------------------------------------------------------------------------


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
            await asyncio.sleep(random.choice((0, 0.0005, 0.002)))
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
