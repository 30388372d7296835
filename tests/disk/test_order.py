"""Everything is synced before what names it, so that no loss of power leaves a checkpoint without its files."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest
import torch

from asyncbuf._disk import files
from asyncbuf._disk.manifest import DATA, MANIFEST
from asyncbuf._disk.writer import CheckpointWriter
from tests.disk.helpers import contents, leftovers, load, save
from tests.disk.traced import Done, done_of, needs_strace, strace, watched

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def nothing(name: str, path: Path) -> None:
    """No fault."""


class Disk:
    """What would be there after a loss of power, in the worst case: only what was synced, and names that were.

    Args:
        root: everything happens below.
        there: what is there before, synced.
    """

    def __init__(self, root: Path, there: set[Path]) -> None:
        self.root = root
        self.names = set(there)  # as they are now
        self.lasting_names = set(there)
        self.lasting_content = set(there)
        self.dirty: set[Path] = set()

    def apply(self, done: Done) -> None:
        """Follow an operation."""
        path, target = done.path, done.target
        if done.name in ("mkdir", "create"):
            self.names.add(path)
            self.lasting_content.discard(path)
            if done.name == "mkdir":
                self.lasting_content.add(path)
        elif done.name == "write":
            self.lasting_content.discard(path)
        elif done.name in ("sync", "sync_directory", "fsync"):
            self.lasting_content.add(path)
            inside = {name for name in self.names if name.parent == path}
            gone = {name for name in self.lasting_names if name.parent == path} - inside
            self.lasting_names = (self.lasting_names - gone) | inside | ({path} & self.lasting_names)
        elif done.name == "link" and target is not None:
            self.names.add(target)
            self.lasting_content.add(target)
        elif done.name in ("rename", "replace") and target is not None:
            self._move(path, target)
        elif done.name in ("unlink", "rmdir", "remove_tree"):
            gone = {name for name in self.names if name == path or path in name.parents}
            self.names -= gone
            self.lasting_names -= gone  # in the worst case at once

    def _move(self, path: Path, target: Path) -> None:
        moved = {name for name in self.names if name == path or path in name.parents}
        for name in moved:
            new = target / name.relative_to(path)
            self.names.discard(name)
            self.names.add(new)
            if name in self.lasting_content:
                self.lasting_content.add(new)
            else:
                self.lasting_content.discard(new)
            if name != path and name in self.lasting_names:
                self.lasting_names.add(new)
        if path in self.lasting_content and target.name == MANIFEST:
            self.lasting_names.add(target)  # in the worst case the rename lasts at once, and nothing before it

    def check(self, checkpoint: Path) -> None:
        """Whatever the manifest may name by now lasts."""
        manifest = checkpoint / MANIFEST
        if manifest not in self.names:
            return
        assert manifest in self.lasting_content
        inside = [name for name in self.names if checkpoint in name.parents and DATA.search(str(name))]
        committed = [name for name in inside if name.name != MANIFEST]
        for name in committed:
            assert name in self.lasting_content, f"{name} was not synced before the manifest was in place"
            assert name in self.lasting_names, f"the name {name} was not synced before the manifest was in place"


def replay(done: list[Done], root: Path, there: set[Path], checkpoint: Path) -> Disk:
    """Follow operations, and look after each rename of a manifest or of a whole checkpoint."""
    disk = Disk(root, there)
    for operation in done:
        disk.apply(operation)
        if operation.target in (checkpoint, checkpoint / MANIFEST):
            disk.check(checkpoint)
    assert disk.names >= {checkpoint / MANIFEST}
    lasting = [name for name in disk.names if checkpoint in (name, *name.parents)]
    assert all(name in disk.lasting_names for name in lasting), "a name was not synced at the end"
    return disk


def everything(root: Path) -> set[Path]:
    return {root, *root.rglob("*")}


def first(root: Path) -> tuple[Path, Callable[[], None]]:
    path = root / "new" / "folders" / "step-000001"
    return path, lambda: save(path, 1)


def replaced(root: Path) -> tuple[Path, Callable[[], None]]:
    path = root / "step-000001"
    save(path, 1)
    return path, lambda: save(path, 2)


def clash(root: Path) -> tuple[Path, Callable[[], None]]:
    path = root / "step-000001"

    def both() -> None:
        with CheckpointWriter(path) as one, CheckpointWriter(path) as other:
            for number, writer in ((1, one), (2, other)):
                for name, tensors in contents(number).items():
                    writer.write(name, tensors)
            other.commit({"number": 2})
            one.commit({"number": 1})

    return path, both


def linked(root: Path) -> tuple[Path, Callable[[], None]]:
    path = root / "step-000002"

    def chunk(path: Path, base: Path | None) -> None:
        with CheckpointWriter(path, base) as writer:
            writer.write_chunk("rows/00000.safetensors", "same", lambda: {"x": torch.zeros(9)})
            writer.commit(writer.document("part.json", "x" * 100_000))

    chunk(root / "step-000001", None)
    return path, lambda: chunk(path, root / "step-000001")


@pytest.mark.parametrize("case", [first, replaced, clash, linked])
def test_what_is_named_was_synced(case: Callable[[Path], tuple[Path, Callable[[], None]]], tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    path, action = case(root)
    there = everything(root)
    with watched(nothing) as done:
        action()
    disk = replay(done, root, there, path)
    names = [operation.name for operation in done]
    assert names.count("link") == (case is linked)
    # Old data goes when the new one is safe.
    if case is replaced:
        last_sync = max(i for i, name in enumerate(names) if name == "sync_directory")
        assert names.index("remove_tree") > last_sync
    assert everything(root) == {name for name in disk.names if name == root or root in name.parents}


def test_a_save_without_any_one_sync_is_noticed(tmp_path: Path) -> None:
    """The check above is worth something: leave out one sync after the other."""
    for case in (first, replaced, clash):
        root = tmp_path / case.__name__
        root.mkdir()
        path, action = case(root)
        there = everything(root)
        with watched(nothing) as done:
            action()
        syncs = [i for i, operation in enumerate(done) if operation.name.startswith("sync")]
        noticed = 0
        for left_out in syncs:
            try:
                replay([each for i, each in enumerate(done) if i != left_out], root, there, path)
            except AssertionError:
                noticed += 1
        # Some are there twice: what is synced once more later, or what the next save replaces.
        assert noticed >= len(syncs) * 0.6, f"{case.__name__}: {noticed} of {len(syncs)}"


SAVE = """
import sys
from pathlib import Path
from tests.disk.helpers import save
from tests.disk.test_order import clash, first, linked, replaced

