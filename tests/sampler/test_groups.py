"""Groups: handed out whole, once, and gone."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import (
    AsyncBufError,
    Counters,
    GroupSampler,
    Limiter,
    ListStorage,
    NotYet,
    RaggedStorage,
    ReplayBuffer,
    RoundRobinWriter,
    TensorStorage,
)
from asyncbuf._table.table import Table
from asyncbuf.errors import BufferClosedError, CheckpointCorruptError, CheckpointMismatchError, SchemaError
from asyncbuf.limiter import MinSize
from asyncbuf.sampler import _group_rows
from asyncbuf.testing import assert_exact_resume
from tests.helpers import check_same, crossed, fingerprint, jitter, seeded, turns, within

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncbuf import Batch, Draw
    from asyncbuf.rows import Answer

SIZE = 3


def made(sampler: GroupSampler, capacity: int = 24, batch_size: int = 2 * SIZE, **more: Any) -> ReplayBuffer:
    return ReplayBuffer(TensorStorage(capacity), sampler=sampler, batch_size=batch_size, generator=seeded(), **more)


def of(keys: Sequence[int], start: int = 0, rewards: Sequence[float] | None = None) -> dict[str, torch.Tensor]:
    """Items of some groups, numbered."""
    values = [float((start + i) % 4) for i in range(len(keys))] if rewards is None else list(rewards)
    return {
        "group": torch.tensor(keys),
        "number": torch.arange(start, start + len(keys)),
        "reward": torch.tensor(values),
    }


def interleaved(count: int, start: int) -> dict[str, torch.Tensor]:
    """Items of three groups of three that take turns, and then of the next three."""
    number = torch.arange(start, start + count)
    return {"group": number // 9 * 3 + number % 3, "number": number, "reward": (number % 4).float()}


def varied(group: dict[str, Any]) -> bool:
    return float(np.ptp(group["reward"])) > 0


# -- against a plain model --------------------------------------------------------------------------------------------


class Model:
    """The same with lists: groups as lists of item numbers."""

    def __init__(self, thin: bool) -> None:
        self.thin = thin
        self.row: dict[int, int] = {}
        self.open: dict[int, list[int]] = {}
        self.line: list[tuple[int, list[int]]] = []
        self.drawn: set[int] = set()
        self.told: list[tuple[int, str]] = []

    def lose(self, numbers: set[int]) -> None:
        """Items are gone: their groups leave."""
        gone = []
        for key, members in [*self.open.items(), *self.line]:
            if numbers & set(members):
                gone.append((members[-1], key, members))
        for _, key, members in sorted(gone):
            if self.open.get(key) == members:
                del self.open[key]
            self.line = [entry for entry in self.line if entry[1] != members]
            self.told.append((key, "lost"))
            self.forget(members)
        self.forget(list(numbers))

    def forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.row.pop(number, None)
            self.drawn.discard(number)

    def wrote(self, keys: list[int], start: int, placed: dict[int, int]) -> None:
        taken = set(placed.values())
        self.lose({number for number, row in self.row.items() if row in taken})
        for key in sorted({key for i, key in enumerate(keys) if start + i not in placed}):
            self.forget(self.open.pop(key, []))
            self.told.append((key, "lost"))
        for number, row in placed.items():
            self.row[number] = row
            key = keys[number - start]
            members = self.open.setdefault(key, [])
            members.append(number)
            if len(members) == SIZE:
                del self.open[key]
                if self.thin and sum(members) % 3 == 0:
                    self.told.append((key, "filter"))
                    self.forget(members)
                else:
                    self.line.append((key, members))

    def draw(self, count: int) -> list[tuple[int, list[int]]]:
        found, self.line = self.line[:count], self.line[count:]
        for _, members in found:
            self.drawn |= set(members)
        return found

    def drop(self, groups: list[tuple[int, list[int]]]) -> None:
        for key, members in groups:
            there = [number for number in members if number in self.drawn]
            if there == members:
                self.line = sorted([(key, members), *self.line], key=lambda entry: entry[1][-1])
            elif there:
                self.told.append((key, "lost"))
                self.forget(there)
            self.drawn -= set(members)


class Play:
    """A table and the model, side by side."""

    def __init__(self, seed: int, thin: bool) -> None:
        self.choose = random.Random(seed)
        self.model, self.told = Model(thin), list[tuple[int, str]]()
        self.sampler = GroupSampler(
            "group",
            SIZE,
            filter=(lambda group: bool(group["number"].sum() % 3)) if thin else None,
            filter_keys="number" if thin else (),
            on_drop=lambda key, cause: self.told.append((key, cause)),
        )
        self.table = Table(TensorStorage(17), RoundRobinWriter(), self.sampler, MinSize(1), seeded(seed))
        self.open: list[tuple[Draw, int, list[tuple[int, list[int]]]]] = []
        self.written = 0

    def step(self) -> None:
        names = ["write", "draw", "hand over", "drop", "remove", "clear", "save"]
        what = self.choose.choices(names, [6, 4, 3, 1, 1, 0.1, 1])[0]
        getattr(self, f"_{what.replace(' ', '_')}")()
        model, sampler = self.model, self.sampler
        assert self.told == model.told
        assert (sampler.waiting, sampler.incomplete) == (len(model.line), len(model.open))
        assert (sampler.lost, sampler.refused) == tuple(
            sum(cause == each for _, cause in model.told) for each in ("lost", "filter")
        )
        sampler.verify(self.table.rows)

    def _write(self) -> None:
        count = self.choose.choice((1, 1, 2, 3, 6, 19))
        keys, start, table = [self.choose.randrange(-2, 3) for _ in range(count)], self.written, self.table
        prepared = table.storage.prepare(of(keys, start))
        placement = table.place(count)
        event = table.check_write(placement, prepared)
        table.storage.write(prepared, placement.runs)
        table.commit(placement)
        for _ in table.telling(placement, event, self.choose.choice((2, 100))):
            pass
        placed = dict(zip((placement.items + start).tolist(), placement.rows.tolist(), strict=True))
        self.model.wrote(keys, start, placed)
        self.written += count
        assert table.size == len(self.model.row)

    def _draw(self) -> None:
        count = self.choose.randrange(1, 3)
        assert bool(self.table.may_draw(count * SIZE)) == (len(self.model.line) >= count)
        if len(self.model.line) < count:
            return
        draw, groups = self.table.draw(count * SIZE), self.model.draw(count)
        assert draw.shape == (count, SIZE)
        assert draw.info["group"].tolist() == [key for key, _ in groups]
        assert draw.info["number"].tolist() == [members for _, members in groups]
        assert draw.indices.tolist() == [self.model.row[number] for _, members in groups for number in members]
        self.open.append((draw, self.table.write_count, groups))

    def _hand_over(self) -> None:
        if self.open:
            draw, write_count, groups = self.open.pop(self.choose.randrange(len(self.open)))
            self.table.handed_over(draw, write_count)
            self.model.forget([number for _, members in groups for number in members if number in self.model.drawn])

    def _drop(self) -> None:
        while self.open and self.choose.random() < 0.7:
            draw, _, groups = self.open.pop(0)
            self.table.dropped(draw)
            self.model.drop(groups)
        self.table.let_go()

    def _remove(self) -> None:
        there = sorted(self.model.row)
        gone = self.choose.sample(there, min(len(there), 2))
        self.table.remove(np.array([self.model.row[number] for number in gone], np.int64))
        self.model.lose(set(gone))

    def _clear(self) -> None:
        self.table.clear()
        self.model.row, self.model.open, self.model.line, self.model.drawn = {}, {}, [], set()
        while self.open:
            self.table.dropped(self.open.pop()[0])

    def _save(self) -> None:
        self.sampler.load_state_dict(self.sampler.state_dict())


@pytest.mark.parametrize("thin", [False, True])
@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 400), marks=pytest.mark.slow)], ids=["12", "400"])
@pytest.mark.parametrize("few", [0, 4, 32])
def test_histories_are_those_of_lists(seeds: range, thin: bool, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_group_rows, "_FEW", few)
    for seed in seeds:
        play = Play(seed, thin)
        for _ in range(200):
            play.step()


# -- whole buffers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 3])
async def test_groups_come_whole_in_the_order_in_which_they_became_so(prefetch: int) -> None:
    sampler = GroupSampler("group", SIZE)
    buffer = made(sampler, prefetch=prefetch)
    async with buffer:
        await buffer.extend(of([5, 7, 5, 9, 7, 9, 9, 7]))
        assert (sampler.waiting, sampler.incomplete) == (2, 1)
        batch = await within(buffer.sample())
        assert batch.info["group"].tolist() == [9, 7]
        assert batch.info["number"].tolist() == [[3, 5, 6], [1, 4, 7]]
        assert batch["number"].tolist() == [[3, 5, 6], [1, 4, 7]]
        assert batch.indices.shape == (2, SIZE)
        assert len(buffer) == 2
        await buffer.add({"group": torch.tensor(5), "number": torch.tensor(8), "reward": torch.tensor(0.0)})
        assert buffer.write_count == 9
        await buffer.finish()
        with pytest.raises(BufferClosedError, match="no item will come"):
            await within(buffer.sample())
        assert (await within(buffer.sample(SIZE)))["number"].tolist() == [[0, 2, 8]]
        assert len(buffer) == 0


async def test_surplus_members_begin_the_next_group() -> None:
    sampler = GroupSampler("group", SIZE)
    async with made(sampler, batch_size=SIZE) as buffer:
        await buffer.extend(of([1] * 7 + [2]))
        found = [(await within(buffer.sample()))["number"].tolist() for _ in range(2)]
        assert found == [[[0, 1, 2]], [[3, 4, 5]]]
        await buffer.extend(of([1, 1], 8))
        assert (await within(buffer.sample()))["number"].tolist() == [[6, 8, 9]]


async def test_what_the_filter_refuses_leaves_at_once_and_is_told() -> None:
    told: list[tuple[int, str]] = []
    asked: list[list[float]] = []

    def filter_(group: dict[str, Any]) -> bool:
        asked.append(group["reward"].tolist())
        return varied(group)

    sampler = GroupSampler("group", SIZE, filter=filter_, filter_keys="reward", on_drop=lambda *drop: told.append(drop))
    async with made(sampler, batch_size=SIZE) as buffer:
        await buffer.extend(of([1, 2], rewards=[1.0, 1.0]))
        await buffer.extend(of([1, 2, 2, 1], 2, rewards=[1.0, 0.0, 1.0, 1.0]))
        assert told == [(1, "filter")]
        assert asked == [[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]]
        assert (sampler.refused, sampler.waiting, len(buffer)) == (1, 1, SIZE)
        assert (await within(buffer.sample())).info["group"].tolist() == [2]
        assert len(buffer) == 0


async def test_the_filter_may_refuse_the_write() -> None:
    def fails(group: dict[str, Any]) -> bool:
        if group["reward"].max() > 2:
            raise ValueError("no such reward")
        return True

    sampler = GroupSampler("group", SIZE, filter=fails, filter_keys="reward")
    async with made(sampler, batch_size=SIZE) as buffer:
        await buffer.extend(of([1, 1], rewards=[3.0, 0.0]))
        with pytest.raises(ValueError, match="no such reward"):
            await buffer.extend(of([1], 2))
        assert (sampler.incomplete, len(buffer)) == (1, 2)
        await buffer.extend(of([2] * SIZE, rewards=[0.0] * SIZE))
        assert (await within(buffer.sample())).info["group"].tolist() == [2]


@pytest.mark.parametrize("verdict", [None, 1, torch.ones(2), "yes"])
async def test_a_filter_says_true_or_false(verdict: Any) -> None:
    buffer = made(GroupSampler("group", 1, filter=lambda group: verdict, filter_keys="reward"))
    with pytest.raises(TypeError, match="filter: expected a function that returns True or False"):
        await buffer.extend(of([1]))
    assert len(buffer) == 0


async def test_an_async_filter_is_refused() -> None:
    async def later(group: Any) -> bool:
        return True

    buffer = made(GroupSampler("group", 1, filter=later, filter_keys="reward"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="found the coroutine"):
        await buffer.extend(of([1]))


async def test_a_callback_that_fails_ends_the_buffer() -> None:
    def fails(key: int, cause: str) -> None:
        raise RuntimeError("not today")

    sampler = GroupSampler("group", 1, filter=lambda group: False, filter_keys="reward", on_drop=fails)
    async with made(sampler, batch_size=1) as buffer:
        with pytest.raises(AsyncBufError, match="not today"):
            await buffer.extend(of([1]))


async def test_lost_groups_are_counted_and_their_other_members_leave() -> None:
    told: list[tuple[int, str]] = []
    sampler = GroupSampler("group", SIZE, on_drop=lambda *drop: told.append(drop))
    async with made(sampler, capacity=8, batch_size=SIZE) as buffer:
        rows = await buffer.extend(of([1, 2, 1, 2, 2, 3]))
        await buffer.remove(rows[:1])
        assert (told, len(buffer)) == ([(1, "lost")], 4)
        await buffer.extend(of([4, 4, 4, 5], 6))  # the ring has room for these
        assert len(buffer) == 8
        await buffer.extend(of([6], 10))
        assert (told[1:], sampler.lost, sampler.waiting) == ([(2, "lost")], 2, 1)
        assert sorted((await within(buffer.sample())).info["group"].tolist()) == [4]


async def test_a_dropped_group_that_lacks_a_member_is_lost() -> None:
    sampler = GroupSampler("group", SIZE)
    async with made(sampler, prefetch=2, batch_size=SIZE) as buffer:
        rows = await buffer.extend(of([1, 1, 1, 2, 2, 2, 3, 3, 3]))
        assert (await within(buffer.sample())).info["group"].tolist() == [1]
        await buffer.remove(rows[3:4])  # a member of a group that was drawn
        assert sampler.lost == 0
        await buffer.flush()
        assert (sampler.lost, len(buffer)) == (1, 3)
        assert (await within(buffer.sample())).info["group"].tolist() == [3]


async def test_skipped_groups_are_the_next_ones() -> None:
    async with made(GroupSampler("group", SIZE), capacity=40, prefetch=2, batch_size=SIZE) as buffer:
        await buffer.extend(of([number // SIZE for number in range(21)]))
        assert (await within(buffer.sample())).info["group"].tolist() == [0]
        await buffer.skip()
        found = [(await within(buffer.sample())).info["group"].item() for _ in range(4)]
        assert found == [2, 1, 3, 4]


class Room(Limiter):
    """Holds writers back while rows are missing."""

    def may_write(self, counters: Counters, items: int) -> Answer:
        room = counters.capacity - counters.size - counters.admitted
        return True if items <= room else NotYet(f"there is room for {room} of {items} items")


async def test_writers_that_wait_for_room_go_on_when_groups_leave() -> None:
    sampler = GroupSampler("group", SIZE, filter=varied, filter_keys="reward")
    async with made(sampler, capacity=9, batch_size=SIZE, prefetch=1, limiter=Room()) as buffer:
        rows = await buffer.extend(of([1, 1, 1, 2, 2, 2, 3, 3]))
        assert (await within(buffer.sample())).info["group"].tolist() == [1]
        await buffer.extend(of([3, 4], 8, rewards=[float(8 % 4), 0.0]))
        assert (sampler.waiting, len(buffer)) == (1, 7)  # 2 was drawn ahead
        held = asyncio.ensure_future(buffer.extend(of([5] * 4, 10, rewards=[1.0] * 4)))
        await turns()
        assert not held.done()
        await buffer.remove(rows[3:4])
        await turns()
        assert not held.done()  # there is room for four only when the rest of group 2 has left
        await buffer.flush()
        await within(held)
        assert (sampler.lost, sampler.refused) == (1, 1)
        assert len(buffer) == SIZE + 2


async def test_ragged_answers_and_list_items() -> None:
    def answer(number: int) -> dict[str, Any]:
        return {"group": number % 2, "tokens": torch.arange(number + 1), "reward": float(number)}

    storage = RaggedStorage(12, ["tokens"])
    buffer = ReplayBuffer(storage, sampler=GroupSampler("group", 2), batch_size=4, generator=seeded())
    other = ReplayBuffer(ListStorage(12), sampler=GroupSampler("group", 2), batch_size=4, collate_fn=list)
    async with buffer, other:
        for number in range(4):
            await buffer.add(answer(number))
            await other.add(answer(number))
        batch = await within(buffer.sample())
        assert batch["lengths"].tolist() == [[1, 3], [2, 4]]
        assert batch["tokens"].shape[:2] == (2, 2)
        assert [item["reward"] for item in (await within(other.sample())).data] == [0.0, 2.0, 1.0, 3.0]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ({"group": torch.tensor([0.5])}, "group: expected one integer per item.*float32"),
        ({"group": torch.tensor([True])}, "group: expected one integer per item.*bool"),
        ({"group": torch.tensor([[1, 2]])}, "group: expected one integer per item"),
        ({"reward": torch.tensor([1j])}, "reward: expected numbers, because the filter asks for them; found complex64"),
        ({"group": torch.tensor([2**63], dtype=torch.uint64)}, "group: expected keys below"),
    ],
)
async def test_items_of_no_group_are_refused(items: dict[str, torch.Tensor], message: str) -> None:
    buffer = made(GroupSampler("group", 2, filter=varied, filter_keys="reward"), batch_size=2)
    with pytest.raises(SchemaError, match=message):
        await buffer.extend({**of([1]), **items})
    assert len(buffer) == 0


async def test_rewards_of_other_kinds_come_together() -> None:
    seen: list[Any] = []

    def note(group: dict[str, Any]) -> bool:
        seen.append(group["reward"])
        return True

    sampler = GroupSampler("group", SIZE, filter=note, filter_keys="reward")
    buffer = ReplayBuffer(ListStorage(9), sampler=sampler, batch_size=SIZE)
    for reward in (1, True, 0.5):
        await buffer.add({"group": 1, "reward": reward})
    assert [each.tolist() for each in seen] == [[1.0, 1.0, 0.5]]
    with pytest.raises(SchemaError, match="reward: expected the shape"):
        await buffer.add({"group": 1, "reward": torch.zeros(2)})


@pytest.mark.parametrize(("prefetch", "workers"), [(0, 1), (1, 2), (4, 2)])
async def test_depth_workers_and_latency_do_not_show(prefetch: int, workers: int) -> None:
    def slow(data: Any) -> Any:
        jitter()
        return data

    async def stream(transform: Any, **more: Any) -> list[Any]:
        buffer = made(GroupSampler("group", SIZE), capacity=120, transform=transform, **more)
        found = []
        async with buffer:
            for start in range(0, 90, 10):
                await buffer.extend(interleaved(10, start))
            await buffer.finish()
            found = [fingerprint(batch) async for batch in buffer]
        return found

    check_same(await stream([slow], prefetch=prefetch, workers=workers), await stream([]), f"prefetch {prefetch}")


@pytest.mark.parametrize(("prefetch", "has_filter"), crossed([0, 1, 4], [False, True], one_in=2))
@pytest.mark.parametrize("at", [(3,), pytest.param("every", marks=pytest.mark.slow)], ids=["one", "every"])
async def test_exact_resume(prefetch: int, has_filter: bool, at: Any) -> None:
    async def make() -> ReplayBuffer:
        more: dict[str, Any] = {"filter": varied, "filter_keys": "reward"} if has_filter else {}
        buffer = made(GroupSampler("group", SIZE, **more), capacity=60, prefetch=prefetch, workers=2)
        await buffer.extend(interleaved(47, 0))
        return buffer

    async def feed(buffer: ReplayBuffer, step: int, batch: Batch) -> None:
        await buffer.extend(interleaved(8, 47 + 8 * step))
        if step % 3 == 1:
            await buffer.skip()
        if step % 4 == 3:
            await buffer.remove(batch.indices[0])

    await assert_exact_resume(make, feed=feed, at=at, steps=6)


# -- states that are none ---------------------------------------------------------------------------------------------


def tensor(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(
    ("where", "value", "error"),
    [
        ("size", 4, CheckpointMismatchError),
        ("lost", -1, CheckpointCorruptError),
        ("groups/capacity", 23, CheckpointCorruptError),
        ("groups/capacity", 2**61, CheckpointCorruptError),
        ("groups/waiting", 0, CheckpointCorruptError),
        ("groups/waiting", 3, CheckpointCorruptError),
        ("groups/lengths", tensor(2, 4), CheckpointCorruptError),
        ("groups/lengths", tensor(0, 3), CheckpointCorruptError),
        ("groups/lengths", tensor(1, 3), CheckpointCorruptError),
        ("groups/keys", tensor(7), CheckpointCorruptError),
        ("groups/rows", tensor(0, 1, 2, 3, 3), CheckpointCorruptError),
        ("groups/rows", tensor(0, 1, 2, 3, -1), CheckpointCorruptError),
        ("groups/rows", tensor(0, 1, 2, 3, 23), CheckpointCorruptError),
        ("groups/numbers", tensor(0, 2, 1, 3, 9), CheckpointCorruptError),
        ("groups/numbers", tensor(2, 0, 1, 3, 4), CheckpointCorruptError),
        ("groups/numbers", torch.zeros(5), CheckpointCorruptError),
        ("groups/drawn", tensor(7), CheckpointCorruptError),
        ("groups/leaving", tensor(0), CheckpointCorruptError),
        ("groups/leaving", tensor(9), CheckpointCorruptError),
        ("columns", {}, CheckpointMismatchError),
        ("columns", {"other": torch.zeros(2)}, CheckpointMismatchError),
        ("columns/reward", torch.zeros(3, dtype=torch.float64), CheckpointCorruptError),
        ("columns/reward", torch.zeros(2), CheckpointCorruptError),
        ("columns/reward", "x", CheckpointCorruptError),
    ],
)
async def test_a_state_that_is_none_is_refused(where: str, value: Any, error: type[Exception]) -> None:
    def target() -> ReplayBuffer:
        return made(GroupSampler("group", SIZE, filter=varied, filter_keys="reward"), batch_size=SIZE)

    buffer, other = target(), target()
    await buffer.extend(of([1, 2, 2, 1, 2]))
    state = await buffer.state_dict()
    await other.load_state_dict(state)
    node = state["sampler"]
    *path, last = where.split("/")
    for part in path:
        node = node[part]
    node[last] = value
    with pytest.raises(error):
        await other.load_state_dict(state)
    async with other:
        assert (await within(other.sample()))["number"].tolist() == [[1, 2, 4]]
        await other.extend(of([1], 5))
        assert (await within(other.sample()))["number"].tolist() == [[0, 3, 5]]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"group_key": 3}, TypeError, "group_key: expected the path of a field"),
        ({"size": 0}, ValueError, "size: expected at least 1, found 0"),
        ({"filter": 3, "filter_keys": "reward"}, TypeError, "filter: expected a function or None, found 3"),
        ({"filter": varied}, ValueError, "filter_keys: expected the fields that the filter gets"),
        ({"filter_keys": "reward"}, ValueError, "filter_keys: expected none, because there is no filter"),
        ({"on_drop": 3}, TypeError, "on_drop: expected a function or None, found 3"),
    ],
)
def test_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        GroupSampler(**{"group_key": "group", "size": SIZE, **arguments})


def test_batches_are_of_whole_groups() -> None:
    with pytest.raises(ValueError, match="batch_size: expected a multiple of the group size 3, found 4"):
        made(GroupSampler("group", SIZE), batch_size=4)
    with pytest.raises(ValueError, match="batch_size: expected at most the capacity 24, found 27"):
        made(GroupSampler("group", SIZE), batch_size=27)
