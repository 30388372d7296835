"""The ring against a deque that forgets its oldest items."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncbuf import Placement, RoundRobinWriter, RowRange

# How many items each write has; None stands for clear().
PROGRAMS = st.lists(st.one_of(st.integers(1, 25), st.none()), max_size=12)


def write(writer: RoundRobinWriter, count: int, capacity: int) -> Placement:
    placement = writer.place(count, capacity)
    writer.commit(placement, capacity)
    return placement


@given(st.integers(1, 10), PROGRAMS)
@settings(max_examples=150, deadline=None)
def test_ring_against_a_deque(capacity: int, program: list[int | None]) -> None:
    writer = RoundRobinWriter()
    model: deque[int] = deque(maxlen=capacity)
    rows: dict[int, int] = {}
    written = 0
    for count in program:
        if count is None:
            writer.clear()
            model.clear()
            rows.clear()
        else:
            items = range(written, written + count)
            placement = write(writer, count, capacity)
            assert placement.offered == count
            for run in placement.runs:
                assert run.count > 0
                assert 0 <= run.row < run.row + run.count <= capacity
                for i in range(run.count):
                    rows[run.row + i] = items[run.item + i]
            model.extend(items)
            written += count
        assert writer.write_count == written
        assert writer.size == len(model)
        # Valid rows come first; from the cursor on the oldest item is followed by newer ones.
        assert sorted(rows) == list(range(len(model)))
        start = writer.cursor if len(model) == capacity else 0
        assert [rows[(start + i) % capacity] for i in range(len(model))] == list(model)


@given(st.integers(1, 10), st.lists(st.integers(1, 25), max_size=5), st.integers(1, 25))
@settings(max_examples=60, deadline=None)
def test_runs_are_in_the_order_of_the_items_and_never_overlap(capacity: int, before: list[int], count: int) -> None:
    writer = RoundRobinWriter()
    for earlier in before:
        write(writer, earlier, capacity)
    runs = writer.place(count, capacity).runs
    rows = [run.row + i for run in runs for i in range(run.count)]
    items = [run.item + i for run in runs for i in range(run.count)]
    assert len(set(rows)) == len(rows)
    assert items == list(range(max(0, count - capacity), count))


def test_place_changes_nothing() -> None:
    writer = RoundRobinWriter()
    write(writer, 3, 5)
    assert writer.place(4, 5) == writer.place(4, 5) == Placement(4, (RowRange(3, 0, 2), RowRange(0, 2, 2)))
    assert (writer.cursor, writer.size, writer.write_count) == (3, 3, 3)


@pytest.mark.parametrize(
    ("cursor", "count", "runs", "after"),
    [
        (0, 5, (RowRange(0, 0, 5),), 0),
        (2, 3, (RowRange(2, 0, 3),), 0),
        (2, 4, (RowRange(2, 0, 3), RowRange(0, 3, 1)), 1),
        (0, 6, (RowRange(1, 1, 4), RowRange(0, 5, 1)), 1),
        (0, 10, (RowRange(0, 5, 5),), 0),
        (3, 7, (RowRange(0, 2, 5),), 0),
        (3, 13, (RowRange(1, 8, 4), RowRange(0, 12, 1)), 1),
    ],
)
def test_runs_across_the_end(cursor: int, count: int, runs: tuple[RowRange, ...], after: int) -> None:
    writer = RoundRobinWriter()
    if cursor:
        write(writer, cursor, 5)
    assert write(writer, count, 5).runs == runs
    assert writer.cursor == after


def test_clear_starts_over_but_goes_on_counting() -> None:
    writer = RoundRobinWriter()
    write(writer, 7, 5)
    writer.clear()
    assert (writer.cursor, writer.size, writer.write_count) == (0, 0, 7)
    assert write(writer, 2, 5).runs == (RowRange(0, 0, 2),)
    assert (writer.cursor, writer.size, writer.write_count) == (2, 2, 9)


def test_write_count_does_not_overflow() -> None:
    writer = RoundRobinWriter()
    for _ in range(3):
        write(writer, 2**63, 5)
    assert writer.write_count == 3 * 2**63
    assert writer.cursor == 3 * 2**63 % 5
