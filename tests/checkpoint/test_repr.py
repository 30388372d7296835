"""asyncio asks for the ``repr`` of what a task returned: that must not format tensors."""

from __future__ import annotations

from pathlib import Path

import torch

from asyncbuf import RestoredCheckpoint


def test_restored_checkpoint() -> None:
    values = {"weights": torch.ones(1000, 1000), "loss": 0.5, "note": "x" * 10_000}
    restored = RestoredCheckpoint(100, Path("runs/step-000100"), values)
    assert repr(restored) == (
        "RestoredCheckpoint(step=100, path='runs/step-000100', "
        "values={weights: float32 [1000, 1000], loss: float, note: str})"
    )
