"""Writes into scattered free rows: by their numbers, and not run by run; the same rows hold the same items."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import ListStorage, Placement, RandomSampler, ReplayBuffer, RoundRobinWriter, RowRange, TensorStorage
from asyncbuf.rows import ScatteredRows, runs_of
from tests.helpers import rows, seeded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncbuf import Prepared, WriteEvent

CAPACITY = 400


@pytest.mark.parametrize("kept", [[0], [3, 4, 5], [1, 3, 5, 7], [0, 1, 7, 8, 9, 20]])
@pytest.mark.parametrize("item", [0, 4])
def test_it_is_a_sequence_of_runs(kept: list[int], item: int) -> None:
    numbers = np.array(kept, np.int64)
    runs = runs_of(numbers, item)
    scattered = ScatteredRows(numbers, item)
    assert list(scattered) == [*scattered[:]] == runs
    assert (len(scattered), scattered[0], scattered[-1]) == (len(runs), runs[0], runs[-1])
    for offered in (item + len(kept), len(kept)):
        one, other = Placement(offered, tuple(runs)), Placement(offered, scattered)
        assert one.rows.tolist() == other.rows.tolist() == kept
        assert one.items.tolist() == other.items.tolist()
        assert one.keeps_all == other.keeps_all
    other.rows[0] = 99  # a copy
    assert scattered.rows.tolist() == kept


class RunByRun(TensorStorage):
    """A storage of a user, which knows of runs alone."""

    def write(self, prepared: Prepared, runs: Sequence[RowRange]) -> None:
        super().write(prepared, [RowRange(run.row, run.item, run.count) for run in runs])


class Told(RandomSampler):
    """Keeps what it is told of writes."""

    columns = ("number",)

    def __init__(self) -> None:
        self.events: list[Any] = []

    def wrote(self, event: WriteEvent) -> None:
        columns = event.columns["number"].tolist()
        self.events.append((event.rows.tolist(), event.items.tolist(), event.numbers.tolist(), columns))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


async def contents(buffer: ReplayBuffer) -> dict[int, int]:
    """The item of each valid row."""
    state = await buffer.state_dict()
    valid = state["rows"]["valid"]
    valid = torch.arange(len(buffer)) if valid is None else valid
    if isinstance(buffer._storage, ListStorage):
        return {row: int(buffer._storage.gather(torch.tensor([row]))[0]["number"]) for row in valid.tolist()}
    number = torch.cat([chunk["number"] for chunk in state["storage"]["chunks"]])
    return dict(zip(valid.tolist(), number[valid].tolist(), strict=True))


async def play(storage: Any) -> tuple[list[Any], list[Any]]:
    sampler = Told()
    buffer = ReplayBuffer(storage, sampler=sampler, batch_size=8, generator=seeded())
    found: list[Any] = []
    snapshots = []

    async def write(count: int, start: int) -> None:
        items: Any = rows(count, start)
        if isinstance(storage, ListStorage):
            items = [{"number": number} for number in items["number"].tolist()]
        found.append((await buffer.extend(items)).tolist())

    async with buffer:
        await write(CAPACITY - 20, 0)
        for step in range(4):
            chosen = torch.randperm(CAPACITY - 20, generator=seeded(step))[:150]
            await buffer.remove(chosen)
            snapshots.append((await buffer.snapshot(), await contents(buffer)))
            for count in (1, 5, 40, 200, CAPACITY + 7):
                await write(count, 1000 * (step + 1) + 10 * count)
                found.append(await contents(buffer))
        for snapshot, expected in snapshots:  # kept as it was, by copy on write
            await buffer.restore(snapshot)
            assert await contents(buffer) == expected
    return found, sampler.events


async def test_rows_hold_the_same_as_run_by_run() -> None:
    expected = await play(RunByRun(CAPACITY))
    assert await play(TensorStorage(CAPACITY)) == expected
    assert await play(ListStorage(CAPACITY)) == expected


async def test_no_object_for_each_row() -> None:
    seen: list[Any] = []

    class Watched(RoundRobinWriter):
        trusted = True
        computes_numbers = True

        def place(self, count: int, capacity: int) -> Placement:
            placement = super().place(count, capacity)
            seen.append(placement.runs)
            return placement

    async with ReplayBuffer(TensorStorage(CAPACITY), writer=Watched(), batch_size=4, generator=seeded()) as buffer:
        await buffer.extend(rows(CAPACITY))
        await buffer.remove(torch.arange(0, CAPACITY, 2))
        await buffer.extend(rows(100, 1000))
        assert type(seen[-1]) is ScatteredRows
        assert seen[-1]._runs is None
        await buffer.empty()
        await buffer.extend(rows(CAPACITY))
        await buffer.remove(torch.arange(50, 150))
        await buffer.extend(rows(100, 1000))
        assert list(seen[-1]) == [RowRange(50, 0, 100)]
        await buffer.sample()
