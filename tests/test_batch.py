"""What a consumer gets."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.utils import _pytree as torch_pytree

from asyncbuf import Batch, Draw
from asyncbuf.batch import Ticket


def make(**changes: Any) -> Batch:
    fields: dict[str, Any] = {
        "data": {"obs": torch.arange(6.0).reshape(3, 2), "next": [torch.ones(3), {"done": torch.zeros(3)}]},
        "indices": torch.tensor([4, 1, 2]),
        "info": {"weight": torch.tensor([1.0, 2.0, 3.0])},
        "number": 9,
        "epoch": 2,
        "last": True,
    }
    return Batch(**{**fields, **changes})


def test_key_reaches_into_the_data() -> None:
    batch = make()
    assert batch["obs"] is batch.data["obs"]
    with pytest.raises(KeyError):
        batch["indices"]
    assert make(data=torch.arange(3))[1].item() == 1
    assert make(data=(5, 6))[1] == 6


def test_length_is_the_number_of_items() -> None:
    assert len(make()) == 3
    assert len(make(indices=torch.arange(0))) == 0


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Batch)])
def test_frozen(name: str) -> None:
    batch = make()
    before = getattr(batch, name)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(batch, name, None)
    assert getattr(batch, name) is before


def test_defaults() -> None:
    indices = torch.arange(2)
    batch = Batch(None, indices, {}, 0)
    assert (batch.epoch, batch.last) == (None, False)
    draw = Draw(indices)
    assert (draw.info, draw.epoch, draw.last) == ({}, None, False)
    with pytest.raises(TypeError):
        draw.info["weight"] = 1  # type: ignore[index]
    with pytest.raises(AttributeError):
        draw.last = True  # type: ignore[misc]
    with pytest.raises(AttributeError):
        Ticket(0, draw, 1).number = 2  # type: ignore[misc]


def test_batches_are_equal_only_to_themselves() -> None:
    # Comparing tensors would give tensors; and a batch may be a key.
    batch = make()
    assert batch != make()
    assert {batch: 1}[batch] == 1


def test_tree_map_reaches_every_tensor() -> None:
    batch = make()
    mapped = torch_pytree.tree_map(lambda leaf: leaf * 2 if isinstance(leaf, torch.Tensor) else leaf, batch)
    assert type(mapped) is Batch
    assert torch.equal(mapped["obs"], batch["obs"] * 2)
    assert torch.equal(mapped["next"][0], torch.full((3,), 2.0))
    assert mapped.indices.tolist() == [8, 2, 4]
    assert mapped.info["weight"].tolist() == [2, 4, 6]
    assert (mapped.number, mapped.epoch, mapped.last) == (9, 2, True)
    # The original is as it was.
    assert batch.indices.tolist() == [4, 1, 2]


def test_tree_map_over_two_batches() -> None:
    total = torch_pytree.tree_map(torch.add, make(), make())
    assert torch.equal(total["obs"], make()["obs"] * 2)


def test_pytree_structure_holds_what_is_no_tensor() -> None:
    leaves, spec = torch_pytree.tree_flatten(make())
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    assert len(leaves) == 5
    assert spec == torch_pytree.tree_structure(make())
    assert spec != torch_pytree.tree_structure(make(number=10))
    back = torch_pytree.tree_unflatten(leaves, spec)
    assert back["obs"] is leaves[0]
    assert (back.number, back.epoch, back.last) == (9, 2, True)


def test_pytree_structure_can_be_stored() -> None:
    leaves, spec = torch_pytree.tree_flatten(make())
    restored = torch_pytree.treespec_loads(torch_pytree.treespec_dumps(spec))
    back = torch_pytree.tree_unflatten(leaves, restored)
    assert (type(back), back.number, back.epoch, back.last) == (Batch, 9, 2, True)


def test_info_of_any_mapping() -> None:
    batch = make(info=MappingProxyType({"weight": torch.ones(3)}))
    mapped = torch_pytree.tree_map(lambda leaf: leaf + 1, batch)
    assert mapped.info["weight"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickling(protocol: int) -> None:
    batch = make()
    for found in (pickle.loads(pickle.dumps(batch, protocol)), copy.deepcopy(batch)):
        assert type(found) is Batch
        assert torch.equal(found["obs"], batch["obs"])
        assert torch.equal(found.indices, batch.indices)
        assert torch.equal(found.info["weight"], batch.info["weight"])
        assert (found.number, found.epoch, found.last) == (9, 2, True)
