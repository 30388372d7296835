"""What the modules of this folder share."""

from __future__ import annotations

from typing import Any

from asyncbuf import ReplayBuffer, TensorStorage


def make(capacity: int = 100, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(TensorStorage(capacity), **{"batch_size": 4, **options})
