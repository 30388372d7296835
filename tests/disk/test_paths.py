"""Whatever stands in a path, and whatever is there: an error that names it, or a checkpoint."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import Checkpointer, CheckpointError, ReplayBuffer, TensorStorage
from asyncbuf._disk.housekeeping import remove, sweep, temporary
from asyncbuf._disk.manifest import MANIFEST, is_checkpoint
from asyncbuf._disk.reader import CheckpointReader
from asyncbuf._disk.writer import CheckpointWriter
from asyncbuf.checkpoint.snapshot import Snapshot
from tests.disk.helpers import ROOT, leftovers, load, save
from tests.helpers import turns

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path


def buffer() -> ReplayBuffer:
    return ReplayBuffer(TensorStorage(10), batch_size=2)


BAD = {"null": "a\0b", "surrogate": "a\ud800b"}


@pytest.mark.parametrize("name", BAD.values(), ids=BAD)
async def test_what_no_file_system_has_is_named(name: str, tmp_path: Path) -> None:
    path = f"{tmp_path}/{name}"
    for action in (buffer().save, buffer().load, Snapshot().save, Snapshot.load):
        with pytest.raises((CheckpointError, OSError), match=r"a.*b"):
            await action(path)
    with pytest.raises((CheckpointError, OSError), match=r"a.*b"):
        await Checkpointer(path).save(1, n=1)
    for make in (CheckpointWriter, CheckpointReader):
        with pytest.raises(CheckpointError, match="expected a path, found"):
            make(path)


def loop(path: Path) -> None:
    path.symlink_to(path)


def a_file(path: Path) -> None:
    path.write_text("precious")


def below_a_file(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_text("precious")


def below_a_loop(path: Path) -> None:
    path.parent.rmdir()
    path.parent.symlink_to(path.parent)


def with_a_directory_as_manifest(path: Path) -> None:
    (path / MANIFEST).mkdir(parents=True)


def with_a_pipe_as_manifest(path: Path) -> None:
    path.mkdir()
    os.mkfifo(path / MANIFEST)


@pytest.mark.parametrize(
    "make", [loop, a_file, below_a_file, below_a_loop, with_a_directory_as_manifest, with_a_pipe_as_manifest]
)
async def test_what_is_in_the_way_is_named(make: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "folder" / "step-000001"
    path.parent.mkdir()
    make(path)
    for action in (buffer().save, buffer().load):
        with pytest.raises((CheckpointError, OSError)) as caught:
            await action(path)
        assert str(path.parent) in str(caught.value)
    with pytest.raises((CheckpointError, OSError)) as caught:
        await Checkpointer(path.parent).save(1, n=1)
    assert str(path.parent) in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="whoever may do everything is not refused")
async def test_what_is_not_permitted_is_named(tmp_path: Path) -> None:
    save(tmp_path / "run", 1)
    for mode in (0o000, 0o300, 0o500):
        (tmp_path / "run").chmod(mode)
        with pytest.raises((CheckpointError, OSError), match="run"):
            await buffer().save(tmp_path / "run")
        (tmp_path / "run").chmod(0o700)
        assert load(tmp_path / "run") == 1


@pytest.mark.parametrize("name", ["n" * 200, "n" * 234, "n" * 255, "\u00e9" * 127, "\U0001f600" * 63])
def test_every_name_that_a_directory_may_have(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.mkdir()
    path.rmdir()
    save(path, 1)
    save(path, 2)
    assert load(path) == 2
    assert len(os.fsencode(temporary(path, "0f" * 8).name)) <= 255
    assert remove(path)
    assert not any(tmp_path.iterdir())


async def test_relative_paths_are_meant_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    full = buffer()
    await full.extend({"x": torch.arange(10)})
    snapshot = await full.snapshot()
    checkpointer_in: list[Checkpointer] = []

    async def through_a_checkpointer() -> Any:
        return await checkpointer_in[0].save(1, n=1)

    actions: list[Callable[[], Awaitable[Any]]] = [
        lambda: full.save("a"),
        lambda: snapshot.save("b"),
        through_a_checkpointer,
        lambda: buffer().load("a"),
        lambda: Snapshot.load("b"),
    ]
    for action in actions:
        monkeypatch.chdir(tmp_path / "first")
        checkpointer_in[:] = [Checkpointer("runs")]
        task = asyncio.ensure_future(action())
        await turns(2)
        monkeypatch.chdir(tmp_path / "second")
        await task
    assert sorted(entry.name for entry in (tmp_path / "first").iterdir()) == ["a", "b", "runs"]
    assert not any((tmp_path / "second").iterdir())


# -- what is not ours -------------------------------------------------------------------------------------------------

FOREIGN = {
    "another format": '{"format": "other", "version": 1}',
    "no format": '{"name": "my web application"}',
    "our format within": '{"formats": [{"format": "asyncbuf.checkpoint"}]}',
    "our format as text": '{"note": "\\"format\\": \\"asyncbuf.checkpoint\\""}',
    "no object": '["asyncbuf.checkpoint"]',
    "no JSON": "cache manifest",
    "empty": "",
}


@pytest.mark.parametrize("manifest", FOREIGN.values(), ids=FOREIGN)
async def test_a_directory_of_somebody_else_is_left_alone(manifest: str, tmp_path: Path) -> None:
    path = tmp_path / "step-000001"
    hidden = tmp_path / f".step-000001.tmp-{'0f' * 8}"
    for place in (path, hidden):
        (place / f"data-{'0f' * 8}").mkdir(parents=True)
        (place / f"data-{'0f' * 8}" / "thesis").write_text("precious")
        (place / MANIFEST).write_text(manifest)
        (place / f"{MANIFEST}.{'0f' * 8}").write_text("precious")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert not is_checkpoint(path)
    with pytest.raises(CheckpointError, match="expected a checkpoint to replace, or nothing"):
        await buffer().save(path)
    with pytest.raises(CheckpointError, match="expected a checkpoint to replace, or nothing"):
        await Checkpointer(tmp_path, keep=1).save(1, n=1)
    sweep(tmp_path)
    await Checkpointer(tmp_path, keep=1).save(2, n=1)
    await Checkpointer(tmp_path, keep=1).save(3, n=1)
    after = {file: file.read_bytes() for file in before if file.exists()}
    assert after == before


def test_files_of_the_user_in_a_checkpoint_stay_when_it_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run"
    save(path, 1)
    kept = [f"{MANIFEST}.bak", "notes.txt", "data-of-mine", f"draft-{'0F' * 8}"]
    for name in kept:
        (path / name).write_text("precious")
    save(path, 2)
    assert {*kept} <= set(os.listdir(path))
    assert load(path) == 2


@pytest.mark.parametrize("damage", ["cut", "flip", "newer"])
def test_a_damaged_or_newer_checkpoint_may_be_replaced(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    save(path, 1)
    manifest = path / MANIFEST
    content = manifest.read_bytes()
    if damage == "newer":
        content = json.dumps({"format": "asyncbuf.checkpoint", "version": 99}).encode()
    manifest.write_bytes(content[1:] if damage == "cut" else content.replace(b"body", b"bodi\xff"))
    if damage == "newer":
        manifest.write_bytes(content)
    assert is_checkpoint(path)
    save(path, 2)
    assert load(path) == 2
    assert leftovers(path) == []


# -- the end of the interpreter ---------------------------------------------------------------------------------------


@pytest.mark.timeout(170)
def test_a_save_and_a_load_while_the_interpreter_ends(tmp_path: Path) -> None:
    code = """
    import asyncio, atexit, sys
    import torch
    from asyncbuf import Checkpointer, ReplayBuffer, TensorStorage

    buffer = ReplayBuffer(TensorStorage(1000), batch_size=4, prefetch=2)

    async def last():
        await buffer.save(sys.argv[1] + "/one")
        checkpointer = Checkpointer(sys.argv[1] + "/runs")
        await checkpointer.save(1, buffer=buffer, n=1)
        other = ReplayBuffer(TensorStorage(1000), batch_size=4, prefetch=2)
        await other.load(sys.argv[1] + "/one")
        await checkpointer.restore(buffer=other)
        print(len(other))

    async def use():
        await buffer.extend({"x": torch.arange(1000.0)})
        async with buffer:
            await buffer.sample()

    atexit.register(lambda: asyncio.run(last()))
    asyncio.run(use())
    """
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.stdout.split() == ["1000"], process.stderr
    assert process.stderr == ""
