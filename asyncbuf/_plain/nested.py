"""Nested tensors of layout ``torch.jagged``, taken apart into dense ones and put together again."""

from __future__ import annotations

from typing import Any

import torch
from torch.nested._internal.nested_tensor import NestedTensor as NestedTensor

from asyncbuf.errors import CheckpointCorruptError

_ENTRIES = {"values", "offsets", "lengths", "axis", "grad"}


def parts_of(tensor: Any) -> dict[str, Any]:
    """What a jagged tensor consists of. Those over the same offsets show the very same tensor of offsets.

    Args:
        tensor: the jagged tensor.

    Returns:
        ``values``, the dense tensor that all rows are in; ``offsets`` and ``lengths`` of the rows there, integers
        ``[batch + 1]`` and ``[batch]`` (None where rows follow each other); ``axis``, the jagged axis; and whether it
        requires a ``grad``.
    """
    plain = tensor.detach()
    return {
        "values": plain.values(),
        "offsets": plain.offsets(),
        "lengths": plain.lengths(),
        "axis": tensor._ragged_idx,
        "grad": tensor.requires_grad,
    }


def from_parts(parts: Any) -> torch.Tensor:
    """The way back.

    Raises:
        CheckpointCorruptError: there is no such jagged tensor.
    """
    if not isinstance(parts, dict) or parts.keys() != _ENTRIES:
        raise CheckpointCorruptError("expected the parts of a jagged tensor, found something else")
    values, offsets, lengths, axis = (parts[name] for name in ("values", "offsets", "lengths", "axis"))
    is_dense = isinstance(values, torch.Tensor) and type(axis) is int and 0 < axis <= values.ndim
    if not is_dense or not _are_numbers(offsets) or not len(offsets):
        raise CheckpointCorruptError("expected values and offsets of a jagged tensor, found something else")
    size, steps = values.shape[axis - 1], offsets.diff()
    # Each by itself before any are added up, so that no sum overflows. There may be values that are in no row.
    is_sound = bool(((offsets >= 0) & (offsets <= size)).all())
    if lengths is None:
        is_sound = is_sound and bool((steps >= 0).all())
    else:
        is_sound = is_sound and _are_numbers(lengths) and lengths.shape == steps.shape
        is_sound = is_sound and bool(((lengths >= 0) & (lengths <= size)).all())
        is_sound = is_sound and bool((offsets[:-1] + lengths <= size).all())
    if not is_sound:
        raise CheckpointCorruptError(f"expected offsets of a jagged tensor from 0 to {size}, found others")
    made: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, offsets, lengths, axis)
    return made.requires_grad_() if parts["grad"] is True else made


def _are_numbers(tensor: Any) -> bool:
    is_tensor = isinstance(tensor, torch.Tensor) and tensor.ndim == 1
    return is_tensor and tensor.dtype in (torch.int64, torch.int32)
