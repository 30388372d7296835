"""Long lists and tuples of numbers and texts are one column each, whatever they are part of."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncbuf import CheckpointCorruptError, CheckpointError
from asyncbuf._plain.codec import decode, encode, split
from tests.plain.codec_helpers import CONTAINERS, Point, check, through_json
from tests.plain.test_codec_any import trees

LONG: dict[str, Any] = {
    "ints": list(range(600)),
    "floats": [0.5] * 8000,
    "tuple": (True, None) * 300,
    "texts": [f"é{i}\ud800" for i in range(600)],
    "mixed": [1, 2.5, "x", b"y", None, 1j, 2**90] * 100,
    "nested": {"a": [[1.5] * 600, [2] * 511, {"b": Point([3] * 512, None)}]},
}


@pytest.mark.parametrize("value", LONG.values(), ids=LONG)
def test_long_lists(value: Any) -> None:
    check(through_json(value), value)


def test_numbers_are_no_part_of_the_document() -> None:
    document, tensors = split(encode({"tokens": list(range(8000)), "short": [1, 2]}))
    assert len(json.dumps(document)) < 300
    assert sum(tensor.nbytes for tensor in tensors.values()) < 8000 * 8 + 300


@settings(max_examples=150, deadline=None)
@given(trees)
def test_any_tree_with_short_columns(value: Any) -> None:
    with mock.patch("asyncbuf._plain.codec._MANY", 0):
        check(through_json(value), value)


@pytest.mark.parametrize("value", CONTAINERS.values(), ids=CONTAINERS)
def test_containers_with_short_columns(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncbuf._plain.codec._MANY", 0)
    check(through_json(value), value)


def test_what_only_looks_like_a_number_is_refused_with_its_path() -> None:
    with pytest.raises(CheckpointError, match=r"state/a/300: expected .*Fraction"):
        encode({"a": [1] * 300 + [Fraction(1, 2)] + [1] * 300}, "state")


def test_a_tensor_among_many_numbers() -> None:
    value = [*range(600), torch.ones(2)]
    check(through_json(value), value)


COLUMN = encode(list(range(600)))["$columns"]
DAMAGED: dict[str, Any] = {
    "nothing": None,
    "list": [1, 2],
    "no tensors": {},
    "no document": {"0": COLUMN["0"]},
    "numbers": {**COLUMN, "0": 3},
    "fewer": {**COLUMN, "0": COLUMN["0"][:-1]},
    "two values": {
        "columns": torch.frombuffer(
            bytearray(b'{"version": 1, "items": 2, "column": {"none": "0"}}'), dtype=torch.uint8
        ),
        "0": torch.zeros(2, dtype=torch.uint8),
    },
}


@pytest.mark.parametrize("columns", DAMAGED.values(), ids=DAMAGED)
def test_damaged(columns: Any) -> None:
    with pytest.raises(CheckpointCorruptError, match="expected"):
        decode({"$columns": columns}, "value")
    with pytest.raises(CheckpointCorruptError, match="expected"):
        decode([{"$columns": COLUMN, "more": 1}], "value")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.one_of(st.integers(), st.floats(), st.text(max_size=3)), min_size=512, max_size=530))
def test_any_long_list(value: list[Any]) -> None:
    check(through_json(tuple(value)), tuple(value))
