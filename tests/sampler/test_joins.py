"""Batches with n-step returns, stacks of frames and relabelled goals, out of a buffer."""

from __future__ import annotations

import pickle
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
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SamplerWithoutReplacement,
    SchemaError,
    SliceSampler,
    TableWriter,
    TensorStorage,
)
from asyncbuf._plain.codec import encode
from asyncbuf.testing import assert_same_batch, difference
from tests.helpers import seeded

if TYPE_CHECKING:
    from collections.abc import Callable

ENDS = ("terminated", "truncated")


def steps(count: int, start: int = 0) -> dict[str, torch.Tensor]:
    """Steps of one environment: episodes of seven, each third of which is cut off."""
    number = torch.arange(start, start + count)
    obs = number.float()[:, None].repeat(1, 5)
    last, cut = number % 7 == 6, number % 21 == 20
    reward = 1.0 + number.float()
    return {"obs": obs, "next_obs": obs + 1, "reward": reward, "terminated": last & ~cut, "truncated": cut}


def make(*joins: Any, prefetch: int = 0, **options: Any) -> ReplayBuffer:
    sampler = JoinedSampler(options.pop("sampler", None) or RandomSampler(), *joins, end_key=ENDS)
    options = {"storage": TensorStorage(50), "batch_size": 16, "generator": seeded(3), **options}
    return ReplayBuffer(options.pop("storage"), sampler=sampler, prefetch=prefetch, **options)


@pytest.mark.parametrize("prefetch", [0, 3])
async def test_returns_are_the_formula(prefetch: int) -> None:
    async with make(NStep(3, 0.5, keys="truncated"), prefetch=prefetch) as buffer:
        await buffer.extend(steps(60))  # the first ten are overwritten
        for _ in range(8):
            batch = await buffer.sample()
            for i, first in enumerate(batch["obs"][:, 0].int().tolist()):
                count = min(3, 7 - first % 7, 60 - first)
                last = first + count - 1
                expected = sum(0.5**k * (1 + first + k) for k in range(count))
                assert batch["reward"][i].item() == pytest.approx(expected)
                assert batch.info["steps"][i].item() == count
                assert batch["next_obs"][i].tolist() == [last + 1] * 5
                assert batch["truncated"][i].item() == (last % 21 == 20)
                is_terminated = last % 7 == 6 and last % 21 != 20
                assert batch["terminated"][i].item() == is_terminated
                assert batch.info["discount"][i].item() == (0 if is_terminated else 0.5**count)


async def test_one_step_is_what_was_stored() -> None:
    async with make(NStep(1, 0.5)) as buffer, make(NStep(1, 0.5), sampler=PrioritizedSampler()) as prioritized:
        for each in (buffer, prioritized):
            await each.extend(steps(40))
            batch = await each.sample()
            numbers = batch["obs"][:, 0]
            assert torch.equal(batch["reward"], 1 + numbers)
            assert torch.equal(batch["next_obs"], batch["obs"] + 1)
        assert batch.info["weights"].shape == (16,)
        await prioritized.update_priority(batch, torch.rand(16))


async def test_rewards_of_several_values_and_nested_fields() -> None:
    def items(count: int) -> dict[str, Any]:
        plain = steps(count)
        inner = {"obs": plain["next_obs"], "reward": plain["reward"][:, None].repeat(1, 2)}
        return {"obs": plain["obs"], "next": {**inner, "terminated": plain["terminated"][:, None]}}

    returns = NStep(2, 0.5, reward_key="next/reward", next_keys="next/obs", terminated_key="next/terminated")
    sampler = JoinedSampler(RandomSampler(), returns, end_key="next/terminated")
    async with ReplayBuffer(TensorStorage(50), sampler=sampler, batch_size=64, generator=seeded()) as buffer:
        await buffer.extend(items(20))
        batch = await buffer.sample()
        first = batch["obs"][:, 0]
        two = batch.info["steps"] == 2
        assert torch.equal(batch["next"]["reward"][two], (first + 1 + (first + 2) / 2)[two, None].repeat(1, 2))
        assert torch.equal(batch["next"]["reward"][~two], (first + 1)[~two, None].repeat(1, 2))
        assert batch["next"]["reward"].shape == (64, 2)
        assert torch.equal(batch["next"]["obs"][:, 0], first + batch.info["steps"])


