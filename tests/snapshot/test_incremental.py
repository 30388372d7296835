"""Saving writes what changed. Each checkpoint is whole: any may be removed, and what is not as it was is written."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import Checkpointer, ListStorage, ReplayBuffer, TensorStorage
from asyncbuf.testing import difference
from tests.helpers import turns

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROWS = 10  # of a chunk
CAPACITY = 45


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncbuf.storage._row_memory.SEGMENT_BYTES", 5 * 8)
    monkeypatch.setattr("asyncbuf.storage._row_memory.CHUNK_BYTES", ROWS * 8)
    monkeypatch.setattr("asyncbuf.storage._frozen_items._CHUNK_ITEMS", ROWS)


def items(count: int, value: int = 0) -> Any:
    return {"x": torch.arange(count) + 1000 * value}


def listed(count: int, value: int = 0) -> Any:
    return [{"x": torch.tensor(number + 1000 * value)} for number in range(count)]


async def filled(make: type[Any] = TensorStorage) -> ReplayBuffer:
    buffer = ReplayBuffer(make(CAPACITY), batch_size=4)
    await buffer.extend(items(CAPACITY) if make is TensorStorage else listed(CAPACITY))
    return buffer


def chunks(path: Path) -> list[Path]:
    return sorted(path.glob("data-*/**/storage/*.safetensors"))


def shared(path: Path) -> list[bool]:
    """Which chunks have another name elsewhere."""
    return [file.stat().st_nlink > 1 for file in chunks(path)]


async def same(path: Path, buffer: ReplayBuffer, make: type[Any] = TensorStorage) -> bool:
    other = ReplayBuffer(make(CAPACITY), batch_size=4)
    await other.load(path)
    return difference(await other.state_dict(), await buffer.state_dict()) is None


@pytest.mark.parametrize("make", [TensorStorage, ListStorage])
async def test_only_what_changed_is_written(make: type[Any], tmp_path: Path) -> None:
    buffer = await filled(make)
    await buffer.save(tmp_path / "a")
    assert not any(shared(tmp_path / "a"))
    await buffer.save(tmp_path / "b", base=tmp_path / "a")
    assert shared(tmp_path / "b") == [True] * 5
    await buffer.extend((items if make is TensorStorage else listed)(12, 1))
    await buffer.save(tmp_path / "c", base=tmp_path / "b")
    assert shared(tmp_path / "c") == [False, False, True, True, True]
    assert await same(tmp_path / "c", buffer, make)
    for name in ("a", "b"):
        shutil.rmtree(tmp_path / name)
    assert await same(tmp_path / "c", buffer, make)


async def test_what_is_replaced_is_used_again(tmp_path: Path) -> None:
    buffer = await filled()
    await buffer.save(tmp_path / "a")
    before = [file.stat().st_ino for file in chunks(tmp_path / "a")]
    await buffer.extend(items(1, 1))
    await buffer.save(tmp_path / "a")
    after = [file.stat().st_ino for file in chunks(tmp_path / "a")]
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, True, True, True, True]
    assert not any(shared(tmp_path / "a"))  # the old names are gone
    assert await same(tmp_path / "a", buffer)


async def test_steps_of_a_run_share_what_did_not_change(tmp_path: Path) -> None:
    buffer = await filled()
    checkpointer = Checkpointer(tmp_path, keep=2)
    for step in range(4):
        await buffer.extend(items(3, step))
        await checkpointer.save(step, buffer=buffer, n=step)
        if step:
            assert sum(shared(checkpointer.path(step))) >= 3
    for step in checkpointer.steps():
        other = ReplayBuffer(TensorStorage(CAPACITY), batch_size=4)
        assert (await checkpointer.restore(step, buffer=other)).values == {"n": step}
    assert difference(await other.state_dict(), await buffer.state_dict()) is None


@pytest.mark.parametrize("make", [TensorStorage, ListStorage])
@pytest.mark.parametrize("by", ["load", "checkpointer"])
async def test_a_buffer_that_was_loaded_knows_its_chunks_again(by: str, make: type[Any], tmp_path: Path) -> None:
    buffer = await filled(make)
    checkpointer = Checkpointer(tmp_path / "runs")
    other = ReplayBuffer(make(CAPACITY), batch_size=4)
    if by == "load":
        await buffer.save(tmp_path / "a")
        await other.load(tmp_path / "a")
    else:
        await checkpointer.save(1, buffer=buffer)
        await checkpointer.restore(buffer=other)
    await other.extend((items if make is TensorStorage else listed)(11, 1))
    path = tmp_path / "b"
    if by == "load":
        await other.save(path, base=tmp_path / "a")
    else:
        path = await checkpointer.save(2, buffer=other)
    assert shared(path) == [False, False, True, True, True]
    third = ReplayBuffer(make(CAPACITY), batch_size=4)
    if by == "load":
        await third.load(path)
    else:
        await checkpointer.restore(buffer=third)
    assert difference(await third.state_dict(), await other.state_dict()) is None


async def test_chunks_of_another_size_are_not_known_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = await filled()
    await buffer.save(tmp_path / "a")
    monkeypatch.setattr("asyncbuf.storage._row_memory.CHUNK_BYTES", 2 * ROWS * 8)
    other = ReplayBuffer(TensorStorage(CAPACITY), batch_size=4)
    await other.load(tmp_path / "a")
    await other.save(tmp_path / "b", base=tmp_path / "a")
    assert shared(tmp_path / "b") == [False, False, True]  # the last one is of the same rows as before
    assert await same(tmp_path / "b", other)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def touch(file: Path) -> None:
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))


def copied(file: Path) -> None:
    shutil.copy2(file, file.with_name("copy"))
    file.with_name("copy").rename(file)


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def linked(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))


@pytest.mark.parametrize("change", [cut, touch, copied, flipped, linked, os.unlink])
async def test_a_file_that_is_not_as_it_was_written_is_not_used(
    change: Callable[[Path], object], tmp_path: Path
) -> None:
    buffer = await filled()
    await buffer.save(tmp_path / "a")
    change(chunks(tmp_path / "a")[2])
    await buffer.save(tmp_path / "b", base=tmp_path / "a")
    assert shared(tmp_path / "b") == [True, True, False, True, True]
    assert await same(tmp_path / "b", buffer)


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV, errno.EIO])
async def test_where_there_are_no_links_it_is_written(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, "there are no links here")

    buffer = await filled()
    await buffer.save(tmp_path / "a")
    monkeypatch.setattr(os, "link", refuse)
    await buffer.save(tmp_path / "b", base=tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    assert await same(tmp_path / "b", buffer)


async def test_a_base_that_is_none_is_told_and_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    buffer = await filled()
    with caplog.at_level(logging.WARNING, "asyncbuf"):
        await buffer.save(tmp_path / "b", base=tmp_path / "nowhere")
    assert "everything is written: base expected a checkpoint" in caplog.text
    assert await same(tmp_path / "b", buffer)


async def test_another_buffer_shares_nothing(tmp_path: Path) -> None:
    one, other = await filled(), await filled()
    await one.save(tmp_path / "a")
    await other.save(tmp_path / "b", base=tmp_path / "a")
    assert not any(shared(tmp_path / "b"))


async def test_pairs_of_numbers_are_no_complex_numbers(tmp_path: Path) -> None:
    """They lie in a file in the same way. Restored rows are known by what is in their file."""
    pairs = torch.zeros(CAPACITY, 2)
    rows = {"pairs": pairs, "numbers": torch.view_as_complex(pairs), "again": torch.view_as_complex(pairs)}
    checkpointer = Checkpointer(tmp_path)
    buffers: dict[str, Any] = {name: ReplayBuffer(TensorStorage(CAPACITY), batch_size=4) for name in rows}
    for name, buffer in buffers.items():
        await buffer.extend({"x": rows[name]})
    saved = {name: await buffer.state_dict() for name, buffer in buffers.items()}
    await checkpointer.save(0, **buffers)
    for step in range(1, 3):
        buffers = {name: ReplayBuffer(TensorStorage(CAPACITY), batch_size=4) for name in rows}
        await checkpointer.restore(**buffers)
        for name, buffer in buffers.items():
            assert difference(await buffer.state_dict(), saved[name]) is None
        await checkpointer.save(step, **buffers)
        assert all(file.stat().st_nlink > 1 for file in checkpointer.path(step).glob("data-*/*/storage/*"))


async def test_a_base_is_meant_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = await filled()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    snapshot = await buffer.snapshot()
    await snapshot.save("a")
    saving = asyncio.create_task(buffer.save("b", base="a"))
    await turns(1)
    monkeypatch.chdir(tmp_path / "elsewhere")
    await saving
    assert shared(tmp_path / "b") == [True] * 5
