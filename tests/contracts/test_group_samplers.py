"""The contract of samplers holds for those of groups."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import GroupSampler, JoinedSampler, ListStorage, MixtureSampler, NStep, Sampler
from asyncbuf.testing import check_sampler
from tests.tables import two_tables

if TYPE_CHECKING:
    from collections.abc import Callable

FEW: dict[str, Any] = {"seeds": range(3), "steps": 24}
MANY: dict[str, Any] = {"seeds": range(24), "steps": 120}
many = pytest.mark.parametrize(
    "many", [FEW, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])], ids=["few", "many"]
)


def items(count: int, start: int) -> dict[str, torch.Tensor]:
    """Items of which those of two groups come in turns."""
    number = torch.arange(start, start + count)
    return {"group": number // 8 * 2 + number % 2, "number": number, "reward": (number % 3).float(), "done": number < 0}


def separate_items(count: int, start: int) -> list[dict[str, Any]]:
    found = items(count, start)
    return [{name: column[i].item() for name, column in found.items()} for i in range(count)]


def thin(group: dict[str, Any]) -> bool:
    """Refuses every fifth group."""
    return bool(group["number"].sum() % 5)


SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "groups": lambda: GroupSampler("group", 4),
    "pairs": lambda: GroupSampler("group", 2),
    "alone": lambda: GroupSampler("number", 1),
    "filtered": lambda: GroupSampler("group", 2, filter=thin, filter_keys=("reward", "number")),
}


@pytest.mark.loops_in_turn
@pytest.mark.parametrize("name", SAMPLERS)
@many
async def test_samplers_of_groups_pass(many: dict[str, Any], name: str) -> None:
    await check_sampler(SAMPLERS[name], items=items, capacity=40, batch_size=4, other_batch_sizes=(1, 2, 8), **many)


@pytest.mark.loops_in_turn
@many
async def test_separate_items(many: dict[str, Any]) -> None:
    await check_sampler(
        SAMPLERS["filtered"], items=separate_items, make_storage=ListStorage, capacity=40, batch_size=4, **many
    )


@pytest.mark.loops_in_turn
@many
async def test_groups_in_tables(many: dict[str, Any]) -> None:
    await check_sampler(
        lambda: MixtureSampler({"one": SAMPLERS["filtered"](), "other": SAMPLERS["pairs"]()}, when_empty="others"),
        items=items,
        make_writer=partial(two_tables, 40),
        capacity=40,
        batch_size=4,
        other_batch_sizes=(2, 8),
        **many,
    )


async def test_joined_groups() -> None:
    await check_sampler(
        lambda: JoinedSampler(
            SAMPLERS["filtered"](),
            NStep(2, 0.9, reward_key="reward", terminated_key="done", next_keys=()),
            end_key="done",
        ),
        items=items,
        capacity=40,
        batch_size=4,
        other_batch_sizes=(2, 8),
        **FEW,
    )
