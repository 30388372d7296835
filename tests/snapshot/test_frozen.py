"""Snapshots: a buffer that is frozen stands still, and says so to those who ask for more."""

from __future__ import annotations

import asyncio
import contextvars
from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import AsyncBufError, PrefetchError, Snapshot
from asyncbuf.testing import difference
from tests.helpers import SECONDS, CountingTransform, Crew, turns, within
from tests.resume_helpers import check_stream, items_of, late, take
from tests.snapshot.helpers import buffer_with, filled

if TYPE_CHECKING:
    from collections.abc import Callable


async def test_snapshot_within_frozen() -> None:
    async with await filled(transform=late) as source, Crew() as crew:
        await source.sample()
        elsewhere = contextvars.copy_context()  # a task that is started within the block belongs to it
        async with source.frozen():
            outside = crew.start(source.extend(items_of(3, 100)), elsewhere)
            asked = [crew.start(source.sample(), elsewhere) for _ in range(2)]
            await turns()
            first, second = await source.snapshot(), await source.state_dict()
            assert not outside.done()
            assert not any(task.done() for task in asked)
            assert difference(first.state_dict(), second) is None
            for attempt in (source.extend(items_of(1)), source.sample()):
                with pytest.raises(AsyncBufError, match="frozen"):
                    await attempt
        await within(outside)
        expected = [await within(task) for task in asked] + await take(source, 2)
    async with buffer_with(transform=late, seed=9) as target:
        await target.restore(first)
        await target.extend(items_of(3, 100))
        await check_stream(target, expected)


async def test_nothing_moves_within_frozen() -> None:
    def hook(seen: int) -> None:
        if seen == 2:
            raise ValueError("once")

    async with await filled(transform=CountingTransform(hook)) as source, Crew() as crew:
        await source.sample()
        with pytest.raises(PrefetchError, match="once"):
            await source.sample()
        elsewhere = contextvars.copy_context()
        async with source.frozen():
            first = await source.state_dict()
            calls = (source.sample(), source.skip(), source.flush(), source.sample())
            others = [crew.start(call, elsewhere) for call in calls]
            await turns(500)
            assert not any(task.done() for task in others)
            assert difference(await source.state_dict(), first) is None
        ends: list[Any] = await within(asyncio.gather(*others))
        # Now it goes on, call by call: the one that failed is tried again, and dropped before it is a batch.
        assert (ends[1], ends[0].number, ends[3].number) == (1, 2, 4)


@pytest.mark.parametrize(
    "call", ["restore", "load_state_dict", "empty", "update_priority", "finish", "frozen", "skip", "flush"]
)
async def test_what_cannot_be_done_within_frozen_says_so(call: str) -> None:
    async with await filled() as source:
        await source.sample()
        state = await source.state_dict()

        async def freeze() -> None:
            async with source.frozen():
                pass

        calls: dict[str, Callable[[], Any]] = {
            "restore": lambda: source.restore(Snapshot.from_state_dict(state)),
            "load_state_dict": lambda: source.load_state_dict(state),
            "empty": source.empty,
            "update_priority": lambda: source.update_priority([0], 1.0),
            "finish": source.finish,
            "frozen": freeze,
            "skip": source.skip,
            "flush": source.flush,
        }
        async with source.frozen():
            with pytest.raises(AsyncBufError, match="frozen"):
                async with asyncio.timeout(SECONDS):
                    await calls[call]()
        await take(source, 2)
