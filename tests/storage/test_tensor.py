"""Items as rows of memory: what can be stored, and where it may come from."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from asyncbuf import SchemaError, TensorStorage
from asyncbuf.storage._leaf import Field
from tests.storage.tensor_helpers import (
    DTYPES,
    NUMPY_DTYPES,
    Pair,
    Step,
    add,
    assert_same,
    extend,
    gather,
    random_tensor,
)

if TYPE_CHECKING:
    from collections.abc import Callable


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
