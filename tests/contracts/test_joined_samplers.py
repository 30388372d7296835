"""The contract of samplers holds for those with joins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import (
    ConsumingSampler,
    FrameStack,
    Hindsight,
    JoinedSampler,
    ListStorage,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
)
from asyncbuf.testing import check_sampler
from tests.contracts.test_slice_samplers import items as slice_items
from tests.contracts.test_slice_samplers import many
from tests.helpers import some

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def reached(achieved: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    return (achieved == goal).float()


def goals(strategy: str) -> Hindsight:
    return Hindsight(reached, strategy=strategy, goal_key="goal", achieved_key="env", reward_key="value")


JOINED: dict[str, Callable[[], Sampler]] = {
    "returns": lambda: JoinedSampler(
        PrioritizedSampler(), NStep(3, 0.9, reward_key="value", terminated_key="done", next_keys=()), end_key="done"
    ),
    "of-rows-that-leave": lambda: JoinedSampler(
        ConsumingSampler(), NStep(3, 0.9, reward_key="value", terminated_key="done", next_keys=()), end_key="done"
    ),
    "frames": lambda: JoinedSampler(
        SamplerWithoutReplacement(), FrameStack(3, "value", pad="zero"), end_key="done", trajectory_key="env"
    ),
    "both": lambda: JoinedSampler(
        SliceSampler(slice_len=3, end_key="done", trajectory_key="env"),
        NStep(2, 1.0, reward_key="value", terminated_key=None, next_keys="trajectory"),
        FrameStack(2, "goal", next_key="next_goal"),
        end_key="done",
        trajectory_key="env",
    ),
    "future": lambda: JoinedSampler(RandomSampler(), goals("future"), end_key="done", trajectory_key="env"),
    "final": lambda: JoinedSampler(RandomSampler(), goals("final"), trajectory_key="trajectory"),
    "episode": lambda: JoinedSampler(PrioritizedSampler(), goals("episode"), end_key="done", trajectory_key="env"),
}


def items(count: int, start: int) -> dict[str, torch.Tensor]:
    found = slice_items(count, start)
    return {**found, "goal": found["trajectory"] % 3}


def separate_items(count: int, start: int) -> list[dict[str, Any]]:
    found = items(count, start)
    return [{name: column[i].clone() for name, column in found.items()} for i in range(count)]


@pytest.mark.loops_in_turn
@pytest.mark.parametrize("name", some(JOINED, fast=("frames", "both", "episode")))
@many
async def test_samplers_with_joins_pass(many: dict[str, Any], name: str) -> None:
    await check_sampler(JOINED[name], items=items, capacity=40, batch_size=6, other_batch_sizes=(3, 4, 9, 18), **many)


@pytest.mark.loops_in_turn
@pytest.mark.parametrize("name", some(["both", "future"], fast=["future"]))
async def test_items_of_another_storage(name: str) -> None:
    await check_sampler(
        JOINED[name],
        items=separate_items,
        make_storage=ListStorage,
        capacity=40,
        batch_size=6,
        seeds=range(1, 2),
        steps=12,
    )
