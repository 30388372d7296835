"""Snapshots: one point in time of everything, whatever goes on around it."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import gc
import io
import pickle
import random
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import (
    AsyncBufError,
    Batch,
    BufferClosedError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointVersionError,
    ListStorage,
    PrefetchError,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    Snapshot,
    TensorStorage,
)
from asyncbuf._plain import tree
from asyncbuf.testing import WAYS, assert_same_batch, difference
from tests.helpers import (
    SECONDS,
    CountingTransform,
    Crew,
    Stop,
    ThreadedStorage,
    background_tasks,
    rows,
    seeded,
    turns,
    until,
    within,
)
from tests.resume_helpers import (
    Average,
    Blocking,
    DictStorage,
    Failing,
    FavourSampler,
    ThinningWriter,
    Weighing,
    check_stream,
    items_of,
    items_with_history,
    late,
    list_of_tensordicts,
    noisy,
    plain,
    reached,
    restored,
    saved,
    take,
    tensordict_of,
    to_tensordict,
    unchanged,
)

if TYPE_CHECKING:
    from pathlib import Path

    from asyncbuf import Sampler, Storage

DEPTHS = (0, 1, 2, 3, 4, 8, 64)
ITEMS = 20

every_way = pytest.mark.parametrize("way", WAYS)
in_memory_and_on_disk = pytest.mark.parametrize("way", WAYS[:3])
slow = pytest.mark.slow


def buffer_with(**settings: Any) -> ReplayBuffer:
    """A buffer without items: batches of 3, two of them prefetched."""
    storage: Storage = settings.pop("storage", None) or TensorStorage(ITEMS)
    generator = seeded(settings.pop("seed", 0))
    arguments: dict[str, Any] = {"batch_size": 3, "prefetch": 2, "generator": generator}
    return ReplayBuffer(storage, **(arguments | settings))


async def filled(items: int = ITEMS, **settings: Any) -> ReplayBuffer:
    """The same with items."""
    buffer = buffer_with(**settings)
    await buffer.extend(items_of(items))
    return buffer


def queue_of(state: dict[str, Any]) -> list[dict[str, Any]]:
    queue: list[dict[str, Any]] = state["prefetch"]["queue"]
    return queue


def rows_of(state: dict[str, Any], name: str) -> torch.Tensor:
    return torch.cat([chunk[name] for chunk in state["storage"]["chunks"]])


# -- what the reference does ------------------------------------------------------------------------------------------


@every_way
async def test_queue_and_round_trip(way: str, tmp_path: Path) -> None:
    def make(seed: int) -> ReplayBuffer:
        return buffer_with(storage=ListStorage(ITEMS), seed=seed, workers=2)

    source = make(1)
    await source.extend([{"x": torch.tensor(i)} for i in range(ITEMS)])
    async with source:
        await source.sample()
        assert source.stats().queued == 2
        what = await saved(way, source, tmp_path)
        expected = await take(source, 4)
    async with await restored(way, what, make(2)) as target:
        assert target.stats().queued == 2
        await check_stream(target, expected)


@every_way
async def test_capture_while_a_worker_is_blocked(way: str, tmp_path: Path) -> None:
    transform = Blocking()
    source = await filled(transform=transform, workers=2)
    async with source:
        await source.sample()
        await source.snapshot()  # what was drawn so far is made
        stop = transform.block()
        await source.sample()
        await reached(stop)
        what = await saved(way, source, tmp_path, timeout=1.0)
        assert source.stats().in_flight == 1
        transform.release()
        expected = await take(source, 6)
    target = await restored(way, what, buffer_with(transform=Blocking(), seed=9))
    assert [entry["step"] for entry in queue_of(await target.state_dict())] == [None, 0]
    async with target:
        await check_stream(target, expected)


async def test_a_blocked_worker_holds_up_a_snapshot_no_longer_than_its_timeout() -> None:
    transform = Blocking()
    source = await filled(transform=transform)
    stop = transform.block()
    async with source, Crew() as crew:
        asked = crew.start(source.sample())
        await reached(stop)
        start = time.monotonic()
        snapshot = await source.snapshot(timeout=1.0)
        assert 0.7 < time.monotonic() - start < 1.5
        transform.release()
        expected = [await within(asked), *await take(source, 4)]
    target = buffer_with(transform=Blocking(), seed=9)
    await target.restore(snapshot)
    assert target.stats().queued == 3  # one for the consumer that was waiting
    async with target:
        await check_stream(target, expected)


async def test_a_transform_that_hangs_after_it_changed_its_state() -> None:
    class Hanging(Average):
        def __init__(self) -> None:
            super().__init__()
            self.stop: Stop | None = None

        def __call__(self, data: Any) -> Any:
            data = super().__call__(data)
            if self.stop is not None:
                self.stop()
            return data

    transform = Hanging()
    source = await filled(transform=transform)
    async with source:
        await source.sample()
        await source.snapshot()
        transform.stop = Stop()
        await source.sample()
        await reached(transform.stop)
        # Its state is neither that from before the ticket nor that from after it.
        with pytest.raises(TimeoutError, match="stateful"):
            await source.snapshot(timeout=0.5)
        transform.stop.go.set()
        snapshot = await source.snapshot()
        expected = await take(source, 6)
    target = buffer_with(transform=Hanging(), seed=9)
    await target.restore(snapshot)
    async with target:
        await check_stream(target, expected)


async def test_a_gather_that_hangs_ends_a_snapshot_in_time() -> None:
    stop = Stop()
    hooks = [stop]
    source = await filled(storage=ThreadedStorage(ITEMS, on_gather=lambda: hooks[0]() if hooks else None))
    async with source, Crew() as crew:
        asked = crew.start(source.sample())
        await reached(stop)
        with pytest.raises(TimeoutError):
            await source.snapshot(timeout=0.2)
        hooks.clear()
        stop.go.set()
        first = await within(asked)
        snapshot = await within(source.snapshot(timeout=5))
        expected = await take(source, 3)
    assert first.number == 0
    async with await filled(storage=ThreadedStorage(ITEMS), seed=9) as target:
        await target.restore(snapshot)
        await check_stream(target, expected)


@in_memory_and_on_disk
async def test_load_while_the_worker_of_the_target_is_blocked(way: str, tmp_path: Path) -> None:
    async with await filled(transform=Blocking()) as source:
        await source.sample()
        what = await saved(way, source, tmp_path)
        expected = await take(source, 5)
    transform = Blocking()
    stop = transform.block()
    async with await filled(transform=transform, seed=9) as target, Crew() as crew:
        waiting = crew.start(target.sample())
        await reached(stop)
        await restored(way, what, target)
        # What it was at is dropped; the consumer gets the first batch of the other stream, which is there already.
        assert_same_batch(await within(waiting), expected[0])
        transform.release()
        await check_stream(target, expected[1:])


async def test_load_waits_for_a_stateful_transform_that_is_at_work() -> None:
    class Slow(Average):
        def __init__(self) -> None:
            super().__init__()
            self.stop: Stop | None = None

        def __call__(self, data: Any) -> Any:
            if self.stop is not None:
                self.stop()
            return super().__call__(data)

    async with await filled(transform=Slow()) as source:
        await source.sample()
        snapshot = await source.snapshot()
        expected = await take(source, 5)
    transform = Slow()
    stop = transform.stop = Stop()
    async with await filled(transform=transform, seed=9) as target, Crew() as crew:
        crew.start(target.sample()).add_done_callback(lambda task: task.cancelled() or task.exception())
        await reached(stop)
        restoring = crew.start(target.restore(snapshot))
        await turns()
        assert not restoring.done()
        transform.stop = None
        stop.go.set()
        await within(restoring)
        await check_stream(target, expected[1:])  # the first went to the consumer that was waiting


def spoil(*values: Any) -> None:
    """Overwrite every tensor."""
    for leaf in tree.flatten(values, batched=False)[0]:
        if isinstance(leaf, torch.Tensor):
            leaf.detach().fill_(-1)


def of_tensors(seed: int) -> ReplayBuffer:
    return buffer_with(seed=seed, sampler=FavourSampler(ITEMS), transform=[noisy, Average()])


def of_list(seed: int) -> ReplayBuffer:
    return buffer_with(seed=seed, storage=ListStorage(ITEMS), sampler=SamplerWithoutReplacement(), transform=late)


def of_user(seed: int) -> ReplayBuffer:
    return buffer_with(seed=seed, storage=DictStorage(ITEMS), sampler=FavourSampler(ITEMS), transform=Average())


def of_tensordicts(seed: int) -> ReplayBuffer:
    return buffer_with(seed=seed)


@pytest.mark.parametrize(
    ("make", "items"),
    [(of_tensors, items_of), (of_list, list_of_tensordicts), (of_user, items_of), (of_tensordicts, tensordict_of)],
)
async def test_nothing_is_shared(make: Callable[[int], ReplayBuffer], items: Callable[[int], Any]) -> None:
    source = make(0)
    await source.extend(items(ITEMS))
    async with source:
        await source.sample()
        snapshot, state = await source.snapshot(), await source.state_dict()
        kept = copy.deepcopy(state)
        spoil(await source.state_dict(), snapshot.state_dict())
        live = await take(source, 8)
        expected = copy.deepcopy(live)
        spoil(live)
    for what in (snapshot, state, snapshot, state):
        async with make(9) as target:
            await (target.restore(what) if isinstance(what, Snapshot) else target.load_state_dict(what))
            for batch in expected:
                found = await within(target.sample())
                assert_same_batch(found, batch)
                spoil(found.data, found.indices, dict(found.info))
        assert difference(state, kept) is None
    async with make(9) as target:
        await target.load_state_dict(state)
        spoil(state)
        await check_stream(target, expected)


@every_way
async def test_values_with_a_history_become_leaves_and_stay_shared(way: str, tmp_path: Path) -> None:
    source = await filled(transform=Weighing())
    async with source:
        await source.sample()
        what = await saved(way, source, tmp_path)
        original = await source.sample()
    async with await restored(way, what, buffer_with(transform=Weighing(), seed=9)) as target:
        batch = await target.sample()
    assert not original["product"].is_leaf
    assert original["product"].requires_grad
    assert_same_batch(batch, original)
    assert batch["product"].is_leaf
    assert batch["again"] is batch["product"]
    batch["product"].sum().backward()
    assert batch["product"].grad is not None


@every_way
async def test_items_with_a_history(way: str, tmp_path: Path) -> None:
    source = buffer_with(storage=ListStorage(ITEMS))
    await source.extend(items_with_history(ITEMS))
    async with source:
        await source.sample()
        what = await saved(way, source, tmp_path)
        expected = await take(source, 4)
    async with await restored(way, what, buffer_with(storage=ListStorage(ITEMS), seed=9)) as target:
        await check_stream(target, expected)


@in_memory_and_on_disk
async def test_without_a_queue_it_goes_on_from_the_saved_sampler(way: str, tmp_path: Path) -> None:
    async with await filled() as source:
        await source.sample()
        state = await source.state_dict()
        expected = await take(source, 5)
    del state["prefetch"]
    what: Any = state if way == "state_dict" else Snapshot.from_state_dict(state)
    if way == "directory":
        await what.save(tmp_path / "old")
        what = tmp_path / "old"
    async with await filled(seed=9) as target:
        await take(target, 3)
        await restored(way, what, target)
        assert target.stats().queued == 0
        for batch in expected[2:]:  # two had been drawn and were not saved
            assert (await target.sample()).indices.equal(batch.indices)


async def test_first_batch_and_the_rest_are_each_item_once() -> None:
    sampler = functools.partial(SamplerWithoutReplacement, shuffle=True)
    async with await filled(10, sampler=sampler()) as source:
        seen = (await source.sample())["number"].tolist()
        snapshot = await source.snapshot()
        rest = [batch["number"].tolist() async for batch in source.epoch()]
    async with buffer_with(sampler=sampler(), seed=9) as target:
        await target.restore(snapshot)
        found = [batch["number"].tolist() async for batch in target.epoch()]
        assert found == rest
        assert sorted(sum(found, seen)) == list(range(10))
        following = [number async for batch in target.epoch() for number in batch["number"].tolist()]
        assert sorted(following) == list(range(10))


# -- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
async def test_elastic_from_any_depth_into_any_depth(depth: int, tmp_path: Path) -> None:
    async with await filled(prefetch=depth, transform=noisy, sampler=SamplerWithoutReplacement(), workers=2) as source:
        await take(source, 2)
        what = {way: await saved(way, source, tmp_path) for way in WAYS[:3]}
        expected = await take(source, 12)
    for i, other in enumerate(DEPTHS):
        way = WAYS[i % 3]
        target = buffer_with(prefetch=other, transform=noisy, sampler=SamplerWithoutReplacement(), seed=9)
        if other != depth:
            with pytest.raises(CheckpointMismatchError, match=rf"depth.*\b{other}\b.*\b{depth}\b"):
                await restored(way, what[way], target)
        async with await restored(way, what[way], target, elastic=True) as target:
            queued = target.stats().queued
            await check_stream(target, expected[:1], f"{depth} into {other}")
            # Drawing starts again when fewer are left than the depth, and ends with the pass, which has 7 batches.
            assert target.stats().queued == max(queued - 1, min(other, 4))
            await check_stream(target, expected[1:], f"{depth} into {other}")


@pytest.mark.parametrize("depth", [0, 2, 5])
async def test_elastic_into_another_batch_size(depth: int) -> None:
    async with await filled(prefetch=3) as source:
        await source.sample()
        snapshot = await source.snapshot()
        expected = await take(source, 3)
    target = buffer_with(prefetch=depth, batch_size=5, seed=9)
    with pytest.raises(CheckpointMismatchError, match=r"batch_size.*\b5\b.*\b3\b"):
        await target.restore(snapshot)
    await target.restore(snapshot, elastic=True)
    async with target:
        await check_stream(target, expected)
        assert [len(await target.sample()) for _ in range(4)] == [5] * 4


async def test_elastic_into_calls_that_say_their_size() -> None:
    async with await filled(prefetch=3) as source:
        await source.sample()
        snapshot = await source.snapshot()
        expected = await take(source, 3)
    async with buffer_with(prefetch=0, batch_size=None) as target:
        await target.restore(snapshot, elastic=True)
        for batch in expected:
            assert_same_batch(await target.sample(3), batch)
        assert len(await target.sample(4)) == 4


class Named(RandomSampler):
    """A sampler of another kind."""


Makes = Callable[..., ReplayBuffer]
make_other: Makes = functools.partial(buffer_with, transform=noisy)
OTHERS: dict[str, tuple[Makes, str]] = {
    "depth": (lambda: make_other(prefetch=4), r"\b4\b.*\b2\b"),
    "batch size": (lambda: make_other(batch_size=4), r"\b4\b.*\b3\b"),
    "no batch size": (lambda: make_other(batch_size=None, prefetch=0), r"None.*\b3\b"),
    "capacity": (lambda: make_other(storage=TensorStorage(30)), r"capacity.*\b30\b.*\b20\b"),
    "smaller": (lambda: make_other(storage=TensorStorage(15)), r"capacity.*\b15\b.*\b20\b"),
    "sampler": (lambda: make_other(sampler=Named()), "sampler.*Named.*RandomSampler"),
    "passes": (lambda: make_other(sampler=SamplerWithoutReplacement()), "WithoutReplacement.*RandomSampler"),
    "storage": (lambda: make_other(storage=DictStorage(ITEMS)), "storage.*DictStorage.*TensorStorage"),
    "writer": (lambda: make_other(writer=ThinningWriter()), "writer.*ThinningWriter.*RoundRobinWriter"),
    "stateful": (lambda: buffer_with(transform=Average()), "transform"),
    "fewer transforms": (lambda: buffer_with(), r"transform.*\b0\b.*\b1\b"),
    "more transforms": (lambda: buffer_with(transform=[noisy, plain]), r"transform.*\b2\b.*\b1\b"),
}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("elastic", [False, True], ids=["strict", "elastic"])
async def test_what_does_not_fit_is_refused(what: str, elastic: bool) -> None:
    if elastic and what in ("depth", "batch size", "no batch size"):
        return
    make, message = OTHERS[what]
    async with await filled(transform=noisy) as source:
        await source.sample()
        snapshot = await source.snapshot()
    async with make() as target:
        await target.extend(items_of(15, 500))
        await target.sample(3)
        async with unchanged(target):
            with pytest.raises(CheckpointMismatchError, match=message):
                await target.restore(snapshot, elastic=elastic)
        await take(target, 3) if target.batch_size else await target.sample(3)


@pytest.mark.parametrize(
    "sampler", [SamplerWithoutReplacement(drop_last=True), SamplerWithoutReplacement(shuffle=False)]
)
async def test_settings_of_a_sampler_that_differ_are_refused(sampler: Sampler) -> None:
    async with await filled(sampler=SamplerWithoutReplacement()) as source:
        await source.sample()
        snapshot = await source.snapshot()
    async with await filled(sampler=sampler, seed=9) as target:
        await target.sample()
        async with unchanged(target):
            with pytest.raises(
                CheckpointMismatchError, match=r"(drop_last|shuffle): expected (True|False).*(True|False)"
            ):
                await target.restore(snapshot, elastic=True)


@in_memory_and_on_disk
async def test_another_source_is_refused(way: str, tmp_path: Path) -> None:
    async with await filled() as source:
        await source.sample()
        what = await saved(way, source, tmp_path)
    other = buffer_with()
    await other.extend({"number": torch.arange(20), "image": torch.zeros(20, 2, 2)})
    async with other:
        await other.sample()
        async with unchanged(other):
            with pytest.raises(CheckpointMismatchError, match=r"image.*wide"):
                await restored(way, what, other)
        await other.sample()


class Refusing(FavourSampler):
    """Cannot be loaded, and finds out late."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state["draws"] < 5:
            raise RuntimeError("refused halfway")


