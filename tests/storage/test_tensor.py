"""Items as rows of memory."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from asyncbuf import RowRange, SchemaError, TensorStorage
from asyncbuf.storage.leaf import Field

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.complex64,
    torch.complex128,
]
NUMPY_DTYPES = ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"]


class Pair(NamedTuple):
    one: Any
    two: Any


@dataclasses.dataclass
class Step:
    obs: Any
    reward: Any


def extend(storage: TensorStorage, items: Any, row: int = 0) -> None:
    prepared = storage.prepare(items)
    storage.write(prepared, [RowRange(row, 0, prepared.count)])


def add(storage: TensorStorage, item: Any, row: int = 0) -> None:
    storage.write(storage.prepare_one(item), [RowRange(row, 0, 1)])


def gather(storage: TensorStorage, *rows: int) -> Any:
    return storage.gather(torch.tensor(rows, dtype=torch.int64))


def as_bytes(tensor: torch.Tensor) -> bytes:
    """The bits of a tensor in order, to which nan is equal to itself and 0.0 is not -0.0."""
    dense = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert isinstance(found, torch.Tensor)
    assert found.dtype is expected.dtype
    assert found.shape == expected.shape
    assert as_bytes(found) == as_bytes(expected)


def random_tensor(dtype: torch.dtype, shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """Any bits that the dtype can have."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
    size = torch.empty(0, dtype=dtype).element_size()
    count = int(np.prod(shape, dtype=np.int64))
    return torch.randint(0, 256, (count * size,), generator=generator, dtype=torch.uint8).view(dtype).reshape(*shape)


# -- what can be stored ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 3), (700,)], ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    storage = TensorStorage(6)
    # The neighbours move the field away from the start of the row.
    items = {"x": random_tensor(dtype, (5, *shape)), "wide": torch.zeros(5, 3), "flag": torch.ones(5) > 0}
    extend(storage, items)
    batch = gather(storage, 4, 0, 2, 2)
    assert_same(batch["x"], items["x"][[4, 0, 2, 2]])
    assert_same(batch["flag"], torch.ones(4) > 0)
    add(storage, {name: leaf[1] for name, leaf in items.items()}, row=5)
    assert_same(gather(storage, 5)["x"], items["x"][1:2])


@pytest.mark.parametrize("code", NUMPY_DTYPES)
@pytest.mark.parametrize("order", ["<", ">"])
def test_numpy_arrays_of_either_byte_order(code: str, order: str) -> None:
    values = np.array([[0, 1], [2, 3], [1, 0]]).astype(code)
    items = values.astype(np.dtype(order + code))
    storage = TensorStorage(4)
    extend(storage, {"x": items})
    add(storage, {"x": items[1]}, row=3)
    assert_same(gather(storage, 2, 0, 3)["x"], torch.from_numpy(values[[2, 0, 1]]))


def test_numpy_arrays_and_tensors_of_the_same_dtype_go_together() -> None:
    storage = TensorStorage(6)
    extend(storage, {"x": np.array([1, 2], np.float32)})
    extend(storage, {"x": torch.tensor([3.0, 4.0])}, row=2)
    add(storage, {"x": np.float32(5)}, row=4)
    add(storage, {"x": np.array(6, ">f4")}, row=5)
    assert_same(gather(storage, *range(6))["x"], torch.tensor([1.0, 2, 3, 4, 5, 6]))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 5)], ids=str)
@pytest.mark.parametrize("capacity", [1, 4])
def test_fields_without_elements(shape: tuple[int, ...], capacity: int) -> None:
    items = {"x": torch.zeros(1, *shape), "y": torch.tensor([[1, 2]]), "z": torch.zeros(1, *shape, dtype=torch.bool)}
    storage = TensorStorage(capacity)
    extend(storage, items)
    batch = gather(storage, 0, 0, 0)
    assert_same(batch["x"], torch.zeros(3, *shape))
    assert_same(batch["z"], torch.zeros(3, *shape, dtype=torch.bool))
    assert_same(batch["y"], torch.tensor([[1, 2]] * 3))


def test_nothing_but_fields_without_elements() -> None:
    storage = TensorStorage(3)
    extend(storage, {"x": torch.zeros(2, 0), "y": np.zeros((2, 3, 0), np.int16)})
    batch = gather(storage, 1, 0)
    assert_same(batch["x"], torch.zeros(2, 0))
    assert_same(batch["y"], torch.zeros(2, 3, 0, dtype=torch.int16))
    assert storage.gather_nbytes(2) == 0


