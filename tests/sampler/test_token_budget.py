"""Batches of so many tokens."""

from __future__ import annotations

import asyncio
import pickle
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import (
    JoinedSampler,
    MixtureSampler,
    NStep,
    RaggedStorage,
    ReplayBuffer,
    RoundRobinWriter,
    TableWriter,
    TensorStorage,
    TokenBudgetSampler,
)
from asyncbuf._table.table import Table
from asyncbuf.errors import BufferClosedError, CheckpointCorruptError, CheckpointMismatchError, SchemaError
from asyncbuf.limiter import MinSize
from asyncbuf.sampler.token_budget import balanced
from asyncbuf.testing import assert_exact_resume, check_sampler
from tests.helpers import check_same, crossed, jitter, numbers, seeded, turns, within

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncbuf import Batch, Draw

TOKENS = 20


def made(sampler: TokenBudgetSampler, capacity: int = 40, batch_size: int = 8, **more: Any) -> ReplayBuffer:
    return ReplayBuffer(TensorStorage(capacity), sampler=sampler, batch_size=batch_size, generator=seeded(), **more)


def of(lengths: Sequence[int], start: int = 0) -> dict[str, torch.Tensor]:
    return {"length": torch.tensor(lengths), "number": torch.arange(start, start + len(lengths))}


def mixed(count: int, start: int) -> dict[str, torch.Tensor]:
    number = torch.arange(start, start + count)
    return {"length": number * 2654435761 % 19, "number": number, "reward": number.float(), "done": number < 0}


@pytest.mark.loops_in_turn
@pytest.mark.parametrize("look_ahead", [0, 3])
@pytest.mark.parametrize("ranks", [None, 3])
@pytest.mark.parametrize(
    "many",
    [
        {"seeds": range(3), "steps": 24},
        pytest.param({"seeds": range(24), "steps": 120}, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
    ids=["few", "many"],
)
async def test_the_contract_of_samplers(look_ahead: int, ranks: int | None, many: dict[str, Any]) -> None:
    await check_sampler(
        lambda: TokenBudgetSampler(18, "length", look_ahead=look_ahead, ranks=ranks), items=mixed, **many
    )


# -- against a plain model --------------------------------------------------------------------------------------------


def packed(lengths: Sequence[int], tokens: int, batch_size: int, look_ahead: int) -> tuple[list[int], bool]:
    """Places of the items of the next batch, and whether it is full."""
    taken: list[int] = []
    passed = 0
    for place, length in enumerate(lengths):
        if length <= tokens:
            taken.append(place)
            tokens -= length
            if len(taken) == batch_size or tokens == 0:
                return taken, True
        else:
            passed += 1
            if passed > look_ahead:
                return taken, True
    return taken, False


class Play:
    """A table and a sorted list of item numbers, side by side."""

    def __init__(self, seed: int, look_ahead: int) -> None:
        self.choose = random.Random(seed)
        self.look_ahead = look_ahead
        self.sampler = TokenBudgetSampler(TOKENS, "length", look_ahead=look_ahead)
        self.table = Table(TensorStorage(23), RoundRobinWriter(), self.sampler, MinSize(1), seeded(seed))
        self.open: list[tuple[Draw, int, list[int]]] = []
        self.length: dict[int, int] = {}
        self.row: dict[int, int] = {}
        self.waiting: list[int] = []
        self.written = self.lost = 0
        self.finished = False

    def step(self) -> None:
        names = ["write", "draw", "hand over", "drop", "remove", "save", "finish"]
        what = self.choose.choices(names, [5, 5, 3, 1, 1, 1, 0.05])[0]
        getattr(self, f"_{what.replace(' ', '_')}")()
        assert self.sampler.waiting == len(self.waiting)
        assert self.sampler.lost == self.lost
        self.sampler.verify(self.table.rows)

    def forget(self, gone: set[int]) -> None:
        self.waiting = [number for number in self.waiting if number not in gone]
        for number in gone:
            self.row.pop(number, None)

    def _write(self) -> None:
        count, start, table = self.choose.choice((1, 2, 3, 8, 25)), self.written, self.table
        lengths = [self.choose.randrange(TOKENS + 1) for _ in range(count)]
        prepared = table.storage.prepare(of(lengths, start))
        placement = table.place(count)
        event = table.check_write(placement, prepared)
        table.storage.write(prepared, placement.runs)
        table.commit(placement)
        table.wrote(placement, event)
        gone = {number for number, row in self.row.items() if row in set(placement.rows.tolist())}
        self.lost += len(gone & set(self.waiting)) + count - len(placement.rows)
        self.forget(gone)
        for number, row in zip((placement.items + start).tolist(), placement.rows.tolist(), strict=True):
            self.row[number], self.length[number] = row, lengths[number - start]
            self.waiting.append(number)
        self.written += count

    def _draw(self) -> None:
        size = self.choose.choice((1, 3, 6))
        taken, is_full = packed([self.length[number] for number in self.waiting], TOKENS, size, self.look_ahead)
        may = is_full or (self.finished and bool(self.waiting))
        assert bool(self.table.may_draw(size)) == may
        if not may:
            return
        drawn = [self.waiting[place] for place in taken]
        draw = self.table.draw(size)
        assert draw.info["number"].tolist() == drawn
        assert draw.info["length"].tolist() == [self.length[number] for number in drawn]
        assert draw.indices.tolist() == [self.row[number] for number in drawn]
        self.waiting = [number for number in self.waiting if number not in drawn]
        self.open.append((draw, self.table.write_count, drawn))

    def _hand_over(self) -> None:
        if self.open:
            draw, write_count, drawn = self.open.pop(self.choose.randrange(len(self.open)))
            self.table.handed_over(draw, write_count)
            self.forget(set(drawn))

    def _drop(self) -> None:
        while self.open and self.choose.random() < 0.7:
            draw, _, drawn = self.open.pop(0)
            self.table.dropped(draw)
            self.waiting = sorted([*self.waiting, *(number for number in drawn if number in self.row)])

    def _remove(self) -> None:
        gone = self.choose.sample(sorted(self.row), min(len(self.row), 2))
        self.table.remove(np.array([self.row[number] for number in gone], np.int64))
        self.forget(set(gone))

    def _save(self) -> None:
        self.sampler.load_state_dict(self.sampler.state_dict())

    def _finish(self) -> None:
        self.finished = True
        self.table.finish()


@pytest.mark.parametrize("look_ahead", [0, 2, 16])
@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 300), marks=pytest.mark.slow)], ids=["6", "300"])
def test_histories_are_those_of_a_list(seeds: range, look_ahead: int) -> None:
    for seed in seeds:
        play = Play(seed, look_ahead)
        for _ in range(200):
            play.step()


