"""The contract of samplers holds for mixtures of tables."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import (
    ConsumingSampler,
    MixtureSampler,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    StratifiedSampler,
    TrajectorySampler,
    WeightedSampler,
)
from asyncbuf.testing import check_sampler
from tests.contracts.broken_samplers import WeightSampler
from tests.contracts.test_slice_samplers import items
from tests.helpers import some
from tests.tables import two_tables

if TYPE_CHECKING:
    from collections.abc import Callable

SLICES: dict[str, Any] = {"slice_len": 3, "end_key": "done", "trajectory_key": "env"}
MIXTURES: dict[str, Callable[[], Sampler]] = {
    "random": lambda: MixtureSampler({"one": 0.3, "other": 0.7}),
    "random-order": lambda: MixtureSampler({"other": 0.3, "one": 0.7}, order="random"),
    "prioritized": lambda: MixtureSampler({"one": RandomSampler(), "other": PrioritizedSampler()}),
    "passes": lambda: MixtureSampler({"one": SamplerWithoutReplacement(), "other": WeightSampler()}),
    "weighted-others": lambda: MixtureSampler(
        {"one": WeightedSampler("value"), "other": StratifiedSampler("done", {0: 0.5, 1: 0.5})}, when_empty="others"
    ),
    "consuming": lambda: MixtureSampler({"one": ConsumingSampler(), "other": RandomSampler()}, when_empty="others"),
    "consuming-both": lambda: MixtureSampler({"one": ConsumingSampler(), "other": ConsumingSampler(2, "random")}),
}
SEQUENCES: dict[str, Callable[[], Sampler]] = {
    "slices": lambda: MixtureSampler({"one": SliceSampler(**SLICES), "other": PrioritizedSliceSampler(**SLICES)}),
    "packed": lambda: MixtureSampler(
        {
            "one": TrajectorySampler(6, end_key="done", padded=False),
            "other": TrajectorySampler(6, end_key="done", padded=False),
        },
        when_empty="others",
    ),
}
FEW: dict[str, Any] = {"seeds": range(3), "steps": 20}
MANY: dict[str, Any] = {"seeds": range(18), "steps": 120}
many = pytest.mark.parametrize(
    "many", [FEW, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])], ids=["few", "many"]
)


@pytest.mark.loops_in_turn
@pytest.mark.parametrize("name", some(MIXTURES, fast=("random-order", "passes", "weighted-others", "consuming")))
@many
async def test_mixtures_pass(many: dict[str, Any], name: str) -> None:
    await check_sampler(MIXTURES[name], make_writer=partial(two_tables, 24), capacity=24, **many)


@pytest.mark.loops_in_turn
@pytest.mark.parametrize("name", SEQUENCES)
@many
async def test_mixtures_of_sequences_pass(many: dict[str, Any], name: str) -> None:
    await check_sampler(
        SEQUENCES[name],
        make_writer=partial(two_tables, 60),
        items=items,
        capacity=60,
        batch_size=6,
        other_batch_sizes=(3, 9, 12, 18),
        **many,
    )
