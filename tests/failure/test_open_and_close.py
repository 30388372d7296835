"""Opening and closing at any moment: the stream goes on exactly, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import (
    AsyncBufError,
    Batch,
    BufferClosedError,
    PrefetchError,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorStorage,
)
from tests.failure.helpers import AT_ONCE, Unlucky, in_order
from tests.helpers import (
    CountingTransform,
    Crew,
    Stop,
    ThreadedStorage,
    background_tasks,
    check_same,
    fingerprint,
    outcomes,
    rows,
    seeded,
    take,
    turns,
    within,
)

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch


@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
@pytest.mark.parametrize("kind", ["sync", "coroutine"])
@pytest.mark.parametrize("depth", [0, 1, 6])
async def test_closing_and_opening_again_goes_on_exactly(depth: int, kind: str, threads: bool) -> None:
    def make() -> ReplayBuffer:
        return ReplayBuffer(
            ThreadedStorage(80) if threads else TensorStorage(80),
            sampler=SamplerWithoutReplacement(),
            batch_size=4,
            prefetch=depth,
            workers=2,
            transform=[getattr(Unlucky({}), kind), lambda data: data],
            generator=seeded(0),
        )

    expected_of, buffer = make(), make()
    await expected_of.extend(rows(80))
    async with expected_of:
        expected = await take(expected_of, 40)
    await buffer.extend(rows(80))
    found: list[Hashable] = []
    while len(found) < 40:
        async with buffer, Crew() as crew:
            found += await take(buffer, 1 + len(found) % 3)
            if len(found) % 4 == 0:  # closed while consumers wait
                waiting = [crew.start(buffer.sample()) for _ in range(2)]
                await turns(len(found) % 7)
                await buffer.aclose()
                found += [fingerprint(end) for end in await outcomes(*waiting) if isinstance(end, Batch)]
    check_same(found[:40], expected)


@pytest.mark.parametrize("depth", [0, 2])
async def test_closing_while_a_stateful_transform_runs(depth: int) -> None:
    stop = Stop()

    def hook(seen: int) -> None:
        if seen == 3:
            stop()

    buffer = in_order(CountingTransform(hook), prefetch=depth)
    await buffer.extend(rows(80))
    async with Crew() as crew:
        await buffer.open()
        seen: list[int] = []
        while len(seen) < 2:
            seen.append(int((await buffer.sample())["seen"][0]))
        waiting = crew.start(buffer.sample())
        await stop.come.reached()
        close = crew.start(buffer.aclose())
        await turns()
        stop.go.set()
        await outcomes(waiting, close)
        async with buffer:
            # What the thread made is kept: made again, it would be another.
            seen += [int((await within(buffer.sample()))["seen"][0]) for _ in range(5)]
        assert seen == [1, 2, 3, 4, 5, 6, 7]


async def test_calls_while_the_buffer_is_being_opened() -> None:
    for steps in range(6):
        for threads in (False, True):
            buffer = in_order(
                Unlucky({}).sync, storage=ThreadedStorage(80) if threads else TensorStorage(80), prefetch=2, workers=2
            )
            await buffer.extend(rows(80))

            async def sample(steps: int = steps, buffer: ReplayBuffer = buffer) -> Batch | None:
                await turns(steps)
                try:
                    return await buffer.sample()
                except BufferClosedError:
                    return None

            _, early = await within(asyncio.gather(buffer.open(), sample()))
            received = [] if early is None else [early.number]
            received += [(await within(buffer.sample())).number for _ in range(5)]
            await buffer.aclose()
            assert received == list(range(len(received)))


async def test_calls_while_the_buffer_is_being_opened_again() -> None:
    buffer = in_order(Unlucky({0: 1}).sync, prefetch=2, workers=2)
    await buffer.extend(rows(80))
    async with buffer:
        with pytest.raises(PrefetchError):
            await buffer.sample()
    _, batch = await within(asyncio.gather(buffer.open(), buffer.sample()))
    assert batch.number == 0
    assert [(await within(buffer.sample())).number for _ in range(5)] == [1, 2, 3, 4, 5]
    await buffer.aclose()


async def test_aclose_while_consumers_and_writers_wait() -> None:
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
        close = crew.start(buffer.aclose())
        # They are told at once, while a thread still gathers.
        assert {type(end) for end in await outcomes(*consumers, *writers, seconds=AT_ONCE)} == {BufferClosedError}
        assert not close.done()
        stop.go.set()
        await within(close)
        assert not background_tasks()


async def test_aclose_waits_for_a_write_that_a_thread_makes() -> None:
    stop = Stop()
    storage = ThreadedStorage(80)
    buffer = ReplayBuffer(storage, batch_size=4)
    async with Crew() as crew:
        await buffer.open()
        await buffer.extend(rows(10))
        storage.on_write = stop
        write = crew.start(buffer.extend(rows(3)))
        await stop.come.reached()
        close = crew.start(buffer.aclose())
        await turns()
        assert not close.done()
        stop.go.set()
        # It was under way, so it is whole.
        ends = await outcomes(write, close)
        assert ends[0].tolist() == [10, 11, 12]
        assert (len(buffer), buffer.write_count) == (13, 13)
        async with buffer:
            await within(buffer.extend(rows(1)))


async def test_opening_and_closing_at_once() -> None:
    for order in (("open", "aclose"), ("aclose", "open"), ("open", "open", "aclose", "aclose", "open")):
        for steps in range(5):
            buffer = in_order(Unlucky({}).sync, prefetch=2, workers=2)
            await buffer.extend(rows(80))

            async def call(name: str, wait: int, buffer: ReplayBuffer = buffer) -> None:
                await turns(wait)
                await getattr(buffer, name)()

            ends = await within(
                asyncio.gather(*(call(name, i * steps) for i, name in enumerate(order)), return_exceptions=True)
            )
            assert all(end is None or isinstance(end, AsyncBufError) for end in ends)
            await within(buffer.aclose())
            assert not background_tasks()
            async with buffer:
                assert (await within(buffer.sample())).number == 0


async def test_aclose_from_another_task_and_twice() -> None:
    buffer = in_order(Unlucky({}).sync, prefetch=2)
    await buffer.extend(rows(80))
    async with Crew() as crew:
        await crew.start(buffer.open())
        await buffer.sample()
        await outcomes(*(crew.start(buffer.aclose()) for _ in range(3)))
        await buffer.aclose()
        with pytest.raises(BufferClosedError):
            await buffer.sample()
        async with buffer:
            assert (await buffer.sample()).number == 1


async def test_aclose_within_iteration() -> None:
    buffer = in_order(Unlucky({}).sync, prefetch=2)
    await buffer.extend(rows(80))
    await buffer.open()
    received = []
    async for batch in buffer:
        received.append(batch.number)
        if batch.number == 2:
            await buffer.aclose()
    assert received == [0, 1, 2]


async def test_aclose_with_a_time_limit() -> None:
    stop = Stop()

    def transform(data: Any) -> Any:
        stop()
        return data

    buffer = in_order(transform)
    await buffer.extend(rows(80))
    async with Crew() as crew:
        await buffer.open()
        sample = crew.start(buffer.sample())
        await stop.come.reached()
        with pytest.raises(TimeoutError):
            await buffer.aclose(timeout=0.01)
        assert isinstance((await outcomes(sample))[0], BufferClosedError)
        with pytest.raises(AsyncBufError):
            await buffer.open()
        stop.go.set()
        await within(buffer.aclose())
        async with buffer:
            assert (await within(buffer.sample())).number == 0


async def test_a_buffer_that_closes_late_closes_by_itself() -> None:
    stop = Stop()

    def transform(data: Any) -> Any:
        stop()
        return data

    buffer = in_order(transform)
    await buffer.extend(rows(80))
    async with Crew() as crew:
        await buffer.open()
        sample = crew.start(buffer.sample())
        await stop.come.reached()
        with pytest.raises(TimeoutError):
            await buffer.aclose(timeout=0.01)
        await outcomes(sample)
        ending = background_tasks()
        stop.go.set()
        await outcomes(*ending)
        await turns()
        # Its thread and its tasks have ended: "the buffer closes when it does".
        async with buffer:
            assert (await within(buffer.sample())).number == 0


async def test_waiting_takes_no_processor_time() -> None:
    stop = Stop()

    def transform(data: Any) -> Any:
        stop()
        return data

    buffer = in_order(transform, workers=2, prefetch=2, storage=ThreadedStorage(80))
    await buffer.extend(rows(80))
    async with Crew() as crew:
        await buffer.open()
        waiting = [crew.start(buffer.sample()) for _ in range(3)]
        await stop.come.reached()
        start = time.thread_time()
        done, _ = await asyncio.wait(waiting, timeout=0.1)
        assert not done
        with pytest.raises(TimeoutError):
            await buffer.aclose(timeout=0.1)
        used = time.thread_time() - start
        stop.go.set()
        await within(buffer.aclose())
        await outcomes(*waiting)
    assert used < 0.025


@pytest.mark.parametrize("steps", range(4))
async def test_closing_while_a_gather_that_is_tried_again_waits_for_a_write(steps: int) -> None:
    class Unreadable(ThreadedStorage):
        failures = 1

        def gather(self, indices: torch.Tensor) -> Any:
            if self.failures:
                self.failures -= 1
                raise OSError("gather")
            return super().gather(indices)

    stop, storage = Stop(), Unreadable(80)
    buffer = ReplayBuffer(storage, batch_size=4)
    async with Crew() as crew:
        await buffer.open()
        await buffer.extend(rows(80))
        with pytest.raises(PrefetchError):
            await buffer.sample()
        storage.on_write = stop
        write = crew.start(buffer.extend(rows(1)))
        await stop.come.reached()
        again = crew.start(buffer.sample())
        await turns()
        close = crew.start(buffer.aclose())
        await turns(steps)
        stop.go.set()
        await outcomes(write, again, close)
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("asyncbuf")]
        async with buffer:
            await within(buffer.extend(rows(1)), AT_ONCE)
            assert [(await within(buffer.sample(), AT_ONCE)).number for _ in range(3)] == [0, 1, 2]
        assert not left


async def check_storm(seed: int, *, gathers_fail: bool) -> None:
    """Calls of every kind, at every moment of opening and closing: in the end everything works, and nothing is lost."""
    choose = random.Random(seed)

    class Unreliable(ThreadedStorage):
        def gather(self, indices: torch.Tensor) -> Any:
            if gathers_fail and choose.random() < 0.3:
                raise OSError("gather")
            return super().gather(indices)

    def sync(data: Any) -> Any:
        if choose.random() < 0.2:
            raise LookupError("transform")
        return data

    async def coroutine(data: Any) -> Any:
        await asyncio.sleep(0)
        return sync(data)

    storage = Unreliable(50) if choose.random() < 0.7 else TensorStorage(50)
    buffer = ReplayBuffer(
        storage,
        sampler=SamplerWithoutReplacement(),
        batch_size=4,
        prefetch=choose.choice((0, 2)),
        workers=choose.choice((1, 2)),
        transform=choose.choice(([], [sync], [coroutine], [sync, coroutine, sync])),
    )
    received: list[int] = []

    async def write() -> None:
        with contextlib.suppress(BufferClosedError):
            await buffer.extend(rows(2))

    async def read() -> None:
        with contextlib.suppress(BufferClosedError, PrefetchError):
            received.append((await buffer.sample()).number)

    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    await buffer.extend(rows(50))
    async with Crew() as crew:
        for _ in range(10):
            await buffer.open()
            tasks = [crew.start(choose.choice((write, read, read))()) for _ in range(choose.randrange(1, 7))]
            await turns(choose.randrange(8))
            if choose.random() < 0.3:
                await turns(100)
            if choose.random() < 0.5:
                for task in choose.sample(tasks, len(tasks) // 2):
                    task.cancel()
            await within(buffer.aclose(), AT_ONCE)
            assert not background_tasks()
            if choose.random() < 0.5:
                await outcomes(*tasks, seconds=AT_ONCE)
        async with buffer:
            await within(buffer.extend(rows(1)), AT_ONCE)
            for _ in range(5):
                count = len(received)
                while len(received) == count:
                    await within(read(), AT_ONCE)
    assert received == list(range(len(received)))
    assert not problems


@pytest.mark.parametrize("gathers_fail", [False, True], ids=["transforms fail", "gathers fail"])
@pytest.mark.parametrize("seeds", [15, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_opening_and_closing_at_any_moment(seeds: int, gathers_fail: bool) -> None:
    for seed in range(seeds):
        await check_storm(seed, gathers_fail=gathers_fail)
