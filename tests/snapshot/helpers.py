"""Buffers to take snapshots of, and what the modules of this folder look up in a state dict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import ReplayBuffer, TensorStorage
from asyncbuf.testing import WAYS
from tests.helpers import seeded
from tests.resume_helpers import items_of

if TYPE_CHECKING:
    from asyncbuf import Storage

DEPTHS = (0, 1, 2, 3, 4, 8, 64)
ITEMS = 20

State = dict[str, Any]

every_way = pytest.mark.parametrize("way", WAYS)
in_memory_and_on_disk = pytest.mark.parametrize("way", WAYS[:3])
slow = pytest.mark.slow


def buffer_with(**settings: Any) -> ReplayBuffer:
    """A buffer without items: batches of 3, two of them prefetched."""
    storage: Storage = settings.pop("storage", None) or TensorStorage(ITEMS)
    generator = seeded(settings.pop("seed", 0))
    arguments: dict[str, Any] = {"batch_size": 3, "prefetch": 2, "generator": generator}
    return ReplayBuffer(storage, **(arguments | settings))


async def filled(items: int = ITEMS, **settings: Any) -> ReplayBuffer:
    """The same with items."""
    buffer = buffer_with(**settings)
    await buffer.extend(items_of(items))
    return buffer


def queue_of(state: dict[str, Any]) -> list[dict[str, Any]]:
    queue: list[dict[str, Any]] = state["prefetch"]["queue"]
    return queue


def rows_of(state: dict[str, Any], name: str) -> torch.Tensor:
    return torch.cat([chunk[name] for chunk in state["storage"]["chunks"]])
