"""Checkpoints of other runs: refused, unless taken partially or elastically."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from asyncbuf import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointVersionError,
    ReplayBuffer,
    TensorStorage,
)
from asyncbuf._disk.writer import CheckpointWriter
from asyncbuf.checkpoint.checkpointer import Checkpointer
from tests.checkpoint.helpers import Count, Run, Untouched, bits, items, make_buffer, saved_twice
from tests.helpers import check_same, take

if TYPE_CHECKING:
    from pathlib import Path


async def test_parts_must_be_the_same(checkpointer: Checkpointer) -> None:
    buffer, count = make_buffer(), Count(1)
    await checkpointer.save(0, buffer=buffer, count=count, extra=1)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, r"no object given: \['buffer', 'count'\]"),
        ({"count": Count()}, r"no object given: \['buffer'\]"),
        ({"buffer": buffer, "count": Count(), "model": Count()}, r"not in the checkpoint: \['model'\]"),
        ({"buffer": buffer, "counter": Count()}, r"\['counter'\], no object given: \['count'\]"),
        ({"buffer": buffer, "count": Count(), "extra": Count()}, r"\['extra'\].*plain values.*: \['extra'\]"),
        (
            {"buffer": Count(), "count": Count()},
            r"buffer: expected a buffer \(any Snapshotable.*, found an object",
        ),
        ({"buffer": buffer, "count": make_buffer()}, "count: expected an object .* found a buffer"),
        ({"buffer": await buffer.snapshot(), "count": Count()}, "buffer: expected a buffer"),
    ]
    for objects, message in wrong:
        with pytest.raises(CheckpointMismatchError, match=message) as caught:
            await checkpointer.restore(**objects)
        assert str(checkpointer.path(0)) in str(caught.value)


async def test_partial_leaves_parts_out(checkpointer: Checkpointer) -> None:
    run = Run(0)
    async with run.buffer:
        await run.train(3)
        await checkpointer.save(3, **run.objects, extra=1)
    other = Run(1)
    restored = await checkpointer.restore(partial=True, model=other.model)
    assert other.weights() == run.weights()
    assert restored.values == {"extra": 1}
    assert len(other.buffer) == 0
    with pytest.raises(CheckpointMismatchError, match="nonsense"):
        await checkpointer.restore(partial=True, nonsense=other.model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"prefetch": 5}, "depth.*elastic"), ({"batch_size": 4}, "batch_size.*elastic"), ({"capacity": 65}, "capacity")],
)
async def test_buffer_that_does_not_fit_changes_nothing(
    checkpointer: Checkpointer, settings: dict[str, Any], message: str
) -> None:
    await saved_twice(checkpointer)
    state = await Untouched.start(**settings)
    with pytest.raises(CheckpointMismatchError, match=message):
        await checkpointer.restore(**state.run.objects)
    await state.check()


async def test_elastic_takes_another_depth(checkpointer: Checkpointer) -> None:
    run = Run(0, prefetch=3)
    async with run.buffer:
        await run.buffer.extend(items(20, 0))
        await take(run.buffer, 2)
        await checkpointer.save(0, **run.objects)
        expected = await take(run.buffer, 12)
    for prefetch in (0, 1, 6):
        other = Run(1, prefetch=prefetch)
        await checkpointer.restore(elastic=True, **other.objects)
        async with other.buffer:
            check_same(await take(other.buffer, 12), expected)


async def test_other_model_changes_nothing(checkpointer: Checkpointer) -> None:
    await saved_twice(checkpointer)
    state = await Untouched.start()
    other = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
    before = [bits(tensor) for tensor in other.state_dict().values()]
    with pytest.raises(CheckpointMismatchError, match=r"(?s)model: expected a state that it takes.*size mismatch"):
        await checkpointer.restore(**{**state.run.objects, "model": other})
    assert [bits(tensor) for tensor in other.state_dict().values()] == before
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))])
    with pytest.raises(CheckpointMismatchError, match="optimizer: expected a state that it takes"):
        await checkpointer.restore(**{**state.run.objects, "optimizer": optimizer})
    await state.check()


async def test_what_is_no_run_is_refused(checkpointer: Checkpointer) -> None:
    buffer = make_buffer()
    await buffer.extend(items(9, 0))
    await buffer.save(checkpointer.path(1))
    with pytest.raises(CheckpointMismatchError, match=r"expected the checkpoint of a run \(asyncbuf\.run\), found"):
        await checkpointer.restore(buffer=buffer)
    await checkpointer.save(2, n=1)
    checkpointer.path(2).rename(checkpointer.path(3))
    with pytest.raises(CheckpointMismatchError, match="expected the checkpoint of step 3, found 2"):
        await checkpointer.restore()
    for state, error in (
        ({"format": "asyncbuf.run", "version": 3}, CheckpointVersionError),
        ({"format": "asyncbuf.run", "version": True}, CheckpointVersionError),
        ({"format": "asyncbuf.run", "version": 1, "step": 4}, CheckpointCorruptError),
        (
            {"format": "asyncbuf.run", "version": 1, "step": 4, "parts": {"a": {"kind": "b", "state": 1}}},
            CheckpointError,
        ),
        (
            {"format": "asyncbuf.run", "version": 1, "step": 4, "parts": {"a": {"kind": [], "state": 1}}},
            CheckpointError,
        ),
        ([], CheckpointMismatchError),
    ):
        with CheckpointWriter(checkpointer.path(4)) as writer:
            writer.commit(state)
        with pytest.raises(error, match="expected"):
            await checkpointer.restore()


async def test_no_checkpoint(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "nowhere")
    assert checkpointer.steps() == []
    assert checkpointer.latest() is None
    with pytest.raises(CheckpointNotFoundError, match=r"nowhere: expected the directories of steps.*; found nothing"):
        await checkpointer.restore(count=Count())
    assert not (tmp_path / "nowhere").exists()
    await checkpointer.save(4, n=1)
    with pytest.raises(
        CheckpointNotFoundError, match=r"step-000003: expected a checkpoint, found those of steps \[4\]"
    ):
        await checkpointer.restore(3)


async def test_the_checkpoint_of_a_buffer_is_no_run_and_the_other_way_round(tmp_path: Path) -> None:
    buffer = ReplayBuffer(TensorStorage(5), batch_size=2)
    await buffer.save(tmp_path / "a")
    with pytest.raises(CheckpointNotFoundError, match=r"a buffer, which await buffer\.load\(path\) reads"):
        await Checkpointer(tmp_path / "a").restore(buffer=buffer)
    path = await Checkpointer(tmp_path / "runs").save(3, buffer=buffer, n=1)
    with pytest.raises(CheckpointMismatchError, match=r"parts n, buffer: write await .*restore\(step, partial=True"):
        await buffer.load(path)


async def test_a_run_that_begins_anew_beside_later_steps_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1000, 2000):
        await Checkpointer(tmp_path).save(step, n=step)
    assert not caplog.records
    other = Checkpointer(tmp_path)
    await other.save(100, n=1)
    assert "step 100 was saved beside later ones, up to 2000" in caplog.text
    await other.save(200, n=1)
    assert len(caplog.records) == 1
    again = Checkpointer(tmp_path)
    await again.restore(1000)
    await again.save(1500, n=1)
    assert len(caplog.records) == 1
