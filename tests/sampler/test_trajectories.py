"""Whole trajectories."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from asyncbuf import ReplayBuffer, TensorStorage, TrajectorySampler
from asyncbuf.errors import CheckpointMismatchError
from tests.helpers import seeded, within
from tests.sampler.chi_square import deviation
from tests.sampler.test_slices import steps


def made(capacity: int = 100, batch_size: int = 40, **arguments: Any) -> ReplayBuffer:
    sampler = TrajectorySampler(**{"max_len": 10, "end_key": "done", **arguments})
    return ReplayBuffer(TensorStorage(capacity), sampler=sampler, batch_size=batch_size, generator=seeded())


async def fill(buffer: ReplayBuffer, lengths: list[int]) -> None:
    """Trajectories of some lengths, whose items carry number and length of theirs."""
    for number, length in enumerate(lengths):
        step = torch.arange(length)
        await buffer.extend({"number": torch.full((length,), number), "step": step, "done": step == length - 1})


async def test_padded() -> None:
    buffer = made(batch_size=200)
    await fill(buffer, [3, 10, 1, 11, 7])
    async with buffer:
        batch = await buffer.sample()
    lengths, mask = batch.info["lengths"], batch.info["mask"]
    assert batch["step"].shape == mask.shape == (20, 10)
    assert set(zip(batch["number"][:, 0].tolist(), lengths.tolist(), strict=True)) == {(0, 3), (1, 10), (2, 1), (4, 7)}
    assert (batch["number"] == batch["number"][:, :1]).all()
    assert (batch["step"] == torch.minimum(torch.arange(10), lengths[:, None] - 1)).all()
    assert (mask == (torch.arange(10) < lengths[:, None])).all()
    assert batch.lengths is None


async def test_padded_to_the_longest_of_the_batch() -> None:
    buffer = made()
    await fill(buffer, [3, 2])
    async with buffer:
        assert (await buffer.sample())["step"].shape[1] in (2, 3)


async def test_packed() -> None:
    buffer = made(batch_size=200, padded=False)
    await fill(buffer, [3, 10, 1, 11, 7])
    async with buffer:
        batch = await buffer.sample()
    assert batch.lengths is not None
    assert len(batch.lengths) == 20
    parts = batch["step"].split(batch.lengths.tolist())
    assert all((part == torch.arange(len(part))).all() for part in parts)
    assert {len(part) for part in parts} == {1, 3, 7, 10}


async def test_only_what_is_stored_whole() -> None:
    buffer = made(capacity=30, batch_size=400, trajectory_key="env")
    await buffer.extend(steps(55, environments=2, length=5))  # 25 to 54 are stored: of 20 to 29 not all
    await buffer.remove([34 - 30])
    async with buffer:
        batch = await buffer.sample()
        assert set(batch["number"][:, 0].tolist()) == {31, 40, 41}
        assert (batch["number"].diff(dim=1) == 2).all()
        with pytest.raises(ValueError, match="multiple of the 10 items"):
            await buffer.sample(15)


async def test_waits_for_the_end_of_a_trajectory() -> None:
    buffer = made()
    async with buffer:
        await buffer.extend(steps(9))
        with pytest.raises(TimeoutError):
            await within(buffer.sample(), 0.01)
        assert "none of the trajectories of the 9 items that are stored is whole" in buffer.why_blocked()
        await buffer.extend(steps(1, 9))
        assert (await within(buffer.sample()))["step"].shape == (4, 10)


async def test_a_trajectory_that_lost_its_newest_item_is_not_whole() -> None:
    buffer = made(batch_size=400)
    await buffer.extend(steps(4))
    await buffer.remove([3])
    await buffer.extend(steps(16, 4))
    async with buffer:
        assert set((await buffer.sample())["number"][:, 0].tolist()) == {10}


async def test_each_trajectory_is_equally_likely() -> None:
    buffer = made(batch_size=10 * 100_000, padded=False, max_len=10)
    await fill(buffer, [1 + number % 4 for number in range(30)])
    counts = np.zeros(30)
    async with buffer:
        for _ in range(10):
            batch = await buffer.sample()
            assert batch.lengths is not None
            counts += np.bincount(batch["number"][batch.lengths.cumsum(0) - 1], minlength=30)
    assert counts.sum() == 1_000_000
    assert abs(deviation(counts, 29)) < 3


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_len": 0}, ValueError, "max_len"),
        ({"end_key": ()}, ValueError, "found neither"),
        ({"end_key": (), "trajectory_key": "env"}, ValueError, "end_key: expected the field"),
        ({"padded": 1}, TypeError, "padded"),
    ],
)
def test_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        made(**arguments)


async def test_other_settings_are_refused() -> None:
    buffer = made()
    await buffer.extend(steps(30))
    state = await buffer.state_dict()
    for other in ({"max_len": 20}, {"padded": False}):
        with pytest.raises(CheckpointMismatchError, match=next(iter(other))):
            await made(**other).load_state_dict(state)
