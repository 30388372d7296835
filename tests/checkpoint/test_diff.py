"""In what two checkpoints differ: parts, leaves, and rows by their item numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
import torch

from asyncbuf import (
    CheckpointCorruptError,
    Checkpointer,
    CheckpointNotFoundError,
    ListStorage,
    MaxValueWriter,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorStorage,
    register_codec,
)
from asyncbuf._disk import files
from asyncbuf.checkpoint import Difference, PartDifference, RowsDifference, diff
from tests.checkpoint.helpers import Run
from tests.checkpoint.looks import damage, list_ring, listed, make_chunks_small, numbered, ring, run_of
from tests.helpers import seeded
from tests.resume_helpers import DictStorage
from tests.snapshot.forged import BackwardsWriter
from tests.version_1.cases import Step
from tests.version_1.test_version_1 import DATA

if TYPE_CHECKING:
    from io import FileIO
    from pathlib import Path


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    make_chunks_small(monkeypatch)


class Made:
    """A value that notes what it was made from."""

    decoded: ClassVar[list[Any]] = []

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    @classmethod
    def decode(cls, plain: Any) -> Made:
        cls.decoded.append(plain)
        return cls(plain)


register_codec(Made, lambda made: made.numbers, Made.decode, name="test_diff.Made")


def part(found: Difference, name: str = "buffer") -> PartDifference:
    return {each.name: each for each in found.parts}[name]


def rows(a: Path, b: Path) -> RowsDifference:
    found = part(diff(a, b)).rows
    assert found is not None
    return found


def counts(a: Path, b: Path) -> tuple[int, int, int | None]:
    found = rows(a, b)
    return found.added, found.removed, found.changed


async def saved(path: Path, buffer: ReplayBuffer) -> Path:
    await buffer.save(path)
    return path


async def both(tmp_path: Path, buffer: ReplayBuffer, change: Any) -> tuple[Path, Path]:
    """A buffer before and after a change."""
    await buffer.save(tmp_path / "a")
    await change()
    await buffer.save(tmp_path / "b")
    return tmp_path / "a", tmp_path / "b"


async def test_a_checkpoint_and_itself(tmp_path: Path) -> None:
    checkpointer = await run_of(tmp_path, 1)
    found = diff(checkpointer.path(1), checkpointer.path(1))
    assert found.is_same
    assert {each.name: each.status for each in found.parts} == {"buffer": "same", "epoch": "same", "name": "same"}
    assert rows(checkpointer.path(1), checkpointer.path(1)) == RowsDifference(45, 45, "item number", 0, 0, 0, ())


async def test_the_same_written_again(tmp_path: Path) -> None:
    kinds: list[tuple[Any, Any]] = [(TensorStorage, numbered), (ListStorage, listed)]
    for make, items in kinds:
        paths = []
        for name in ("a", "b"):
            buffer = ring(make, generator=seeded(), collate_fn=lambda data: data)
            await buffer.extend(items(30))
            paths.append(await saved(tmp_path / f"{make.__name__}-{name}", buffer))
        assert diff(*paths).is_same, diff(*paths)


@pytest.mark.parametrize("make", [ring, list_ring])
async def test_a_ring_that_went_on(make: Any, tmp_path: Path) -> None:
    items: Any = numbered if make is ring else listed
    buffer = make()
    await buffer.extend(items(30))
    a, b = await both(tmp_path, buffer, lambda: buffer.extend(items(27, 100)))
    assert counts(a, b) == (27, 12, 0)
    assert counts(b, a) == (12, 27, 0)
    found = rows(a, b)
    assert (found.a, found.b, found.by, found.is_same) == (30, 45, "item number", False)
    leaves = {leaf.path: leaf for leaf in part(diff(a, b)).leaves}
    assert leaves.keys() == {"writer/cursor", "writer/size", "writer/write_count", "ledger/overwritten"}
    assert (leaves["writer/size"].a, leaves["writer/size"].changed) == (
        next(leaf.a for leaf in leaves.values() if leaf.path == "writer/size"),
        None,
    )


async def test_rows_with_something_else_in_them(tmp_path: Path) -> None:
    paths = []
    for name, changed in (("a", []), ("b", [3, 4, 17, 44])):
        buffer = ring()
        items = {"x": torch.arange(45), "y": torch.arange(45.0), "same": torch.zeros(45, 2)}
        items["x"][changed] += 1
        items["y"][changed[:1]] = float("nan")
        await buffer.extend(items)
        paths.append(await saved(tmp_path / name, buffer))
    found = rows(*paths)
    assert (found.added, found.removed, found.changed) == (0, 0, 4)
    assert {field.path: field.rows for field in found.fields} == {"x": 4, "y": 1}
    assert rows(paths[1], paths[1]).is_same


async def test_items_with_something_else_in_them(tmp_path: Path) -> None:
    first, second = listed(45), listed(45)
    second[5]["text"] = "else"
    second[5]["steps"] = [{"reward": -0.5}] * 2
    second[6]["steps"] = [{"reward": 0.5}] * 7
    second[12]["x"] = second[12]["x"].double()
    second[44]["more"] = None
    second[30]["pair"] = [30, True]
    first[31]["array"], second[31]["array"] = np.zeros(2, "<i4"), np.zeros(2, ">i4")
    first[32]["float"], second[32]["float"] = 0.0, -0.0
    first[33]["nan"], second[33]["nan"] = float("nan"), float("nan")
    paths = []
    for name, items in (("a", first), ("b", second)):
        buffer = list_ring()
        await buffer.extend(items)
        paths.append(await saved(tmp_path / name, buffer))
    found = rows(*paths)
    assert (found.added, found.removed, found.changed) == (0, 0, 7)
    assert {field.path: field.rows for field in found.fields} == {
        "text": 1,
        "steps[]/reward": 1,
        "steps[]": 1,
        "x": 1,
        "more": 1,
        "pair": 1,
        "array": 1,
        "float": 1,
    }


async def test_values_of_registered_types_are_compared_without_them(tmp_path: Path) -> None:
    paths = []
    for name, value in (("a", 1), ("b", 2)):
        buffer = list_ring()
        changed = {"step": Step(value, 0.5), "made": Made([value])}
        await buffer.extend([changed, {"step": Step(0, 0), "made": 1}])
        paths.append(await saved(tmp_path / name, buffer))
    found = rows(*paths)
    assert found.changed == 1
    assert [field.path for field in found.fields] == ["step<Step>/obs", "made<Made>[]"]
    assert not Made.decoded


async def test_rows_that_were_removed(tmp_path: Path) -> None:
    buffer = ring()
    await buffer.extend(numbered(45))
    a, b = await both(tmp_path, buffer, lambda: buffer.remove(torch.tensor([3, 20, 44])))
    assert counts(a, b) == (0, 3, 0)
    await buffer.extend(numbered(5, 500))
    await buffer.save(tmp_path / "c")
    assert counts(tmp_path / "b", tmp_path / "c") == (5, 2, 0)
    assert counts(a, tmp_path / "c") == (5, 5, 0)


async def test_writers_of_which_numbers_are_stored(tmp_path: Path) -> None:
    buffer = ReplayBuffer(TensorStorage(20), batch_size=4, writer=BackwardsWriter())
    await buffer.extend(numbered(15))
    a, b = await both(tmp_path, buffer, lambda: buffer.extend(numbered(8, 100)))
    found = rows(a, b)
    assert (found.by, found.a, found.b) == ("item number", 15, 20)
    assert (found.added, found.removed, found.changed) == (8, 3, 0)


async def test_other_fields(tmp_path: Path) -> None:
    first, second = ring(), ring()
    await first.extend({"x": torch.arange(5), "y": torch.zeros(5)})
    await second.extend({"x": torch.arange(5), "y": torch.zeros(5, 2), "z": torch.zeros(5)})
    a, b = await saved(tmp_path / "a", first), await saved(tmp_path / "b", second)
    assert counts(a, b) == (0, 0, 0)
    leaves = {leaf.path: leaf for leaf in part(diff(a, b)).leaves if leaf.path.startswith("item")}
    assert leaves.keys() == {"item/y", "item/z"}
    assert leaves["item/z"].a is None
    assert str(leaves["item/y"].b) == "item/y: float32 [2]"
    third = ring()
    await third.extend({"else": torch.arange(5)})
    c = await saved(tmp_path / "c", third)
    assert counts(a, c) == (0, 0, None)
    assert not rows(a, c).is_same


async def test_other_storages_and_settings(tmp_path: Path) -> None:
    first, second = ring(), ring(ListStorage, sampler=SamplerWithoutReplacement(), collate_fn=lambda data: data)
    third = ReplayBuffer(TensorStorage(50), batch_size=5)
    await first.extend(numbered(5))
    await second.extend(listed(7))
    await third.extend(numbered(5))
    a, b, c = [await saved(tmp_path / name, buffer) for name, buffer in (("a", first), ("b", second), ("c", third))]
    assert {setting.name for setting in part(diff(a, b)).settings} == {"storage", "sampler"}
    assert counts(a, b) == (2, 0, None)
    settings = {setting.name: (setting.a, setting.b) for setting in part(diff(a, c)).settings}
    assert settings == {"capacity": (45, 50), "batch_size": (4, 5)}
    assert counts(a, c) == (0, 0, 0)


async def test_a_storage_of_the_user(tmp_path: Path) -> None:
    buffer = ring(DictStorage)
    await buffer.extend(numbered(3) | {"number": torch.arange(3)})
    a, b = await both(tmp_path, buffer, lambda: buffer.extend(numbered(2, 7) | {"number": torch.arange(2)}))
    assert counts(a, b) == (2, 0, 0)
    assert "storage/items/3/x" in {leaf.path for leaf in part(diff(a, b)).leaves}
    assert diff(a, a).is_same


async def test_a_buffer_that_was_never_written(tmp_path: Path) -> None:
    buffer = ring()
    a, b = await both(tmp_path, buffer, lambda: buffer.extend(numbered(2)))
    assert counts(a, b) == (2, 0, 0)
    assert diff(a, a).is_same


async def test_queues(tmp_path: Path) -> None:
    buffer = ring(prefetch=2, generator=torch.Generator().manual_seed(0))
    async with buffer:
        await buffer.extend(numbered(10))
        await buffer.sample()
        await buffer.save(tmp_path / "a")
        await buffer.sample()
        await buffer.save(tmp_path / "b")
    found = part(diff(tmp_path / "a", tmp_path / "b"))
    tickets = {leaf.path: leaf for leaf in found.leaves if leaf.path.removeprefix("prefetch/").isdigit()}
    assert tickets.keys() == {"prefetch/1", "prefetch/3"}
    assert tickets["prefetch/3"].a is None
    assert tickets["prefetch/1"].b is None


async def test_runs(tmp_path: Path) -> None:
    run = Run(0)
    checkpointer = Checkpointer(tmp_path, keep=None)
    async with run.buffer:
        await run.train(2)
        a = await checkpointer.save(1, **run.objects, only_a=1, note="x", kind=torch.ones(1))
        with torch.no_grad():
            next(run.model.parameters())[0, :2] += 1
        b = await checkpointer.save(2, **run.objects, only_b=1, note="y", kind=run.model[1])
    found = diff(a, b)
    status = {each.name: each.status for each in found.parts}
    assert status == {
        "model": "differs",
        "optimizer": "same",
        "scheduler": "same",
        "buffer": "same",
        "only_a": "only in a",
        "only_b": "only in b",
        "note": "differs",
        "kind": "differs",
    }
    (leaf,) = part(found, "model").leaves
    assert (leaf.path, leaf.changed, leaf.elements) == ("0.weight", 2, 24)
    (note,) = part(found, "note").leaves
    assert (str(note.a), str(note.b)) == (".: str = 'x'", ".: str = 'y'")
    assert part(found, "kind").settings[0].a == "value"


async def test_values_of_every_kind(tmp_path: Path) -> None:
    def value(number: int) -> dict[Any, Any]:
        return {
            "int": number,
            "bool": bool(number),
            "bytes": b"ab" * (number + 1),
            "same bytes": b"xy",
            "array": np.arange(5, dtype="<f8") * (number + 1),
            "texts": [f"{number}"] * 600,
            "same texts": ["a"] * 600,
            "scalar": np.float32(number),
            "tuple": (number, [number]),
            7: torch.zeros(3, dtype=torch.complex64) + number,
            "grad": torch.zeros(2, requires_grad=bool(number)),
            "empty": torch.zeros(0, 3),
        }

    checkpointer = Checkpointer(tmp_path)
    a, b = [await checkpointer.save(step, value=value(step)) for step in (0, 1)]
    leaves = {leaf.path: (leaf.changed, leaf.elements) for leaf in part(diff(a, b), "value").leaves}
    assert leaves == {
        "int": (None, None),
        "bool": (None, None),
        "bytes": (None, None),
        "array": (4, 5),
        "texts": (None, None),
        "scalar": (1, 1),
        "tuple/0": (None, None),
        "tuple/1/0": (None, None),
        "7": (3, 3),
        "grad": (None, None),
    }


async def test_a_buffer_and_a_run(tmp_path: Path) -> None:
    buffer = ring()
    await buffer.extend(numbered(10))
    await buffer.save(tmp_path / "a")
    path = await Checkpointer(tmp_path).save(1, buffer=buffer, other=1)
    found = diff(tmp_path / "a", path)
    assert {each.name: each.status for each in found.parts} == {"buffer": "same", "other": "only in b"}
    assert not found.is_same


async def test_only_what_differs_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = ring()
    await buffer.extend(numbered(45))
    await buffer.save(tmp_path / "a")
    await buffer.extend(numbered(5, 100))
    await buffer.save(tmp_path / "b", base=tmp_path / "a")
    seek = files.seek
    read: list[str] = []

    def note(file: FileIO, path: Path, start: int) -> None:
        if path.parent.name == "storage":
            read.append(path.name)
        seek(file, path, start)

    monkeypatch.setattr(files, "seek", note)
    assert counts(tmp_path / "a", tmp_path / "b") == (5, 5, 0)
    assert set(read) == {"00000.safetensors"}


@pytest.mark.parametrize("name", ["list-p4-w4-wrapped-passes-ragged", "nested-p4-w1-partial", "flat-p0-w1-empty"])
async def test_checkpoints_of_version_1(name: str) -> None:
    path = DATA / name / "checkpoint"
    assert diff(path, path).is_same
    other = DATA / "flat-p1-w1-wrapped" / "checkpoint"
    assert not diff(path, other).is_same


async def test_items_that_are_written_in_different_ways(tmp_path: Path) -> None:
    old = DATA.parents[1] / "version_2" / "data" / "checkpoint"
    buffer = ReplayBuffer(ListStorage(12), sampler=SamplerWithoutReplacement(), batch_size=3, prefetch=2)
    await buffer.load(old)
    await buffer.save(tmp_path / "new")
    assert counts(old, tmp_path / "new") == (0, 0, None)
    assert counts(old, old) == (0, 0, 0)


async def test_damaged_and_missing_ones(tmp_path: Path) -> None:
    checkpointer = await run_of(tmp_path, 2)
    with pytest.raises(CheckpointNotFoundError, match="step-000009"):
        diff(checkpointer.path(1), checkpointer.path(9))
    file = damage(checkpointer.path(2), "truncate")
    for pair in ((1, 2), (2, 1)):
        with pytest.raises(CheckpointCorruptError, match=str(file)):
            diff(*map(checkpointer.path, pair))


async def test_the_same_bytes_of_another_dtype_differ(tmp_path: Path) -> None:
    pairs, buffers = torch.zeros(9, 2), {name: ReplayBuffer(TensorStorage(9), batch_size=4) for name in "ab"}
    await buffers["a"].extend({"x": pairs})
    await buffers["b"].extend({"x": torch.view_as_complex(pairs)})
    for name, buffer in buffers.items():
        await buffer.save(tmp_path / name)
    found = diff(tmp_path / "a", tmp_path / "b")
    assert not found.is_same


async def test_rows_of_writers_that_keep_some(tmp_path: Path) -> None:
    best = ReplayBuffer(TensorStorage(4), writer=MaxValueWriter("number"))
    await best.extend({"number": torch.tensor([3, 1, 2, 0])})
    await best.save(tmp_path / "a")
    await best.extend({"number": torch.tensor([9, 0])})
    await best.remove([2])
    await best.save(tmp_path / "b")
    found = rows(tmp_path / "a", tmp_path / "b")
    assert found == RowsDifference(4, 3, "item number", 1, 2, 0, ())


async def test_rows_of_fixed_data_and_of_storages_that_are_not_known(tmp_path: Path) -> None:
    unknown = ReplayBuffer(DictStorage(9), batch_size=2)
    await unknown.extend({"number": torch.arange(9), "wide": torch.ones(9, 3)})
    for buffer in (ReplayBuffer.from_dataset(torch.arange(9), batch_size=2), unknown):
        folder = tmp_path / type(buffer._storage).__name__
        await buffer.save(folder / "a")
        await buffer.remove([1, 2])
        await buffer.save(folder / "b")
        assert counts(folder / "a", folder / "b")[:2] == (0, 2)
