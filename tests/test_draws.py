"""Draws that are more than a list of rows: with a shape, groups, joins; and samplers that hear what becomes of them."""

from __future__ import annotations

import asyncio
import pickle
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch

from asyncbuf import Draw, ListStorage, NotYet, ReplayBuffer, Sampler, Storage, TensorStorage
from asyncbuf.batch import Ticket
from asyncbuf.testing import assert_exact_resume, difference
from tests.helpers import Crew, Latch, outcomes, seeded, turns, within

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from asyncbuf import Rows, WriteEvent
    from asyncbuf.rows import Answer

SLICES, TIME = 3, 4


def test_a_pickled_draw_takes_its_own_bytes() -> None:
    """Rows, lengths, joins and what is said of them may be windows into a whole epoch."""
    whole = torch.arange(100_000)
    draw = Draw(whole[10:20], {"weight": whole[:10].float()[:10]}, lengths=whole[5:6] * 2, joins={"next": whole[30:40]})
    draw = draw._replace(info={"weight": torch.rand(100_000)[:10]}, lengths=torch.arange(100_000)[10:11])
    content = pickle.dumps(draw)
    assert len(content) < 4000
    again = pickle.loads(content)
    assert type(again) is Draw
    assert difference(again._asdict(), draw._asdict()) is None
    ticket = pickle.loads(pickle.dumps(Ticket(3, draw, 5, 7)))
    assert ticket.draw.indices.equal(draw.indices)
    assert len(pickle.dumps(ticket)) < 4000


class Slices(Sampler):
    """Slices of neighbouring rows, with the row after each step joined as ``next``."""

    joins = False

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        slices = batch_size // TIME
        start = torch.randint(rows.size - TIME, (slices, 1), generator=generator)
        indices = start + torch.arange(TIME)
        joins = {"next": indices + 1, "first": start[:, 0]} if self.joins else {}
        lengths = torch.full((slices,), TIME)
        return Draw(indices.reshape(-1), {"start": start[:, 0]}, shape=(slices, TIME), lengths=lengths, joins=joins)


class JoinedSlices(Slices):
    joins = True

    def combine(self, draw: Draw, data: Any, joined: Mapping[str, Any]) -> Any:
        return {**data, "next": joined["next"]["x"], "first": joined["first"]["x"]}


def filled(storage: Storage, count: int = 50) -> Any:
    items = {"x": torch.arange(float(count)), "y": torch.arange(2.0 * count).reshape(count, 2)}
    if isinstance(storage, ListStorage):
        return [{key: value[i] for key, value in items.items()} for i in range(count)]
    return items


STORAGES: list[Callable[[], Storage]] = [lambda: TensorStorage(60), lambda: ListStorage(60)]


@pytest.mark.parametrize("storage", STORAGES, ids=["tensors", "list"])
@pytest.mark.parametrize("transform", [None, lambda data: {key: value + 0 for key, value in data.items()}])
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("sampler", [Slices, JoinedSlices])
async def test_a_batch_has_the_shape_of_its_draw(
    storage: Callable[[], Storage], transform: Any, prefetch: int, sampler: type[Slices]
) -> None:
    buffer = ReplayBuffer(
        storage(),
        sampler=sampler(),
        batch_size=SLICES * TIME,
        prefetch=prefetch,
        transform=transform,
        generator=seeded(),
    )
    await buffer.extend(filled(buffer._storage))
    async with buffer:
        for _ in range(8):
            batch = await within(buffer.sample())
            start = batch.info["start"]
            assert batch.indices.shape == (SLICES, TIME)
            assert len(batch) == SLICES * TIME
            assert batch.lengths is not None
            assert batch.lengths.tolist() == [TIME] * SLICES
            assert batch["x"].equal((start[:, None] + torch.arange(TIME)).float())
            assert batch["y"].shape == (SLICES, TIME, 2)
            assert batch["y"][..., 0].equal(2 * batch["x"])
            if sampler is JoinedSlices:
                assert batch["next"].equal(batch["x"] + 1)
                assert batch["first"].equal(start.float())


@pytest.mark.parametrize("storage", STORAGES, ids=["tensors", "list"])
@pytest.mark.parametrize(
    "at", [[0, 2], pytest.param("every", marks=pytest.mark.slow)], ids=["some-points", "every-point"]
)
async def test_shapes_and_joins_are_resumed_exactly(
    storage: Callable[[], Storage], at: list[int] | Literal["every"]
) -> None:
    async def make() -> ReplayBuffer:
        buffer = ReplayBuffer(
            storage(), sampler=JoinedSlices(), batch_size=SLICES * TIME, prefetch=2, generator=seeded()
        )
        await buffer.extend(filled(buffer._storage))
        return buffer

    await assert_exact_resume(make, steps=4, at=at, ways=("snapshot", "state_dict", "directory"))


async def test_joins_are_gathered_at_the_point_of_the_draw() -> None:
    buffer = ReplayBuffer(TensorStorage(50), sampler=JoinedSlices(), batch_size=8, prefetch=3, generator=seeded())
    await buffer.extend(filled(buffer._storage))
    async with buffer:
        await buffer.sample()
        await buffer.extend({"x": torch.full((50,), -1.0), "y": torch.zeros(50, 2)})
        for _ in range(3):
            batch = await buffer.sample()
            assert batch["next"].equal(batch["x"] + 1)
            assert (batch["x"] >= 0).all()
        assert (await buffer.sample())["x"].equal(torch.full((2, 4), -1.0))


