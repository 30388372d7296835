"""Tensors that are pickled in about their own bytes.

Pickle writes all the memory that a tensor lies in, once for each tensor in it: a row of a tensor of 300 rows takes the
bytes of 300. So tensors that show a part of some memory are replaced by copies before they are pickled.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.utils import _pytree as torch_pytree

from asyncbuf._runtime.atoms import ATOMS, holds_atoms

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

T = TypeVar("T")


def own_memory(tree: T) -> T:
    """Copy the tensors of a tree that show a part of some memory, or that have a history.

    Looks into lists, tuples, dicts and the other containers that torch knows as pytrees, and into dataclasses. What has
    memory of its own already, and what is no plain tensor, is not copied. What is there twice stays one.
    """
    return cast("T", OwnMemory(owned)(tree))


def packed_memory(tree: Any) -> Any:
    """As ``own_memory``, for trees of many small tensors: something else stands for tensors until it is unpickled.

    So a tensor takes some 50 bytes more than its own, where torch takes 300 and twenty times as long.
    """
    return OwnMemory(_packed, OwnMemory(owned))(tree)


def owned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with memory of its own and without history: itself, if it is one."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not _is_plain(tensor):
        return tensor
    if tensor.is_leaf and tensor.untyped_storage().nbytes() <= tensor.nbytes:
        return tensor
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
    return copy.requires_grad_() if tensor.requires_grad else copy


class OwnMemory:
    """Replaces tensors in a tree; nothing is changed in place.

    Args:
        tensor: what stands for a tensor.
        other: what stands for a value that is neither a tensor nor a list, tuple or dict; looked into by default.
    """

    def __init__(self, tensor: Callable[[torch.Tensor], Any], other: Callable[[Any], Any] | None = None) -> None:
        self._tensor = tensor
        self._other = self._inside if other is None else other
        # By id, beside the original, whose id must not be taken by another object meanwhile.
        self._known: dict[int, tuple[Any, Any]] = {}

    def __call__(self, value: Any) -> Any:
        """The value itself if nothing in it is replaced, else one of the same type."""
        if type(value) in ATOMS:
            return value
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        self._known[id(value)] = (value, value)  # a container that contains itself stays as it is
        replaced = self._replaced(value)
        self._known[id(value)] = (value, replaced)
        return replaced

    def _replaced(self, value: Any) -> Any:
        kind = type(value)
        if kind is list or kind is tuple:
            if holds_atoms(value):
                return value
            members = [self(member) for member in value]
            return value if _same(members, value) else kind(members)
        if kind is dict:
            members = [self(member) for member in value.values()]
            return value if _same(members, value.values()) else dict(zip(value, members, strict=True))
        return self._tensor(value) if isinstance(value, torch.Tensor) else self._other(value)

    def _inside(self, value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._dataclass(value)
        members, spec = torch_pytree.tree_flatten(value, is_leaf=lambda node: node is not value)
        if spec.is_leaf():
            return value
        replaced = [self(member) for member in members]
        return value if _same(replaced, members) else torch_pytree.tree_unflatten(replaced, spec)

    def _dataclass(self, value: Any) -> Any:
        members = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        replaced = {name: self(member) for name, member in members.items()}
        return value if _same(replaced.values(), members.values()) else dataclasses.replace(value, **replaced)


def _same(some: Any, others: Any) -> bool:
    return all(one is other for one, other in zip(some, others, strict=True))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies dense or strided in memory."""
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)


class _Packed:
    """Stands for a tensor in what is pickled, and is a tensor again when it was unpickled."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        plain = self._tensor.detach().resolve_conj().resolve_neg()
        bits = plain.reshape(-1).contiguous().view(torch.uint8).numpy()
        return _unpacked, (bits, plain.dtype, tuple(plain.shape), self._tensor.requires_grad)


def _unpacked(
    bits: np.ndarray[Any, np.dtype[np.uint8]], dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool
) -> torch.Tensor:
    tensor = torch.from_numpy(bits).view(dtype).reshape(shape)
    return tensor.requires_grad_() if requires_grad else tensor


def _packed(tensor: torch.Tensor) -> Any:
    is_simple = type(tensor) is torch.Tensor and _is_plain(tensor) and tensor.device.type == "cpu"
    return _Packed(tensor) if is_simple and not tensor.__dict__ else owned(tensor)
