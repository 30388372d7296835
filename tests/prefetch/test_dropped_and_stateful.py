"""Stateful transforms see every ticket that was drawn, in order, dropped or not, however far they had come.

So a run that prefetches and drops is a run without prefetching that takes what the other drops, and ignores it.
"""

from __future__ import annotations

import pickle
import random
from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import ListStorage, PrefetchError, RandomSampler, ReplayBuffer, SamplerWithoutReplacement, TensorStorage
from asyncbuf.testing import WAYS, difference
from tests.helpers import (
    CountingTransform,
    Latch,
    Stop,
    ThreadedStorage,
    check_same,
    crossed,
    jitter,
    rows,
    seeded,
    turns,
    until,
    wander,
    within,
)
from tests.resume_helpers import restored, saved

if TYPE_CHECKING:
    from pathlib import Path

ITEMS = 30
BATCH = 3


class Waiting(CountingTransform):
    """Async, and takes any number of turns of the loop."""

    async def __call__(self, data: Any) -> Any:
        await wander()
        return super().__call__(data)


def made(depth: int = 0, workers: int = 1, transform: Any = None, **options: Any) -> ReplayBuffer:
    options.setdefault("storage", TensorStorage(ITEMS))
    options.setdefault("sampler", RandomSampler())
    return ReplayBuffer(
        **options, batch_size=BATCH, prefetch=depth, workers=workers, transform=transform, generator=seeded()
    )


class Script:
    """A history of calls, by number.

    Args:
        seed: what it follows from.
    """

    def __init__(self, seed: int) -> None:
        self._choose = random.Random(seed)

    async def play(self, buffer: ReplayBuffer, twin_depth: int | None = None) -> list[Any]:
        """What came.

        Args:
            buffer: the buffer.
            twin_depth: if this is the twin without prefetching: the depth of the other. Takes what that drops.
        """
        queued, found = 0, []
        for step in range(25):
            kind = self._choose.choice(["sample", "sample", "sample", "flush", "skip", "empty", "turns"])
            if kind == "sample":
                batch = await within(buffer.sample())
                found.append((batch.number, batch["number"].tolist(), batch["seen"].tolist()))
                queued = twin_depth or 0
            elif kind == "turns" and twin_depth is None:
                await wander()
            elif twin_depth is not None:
                gone = queued if kind in ("flush", "empty") else min(1, queued) if kind == "skip" else 0
                for _ in range(gone):
                    await within(buffer.sample())
                queued -= gone
            elif kind == "flush":
                await within(buffer.flush())
            elif kind == "skip":
                await within(buffer.skip())
            if kind == "empty":
                await within(buffer.empty())
                await within(buffer.extend(rows(ITEMS, 100 * step)))
        return found


@pytest.mark.parametrize(
    ("depth", "workers", "kind", "seed"), crossed((1, 2, 5), (1, 3), (CountingTransform, Waiting), range(4), one_in=4)
)
async def test_dropping_is_taking_and_ignoring(
    depth: int, workers: int, kind: type[CountingTransform], seed: int
) -> None:
    ends = []
    for twin in (True, False, False):
        transform = CountingTransform() if twin else kind(*(() if kind is Waiting else (lambda _: jitter(),)))
        async with made(0 if twin else depth, 1 if twin else workers, transform) as buffer:
            await buffer.extend(rows(ITEMS))
            found = await Script(seed).play(buffer, depth if twin else None)
            # The last calls have drawn ahead, too: the twin takes them.
            end = await within(buffer.sample())
            found.append((end.number, end["number"].tolist(), end["seen"].tolist()))
        ends.append(found)
    check_same(ends[1], ends[0], "stream")
    check_same(ends[2], ends[1], "stream, again")


@pytest.mark.parametrize("call", ["flush", "skip", "empty"])
async def test_one_that_is_dropped_while_it_is_at_work_is_seen_once(call: str) -> None:
    stop = Stop()
    transform = CountingTransform(lambda seen: stop() if seen == 2 else None)
    async with made(3, 1, transform) as buffer:
        await buffer.extend(rows(ITEMS))
        assert (await within(buffer.sample()))["seen"][0] == 1
        await stop.come.reached()
        if call == "skip":
            for _ in range(3):
                await within(buffer.skip())
        else:
            await within(getattr(buffer, call)())
        if call == "empty":
            await buffer.extend(rows(ITEMS))
        assert buffer.stats().queued == 0
        stop.go.set()
        batch = await within(buffer.sample())
        assert (batch.number, int(batch["seen"][0])) == (4, 5)


async def test_one_whose_rows_are_still_being_gathered() -> None:
    stop = Stop()
    gathers: list[int] = []

    def hook() -> None:
        gathers.append(1)
        if len(gathers) == 2:
            stop()

    storage = ThreadedStorage(ITEMS, on_gather=hook)
    async with made(2, 2, CountingTransform(), storage=storage) as buffer:
        await buffer.extend(rows(ITEMS))
        await within(buffer.sample())
        await stop.come.reached()
        assert await within(buffer.flush()) == 2
        stop.go.set()
        batch = await within(buffer.sample())
        assert (batch.number, int(batch["seen"][0])) == (3, 4)


