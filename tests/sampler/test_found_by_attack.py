"""Faults of kinds that nobody had thought of, each with its siblings."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import (
    FrameStack,
    Hindsight,
    JoinedSampler,
    ListStorage,
    MixtureSampler,
    NStep,
    PrefetchError,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SchemaError,
    StratifiedSampler,
    TableWriter,
    TensorStorage,
    WeightedSampler,
)
from asyncbuf._prefetch.copies import private_draw
from asyncbuf.batch import Draw
from tests.helpers import seeded, within

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncbuf import Sampler


@pytest.fixture
def _threads_take_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_threads_take_turns_often")
async def test_copies_of_draws_do_not_mix_up_what_they_have() -> None:
    draw = Draw(torch.arange(4), {"weights": torch.ones(4)}, joins={"next": torch.arange(4)})

    def copies() -> None:
        stop = time.monotonic() + 0.5
        while time.monotonic() < stop:
            copy = private_draw(draw)
            assert copy.info.keys() == {"weights"}
            assert copy.joins.keys() == {"next"}

    await asyncio.gather(*[asyncio.to_thread(copies) for _ in range(3)])


async def one_batch(buffer: ReplayBuffer, items: Any) -> Any:
    async with buffer:
        await buffer.extend(items)
        return await within(buffer.sample())


def in_order(join: Any, **options: Any) -> ReplayBuffer:
    sampler = JoinedSampler(SamplerWithoutReplacement(shuffle=False), join, end_key="terminated")
    return ReplayBuffer(options.pop("storage", None) or TensorStorage(8), sampler=sampler, batch_size=4, **options)


async def test_rewards_of_a_list_may_be_whole_numbers_at_first() -> None:
    item = {"obs": 1.0, "next_obs": 2.0, "reward": 0, "terminated": False}
    async with in_order(NStep(1, 0.9), storage=ListStorage(8)) as buffer:
        await buffer.extend([item, item])
        await buffer.extend([{**item, "reward": 0.5}, {**item, "reward": -0.75}])
        batch = await within(buffer.sample())
    assert batch["reward"].tolist() == [0.0, 0.0, 0.5, -0.75]


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
async def test_an_infinite_reward_is_no_nan(gamma: float) -> None:
    rewards = torch.tensor([0.0, 0.0, 0.0, -math.inf])
    items = {"next_obs": torch.zeros(4), "reward": rewards, "terminated": torch.arange(4) == 3}
    found = (await one_batch(in_order(NStep(3, gamma)), items))["reward"].tolist()
    assert found == ([0, 0, 0, -math.inf] if not gamma else [0, -math.inf, -math.inf, -math.inf])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64, torch.int32])
async def test_rewards_of_any_dtype(dtype: torch.dtype) -> None:
    items = {"next_obs": torch.zeros(4), "reward": torch.ones(4).to(dtype), "terminated": torch.arange(4) == 3}
    kind = dtype if dtype.is_floating_point else torch.float32
    batch = await one_batch(in_order(NStep(2, 0.5)), items)
    assert batch["reward"].dtype is kind
    assert batch["reward"].float().tolist() == [1.5, 1.5, 1.5, 1]
    buffer = ReplayBuffer(TensorStorage(8), sampler=SamplerWithoutReplacement(shuffle=False), batch_size=4)
    adder = buffer.adder(NStep(2, 0.5), end_key="terminated")
    async with buffer:
        await adder.extend(items)
        batch = await within(buffer.sample())
    assert batch["reward"].dtype is kind
    assert batch["reward"].float().tolist() == [1.5, 1.5, 1.5, 1]


@pytest.mark.parametrize("key", [torch.tensor([0.0, 0.5]), torch.tensor([math.nan, 1]), torch.ones(2, 2)])
async def test_keys_that_tell_no_trajectories_apart(key: torch.Tensor) -> None:
    returns = NStep(2, 1.0, terminated_key=None, next_keys=())
    adder = ReplayBuffer(TensorStorage(8)).adder(returns, trajectory_key="env")
    sampler = JoinedSampler(RandomSampler(), returns, trajectory_key="env")
    items = {"reward": torch.ones(2), "env": key}
    for write in (adder.extend, ReplayBuffer(TensorStorage(8), sampler=sampler).extend):
        with pytest.raises(SchemaError, match="env: expected"):
            await write(items)
    assert not len(adder)


def reached(achieved: torch.Tensor, goal: torch.Tensor) -> None:
    """Forgets to return rewards."""


async def test_joins_that_cannot_be_put_together_are_named() -> None:
    place = torch.arange(8.0)[:, None]
    items = {"obs": place, "next_obs": place, "wide": place.repeat(1, 2), "reward": place[:, 0]}
    items["terminated"] = place < 0
    for join, message in (
        (FrameStack(2, next_key="obs/x"), "obs/x"),
        (FrameStack(2, next_key="wide", is_next_stored=True), "wide: expected frames as in obs"),
        (FrameStack(2, "other"), "other"),
        (Hindsight(reached, goal_key="obs", achieved_key="next_obs", share=1.0), "reward_fn: expected rewards"),
        (Hindsight(reached, goal_key="wide", achieved_key="obs", share=1.0), "wide: expected goals of shape"),
        (Hindsight(reached, goal_key="obs", achieved_key="nothing", share=1.0), "nothing"),
    ):
        with pytest.raises((SchemaError, PrefetchError)) as caught:
            await one_batch(in_order(join), items)
        assert message in f"{caught.value} {caught.value.__cause__}"
        assert "expected" in f"{caught.value} {caught.value.__cause__}"
    with pytest.raises(ValueError, match="Hindsight ahead of FrameStack"):
        JoinedSampler(RandomSampler(), FrameStack(2), Hindsight(reached), end_key="terminated")
    with pytest.raises(ValueError, match="next_key: expected another path"):
        FrameStack(2, "obs", next_key="obs")


PRIORITIZED_BY: Any = PrioritizedSampler
PRIORITIZED: dict[str, Callable[[], Sampler]] = {
    "prioritized": PrioritizedSampler,
    "weighted": WeightedSampler,
    "slices": lambda: PrioritizedSliceSampler(slice_len=2, end_key="terminated"),
    "mixture": lambda: MixtureSampler({"one": PrioritizedSampler()}),
    "joined": lambda: JoinedSampler(PrioritizedSampler(), NStep(2, 0.9, next_keys=()), end_key="terminated"),
}


@pytest.mark.parametrize("name", PRIORITIZED)
async def test_priorities_of_any_dtype(name: str) -> None:
    is_mixture = name == "mixture"
    into = {"table": "one"} if is_mixture else {}
    writer = TableWriter({"one": 20}) if is_mixture else None
    buffer = ReplayBuffer(
        TensorStorage(20), sampler=PRIORITIZED[name](), writer=writer, batch_size=4, generator=seeded()
    )
    items = {"reward": torch.arange(10.0), "terminated": torch.zeros(10, dtype=torch.bool)}
    async with buffer:
        await buffer.extend(items, **into)
        for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.float8_e5m2):
            batch = await within(buffer.sample())
            await buffer.update_priority(batch, torch.ones(batch.indices.shape).to(dtype))
            if name != "slices":
                await buffer.extend(items, priority=torch.ones(10).to(dtype), **into)
        batch = await within(buffer.sample())
        odd: Any
        for odd in (None, "x", object(), 1j, [None] * 4, torch.ones(batch.indices.shape) > 0, [1.0] * 77, 10**400):
            with pytest.raises((TypeError, ValueError), match="expected"):
                await buffer.update_priority(batch, odd)
        await within(buffer.sample())


@pytest.mark.parametrize("value", [math.nan, -1.0, math.inf, "x", None])
@pytest.mark.parametrize("name", ["alpha", "beta"])
async def test_what_a_schedule_returns_is_checked(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{name}: expected"):
        PRIORITIZED_BY(**{name: lambda draws: value})
    sampler = PRIORITIZED_BY(**{name: lambda draws: value if draws else 0.5})
    async with ReplayBuffer(TensorStorage(8), sampler=sampler, batch_size=4) as buffer:
        await buffer.extend({"x": torch.arange(8)})
        await within(buffer.sample())
        with pytest.raises((TypeError, ValueError), match=f"^{name}: expected"):
            await within(buffer.sample())


async def test_weights_of_priorities_are_always_numbers() -> None:
    with pytest.raises(ValueError, match="alpha: expected"):
        PrioritizedSampler(alpha=300.0)
    sampler = PrioritizedSampler(alpha=1.0)
    async with ReplayBuffer(TensorStorage(8), sampler=sampler, batch_size=4) as buffer:
        await buffer.extend({"x": torch.arange(8)})
        huge = torch.full((8,), 1e300, dtype=torch.float64)
        with pytest.raises(ValueError, match=r"below 1e\+280"):
            await buffer.update_priority(torch.arange(8), huge)
        with pytest.raises(ValueError, match=r"below 1e\+280"):
            await buffer.extend({"x": torch.arange(8)}, priority=huge)
        await buffer.update_priority(torch.arange(8), torch.full((8,), 1e200, dtype=torch.float64))
        sampler.alpha = 2.0
        with pytest.raises(ValueError, match="alpha: expected"):
            await within(buffer.sample())
        sampler.alpha = 1.0
        assert (await within(buffer.sample())).info["weights"].tolist() == [1.0] * 4


async def test_a_number_as_the_priority_of_new_items_is_taken_as_it_is() -> None:
    sampler = PrioritizedSampler()
    await ReplayBuffer(TensorStorage(8), sampler=sampler).extend({"x": torch.arange(2)}, priority=0.1)
    assert sampler.priorities(torch.arange(2)).tolist() == [0.1, 0.1]


@pytest.mark.parametrize("shares", [None, {0: 0.5, 1: 0.5}])
async def test_classes_without_items_are_forgotten(shares: Any) -> None:
    sampler = StratifiedSampler("c", shares)
    async with ReplayBuffer(TensorStorage(20), sampler=sampler, batch_size=4, generator=seeded()) as buffer:
        for start in range(0, 400, 10):
            await buffer.extend({"c": torch.arange(10) + (0 if shares else start)})
            await within(buffer.sample())
        state = sampler.state_dict()
        assert len(state["classes"]) <= 20
        assert len(sampler._rows.values) <= 40
        await buffer.empty()
        await buffer.extend({"c": torch.arange(4) % 2})
        assert sorted((await within(buffer.sample())).info["class"].tolist()) == [0, 0, 1, 1]
