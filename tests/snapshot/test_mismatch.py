"""Snapshots of another buffer: refused with both values named, or taken elastically."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import CheckpointMismatchError, RandomSampler, ReplayBuffer, SamplerWithoutReplacement, TensorStorage
from asyncbuf.testing import WAYS, assert_same_batch
from tests.helpers import some
from tests.resume_helpers import (
    Average,
    DictStorage,
    FavourSampler,
    ThinningWriter,
    check_stream,
    items_of,
    noisy,
    plain,
    restored,
    saved,
    take,
    unchanged,
)
from tests.snapshot.helpers import DEPTHS, ITEMS, buffer_with, filled, in_memory_and_on_disk

if TYPE_CHECKING:
    from pathlib import Path

    from asyncbuf import Sampler


@pytest.mark.parametrize("depth", some(DEPTHS, fast=[0, 2, 64]))
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
            with pytest.raises(CheckpointMismatchError, match=r"sampler: expected a state.*refused halfway"):
                await target.restore(snapshot)
        assert len(target) == 11
        await take(target, 3)
