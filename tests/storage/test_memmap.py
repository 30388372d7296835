"""A storage in files: who has the directory, what it says of itself, and what happens when the disk is full."""

from __future__ import annotations

import asyncio
import errno
import functools
import gc
import io
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import (
    AsyncBufError,
    CheckpointCorruptError,
    CheckpointMismatchError,
    MemmapStorage,
    ReplayBuffer,
    RowRange,
    SchemaError,
    TensorStorage,
)
from asyncbuf._disk import files
from asyncbuf.storage import _mapped_files as mapped_files
from asyncbuf.storage._mapped_directory import DESCRIPTION
from asyncbuf.testing import assert_exact_resume, assert_same_batch, varied_items
from tests.helpers import Crew, numbers, rows, seeded, within
from tests.resume_helpers import items_of, noisy
from tests.storage.mapped_helpers import MEMORY, in_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncbuf import Batch

ROOT = Path(__file__).parents[2]


def put(storage: MemmapStorage, count: int, start: int = 0, row: int = 0, *, width: int = 1) -> None:
    storage.write(storage.prepare(rows(count, start, width=width)), [RowRange(row, 0, count)])


def stored(storage: MemmapStorage, count: int) -> list[int]:
    found: list[int] = storage.gather(torch.arange(count))["number"].tolist()
    return found


async def drawn(buffer: ReplayBuffer) -> set[int]:
    """The numbers of about all items."""
    async with buffer:
        return set(numbers(await buffer.sample(2_000)))


def described(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / DESCRIPTION).read_bytes())
    return found


def folders(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_dir())


# -- the files --------------------------------------------------------------------------------------------------------


def test_numpy_opens_each_field(tmp_path: Path) -> None:
    with MemmapStorage(50, tmp_path / "deep" / "rows") as storage:
        storage.write(storage.prepare(varied_items(7, 0)), [RowRange(0, 0, 7)])
        (folder,) = (path for path in storage.directory.iterdir() if path.is_dir())
        arrays = {path.name: np.load(path, mmap_mode="r") for path in folder.iterdir()}
        shapes = {name: array.shape for name, array in arrays.items()}
        assert shapes == {
            "000-number.npy": (50,),
            "001-value.npy": (50, 3),
            "002-done.npy": (50,),
            "003-deep.pixels.npy": (50, 2, 2),
            "004-deep.half.npy": (50,),
        }
        assert arrays["000-number.npy"][:7].tolist() == list(range(7))
        storage.write(storage.prepare(varied_items(1, 100)), [RowRange(3, 0, 1)])
        assert arrays["000-number.npy"][3] == 100


def test_the_rows_of_a_closed_directory_can_be_read(tmp_path: Path) -> None:
    items = varied_items(9, 0)
    with MemmapStorage(12, tmp_path) as storage:
        storage.write(storage.prepare(items), [RowRange(0, 0, 9)])
    read = MemmapStorage.read(tmp_path)
    for found, expected in ((read["number"], items["number"]), (read["deep"]["half"], items["deep"]["half"])):
        assert found.dtype is expected.dtype
        assert found.equal(expected)
    assert read["value"].view(torch.int32).equal(items["value"].view(torch.int32))
    read["number"][:] = 0  # seen by nobody else
    again = MemmapStorage.read(tmp_path)
    assert again["number"].equal(items["number"])
    MemmapStorage(12, tmp_path, overwrite=True).close()
    assert again["done"].equal(items["done"])  # still there for those that have it


async def test_what_was_read_goes_into_another_buffer(tmp_path: Path) -> None:
    with MemmapStorage(12, tmp_path) as storage:
        put(storage, 10)
    buffer = ReplayBuffer(in_files(30), batch_size=4, generator=seeded())
    await buffer.extend(MemmapStorage.read(tmp_path))
    assert await drawn(buffer) == set(range(10))


def test_items_of_no_bytes_and_odd_names(tmp_path: Path) -> None:
    items = {"": torch.empty(4, 0), "a/b": torch.arange(4), "a": {"b": torch.arange(4.0)}, "é" * 200: torch.ones(4, 2)}
    with MemmapStorage(5, tmp_path) as storage:
        storage.write(storage.prepare(items), [RowRange(0, 0, 4)])
    read = MemmapStorage.read(tmp_path)
    assert read[""].shape == (4, 0)
    assert read["a/b"].equal(items["a/b"])
    assert read["a"]["b"].equal(items["a"]["b"])  # type: ignore[index]


