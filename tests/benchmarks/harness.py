"""Interleaved timing: every contender runs once per round, in turn, so that a machine that drifts slows all alike."""

from __future__ import annotations

import gc
import os
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


@dataclass(slots=True)
class Contender:
    """Something that does the work of a round.

    Attributes:
        name: what the table calls it.
        run: ``await run(calls)`` does the work that many times.
        seconds: measured time of one call, one value per round.
    """

    name: str
    run: Callable[[int], Awaitable[None]]
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median time of one call, in seconds."""
        return statistics.median(self.seconds)


async def interleave(contenders: list[Contender], *, rounds: int, calls: int) -> None:
    """Time every contender in every round; one round before does not count."""
    for round_number in range(rounds + 1):
        for contender in contenders:
            gc.collect()
            start = time.perf_counter()
            await contender.run(calls)
            seconds = (time.perf_counter() - start) / calls
            if round_number:
                contender.seconds.append(seconds)


def ratio(slow: Contender, fast: Contender) -> tuple[float, float, float]:
    """How many times as long ``slow`` takes as ``fast``: least, median and most over the rounds."""
    ratios = sorted(a / b for a, b in zip(slow.seconds, fast.seconds, strict=True))
    return ratios[0], statistics.median(ratios), ratios[-1]


def load() -> str:
    """What else the machine is doing."""
    one, five, _ = os.getloadavg()
    return f"{os.cpu_count()} cores, load {one:.2f} (1 min) {five:.2f} (5 min)"