class FailsAt(CountingTransform):
    """Raises with some batches, after it has counted them."""

    def __init__(self, *at: int) -> None:
        super().__init__()
        self._at = at

    def __call__(self, data: Any) -> Any:
        data = super().__call__(data)
        if self.seen in self._at:
            raise ValueError(f"batch {self.seen}")
        return data


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("call", ["flush", "skip"])
async def test_one_that_fails_is_seen_as_far_as_it_came(call: str, early: bool) -> None:
    """Whether it had failed when it was dropped makes no difference to those behind it."""
    transform = FailsAt(2)
    async with made(3, 1, transform) as buffer:
        await buffer.extend(rows(ITEMS))
        await within(buffer.sample())
        if early:
            await until(lambda: transform.seen == 2)
            await turns()
        await within(getattr(buffer, call)())
        batch = await within(buffer.sample())
        expected = (4, 5) if call == "flush" else (2, 3)
        assert (batch.number, int(batch["seen"][0])) == expected


async def test_one_that_a_consumer_was_told_of_and_skips() -> None:
    async with made(2, 1, FailsAt(2)) as buffer:
        await buffer.extend(rows(ITEMS))
        await within(buffer.sample())
        with pytest.raises(PrefetchError):
            await within(buffer.sample())
        assert await within(buffer.skip()) == 1
        batch = await within(buffer.sample())
        assert (batch.number, int(batch["seen"][0])) == (2, 3)


async def closed_with_unseen(storage: Any = None) -> tuple[ReplayBuffer, CountingTransform]:
    """A closed buffer with three tickets that were dropped, and that its transform has not seen."""
    stop = Stop()
    transform = CountingTransform(lambda seen: stop() if seen == 2 else None)
    buffer = made(4, 1, transform, **({} if storage is None else {"storage": storage}))
    async with buffer:
        await buffer.extend(rows(ITEMS))
        await within(buffer.sample())
        await stop.come.reached()
        stop.go.set()
        await within(buffer.aclose())
    assert await within(buffer.flush()) == 4
    return buffer, transform


async def end_of(buffer: ReplayBuffer) -> list[tuple[int, int]]:
    async with buffer:
        batches = [await within(buffer.sample()) for _ in range(3)]
    return [(batch.number, int(batch["seen"][0])) for batch in batches]


EXPECTED = [(5, 6), (6, 7), (7, 8)]


async def test_they_are_seen_when_the_buffer_is_opened_again() -> None:
    buffer, transform = await closed_with_unseen()
    assert transform.seen == 2
    assert await end_of(buffer) == EXPECTED


@pytest.mark.parametrize("way", WAYS[:3])
async def test_a_checkpoint_has_them(way: str, tmp_path: Path) -> None:
    source, _ = await closed_with_unseen()
    what = await saved(way, source, tmp_path)
    target = await restored(way, what, made(4, 1, CountingTransform()))
    assert difference(await target.state_dict(), await source.state_dict()) is None
    queue = (await target.state_dict())["prefetch"]["queue"]
    assert [(ticket["number"], ticket["dropped"]) for ticket in queue] == [(2, True), (3, True), (4, True)]
    assert target.stats().queued == 0
    assert target.stats().dropped == 4
    assert await end_of(target) == await end_of(source) == EXPECTED


async def test_a_pickle_has_them() -> None:
    source = made(4, 1, CountingTransform())
    before, _ = await closed_with_unseen()
    await source.restore(await before.snapshot())
    twin = pickle.loads(pickle.dumps(source))
    assert await end_of(twin) == await end_of(source) == EXPECTED


async def test_tickets_of_a_checkpoint_that_are_dropped_before_the_buffer_is_opened() -> None:
    first, _ = await closed_with_unseen()
    stop = Stop()
    transform = CountingTransform(lambda seen: stop() if seen == 2 else None)
    async with made(4, 1, transform) as source:
        await source.extend(rows(ITEMS))
        await within(source.sample())
        await stop.come.reached()
        stop.go.set()
        await within(source.aclose())
    snapshot = await source.snapshot()  # with tickets 2 to 4 that were gathered only
    target = made(4, 1, CountingTransform())
    await target.restore(snapshot)
    assert await within(target.flush()) == 4
    assert await end_of(target) == EXPECTED == await end_of(first)


class Patient(CountingTransform):
    """Lets the second batch, and those after it, wait."""

    def __init__(self, go: Latch) -> None:
        super().__init__()
        self._go = go

    async def __call__(self, data: Any) -> Any:
        if self.seen:
            await self._go.reached()
        return super().__call__(data)


async def test_a_snapshot_of_a_running_buffer_waits_for_them() -> None:
    go = Latch()

    async with made(3, 1, Patient(go)) as buffer:
        await buffer.extend(rows(ITEMS))
        await within(buffer.sample())
        await within(buffer.flush())
        with pytest.raises(TimeoutError, match="stateful transform"):
            await buffer.snapshot(0.05)
        go.set()
        state = await within(buffer.state_dict())
    assert state["prefetch"]["queue"] == []
    assert state["transforms"] == [{"seen": 4}]


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
async def test_a_restore_forgets_them(sampler: Any) -> None:
    go = Latch()

    async with made(3, 1, Patient(go), sampler=sampler()) as buffer:
        await buffer.extend(rows(ITEMS))
        snapshot = await buffer.snapshot()
        await within(buffer.sample())
        await within(buffer.flush())
        go.set()
        await within(buffer.restore(snapshot))
        batch = await within(buffer.sample())
        assert (batch.number, int(batch["seen"][0])) == (0, 1)


async def test_items_of_a_list_are_seen_too() -> None:
    transform = CountingTransform()
    async with made(2, 1, transform, storage=ListStorage(ITEMS)) as buffer:
        await buffer.extend([{"number": i} for i in range(ITEMS)])
        await within(buffer.sample())
        await within(buffer.flush())
        batch = await within(buffer.sample())
        assert (batch.number, int(batch["seen"][0])) == (3, 4)