# -- whose directory it is --------------------------------------------------------------------------------------------


def test_two_storages_cannot_have_a_directory(tmp_path: Path) -> None:
    first = MemmapStorage(5, tmp_path)
    for overwrite in (False, True):
        with pytest.raises(AsyncBufError, match=r"expected a directory that no other storage has.*close\(\)"):
            MemmapStorage(5, tmp_path, overwrite=overwrite)
    with pytest.raises(AsyncBufError, match=r"expected rows that nobody writes.*close\(\)"):
        MemmapStorage.read(tmp_path)
    put(first, 5)
    assert stored(first, 5) == [0, 1, 2, 3, 4]
    first.close()
    MemmapStorage(5, tmp_path, overwrite=True).close()


def test_rows_are_not_overwritten_by_accident(tmp_path: Path) -> None:
    with MemmapStorage(5, tmp_path) as storage:
        put(storage, 5)
    with pytest.raises(FileExistsError, match=r"found rows: MemmapStorage.read\(\) gives them.*overwrite=True"):
        MemmapStorage(5, tmp_path)
    assert MemmapStorage.read(tmp_path)["number"].tolist() == [0, 1, 2, 3, 4]
    with MemmapStorage(9, tmp_path, overwrite=True) as storage:
        assert folders(tmp_path) == []
        with pytest.raises(SchemaError):
            storage.gather(torch.arange(1))
    with MemmapStorage(9, tmp_path):  # nothing was written, so nothing is lost
        pass


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_not_ours_is_never_removed(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "rows-0123456789abcdef").mkdir()
    with pytest.raises(FileExistsError, match=r"expected an empty directory.*choose another"):
        MemmapStorage(5, tmp_path, overwrite=overwrite)
    assert folders(tmp_path) == ["rows-0123456789abcdef"]
    (tmp_path / DESCRIPTION).write_text('{"format": "mine"}')
    with pytest.raises(CheckpointCorruptError, match="expected a description"):
        MemmapStorage(5, tmp_path, overwrite=overwrite)
    assert folders(tmp_path) == ["rows-0123456789abcdef"]
    with pytest.raises(FileNotFoundError):
        MemmapStorage.read(tmp_path / "nowhere")


