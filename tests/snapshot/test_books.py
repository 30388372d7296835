"""Every ticket that was drawn was delivered, was dropped, or is in the queue: always, also after a restore."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import CheckpointCorruptError, PrefetchError, ReplayBuffer, SamplerWithoutReplacement
from tests.helpers import Crew, turns, within
from tests.resume_helpers import Average, Failing, items_of, late, restored, saved, take
from tests.snapshot.helpers import ITEMS, State, buffer_with, every_way, filled, in_memory_and_on_disk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path


def books(buffer: ReplayBuffer) -> tuple[int, int, int, int]:
    """Drawn, delivered, dropped and queued, which must add up."""
    stats = buffer.stats()
    assert stats.drawn == stats.delivered + stats.dropped + stats.queued, stats
    return stats.drawn, stats.delivered, stats.dropped, stats.queued


@asynccontextmanager
async def used(**settings: Any) -> AsyncIterator[ReplayBuffer]:
    """A buffer that is open, with something in each of its books."""
    async with await filled(**settings) as buffer:
        await take(buffer, 5)
        await buffer.skip()
        await buffer.sample(2)
        await take(buffer, 1)
        yield buffer


@every_way
async def test_a_restore_takes_them_over(way: str, tmp_path: Path) -> None:
    async with used(transform=late) as source:
        what = await saved(way, source, tmp_path)
        expected = books(source)
        assert all(expected)
    async with used(transform=late, seed=9) as live:
        target = await restored(way, what, live)
        assert books(target) == expected
        if way == "pickle":
            await target.open()
        await take(target, 3)
        drawn, delivered, dropped, _ = books(target)
        assert (drawn, delivered, dropped) == (expected[0] + 3, expected[1] + 3, expected[2])
        await target.aclose()


@in_memory_and_on_disk
async def test_elastic_into_another_depth(way: str, tmp_path: Path) -> None:
    async with used(prefetch=4) as source:
        what = await saved(way, source, tmp_path)
        expected = books(source)
    for depth in (0, 1, 7):
        async with await restored(way, what, buffer_with(prefetch=depth), elastic=True) as target:
            assert books(target) == expected
            await take(target, 6)
            books(target)


async def test_a_restore_that_is_refused_leaves_them_alone() -> None:
    async with used() as source, used(prefetch=3) as target:
        await take(target, 4)
        before = books(target)
        with pytest.raises(Exception, match="prefetch depth"):
            await target.restore(await source.snapshot())
        assert books(target) == before


async def test_one_restore_after_the_other() -> None:
    async with used() as source:
        snapshots = []
        for _ in range(4):
            snapshots.append((await source.snapshot(), books(source)))
            await take(source, 2)
            await source.flush()
        for snapshot, expected in reversed(snapshots):
            await source.restore(snapshot)
            assert books(source) == expected


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens(seed: int, tmp_path: Path) -> None:
    choose = random.Random(seed)
    failing = Failing()

    def make() -> ReplayBuffer:
        transform = [failing, Average()] if seed > 1 else failing
        return buffer_with(
            transform=transform, prefetch=seed, sampler=SamplerWithoutReplacement() if seed % 2 else None
        )

    buffer = make()
    await buffer.extend(items_of(ITEMS))
    await buffer.open()
    async with Crew() as crew:

        async def give_up() -> None:
            task = crew.start(buffer.sample())
            await turns(choose.randrange(6))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        async def fail() -> None:
            failing.broken = True
            await asyncio.gather(buffer.sample(), buffer.sample(), return_exceptions=True)
            failing.broken = False

        async def refill() -> None:
            await buffer.empty()
            await buffer.extend(items_of(ITEMS))

        async def resume() -> None:
            nonlocal buffer
            before = books(buffer)
            what = await saved(way := choose.choice(["snapshot", "state_dict", "directory"]), buffer, tmp_path)
            expected = books(buffer)
            assert expected[:3] == before[:3]
            await buffer.aclose()
            buffer = await restored(way, what, make())
            assert books(buffer) == expected
            await buffer.open()

        actions: list[Callable[[], Any]] = [
            *[lambda: buffer.sample()] * 5,
            lambda: buffer.sample(choose.randrange(1, 5)),
            lambda: asyncio.gather(*(buffer.sample() for _ in range(4))),
            lambda: buffer.skip(),
            lambda: buffer.flush(),
            lambda: buffer.remove([choose.randrange(ITEMS)]),
            lambda: buffer.extend(items_of(2, 100)),
            give_up,
            fail,
            refill,
            resume,
        ]
        for _ in range(120):
            try:
                await within(choose.choice(actions)())
            except PrefetchError:
                failing.broken = False
            books(buffer)
        await buffer.aclose()
        books(buffer)


# -- on the way -------------------------------------------------------------------------------------------------------


async def test_books_that_do_not_add_up_are_refused() -> None:
    async with used() as source:
        state: State = await source.state_dict()
    for name in ("next", "delivered", "dropped"):
        wrong = {**state, "prefetch": {**state["prefetch"], name: state["prefetch"][name] + 1}}
        with pytest.raises(CheckpointCorruptError, match="as many as were drawn"):
            await buffer_with().load_state_dict(wrong)
        for value in (-1, 1.0, None, True):
            wrong["prefetch"][name] = value
            with pytest.raises(CheckpointCorruptError, match=f"expected {name} as an int"):
                await buffer_with().load_state_dict(wrong)
        del wrong["prefetch"][name]
        with pytest.raises(CheckpointCorruptError, match=f"expected {name} as an int"):
            await buffer_with().load_state_dict(wrong)


async def test_a_ticket_that_is_there_twice_is_refused() -> None:
    async with used() as source:
        state: State = await source.state_dict()
    payload = state["prefetch"]
    payload["queue"][1] = payload["queue"][0]
    with pytest.raises(CheckpointCorruptError, match="each once"):
        await buffer_with().load_state_dict(state)
