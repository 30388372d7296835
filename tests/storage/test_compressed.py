"""Compressed rows: the same bits come back, in less memory, through every checkpoint and codec."""

from __future__ import annotations

import importlib.util
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import (
    CheckpointCorruptError,
    CheckpointError,
    CompressedStorage,
    ReplayBuffer,
    RowRange,
    TensorStorage,
)
from asyncbuf.storage import _codecs as codecs
from asyncbuf.testing import assert_same_batch
from tests.helpers import seeded, within

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from asyncbuf import Batch

CODECS = [
    pytest.param(
        "zstd", marks=pytest.mark.skipif(importlib.util.find_spec("zstandard") is None, reason="no zstandard")
    ),
    "zlib",
]


def frames(count: int, start: int = 0) -> dict[str, torch.Tensor]:
    """Images that are mostly flat, and noise."""
    number = torch.arange(start, start + count)
    image = number[:, None, None, None].to(torch.uint8).repeat(1, 84, 84, 4)
    noise = [torch.randint(256, (600,), generator=seeded(int(n)), dtype=torch.uint8) for n in number]
    return {"image": image, "noise": torch.stack(noise), "number": number}


def put(storage: TensorStorage, items: Any, row: int = 0) -> None:
    count = len(items["number"])
    storage.write(storage.prepare(items), [RowRange(row, 0, count)])


def state_of(codec: str, count: int = 9) -> dict[str, Any]:
    storage = CompressedStorage(12, codec=codec)
    put(storage, frames(count))
    return storage.state_dict()


def same(storage: TensorStorage, items: dict[str, torch.Tensor]) -> None:
    found = storage.gather(torch.arange(len(items["number"])))
    assert found.keys() == items.keys()
    for key, leaf in items.items():
        assert found[key].dtype is leaf.dtype
        assert found[key].equal(leaf), key


@pytest.mark.parametrize("codec", CODECS)
def test_it_takes_less_memory(codec: str) -> None:
    storage = CompressedStorage(40, codec=codec)
    assert storage.stored_nbytes == 0
    put(storage, frames(40))
    same(storage, frames(40))
    # An image takes next to nothing, the noise as many bytes as before.
    assert 40 * 608 < storage.stored_nbytes < 40 * (608 + 400)


@pytest.mark.parametrize("codec", CODECS)
def test_leaves_of_every_kind(codec: str) -> None:
    shape = (3, 400)
    items = {
        "half": torch.randn(shape).to(torch.bfloat16),
        "eight": torch.randn(shape).to(torch.float8_e4m3fn),
        "complex": torch.randn(shape, dtype=torch.complex64),
        "bool": torch.randn(3, 40, 40) > 0,
        "nan": torch.full(shape, torch.nan),
        "strided": torch.randn(400, 3).t(),
        "empty": torch.empty(3, 0, 700),
        "number": torch.arange(3),
    }
    storage = CompressedStorage(5, codec=codec)
    storage.write(storage.prepare(items), [RowRange(1, 0, 3)])
    storage.write(storage.prepare_one({key: leaf[0] for key, leaf in items.items()}), [RowRange(0, 0, 1)])
    found = storage.gather(torch.tensor([0, 1, 2, 3]))
    for key, leaf in items.items():
        expected = torch.cat([leaf[:1], leaf])
        bits = (found[key].contiguous(), expected.contiguous())
        assert found[key].dtype is leaf.dtype
        assert found[key].shape == expected.shape
        one, other = (each.reshape(-1).view(torch.uint8) if each.numel() else each for each in bits)
        assert one.equal(other), key


def test_items_that_are_not_kept_are_not_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = CompressedStorage(4, codec="zlib")
    rows: list[int] = []
    encode = codecs.Codec.encode

    def noted(codec: codecs.Codec, row: Any) -> bytes:
        rows.append(len(row))
        return encode(codec, row)

    monkeypatch.setattr(codecs.Codec, "encode", noted)
    storage.write(storage.prepare(frames(10)), [RowRange(0, 6, 4)])
    assert len(rows) == 2 * 4
    same(storage, frames(4, 6))


async def test_removed_items_take_no_memory() -> None:
    storage = CompressedStorage(40)
    buffer = ReplayBuffer(storage, batch_size=4, generator=seeded())
    await buffer.extend(frames(40))
    before = storage.stored_nbytes
    snapshot = await buffer.snapshot()
    assert await buffer.remove(torch.arange(0, 40, 2)) == 20
    assert storage.stored_nbytes < 0.6 * before
    later = await buffer.snapshot()
    for some, count in ((snapshot, 40), (later, 20)):
        other = ReplayBuffer(CompressedStorage(40), batch_size=4, generator=seeded())
        await other.restore(some)
        async with other:
            batch = await other.sample(400)
        assert len(set(batch["number"].tolist())) == count
        assert batch["image"][:, 5, 5, 2].equal(batch["number"].to(torch.uint8))
    await buffer.extend(frames(30, 100))
    assert len(buffer) == 40


@pytest.mark.parametrize("new", CODECS)
@pytest.mark.parametrize("old", CODECS)
async def test_a_checkpoint_of_any_codec_is_loaded(old: str, new: str, tmp_path: Path) -> None:
    source = ReplayBuffer(CompressedStorage(40, codec=old), batch_size=4, prefetch=1, generator=seeded())
    await source.extend(frames(40))
    await source.save(tmp_path / "saved")
    before = files_of(tmp_path / "saved")
    storage = CompressedStorage(40, codec=new)
    target = ReplayBuffer(storage, batch_size=4, prefetch=1, generator=seeded(9))
    await target.load(tmp_path / "saved")
    same(storage, frames(40))
    await target.save(tmp_path / "saved")
    # The chunk is written again only where it has other bytes.
    assert (files_of(tmp_path / "saved") == before) == (old == new)
    await source.load(tmp_path / "saved")
    async with source, target:
        for _ in range(3):
            assert_same_batch(await source.sample(), await target.sample())


