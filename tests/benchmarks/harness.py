"""Interleaved timing: every contender runs once per round, in turn, so that a machine that drifts slows all alike."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


@dataclass(slots=True)
class Contender:
    """Something that does the work of a round.

    Attributes:
        name: what the table calls it.
        run: ``await run(calls)`` does the work that many times. It may return seconds that it has measured itself.
        before: called before each round; takes no part in the time.
        seconds: measured time of one call, one value per round.
    """

    name: str
    run: Callable[[int], Awaitable[float | None]]
    seconds: list[float] = field(default_factory=list)
    before: Callable[[], object] | None = None

    @property
    def median(self) -> float:
        """Median time of one call, in seconds."""
        return statistics.median(self.seconds)


def blocking(name: str, call: Callable[[], Any], keep: int = 0) -> Contender:
    """A blocking call as a contender.

    Args:
        name: what the table calls it.
        call: the call.
        keep: how many of its last results stay referenced.
    """
    kept: deque[Any] = deque(maxlen=keep)

    async def run(calls: int) -> None:
        for _ in range(calls):
            kept.append(call())

    return Contender(name, run)


def awaiting(name: str, call: Callable[[], Awaitable[Any]], keep: int = 0) -> Contender:
    """A call that is awaited, as a contender; otherwise as ``blocking``."""
    kept: deque[Any] = deque(maxlen=keep)

    async def run(calls: int) -> None:
        for _ in range(calls):
            kept.append(await call())

    return Contender(name, run)


@dataclass(slots=True)
class Comparison:
    """Several ways to do the same work, measured in one run.

    Attributes:
        title: what the work is.
        contenders: who does it; the first one is what the others are compared with.
        calls: calls per round.
        rounds: how many rounds count.
        missing: peers that are not installed, by name.
        close: awaited at the end.
        load: what else the machine was doing.
    """

    title: str
    contenders: list[Contender]
    calls: int
    rounds: int
    missing: list[str] = field(default_factory=list)
    close: list[Callable[[], Awaitable[object]]] = field(default_factory=list)
    load: str = ""

    async def run(self) -> None:
        """Time every contender in every round; one round before does not count."""
        self.load = load()
        try:
            for number in range(self.rounds + 1):
                for contender in self.contenders:
                    if contender.before is not None:
                        contender.before()
                    gc.collect()
                    start = time.perf_counter()
                    measured = await contender.run(self.calls)
                    seconds = (time.perf_counter() - start) / self.calls
                    if number:
                        contender.seconds.append(seconds if measured is None else measured)
        finally:
            for contender in self.contenders:
                contender.run = _let_go  # what it measured may be large
            for close in self.close:
                await close()
            self.close.clear()

    def ratio(self, contender: Contender) -> tuple[float, float, float]:
        """How many times as long a contender takes as the first one: least, median and most over the rounds."""
        pairs = zip(contender.seconds, self.contenders[0].seconds, strict=True)
        ratios = sorted(theirs / ours for theirs, ours in pairs)
        return ratios[0], statistics.median(ratios), ratios[-1]

    def plain(self) -> dict[str, Any]:
        """Everything that was measured, as JSON can hold it."""
        return {
            "title": self.title,
            "load": self.load,
            "missing": self.missing,
            "contenders": [
                {"name": one.name, "seconds": one.seconds, "median": one.median, "ratio": self.ratio(one)}
                for one in self.contenders
            ],
        }


async def _let_go(calls: int) -> None:
    raise AssertionError("measured already")


def load() -> str:
    """What else the machine is doing."""
    one, five, _ = os.getloadavg()
    return f"{os.cpu_count()} cores, load {one:.2f} (1 min) {five:.2f} (5 min)"
