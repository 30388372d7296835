"""Items that do not fit: the error says what to do."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from asyncbuf import SchemaError, TensorStorage

ITEM = {"obs": torch.ones(3), "action": torch.ones(3), "reward": 0}
DONE = {"x": torch.ones(2), "done": False}


def known(item: Any) -> TensorStorage:
    """A storage that knows the structure of an item."""
    from asyncbuf import RowRange

    storage = TensorStorage(10)
    storage.write(storage.prepare_one(item), [RowRange(0, 0, 1)])
    return storage


def check(call: Any, items: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=re.escape(message)):
        call(items)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"x": 1.0}, "x: expected a leading axis of items, found a float (add() takes one item, without that axis)"),
        ({"x": torch.tensor(1.0)}, "found a Tensor without axes (add() takes one item, without that axis)"),
        (
            {"obs": torch.ones(3), "action": torch.ones(2)},
            "action: expected 3 items along the leading axis, as in obs, found 2 (add() takes one item",
        ),
        (
            {"obs": [[0.5, 1.0], [2.0, 3.0]]},
            "obs/0/0: expected a leading axis of items, found a float (it is in a list",
        ),
        ({"obs": torch.ones(3), "reward": 1.0}, "reward: expected a leading axis of items, found a float (add() takes"),
    ],
)
def test_the_first_items_look_like_one(item: Any, message: str) -> None:
    check(TensorStorage(10).prepare, item, message)


@pytest.mark.parametrize(
    "item",
    [
        {**ITEM, "reward": torch.tensor(1)},
        {"obs": np.ones(3, np.float32), "action": torch.ones(3), "reward": torch.tensor(1)},
    ],
)
def test_one_item_for_extend(item: Any) -> None:
    check(known(ITEM).prepare, item, "found a Tensor without axes (add() takes one item")


def test_one_item_whose_leading_axes_differ() -> None:
    item = {"obs": torch.ones(3), "action": torch.ones(2)}
    check(known(item).prepare, item, "found 2 (these are the shapes of one item, which add() takes)")


def test_one_item_whose_leading_axes_agree() -> None:
    item = {"obs": torch.ones(3), "action": torch.ones(3)}
    check(known(item).prepare, item, "found [] (these are the shapes of one item, which add() takes)")


def test_several_items_for_add() -> None:
    items = {"obs": torch.ones(5, 3), "action": torch.ones(5, 3), "reward": torch.ones(5, dtype=torch.int64)}
    check(known(ITEM).prepare_one, items, "found [5, 3] (these are the shapes of several items, which extend() takes)")


@pytest.mark.parametrize("items", [{"obs": torch.ones(5, 4)}, {"obs": torch.ones(4)}])
def test_other_shapes_get_no_advice(items: Any) -> None:
    with pytest.raises(SchemaError) as caught:
        known({"obs": torch.ones(3)}).prepare(items)
    assert "add()" not in str(caught.value)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (0.5, "reward: expected dtype torch.int64, found torch.float32 from the float 0.5 (the first item decides"),
        (True, "from the bool True (int(...) makes one of it)"),
        (torch.tensor(0.5), "found torch.float32 (cast it, as in tensor.to(torch.int64) or array.astype('int64'))"),
        (np.array(0.5), "found torch.float64 (cast it, as in tensor.to(torch.int64)"),
        (np.float64(0.5), "found torch.float64 from the float 0.5 (the first item decides"),
        (1j, "found torch.complex64 from the complex 1j"),
    ],
)
def test_an_int_field_that_gets_something_else(reward: Any, message: str) -> None:
    check(known(ITEM).prepare_one, {**ITEM, "reward": reward}, message)


@pytest.mark.parametrize("reward", [np.float64(0.5), np.float32(0.5), np.float16(0.5)], ids=["64", "32", "16"])
def test_a_float_field_takes_any_scalar(reward: Any) -> None:
    storage = known({**ITEM, "reward": 0.25})
    assert storage.columns(storage.prepare_one({**ITEM, "reward": reward}), ["reward"])["reward"].tolist() == [0.5]


def test_a_scalar_that_is_too_large() -> None:
    check(known({**ITEM, "reward": 0.25}).prepare_one, {**ITEM, "reward": np.float64(1e300)}, "a number that fits")


def test_a_bool_field_that_gets_a_number() -> None:
    check(known(DONE).prepare_one, {**DONE, "done": 1}, "from the int 1 (bool(...) makes one of it)")


def test_a_dtype_that_numpy_lacks() -> None:
    item = {"x": torch.ones(2, dtype=torch.bfloat16)}
    check(known(item).prepare_one, {"x": torch.ones(2)}, "(cast it, as in tensor.to(torch.bfloat16))")


@pytest.mark.parametrize("method", ["prepare", "prepare_one"])
def test_a_list_of_dicts(method: str) -> None:
    message = "found a list of 2 items: stack them for extend(), add() them one by one, or use a ListStorage"
    check(getattr(known(ITEM), method), [ITEM, ITEM], message)
    check(TensorStorage(10).prepare, [ITEM, ITEM], message)


def test_a_list_in_place_of_a_tensor() -> None:
    message = "structure differs at obs: expected leaf, found list of type list (torch.tensor(...) makes one of a list"
    check(known(ITEM).prepare_one, {**ITEM, "obs": [1.0, 2.0, 3.0]}, message)
