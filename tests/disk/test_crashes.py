"""A checkpoint directory is there whole or not at all, wherever a save ends.

Run as a program (``python -m tests.disk.test_crashes``), this module is the process whose children die.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf._disk.housekeeping import sweep
from asyncbuf._disk.manifest import MANIFEST
from tests.disk.helpers import ROOT, leftovers, load, save

if TYPE_CHECKING:
    from collections.abc import Callable

_CRASHED = 77
_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link"}


def _changes_something(event: str, arguments: tuple[Any, ...]) -> bool:
    if event != "open":
        return event in _EVENTS
    _, mode, flags = arguments
    return bool(flags & (os.O_WRONLY | os.O_RDWR)) or (isinstance(mode, str) and mode[0] in "wxa")


def _fail_at(operation: int, *, crash: bool) -> None:
    """Let one operation on files not happen: the process ends there, or the operation fails as on a full disk."""
    lock = threading.Lock()
    left = operation

    def fail() -> None:
        nonlocal left
        with lock:
            left -= 1
            if left == 0 and crash:
                os._exit(_CRASHED)
            if left == 0:
                raise OSError(errno.ENOSPC, "no space left")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if _changes_something(event, arguments):
            fail()

    os.fsync = lambda fd: fail()
    sys.addaudithook(hook)


def _in_child(action: Callable[[], int]) -> int:
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = action()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _saved(target: Path, operation: int, *, crash: bool) -> int:
    _fail_at(operation, crash=crash)
    try:
        save(target, 2)
    except OSError as error:
        return 1 if error.errno == errno.ENOSPC else 98
    return 0


def _die_everywhere(root: Path, *, crash: bool, over: bool) -> int:
    """Let a save die at each of its operations on files, one after the other; how many there are."""
    for operation in itertools.count(1):
        shutil.rmtree(root, ignore_errors=True)
        old = root / "step-000001"
        save(old, 1)
        new = old if over else root / "step-000002"
        code = _in_child(lambda new=new, n=operation: _saved(new, n, crash=crash))  # type: ignore[misc]
        where = f"{'crash' if crash else 'error'} at operation {operation}, {'over' if over else 'beside'}: exit {code}"
        assert code in ((0, _CRASHED) if crash else (0, 1)), where
        if over:
            assert load(old) in ((2,) if code == 0 else (1, 2)), where
        else:
            assert load(old) == 1, where
            assert not new.exists() or load(new) == 2, where
            assert new.exists() or code != 0, where
        # Where the new one is in place but its name may not last, the old data stays.
        if code == 1 and load(old) == 1:
            assert not [name for name in leftovers(old) if f"{MANIFEST}." not in name], where
        sweep(root)
        save(new, 3)
        assert load(new) == 3, where
        assert not leftovers(new), where
        if code == 0 and operation > 1 and _untouched(root, operation):
            return operation - 1
    raise AssertionError


def _untouched(root: Path, operation: int) -> bool:
    """Whether a save has fewer operations than that, so that all of them had their turn."""
    target = root / "step-000009"
    code = _in_child(lambda: _saved(target, operation, crash=True))
    shutil.rmtree(target, ignore_errors=True)
    sweep(root)
    return code == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_crash_or_error_at_any_operation_leaves_whole_checkpoints(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", __name__, str(tmp_path / "root")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    counts = [int(line) for line in process.stdout.split()]
    # Each file is made and synced, each directory made and synced, the manifest renamed: no operation was left out.
    assert len(counts) == 4
    assert min(counts) >= 4 * 2 + 3


def main() -> None:
    root = Path(sys.argv[1])
    os.fsync = lambda fd: None  # no power is lost here, and it takes most of the time
    for crash, over in itertools.product((True, False), (False, True)):
        print(_die_everywhere(root, crash=crash, over=over))


if __name__ == "__main__":
    main()
