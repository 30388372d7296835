"""Items as rows of memory: where rows are written, what is read, and what memory it takes."""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncbuf import RowRange, SchemaError, TensorStorage
from asyncbuf.storage._leaf import Field
from tests.storage.tensor_helpers import DTYPES, NUMPY_DTYPES, add, assert_same, extend, gather


def test_runs_that_wrap_around() -> None:
    storage = TensorStorage(5)
    prepared = storage.prepare({"x": torch.arange(4), "y": torch.arange(4.0)[:, None] * torch.ones(1000)})
    storage.write(prepared, [RowRange(3, 0, 2), RowRange(0, 2, 2)])
    batch = gather(storage, 3, 4, 0, 1)
    assert batch["x"].tolist() == [0, 1, 2, 3]
    assert batch["y"][:, 999].tolist() == [0, 1, 2, 3]


def test_items_of_no_run_are_not_written() -> None:
    storage = TensorStorage(4)
    extend(storage, {"x": torch.full((4,), 9)})
    storage.write(storage.prepare({"x": torch.arange(6)}), [RowRange(1, 4, 2)])
    assert gather(storage, 0, 1, 2, 3)["x"].tolist() == [9, 4, 5, 9]


class _Program(NamedTuple):
    """Fields, and writes of them, each by runs."""

    capacity: int
    fields: dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
    writes: list[tuple[int, list[RowRange]]]
    rows: list[int]


@st.composite
def programs(draw: st.DrawFn) -> _Program:
    capacity = draw(st.integers(1, 9))
    dtypes = st.sampled_from(NUMPY_DTYPES).map(np.dtype)
    shapes = st.sampled_from([(), (1,), (3,), (2, 2), (0,), (300,), (2, 1100)])
    fields = draw(st.dictionaries(st.sampled_from("abcde"), st.tuples(dtypes, shapes), min_size=1))
    writes = []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(1, 12))
        runs = []
        for _ in range(draw(st.integers(0, 3))):
            length = draw(st.integers(0, min(count, capacity)))
            row, item = draw(st.integers(0, capacity - length)), draw(st.integers(0, count - length))
            runs.append(RowRange(row, item, length))
        writes.append((count, runs))
    return _Program(capacity, fields, writes, draw(st.lists(st.integers(0, capacity - 1), max_size=12)))


@given(programs())
@settings(max_examples=60, deadline=None)
def test_writes_and_gathers_against_plain_arrays(program: _Program) -> None:
    storage = TensorStorage(program.capacity)
    model = {name: np.zeros((program.capacity, *shape), dtype) for name, (dtype, shape) in program.fields.items()}
    generator = np.random.default_rng(0)
    for count, runs in program.writes:
        items = {
            name: generator.integers(0, 255, (count, *shape)).astype(dtype)
            for name, (dtype, shape) in program.fields.items()
        }
        storage.write(storage.prepare(items), runs)
        for run in runs:
            for name, array in items.items():
                model[name][run.row : run.row + run.count] = array[run.item : run.item + run.count]
    batch = storage.gather(torch.tensor(program.rows, dtype=torch.int64))
    assert list(batch) == list(program.fields)
    for name, array in model.items():
        assert_same(batch[name], torch.from_numpy(array[program.rows]))


def test_what_the_caller_does_to_its_items_afterwards_does_not_show() -> None:
    tensors, arrays = {"x": torch.ones(2, 3)}, {"x": np.ones((2, 3), np.float32)}
    item = {"x": torch.ones(3)}
    storage = TensorStorage(5)
    extend(storage, tensors)
    extend(storage, arrays, row=2)
    add(storage, item, row=4)
    tensors["x"].fill_(7)
    arrays["x"].fill(7)
    item["x"].fill_(7)
    item.clear()
    assert_same(gather(storage, *range(5))["x"], torch.ones(5, 3))


def test_batches_are_fresh_memory() -> None:
    storage = TensorStorage(2)
    extend(storage, {"small": torch.ones(2), "flag": torch.ones(2) > 0, "large": torch.ones(2, 1000)})
    before = gather(storage, 0, 1)
    extend(storage, {"small": torch.zeros(2), "flag": torch.zeros(2) > 0, "large": torch.zeros(2, 1000)})
    assert before["small"].all()
    assert before["flag"].all()
    assert before["large"].all()
    after = gather(storage, 0, 1)
    for leaf in after.values():
        leaf.fill_(1)
    assert not any(leaf.any() for leaf in gather(storage, 0, 1).values())


