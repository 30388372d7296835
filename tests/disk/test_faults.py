"""A fault at every single thing that is done to files: afterwards the new checkpoint is there, or the one before.

First as the thin layer does them; each fails, or is done and reports an error all the same. Then as the system is asked
by a process whose calls strace lets fail: run as a program, this module is that process.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import CheckpointError, CheckpointNotFoundError
from asyncbuf._disk import files, housekeeping, pipeline
from asyncbuf._disk.housekeeping import remove
from asyncbuf._disk.manifest import is_checkpoint
from asyncbuf._disk.reader import CheckpointReader
from asyncbuf._disk.writer import CheckpointWriter
from tests.disk.helpers import ROOT
from tests.disk.traced import CALLS, LOOKS, OPERATIONS, STRACE, needs_strace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_RAISED, _RAW = 1, 98


def save(path: Path, number: int, base: Path | None = None) -> None:
    """A checkpoint with every kind of file, of which one is the same in all of them."""
    with CheckpointWriter(path, base) as writer:
        writer.write("model.safetensors", {"x": torch.full((5,), number)})
        writer.write_chunk("rows/00000.safetensors", "same", lambda: {"x": torch.arange(9)})
        writer.write_chunk("rows/00001.safetensors", f"number {number}", lambda: {"x": torch.full((9,), number)})
        part = writer.document("part.json", [number] * 30_000)
        writer.commit({"number": number, "part": part})


def load(path: Path) -> int:
    """Read all of it and return its number; whatever is not as it was saved raises."""
    reader = CheckpointReader(path)
    number = int(reader.state["number"])
    assert reader.document(reader.state["part"]) == [number] * 30_000
    found = [reader.read("model.safetensors")["x"], *(part["x"] for part in reader.read_all("rows"))]
    expected = [torch.full((5,), number), torch.arange(9), torch.full((9,), number)]
    assert all(map(torch.equal, found, expected))
    return number


def leftovers(root: Path) -> list[str]:
    """What belongs to no checkpoint."""
    left = []
    for entry in root.iterdir():
        if not is_checkpoint(entry):
            left.append(entry.name)
            continue
        data = housekeeping.committed(entry)
        left += [f"{entry.name}/{name.name}" for name in entry.iterdir() if name.name not in ("manifest.json", data)]
    return left


def first(root: Path) -> None:
    save(root / "new", 2)


def replaced(root: Path) -> None:
    save(root / "old", 2)


def linked(root: Path) -> None:
    save(root / "new", 2, base=root / "old")


def clash(root: Path) -> None:
    with CheckpointWriter(root / "new") as writer:
        save(root / "new", 3)
        writer.write("model.safetensors", {"x": torch.full((5,), 2)})
        writer.write_chunk("rows/00000.safetensors", "same", lambda: {"x": torch.arange(9)})
        writer.write("rows/00001.safetensors", {"x": torch.full((9,), 2)})
        writer.commit({"number": 2, "part": writer.document("part.json", [2] * 30_000)})


def removed(root: Path) -> None:
    remove(root / "old")


def swept(root: Path) -> None:
    housekeeping.sweep(root)


def loaded(root: Path) -> None:
    load(root / "old")


CASES = {case.__name__: case for case in (first, replaced, linked, clash, removed, swept, loaded)}


def prepare(root: Path) -> None:
    """An old checkpoint, and what one that was killed left in it and beside."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    save(root / "old", 1)
    for place in (root / "old", root / f".x.tmp-{'0f' * 8}"):
        (place / f"data-{'0f' * 8}" / "rows").mkdir(parents=True)
        (place / f"data-{'0f' * 8}" / "rows" / "x").write_text("x")
        (place / f"draft-{'0f' * 8}").write_text('{"format": "asyncbuf.checkpoint"}')


def check(root: Path, case: str, *, failed: bool, where: str) -> None:
    """Whether everything is there that must be; then a save puts everything in order."""
    old, new = root / "old", root / "new"
    if case == "removed":
        with contextlib.suppress(CheckpointNotFoundError):
            assert load(old) == 1, where
    else:
        assert load(old) in ((1, 2) if case == "replaced" else (1,)), where
    if not failed and case in ("first", "linked", "clash"):
        assert load(new) == 2, where
    if not failed and case == "replaced":
        assert load(old) == 2, where
    if new.exists():
        assert load(new) in (2, 3), where
    shutil.rmtree(new, ignore_errors=True)
    save(old, 5)
    save(new, 6)
    assert (load(old), load(new)) == (5, 6), where
    assert leftovers(root) == [], where


