"""Batches out of several tables."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import (
    ConsumingSampler,
    MixtureSampler,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    StratifiedSampler,
    TableWriter,
    TensorStorage,
    TrajectorySampler,
    WeightedSampler,
)
from asyncbuf._plain.codec import encode
from asyncbuf._table.table import Table
from asyncbuf.errors import CheckpointCorruptError, CheckpointMismatchError
from asyncbuf.limiter import MinSize
from asyncbuf.testing import assert_exact_resume, difference
from tests.helpers import check_same, crossed, fingerprint, numbers, rows, seeded, turns, within
from tests.sampler.chi_square import assert_chances

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncbuf import Batch

TABLES = {"offline": 30, "online": 20}


def made(sampler: Sampler, batch_size: int = 10, tables: Any = TABLES, **more: Any) -> ReplayBuffer:
    writer = TableWriter(tables)
    storage = TensorStorage(sum(tables.values()))
    return ReplayBuffer(storage, writer=writer, sampler=sampler, batch_size=batch_size, generator=seeded(), **more)


async def filled(sampler: Sampler, batch_size: int = 10, **more: Any) -> ReplayBuffer:
    buffer = made(sampler, batch_size, **more)
    await buffer.extend(rows(30), table="offline")
    await buffer.extend(rows(20, 30), table="online")
    return buffer


# -- fractions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["deterministic", "random"])
async def test_every_row_of_a_table_is_equally_likely(order: str) -> None:
    buffer = await filled(MixtureSampler({"offline": 0.25, "online": 0.75}, order=order), 10_000)
    counts = np.zeros(50)
    async with buffer:
        for _ in range(100):
            batch = await buffer.sample()
            tables = batch.info["table"]
            assert torch.equal(tables, (batch.indices >= 30).long())
            assert torch.equal(tables, tables.sort().values)
            counts += np.bincount(batch.indices, minlength=50)
    assert_chances(counts, [0.25 / 30] * 30 + [0.75 / 20] * 20)
    if order == "deterministic":
        assert counts[:30].sum() == 250_000


@pytest.mark.parametrize("fractions", [(0.5, 0.5), (1 / 3, 2 / 3), (0.05, 0.95), (1.0, 0.0)])
@pytest.mark.parametrize("batch_size", [1, 7, 32])
async def test_no_table_is_ever_a_row_ahead_or_behind(fractions: tuple[float, float], batch_size: int) -> None:
    buffer = await filled(MixtureSampler(dict(zip(TABLES, fractions, strict=True))), batch_size)
    online = 0
    async with buffer:
        for draws in range(1, 100):
            online += int((await buffer.sample()).info["table"].sum())
            assert abs(online - draws * batch_size * fractions[1]) < 1


async def test_fractions_follow_functions_and_settings() -> None:
    sampler = MixtureSampler(
        {"offline": RandomSampler(), "online": RandomSampler()},
        lambda draws: {"offline": max(0.0, 1 - draws / 4), "online": min(1.0, draws / 4)},
    )
    buffer = await filled(sampler, 8)
    async with buffer:
        assert [int((await buffer.sample()).info["table"].sum()) for _ in range(6)] == [0, 2, 4, 6, 8, 8]
        assert sampler.fractions == {"offline": 0.0, "online": 1.0}
        sampler.fractions = {"offline": 0.75, "online": 0.25}
        assert [int((await buffer.sample()).info["table"].sum()) for _ in range(2)] == [2, 2]
        with pytest.raises(ValueError, match=r"fractions: expected the tables \['offline', 'online'\]"):
            sampler.fractions = {"offline": 1.0}
        assert sampler.fractions == {"offline": 0.75, "online": 0.25}


# -- what samplers are told -------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[], Sampler]] = {
    "random": RandomSampler,
    "prioritized": PrioritizedSampler,
    "weighted": lambda: WeightedSampler("number"),
    "stratified": lambda: StratifiedSampler("number"),
    "passes": lambda: SamplerWithoutReplacement(drop_last=True),
    "consuming": lambda: ConsumingSampler(2, "lifo"),
}


class Play:
    """A mixture, and beside it a table of its own for each of its samplers: both are told the same."""

    def __init__(self, kinds: list[str], seed: int) -> None:
        self.choose = random.Random(seed)
        self.names = [f"{kind}-{i}" for i, kind in enumerate(kinds)]
        sizes = [self.choose.randrange(5, 15) for _ in kinds]
        self.sampler = MixtureSampler(
            {name: KINDS[kind]() for name, kind in zip(self.names, kinds, strict=True)}, when_empty="others"
        )
        writer = TableWriter(dict(zip(self.names, sizes, strict=True)))
        self.held = writer.tables
        self.generator = seeded(seed)
        self.table = Table(TensorStorage(sum(sizes)), writer, self.sampler, MinSize(1), self.generator)
        self.alone = [
            Table(TensorStorage(size), RoundRobinWriter(), KINDS[kind](), MinSize(1), seeded())
            for kind, size in zip(kinds, sizes, strict=True)
        ]
        self.open: list[tuple[Any, int, list[tuple[int, Any, int]]]] = []
        self.written = 0

    def step(self) -> None:
        kinds = ["write", "draw", "hand over", "drop", "update", "remove", "clear"]
        what = self.choose.choices(kinds, [5, 6, 4, 1, 2, 1, 0.2])[0]
        getattr(self, f"_{what.replace(' ', '_')}")()
        for name, alone in zip(self.names, self.alone, strict=True):
            found = encode(self.sampler.samplers[name].state_dict())
            assert difference(found, encode(alone.sampler.state_dict())) is None, (what, name)

    def _write(self) -> None:
        i, count = self.choose.randrange(len(self.names)), self.choose.choice((1, 2, 5, 20))
        priority = np.array([self.choose.random() for _ in range(count)]) if self.choose.random() < 0.5 else None
        for table, name in ((self.table, self.names[i]), (self.alone[i], None)):
            prepared = table.storage.prepare(rows(count, self.written))
            prepared.priority, prepared.table = priority, name
            placement = table.place_items(prepared)
            event = table.check_write(placement, prepared)
            table.storage.write(prepared, placement.runs)
            table.commit(placement)
            table.wrote(placement, event)
        self.written += count

    def _draw(self) -> None:
        size = self.choose.randrange(1, 6)
        if not self.table.may_draw(size):
            return
        generator = seeded()
        generator.set_state(self.generator.get_state())
        draw = self.table.draw(size)
        parts = []
        for i, alone in enumerate(self.alone):
            mask = draw.info["table"] == i
            if not mask.any():
                continue
            expected = alone.sampler.draw(alone.rows, int(mask.sum()), generator)
            assert torch.equal(draw.indices[mask] - self.held[self.names[i]].start, expected.indices)
            for key, value in expected.info.items():
                assert torch.equal(draw.info[key][mask], value)
            parts.append((i, expected, alone.write_count))
        assert generator.get_state().equal(self.generator.get_state())
        self.open.append((draw, self.table.write_count, parts))

    def _hand_over(self) -> None:
        if self.open:
            draw, write_count, parts = self.open.pop(self.choose.randrange(len(self.open)))
            left = self.table.handed_over(draw, write_count)
            assert left == sum(self.alone[i].handed_over(part, count) for i, part, count in parts)

    def _drop(self) -> None:
        while self.open and self.choose.random() < 0.7:
            draw, _, parts = self.open.pop(0)
            self.table.dropped(draw)
            for i, part, _ in parts:
                self.alone[i].dropped(part)

    def _some(self) -> tuple[list[int], list[torch.Tensor]]:
        together, alone = [], []
        for name, table in zip(self.names, self.alone, strict=True):
            held = table.rows.at(torch.arange(table.size)).tolist()
            found = self.choose.sample(held, min(len(held), self.choose.randrange(3)))
            together += [row + self.held[name].start for row in found]
            alone.append(torch.tensor(found, dtype=torch.int64))
        return together, alone

    def _update(self) -> None:
        together, alone = self._some()
        self.table.update_priority(together, torch.tensor(together, dtype=torch.float64))
        for name, table, found in zip(self.names, self.alone, alone, strict=True):
            table.update_priority(found, (found + self.held[name].start).double())

    def _remove(self) -> None:
        together, alone = self._some()
        self.table.remove(np.array(together, np.int64))
        for table, found in zip(self.alone, alone, strict=True):
            table.remove(found.numpy())

    def _clear(self) -> None:
        for table in (self.table, *self.alone):
            table.clear()
        while self.open:
            draw, _, parts = self.open.pop()
            self.table.dropped(draw)
            for i, part, _ in parts:
                self.alone[i].dropped(part)


@pytest.mark.parametrize("kinds", [["random", "prioritized"], ["passes", "weighted", "consuming"], list(KINDS)])
@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 200), marks=pytest.mark.slow)], ids=["8", "200"])
def test_every_sampler_is_told_what_a_buffer_of_its_own_would_tell_it(kinds: list[str], seeds: range) -> None:
    for seed in seeds:
        play = Play(kinds, seed)
        for _ in range(120):
            play.step()


async def test_what_samplers_say_is_put_together() -> None:
    sampler = MixtureSampler({"offline": RandomSampler(), "online": PrioritizedSampler(beta=1.0)})
    buffer = await filled(sampler, 8)
    await buffer.update_priority(torch.arange(30, 50), torch.arange(20).double() + 1)
    async with buffer:
        batch = await buffer.sample()
        assert batch.info["table"].tolist() == [0] * 4 + [1] * 4
        assert batch.info["weights"][:4].tolist() == [1.0] * 4
        assert (batch.info["weights"][4:] < 1.0).any()
        await buffer.update_priority(batch, 3.0)
        with pytest.raises(ValueError, match="priority: expected finite numbers of at least 0"):
            await buffer.update_priority([0, 30], [1.0, -1.0])
    online = sampler.samplers["online"]
    assert isinstance(online, PrioritizedSampler)
    assert (online.priorities(batch.indices[4:] - 30) == 3.0).all()


async def test_passes_of_a_table_go_on_within_a_batch() -> None:
    buffer = await filled(MixtureSampler({"offline": SamplerWithoutReplacement(), "online": RandomSampler()}), 14)
    async with buffer:
        batches = [await buffer.sample() for _ in range(30)]
    drawn = [row for batch in batches for row in batch.indices[batch.info["table"] == 0].tolist()]
    assert len(drawn) == 210
    assert all(sorted(drawn[start : start + 30]) == list(range(30)) for start in range(0, 210, 30))


async def test_online_items_are_used_once() -> None:
    buffer = made(MixtureSampler({"offline": RandomSampler(), "online": ConsumingSampler()}), 8, prefetch=2)
    await buffer.extend(rows(30), table="offline")
    used: list[int] = []
    async with buffer:
        for start in range(100, 200, 20):
            await buffer.extend(rows(20, start), table="online")
            for _ in range(5):
                batch = await buffer.sample()
                used += batch["number"][batch.info["table"] == 1].tolist()
        assert used == list(range(100, 200))
        assert len(buffer) == 30
        waiting = asyncio.ensure_future(buffer.sample())
        await turns()
        assert "table 'online': no item is stored" in buffer.why_blocked()
        await buffer.extend(rows(3), table="online")
        await turns()
        assert "table 'online': 3 of 4 items wait to be drawn" in buffer.why_blocked()
        await buffer.extend(rows(1, 3), table="online")
        assert numbers(await within(waiting))[4:] == [0, 1, 2, 3]


@pytest.mark.parametrize("order", ["deterministic", "random"])
async def test_other_tables_take_the_share_of_an_empty_one(order: str) -> None:
    buffer = made(MixtureSampler({"offline": 0.25, "online": 0.75}, order=order, when_empty="others"), 8)
    async with buffer:
        waiting = asyncio.ensure_future(buffer.sample())
        await turns()
        await buffer.extend(rows(5), table="offline")
        assert (await within(waiting)).info["table"].tolist() == [0] * 8
        await buffer.extend(rows(5), table="online")
        assert set((await buffer.sample(1000)).info["table"].tolist()) == {0, 1}


# -- slices -----------------------------------------------------------------------------------------------------------


def steps(count: int, start: int = 0) -> dict[str, torch.Tensor]:
    number = torch.arange(start, start + count)
    return {"number": number, "done": number % 10 == 9}


async def test_slices_of_several_tables() -> None:
    slices: dict[str, Any] = {"slice_len": 4, "end_key": "done"}
    online = PrioritizedSliceSampler(**slices)
    buffer = made(MixtureSampler({"offline": SliceSampler(**slices), "online": online}), 24)
    await buffer.extend(steps(30), table="offline")
    await buffer.extend(steps(20, 30), table="online")
    async with buffer:
        batch = await buffer.sample()
        assert batch["number"].shape == batch.indices.shape == (6, 4)
        assert (batch["number"].diff(dim=1) == 1).all()
        assert batch.info["table"].tolist() == [0, 0, 0, 1, 1, 1]
        assert batch.info["is_start"].shape == batch.info["weights"].shape == (6,)
        firsts = batch.indices[3:, 0] - 30
        for priority in (torch.full((6,), 5.0), torch.full((6, 4), 5.0), 5.0):
            await buffer.update_priority([*range(30, 50)], 1.0)
            await buffer.update_priority(batch, priority)
            assert (online.priorities(firsts) == 5.0).all()
        with pytest.raises(ValueError, match="priority: expected values for 6 slices"):
            await buffer.update_priority(batch, torch.zeros(7))


def test_sequences_that_do_not_fit_each_other() -> None:
    slices: dict[str, Any] = {"slice_len": 4, "end_key": "done"}
    wrong: list[tuple[Any, str]] = [
        (
            SliceSampler(slice_len=5, end_key="done"),
            "samplers: expected slices of the same length in all tables, found",
        ),
        (
            RandomSampler(),
            "samplers: expected slices of the same length in all tables, found {'offline': 4, 'online': 1}",
        ),
        (TrajectorySampler(4, end_key="done"), r'samplers\["online"\]: expected trajectories .* padded=False'),
    ]
    for other, message in wrong:
        with pytest.raises(ValueError, match=message):
            made(MixtureSampler({"offline": SliceSampler(**slices), "online": other}), 20)


# -- one stream, and checkpoints --------------------------------------------------------------------------------------


def annealed(draws: int) -> dict[str, float]:
    online = min(0.9, 0.1 + draws / 50)
    return {"offline": 1 - online, "online": online}


MIXTURES: dict[str, Callable[[], MixtureSampler]] = {
    "halves": lambda: MixtureSampler({"offline": 0.5, "online": 0.5}),
    "by-chance": lambda: MixtureSampler(
        {"offline": SamplerWithoutReplacement(), "online": PrioritizedSampler()}, annealed, order="random"
    ),
    "annealed": lambda: MixtureSampler(
        {"offline": WeightedSampler("number"), "online": StratifiedSampler("number")}, annealed
    ),
    "consuming": lambda: MixtureSampler(
        {"offline": PrioritizedSampler(), "online": ConsumingSampler(2)}, when_empty="others"
    ),
}


@pytest.mark.parametrize("name", MIXTURES)
async def test_depth_and_workers_do_not_show(name: str) -> None:
    async def stream(depth: int, workers: int) -> list[Any]:
        buffer = await filled(MIXTURES[name](), 7, prefetch=depth, workers=workers)
        async with buffer:
            return [fingerprint(await within(buffer.sample())) for _ in range(2 if name == "consuming" else 30)]

    expected = await stream(0, 1)
    for depth, workers in ((1, 1), (4, 2), (16, 4)):
        check_same(await stream(depth, workers), expected, f"prefetch {depth}, {workers} workers")


@pytest.mark.parametrize(("prefetch", "name"), crossed([0, 1, 4], list(MIXTURES), one_in=2))
@pytest.mark.parametrize("at", [(3,), pytest.param("every", marks=pytest.mark.slow)], ids=["one", "every"])
async def test_exact_resume(prefetch: int, name: str, at: Any) -> None:
    async def make() -> ReplayBuffer:
        return await filled(MIXTURES[name](), 4, prefetch=prefetch, workers=2)

    async def feed(buffer: ReplayBuffer, step: int, batch: Batch) -> None:
        await buffer.update_priority(batch, batch["number"] % 7)
        await buffer.extend(rows(3, 50 + 3 * step), table="online")
        await buffer.add({name: value[0] for name, value in rows(1, step).items()}, table="offline")
        if step % 4 == 3:
            await buffer.remove(batch.indices[:2])

    # The function of the test reaches no other process, but another buffer in this one.
    await assert_exact_resume(make, feed=feed, at=at, steps=6)


async def test_set_fractions_are_saved() -> None:
    sampler = MixtureSampler({"offline": 0.5, "online": 0.5})
    buffer = await filled(sampler)
    sampler.fractions = {"offline": 0.3, "online": 0.7}
    other = MixtureSampler({"offline": 0.5, "online": 0.5})
    target = made(other)
    await target.load_state_dict(await buffer.state_dict())
    assert other.fractions == sampler.fractions
    function = made(MixtureSampler({"offline": RandomSampler(), "online": RandomSampler()}, annealed))
    with pytest.raises(CheckpointMismatchError, match="whether fractions are a function"):
        await function.load_state_dict(await buffer.state_dict())


@pytest.mark.parametrize(
    ("path", "value", "error"),
    [
        ("order", "random", CheckpointMismatchError),
        ("when_empty", "others", CheckpointMismatchError),
        ("fractions", torch.tensor([0.5, 0.6], dtype=torch.float64), CheckpointCorruptError),
        ("fractions", torch.tensor([1.5, -0.5], dtype=torch.float64), CheckpointCorruptError),
        ("fractions", torch.tensor([1.0], dtype=torch.float64), CheckpointCorruptError),
        ("owed", torch.tensor([torch.nan, 0.0], dtype=torch.float64), CheckpointCorruptError),
        ("owed", torch.zeros(2), CheckpointCorruptError),
        ("draws", -1, CheckpointCorruptError),
        ("tables", {}, CheckpointCorruptError),
        ("tables/online/held", [30, 21], CheckpointMismatchError),
        ("tables/online/written", 21, CheckpointCorruptError),
        ("tables/online/size", 19, CheckpointCorruptError),
        ("tables/online/size", 21, CheckpointCorruptError),
        ("tables/online/valid", torch.arange(19), CheckpointCorruptError),
        ("tables/online/valid", torch.zeros(20, dtype=torch.int64), CheckpointCorruptError),
        ("tables/online/sampler", {}, CheckpointCorruptError),
        ("tables/online/sampler/capacity", 21, CheckpointCorruptError),
    ],
)
async def test_a_state_that_is_none_is_refused(path: str, value: Any, error: type[Exception]) -> None:
    def sampler() -> MixtureSampler:
        return MixtureSampler({"offline": PrioritizedSampler(), "online": PrioritizedSampler()})

    buffer = await filled(sampler())
    target = await filled(sampler())
    state = await buffer.state_dict()
    await target.load_state_dict(state)
    await target.update_priority([3, 35], 17.0)
    before = encode(await target.state_dict())
    *parents, last = path.split("/")
    place = state["sampler"]
    for parent in parents:
        place = place[parent]
    place[last] = value
    with pytest.raises(error):
        await target.load_state_dict(state)
    assert difference(encode(await target.state_dict()), before) is None


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"samplers": [RandomSampler()]}, TypeError, "samplers: expected a dict with the sampler of each table"),
        ({"samplers": {}}, TypeError, "samplers: expected a dict"),
        ({"samplers": {3: RandomSampler()}}, TypeError, "samplers: expected names of tables as keys, found 3"),
        ({"samplers": {"a": RandomSampler}}, TypeError, r'samplers\["a"\]: expected a Sampler.*RandomSampler\(\)'),
        ({"samplers": {"a": 0.5, "b": RandomSampler()}}, TypeError, r'samplers\["a"\]: expected a Sampler, found 0.5'),
        ({"samplers": {"a": 0.5, "b": 0.4}}, ValueError, "fractions: expected shares whose sum is 1"),
        ({"samplers": {"a": 1.0}, "fractions": {"a": 1.0}}, ValueError, "fractions: expected none beside"),
        ({"samplers": {"a": MixtureSampler({"a": 1.0})}}, ValueError, "expected a sampler without tables"),
        ({"samplers": dict.fromkeys("ab", PrioritizedSampler())}, ValueError, "expected a sampler of its own"),
        ({"fractions": {"a": 0.5}}, ValueError, "fractions: expected shares whose sum is 1"),
        ({"fractions": {"a": 0.5, "c": 0.5}}, ValueError, r"fractions: expected the tables \['a', 'b'\]"),
        ({"fractions": 0.5}, TypeError, "fractions: expected a dict"),
        ({"fractions": lambda draws: 0.5}, TypeError, "fractions: expected a dict"),
        ({"order": "shuffled"}, ValueError, "order: expected one of"),
        ({"when_empty": None}, ValueError, "when_empty: expected one of"),
    ],
)
def test_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MixtureSampler(**{"samplers": {"a": RandomSampler(), "b": PrioritizedSampler()}, **arguments})


def test_a_mixture_needs_its_tables() -> None:
    for writer in (None, TableWriter({"a": 5, "other": 4})):
        with pytest.raises(ValueError, match=r"sampler: expected a TableWriter with the tables \['a', 'b'\]"):
            ReplayBuffer(TensorStorage(9), sampler=MixtureSampler({"a": 0.5, "b": 0.5}), batch_size=2, writer=writer)
