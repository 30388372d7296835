"""Rows drawn by weights."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import ReplayBuffer, SchemaError, TensorStorage, WeightedSampler
from asyncbuf.errors import CheckpointCorruptError, CheckpointMismatchError
from asyncbuf.testing import assert_exact_resume
from tests.helpers import crossed, rows, seeded, turns, within
from tests.sampler.chi_square import assert_chances

if TYPE_CHECKING:
    from asyncbuf import Batch

SIZE = 50


def made(sampler: WeightedSampler, capacity: int = SIZE, batch_size: int = 100, **more: Any) -> ReplayBuffer:
    return ReplayBuffer(TensorStorage(capacity), sampler=sampler, batch_size=batch_size, generator=seeded(), **more)


def weights_of(sampler: WeightedSampler) -> list[float]:
    return sampler.weights(torch.arange(SIZE)).tolist()


async def test_chances_are_in_proportion_to_the_weights() -> None:
    buffer = made(WeightedSampler(), batch_size=10_000)
    weights = (torch.arange(SIZE) % 10).double() ** 2
    await buffer.extend(rows(SIZE), priority=weights)
    counts = np.zeros(SIZE)
    async with buffer:
        for _ in range(100):
            counts += np.bincount((await buffer.sample()).indices, minlength=SIZE)
    assert counts.sum() == 10**6
    assert (counts[weights == 0] == 0).all()
    assert_chances(counts[weights > 0], weights[weights > 0])


@pytest.mark.parametrize("weights", [(1.0, 2.0, 3.0, 4.0), (1e12, 1.0, 1e-12, 5.0), (0.0, 1.0, 1.0, 9.0)])
async def test_without_replacement_rows_come_one_after_the_other(weights: tuple[float, ...]) -> None:
    sampler = WeightedSampler(replacement=False)
    buffer = made(sampler, batch_size=3)
    await buffer.extend(rows(4), priority=torch.tensor(weights, dtype=torch.float64))
    chances = {}
    for order in itertools.permutations(range(4), 3):
        chance, left = 1.0, sum(weights)
        for row in order:
            chance, left = chance * weights[row] / left if left else 0.0, left - weights[row]
        chances[order] = chance
    counts = dict.fromkeys(chances, 0)
    async with buffer:
        for _ in range(4000):
            counts[tuple((await buffer.sample()).indices.tolist())] += 1
    likely = [order for order in chances if chances[order] > 0.002]
    assert sum(counts[order] for order in likely) > 3900
    assert_chances(np.array([counts[order] for order in likely]), [chances[order] for order in likely])
    assert weights_of(sampler)[:4] == list(weights)


async def test_weights_are_a_field_or_come_with_items_or_later() -> None:
    sampler = WeightedSampler("number")
    buffer = made(sampler)
    await buffer.extend(rows(4, 2))
    await buffer.extend(rows(2), priority=[7.0, 8.0])
    assert weights_of(sampler)[:6] == [2.0, 3.0, 4.0, 5.0, 7.0, 8.0]
    await buffer.update_priority([1, 3, 1], [0.5, 0.0, 9.0])
    assert weights_of(sampler)[:6] == [2.0, 9.0, 4.0, 0.0, 7.0, 8.0]
    await buffer.remove([0])
    assert math.isnan(weights_of(sampler)[0])
    plain = WeightedSampler()
    await made(plain).extend(rows(2))
    assert weights_of(plain)[:2] == [1.0, 1.0]


@pytest.mark.parametrize("replacement", [True, False])
async def test_consumers_wait_while_all_weights_are_0(replacement: bool) -> None:
    buffer = made(WeightedSampler(replacement=replacement), batch_size=2)
    await buffer.extend(rows(5), priority=0.0)
    async with buffer:
        waiting = asyncio.ensure_future(buffer.sample())
        await turns()
        assert "weight above 0" in buffer.why_blocked()
        await buffer.update_priority([3, 4], torch.tensor(1e-300, dtype=torch.float64))
        assert set((await within(waiting)).indices.tolist()) <= {3, 4}
        await buffer.update_priority([3, 4], 0.0)
        await buffer.finish()
        assert [batch async for batch in buffer] == []


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("seed", range(6))
async def test_histories_are_those_of_a_dict(replacement: bool, seed: int) -> None:
    choose, sampler = random.Random(seed), WeightedSampler(replacement=replacement)
    buffer = made(sampler, capacity=17, batch_size=3)
    weights: dict[int, float] = {}
    async with buffer:
        for step in range(200):
            what = choose.choice(["write", "write", "update", "draw", "draw", "remove"])
            values = [choose.choice((0.0, 0.0, 2.0**-30, 1.0, 2.0**30)) for _ in range(choose.choice((1, 2, 5, 20)))]
            there = sorted(weights)
            if what == "write":
                written = await buffer.extend(rows(len(values), step), priority=values)
                weights |= dict(zip(written.tolist(), values[-len(written) :], strict=True))
            elif what == "update" and there:
                named = [choose.choice(there) for _ in values]
                await buffer.update_priority(named, values)
                weights |= dict(zip(named, values, strict=True))
            elif what == "remove" and there:
                gone = choose.sample(there, min(2, len(there)))
                await buffer.remove(gone)
                for row in gone:
                    del weights[row]
            elif what == "draw" and sum(weight > 0 for weight in weights.values()) >= (1 if replacement else 3):
                drawn = (await within(buffer.sample())).indices.tolist()
                assert all(weights[row] > 0 for row in drawn)
                assert replacement or len(set(drawn)) == 3
            found = sampler.weights(torch.arange(17)).tolist()
            assert {row: weight for row, weight in enumerate(found) if not math.isnan(weight)} == weights


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf, 1e290])
async def test_weights_that_are_none_are_refused_and_change_nothing(wrong: float) -> None:
    sampler = WeightedSampler("wide")
    buffer = made(sampler)
    await buffer.extend({"number": torch.arange(4), "wide": torch.ones(4, 1, dtype=torch.float64)})
    before = weights_of(sampler)
    with pytest.raises(ValueError, match="priority: expected"):
        await buffer.update_priority([0, 1], torch.tensor([1.0, wrong], dtype=torch.float64))
    items = {"number": torch.arange(2), "wide": torch.ones(2, 1, dtype=torch.float64)}
    with pytest.raises(ValueError, match="priority: expected"):
        await buffer.extend(items, priority=torch.tensor([1.0, wrong], dtype=torch.float64))
    with pytest.raises(ValueError, match="wide: expected finite numbers of at least 0 and below 1e\\+290"):
        await buffer.extend({"number": torch.arange(1), "wide": torch.tensor([[wrong]], dtype=torch.float64)})
    np.testing.assert_equal(weights_of(sampler), before)
    with pytest.raises(SchemaError, match="wide: expected one weight per item"):
        await made(WeightedSampler("wide")).extend(rows(2, width=2))


@pytest.mark.parametrize(("prefetch", "replacement"), crossed([0, 1, 4], [True, False], one_in=2))
@pytest.mark.parametrize("at", [(3,), pytest.param("every", marks=pytest.mark.slow)], ids=["one", "every"])
async def test_exact_resume(prefetch: int, replacement: bool, at: Any) -> None:
    async def make() -> ReplayBuffer:
        buffer = made(WeightedSampler("number", replacement), capacity=40, batch_size=4, prefetch=prefetch, workers=2)
        await buffer.extend(rows(25))
        return buffer

    async def feed(buffer: ReplayBuffer, step: int, batch: Batch) -> None:
        await buffer.update_priority(batch, batch["number"] % 7)
        await buffer.extend(rows(3, 25 + 3 * step), priority=[0.5, 0.0, 2.0] if step % 2 else None)
        if step % 4 == 3:
            await buffer.remove(batch.indices[:2])

    await assert_exact_resume(make, feed=feed, at=at, steps=6)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("replacement", False, CheckpointMismatchError),
        ("replacement", 1, CheckpointCorruptError),
        ("capacity", 49, CheckpointCorruptError),
        ("capacity", 3, CheckpointCorruptError),
        ("weights", torch.zeros(4), CheckpointCorruptError),
        ("weights", torch.full((4,), math.nan, dtype=torch.float64), CheckpointCorruptError),
        ("weights", torch.full((4,), 1e290, dtype=torch.float64), CheckpointCorruptError),
        ("weights", torch.zeros(5, dtype=torch.float64), CheckpointCorruptError),
    ],
)
async def test_a_state_that_is_none_is_refused(key: str, value: Any, error: type[Exception]) -> None:
    buffer = made(WeightedSampler())
    await buffer.extend(rows(4))
    state = await buffer.state_dict()
    await made(WeightedSampler()).load_state_dict(state)
    state["sampler"][key] = value
    with pytest.raises(error):
        await made(WeightedSampler()).load_state_dict(state)


def test_arguments() -> None:
    wrong: Any = 3
    with pytest.raises(TypeError, match="weight_key: expected the path of a field, found 3"):
        WeightedSampler(wrong)
    with pytest.raises(TypeError, match="replacement: expected a bool, found 3"):
        WeightedSampler(None, wrong)
    with pytest.raises(ValueError, match="batch_size: expected at most the capacity 50"):
        made(WeightedSampler(replacement=False), batch_size=51)
