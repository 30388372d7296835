"""Tensors of a state dict, and whether there is as much memory behind them as they say."""

from __future__ import annotations

from typing import Any

import torch

from asyncbuf.errors import CheckpointCorruptError


def check_memory(plain: Any, what: str) -> None:
    """Refuse tensors that would take more memory as copies than they do now, however small the file they come from.

    Tensors of a state dict have memory of their own. Here one may claim any size by being expanded, and many may claim
    the same memory.

    Args:
        plain: plain data.
        what: what it is, for messages.

    Raises:
        CheckpointCorruptError: there are such tensors.
    """
    left: dict[int, int] = {}
    seen: set[int] = set()
    nodes = [plain]
    while nodes:
        node = nodes.pop()
        is_tensor = isinstance(node, torch.Tensor)
        if not is_tensor and not isinstance(node, (dict, list)):
            continue
        if id(node) in seen:
            continue
        seen.add(id(node))
        if is_tensor:
            _claim(node, left, what)
        else:
            nodes += node.values() if isinstance(node, dict) else node


def _claim(tensor: torch.Tensor, left: dict[int, int], what: str) -> None:
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested or tensor.numel() == 0:
        return
    memory = tensor.untyped_storage()
    claimed = tensor.numel() * tensor.element_size()
    rest = left.get(memory.data_ptr(), memory.nbytes()) - claimed
    if rest < 0:
        raise CheckpointCorruptError(
            f"{what}: expected tensors with memory of their own, found {tensor.dtype} {list(tensor.shape)} over "
            f"{memory.nbytes()} bytes"
        )
    left[memory.data_ptr()] = rest
