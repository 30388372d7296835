"""Types at the edge of what the codec knows: they come back as they were, or are refused."""

from __future__ import annotations

import collections
import json
from typing import Any

import numpy as np
import pytest
import torch

from asyncbuf import CheckpointError, register_codec, register_type
from asyncbuf._plain.codec import decode, encode
from asyncbuf.errors import AsyncBufError
from tests.plain.codec_helpers import Access, Celsius, Point, check, through_json


@pytest.mark.parametrize("value", [Access.READ | Access.WRITE, Access(0)], ids=["both", "none"])
def test_composite_flag_comes_back(value: Access) -> None:
    check(through_json(value), value)


@pytest.mark.parametrize("value", [collections.OrderedDict(b=1, a=(2,)), torch.Size([2, 3])], ids=["ordered", "size"])
def test_type_comes_back(value: Any) -> None:
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "value",
    [collections.Counter("aab"), collections.defaultdict(list, a=[1])],
    ids=["counter", "defaultdict"],
)
def test_dict_subclass_comes_back_or_is_refused(value: Any) -> None:
    try:
        plain = encode(value)
    except CheckpointError:
        return
    assert type(decode(plain)) is type(value)


def test_masked_array_comes_back_or_is_refused() -> None:
    value = np.ma.masked_array([1, 2], [False, True])
    try:
        found = decode(encode(value))
    except CheckpointError:
        return
    assert isinstance(found, np.ma.MaskedArray)


def test_deep_value_comes_back_or_is_refused() -> None:
    value: list[Any] = []
    for _ in range(5_000):
        value = [value]
    try:
        through_json(value)
    except CheckpointError:
        return


@pytest.mark.parametrize("value", [2**8192, -(2**8192) - 5, 10**5_000], ids=["first", "negative", "long"])
def test_int_that_python_would_not_read_from_json_comes_back(value: int) -> None:
    assert through_json([value])[0] - value == 0  # as text it is too long for a message, too


# -- registering ------------------------------------------------------------------------------------------------------


def test_taken_name_is_refused() -> None:
    class Other:
        pass

    with pytest.raises(ValueError, match="celsius"):
        register_codec(Other, str, lambda plain: Other(), name="celsius")


def test_registering_again_is_fine() -> None:
    assert register_type(Point) is Point
    check(through_json(Point(1, 2)), Point(1, 2))


def test_register_type_wants_a_known_kind() -> None:
    with pytest.raises(TypeError, match="dataclass, named tuple or enum"):
        register_type(Celsius)


def test_subclasses_only_where_they_are_wanted() -> None:
    class Base:
        pass

    class Derived(Base):
        pass

    register_codec(Base, lambda value: 1, lambda plain: Base(), name="test_codec.base", subclasses=True)
    assert type(through_json(Derived())) is Base


# -- TensorDict -------------------------------------------------------------------------------------------------------


def test_tensordict_comes_back() -> None:
    tensordict = pytest.importorskip("tensordict")
    inner = tensordict.TensorDict({"x": torch.arange(6).reshape(2, 3)}, batch_size=[2, 3])
    shared = torch.ones(2)
    value = {"td": tensordict.TensorDict({"inner": inner, "a": shared}, batch_size=[2]), "a": shared}
    found = through_json(value)
    assert type(found["td"]) is tensordict.TensorDict
    assert found["td"].batch_size == torch.Size([2])
    assert found["td"]["inner"].batch_size == torch.Size([2, 3])
    check(found["td"]["inner", "x"], inner["x"])
    assert found["td"]["a"] is found["a"]


def test_tensordict_with_text_comes_back() -> None:
    tensordict = pytest.importorskip("tensordict")
    one = tensordict.TensorDict({"text": "words", "more": tensordict.NonTensorData({"a": [1, torch.ones(2)]})}, [])
    found = through_json(one)
    assert type(found) is tensordict.TensorDict
    assert found["text"] == "words"
    assert type(found.get("text")) is tensordict.NonTensorData
    check(found["more"], one["more"])


def test_stack_of_text_comes_back() -> None:
    tensordict = pytest.importorskip("tensordict")
    rows = [tensordict.TensorDict({"text": text, "x": torch.zeros(2)}, []) for text in ("one", "two", "three")]
    batch: Any = torch.stack(rows)
    square: Any = torch.stack([batch, batch], 1)
    for value in (batch, square):
        found = through_json(value)
        assert found.batch_size == value.batch_size
        assert found.get("text").tolist() == value.get("text").tolist()


def test_text_of_a_tensordict_that_holds_something_unknown_is_refused() -> None:
    tensordict = pytest.importorskip("tensordict")
    with pytest.raises(AsyncBufError, match="text"):
        encode(tensordict.TensorDict({"text": tensordict.NonTensorData(object())}, []))
