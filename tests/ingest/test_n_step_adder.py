"""Items with n-step returns, made before they are written."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import (
    BufferClosedError,
    CheckpointCorruptError,
    Checkpointer,
    JoinedSampler,
    NStep,
    RandomSampler,
    ReplayBuffer,
    SchemaError,
    TensorStorage,
)
from tests.helpers import seeded, turns, within

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from asyncbuf import NStepAdder


class Step:
    """What a plain model knows of an item."""

    def __init__(self, number: int, env: int, ends: bool, terminated: bool) -> None:
        self.number, self.env, self.ends, self.terminated = number, env, ends, terminated


def batch_of(steps: list[Step]) -> dict[str, torch.Tensor]:
    number = torch.tensor([step.number for step in steps])
    flags = {
        "terminated": torch.tensor([step.terminated for step in steps]),
        "truncated": torch.tensor([step.ends and not step.terminated for step in steps]),
    }
    env = torch.tensor([step.env for step in steps])
    return {
        "obs": number[:, None].float(),
        "next_obs": number[:, None] + 0.5,
        "reward": 1 + number,
        "env": env,
        **flags,
    }


def item_of(step: Step) -> dict[str, torch.Tensor]:
    return {key: value[0] for key, value in batch_of([step]).items()}


class Model:
    """The same in plain Python, one item at a time."""

    def __init__(self, n: int, gamma: float) -> None:
        self.n, self.gamma = n, gamma
        self.waiting: list[Step] = []
        self.written: list[tuple[float, ...]] = []

    def take(self, steps: list[Step], *, flushes: bool = False) -> None:
        self.waiting = self.waiting + steps
        rest = []
        for place, first in enumerate(self.waiting):
            way: list[Step] = []
            for step in self.waiting[place:]:
                if step.env == first.env and len(way) < self.n and not (way and way[-1].ends):
                    way.append(step)
            if len(way) < self.n and not way[-1].ends and not flushes:
                rest.append(first)
                continue
            total = sum(self.gamma**k * (1 + step.number) for k, step in enumerate(way))
            last = way[-1]
            discount = 0.0 if last.terminated else self.gamma ** len(way)
            self.written.append((first.number, total, last.number + 0.5, len(way), discount))
        self.waiting = rest


def make(n: int = 3, gamma: float = 0.5, capacity: int = 2_000, **options: Any) -> tuple[ReplayBuffer, NStepAdder]:
    buffer = ReplayBuffer(TensorStorage(capacity), batch_size=4, generator=seeded(), **options)
    return buffer, buffer.adder(NStep(n, gamma), end_key=("terminated", "truncated"), trajectory_key="env")


async def stored(buffer: ReplayBuffer) -> list[tuple[float, ...]]:
    """What the model calls written."""
    if not len(buffer):
        return []
    (chunk,) = (await buffer.state_dict())["storage"]["chunks"]
    columns = (chunk["obs"][:, 0], chunk["reward"], chunk["next_obs"][:, 0], chunk["steps"], chunk["discount"])
    return [tuple(row) for row in torch.stack([column.double() for column in columns], 1).tolist()]


def same(found: list[tuple[float, ...]], expected: list[tuple[float, ...]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.loops_in_turn
@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 2_000), marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
async def test_what_is_written_is_what_the_model_says(seeds: range) -> None:
    for seed in seeds:
        choose = random.Random(seed)
        n, gamma, envs = choose.choice((1, 2, 3, 6)), choose.choice((0.5, 0.9)), choose.choice((1, 2, 5))
        buffer, adder = make(n, gamma)
        model, number = Model(n, gamma), 0
        for _ in range(20):
            count = choose.choice((1, 1, 2, envs, 9))
            steps = []
            for _ in range(count):
                ends = choose.random() < 0.2
                steps.append(Step(number, number % envs, ends, ends and choose.random() < 0.5))
                number += 1
            if choose.random() < 0.1:
                await adder.flush()
                model.take([], flushes=True)
            if choose.random() < 0.1:
                state = adder.state_dict()
                adder = make_adder(buffer, n, gamma)
                adder.load_state_dict(state)
            if count == 1 and choose.random() < 0.5:
                await adder.add(item_of(steps[0]))
            else:
                await adder.extend(batch_of(steps))
            model.take(steps)
            assert len(adder) == len(model.waiting)
            assert len(buffer) == len(model.written)
        same(await stored(buffer), model.written)


def make_adder(buffer: ReplayBuffer, n: int = 3, gamma: float = 0.5) -> NStepAdder:
    return buffer.adder(NStep(n, gamma), end_key=("terminated", "truncated"), trajectory_key="env")


def steps_of(count: int, start: int = 0) -> list[Step]:
    return [Step(number, number % 2, number % 9 == 8, number % 9 == 8) for number in range(start, start + count)]


async def test_written_and_drawn_returns_are_the_same() -> None:
    drawn = JoinedSampler(RandomSampler(), NStep(3, 0.5), end_key=("terminated", "truncated"), trajectory_key="env")
    plain, joined = make()[0], ReplayBuffer(TensorStorage(100), sampler=drawn, batch_size=64, generator=seeded())
    adder = make_adder(plain)
    items = batch_of(steps_of(50))
    async with joined:
        await joined.extend(items)
        await adder.extend(items)
        await adder.flush()
        expected = {row[0]: row for row in await stored(plain)}
        batch = await joined.sample()
        for i, number in enumerate(batch["obs"][:, 0].tolist()):
            found = (
                number,
                batch["reward"][i].item(),
                batch["next_obs"][i].item(),
                batch.info["steps"][i].item(),
                batch.info["discount"][i].item(),
            )
            assert found == pytest.approx(expected[number])


@asynccontextmanager
async def held(buffer: ReplayBuffer) -> AsyncIterator[None]:
    """Somebody else has frozen the buffer."""
    begun, over = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with buffer.frozen():
            begun.set()
            await over.wait()

    holding = asyncio.create_task(hold())
    await within(begun.wait())
    yield
    over.set()
    await within(holding)


async def test_a_cancelled_call_has_written_nothing_and_can_be_made_again() -> None:
    buffer, adder = make()
    await adder.extend(batch_of(steps_of(20)))
    before, waiting = len(buffer), len(adder)
    async with buffer:
        async with held(buffer):
            task = asyncio.create_task(adder.extend(batch_of(steps_of(10, 20))))
            await turns(5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (len(buffer), len(adder)) == (before, waiting)
        await adder.extend(batch_of(steps_of(10, 20)))
    model = Model(3, 0.5)
    model.take(steps_of(20))
    model.take(steps_of(10, 20))
    same(await stored(buffer), model.written)


async def test_calls_that_overlap_take_turns() -> None:
    buffer, adder = make()
    async with buffer:
        async with held(buffer):
            calls = [asyncio.create_task(adder.extend(batch_of(steps_of(7, start)))) for start in range(0, 70, 7)]
            await turns(5)
        await within(asyncio.gather(*calls))
    model = Model(3, 0.5)
    for start in range(0, 70, 7):
        model.take(steps_of(7, start))
    same(await stored(buffer), model.written)


async def test_large_writes_in_a_thread() -> None:
    buffer, adder = make(capacity=100)
    items = batch_of(steps_of(60))
    await adder.extend({**items, "wide": torch.zeros(60, 40_000)})
    model = Model(3, 0.5)
    model.take(steps_of(60))
    assert len(adder) == len(model.waiting)
    assert len(buffer) == len(model.written)


async def test_wrong_items_change_nothing() -> None:
    buffer, adder = make()
    good = batch_of(steps_of(5))
    await adder.extend(good)
    before = adder.state_dict()
    for wrong, message in (
        ({**good, "more": torch.ones(5)}, "unknown ['more']"),
        ({**good, "obs": torch.ones(5, 2)}, "obs: expected"),
        ({**good, "obs": torch.ones(4, 1)}, "expected as many items"),
        ({key: value for key, value in good.items() if key != "reward"}, "expected items with the field 'reward'"),
        ({key: value for key, value in good.items() if key != "next_obs"}, "expected items with the field 'next_obs'"),
        ({**good, "steps": torch.ones(5)}, "steps: expected items without"),
        ({**good, "env": torch.ones(5, 2)}, "env: expected one value"),
        ({**good, "obs": "x"}, "obs: expected"),
        (torch.ones(5), "expected items"),
        ({}, "expected items"),
    ):
        with pytest.raises(SchemaError) as caught:
            await adder.extend(wrong)
        assert message in str(caught.value)
    assert str(adder.state_dict()) == str(before)
    await buffer.finish()
    with pytest.raises(BufferClosedError):
        await adder.flush()
    with pytest.raises(BufferClosedError):
        await adder.add(item_of(steps_of(1)[0]))
    assert len(adder) == len(before["items"][0])


async def test_a_checkpoint_has_the_items_that_wait(tmp_path: Path) -> None:
    buffer, adder = make()
    checkpointer = Checkpointer(tmp_path)
    await adder.extend(batch_of(steps_of(20)))
    await checkpointer.save(1, buffer=buffer, adder=adder)
    other = make()
    await checkpointer.restore(buffer=other[0], adder=other[1])
    for each in ((buffer, adder), other):
        await each[1].extend(batch_of(steps_of(20, 20)))
        await each[1].flush()
    assert await stored(buffer) == await stored(other[0])
    assert len(adder) == len(other[1]) == 0


async def test_forged_states_change_nothing() -> None:
    _, adder = make()
    await adder.extend(batch_of(steps_of(5)))
    state = adder.state_dict()
    before = str(state)
    odd: list[Any] = [
        None,
        [],
        {},
        {"structure": None},
        {"structure": None, "items": [torch.ones(2)]},
        {**state, "items": state["items"][:-1]},
        {**state, "items": [torch.ones(2), *state["items"][1:]]},
        {**state, "items": ["x" for _ in state["items"]]},
        {**state, "items": [torch.ones(0) for _ in state["items"]]},
        {**state, "structure": "x"},
        {**state, "more": 1},
    ]
    for forged in odd:
        with pytest.raises(CheckpointCorruptError):
            adder.load_state_dict(forged)
        assert str(adder.state_dict()) == before


def test_odd_arguments_are_refused_in_words() -> None:
    buffer = ReplayBuffer(TensorStorage(9))
    odd: Any
    for odd in (None, 3, "x", NStep, RandomSampler()):
        with pytest.raises(TypeError, match=r"^returns: expected"):
            buffer.adder(odd, end_key="done")
    for odd in (3, [3]):
        with pytest.raises(TypeError, match=r"^end_key: expected"):
            buffer.adder(NStep(3, 0.9), end_key=odd)
        with pytest.raises(TypeError, match=r"^trajectory_key: expected"):
            buffer.adder(NStep(3, 0.9), trajectory_key=odd)
    with pytest.raises(ValueError, match="found neither"):
        buffer.adder(NStep(3, 0.9))