HOLDS = """
import sys, torch
from asyncbuf import MemmapStorage, RowRange
storage = MemmapStorage(50, sys.argv[1])
storage.write(storage.prepare({"x": torch.arange(50)}), [RowRange(0, 0, 50)])
storage.flush()
print("flushed", flush=True)
sys.stdin.readline()
storage.write(storage.prepare({"x": torch.zeros(3, dtype=torch.int64)}), [RowRange(0, 0, 3)])
print("written", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which has a storage in the directory ``rows``."""
    command = [sys.executable, "-c", HOLDS, str(tmp_path / "rows")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "flushed\n"
        yield process
        process.kill()


def test_another_process_has_it_and_is_killed(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    directory = tmp_path / "rows"
    assert other.stdin is not None
    assert other.stdout is not None
    with pytest.raises(AsyncBufError, match="no other storage has"):
        MemmapStorage(50, directory, overwrite=True)
    with pytest.raises(AsyncBufError, match="nobody writes"):
        MemmapStorage.read(directory)
    other.stdin.write("\n")
    other.stdin.flush()
    assert other.stdout.readline() == "written\n"
    other.send_signal(signal.SIGKILL)
    other.wait()
    # Some rows are of before and some of after the last flush: nobody knows which.
    with pytest.raises(AsyncBufError, match=r"closed cleanly.*killed.*restore a checkpoint.*overwrite=True"):
        MemmapStorage.read(directory)
    with pytest.raises(FileExistsError, match=r"not closed cleanly.*restore a checkpoint"):
        MemmapStorage(50, directory)
    with MemmapStorage(50, directory, overwrite=True) as storage:
        assert folders(directory) == []
        put(storage, 3)
    assert MemmapStorage.read(directory)["number"].tolist() == [0, 1, 2]


def test_killed_after_a_flush_it_can_be_read(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert MemmapStorage.read(tmp_path / "rows")["x"].equal(torch.arange(50))


def test_clean_is_what_the_files_hold(tmp_path: Path) -> None:
    storage = MemmapStorage(9, tmp_path)
    assert described(tmp_path)["clean"] is False
    put(storage, 4)
    assert described(tmp_path)["clean"] is False
    storage.flush()
    assert described(tmp_path)["clean"] is True
    assert described(tmp_path)["items"]["rows"] == 4
    put(storage, 2, 10)
    assert described(tmp_path)["clean"] is False
    storage.close()
    storage.close()
    assert described(tmp_path)["clean"] is True
    assert MemmapStorage.read(tmp_path)["number"].tolist() == [10, 11, 2, 3]


def test_a_storage_that_is_dropped_leaves_no_clean_directory(tmp_path: Path) -> None:
    put(MemmapStorage(9, tmp_path), 4)
    gc.collect()
    assert described(tmp_path)["clean"] is False
    with pytest.raises(FileExistsError, match="not closed cleanly"):
        MemmapStorage(9, tmp_path)


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "version": lambda found: found.update(version=99),
    "folder": lambda found: found.update(folder="../elsewhere"),
    "no-folder": lambda found: found.update(folder=None),
    "files": lambda found: found.update(files=["x.npy"]),
    "file": lambda found: found["files"].__setitem__(0, "../../x.npy"),
    "small": lambda found: found.update(capacity=3),
    "text": lambda found: found.update(capacity="9"),
    "rows": lambda found: found["items"].update(rows=10),
    "dtype": lambda found: found["items"]["fields"][0].update(dtype="float32"),
    "items": lambda found: found.pop("items"),
    "null": lambda found: found.update(files=None),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
def test_a_forged_description_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    with MemmapStorage(9, tmp_path) as storage:
        put(storage, 4)
    found = described(tmp_path)
    change(found)
    (tmp_path / DESCRIPTION).write_text(json.dumps(found))
    with pytest.raises(AsyncBufError, match="expected"):
        MemmapStorage.read(tmp_path)


def test_a_shortened_file_is_refused(tmp_path: Path) -> None:
    with MemmapStorage(9, tmp_path) as storage:
        put(storage, 4)
    file = next(tmp_path.glob("rows-*/000-*"))
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointCorruptError, match="another size"):
        MemmapStorage.read(tmp_path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_does_not_write(tmp_path: Path) -> None:
    storage = MemmapStorage(9, tmp_path)
    put(storage, 4)
    child = os.fork()
    if not child:
        code = 1
        try:
            assert stored(storage, 4) == [0, 1, 2, 3]
            put(storage, 1, 100)
        except AsyncBufError as error:
            code = 0 if "forked" in str(error) else 2
        storage.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert stored(storage, 4) == [0, 1, 2, 3]
    with pytest.raises(AsyncBufError, match="no other storage"):
        MemmapStorage(9, tmp_path)
    storage.close()
    assert MemmapStorage.read(tmp_path)["number"].tolist() == [0, 1, 2, 3]


def test_it_says_why_it_cannot_be_pickled(tmp_path: Path) -> None:
    with MemmapStorage(9, tmp_path) as storage, pytest.raises(TypeError, match=r"checkpoint.*another"):
        pickle.dumps(storage)


# -- closed -----------------------------------------------------------------------------------------------------------


def handles_in(directory: Path) -> list[str]:
    links = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    found = [os.readlink(link) for link in links if link.is_symlink()]
    return [target for target in found if target.startswith(str(directory))]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc")
async def test_no_handle_is_left(tmp_path: Path) -> None:
    storage = MemmapStorage(9, tmp_path)
    async with ReplayBuffer(storage, batch_size=4, prefetch=2, generator=seeded()) as buffer:
        await buffer.extend(rows(9))
        snapshot = await buffer.snapshot()
        await buffer.extend(rows(9, 9))  # rows are put aside
        await buffer.sample()
        await buffer.restore(snapshot)
        await buffer.extend(rows(1, 18))
    assert handles_in(tmp_path)
    storage.close()
    del snapshot
    gc.collect()
    assert handles_in(tmp_path) == []
    for name in [*tmp_path.glob("*/*"), *tmp_path.glob("*")]:
        assert not name.name.startswith(".")


async def test_a_closed_storage_says_so(tmp_path: Path) -> None:
    storage = MemmapStorage(9, tmp_path)
    buffer = ReplayBuffer(storage, batch_size=4, prefetch=1, generator=seeded())
    await buffer.extend(rows(9))
    snapshot = await buffer.snapshot()
    storage.close()
    calls = (lambda: buffer.extend(rows(1)), buffer.sample, buffer.snapshot, lambda: buffer.restore(snapshot))
    async with buffer:
        for call in calls:
            with pytest.raises(AsyncBufError, match="it was closed; make another one"):
                await within(call())
    with pytest.raises(AsyncBufError, match="it was closed"):
        storage.flush()
    # What was taken before is there for another one.
    other = ReplayBuffer(in_files(9), batch_size=4, prefetch=1, generator=seeded())
    await other.restore(snapshot)
    assert await drawn(other) == set(range(9))


async def test_a_buffer_can_be_opened_again(tmp_path: Path) -> None:
    with MemmapStorage(9, tmp_path) as storage:
        buffer = ReplayBuffer(storage, batch_size=4, prefetch=2, generator=seeded())
        for number in range(3):
            async with buffer:
                await buffer.extend(rows(9, 9 * number))
                assert set(numbers(await buffer.sample(200))) == set(range(9 * number, 9 * number + 9))


# -- a full disk ------------------------------------------------------------------------------------------------------


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


# -- checkpoints ------------------------------------------------------------------------------------------------------


def wide(count: int, start: int) -> dict[str, torch.Tensor]:
    """Rows of which 8 fill a segment that is put aside."""
    return rows(count, start, width=32_768)


async def test_a_snapshot_stays_while_everything_is_overwritten(tmp_path: Path) -> None:
    storage = MemmapStorage(64, tmp_path)
    async with ReplayBuffer(storage, batch_size=4, prefetch=2, generator=seeded()) as buffer:
        await buffer.extend(wide(64, 0))
        snapshots = []
        for number in range(1, 4):
            snapshots.append(await buffer.snapshot())
            await buffer.extend(wide(40, 64 * number))
        expected = await buffer.snapshot()
        await buffer.restore(expected)
        await buffer.extend(wide(1, 999))
        assert len(folders(tmp_path)) == 1
    storage.close()
    for number, snapshot in enumerate(snapshots):
        other = ReplayBuffer(in_files(64), batch_size=4, prefetch=2, generator=seeded())
        await other.restore(snapshot)
        found = await drawn(other)
        assert all(n < 64 * (number + 1) for n in found)
        assert number or found == set(range(64))


async def test_a_save_while_rows_are_written_is_of_one_moment(tmp_path: Path) -> None:
    storage = MemmapStorage(64, tmp_path / "rows")
    async with ReplayBuffer(storage, batch_size=4, prefetch=2, generator=seeded()) as buffer, Crew() as crew:
        await buffer.extend(wide(64, 0))
        saving = crew.start(buffer.save(tmp_path / "saved"))
        for number in range(8):
            await buffer.extend(wide(16, 64 + 16 * number))
        await within(saving)
    other = in_files(64)
    buffer = ReplayBuffer(other, batch_size=4, prefetch=2, generator=seeded())
    await buffer.load(tmp_path / "saved")
    found = stored(other, 64)
    assert max(found) - min(found) == 63
    assert other.gather(torch.arange(64))["wide"][:, -1].tolist() == found


async def test_unchanged_chunks_get_a_second_name(tmp_path: Path) -> None:
    storage = MemmapStorage(256, tmp_path / "rows")
    buffer = ReplayBuffer(storage, batch_size=4, generator=seeded())
    await buffer.extend(wide(256, 0))
    await buffer.save(tmp_path / "saved")
    before = {path.stat().st_ino for path in (tmp_path / "saved").glob("*/storage/*.safetensors")}
    await buffer.extend(wide(8, 256))
    await buffer.save(tmp_path / "saved")
    after = {path.stat().st_ino for path in (tmp_path / "saved").glob("*/storage/*.safetensors")}
    assert len(before) >= 4
    assert len(after - before) == 1
    # Loaded ones as well, in another directory.
    other = ReplayBuffer(in_files(256), batch_size=4, generator=seeded())
    await other.load(tmp_path / "saved")
    await other.save(tmp_path / "saved")
    assert {path.stat().st_ino for path in (tmp_path / "saved").glob("*/storage/*.safetensors")} == after


async def test_what_cannot_be_loaded_leaves_nothing(tmp_path: Path) -> None:
    buffer = ReplayBuffer(MemmapStorage(9, tmp_path), batch_size=4, generator=seeded())
    await buffer.extend(rows(9))
    other = ReplayBuffer(in_files(9), batch_size=4, generator=seeded())
    await other.extend({"else": torch.arange(9)})
    with pytest.raises(CheckpointMismatchError):
        await buffer.restore(await other.snapshot())
    state = await buffer.state_dict()
    state["storage"]["chunks"] = []
    with pytest.raises(AsyncBufError):
        await buffer.load_state_dict(state)
    gc.collect()
    assert len(folders(tmp_path)) == 1
    assert await drawn(buffer) == set(range(9))


def made(depth: int, workers: int) -> Callable[[], Any]:
    async def make() -> ReplayBuffer:
        buffer = ReplayBuffer(
            in_files(20), batch_size=3, prefetch=depth, workers=workers, transform=noisy, generator=seeded()
        )
        await buffer.extend(items_of(13))
        return buffer

    return make


async def overwrite(buffer: ReplayBuffer, step: int, batch: Batch) -> None:
    await buffer.extend(items_of(1 + step % 3, 100 + 10 * step))


@pytest.mark.parametrize(("depth", "workers"), [(0, 1), (3, 1), (8, 4)])
async def test_it_resumes_exactly(depth: int, workers: int) -> None:
    await assert_exact_resume(
        made(depth, workers), steps=5, at=[0, 3], ways=("snapshot", "state_dict", "directory"), feed=overwrite, hops=1
    )


def test_a_write_never_finds_copies_whose_file_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemmapStorage(9, tmp_path)
    put(storage, 9)
    frozen = storage.freeze()
    (reference,) = storage._frozen
    there: list[bool] = []

    class Watched(io.FileIO):
        def close(self) -> None:
            there.append(reference() is not None)
            super().close()

    monkeypatch.setattr(files, "unnamed", lambda folder: Watched(folder / "aside", "x+"))
    put(storage, 9, 9)
    del frozen
    gc.collect()
    assert there
    assert not any(there)
    put(storage, 9, 18)


# -- memory -----------------------------------------------------------------------------------------------------------


def test_pages_are_let_go_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemmapStorage(512, tmp_path, resident_bytes=4 * 1024 * 1024)
    parts: list[int] = []
    let_go = mapped_files.RowFile.let_go

    def noted(file: mapped_files.RowFile, part: int) -> None:
        parts.append(part)
        let_go(file, part)

    monkeypatch.setattr(mapped_files.RowFile, "let_go", noted)
    for number in range(8):
        storage.write(storage.prepare(wide(64, 64 * number)), [RowRange(64 * number, 0, 64)])
    assert set(parts) == set(range(64))  # of 64 MB that were written
    parts.clear()
    generator = seeded()
    while len(parts) < 64:
        some = torch.randint(512, (32,), generator=generator)
        found = storage.gather(some)
        assert found["number"].equal(some)
        assert found["wide"][:, 7].equal(some.float())
    assert set(parts) == set(range(64))


async def test_same_batches_as_in_memory() -> None:
    batches = []
    for storage in (TensorStorage(30), in_files(30)):
        async with ReplayBuffer(storage, batch_size=5, prefetch=3, generator=seeded()) as buffer:
            found: list[Batch] = []
            for number in range(12):
                await buffer.extend(rows(7, 7 * number))
                found += await asyncio.gather(buffer.sample(), buffer.sample(2))
            batches.append(found)
    for one, other in zip(*batches, strict=True):
        assert_same_batch(one, other)