class Queue(Sampler):
    """First in, first out: rows leave when they are handed over, and come again when their ticket is dropped."""

    def __init__(self) -> None:
        self.fresh: list[int] = []
        self.diary: list[tuple[str, list[int]]] = []

    def wrote(self, event: WriteEvent) -> None:
        self.fresh += event.rows.tolist()

    def may_draw(self, rows: Rows, batch_size: int) -> Answer:
        if len(self.fresh) >= batch_size:
            return True
        return NotYet(f"{len(self.fresh)} of {batch_size} fresh items are stored")

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        taken, self.fresh = self.fresh[:batch_size], self.fresh[batch_size:]
        return Draw(torch.tensor(taken))

    def handed_over(self, draw: Draw) -> torch.Tensor:
        self.diary.append(("handed over", draw.indices.tolist()))
        return draw.indices

    def dropped(self, draw: Draw) -> None:
        self.diary.append(("dropped", draw.indices.tolist()))
        self.fresh = draw.indices.tolist() + self.fresh

    def state_dict(self) -> dict[str, Any]:
        return {"fresh": list(self.fresh)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fresh = list(state["fresh"])


def numbered(*numbers: int) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor(numbers)}


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("transform", [None, lambda data: data])
async def test_rows_leave_when_they_are_handed_over(prefetch: int, transform: Any) -> None:
    sampler = Queue()
    buffer = ReplayBuffer(TensorStorage(6), sampler=sampler, batch_size=2, prefetch=prefetch, transform=transform)
    found: list[int] = []
    async with buffer, Crew() as crew:
        for round_ in range(5):
            await buffer.extend(numbered(*range(6 * round_, 6 * round_ + 6)))
            for left in (4, 2, 0):
                found += (await within(buffer.sample()))["x"].tolist()
                await turns()
                assert len(buffer) == left
        waiting = crew.start(buffer.sample())
        await turns()
        await buffer.add({"x": torch.tensor(98)})
        assert "1 of 2 fresh items are stored" in buffer.why_blocked()
        await buffer.add({"x": torch.tensor(99)})
        found += (await within(waiting))["x"].tolist()
    assert found == [*range(30), 98, 99]
    assert [what for what, _ in sampler.diary] == ["handed over"] * 16


async def test_rows_of_dropped_tickets_come_again() -> None:
    sampler = Queue()
    buffer = ReplayBuffer(TensorStorage(12), sampler=sampler, batch_size=2, prefetch=2)
    async with buffer:
        await buffer.extend(numbered(*range(10)))
        assert (await buffer.sample())["x"].tolist() == [0, 1]
        assert await buffer.skip() == 1
        assert (await buffer.sample())["x"].tolist() == [4, 5]
        assert await buffer.flush() == 2
        rest = [(await buffer.sample())["x"].tolist() for _ in range(3)]
        assert sorted(row for rows in rest for row in rows) == [2, 3, 6, 7, 8, 9]
        stats = buffer.stats()
        assert stats.drawn == stats.delivered + stats.dropped + stats.queued
        assert len(buffer) == 0
    assert [what for what, _ in sampler.diary].count("dropped") == stats.dropped


async def test_a_queue_that_has_run_out_ends_the_stream() -> None:
    buffer = ReplayBuffer(TensorStorage(12), sampler=Queue(), batch_size=2, prefetch=3)
    async with buffer, Crew() as crew:
        await buffer.extend(numbered(*range(7)))
        found: list[int] = []

        async def consume() -> None:
            async for batch in buffer:
                found.extend(batch["x"].tolist())

        consumers = [crew.start(consume()) for _ in range(3)]
        await turns()
        await buffer.finish()
        assert await outcomes(*consumers) == [None] * 3
        assert sorted(found) == list(range(6))  # one item fills no batch
        assert len(buffer) == 1


class Remote(TensorStorage):
    """Answers later."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.answers = Latch()
        self.failures = 0

    def begin_gather(self, draw: Draw, *, inline: bool, parts: int) -> Any:
        return self._later(draw)

    async def _later(self, draw: Draw) -> Any:
        await self.answers.reached()
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the other side is gone")
        return self.gather(draw.indices)


async def test_a_storage_may_gather_asynchronously() -> None:
    from asyncbuf import Runs

    class Async(Remote):
        runs = Runs.AWAIT

    storage = Async(20)
    buffer = ReplayBuffer(storage, batch_size=4, prefetch=2, generator=seeded())
    twin = ReplayBuffer(TensorStorage(20), batch_size=4, generator=seeded())
    for one in (buffer, twin):
        await one.extend(numbered(*range(20)))
    async with buffer, twin, Crew() as crew:
        asked = crew.start(buffer.sample())
        await turns()
        # The rows are being read: a write waits for that, so that the batch is as it was at its draw.
        write = crew.start(buffer.extend(numbered(*range(100, 120))))
        await turns()
        assert not asked.done()
        assert not write.done()
        storage.answers.set()
        batches = [await within(asked), *[await within(buffer.sample()) for _ in range(2)]]
        await within(write)
        for batch in batches:
            expected = await twin.sample()
            assert batch["x"].equal(expected["x"])
        assert (await within(buffer.sample()))["x"].min() >= 100
        storage.failures = 1
        results = await asyncio.gather(*[buffer.sample() for _ in range(3)], return_exceptions=True)
        assert sum(isinstance(result, Exception) for result in results) == 1
        assert (await within(buffer.sample())).number is not None
