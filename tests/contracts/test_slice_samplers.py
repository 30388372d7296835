"""The contract of samplers holds for those of slices and trajectories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import (
    ListStorage,
    PrioritizedSliceSampler,
    Sampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TrajectorySampler,
)
from asyncbuf.testing import check_sampler
from tests.helpers import some

if TYPE_CHECKING:
    from collections.abc import Callable

SLICES: dict[str, Callable[[], Sampler]] = {
    "one-after-the-other": lambda: SliceSampler(slice_len=3, end_key="done"),
    "in-turns": lambda: SliceSampler(slice_len=3, end_key="done", trajectory_key="env"),
    "num-slices": lambda: SliceSampler(num_slices=2, end_key="done", trajectory_key="env", strict_length=False),
    "by-trajectory": lambda: SliceSampler(slice_len=2, burn_in=1, trajectory_key="trajectory", strict_length=False),
    "passes": lambda: SliceSamplerWithoutReplacement(slice_len=3, end_key="done", trajectory_key="env"),
    "passes-one-after-the-other": lambda: SliceSamplerWithoutReplacement(slice_len=3, end_key="done", drop_last=True),
    "passes-drop": lambda: SliceSamplerWithoutReplacement(
        num_slices=2, end_key="done", strict_length=False, drop_last=True
    ),
    "passes-order": lambda: SliceSamplerWithoutReplacement(
        slice_len=3, end_key="done", trajectory_key="env", strict_length=False, shuffle=False
    ),
    "prioritized": lambda: PrioritizedSliceSampler(slice_len=3, end_key="done", trajectory_key="env"),
    "prioritized-short": lambda: PrioritizedSliceSampler(
        num_slices=2, trajectory_key="env", strict_length=False, priority_key="value"
    ),
}
FAST = ("in-turns", "by-trajectory", "passes-drop", "passes-order", "prioritized-short")
TRAJECTORIES: dict[str, Callable[[], Sampler]] = {
    "padded": lambda: TrajectorySampler(6, end_key="done", trajectory_key="env"),
    "packed": lambda: TrajectorySampler(6, end_key=("done",), padded=False),
}
FEW: dict[str, Any] = {"seeds": range(3), "steps": 20}
MANY: dict[str, Any] = {"seeds": range(18), "steps": 120}
many = pytest.mark.parametrize(
    "many", [FEW, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])], ids=["few", "many"]
)


def items(count: int, start: int) -> dict[str, torch.Tensor]:
    """Items of three environments that take turns without an order."""
    number = torch.arange(start, start + count)
    env = (number * 2654435761 >> 7) % 3
    value = (number % 7).to(torch.float32) / 4
    return {"value": value, "done": number % 5 == 4, "env": env, "trajectory": number // 5}


def separate_items(count: int, start: int) -> list[dict[str, Any]]:
    found = items(count, start)
    return [{name: column[i].item() for name, column in found.items()} for i in range(count)]


@pytest.mark.loops_in_turn
@pytest.mark.parametrize("name", some(SLICES, fast=FAST))
@many
async def test_samplers_of_slices_pass(many: dict[str, Any], name: str) -> None:
    await check_sampler(SLICES[name], items=items, capacity=40, batch_size=6, other_batch_sizes=(3, 4, 9, 18), **many)


@pytest.mark.loops_in_turn
@pytest.mark.parametrize("name", TRAJECTORIES)
@many
async def test_samplers_of_trajectories_pass(many: dict[str, Any], name: str) -> None:
    await check_sampler(
        TRAJECTORIES[name], items=items, capacity=80, batch_size=12, other_batch_sizes=(6, 7, 18), **many
    )


@pytest.mark.loops_in_turn
async def test_items_of_another_storage() -> None:
    few: dict[str, Any] = {"seeds": range(1, 2), "steps": 20}
    await check_sampler(
        SLICES["in-turns"], items=separate_items, make_storage=ListStorage, capacity=40, batch_size=6, **few
    )
