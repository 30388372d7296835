"""States of buffers over fixed data in which one thing was changed: refused, or taken over whole."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from asyncbuf import CheckpointError, ReplayBuffer, Subset
from asyncbuf.testing import difference
from tests.helpers import seeded, some, within
from tests.snapshot.forged import mutate
from tests.snapshot.test_forged_at_random import loads, told

ITEMS = 20


def made(kind: str) -> ReplayBuffer:
    columns = {"number": torch.arange(2 * ITEMS)}
    data = {
        "columns": {"number": torch.arange(ITEMS)},
        "part": Subset(columns, range(5, 5 + ITEMS)),
        "items": [{"number": number} for number in range(ITEMS)],
    }[kind]
    return ReplayBuffer.from_dataset(data, batch_size=3, generator=seeded())


async def used(kind: str, removed: int) -> ReplayBuffer:
    async with made(kind) as buffer:
        for _ in range(3):
            await buffer.sample()
        if removed:
            await buffer.remove(range(2, 2 + removed))
        await buffer.sample()
    return buffer


@pytest.mark.loops_in_turn
@pytest.mark.parametrize("seed", some(range(16), fast=[0, 1]))
@pytest.mark.parametrize("kind", ["columns", "part", "items"])
async def test_one_change_is_refused_or_taken_over_whole(kind: str, seed: int) -> None:
    chance = random.Random(f"{kind}-{seed}")
    good = [await (await used(kind, removed)).state_dict() for removed in (0, 3)]
    async with await used(kind, chance.choice((0, 2))) as buffer:
        for number in range(20):
            before = await buffer.state_dict()
            forged = copy.deepcopy(chance.choice(good))
            with told(f"{kind}, seed {seed}, change {number}: {mutate(forged, chance)}"):
                if await loads(buffer, forged):
                    await goes_on(buffer, kind)
                    await buffer.load_state_dict(before)
                found = difference(await within(buffer.state_dict()), before)
                assert found is None, f"the live buffer has changed: {found}"


async def goes_on(buffer: ReplayBuffer, kind: str) -> None:
    again = made(kind)
    await again.load_state_dict(await within(buffer.state_dict()))
    for _ in range(8):
        await within(buffer.sample())
    await buffer.remove([0, 1, 5])
    await buffer.restart_epoch()
    seen = [number for batch in [b async for b in buffer.epoch()] for number in batch.indices.tolist()]
    assert sorted(seen) == sorted(set(seen))
    assert len(seen) == len(buffer)


async def test_a_good_state_is_taken_over() -> None:
    for kind in ("columns", "part", "items"):
        buffer = await used(kind, 3)
        async with made(kind) as other:
            await other.load_state_dict(await buffer.state_dict())
            await goes_on(other, kind)
            with pytest.raises(CheckpointError):
                await other.load_state_dict({**await buffer.state_dict(), "writer": {}})
