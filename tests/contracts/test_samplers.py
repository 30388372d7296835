"""The contract of samplers holds for those of the package, and catches those that break it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import (
    ConsumingSampler,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SamplerWithoutReplacement,
    StratifiedSampler,
    TensorStorage,
    WeightedSampler,
    WriteEvent,
)
from asyncbuf.testing import check_sampler
from tests.contracts.broken_samplers import BROKEN, CAPACITY, JoinsForNobody, LeaseSampler, WeightSampler
from tests.helpers import WeightedSampler as MultinomialSampler
from tests.helpers import rows, within

if TYPE_CHECKING:
    from collections.abc import Callable

SOUND: dict[str, Callable[[], Sampler]] = {
    "random": RandomSampler,
    "multinomial": MultinomialSampler,
    "weighted": lambda: WeightedSampler("value"),
    "weighted-distinct": lambda: WeightedSampler(replacement=False),
    "weights": WeightSampler,
    "lease": LeaseSampler,
    "prioritized": PrioritizedSampler,
    "consuming": ConsumingSampler,
    "consuming-fifo": lambda: ConsumingSampler(3),
    "consuming-lifo": lambda: ConsumingSampler(2, "lifo"),
    "consuming-random": lambda: ConsumingSampler(2, "random"),
    "stratified": lambda: StratifiedSampler("number"),
    "stratified-shares": lambda: StratifiedSampler("done", {True: 0.3, False: 0.7}),
    "stratified-others": lambda: StratifiedSampler("number", {3: 0.5, 20: 0.25, 41: 0.25}, when_empty="others"),
    "passes": SamplerWithoutReplacement,
    "passes-drop": lambda: SamplerWithoutReplacement(drop_last=True),
    "passes-order": lambda: SamplerWithoutReplacement(shuffle=False),
    "passes-order-drop": lambda: SamplerWithoutReplacement(drop_last=True, shuffle=False),
}
SHORT: dict[str, Any] = {"seeds": range(3), "steps": 16}
FEW: dict[str, Any] = {"seeds": range(3), "steps": 40}
MANY: dict[str, Any] = {"seeds": range(24), "steps": 120}


@pytest.mark.loops_in_turn
@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize(
    "many", [SHORT, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])], ids=["few", "many"]
)
async def test_sound_samplers_pass(many: dict[str, Any], name: str) -> None:
    await check_sampler(SOUND[name], capacity=CAPACITY, **many)


@pytest.mark.loops_in_turn
@pytest.mark.parametrize("many", [SHORT, pytest.param(FEW, marks=pytest.mark.slow)], ids=["short", "few"])
async def test_items_and_storage_of_another_kind(many: dict[str, Any]) -> None:
    def items(count: int, start: int) -> list[dict[str, float]]:
        return [{"value": float(number % 5)} for number in range(start, start + count)]

    await check_sampler(LeaseSampler, items=items, make_storage=ListStorage, capacity=CAPACITY, **many)


@pytest.mark.parametrize(("kind", "rule"), BROKEN, ids=[kind.__name__ for kind, _ in BROKEN])
def test_a_broken_sampler_is_caught(kind: type[Sampler], rule: str) -> None:
    with pytest.raises(AssertionError, match=f"{kind.__name__} breaks the rule .*({rule})") as caught:
        asyncio.run(check_sampler(kind, capacity=CAPACITY, **FEW))
    message = str(caught.value)
    assert "expected" in message
    assert "found" in message


class MisspeltColumn(LeaseSampler):
    columns = ("valeu",)


class ColumnForAnswers(RandomSampler):
    columns = ("reward",)

    def check_write(self, event: WriteEvent) -> None:
        """Wants the column, and refuses nothing."""


@pytest.mark.parametrize("kind", [MisspeltColumn, ColumnForAnswers])
def test_a_column_that_items_lack_is_named_at_the_first_write(kind: type[Sampler]) -> None:
    with pytest.raises(AssertionError, match=r"step 1, write.*items=.*SchemaError") as caught:
        asyncio.run(check_sampler(kind, capacity=CAPACITY, **FEW))
    message = str(caught.value)
    assert kind.columns[0] in message
    assert repr(caught.value.__cause__) in message


def test_a_factory_that_gives_the_same_sampler_is_caught() -> None:
    sampler = LeaseSampler()
    with pytest.raises(AssertionError, match="makes a new sampler each time"):
        asyncio.run(check_sampler(lambda: sampler, capacity=CAPACITY, **FEW))


def test_a_batch_that_cannot_be_is_the_callers_error() -> None:
    with pytest.raises(ValueError, match="at most the capacity"):
        asyncio.run(check_sampler(lambda: SamplerWithoutReplacement(drop_last=True), capacity=24, batch_size=25))


@pytest.mark.parametrize("prefetch", [0, 2])
async def test_joins_that_nobody_would_see_are_refused(prefetch: int) -> None:
    buffer = ReplayBuffer(TensorStorage(9), sampler=JoinsForNobody(), batch_size=2, prefetch=prefetch)
    async with buffer:
        await buffer.extend(rows(5))
        with pytest.raises(TypeError, match="expected combine"):
            await within(buffer.sample())
