"""overwrite="wait": the ring overwrites nothing that nobody has read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import (
    BufferClosedError,
    CheckpointCorruptError,
    ConsumingSampler,
    GroupSampler,
    ItemsLostWarning,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SamplerWithoutReplacement,
    TensorStorage,
    TokenBudgetSampler,
)
from tests.helpers import Crew, numbers, rows, seeded, turns, within

if TYPE_CHECKING:
    from collections.abc import Callable


def made(sampler: Sampler | None = None, **options: Any) -> ReplayBuffer:
    settings: dict[str, Any] = {"batch_size": 4, "generator": seeded(), "overwrite": "wait", **options}
    return ReplayBuffer(TensorStorage(settings.pop("capacity", 12)), sampler=sampler, **settings)


SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "random": RandomSampler,
    "passes": SamplerWithoutReplacement,
    "consuming": ConsumingSampler,
    "consuming-twice": lambda: ConsumingSampler(2, "random"),
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("prefetch", [0, 2])
async def test_every_item_is_read(name: str, prefetch: int) -> None:
    seen: set[int] = set()
    sampler = SAMPLERS[name]()
    async with made(sampler, prefetch=prefetch) as buffer, Crew() as crew:

        async def collect(first: int) -> None:
            for start in range(first, first + 60, 3):
                await buffer.extend(rows(3, start))

        writers = [crew.start(collect(0)), crew.start(collect(60))]
        while not all(writer.done() for writer in writers):
            seen |= set(numbers(await within(buffer.sample())))
        await buffer.finish()
        with contextlib.suppress(BufferClosedError):
            while len(seen) < 120:  # what is stored still
                seen |= set(numbers(await within(buffer.sample())))
        if sampler.unread:
            seen |= set(numbers(await within(buffer.sample(sampler.unread))))
    assert seen == set(range(120))


async def test_it_says_what_it_waits_for() -> None:
    async with made() as buffer, Crew() as crew:
        await buffer.extend(rows(10))
        writer = crew.start(buffer.extend(rows(6, 10)))
        await turns()
        assert not writer.done()
        assert "no batch was drawn yet from 4 stored item(s) that 6 more would overwrite" in buffer.why_blocked()
        await buffer.remove([5, 6, 7, 8])  # free rows go first
        await within(writer)
        with pytest.raises(
            ValueError, match=r"writes of at most 12 items, the capacity, found 13: write them in parts"
        ):
            await buffer.extend(rows(13))
        await buffer.empty()
        await within(buffer.extend(rows(12)))


@pytest.mark.parametrize("way", ["state", "pickle"])
@pytest.mark.parametrize("known", [True, False])
async def test_what_was_read_is_saved(way: str, known: bool) -> None:
    source = made(SamplerWithoutReplacement(shuffle=False), overwrite="wait" if known else "oldest")
    await source.extend(rows(12))
    async with source:
        await source.sample()  # the first four
        state = await source.state_dict()
        async with source.frozen():
            pickled = pickle.dumps(source)
    target = pickle.loads(pickled) if way == "pickle" and known else made(SamplerWithoutReplacement(shuffle=False))
    if way == "state" or not known:
        await target.load_state_dict(state)
    async with target, Crew() as crew:
        writer = crew.start(target.extend(rows(4, 12)))
        await turns()
        assert writer.done() is known  # what is not known to have been read counts as unread
        if not known:
            for _ in range(3):
                await target.sample()
        await within(writer)
        more = crew.start(target.extend(rows(1, 16)))
        await turns()
        assert more.done() is not known


async def test_forged_rows_are_refused() -> None:
    source = made()
    await source.extend(rows(6))
    for unread in ([7], [-1], [12], [0.5]):
        state = await source.state_dict()
        assert state["limiter"]["unread"].tolist() == [0, 1, 2, 3, 4, 5]
        state["limiter"]["unread"] = torch.tensor(unread)
        target = made()
        await target.extend(rows(2))
        before = await target.state_dict()
        with pytest.raises(CheckpointCorruptError):
            await target.load_state_dict(state)
        assert (await target.state_dict())["limiter"]["unread"].equal(before["limiter"]["unread"])


# -- without it -------------------------------------------------------------------------------------------------------

LOSING: dict[str, tuple[Callable[[], Sampler], str]] = {
    "consuming": (ConsumingSampler, r"ConsumingSampler: 3 item\(s\) left before a batch had it"),
    "groups": (lambda: GroupSampler("number", 1), r"GroupSampler: items of 3 group\(s\) left"),
    "tokens": (lambda: TokenBudgetSampler(99, "number", look_ahead=1), r"TokenBudgetSampler: 3 item\(s\) left"),
}


@pytest.mark.parametrize("name", LOSING)
async def test_the_first_loss_is_told_once(name: str) -> None:
    make, message = LOSING[name]
    async with made(make(), overwrite="oldest") as buffer:
        await buffer.extend(rows(12))
        with pytest.warns(ItemsLostWarning, match=message + r'.*overwrite="wait".*Queue') as caught:
            await buffer.extend(rows(3, 12))
        assert [warning.filename for warning in caught] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            await buffer.extend(rows(3, 15))


async def test_a_warning_that_is_an_error_breaks_no_write(caplog: pytest.LogCaptureFixture) -> None:
    async with made(ConsumingSampler(), overwrite="oldest") as buffer:
        with caplog.at_level(logging.WARNING, "asyncbuf"):
            await buffer.extend(rows(15))
        assert len(buffer) == 12
        assert 'overwrite="wait"' in caplog.text


async def test_nothing_is_told_where_nothing_is_lost() -> None:
    async with made(ConsumingSampler()) as buffer, Crew() as crew:
        reader = crew.start(asyncio.wait_for(buffer.sample(), 20))
        await buffer.extend(rows(12))
        await within(reader)
        await buffer.extend(rows(4, 12))
        assert buffer._config.sampler.lost == 0  # type: ignore[attr-defined]
