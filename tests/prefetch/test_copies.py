"""Private copies of batches."""

from __future__ import annotations

import collections
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from asyncbuf import Draw
from asyncbuf._prefetch import containers
from asyncbuf._prefetch.copies import is_small, private, private_draw
from tests.prefetch.containers import CONTAINERS, ReadOnly

if TYPE_CHECKING:
    from tests.prefetch.containers import Way


@pytest.mark.parametrize("way", CONTAINERS.values(), ids=CONTAINERS)
def test_containers_keep_their_type_and_share_nothing(way: Way) -> None:
    make, tensor_of = way
    value = make(torch.ones(4))
    copied = private(value)
    assert type(copied) is type(value)
    assert copied is not value
    tensor_of(copied).add_(1)
    assert tensor_of(copied).tolist() == [2] * 4
    assert tensor_of(value).tolist() == [1] * 4


TENSORS = {
    "dense": torch.arange(6.0).reshape(2, 3),
    "strided": torch.arange(12.0).reshape(2, 6)[:, ::2],
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(3),
    "expanded": torch.arange(3.0)[:, None].expand(3, 5000),
    "complex": torch.complex(torch.arange(3.0), torch.ones(3)).conj(),
    "sparse": torch.eye(3).to_sparse(),
    "bool": torch.tensor([True, False]),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(name: str) -> None:
    tensor = TENSORS[name]
    copied = private(tensor)
    assert copied.dtype == tensor.dtype
    assert copied.shape == tensor.shape
    assert torch.equal(copied.to_dense(), tensor.to_dense()) if tensor.is_sparse else torch.equal(copied, tensor)
    if not tensor.is_sparse:
        assert not tensor.numel() or copied.data_ptr() != tensor.data_ptr()
        assert copied.is_contiguous() or name == "expanded"


def test_an_expanded_tensor_takes_no_more_memory() -> None:
    copied = private(torch.arange(3.0)[:, None].expand(3, 1 << 20))
    assert copied.untyped_storage().nbytes() == 12


def test_history_of_gradients_is_kept() -> None:
    leaf = torch.ones(2, requires_grad=True)
    node = leaf * 2
    copies = private({"leaf": leaf, "node": node, "parameter": torch.nn.Parameter(torch.ones(2))})
    assert copies["leaf"].is_leaf
    assert copies["leaf"].requires_grad
    assert type(copies["parameter"]) is torch.nn.Parameter
    (copies["node"] * copies["leaf"]).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2, 2]
    assert copies["leaf"].grad.tolist() == [2, 2]
    frozen = private(torch.nn.Parameter(torch.ones(2), requires_grad=False))
    assert type(frozen) is torch.nn.Parameter
    assert not frozen.requires_grad


def test_what_stands_in_two_places_stays_one() -> None:
    tensor, array, inner = torch.ones(2), np.ones(2), [1]
    copied = private({"a": tensor, "b": (tensor, [array, array]), "c": [inner, inner]})
    assert copied["a"] is copied["b"][0]
    assert copied["b"][1][0] is copied["b"][1][1]
    assert copied["c"][0] is copied["c"][1]
    assert copied["a"] is not tensor


class Thing:
    def __init__(self) -> None:
        self.tensor = torch.ones(2)
        self.list = [1]


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (np.ones(3), lambda value: value.fill(2)),
        (np.array([[1], None], dtype=object), lambda value: value[0].append(2)),
        (np.ma.masked_array([1, 2], mask=[True, False]), lambda value: value.mask.fill(True)),
        (bytearray(b"ab"), lambda value: value.append(1)),
        ([1, 2, 3], lambda value: value.append(2)),
        ([1, "a", None, [2]], lambda value: value[3].append(2)),
        ([1.5] * 100, lambda value: value.append(2)),
        ([1] * 100 + [[2]], lambda value: value[-1].append(2)),
        ([np.float32(1)] * 100, lambda value: value.append(2)),
        ({1, 2}, lambda value: value.add(3)),
        (collections.Counter("ab"), lambda value: value.update("c")),
        (Thing(), lambda value: value.list.append(2)),
        (Thing(), lambda value: value.tensor.add_(2)),
    ],
    ids=str,
)
def test_what_may_change_is_copied(value: Any, change: Any) -> None:
    kept = private(value)
    before = [repr(vars(kept)) if isinstance(kept, Thing) else repr(kept)]
    change(private(value))
    change(value)
    assert [repr(vars(kept)) if isinstance(kept, Thing) else repr(kept)] == before


