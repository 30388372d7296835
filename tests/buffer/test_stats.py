"""What a buffer says of itself while it works and waits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncbuf import ReplayBuffer
from tests.buffer.helpers import make
from tests.helpers import Crew, Latch, Stop, ThreadedStorage, outcomes, rows, turns, until


async def test_counters() -> None:
    buffer = make(prefetch=3)
    async with buffer:
        await buffer.extend(rows(110))
        for _ in range(5):
            await buffer.sample()
        await buffer.skip()
        stats = buffer.stats()
        assert stats.size == stats.capacity == 100
        assert stats.write_count == 110
        assert (stats.drawn, stats.delivered, stats.dropped, stats.queued) == (8, 5, 1, 2)
        assert stats.drawn == stats.delivered + stats.dropped + stats.queued
        assert (stats.in_flight, stats.waiting_consumers, stats.waiting_writers, stats.retries) == (0, 0, 0, 0)
        assert stats.peak_queued == 4
        assert stats.gather_seconds > 0
        assert stats.wait_seconds >= 0
        assert buffer.why_blocked() == "nobody waits"


async def test_blocked_on_data() -> None:
    buffer = make(min_size=10)
    async with buffer, Crew() as crew:
        await buffer.extend(rows(3))
        waiting = [crew.start(buffer.sample()) for _ in range(2)]
        waiting.append(crew.start(buffer.sample(7)))
        await turns()
        assert buffer.stats().waiting_consumers == 3
        assert buffer.why_blocked() == (
            "2 consumer(s) of batches of 4 wait for data: 3 of at least 10 items are stored; "
            "1 consumer(s) of batches of 7 wait for data: 3 of at least 10 items are stored"
        )
        await buffer.extend(rows(10))
        await outcomes(*waiting)
        assert buffer.why_blocked() == "nobody waits"
        assert buffer.stats().wait_seconds > 0


async def test_what_a_call_waited_for_that_gave_up() -> None:
    buffer = make(min_size=10)
    async with buffer:
        await buffer.extend(rows(3))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(buffer.sample(), 0.01)
        assert buffer.why_blocked() == (
            "nobody waits now; when a call last gave up, 1 consumer(s) of batches of 4 wait for data: "
            "3 of at least 10 items are stored"
        )


async def test_blocked_on_a_gather_and_writers_behind_it() -> None:
    stop = Stop()
    storage = ThreadedStorage(100)
    buffer = ReplayBuffer(storage, batch_size=4, workers=2)
    async with buffer, Crew() as crew:
        await buffer.extend(rows(10))
        storage.on_gather = stop
        waiting: list[asyncio.Task[Any]] = [crew.start(buffer.sample()) for _ in range(2)]
        await stop.come.reached()
        waiting += [crew.start(buffer.extend(rows(1))) for _ in range(3)]
        await turns()
        stats = buffer.stats()
        assert (stats.waiting_consumers, stats.waiting_writers, stats.in_flight, stats.queued) == (2, 3, 2, 2)
        assert buffer.why_blocked() == (
            "2 consumer(s) of batches of 4 wait for batch 0: its rows are being gathered; "
            "3 writer(s) wait behind 2 gather(s) of earlier batches"
        )
        late = crew.start(buffer.sample(2))
        await turns()
        assert "1 consumer(s) of batches of 2 wait for a draw, which is behind 3 write(s)" in buffer.why_blocked()
        stop.go.set()
        await outcomes(*waiting, late)
        assert buffer.why_blocked() == "nobody waits"


async def test_writers_that_gave_up_are_not_counted() -> None:
    stop = Stop()
    storage = ThreadedStorage(100)
    buffer = ReplayBuffer(storage, batch_size=4)
    async with buffer, Crew() as crew:
        await buffer.extend(rows(10))
        storage.on_gather = stop
        sample = crew.start(buffer.sample())
        await stop.come.reached()
        writers = [crew.start(buffer.extend(rows(1))) for _ in range(3)]
        await turns()
        writers[1].cancel()
        writers[2].cancel()
        await turns()
        try:
            assert buffer.stats().waiting_writers == 1
            assert "1 writer(s) wait behind" in buffer.why_blocked()
        finally:
            stop.go.set()
        await outcomes(sample, *writers)


async def test_blocked_on_a_write_in_a_thread() -> None:
    stop = Stop()
    storage = ThreadedStorage(100)
    buffer = ReplayBuffer(storage, batch_size=4)
    async with buffer, Crew() as crew:
        await buffer.extend(rows(10))
        storage.on_write = stop
        write = crew.start(buffer.extend(rows(1)))
        await stop.come.reached()
        sample = crew.start(buffer.sample())
        await turns()
        try:
            # The write that is under way is what the draw waits for.
            assert "behind 0 write" not in buffer.why_blocked()
            assert "1 consumer(s) of batches of 4 wait for a draw, which is behind" in buffer.why_blocked()
            second = crew.start(buffer.extend(rows(1)))
            await turns()
            assert "1 writer(s) wait behind a write in a thread" in buffer.why_blocked()
        finally:
            stop.go.set()
        await outcomes(write, sample, second)


async def test_blocked_on_a_transform_and_on_a_failure() -> None:
    come, go = Latch(), Latch()

    async def transform(data: Any) -> Any:
        come.set()
        await go.reached()
        raise ValueError

    buffer = make(transform=transform)
    async with buffer, Crew() as crew:
        await buffer.extend(rows(10))
        sample = crew.start(buffer.sample())
        await come.reached()
        assert buffer.why_blocked() == "1 consumer(s) of batches of 4 wait for batch 0: its transforms have not ended"
        assert buffer.stats().in_flight == 1
        go.set()
        await outcomes(sample)
        assert buffer.why_blocked() == "nobody waits"
        stats = buffer.stats()
        assert (stats.queued, stats.in_flight, stats.retries) == (1, 0, 0)
        await outcomes(crew.start(buffer.sample()))
        assert buffer.stats().retries == 1


async def test_idle_with_a_full_queue() -> None:
    buffer = make(prefetch=3, transform=lambda data: data)
    async with buffer:
        await buffer.extend(rows(10))
        await buffer.sample()
        await until(lambda: buffer.stats().in_flight == 0)
        assert buffer.stats().queued == 3
        assert buffer.why_blocked() == "nobody waits"