async def test_a_part_that_refuses_halfway_changes_nothing() -> None:
    async with await filled(sampler=Refusing(ITEMS), transform=Average()) as source:
        await source.sample()
        snapshot = await source.snapshot()
    async with await filled(11, sampler=Refusing(ITEMS), transform=Average(), seed=9) as target:
        await take(target, 6)
        async with unchanged(target):
            with pytest.raises(RuntimeError, match="refused halfway"):
                await target.restore(snapshot)
        assert len(target) == 11
        await take(target, 3)


# -- malformed --------------------------------------------------------------------------------------------------------

State = dict[str, Any]


def at(*keys: Any) -> Callable[[State], Any]:
    """The container at a place in a state dict."""
    return lambda state: functools.reduce(lambda node, key: node[key], keys, state)


def put(value: Any, *keys: Any) -> Callable[[State], None]:
    """Write something there."""
    return lambda state: at(*keys[:-1])(state).__setitem__(keys[-1], value)


def drop(*keys: Any) -> Callable[[State], None]:
    """Remove what is there."""
    return lambda state: at(*keys[:-1])(state).__delitem__(keys[-1])


ENTRY = ("prefetch", "queue", 0)
CONTENT = (*ENTRY, "content")
MALFORMED: dict[str, tuple[Callable[[State], Any], type[CheckpointError], str]] = {
    "payload is a list": (put([], "prefetch"), CheckpointCorruptError, "prefetch.*dict.*list"),
    "payload is None": (put(None, "prefetch"), CheckpointCorruptError, "prefetch.*dict.*None"),
    "version 2": (put(2, "prefetch", "version"), CheckpointVersionError, "version 1.*2"),
    "version True": (put(True, "prefetch", "version"), CheckpointVersionError, "version.*True"),
    "version text": (put("1", "prefetch", "version"), CheckpointVersionError, "version.*'1'"),
    "no version": (drop("prefetch", "version"), CheckpointVersionError, "version.*None"),
    "capacity bool": (put(True, "prefetch", "capacity"), CheckpointCorruptError, "capacity.*int.*True"),
    "capacity negative": (put(-1, "prefetch", "capacity"), CheckpointCorruptError, "capacity.*-1"),
    "capacity text": (put("2", "prefetch", "capacity"), CheckpointCorruptError, "capacity.*int.*'2'"),
    "capacity float": (put(2.0, "prefetch", "capacity"), CheckpointCorruptError, "capacity.*int.*2.0"),
    "no capacity": (drop("prefetch", "capacity"), CheckpointCorruptError, "capacity.*None"),
    "waiting negative": (put(-1, "prefetch", "waiting"), CheckpointCorruptError, "waiting.*-1"),
    "no waiting": (drop("prefetch", "waiting"), CheckpointCorruptError, "waiting.*None"),
    "next negative": (put(-1, "prefetch", "next"), CheckpointCorruptError, "next.*-1"),
    "no next": (drop("prefetch", "next"), CheckpointCorruptError, "next.*None"),
    "queue is a dict": (put({}, "prefetch", "queue"), CheckpointCorruptError, "queue.*list.*dict"),
    "queue is None": (put(None, "prefetch", "queue"), CheckpointCorruptError, "queue.*list.*None"),
    "no queue": (drop("prefetch", "queue"), CheckpointCorruptError, "queue.*list"),
    "queue too long": (
        lambda state: queue_of(state).append(copy.deepcopy(queue_of(state)[0])),
        CheckpointCorruptError,
        "at most 2.*3",
    ),
    "entry is a list": (put([], *ENTRY), CheckpointCorruptError, "queue.*list"),
    "entry is None": (put(None, *ENTRY), CheckpointCorruptError, "queue.*None"),
    **{
        f"entry without {key}": (drop(*ENTRY, key), CheckpointCorruptError, key)
        for key in ("number", "seed", "batch_size", "main", "epoch", "last", "step", "content")
    },
    "entry with more": (put(1, *ENTRY, "more"), CheckpointCorruptError, "more"),
    "number text": (put("1", *ENTRY, "number"), CheckpointCorruptError, "number.*'1'"),
    "number bool": (put(True, *ENTRY, "number"), CheckpointCorruptError, "number.*True"),
    "number beyond the next": (put(10**6, *ENTRY, "number"), CheckpointCorruptError, "number.*1000000"),
    "seed too large": (put(2**64, *ENTRY, "seed"), CheckpointCorruptError, "seed"),
    "main a number": (put(1, *ENTRY, "main"), CheckpointCorruptError, "main.*bool"),
    "epoch text": (put("0", *ENTRY, "epoch"), CheckpointCorruptError, "epoch.*'0'"),
    "epoch negative": (put(-1, *ENTRY, "epoch"), CheckpointCorruptError, "epoch.*-1"),
    "step too large": (put(9, *ENTRY, "step"), CheckpointError, "steps"),
    "step below -1": (put(-2, *ENTRY, "step"), CheckpointCorruptError, "step.*-2"),
    "content is None": (put(None, *CONTENT), CheckpointCorruptError, "content"),
    "content without data": (drop(*CONTENT, "data"), CheckpointCorruptError, "content"),
    "content of no type": (put({"$type": "os.system", "value": 1}, *CONTENT, "data"), CheckpointCorruptError, "os.sys"),
    "indices float": (put(torch.zeros(3), *CONTENT, "indices"), CheckpointCorruptError, "indices"),
    "indices a list": (put([0, 1, 2], *CONTENT, "indices"), CheckpointCorruptError, "indices"),
    "indices with two axes": (put(torch.zeros(3, 1).long(), *CONTENT, "indices"), CheckpointCorruptError, "indices"),
    "indices out of range": (
        put(torch.tensor([0, 1, 999]), *CONTENT, "indices"),
        CheckpointCorruptError,
        "indices|rows",
    ),
    "indices negative": (put(torch.tensor([0, 1, -1]), *CONTENT, "indices"), CheckpointCorruptError, "indices|rows"),
    "info a list": (put([1], *CONTENT, "info"), CheckpointCorruptError, "info"),
    "format": (put("else", "format"), CheckpointCorruptError, "format.*'else'"),
    "no format": (drop("format"), CheckpointCorruptError, "format.*None"),
    "format version": (put(99, "version"), CheckpointVersionError, "99"),
    "no config": (drop("config"), CheckpointCorruptError, "None"),
    "less config": (drop("config", "capacity"), CheckpointCorruptError, "kinds|capacity"),
    "no writer": (drop("writer"), CheckpointCorruptError, "writer|RoundRobin"),
    "no sampler": (drop("sampler"), CheckpointCorruptError, "Sampler|sampler"),
    "no generator": (drop("generator"), CheckpointCorruptError, "generator"),
    "generator cut": (
        put(torch.zeros(7, dtype=torch.uint8), "generator", "state"),
        CheckpointCorruptError,
        "generator",
    ),
    "cursor text": (put("3", "writer", "cursor"), CheckpointCorruptError, "cursor.*'3'"),
    "cursor beyond size": (put(21, "writer", "cursor"), CheckpointCorruptError, "cursor.*21"),
    "more rows than written": (put(99, "writer", "size"), CheckpointCorruptError, "size|rows"),
    "fewer writes than rows": (put(5, "writer", "write_count"), CheckpointCorruptError, "write_count"),
    "rows of nothing": (put({"meta": None, "chunks": []}, "storage"), CheckpointCorruptError, "storage|rows"),
    "position beyond the pass": (put(99, "sampler", "position"), CheckpointCorruptError, "position.*99"),
    "pass beyond the rows": (put(99, "sampler", "length"), CheckpointCorruptError, "length|rows|99"),
    "no storage": (drop("storage"), CheckpointCorruptError, "storage"),
    "no chunks": (put([], "storage", "chunks"), CheckpointCorruptError, "20 rows.*0"),
    "chunks too often": (
        lambda s: s["storage"]["chunks"].append(s["storage"]["chunks"][0]),
        CheckpointCorruptError,
        "row",
    ),
    "field missing": (drop("storage", "chunks", 0, "wide"), CheckpointCorruptError, "wide"),
    "field of another dtype": (
        lambda state: put(rows_of(state, "number").float(), "storage", "chunks", 0, "number")(state),
        CheckpointCorruptError,
        "number.*float32",
    ),
    "rows negative": (put(-1, "storage", "meta", "rows"), CheckpointCorruptError, "-1"),
    "meta text": (put("rows", "storage", "meta"), CheckpointCorruptError, "storage"),
    "chunk of numbers": (put(1, "storage", "chunks", 0, "number"), CheckpointCorruptError, "expe"),
    "chunk without rows": (put(torch.tensor(1), "storage", "chunks", 0, "number"), CheckpointCorruptError, "expe"),
    "meta on its head": (put([{}], "storage", "meta", "fields"), CheckpointCorruptError, "storage"),
}


