"""Prioritized experience replay."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import ListStorage, PrioritizedSampler, ReplayBuffer, SchemaError, TensorStorage
from asyncbuf.errors import CheckpointCorruptError, CheckpointMismatchError
from asyncbuf.testing import assert_exact_resume
from tests.helpers import rows, seeded, within

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncbuf import Batch

SIZE = 50


def made(sampler: PrioritizedSampler, capacity: int = SIZE, batch_size: int = 100, **more: Any) -> ReplayBuffer:
    return ReplayBuffer(TensorStorage(capacity), sampler=sampler, batch_size=batch_size, generator=seeded(), **more)


def chances(sampler: PrioritizedSampler, priorities: Any) -> Any:
    weights = (np.asarray(priorities, np.float64) + 1e-8) ** sampler.alpha
    return weights / weights.sum()


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
async def test_chances_and_weights_are_those_of_the_formula(alpha: float) -> None:
    sampler = PrioritizedSampler(alpha, 0.7)
    priorities = torch.linspace(0.1, 5.0, SIZE)
    buffer = made(sampler, batch_size=1000)
    await buffer.extend(rows(SIZE), priority=priorities)
    chance = chances(sampler, priorities)
    counts = np.zeros(SIZE)
    async with buffer:
        for _ in range(200):
            batch = await buffer.sample()
            counts += np.bincount(batch.indices, minlength=SIZE)
            weights = (SIZE * chance) ** -0.7
            expected = (weights / weights.max())[batch.indices]
            assert batch.info["weights"].dtype is torch.float32
            np.testing.assert_allclose(batch.info["weights"], expected, rtol=1e-6)
    draws = counts.sum()
    statistic = ((counts - draws * chance) ** 2 / (draws * chance)).sum()
    assert abs(statistic - (SIZE - 1)) < 3 * math.sqrt(2 * (SIZE - 1))


async def test_new_rows_get_the_largest_priority_so_far() -> None:
    sampler = PrioritizedSampler()
    buffer = made(sampler, capacity=4)
    await buffer.extend(rows(2))
    assert sampler.priorities(torch.arange(4)).tolist()[:2] == [1.0, 1.0]
    await buffer.update_priority([0], 7.0)
    await buffer.update_priority([0], 0.5)
    await buffer.add({"number": torch.tensor(9), "wide": torch.zeros(1)})
    assert sampler.largest_priority == 7.0
    found = sampler.priorities(torch.arange(4))
    assert found[:3].tolist() == [0.5, 1.0, 7.0]
    assert math.isnan(found[3])


async def test_priorities_may_come_with_the_items() -> None:
    sampler = PrioritizedSampler()
    buffer = made(sampler, capacity=4)
    await buffer.extend(rows(6), priority=torch.arange(6))  # the last four stay
    assert sorted(sampler.priorities(torch.arange(4)).tolist()) == [2.0, 3.0, 4.0, 5.0]
    await buffer.extend(rows(2), priority=9)
    assert sorted(sampler.priorities(torch.arange(4)).tolist()) == [4.0, 5.0, 9.0, 9.0]
    row = await buffer.add({"number": torch.tensor(9), "wide": torch.zeros(1)}, priority=0.25)
    assert row is not None
    assert sampler.priorities(torch.tensor([row])).item() == 0.25


@pytest.mark.parametrize("storage", [TensorStorage, ListStorage])
async def test_priorities_may_be_a_field_of_the_items(storage: Callable[[int], Any]) -> None:
    sampler = PrioritizedSampler(priority_key="meta/td")
    buffer = ReplayBuffer(storage(8), sampler=sampler, batch_size=4)
    for number in range(3):
        await buffer.add({"meta": {"td": torch.tensor(float(number))}})
    assert sampler.priorities(torch.arange(3)).tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(ValueError, match="meta/td: expected finite numbers of at least 0"):
        await buffer.add({"meta": {"td": torch.tensor(-1.0)}})
    assert len(buffer) == 3


async def test_a_field_with_several_numbers_is_no_priority() -> None:
    buffer = made(PrioritizedSampler(priority_key="wide"))
    with pytest.raises(SchemaError, match="expected one priority per item"):
        await buffer.extend(rows(4, width=2))


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf, -math.inf])
async def test_priorities_that_are_none_are_refused_and_change_nothing(wrong: float) -> None:
    sampler = PrioritizedSampler()
    buffer = made(sampler)
    await buffer.extend(rows(4))
    before = sampler.state_dict()
    told = "td_error.abs()" if wrong == -1.0 else "1 of 2 that are nan or infinite, the first at position 1"
    with pytest.raises(ValueError, match=re.escape(told)):
        await buffer.update_priority([0, 1], [1.0, wrong])
    with pytest.raises(ValueError, match="priority: expected"):
        await buffer.extend(rows(2), priority=[1.0, wrong])
    with pytest.raises(ValueError, match="priority: expected 2 values"):
        await buffer.extend(rows(2), priority=[1.0, 1.0, 1.0])
    with pytest.raises(IndexError, match="expected rows 0 to 49"):
        await buffer.update_priority([50], 1.0)
    assert len(buffer) == buffer.write_count == 4
    after = sampler.state_dict()
    assert after.pop("priorities").tolist() == before.pop("priorities").tolist()
    assert after == before


@pytest.mark.parametrize(
    ("reduction", "expected"), [("max", 5.0), ("min", 1.0), ("mean", 3.0), ("sum", 9.0), ("last", 1.0)]
)
async def test_a_row_that_is_named_several_times(reduction: str, expected: float) -> None:
    sampler = PrioritizedSampler(reduction=reduction)
    buffer = made(sampler)
    await buffer.extend(rows(4))
    await buffer.update_priority([2, 1, 2, 2], [3.0, 0.5, 5.0, 1.0])
    assert sampler.priorities(torch.arange(4)).tolist() == [1.0, 0.5, expected, 1.0]


async def test_rows_that_were_replaced_since_the_draw_keep_their_priority() -> None:
    sampler = PrioritizedSampler()
    buffer = made(sampler, capacity=8, batch_size=16)
    await buffer.extend(rows(8))
    async with buffer:
        batch = await buffer.sample()
        await buffer.extend(rows(4, 8))  # rows 0 to 3
        await buffer.update_priority(batch, 50.0)
        assert buffer.stats().stale_priorities == int((batch.indices < 4).sum())
    assert sampler.priorities(torch.arange(4)).tolist() == [1.0] * 4


async def test_removed_rows_are_not_drawn() -> None:
    sampler = PrioritizedSampler()
    buffer = made(sampler, batch_size=500)
    await buffer.extend(rows(SIZE), priority=torch.arange(SIZE))
    await buffer.remove(torch.arange(10, SIZE))
    async with buffer:
        assert set((await buffer.sample()).indices.tolist()) <= set(range(10))
        await buffer.empty()
        await buffer.extend(rows(3))
        assert set((await buffer.sample()).indices.tolist()) == {0, 1, 2}
    assert sampler.largest_priority == 49.0


async def test_priority_zero_is_drawn_seldom_but_not_never() -> None:
    buffer = made(PrioritizedSampler(1.0), batch_size=1000)
    await buffer.extend(rows(4), priority=0.0)
    async with buffer:
        assert set((await buffer.sample()).indices.tolist()) == {0, 1, 2, 3}


async def test_alpha_and_beta_follow_schedules_and_settings() -> None:
    sampler = PrioritizedSampler(lambda draws: 1.0 if draws < 2 else 0.0, lambda draws: min(1.0, 0.25 * draws))
    buffer = made(sampler, batch_size=4000)
    await buffer.extend(rows(2), priority=[1.0, 3.0])
    async with buffer:
        for beta in (0.0, 0.25):
            batch = await buffer.sample()
            assert 0.7 < float((batch.indices == 1).float().mean()) < 0.8
            expected = torch.where(batch.indices == 1, (1 / 3) ** beta, 1.0)
            assert torch.allclose(batch.info["weights"], expected)
        batch = await buffer.sample()
        assert 0.45 < float((batch.indices == 1).float().mean()) < 0.55
        assert (batch.info["weights"] == 1).all()
        sampler.alpha, sampler.beta = 1.0, 1.0
        assert (sampler.alpha, sampler.beta) == (1.0, 1.0)
        batch = await buffer.sample()
        assert 0.7 < float((batch.indices == 1).float().mean()) < 0.8


@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.parametrize("is_scheduled", [False, True])
@pytest.mark.loops_in_turn
@pytest.mark.parametrize("at", [[3, 8], pytest.param("every", marks=pytest.mark.slow)], ids=["two", "every"])
async def test_exact_resume(prefetch: int, is_scheduled: bool, at: Any) -> None:
    async def make() -> ReplayBuffer:
        schedules: dict[str, Any] = {"alpha": lambda n: 0.9 - 0.05 * (n // 4), "beta": lambda n: 0.1 * n}
        sampler = PrioritizedSampler(**(schedules if is_scheduled else {}))
        buffer = made(sampler, capacity=40, batch_size=8, prefetch=prefetch, workers=2)
        await buffer.extend(rows(25))
        return buffer

    async def feed(buffer: ReplayBuffer, step: int, batch: Batch) -> None:
        await buffer.update_priority(batch, batch["number"] % 7)
        await buffer.extend(rows(3, 25 + 3 * step), priority=[0.5, 1.0, 2.0] if step % 2 else None)
        if step % 4 == 3:
            await buffer.remove(batch.indices[:2])

    # Functions of the test reach no other process.
    ways = (
        ("snapshot", "state_dict", "directory") if is_scheduled else ("snapshot", "state_dict", "directory", "pickle")
    )
    await assert_exact_resume(make, feed=feed, ways=ways, at=at)


async def restored(state: dict[str, Any], sampler: PrioritizedSampler | None = None) -> None:
    buffer = made(PrioritizedSampler() if sampler is None else sampler)
    await buffer.load_state_dict(state)
    async with buffer:
        await within(buffer.sample())


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("priorities", torch.zeros(4)),
        ("priorities", torch.zeros(4, 1, dtype=torch.float64)),
        ("priorities", torch.full((4,), -0.5, dtype=torch.float64)),
        ("priorities", torch.full((4,), math.nan, dtype=torch.float64)),
        ("priorities", torch.zeros(3, dtype=torch.float64)),
        ("priorities", torch.zeros(5, dtype=torch.float64)),
        ("priorities", [1.0] * 4),
        ("capacity", 2**60),
        ("capacity", 49),
        ("largest", -1.0),
        ("largest", math.nan),
        ("exponent", math.inf),
        ("alpha", "x"),
        ("draws", -1),
    ],
)
async def test_a_state_that_is_none_is_refused(key: str, wrong: Any) -> None:
    buffer = made(PrioritizedSampler())
    await buffer.extend(rows(4))
    state = await buffer.state_dict()
    await restored(state)
    state["sampler"][key] = wrong
    with pytest.raises(CheckpointCorruptError):
        await restored(state)


async def test_a_function_is_no_number() -> None:
    buffer = made(PrioritizedSampler())
    await buffer.extend(rows(4))
    state = await buffer.state_dict()
    with pytest.raises(CheckpointMismatchError, match="whether beta is a function"):
        await restored(state, PrioritizedSampler(beta=lambda draws: 0.5))
    with pytest.raises(CheckpointMismatchError, match="eps"):
        await restored(state, PrioritizedSampler(eps=1e-3))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"alpha": -1.0}, ValueError),
        ({"alpha": "x"}, TypeError),
        ({"alpha": True}, TypeError),
        ({"beta": math.nan}, ValueError),
        ({"eps": 0.0}, ValueError),
        ({"reduction": "median"}, ValueError),
        ({"priority_key": 3}, TypeError),
    ],
)
def test_arguments(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(arguments))):
        PrioritizedSampler(**arguments)


async def test_what_other_libraries_would_have_said() -> None:
    with pytest.raises(ValueError, match=r"alpha: expected an exponent below 1000.*found 100000 \(the storage"):
        PrioritizedSampler(100_000)
    async with ReplayBuffer(TensorStorage(8), sampler=PrioritizedSampler(), batch_size=4) as buffer:
        await buffer.extend({"x": torch.arange(8)})
        with pytest.raises(KeyError, match=r'found weights; the sampler says it: batch.info\["weights"\]'):
            (await within(buffer.sample()))["weights"]
