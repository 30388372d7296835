"""A storage in files: what the files are, who has the directory, and what it says of itself."""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import (
    AsyncBufError,
    CheckpointCorruptError,
    MemmapStorage,
    ReplayBuffer,
    RowRange,
    SchemaError,
)
from asyncbuf.storage._mapped_directory import DESCRIPTION
from asyncbuf.testing import varied_items
from tests.helpers import numbers, rows, seeded, within
from tests.storage.mapped_helpers import described, drawn, folders, in_files, put, stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


ROOT = Path(__file__).parents[2]


# -- the files ---------------------------------------------------------------------------------------------------------


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


# -- whose directory it is ---------------------------------------------------------------------------------------------


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


# -- closed ------------------------------------------------------------------------------------------------------------


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
