"""A quick look at sequences that hold numbers and strings alone."""

from __future__ import annotations

import fractions
from typing import Any

import numpy as np
import pytest
import torch

from asyncbuf._runtime.atoms import holds_atoms

FEW, MANY = 3, 600


class Failing:
    def __radd__(self, other: object) -> Any:
        raise KeyError("no sum")


@pytest.mark.parametrize("count", [0, 1, FEW, MANY])
@pytest.mark.parametrize("value", [1, -0.5, True, None, "a", b"a", 2j, float("nan"), 2**3000], ids=repr)
def test_atoms_of_one_kind(value: Any, count: int) -> None:
    assert holds_atoms([value] * count)
    assert holds_atoms((value,) * count)


@pytest.mark.parametrize("ends", [(1, 1), (0.5, True), ("a", 1), (1, None)])
def test_atoms_of_several_kinds(ends: tuple[Any, Any]) -> None:
    assert holds_atoms([ends[0], *[2, 0.5, None, "b"] * 9, ends[1]])


OTHERS = {
    "tensor": torch.tensor(1),
    "large tensor": torch.ones(5),
    "array": np.array(["a"], dtype=object),
    "numpy number": np.int64(3),
    "list": [1],
    "empty list": [],
    "object": object(),
    "failing": Failing(),
}


@pytest.mark.parametrize("around", [0, FEW, MANY])
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("number", [1, 0.5], ids=["int", "float"])
def test_something_else_anywhere(number: Any, kind: str, around: int) -> None:
    other = OTHERS[kind]
    for values in ([other, *[number] * around], [*[number] * around, other], [*[number] * around, other, number]):
        assert not holds_atoms(values)


def test_what_becomes_a_number_when_it_is_added_may_count_as_one() -> None:
    # None of these holds anything that matters to those who ask.
    assert holds_atoms([0.5, *[fractions.Fraction(1, 2)] * MANY, 0.5])
    assert not holds_atoms([0.5, *[fractions.Fraction(1, 2)] * FEW, 0.5])


def test_other_atoms_than_those_that_are_asked_for() -> None:
    numbers = frozenset({bool, int, float})
    assert holds_atoms([1, 2.5] * MANY, numbers)
    assert not holds_atoms([1, None] * MANY, numbers)
    assert not holds_atoms([1, *[None] * MANY, 1], numbers)
