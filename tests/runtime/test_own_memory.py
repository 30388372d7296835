"""Tensors are pickled in about their own bytes."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import torch
from tensordict import TensorDict

from asyncbuf._runtime.own_memory import own_memory


@dataclasses.dataclass
class Pair:
    left: Any
    right: Any


def views(count: int = 10) -> list[torch.Tensor]:
    return list(torch.arange(count * 1000.0).reshape(count, 1000))


def test_views_are_copied_out_of_what_they_view() -> None:
    tree: dict[str, Any] = {"a": views()[0], "b": [views()[1], (views()[2],)], "pair": Pair(views()[3], None)}
    owned = own_memory(tree)
    assert len(pickle.dumps(owned)) < 4 * 4000 + 4000 < len(pickle.dumps(tree))
    assert torch.equal(owned["a"], tree["a"])
    assert torch.equal(owned["pair"].left, tree["pair"].left)
    assert type(owned["pair"]) is Pair
    # What it was made from is as it was.
    assert tree["a"].untyped_storage().nbytes() == 40_000


def test_rows_of_a_strided_field_become_dense() -> None:
    column = torch.arange(60.0).reshape(20, 3)[:, 1]
    owned = own_memory(column)
    assert owned.is_contiguous()
    assert torch.equal(owned, column)
    assert owned.untyped_storage().nbytes() == column.nbytes


def test_tensor_dict_keeps_its_type() -> None:
    whole = TensorDict({"a": torch.ones(10, 1000), "b": {"c": torch.ones(10)}}, batch_size=10)
    owned = own_memory(whole[2:3])
    assert type(owned) is TensorDict
    assert owned.batch_size == torch.Size([1])
    assert owned["a"].untyped_storage().nbytes() == 4000


def test_what_has_memory_of_its_own_is_not_copied() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    kept = [torch.ones(3), torch.ones(1).expand(1000), torch.eye(3).to_sparse(), parameter, "text", None]
    assert all(one is other for one, other in zip(own_memory(kept), kept, strict=True))


def test_tensor_that_is_there_twice_stays_one() -> None:
    view = views()[0]
    tree: dict[str, Any] = {"one": view, "other": [view]}
    owned = own_memory(tree)
    assert owned["one"] is owned["other"][0]


def test_history_is_left_behind_as_pickle_does() -> None:
    whole = torch.ones(10, 1000, requires_grad=True)
    owned = own_memory(whole[0])
    assert owned.is_leaf
    assert owned.requires_grad
