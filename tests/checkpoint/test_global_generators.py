"""Global generators: saved and restored if asked for, left alone otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from asyncbuf import CheckpointMismatchError
from asyncbuf.checkpoint.checkpointer import Checkpointer
from tests.checkpoint.helpers import Run, disturb, drawn

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("by", ["constructor", "argument"])
async def test_global_generators_are_saved_if_asked_for(tmp_path: Path, by: str) -> None:
    checkpointer = Checkpointer(tmp_path, rng=by == "constructor")
    drawn()  # leaves the second half of a pair of normal numbers behind
    await checkpointer.save(0, **({"rng": True} if by == "argument" else {}))
    expected = drawn()
    disturb()
    await Checkpointer(tmp_path).restore()
    assert drawn() == expected


async def test_global_generators_are_left_alone_otherwise(checkpointer: Checkpointer) -> None:
    run = Run(0)
    async with run.buffer:
        await run.train(3)
        disturb()
        expected = drawn()
        disturb()
        await checkpointer.save(0, **run.objects)
        await checkpointer.restore(**run.objects)
    assert drawn() == expected


async def test_global_generators_when_they_are_not_wanted(checkpointer: Checkpointer) -> None:
    model = nn.Linear(1, 1)
    await checkpointer.save(0, rng=True, model=model)
    disturb()
    expected = drawn()
    for options in ({"rng": False}, {"partial": True}):
        disturb()
        await checkpointer.restore(model=model, **options)
        assert drawn() == expected
    await checkpointer.restore(model=model, partial=True, rng=True)
    assert drawn() != expected


async def test_global_generators_that_were_not_saved(tmp_path: Path) -> None:
    await Checkpointer(tmp_path).save(0, n=1)
    for checkpointer, options in ((Checkpointer(tmp_path), {"rng": True}), (Checkpointer(tmp_path, rng=True), {})):
        with pytest.raises(CheckpointMismatchError, match="expected global generators"):
            await checkpointer.restore(**options)
    assert (await Checkpointer(tmp_path, rng=True).restore(rng=False)).values == {"n": 1}


async def test_generators_of_devices_that_are_not_here(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_rng_state_all", lambda: [torch.zeros(16, dtype=torch.uint8)])
        await checkpointer.save(0, rng=True)
    expected = drawn()
    disturb()
    with pytest.raises(CheckpointMismatchError, match=r"at most 0 CUDA devices.*has 1.*elastic=True"):
        await checkpointer.restore()
    await checkpointer.restore(elastic=True)
    assert drawn() == expected