@pytest.fixture(scope="module")
def good_state() -> State:
    async def main() -> State:
        async with await filled(sampler=SamplerWithoutReplacement()) as source:
            await source.sample()
            return await source.state_dict()

    return asyncio.run(main())


@pytest.mark.parametrize("what", MALFORMED)
async def test_malformed_is_refused_and_changes_nothing(what: str, good_state: State) -> None:
    mutate, error, message = MALFORMED[what]
    state = copy.deepcopy(good_state)
    mutate(state)
    async with await filled(12, sampler=SamplerWithoutReplacement(), seed=9) as target:
        await target.sample()
        async with unchanged(target):
            with pytest.raises(error, match=message):
                await target.load_state_dict(state)
        await check_goes_on(target)


async def test_the_state_that_was_mutated_loads(good_state: State) -> None:
    async with await filled(12, sampler=SamplerWithoutReplacement(), seed=9) as target:
        await target.load_state_dict(copy.deepcopy(good_state))
        assert len(target) == 20
        await check_goes_on(target)


async def check_goes_on(buffer: ReplayBuffer) -> None:
    await take(buffer, 3)
    await buffer.extend(items_of(2))


async def test_bytes_that_changed_on_disk_are_refused(tmp_path: Path) -> None:
    async with await filled(transform=noisy) as source:
        await source.sample()
        await source.save(tmp_path / "it")
    files = [path for path in (tmp_path / "it").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    assert len(files) >= 4  # manifest, rows, two batches
    async with await filled(12, transform=noisy, seed=9) as target:
        await target.sample()
        for path in files:
            content = path.read_bytes()
            for wrong in (_flipped(content), content[:-1], b"", None):
                path.unlink() if wrong is None else path.write_bytes(wrong)
                async with unchanged(target):
                    with pytest.raises(CheckpointError):
                        await target.load(tmp_path / "it")
                path.write_bytes(content)
        await target.load(tmp_path / "it")
        assert len(target) == 20


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


# -- where a save may fall --------------------------------------------------------------------------------------------


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


@in_memory_and_on_disk
async def test_a_restore_deep_in_a_pass_is_no_replay(way: str, tmp_path: Path) -> None:
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
    assert seconds[1] < 3 * seconds[0] + 0.1


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
        what = await saved(way, source, tmp_path, timeout=1.0)
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
    monkeypatch.setattr("asyncbuf.storage.frozen.SEGMENT_BYTES", 100)
    monkeypatch.setattr("asyncbuf.storage.row_memory.CHUNK_BYTES", 150)
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
    state["writer"]["write_count"] = state["prefetch"]["next"] = 2**40
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


# -- formats and protocols --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [noisy, to_tensordict], ids=["dict", "tensordict"])
async def test_torch_load_reads_a_state_dict_safely(transform: Callable[..., Any]) -> None:
    async with await filled(transform=transform) as source:
        await source.sample()
        file = io.BytesIO()
        torch.save(await source.state_dict(), file)
        expected = await take(source, 5)
    file.seek(0)
    state = torch.load(file)
    async with buffer_with(transform=transform, seed=9) as target:
        await target.load_state_dict(state)
        await check_stream(target, expected)


async def test_stateful_of_torch_distributed() -> None:
    stateful = pytest.importorskip("torch.distributed.checkpoint.stateful")
    async with await filled() as source:
        await source.sample()
        snapshot = await source.snapshot()
        expected = await take(source, 4)
    assert isinstance(snapshot, stateful.Stateful)
    other = Snapshot()
    assert isinstance(other, stateful.Stateful)
    other.load_state_dict(snapshot.state_dict())
    async with buffer_with(seed=9) as target:
        await target.restore(other)
        await check_stream(target, expected)


async def test_a_snapshot_pickles_and_says_what_it_holds(tmp_path: Path) -> None:
    async with await filled() as source:
        await source.sample()
        snapshot = await source.snapshot()
        await snapshot.save(tmp_path / "it")
        expected = await take(source, 4)
    copies = [pickle.loads(pickle.dumps(snapshot)), copy.deepcopy(snapshot), await Snapshot.load(tmp_path / "it")]
    for one in copies:
        assert repr(one) == repr(snapshot)
        async with buffer_with(seed=9) as target:
            await target.restore(one)
            assert difference(await target.state_dict(), snapshot.state_dict()) is None
            await check_stream(target, expected)
    assert "20/20 items" in repr(snapshot)
    assert "prefetched [1, 2]" in repr(snapshot)


async def test_a_bad_state_dict_leaves_a_snapshot_as_it_is() -> None:
    async with await filled() as source:
        await source.sample()
        snapshot = await source.snapshot()
    before = snapshot.state_dict()
    for bad in ({}, {**before, "version": 99}, {**before, "storage": None}):
        with pytest.raises(CheckpointError):
            snapshot.load_state_dict(bad)
    assert difference(snapshot.state_dict(), before) is None


async def test_a_running_buffer_does_not_pickle() -> None:
    source = await filled(transform=noisy)
    pickle.dumps(source)
    async with source:
        await source.sample()
        for attempt in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match="frozen"):
                attempt(source)
        async with source.frozen():
            content, twin = pickle.dumps(source), copy.deepcopy(source)
        with pytest.raises(TypeError, match="frozen"):
            pickle.dumps(source)
        expected = await take(source, 5)
    for buffer in (pickle.loads(content), twin):
        async with buffer:
            await check_stream(buffer, expected)


