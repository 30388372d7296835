"""Jagged tensors in what is saved: they come back with their offsets, and forged ones are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncbuf import CheckpointCorruptError, ListStorage, RowRange
from asyncbuf._plain.codec import decode, encode, join, split
from asyncbuf.testing import difference

OFFSETS = torch.tensor([0, 2, 2, 5])


def jagged(values: torch.Tensor, offsets: torch.Tensor = OFFSETS, **options: Any) -> Any:
    return torch.nested.nested_tensor_from_jagged(values, offsets, **options)


def there_and_back(value: Any) -> Any:
    return decode(join(*split(encode(value))))


@pytest.mark.parametrize(
    "value",
    [
        jagged(torch.arange(5.0)),
        jagged(torch.arange(10).reshape(5, 2)),
        jagged(torch.arange(10).reshape(2, 5), jagged_dim=2),
        jagged(torch.arange(9.0), lengths=torch.tensor([1, 0, 3])),
        jagged(torch.arange(15.0).reshape(3, 5)[:, 1:].flatten(), torch.tensor([1, 4, 8, 12])),
        jagged(torch.zeros(0), torch.tensor([0])),
        jagged(torch.arange(5.0)).requires_grad_(),
    ],
    ids=["plain", "axis", "other-axis", "lengths", "gaps", "empty", "grad"],
)
def test_they_come_back(value: Any) -> None:
    found = there_and_back(value)
    assert difference(found, value) is None
    assert found.shape[0] == value.shape[0]
    assert found.requires_grad == value.requires_grad
    assert difference(found.detach() * 2, value) is not None or not value.numel()


def test_those_over_the_same_offsets_stay_together() -> None:
    found = there_and_back({"a": jagged(torch.arange(5.0)), "b": [jagged(torch.ones(5))]})
    assert (found["a"] + found["b"][0]).values().tolist() == [1, 2, 3, 4, 5]


def test_what_differs_is_told() -> None:
    value = jagged(torch.arange(5.0))
    assert "offsets differs at element 1" in str(difference(jagged(torch.arange(5.0), OFFSETS.clamp(min=1) - 1), value))
    assert "values differs at element 4" in str(difference(jagged(torch.tensor([0.0, 1, 2, 3, 5])), value))
    assert "expected" in str(difference(torch.arange(5.0), value))


def test_a_list_of_items_has_them() -> None:
    storage, other = ListStorage(3), ListStorage(3)
    storage.write(storage.prepare([{"x": jagged(torch.arange(5.0))}]), [RowRange(0, 0, 1)])
    other.load_state_dict(storage.state_dict())
    assert difference(other.gather(torch.tensor([0])), storage.gather(torch.tensor([0]))) is None


@pytest.mark.parametrize(
    ("name", "forged"),
    [
        ("values", None),
        ("values", torch.ones(4)),
        ("values", torch.tensor(1.0)),
        ("offsets", None),
        ("offsets", torch.tensor([-1, 2, 2, 5])),
        ("offsets", torch.tensor([0, 3, 2, 5])),
        ("offsets", torch.tensor([0, 2, 2, 2**62])),
        ("offsets", torch.tensor([0.0, 2, 2, 5])),
        ("offsets", torch.zeros(0, dtype=torch.int64)),
        ("offsets", torch.tensor([[0, 5]])),
        ("lengths", torch.tensor([1, 1])),
        ("lengths", torch.tensor([-1, 0, 1])),
        ("lengths", torch.tensor([1, 0, 4])),
        ("lengths", torch.tensor([1, 0, 2**63 - 1])),
        ("lengths", "x"),
        ("axis", 0),
        ("axis", 2),
        ("axis", True),
    ],
)
def test_forged_ones_are_refused(name: str, forged: Any) -> None:
    plain = encode(jagged(torch.arange(5.0)))
    plain["value"][name] = encode(forged)
    with pytest.raises(CheckpointCorruptError, match="expected"):
        decode(plain)


def test_parts_that_are_missing_are_noticed() -> None:
    plain = encode(jagged(torch.arange(5.0)))
    for name in list(plain["value"]):
        worse = {**plain, "value": {key: value for key, value in plain["value"].items() if key != name}}
        with pytest.raises(CheckpointCorruptError, match="expected the parts of a jagged tensor"):
            decode(worse)
