"""Priorities that come late: rows that were replaced or removed since the draw are left out, and counted."""

from __future__ import annotations

import pickle
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch

from asyncbuf import (
    Draw,
    NotYet,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Rows,
    SamplerWithoutReplacement,
    TensorStorage,
)
from asyncbuf.testing import assert_exact_resume
from tests.helpers import Crew, rows, seeded, turns, within
from tests.resume_helpers import FavourSampler, ThinningWriter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncbuf import Batch, Writer
    from asyncbuf.rows import Answer


class Recorder(SamplerWithoutReplacement):
    """Writes down the priorities that it is told."""

    def __init__(self) -> None:
        super().__init__(shuffle=False)
        self.told: list[dict[int, float]] = []

    def update_priority(self, indices: torch.Tensor, priority: torch.Tensor, rows: Rows) -> None:
        self.told.append(dict(zip(indices.tolist(), priority.tolist(), strict=True)))


class NumbersStored(RoundRobinWriter):
    """The table has to store its item numbers."""


@asynccontextmanager
async def opened(writer: Writer | None = None, **options: Any) -> AsyncIterator[tuple[ReplayBuffer, Recorder]]:
    sampler = Recorder()
    settings = {"batch_size": 4, "generator": seeded(), **options}
    async with ReplayBuffer(TensorStorage(4), sampler=sampler, writer=writer, **settings) as buffer:
        await buffer.extend(rows(4))
        yield buffer, sampler


def named(batch: Batch, what: str) -> Any:
    return batch if what == "batch" else batch.indices


@pytest.mark.parametrize("writer", [RoundRobinWriter, NumbersStored])
@pytest.mark.parametrize("what", ["batch", "indices"])
async def test_replaced_rows_are_left_out(writer: type[Writer], what: str) -> None:
    async with opened(writer()) as (buffer, sampler):
        batch = await buffer.sample()
        await buffer.extend(rows(2, 4))  # rows 0 and 1
        await buffer.update_priority(named(batch, what), [1.0, 2.0, 3.0, 4.0])
        assert sampler.told == [{2: 3.0, 3: 4.0}]
        assert buffer.stats().stale_priorities == 2
        await buffer.extend(rows(2, 6))
        await buffer.update_priority(named(batch, what), 5.0)
        assert len(sampler.told) == 1  # nothing is left to tell
        assert buffer.stats().stale_priorities == 6


@pytest.mark.parametrize("writer", [RoundRobinWriter, NumbersStored])
async def test_removed_rows_are_left_out_even_if_they_hold_an_item_again(writer: type[Writer]) -> None:
    async with opened(writer()) as (buffer, sampler):
        batch = await buffer.sample()
        await buffer.remove([1, 2])
        await buffer.update_priority(batch, 1.0)
        assert await buffer.extend(rows(1, 4)) is not None
        await buffer.update_priority(batch, 2.0)
        assert sampler.told == [{0: 1.0, 3: 1.0}, {0: 2.0, 3: 2.0}]
        assert buffer.stats().stale_priorities == 4


async def test_what_was_there_before_empty_is_stale() -> None:
    async with opened() as (buffer, sampler):
        batch = await buffer.sample()
        await buffer.empty()
        await buffer.extend(rows(2))
        await buffer.update_priority(batch, 1.0)
        assert sampler.told == []


async def test_bare_rows_are_taken_as_they_are() -> None:
    async with opened() as (buffer, sampler):
        batch = await buffer.sample()
        await buffer.extend(rows(2, 4))
        await buffer.update_priority(batch.indices.tolist(), 1.0)
        await buffer.update_priority(batch.indices.clone(), 2.0)
        assert sampler.told == [dict.fromkeys(range(4), 1.0), dict.fromkeys(range(4), 2.0)]
        assert buffer.stats().stale_priorities == 0


async def test_a_batch_that_was_prefetched_knows_its_draw() -> None:
    async with opened(prefetch=2, batch_size=2) as (buffer, sampler):
        await buffer.sample()  # draws the next two, of this pass and no other
        await buffer.extend(rows(1, 4))  # row 0
        await buffer.extend(rows(2, 5))  # rows 1 and 2
        batch = await buffer.sample()
        assert batch.indices.tolist() == [2, 3]
        await buffer.update_priority(batch, [1.0, 2.0])
        assert sampler.told == [{3: 2.0}]