# -- whole buffers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 2])
async def test_batches_fill_the_budget_and_the_rest_is_the_last_one(prefetch: int) -> None:
    async with made(TokenBudgetSampler(TOKENS, "length", look_ahead=1), prefetch=prefetch) as buffer:
        await buffer.extend(of([12, 9, 5, 3, 7, 20, 6, 1]))
        found = [numbers(await within(buffer.sample())) for _ in range(2)]
        assert found == [[0, 2, 3], [1, 4]]  # 1 is passed over, and comes first then; so is 5
        waiting = asyncio.ensure_future(buffer.sample())
        assert numbers(await within(waiting)) == [5]
        waiting = asyncio.ensure_future(buffer.sample())
        await turns()
        assert not waiting.done()
        assert "2 items wait, and 7 tokens of them fit" in buffer.why_blocked()
        await buffer.finish()
        assert numbers(await within(waiting)) == [6, 7]
        with pytest.raises(BufferClosedError):
            await within(buffer.sample())
        assert len(buffer) == 0


async def test_no_item_is_passed_over_for_ever() -> None:
    async with made(TokenBudgetSampler(TOKENS, "length", look_ahead=1)) as buffer:
        await buffer.extend(of([11, 19]))
        for start in range(2, 40, 2):
            await buffer.extend(of([9, 11], start))
            if 1 in numbers(await within(buffer.sample())):
                break
        assert start == 4


async def test_a_batch_has_no_more_items_than_its_size() -> None:
    async with made(TokenBudgetSampler(TOKENS, "length"), batch_size=4) as buffer:
        await buffer.extend(of([1] * 10))
        await buffer.finish()
        assert [len(batch) async for batch in buffer] == [4, 4, 2]


async def test_ranks_have_about_as_many_tokens() -> None:
    async with made(TokenBudgetSampler(30, "length", ranks=3), batch_size=6) as buffer:
        await buffer.extend(of([9, 1, 5, 4, 8, 3]))
        batch = await within(buffer.sample())
        assert batch.lengths is not None
        assert batch.lengths.tolist() == [2, 2, 2]
        assert batch.info["rank"].tolist() == [0, 0, 1, 1, 2, 2]
        assert [part.tolist() for part in batch["length"].split(batch.lengths.tolist())] == [[9, 1], [8, 3], [5, 4]]


