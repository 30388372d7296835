"""Passes and iteration."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import (
    Batch,
    BatchStream,
    BufferClosedError,
    BufferFailedError,
    PrefetchError,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorStorage,
)
from tests.helpers import (
    Crew,
    Latch,
    Stop,
    ThreadedStorage,
    jitter,
    numbers,
    outcomes,
    rows,
    seeded,
    some,
    turns,
    until,
    wander,
    within,
    worker_tasks,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

every_depth = pytest.mark.parametrize("depth", some([0, 1, 2, 3, 8], fast=[0, 1, 8]))


def slow(data: Any) -> Any:
    jitter()
    return data


def make(*, drop_last: bool = False, shuffle: bool = False, threads: bool = False, **options: Any) -> ReplayBuffer:
    storage = ThreadedStorage(100, on_gather=jitter, on_write=jitter) if threads else TensorStorage(100)
    sampler = SamplerWithoutReplacement(drop_last=drop_last, shuffle=shuffle)
    return ReplayBuffer(storage, sampler=sampler, batch_size=4, generator=seeded(0), **options)


async def collect(stream: AsyncIterator[Batch]) -> list[int]:
    """The numbers of the items of a stream, to its end."""
    found: list[int] = []
    async for batch in stream:
        found += numbers(batch)
    return found


# -- passes -----------------------------------------------------------------------------------------------------------


@every_depth
@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("items", [8, 10])
async def test_passes_end_properly(depth: int, threads: bool, drop_last: bool, items: int) -> None:
    buffer = make(drop_last=drop_last, threads=threads, prefetch=depth, workers=2, transform=slow)
    await buffer.extend(rows(items))
    whole = items - items % 4 if drop_last else items
    async with buffer:
        for epoch in range(4):
            batches = [batch async for batch in buffer.epoch()]
            assert [number for batch in batches for number in numbers(batch)] == list(range(whole))
            assert {batch.epoch for batch in batches} == {epoch}
            assert [batch.last for batch in batches] == [False] * (len(batches) - 1) + [True]
            # Nothing of the next pass is drawn before somebody asks for it.
            stats = buffer.stats()
            assert (stats.queued, stats.drawn) == (0, (epoch + 1) * len(batches))


@every_depth
async def test_shuffled_passes_have_each_item_once_and_differ(depth: int) -> None:
    buffer = make(shuffle=True, prefetch=depth, workers=2, transform=slow)
    await buffer.extend(rows(30))
    async with buffer:
        passes = [await collect(buffer.epoch()) for _ in range(3)]
    assert all(sorted(found) == list(range(30)) for found in passes)
    assert passes[0] != passes[1] != passes[2]


@every_depth
@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
async def test_new_items_join_at_the_next_pass(depth: int, threads: bool) -> None:
    buffer = make(threads=threads, prefetch=depth, workers=2, transform=slow)
    async with buffer:
        await buffer.extend(rows(8))
        for _ in range(4):
            before, found = len(buffer), []
            async for batch in buffer.epoch():
                found += numbers(batch)
                await buffer.extend(rows(3, len(buffer)))
            assert found == list(range(before))


@every_depth
async def test_items_written_between_passes_are_in_the_next(depth: int) -> None:
    buffer = make(prefetch=depth)
    async with buffer:
        for count in range(1, 30):
            await buffer.extend(rows(1, count - 1))
            assert await collect(buffer.epoch()) == list(range(count))


@every_depth
async def test_the_rest_of_a_pass(depth: int) -> None:
    buffer = make(prefetch=depth)
    await buffer.extend(rows(20))
    async with buffer:
        assert numbers(await buffer.sample()) == [0, 1, 2, 3]
        assert await collect(buffer.epoch()) == list(range(4, 20))
        assert await collect(buffer.epoch()) == list(range(20))


@every_depth
async def test_break_and_go_on(depth: int) -> None:
    buffer = make(prefetch=depth, transform=slow, workers=2)
    await buffer.extend(rows(20))
    async with buffer:
        stream = buffer.epoch()
        found: list[int] = []
        async for batch in stream:
            found += numbers(batch)
            if len(found) == 8:
                break
        # With the same object, with another one, or without any.
        async for batch in stream:
            found += numbers(batch)
            break
        found += numbers(await buffer.sample())
        found += await collect(buffer.epoch())
        assert found == list(range(20))
        assert await collect(stream) == []  # its pass is over
        assert await collect(stream) == []
        assert await collect(buffer.epoch()) == list(range(20))


async def test_an_epoch_of_a_sampler_without_passes() -> None:
    buffer = ReplayBuffer(TensorStorage(100), batch_size=4)
    with pytest.raises(TypeError, match="expected a sampler with passes, found RandomSampler"):
        buffer.epoch()


async def test_iteration_without_an_end() -> None:
    buffer = make(prefetch=2)
    await buffer.extend(rows(8))
    async with buffer:
        epochs = []
        async for batch in buffer:
            epochs.append(batch.epoch)
            if len(epochs) == 6:
                break
        assert epochs == [0, 0, 1, 1, 2, 2]
        assert (await buffer.sample()).epoch == 3


async def test_nothing_is_drawn_by_making_a_stream() -> None:
    buffer = make(prefetch=2)
    await buffer.extend(rows(8))
    async with buffer:
        streams = [buffer.epoch(), aiter(buffer)]
        await turns()
        assert buffer.stats().drawn == 0
        # It stands for the pass that is under way when its first batch is asked for.
        await buffer.sample()
        await buffer.sample()
        assert await collect(streams[0]) == list(range(8))


async def test_a_stream_made_before_opening() -> None:
    buffer = make()
    stream = buffer.epoch()
    with pytest.raises(BufferClosedError):
        await anext(stream)
    await buffer.extend(rows(8))
    async with buffer:
        assert await collect(stream) == list(range(8))


async def test_waiting_for_the_first_items() -> None:
    buffer = make(prefetch=2, min_size=5)
    async with buffer, Crew() as crew:
        task = crew.start(collect(buffer.epoch()))
        await buffer.extend(rows(3))
        await turns()
        assert not task.done()
        await buffer.extend(rows(5, 3))
        assert await within(task) == list(range(8))


# -- several consumers ------------------------------------------------------------------------------------------------


@every_depth
@pytest.mark.parametrize("consumers", [2, 5])
async def test_consumers_of_one_stream_share_its_pass(depth: int, consumers: int) -> None:
    buffer = make(prefetch=depth, workers=3, transform=slow, threads=True)
    await buffer.extend(rows(42))
    async with buffer:
        for epoch in range(3):
            stream = buffer.epoch()
            received: list[list[int]] = []

            async def consume(stream: BatchStream = stream, received: list[list[int]] = received) -> int:
                count = 0
                async for batch in stream:
                    received.append(numbers(batch))
                    count += 1
                return count

            await within(asyncio.gather(*(consume() for _ in range(consumers))))
            assert [number for batch in received for number in batch] == list(range(42)), f"pass {epoch}"
            assert buffer.stats().queued == 0


@every_depth
async def test_two_streams_at_once_share_the_pass_under_way(depth: int) -> None:
    buffer = make(prefetch=depth, workers=2, transform=slow)
    await buffer.extend(rows(42))
    async with buffer:
        for _ in range(3):
            one, other = await within(asyncio.gather(collect(buffer.epoch()), collect(buffer.epoch())))
            assert sorted(one + other) == list(range(42))
            assert one
            assert other


async def test_more_consumers_than_batches() -> None:
    buffer = make(prefetch=2, workers=2, transform=slow)
    await buffer.extend(rows(6))
    async with buffer:
        stream = buffer.epoch()
        found = await within(asyncio.gather(*(collect(stream) for _ in range(6))))
        assert sorted(found) == [[], [], [], [], [0, 1, 2, 3], [4, 5]]
        assert buffer.stats().waiting_consumers == 0
        assert await collect(buffer.epoch()) == list(range(6))


async def test_a_crowd_that_waits_for_the_first_items() -> None:
    buffer = make(prefetch=2)
    async with buffer, Crew() as crew:
        stream = buffer.epoch()
        tasks = [crew.start(collect(stream)) for _ in range(1500)]
        await turns()
        await buffer.extend(rows(8))
        found = await outcomes(*tasks)
        assert sorted(number for numbers_found in found for number in numbers_found) == list(range(8))


@every_depth
async def test_a_stream_and_plain_calls_side_by_side(depth: int) -> None:
    buffer = make(prefetch=depth, workers=2, transform=slow)
    await buffer.extend(rows(40))
    received: list[tuple[int | None, int]] = []

    async def plain() -> None:
        for _ in range(15):
            batch = await buffer.sample()
            received.append((batch.epoch, batch.number))
            await asyncio.sleep(0)

    async def passes() -> None:
        for _ in range(3):
            epochs = set()
            async for batch in buffer.epoch():
                received.append((batch.epoch, batch.number))
                epochs.add(batch.epoch)
            assert len(epochs) == 1

    async with buffer:
        await within(asyncio.gather(plain(), passes()))
        received += [(batch.epoch, batch.number) async for batch in buffer.epoch()]
    assert [number for _, number in received] == list(range(len(received)))
    assert [epoch for epoch, _ in received] == [number // 10 for number in range(len(received))]


async def test_a_stream_is_not_ended_by_another_consumer_that_gives_up() -> None:
    come, go = Latch(), Latch()

    async def transform(data: Any) -> Any:
        if int(data["number"][0]) == 4:
            come.set()
            await go.reached()
        return data

    buffer = make(transform=transform, workers=2)
    await buffer.extend(rows(8))
    async with buffer, Crew() as crew:
        await buffer.sample()
        # The last batch of the pass is asked for; so a stream that begins now stands for the next pass.
        last = crew.start(buffer.sample())
        await come.reached()
        stream = crew.start(collect(buffer.epoch()))
        await turns()
        last.cancel()
        await turns()
        go.set()
        found = await within(stream)
        rest = [numbers(await buffer.sample()) for _ in range(buffer.stats().queued)]
    # Whichever pass it gets now: not none at all.
    assert found, f"the stream ended without a batch; left behind: {rest}"


async def test_a_pass_does_not_end_early_when_a_consumer_gives_up() -> None:
    come, go = Latch(), Latch()

    async def transform(data: Any) -> Any:
        if int(data["number"][0]) == 4:
            come.set()
            await go.reached()
        return data

    buffer = make(transform=transform, workers=2)
    await buffer.extend(rows(8))
    async with buffer, Crew() as crew:
        stream = buffer.epoch()
        assert numbers(await anext(stream)) == [0, 1, 2, 3]
        first = crew.start(collect(stream))
        await come.reached()
        # The only batch that is left is promised to the first one.
        second = crew.start(collect(stream))
        await turns()
        first.cancel()
        await turns()
        go.set()
        await outcomes(first)
        found = await within(second)
        found += await collect(buffer.epoch())
    assert found[:4] == [4, 5, 6, 7]


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("rounds", [60, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_passes_are_whole_whoever_gives_up(depth: int, rounds: int) -> None:
    """Consumers of passes, cancelled at random: each pass has each item once, in order."""
    buffer = make(prefetch=depth, workers=2, transform=slow, threads=True)
    await buffer.extend(rows(22))
    received: list[tuple[int | None, list[int]]] = []

    async def consume(stream: BatchStream) -> None:
        async for batch in stream:
            received.append((batch.epoch, numbers(batch)))

    async with buffer:
        for _ in range(rounds):
            stream = buffer.epoch()
            tasks = [asyncio.create_task(consume(stream)) for _ in range(3)]
            await wander()
            for task in tasks:
                task.cancel()
            await outcomes(*tasks)
        received += [(batch.epoch, numbers(batch)) async for batch in buffer.epoch()]
        if received[-1][1][-1] != 21:
            received += [(batch.epoch, numbers(batch)) async for batch in buffer.epoch()]
    epochs = [epoch for epoch, _ in received]
    assert epochs == sorted(epochs, key=lambda epoch: epoch or 0)
    for epoch in set(epochs):
        assert [number for of, batch in received if of == epoch for number in batch] == list(range(22))


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one_pass", [False, True])
async def test_finish_ends_those_who_wait(one_pass: bool) -> None:
    buffer = make(min_size=5)
    async with buffer, Crew() as crew:
        await buffer.extend(rows(3))
        tasks = [crew.start(collect(buffer.epoch() if one_pass else aiter(buffer))) for _ in range(3)]
        await turns()
        await buffer.finish()
        assert await outcomes(*tasks) == [[], [], []]
        assert await collect(buffer.epoch() if one_pass else aiter(buffer)) == []


async def test_finish_lets_a_pass_go_on_to_its_end() -> None:
    buffer = make(prefetch=2, transform=slow)
    await buffer.extend(rows(20))
    async with buffer:
        found = []
        async for batch in buffer.epoch():
            found += numbers(batch)
            if batch.number == 1:
                await buffer.finish()
        assert found == list(range(20))
        assert await collect(buffer.epoch()) == list(range(20))


@pytest.mark.parametrize("one_pass", [False, True])
async def test_aclose_ends_those_who_wait(one_pass: bool) -> None:
    buffer = make(min_size=5)
    async with Crew() as crew:
        await buffer.open()
        tasks = [crew.start(collect(buffer.epoch() if one_pass else aiter(buffer))) for _ in range(3)]
        await turns()
        await buffer.aclose()
        assert await outcomes(*tasks) == [[], [], []]
        assert await within(collect(buffer.epoch() if one_pass else aiter(buffer))) == []


async def test_aclose_in_the_middle_of_a_pass_and_another_stream_after_opening_again() -> None:
    buffer = make(prefetch=3, transform=slow, workers=2)
    await buffer.extend(rows(20))
    found = []
    async with buffer:
        async for batch in buffer.epoch():
            found += numbers(batch)
            if batch.number == 1:
                await buffer.aclose()
    assert found == list(range(8))
    async with buffer:
        assert await collect(buffer.epoch()) == list(range(8, 20))


@pytest.mark.parametrize("one_pass", [False, True])
async def test_a_crash_raises_in_those_who_wait_and_who_come(one_pass: bool) -> None:
    buffer = make(min_size=5)
    async with buffer, Crew() as crew:
        tasks = [crew.start(collect(buffer.epoch() if one_pass else aiter(buffer))) for _ in range(3)]
        await turns()
        worker_tasks()[0].cancel()
        assert [type(end) for end in await outcomes(*tasks)] == [BufferFailedError] * 3
        with pytest.raises(BufferFailedError):
            await within(collect(buffer.epoch() if one_pass else aiter(buffer)))


@pytest.mark.parametrize("depth", [0, 3])
async def test_a_batch_that_fails_in_the_middle_of_a_pass(depth: int) -> None:
    failures = [2]

    def transform(data: Any) -> Any:
        if int(data["number"][0]) == 8 and failures[0]:
            failures[0] -= 1
            raise ValueError
        return data

    buffer = make(prefetch=depth, transform=transform, workers=2)
    await buffer.extend(rows(20))
    async with buffer:
        stream = buffer.epoch()
        found: list[int] = []
        errors = 0
        while True:
            try:
                async for batch in stream:
                    found += numbers(batch)
                break
            except PrefetchError:
                errors += 1
        assert found == list(range(20))
        assert errors == 2


async def test_empty_in_the_middle_of_a_pass_ends_it() -> None:
    buffer = make(prefetch=2)
    await buffer.extend(rows(20))
    async with buffer:
        found: list[list[int]] = []
        async for batch in buffer.epoch():
            found.append(numbers(batch))
            if len(found) == 2:
                await buffer.empty()
                await buffer.extend(rows(8, 100))
        assert found == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert await collect(buffer.epoch()) == list(range(100, 108))


async def test_flush_in_the_middle_of_a_pass_leaves_those_rows_out() -> None:
    buffer = make(prefetch=2)
    await buffer.extend(rows(20))
    async with buffer:
        found: list[int] = []
        async for batch in buffer.epoch():
            found += numbers(batch)
            if len(found) == 4:
                assert await buffer.flush() == 2
        assert found == [0, 1, 2, 3, *range(12, 20)]


async def test_skip_of_the_last_batch_of_a_pass_ends_it_for_those_who_wait() -> None:
    stop = Stop()

    def transform(data: Any) -> Any:
        if int(data["number"][0]) == 4:
            stop()
        return data

    buffer = make(transform=transform, workers=2)
    await buffer.extend(rows(8))
    async with buffer, Crew() as crew:
        task = crew.start(collect(buffer.epoch()))
        await stop.come.reached()
        assert await buffer.skip() == 1
        try:
            assert await within(task) == [0, 1, 2, 3]
        finally:
            stop.go.set()
        await until(lambda: buffer.stats().in_flight == 0)


async def test_another_size_takes_its_rows_out_of_the_pass() -> None:
    buffer = make(prefetch=1)
    await buffer.extend(rows(20))
    async with buffer:
        assert numbers(await buffer.sample()) == [0, 1, 2, 3]
        assert numbers(await buffer.sample(3)) == [8, 9, 10]
        assert await collect(buffer.epoch()) == [4, 5, 6, 7, *range(11, 20)]


async def test_a_pass_may_be_ended_by_another_size() -> None:
    buffer = make(prefetch=0)
    await buffer.extend(rows(8))
    async with buffer:
        stream = buffer.epoch()
        assert numbers(await anext(stream)) == [0, 1, 2, 3]
        assert numbers(await buffer.sample(10)) == [4, 5, 6, 7]
        assert await collect(stream) == []
        assert await collect(buffer.epoch()) == list(range(8))


async def test_prefetching_does_not_begin_a_pass_after_another_size_either() -> None:
    buffer = make(drop_last=True, prefetch=1)
    await buffer.extend(rows(14))
    async with buffer:
        assert numbers(await buffer.sample()) == [0, 1, 2, 3]
        assert numbers(await buffer.sample(3)) == [8, 9, 10]
        # Three rows are left, too few for a batch: what comes next is the next pass, and nobody has asked for it yet.
        assert numbers(await buffer.sample()) == [4, 5, 6, 7]
        assert buffer.stats().queued == 0
        await buffer.extend(rows(2, 14))
        assert await collect(buffer.epoch()) == list(range(16))


async def test_the_rest_of_a_pass_that_is_too_small_for_a_batch() -> None:
    buffer = make(drop_last=True)
    await buffer.extend(rows(10))
    async with buffer:
        assert numbers(await buffer.sample()) == [0, 1, 2, 3]
        assert numbers(await buffer.sample(3)) == [4, 5, 6]
        # "What is left of the pass, or the next pass": nothing that makes a batch is left.
        assert await collect(buffer.epoch()) == list(range(8))
