"""Passes over slices."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from asyncbuf import ReplayBuffer, SliceSamplerWithoutReplacement, TensorStorage
from asyncbuf.errors import CheckpointCorruptError, CheckpointMismatchError
from tests.helpers import seeded, within
from tests.sampler.test_slices import steps

END: dict[str, Any] = {"end_key": "done"}


def made(capacity: int = 100, batch_size: int = 8, **arguments: Any) -> ReplayBuffer:
    sampler = SliceSamplerWithoutReplacement(**{"slice_len": 4, **END, **arguments})
    return ReplayBuffer(TensorStorage(capacity), sampler=sampler, batch_size=batch_size, generator=seeded())


async def passed(buffer: ReplayBuffer, passes: int = 1) -> list[list[tuple[int, ...]]]:
    """The slices of some passes, as the numbers of their items without padding."""
    found = []
    for _ in range(passes):
        slices: list[tuple[int, ...]] = []
        async for batch in buffer.epoch():
            mask = batch.info.get("mask", torch.ones(batch.indices.shape, dtype=torch.bool))
            slices += [tuple(line[there].tolist()) for line, there in zip(batch["number"], mask, strict=True)]
        found.append(slices)
    return found


async def test_a_pass_has_each_slice_once() -> None:
    buffer = made()
    await buffer.extend(steps(35))
    expected = {tuple(range(start, start + 4)) for start in (0, 4, 10, 14, 20, 24, 30)}
    async with buffer:
        passes = await passed(buffer, 3)
    assert [set(slices) for slices in passes] == [expected] * 3
    assert [len(slices) for slices in passes] == [7] * 3
    assert passes[0] != passes[1]


async def test_short_ends_are_padded() -> None:
    buffer = made(strict_length=False)
    await buffer.extend(steps(25))
    async with buffer:
        (slices,) = await passed(buffer)
    assert Counter(number for line in slices for number in line) == Counter(range(25))
    assert {len(line) for line in slices} == {1, 2, 4}


async def test_in_the_order_of_the_rows() -> None:
    buffer = made(shuffle=False)
    await buffer.extend(steps(30))
    async with buffer:
        (slices,) = await passed(buffer)
    assert [line[0] for line in slices] == [0, 4, 10, 14, 20, 24]


async def test_the_last_batch_is_shorter_or_left_out() -> None:
    for drop_last, lengths in ((False, [3, 3, 1]), (True, [3, 3])):
        buffer = made(batch_size=12, drop_last=drop_last)
        await buffer.extend(steps(35))
        async with buffer:
            batches = [batch async for batch in buffer.epoch()]
        assert [len(batch["number"]) for batch in batches] == lengths
        assert [batch.last for batch in batches] == [False] * (len(lengths) - 1) + [True]
        assert {batch.epoch for batch in batches} == {0}


async def test_interleaved_environments_around_the_ring() -> None:
    buffer = made(trajectory_key="env", capacity=60)
    await buffer.extend(steps(200, environments=3))
    async with buffer:
        (slices,) = await passed(buffer)
    assert all(line[0] // 3 % 10 in (0, 4) for line in slices)
    assert all(line == tuple(range(line[0], line[0] + 12, 3)) for line in slices)
    every = Counter(number for line in slices for number in line)
    assert set(every.values()) == {1}
    assert len(every) >= 36  # of each environment, at most three items at the edge and two of each ten are left out
    assert min(every) >= 140


async def test_burn_in_overlaps_and_nothing_else_does() -> None:
    buffer = made(burn_in=2, batch_size=6)
    await buffer.extend(steps(11, length=11))
    async with buffer:
        (slices,) = await passed(buffer)
    assert sorted(slices) == [(0, 1, 2, 3, 4, 5), (4, 5, 6, 7, 8, 9)]
    with pytest.raises(ValueError, match="burn_in: expected 0 without strict_length"):
        made(burn_in=2, strict_length=False)


async def test_slices_that_leave_during_a_pass() -> None:
    buffer = made(capacity=40, batch_size=4)
    await buffer.extend(steps(40))
    async with buffer:
        first = await buffer.sample()
        await buffer.extend(steps(10, 40))  # over the slices that begin at 0 and 4
        await buffer.remove([35])  # of the slice that begins at 34
        (slices,) = await passed(buffer)
    begun = first["number"][0, 0].item()
    assert {line[0] for line in slices} == {10, 14, 20, 24, 30} - {begun}


async def test_a_pass_of_which_nothing_is_left_ends() -> None:
    buffer = made(capacity=40, batch_size=4)
    await buffer.extend(steps(10))
    async with buffer:
        first = await buffer.sample()
        assert (first.epoch, first.last) == (0, False)
        await buffer.remove(torch.arange(10))
        await buffer.extend(steps(10))
        assert (await within(buffer.sample())).epoch == 1


async def test_drop_last_waits_for_a_batch() -> None:
    buffer = made(drop_last=True, batch_size=12)
    async with buffer:
        await buffer.extend(steps(10))
        with pytest.raises(TimeoutError):
            await within(buffer.sample(), 0.01)
        assert "2 of 3 slices of 4 items" in buffer.why_blocked()
    with pytest.raises(ValueError, match="at most the capacity 100, because of drop_last"):
        made(drop_last=True, batch_size=104)


async def test_states_that_are_none() -> None:
    buffer = made()
    await buffer.extend(steps(35))
    async with buffer:
        await buffer.sample()
        state = await buffer.state_dict()
    other = made()
    with pytest.raises(CheckpointMismatchError, match="drop_last"):
        await made(drop_last=True).load_state_dict(state)
    state["sampler"]["pass"]["rows"][0] = 1  # where no slice begins
    state["sampler"]["pass"]["position"] = 0
    with pytest.raises(CheckpointCorruptError, match="valid rows"):
        await other.load_state_dict(state)
    assert len(other) == 0