@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_the_balance_is_within_its_bound(ranks: int) -> None:
    for seed in range(30):
        lengths = np.random.default_rng(seed).geometric(0.02, 64)
        found = balanced(lengths, ranks)
        sums = np.bincount(found, weights=lengths, minlength=ranks)
        assert sums.max() <= 4 / 3 * max(lengths.max(), lengths.sum() / ranks) + 1e-9
        assert np.bincount(found, minlength=ranks).min() > 0


async def test_lengths_of_ragged_storage_in_packed_batches() -> None:
    storage = RaggedStorage(40, ["tokens"], layout="packed")
    buffer = ReplayBuffer(storage, sampler=TokenBudgetSampler(10, "lengths"), batch_size=8, generator=seeded())
    async with buffer:
        for length in (4, 7, 3, 2, 9, 1, 3):
            await buffer.add({"tokens": torch.full((length,), length)})
        await buffer.finish()
        found = [batch["lengths"].tolist() async for batch in buffer]
        assert found == [[4, 3, 2, 1], [7, 3], [9]]
        with pytest.raises(BufferClosedError):
            await buffer.add({"tokens": torch.zeros(11)})


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ({"length": torch.tensor([21])}, "length: expected lengths from 0 to 20, the tokens of a batch; found 21"),
        ({"length": torch.tensor([-1])}, "length: expected lengths from 0 to 20.*found -1"),
        ({"length": torch.tensor([1.0])}, "length: expected one integer per item"),
        ({"length": torch.tensor([[1, 2]])}, "length: expected one integer per item"),
    ],
)
async def test_items_that_fit_into_no_batch_are_refused(items: dict[str, torch.Tensor], message: str) -> None:
    buffer = made(TokenBudgetSampler(TOKENS, "length"), batch_size=2)
    with pytest.raises(SchemaError, match=message):
        await buffer.extend({**of([1]), **items})
    assert len(buffer) == 0


@pytest.mark.parametrize("kind", ["mixture", "joined"])
async def test_within_other_samplers_the_rest_comes_at_the_end_too(kind: str) -> None:
    sampler: Any = TokenBudgetSampler(TOKENS, "length", look_ahead=0)
    writer = None
    if kind == "mixture":
        sampler, writer = MixtureSampler({"one": sampler}), TableWriter({"one": 40})
    else:
        sampler = JoinedSampler(
            sampler, NStep(1, 0.9, reward_key="reward", terminated_key="done", next_keys=()), end_key="done"
        )
    buffer = ReplayBuffer(TensorStorage(40), sampler=sampler, writer=writer, batch_size=8, generator=seeded())
    async with buffer:
        await buffer.extend({**mixed(3, 0), **of([15, 15, 3])}, table="one" if writer else None)
        assert numbers(await within(buffer.sample())) == [0]
        waiting = asyncio.ensure_future(buffer.sample())
        await turns()
        assert not waiting.done()
        await buffer.finish()
        assert numbers(await within(waiting)) == [1, 2]


@pytest.mark.parametrize(("prefetch", "workers"), [(0, 1), (1, 2), (4, 2)])
async def test_depth_workers_latency_and_when_items_come_do_not_show(prefetch: int, workers: int) -> None:
    def slow(data: Any) -> Any:
        jitter()
        return data

    async def stream(transform: Any, step: int, **more: Any) -> list[Any]:
        buffer = made(TokenBudgetSampler(TOKENS, "length"), capacity=200, transform=transform, **more)
        found: list[Any] = []

        async def learn() -> None:
            found.extend([(batch["number"].tolist(), batch.number) async for batch in buffer])

        async with buffer:
            learning = asyncio.create_task(learn())
            for start in range(0, 60, step):
                await buffer.extend(mixed(step, start))
                await turns(step % 3)
            await buffer.finish()
            await within(learning)
        return found

    expected = await stream([], 60)
    assert sum(len(batch) for batch, _ in expected) == 60
    for step in (1, 5, 12):
        check_same(await stream([slow], step, prefetch=prefetch, workers=workers), expected, f"{step} at a time")


