"""Items as rows of memory: what is refused, and that it changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from asyncbuf import SchemaError, TensorStorage
from tests.storage.tensor_helpers import assert_same, extend, gather


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
    "numpy scalar of another dtype": ({"i": np.uint8(1)}, "i: expected dtype torch.int64, found torch.uint8"),
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
    assert str(caught.value).startswith(message)  # what to do may follow
    _assert_unharmed(storage)


@pytest.mark.parametrize(("others", "message"), BAD_ITEMS.values(), ids=BAD_ITEMS)
def test_item_that_does_not_fit(others: dict[str, Any], message: str) -> None:
    storage = TensorStorage(5)
    extend(storage, _goods())
    item = {name: leaf[0] for name, leaf in _goods().items()}
    with pytest.raises(SchemaError) as caught:
        storage.prepare_one({**item, **others})
    assert str(caught.value).startswith(message)  # what to do may follow
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
        "expected a tree whose leaves have a leading axis of items, found a list of 2 items: stack them for "
        "extend(), add() them one by one, or use a ListStorage (a tuple of dicts is taken as a tree)",
    ),
}


@pytest.mark.parametrize(("items", "message"), FIRST.values(), ids=FIRST)
def test_first_batch_that_cannot_be_stored(items: Any, message: str) -> None:
    storage = TensorStorage(5)
    with pytest.raises(SchemaError) as caught:
        storage.prepare(items)
    assert str(caught.value).startswith(message)  # what to do may follow
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
    assert str(caught.value).startswith(message)  # what to do may follow
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
        (1.0, TypeError, "capacity: expected an int, found 1.0 of type float: write capacity=1"),
        ("5", TypeError, "capacity: expected an int, found '5' of type str"),
    ],
    ids=str,
)
def test_capacity(capacity: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        TensorStorage(capacity)
    assert str(caught.value) == message
    assert TensorStorage(7).capacity == 7