@pytest.mark.parametrize("kind", ["items", "transform"])
async def test_deepcopy_with_a_history(kind: str) -> None:
    if kind == "items":
        source = buffer_with(storage=ListStorage(ITEMS))
        await source.extend(items_with_history(ITEMS))
    else:
        source = await filled(transform=Weighing())
    async with source:
        await source.sample()
        async with source.frozen():
            twin = copy.deepcopy(source)
        expected = await take(source, 4)
    async with twin:
        await check_stream(twin, expected)


class Remembering(TensorStorage):
    """A storage with something of its own."""

    def __init__(self, capacity: int, name: str) -> None:
        super().__init__(capacity)
        self.name = name


async def test_a_derived_storage_pickles_with_what_is_its_own() -> None:
    source = await filled(storage=Remembering(ITEMS, "mine"))
    storage = pickle.loads(pickle.dumps(source))._storage
    assert (type(storage), storage.name) == (Remembering, "mine")


async def test_snapshot_within_frozen() -> None:
    async with await filled(transform=late) as source, Crew() as crew:
        await source.sample()
        async with source.frozen():
            outside = crew.start(source.extend(items_of(3, 100)))
            asked = [crew.start(source.sample()) for _ in range(2)]
            await turns()
            # Not within(), which would call from another task.
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
        async with source.frozen():
            first = await source.state_dict()
            others = [crew.start(call) for call in (source.sample(), source.skip(), source.flush(), source.sample())]
            await turns(50)
            await asyncio.sleep(0.02)
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
                async with asyncio.timeout(1):
                    await calls[call]()
        await take(source, 2)


