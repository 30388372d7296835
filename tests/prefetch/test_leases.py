"""Batches on lease: acknowledged at the end of the block, or first in line again."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import (
    AsyncBufError,
    Batch,
    BufferClosedError,
    ConsumingSampler,
    PrefetchError,
    Queue,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorStorage,
)
from asyncbuf.testing import assert_same_batch
from tests.helpers import fingerprint, rows, seeded, take, turns, until, wander, within
from tests.resume_helpers import check_stream, make, restored, saved, write
from tests.virtual_clock import pass_by, run_virtually

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable
    from pathlib import Path

WAYS = ("snapshot", "state_dict", "directory", "pickle")


def made(depth: int = 2, **options: Any) -> ReplayBuffer:
    settings: dict[str, Any] = {"batch_size": 3, "prefetch": depth, "generator": seeded(1), **options}
    return ReplayBuffer(TensorStorage(30), **settings)


async def leased(buffer: ReplayBuffer, **options: Any) -> Batch:
    async with buffer.lease(**options) as batch:
        return batch


async def refused(buffer: ReplayBuffer, meanwhile: Callable[[], Awaitable[object]] = turns) -> Batch:
    """Give a batch back."""

    async def fail() -> None:
        async with buffer.lease() as batch:
            batches.append(batch)
            await meanwhile()
            raise ZeroDivisionError

    batches: list[Batch] = []
    with pytest.raises(ZeroDivisionError):
        await fail()
    return batches[0]


def closes(buffer: ReplayBuffer) -> bool:
    stats = buffer.stats()
    return stats.ledger.closes and stats.drawn == stats.delivered + stats.leased + stats.queued + stats.dropped


@pytest.mark.parametrize("transform", [None, lambda data: data])
@pytest.mark.parametrize("depth", [0, 1, 3])
async def test_the_stream_is_that_of_sample(depth: int, transform: Any) -> None:
    streams: list[list[Hashable]] = []
    for is_leased in (False, True):
        async with made(depth, transform=transform) as buffer:
            await buffer.extend(rows(20))
            found = []
            for step in range(12):
                found.append(fingerprint(await (leased(buffer) if is_leased else buffer.sample())))
                await buffer.extend(rows(1, 100 + step))
            streams.append(found)
            assert buffer.stats().delivered == 12
            assert closes(buffer)
    assert streams[0] == streams[1]


@pytest.mark.parametrize("depth", [0, 1, 3])
async def test_a_batch_that_is_given_back_is_first_in_line(depth: int) -> None:
    async with made(depth) as buffer:
        await buffer.extend(rows(20))
        first = await leased(buffer)
        again = await refused(buffer)
        assert closes(buffer)
        assert buffer.stats().delivered == 1
        assert await buffer.sample() is again
        assert (await leased(buffer)).number == again.number + 1 == first.number + 2
        assert buffer.stats().drawn == 3 + depth
        assert closes(buffer)


@pytest.mark.parametrize("depth", [0, 2])
async def test_what_ends_a_block_early_gives_the_batch_back(depth: int) -> None:
    async with made(depth) as buffer:
        await buffer.extend(rows(20))

        async def hang() -> None:
            async with buffer.lease():
                await asyncio.Event().wait()

        task = asyncio.create_task(hang())
        await until(lambda: buffer.stats().leased == 1)
        assert closes(buffer)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            async with buffer.lease(timeout=0) as batch:
                await asyncio.Event().wait()
        assert batch.number == 0
        assert buffer.stats().leased == 0
        assert (await leased(buffer, timeout=30)).number == 0


@pytest.mark.parametrize("depth", [0, 2])
async def test_a_consumer_that_waits_for_data_gets_what_is_given_back(depth: int) -> None:
    buffer = made(depth, sampler=ConsumingSampler())
    await buffer.extend(rows(3))
    async with buffer:
        waiting: list[asyncio.Task[Batch]] = []

        async def wait() -> None:
            waiting.extend(asyncio.create_task(buffer.sample()) for _ in range(2))
            await turns()
            assert not any(task.done() for task in waiting)

        batch = await refused(buffer, wait)
        assert await within(waiting[0]) is batch
        await turns()
        assert not waiting[1].done()
        await buffer.extend(rows(3))
        assert (await within(waiting[1])).number == 1
        assert closes(buffer)


@pytest.mark.parametrize("comes_back", [False, True])
async def test_nobody_is_told_of_the_end_while_a_batch_may_come_back(comes_back: bool) -> None:
    async with made(0, sampler=ConsumingSampler()) as buffer:
        await buffer.extend(rows(3))
        lease = buffer.lease()
        batch = await lease.__aenter__()
        waiting = asyncio.create_task(buffer.sample())
        await buffer.finish()
        await turns()
        assert not waiting.done()
        await lease.__aexit__(*((ValueError, ValueError(), None) if comes_back else (None, None, None)))
        if comes_back:
            assert await within(waiting) is batch
        else:
            with pytest.raises(BufferClosedError):
                await within(waiting)


async def test_the_last_batch_of_a_pass_is_given_back() -> None:
    sampler = SamplerWithoutReplacement()
    buffer = ReplayBuffer(TensorStorage(6), sampler=sampler, batch_size=3, generator=seeded())
    await buffer.extend(rows(6))
    async with buffer:
        first = await buffer.sample()
        batch = await refused(buffer)
        assert batch.last
        rest = [batch.number async for batch in buffer.epoch()]
        assert [first.number, *rest] == [0, 1]


async def test_several_that_are_given_back_come_in_their_order() -> None:
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        async with made(2) as buffer:
            await buffer.extend(rows(20))
            leases = [buffer.lease() for _ in range(3)]
            batches = [await lease.__aenter__() for lease in leases]
            error = ValueError("no")
            for which in order:
                await leases[which].__aexit__(ValueError, error, None)
            assert [await buffer.sample() for _ in range(3)] == batches
            assert (await buffer.sample()).number == 3
            assert closes(buffer)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["passes", "stateful", "list", "consuming", "joined"])
@pytest.mark.parametrize("depth", [0, 2])
async def test_a_restore_hands_out_what_was_not_acknowledged(depth: int, name: str, way: str, tmp_path: Path) -> None:
    async with await make(name, depth=depth) as buffer:
        for step in range(3):
            await write(name, buffer, step, await buffer.sample())
        async with buffer.lease() as one, buffer.lease() as two, buffer.lease(2) as small:
            expected = [one, two]
            what = await saved(way, buffer, tmp_path)
            assert buffer.stats().leased == 3
        expected += [await buffer.sample() for _ in range(4)]
    async with await restored(way, what, await make(name, depth=depth, items=1, seed=9)) as other:
        assert_same_batch(await within(other.sample(2)), small)
        await check_stream(other, expected)
        assert other.stats().leased == 0


async def test_rows_leave_when_the_batch_is_acknowledged() -> None:
    buffer = ReplayBuffer(TensorStorage(12), sampler=ConsumingSampler(), batch_size=3, generator=seeded())
    await buffer.extend(rows(12))
    async with buffer:
        again = await refused(buffer)
        assert len(buffer) == 12
        async with buffer.lease() as batch:
            assert batch is again
            await turns()
            assert len(buffer) == 12
        await turns()
        assert len(buffer) == 9
        async with buffer.lease() as late:
            await buffer.aclose()
        assert buffer.stats().delivered == 2
        async with buffer:
            await turns()
            assert len(buffer) == 6
            assert not set((await buffer.sample()).indices.tolist()) & set(late.indices.tolist())


async def test_what_is_loaded_meanwhile_knows_nothing_of_the_lease() -> None:
    async with made(1) as buffer:
        await buffer.extend(rows(20))
        state = await buffer.state_dict()
        for fails in (False, True):
            try:
                async with buffer.lease():
                    await buffer.load_state_dict(state)
                    expected = buffer.stats()
                    if fails:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                pass
            await turns()
            assert buffer.stats()[:9] == expected[:9]
            assert buffer.stats().leased == 0
        assert (await buffer.sample()).number == 0


async def test_the_buffer_is_closed_and_opened_again_meanwhile() -> None:
    buffer = made(2)
    await buffer.extend(rows(20))
    async with buffer:
        batch = await refused(buffer, buffer.aclose)
    async with buffer:
        assert await buffer.sample() is batch


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_the_event_loop_ends_meanwhile(is_cancelled: bool) -> None:
    buffer = made(2)
    kept: list[Any] = []

    async def hold() -> None:
        async with buffer.lease():
            await asyncio.Event().wait()

    async def leave() -> None:
        await buffer.open()
        await buffer.extend(rows(20))
        if is_cancelled:
            kept.append(asyncio.create_task(hold()))
        else:  # nobody ever gets to the end of the block
            kept.append(buffer.lease())
            await kept[0].__aenter__()
        await until(lambda: buffer.stats().leased == 1)

    async def go_on() -> int:
        async with buffer:
            return (await buffer.sample()).number

    if is_cancelled:
        asyncio.run(leave())
    else:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(leave())
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()
    assert asyncio.run(go_on()) == 0


async def test_a_failed_batch_stays_as_with_sample() -> None:
    fails = [True]

    def transform(data: Any) -> Any:
        if fails:
            fails.pop()
            raise ZeroDivisionError
        return data

    async with made(1, transform=transform) as buffer:
        await buffer.extend(rows(20))
        with pytest.raises(PrefetchError):
            await leased(buffer)
        assert buffer.stats().leased == 0
        assert (await leased(buffer)).number == 0


async def test_flush_and_empty_leave_it_alone() -> None:
    async def forget() -> None:
        assert await buffer.flush() == 2
        await buffer.empty()

    async with made(2) as buffer:
        await buffer.extend(rows(20))
        batch = await refused(buffer, forget)
        assert await buffer.sample() is batch
        assert closes(buffer)


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("seed", range(4))
async def test_every_batch_is_acknowledged_once_whoever_fails(depth: int, seed: int, tmp_path: Path) -> None:
    """Consumers that fail, are cancelled and run out of time, beside writers and saves: no hole and no repeat."""
    draws = random.Random(100 * depth + seed)
    acknowledged: list[Batch] = []
    async with made(depth, transform=[_slow], workers=3) as buffer:
        await buffer.extend(rows(20))

        async def consume() -> None:
            timeout = draws.choice((None, None, 0))
            async with buffer.lease(timeout=timeout) as batch:
                await wander()
                if draws.random() < 0.2:
                    raise ZeroDivisionError
            acknowledged.append(batch)

        tasks: list[asyncio.Task[None]] = []
        for step in range(150):
            tasks.append(asyncio.create_task(consume()))
            await wander()
            if draws.random() < 0.2:
                draws.choice(tasks).cancel()
            if step % 50 == 25:
                await within(buffer.save(tmp_path / str(step)))
                await buffer.extend(rows(2, 100 + step))
        await within(asyncio.wait(tasks))
        for task in tasks:
            assert task.cancelled() or isinstance(task.exception(), (ZeroDivisionError, TimeoutError, type(None)))
        stats = buffer.stats()
        assert stats.leased == 0
        assert closes(buffer)
        assert stats.delivered == len(acknowledged)
        rest = [await within(buffer.sample()) for _ in range(stats.queued)]
        found = sorted(batch.number for batch in [*acknowledged, *rest])
        assert found == list(range(len(found)))


async def _slow(data: Any) -> Any:
    await wander()
    return data


async def test_wrong_calls() -> None:
    async with made(0) as buffer:
        await buffer.extend(rows(20))
        lease = buffer.lease()
        async with lease:
            pass
        with pytest.raises(AsyncBufError, match="expected a new one for each block"):
            await lease.__aenter__()
        twice = buffer.lease()
        found = await asyncio.gather(twice.__aenter__(), twice.__aenter__(), return_exceptions=True)
        assert [isinstance(each, AsyncBufError) for each in found] == [False, True]
        await twice.__aexit__(None, None, None)
        for timeout in (-1, "1", True, float("nan")):
            with pytest.raises((TypeError, ValueError), match="timeout"):
                buffer.lease(timeout=timeout)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="batch_size"):
            await leased(buffer, batch_size="3")


async def test_a_lease_within_a_transform_of_the_same_buffer() -> None:
    errors: list[BaseException] = []

    async def transform(data: Any) -> Any:
        try:
            await leased(buffer)
        except AsyncBufError as error:
            errors.append(error)
        return data

    buffer = made(0, transform=transform)
    async with buffer:
        await buffer.extend(rows(20))
        await within(buffer.sample())
    assert "lease" in str(errors[0])


async def test_a_stream_after_a_batch_was_given_back() -> None:
    """A batch that was given back leaves the stream as it is."""
    for name in ("weights", "mixture", "tensordict"):
        streams = []
        for is_leased in (False, True):
            async with await make(name, depth=1) as buffer:
                if is_leased:
                    await refused(buffer)
                streams.append(await take(buffer, 5))
        assert streams[0] == streams[1]


def test_memory_of_a_batch_is_not_used_again_while_it_is_out() -> None:
    async def run() -> None:
        async with made(0) as buffer:
            await buffer.extend(rows(20))
            async with buffer.lease() as batch:
                pass
            kept = {key: value.clone() for key, value in batch.data.items()}
            for _ in range(20):
                await buffer.sample()
            assert all(torch.equal(value, kept[key]) for key, value in batch.data.items())

    asyncio.run(run())


async def test_all_snapshots_of_a_freeze_have_the_batch(tmp_path: Path) -> None:
    buffer = made(0, sampler=ConsumingSampler())
    await buffer.extend(rows(6))
    async with buffer:
        lease = buffer.lease()
        batch = await lease.__aenter__()
        async with buffer.frozen():
            before = await buffer.state_dict()
            await lease.__aexit__(None, None, None)
            assert buffer.stats().leased == 1
            after = await buffer.state_dict()
        await turns()
        assert (buffer.stats().leased, buffer.stats().delivered, len(buffer)) == (0, 1, 3)
        assert closes(buffer)
    for state in (before, after):
        other = made(0, sampler=ConsumingSampler())
        await other.load_state_dict(state)
        async with other:
            assert_same_batch(await within(other.sample()), batch)
            await turns()
            assert len(other) == 3


def test_who_waits_for_the_end_of_a_lease_is_not_told_that_nobody_goes_on() -> None:
    async def program() -> None:
        buffer = made(0, sampler=ConsumingSampler(), limiter=Queue(3))
        await buffer.extend(rows(3))
        async with buffer:
            async with buffer.lease():
                waiting = [asyncio.create_task(buffer.sample()), asyncio.create_task(buffer.extend(rows(3, 3)))]
                await pass_by(5.0)
                assert not any(task.done() for task in waiting)
            await asyncio.gather(*waiting)

    run_virtually(program())
