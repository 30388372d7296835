"""Every byte is compared with what was written. Damage is a result, and no error."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING

import pytest

from asyncbuf import CheckpointCorruptError, CheckpointNotFoundError, CheckpointVersionError
from asyncbuf._disk import files
from asyncbuf._disk.manifest import MANIFEST
from asyncbuf.checkpoint import inspect, verify
from tests.checkpoint.looks import (
    DAMAGES,
    MANIFEST_DAMAGES,
    chunks,
    damage,
    list_ring,
    listed,
    make_chunks_small,
    numbered,
    ring,
    run_of,
)
from tests.version_1.test_version_1 import DATA

if TYPE_CHECKING:
    from io import FileIO
    from pathlib import Path


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    make_chunks_small(monkeypatch)


async def saved(path: Path) -> Path:
    buffer = ring()
    await buffer.extend(numbered(45))
    await buffer.save(path)
    return path


async def test_what_was_just_written_is_sound(tmp_path: Path) -> None:
    await saved(tmp_path / "tensors")
    items = list_ring()
    async with items:
        await items.extend(listed(45))
        await items.sample()
        await items.save(tmp_path / "items")
    checkpointer = await run_of(tmp_path / "runs", 2)
    for path in (tmp_path / "tensors", tmp_path / "items", *map(checkpointer.path, (1, 2))):
        found = verify(path)
        assert found.is_sound, found
        assert found.path == str(path)
        assert found.files == len([file for file in path.rglob("*") if file.is_file()])
        assert found.nbytes == sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize("path", sorted(DATA.glob("*/checkpoint")), ids=lambda path: path.parent.name)
def test_checkpoints_of_version_1_are_sound(path: Path) -> None:
    path = path if (path / MANIFEST).exists() else path / "step-000007"
    assert verify(path).is_sound


@pytest.mark.parametrize("how", DAMAGES)
async def test_damaged_files_are_named_each(how: str, tmp_path: Path) -> None:
    path = await saved(tmp_path / "a")
    file = damage(path, how)
    other = chunks(path)[3]
    other.write_bytes(other.read_bytes()[:-1] + b"\xff")
    found = verify(path)
    assert not found.is_sound
    assert len(found.problems) == 2
    assert any(str(file) in problem for problem in found.problems)
    assert any(str(other) in problem for problem in found.problems)


@pytest.mark.parametrize("how", MANIFEST_DAMAGES)
async def test_a_damaged_manifest_is_a_result(how: str, tmp_path: Path) -> None:
    path = await saved(tmp_path / "a")
    file = damage(path, how)
    found = verify(path)
    assert len(found.problems) == 1
    assert str(file) in found.problems[0]
    with pytest.raises(CheckpointCorruptError, match=MANIFEST):
        inspect(path)


async def test_the_data_directory_is_gone(tmp_path: Path) -> None:
    path = await saved(tmp_path / "a")
    (data,) = path.glob("data-*")
    data.rename(tmp_path / "elsewhere")
    assert str(data) in verify(path).problems[0]
    data.symlink_to(tmp_path / "elsewhere")
    assert str(data) in verify(path).problems[0]


async def test_a_file_that_cannot_be_read_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = await saved(tmp_path / "a")
    read_into = files.read_into

    def fail(file: FileIO, where: Path, content: memoryview) -> int:
        if where.name == "00002.safetensors":
            raise OSError(5, "Input/output error", str(where))
        return read_into(file, where, content)

    monkeypatch.setattr(files, "read_into", fail)
    (problem,) = verify(path).problems
    assert "00002.safetensors" in problem
    assert "Input/output error" in problem


async def test_interrupting_ends_it_and_leaves_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = await saved(tmp_path / "a")

    def interrupt(file: FileIO, where: Path, content: memoryview) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "read_into", interrupt)
    with pytest.raises(KeyboardInterrupt):
        verify(path)


async def test_what_is_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / MANIFEST).write_text(json.dumps({"name": "a web application"}))
    for name in ("empty", "file", "other", "nothing"):
        for look in (verify, inspect):
            with pytest.raises(CheckpointNotFoundError, match=f"{name}: expected a checkpoint"):
                look(tmp_path / name)
    with pytest.raises(TypeError, match="path"):
        verify(3)  # type: ignore[arg-type]


async def test_one_of_a_newer_release_is_an_error(tmp_path: Path) -> None:
    path = await saved(tmp_path / "a")
    manifest = path / MANIFEST
    content = manifest.read_bytes()
    manifest.write_bytes(content.replace(b'"version": 2\n}', b'"version": 3\n}'))
    for look in (verify, inspect):
        with pytest.raises(CheckpointVersionError, match=str(manifest)):
            look(path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="whoever may do everything is not refused")
async def test_a_directory_that_may_not_be_entered_is_named(tmp_path: Path) -> None:
    path = await saved(tmp_path / "a")
    path.chmod(0)
    try:
        with pytest.raises(PermissionError, match=str(path)):
            verify(path)
    finally:
        path.chmod(0o755)


async def test_a_save_that_replaces_it_leaves_it_alone_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await saved(tmp_path / "a")
    (old,) = path.glob("data-*")
    read_into = files.read_into
    first = [1]

    async def replace() -> None:
        buffer = ring()
        await buffer.extend(numbered(45, 7))
        await buffer.save(path)

    def replace_meanwhile(file: FileIO, where: Path, content: memoryview) -> int:
        if first:  # in a thread that reads
            first.clear()
            asyncio.run(replace())
        return read_into(file, where, content)

    monkeypatch.setattr(files, "read_into", replace_meanwhile)
    found = await asyncio.to_thread(verify, path)
    assert found.is_sound
    assert not first
    assert old.exists()
    await replace()
    assert not old.exists()
    assert len(list(path.glob("data-*"))) == 1