@contextlib.contextmanager
def in_this_thread() -> Iterator[None]:
    """Files are written one after the other, so that their order is always the same."""

    def none(call: object) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "in_new_thread", none)
        yield


@contextlib.contextmanager
def fault(at: int, *, is_done: bool) -> Iterator[list[str]]:
    """Let one operation fail, and none after it: their names up to it."""
    names: list[str] = []

    def wrapped(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            names.append(name)
            if len(names) != at:
                return operation(*arguments, **options)
            if is_done:
                result = operation(*arguments, **options)
                if name in ("create", "open_file"):
                    result.close()
            raise OSError(errno.EIO, "the reply was lost" if is_done else "it is broken")

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in (*OPERATIONS, *LOOKS):
            patch.setattr(files, name, wrapped(name, getattr(files, name)))
        yield names


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is lost here, and it takes most of the time."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("one_in", [6, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_done", [False, True], ids=["not done", "done"])
@pytest.mark.parametrize("case", CASES)
def test_a_fault_in_the_thin_layer(case: str, is_done: bool, one_in: int, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for at in itertools.count(1, one_in):
        prepare(root)
        failed = False
        with in_this_thread(), fault(at, is_done=is_done) as names:
            try:
                CASES[case](root)
            except (OSError, CheckpointError):
                failed = True
        if len(names) < at:
            break
        check(root, case, failed=failed, where=f"{case}: {names[at - 1]} is operation {at}")
    assert at > (20 if case in ("first", "replaced", "linked", "clash") else 5)


@pytest.mark.timeout(170)
def test_a_fault_in_other_threads(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for at in range(1, 100, 14):
        prepare(root)
        failed = False
        with fault(at, is_done=False) as names:
            try:
                linked(root)
            except (OSError, CheckpointError):
                failed = True
        if len(names) < at:
            break
        check(root, "linked", failed=failed, where=f"{names[at - 1]} is operation {at}")


# -- faults of the system ---------------------------------------------------------------------------------------------


def traced(root: Path, case: str, expression: str | None) -> tuple[int, str]:
    """Let a child run a case while strace watches it: its exit status, and the trace."""
    assert STRACE is not None
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(ready, 1)
        code = _RAW
        try:
            with in_this_thread():
                CASES[case](root)
            code = 0
        except (OSError, CheckpointError):
            code = _RAISED
        finally:
            os._exit(code)
    os.close(ready)
    log = root.parent / "strace"
    command = [
        STRACE,
        "-qq",
        "-y",
        "-s",
        "0",
        "-e",
        f"trace={CALLS}",
        "-e",
        "signal=none",
        "-o",
        str(log),
        "-p",
        str(child),
    ]
    command += [] if expression is None else ["-e", f"inject={expression}"]
    tracer = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while "TracerPid:\t0\n" in Path(f"/proc/{child}/status").read_text():
        assert tracer.poll() is None, "strace may not trace here"
    os.close(go)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    tracer.wait()
    return status, log.read_text()


def everywhere(root: Path, case: str, one_in: int) -> int:
    """Let each call of a case fail, one after the other: how many there were."""
    prepare(root)
    status, log = traced(root, case, None)
    assert status == 0
    count = 0
    for call in CALLS.split(","):
        number = len(re.findall(rf"^{call}\(", log, re.MULTILINE))
        for at in range(1, number + 1):
            count += 1
            if count % one_in:
                continue
            prepare(root)
            status, _ = traced(root, case, f"{call}:error=EIO:when={at}")
            where = f"{case}: {call} number {at} of {number}, exit status {status}"
            assert status in (0, _RAISED), where
            check(root, case, failed=status == _RAISED, where=where)
    return count


@needs_strace
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("one_in", [60, pytest.param(1, marks=pytest.mark.slow)])
def test_a_fault_of_the_system(one_in: int, tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", __name__, str(tmp_path / "root"), str(one_in)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    counts = dict(line.split() for line in process.stdout.splitlines())
    assert counts.keys() == CASES.keys()
    assert int(counts["first"]) > 30


def main() -> None:
    root, one_in = Path(sys.argv[1]), int(sys.argv[2])
    for case in CASES:
        print(case, everywhere(root, case, one_in), flush=True)


if __name__ == "__main__":
    main()