# -- in the middle of everything --------------------------------------------------------------------------------------


async def test_two_snapshots_at_once() -> None:
    async with await filled(transform=late) as source:
        await source.sample()
        one, other, state = await asyncio.gather(source.snapshot(), source.snapshot(), source.state_dict())
        assert difference(one.state_dict(), other.state_dict()) is None
        assert difference(one.state_dict(), state) is None
        expected = await take(source, 4)
    async with buffer_with(transform=late, seed=9) as target:
        await asyncio.gather(target.restore(one), target.restore(other))
        await check_stream(target, expected)


async def test_two_saves_to_one_place_at_once(tmp_path: Path) -> None:
    async with await filled(prefetch=8) as source:
        await source.sample()
        await source.save(tmp_path / "it")
        for _ in range(5):
            await asyncio.gather(*(source.save(tmp_path / "it") for _ in range(4)))
            target = buffer_with(prefetch=8, seed=9)
            await target.load(tmp_path / "it")
            assert target.stats().queued == 8


def test_one_event_loop_after_the_other() -> None:
    buffer = buffer_with()

    async def main() -> None:
        await asyncio.gather(*(buffer.snapshot() for _ in range(3)))
        async with buffer:
            await buffer.extend(items_of(4))
            await take(buffer, 2)
            await asyncio.gather(*(buffer.snapshot() for _ in range(3)))

    asyncio.run(main())
    asyncio.run(main())


