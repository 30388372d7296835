"""Prioritized slices."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from asyncbuf import PrioritizedSliceSampler, ReplayBuffer, TensorStorage
from asyncbuf.errors import CheckpointCorruptError
from tests.helpers import seeded
from tests.sampler.test_slices import steps

SIZE = 50


def sampler(**arguments: Any) -> PrioritizedSliceSampler:
    return PrioritizedSliceSampler(**{"slice_len": 4, "end_key": "done", **arguments})


def made(part: PrioritizedSliceSampler, batch_size: int = 16, capacity: int = SIZE) -> ReplayBuffer:
    return ReplayBuffer(TensorStorage(capacity), sampler=part, batch_size=batch_size, generator=seeded())


def kept(part: PrioritizedSliceSampler, *rows: int) -> list[float]:
    return part.priorities(torch.tensor(rows)).tolist()


async def test_chances_and_weights_are_those_of_the_formula() -> None:
    part = sampler(alpha=0.7, beta=0.5)
    buffer = made(part, batch_size=4 * 50_000)
    priorities = np.linspace(0.1, 4.0, 80)
    await buffer.extend(steps(40), priority=priorities[:40])
    await buffer.extend(steps(40, 40), priority=priorities[40:])
    await buffer.remove([0, 7])
    stored = {number % SIZE: number for number in range(30, 80) if number % SIZE not in (0, 7)}
    ways = {row: [stored.get((row + ahead) % SIZE) for ahead in range(4)] for row in stored}
    starts = np.array(
        [
            row
            for row, way in ways.items()
            if None not in way and way == list(range(way[0] or 0, (way[0] or 0) + 4)) and (way[0] or 0) % 10 <= 6
        ]
    )
    weights = (priorities[[stored[row] for row in starts]] + 1e-8) ** 0.7
    chance = np.zeros(SIZE)
    chance[starts] = weights / weights.sum()
    counts = np.zeros(SIZE)
    async with buffer:
        for _ in range(20):
            batch = await buffer.sample()
            first = batch.indices[:, 0].numpy()
            counts += np.bincount(first, minlength=SIZE)
            found = batch.info["weights"]
            assert found.shape == (50_000,)
            assert found.dtype is torch.float32
            expected = (chance[first] / chance[starts].min()) ** -0.5
            np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert counts[chance == 0].sum() == 0
    counts, chance = counts[starts], chance[starts]
    statistic = ((counts - 1e6 * chance) ** 2 / (1e6 * chance)).sum()
    freedom = len(starts) - 1
    assert abs(statistic - freedom) < 3 * math.sqrt(2 * freedom)


async def test_priorities_of_all_steps_become_one_of_the_slice() -> None:
    part = sampler(eta=0.9, burn_in=2)
    buffer = made(part, batch_size=6)
    await buffer.extend(steps(6))
    async with buffer:
        batch = await buffer.sample()
        assert batch.indices.tolist() == [[0, 1, 2, 3, 4, 5]]
        values = torch.tensor([[90.0, -90.0, 1.0, 2.0, 3.0, 6.0]])
        await buffer.update_priority(batch, values)
        assert kept(part, 0) == [pytest.approx(0.9 * 6 + 0.1 * 3)]
        assert kept(part, 1, 2, 3, 4, 5) == [1.0] * 5
        await buffer.update_priority(batch, values[:, 2:] + 1)
        assert kept(part, 0) == [pytest.approx(0.9 * 7 + 0.1 * 4)]
        await buffer.update_priority(batch, [2.5])
        assert kept(part, 0) == [2.5]
        await buffer.update_priority(batch, 1.5)
        assert kept(part, 0, 1) == [1.5, 1.0]
        await buffer.update_priority([0, 3], [4.0, 0.25])
        assert kept(part, 0, 3) == [4.0, 0.25]
        assert part.largest_priority == pytest.approx(0.9 * 7 + 0.1 * 4)


async def test_padding_counts_for_no_priority() -> None:
    part = sampler(strict_length=False, eta=0.5)
    buffer = made(part, batch_size=4)
    await buffer.extend(steps(2))
    async with buffer:
        batch = await buffer.sample()
        assert batch.info["lengths"].tolist() == [2]
        await buffer.update_priority(batch, torch.tensor([[1.0, 2.0, 50.0, math.nan]]))
    assert kept(part, 0) == [0.5 * 2 + 0.5 * 1.5]


async def test_a_slice_that_is_only_burn_in_keeps_its_priority() -> None:
    part = sampler(strict_length=False, burn_in=3, slice_len=1)
    buffer = made(part, batch_size=4)
    await buffer.extend(steps(2))
    async with buffer:
        await buffer.update_priority(await buffer.sample(), torch.full((1, 4), 7.0))
    assert kept(part, 0) == [1.0]


@pytest.mark.parametrize(
    ("priority", "message"),
    [
        (torch.zeros(4, 3), r"priority: expected values \[4, 4\] or \[4\], found \[4, 3\]"),
        (-torch.ones(4, 4), "expected finite numbers of at least 0, found"),
        (torch.full((4, 4), math.nan), "expected finite numbers of at least 0, found"),
        (torch.full((4, 4), math.inf), "expected finite values"),
        (-torch.ones(4), "expected finite numbers of at least 0"),
    ],
)
async def test_priorities_that_are_none_are_refused(priority: torch.Tensor, message: str) -> None:
    part = sampler()
    buffer = made(part)
    await buffer.extend(steps(30))
    async with buffer:
        batch = await buffer.sample()
        with pytest.raises(ValueError, match=message):
            await buffer.update_priority(batch, priority)
    assert kept(part, *range(30)) == [1.0] * 30


async def test_slices_that_were_replaced_since_keep_their_priority() -> None:
    part = sampler()
    buffer = made(part, batch_size=4 * 40, capacity=20)
    await buffer.extend(steps(20))
    async with buffer:
        batch = await buffer.sample()
        await buffer.extend(steps(2, 20))  # into rows 0 and 1
        await buffer.update_priority(batch.indices, torch.full((40, 4), 5.0))
        assert buffer.stats().stale_priorities == int((batch.indices[:, 0] < 2).sum()) > 0
    drawn = set(batch.indices[:, 0].tolist()) - {0, 1}
    assert kept(part, *range(20)) == [5.0 if row in drawn else 1.0 for row in range(20)]


async def test_alpha_may_change() -> None:
    part = sampler(alpha=0.0)
    buffer = made(part, batch_size=4 * 4000)
    await buffer.extend(steps(5), priority=[1.0, 3.0, 9.0, 9.0, 9.0])
    async with buffer:
        assert 0.45 < float((await buffer.sample()).indices[:, 0].float().mean()) < 0.55
        part.alpha = 1.0
        assert 0.7 < float((await buffer.sample()).indices[:, 0].float().mean()) < 0.8


async def test_states_that_are_none() -> None:
    buffer = made(sampler())
    await buffer.extend(steps(30))
    for key, entry, wrong in (
        ("priorities", "priorities", torch.ones(29, dtype=torch.float64)),
        ("priorities", "priorities", torch.ones(30)),
        ("priorities", "draws", -1),
        ("slices", "starts", torch.zeros(3, dtype=torch.int64)),
        ("slices", "length", 0),
    ):
        state = await buffer.state_dict()
        state["sampler"][key][entry] = wrong
        other = made(sampler())
        with pytest.raises(CheckpointCorruptError):
            await other.load_state_dict(state)
        await other.load_state_dict(await buffer.state_dict())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [({"eta": -0.1}, ValueError), ({"eta": 1.5}, ValueError), ({"eta": "x"}, TypeError), ({"alpha": -1}, ValueError)],
)
def test_arguments(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(arguments))):
        sampler(**arguments)


@pytest.mark.parametrize("shape", [(8, 6), (8, 4), (8, 6, 1), (48,), (32,), (8,), (8, 1), ()])
async def test_shapes_of_priorities(shape: tuple[int, ...]) -> None:
    sampler = PrioritizedSliceSampler(slice_len=4, burn_in=2, end_key="done", strict_length=False)
    buffer = ReplayBuffer(TensorStorage(100), sampler=sampler, batch_size=48)
    async with buffer:
        await buffer.extend({"x": torch.arange(60), "done": torch.arange(60) % 10 == 9})
        batch = await buffer.sample()
        await buffer.update_priority(batch, torch.full(shape, 3.0))
        assert sampler.largest_priority == 3.0
        for wrong in ((6, 8), (4, 8), (1, 8), (47,), (8, 6, 2)):
            with pytest.raises(ValueError, match="priority: expected values"):
                await buffer.update_priority(batch, torch.ones(wrong))
        with pytest.raises(ValueError, match=r"td_error\.abs"):
            await buffer.update_priority(batch, -torch.ones(8, 6))