def test_gather_of_no_rows() -> None:
    storage = TensorStorage(3)
    extend(storage, {"x": torch.zeros(2, 5), "y": torch.zeros(2, 1000), "z": torch.zeros(2, 0)})
    batch = gather(storage)
    assert {name: tuple(leaf.shape) for name, leaf in batch.items()} == {"x": (0, 5), "y": (0, 1000), "z": (0, 0)}


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1.5, -2.0, 3.25], torch.float32),
        ([1.5, 2, float("inf")], torch.float32),
        ([1, -(2**63), 2**63 - 1], torch.int64),
        ([True, False, True], torch.bool),
        ([1 + 2j, 3, 4.5], torch.complex64),
    ],
    ids=["float", "float and int", "int", "bool", "complex"],
)
def test_python_numbers(values: list[Any], dtype: torch.dtype) -> None:
    storage = TensorStorage(3)
    for row, value in enumerate(values):
        add(storage, {"x": value, "y": torch.zeros(2)}, row)
    assert_same(gather(storage, 0, 1, 2)["x"], torch.tensor(values, dtype=dtype))


def test_python_float_takes_the_default_dtype_of_the_time() -> None:
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        storage = TensorStorage(2)
        add(storage, {"x": 0.1})
        torch.set_default_dtype(torch.bfloat16)
        other = TensorStorage(2)
        add(other, {"x": 0.1})
    finally:
        torch.set_default_dtype(default)
    assert_same(gather(storage, 0)["x"], torch.tensor([0.1], dtype=torch.float64))
    assert_same(gather(other, 0)["x"], torch.tensor([0.1], dtype=torch.bfloat16))
    add(storage, {"x": 0.1}, row=1)
    assert_same(gather(storage, 1)["x"], torch.tensor([0.1], dtype=torch.float64))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_python_numbers_take_the_dtype_of_the_field(dtype: torch.dtype) -> None:
    storage = TensorStorage(2)
    extend(storage, {"x": torch.zeros(2, dtype=dtype)})
    value: Any = True if dtype is torch.bool else 1
    add(storage, {"x": value}, row=1)
    assert_same(gather(storage, 1)["x"], torch.tensor([value], dtype=dtype))


@pytest.mark.parametrize(
    ("dtype", "least", "most"),
    [
        (torch.uint8, 0, 255),
        (torch.uint16, 0, 2**16 - 1),
        (torch.uint32, 0, 2**32 - 1),
        (torch.uint64, 0, 2**64 - 1),
        (torch.int8, -128, 127),
        (torch.int16, -(2**15), 2**15 - 1),
        (torch.int32, -(2**31), 2**31 - 1),
        (torch.int64, -(2**63), 2**63 - 1),
    ],
    ids=str,
)
def test_python_int_fits_or_is_refused(dtype: torch.dtype, least: int, most: int) -> None:
    storage = TensorStorage(2)
    extend(storage, {"x": torch.ones(2, dtype=dtype)})
    for value in (least - 1, most + 1, 2**70):
        with pytest.raises(SchemaError, match=f"x: expected .*{dtype}|x: expected an integer of 64 bits"):
            add(storage, {"x": value})
    assert_same(gather(storage, 0, 1)["x"], torch.ones(2, dtype=dtype))
    add(storage, {"x": least}, row=0)
    add(storage, {"x": most}, row=1)
    assert gather(storage, 0, 1)["x"].tolist() == [least, most]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn, torch.complex64], ids=str)
@pytest.mark.parametrize("value", [1e300, 2**62], ids=["float", "int"])
def test_number_beyond_the_range_of_the_field(dtype: torch.dtype, value: float) -> None:
    storage = TensorStorage(1)
    extend(storage, {"x": torch.ones(1, dtype=dtype)})
    with contextlib.suppress(SchemaError):
        add(storage, {"x": value})
    # It was refused, or it is there: not infinite, not nan, not the largest number that there is.
    stored = gather(storage, 0)["x"].to(torch.complex128).real.item()
    assert stored in (1.0, value)


# -- where tensors come from -------------------------------------------------------------------------------------------


