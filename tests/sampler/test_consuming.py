"""Items that are used up."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import ConsumingSampler, ReplayBuffer, RoundRobinWriter, TensorStorage
from asyncbuf._table.table import Table
from asyncbuf.errors import BufferClosedError, CheckpointCorruptError, CheckpointMismatchError
from asyncbuf.limiter import MinSize
from asyncbuf.sampler import _line
from asyncbuf.sampler._distinct import distinct
from asyncbuf.testing import assert_exact_resume
from tests.helpers import Lines, crossed, numbers, rows, seeded, within
from tests.sampler.chi_square import assert_uniform

if TYPE_CHECKING:
    from asyncbuf import Batch, Draw

ORDERS = ("fifo", "lifo", "random")


def made(sampler: ConsumingSampler, capacity: int = 20, batch_size: int = 4, **more: Any) -> ReplayBuffer:
    return ReplayBuffer(TensorStorage(capacity), sampler=sampler, batch_size=batch_size, generator=seeded(), **more)


class Model:
    """The same, with a list: item numbers in the order in which they are drawn."""

    def __init__(self, times: int, order: str) -> None:
        self.times, self.order = times, order
        self.row: dict[int, int] = {}
        self.left: dict[int, int] = {}
        self.due: dict[int, int] = {}
        self.returned: list[int] = []
        self.fresh: list[int] = []
        self.again: list[int] = []
        self.lost = 0

    @property
    def line(self) -> list[int]:
        is_fifo = self.order == "fifo"
        fresh = self.fresh if is_fifo else self.fresh[::-1]
        return sorted(self.returned, reverse=not is_fifo) + fresh + self.again

    def wrote(self, placed: dict[int, int], offered: int) -> None:
        taken = set(placed.values())
        gone = [number for number, row in self.row.items() if row in taken]
        self.lost += sum(self.left[number] > 0 for number in gone) + offered - len(placed)
        self.forget(gone)
        for number, row in placed.items():
            self.row[number], self.left[number], self.due[number] = row, self.times, self.times
            if self.order == "fifo":
                self.fresh, self.again = [*self.fresh, *self.again], []
            self.fresh.append(number)

    def forget(self, gone: list[int]) -> None:
        for number in gone:
            del self.row[number], self.left[number], self.due[number]
        for name in ("returned", "fresh", "again"):
            setattr(self, name, [number for number in getattr(self, name) if number in self.row])

    def draw(self, drawn: list[int]) -> None:
        for name in ("returned", "fresh", "again"):
            setattr(self, name, [number for number in getattr(self, name) if number not in drawn])
        for number in drawn:
            self.left[number] -= 1
            if self.left[number]:
                self.again.append(number)

    def drop(self, drawn: list[int]) -> None:
        for number in drawn:
            if number in self.row:
                self.left[number] += 1
                if self.left[number] == 1:
                    self.returned.append(number)

    def hand_over(self, drawn: list[int]) -> list[int]:
        for number in drawn:
            if number in self.row:
                self.due[number] -= 1
        return [self.row[number] for number in drawn if number in self.row and not self.due[number]]


class Play:
    """A table and the model, side by side."""

    def __init__(self, times: int, order: str, seed: int) -> None:
        self.choose = random.Random(seed)
        self.sampler, self.model = ConsumingSampler(times, order), Model(times, order)
        self.table = Table(TensorStorage(17), RoundRobinWriter(), self.sampler, MinSize(1), seeded(seed))
        self.open: list[tuple[Draw, int]] = []
        self.written = 0

    def step(self) -> None:
        what = self.choose.choices(["write", "draw", "hand over", "drop", "remove", "clear"], [5, 6, 4, 1, 1, 0.1])[0]
        getattr(self, f"_{what.replace(' ', '_')}")()
        assert self.sampler.waiting == len(self.model.line)
        assert self.sampler.lost == self.model.lost

    def _write(self) -> None:
        count, table = self.choose.choice((1, 1, 2, 3, 6, 19)), self.table
        prepared = table.storage.prepare(rows(count, self.written))
        placement = table.place(count)
        event = table.check_write(placement, prepared)
        table.storage.write(prepared, placement.runs)
        table.commit(placement)
        table.wrote(placement, event)
        placed = dict(zip((placement.items + self.written).tolist(), placement.rows.tolist(), strict=True))
        self.model.wrote(placed, count)
        self.written += count

    def _draw(self) -> None:
        size, line = self.choose.randrange(1, 7), self.model.line
        assert bool(self.table.may_draw(size)) == (len(line) >= size)
        if len(line) < size:
            return
        draw = self.table.draw(size)
        drawn = draw.info["number"].tolist()
        assert draw.indices.tolist() == [self.model.row[number] for number in drawn]
        if self.model.order == "random":
            assert set(drawn) <= set(line)
            assert len(set(drawn)) == size
        else:
            assert drawn == line[:size]
        self.model.draw(drawn)
        self.open.append((draw, self.table.write_count))

    def _hand_over(self) -> None:
        if self.open:
            draw, write_count = self.open.pop(self.choose.randrange(len(self.open)))
            leaving = self.model.hand_over(draw.info["number"].tolist())
            assert self.table.handed_over(draw, write_count) == len(leaving)
            self.model.forget([number for number, row in self.model.row.items() if row in leaving])

    def _drop(self) -> None:
        while self.open and self.choose.random() < 0.7:
            draw, _ = self.open.pop(0)
            self.table.dropped(draw)
            self.model.drop(draw.info["number"].tolist())

    def _remove(self) -> None:
        there = sorted(self.model.row)
        gone = self.choose.sample(there, min(len(there), 3))
        self.table.remove(np.array([self.model.row[number] for number in gone], np.int64))
        self.model.forget(gone)

    def _clear(self) -> None:
        self.table.clear()
        self.model.forget(list(self.model.row))
        while self.open:
            self.table.dropped(self.open.pop()[0])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize("block", [8, 1 << 14])
@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 150), marks=pytest.mark.slow)], ids=["4", "150"])
def test_histories_are_those_of_a_list(
    times: int, order: str, block: int, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_line, "_BLOCK", block)
    for seed in seeds:
        play = Play(times, order, seed)
        for _ in range(150):
            play.step()


@pytest.mark.parametrize("prefetch", [0, 3])
async def test_every_item_is_used_once_and_leaves(prefetch: int) -> None:
    buffer = made(ConsumingSampler(), prefetch=prefetch)

    async def collect() -> None:
        for start in range(0, 82, 2):
            await buffer.extend(rows(2, start))
            while len(buffer) > 16:  # noqa: ASYNC110 (a limiter does this)
                await asyncio.sleep(0)
        await buffer.finish()

    async with buffer:
        collecting = asyncio.create_task(collect())
        used = [batch async for batch in buffer]
        await collecting
        assert [number for batch in used for number in numbers(batch)] == list(range(80))
        assert all(torch.equal(batch.info["number"], batch["number"]) for batch in used)
        assert len(buffer) == 2
        with pytest.raises(BufferClosedError, match="no item will come"):
            await within(buffer.sample())
        assert numbers(await within(buffer.sample(2))) == [80, 81]
        assert len(buffer) == 0


@pytest.mark.parametrize(
    ("order", "expected"),
    [("fifo", [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]), ("lifo", [5, 4, 3, 2, 1, 0, 5, 4, 3, 2, 1, 0])],
)
async def test_several_times(order: str, expected: list[int]) -> None:
    buffer = made(ConsumingSampler(2, order), batch_size=2)
    await buffer.extend(rows(6))
    await buffer.finish()
    async with buffer:
        assert [number async for batch in buffer for number in numbers(batch)] == expected
    assert len(buffer) == 0


async def test_skipped_items_are_the_next_ones() -> None:
    buffer = made(ConsumingSampler(), prefetch=2)
    await buffer.extend(rows(20))
    async with buffer:
        assert numbers(await buffer.sample()) == [0, 1, 2, 3]
        await buffer.flush()
        assert numbers(await buffer.sample()) == [4, 5, 6, 7]
        await buffer.skip()  # 8 to 11, while 12 to 15 are under way
        found = [numbers(await buffer.sample()) for _ in range(3)]
    assert found == [[12, 13, 14, 15], [8, 9, 10, 11], [16, 17, 18, 19]]


async def test_items_that_are_overwritten_are_counted() -> None:
    sampler = ConsumingSampler()
    buffer = made(sampler, capacity=8)
    await buffer.extend(rows(6))
    async with buffer:
        batch = await buffer.sample()
        assert numbers(batch) == [0, 1, 2, 3]
        await buffer.extend(rows(10, 6))  # two of which are not kept, and 4 and 5 are lost
        assert (sampler.lost, sampler.waiting, len(buffer)) == (4, 8, 8)
        assert numbers(await buffer.sample(8)) == list(range(8, 16))


async def test_a_batch_has_no_item_twice() -> None:
    with pytest.raises(ValueError, match="batch_size: expected at most the capacity 20, found 21"):
        made(ConsumingSampler(5), batch_size=21)
    buffer = made(ConsumingSampler(5, "random"), batch_size=3)
    await buffer.extend(rows(4))
    await buffer.finish()
    async with buffer:
        found = [sorted(numbers(batch)) async for batch in buffer]
    assert all(len(set(batch)) == 3 for batch in found)
    assert max(np.bincount(np.concatenate(found))) <= 5


@pytest.mark.parametrize(("limit", "count"), [(40, 3), (40, 19), (40, 20), (40, 40), (1000, 100)])
def test_distinct_numbers_are_uniform_in_every_place(limit: int, count: int) -> None:
    generator = seeded(count)
    found = np.stack([distinct(limit, count, generator) for _ in range(4000)])
    assert all(len(set(draw)) == count for draw in found[:50].tolist())
    for place in (0, count // 2, count - 1):
        assert_uniform(found[:, place], limit)


@pytest.mark.parametrize("order", ORDERS)
def test_the_cost_does_not_depend_on_how_much_waits(order: str) -> None:
    def lines(capacity: int) -> int:
        sampler = ConsumingSampler(2, order)
        table = Table(TensorStorage(capacity), RoundRobinWriter(), sampler, MinSize(1), seeded())
        for start in (0, capacity // 2):
            prepared = table.storage.prepare(rows(capacity // 2, start))
            placement = table.place(capacity // 2)
            event = table.check_write(placement, prepared)
            table.storage.write(prepared, placement.runs)
            table.commit(placement)
            table.wrote(placement, event)
        with Lines() as counted:
            for _ in range(40):
                table.handed_over(table.draw(2), table.write_count)
        return counted.count

    assert lines(1 << 17) < 1.2 * lines(1 << 10)


@pytest.mark.parametrize(("prefetch", "order"), crossed([0, 1, 4], ORDERS, one_in=3))
@pytest.mark.parametrize("at", [(3,), pytest.param("every", marks=pytest.mark.slow)], ids=["one", "every"])
async def test_exact_resume(prefetch: int, order: str, at: Any) -> None:
    async def make() -> ReplayBuffer:
        buffer = made(ConsumingSampler(2, order), capacity=40, prefetch=prefetch, workers=2)
        await buffer.extend(rows(25))
        return buffer

    async def feed(buffer: ReplayBuffer, step: int, batch: Batch) -> None:
        await buffer.extend(rows(4, 25 + 4 * step))
        if step % 3 == 1:
            await buffer.skip()
        if step % 4 == 3:
            await buffer.remove(batch.indices[:2])

    await assert_exact_resume(make, feed=feed, at=at, steps=6)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("times", 3, CheckpointMismatchError),
        ("order", "lifo", CheckpointMismatchError),
        ("lost", -1, CheckpointCorruptError),
        ("capacity", 19, CheckpointCorruptError),
        ("capacity", 2**60, CheckpointCorruptError),
        ("rows", torch.tensor([0, 1, 2, 3, 5]), CheckpointCorruptError),
        ("rows", torch.tensor([0, 1, 2, 3, 3]), CheckpointCorruptError),
        ("rows", torch.tensor([0, 1, 2, 3, -1]), CheckpointCorruptError),
        ("numbers", torch.tensor([0, 1, 2, 3, 9]), CheckpointCorruptError),
        ("numbers", torch.tensor([0, 1, 2, 2, 3]), CheckpointCorruptError),
        ("left", torch.tensor([2, 2, 2, 2, 3]), CheckpointCorruptError),
        ("due", torch.tensor([2, 2, 2, 2, 1]), CheckpointCorruptError),
        ("line", torch.tensor([0, 1, 2, 3]), CheckpointCorruptError),
        ("line", torch.zeros(5), CheckpointCorruptError),
        ("again", torch.tensor([4]), CheckpointCorruptError),
        ("returned", torch.tensor([4]), CheckpointCorruptError),
    ],
)
async def test_a_state_that_is_none_is_refused(key: str, value: Any, error: type[Exception]) -> None:
    buffer = made(ConsumingSampler(2))
    await buffer.extend(rows(5))
    state = await buffer.state_dict()
    target = made(ConsumingSampler(2))
    await target.load_state_dict(state)
    state["sampler"][key] = value
    with pytest.raises(error):
        await target.load_state_dict(state)
    async with target:
        assert numbers(await target.sample()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"times": 0}, ValueError, "times: expected at least 1, found 0"),
        ({"times": 1.5}, TypeError, "times: expected an int"),
        ({"times": True}, TypeError, "times: expected an int"),
        ({"times": 2**31}, ValueError, "times: expected at most"),
        ({"order": "filo"}, ValueError, "order: expected one of .*found 'filo'"),
        ({"order": None}, ValueError, "order: expected one of"),
        ({"order": []}, ValueError, "order: expected one of"),
    ],
)
def test_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ConsumingSampler(**arguments)