@pytest.mark.parametrize("is_written", [False, True])
async def test_discounts_have_the_axes_of_rewards(is_written: bool) -> None:
    returns = NStep(3, 0.5)
    sampler = RandomSampler() if is_written else JoinedSampler(RandomSampler(), returns, end_key=ENDS)
    items = steps(20)
    items["reward"] = items["reward"][:, None]
    async with ReplayBuffer(TensorStorage(50), sampler=sampler, batch_size=8, generator=seeded()) as buffer:
        adder = buffer.adder(returns, end_key=ENDS)
        await (adder.extend if is_written else buffer.extend)(items)
        batch = await buffer.sample()
    discount = batch["discount"] if is_written else batch.info["discount"]
    assert batch["reward"].shape == discount.shape == (8, 1)
    assert (batch["reward"] + discount * torch.ones(8, 1)).shape == (8, 1)


async def test_whole_numbers_as_rewards() -> None:
    async with make(NStep(2, 0.5)) as buffer:
        items = steps(40)
        await buffer.extend({**items, "reward": torch.ones(40, dtype=torch.int64)})
        batch = await buffer.sample()
        assert batch["reward"].dtype is torch.float32
        assert torch.equal(batch["reward"], torch.where(batch.info["steps"] == 2, 1.5, 1.0))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("is_stored", [False, True])
async def test_frames(prefetch: int, is_stored: bool) -> None:
    frames = FrameStack(3, next_key="next_obs", is_next_stored=is_stored)
    async with make(frames, prefetch=prefetch) as buffer:
        items = steps(60)
        if not is_stored:
            del items["next_obs"]
        await buffer.extend(items)
        for _ in range(6):
            batch = await buffer.sample()
            assert batch["obs"].shape == batch["next_obs"].shape == (16, 3, 5)
            for stack, after, i in zip(batch["obs"][..., 0], batch["next_obs"][..., 0], range(16), strict=True):
                newest = int(stack[-1].item())
                first = max(10, newest - newest % 7)  # of its episode, or that is stored
                assert stack.tolist() == [max(first, newest - 2), max(first, newest - 1), newest]
                has_next = newest % 7 != 6 and newest != 59
                ahead = newest + 1 if is_stored or has_next else newest
                assert after.tolist() == [max(first, newest - 1), newest, ahead]
                if not is_stored:
                    assert batch.info["has_next"][i].item() == has_next


async def test_frames_after_several_steps() -> None:
    async with make(NStep(3, 0.9, next_keys=()), FrameStack(2, next_key="after")) as buffer:
        await buffer.extend(steps(40))
        batch = await buffer.sample(256)
        first, last = batch["obs"][:, 1, 0], batch["after"][:, 1, 0]
        assert torch.equal((last - first)[batch.info["has_next"]], batch.info["steps"][batch.info["has_next"]].float())
        assert (batch["after"][:, 0] <= batch["after"][:, 1]).all()


async def test_zeros_before_the_first_frame() -> None:
    async with make(FrameStack(4, pad="zero")) as buffer:
        items = steps(40)
        await buffer.extend({**items, "obs": items["obs"] + 100})
        batch = await buffer.sample(256)
        stack = batch["obs"][..., 0]
        position = (stack[:, -1] - 100) % 7
        assert torch.equal((stack == 0).sum(1), (3 - position).clamp(min=0).long())
        assert torch.equal(batch.info["frames_mask"], stack != 0)


async def test_joins_to_slices() -> None:
    joins = NStep(2, 0.5), FrameStack(2)
    async with make(*joins, sampler=SliceSampler(slice_len=4, end_key=ENDS)) as buffer:
        await buffer.extend(steps(40))
        batch = await buffer.sample()
        first = batch["obs"][:, :, 1, 0]
        assert batch["obs"].shape == (4, 4, 2, 5)
        assert batch.info["steps"].shape == batch["reward"].shape == (4, 4)
        assert torch.equal(batch["next_obs"][..., 0], first + batch.info["steps"])


