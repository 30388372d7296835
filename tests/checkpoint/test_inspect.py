"""What a checkpoint holds, told from its manifest and the headers of its files."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import asyncbuf.checkpoint
from asyncbuf import (
    CheckpointCorruptError,
    Checkpointer,
    ListStorage,
    PrefetchError,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorStorage,
)
from asyncbuf._disk import files
from asyncbuf.checkpoint import CheckpointInfo, PartInfo, inspect, prune
from tests.checkpoint.helpers import Run
from tests.checkpoint.looks import (
    CAPACITY,
    chunks,
    damage,
    list_ring,
    listed,
    make_chunks_small,
    numbered,
    ring,
    run_of,
)
from tests.helpers import until
from tests.resume_helpers import DictStorage
from tests.snapshot.forged import BackwardsWriter, JoiningSampler, Patient
from tests.version_1.test_version_1 import DATA

if TYPE_CHECKING:
    from io import FileIO
    from pathlib import Path


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    make_chunks_small(monkeypatch)


def only_part(info: CheckpointInfo) -> PartInfo:
    (part,) = info.parts
    return part


def buffer_in(path: Path) -> Any:
    found = only_part(inspect(path)).buffer
    assert found is not None
    return found


def fields(path: Path) -> list[str]:
    return [str(leaf) for leaf in buffer_in(path).fields]


async def test_a_buffer(tmp_path: Path) -> None:
    buffer = ring(sampler=SamplerWithoutReplacement(shuffle=False), prefetch=2)
    async with buffer:
        await buffer.extend(numbered(60))
        for _ in range(3):
            await buffer.sample()
        await buffer.save(tmp_path / "a")
    info = inspect(tmp_path / "a")
    assert (info.step, info.version, info.path) == (None, 2, str(tmp_path / "a"))
    assert info.libraries["asyncbuf"] == asyncbuf.__version__
    assert abs(info.created - time.time()) < 100
    assert 0 <= info.age < 100
    on_disk = [file for file in (tmp_path / "a").rglob("*") if file.is_file()]
    assert info.files == len(on_disk)
    assert info.nbytes == info.own_nbytes == sum(file.stat().st_size for file in on_disk)
    part = only_part(info)
    assert (part.name, part.kind, part.leaves) == ("buffer", "buffer", ())
    found = part.buffer
    assert found is not None
    assert (found.storage, found.writer, found.sampler, found.limiter) == (
        "TensorStorage",
        "RoundRobinWriter",
        "SamplerWithoutReplacement",
        "MinSize",
    )
    assert (found.capacity, found.rows, found.write_count, found.batch_size, found.prefetch) == (45, 45, 60, 4, 2)
    assert (found.drawn, found.delivered, found.dropped) == (5, 3, 0)
    assert [(ticket.number, ticket.rows, ticket.is_prepared, ticket.epoch) for ticket in found.queue] == [
        (3, 4, True, 0),
        (4, 4, True, 0),
    ]
    assert [str(leaf) for leaf in found.fields] == ["x: int64 []"]
    state = {leaf.path: leaf.value for leaf in found.state}
    assert state["writer/cursor"] == "15"
    assert state["sampler/shuffle"] == "False"
    assert state["sampler/position"] == "20"


async def test_tickets_that_are_not_made_yet(tmp_path: Path) -> None:
    def fail(data: Any) -> Any:
        raise ValueError("never")

    buffer = ring(prefetch=2, transform=fail)
    async with buffer:
        await buffer.extend(numbered(10))
        with pytest.raises(PrefetchError):
            await buffer.sample()
        await buffer.save(tmp_path / "a")
    queue = buffer_in(tmp_path / "a").queue
    assert queue[0].stage == "gathered"
    assert not any(ticket.is_prepared for ticket in queue)


async def test_tickets_that_were_dropped(tmp_path: Path) -> None:
    buffer = ring(prefetch=3)
    async with buffer:
        await buffer.extend(numbered(10))
        await buffer.sample()
        await until(lambda: buffer.stats().queued == 3)
        await buffer.flush()
    await buffer.save(tmp_path / "a")
    found = buffer_in(tmp_path / "a")
    assert found.dropped == 3
    assert found.drawn == found.delivered + found.dropped + len(found.queue)


async def test_a_buffer_that_was_never_written(tmp_path: Path) -> None:
    for storage in (TensorStorage, ListStorage, DictStorage):
        path = tmp_path / storage.__name__
        await ring(storage).save(path)
        found = buffer_in(path)
        assert (found.rows, found.write_count, found.queue) == (0, 0, ())


async def test_fields_of_tensors_in_a_tree(tmp_path: Path) -> None:
    buffer = ring()
    items = {
        "obs": {"image": torch.zeros(3, 2, 2, dtype=torch.uint8), "wave": torch.zeros(3, dtype=torch.complex64)},
        "pair": (torch.zeros(3), torch.zeros(3, 0, dtype=torch.bfloat16)),
    }
    await buffer.extend(items)
    await buffer.save(tmp_path / "a")
    assert fields(tmp_path / "a") == [
        "obs/image: uint8 [2, 2]",
        "obs/wave: complex64 []",
        "pair/0: float32 []",
        "pair/1: bfloat16 [0]",
    ]


async def test_fields_of_objects(tmp_path: Path) -> None:
    buffer = list_ring()
    same = torch.zeros(2)
    await buffer.add(
        {
            "wave": torch.zeros(2, dtype=torch.complex128),
            "again": [same, same],
            "array": np.zeros((2, 3), ">f4"),
            "scalar": np.float16(1),
            "kinds": (1, 2.5, True, None, "a", b"b", bytearray(b"c"), 1j, 1 << 80),
            "torch": [torch.float32, torch.device("cpu")],
            "none": {},
            "empty": [],
            3: {(1, "x"): 1},
        }
    )
    await buffer.save(tmp_path / "a")
    assert fields(tmp_path / "a") == [
        "wave: complex128 [2]",
        "again[]: float32 [2]",
        "again[]: any dtype of any shape",
        "array: array float32 [2, 3]",
        "scalar: scalar float16",
        *[f"kinds[]: {kind}" for kind in ("int", "float", "bool", "none", "str", "bytes", "bytearray", "complex")],
        "torch[]: dtype",
        "torch[]: device",
        "none: dict",
        "empty: list",
        "3/(1, 'x'): int",
    ]


async def test_fields_of_ragged_objects(tmp_path: Path) -> None:
    buffer = list_ring()
    for number in range(4):
        await buffer.add({"t": torch.zeros(number), "a": np.zeros(number), "d": {f"k{number}": number}})
    await buffer.save(tmp_path / "a")
    assert fields(tmp_path / "a") == [
        "t: float32 of any shape",
        "a: array float64 of any shape",
        "d{}: int",
    ]


async def test_a_storage_of_the_user(tmp_path: Path) -> None:
    buffer = ring(DictStorage)
    await buffer.extend(numbered(3) | {"number": torch.arange(3)})
    await buffer.save(tmp_path / "a")
    found = buffer_in(tmp_path / "a")
    assert (found.storage, found.rows) == ("DictStorage", 3)
    assert "items/0/x: int64 []" in fields(tmp_path / "a")


async def test_parts_of_the_user(tmp_path: Path) -> None:
    buffer = ring(writer=BackwardsWriter(), limiter=Patient(), sampler=JoiningSampler(), prefetch=1)
    async with buffer:
        await buffer.extend(numbered(6))
        await buffer.sample()
        await buffer.save(tmp_path / "a")
    found = buffer_in(tmp_path / "a")
    assert (found.writer, found.limiter, found.sampler) == ("BackwardsWriter", "Patient", "JoiningSampler")
    assert (found.rows, found.write_count) == (6, None)


async def test_rows_that_were_removed(tmp_path: Path) -> None:
    buffer = ring()
    await buffer.extend(numbered(50))
    await buffer.remove(torch.arange(7))
    await buffer.save(tmp_path / "a")
    found = buffer_in(tmp_path / "a")
    assert (found.rows, found.write_count) == (38, 50)
    assert "rows/valid: int64 [38]" in map(str, found.state)


async def test_a_run(tmp_path: Path) -> None:
    run = Run(0)
    checkpointer = Checkpointer(tmp_path, rng=True)
    extra = {"t": torch.ones(2), "texts": ["a"] * 600, "nan": float("nan"), "int": 1 << 400, "tuple": (), "c": 1j}
    async with run.buffer:
        await run.train(3)
        path = await checkpointer.save(3, **run.objects, extra=extra, best=0.5, note=None)
    info = inspect(path)
    assert info.step == 3
    parts = {part.name: part for part in info.parts}
    kinds = {name: part.kind for name, part in parts.items()}
    objects = ("model", "optimizer", "scheduler", "rng")
    assert kinds == dict.fromkeys(objects, "object") | dict.fromkeys(("extra", "best", "note"), "value") | {
        "buffer": "buffer"
    }
    model = {leaf.path: leaf for leaf in parts["model"].leaves}
    assert model.keys() == run.model.state_dict().keys()
    assert all(leaf.shape == tuple(run.model.state_dict()[name].shape) for name, leaf in model.items())
    assert str(parts["best"].leaves[0]) == ".: float = 0.5"
    assert str(parts["note"].leaves[0]) == ".: none"
    assert [str(leaf) for leaf in parts["extra"].leaves] == [
        "t: float32 [2]",
        "texts: list",
        "nan: float = nan",
        "int: int = an int of 401 bits",
        "tuple: tuple = ()",
        "c: complex = 1j",
    ]
    optimizer = {leaf.path: leaf for leaf in parts["optimizer"].leaves}
    assert optimizer["param_groups/0/initial_lr"].described == "float = 0.01"
    assert optimizer["state/0/exp_avg"].described == "float32 [8, 3]"
    assert sum(part.nbytes for part in info.parts) < info.nbytes
    assert parts["buffer"].buffer is not None
    assert parts["buffer"].buffer.rows == 15


async def test_shared_bytes(tmp_path: Path) -> None:
    checkpointer = await run_of(tmp_path, 3)
    info = inspect(checkpointer.path(3))
    shared = sum(file.stat().st_size for file in chunks(checkpointer.path(3)) if file.stat().st_nlink > 1)
    assert shared
    assert info.shared_nbytes == shared
    part = {part.name: part for part in info.parts}["buffer"]
    assert part.shared_nbytes == shared
    assert prune(tmp_path, keep=1).removed == (2, 1)
    assert inspect(checkpointer.path(3)).shared_nbytes == 0


@pytest.mark.parametrize("path", sorted(DATA.glob("*/checkpoint")), ids=lambda path: path.parent.name)
def test_checkpoints_of_version_1(path: Path) -> None:
    is_run = not (path / "manifest.json").exists()
    info = inspect(path / "step-000007" if is_run else path)
    assert info.version == 1
    assert info.step == (7 if is_run else None)
    found = info.parts[0].buffer
    assert found is not None
    assert found.capacity == 24
    assert found.limiter is None
    assert found.rows == min(24, found.write_count or 0)
    assert found.drawn == (found.delivered or 0) + len(found.queue)
    assert bool(found.fields) == (found.rows > 0)


def test_items_of_version_2() -> None:
    found = fields(DATA.parents[1] / "version_2" / "data" / "checkpoint")
    assert found[:3] == ["x: float32 [3]", "same/0: float32 [2]", "same/1: float32 [2]"]


async def test_no_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = ReplayBuffer(TensorStorage(1000), batch_size=4)
    monkeypatch.undo()  # chunks of the usual size
    await buffer.extend({"x": torch.zeros(1000, 500)})
    await buffer.save(tmp_path / "a")
    read_into = files.read_into
    nbytes = [0]

    def count(file: FileIO, path: Path, content: memoryview) -> int:
        nbytes[0] += len(content)
        return read_into(file, path, content)

    monkeypatch.setattr(files, "read_into", count)
    assert buffer_in(tmp_path / "a").rows == 1000
    assert nbytes[0] < 20_000


@pytest.mark.parametrize("how", ["truncate", "longer", "delete", "link", "directory"])
async def test_a_damaged_file_is_named(how: str, tmp_path: Path) -> None:
    checkpointer = await run_of(tmp_path, 1)
    file = damage(checkpointer.path(1), how)
    with pytest.raises(CheckpointCorruptError, match=str(file)):
        inspect(checkpointer.path(1))


async def test_results_are_plain(tmp_path: Path) -> None:
    checkpointer = await run_of(tmp_path, 1)
    info = inspect(str(checkpointer.path(1)))
    again = json.loads(json.dumps(dataclasses.asdict(info)))
    parts = {part["name"]: part for part in again["parts"]}
    assert parts["buffer"]["buffer"]["rows"] == CAPACITY
    assert again["step"] == 1


async def test_nothing_is_left_locked(tmp_path: Path) -> None:
    buffer = list_ring()
    await buffer.extend(listed(10))
    for _ in range(3):
        await buffer.save(tmp_path / "a")
        inspect(tmp_path / "a")
    assert len(list((tmp_path / "a").glob("data-*"))) == 1


def test_names_are_there_when_asked_for() -> None:
    for name in asyncbuf.checkpoint.__all__:
        assert getattr(asyncbuf.checkpoint, name).__doc__
    with pytest.raises(AttributeError, match="nothing"):
        _ = asyncbuf.checkpoint.nothing
