"""Table, writer and valid rows against a plain model: random writes, removals, clears, saves and restores."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from asyncbuf import ListStorage, MinSize, Placement, RandomSampler, RoundRobinWriter, RowRange, Writer
from asyncbuf._table.table import Table
from tests.helpers import seeded


@dataclasses.dataclass
class Model:
    """What a buffer of a ring is, told in the plainest way.

    Attributes:
        rows: the item number in each valid row, in the order of the positions.
        free: freed rows, the longest free one first.
        unused: the first row that was never used.
        cursor: where a ring goes on.
    """

    capacity: int
    rows: dict[int, int] = dataclasses.field(default_factory=dict)
    free: list[int] = dataclasses.field(default_factory=list)
    unused: int = 0
    cursor: int = 0
    written: int = 0
    is_ring: bool = True

    def write(self, count: int) -> list[int]:
        """The rows of the kept items."""
        kept = min(count, self.capacity)
        numbers = range(self.written, self.written + count)
        self.written += count
        if self.is_ring:
            taken = [(self.cursor + i) % self.capacity for i in range(count)]
            self.cursor = (self.cursor + count) % self.capacity
            self.rows.update(zip(taken, numbers, strict=True))
            self.rows = dict(sorted(self.rows.items()))
            self.unused = len(self.rows)
            return taken[-kept:]
        taken, self.free = self.free[:kept], self.free[kept:]
        unused = range(self.unused, min(self.capacity, self.unused + kept - len(taken)))
        self.unused += len(unused)
        taken += unused
        taken += sorted(self.rows, key=self.rows.__getitem__)[: kept - len(taken)]
        self.rows.update(zip(sorted(taken), numbers[-kept:], strict=True))
        return sorted(taken)

    def remove(self, rows: list[int]) -> int:
        """The last rows take the positions of those that leave, the lowest position first."""
        order, leaving = list(self.rows), list(dict.fromkeys(row for row in rows if row in self.rows))
        if not leaving:
            return 0
        self.is_ring = False
        size = len(order) - len(leaving)
        movers = [row for row in order[size:] if row not in leaving]
        kept = [movers.pop(0) if row in leaving else row for row in order[:size]]
        self.rows = {row: self.rows[row] for row in kept}
        self.free += leaving
        return len(leaving)

    def clear(self) -> None:
        self.rows, self.free, self.unused, self.cursor, self.is_ring = {}, [], 0, 0, True


def made(capacity: int, kind: type[Writer]) -> Table:
    return Table(ListStorage(capacity), kind(), RandomSampler(), MinSize(1), seeded())


class NumbersStored(RoundRobinWriter):
    """The same ring, whose item numbers the table has to store."""


class Programs(RuleBasedStateMachine):
    table: Table
    model: Model

    @initialize(capacity=st.integers(1, 12), kind=st.sampled_from([RoundRobinWriter, NumbersStored]))
    def begin(self, capacity: int, kind: type[Writer]) -> None:
        self.kind = kind
        self.table = made(capacity, kind)
        self.model = Model(capacity)

    @rule(count=st.integers(1, 30))
    def write(self, count: int) -> None:
        first = self.model.written
        prepared = self.table.storage.prepare(list(range(first, first + count)))
        placement = self.table.place(count)
        before = self.table.place(count)
        assert placement == before  # placing changes nothing
        self.table.storage.write(prepared, placement.runs)
        self.table.commit(placement)
        assert placement.rows.tolist() == self.model.write(count)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(0, self.model.capacity - 1), max_size=20))
        assert self.table.remove(np.array(rows, np.int64)) == self.model.remove(rows)

    @rule(data=st.data())
    def remove_what_was_not_replaced(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(0, self.model.capacity - 1), max_size=20))
        then = data.draw(st.integers(0, self.model.written))
        old = [row for row in rows if self.model.rows.get(row, then) < then]
        assert self.table.remove(np.array(rows, np.int64), then) == self.model.remove(old)

    @rule()
    def clear(self) -> None:
        self.table.clear()
        self.model.clear()

    @rule()
    def save_and_restore(self) -> None:
        states = [(name, part.state_dict()) for name, part in self.table.components()]
        contents = self.table.storage.state_dict()
        self.table = made(self.model.capacity, self.kind)
        for (name, part), (saved_name, state) in zip(self.table.components(), states, strict=True):
            assert name == saved_name
            part.load_state_dict(state)
        self.table.verify(self.table.storage.rows_in(contents["meta"]) or 0)
        self.table.storage.load_state_dict(contents)

    @precondition(lambda self: self.model.is_ring and self.kind is RoundRobinWriter)
    @rule()
    def restore_an_older_checkpoint(self) -> None:
        writer, contents = self.table.writer.state_dict(), self.table.storage.state_dict()
        fresh = dict(made(self.model.capacity, self.kind).components())["rows"].state_dict()
        self.table.writer.load_state_dict(writer)
        dict(self.table.components())["rows"].load_state_dict(fresh)
        self.table.verify(self.table.storage.rows_in(contents["meta"]) or 0)

    @invariant()
    def same(self) -> None:
        table, model = self.table, self.model
        rows = table.rows
        assert (rows.size, rows.capacity, rows.write_count) == (len(model.rows), model.capacity, model.written)
        assert (table.size, table.write_count) == (len(model.rows), model.written)
        assert rows.at(torch.arange(rows.size)).tolist() == list(model.rows)
        every = torch.arange(model.capacity)
        assert rows.contains(every).tolist() == [row in model.rows for row in range(model.capacity)]
        for then in {0, model.written // 2, model.written}:
            replaced = [model.rows.get(row, then) >= then for row in range(model.capacity)]
            assert table.replaced(every.numpy(), then).tolist() == replaced
        if table.size and self.kind is RoundRobinWriter:
            assert table.storage.gather(torch.tensor(list(model.rows))) == list(model.rows.values())


def test_programs() -> None:
    run_state_machine_as_test(Programs, settings=settings(max_examples=25, stateful_step_count=25, deadline=None))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_programs() -> None:
    run_state_machine_as_test(Programs, settings=settings(max_examples=2000, stateful_step_count=40, deadline=None))


class Scattering(Writer):
    """Every item goes to a row of its own choice: seven further on each time."""

    def __init__(self) -> None:
        self.count = 0

    @property
    def size(self) -> int:
        return 0

    @property
    def write_count(self) -> int:
        return self.count

    def place(self, count: int, capacity: int) -> Placement:
        kept = range(max(0, count - capacity), count)
        return Placement(count, tuple(RowRange((self.count + i) * 7 % capacity, i, 1) for i in kept))

    def commit(self, placement: Placement, capacity: int) -> None:
        self.count += placement.offered

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def clear(self) -> None:
        pass


def test_an_older_checkpoint_did_not_store_item_numbers() -> None:
    table = made(4, NumbersStored)
    for _ in range(7):
        table.commit(table.place(1))
    other = made(4, NumbersStored)
    fresh = dict(other.components())["rows"].state_dict()
    other.writer.load_state_dict(table.writer.state_dict())
    dict(other.components())["rows"].load_state_dict(fresh)
    other.verify(4)
    # Those of the last four items, in the order of the rows: what was drawn before is taken for what is there.
    assert other.replaced(np.arange(4), 7).tolist() == [False] * 4
    other.commit(other.place(1))
    assert other.replaced(np.arange(4), 7).tolist() == [False, False, False, True]


def test_a_writer_may_leave_gaps() -> None:
    table = made(10, Scattering)
    model: dict[int, int] = {}
    for number in range(25):
        table.commit(table.place(1))
        model[number * 7 % 10] = number
        assert table.rows.at(torch.arange(table.size)).tolist() == list(model)
        assert table.replaced(np.array(list(model)), number).tolist() == [found >= number for found in model.values()]
    states = [part.state_dict() for _, part in table.components()]
    other = made(10, Scattering)
    for (_, part), state in zip(other.components(), states, strict=True):
        part.load_state_dict(state)
    other.verify(10)
    assert other.rows.at(torch.arange(10)).tolist() == list(model)
