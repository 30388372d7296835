"""A storage in files when the disk is full or fails: an error, nothing lost, and a directory that tells the truth."""

from __future__ import annotations

import errno
import functools
import io
import itertools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import (
    MemmapStorage,
    ReplayBuffer,
)
from asyncbuf._disk import files
from tests.helpers import rows, seeded
from tests.storage.mapped_helpers import MEMORY, described, folders, put, stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def full(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Let the disk have so many bytes left."""
    allocate = files.allocate
    left = [room]

    def some(file: Any, path: Path, start: int, nbytes: int) -> None:
        if nbytes > left[0]:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        left[0] -= nbytes
        allocate(file, path, start, nbytes)

    monkeypatch.setattr(files, "allocate", some)


async def test_a_full_disk_is_an_error_and_nothing_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemmapStorage(100_000, tmp_path)
    buffer = ReplayBuffer(storage, batch_size=4, generator=seeded())
    full(monkeypatch, 300_000)
    with pytest.raises(OSError, match="No space") as caught:
        await buffer.extend(rows(90_000))
    assert str(tmp_path) in str(caught.value)
    assert len(buffer) == 0
    await buffer.extend(rows(1_000))
    with pytest.raises(OSError, match="No space"):
        await buffer.extend(rows(60_000, 1_000))
    assert len(buffer) == 1_000
    assert stored(storage, 1_000) == list(range(1_000))
    snapshot = await buffer.snapshot()
    full(monkeypatch, 10)
    with pytest.raises(OSError, match="No space"):
        await buffer.restore(snapshot)
    assert len(folders(tmp_path)) == 1
    assert stored(storage, 1_000) == list(range(1_000))
    monkeypatch.undo()
    await buffer.extend(rows(60_000, 1_000))
    assert stored(storage, 61_000) == list(range(61_000))


def test_room_is_there_before_rows_are_written(tmp_path: Path) -> None:
    storage = MemmapStorage(100_000, tmp_path)
    put(storage, 10, width=3)
    sizes = {path.name: path.stat() for path in tmp_path.glob("rows-*/*")}
    assert sizes["001-wide.npy"].st_size > 1_000_000
    put(storage, 1, row=60_000, width=3)
    assert (next(tmp_path.glob("rows-*/001-*")).stat().st_blocks * 512) >= 60_000 * 12


def test_files_that_cannot_be_made_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemmapStorage(9, tmp_path)
    calls = itertools.count()

    def mapped(*args: Any, **options: Any) -> Any:
        if next(calls):
            raise OSError(errno.ENOMEM, "Cannot allocate memory", "file")
        return files_mapped(*args, **options)

    files_mapped = files.mapped
    monkeypatch.setattr(files, "mapped", mapped)
    with pytest.raises(OSError, match="memory"):
        put(storage, 3)
    assert folders(tmp_path) == []
    monkeypatch.undo()
    put(storage, 3)
    assert stored(storage, 3) == [0, 1, 2]


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A directory for what syncs hundreds of times; what a disk takes for it is not the question."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)


OPERATIONS = (
    "mkdir",
    "create",
    "create_to_map",
    "write",
    "write_whole",
    "replace",
    "sync",
    "sync_directory",
    "allocate",
)


@pytest.mark.parametrize("is_done", [False, True], ids=["not-done", "done"])
def test_an_error_of_any_operation_leaves_a_directory_that_tells_the_truth(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    """Each operation fails once, or is done and reports an error all the same; who wrote goes on or is killed."""
    plain = {name: getattr(files, name) for name in OPERATIONS}
    left = [-1]

    def failing(name: str, *args: Any) -> Any:
        left[0] -= 1
        if left[0]:
            return plain[name](*args)
        if is_done:
            made = plain[name](*args)
            if isinstance(made, io.IOBase):
                made.close()
        raise OSError(errno.EIO, f"{name} failed on purpose", "file")

    for name in OPERATIONS:
        monkeypatch.setattr(files, name, functools.partial(failing, name))

    def tried(call: Callable[[], object]) -> bool:
        try:
            call()
        except OSError as error:
            if "on purpose" not in str(error):
                raise
            return False
        return True

    for number in itertools.count(1):
        directory = memory_path / f"{number}"
        left[0] = 0
        storage = MemmapStorage(9, directory)
        left[0] = number
        held: list[int] = []
        for step in range(3):
            if tried(functools.partial(put, storage, 5, 10 * step)):
                held = list(range(10 * step, 10 * step + 5))
            if step < 2:
                tried(storage.flush)
            found = described(directory)
            assert not found["clean"] or found.get("items", {"rows": 0})["rows"] == len(held)
        failed = left[0] <= 0
        left[0] = 0
        assert stored(storage, 5) == held
        # It is clean only where the last write has not come to anything.
        assert not described(directory)["clean"] or held == [10, 11, 12, 13, 14]
        assert len(folders(directory)) == 1
        put(storage, 5, 50)
        storage.close()
        assert MemmapStorage.read(directory)["number"].tolist() == list(range(50, 55))
        if not failed:
            break
    assert number > 15
