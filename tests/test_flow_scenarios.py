"""What stacks for asynchronous RL are reported to get wrong, one scenario each: it ends at once, and well.

Others are where they belong: a collector that died, a save beside a full queue, and limits after a restore in
``limits/test_stalls.py``; stragglers of a group in ``ingest/test_reserved_groups.py``; filtered groups that pin a
limit in ``limits/test_max_staleness.py``; prompts and items of one moment in ``test_prompts.py``.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from asyncbuf import (
    BufferClosedError,
    ConsumingSampler,
    ItemsLostWarning,
    MaxStaleness,
    Queue,
    ReplayBuffer,
    SamplerWithoutReplacement,
    Staleness,
    TensorStorage,
)
from tests.helpers import rows, seeded, turns, within

SECONDS = 2.0


def made(capacity: int = 64, batch_size: int = 8, **options: Any) -> ReplayBuffer:
    settings: dict[str, Any] = {"sampler": ConsumingSampler(), "generator": seeded(), **options}
    return ReplayBuffer(TensorStorage(capacity), batch_size=batch_size, **settings)


async def test_one_item_is_missing_and_nobody_will_write_it() -> None:
    """Elsewhere: a call without a timeout stood 29 hours at 127 of 128 items."""
    async with made(batch_size=16) as buffer:

        async def collect() -> None:
            await buffer.extend(rows(15))

        buffer.watch(asyncio.create_task(collect()), "producer")
        with pytest.raises(BufferClosedError):
            await within(buffer.sample(), SECONDS)
        assert len(await within(buffer.sample(15), SECONDS)) == 15


async def test_a_full_batch_is_there_after_a_resume() -> None:
    """Elsewhere: the resumed run waited for a start signal that never came."""
    async with made(prefetch=2) as buffer:
        await buffer.extend(rows(8))
        state = await buffer.state_dict()
    async with made(prefetch=2) as other:
        waiting = asyncio.create_task(other.sample())
        await turns()
        await other.load_state_dict(state)
        assert (await within(waiting, SECONDS)).number == 0


async def test_a_resume_at_the_very_end_of_an_epoch() -> None:
    """Elsewhere: it trained nothing, and ended well."""
    options: dict[str, Any] = {"sampler": SamplerWithoutReplacement(), "prefetch": 2}
    async with made(**options) as buffer:
        await buffer.extend(rows(16))
        assert len([batch async for batch in buffer.epoch()]) == 2
        state = await buffer.state_dict()
    options["sampler"] = SamplerWithoutReplacement()
    async with made(**options) as other:
        await other.load_state_dict(state)
        found = [batch async for batch in other.epoch()]
        assert [batch.epoch for batch in found] == [1, 1]


async def test_the_bound_on_staleness_is_the_same_after_a_recovery() -> None:
    """Elsewhere: it grew, and tasks that were done were counted twice, so that admission stayed shut."""

    def limited() -> ReplayBuffer:
        return made(staleness=Staleness(1), limiter=MaxStaleness(1))

    async with limited() as buffer:
        for _ in range(3):
            await within(buffer.extend(rows(8)), SECONDS)
            await within(buffer.sample(), SECONDS)
            await buffer.advance_version()
        state = await buffer.state_dict()
    for _ in range(3):  # restored again and again
        async with limited() as other:
            await other.load_state_dict(state)
            for _ in range(2):  # (1 + 3 + 1) * 8 less 24 written
                await within(other.extend(rows(8)), SECONDS)
            state = await other.state_dict()
            waiting = asyncio.create_task(other.extend(rows(8)))
            await turns()
            assert not waiting.done()
            assert (await within(other.sample(), SECONDS)).info["age"].max() <= 1
            await other.advance_version()
            await within(waiting, SECONDS)
            await within(other.sample(), SECONDS)
            state = await other.state_dict()
            assert other.stats().ledger.closes
            # As at the beginning of the round: one batch is ahead.
            await within(other.sample(), SECONDS)
            await other.advance_version()
            await other.advance_version()
            state = await other.state_dict()


async def test_items_that_are_stale_at_arrival_starve_nobody() -> None:
    """Elsewhere: they were evicted before anyone could take them, again and again."""
    again: asyncio.Queue[int] = asyncio.Queue()

    def evicted(ids: list[int]) -> None:
        for id in ids:
            again.put_nowait(id)

    async with made(staleness=Staleness(0, id_key="id", on_evict=evicted), batch_size=4) as buffer:

        async def roll_out(id: int) -> None:
            version = buffer.version
            await turns(1 + 5 * (id % 2))  # half of them are slow
            await buffer.add({"id": torch.tensor(id)}, version=version)

        for id in range(8):
            again.put_nowait(id)
        trained: list[int] = []

        async def actors() -> None:
            while True:
                await roll_out(await again.get())

        tasks = [buffer.watch(asyncio.create_task(actors())) for _ in range(4)]
        while len(trained) < 8:
            batch = await within(buffer.sample(), SECONDS)
            assert batch.info["age"].tolist() == [0] * 4
            trained += batch["id"].tolist()
            await buffer.advance_version()
        assert sorted(trained) == list(range(8))
        for task in tasks:
            buffer.unwatch(task)
            task.cancel()
        await asyncio.wait(tasks)
        assert buffer.stats().ledger.closes


async def test_the_only_consumer_gives_a_batch_back_to_a_full_queue() -> None:
    """Elsewhere: that deadlocked."""
    async with made(8, 4, limiter=Queue(8)) as buffer:
        await buffer.extend(rows(8))
        waiting = asyncio.create_task(buffer.extend(rows(4, 8)))
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await within(_fail(buffer), SECONDS)
        assert not waiting.done()
        assert (await within(buffer.sample(), SECONDS)).number == 0
        await within(waiting, SECONDS)


async def _fail(buffer: ReplayBuffer) -> None:
    async with buffer.lease():
        raise ZeroDivisionError


async def test_nothing_is_lost_in_silence() -> None:
    """Elsewhere: a bounded queue evicted, and said nothing."""
    async with made(8, 4) as buffer:
        await buffer.extend(rows(8))
        with pytest.warns(ItemsLostWarning, match="Queue"):
            await buffer.extend(rows(2, 8))
        assert buffer.stats().ledger.evicted == {"overwritten": 2}


async def test_a_rollout_of_three_versions_counts_by_its_oldest() -> None:
    """Elsewhere: nobody noticed that requeued rollouts had tokens of several versions."""
    async with made(staleness=Staleness(1, version_key="version"), batch_size=2) as buffer:
        await buffer.advance_version(3)
        await buffer.extend({"version": torch.tensor([[1, 2, 3], [2, 2, 3], [3, 3, 3]])})
        batch = await within(buffer.sample(), SECONDS)
        assert batch["version"].tolist() == [[2, 2, 3], [3, 3, 3]]
        assert batch.info["version"].tolist() == [2, 3]
        assert batch.info["age"].tolist() == [1, 0]


async def test_failed_work_gives_its_room_back() -> None:
    """Elsewhere: reservations of members that had failed leaked, until nothing was admitted any more."""
    async with made(16, 4, limiter=Queue(8)) as buffer:
        for _ in range(20):
            members = await within(buffer.reserve_group("prompt", 4, items=2), SECONDS)

            async def fail(slot: Any) -> None:
                async with slot:
                    raise ZeroDivisionError

            await asyncio.gather(*map(fail, members), return_exceptions=True)
        async with buffer.reserve("prompt", items=8) as slot:
            assert await within(slot.commit(rows(8)), SECONDS)
        assert buffer.stats().ledger.closes
