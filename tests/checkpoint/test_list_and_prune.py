"""The checkpoints of a run at a glance, and removing the oldest: never one that somebody is at work in."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import Checkpointer, CheckpointError, CheckpointNotFoundError
from asyncbuf._disk import files
from asyncbuf._disk.lock import share
from asyncbuf._disk.manifest import MANIFEST
from asyncbuf._disk.reader import CheckpointReader
from asyncbuf.checkpoint import Pruned, list_checkpoints, prune, verify
from tests.checkpoint.looks import DAMAGES, MANIFEST_DAMAGES, damage, make_chunks_small, run_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    make_chunks_small(monkeypatch)


def taken(directory: Path) -> int:
    """Bytes of all files, each counted once."""
    statuses = [file.stat() for file in directory.rglob("*") if file.is_file()]
    return sum({status.st_ino: status.st_size for status in statuses}.values())


async def test_the_newest_comes_first(tmp_path: Path) -> None:
    checkpointer = await run_of(tmp_path, 4)
    found = list_checkpoints(tmp_path)
    assert [each.step for each in found] == [4, 3, 2, 1]
    assert [each.path for each in found] == [str(checkpointer.path(step)) for step in (4, 3, 2, 1)]
    assert all(each.problem is None and 0 <= each.age < 100 for each in found)
    for each in found:
        statuses = [file.stat() for file in checkpointer.path(each.step).rglob("*") if file.is_file()]
        assert each.files == len(statuses)
        assert each.nbytes == sum(status.st_size for status in statuses)
        assert each.shared_nbytes == sum(status.st_size for status in statuses if status.st_nlink > 1)
        assert each.own_nbytes == each.nbytes - each.shared_nbytes
        assert each.shared_nbytes > 0


async def test_other_things_are_not_listed(tmp_path: Path) -> None:
    checkpointer = await run_of(tmp_path, 1)
    for name in ("step-5", "other", ".step-000009.tmp-0123456789abcdef", "step-000007"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-000008").write_text("a file")
    (tmp_path / "step-000006").mkdir()
    (tmp_path / "step-000006" / MANIFEST).write_text("{}")
    assert [each.path for each in list_checkpoints(tmp_path)] == [str(checkpointer.path(1))]


def test_an_empty_directory(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path) == ()
    assert prune(tmp_path, keep=1) == Pruned(str(tmp_path), (), (), (), (), 0)


@pytest.mark.parametrize("how", [*DAMAGES[1:], *MANIFEST_DAMAGES])
async def test_damage_that_shows_without_reading(how: str, tmp_path: Path) -> None:
    checkpointer = await run_of(tmp_path, 3)
    file = damage(checkpointer.path(2), how)
    found = {each.step: each.problem for each in list_checkpoints(tmp_path)}
    assert found[1] is None
    assert found[3] is None
    assert str(file) in (found[2] or "")


async def test_what_is_no_directory_of_checkpoints(tmp_path: Path) -> None:
    checkpointer = await run_of(tmp_path / "runs", 1)
    (tmp_path / "file").write_text("x")
    for call in (list_checkpoints, lambda path: prune(path, keep=1)):
        for name in ("file", "nothing"):
            with pytest.raises(CheckpointNotFoundError, match=f"{name}: expected a directory"):
                call(tmp_path / name)
        with pytest.raises(CheckpointError, match="found a single one"):
            call(checkpointer.path(1))
        with pytest.raises(TypeError, match="directory"):
            call(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("keep", [0, -1, True, 1.0, None])
def test_how_many_are_kept_is_checked(keep: Any, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError), match="keep"):
        prune(tmp_path, keep=keep)


async def test_the_oldest_go(tmp_path: Path) -> None:
    await run_of(tmp_path, 5)
    before = taken(tmp_path)
    planned = prune(tmp_path, keep=2, dry_run=True)
    assert taken(tmp_path) == before
    found = prune(tmp_path, keep=2)
    assert found == planned
    assert (found.kept, found.removed, found.busy, found.failed) == ((5, 4), (3, 2, 1), (), ())
    assert sorted(os.listdir(tmp_path)) == ["step-000004", "step-000005"]
    assert found.nbytes == before - taken(tmp_path) > 0
    assert all(verify(tmp_path / name).is_sound for name in os.listdir(tmp_path))
    assert prune(tmp_path, keep=2).removed == ()


async def test_one_that_is_read_stays(tmp_path: Path) -> None:
    checkpointer = await run_of(tmp_path, 4)
    reader = CheckpointReader(checkpointer.path(2))
    found = prune(tmp_path, keep=1)
    assert (found.removed, found.busy) == ((3, 1), (2,))
    assert verify(checkpointer.path(2)).is_sound
    del reader
    assert prune(tmp_path, keep=1).removed == (2,)


async def test_one_that_is_written_stays(tmp_path: Path) -> None:
    checkpointer = await run_of(tmp_path, 2)
    held = share(checkpointer.path(1))
    assert held is not None
    assert prune(tmp_path, keep=1).busy == (1,)
    held.release()
    assert prune(tmp_path, keep=1).removed == (1,)


@pytest.mark.parametrize("how", ["truncate", "delete", "manifest flipped"])
async def test_damaged_ones_do_not_count(how: str, tmp_path: Path) -> None:
    checkpointer = await run_of(tmp_path, 5)
    damage(checkpointer.path(5), how)
    damage(checkpointer.path(2), how)
    found = prune(tmp_path, keep=2)
    assert found.kept == (5, 4, 3)
    assert found.removed == (2, 1)
    assert verify(checkpointer.path(3)).is_sound


async def test_one_of_a_newer_release_counts(tmp_path: Path) -> None:
    checkpointer = await run_of(tmp_path, 3)
    manifest = checkpointer.path(3) / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b'"version": 2\n}', b'"version": 3\n}'))
    assert "format version" in (list_checkpoints(tmp_path)[0].problem or "")
    assert prune(tmp_path, keep=1).kept == (3,)


async def test_one_that_cannot_be_removed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await run_of(tmp_path, 3)
    rename = files.rename

    def refuse(source: Path, target: Path) -> None:
        if source.name == "step-000001":
            raise PermissionError(13, "Permission denied", str(source))
        rename(source, target)

    monkeypatch.setattr(files, "rename", refuse)
    found = prune(tmp_path, keep=1)
    assert (found.kept, found.removed, found.busy) == ((3,), (2,), ())
    ((step, problem),) = found.failed
    assert step == 1
    assert "Permission denied" in problem


async def test_one_that_goes_meanwhile_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = await run_of(tmp_path, 3)
    is_directory = files.is_directory

    def remove_meanwhile(path: Path) -> bool:
        shutil.rmtree(checkpointer.path(2), ignore_errors=True)
        return is_directory(path)

    monkeypatch.setattr(files, "is_directory", remove_meanwhile)
    assert [each.step for each in list_checkpoints(tmp_path)] == [3, 1]


async def test_a_checkpointer_goes_on_where_something_was_pruned(tmp_path: Path) -> None:
    await run_of(tmp_path, 3)
    prune(tmp_path, keep=1)
    checkpointer = Checkpointer(tmp_path, keep=2)
    await checkpointer.save(9, n=9)
    await checkpointer.save(10, n=10)
    assert checkpointer.steps() == [9, 10]