@pytest.mark.parametrize(
    "value",
    [None, 1, 2.5, "text", b"bytes", True, 1j, torch.float32, torch.device("cpu"), range(3), np.float32(1), int],
)
def test_what_cannot_change_is_not_copied(value: Any) -> None:
    assert private(value) is value
    assert private([value, [value]]) == [value, [value]]


def test_what_cannot_be_copied_is_shared() -> None:
    lock = threading.Lock()
    assert private({"lock": lock})["lock"] is lock
    mapping = ReadOnly({"lock": lock})
    assert private(mapping)["lock"] is lock


def test_a_tensordict_keeps_names_and_what_is_no_tensor() -> None:
    value = TensorDict(
        {"x": torch.ones(2), "inner": {"y": torch.ones(2)}, "text": NonTensorData("text", batch_size=[2])},
        batch_size=[2],
        names=["rows"],
    )
    copied = private(value)
    assert copied.names == ["rows"]
    assert copied["text"] == "text"
    copied["inner", "y"].add_(1)
    assert value["inner", "y"].tolist() == [1, 1]


class Fleeting(ReadOnly):
    """Makes its values anew each time."""

    def __getitem__(self, key: str) -> Any:
        return torch.full((2,), float(super().__getitem__(key)))


def test_values_that_are_made_up_on_the_spot_are_not_mixed_up() -> None:
    copied = private([Fleeting({str(n): n for n in range(50)}) for _ in range(50)])
    assert all(values[str(n)].tolist() == [n, n] for values in copied for n in range(50))


def test_a_draw_gets_dicts_of_its_own() -> None:
    draw = Draw(torch.arange(3), {"weight": torch.ones(3)}, joins={"next": torch.arange(3)}, shape=(3, 1), last=True)
    copied = private_draw(draw)
    assert copied.shape == (3, 1)
    assert copied.last
    copied.indices.add_(1)
    copied.info["weight"].add_(1)
    copied.joins["next"].add_(1)
    assert draw.indices.tolist() == [0, 1, 2]
    assert draw.info["weight"].tolist() == [1, 1, 1]
    assert draw.joins["next"].tolist() == [0, 1, 2]
    assert private_draw(Draw(torch.arange(3))).info == {}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.zeros(10), True),
        ({"x": torch.zeros(10), "y": [np.zeros(3), "text"]}, True),
        (torch.zeros(1001), False),
        ({"x": torch.zeros(600), "y": np.zeros(600, np.float32)}, False),
        ([1] * 1000, False),
        ([[1] * 10] * 10, False),
        (Thing(), False),
    ],
    ids=["tensor", "dict", "large tensor", "large together", "long list", "many parts", "unknown"],
)
def test_small(value: Any, expected: bool) -> None:
    assert is_small(value, 4000) is expected


class Adds:
    """Can be added to a number, which leaves no trace of it."""

    def __radd__(self, other: Any) -> str:
        return "a string"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], True),
        ([1, 2.5, True], True),
        ([1] * 100, True),
        ([0.5] * 100, True),
        (["a"] * 100, True),
        ([1, "a", None] * 10, True),
        ([np.int64(1)] * 100, True),
        ([1] * 100 + [torch.tensor(1)], False),
        ([1] * 100 + [[1]], False),
        ([1] * 100 + [Adds()], False),
        ([1] * 100 + [np.ones(1)], False),
        ([1] * 100 + [np.void(b"a")], False),
        ([[1]], False),
        ((1, 2), True),
    ],
    ids=str,
)
def test_lists_of_numbers(values: Any, expected: bool) -> None:
    assert containers.holds_atoms_only(values) is expected
