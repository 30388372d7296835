"""A storage in files: snapshots of files that go on changing, exact resume, and how much of them is in memory."""

from __future__ import annotations

import asyncio
import gc
import io
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import (
    AsyncBufError,
    CheckpointMismatchError,
    MemmapStorage,
    ReplayBuffer,
    RowRange,
    TensorStorage,
)
from asyncbuf._disk import files
from asyncbuf.storage import _mapped_files as mapped_files
from asyncbuf.testing import assert_exact_resume, assert_same_batch
from tests.helpers import Crew, rows, seeded, within
from tests.resume_helpers import items_of, noisy
from tests.storage.mapped_helpers import drawn, folders, in_files, put, stored

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from asyncbuf import Batch


# -- checkpoints -------------------------------------------------------------------------------------------------------


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


# -- memory ------------------------------------------------------------------------------------------------------------


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
