"""Values in a few words."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from asyncbuf._runtime.summary import listed, literal, summary

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Pair:
    left: Any
    right: Any


class Unspeakable:
    """Raises whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __repr__(self) -> str:
        raise ValueError("no text")

    def __len__(self) -> int:
        raise ZeroDivisionError


class BrokenMapping(UserDict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("no items")


class LoudTensor(torch.Tensor):
    """Says whether its values were looked at."""

    looked_at = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("__repr__", "tolist", "item", "__str__", "__format__"):
            LoudTensor.looked_at = True
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


FLOATS = torch.ones(4, 2)


WORDS: list[tuple[Any, str]] = [
    (FLOATS, "float32 [4, 2]"),
    (torch.tensor(1), "int64 []"),
    (torch.ones(2, device="meta"), "float32 [2] meta"),
    (torch.eye(2).to_sparse(), "float32 [2, 2] sparse_coo"),
    (np.ones(3), "float64 array [3]"),
    ({}, "{}"),
    ({"obs": FLOATS, "done": FLOATS[:, 0]}, "{obs: float32 [4, 2], done: float32 [4]}"),
    ({"obs": {"image": FLOATS}}, "{obs: {image: float32 [4, 2]}}"),
    (OrderedDict(a=FLOATS), "OrderedDict{a: float32 [4, 2]}"),
    (MappingProxyType({"a": 1}), "mappingproxy{a: int}"),
    ([FLOATS, "text"], "[float32 [4, 2], str]"),
    ((FLOATS,), "(float32 [4, 2],)"),
    ((), "()"),
    (Point(FLOATS, None), "Point(x: float32 [4, 2], y: None)"),
    (Pair(1.5, [True]), "Pair(left: float, right: [bool])"),
    (Pair, "type"),
    (TensorDict({"a": FLOATS}, batch_size=4), "TensorDict{a: float32 [4, 2]}"),
    (None, "None"),
    (Unspeakable(), "Unspeakable"),
    (BrokenMapping(a=1), "BrokenMapping"),
    ({"a": Unspeakable()}, "{a: Unspeakable}"),
    ({"two\nlines": 1}, "{'two\\nlines': int}"),
    ({3: 1, (1, "a"): 2, None: 3, (0, True): 4}, "{3: int, (int, str): int, None: int, (0, True): int}"),
    ({Unspeakable(): 1}, "{Unspeakable: int}"),
    ({"k" * 100: 1}, f"{{{'k' * 40}...: int}}"),
    ({"a": {"b": {"c": {"d": {"e": 1}}}}}, "{a: {b: {c: {d: {...}}}}}"),
]


@pytest.mark.parametrize("case", range(len(WORDS)))  # by number: pytest asks a value for its name
def test_in_words(case: int) -> None:
    value, expected = WORDS[case]
    assert summary(value) == expected


def test_what_does_not_fit_is_counted() -> None:
    assert summary({f"key_{i}": FLOATS for i in range(1000)}, room=60) == (
        "{key_0: float32 [4, 2], key_1: float32 [4, 2], key_2: float32 [4, 2], ... 997 more}"
    )
    assert summary([1] * 20) == "[int, int, int, int, int, int, int, int, ... 12 more]"
    assert summary({"a": {"b": FLOATS, "c": FLOATS}, "d": FLOATS}, room=12).endswith("... 1 more}")


def test_length_is_bounded_whatever_the_value() -> None:
    deep: Any = FLOATS
    wide: Any = FLOATS
    for _ in range(50):
        deep = {"next": deep}
    for _ in range(6):
        wide = [wide] * 8
    endless: list[Any] = []
    endless.append(endless)
    many = {f"key {i}": {f"key {j}": FLOATS for j in range(50)} for i in range(50)}
    for value in (deep, wide, endless, many, ["x" * 10_000] * 10_000, type("N" * 5000, (), {})()):
        assert len(summary(value)) < 400


def test_no_value_of_a_tensor_is_looked_at() -> None:
    tensor = torch.ones(3).as_subclass(LoudTensor)
    assert summary({"a": tensor}) == "{a: float32 [3]}"
    assert not LoudTensor.looked_at


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, "3"),
        (-0.5, "-0.5"),
        (True, "True"),
        (None, "None"),
        ((8, 32), "(8, 32)"),
        ((8,), "(8,)"),
        ((8, "a"), "(int, str)"),
        ("text", "str"),
        (FLOATS, "float32 [4, 2]"),
    ],
)
def test_literal(value: Any, expected: str) -> None:
    assert literal(value) == expected


def test_literal_of_more_digits_than_python_turns_into_text() -> None:
    assert literal(10**5000) == "int"
    assert literal((1, 10**5000)) == "(int, int)"


def test_listed() -> None:
    assert listed(["obs", "action"]) == "obs, action"
    assert listed([]) == ""
    assert listed(range(5), most=3) == "0, 1, 2, ..."
    assert listed(range(3), most=3) == "0, 1, 2"