def test_lazy_conjugate_and_negative() -> None:
    values = torch.tensor([[1 + 2j, 3 - 4j], [5j, 6 + 0j]])
    conjugate, negative = values.conj(), values.conj().imag
    assert conjugate.is_conj()
    assert negative.is_neg()
    storage = TensorStorage(2)
    extend(storage, {"c": conjugate, "n": negative})
    batch = gather(storage, 0, 1)
    assert batch["c"].tolist() == [[1 - 2j, 3 + 4j], [-5j, 6 + 0j]]
    assert batch["n"].tolist() == [[-2.0, 4.0], [-5.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_tensors_that_require_grad_are_stored_without(dtype: torch.dtype) -> None:
    leaf = torch.ones(3, 2, dtype=dtype, requires_grad=True)
    storage = TensorStorage(4)
    extend(storage, {"leaf": leaf, "made": leaf * 2, "parameter": torch.nn.Parameter(leaf.detach().clone())})
    add(storage, {"leaf": leaf[0], "made": leaf[0] * 3, "parameter": leaf[1]}, row=3)
    batch = gather(storage, 0, 3)
    assert not any(tensor.requires_grad for tensor in batch.values())
    assert_same(batch["made"], torch.tensor([[2, 2], [3, 3]], dtype=dtype))
    assert leaf.requires_grad
    assert leaf.grad is None


def test_inference_tensors() -> None:
    with torch.inference_mode():
        items = {"x": torch.arange(3)}
    storage = TensorStorage(3)
    extend(storage, items)
    assert_same(gather(storage, 2, 1)["x"], torch.tensor([2, 1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_tensors_that_are_not_contiguous(dtype: torch.dtype) -> None:
    base = random_tensor(dtype, (6, 4, 5), seed=1)
    shapes = {
        "transposed": base.permute(1, 2, 0),
        "strided": base[::2, :, 1::2].transpose(0, 1),
        "expanded": base[0, :, :1].expand(4, 7),
        "offset": base[2, :, 3],
    }
    assert not any(tensor.is_contiguous() for tensor in shapes.values())
    storage = TensorStorage(4)
    extend(storage, shapes)
    batch = gather(storage, 3, 1)
    for name, tensor in shapes.items():
        assert_same(batch[name], tensor[[3, 1]])


def test_arrays_that_are_read_backwards_or_read_only() -> None:
    values = np.arange(12, dtype=np.int16).reshape(4, 3)
    fixed = values.copy()
    fixed.flags.writeable = False
    storage = TensorStorage(4)
    extend(storage, {"backwards": values[::-1, ::-1], "fixed": fixed, "fortran": np.asfortranarray(values)})
    batch = gather(storage, 0, 3)
    assert batch["backwards"].tolist() == [[11, 10, 9], [2, 1, 0]]
    assert batch["fixed"].tolist() == batch["fortran"].tolist() == [[0, 1, 2], [9, 10, 11]]


@pytest.mark.parametrize(
    "make",
    [
        lambda x, y: {"a": x, "b": {"c": y}},
        lambda x, y: (x, [y]),
        Pair,
        Step,
        lambda x, y: Step(Pair(x, y), {"a": x}),
    ],
    ids=["dict", "tuple", "namedtuple", "dataclass", "nested"],
)
def test_containers_come_back(make: Callable[[Any, Any], Any]) -> None:
    one, two = torch.arange(4), torch.arange(8.0).reshape(4, 2)
    storage = TensorStorage(5)
    extend(storage, make(one, two))
    add(storage, make(one[3], two[3]), row=4)
    assert repr(gather(storage, 2, 4)) == repr(make(one[[2, 3]], two[[2, 3]]))


def test_lone_tensor() -> None:
    storage = TensorStorage(3)
    extend(storage, torch.arange(3))
    assert_same(gather(storage, 2, 0), torch.tensor([2, 0]))
    assert storage.fields == (Field(".", torch.int64, ()),)


def test_tensordicts_come_back() -> None:
    items = TensorDict(
        {"a": torch.arange(3), "n": TensorDict({"b": torch.ones(3, 2, 4)}, batch_size=[3, 2])}, batch_size=[3]
    )
    storage = TensorStorage(4)
    extend(storage, items)
    add(storage, items[1], row=3)
    batch = gather(storage, 3, 2, 0, 1)
    assert isinstance(batch, TensorDict)
    assert batch.batch_size == torch.Size([4])
    assert batch["n"].batch_size == torch.Size([4, 2])
    assert_same(batch["a"], torch.tensor([1, 2, 0, 1]))
    assert_same(batch["n", "b"], torch.ones(4, 2, 4))


# -- rows --------------------------------------------------------------------------------------------------------------


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


# -- what is refused ---------------------------------------------------------------------------------------------------


def _goods() -> dict[str, torch.Tensor]:
    return {
        "f": torch.arange(6.0).reshape(3, 2),
        "i": torch.arange(3),
        "u": torch.arange(3, dtype=torch.uint8),
        "b": torch.tensor([True, False, True]),
        "large": torch.ones(3, 1000),
    }


def _with(**others: Any) -> dict[str, Any]:
    return {**_goods(), **others}


BAD_BATCHES: dict[str, tuple[Any, str]] = {
    "missing key": (
        {name: leaf for name, leaf in _goods().items() if name != "i"},
        "keys differ at the top: expected ['f', 'i', 'u', 'b', 'large'], found ['f', 'u', 'b', 'large'] "
        "(missing ['i'], unknown [])",
    ),
    "no keys": (
        {},
        "keys differ at the top: expected ['f', 'i', 'u', 'b', 'large'], found [] "
        "(missing ['f', 'i', 'u', 'b', 'large'], unknown [])",
    ),
    "more keys": (
        _with(more=torch.zeros(3)),
        "keys differ at the top: expected ['f', 'i', 'u', 'b', 'large'], "
        "found ['f', 'i', 'u', 'b', 'large', 'more'] (missing [], unknown ['more'])",
    ),
    "other container": (
        list(_goods().values()),
        "structure differs at the top: expected dict, found list of type list",
    ),
    "tensor": (torch.zeros(3), "structure differs at the top: expected dict, found leaf of type Tensor"),
    "nested": (_with(i={"x": torch.arange(3)}), "structure differs at i: expected leaf, found dict of type dict"),
    "list of numbers": (_with(i=[1, 2, 3]), "structure differs at i: expected leaf, found list of type list"),
    "longer item": (_with(f=torch.zeros(3, 3)), "f: expected items of shape [2], found [3]"),
    "item with more axes": (_with(i=torch.zeros(3, 1, dtype=torch.int64)), "i: expected items of shape [], found [1]"),
    "item with fewer axes": (_with(f=torch.zeros(3)), "f: expected items of shape [2], found []"),
    "wider dtype": (
        _with(f=torch.zeros(3, 2).double()),
        "f: expected dtype torch.float32, found torch.float64",
    ),
    "numpy default": (_with(f=np.zeros((3, 2))), "f: expected dtype torch.float32, found torch.float64"),
    "narrower dtype": (_with(i=torch.zeros(3).int()), "i: expected dtype torch.int64, found torch.int32"),
    "bool into int": (_with(i=torch.zeros(3) > 0), "i: expected dtype torch.int64, found torch.bool"),
    "bool into uint8": (_with(u=np.zeros(3, bool)), "u: expected dtype torch.uint8, found torch.bool"),
    "int into bool": (_with(b=torch.zeros(3).byte()), "b: expected dtype torch.bool, found torch.uint8"),
    "same size, other dtype": (_with(f=torch.zeros(3, 2).int()), "f: expected dtype torch.float32, found torch.int32"),
    "fewer of one": (_with(u=torch.zeros(2).byte()), "u: expected 3 items along the leading axis, as in f, found 2"),
    "none of one": (_with(i=torch.zeros(0).long()), "i: expected 3 items along the leading axis, as in f, found 0"),
    "none of the first": (_with(f=torch.zeros(0, 2)), "i: expected 0 items along the leading axis, as in f, found 3"),
    "no axis": (_with(i=torch.tensor(1)), "i: expected a leading axis of items, found a Tensor without axes"),
    "numpy scalar": (_with(i=np.int64(1)), "i: expected a leading axis of items, found a int64 without axes"),
    "number": (_with(i=1), "i: expected a leading axis of items, found a int"),
    "None": (_with(i=None), "i: expected a leading axis of items, found a NoneType"),
    "string": (_with(i="abc"), "i: expected a leading axis of items, found a str"),
    "objects": (
        _with(i=np.array([1, None, 3], object)),
        "i: expected numbers, found a numpy array of dtype object",
    ),
    "strings": (_with(i=np.array(["a", "b", "c"])), "i: expected numbers, found a numpy array of dtype <U1"),
    "dates": (
        _with(i=np.zeros(3, "M8[s]")),
        "i: expected numbers, found a numpy array of dtype datetime64[s]",
    ),
    "sparse": (
        _with(f=torch.zeros(3, 2).to_sparse()),
        "f: expected a dense tensor of a plain dtype, found torch.float32, torch.sparse_coo",
    ),
    "empty": ({name: leaf[:0] for name, leaf in _goods().items()}, "expected at least one item, found none"),
}

BAD_ITEMS: dict[str, tuple[dict[str, Any], str]] = {
    "bool into int": ({"i": True}, "i: expected dtype torch.int64, found torch.bool"),
    "bool into float": ({"f": True}, "f: expected dtype torch.float32, found torch.bool"),
    "bool into uint8": ({"u": False}, "u: expected dtype torch.uint8, found torch.bool"),
    "int into bool": ({"b": 1}, "b: expected dtype torch.bool, found torch.int64"),
    "float into int": ({"i": 1.0}, "i: expected dtype torch.int64, found torch.float32"),
    "nan into int": ({"i": float("nan")}, "i: expected dtype torch.int64, found torch.float32"),
    "complex into float": ({"f": 1j}, "f: expected dtype torch.float32, found torch.complex64"),
    "too large": ({"u": 256}, "u: expected a number that fits torch.uint8, found 256"),
    "negative": ({"u": -1}, "u: expected a number that fits torch.uint8, found -1"),
    "huge": ({"i": 2**63}, f"i: expected a number that fits torch.int64, found {2**63}"),
    "tensor of another dtype": (
        {"i": torch.tensor(1, dtype=torch.int32)},
        "i: expected dtype torch.int64, found torch.int32",
    ),
    "numpy scalar of another dtype": ({"i": np.int32(1)}, "i: expected dtype torch.int64, found torch.int32"),
    "number for a vector": ({"f": 1.0}, "f: expected items of shape [2], found []"),
    "vector for a number": ({"i": torch.arange(1)}, "i: expected items of shape [], found [1]"),
    "string": (
        {"i": "1"},
        "i: expected a tensor, numpy array or number, found str (ListStorage takes any object)",
    ),
    "None": (
        {"i": None},
        "i: expected a tensor, numpy array or number, found NoneType (ListStorage takes any object)",
    ),
    "object": ({"i": np.array(None)}, "i: expected numbers, found a numpy array of dtype object"),
}


def _assert_unharmed(storage: TensorStorage) -> None:
    """It holds the good items as before, and takes more of them."""
    for _ in range(2):
        batch = gather(storage, 0, 1, 2)
        assert list(batch) == list(_goods())
        for name, leaf in _goods().items():
            assert_same(batch[name], leaf)
        extend(storage, _goods())


@pytest.mark.parametrize(("items", "message"), BAD_BATCHES.values(), ids=BAD_BATCHES)
def test_batch_that_does_not_fit(items: Any, message: str) -> None:
    storage = TensorStorage(5)
    extend(storage, _goods())
    with pytest.raises(SchemaError) as caught:
        storage.prepare(items)
    assert str(caught.value) == message
    _assert_unharmed(storage)


@pytest.mark.parametrize(("others", "message"), BAD_ITEMS.values(), ids=BAD_ITEMS)
def test_item_that_does_not_fit(others: dict[str, Any], message: str) -> None:
    storage = TensorStorage(5)
    extend(storage, _goods())
    item = {name: leaf[0] for name, leaf in _goods().items()}
    with pytest.raises(SchemaError) as caught:
        storage.prepare_one({**item, **others})
    assert str(caught.value) == message
    _assert_unharmed(storage)


@pytest.mark.parametrize("missing", [["i"], list(_goods())], ids=["one", "all"])
def test_item_without_some_keys(missing: list[str]) -> None:
    storage = TensorStorage(5)
    extend(storage, _goods())
    item = {name: leaf[0] for name, leaf in _goods().items() if name not in missing}
    with pytest.raises(SchemaError, match=r"keys differ at the top: expected .* found"):
        storage.prepare_one(item)
    _assert_unharmed(storage)


FIRST: dict[str, tuple[Any, str]] = {
    "no leaf": ({}, "expected items with at least one leaf, found dict()"),
    "no leaf, nested": ({"a": [], "b": ()}, "expected items with at least one leaf, found dict(a: list(), b: tuple())"),
    "no items": ({"x": torch.zeros(0, 3)}, "expected at least one item, found none"),
    "lengths": (
        {"x": torch.zeros(2), "y": {"z": torch.zeros(3)}},
        "y/z: expected 2 items along the leading axis, as in x, found 3",
    ),
    "no axis": ({"x": torch.tensor(1.0)}, "x: expected a leading axis of items, found a Tensor without axes"),
    "object": ({"x": np.array([None])}, "x: expected numbers, found a numpy array of dtype object"),
    "string": ("abc", ".: expected a leading axis of items, found a str"),
    "mask": (
        {"x": np.ma.masked_array(np.zeros(3), [False, True, False])},
        "x: expected a plain array, found one with a mask",
    ),
    "nested": (
        {"x": torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged)},
        "x: expected a dense tensor of a plain dtype, found torch.float32, torch.jagged",
    ),
    "list of items": (
        [{"x": torch.zeros(4)}, {"x": torch.zeros(4)}],
        "expected a tree whose leaves have a leading axis of items, found a list of 2 items: stack them, add() them "
        "one by one, or use a ListStorage (a tuple of dicts is taken as a tree)",
    ),
}


@pytest.mark.parametrize(("items", "message"), FIRST.values(), ids=FIRST)
def test_first_batch_that_cannot_be_stored(items: Any, message: str) -> None:
    storage = TensorStorage(5)
    with pytest.raises(SchemaError) as caught:
        storage.prepare(items)
    assert str(caught.value) == message
    assert not storage.fields
    extend(storage, _goods())
    _assert_unharmed(storage)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (object(), "x: expected a tensor, numpy array or number, found object (ListStorage takes any object)"),
        (b"1", "x: expected a tensor, numpy array or number, found bytes (ListStorage takes any object)"),
        (2**63, f"x: expected an integer of 64 bits, found {2**63}"),
        (np.array("a"), "x: expected numbers, found a numpy array of dtype <U1"),
        (np.str_("a"), "x: expected numbers, found a numpy array of dtype <U1"),
        (
            np.zeros((), [("a", "i4")]),
            "x: expected numbers, found a numpy array of dtype [('a', '<i4')]",
        ),
        (
            torch.zeros(2).to_sparse(),
            "x: expected a dense tensor of a plain dtype, found torch.float32, torch.sparse_coo",
        ),
    ],
    ids=["object", "bytes", "huge", "str", "numpy str", "structured", "sparse"],
)
def test_first_item_that_cannot_be_stored(leaf: Any, message: str) -> None:
    storage = TensorStorage(5)
    with pytest.raises(SchemaError) as caught:
        storage.prepare_one({"x": leaf})
    assert str(caught.value) == message
    assert not storage.fields


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_dtype_that_numpy_has_no_size_for() -> None:
    with pytest.raises(SchemaError, match=r"x: expected a dense tensor of a plain dtype, found torch\.complex32"):
        TensorStorage(5).prepare_one({"x": torch.zeros(2, dtype=torch.complex32)})


def test_tensor_without_data() -> None:
    with pytest.raises(SchemaError, match=r"x: expected .*, found .*meta"):
        TensorStorage(5).prepare_one({"x": torch.zeros(2, device="meta")})


def test_tensordict_with_another_batch_size() -> None:
    storage = TensorStorage(5)
    extend(storage, TensorDict({"a": torch.zeros(3, 2)}, batch_size=[3]))
    with pytest.raises(SchemaError, match=r"tensordict at the top differs: expected \(\), found \(2,\)"):
        storage.prepare(TensorDict({"a": torch.zeros(3, 2)}, batch_size=[3, 2]))


@pytest.mark.parametrize(
    ("capacity", "error", "message"),
    [
        (0, ValueError, "capacity: expected at least 1, found 0"),
        (-3, ValueError, "capacity: expected at least 1, found -3"),
        (True, TypeError, "capacity: expected an int, found True of type bool"),
        (1.0, TypeError, "capacity: expected an int, found 1.0 of type float"),
        ("5", TypeError, "capacity: expected an int, found '5' of type str"),
    ],
    ids=str,
)
def test_capacity(capacity: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        TensorStorage(capacity)
    assert str(caught.value) == message
    assert TensorStorage(7).capacity == 7
