"""The contract of writers holds for those of the package, and catches those that break it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from asyncbuf import (
    ImmutableDatasetWriter,
    MaxValueWriter,
    Placement,
    ReservoirWriter,
    RoundRobinWriter,
    RowRange,
    Writer,
)
from asyncbuf.testing import check_writer
from tests.contracts.broken_writers import BROKEN, StopsWhenFull
from tests.tables import TurnsWriter, two_tables

if TYPE_CHECKING:
    from collections.abc import Callable


class EverySecond(RoundRobinWriter):
    """Keeps the first of every two items; placed as by a ring that was handed those only."""

    def place(self, count: int, capacity: int) -> Placement:
        kept = list(range(self.write_count % 2, count, 2))[-capacity:]
        rows = [(row, i) for run in super().place(len(kept), capacity).runs for i, row in _rows(run)] if kept else []
        return Placement(count, tuple(RowRange(row, kept[i], 1) for row, i in rows))


def _rows(run: RowRange) -> list[tuple[int, int]]:
    return [(run.item + i, run.row + i) for i in range(run.count)]


SOUND: dict[str, Callable[[], Writer]] = {
    "ring": RoundRobinWriter,
    "stops-when-full": StopsWhenFull,
    "every-second": EverySecond,
    "best": lambda: MaxValueWriter("value"),
    "reservoir": lambda: ReservoirWriter(seed=3),
    "tables": lambda: two_tables(13),
    "three-tables": lambda: TurnsWriter({"a": 4, "b": 6, "c": 3}),
    "immutable": ImmutableDatasetWriter,
}


@pytest.mark.loops_in_turn
@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize(
    ("seeds", "steps"),
    [(range(3), 24), pytest.param(range(24), 120, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
    ids=["few", "many"],
)
async def test_sound_writers_pass(seeds: range, steps: int, name: str) -> None:
    await check_writer(SOUND[name], seeds=seeds, steps=steps)


@pytest.mark.parametrize(("kind", "rule"), BROKEN, ids=[kind.__name__ for kind, _ in BROKEN])
def test_a_broken_writer_is_caught(kind: type[Writer], rule: str) -> None:
    with pytest.raises(AssertionError, match=f"{kind.__name__} breaks the rule '.*({rule})") as caught:
        asyncio.run(check_writer(kind))
    message = str(caught.value)
    assert "expected" in message
    assert "found" in message
