"""Several at work in one place, with locks of the system and without."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from asyncbuf._disk import lock
from asyncbuf._disk.housekeeping import remove, sweep
from asyncbuf._disk.lock import alone, share
from asyncbuf._disk.manifest import DATA
from asyncbuf._disk.reader import CheckpointReader
from asyncbuf._disk.stop import Stop, StoppedError
from asyncbuf._disk.writer import CheckpointWriter
from tests.disk.helpers import FILES, ROOT, contents, leftovers, load, save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

fcntl = pytest.importorskip("fcntl")


def refused(code: int) -> Callable[[int, int], None]:
    def flock(handle: int, operation: int) -> None:
        raise OSError(code, "there are no locks here")

    return flock


@pytest.fixture(params=["locks", "refused", "not permitted on directories", "missing"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A system with locks, or one of those without."""
    monkeypatch.setattr(lock, "_places", lock._Places())
    if request.param == "refused":
        monkeypatch.setattr(fcntl, "flock", refused(errno.ENOLCK))
    elif request.param == "not permitted on directories":
        monkeypatch.setattr(fcntl, "flock", refused(errno.EBADF))
    elif request.param == "missing":
        monkeypatch.setattr(lock, "fcntl", None)
    return str(request.param)


def test_who_shares_and_who_is_alone(system: str, tmp_path: Path) -> None:
    one, two = share(tmp_path), share(tmp_path)
    assert one is not None
    assert two is not None
    assert alone(tmp_path) is None
    one.release()
    one.release()  # once is enough
    assert alone(tmp_path) is None
    two.release()
    only = alone(tmp_path)
    assert only is not None
    assert alone(tmp_path) is None
    only.release()
    assert share(tmp_path / "nowhere") is None
    assert alone(tmp_path / "nowhere") is None


def test_whoever_waits_for_a_removal_can_give_up(system: str, tmp_path: Path) -> None:
    visited = share(tmp_path)
    assert visited is not None
    visited.release()
    held = alone(tmp_path)
    assert held is not None
    stop = Stop()
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            share(tmp_path, stop)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    stop.set()
    thread.join(20)
    assert [type(error) for error in raised] == [StoppedError]
    held.release()


def test_nobody_waits_for_a_removal_for_ever(system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    visited = share(tmp_path)
    assert visited is not None
    visited.release()
    held = alone(tmp_path)
    assert held is not None
    monkeypatch.setattr(lock, "MOST_SECONDS", 0.05)
    with pytest.raises(OSError, match="expected nobody who removes it") as caught:
        share(tmp_path)
    assert str(tmp_path) in str(caught.value)
    held.release()


def came_and_went(path: Path, number: int) -> None:
    save(path, number)
    remove(path)


def test_threads_of_one_process_lose_nothing(system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    path = tmp_path / "run"
    save(path, 0)
    errors: list[BaseException] = []

    def work(action: Callable[[int], object]) -> None:
        try:
            for number in range(25):
                action(number)
        except BaseException as error:
            errors.append(error)

    actions: list[Callable[[int], object]] = [lambda n: save(path, n)] * 3 + [lambda n: load(path)] * 3
    actions += [lambda n: sweep(tmp_path), lambda n: came_and_went(tmp_path / "two", n)]
    threads = [threading.Thread(target=work, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    save(path, 7)
    assert load(path) == 7
    assert leftovers(path) == []


def test_a_long_reader_keeps_its_copy_alone(system: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    save(path, 1)
    reader = CheckpointReader(path)
    for number in range(2, 8):
        save(path, number)
    assert len(list(filter(DATA.fullmatch, os.listdir(path)))) == 2
    for name, tensors in contents(1).items():
        assert reader.read(name)["x"].equal(tensors["x"])
    assert not remove(path)
    del reader
    save(path, 9)
    assert leftovers(path) == []
    assert remove(path)


def test_a_writer_keeps_what_it_writes(system: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    save(path, 1)
    with CheckpointWriter(path) as writer, CheckpointWriter(tmp_path / "new") as other:
        for each in (writer, other):
            each.write(FILES[0], contents(2)[FILES[0]])
        save(path, 3)
        save(tmp_path / "other", 4)
        sweep(tmp_path)
        for each in (writer, other):
            for name in FILES[1:]:
                each.write(name, contents(2)[name])
            each.commit({"number": 2})
    assert load(path) == load(tmp_path / "new") == 2
    assert leftovers(path) == []


@pytest.mark.parametrize("system", ["refused", "missing"], indirect=True)
def test_without_locks_one_warning_says_so(system: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "asyncbuf"):
        for number in range(3):
            save(tmp_path / "run", number)
            load(tmp_path / "run")
    assert [record.getMessage() for record in caplog.records if "no locks" in record.getMessage()] == [
        "this file system has no locks (flock): expected that one process at a time saves, loads and removes "
        "checkpoints there; tasks and threads of one process are safe"
    ]


@pytest.mark.parametrize("system", ["refused"], indirect=True)
def test_without_locks_what_others_left_goes_when_it_is_old(system: str, tmp_path: Path) -> None:
    stale = tmp_path / f".x.tmp-{'0f' * 8}"
    stale.mkdir()
    (stale / f"draft-{'0f' * 8}").write_text('{"format": "asyncbuf.checkpoint"}')
    sweep(tmp_path)
    assert stale.exists()  # another process may be at work there
    old = time.time() - 2 * lock.ABANDONED_SECONDS
    os.utime(stale, (old, old))
    sweep(tmp_path)
    assert not stale.exists()


# One process imports torch, and others are made of it, with three threads each.
AT_ONCE = """
import errno, fcntl, os, random, sys, threading, time, traceback
from pathlib import Path
from asyncbuf.errors import CheckpointError
from asyncbuf._disk.housekeeping import remove, sweep
from tests.disk.helpers import load, save

root, seconds, has_locks = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "locks"
end = time.monotonic() + seconds
if not has_locks:
    def flock(handle, operation):
        raise OSError(errno.ENOLCK, "there are no locks here")
    fcntl.flock = flock
failed = []

def work(number):
    rng = random.Random(number)
    try:
        while time.monotonic() < end:
            # Without locks, each process has places of its own beside those of the others.
            which = rng.randrange(3) if has_locks else f"{number // 3}-{rng.randrange(3)}"
            path = root / f"step-{which}"
            save(path, number)
            try:
                load(path)
            except FileNotFoundError:
                pass
            if rng.random() < 0.3:
                try:
                    remove(path)
                except FileNotFoundError:
                    pass
            sweep(root)
    except BaseException:
        traceback.print_exc()
        failed.append(number)

def process(number):
    threads = [threading.Thread(target=work, args=(3 * number + i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

children = []
for number in range(3):
    child = os.fork()
    if child == 0:
        process(number)
        sys.stderr.flush()
        os._exit(len(failed))
    children.append(child)
print(*[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.timeout(170)
@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["locks", "none"])
def test_three_processes_with_three_threads_each(kind: str, seconds: int, tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", AT_ONCE, str(tmp_path), str(seconds), kind],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert process.stdout.split() == ["0", "0", "0"], process.stderr
    for path in tmp_path.glob("step-*"):
        assert load(path) in range(9)
        save(path, 7)
        assert load(path) == 7
    save(tmp_path / "last", 7)
    assert leftovers(tmp_path / "last") == []