def files_of(path: Path) -> set[int]:
    return {file.stat().st_ino for file in path.glob("*/storage/*.safetensors")}


async def test_unchanged_chunks_get_a_second_name(tmp_path: Path) -> None:
    buffer = ReplayBuffer(CompressedStorage(3000), batch_size=4, generator=seeded())
    await buffer.extend(frames(3000))
    await buffer.save(tmp_path / "saved")
    before = files_of(tmp_path / "saved")
    await buffer.extend(frames(1, 3000))
    await buffer.save(tmp_path / "saved")
    assert len(before) >= 3
    assert len(files_of(tmp_path / "saved") - before) == 1
    assert sum(file.stat().st_size for file in (tmp_path / "saved").rglob("*.safetensors")) < 5_000_000


FORGED: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "bytes": lambda chunk: chunk["zlib/image"].__setitem__(slice(2, 9), 7),
    "fewer-bytes": lambda chunk: chunk.update({"zlib/image": chunk["zlib/image"][:-1]}),
    "dtype": lambda chunk: chunk.update({"zlib/image": chunk["zlib/image"].to(torch.int16)}),
    "no-bytes": lambda chunk: chunk.pop("zlib/image"),
    "other-name": lambda chunk: chunk.update({"zstd/image": chunk.pop("zlib/image")}),
    "no-codec": lambda chunk: chunk.update({"lzma/image": chunk.pop("zlib/image")}),
    "descending": lambda chunk: chunk["offsets/image"].__setitem__(3, 0),
    "beyond": lambda chunk: chunk["offsets/image"].__setitem__(-1, 10**6),
    "first": lambda chunk: chunk["offsets/image"].__setitem__(0, 1),
    "offsets-dtype": lambda chunk: chunk.update({"offsets/image": chunk["offsets/image"].float()}),
    "offsets-shape": lambda chunk: chunk.update({"offsets/image": chunk["offsets/image"][None]}),
    "no-offsets": lambda chunk: chunk.update({"offsets/image": torch.empty(0, dtype=torch.int64)}),
    "fewer-rows": lambda chunk: chunk.update({"rows/number": chunk["rows/number"][:-1]}),
    "rows-dtype": lambda chunk: chunk.update({"rows/number": chunk["rows/number"].float()}),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
def test_a_forged_chunk_is_refused_and_changes_nothing(change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    storage = CompressedStorage(12, codec="zlib")
    put(storage, frames(5, 50))
    state = state_of("zlib")
    change(state["chunks"][0])
    with pytest.raises(CheckpointError, match="expected"):
        storage.load_state_dict(state)
    same(storage, frames(5, 50))


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_that_become_more_than_they_should(codec: str) -> None:
    state = state_of(codec, 1)
    (chunk,) = state["chunks"]
    kind = codecs.CODECS[codec](1)
    bomb = kind.encode(torch.zeros(10_000_000, dtype=torch.uint8).numpy())
    chunk[f"{codec}/image"] = torch.frombuffer(bytearray(bomb), dtype=torch.uint8)
    chunk["offsets/image"] = torch.tensor([0, len(bomb)])
    with pytest.raises(CheckpointCorruptError, match="expected 28224 bytes"):
        CompressedStorage(12, codec=codec).load_state_dict(state)


def test_too_many_rows_and_other_descriptions_are_refused() -> None:
    with pytest.raises(CheckpointError, match="at most 5 rows"):
        CompressedStorage(5).load_state_dict(state_of("zlib"))
    plain = TensorStorage(12)
    put(plain, frames(3))
    metas: list[Any] = [plain.state_dict()["meta"], {"compressed": None}, {"compressed": {}}, 3]
    for meta in metas:
        with pytest.raises(CheckpointCorruptError, match="expected a description"):
            CompressedStorage(12).load_state_dict({"meta": meta, "chunks": []})


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def no_zstd(name: str, *args: Any) -> Any:
        return None if name == "zstandard" else find(name, *args)

    def import_module(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    state = state_of("zstd") if find("zstandard") is not None else None
    monkeypatch.setattr(importlib.util, "find_spec", no_zstd)
    monkeypatch.setattr(importlib, "import_module", import_module)
    storage = CompressedStorage(12)
    put(storage, frames(9))
    same(storage, frames(9))
    assert any(name.startswith("zlib/") for name in storage.state_dict()["chunks"][0])
    with pytest.raises(ImportError, match=r"pip install asyncbuf\[zstd\]"):
        CompressedStorage(12, codec="zstd")
    if state is not None:
        with pytest.raises(CheckpointError, match="expected that the codec zstd is installed"):
            storage.load_state_dict(state)
        same(storage, frames(9))


async def test_same_batches_as_without() -> None:
    batches: list[list[Batch]] = []
    for storage in (TensorStorage(30), CompressedStorage(30)):
        async with ReplayBuffer(storage, batch_size=5, prefetch=3, generator=seeded()) as buffer:
            found: list[Batch] = []
            for number in range(8):
                await buffer.extend(frames(7, 7 * number))
                found.append(await within(buffer.sample()))
            batches.append(found)
    for one, other in zip(*batches, strict=True):
        assert_same_batch(one, other)


def test_a_pickle_has_the_compressed_bytes() -> None:
    storage = CompressedStorage(40)
    put(storage, frames(40))
    content = pickle.dumps(storage)
    assert len(content) < 100_000
    same(pickle.loads(content), frames(40))
