"""Bit for bit comparison of batches, trees and state dicts, which says what differs first."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from asyncbuf._plain import tree
from asyncbuf._plain.nested import NestedTensor, parts_of
from asyncbuf.batch import Batch


def assert_same_batch(found: Batch, expected: Batch, where: str = "batch") -> None:
    """Raise an ``AssertionError`` that says what differs, unless two batches are the same bit for bit."""
    if (what := difference(found, expected)) is not None:
        raise AssertionError(f"{where}: {what}")


def difference(found: Any, expected: Any) -> str | None:
    """What differs first between two batches, trees of tensors and arrays, or state dicts; None if nothing does.

    Tensors and arrays are compared by dtype, shape and bits: a NaN equals the same NaN, and 0.0 is not -0.0. Tensors
    must agree in device and ``requires_grad``, but not in strides or history. Jagged tensors must have the same values
    and offsets.
    """
    pairs = [("", found, expected)]
    if isinstance(found, Batch) and isinstance(expected, Batch):
        names = ("number", "epoch", "last", "write_count", "lengths", "indices", "data")
        pairs = [(name, getattr(found, name), getattr(expected, name)) for name in names]
        pairs.append(("info", dict(found.info), dict(expected.info)))
    for path, one, other in pairs:
        (leaves, spec), (wanted, structure) = (tree.flatten(value, batched=False) for value in (one, other))
        if spec != structure:
            return f"{path or 'the value'} is {spec}, expected {structure}"
        for name, leaf, want in zip(spec.paths(path), leaves, wanted, strict=True):
            if (what := _leaf_difference(leaf, want)) is not None:
                return f"{name} {what}"
    return None


def _leaf_difference(found: Any, expected: Any) -> str | None:
    if isinstance(found, NestedTensor) and isinstance(expected, NestedTensor):
        # By what they consist of: torch counts the sets of offsets that it has seen, and shows that in the shape.
        return difference(parts_of(found), parts_of(expected))
    if (kind := _kind(found)) != (wanted := _kind(expected)):
        return f"is {kind}, expected {wanted}"
    where = np.flatnonzero(_cells(found) != _cells(expected))
    if not where.size:
        return None
    values = [leaf.reshape(-1)[where[0]] if hasattr(leaf, "reshape") else leaf for leaf in (found, expected)]
    return f"differs at element {where[0]}: {values[0]}, expected {values[1]}"


def _kind(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor | np.ndarray | np.generic):
        return type(leaf).__name__
    more = f" on {leaf.device}, requires_grad={leaf.requires_grad}" if isinstance(leaf, torch.Tensor) else ""
    return f"{type(leaf).__name__} {leaf.dtype} {list(leaf.shape)}{more}"


def _cells(leaf: Any) -> np.ndarray[Any, Any]:
    """Its elements, as bits where they are numbers."""
    if isinstance(leaf, torch.Tensor):
        plain = leaf.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
        return plain.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().view(f"V{leaf.itemsize}")
    if not isinstance(leaf, np.ndarray | np.generic | float | complex):
        return np.fromiter([leaf], object)
    array = np.asarray(leaf).reshape(-1)
    return array if array.dtype.hasobject else np.frombuffer(array.tobytes(), f"V{max(1, array.itemsize)}")
