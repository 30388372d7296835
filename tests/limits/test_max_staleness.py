"""Writers begin no more than can be trained on before it is too old: the capacity rule of AReaL."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncbuf import (
    BufferClosedError,
    ConsumingSampler,
    Counters,
    GroupSampler,
    MaxStaleness,
    MinSize,
    Queue,
    ReplayBuffer,
    Staleness,
    TensorStorage,
)
from tests.helpers import Crew, numbers, outcomes, rows, seeded, turns, within


def made(max_age: int = 1, **settings: Any) -> ReplayBuffer:
    arguments: dict[str, Any] = {
        "sampler": ConsumingSampler(),
        "limiter": MaxStaleness(max_age),
        "staleness": Staleness(max_age),
        "batch_size": 4,
        "generator": seeded(),
    }
    return ReplayBuffer(TensorStorage(64), **{**arguments, **settings})


def test_the_rule() -> None:
    limiter = MaxStaleness(2)
    empty = Counters(0, 100, 0, 0, 0, 0, batch_size=4)
    assert limiter.may_write(empty, 12) is True
    for filled in ({"write_count": 10}, {"admitted": 10}, {"write_count": 4, "admitted": 6}):
        assert limiter.may_write(empty._replace(**filled), 2) is True
        held = limiter.may_write(empty._replace(**filled), 3)
        assert not held
        assert "10 items are written or about to be" in str(held)
        assert "of at most 12, which is (max_age 2 + version 0 + 1) batches of 4, and 3 more are to come" in str(held)
        assert limiter.may_write(empty._replace(**filled, version=1), 6) is True
        assert limiter.may_write(empty._replace(**filled, given_up=1), 3) is True
    with pytest.raises(ValueError, match=r"at most 12 items in one write, 3 batch\(es\) of 4, found 13: write them in"):
        limiter.may_write(empty._replace(version=7), 13)
    assert repr(limiter & Queue(8)) == "MaxStaleness(2) & Queue(8)"


def test_what_it_needs() -> None:
    with pytest.raises(ValueError, match=r"staleness: expected one.*because MaxStaleness\(1\) counts versions"):
        made(staleness=None)
    with pytest.raises(ValueError, match="staleness: expected one"):
        made(staleness=None, limiter=MinSize(2) & MaxStaleness(1))
    with pytest.raises(ValueError, match=r"batch_size: expected one, because MaxStaleness\(1\) counts batches"):
        made(batch_size=None)
    made(staleness=Staleness())


async def test_a_version_makes_room() -> None:
    async with made(1) as buffer, Crew() as crew:
        await buffer.extend(rows(8))
        writer = crew.start(buffer.extend(rows(2, 8)))
        await turns()
        assert "8 items are written or about to be" in buffer.why_blocked()
        assert "(max_age 1 + version 0 + 1) batches of 4" in buffer.why_blocked()
        assert numbers(await buffer.sample()) == [0, 1, 2, 3]
        await turns()
        assert not writer.done()  # a batch makes none: its version does
        await buffer.advance_version()
        await within(writer)
        assert len(buffer) == 6
        with pytest.raises(ValueError, match="at most 8 items in one write"):
            await buffer.extend(rows(9))


async def test_what_left_untrained_makes_room() -> None:
    async with made(1) as buffer, Crew() as crew:
        await buffer.extend(rows(8))
        writer = crew.start(buffer.extend(rows(3, 8)))
        await turns()
        await buffer.remove(torch.tensor([0, 5]))
        await turns()
        assert not writer.done()
        await buffer.remove(torch.tensor([6]))
        await within(writer)
        second = crew.start(buffer.extend(rows(8)))
        await turns()
        await buffer.empty()
        await within(second)
        third = crew.start(buffer.extend(rows(4)))
        await turns()
        assert not third.done()
        await buffer.advance_version(2)  # all eight are too old, and the bound is higher
        await within(third)
        assert buffer.stats().ledger.evicted == {"removed": 3, "emptied": 8, "stale": 8}


async def test_groups_that_are_filtered_make_room() -> None:
    sampler = GroupSampler("group", 2, filter=lambda group: group["reward"].std() > 0, filter_keys="reward")
    async with made(0, sampler=sampler) as buffer:
        for group in range(20):
            same = torch.ones(2)
            await within(buffer.extend({"group": torch.full((2,), group), "reward": same}))
        assert len(buffer) == 0
        assert buffer.stats().ledger.evicted == {"let_go": 40}
        for group in (20, 21):
            await within(buffer.extend({"group": torch.full((2,), group), "reward": torch.tensor([0.0, 1.0])}))
        assert sorted((await within(buffer.sample()))["group"].tolist()) == [[20, 20], [21, 21]]


async def test_it_ends_with_the_buffer() -> None:
    async with made(0) as buffer, Crew() as crew:
        await buffer.extend(rows(4))
        first, second = crew.start(buffer.extend(rows(1))), crew.start(buffer.extend(rows(2)))
        await turns()
        first.cancel()
        await turns()
        assert buffer.stats().waiting_writers == 1
        await buffer.finish()
        (_, error) = await outcomes(first, second)
        assert isinstance(error, BufferClosedError)


async def test_the_limit_goes_on_after_a_restore() -> None:
    source = made(1)
    async with source:
        await source.extend(rows(8))
        await source.sample()
        handed_over = await source.state_dict()
        await source.advance_version()
        await source.extend(rows(3, 8))
        later = await source.state_dict()
    for state, room in ((handed_over, 0), (later, 1)):
        target = made(1)
        await target.load_state_dict(state)
        async with target, Crew() as crew:
            if room:
                await within(target.extend(rows(room)))
            writer = crew.start(target.extend(rows(1)))
            await turns()
            assert not writer.done()
            await target.load_state_dict(later)  # those that wait are asked again
            await within(writer)


@pytest.mark.parametrize("is_versioned", [False, True])
async def test_a_run_that_had_another_limiter_goes_on(is_versioned: bool) -> None:
    """What it had trained on before does not count against the rule, however much that was."""
    source = made(limiter=MinSize(1), staleness=Staleness() if is_versioned else None)
    async with source:
        for start in range(0, 80, 8):
            await source.extend(rows(8, start))
            await source.sample(8)
        await source.extend(rows(6))
        if is_versioned:
            await source.advance_version(3)
        state = await source.state_dict()
    target = made(2, staleness=Staleness())
    await target.load_state_dict(state)
    async with target, Crew() as crew:
        await within(target.extend(rows(6)))  # of 12, six are stored
        writer = crew.start(target.extend(rows(1)))
        await turns()
        assert not writer.done()
        again = made(2, staleness=Staleness())
        await again.load_state_dict(await target.state_dict())
        other = made(2, staleness=Staleness(), batch_size=2)
        await other.load_state_dict(await target.state_dict(), elastic=True)
        for buffer in (again, other):
            late = crew.start(buffer.extend(rows(1)))
            await turns()
            assert not late.done()
        assert "12 items" in again.why_blocked() or is_versioned
        await target.advance_version()
        await within(writer)