def goals(count: int) -> dict[str, Any]:
    number = torch.arange(count)
    place = number.float()[:, None]
    obs = {"desired_goal": -1 - place, "achieved_goal": place}
    after = {"desired_goal": -1 - place, "achieved_goal": place + 1}
    return {"obs": obs, "next_obs": after, "reward": torch.full((count,), -1.0), "done": number % 5 == 4}


def reward(achieved: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    assert achieved.shape == goal.shape
    return torch.where((achieved == goal).all(-1), 10.0, 0.0)


@pytest.mark.parametrize("make_storage", [TensorStorage, ListStorage])
@pytest.mark.parametrize(("strategy", "least"), [("future", 0), ("final", 0), ("episode", -4)])
async def test_goals(strategy: str, least: int, make_storage: Callable[[int], Any]) -> None:
    relabel = Hindsight(lambda a, g: reward(a, g).numpy(), strategy=strategy, share=0.75)
    sampler = JoinedSampler(RandomSampler(), relabel, end_key="done")
    async with ReplayBuffer(make_storage(40), sampler=sampler, batch_size=400, generator=seeded()) as buffer:
        items = goals(40)
        if make_storage is ListStorage:
            pick = torch.utils._pytree.tree_map
            await buffer.extend([pick(lambda leaf, i=i: leaf[i], items) for i in range(40)])
        else:
            await buffer.extend(items)
        batch = await buffer.sample()
        changed = batch.info["relabelled"]
        assert 260 <= changed.sum() <= 340
        goal, place = batch["obs"]["desired_goal"][:, 0], batch["obs"]["achieved_goal"][:, 0]
        assert torch.equal(batch["next_obs"]["desired_goal"][:, 0], goal)
        assert torch.equal(goal[~changed], -1 - place[~changed])
        assert (batch["reward"][~changed] == -1).all()
        ahead = (goal - 1 - place)[changed]
        left = 4 - place[changed] % 5
        assert (ahead >= least).all()
        assert (ahead <= left).all()
        assert strategy != "final" or torch.equal(ahead, left)
        assert strategy == "final" or set(ahead.tolist()) == set(range(least, 5))
        assert torch.equal(batch["reward"][changed], torch.where(ahead == 0, 10.0, 0.0))


async def test_the_stored_items_stay_as_they_are() -> None:
    relabel = Hindsight(reward, share=1.0)
    sampler = JoinedSampler(RandomSampler(), relabel, end_key="done")
    async with ReplayBuffer(TensorStorage(40), sampler=sampler, batch_size=40, generator=seeded()) as buffer:
        await buffer.extend(goals(40))
        first = await buffer.sample()
        first["reward"].fill_(7)
        first["obs"]["desired_goal"].fill_(7)
        batch = await buffer.sample()
        assert not (batch["reward"] == 7).any()


async def test_tensors_of_a_batch_are_each_alone_in_their_memory() -> None:
    async with make(NStep(3, 0.9, next_keys=()), FrameStack(4, next_key="after"), prefetch=1) as buffer:
        await buffer.extend(steps(40))
        batch = await buffer.sample()
        for leaf in torch.utils._pytree.tree_leaves(batch.data):
            assert leaf.is_contiguous()
            assert leaf.untyped_storage().nbytes() < 2 * leaf.nbytes + 64
        batch["obs"].zero_()
        assert batch["after"].any()
        batch["reward"].zero_()
        assert batch.info["return"].any()
        assert len(pickle.dumps(batch)) < 16 * (8 * 20 + 100) + 4_000


@pytest.mark.parametrize("workers", [1, 3])
async def test_transforms_see_the_joined_batch_and_may_change_it(workers: int) -> None:
    def halved(data: Any) -> Any:
        data["reward"].div_(2)
        return {**data, "twice": data["next_obs"] * 2}

    joins = NStep(2, 0.5)
    async with make(joins, prefetch=2, workers=workers, transform=halved) as buffer, make(NStep(2, 0.5)) as plain:
        for each in (buffer, plain):
            await each.extend(steps(40))
        for _ in range(5):
            batch, expected = await buffer.sample(), await plain.sample()
            assert torch.equal(batch["reward"], expected["reward"] / 2)
            assert torch.equal(batch["twice"], expected["next_obs"] * 2)


async def test_large_gathers_in_threads_are_the_same() -> None:
    def items(count: int) -> dict[str, torch.Tensor]:
        return {**steps(count), "obs": torch.arange(count)[:, None].repeat(1, 20_000).float()}

    found = []
    for prefetch in (0, 2):
        async with make(NStep(2, 0.5), FrameStack(3), prefetch=prefetch) as buffer:
            await buffer.extend(items(40))
            found.append([await buffer.sample() for _ in range(4)])
            assert prefetch == 0 or buffer.stats().thread_gathers
    for one, other in zip(*found, strict=True):
        assert_same_batch(one, other)


async def test_a_field_that_items_lack_is_named() -> None:
    items = steps(20)
    del items["next_obs"]
    async with make(NStep(2, 0.5)) as buffer:
        await buffer.extend(items)
        with pytest.raises((SchemaError, PrefetchError)) as caught:
            await buffer.sample()
        assert "next_obs" in f"{caught.value}{caught.value.__cause__}"
    with pytest.raises(SchemaError, match="reward"):
        await make(NStep(2, 0.5)).extend(
            {"obs": torch.ones(3), "terminated": torch.ones(3), "truncated": torch.ones(3)}
        )


async def test_passes_end_as_without_joins() -> None:
    async with make(NStep(2, 0.5), sampler=SamplerWithoutReplacement(), prefetch=2) as buffer:
        await buffer.extend(steps(40))
        numbers = [number async for batch in buffer.epoch() for number in batch["obs"][:, 0].tolist()]
        assert sorted(numbers) == list(range(40))


ODD: dict[str, tuple[Callable[[Any], Any], list[Any], str]] = {
    "n": (lambda v: NStep(v, 0.9), ["x", None, 0, -1, 1.5, True], "n: expected"),
    "gamma": (lambda v: NStep(3, v), ["x", None, True, -0.1, 1.1, float("nan"), torch.ones(1)], "gamma: expected"),
    "reward_key": (lambda v: NStep(3, 0.9, reward_key=v), [None, 3, "", ["a"]], "reward_key: expected"),
    "terminated_key": (lambda v: NStep(3, 0.9, terminated_key=v), [3, "", ["a"]], "terminated_key: expected"),
    "next_keys": (lambda v: NStep(3, 0.9, next_keys=v), [None, 3, "", [3], {"a": 1}], "next_keys: expected"),
    "keys": (lambda v: NStep(3, 0.9, keys=v), [None, 3, [None]], "keys: expected"),
    "k": (lambda v: FrameStack(v), ["x", None, 0, 2.0, True], "k: expected"),
    "key": (lambda v: FrameStack(2, v), [None, 3, ""], "key: expected"),
    "next_key": (lambda v: FrameStack(2, next_key=v), [3, "", ["a"]], "next_key: expected"),
    "is_next_stored": (lambda v: FrameStack(2, next_key="a", is_next_stored=v), [None, 1, "x"], "is_next_stored: exp"),
    "no next_key": (lambda v: FrameStack(2, is_next_stored=v), [True], "next_key: expected"),
    "pad": (lambda v: FrameStack(2, pad=v), [None, 0, "last", []], "pad: expected"),
    "reward_fn": (lambda v: Hindsight(v), [None, 3, "x"], "reward_fn: expected"),
    "strategy": (lambda v: Hindsight(reward, strategy=v), [None, 3, "past"], "strategy: expected"),
    "share": (lambda v: Hindsight(reward, share=v), ["x", None, True, -0.1, 2, float("nan")], "share: expected"),
    "goal_key": (lambda v: Hindsight(reward, goal_key=v), [None, 3, [3]], "goal_key: expected"),
    "achieved_key": (lambda v: Hindsight(reward, achieved_key=v), [None, 3, ["a"]], "achieved_key: expected"),
    "hindsight reward_key": (lambda v: Hindsight(reward, reward_key=v), [None, 3], "reward_key: expected"),
    "sampler": (lambda v: JoinedSampler(v, NStep(3, 0.9), end_key="a"), [None, 3, RandomSampler], "sampler: expected"),
    "joins": (lambda v: JoinedSampler(RandomSampler(), v, end_key="a"), [None, 3, NStep], "joins: expected"),
    "end_key": (lambda v: JoinedSampler(RandomSampler(), NStep(3, 0.9), end_key=v), [3, [3]], "end_key: expected"),
}


@pytest.mark.parametrize("what", ODD)
def test_odd_arguments_are_refused_in_words(what: str) -> None:
    call, odd, message = ODD[what]
    for value in odd:
        with pytest.raises((TypeError, ValueError)) as caught:
            call(value)
        assert str(caught.value).startswith(message), f"{value!r}: {caught.value}"


def test_joins_that_do_not_go_together() -> None:
    returns = NStep(2, 0.9)
    with pytest.raises(ValueError, match="found one"):
        JoinedSampler(RandomSampler(), returns, Hindsight(reward), end_key="done")
    with pytest.raises(ValueError, match="found one"):
        JoinedSampler(RandomSampler(), Hindsight(reward), returns, end_key="done")
    with pytest.raises(ValueError, match="each kind once"):
        JoinedSampler(RandomSampler(), returns, NStep(3, 0.9), end_key="done")
    with pytest.raises(ValueError, match="ahead of FrameStack"):
        JoinedSampler(RandomSampler(), FrameStack(2), returns, end_key="done")
    with pytest.raises(TypeError, match="without joins"):
        JoinedSampler(JoinedSampler(RandomSampler(), returns, end_key="done"), FrameStack(2), end_key="done")
    with pytest.raises(TypeError, match="joins: expected at least one"):
        JoinedSampler(RandomSampler(), end_key="done")
    with pytest.raises(ValueError, match="end_key"):
        JoinedSampler(RandomSampler(), returns)


@pytest.mark.parametrize("trajectory_key", [None, "env"])
@pytest.mark.parametrize("at_once", [1, 40])
async def test_a_trajectory_does_not_go_on_in_another_table(trajectory_key: str | None, at_once: int) -> None:
    tables = TableWriter({"offline": 40, "online": 40})
    mixture = MixtureSampler({"offline": RandomSampler(), "online": RandomSampler()})
    sampler = JoinedSampler(mixture, NStep(3, 1.0), FrameStack(2), end_key=ENDS, trajectory_key=trajectory_key)
    async with ReplayBuffer(
        TensorStorage(80), writer=tables, sampler=sampler, batch_size=64, generator=seeded()
    ) as buffer:
        for start in range(0, 40, at_once):
            for table, sign in (("offline", -1), ("online", 1)):
                items = steps(at_once, start)
                items = {**items, "obs": sign * (1 + items["obs"]), "env": torch.zeros(at_once, dtype=torch.int64)}
                await buffer.extend({**items, "next_obs": items["obs"]}, table=table)
        batch = await buffer.sample()
        signs = torch.where(batch.info["table"] == 0, -1, 1)
        assert set(signs.tolist()) == {-1, 1}
        first, last = batch["obs"][:, 1, 0], batch["next_obs"][:, 0]
        assert torch.equal((last - first) * signs, batch.info["steps"] - 1.0)
        assert (batch["obs"][:, 0, 0] * signs > 0).all()


def test_a_sampler_with_joins_passes_on_everything() -> None:
    asked = {name for name in vars(Sampler) if not name.startswith("_")} - {"columns", "trusted", "counts_draws"}
    assert asked - vars(JoinedSampler).keys() <= {"combines_at_once", "hooks"}  # set for each object


async def test_what_rows_without_an_item_once_had_is_no_state() -> None:
    def make() -> ReplayBuffer:
        sampler = JoinedSampler(
            RandomSampler(),
            NStep(2, 0.9, reward_key="value", terminated_key=None, next_keys=()),
            end_key="done",
        )
        return ReplayBuffer(TensorStorage(8), sampler=sampler, batch_size=4, generator=seeded())

    def some_items(count: int) -> dict[str, torch.Tensor]:
        return {"value": torch.arange(1.0, count + 1), "done": torch.zeros(count, dtype=torch.bool)}

    original, restored = make(), make()
    await original.extend(some_items(4))
    for row in (3, 2, 1, 0):
        await original.remove(torch.tensor([row]))
    await restored.restore(await original.snapshot())
    for buffer in (original, restored):
        assert (await buffer.extend(some_items(1))).tolist() == [3]  # below it, rows have no item
    states = [encode((await buffer.state_dict())["sampler"]) for buffer in (original, restored)]
    assert difference(*states) is None