@pytest.mark.parametrize("timeout", [None, 5.0])
async def test_close_while_a_snapshot_waits(timeout: float | None) -> None:
    is_open = asyncio.Event()

    async def jam(data: Any) -> Any:
        await is_open.wait()
        return data

    source = await filled(transform=jam)
    async with Crew() as crew:
        await source.open()
        asked = crew.start(source.sample())
        await turns()
        waiting = crew.start(source.snapshot(timeout))
        await turns()
        await within(source.aclose())
        with pytest.raises(BufferClosedError):
            await within(asked)
        start = time.monotonic()
        snapshot = await within(waiting, 8)  # of the closed buffer
        assert time.monotonic() - start < 2
        is_open.set()
        async with source:
            expected = await take(source, 5)
        async with buffer_with(transform=jam, seed=9) as target:
            await target.restore(snapshot)
            await check_stream(target, expected)


@pytest.mark.parametrize("call", ["skip", "flush", "empty"])
async def test_what_a_snapshot_waits_for_is_dropped(call: str) -> None:
    is_open = asyncio.Event()

    async def jam(data: Any) -> Any:
        await is_open.wait()
        return data

    async with await filled(transform=jam, prefetch=1, batch_size=20) as source, Crew() as crew:
        asked = crew.start(source.sample())
        await turns()
        asked.cancel()
        await source.skip()
        waiting = crew.start(source.snapshot())
        await turns()
        assert not waiting.done()
        await getattr(source, call)()
        snapshot = await within(waiting, 2)
        assert queue_of(snapshot.state_dict()) == []


async def test_a_dead_worker_does_not_stop_a_snapshot() -> None:
    source = await filled(transform=late)
    await source.open()
    await take(source, 3)
    next(task for task in background_tasks() if "worker" in task.get_name()).cancel()
    await turns()
    snapshot = await within(source.snapshot())
    await within(source.aclose())
    async with buffer_with(transform=late, seed=9) as target:
        await target.restore(snapshot)
        assert [batch.number for batch in await take(target, 4)] == [3, 4, 5, 6]


@pytest.mark.parametrize("rounds", [60, pytest.param(2000, marks=[slow, pytest.mark.timeout(900)])])
async def test_cancelled_at_random_moments(rounds: int, tmp_path: Path) -> None:
    def make(seed: int = 0) -> ReplayBuffer:
        return buffer_with(transform=[Average(), late], prefetch=3, workers=2, seed=seed)

    plain_one, source, choose = make(), make(), random.Random(0)
    await plain_one.extend(items_of(ITEMS))
    await source.extend(items_of(ITEMS))

    async def freeze() -> None:
        async with source.frozen():
            await source.state_dict()

    calls: list[Callable[[], Any]] = [source.snapshot, source.state_dict, lambda: source.save(tmp_path / "it"), freeze]
    async with plain_one, source, Crew() as crew:
        for _ in range(rounds):
            asked = crew.start(source.sample())
            tasks = [crew.start(call()) for call in choose.sample(calls, 2)]
            await turns(choose.randrange(8))
            if choose.random() < 0.5:
                await asyncio.sleep(choose.random() * 0.004)
            for task in tasks:
                task.cancel()
            assert_same_batch(await within(asked), await plain_one.sample())
        await asyncio.gather(*tasks, return_exceptions=True)
        assert difference(await within(source.state_dict()), await plain_one.state_dict()) is None
    assert [path.name for path in tmp_path.iterdir()] in ([], ["it"])


