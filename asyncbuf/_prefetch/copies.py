"""Private copies: what a function of the user may change without changing what is kept for a second try.

A copy is independent of where its original has been. Its tensors are contiguous, as those that come out of a checkpoint
are, so that a sum over them has the same last bits. A tensor that stands in two places stands in both in the copy, too.
Different tensors over one memory, such as a view beside its base, become independent; in a checkpoint they do as well.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._prefetch.containers import ATOMS, holds_atoms_only, is_tensor_collection, kind_of

if TYPE_CHECKING:
    from asyncbuf.batch import Draw

_MOST_LEAVES = 64
# Below this many elements, looking for expanded axes would cost more than copying them.
_SMALL = 4096


def private(value: Any) -> Any:
    """A copy whose tensors, arrays and containers are its own.

    Tensors keep their history of gradients. An object that cannot be copied, such as a lock, is shared.

    Args:
        value: the data of a batch.

    Returns:
        The copy, of the same types.
    """
    return _Copier().copy(value)


def private_draw(draw: Draw) -> Draw:
    """A draw whose tensors and dicts may be changed."""
    # All at once: what was copied is told by its id, which another object may have once it is gone.
    indices, info, lengths, joins = private((draw.indices, dict(draw.info), draw.lengths, dict(draw.joins)))
    return draw._replace(indices=indices, info=info, lengths=lengths, joins=joins)


def is_small(value: Any, nbytes: int) -> bool:
    """Whether a copy takes so little time that it may be made on the event loop. Looks at a few parts only.

    Args:
        value: the data of a batch.
        nbytes: up to how many bytes of tensors and arrays.
    """
    left, count = [value], 0
    while left:
        part = left.pop()
        count += 1
        if isinstance(part, torch.Tensor | np.ndarray):
            nbytes -= part.nbytes
        elif type(part) not in ATOMS:
            kind = kind_of(part)
            if kind is None or (hasattr(part, "__len__") and len(part) > _MOST_LEAVES):
                return False
            left += kind.parts(part)
        if nbytes < 0 or count + len(left) > _MOST_LEAVES:
            return False
    return True


class _Copier:
    """Makes one copy. Knows what it has copied already."""

    def __init__(self) -> None:
        # Also that of copy.deepcopy, which objects of unknown classes go through.
        self._memo: dict[int, Any] = {}
        self._alive: list[Any] = []  # what a container has made up just now: its id must not be used again

    def copy(self, value: Any) -> Any:
        cls = type(value)
        if cls in ATOMS:
            return value
        key = id(value)
        made = self._memo.get(key)
        if made is None:
            made = self._memo[key] = _cloned(value) if cls is torch.Tensor else self._made(value, cls)
        return made

    def _made(self, value: Any, cls: type) -> Any:
        if cls is dict:
            return {key: self.copy(part) for key, part in value.items()}
        if isinstance(value, torch.Tensor):
            return _cloned(value)
        if cls is np.ndarray and not value.dtype.hasobject:
            return value.copy(order="C")
        if (cls is list or cls is tuple) and holds_atoms_only(value):
            return value[:]
        if is_tensor_collection(value):
            return value.apply(self.copy)
        kind = kind_of(value)
        if kind is None:
            return self._deep(value)
        parts = kind.parts(value)
        self._alive.append(parts)
        try:
            return kind.rebuild(value, parts, [self.copy(part) for part in parts])
        except TypeError:
            return self._deep(value)

    def _deep(self, value: Any) -> Any:
        try:
            return copy.deepcopy(value, self._memo)
        except Exception:
            return value  # nobody can copy it


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return tensor.clone()
    if type(tensor) is torch.nn.Parameter:
        return torch.nn.Parameter(_dense(tensor.detach()), tensor.requires_grad)
    if not tensor.requires_grad:
        return _dense(tensor)
    # A leaf stays one, so that it gets a gradient of its own.
    return _dense(tensor.detach()).requires_grad_() if tensor.is_leaf else _dense(tensor)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous():
        return tensor.clone()
    if tensor.numel() > _SMALL and 0 in tensor.stride():
        # One that was expanded takes no more memory afterwards.
        once = tensor[tuple(slice(1) if step == 0 else slice(None) for step in tensor.stride())]
        return once.clone(memory_format=torch.contiguous_format).expand(tensor.shape)
    return tensor.contiguous()
