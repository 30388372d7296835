"""Savers, readers and removers of one checkpoint directory at once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from asyncbuf._disk import files, housekeeping
from asyncbuf._disk.housekeeping import remove, sweep
from asyncbuf._disk.manifest import is_checkpoint
from asyncbuf._disk.reader import CheckpointReader
from asyncbuf._disk.writer import CheckpointWriter
from tests.disk.helpers import FILES, ROOT, contents, leftovers, load, save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_sweep_leaves_alone_what_is_being_saved(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with CheckpointWriter(path) as writer:
        writer.write(FILES[0], contents(1)[FILES[0]])
        sweep(tmp_path)
        for name in FILES[1:]:
            writer.write(name, contents(1)[name])
        writer.commit({"number": 1})
    assert load(path) == 1
    sweep(tmp_path)
    assert leftovers(path) == []


@pytest.mark.parametrize("first_is_there", [False, True])
def test_the_save_that_commits_last_is_the_checkpoint(tmp_path: Path, first_is_there: bool) -> None:
    path = tmp_path / "run"
    if first_is_there:
        save(path, 0)
    with CheckpointWriter(path) as one, CheckpointWriter(path) as other:
        for number, writer in ((1, one), (2, other)):
            for name, tensors in contents(number).items():
                writer.write(name, tensors)
        other.commit({"number": 2})
        assert load(path) == 2
        one.commit({"number": 1})
        assert load(path) == 1
    assert load(path) == 1
    save(path, 3)
    assert load(path) == 3
    assert leftovers(path) == []


def test_a_reader_keeps_what_it_reads(path: Path) -> None:
    reader = CheckpointReader(path)
    save(path, 2)
    for name, tensors in contents(1).items():
        assert reader.read(name)["x"].equal(tensors["x"])
    assert load(path) == 2
    del reader
    save(path, 3)
    assert leftovers(path) == []


def test_a_checkpoint_that_is_read_is_not_removed(path: Path) -> None:
    reader = CheckpointReader(path)
    assert not remove(path)
    assert load(path) == 1
    del reader
    assert remove(path)
    assert not any(path.parent.iterdir())


def test_threads_that_save_and_load_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run"
    save(path, 0)
    errors: list[BaseException] = []

    def work(action: Callable[[int], object]) -> None:
        try:
            for number in range(60):
                action(number)
        except BaseException as error:
            errors.append(error)

    actions: list[Callable[[int], object]] = [lambda n: save(path, n)] * 3 + [lambda n: load(path)] * 3
    threads = [threading.Thread(target=work, args=(action,)) for action in (*actions, lambda n: sweep(tmp_path))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    save(path, 7)
    assert load(path) == 7
    assert leftovers(path) == []


# One process imports torch, and others are made of it.
AT_ONCE = """
import os, sys, traceback
from pathlib import Path
from asyncbuf._disk.housekeeping import sweep
from tests.disk.helpers import load, save

path, times = Path(sys.argv[1]), int(sys.argv[2])

def work(number):
    for _ in range(times):
        save(path, number)
        sweep(path.parent)
        load(path)

children = []
for number in range(3):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work(number)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    children.append(child)
print(*[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.timeout(170)  # a process that imports torch
@pytest.mark.parametrize("times", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_processes_that_save_and_load_at_once(tmp_path: Path, times: int) -> None:
    path = tmp_path / "run"
    command = [sys.executable, "-c", AT_ONCE, str(path), str(times)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert process.stdout.split() == ["0", "0", "0"], process.stderr
    assert load(path) in range(3)
    save(path, 7)
    assert leftovers(path) == []


# -- savers, readers and removers at once -----------------------------------------------------------------------------


def test_a_checkpoint_that_is_removed_while_a_save_begins_leaves_no_half(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[bool] = []
    look = is_checkpoint

    def looked(there: Path) -> bool:
        found = look(there)
        if found and not removed:
            removed.append(remove(there))  # between the look and the lock
        return found

    monkeypatch.setattr(housekeeping, "is_checkpoint", looked)
    save(path, 2)
    assert removed == [True]
    assert load(path) == 2
    assert leftovers(path) == []


def test_a_checkpoint_that_is_being_replaced_is_not_removed(path: Path) -> None:
    with CheckpointWriter(path) as writer:
        assert not remove(path)
        for name, tensors in contents(2).items():
            writer.write(name, tensors)
        assert not remove(path)
        writer.commit({"number": 2})
    assert load(path) == 2
    assert remove(path)


def test_a_save_to_a_place_where_another_came_first_and_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step-000001"
    moves: list[Path] = []
    rename = files.rename

    def renamed(source: Path, target: Path) -> None:
        if target == path and not moves:
            moves.append(source)
            monkeypatch.undo()
            save(path, 7)  # another one is there now, so that the rename fails
            monkeypatch.setattr(housekeeping, "is_checkpoint", looked)
        rename(source, target)

    def looked(there: Path) -> bool:
        if len(moves) == 1:
            moves.append(there)
            assert remove(there)
        return is_checkpoint(there)

    monkeypatch.setattr(files, "rename", renamed)
    save(path, 2)
    assert len(moves) == 2
    assert load(path) == 2
    assert leftovers(path) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_that_ends_takes_no_lock_with_it(path: Path) -> None:
    reader = CheckpointReader(path)
    child = os.fork()
    if child == 0:
        del reader
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not remove(path)
    del reader
    assert remove(path)
