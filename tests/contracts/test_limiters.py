"""The contract of limiters holds for those of the package, and catches those that break it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from asyncbuf import Limiter, MinSize
from asyncbuf.testing import check_limiter
from tests.contracts.broken_limiters import BROKEN, RatioLimiter, Room
from tests.contracts.broken_samplers import LeaseSampler

if TYPE_CHECKING:
    from collections.abc import Callable

SOUND: dict[str, Callable[[], Limiter]] = {
    "none": Limiter,
    "min-size": lambda: MinSize(5),
    "ratio": RatioLimiter,
    "ratio-below-one": lambda: RatioLimiter(0.5, 8.0, 2),
}


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize(
    ("seeds", "steps"),
    [(range(3), 80), pytest.param(range(100), 300, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
    ids=["few", "many"],
)
async def test_sound_limiters_pass(seeds: range, steps: int, name: str) -> None:
    await check_limiter(SOUND[name], seeds=seeds, steps=steps)


@pytest.mark.parametrize(("kind", "rule"), BROKEN, ids=[kind.__name__ for kind, _ in BROKEN])
def test_a_broken_limiter_is_caught(kind: type[Limiter], rule: str) -> None:
    with pytest.raises(AssertionError, match=f"{kind.__name__} breaks the rule '.*({rule})") as caught:
        asyncio.run(check_limiter(kind, seconds=5.0))
    message = str(caught.value)
    assert "expected" in message
    assert "found" in message


@pytest.mark.loops_in_turn
async def test_a_limiter_that_relies_on_rows_leaving_passes_with_a_sampler_that_lets_them() -> None:
    await check_limiter(Room, make_sampler=LeaseSampler)


def test_what_is_waited_for_is_asked_before_anybody_is_cancelled() -> None:
    with pytest.raises(AssertionError, match=r"come to their end.*there is room for \d of \d items"):
        asyncio.run(check_limiter(Room, seconds=1.0))


def test_a_limit_that_is_never_met_is_the_callers_error() -> None:
    with pytest.raises(ValueError, match="at most the capacity"):
        asyncio.run(check_limiter(lambda: MinSize(50), capacity=16))