async def test_a_restore_cancelled_at_random_moments_is_all_or_nothing() -> None:
    async with await filled(transform=late) as source:
        await source.sample()
        state = await source.state_dict()
        new = await take(source, 2)
    choose = random.Random(1)
    outcomes = set()
    async with await filled(12, transform=late, seed=9) as target:
        await take(target, 20)
        old_state = await target.state_dict()
        old = await take(target, 2)
        for _ in range(60):
            await target.load_state_dict(old_state)
            task = asyncio.create_task(target.load_state_dict(state))
            await turns(choose.randrange(6))
            await asyncio.sleep(choose.choice([0, 0, 0.001, 0.003]))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            batches = await take(target, 2)
            was_restored = batches[0].number == new[0].number
            assert was_restored == (not task.cancelled())
            outcomes.add(was_restored)
            for found, expected in zip(batches, new if was_restored else old, strict=True):
                assert_same_batch(found, expected)
            assert len(target) == (20 if was_restored else 12)
    assert outcomes == {True, False}


@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
async def test_a_write_that_waits_while_a_restore_changes_the_order_of_fields(threads: bool) -> None:
    def items(*names: str) -> dict[str, torch.Tensor]:
        return {name: torch.full((4,), ord(name)) for name in names}

    source = buffer_with()
    await source.extend(items("b", "a"))
    snapshot = await source.snapshot()

    planned, copying = Stop(), Stop()

    class SlowStorage(ThreadedStorage):
        def load_rows(self, meta: Any, chunks: Any) -> Callable[[], None]:
            make_live = super().load_rows(meta, chunks)
            planned()
            return make_live

    storage = SlowStorage(ITEMS)
    target = buffer_with(storage=storage)
    # The class of the storage is part of what must agree.
    snapshot._state["config"]["storage"] = "SlowStorage"
    async with target, Crew() as crew:
        restore = crew.start(target.restore(snapshot))
        await planned.come.reached()  # it saw an empty storage
        await target.extend(items("a", "b"))
        storage.on_write = copying
        first = crew.start(target.extend(items("a", "b")))
        await copying.come.reached()
        storage.on_write = lambda: None
        planned.go.set()
        await until(lambda: target.stats().waiting_writers == 1)
        storage.writes_in_threads = threads
        second = crew.start(target.extend(items("a", "b")))
        await turns()
        copying.go.set()
        await within(asyncio.gather(restore, first, second))
        assert len(target) == 8
        batch = await within(target.sample(64))
        assert batch["a"].tolist() == [ord("a")] * 64
        assert batch["b"].tolist() == [ord("b")] * 64


# -- among writers ----------------------------------------------------------------------------------------------------

RING = 600  # rows of 4 KB: three segments of memory


def numbered(start: int, count: int) -> dict[str, torch.Tensor]:
    number = torch.arange(start, start + count)
    return {"number": number, "wide": number[:, None].repeat(1, 512)}


