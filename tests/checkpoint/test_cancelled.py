"""Saves and restores that are cancelled leave a checkpoint whole or none."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf._disk.reader import CheckpointReader
from asyncbuf._disk.writer import CheckpointWriter
from tests.checkpoint.helpers import Run, Untouched, saved_twice
from tests.helpers import Stop, check_same, dismiss, turns, within

if TYPE_CHECKING:
    import torch

    from asyncbuf.checkpoint.checkpointer import Checkpointer


async def test_save_cancelled_at_each_of_its_files(checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(0)
    names: list[str] = []
    stop, at = Stop(), -1
    write = CheckpointWriter.write

    def stopping(self: CheckpointWriter, name: str, tensors: Any) -> None:
        names.append(name)
        if len(names) == at:
            stop()
        write(self, name, tensors)

    monkeypatch.setattr(CheckpointWriter, "write", stopping)
    async with run.buffer:
        await run.train(5)
        await checkpointer.save(1, **run.objects, n=1)
        for at in range(1, len(names) + 1):
            for step in (1, 2):
                names.clear()
                stop = Stop()
                saving = asyncio.create_task(checkpointer.save(step, **run.objects, n=2))
                await stop.come.reached()
                saving.cancel()
                await turns()
                assert not saving.done()  # its thread is still at work
                stop.go.set()
                with pytest.raises(asyncio.CancelledError):
                    await within(saving)
                assert len(names) <= at + 1
                assert [entry.name for entry in checkpointer.path(1).parent.iterdir()] == ["step-000001"]
        at = -1
        other = Run(1)
        assert (await checkpointer.restore(**other.objects)).values == {"n": 1}
        await run.train(3)
        await checkpointer.save(2, **run.objects, n=2)
    assert (await checkpointer.restore(**other.objects)).values == {"n": 2}


@pytest.mark.loops_in_turn
@pytest.mark.parametrize("seed", range(2))
async def test_save_cancelled_at_any_moment(checkpointer: Checkpointer, seed: int) -> None:
    rng = random.Random(seed)
    run, twin = Run(0), Run(0)
    async with run.buffer, twin.buffer:
        await checkpointer.save(0, **run.objects, n=0)
        for number in range(1, 25):
            check_same(await run.train(1), await twin.train(1))
            saving = asyncio.create_task(checkpointer.save(rng.choice([0, number]), **run.objects, n=number))
            await turns(rng.randrange(12))
            if rng.random() < 0.5:
                await turns(rng.choice((30, 300, 3000)))
            await dismiss([saving])
            restored = await checkpointer.restore(partial=True)
            committed = not saving.cancelled() or restored.values["n"] == number
            assert committed or restored.values["n"] < number
    folder = checkpointer.path(0).parent
    assert all(entry.name.startswith("step-") for entry in folder.iterdir())
    for step in checkpointer.steps():
        await checkpointer.restore(step, **Run(1).objects)


async def test_restore_cancelled_while_it_reads_changes_nothing(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await saved_twice(checkpointer)
    state = await Untouched.start()
    read = CheckpointReader.read
    names: list[str] = []
    stop, at = Stop(), -1

    def stopping(self: CheckpointReader, name: str) -> dict[str, torch.Tensor]:
        names.append(name)
        if len(names) == at:
            stop()
        return read(self, name)

    monkeypatch.setattr(CheckpointReader, "read", stopping)
    await checkpointer.restore(**Run(1).objects)
    for at in range(1, len(names) + 1):  # noqa: B007 -- the reader looks at it
        names.clear()
        stop = Stop()
        restoring = asyncio.create_task(checkpointer.restore(**state.run.objects))
        await stop.come.reached()
        restoring.cancel()
        stop.go.set()
        with pytest.raises(asyncio.CancelledError):
            await within(restoring)
    await state.check()
