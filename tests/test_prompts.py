"""Prompts: each once per epoch or by weights, none lost, none twice, across restores."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import (
    CheckpointCorruptError,
    Checkpointer,
    CheckpointMismatchError,
    ConsumingSampler,
    GroupSampler,
    PromptSource,
    ReplayBuffer,
    TensorStorage,
)
from tests.helpers import seeded, turns, within
from tests.sampler.chi_square import assert_uniform

if TYPE_CHECKING:
    from pathlib import Path


def made(length: int = 10, *, seed: int = 0, **more: Any) -> PromptSource[str]:
    return PromptSource([f"prompt {i}" for i in range(length)], generator=seeded(seed), **more)


async def take(source: PromptSource[str], count: int) -> list[int]:
    """The next ids, which are done at once."""
    found = []
    for _ in range(count):
        id, prompt = await within(source.next())
        assert prompt == f"prompt {id}"
        assert source.done(id)
        found.append(id)
    return found


async def test_each_epoch_has_every_prompt_once_in_an_order_of_its_own() -> None:
    source = made(epochs=3)
    epochs = [await take(source, 10) for _ in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert (source.epoch, source.position) == (3, 0)
    with pytest.raises(StopAsyncIteration):
        await source.next()
    assert await take(made(), 30) == [id for epoch in epochs for id in epoch]
    assert await take(made(seed=1), 10) != epochs[0]
    assert await take(made(shuffle=False), 12) == [*range(10), 0, 1]


async def test_async_for_ends_with_the_last_epoch_and_goes_on_for_what_is_put_back() -> None:
    source = made(3, epochs=1, shuffle=False)
    assert [id async for id, _ in source] == [0, 1, 2]
    assert source.outstanding == [0, 1, 2]
    source.put_back(1)
    assert [id async for id, _ in source] == [1]


async def test_without_end() -> None:
    assert Counter(await take(made(7), 70)) == dict.fromkeys(range(7), 10)


@pytest.mark.parametrize("weights", [None, [1.0] * 10], ids=["plain", "weights"])
async def test_what_was_not_done_is_given_again_first(weights: Any) -> None:
    source, other = made(weights=weights), made(seed=5, weights=weights)
    under_way = [(await source.next())[0] for _ in range(5)]
    source.done(under_way[1])
    source.put_back(under_way[3])
    state = source.state_dict()
    other.load_state_dict(state)
    assert other.counts == source.counts._replace(handed_out=2, outstanding=0, waiting=4)
    expected = [under_way[0], under_way[2], under_way[4], under_way[3]]
    assert await take(other, 4) == expected
    fresh = await take(other, 12)
    assert await take(source, 1) == [under_way[3]]
    assert await take(source, 12) == fresh
    assert not source.done(under_way[3])
    assert source.counts.duplicates == 1


@pytest.mark.parametrize(
    "settings",
    [{}, {"shuffle": False}, {"weights": np.arange(7.0)}, {"epochs": 2}],
    ids=["shuffled", "in-order", "weights", "two-epochs"],
)
async def test_exact_resume_at_every_point(settings: dict[str, Any]) -> None:
    async def step(source: PromptSource[str], number: int, found: list[int]) -> None:
        choose = random.Random(number)
        try:
            found.append((await source.next())[0])
        except StopAsyncIteration:
            found.append(-1)
        if source.outstanding and choose.random() < 0.8:
            getattr(source, choose.choice(("done", "done", "put_back", "discard")))(source.outstanding[0])
        if "weights" in settings and choose.random() < 0.4:
            source.set_weights([choose.randrange(7)], choose.random() + 0.1)

    for at in range(20):
        source: PromptSource[str] = made(7, **settings)
        found: list[int] = []
        for number in range(at):
            await step(source, number, found)
        for id in source.outstanding:  # so that both go on from the same
            source.put_back(id)
        other: PromptSource[str] = made(7, seed=3, **{**settings, "weights": settings.get("weights")})
        other.load_state_dict(source.state_dict())
        expected: list[int] = []
        resumed: list[int] = []
        for number in range(at, at + 12):
            await step(source, number, expected)
            await step(other, number, resumed)
        assert resumed == expected
        assert other.counts == source.counts


class Model:
    """The same with lists."""

    def __init__(self, orders: list[list[int]]) -> None:
        self.fresh = [id for order in orders for id in order]
        self.line: list[int] = []
        self.out: list[int] = []
        self.settled = 0

    def next(self) -> int | None:
        if not self.line and not self.fresh:
            return None
        id = (self.line or self.fresh).pop(0)
        self.out.append(id)
        return id

    def settle(self, id: int) -> bool:
        if id not in self.out:
            return False
        self.out.remove(id)
        self.settled += 1
        return True

    def put_back(self, id: int) -> bool:
        if id in self.out:
            self.out.remove(id)
            self.settled += 1
        elif id in self.line:
            return False
        self.line.append(id)
        return True

    def restart(self) -> None:
        self.line, self.out = [*self.out, *self.line], []


@pytest.mark.parametrize("seeds", [range(15), pytest.param(range(15, 500), marks=pytest.mark.slow)], ids=["15", "500"])
async def test_histories_are_those_of_lists(seeds: range) -> None:
    for seed in seeds:
        choose, reference = random.Random(seed), made(6, seed=seed)
        model = Model([await take(reference, 6) for _ in range(4)])
        source: PromptSource[str] = made(6, seed=seed, epochs=4)
        for _ in range(120):
            what = choose.choices(["next", "done", "discard", "put_back", "restart"], [6, 3, 1, 1.5, 0.4])[0]
            id = choose.choice(source.outstanding or [0]) if choose.random() < 0.8 else choose.randrange(6)
            if what == "next":
                try:
                    assert (await source.next())[0] == model.next()
                except StopAsyncIteration:
                    assert model.next() is None
            elif what == "restart":
                state, source = source.state_dict(), made(6, seed=1, epochs=4)
                source.load_state_dict(state)
                model.restart()
            elif what == "put_back":
                assert source.put_back(id) == model.put_back(id)
            else:
                assert getattr(source, what)(id) == model.settle(id)
            counts = source.counts
            assert source.outstanding == model.out
            assert counts.waiting == len(model.line)
            assert counts.handed_out == counts.done + counts.discarded + counts.put_back + counts.outstanding
            assert counts.handed_out - counts.outstanding == model.settled


# -- waiting ----------------------------------------------------------------------------------------------------------


async def test_workers_end_together_and_none_before_the_last_prompt_is_done() -> None:
    source = made(12, epochs=1)
    answered: list[int] = []
    fails = {3, 8}

    async def work() -> None:
        async for id, _ in source.until_done():
            await turns(1 + id % 3)
            if id in fails:
                fails.remove(id)
                source.put_back(id)
            else:
                answered.append(id)
                source.done(id)

    await within(asyncio.gather(*(work() for _ in range(5))))
    assert sorted(answered) == list(range(12))
    assert source.counts.done == 12


async def test_a_call_that_waits_is_woken_or_cancelled() -> None:
    source = made(1, epochs=1)
    id, _ = await source.next()
    waiting, other = (asyncio.ensure_future(source.next(wait=True)) for _ in range(2))
    await turns()
    assert not waiting.done()
    waiting.cancel()
    await turns()
    source.put_back(id)
    assert (await within(other))[0] == id
    ended = asyncio.ensure_future(source.next(wait=True))
    await turns()
    source.discard(id)
    with pytest.raises(StopAsyncIteration):
        await within(ended)


async def test_a_prompt_that_cannot_be_read_is_not_lost() -> None:
    class Flaky(list[str]):
        broken = True

        def __getitem__(self, index: Any) -> Any:
            if self.broken:
                raise OSError("the disk is gone")
            return super().__getitem__(index)

    dataset = Flaky(["a", "b"])
    source = PromptSource(dataset, shuffle=False)
    with pytest.raises(OSError, match="the disk is gone"):
        await source.next()
    dataset.broken = False
    assert await source.next() == (0, "a")
    assert source.counts.handed_out == 1


# -- weights ----------------------------------------------------------------------------------------------------------


async def test_weights_are_chances() -> None:
    weights = np.array([0.0, 1.0, 2.0, 5.0])
    drawn = np.bincount(await take(made(4, weights=weights), 8000), minlength=4)
    assert drawn[0] == 0
    expected = 8000 * weights[1:] / 8
    assert (((drawn[1:] - expected) ** 2 / expected).sum()) < 14.0  # of two degrees of freedom: one in a thousand
    assert_uniform(np.array(await take(made(20, weights=torch.ones(20)), 8000)), 20)


async def test_weights_change_for_the_draws_from_then_on() -> None:
    source = made(4, weights=[1, 1, 1, 1], epochs=10)
    source.set_weights(torch.tensor([0, 1, 2]), 0.0)
    assert await take(source, 5) == [3] * 5
    source.set_weights([1, 1, 3], [5, 0.5, 0])
    assert source.weights is not None
    assert source.weights.tolist() == [0, 0.5, 0, 0]
    assert await take(source, 5) == [1] * 5
    with pytest.raises(ValueError, match="weights: expected some whose sum is positive"):
        source.set_weights([1], [0.0])
    assert await take(source, 2) == [1] * 2
    other = made(4, weights=torch.ones(4), seed=9)
    other.load_state_dict(source.state_dict())
    assert await take(other, 3) == [1] * 3


@pytest.mark.parametrize("weights", [None, np.ones(10**6)], ids=["shuffled", "weights"])
async def test_a_million_prompts_hold_up_nobody(weights: Any) -> None:
    source = PromptSource(range(10**6), weights=weights, generator=seeded())
    longest = 0.0
    for _ in range(300):
        start = time.perf_counter()
        id, prompt = await source.next()
        source.done(id)
        longest = max(longest, time.perf_counter() - start)
        assert id == prompt
    assert longest < 0.1
    state = source.state_dict()
    assert sum(value.numel() for value in state.values() if isinstance(value, torch.Tensor)) <= 10**6


# -- with buffers and checkpoints -------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 2])
async def test_none_is_lost_and_none_comes_twice_over_many_restarts(tmp_path: Path, depth: int) -> None:
    """Workers with answers in flight are killed again and again; each prompt is trained on once."""
    trained: list[int] = []
    choose = random.Random(depth)
    for run in range(12):
        source = made(40, seed=run, epochs=1)
        buffer = ReplayBuffer(
            TensorStorage(64), sampler=ConsumingSampler(), batch_size=4, prefetch=depth, generator=seeded()
        )
        checkpointer = Checkpointer(tmp_path, keep=1)
        parts: dict[str, Any] = {"buffer": buffer, "prompts": source}
        if checkpointer.latest() is not None:
            restored = await checkpointer.restore(**parts)
            trained = restored.values["trained"]
            if len(trained) == 40:
                break

        async def work(source: PromptSource[str], buffer: ReplayBuffer) -> None:
            async for id, _ in source.until_done():
                await turns(1 + id % 4)
                await buffer.add({"id": torch.tensor(id)})
                source.done(id)

        async with buffer:
            workers = [asyncio.create_task(work(source, buffer)) for _ in range(3)]
            for _ in range(2):
                if len(trained) < 40:
                    trained = trained + (await within(buffer.sample()))["id"].tolist()
            await checkpointer.save(run, trained=trained, **parts)
            await turns(choose.randrange(12))  # what comes after the checkpoint is lost
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    assert sorted(trained) == list(range(40))


async def test_prompts_of_groups_that_are_refused_are_asked_again_or_replaced() -> None:
    source = made(6, epochs=1, shuffle=False)
    sampler = GroupSampler(
        "prompt",
        2,
        filter=lambda group: bool(group["reward"][0] != group["reward"][1]),
        filter_keys="reward",
        on_drop=lambda key, cause: source.put_back(key) if key < 3 else source.discard(key),
    )
    buffer = ReplayBuffer(TensorStorage(12), sampler=sampler, batch_size=2, generator=seeded())
    asked: Counter[int] = Counter()
    async with buffer:
        async for id, _ in source:
            asked[id] += 1
            rewards = torch.tensor([0.0, float(asked[id] > 1)])
            await buffer.extend({"prompt": torch.tensor([id, id]), "reward": rewards})
            if id in source.outstanding:
                source.done(id)
        found = [(await within(buffer.sample())).info["group"].item() for _ in range(sampler.waiting)]
    assert asked == {0: 2, 1: 2, 2: 2, 3: 1, 4: 1, 5: 1}
    assert found == [0, 1, 2]
    assert source.counts[:5] == (9, 3, 3, 3, 0)


# -- what is refused --------------------------------------------------------------------------------------------------


def tensor(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(
    ("where", "value", "error"),
    [
        ("prompts", 11, CheckpointMismatchError),
        ("shuffle", False, CheckpointMismatchError),
        ("shuffle", 1, CheckpointCorruptError),
        ("weights", None, CheckpointMismatchError),
        ("weights", torch.ones(10), CheckpointCorruptError),
        ("weights", torch.ones(9, dtype=torch.float64), CheckpointCorruptError),
        ("weights", torch.zeros(10, dtype=torch.float64), CheckpointCorruptError),
        ("weights", -torch.ones(10, dtype=torch.float64), CheckpointCorruptError),
        ("weights", torch.full((10,), torch.nan, dtype=torch.float64), CheckpointCorruptError),
        ("weights", torch.full((10,), 1e308, dtype=torch.float64), CheckpointCorruptError),
        ("seed", -1, CheckpointCorruptError),
        ("epoch", 1.0, CheckpointCorruptError),
        ("position", 11, CheckpointCorruptError),
        ("again", tensor(10), CheckpointCorruptError),
        ("again", tensor(-1), CheckpointCorruptError),
        ("again", torch.zeros(2), CheckpointCorruptError),
        ("counts", {}, CheckpointCorruptError),
        ("counts", dict.fromkeys(("handed_out", "done", "discarded", "put_back"), 1), CheckpointCorruptError),
        (
            "counts",
            dict.fromkeys(("handed_out", "done", "discarded", "put_back", "asked_again", "duplicates"), 1),
            CheckpointCorruptError,
        ),
    ],
)
async def test_a_state_that_is_none_is_refused(where: str, value: Any, error: type[Exception]) -> None:
    source, twin = made(weights=[1] * 10), made(weights=[1] * 10)
    for each in (source, twin):
        await take(each, 3)
        await each.next()
    state = source.state_dict()
    state[where] = value
    before = source.counts
    with pytest.raises(error):
        source.load_state_dict(state)
    assert source.counts == before
    assert await take(source, 5) == await take(twin, 5)


async def test_a_longer_run_goes_on_and_a_shorter_one_is_over() -> None:
    source = made(epochs=2)
    await take(source, 20)
    longer, shorter = made(epochs=3), made(epochs=1)
    longer.load_state_dict(source.state_dict())
    shorter.load_state_dict(source.state_dict())
    assert sorted(await take(longer, 10)) == list(range(10))
    for over in (shorter, longer, source):
        with pytest.raises(StopAsyncIteration):
            await over.next()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dataset": []}, ValueError, "dataset: expected at least one prompt"),
        ({"dataset": iter("ab")}, TypeError, "dataset: expected a sequence of prompts"),
        ({"dataset": "abc"}, TypeError, "dataset: expected a sequence of prompts"),
        ({"shuffle": 1}, TypeError, "shuffle: expected a bool"),
        ({"epochs": 0}, ValueError, "epochs: expected at least 1"),
        ({"generator": 3}, TypeError, "generator: expected a torch.Generator or None, found 3"),
        ({"weights": [1.0]}, ValueError, "weights: expected 2 numbers, found 1"),
        ({"weights": [0, 0]}, ValueError, "weights: expected some whose sum is positive"),
        ({"weights": [1, -1]}, ValueError, "weights: expected finite numbers"),
        ({"weights": [1, float("nan")]}, ValueError, "weights: expected finite numbers"),
        ({"weights": ["x", "y"]}, TypeError, "weights: expected numbers"),
        ({"weights": [True, False]}, TypeError, "weights: expected real numbers"),
        ({"weights": [1, 1], "shuffle": False}, ValueError, "shuffle: expected True"),
    ],
)
def test_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PromptSource(**{"dataset": ["a", "b"], **arguments})


@pytest.mark.parametrize("call", ["done", "discard", "put_back"])
@pytest.mark.parametrize("id", [10, -1, "x", None, 1.0, True, [1]])
def test_ids_that_there_are_not(call: str, id: Any) -> None:
    source = made()
    with pytest.raises((TypeError, ValueError), match="id: expected"):
        getattr(source, call)(id)
    assert not source.done(np.int64(3))  # type: ignore[arg-type]
    assert not source.done(torch.tensor(3))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ids", "weights", "error", "message"),
    [
        ([10], 1.0, ValueError, "ids: expected numbers from 0 to 9"),
        ([0.5], 1.0, TypeError, "ids: expected integers"),
        ("x", 1.0, TypeError, "ids: expected integers"),
        ([1, 2], [1.0], ValueError, "weights: expected 2 numbers, found 1"),
        ([1], "x", TypeError, "weights: expected numbers"),
        ([1], float("inf"), ValueError, "weights: expected finite numbers"),
    ],
)
def test_weights_that_are_none(ids: Any, weights: Any, error: type[Exception], message: str) -> None:
    source = made(weights=[1] * 10)
    with pytest.raises(error, match=message):
        source.set_weights(ids, weights)
    with pytest.raises(TypeError, match="set_weights: expected a source made with weights"):
        made().set_weights([1], 1.0)
