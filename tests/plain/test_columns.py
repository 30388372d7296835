"""Values in columns come back as they were: types, bits, order, and what is one tensor."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncbuf import CheckpointError, register_codec
from asyncbuf._plain.codec import check as check_savable
from asyncbuf._plain.column_leaves import DOCUMENT
from asyncbuf._plain.columns import to_columns
from asyncbuf._plain.columns_back import from_columns
from asyncbuf._runtime.pieces import PIECE
from tests.plain.codec_helpers import (
    ARRAYS,
    ATOMS,
    CONTAINERS,
    SCALARS,
    TENSORS,
    Colour,
    Pair,
    Point,
    Unregistered,
    check,
)
from tests.plain.test_codec_any import keys, leaves, trees

if TYPE_CHECKING:
    from collections.abc import Callable

GROUPS: dict[str, dict[str, Any]] = {
    "atom": ATOMS,
    "array": ARRAYS,
    "scalar": SCALARS,
    "tensor": TENSORS,
    "container": CONTAINERS,
}
VALUES = {f"{group} {name}": value for group, values in GROUPS.items() for name, value in values.items()}


def written(values: list[Any]) -> dict[str, torch.Tensor]:
    return to_columns(values, lambda position: check_savable(values[position], f"item {position}"))


def node_of(values: list[Any]) -> Any:
    """What the document says of values."""
    return json.loads(written(values)[DOCUMENT].numpy().tobytes())["column"]


def back(values: list[Any]) -> list[Any]:
    return from_columns(written(values), "test")


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_every_kind_alone_among_its_like_and_among_others(value: Any) -> None:
    cases: list[list[Any]] = [
        [value],
        [value] * 3,
        [value, 1, value, "x"],
        [[value], [value, value], []],
        [(value,), (value, (value,))],
        [{"a": value}, {"a": value, "b": 2}],
        [{"a": 1, "b": value}, {"a": 2, "b": value}],
        [Point(value, [value]), Point(None)],
    ]
    for values in cases:
        check(back(values), values)


def test_all_kinds_at_once() -> None:
    values = list(VALUES.values())
    check(back([*values, values, {"deep": tuple(values)}]), [*values, values, {"deep": tuple(values)}])


@settings(max_examples=150, deadline=None)
@given(st.lists(trees, max_size=6))
def test_any_values_come_back(values: list[Any]) -> None:
    check(back(values), values)


@st.composite
def alike(draw: st.DrawFn) -> list[Any]:
    """Items of one structure with other leaves, as buffers have them."""
    names = draw(st.lists(keys, max_size=3, unique_by=lambda key: (str(type(key)), str(key))))
    kinds = [draw(st.sampled_from(["float", "int", "text", "tensor", "list", "any"])) for _ in names]
    makers: dict[str, st.SearchStrategy[Any]] = {
        "float": st.floats(),
        "int": st.integers(),
        "text": st.text(st.characters(codec=None, categories=None, exclude_categories=())),
        "tensor": st.lists(st.floats(width=32), min_size=2, max_size=2).map(torch.tensor),
        "list": st.lists(st.integers(-5, 5), max_size=4),
        "any": leaves,
    }
    count = draw(st.integers(0, 5))
    return [{name: draw(makers[kind]) for name, kind in zip(names, kinds, strict=True)} for _ in range(count)]


@settings(max_examples=100, deadline=None)
@given(alike())
def test_items_of_one_structure_come_back(values: list[Any]) -> None:
    check(back(values), values)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None)
@given(st.one_of(st.lists(trees, max_size=6), alike()))
def test_any_values_come_back_at_length(values: list[Any]) -> None:
    check(back(values), values)


def test_columns_longer_than_a_piece() -> None:
    count = PIECE + 7
    cases: dict[str, list[Any]] = {
        "float": [float(i) for i in range(count)],
        "int": list(range(count)),
        "large int": [*range(count), 2**70],
        "bool": [i % 3 == 0 for i in range(count)],
        "text": [f"é{i}" for i in range(count)],
        "mixed": [i if i % 2 else str(i) for i in range(count)],
        "scalar": [np.float32(i) for i in range(count)],
        "tensor": [torch.tensor([i]) for i in range(PIECE // 8 + 1)],
        "shapes": [torch.arange(i % 3) for i in range(PIECE // 8 + 1)],
        "array": [np.array([i]) for i in range(PIECE // 8 + 1)],
        "array shapes": [np.arange(i % 3) for i in range(PIECE // 8 + 1)],
        "dict": [{"x": i, "y": None} for i in range(PIECE // 8 + 1)],
        "map": [{i: i} for i in range(PIECE // 8 + 1)],
        "long lists": [list(range(count)), [], list(range(3))],
    }
    for values in cases.values():
        check(back(values), values)


def test_long_texts() -> None:
    values = ["é" * 300_000 + "\ud800", "a" * 3_000_000, "", "\ud83d\ude00", "\U0001f600"]
    check(back(values), values)
    check(back([b"x" * 2_000_000, b""]), [b"x" * 2_000_000, b""])


# -- few tensors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (float, 1),
        (int, 1),
        (str, 2),
        (np.float32, 1),
        (lambda i: torch.full((4,), float(i)), 1),
        (lambda i: torch.zeros(i % 3), 3),
        (lambda i: [1.5] * 20, 2),
        (lambda i: {"x": torch.ones(4), "n": i, "text": str(i)}, 6),
        (lambda i: Point(i, 2.5), 4),
        (lambda i: (i, float(i)), 4),
    ],
    ids=["float", "int", "text", "scalar", "tensor", "shapes", "list", "dict", "dataclass", "tuple"],
)
def test_like_values_take_few_tensors(make: Callable[[int], Any], most: int) -> None:
    values = [make(i) for i in range(500)]
    tensors = written(values)
    assert len(tensors) - 1 <= most
    assert tensors[DOCUMENT].nbytes < 600
    check(from_columns(tensors, "test"), values)


def test_numbers_are_one_array() -> None:
    assert node_of([[1.5, 2.5], [3.5]]) == {"list": {"float": "0"}, "lengths": "1"}
    assert node_of([]) is None
    assert node_of([[], []]) == {"list": None, "lengths": "0"}


# -- what is one tensor -----------------------------------------------------------------------------------------------


def test_one_tensor_in_several_places_is_written_once_and_stays_one() -> None:
    goal, other = torch.arange(1000.0), torch.zeros(3)
    values = [{"goal": goal, "same": [goal, other], "own": torch.ones(3)}, {"goal": goal, "same": [], "own": other}]
    tensors = written(values)
    assert sum(tensor.nbytes for tensor in tensors.values()) < goal.nbytes + 1500
    one, two = from_columns(tensors, "test")
    check([one, two], values)
    assert one["goal"] is one["same"][0] is two["goal"]
    assert one["same"][1] is two["own"]
    assert one["own"] is not two["own"]


def test_a_tensor_that_a_codec_makes_is_no_other_one() -> None:
    class Maker:
        pass

    made = iter(range(1000))
    register_codec(
        Maker, lambda value: torch.full((3,), float(next(made))), lambda plain: plain, name="test_columns.Maker"
    )
    values = [[Maker()] for _ in range(100)]
    assert [value[0].tolist() for value in back(values)] == [[i] * 3 for i in map(float, range(100))]


@pytest.mark.parametrize(
    "values",
    [[torch.arange(4.0) + i for i in range(50)], [torch.arange(4.0 + i % 2) for i in range(50)]],
    ids=["a shape", "shapes"],
)
def test_tensors_have_memory_of_their_own(values: list[torch.Tensor]) -> None:
    tensors = written(values)
    found = from_columns(tensors, "test")
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in found)
    for tensor in tensors.values():
        tensor.fill_(1)
    check(found, values)


def test_arrays_have_memory_of_their_own_and_can_be_written() -> None:
    values = [np.arange(4.0) + i for i in range(50)]
    found = back(values)
    assert all(array.base is None and array.flags.writeable for array in found)


def test_what_is_written_does_not_change_with_the_values() -> None:
    tensor, array, content = torch.ones(3), np.ones(3), bytearray(b"abc")
    tensors = written([tensor, array, content])
    tensor.fill_(7)
    array[:] = 7
    content[0] = 0
    check(from_columns(tensors, "test"), [torch.ones(3), np.ones(3), bytearray(b"abc")])


# -- what equality does not tell --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        [{1: "a"}, {True: "a"}, {1.0: "a"}],
        [{0.0: "a"}, {-0.0: "a"}],
        [{(1,): 0}, {(True,): 0}],
        [{"a": 1, "b": 2}, {"b": 2, "a": 1}],
        [{Colour.RED: 1}, {Colour.RED: 2}],
        [{math.inf: 1}, {math.inf: 2}],
        [1, True, 1.0, np.int64(1), np.bool_(True), 1 + 0j],
        [torch.tensor(1), torch.tensor(1.0), torch.tensor(True), torch.tensor([1])],
        [np.array(1), np.array([1]), np.array(1, ">i8"), np.array(1.0)],
        ["", b"", bytearray(), [], (), {}, None, Pair(0, 0)],
        [torch.ones(2, requires_grad=True), torch.ones(2)],
        [2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 0],
    ],
    ids=str,
)
def test_values_that_are_equal_and_differ(values: list[Any]) -> None:
    check(back(values), values)
    check(back([values, *values]), [values, *values])


def test_payloads_of_nan() -> None:
    bits = np.array([0x7FF8000000000123, 0x7FF0000000000001, 0xFFF8000000000001], np.uint64)
    floats = bits.view(np.float64).tolist()
    assert np.array(back(floats)).view(np.uint64).tolist() == bits.tolist()
    small = np.array([0x7FA00001, 0x7FC12345], np.uint32).view(np.float32)
    found = back(list(small))
    assert [hex(scalar.view(np.uint32)) for scalar in found] == ["0x7fa00001", "0x7fc12345"]


class Sub(np.ndarray[Any, Any]):
    pass


def test_arrays_of_derived_classes_come_back_as_arrays(tmp_path: Any) -> None:
    np.save(tmp_path / "rows.npy", np.arange(6.0).reshape(2, 3))
    rows = np.load(tmp_path / "rows.npy", mmap_mode="r")
    derived = np.arange(3.0).view(Sub)
    check(back([rows[0], derived, rows[1]]), [np.asarray(rows[0]), np.arange(3.0), np.asarray(rows[1])])


class Loud(torch.Tensor):
    """A derived class that does more than it should."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert getattr(func, "__name__", "") not in ("stack", "cat"), "asked to do the work"
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def test_tensors_of_derived_classes_come_back_as_tensors() -> None:
    loud, parameter = torch.ones(2).as_subclass(Loud), torch.nn.Parameter(torch.zeros(2))
    plain = [torch.ones(2), torch.zeros(2, requires_grad=True), torch.ones(2)]
    check(back([loud, parameter, torch.ones(2)]), plain)
    check(back([loud, loud[:1]]), [torch.ones(2), torch.ones(1)])
    assert all(type(tensor) is torch.Tensor for tensor in back([loud, parameter]))


