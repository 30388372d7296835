"""Trajectories as a plain model in Python, and random histories of writes and removals for it and for samplers."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from asyncbuf import RowRange, Rows, WriteEvent
from asyncbuf.writer import Placement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Slice = tuple[int, ...]


class Item(NamedTuple):
    """An item that is stored: trajectory, number of its step there, whether it ends that."""

    trajectory: int
    step: int
    ends: bool


class Model:
    """What is stored, and which slices of it there are."""

    def __init__(self) -> None:
        self.rows: dict[int, Item] = {}  # by row
        self._open: dict[int, Item] = {}  # the newest item by key
        self._trajectories = 0

    def write(self, row: int, key: int, ends: bool) -> None:
        before = self._open.pop(key, None)
        if before is None:
            self._trajectories += 1
            item = Item(self._trajectories, 0, ends)
        else:
            item = Item(before.trajectory, before.step + 1, ends)
        if not ends:
            self._open[key] = item
        if row >= 0:
            self.rows[row] = item

    def clear(self) -> None:
        self.rows.clear()
        self._open.clear()

    def slices(self, length: int, *, strict: bool, block: int = 0) -> set[Slice]:
        """All of them, as rows. With a block length, only those from every so many steps on."""
        places = {(item.trajectory, item.step): row for row, item in self.rows.items()}
        found = set()
        for trajectory, step in places:
            is_head = (trajectory, step - 1) not in places
            rows: list[int] = []
            for ahead in range(length):
                at_border = block and not strict and ahead and (step + ahead) % block == 0
                if at_border or (trajectory, step + ahead) not in places:
                    break
                rows.append(places[trajectory, step + ahead])
            begins = not block or step % block == 0
            is_long = len(rows) == length or (block and not strict)
            if (begins and is_long) or (is_head and not strict):
                found.add(tuple(rows))
        return found

    def whole(self, longest: int) -> set[Slice]:
        """The whole trajectories that end."""
        found: dict[int, dict[int, int]] = {}
        ended = {item.trajectory: item.step + 1 for item in self.rows.values() if item.ends}
        for row, item in self.rows.items():
            found.setdefault(item.trajectory, {})[item.step] = row
        return {
            tuple(row for _, row in sorted(rows.items()))
            for trajectory, rows in found.items()
            if ended.get(trajectory) == len(rows) <= longest
        }


class Plan(NamedTuple):
    """How the items of a history come."""

    capacity: int
    environments: int
    is_keyed: bool
    end_chance: float
    is_ring: bool
    removes: bool

    @classmethod
    def chosen(cls, choose: random.Random) -> Plan:
        environments = choose.choice((1, 1, 2, 3, 7))
        return cls(
            choose.randrange(6, 48),
            environments,
            environments > 1 or choose.random() < 0.3,
            choose.choice((0.0, 0.05, 0.2, 0.6)),
            choose.random() < 0.7,
            choose.random() < 0.5,
        )


class Told(NamedTuple):
    """What a sampler is told."""

    event: WriteEvent | None
    removed: torch.Tensor | None
    rows: Rows


class Valid:
    """Valid rows of a table with gaps."""

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows = torch.tensor(sorted(rows), dtype=torch.int64)

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        return self._rows[positions]

    def contains(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.isin(rows, self._rows)


def history(plan: Plan, model: Model, choose: random.Random, steps: int) -> Iterator[Told]:
    """Go through a history: after each step, the model is what the sampler should be when it was told."""
    written = position = 0
    for _ in range(steps):
        roll = choose.random()
        if plan.removes and model.rows and roll < 0.2:
            gone = choose.sample(sorted(model.rows), choose.randrange(1, 1 + min(5, len(model.rows))))
            for row in gone:
                del model.rows[row]
            yield Told(None, torch.tensor(gone), _table(plan, model, written))
            continue
        if plan.removes and roll < 0.22:
            model.clear()
            position = 0
            yield Told(None, None, _table(plan, model, written))
            continue
        count = choose.choice((1, 1, 1, 2, 5, plan.environments, plan.capacity + choose.randrange(4)))
        keys = [number % plan.environments for number in range(written, written + count)]
        if choose.random() < 0.3:
            keys = [choose.randrange(plan.environments) for _ in range(count)]
        ends = [choose.random() < plan.end_chance for _ in range(count)]
        rows = _ring(plan, position, count) if plan.is_ring else _anywhere(plan, choose, count)
        position = (position + count) % plan.capacity
        for row, key, is_end in zip(rows, keys, ends, strict=True):
            model.rows.pop(row, None)
            model.write(row, key if plan.is_keyed else 0, is_end)
        numbers = np.arange(written, written + count)
        columns = {"env": np.array(keys), "done": np.array(ends)[:, None], "cut": np.zeros(count)}
        columns |= {"number": numbers.astype(np.float64), "terminated": np.array(ends) & (numbers % 2 == 0)}
        written += count
        runs = tuple(RowRange(row, item, 1) for item, row in enumerate(rows) if row >= 0)
        event = WriteEvent(Placement(count, runs), written - count, _table(plan, model, written), columns)
        yield Told(event, None, event.table)


def _table(plan: Plan, model: Model, written: int) -> Rows:
    return Rows(len(model.rows), plan.capacity, written, Valid(list(model.rows)))


def _ring(plan: Plan, position: int, count: int) -> list[int]:
    kept = min(count, plan.capacity)
    return [-1] * (count - kept) + [(position + item) % plan.capacity for item in range(count - kept, count)]


def _anywhere(plan: Plan, choose: random.Random, count: int) -> list[int]:
    """Rows of a writer that puts items anywhere, and leaves some out."""
    kept = [choose.random() < 0.8 for _ in range(count)]
    rows = choose.sample(range(plan.capacity), min(sum(kept), plan.capacity))
    return [rows.pop() if keeps and rows else -1 for keeps in kept]


def tell(part: Any, told: Told) -> None:
    """Pass on what happened, to a sampler or to what has its methods."""
    if told.event is not None:
        part.check_write(told.event)
        part.wrote(told.event)
    elif told.removed is None:
        part.clear()
    else:
        part.removed(told.removed, told.rows)


def compared(seeds: range, check: Callable[[random.Random], None]) -> None:
    """Play a history for each seed; an error names the seed."""
    for seed in seeds:
        try:
            check(random.Random(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
