"""Snapshots: the formats they travel in and the protocols they follow."""

from __future__ import annotations

import copy
import io
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import CheckpointError, ListStorage, Snapshot, TensorStorage
from asyncbuf.testing import difference
from tests.resume_helpers import Weighing, check_stream, items_with_history, noisy, take, to_tensordict
from tests.snapshot.helpers import ITEMS, buffer_with, filled

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


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