def check_consistent(state: State, capacity: int) -> None:
    """Every row holds the newest item that the cursor says was written to it, and all of it."""
    writer = state["writer"]
    count, size = writer["write_count"], writer["size"]
    assert (writer["cursor"], size) == (count % capacity, min(count, capacity))
    row = torch.arange(size)
    newest = row + capacity * ((count - 1 - row) // capacity)
    assert rows_of(state, "number").equal(newest)
    wide = rows_of(state, "wide")
    assert wide.equal(newest[:, None].expand_as(wide))
    for entry in queue_of(state):
        check_whole(entry["content"]["indices"], entry["content"]["data"], capacity)


def check_whole(indices: torch.Tensor, data: Any, capacity: int) -> None:
    assert (data["number"] % capacity).equal(indices)
    assert data["wide"].equal(data["number"][:, None].expand_as(data["wide"]))


@pytest.mark.parametrize("count", [100, pytest.param(4000, marks=[slow, pytest.mark.timeout(1800)])])
async def test_snapshots_among_writers_are_consistent(count: int, tmp_path: Path) -> None:
    buffer = buffer_with(storage=TensorStorage(RING), batch_size=4, transform=late, workers=2)
    written, longest, over = 0, 0.0, False

    async def produce() -> None:
        nonlocal written
        while not over:
            size = random.choice((1, 7, 60))  # inline and in a thread
            start, written = written, written + size
            async with asyncio.timeout(SECONDS):
                await buffer.extend(numbered(start, size))

    async def consume() -> None:
        while not over:
            async with asyncio.timeout(SECONDS):
                batch = await buffer.sample()
            check_whole(batch.indices, batch.data, RING)

    async def snapshots() -> None:
        nonlocal longest, over
        for i in range(count):
            start = time.monotonic()
            snapshot = await buffer.snapshot(timeout=10)
            longest = max(longest, time.monotonic() - start)
            before = buffer.write_count
            while i % 2 and buffer.write_count < before + RING:  # noqa: ASYNC110 - until every row has been overwritten
                await asyncio.sleep(0)
            if i % 10 == 0:
                await snapshot.save(tmp_path / "it")
                snapshot = await Snapshot.load(tmp_path / "it")
            check_consistent(await asyncio.to_thread(snapshot.state_dict), RING)
        over = True

    async with buffer, asyncio.TaskGroup() as tasks:
        for work in (produce, produce, produce, consume, consume, snapshots):
            tasks.create_task(work())
    assert longest < 10


async def test_rows_are_kept_only_while_a_snapshot_lives() -> None:
    buffer = buffer_with(storage=TensorStorage(RING), batch_size=4)
    await buffer.extend(numbered(0, RING))
    first = await buffer.snapshot()
    await buffer.extend(numbered(RING, 100))
    second = await buffer.snapshot()
    await buffer.extend(numbered(RING + 100, RING))
    await buffer.empty()
    await buffer.extend(numbered(0, 10))
    for snapshot, count in ((first, RING), (second, RING + 100)):
        state = snapshot.state_dict()
        assert state["writer"]["write_count"] == count
        check_consistent(state, RING)
        assert difference(snapshot.state_dict(), state) is None  # and again
    storage = buffer._storage
    assert isinstance(storage, TensorStorage)
    del first, second, snapshot
    gc.collect()
    assert len(storage._frozen) == 0


async def test_pickle_use_and_discard_leaves_nothing() -> None:
    source = await filled(transform=[noisy, late], workers=4)
    async with source:
        await source.sample()
        async with source.frozen():
            content = pickle.dumps(source)
    tasks, threads = len(asyncio.all_tasks()), threading.active_count()
    for _ in range(100):
        async with pickle.loads(content) as buffer:
            await buffer.sample()
            await buffer.snapshot()
        del buffer
    assert len(asyncio.all_tasks()) == tasks
    assert threading.active_count() <= threads


# -- how long it holds others up --------------------------------------------------------------------------------------


class Pauses:
    """The longest time between two steps of something that should never pause."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._last: float | None = None

    def step(self) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self.longest = max(self.longest, now - self._last)
        self._last = now


@slow
@pytest.mark.timeout(300)
async def test_a_save_of_500_megabytes_stalls_nobody(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    rows, width = 9_000, 56_000  # 504 MB
    buffer = buffer_with(storage=TensorStorage(rows), batch_size=32, transform=None, workers=2)
    for start in range(0, rows, 500):
        await buffer.extend({"number": torch.arange(start, start + 500), "pixels": torch.ones(500, width).byte()})
    item = {"number": torch.tensor(0), "pixels": torch.zeros(width, dtype=torch.uint8)}
    over = False

    async def sample(pauses: Pauses) -> None:
        while not over:
            await buffer.sample()
            pauses.step()

    async def extend(pauses: Pauses) -> None:
        while not over:
            await buffer.add(item)
            pauses.step()
            await asyncio.sleep(0.001)

    async def beat(pauses: Pauses) -> None:
        while not over:
            await asyncio.sleep(0.001)
            pauses.step()

    longest: dict[str, dict[str, float]] = {}
    calls: dict[str, Callable[[], Any]] = {
        "idle": lambda: asyncio.sleep(3),
        "save": lambda: buffer.save(tmp_path / "it"),
    }
    async with buffer, Crew() as crew:
        for what, call in calls.items():
            over, all_pauses = False, [Pauses(), Pauses(), Pauses()]
            tasks = [crew.start(loop(p)) for loop, p in zip((sample, extend, beat), all_pauses, strict=True)]
            await asyncio.sleep(0.2)
            began = time.perf_counter()
            await call()
            longest[what] = {"seconds": time.perf_counter() - began}
            over = True
            await asyncio.gather(*tasks)
            names = ("sample", "extend", "loop")
            longest[what] |= {name: p.longest for name, p in zip(names, all_pauses, strict=True)}
    record_property("longest", longest)
    print(longest)
    assert max(longest["save"][name] for name in ("sample", "extend", "loop")) < 0.1


@pytest.mark.parametrize("shape", [[2**62, 2**62], [2**31], [2**64], [True], ["3"], [1.5], [-1], "3"], ids=str)
async def test_a_shape_that_cannot_be_is_refused_by_an_empty_buffer(shape: Any, good_state: State) -> None:
    state = copy.deepcopy(good_state)
    state["storage"]["meta"]["fields"][0]["shape"] = shape
    target = buffer_with(sampler=SamplerWithoutReplacement())
    with pytest.raises(CheckpointError, match="expected"):
        await target.load_state_dict(state)
    assert len(target) == 0
    await target.load_state_dict(good_state)


@pytest.mark.parametrize("way", ["snapshot", "state_dict", "directory", "frozen"])
async def test_stateful_transforms_that_begin_while_a_snapshot_waits_for_its_turn(way: str, tmp_path: Path) -> None:
    stop = Stop()

    class Slow(CountingTransform):
        def __call__(self, data: Any) -> Any:
            time.sleep(0.02)
            return super().__call__(data)

    def make(storage: TensorStorage) -> ReplayBuffer:
        return ReplayBuffer(storage, batch_size=4, prefetch=1, transform=Slow(), generator=seeded())

    storage = ThreadedStorage(50)
    buffer = make(storage)
    await buffer.extend(rows(20))
    async with buffer, Crew() as crew:
        await within(buffer.sample())
        storage.on_write = stop
        write = crew.start(buffer.extend(rows(10)))
        await stop.come.reached()
        consumers = [crew.start(buffer.sample()) for _ in range(3)]  # their draws wait behind the write
        await turns()
        saving = crew.start(_saved_while_frozen(buffer) if way == "frozen" else saved(way, buffer, tmp_path))
        await turns()
        stop.go.set()
        what = await within(saving)
        await within(write)
        seen = [int((await within(consumer))["seen"][0]) for consumer in consumers]
        seen += [int((await within(buffer.sample()))["seen"][0]) for _ in range(3)]
    assert seen == list(range(2, 8))
    other = await restored("state_dict" if way == "frozen" else way, what, make(ThreadedStorage(50)))
    async with other:
        assert [int((await within(other.sample()))["seen"][0]) for _ in range(6)] == seen


async def _saved_while_frozen(buffer: ReplayBuffer) -> Any:
    async with buffer.frozen():
        return await buffer.state_dict()


async def test_a_restore_asks_no_transform_for_its_state_while_it_is_at_work() -> None:
    class Busy(CountingTransform):
        at_work = False
        disturbed = False

        def __call__(self, data: Any) -> Any:
            self.at_work = True
            time.sleep(0.05)
            self.at_work = False
            return super().__call__(data)

        def state_dict(self) -> dict[str, int]:
            self.disturbed |= self.at_work
            return super().state_dict()

    transform = Busy()
    buffer = ReplayBuffer(TensorStorage(50), batch_size=4, prefetch=1, transform=transform)
    await buffer.extend(rows(50))
    async with buffer, Crew() as crew:
        snapshot = await within(buffer.snapshot())
        for _ in range(3):
            consumer = crew.start(buffer.sample())
            await until(lambda: transform.at_work)
            await within(buffer.restore(snapshot))
            await within(consumer)
    assert not transform.disturbed