def test_fields_of_a_batch_do_not_overlap() -> None:
    storage = TensorStorage(3)
    extend(storage, {name: torch.zeros(3, 2, dtype=dtype) for name, dtype in zip("abc", DTYPES[:3], strict=True)})
    batch = gather(storage, 0, 1)
    batch["b"].fill_(255)
    assert not batch["a"].any()
    assert not batch["c"].view(torch.int16).any()


def test_rows_that_were_not_written_are_zero() -> None:
    storage = TensorStorage(3)
    extend(storage, {"x": torch.ones(1, 2), "y": torch.ones(1, dtype=torch.int8)}, row=1)
    assert gather(storage, 0, 1, 2)["x"].tolist() == [[0, 0], [1, 1], [0, 0]]
    assert gather(storage, 0, 1, 2)["y"].tolist() == [0, 1, 0]


def test_clear_keeps_the_structure() -> None:
    storage = TensorStorage(3)
    extend(storage, {"x": torch.ones(3)})
    storage.clear()
    assert storage.fields == (Field("x", torch.float32, ()),)
    with pytest.raises(SchemaError):
        extend(storage, {"y": torch.ones(3)})
    extend(storage, {"x": torch.zeros(2)})
    assert gather(storage, 0, 1)["x"].tolist() == [0, 0]


@pytest.mark.parametrize("inner", [{"x": 1.0}, [1.0], {"x": {"y": 1.0}}], ids=str)
def test_a_tensor_in_the_place_of_a_container_with_one_leaf_is_refused(inner: Any) -> None:
    storage = TensorStorage(4)
    storage.write(storage.prepare_one({"a": inner}), [RowRange(0, 0, 1)])
    for wrong in (torch.tensor(2.0), np.array(2.0, np.float32), 2.0):
        with pytest.raises(SchemaError, match=r"structure differs at a: expected .*, found leaf"):
            storage.prepare_one({"a": wrong})
    with pytest.raises(SchemaError, match=r"structure differs at a: expected .*, found leaf of type Tensor"):
        storage.prepare({"a": torch.zeros(3)})


def test_gather_before_the_first_write() -> None:
    with pytest.raises(SchemaError, match="expected written rows, found an empty storage"):
        gather(TensorStorage(3), 0)


def test_structure_is_decided_by_the_first_write_and_not_by_what_was_prepared() -> None:
    storage = TensorStorage(2)
    early = storage.prepare({"x": torch.ones(2)})
    assert storage.is_current(early)
    assert not storage.fields
    assert storage.gather_nbytes(5) == 0
    first = storage.prepare({"y": torch.ones(2, 3)})
    storage.write(first, [RowRange(0, 0, 2)])
    assert storage.fields == (Field("y", torch.float32, (3,)),)
    assert not storage.is_current(early)
    assert storage.is_current(storage.prepare({"y": torch.ones(1, 3)}))


def test_sizes_in_bytes() -> None:
    storage = TensorStorage(10)
    first = storage.prepare({"x": torch.zeros(4, 25, dtype=torch.float32)})
    assert (first.count, first.nbytes) == (4, 400)
    storage.write(first, [RowRange(0, 0, 4)])
    assert storage.prepare({"x": torch.zeros(3, 25)}).nbytes == 300
    assert storage.prepare_one({"x": torch.zeros(25)}).nbytes == 100
    assert storage.gather_nbytes(7) == 700
    mixed = TensorStorage(10)
    extend(mixed, {"x": torch.zeros(1, 600), "y": torch.zeros(1), "z": torch.zeros(1)})
    # What is moved: the column of 2400 bytes, and the two others side by side.
    assert mixed.gather_nbytes(2) == 2 * (2400 + 8)


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("fields", [("x",), ("x", "y")], ids=["lone", "packed"])
def test_memory_becomes_real_only_where_it_is_written(fields: tuple[str, ...]) -> None:
    before = _resident_bytes()
    storage = TensorStorage(10**9)
    items = {name: torch.full((1000, 100 // len(fields)), 7, dtype=torch.uint8) for name in fields}
    extend(storage, items)
    extend(storage, items, row=10**9 - 1000)
    batch = gather(storage, 0, 999, 10**9 - 1)
    # What is written is 0.2 MB; a huge page is up to 2 MB.
    assert _resident_bytes() - before < 32 * 2**20
    assert all((leaf == 7).all() for leaf in batch.values())
