"""Where rows are gathered: whichever turns out to be faster."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import ReplayBuffer, TensorStorage
from asyncbuf._prefetch import offload
from asyncbuf._prefetch.offload import INLINE_BYTES, THREAD_BYTES, Offload
from tests.helpers import seeded

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = (INLINE_BYTES + THREAD_BYTES) // 2


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(offload, "time", clock)
    return clock


def run(clock: Clock, draws: int, cost: Callable[[bool], float], found: Offload | None = None) -> tuple[Offload, float]:
    """Draw so often, where each way takes so long: the offload, and the time that all of it took."""
    found = found or Offload()
    start = clock.now
    for _ in range(draws):
        here = found.gathers_here(SIZE)
        found.drawn(SIZE)
        clock.now += cost(here)
    return found, clock.now - start


@pytest.mark.parametrize("best_here", [True, False])
@pytest.mark.parametrize("factor", [1.05, 1.3, 3.0])
def test_the_faster_way_is_kept(clock: Clock, best_here: bool, factor: float) -> None:
    draws = 20_000
    found, seconds = run(clock, draws, lambda here: 1.0 if here == best_here else factor)
    assert found.here == best_here
    assert seconds < 1.02 * draws


@pytest.mark.parametrize("seed", range(20))
def test_noise_and_breaks_hardly_matter(clock: Clock, seed: int) -> None:
    chance = random.Random(seed)

    def cost(here: bool) -> float:
        noise = chance.uniform(0.9, 1.1) + (50 if chance.random() < 0.01 else 0)  # now and then the consumer is away
        return noise + (0 if here else 0.4)

    found, _ = run(clock, 5_000, cost)
    assert found.here


@pytest.mark.parametrize("best_here", [True, False])
def test_the_choice_follows_a_program_that_changes(clock: Clock, best_here: bool) -> None:
    found, _ = run(clock, 30_000, lambda here: 1.0 if here == best_here else 1.5)
    assert found.here == best_here
    found, _ = run(clock, 9_000, lambda here: 1.0 if here != best_here else 1.5, found)
    assert found.here != best_here


def test_small_and_large_batches_are_never_tried_elsewhere(clock: Clock) -> None:
    found = Offload()
    for _ in range(1000):
        assert found.gathers_here(INLINE_BYTES)
        assert not found.gathers_here(THREAD_BYTES + 1)
        found.drawn(INLINE_BYTES)
        found.drawn(THREAD_BYTES + 1)
        clock.now += 1
    assert found.here


@pytest.mark.parametrize("depth", [0, 3])
async def test_the_stream_does_not_depend_on_it(depth: int) -> None:
    streams: list[list[int]] = []
    stats: list[tuple[int, int]] = []
    for nbytes in (None, 0, THREAD_BYTES + 1):

        class Sized(TensorStorage):
            claimed = nbytes

            def gather_nbytes(self, count: int) -> int:
                return super().gather_nbytes(count) if self.claimed is None else self.claimed

        buffer = ReplayBuffer(Sized(100), batch_size=50, prefetch=depth, workers=2, generator=seeded())
        # 200 KB a batch
        items: dict[str, Any] = {"x": torch.arange(100)[:, None].repeat(1, 500)}
        await buffer.extend(items)
        async with buffer:
            streams.append([int(row[0]) for _ in range(100) for row in (await buffer.sample())["x"]])
        found = buffer.stats()
        stats.append((found.inline_gathers, found.thread_gathers))
        assert found.inline_gathers + found.thread_gathers == found.drawn
    assert streams[0] == streams[1] == streams[2]
    assert stats[1][1] == 0
    assert stats[2][0] == 0
    assert min(stats[0]) >= 16  # both were tried
