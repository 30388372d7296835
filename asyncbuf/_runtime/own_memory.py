"""Tensors that are pickled in about their own bytes."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, cast

import torch
from torch.utils import _pytree as torch_pytree

T = TypeVar("T")


def own_memory(tree: T) -> T:
    """Copy the tensors of a tree that view a part of some memory: pickle writes all of it, once for each of them.

    Looks into the containers that torch knows as pytrees, and into dataclasses. What has memory of its own already, and
    what is no plain tensor, is not copied. A tensor that is there twice stays one.
    """
    return cast("T", _owned(tree, {}))


def _owned(tree: Any, copies: dict[int, torch.Tensor]) -> Any:
    def owned(leaf: Any) -> Any:
        if type(leaf) is not torch.Tensor:
            is_dataclass = dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
            return _fields_owned(leaf, copies) if is_dataclass else leaf
        if leaf.layout is not torch.strided or leaf.untyped_storage().nbytes() <= leaf.nbytes:
            return leaf
        if id(leaf) not in copies:
            copy = leaf.detach().clone(memory_format=torch.contiguous_format)
            copies[id(leaf)] = copy.requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    return torch_pytree.tree_map(owned, tree)


def _fields_owned(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    names = [field.name for field in dataclasses.fields(value) if field.init]
    return dataclasses.replace(value, **{name: _owned(getattr(value, name), copies) for name in names})
