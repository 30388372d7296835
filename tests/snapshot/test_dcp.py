"""Snapshots go through ``torch.distributed.checkpoint``, with the batches that were prepared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint

from asyncbuf import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    ListStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    Snapshot,
    TensorStorage,
)
from asyncbuf._plain.layout import laid_out
from asyncbuf.integrations.dcp import SnapshotLoadPlanner
from tests.helpers import CountingTransform, WeightedSampler, check_same, rows, seeded, take, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

DCP: Any = checkpoint  # it does not declare what it exports
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def tensors(seed: int = 0, **settings: Any) -> ReplayBuffer:
    return ReplayBuffer(TensorStorage(64), batch_size=4, prefetch=3, generator=seeded(seed), **settings)


def weighted(seed: int = 0) -> ReplayBuffer:
    return tensors(seed, sampler=WeightedSampler(), transform=[CountingTransform(), lambda data: data])


def in_passes(seed: int = 0) -> ReplayBuffer:
    return tensors(seed, sampler=SamplerWithoutReplacement())


def of_objects(seed: int = 0) -> ReplayBuffer:
    return ReplayBuffer(
        ListStorage(64), batch_size=4, prefetch=3, generator=seeded(seed), collate_fn=lambda items: {"items": items}
    )


def items(buffer: ReplayBuffer, count: int, start: int) -> Any:
    if buffer._config.sampler is None or isinstance(buffer._storage, ListStorage):
        return [{"text": f"{n}", "none": {}, "list": [{}, n, {}]} for n in range(start, start + count)]
    return rows(count, start)


async def snapshot_of(buffer: ReplayBuffer) -> Snapshot:
    """With three prepared batches in its queue."""
    await buffer.extend(items(buffer, 40, 0))
    await take(buffer, 2)
    await until(lambda: buffer.stats().queued == 3 and buffer.stats().in_flight == 0)
    return await buffer.snapshot()


def saved(path: Path, **state: Any) -> None:
    DCP.save(state, checkpoint_id=path, no_dist=True)


def saved_beside(path: Path, **state: Any) -> None:
    found: Any = DCP.async_save(state, checkpoint_id=path, no_dist=True)
    getattr(found, "upload_completion", found).result(timeout=60)


def load(path: Path, *names: str, **state: Any) -> dict[str, Any]:
    DCP.load(state, checkpoint_id=path, no_dist=True, planner=SnapshotLoadPlanner(*names))
    return state


MAKERS = {make.__name__: make for make in (tensors, weighted, in_passes, of_objects)}


@pytest.mark.parametrize("save", [saved, saved_beside])
@pytest.mark.parametrize("make", MAKERS)
async def test_a_buffer_goes_on_exactly(tmp_path: Path, make: str, save: Callable[..., None]) -> None:
    buffer, other = MAKERS[make](), MAKERS[make](7)
    model = torch.nn.Linear(3, 2)
    async with buffer:
        save(tmp_path / "a", model=model, buffer=await snapshot_of(buffer))
        expected = await take(buffer, 12)
    snapshot, loaded = Snapshot(), torch.nn.Linear(3, 2)
    load(tmp_path / "a", model=loaded, buffer=snapshot)
    assert torch.equal(model.weight, loaded.weight)
    await other.restore(snapshot)
    assert other.stats().queued == 3
    async with other:
        check_same(await take(other, 12), expected)


async def test_into_a_snapshot_that_holds_something_else(tmp_path: Path) -> None:
    buffer, other = tensors(), tensors(7)
    async with buffer, other:
        saved(tmp_path / "a", buffer=await snapshot_of(buffer))
        expected = await take(buffer, 8)
        await other.extend(rows(5))
        await other.sample()
        snapshot = await other.snapshot()
        load(tmp_path / "a", buffer=snapshot)
        await other.restore(snapshot)
        check_same(await take(other, 8), expected)


async def test_a_state_dict_by_its_name(tmp_path: Path) -> None:
    buffer, other = tensors(), tensors(7)
    async with buffer:
        await snapshot_of(buffer)
        saved(tmp_path / "a", buffer=await buffer.state_dict(), step=torch.tensor(3))
        expected = await take(buffer, 8)
    state = load(tmp_path / "a", "buffer", buffer={}, step=torch.tensor(0))
    assert int(state["step"]) == 3
    await other.load_state_dict(state["buffer"])
    async with other:
        check_same(await take(other, 8), expected)


async def test_a_closed_buffer_without_items(tmp_path: Path) -> None:
    saved(tmp_path / "a", buffer=await tensors().snapshot())
    snapshot, other = Snapshot(), tensors(7)
    load(tmp_path / "a", buffer=snapshot)
    await other.restore(snapshot)
    assert other.write_count == 0


async def test_gradients_are_kept(tmp_path: Path) -> None:
    def wanting(data: Any) -> Any:
        return {**data, "wide": data["wide"].clone().requires_grad_()}

    buffer, other = tensors(transform=wanting), tensors(7, transform=wanting)
    async with buffer:
        await buffer.extend(rows(40))
        await buffer.sample()
        await until(lambda: buffer.stats().queued == 3 and buffer.stats().in_flight == 0)
        saved(tmp_path / "a", buffer=await buffer.snapshot())
        snapshot = Snapshot()
        load(tmp_path / "a", buffer=snapshot)
    await other.restore(snapshot)
    async with other:
        assert (await other.sample())["wide"].requires_grad


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")
async def test_within_a_process_group(tmp_path: Path) -> None:
    buffer, other = tensors(), tensors(7)
    async with buffer:
        DCP.save({"buffer": await snapshot_of(buffer)}, checkpoint_id=tmp_path / "a")
        expected = await take(buffer, 8)
    snapshot = Snapshot()
    DCP.load({"buffer": snapshot}, checkpoint_id=tmp_path / "a", planner=SnapshotLoadPlanner())
    await other.restore(snapshot)
    async with other:
        check_same(await take(other, 8), expected)


async def test_without_such_a_snapshot(tmp_path: Path) -> None:
    saved(tmp_path / "a", model=torch.nn.Linear(3, 2))
    snapshot = await tensors().snapshot()
    with pytest.raises(BaseException, match="buffer: expected a snapshot in the checkpoint") as found:
        load(tmp_path / "a", buffer=snapshot)
    failures: Any = getattr(found.value, "failures", {0: (found.value,)})
    assert isinstance(failures[0][0], CheckpointMismatchError)
    assert len(snapshot.state_dict()["storage"]["chunks"]) == 0


# -- what is empty ----------------------------------------------------------------------------------------------------


async def test_what_is_empty_is_put_back_and_keys_get_their_order() -> None:
    buffer = of_objects()
    async with buffer:
        state = (await snapshot_of(buffer)).state_dict()
    without = dropped(state) | {"scattered": True}
    assert "sampler" not in without
    shown = repr(without)
    await of_objects(7).load_state_dict(without)
    assert repr(without) == shown
    assert repr(Snapshot.from_state_dict(without).state_dict()) == repr(state)


def dropped(node: Any) -> Any:
    """What is left if nothing is kept that is empty, and keys are in another order."""
    if isinstance(node, dict):
        return {key: dropped(node[key]) for key in sorted(node, reverse=True) if node[key] != {}}
    if isinstance(node, list):
        last = max((i for i, value in enumerate(node) if value != {}), default=-1)
        return [None if value == {} else dropped(value) for value in node[: last + 1]]
    return node


NO_LAYOUTS = [3, {"x": 1}, "", "[" * 10**5, "{"]


@pytest.mark.parametrize("layout", NO_LAYOUTS, ids=range(len(NO_LAYOUTS)))
async def test_forged_layouts(layout: Any) -> None:
    state = await tensors().state_dict()
    state |= {"layout": layout, "scattered": True}
    other = tensors(7)
    with pytest.raises(CheckpointCorruptError):
        await other.load_state_dict(state)
    assert other.write_count == 0


@pytest.mark.parametrize(
    "layout",
    ["3", "{}", "[]", '{"format": {"x": 0}}', '{"format": [], "version": [{}]}', '{"sampler": [0], "rows": [{}]}'],
)
async def test_a_layout_that_says_something_else_changes_nothing(layout: str) -> None:
    buffer, other = tensors(), tensors(7)
    async with buffer:
        state = (await snapshot_of(buffer)).state_dict()
        expected = await take(buffer, 5)
    state |= {"layout": layout, "scattered": True}
    await other.load_state_dict(state)
    async with other:
        check_same(await take(other, 5), expected)


async def test_forged_states_under_a_layout() -> None:
    changes: list[dict[str, Any]] = [{"sampler": 3}, {"more": 3}, {"prefetch": []}, {"config": None}]
    for change in changes:
        with pytest.raises(CheckpointError):
            await tensors(7).load_state_dict(await tensors().state_dict() | {"scattered": True} | change)
    for part in ("config", "prefetch", "generator", "rows"):
        state = await tensors().state_dict()
        del state[part]
        before = (await tensors().state_dict()).keys() - {part}
        assert laid_out(state, state["layout"]).keys() == before
