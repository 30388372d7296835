"""When limiter and sampler are asked, and what is said of parts that return something else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import (
    AsyncBufError,
    Counters,
    Draw,
    Limiter,
    ListStorage,
    MinSize,
    NotYet,
    Placement,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    RowRange,
    Rows,
    SamplerWithoutReplacement,
)
from asyncbuf._table.table import Table
from tests.helpers import seeded

if TYPE_CHECKING:
    from asyncbuf import Sampler
    from asyncbuf.rows import Answer


def made(sampler: Sampler | None = None, limiter: Limiter | None = None) -> Table:
    table = Table(ListStorage(10), RoundRobinWriter(), sampler or RandomSampler(), limiter or MinSize(1), seeded())
    table.commit(table.place(5))
    return table


class Asked(RandomSampler):
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def may_draw(self, rows: Rows, batch_size: int) -> Answer:
        self.asked += 1
        return True if rows.size >= 5 else NotYet(f"{rows.size} of 5 rows")


class AskedAboutRows(Asked):
    counts_draws: bool = False


class AskedLimiter(Limiter):
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def may_draw(self, counters: Counters, items: int) -> Answer:
        self.asked += 1
        return True if counters.size >= 5 else NotYet(f"{counters.size} of 5 items")


def test_a_sampler_is_asked_before_each_draw() -> None:
    sampler = Asked()
    table = made(sampler)
    assert all(table.may_draw(4) for _ in range(3))
    assert sampler.asked == 3


def test_a_limiter_is_asked_before_each_draw() -> None:
    limiter = AskedLimiter()
    table = made(limiter=limiter)
    assert all(table.may_draw(4) for _ in range(3))
    assert limiter.asked == 3


def test_an_answer_about_rows_holds_until_they_change() -> None:
    sampler = AskedAboutRows()
    table = made(sampler)
    assert all(table.may_draw(4) for _ in range(3))
    table.draw(4)
    assert table.may_draw(4)
    assert sampler.asked == 1
    assert table.may_draw(3)  # of another size: asked again
    assert sampler.asked == 2
    table.commit(table.place(1))
    assert table.may_draw(3)
    assert sampler.asked == 3
    table.storage.write(table.storage.prepare([1]), [RowRange(6, 0, 1)])
    table.remove(torch.arange(2).numpy())
    assert table.may_draw(3) == NotYet("4 of 5 rows")
    table.update_priority([5], 1.0)
    assert not table.may_draw(3)
    assert sampler.asked == 5  # a no is asked for each time


def test_the_limiter_is_asked_first_then_the_sampler_then_the_rows() -> None:
    sampler, limiter = Asked(), AskedLimiter()
    table = made(sampler, limiter)
    table.clear()
    assert table.may_draw(1) == NotYet("0 of 5 items")
    assert sampler.asked == 0
    assert made(Asked(), MinSize(5)).may_draw(1) is True
    empty = made()
    empty.limits.limiter = Limiter()
    empty.clear()
    assert empty.may_draw(1) == NotYet("no item is stored")


def test_what_a_sampler_answers_is_noted_when_its_class_is_made() -> None:
    class Other(SamplerWithoutReplacement):
        pass

    class Own(SamplerWithoutReplacement):
        def may_draw(self, rows: Rows, batch_size: int) -> Answer:
            return True

    assert (SamplerWithoutReplacement.counts_draws, Other.counts_draws, Own.counts_draws) == (False, False, True)
    assert (SamplerWithoutReplacement.trusted, Other.trusted) == (True, False)


# -- writers ----------------------------------------------------------------------------------------------------------


class Placing(RoundRobinWriter):
    """Says what it is told to say."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def place(self, count: int, capacity: int) -> Placement:
        placement: Placement = self.answer
        return placement


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        ([0, 1], TypeError, r"Placing.place: expected a Placement, found list"),
        (Placement(2, (RowRange(9, 0, 2),)), IndexError, r"Placing.place: expected rows from 0 to 9, found 9 to 10"),
        (Placement(2, (RowRange(-1, 0, 2),)), IndexError, r"found -1 to 0"),
        (Placement(2, (RowRange(0, 0, 0),)), IndexError, r"found 0 to -1"),
        (Placement(2, (RowRange(0, 1, 2),)), IndexError, r"Placing.place: expected items from 0 to 1, found 1 to 2"),
        (Placement(2, (RowRange(3, 0, 1), RowRange(3, 1, 1))), ValueError, r"expected different rows, found row 3"),
        (Placement(2, (RowRange(4, 0, 1), RowRange(3, 1, 2))), IndexError, r"expected items from 0 to 1"),
    ],
)
async def test_a_writer_that_returns_something_else(answer: Any, kind: type[Exception], message: str) -> None:
    buffer = ReplayBuffer(ListStorage(10), writer=Placing(answer))
    with pytest.raises(kind, match=message):
        await buffer.extend([1, 2])
    assert (len(buffer), buffer.write_count) == (0, 0)


async def test_a_writer_that_counts_otherwise() -> None:
    class Forgetful(RoundRobinWriter):
        def commit(self, placement: Placement, capacity: int) -> None:
            pass

    buffer = ReplayBuffer(ListStorage(10), writer=Forgetful())
    with pytest.raises(AsyncBufError, match=r"Forgetful.commit: expected a write_count of 2, grown by.*found 0"):
        await buffer.extend([1, 2])


# -- samplers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draw", "kind", "message"),
    [
        (Draw(torch.tensor([5])), IndexError, r"Moody.draw: expected rows 0 to 4, found 5 to 5"),
        (Draw(torch.arange(4), shape=(3, 2)), ValueError, r"expected a shape of 4 rows in all, found \(3, 2\)"),
        (Draw(torch.arange(4), lengths=torch.tensor([3, 2])), ValueError, r"expected lengths of 4 rows.*\[3, 2\]"),
        (Draw(torch.arange(4), joins={"next": torch.arange(9)}), IndexError, r"join 'next': expected rows 0 to 4"),
        (Draw(torch.arange(4), joins={"next": [1]}), TypeError, r"the join 'next' as an int64 tensor, found \[1\]"),  # type: ignore[dict-item]
    ],
)
def test_a_sampler_that_returns_something_else(draw: Draw, kind: type[Exception], message: str) -> None:
    class Moody(RandomSampler):
        def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
            return draw

        def combine(self, draw: Draw, data: Any, joined: Any) -> Any:
            return {**data, **joined}

    table = made(Moody())
    with pytest.raises(kind, match=message):
        table.draw(4)
    assert table.limits.drawn == 0


def test_what_was_drawn_is_counted() -> None:
    table = made(SamplerWithoutReplacement())
    for _ in range(2):
        table.draw(3)
    assert (table.limits.drawn, table.limits.drawn_items) == (2, 5)
    other = made()
    other.draw(3)
    assert (other.limits.drawn, other.limits.drawn_items) == (1, 3)