case = {"first": first, "replaced": replaced, "clash": clash, "linked": linked}[sys.argv[2]]
path, action = case(Path(sys.argv[1]))
(path.parent if path.parent.exists() else Path(sys.argv[1])).joinpath("begin").mkdir()
action()
"""
CHECKPOINTER = """
import asyncio, sys
from pathlib import Path
import torch
from asyncbuf import Checkpointer, ReplayBuffer, TensorStorage

async def main():
    buffer = ReplayBuffer(TensorStorage(50), batch_size=4)
    await buffer.extend({"x": torch.arange(50)})
    checkpointer = Checkpointer(Path(sys.argv[1]) / "runs", keep=1)
    await checkpointer.save(1, buffer=buffer, n=1)
    Path(sys.argv[1], "begin").mkdir()
    await checkpointer.save(2, buffer=buffer, n=2)

asyncio.run(main())
"""


# The order of all of them is looked at in the thin layer above; that the system is asked for the same, in one here.
@needs_strace
@pytest.mark.timeout(170)
@pytest.mark.parametrize(
    "case",
    [
        "replaced",
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("first", "clash", "linked", "checkpointer")),
    ],
)
def test_the_system_is_asked_to_sync_in_order(case: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    script = CHECKPOINTER if case == "checkpointer" else SAVE
    lines, status, errors = strace(root, script, case)
    assert status == 0, errors
    done = done_of(lines)
    begin = next(i for i, operation in enumerate(done) if operation.path.name == "begin")
    disk = Disk(root, {root})
    for operation in done[:begin]:
        disk.apply(operation)
    disk.lasting_names |= disk.names
    paths = {"first": "new/folders/step-000001", "linked": "step-000002", "checkpointer": "runs/step-000002"}
    checkpoint = root / paths.get(case, "step-000001")
    replay(done[begin + 1 :], root, set(disk.names), checkpoint)
    if case == "checkpointer":
        removed = [i for i, each in enumerate(done) if each.name == "rename" and each.path.name == "step-000001"]
        committed = [i for i, each in enumerate(done) if each.target == checkpoint]
        synced = [i for i, each in enumerate(done) if each == Done("fsync", checkpoint.parent)]
        assert committed[0] < max(i for i in synced if i < removed[0]) < removed[0]


class Failing:
    """``os.fsync`` that fails once."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen = 0

    def __call__(self, handle: int) -> None:
        self.seen += 1
        if self.seen == self.at:
            raise OSError(errno.EIO, "it is broken")


@pytest.mark.parametrize("over", [False, True])
def test_a_sync_that_fails_is_an_error(over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for at in range(1, 60):
        path = tmp_path / f"step-{at:06}"
        if over:
            save(path, 1)
        failing = Failing(at)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing)
            try:
                save(path, 2)
            except OSError as error:
                told = error
            else:
                assert failing.seen < at
                break
        assert (told.errno, str(tmp_path) in str(told)) == (errno.EIO, True)
        if over or path.exists():
            assert load(path) in ((1, 2) if over else (2,))
        save(path, 3)
        assert load(path) == 3
        assert leftovers(path) == []
    assert at > 8


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_system_that_lacks_the_call_is_none(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(handle: int) -> None:
        raise OSError(code, "there is no such call")

    monkeypatch.setattr(os, "fsync", lacking)
    save(tmp_path / "c", 1)
    assert load(tmp_path / "c") == 1


def test_a_directory_that_may_not_be_read_is_synced_with_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    open_file = os.open

    def barred(path: object, *arguments: int, **options: int) -> int:
        if path == tmp_path:
            raise PermissionError(errno.EACCES, "no", str(path))
        return open_file(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", barred)
    monkeypatch.setattr(os, "sync", lambda: synced.append(True))
    files.sync_directory(tmp_path)
    assert synced
