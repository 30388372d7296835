"""Parts of a batch, and several ranks that share one stream of batches."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import (
    Batch,
    BufferClosedError,
    ConsumingSampler,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorStorage,
    TokenBudgetSampler,
    TrajectorySampler,
)
from asyncbuf.testing import assert_same_batch
from tests.helpers import outcomes, rows, seeded, turns, wander, within
from tests.resume_helpers import restored, saved

if TYPE_CHECKING:
    from pathlib import Path


def made(depth: int = 2, batch_size: int = 6, **options: Any) -> ReplayBuffer:
    settings: dict[str, Any] = {"batch_size": batch_size, "prefetch": depth, "generator": seeded(1), **options}
    return ReplayBuffer(settings.pop("storage", None) or TensorStorage(60), **settings)


async def whole(count: int, **options: Any) -> list[Batch]:
    """The batches of a buffer as one consumer gets them."""
    async with made(**options) as buffer:
        await buffer.extend(rows(40))
        return [await buffer.sample() for _ in range(count)]


def check_parts(parts: list[Batch], batch: Batch) -> None:
    """Together they are the batch."""
    assert {part.number for part in parts} == {batch.number}
    assert torch.equal(torch.cat([part.indices for part in parts]), batch.indices)
    for key, leaf in batch.data.items():
        assert torch.equal(torch.cat([part[key] for part in parts]), leaf)
    for key, value in batch.info.items():
        assert torch.equal(torch.cat([part.info[key] for part in parts]), value)


@pytest.mark.parametrize("world", [1, 2, 4, 5, 9])
async def test_parts_are_disjoint_and_complete(world: int) -> None:
    async with made(0, sampler=PrioritizedSampler()) as buffer:
        await buffer.extend(rows(40))
        batch = await buffer.sample()
        parts = [batch.part(rank, world) for rank in range(world)]
        check_parts(parts, batch)
        sizes = [len(part) for part in parts]
        assert sum(sizes) == 6
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)
        await buffer.extend(rows(60))
        await buffer.update_priority(parts[0], torch.ones(len(parts[0])))
        assert buffer.stats().stale_priorities == len(parts[0])


async def test_parts_of_groups_and_slices() -> None:
    def steps(count: int) -> dict[str, torch.Tensor]:
        number = torch.arange(count)
        return {"x": number, "done": number % 5 == 4}

    async with made(0, 8, sampler=SliceSampler(slice_len=2, end_key="done")) as buffer:
        await buffer.extend(steps(40))
        batch = await buffer.sample()
        assert [tuple(batch.part(rank, 3)["x"].shape) for rank in range(3)] == [(2, 2), (1, 2), (1, 2)]
        check_parts([batch.part(rank, 3) for rank in range(3)], batch)
    async with made(0, 20, sampler=TrajectorySampler(5, end_key="done", padded=False)) as buffer:
        await buffer.extend(steps(40))
        batch = await buffer.sample()
        assert batch.lengths is not None
        parts = [batch.part(rank, 3) for rank in range(3)]
        check_parts(parts, batch)
        assert [part.lengths.tolist() for part in parts if part.lengths is not None] == [[5, 5], [5], [5]]
    async with made(0, 20, sampler=TokenBudgetSampler(30, "x", ranks=2)) as buffer:
        await buffer.extend(steps(10))
        await buffer.finish()
        batch = await buffer.sample()
        assert batch.lengths is not None
        assert [len(batch.part(rank, 2)) for rank in range(2)] == batch.lengths.tolist()


async def test_parts_of_other_data() -> None:
    async with made(0, storage=ListStorage(60), collate_fn=list) as buffer:
        await buffer.extend([str(i) for i in range(20)])
        batch = await buffer.sample()
        assert [*batch.part(0, 2).data, *batch.part(1, 2).data] == batch.data
    nested = Batch({"a": (torch.arange(4), np.arange(4))}, torch.arange(4), {}, 7)
    assert nested.part(1, 2)["a"][1].tolist() == [2, 3]
    for wrong in ({"a": torch.zeros(3)}, {"a": torch.tensor(1.0)}, {"a": "text"}):
        with pytest.raises(TypeError, match="part: expected 4 rows along the first axis of a"):
            Batch(wrong, torch.arange(4), {}, 7).part(0, 2)
    odd: list[tuple[Any, Any]] = [(2, 2), (-1, 2), (0, 0), (True, 2), (0, 1.5), ("0", 2)]
    for rank, world in odd:
        with pytest.raises((TypeError, ValueError), match=r"rank|world"):
            nested.part(rank, world)


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("world", [1, 2, 4])
async def test_ranks_share_the_batches_of_one_stream(world: int, depth: int) -> None:
    expected = await whole(20, depth=depth)
    async with made(depth) as buffer:
        await buffer.extend(rows(40))

        async def read(rank: int) -> list[Batch]:
            shard = buffer.shard(rank, world)
            found = []
            for _ in range(20):
                await wander()
                found.append(await shard.sample())
            return found

        parts = await within(asyncio.gather(*map(read, range(world))))
        for of_all, batch in zip(zip(*parts, strict=True), expected, strict=True):
            check_parts(list(of_all), batch)
        stats = buffer.stats()
        assert (stats.delivered, stats.leased) == (20, 0)
        assert stats.ledger.closes


@pytest.mark.parametrize("seed", range(4))
async def test_calls_that_are_cancelled_lose_no_part(seed: int) -> None:
    draws = random.Random(seed)
    expected = await whole(15)
    async with made() as buffer:
        await buffer.extend(rows(40))

        async def read(rank: int) -> list[Batch]:
            shard = buffer.shard(rank, 3)
            found: list[Batch] = []
            while len(found) < 15:
                call = asyncio.create_task(shard.sample())
                await wander()
                if draws.random() < 0.4:
                    call.cancel()
                    await asyncio.wait([call])
                    if call.cancelled():
                        continue
                found.append(await call)
            return found

        parts = await within(asyncio.gather(*map(read, range(3))))
        for of_all, batch in zip(zip(*parts, strict=True), expected, strict=True):
            check_parts(list(of_all), batch)


@pytest.mark.parametrize("way", ["snapshot", "state_dict", "directory", "pickle"])
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3), (1, 4)])
async def test_another_number_of_ranks_after_a_restore(before: int, after: int, way: str, tmp_path: Path) -> None:
    expected = await whole(12)
    async with made() as buffer:
        await buffer.extend(rows(40))
        shards = [buffer.shard(rank, before) for rank in range(before)]
        for shard in shards:
            for _ in range(3):
                await within(shard.sample()) if shard.rank == 0 or before == 1 else None
        # Rank 0 is ahead: what the others have not had comes again.
        what = await saved(way, buffer, tmp_path)
    first = 3 if before == 1 else 0
    async with await restored(way, what, made()) as other:
        readers = [other.shard(rank, after) for rank in range(after)]
        for batch in expected[first:]:
            check_parts(list(await within(asyncio.gather(*(reader.sample() for reader in readers)))), batch)


async def test_a_restore_under_running_ranks() -> None:
    async with made() as buffer:
        await buffer.extend(rows(40))
        state = await buffer.state_dict()
        one, two = buffer.shard(0, 2), buffer.shard(1, 2)
        await one.sample()
        await one.sample()
        await buffer.load_state_dict(state)
        expected = await whole(1)
        check_parts([await within(one.sample()), await within(two.sample())], expected[0])


async def test_a_rank_waits_for_the_slowest_and_says_so() -> None:
    async with made(1) as buffer:
        await buffer.extend(rows(40))
        one, two = buffer.shard(0, 2), buffer.shard(1, 2)
        for _ in range(2):
            await within(one.sample())
        waiting = asyncio.create_task(one.sample())
        await turns()
        assert not waiting.done()
        assert "ranks [1] of 2 have not had batch 0" in buffer.why_blocked()
        assert (await within(two.sample())).number == 0
        assert (await within(waiting)).number == 2
        with pytest.raises(ValueError, match="world: expected 2"):
            buffer.shard(0, 3)
        for _ in range(2):
            await within(two.sample())
        assert repr(buffer.shard(0, 3)) == "<Shard 0 of 3>"


async def test_the_end_of_the_data_reaches_every_rank() -> None:
    buffer = made(0, 4, sampler=ConsumingSampler())
    shards = [buffer.shard(rank, 2) for rank in range(2)]
    with pytest.raises(BufferClosedError):
        _ = [batch async for batch in shards[0]]
    async with buffer:
        await buffer.extend(rows(8))

        async def read(rank: int) -> int:
            return len([batch async for batch in shards[rank]])

        tasks = [asyncio.create_task(read(rank)) for rank in range(2)]
        await turns()
        await buffer.finish()
        assert await within(asyncio.gather(*tasks)) == [2, 2]
        await turns()
        assert len(buffer) == 0


async def test_everybody_is_told_when_the_buffer_closes() -> None:
    buffer = made(0, 4, sampler=ConsumingSampler())
    async with buffer:
        tasks = [asyncio.create_task(buffer.shard(rank, 3).sample()) for rank in range(3)]
        await turns()
    found = await outcomes(*tasks)
    assert [type(each) for each in found] == [BufferClosedError] * 3


async def test_passes_and_odd_calls() -> None:
    async with made(0, 4, sampler=SamplerWithoutReplacement()) as buffer:
        await buffer.extend(rows(8))
        one, two = buffer.shard(0, 2), buffer.shard(1, 2)
        parts = [await shard.sample() for _ in range(2) for shard in (one, two)]
        assert sorted(torch.cat([part.indices for part in parts]).tolist()) == list(range(8))
        assert [part.last for part in parts] == [False, False, True, True]
        for rank, world in ((2, 2), (-1, 2), (0, 0), (0.0, 1), (True, 2)):
            with pytest.raises((TypeError, ValueError), match=r"rank|world"):
                buffer.shard(rank, world)  # type: ignore[arg-type]
    first, second = await whole(1), await whole(1)
    assert_same_batch(first[0], second[0])


@pytest.mark.parametrize("depth", [0, 2])
async def test_a_rank_that_waits_for_another_is_told_of_the_end(depth: int) -> None:
    buffer = made(depth)
    await buffer.extend(rows(40))
    async with buffer:
        shard = buffer.shard(0, 2)
        for _ in range(depth + 1):
            await within(shard.sample())
        waiting = asyncio.create_task(shard.sample())
        await turns()
        assert not waiting.done()
    (found,) = await outcomes(waiting)
    assert isinstance(found, BufferClosedError)
    async with buffer:
        assert (await within(buffer.shard(1, 2).sample())).number == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_a_restore_while_a_rank_waits_for_data(depth: int) -> None:
    async with made(depth, sampler=ConsumingSampler()) as source:
        await source.extend(rows(12, 100))
        state = await source.state_dict()
    async with made(depth, sampler=ConsumingSampler()) as buffer:
        await buffer.extend(rows(6))
        one, two = buffer.shard(0, 2), buffer.shard(1, 2)
        await one.sample()
        if depth == 0:  # a rank may be ahead by one only
            await two.sample()
        waiting = asyncio.create_task(one.sample())
        await turns()
        assert not waiting.done()
        await buffer.load_state_dict(state)
        assert (await within(waiting)).number == 0
        assert [(await within(two.sample())).number for _ in range(2)] == [0, 1]
        assert (await within(one.sample())).number == 1
        await turns()
        assert buffer.stats().leased == 0
        assert buffer.stats().ledger.closes


async def test_ranks_that_do_not_agree_on_their_number() -> None:
    async with made() as buffer:
        await buffer.extend(rows(40))
        old = buffer.shard(0, 2)
        await buffer.shard(1, 3).sample()
        with pytest.raises(ValueError, match="world: expected no rank of 2"):
            await old.sample()
