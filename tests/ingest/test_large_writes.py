"""A large write: the sampler is told of it in parts, and nothing can be seen of that."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import (
    AsyncBufError,
    ConsumingSampler,
    Draw,
    GroupSampler,
    JoinedSampler,
    MixtureSampler,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    Rows,
    Sampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StratifiedSampler,
    TableWriter,
    TensorStorage,
    TokenBudgetSampler,
    TrajectorySampler,
    WriteEvent,
)
from asyncbuf._ingest.write_path import _MOST_TOLD
from asyncbuf._plain.codec import encode
from asyncbuf.testing import assert_same_batch, difference
from tests.helpers import seeded, turns, within

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = 3 * _MOST_TOLD + 100
KEYS: dict[str, Any] = {"end_key": "done", "trajectory_key": "env"}
SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "prioritized": lambda: PrioritizedSampler(priority_key="value"),
    "slices": lambda: SliceSampler(slice_len=4, **KEYS),
    "slices-passes": lambda: SliceSamplerWithoutReplacement(slice_len=4, **KEYS),
    "trajectories": lambda: TrajectorySampler(16, **KEYS),
    "joined": lambda: JoinedSampler(
        RandomSampler(), NStep(3, 0.9, reward_key="value", terminated_key="done", next_keys=()), **KEYS
    ),
    "consuming": ConsumingSampler,
    "groups": lambda: GroupSampler("env", 8, filter=lambda group: np.ptp(group["value"]) > 5, filter_keys="value"),
    "stratified": lambda: StratifiedSampler("env"),
    "tokens": lambda: TokenBudgetSampler(9, "env"),
    "mixture": lambda: MixtureSampler(
        {"one": SliceSampler(slice_len=4, **KEYS), "other": SliceSampler(slice_len=4, **KEYS)}, when_empty="others"
    ),
}


def items(count: int, start: int = 0) -> dict[str, torch.Tensor]:
    number = torch.arange(start, start + count)
    return {"value": (number % 7).float(), "done": number % 31 > 28, "env": number % 3, "number": number}


def make(name: str) -> tuple[ReplayBuffer, dict[str, str]]:
    has_tables = name == "mixture"
    writer = TableWriter({"one": ROWS - 50, "other": 50}) if has_tables else None
    buffer = ReplayBuffer(
        TensorStorage(ROWS), sampler=SAMPLERS[name](), writer=writer, batch_size=16, generator=seeded()
    )
    return buffer, {"table": "one"} if has_tables else {}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("count", [_MOST_TOLD + 1, ROWS - 50])
async def test_one_write_is_as_several(name: str, count: int) -> None:
    (one, into), (several, _) = make(name), make(name)
    async with one, several:
        for start in (
            (0, 1_000) if name not in ("consuming", "groups", "tokens") else (0,)
        ):  # it frees rows, which one write fills otherwise
            await one.extend(items(count, start), **into)
            for first in range(0, count, _MOST_TOLD):
                await several.extend(items(min(_MOST_TOLD, count - first), start + first), **into)
            states = [encode((await each.state_dict())["sampler"]) for each in (one, several)]
            assert difference(*states) is None
            for _ in range(3):
                assert_same_batch(await within(one.sample()), await within(several.sample()))


@pytest.mark.parametrize("has_buffer", [False, True])
async def test_others_have_their_turns_and_see_all_of_it_or_nothing(has_buffer: bool) -> None:
    buffer, _ = make("slices")
    seen = []
    async with buffer:
        await buffer.extend(items(100))
        write = asyncio.create_task(buffer.extend(items(ROWS, 100)))
        batches = []
        while not write.done():
            seen.append(len(buffer))
            if has_buffer:
                batches.append(asyncio.create_task(buffer.sample()))
            await asyncio.sleep(0)
        numbers = [(await within(batch))["number"] for batch in batches]
        assert len(seen) >= ROWS // _MOST_TOLD
        if has_buffer:  # each was drawn before the write or behind it
            assert all(bool((some < 100).all()) or bool((some >= 100).all()) for some in numbers)
            assert bool((numbers[-1] >= 100).all())


async def test_a_cancelled_write_is_told_as_a_whole() -> None:
    for after in range(8):
        (buffer, _), (other, _) = make("slices"), make("slices")
        async with buffer, other:
            write = asyncio.create_task(buffer.extend(items(ROWS)))
            await turns(after)
            write.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await write
            if len(buffer):
                await other.extend(items(ROWS))
                assert_same_batch(await within(buffer.sample()), await within(other.sample()))


def test_a_closed_event_loop_leaves_the_rest_to_nobody() -> None:
    buffer, _ = make("slices")
    loop = asyncio.new_event_loop()
    loop.run_until_complete(buffer.open())
    loop.run_until_complete(buffer.extend(items(100)))
    write = loop.create_task(buffer.extend(items(ROWS, 100)))
    while len(buffer) == 100:  # a thread may look at the values first, however long that takes
        loop.run_until_complete(asyncio.sleep(0))
    assert not write.done()
    write._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    del write, loop
    gc.collect()
    other, _ = make("slices")

    async def compared() -> None:
        await other.extend(items(100))
        await other.extend(items(ROWS, 100))
        async with buffer, other:
            assert_same_batch(await within(buffer.sample()), await within(other.sample()))

    asyncio.run(compared())


class Whole(Sampler):
    """One of a user, which is told of a write as a whole."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        return Draw(torch.randint(rows.size, (batch_size,), generator=generator))

    def wrote(self, event: WriteEvent) -> None:
        self.told.append(len(event.rows))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to go on with."""


async def test_the_sampler_of_a_user_is_told_at_once() -> None:
    sampler = Whole()
    await ReplayBuffer(TensorStorage(ROWS), sampler=sampler).extend(items(ROWS))
    assert sampler.told == [ROWS]


async def test_a_sampler_that_fails_at_a_later_part(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, _ = make("slices")
    told = SliceSampler.wrote

    def fails(sampler: SliceSampler, event: WriteEvent) -> None:
        if event.first >= _MOST_TOLD:
            raise ValueError("no more")
        told(sampler, event)

    monkeypatch.setattr(SliceSampler, "wrote", fails)
    async with buffer:
        with pytest.raises(AsyncBufError, match="the sampler did not take that"):
            await buffer.extend(items(ROWS))
