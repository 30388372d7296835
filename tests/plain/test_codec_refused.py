"""Values and documents that the codec refuses, with the place named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from asyncbuf import CheckpointCorruptError, CheckpointError
from asyncbuf._plain.codec import decode, encode, join
from tests.plain.codec_helpers import Kelvin, Point, Unregistered, through_json


class SubList(list[int]):
    pass


REFUSED = {
    "set": ({"a": [1, {2}]}, "/a/1"),
    "object": ([None, (object(),)], "/1/0"),
    "unregistered dataclass": ({"deep": {"er": Unregistered(1)}}, "/deep/er"),
    "unregistered subclass": ([Kelvin(1.0)], "/0"),
    "list subclass": ({"a": SubList([1])}, "/a"),
    "function": ({"a": len}, "/a"),
    "class": ({"a": int}, "/a"),
    "generator": ({"a": torch.Generator()}, "/a"),
    "memoryview": ({"a": memoryview(b"x")}, "/a"),
    "sparse": ({"a": torch.eye(2).to_sparse()}, "/a"),
    "object array": ({"a": np.array([object()])}, "/a"),
    "structured array": ({"a": np.zeros(2, "i4,f8")}, "/a"),
    "void": ({"a": np.void(b"ab")}, "/a"),
    "value below an int key": ({7: object()}, "/7"),
    "key": ({object(): 1}, "the value"),
    "in a dataclass": ({"a": Point(1, object())}, "/a/y"),
}


@pytest.mark.parametrize(("value", "path"), REFUSED.values(), ids=REFUSED)
def test_refused_with_its_path(value: Any, path: str) -> None:
    with pytest.raises(CheckpointError, match=r"expected .* found") as caught:
        encode(value)
    assert str(caught.value).startswith(f"{path}:")


def test_path_begins_with_what_the_caller_says() -> None:
    with pytest.raises(CheckpointError, match=r"^sampler/a/0: "):
        encode({"a": [object()]}, "sampler")


def cyclic_list() -> Any:
    value: list[Any] = [1]
    value.append({"deep": value})
    return value


def cyclic_dict() -> Any:
    value: dict[Any, Any] = {}
    value[1] = (value,)
    return value


def cyclic_dataclass() -> Any:
    value = Point(1)
    value.y = [value]
    return value


@pytest.mark.parametrize(
    ("make", "path"),
    [(cyclic_list, "/1/deep"), (cyclic_dict, "/1/0"), (cyclic_dataclass, "/y/0")],
    ids=["list", "dict", "dataclass"],
)
def test_cycle_is_refused_with_its_path(make: Any, path: str) -> None:
    with pytest.raises(CheckpointError, match="contains itself") as caught:
        encode(make())
    assert str(caught.value).startswith(f"{path}:")


def test_same_container_twice_is_no_cycle() -> None:
    part = [1]
    assert through_json([part, part, {"a": part}]) == [[1], [1], {"a": [1]}]


# -- not what encode returns ------------------------------------------------------------------------------------------

CORRUPT = {
    "unknown tag": {"$what": 1},
    "unknown type": {"$type": "os.system", "value": "true"},
    "type of another kind": {"$type": 3, "value": None},
    "no value": {"$type": "celsius"},
    "no list": {"$tuple": 3},
    "no pairs": {"$dict": [[1, 2, 3]]},
    "unhashable key": {"$dict": [[[1], 2]]},
    "complex of one": {"$complex": [1.0, 2.0, 3.0]},
    "dtype that is none": {"$dtype": "sys"},
    "device that is none": {"$device": "nowhere"},
    "bytes without a tensor": {"$bytes": "abc"},
    "object array": {"$ndarray": torch.zeros(8, dtype=torch.uint8), "dtype": "|O", "shape": [1]},
    "structured array": {"$ndarray": torch.zeros(8, dtype=torch.uint8), "dtype": "f4,f4", "shape": [1]},
    "array of another size": {"$ndarray": torch.zeros(8, dtype=torch.uint8), "dtype": "<f8", "shape": [2]},
    "array of negative size": {"$ndarray": torch.zeros(8, dtype=torch.uint8), "dtype": "<f8", "shape": [-1]},
    "array that is huge": {"$ndarray": torch.zeros(8, dtype=torch.uint8), "dtype": "<f8", "shape": [2**60]},
    "array of floats": {"$ndarray": torch.zeros(8), "dtype": "<f4", "shape": [8]},
    "scalar of two": {"$scalar": torch.zeros(8, dtype=torch.uint8), "dtype": "<f4"},
    "unknown member": {"$type": f"{__name__}.Colour", "value": "BLUE"},
    "unknown field": {"$type": f"{__name__}.Point", "value": {"x": 1, "z": 2}},
    "missing field": {"$type": f"{__name__}.Pair", "value": {"left": 1}},
    "set": {1, 2},
    "object": object(),
}


@pytest.mark.parametrize("plain", CORRUPT.values(), ids=CORRUPT)
def test_corrupt_is_refused(plain: Any) -> None:
    for nested in (plain, [plain], {"a": plain}):
        with pytest.raises(CheckpointCorruptError, match="expected"):
            decode(nested)


def test_name_is_looked_up_among_registered_types_only() -> None:
    with pytest.raises(CheckpointCorruptError, match=r"found 'builtins.eval'.*known are .*celsius.*register_type"):
        decode({"$type": "builtins.eval", "value": "1"}, "model")


@pytest.mark.parametrize(
    "document",
    [{"$tensor": "x"}, {"$tensor": None}, {"$tensor": ["0"]}, {"$float": "1.0"}, {"$float": None}, {"$float": []}],
    ids=str,
)
def test_join_refuses(document: Any) -> None:
    with pytest.raises(CheckpointCorruptError, match="expected"):
        join([{"a": document}], {"0": torch.zeros(1)})


def test_join_refuses_a_gradient_of_integers() -> None:
    with pytest.raises(CheckpointCorruptError, match="expected"):
        join({"$tensor": "0", "grad": True}, {"0": torch.zeros(1, dtype=torch.int64)})
