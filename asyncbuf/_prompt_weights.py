"""Weights of prompts: as arguments, as a tree to draw from, and out of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._plain.savable import tensor_problem
from asyncbuf._plain.state import described
from asyncbuf._runtime.arguments import cpu_tensor
from asyncbuf.errors import CheckpointCorruptError
from asyncbuf.sampler._sum_tree import SumTree

if TYPE_CHECKING:
    from asyncbuf.rows import Float64Array, Int64Array


def ids_of(ids: Any, length: int) -> Int64Array:
    """Ids of prompts as an array of its own: int64 ``[n]``."""
    found = cpu_tensor(ids, "ids", expected="integers")
    if found.numel() and (found.is_floating_point() or found.is_complex() or found.dtype is torch.bool):
        raise TypeError(f"ids: expected integers, found {found.dtype}")
    rows: Int64Array = found.to(torch.int64).reshape(-1).numpy()
    if len(rows) and not 0 <= rows.min() <= rows.max() < length:
        raise ValueError(f"ids: expected numbers from 0 to {length - 1}, found {rows.min()} to {rows.max()}")
    return rows.copy()


def numbers_of(weights: Any, name: str, expected: int) -> Float64Array:
    """Weights as an array of its own: float64 ``[expected]``."""
    found = cpu_tensor(weights, name, expected="numbers")
    if found.is_complex() or (found.dtype is torch.bool and found.numel()):
        raise TypeError(f"{name}: expected real numbers, found {found.dtype}")
    values: Float64Array = found.to(torch.float64).numpy()
    if isinstance(weights, float):
        values = np.array(weights)  # not by way of float32
    elif isinstance(weights, list | tuple):
        values = np.asarray(weights, np.float64)
    if values.size != expected and values.ndim:
        raise ValueError(f"{name}: expected {expected} numbers, found {values.size}")
    if not (np.isfinite(values) & (values >= 0)).all():
        raise ValueError(f"{name}: expected finite numbers that are not negative, found others")
    return np.broadcast_to(values.reshape(-1) if values.ndim else values, (expected,)).copy()


def tree_of(weights: Float64Array, name: str) -> SumTree:
    """Weights as a tree, if one of them at least is not 0."""
    tree = SumTree(len(weights))
    tree.set(np.arange(len(weights)), weights)
    if not 0 < tree.total < np.inf:
        raise ValueError(f"{name}: expected some whose sum is positive and finite, found {tree.total}")
    return tree


def saved_tree(weights: torch.Tensor, length: int, name: str) -> SumTree:
    """Weights of a checkpoint as a tree."""
    if weights.dtype is not torch.float64 or tensor_problem(weights) is not None or weights.shape != (length,):
        raise CheckpointCorruptError(f"{name}: expected {length} weights as float64, found {described(weights)}")
    try:
        return tree_of(numbers_of(weights, "weights", length), "weights")
    except ValueError as error:
        raise CheckpointCorruptError(f"{name}: {error}") from error