@pytest.mark.parametrize(("prefetch", "ranks"), crossed([0, 1, 4], [None, 3], one_in=2))
@pytest.mark.parametrize("at", [(3,), pytest.param("every", marks=pytest.mark.slow)], ids=["one", "every"])
async def test_exact_resume(prefetch: int, ranks: int | None, at: Any) -> None:
    async def make() -> ReplayBuffer:
        sampler = TokenBudgetSampler(TOKENS, "length", look_ahead=2, ranks=ranks)
        buffer = made(sampler, capacity=60, prefetch=prefetch, workers=2)
        await buffer.extend(mixed(40, 0))
        return buffer

    async def feed(buffer: ReplayBuffer, step: int, batch: Batch) -> None:
        await buffer.extend(mixed(5, 40 + 5 * step))
        if step % 3 == 1:
            await buffer.skip()
        if step % 4 == 3:
            await buffer.remove(torch.arange(20, 22))

    await assert_exact_resume(make, feed=feed, at=at, steps=6)


@pytest.mark.parametrize("way", ["pickle", "state_dict"])
async def test_a_restored_buffer_waits_for_a_full_batch_again(way: str) -> None:
    buffer = made(TokenBudgetSampler(TOKENS, "length"))
    await buffer.extend(of([3, 4]))
    await buffer.finish()
    other = made(TokenBudgetSampler(TOKENS, "length"))
    if way == "pickle":
        async with buffer.frozen():
            other = pickle.loads(pickle.dumps(buffer))
    else:
        await other.load_state_dict(await buffer.state_dict())
    async with buffer, other:
        assert numbers(await within(buffer.sample())) == [0, 1]
        waiting = asyncio.ensure_future(other.sample())
        await turns()
        assert not waiting.done()
        await other.extend(of([13], 2))
        assert numbers(await within(waiting)) == [0, 1, 2]


async def test_items_that_are_overwritten_are_counted() -> None:
    sampler = TokenBudgetSampler(TOKENS, "length", look_ahead=0)
    async with made(sampler, capacity=8, batch_size=4) as buffer:
        await buffer.extend(of([20] * 6))
        assert numbers(await within(buffer.sample())) == [0]
        await buffer.extend(of([20] * 10, 6))
        assert (sampler.lost, sampler.waiting, len(buffer)) == (7, 8, 8)
        assert numbers(await within(buffer.sample())) == [8]


# -- what is refused --------------------------------------------------------------------------------------------------


def tensor(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("lost", -1, CheckpointCorruptError),
        ("capacity", 39, CheckpointCorruptError),
        ("capacity", 2**61, CheckpointCorruptError),
        ("rows", tensor(0, 1, 1), CheckpointCorruptError),
        ("rows", tensor(0, 1, -1), CheckpointCorruptError),
        ("rows", tensor(0, 1, 4), CheckpointCorruptError),
        ("numbers", tensor(0, 1), CheckpointCorruptError),
        ("numbers", tensor(0, 1, 1), CheckpointCorruptError),
        ("numbers", tensor(0, 1, 9), CheckpointCorruptError),
        ("lengths", tensor(1, 2, -1), CheckpointCorruptError),
        ("lengths", tensor(1, 2, 21), CheckpointMismatchError),
        ("lengths", torch.ones(3), CheckpointCorruptError),
        ("drawn", tensor(7), CheckpointCorruptError),
        ("drawn", tensor(1, 1), CheckpointCorruptError),
    ],
)
async def test_a_state_that_is_none_is_refused(key: str, value: Any, error: type[Exception]) -> None:
    def target() -> ReplayBuffer:
        return made(TokenBudgetSampler(TOKENS, "length", look_ahead=0))

    buffer, other = target(), target()
    await buffer.extend(of([11, 11, 9]))
    state = await buffer.state_dict()
    await other.load_state_dict(state)
    state["sampler"][key] = value
    with pytest.raises(error):
        await other.load_state_dict(state)
    async with other:
        assert numbers(await within(other.sample())) == [0]
        assert numbers(await within(other.sample())) == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tokens": 0}, ValueError, "tokens: expected at least 1, found 0"),
        ({"tokens": 1.5}, TypeError, "tokens: expected an int"),
        ({"key": ""}, TypeError, "key: expected the path of a field"),
        ({"look_ahead": -1}, ValueError, "look_ahead: expected at least 0"),
        ({"ranks": 0}, ValueError, "ranks: expected at least 1"),
    ],
)
def test_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TokenBudgetSampler(**{"tokens": TOKENS, "key": "length", **arguments})


def test_a_full_storage_always_fills_a_batch() -> None:
    with pytest.raises(ValueError, match="batch_size: expected at most the capacity 20 without the 16 items"):
        made(TokenBudgetSampler(TOKENS, "length"), capacity=20, batch_size=5)
