"""Passes over rows that come and go: each row once, none that is gone, and the end where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from asyncbuf import MinSize, RoundRobinWriter, SamplerWithoutReplacement, TensorStorage
from asyncbuf._table.table import Table
from asyncbuf.errors import CheckpointCorruptError
from asyncbuf.sampler._permutation import Permutation
from tests.helpers import seeded

if TYPE_CHECKING:
    from asyncbuf import Draw


def made(capacity: int, *, drop_last: bool = False, shuffle: bool = True) -> Table:
    sampler = SamplerWithoutReplacement(drop_last=drop_last, shuffle=shuffle)
    return Table(TensorStorage(capacity), RoundRobinWriter(), sampler, MinSize(1), seeded())


def write(table: Table, count: int) -> list[int]:
    placement = table.place(count)
    table.commit(placement)
    rows: list[int] = placement.rows.tolist()
    return rows


def remove(table: Table, *rows: int) -> int:
    return table.remove(np.array(rows, np.int64))


def copied(table: Table, other: Table) -> Table:
    """Another table in the same state."""
    for (_, part), (_, copy) in zip(table.components(), other.components(), strict=True):
        copy.load_state_dict(part.state_dict())
    other.generator.set_state(table.generator.get_state())
    other.verify(table.rows.capacity)
    return other


def valid(table: Table) -> set[int]:
    return set(table.rows.at(torch.arange(table.size)).tolist())


class Passes(RuleBasedStateMachine):
    """Two tables, of which the second is made anew from states now and then, and what is known of the pass."""

    @initialize(
        capacity=st.integers(1, 20), drop_last=st.booleans(), shuffle=st.booleans(), batch_size=st.integers(1, 8)
    )
    def begin(self, capacity: int, drop_last: bool, shuffle: bool, batch_size: int) -> None:
        self.capacity, self.batch_size = capacity, min(batch_size, capacity)
        self.drop_last, self.shuffle = drop_last, shuffle
        self.tables = [self.another(), self.another()]
        self.ahead: set[int] = set()
        self.epoch = 0
        self.passed = -1

    def another(self) -> Table:
        return made(self.capacity, drop_last=self.drop_last, shuffle=self.shuffle)

    @property
    def sampler(self) -> SamplerWithoutReplacement:
        sampler = self.tables[0].sampler
        assert isinstance(sampler, SamplerWithoutReplacement)
        return sampler

    def end_if(self, over: bool) -> None:
        if over:
            self.epoch += 1
            self.ahead = set()

    @rule(count=st.integers(1, 12))
    def write(self, count: int) -> None:
        first, second = (write(table, count) for table in self.tables)
        assert first == second

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(0, self.capacity - 1), max_size=12))
        in_pass = bool(self.ahead)
        self.ahead -= set(rows) & valid(self.tables[0])
        for table in self.tables:
            remove(table, *rows)
        self.end_if(in_pass and not self.ahead)

    @rule()
    def clear(self) -> None:
        for table in self.tables:
            table.clear()
        self.end_if(bool(self.ahead))

    @precondition(lambda self: self.tables[0].may_draw(self.batch_size))
    @rule()
    def draw(self) -> None:
        if self.drop_last and len(self.ahead) < self.batch_size:
            self.end_if(bool(self.ahead))
        if not self.ahead:
            self.ahead, self.passed = valid(self.tables[0]), -1
        draw = self.drawn()
        rows = draw.indices.tolist()
        assert len(set(rows)) == len(rows) == min(self.batch_size, len(self.ahead))
        assert set(rows) <= self.ahead
        if not self.shuffle:
            assert rows == sorted(self.ahead)[: len(rows)]
        self.ahead -= set(rows)
        assert draw.epoch == self.epoch
        left = len(self.ahead)
        assert draw.last == (left == 0 or (self.drop_last and left < self.batch_size))
        self.end_if(draw.last)

    def drawn(self) -> Draw:
        first, second = (table.draw(self.batch_size) for table in self.tables)
        assert first.indices.tolist() == second.indices.tolist()
        assert (first.epoch, first.last) == (second.epoch, second.last)
        return first

    @rule()
    def save_and_restore(self) -> None:
        self.tables[1] = copied(self.tables[0], self.another())

    @invariant()
    def says_where_it_is(self) -> None:
        assert self.sampler.epoch == self.epoch
        assert self.sampler.between_epochs == (not self.ahead)
        for size in (1, self.batch_size, self.capacity + 1):
            assert self.sampler.leaves_out(size) == (self.drop_last and 0 < len(self.ahead) < size)
        answer = self.tables[0].may_draw(self.batch_size)
        assert bool(answer) == (self.tables[0].size >= (self.batch_size if self.drop_last else 1))


def test_passes() -> None:
    run_state_machine_as_test(Passes, settings=settings(max_examples=100, stateful_step_count=30, deadline=None))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_passes() -> None:
    run_state_machine_as_test(Passes, settings=settings(max_examples=3000, stateful_step_count=40, deadline=None))


@pytest.mark.parametrize("length", [1, 2, 7, 1000, (1 << 16) + 1, 100_000])
def test_positions_of_indices(length: int) -> None:
    order = Permutation(length, 5)
    positions = np.unique(np.linspace(0, length - 1, 300, dtype=np.int64))
    indices = torch.cat([order[int(position) : int(position) + 1] for position in positions])
    assert order.positions_of(indices.numpy()).tolist() == positions.tolist()


@given(st.integers(1, 200_000), st.integers(0, 2**63 - 1))
@settings(max_examples=30, deadline=None)
def test_positions_of_all_indices(length: int, seed: int) -> None:
    order = Permutation(length, seed)
    stop = min(length, 5000)
    assert order.positions_of(order[0:stop].numpy()).tolist() == list(range(stop))


def test_a_long_pass_loses_rows() -> None:
    table = made(100_000)
    write(table, 100_000)
    taken = [table.draw(1000).indices for _ in range(10)]
    gone = torch.arange(0, 100_000, 3)
    table.remove(gone.numpy())
    write(table, 20_000)  # takes some of the rows again: they join at the next pass
    while taken[-1].numel() == 1000:
        taken.append(table.draw(1000).indices)
    rows = torch.cat(taken)
    expected = set(range(100_000)) - set(gone.tolist()) | set(torch.cat(taken[:10]).tolist())
    assert len(rows) == len(set(rows.tolist()))
    assert set(rows.tolist()) == expected


def test_few_rows_are_left_of_many() -> None:
    table = made(200_000)
    write(table, 200_000)
    drawn = table.draw(1).indices.tolist()
    ahead = next(row for row in range(200_000) if row not in drawn)
    table.remove(np.delete(np.arange(200_000), ahead))
    draw = table.draw(1)
    assert (draw.indices.tolist(), draw.last) == ([ahead], True)


def load_and_verify(table: Table, state: dict[str, object]) -> None:
    table.sampler.load_state_dict(state)
    table.verify(table.rows.capacity)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gone", torch.tensor([3, 2])),
        ("gone", torch.tensor([2, 2])),
        ("gone", torch.tensor([-1])),
        ("gone", torch.tensor([6])),
        ("gone", torch.tensor([1.0])),
        ("gone", [1]),
        ("rows", torch.tensor([0, 1])),
        ("rows", torch.tensor([0, 1, 2, 3, 4, -5])),
        ("rows", torch.tensor([0, 1, 2, 3, 4, 100])),
        ("length", 5),
        ("length", 2**40),
    ],
)
def test_a_pass_that_contradicts_itself_is_refused(name: str, value: object) -> None:
    table = made(10, shuffle=False)
    write(table, 8)
    remove(table, 0, 1)
    table.draw(2)
    remove(table, 7)
    state = table.sampler.state_dict()
    other = made(10, shuffle=False)
    for part_name, part in other.components():
        if part_name != "sampler":
            part.load_state_dict(dict(table.components())[part_name].state_dict())
    with pytest.raises(CheckpointCorruptError):
        load_and_verify(other, {**state, name: value})
    other.sampler.load_state_dict(state)
    other.verify(10)


def test_a_pass_over_rows_that_are_gone_is_refused() -> None:
    table = made(10)
    write(table, 8)
    table.draw(2)
    state = table.sampler.state_dict()
    remove(table, *table.draw(3).indices.tolist())
    table.sampler.load_state_dict(state)
    with pytest.raises(CheckpointCorruptError, match="expected a pass over valid rows, found"):
        table.verify(10)
