"""Which checkpoints are kept, and when the others go."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf._disk import files
from asyncbuf._disk.writer import CheckpointWriter
from asyncbuf.checkpoint.checkpointer import Checkpointer

if TYPE_CHECKING:
    from pathlib import Path


async def test_the_newest_are_kept(tmp_path: Path) -> None:
    for keep, expected in ((1, [9]), (3, [7, 8, 9]), (20, [*range(10)]), (None, [*range(10)])):
        checkpointer = Checkpointer(tmp_path / str(keep), keep=keep)
        for step in range(10):
            await checkpointer.save(step, n=step)
            assert checkpointer.latest() == step
        assert checkpointer.steps() == expected
        assert len(list((tmp_path / str(keep)).iterdir())) == len(expected)


async def test_steps_of_any_size_in_order(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep=None)
    for step in (1_000_000, 5, 12_345_678, 999_999):
        assert (await checkpointer.save(step, n=step)).name == f"step-{step:06}"
    for stray in (
        "step-5",
        "step-0000005",
        "step-00000x",
        "step-\u0660\u0660\u0660\u0660\u0660\u0667",
        "other",
        ".step-000009",
    ):
        (tmp_path / stray).mkdir()
    (tmp_path / "step-000077").write_text("a file")
    assert checkpointer.steps() == [5, 999_999, 1_000_000, 12_345_678]
    assert (await checkpointer.restore()).values == {"n": 12_345_678}


async def test_the_one_just_written_stays_though_higher_ones_are_there(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep=2)
    for step in (10, 20, 5, 7):
        await checkpointer.save(step, n=step)
        assert (await checkpointer.restore(step)).values == {"n": step}
    assert checkpointer.steps() == [7, 10, 20]


async def test_nothing_goes_before_the_new_one_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(tmp_path, keep=1)
    await checkpointer.save(1, n=1)

    def fail(self: CheckpointWriter, state: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(CheckpointWriter, "commit", fail)
    with pytest.raises(OSError, match="disk full"):
        await checkpointer.save(2, n=2)
    assert checkpointer.steps() == [1]
    assert os.listdir(tmp_path) == ["step-000001"]


async def test_one_that_cannot_be_removed_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = Checkpointer(tmp_path, keep=1)
    await checkpointer.save(1, n=1)
    rename = files.rename

    def refuse(source: Path, target: Path) -> None:
        if source.name == "step-000001":
            raise PermissionError("no")
        rename(source, target)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "asyncbuf"):
        patch.setattr(files, "rename", refuse)
        await checkpointer.save(2, n=2)
    assert "step-000001 could not be removed" in caplog.text
    assert (await checkpointer.restore()).values == {"n": 2}
    await checkpointer.save(3, n=3)
    assert checkpointer.steps() == [3]


async def test_leftovers_are_swept_by_every_save_of_a_new_step(tmp_path: Path) -> None:
    stale = tmp_path / f".step-000001.tmp-{'0f' * 8}"
    stale.mkdir()
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.latest() is None
    assert stale.exists()
    await checkpointer.save(1, n=1)
    assert os.listdir(tmp_path) == ["step-000001"]
    stale.mkdir()
    await checkpointer.save(1, n=2)
    assert stale.exists()
    await checkpointer.save(2, n=2)
    assert not stale.exists()


async def test_damaged_directory_is_no_checkpoint_to_keep(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep=2)
    await checkpointer.save(1, n=1)
    (tmp_path / "step-000002").mkdir()
    for step in (3, 4):
        await checkpointer.save(step, n=step)
    assert checkpointer.steps() == [2, 3, 4]