async def test_a_batch_that_was_pickled_knows_its_draw() -> None:
    async with opened() as (buffer, sampler):
        batch = pickle.loads(pickle.dumps(await buffer.sample()))
        await buffer.extend(rows(3, 4))
        await buffer.update_priority(batch, [1.0, 2.0, 3.0, 4.0])
        assert sampler.told == [{3: 4.0}]


@pytest.mark.parametrize(
    ("priority", "found"),
    [([1.0, 2.0], 2), (torch.ones(1), 1), (torch.ones(5), 5), (torch.ones(0), 0)],
)
async def test_a_batch_has_as_many_priorities_as_rows(priority: Any, found: int) -> None:
    async with opened() as (buffer, sampler):
        batch = await buffer.sample()
        with pytest.raises(ValueError, match=f"priority: expected 4 values, one per row of the batch, found {found}"):
            await buffer.update_priority(batch, priority)
        await buffer.update_priority(batch, torch.tensor(2.0))
        await buffer.update_priority(batch, torch.ones(2, 2))
        assert len(sampler.told) == 2


@pytest.mark.parametrize(
    ("which", "priority", "kind", "message"),
    [
        ("abc", 1.0, TypeError, "indices: expected a batch, or rows as integers, found str"),
        ([0], "abc", TypeError, "priority: expected numbers, found str"),
        ([0], None, TypeError, "priority: expected numbers, found None"),
    ],
)
async def test_what_is_no_row_or_no_number(which: Any, priority: Any, kind: type[Exception], message: str) -> None:
    async with opened() as (buffer, _):
        with pytest.raises(kind, match=message):
            await buffer.update_priority(which, priority)


async def test_a_sampler_that_waits_for_priorities() -> None:
    """A consumer that waits is asked for again after a priority update."""

    class Waiting(RandomSampler):
        known = False

        def may_draw(self, rows: Rows, batch_size: int) -> Answer:
            return True if self.known else NotYet("no priority is known")

        def update_priority(self, indices: torch.Tensor, priority: torch.Tensor, rows: Rows) -> None:
            self.known = True

    async with ReplayBuffer(TensorStorage(4), sampler=Waiting(), batch_size=2) as buffer, Crew() as crew:
        await buffer.extend(rows(4))
        reader = crew.start(buffer.sample())
        await turns()
        assert "no priority is known" in buffer.why_blocked()
        await buffer.update_priority([0], 1.0)
        assert len(await within(reader)) == 2


async def feed(buffer: ReplayBuffer, step: int, batch: Batch) -> None:
    """Replaces and removes some of what was drawn before the priorities come."""
    await buffer.extend(rows(1 + step % 3, 100 + 10 * step))
    if step % 2:
        await buffer.remove([step % 8])
    await buffer.update_priority(batch if step % 3 else batch.indices, 1.0 + 0.25 * (batch.indices % 4))


class Favourite(FavourSampler):
    """Among the valid rows."""

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        valid = rows.at(torch.arange(rows.size))
        chosen = torch.multinomial(self.priorities[valid], batch_size, True, generator=generator)
        return Draw(valid[chosen])


@pytest.mark.parametrize("writer", [RoundRobinWriter, ThinningWriter])
@pytest.mark.parametrize(
    "at", [[1, 4], pytest.param("every", marks=pytest.mark.slow)], ids=["some-points", "every-point"]
)
async def test_late_priorities_after_a_restore(writer: type[Writer], at: list[int] | Literal["every"]) -> None:
    """What is late is late in the resumed run as well: batches in line know when they were drawn."""

    async def factory() -> ReplayBuffer:
        buffer = ReplayBuffer(
            TensorStorage(12),
            sampler=Favourite(12),
            writer=writer(),
            batch_size=3,
            prefetch=3,
            generator=seeded(),
        )
        await buffer.extend(rows(20))
        return buffer

    await assert_exact_resume(factory, steps=6, at=at, feed=feed)


async def test_rows_without_an_item_are_left_out_whoever_names_them() -> None:
    told: list[list[int]] = []

    class Told(RandomSampler):
        def update_priority(self, indices: torch.Tensor, priority: torch.Tensor, rows: Rows) -> None:
            told.append(indices.tolist())

    buffer = ReplayBuffer(TensorStorage(30), sampler=Told(), batch_size=2)
    await buffer.extend(rows(10))
    await buffer.remove([3])
    await buffer.update_priority([3, 20, 1], torch.ones(3))  # removed, never written, valid
    assert told == [[1]]
    assert buffer.stats().stale_priorities == 2
    with pytest.raises(IndexError):
        await buffer.update_priority([30], 1.0)
