"""Prompts that are in a checkpoint elsewhere, as in a reservation: not given again, and still under way."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
import torch

from asyncbuf import CheckpointCorruptError, PromptSource
from tests.helpers import seeded, turns, within


def made(length: int = 6, **more: Any) -> PromptSource[int]:
    settings: dict[str, Any] = {"shuffle": False, "generator": seeded(0), **more}
    return PromptSource(range(length), **settings)


def again(source: PromptSource[int], **more: Any) -> PromptSource[int]:
    """After a restore."""
    restored = made(len(source), **more)
    restored.load_state_dict(source.state_dict())
    return restored


def closes(source: PromptSource[int]) -> bool:
    counts = source.counts
    return counts.handed_out == counts.done + counts.discarded + counts.put_back + counts.outstanding


async def taken(source: PromptSource[int], count: int) -> list[int]:
    return [(await within(source.next()))[0] for _ in range(count)]


async def test_a_held_prompt_is_not_given_again() -> None:
    source = made(epochs=1)
    assert await taken(source, 4) == [0, 1, 2, 3]
    assert source.hold(2)
    assert source.hold(1)
    assert not source.hold(1)  # once each
    assert not source.hold(5)  # not under way
    source = again(source, epochs=1)
    assert source.outstanding == [1, 2]
    assert closes(source)
    assert await taken(source, 4) == [0, 3, 4, 5]
    assert again(again(source, epochs=1), epochs=1).outstanding == [1, 2]
    for id in range(6):
        assert source.done(id)
    assert not source.done(1)
    assert closes(source)
    assert source.counts.done == 6


@pytest.mark.parametrize("end", ["done", "discard", "put_back"])
async def test_who_waits_for_the_end_waits_for_held_ones(end: str) -> None:
    source = made(1, epochs=1)
    await taken(source, 1)
    source.hold(0)
    source = again(source, epochs=1)
    waiting = asyncio.create_task(source.next(wait=True))
    await turns()
    assert not waiting.done()
    assert getattr(source, end)(0)
    if end == "put_back":
        assert await within(waiting) == (0, 0)
        assert again(source, epochs=1).outstanding == []  # it is not held any more
    else:
        with pytest.raises(StopAsyncIteration):
            await within(waiting)


async def test_a_prompt_that_is_under_way_twice() -> None:
    source = made(2)
    await taken(source, 4)
    assert source.hold(0)
    restored = again(source)
    assert restored.outstanding == [0]
    assert sorted(await taken(restored, 3)) == [0, 1, 1]
    assert source.done(0)  # the held one
    assert again(source).outstanding == []
    assert source.hold(0)
    assert not source.hold(0)


async def test_a_state_without_held_prompts_is_taken() -> None:
    source = made()
    await taken(source, 3)
    state = source.state_dict()
    del state["held"]
    restored = made()
    restored.load_state_dict(state)
    assert await taken(restored, 3) == [0, 1, 2]


@pytest.mark.parametrize("held", [[6], [-1], [0, 1, 2], [], [1.0], "no"], ids=str)
async def test_a_forged_state_changes_nothing(held: Any) -> None:
    source = made()
    await taken(source, 3)
    source.hold(0)
    source.hold(1)
    state = source.state_dict()
    state["held"] = (
        held if isinstance(held, str) else torch.tensor(held, dtype=torch.float32 if held == [1.0] else None)
    )
    if held == []:
        state["held"] = torch.zeros(0, dtype=torch.int64)
    target = made()
    await taken(target, 1)
    before = str(target.state_dict())
    with pytest.raises(CheckpointCorruptError):
        target.load_state_dict(state)
    assert str(target.state_dict()) == before


@pytest.mark.parametrize("id", [6, -1, 1.5, "1"], ids=repr)
def test_odd_ids(id: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="id: expected"):
        made().hold(id)


@pytest.mark.parametrize("seed", range(8))
async def test_programs_at_random_lose_none_and_answer_none_twice(seed: int) -> None:
    rng = random.Random(seed)
    source = made(5, epochs=4, shuffle=True)
    out: list[int] = []  # handed out, not held
    held: list[int] = []
    settled: Counter[int] = Counter()
    state, kept = source.state_dict(), (Counter[int](), list[int]())
    for _ in range(400):
        what = rng.choice(["next", "next", "hold", "done", "back", "save", "crash"])
        if what == "next":
            try:
                out.append((await within(source.next()))[0])
            except StopAsyncIteration:
                if not out + held:
                    break
        elif what == "hold" and out:
            held.append(out.pop(rng.randrange(len(out))))
            assert source.hold(held[-1])
        elif what == "done" and held:
            id = held.pop(rng.randrange(len(held)))
            settled[id] += 1
            assert source.done(id)
        elif what == "back" and held:
            assert source.put_back(held.pop(rng.randrange(len(held))))
        elif what == "save":
            state, kept = source.state_dict(), (settled.copy(), held.copy())
        elif what == "crash" and rng.random() < 0.3:
            source = made(5, epochs=4, shuffle=True)
            source.load_state_dict(state)
            settled, held, out = kept[0].copy(), kept[1].copy(), []
        assert Counter(source.outstanding) == Counter(out) + Counter(held)
        assert closes(source)
    for id in out + held:
        source.done(id)
        settled[id] += 1
    async for id, _ in source:
        source.done(id)
        settled[id] += 1
    assert settled == dict.fromkeys(range(5), 4)