# -- what cannot be saved ---------------------------------------------------------------------------------------------


def deep(levels: int) -> Any:
    value: Any = 1
    for i in range(levels):
        value = [[value], (value,), {"a": value}, {i: value, "b": 1}][i % 4]
    return value


def test_depth() -> None:
    for value in (deep(100), [Point(deep(95), 1), 3][0]):
        check(back([value, 1, "x"]), [value, 1, "x"])
    with pytest.raises(CheckpointError, match=r"item 1/.*expected at most 100 levels"):
        written([1, deep(101)])


def itself() -> list[Any]:
    value: list[Any] = [1]
    value += [value, [value, value], {"x": value}]
    return value


REFUSED: dict[str, tuple[Any, str]] = {
    "object": (object(), "item 2/y: expected .* found builtins.object"),
    "dataclass": (Unregistered(1), "item 2/y: expected .*Unregistered"),
    "itself": (itself(), "item 2/y/1: .*contains itself"),
    "objects": (np.array([object()]), "item 2/y: .*dtype"),
    "records": (np.zeros(2, "i4,f8"), "item 2/y: .*dtype"),
    "mask": (np.ma.masked_array([1, 2], [True, False]), "item 2/y: .*MaskedArray"),
    "sparse": (torch.eye(2).to_sparse(), "item 2/y: .*dense"),
    "meta": (torch.ones(2, device="meta"), "item 2/y: .*meta"),
    "lazy": (torch.nn.LazyLinear(2).weight, "item 2/y: .*lazy"),
    "key": ({object(): 1}, "item 2/y: expected"),
}


@pytest.mark.parametrize(("value", "message"), REFUSED.values(), ids=REFUSED)
def test_the_message_says_which_item_and_where(value: Any, message: str) -> None:
    for values in ([1, 2, {"y": value}], [{"y": 1}, {"y": 2}, {"y": value}]):
        with pytest.raises(CheckpointError, match=message):
            written(values)


def test_an_error_of_a_codec_keeps_its_type_and_gets_a_note() -> None:
    class Broken:
        pass

    def refuse(value: Any) -> Any:
        raise LookupError("not today")

    register_codec(Broken, refuse, lambda plain: plain, name="test_columns.Broken")
    with pytest.raises(LookupError, match="not today") as caught:
        written([1, [Broken()]])
    assert caught.value.__notes__ == ["raised while item 1 was made plain"]


def test_containers_that_several_values_share_are_no_cycle() -> None:
    part: Any = (1, [2])
    values = [part, (part, part), [(part, [part])], part]
    check(back(values), values)
