"""Snapshots: where in the life of a buffer a save may fall."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import Batch, CheckpointError, PrefetchError, ReplayBuffer, SamplerWithoutReplacement, TensorStorage
from asyncbuf.testing import WAYS, assert_same_batch, difference
from tests.helpers import Crew, Stop, ThreadedStorage, seeded, turns, within
from tests.resume_helpers import (
    Average,
    Blocking,
    Failing,
    check_stream,
    items_of,
    late,
    noisy,
    reached,
    restored,
    saved,
    take,
    to_tensordict,
)
from tests.snapshot.helpers import ITEMS, buffer_with, every_way, filled, in_memory_and_on_disk, queue_of, slow

if TYPE_CHECKING:
    from pathlib import Path


@every_way
@pytest.mark.parametrize("items", [0, 2, 20], ids=["empty", "too-few", "full"])
async def test_save_before_anything_was_asked_for(way: str, items: int, tmp_path: Path) -> None:
    source = buffer_with(min_size=5, transform=noisy)
    if items:
        await source.extend(items_of(items))
    what = await saved(way, source, tmp_path)
    target = await restored(way, what, buffer_with(min_size=5, transform=noisy, seed=9))
    assert (len(target), target.stats().drawn) == (items, 0)
    for buffer in (source, target):
        await buffer.extend(items_of(10, 100))
    async with source, target:
        await check_stream(target, await take(source, 6))


@every_way
async def test_save_at_the_end_of_a_pass_and_in_the_second(way: str, tmp_path: Path) -> None:
    def make(seed: int) -> ReplayBuffer:
        return buffer_with(sampler=SamplerWithoutReplacement(), seed=seed)

    source = make(0)
    await source.extend(items_of(10))
    async with source:
        assert [batch.last async for batch in source.epoch()] == [False, False, False, True]
        at_the_end = await saved(way, source, tmp_path)
        await take(source, 2)
        in_the_second = await saved(way, source, tmp_path)
        rest = [batch async for batch in source.epoch()]
        third = [batch async for batch in source.epoch()]
    async with await restored(way, at_the_end, make(9)) as target:
        assert target.stats().queued == 0
        second = [batch async for batch in target.epoch()]
        assert {batch.epoch for batch in second} == {1}
        assert sorted(number for batch in second for number in batch["number"].tolist()) == list(range(10))
        for found, batch in zip(second[2:], rest, strict=True):
            assert_same_batch(found, batch)
    async with await restored(way, in_the_second, make(9)) as target:
        for expected in (rest, third):
            found_all = [batch async for batch in target.epoch()]
            assert difference(found_all, expected) is None


@every_way
async def test_save_and_load_three_times_in_a_row(way: str, tmp_path: Path) -> None:
    buffer = await filled(transform=[noisy, Average()], sampler=SamplerWithoutReplacement())
    async with buffer:
        await take(buffer, 3)
        what = await saved(way, buffer, tmp_path)
        expected = await take(buffer, 10)
    for _ in range(3):  # the middle ones are never opened
        buffer = await restored(
            way, what, buffer_with(transform=[noisy, Average()], sampler=SamplerWithoutReplacement())
        )
        what = await saved(way, buffer, tmp_path)
    async with buffer:
        await check_stream(buffer, expected)


@in_memory_and_on_disk
@pytest.mark.parametrize("when", ["new", "open", "begun", "waiting", "closed", "other-size"])
async def test_the_restored_stream_wins_over_one_that_began(way: str, when: str, tmp_path: Path) -> None:
    async with await filled(transform=late) as source:
        await take(source, 4)
        what = await saved(way, source, tmp_path)
        expected = await take(source, 6)
    target = buffer_with(transform=late, seed=9)
    if when not in ("new", "waiting"):
        await target.extend(items_of(7, 50))
    async with Crew() as crew:
        if when != "new":
            await target.open()
        if when in ("begun", "closed"):
            await take(target, 3)
        if when == "other-size":
            await target.sample(5)
        waiting = [crew.start(target.sample()) for _ in range(3)] if when == "waiting" else []
        await turns()
        if when == "closed":
            await target.aclose()
        await restored(way, what, target)
        if when in ("new", "closed"):
            await target.open()
        for task, batch in zip(waiting, expected, strict=False):
            assert_same_batch(await within(task), batch, f"consumer {batch.number}")
        if waiting:
            assert target.stats().queued == 2  # drawn when they were given the new stream, not at the next call
        await check_stream(target, expected[len(waiting) :])
        await target.aclose()


@in_memory_and_on_disk
async def test_a_restore_draws_nothing_before_the_next_batch(way: str, tmp_path: Path) -> None:
    async with await filled(prefetch=3) as source:
        await take(source, 2)
        what = await saved(way, source, tmp_path)
        state, drawn = source.generator.get_state(), source.stats().drawn
    generator = seeded(9)
    target = await filled(prefetch=3, generator=generator)
    async with target:
        await restored(way, what, target)
        await turns()
        assert target.generator is generator
        assert generator.get_state().equal(state)
        assert target.stats().drawn == drawn
        await target.sample()
        assert target.stats().drawn == drawn + 1


async def test_generator_is_restored_in_place_and_global_ones_are_left_alone(tmp_path: Path) -> None:
    def globals_now() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]

    before = globals_now()
    source = await filled(transform=noisy, generator=None)  # it makes its own
    async with source:
        await take(source, 3)
        what = {way: await saved(way, source, tmp_path) for way in WAYS}
        expected = await take(source, 5)
    for way in WAYS:
        generator = seeded(9)
        target = await restored(way, what[way], buffer_with(transform=noisy, generator=generator))
        assert way == "pickle" or target.generator is generator
        async with target:
            await check_stream(target, expected)
    assert globals_now() == before


class Counting(SamplerWithoutReplacement):
    """Counts its draws."""

    draws = 0

    def draw(self, *arguments: Any) -> Any:
        type(self).draws += 1
        return super().draw(*arguments)


async def seconds_to_restore_deep_in_a_pass(way: str, tmp_path: Path) -> list[float]:
    """What it takes at the beginning of a pass and deep in it, until the first batch has come."""

    def make() -> ReplayBuffer:
        sampler = Counting()
        return buffer_with(storage=TensorStorage(10**6), sampler=sampler, batch_size=10_000, prefetch=1)

    seconds = []
    async with make() as source:
        await source.extend({"number": torch.arange(10**6)})
        for count in (0, 90):
            await take(source, count)
            what = await saved(way, source, tmp_path)
            target, draws = make(), Counting.draws
            start = time.perf_counter()
            await restored(way, what, target)
            async with target:
                first = await target.sample()
            seconds.append(time.perf_counter() - start)
            assert Counting.draws - draws <= 2
            assert first.number == count
        assert_same_batch(first, await source.sample())
    return seconds


@in_memory_and_on_disk
async def test_a_restore_deep_in_a_pass_is_no_replay(way: str, tmp_path: Path) -> None:
    await seconds_to_restore_deep_in_a_pass(way, tmp_path)


@slow
@in_memory_and_on_disk
async def test_a_restore_deep_in_a_pass_takes_no_longer(way: str, tmp_path: Path) -> None:
    # The best of three, because other programs run on the machine too.
    tries = [await seconds_to_restore_deep_in_a_pass(way, tmp_path) for _ in range(3)]
    first, deep = map(min, zip(*tries, strict=True))
    assert deep < 3 * first + 0.1


@every_way
async def test_consumers_stopped_queue_full_producers_blocked(way: str, tmp_path: Path) -> None:
    stop = Stop()
    hooks: list[Stop] = []
    storage = ThreadedStorage(ITEMS, on_gather=lambda: hooks[0]() if hooks else None)
    source = await filled(storage=storage, prefetch=3)
    async with source, Crew() as crew:
        await source.sample()
        await source.snapshot()
        hooks.append(stop)
        await source.sample()
        await reached(stop)
        producers = [crew.start(source.extend(items_of(7, 100 * i))) for i in range(1, 4)]
        await turns()
        assert source.stats().waiting_writers == 3
        saving = crew.start(saved("snapshot" if way == "pickle" else way, source, tmp_path))
        await turns()
        hooks.clear()
        stop.go.set()
        what = await within(saving)
        await asyncio.gather(*(within(producer) for producer in producers))
        expected = await take(source, 6)
    target = await restored(
        "snapshot" if way == "pickle" else way, what, buffer_with(storage=ThreadedStorage(ITEMS), prefetch=3)
    )
    assert target.write_count == ITEMS + 21  # the writes had been asked for before
    async with target:
        await check_stream(target, expected)


async def persistently(buffer: ReplayBuffer, count: int) -> list[Batch]:
    """The next batches; those that have failed are tried again."""
    batches: list[Batch] = []
    while len(batches) < count:
        with contextlib.suppress(PrefetchError):
            batches.append(await within(buffer.sample()))
    return batches


@every_way
async def test_a_failed_ticket_is_saved_and_tried_again(way: str, tmp_path: Path) -> None:
    transform = Failing()
    async with await filled(transform=transform) as source:
        await source.sample()
        await source.snapshot()  # what was drawn so far is made
        transform.broken = True
        await take(source, 2)
        with pytest.raises(PrefetchError):
            await source.sample()
        what = await saved(way, source, tmp_path)
        transform.broken = False
        expected = await persistently(source, 5)
    assert expected[0].number == 3
    target = await restored(way, what, buffer_with(transform=Failing(), seed=9))
    if way == "pickle":  # it was pickled as broken as it was
        target._arguments["transform"][0].broken = False
    async with target:
        await check_stream(target, expected)


async def test_a_failed_stateful_ticket_holds_up_no_snapshot() -> None:
    class Once(Average):
        def __init__(self) -> None:
            super().__init__()
            self.failures = 0

        def __call__(self, data: Any) -> Any:
            if self.failures and self.seen == 3:
                raise ValueError("broken on purpose")
            return super().__call__(data)

    transform = Once()
    async with await filled(transform=transform, prefetch=4) as source:
        transform.failures = 1
        await take(source, 3)
        snapshot = await within(source.snapshot())
        transform.failures = 0
        expected = await persistently(source, 6)
    assert [batch["seen"] for batch in expected] == list(range(4, 10))
    async with buffer_with(transform=Once(), prefetch=4, seed=9) as target:
        await target.restore(snapshot)
        await check_stream(target, expected)


@every_way
@pytest.mark.usefixtures("transforms_in_threads", "last_fifth_is_long")
async def test_between_two_transforms(way: str, tmp_path: Path) -> None:
    """A ticket whose first transforms are done goes on with the next one."""
    calls: list[int] = []

    async def first(data: Any) -> Any:
        calls.append(int(data["number"][0]))
        return {**data, "first": data["number"] * 2}

    def make(seed: int, second: Blocking) -> ReplayBuffer:
        return buffer_with(transform=[first, second], seed=seed)

    transform = Blocking()
    source = make(0, transform)
    await source.extend(items_of(ITEMS))
    if way == "pickle":
        return  # a local function cannot be pickled
    async with source:
        await source.sample()
        await source.snapshot()
        stop = transform.block()
        await source.sample()
        await reached(stop)
        what = await saved(way, source, tmp_path, timeout=0.1)
        transform.release()
        expected = await take(source, 2)
    calls.clear()
    async with await restored(way, what, make(9, Blocking())) as target:
        await check_stream(target, expected)
        await target.snapshot()
        assert len(calls) == 2  # for what was drawn anew alone


@every_way
async def test_closed_with_unfinished_batches(way: str, tmp_path: Path) -> None:
    source = await filled(transform=late, prefetch=8, workers=4)
    async with source:
        await source.sample()
    assert source.stats().queued == 8
    what = await saved(way, source, tmp_path) if way != "pickle" else pickle.dumps(source)
    async with source:
        expected = await take(source, 12)
    async with await restored(way, what, buffer_with(transform=late, prefetch=8, workers=4, seed=9)) as target:
        await check_stream(target, expected)


@in_memory_and_on_disk
async def test_batches_in_line_outlive_their_rows(way: str, tmp_path: Path) -> None:
    async with await filled() as source:
        await source.sample()
        await source.extend(items_of(ITEMS, 1000))  # overwrites every row
        what = await saved(way, source, tmp_path)
        expected = await take(source, 5)
        assert all(number < ITEMS for batch in expected[:2] for number in batch["number"].tolist())
        await source.empty()
        emptied = await saved(way, source, tmp_path)
        await source.extend(items_of(ITEMS, 2000))
        afterwards = await take(source, 3)
    async with await restored(way, what, buffer_with(seed=9)) as target:
        await check_stream(target, expected)
    async with await restored(way, emptied, buffer_with(seed=9)) as target:
        assert (len(target), target.stats().queued) == (0, 0)
        await target.extend(items_of(ITEMS, 2000))
        await check_stream(target, afterwards)


async def test_what_cannot_be_saved_says_where_and_hurts_nobody(tmp_path: Path) -> None:
    class Unknown:
        pass

    async with await filled(transform=lambda data: {**data, "deep": [Unknown()]}) as source, Crew() as crew:
        await source.sample()
        asked = crew.start(source.sample())
        for call in (source.snapshot, source.state_dict, lambda: source.save(tmp_path / "it")):
            with pytest.raises(CheckpointError, match=r"batch \d/data/deep/0.*Unknown.*register"):
                await within(call())
        assert (await within(asked)).number == 1
        assert (await source.sample()).number == 2
    assert not list(tmp_path.iterdir())


@every_way
async def test_rows_in_many_pieces(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncbuf.storage._row_memory.SEGMENT_BYTES", 100)
    monkeypatch.setattr("asyncbuf.storage._row_memory.CHUNK_BYTES", 150)
    async with await filled() as source:
        await source.sample()
        what = await saved(way, source, tmp_path)
        state = await source.state_dict()
        expected = await take(source, 5)
    assert len(state["storage"]["chunks"]) > 2
    async with await restored(way, what, buffer_with(seed=9)) as target:
        assert difference(await target.state_dict(), state) is None
        await check_stream(target, expected)


async def test_a_tensordict_keeps_what_belongs_to_it() -> None:
    def named(data: Any) -> Any:
        return to_tensordict(data).to("cpu").refine_names("time")

    async with await filled(transform=named) as source:
        await source.sample()
        snapshot = await source.snapshot()
        original = await source.sample()
    async with buffer_with(transform=named, seed=9) as target:
        await target.restore(snapshot)
        batch = await target.sample()
    for found, expected in ((batch.data, original.data), (batch["deep"], original["deep"])):
        assert (found.device, found.names) == (expected.device, expected.names)


async def test_counts_beyond_32_bits() -> None:
    source = await filled()
    state = await source.state_dict()
    state["writer"]["write_count"] = state["prefetch"]["next"] = state["prefetch"]["delivered"] = 2**40
    state["prefetch"]["first"] = state["limiter"]["drawn"] = state["limiter"]["drawn_items"] = 2**40
    target = buffer_with()
    await target.load_state_dict(state)
    await target.extend(items_of(3))
    assert target.write_count == 2**40 + 3
    async with target:
        assert (await target.sample()).number == 2**40


@every_way
async def test_the_write_position_is_saved(way: str, tmp_path: Path) -> None:
    source = await filled(13)
    await source.extend(items_of(12, 100))
    target = await restored(way, await saved(way, source, tmp_path), buffer_with(seed=9))
    assert (len(target), target.write_count) == (ITEMS, 25)
    for buffer in (source, target):
        assert (await buffer.extend(items_of(3, 200))).tolist() == [5, 6, 7]
    assert difference(await target.state_dict(), await source.state_dict()) is None


async def test_a_save_over_a_richer_one_leaves_nothing_of_it(tmp_path: Path) -> None:
    async with await filled(prefetch=8) as rich, await filled(5, prefetch=0, seed=1) as poor:
        await rich.sample()
        await rich.save(tmp_path / "it")
        await take(poor, 2)
        await poor.save(tmp_path / "it")
        expected = await take(poor, 4)
    async with buffer_with(prefetch=0, seed=9) as target:
        await target.load(tmp_path / "it")
        assert (len(target), target.stats().queued) == (5, 0)
        await check_stream(target, expected)
    assert not list((tmp_path / "it").rglob("prefetch/*"))


async def test_a_checkpoint_grows_by_the_depth_at_most() -> None:
    async with await filled(prefetch=4, transform=late) as source:
        for _ in range(30):
            await source.sample()
            assert len(queue_of(await source.state_dict())) == 4
        state = await source.state_dict()
        assert (state["prefetch"]["capacity"], state["prefetch"]["waiting"]) == (4, 0)


@pytest.mark.usefixtures("transforms_in_threads")
async def test_consumers_that_wait_are_counted() -> None:
    async with buffer_with(transform=Blocking(), workers=4) as source, Crew() as crew:
        await source.extend(items_of(ITEMS))
        await source.sample()
        asked = [crew.start(source.sample()) for _ in range(5)]
        await turns(1)
        async with source.frozen():
            state = await source.state_dict()
            served = sum(task.done() for task in asked)
        assert state["prefetch"]["waiting"] == 5 - served
        assert len(queue_of(state)) == 7 - served
        expected = [await within(task) for task in asked][served:] + await take(source, 4)
    async with buffer_with(transform=Blocking(), seed=9) as target:
        await target.load_state_dict(state)
        await check_stream(target, expected)
