"""What the suites say when a rule is broken leads to the mistake."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import Draw, Placement, RandomSampler, ReplayBuffer, Rows, Sampler, TensorStorage
from asyncbuf.testing import assert_exact_resume, check_sampler, check_writer
from tests.contracts.broken_samplers import CAPACITY, WeightSampler
from tests.contracts.broken_writers import StopsWhenFull
from tests.helpers import rows

if TYPE_CHECKING:
    from asyncbuf import Batch

FEW: dict[str, Any] = {"seeds": range(3), "steps": 40, "capacity": CAPACITY}


class CountsLate(Sampler):
    """Counts draws, which says nothing of rows; and after loading by twos."""

    def __init__(self) -> None:
        self.draws, self.step = 0, 1

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        self.draws += self.step
        return Draw(rows.at(torch.randint(rows.size, (batch_size,), generator=generator)))

    def state_dict(self) -> dict[str, Any]:
        return {"draws": self.draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draws, self.step = int(state["draws"]), 2


class CommitsLate(StopsWhenFull):
    """Counts commits, and after loading by twos."""

    def __init__(self) -> None:
        super().__init__()
        self.commits, self.step = 0, 1

    def commit(self, placement: Placement, capacity: int) -> None:
        super().commit(placement, capacity)
        self.commits += self.step

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "commits": self.commits}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        commits = int(state["commits"])
        super().load_state_dict(state)
        self.commits, self.step = commits, 2


def test_a_state_that_differs_though_no_draw_did_is_told_so() -> None:
    with pytest.raises(AssertionError, match=r"the state at the end differs \(no draw did\): .*draws"):
        asyncio.run(check_sampler(CountsLate, **FEW))


def test_a_state_that_differs_though_no_placement_did_is_told_so() -> None:
    with pytest.raises(AssertionError, match=r"the state at the end differs \(no placement did\): .*commits"):
        asyncio.run(check_writer(CommitsLate))


async def test_a_buffer_whose_state_differs_though_no_draw_did_is_told_so() -> None:
    with pytest.raises(AssertionError, match=r"snapshot, .*the state at the end differs \(no draw did\): .*draws"):
        await assert_exact_resume(_made_with(CountsLate), steps=3, hops=0, ways=["snapshot"])


class TakesAnything(WeightSampler):
    """Assigns before it looks."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        weight, draws = state["weight"], state["draws"]
        self.weight, self.draws = weight, draws


class LooksTooLate(TakesAnything):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state["weight"].shape != (CAPACITY,):
            raise ValueError("expected other weights")


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (TakesAnything, "load_state_dict refuses or takes over a state"),
        (LooksTooLate, "load_state_dict takes all of a state or nothing"),
    ],
)
def test_an_odd_state_that_makes_state_dict_fail_is_the_fault_of_load_state_dict(
    kind: type[Sampler], rule: str
) -> None:
    with pytest.raises(AssertionError, match=f"{kind.__name__} breaks the rule '{rule}' .*load_state_dict with"):
        asyncio.run(check_sampler(kind, **FEW))


async def test_a_feed_that_is_no_coroutine_function_is_told_so() -> None:
    def feed(buffer: ReplayBuffer, step: int, batch: Batch) -> None:
        pass

    with pytest.raises(TypeError, match=r"feed: expected a coroutine function \(async def\), found .* None"):
        await assert_exact_resume(_made_with(RandomSampler), steps=2, feed=feed)  # type: ignore[arg-type]


def _made_with(kind: type[Sampler]) -> Any:
    async def made() -> ReplayBuffer:
        generator = torch.Generator().manual_seed(0)
        buffer = ReplayBuffer(TensorStorage(12), sampler=kind(), batch_size=4, generator=generator)
        await buffer.extend(rows(12))
        return buffer

    return made
