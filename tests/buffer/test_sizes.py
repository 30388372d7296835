"""Sizes: calls that ask for another one than that of the buffer."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from asyncbuf import SamplerWithoutReplacement
from tests.buffer.helpers import make
from tests.helpers import Crew, Lines, rows, seeded, turns, within


@pytest.mark.parametrize(
    ("size", "kind"),
    [
        (0, ValueError),
        (-1, ValueError),
        (True, TypeError),
        (2.0, TypeError),
        ("2", TypeError),
        (np.int64(2), TypeError),
    ],
)
async def test_bad_size_of_a_call(size: Any, kind: type[Exception]) -> None:
    buffer = make(prefetch=2)
    async with buffer:
        await buffer.extend(rows(10))
        await buffer.sample()
        before = buffer.stats()
        with pytest.raises(kind, match=r"batch_size: expected .*, found"):
            await buffer.sample(size)
        assert buffer.stats() == before
        assert (await buffer.sample()).number == 1


async def test_a_call_that_must_say_its_size() -> None:
    buffer = make(batch_size=None)
    async with buffer:
        await buffer.extend(rows(10))
        with pytest.raises(ValueError, match="batch_size: expected one"):
            await buffer.sample()
        with pytest.raises(ValueError, match="batch_size: expected one"):
            await anext(buffer.__aiter__())
        assert [len(await buffer.sample(size)) for size in (1, 3, 12)] == [1, 3, 12]


async def test_another_size_draws_its_own_ticket() -> None:
    buffer = make(prefetch=3, workers=2, transform=lambda data: data, generator=seeded(0))
    async with buffer:
        await buffer.extend(rows(10))
        assert (await buffer.sample()).number == 0
        other = await buffer.sample(7)
        assert (other.number, len(other), buffer.stats().queued) == (4, 7, 3)
        assert [(await buffer.sample()).number for _ in range(5)] == [1, 2, 3, 5, 6]
        assert (await buffer.sample(4)).number == 7  # the size of the buffer is no other size


async def test_other_sizes_at_once_are_served_in_order() -> None:
    buffer = make(prefetch=1, workers=3, transform=lambda data: data)
    async with buffer:
        await buffer.extend(rows(10))
        sizes = [4, 2, 3, 2, 4, 3, 2]
        batches = await within(asyncio.gather(*(buffer.sample(size) for size in sizes)))
        assert [len(batch) for batch in batches] == sizes
        for size in (2, 3, 4):
            found = [batch.number for batch in batches if len(batch) == size]
            assert found == sorted(found)
        assert len({batch.number for batch in batches}) == len(sizes)


async def test_many_other_sizes_do_not_slow_the_buffer_down() -> None:
    buffer = make(10_000)

    async def steps() -> int:
        """Lines of Python that the event loop runs for a hundred batches."""
        with Lines() as lines:
            for _ in range(100):
                await buffer.sample()
        return lines.count

    async with buffer:
        await buffer.extend(rows(10_000))
        await steps()  # the first ones see how fast things are
        before = await steps()
        for size in range(1, 3000):
            await buffer.sample(size)
        assert await steps() < 1.1 * before


async def test_a_size_larger_than_a_pass() -> None:
    buffer = make(sampler=SamplerWithoutReplacement(drop_last=True), prefetch=1)
    async with buffer, Crew() as crew:
        await buffer.extend(rows(3))
        waiting = crew.start(buffer.sample())
        await turns()
        assert not waiting.done()
        assert "3 of the 4 rows of a batch are stored" in buffer.why_blocked()
        with pytest.raises(ValueError, match=r"expected at most the capacity 100"):
            await within(buffer.sample(101))
        await buffer.extend(rows(3, 3))
        assert len(await within(waiting)) == 4
        assert len(await within(buffer.sample(6))) == 6


async def test_a_size_larger_than_what_is_left_of_a_pass() -> None:
    buffer = make(sampler=SamplerWithoutReplacement(drop_last=True))
    async with buffer:
        await buffer.extend(rows(10))
        await buffer.sample()
        # Six rows are left: drop_last leaves them out, and the batch begins the next pass.
        batch = await within(buffer.sample(8))
        assert (len(batch), batch.epoch, batch.last) == (8, 1, True)
        assert (await within(buffer.sample())).epoch == 2


async def test_another_size_does_not_stop_the_calls_of_the_buffers_own_size() -> None:
    buffer = make(sampler=SamplerWithoutReplacement(drop_last=True))
    async with buffer:
        await buffer.extend(rows(10))
        assert [len(await buffer.sample(size)) for size in (4, 3)] == [4, 3]
        # Three rows are left of the pass: fewer than a batch, so drop_last leaves them out.
        assert (await within(buffer.sample())).epoch == 1


async def test_a_short_last_batch() -> None:
    buffer = make(sampler=SamplerWithoutReplacement(), prefetch=2)
    async with buffer:
        await buffer.extend(rows(10))
        batches = [await buffer.sample() for _ in range(4)]
        assert [(len(batch), batch.last, batch.epoch) for batch in batches] == [
            (4, False, 0),
            (4, False, 0),
            (2, True, 0),
            (4, False, 1),
        ]
