"""The books close at every moment: each item is stored or left for a cause, each ticket has one place."""

from __future__ import annotations

import asyncio
import pickle
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import (
    CheckpointError,
    ConsumingSampler,
    GroupSampler,
    Ledger,
    MaxValueWriter,
    RandomSampler,
    ReplayBuffer,
    ReservoirWriter,
    SamplerWithoutReplacement,
    TableWriter,
    TensorStorage,
)
from tests.helpers import dismiss, seeded, turns, within

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CAPACITY = 24


def items_of(count: int, start: int) -> dict[str, torch.Tensor]:
    number = torch.arange(start, start + count)
    return {"number": number, "value": (number * 7 % 11).float(), "group": number // 4}


def worth_it(group: Any) -> bool:
    return int(group["number"][0]) % 3 != 0


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "random": lambda: {"sampler": RandomSampler()},
    "passes": lambda: {"sampler": SamplerWithoutReplacement()},
    "consuming": lambda: {"sampler": ConsumingSampler()},
    "groups": lambda: {"sampler": GroupSampler("group", 4, filter=worth_it, filter_keys="number")},
    "best": lambda: {"writer": MaxValueWriter("value")},
    "reservoir": lambda: {"writer": ReservoirWriter(seed=1)},
    "tables": lambda: {"writer": TableWriter({"a": 8, "b": 16})},
}


def made(kind: str, depth: int) -> ReplayBuffer:
    return ReplayBuffer(TensorStorage(CAPACITY), batch_size=4, prefetch=depth, generator=seeded(), **KINDS[kind]())


class Program:
    """Random calls, after each of which the books must close."""

    def __init__(self, kind: str, seed: int, path: Path) -> None:
        self.kind, self.path = kind, path
        self.random = random.Random(seed)
        self.depth = self.random.choice((0, 1, 3))
        self.buffer = made(kind, self.depth)
        self.written = 0
        self.causes: set[str] = set()

    async def run(self, steps: int) -> None:
        calls = [self.write] * 3 + [self.sample] * 3
        calls += [self.remove, self.empty, self.skip, self.flush, self.restart, self.restore, self.reopen]
        await self.buffer.open()
        try:
            for _ in range(steps):
                await self.random.choice(calls)()
                self.check()
        finally:
            await self.buffer.aclose()
        self.check()

    def check(self) -> None:
        ledger = self.buffer.stats().ledger
        assert ledger.closes, ledger
        assert ledger.written == self.written == self.buffer.write_count
        assert ledger.stored == len(self.buffer)
        assert "LOST" not in str(ledger)
        self.causes |= {*ledger.evicted, *ledger.dropped}

    async def write(self) -> None:
        count = self.random.choice((1, 3, 4, 8, CAPACITY + 3))
        more = {"table": self.random.choice("ab")} if self.kind == "tables" else {}
        await self.buffer.extend(items_of(count, self.written), **more)
        self.written += count

    async def sample(self) -> None:
        call = asyncio.create_task(self.buffer.sample())
        await turns(6)
        await dismiss([call])

    async def remove(self) -> None:
        await self.buffer.remove(self.random.sample(range(CAPACITY), 3))

    async def empty(self) -> None:
        await self.buffer.empty()

    async def skip(self) -> None:
        await self.buffer.skip()

    async def flush(self) -> None:
        await self.buffer.flush()

    async def restart(self) -> None:
        if self.kind == "passes":
            await self.buffer.restart_epoch()

    async def restore(self) -> None:
        before = self.buffer.stats().ledger
        way = self.random.choice(("memory", "directory", "pickle"))
        if way == "pickle":
            async with self.buffer.frozen():
                target = pickle.loads(pickle.dumps(self.buffer))
        else:
            target = made(self.kind, self.depth)
        if way == "memory":
            await target.load_state_dict(await self.buffer.state_dict())
        elif way == "directory":
            await self.buffer.save(self.path / "checkpoint")
            await target.load(self.path / "checkpoint")
        assert target.stats().ledger == before
        await self.buffer.aclose()
        self.buffer = await target.open()

    async def reopen(self) -> None:
        await self.buffer.aclose()
        self.check()
        await self.buffer.open()


@pytest.mark.parametrize("kind", KINDS)
async def test_the_books_close_whatever_is_done(kind: str, tmp_path: Path) -> None:
    causes = set()
    for seed in range(12):
        program = Program(kind, seed, tmp_path)
        await within(program.run(60))
        causes |= program.causes
    expected = {"removed", "emptied", "skip", "flush", "empty"}
    special = {"consuming": {"consumed"}, "groups": {"let_go", "consumed"}, "best": {"not_kept"}}
    expected |= special.get(kind, {"overwritten"})
    if kind == "passes":
        expected |= {"restart_epoch"}
    assert causes == expected | (causes & {"overwritten", "not_kept"})


async def test_without_a_ledger_a_checkpoint_begins_one() -> None:
    source = made("random", 1)
    await source.extend(items_of(CAPACITY + 6, 0))
    await source.remove([0, 1])
    async with source:
        await source.sample()
        await source.skip()
        state = await source.state_dict()
    del state["ledger"]
    target = made("random", 1)
    await target.extend(items_of(40, 0))  # books of its own, which end here
    await target.load_state_dict(state)
    ledger = target.stats().ledger
    assert ledger.closes
    assert dict(ledger.evicted) == {"earlier": 8}
    assert dict(ledger.dropped) == {"earlier": 1}


async def test_a_writer_with_a_history_begins_the_books_there() -> None:
    source = made("random", 0)
    await source.extend(items_of(CAPACITY + 6, 0))
    writer = source._config.writer
    storage = source._storage
    del source
    buffer = ReplayBuffer(storage, writer=writer, batch_size=4)
    assert buffer.stats().ledger.evicted == {"earlier": 6}
    assert buffer.stats().ledger.closes


@pytest.mark.parametrize(
    "forged",
    [
        {"overwritten": 7},
        {"overwritten": -1},
        {"evicted": {"removed": 3}},
        {"evicted": {"removed": 0}},
        {"evicted": {"removed": True}},
        {"evicted": {3: 2}},
        {"evicted": []},
        {"dropped": {"skip": 2}},
        {"dropped": {"flush": 1, "skip": 1}},
        {"duplicates": None},
        {"more": 1},
    ],
    ids=str,
)
async def test_books_that_do_not_close_are_refused(forged: dict[str, Any]) -> None:
    source = made("random", 1)
    await source.extend(items_of(CAPACITY + 6, 0))
    await source.remove([0, 1])
    async with source:
        await source.sample()
        await source.skip()
        state = await source.state_dict()
    target = made("random", 1)
    await target.extend(items_of(5, 0))
    before = target.stats().ledger
    with pytest.raises(CheckpointError):
        await target.load_state_dict({**state, "ledger": {**state["ledger"], **forged}})
    assert target.stats().ledger == before


def test_it_says_what_is_missing() -> None:
    ledger = Ledger(written=10, stored=3, evicted={"overwritten": 5}, drawn=4, delivered=3, queued=2)
    assert not ledger.closes
    assert (ledger.lost_items, ledger.lost_tickets) == (2, -1)
    assert str(ledger) == (
        "items:   10 written = 3 stored + 5 evicted (5 overwritten) + 2 LOST; 0 duplicate write(s)\n"
        "tickets: 4 drawn = 3 delivered + 0 leased + 2 queued + 0 dropped - 1 TWICE"
    )
    assert pickle.loads(pickle.dumps(ledger)) == ledger
    assert Ledger().closes
