"""One history: writes, draws and priority updates take effect in the order in which they were asked for."""

from __future__ import annotations

import asyncio
import functools
import random
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import (
    Batch,
    BufferClosedError,
    RandomSampler,
    ReplayBuffer,
    Rows,
    Sampler,
    SamplerWithoutReplacement,
    SchemaError,
    Storage,
    TensorStorage,
)
from tests.helpers import (
    SECONDS,
    Crew,
    DiarySampler,
    Latch,
    Stop,
    ThreadedStorage,
    check_same,
    jitter,
    numbers,
    outcomes,
    rows,
    seeded,
    turns,
    within,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncbuf import Draw

SAMPLERS: dict[str, Callable[[], Sampler]] = {"random": RandomSampler, "passes": SamplerWithoutReplacement}


# -- against a model --------------------------------------------------------------------------------------------------


class Model:
    """The history in the words of the documentation: one call after the other, nothing at once.

    Tickets are drawn when batches are asked for, until as many are drawn as were asked for and ``depth`` more; a pass
    begins only when its first batch is asked for.
    """

    def __init__(self, capacity: int, batch_size: int, depth: int, sampler: Sampler, min_size: int) -> None:
        self._ring = [-1] * capacity
        self._batch_size = batch_size
        self._depth = depth
        self._sampler = sampler
        self._generator = seeded(1)
        self._min_size = min_size
        self._written = self._asked = self._drawn = self._tickets = 0
        self.tickets: list[tuple[int, list[int], list[int]]] = []
        self.others: list[tuple[int, list[int], list[int]]] = []

    @property
    def _held(self) -> Rows:
        return Rows(min(self._written, len(self._ring)), len(self._ring), self._written)

    def extend(self, items: list[int]) -> None:
        for item in items:
            self._ring[self._written % len(self._ring)] = item
            self._written += 1
        if self._asked > self._drawn:
            self._draw()

    def sample(self) -> None:
        self._asked += 1
        self._draw()

    def other(self, batch_size: int) -> None:
        self.others.append(self._ticket(batch_size))

    def _draw(self) -> None:
        while self._drawn < self._asked + self._depth and self._held.size >= self._min_size:
            if self._drawn >= self._asked and self._sampler.between_epochs:
                break
            self.tickets.append(self._ticket(self._batch_size))
            self._drawn += 1

    def _ticket(self, batch_size: int) -> tuple[int, list[int], list[int]]:
        draw: Draw = self._sampler.draw(self._held, batch_size, self._generator)
        self._tickets += 1
        indices = draw.indices.tolist()
        return self._tickets - 1, indices, [self._ring[row] for row in indices]


async def check_against_the_model(
    seed: int, *, sampler: str, depth: int, threads: bool, workers: int, steps: int = 30
) -> None:
    choose = random.Random(seed)
    capacity, min_size = choose.choice((8, 20, 50)), choose.choice((1, 4, 8))
    model = Model(capacity, 5, depth, SAMPLERS[sampler](), min_size)
    storage: Storage = TensorStorage(capacity)
    if threads:
        storage = ThreadedStorage(capacity, on_write=jitter, on_gather=jitter)
    buffer = ReplayBuffer(
        storage,
        sampler=SAMPLERS[sampler](),
        batch_size=5,
        prefetch=depth,
        workers=workers,
        min_size=min_size,
        generator=seeded(1),
    )
    written = 0
    found: list[Batch] = []
    others: list[Batch] = []

    async def extend(count: int, start: int) -> None:
        await buffer.extend(rows(count, start))

    async def sample() -> None:
        found.append(await buffer.sample())

    async def other() -> None:
        others.append(await buffer.sample(3))

    async with buffer:
        for step in range(steps):
            calls = [choose.choice(("extend", "sample")) for _ in range(choose.randrange(1, 6))]
            if step == 0:
                calls.append("extend")  # so that there is something for those that wait
            elif written >= min_size and choose.random() < 0.2:
                calls.append("other")
            asked = []
            for call in calls:
                if call == "extend":
                    count = choose.choice((1, 2, 3, 5, 12 if choose.random() < 0.2 else 4)) + (8 if step == 0 else 0)
                    asked.append(extend(count, written))
                    model.extend(list(range(written, written + count)))
                    written += count
                elif call == "sample":
                    asked.append(sample())
                    model.sample()
                else:
                    asked.append(other())
                    model.other(3)
            await within(asyncio.gather(*asked))
        assert buffer.stats().drawn == len(model.tickets) + len(model.others)
    # Tickets that nobody asked for any more are not compared.
    expected = model.tickets[: len(found)]
    check_same([(b.number, b.indices.tolist(), numbers(b)) for b in found], expected, f"seed {seed}")
    check_same([(b.number, b.indices.tolist(), numbers(b)) for b in others], model.others, f"seed {seed}, other size")


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
@pytest.mark.parametrize("sampler", SAMPLERS)
async def test_batches_are_those_of_the_model(sampler: str, threads: bool, depth: int) -> None:
    for seed in range(6):
        await check_against_the_model(seed, sampler=sampler, depth=depth, threads=threads, workers=1 + seed % 3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("depth", [0, 1, 3, 8])
@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
@pytest.mark.parametrize("sampler", SAMPLERS)
async def test_batches_are_those_of_the_model_in_100_programs(sampler: str, threads: bool, depth: int) -> None:
    for seed in range(100):
        await check_against_the_model(seed, sampler=sampler, depth=depth, threads=threads, workers=1 + seed % 3)


# -- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
async def test_order_of_calls_is_order_of_effects(threads: bool) -> None:
    sampler = DiarySampler()
    storage = ThreadedStorage(100, on_write=jitter, on_gather=jitter) if threads else TensorStorage(100)
    buffer = ReplayBuffer(storage, sampler=sampler, batch_size=4)
    calls: list[Callable[[], Any]] = []
    expected: list[tuple[str, int]] = []
    choose = random.Random(0)
    written, priority = 10, 0
    for _ in range(100):
        kind = choose.choice(("draw", "written", "priority"))
        if kind == "draw":
            calls.append(buffer.sample)
            expected.append((kind, written))
        elif kind == "written":
            calls.append(functools.partial(buffer.extend, rows(3)))
            written += 3
            expected.append((kind, written))
        else:
            calls.append(functools.partial(buffer.update_priority, [0, 1], float(priority)))
            expected.append((kind, priority))
            priority += 1
    async with buffer:
        await buffer.extend(rows(10))
        sampler.diary.clear()
        await within(asyncio.gather(*(call() for call in calls)))
    assert sampler.diary == expected


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
async def test_a_pass_has_in_it_what_was_written_before_it_was_asked_for(threads: bool, depth: int) -> None:
    storage = ThreadedStorage(100) if threads else TensorStorage(100)
    buffer = ReplayBuffer(
        storage, sampler=SamplerWithoutReplacement(shuffle=False), batch_size=5, prefetch=depth, workers=2
    )
    async with buffer:
        await buffer.extend(rows(5))
        assert (await buffer.sample()).last
        # Both writes are asked for before the batch, so both are in its pass.
        _, _, batch = await asyncio.gather(buffer.extend(rows(5, 5)), buffer.extend(rows(5, 10)), buffer.sample())
        seen = numbers(batch)
        while not batch.last:
            batch = await buffer.sample()
            seen += numbers(batch)
        assert seen == list(range(15))


@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
async def test_draws_after_flush_wait_for_their_turn(threads: bool) -> None:
    sampler = DiarySampler()
    storage = ThreadedStorage(100) if threads else TensorStorage(100)
    buffer = ReplayBuffer(storage, sampler=sampler, batch_size=4, prefetch=2)
    async with buffer:
        await buffer.extend(rows(10))
        await buffer.sample()
        await buffer.flush()
        sampler.diary.clear()
        await asyncio.gather(buffer.extend(rows(10)), buffer.extend(rows(10)), buffer.sample())
        assert [entry for entry in sampler.diary if entry[0] == "draw"] == [("draw", 30)] * 3


async def test_an_error_of_a_draw_ahead_is_not_that_of_a_later_call() -> None:
    class Growing(RandomSampler):
        """Has one batch of ten items, and many of more."""

        draws = 0

        def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
            self.draws += 1
            if rows.size <= 10 and self.draws > 1:
                raise ValueError("not enough items")
            return super().draw(rows, batch_size, generator)

    buffer = ReplayBuffer(ThreadedStorage(100), sampler=Growing(), batch_size=4, prefetch=1)
    async with buffer:
        await buffer.extend(rows(10))
        await buffer.sample()
        # When the turn of this call comes, enough items are there.
        _, batch = await asyncio.gather(buffer.extend(rows(10, 10)), buffer.sample())
        assert batch.number == 1


# -- the gate ---------------------------------------------------------------------------------------------------------


async def test_a_gather_sees_the_rows_as_they_were_at_its_draw() -> None:
    stop = Stop()
    buffer = ReplayBuffer(ThreadedStorage(10, on_gather=stop), batch_size=64)
    async with buffer, Crew() as crew:
        await buffer.extend(rows(10))
        sample = crew.start(buffer.sample())
        await stop.come.reached()
        extend = crew.start(buffer.extend(rows(10, 100)))
        await turns()
        assert not extend.done()
        assert buffer.stats().waiting_writers == 1
        stop.go.set()
        batch = await within(sample)
        await within(extend)
        assert max(numbers(batch)) < 10
        assert min(numbers(await within(buffer.sample()))) >= 100


async def test_a_small_gather_waits_for_a_large_write() -> None:
    stop = Stop()

    class LargeWrites(ThreadedStorage):
        def gather_nbytes(self, count: int) -> int:
            return 0

    storage = LargeWrites(10)
    buffer = ReplayBuffer(storage, batch_size=64)
    async with buffer, Crew() as crew:
        await buffer.extend(rows(10))
        storage.on_write = stop
        extend = crew.start(buffer.extend(rows(10, 100)))
        await stop.come.reached()
        sample = crew.start(buffer.sample())
        await turns()
        assert not sample.done()
        assert buffer.stats().drawn == 0
        stop.go.set()
        await within(extend)
        assert min(numbers(await within(sample))) >= 100


async def test_many_gathers_together_and_a_write_alone() -> None:
    barrier = threading.Barrier(3)
    lock, inside = threading.Lock(), [0]
    seen_by_write: list[int] = []

    def gather() -> None:
        with lock:
            inside[0] += 1
        barrier.wait(SECONDS)  # all three are here at once, or this raises
        with lock:
            inside[0] -= 1

    storage = ThreadedStorage(10, on_gather=gather, on_write=lambda: seen_by_write.append(inside[0]))
    buffer = ReplayBuffer(storage, batch_size=4, workers=3)
    async with buffer:
        await buffer.extend(rows(10))
        for _ in range(30):
            await within(
                asyncio.gather(
                    *(buffer.sample() for _ in range(3)),
                    buffer.extend(rows(3)),
                    *(buffer.sample() for _ in range(3)),
                )
            )
    assert set(seen_by_write) == {0}


async def test_a_write_never_waits_for_a_consumer() -> None:
    buffer = ReplayBuffer(ThreadedStorage(20), batch_size=4, prefetch=3, workers=2)
    async with buffer:
        await buffer.extend(rows(20))
        await buffer.sample()
        for start in range(0, 400, 20):  # nobody takes the three batches that are ready
            await within(buffer.extend(rows(20, start)))
        assert buffer.stats().queued == 3
        assert buffer.write_count == 420
        # They are as they were drawn.
        for _ in range(3):
            assert max(numbers(await buffer.sample())) < 20


async def test_a_hanging_transform_does_not_hold_writers_up() -> None:
    stop = Stop()

    def hang(data: Any) -> Any:
        stop()
        return data

    buffer = ReplayBuffer(ThreadedStorage(20), batch_size=4, prefetch=2, workers=2, transform=hang)
    async with buffer, Crew() as crew:
        await buffer.extend(rows(20))
        sample = crew.start(buffer.sample())
        await stop.come.reached()
        for start in range(0, 200, 20):
            await within(buffer.extend(rows(20, start)))
        assert not sample.done()
        stop.go.set()
        await within(sample)


# -- torn rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("total", [20_000, pytest.param(200_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
@pytest.mark.parametrize("depth", [0, 3])
async def test_no_row_is_ever_mixed(total: int, depth: int) -> None:
    size = 128

    def numbered(count: int, start: int) -> dict[str, Any]:
        number = np.arange(start, start + count)
        return {
            "a": number,
            "b": {"wide": np.repeat(number[:, None], 600, 1).astype(np.float32)},
            "c": np.repeat(number[:, None], 9, 1).astype(np.int32),
            "d": number.astype(np.float64),
            "e": np.repeat(number[:, None], 700, 1).astype(np.float32),
        }

    buffer = ReplayBuffer(TensorStorage(size), batch_size=256, prefetch=depth, workers=2)
    written = checked = mixed = 0

    async def write(count: int) -> None:
        nonlocal written
        while checked < total:
            start = written
            written += count
            await buffer.extend(numbered(count, start))

    async def read() -> None:
        nonlocal checked, mixed
        while checked < total:
            batch = await buffer.sample()
            number = batch["a"]
            columns = [batch["b"]["wide"], batch["c"], batch["d"][:, None], batch["e"]]
            wrong = sum((column != number[:, None]).any(1) for column in columns)
            checked += len(batch)
            mixed += int(torch.count_nonzero(torch.as_tensor(wrong)))

    async with buffer:
        await buffer.extend(numbered(size, 0))
        written = size
        # Writes of every size: some are made on the event loop, some in threads, some replace the whole ring.
        await within(asyncio.gather(write(3), write(40), write(size + 5), read(), read()), 500)
    assert checked >= total
    assert mixed == 0


# -- the first items --------------------------------------------------------------------------------------------------


async def test_first_items_of_two_schemas_at_once() -> None:
    buffer = ReplayBuffer(ThreadedStorage(100), batch_size=4)
    async with buffer, Crew() as crew:
        one = crew.start(buffer.extend(rows(10)))
        other = crew.start(buffer.extend({"something": torch.zeros(4)}))
        first, second = await outcomes(one, other)
        assert isinstance(first, torch.Tensor)
        assert isinstance(second, SchemaError)
        assert len(buffer) == 10


async def test_order_of_keys_does_not_matter_while_the_first_items_are_written() -> None:
    # The second write is prepared while a thread lays the rows out for the first one.
    preparing, laid_out = Latch(), Latch()

    class Watched(np.ndarray[Any, Any]):
        """An array that says when it is looked at, and then takes its time."""

        @property  # type: ignore[misc]
        def shape(self) -> Any:
            preparing.set()
            laid_out.wait()
            return np.asarray(self).shape

    class Layers(ThreadedStorage):
        def write(self, prepared: Any, runs: Any) -> None:
            preparing.wait()
            super().write(prepared, runs)
            laid_out.set()

    buffer = ReplayBuffer(Layers(100), sampler=SamplerWithoutReplacement(shuffle=False), batch_size=20)
    one = {"a": np.full(10, 1.0), "b": np.full(10, 2.0)}
    other = {"b": np.full(10, 2.0).view(Watched), "a": np.full(10, 1.0)}
    async with buffer:
        await within(asyncio.gather(buffer.extend(one), buffer.extend(other)))
        batch = await buffer.sample()
        assert set(batch["a"].tolist()) == {1.0}
        assert set(batch["b"].tolist()) == {2.0}


# -- other calls ------------------------------------------------------------------------------------------------------


async def test_empty_drops_tickets_and_numbers_go_on() -> None:
    buffer = ReplayBuffer(TensorStorage(100), batch_size=4, prefetch=3)
    async with buffer, Crew() as crew:
        await buffer.extend(rows(10))
        assert (await buffer.sample()).number == 0
        await buffer.empty()
        assert (len(buffer), buffer.write_count) == (0, 10)
        assert buffer.stats().dropped == 3
        waiting = crew.start(buffer.sample())
        await turns()
        assert not waiting.done()
        await buffer.extend(rows(10, 100))
        batch = await within(waiting)
        assert batch.number == 4
        assert min(numbers(batch)) >= 100


async def test_empty_ends_a_pass() -> None:
    buffer = ReplayBuffer(TensorStorage(100), sampler=SamplerWithoutReplacement(), batch_size=4, prefetch=1)
    async with buffer:
        await buffer.extend(rows(10))
        assert (await buffer.sample()).epoch == 0
        await buffer.empty()
        await buffer.extend(rows(8, 100))
        batches = [await buffer.sample() for _ in range(2)]
        assert [batch.epoch for batch in batches] == [1, 1]
        assert sorted(numbers(batches[0]) + numbers(batches[1])) == list(range(100, 108))


async def test_empty_waits_for_gathers() -> None:
    stop = Stop()
    buffer = ReplayBuffer(ThreadedStorage(100, on_gather=stop), batch_size=4)
    async with buffer, Crew() as crew:
        await buffer.extend(rows(10))
        sample = crew.start(buffer.sample())
        await stop.come.reached()
        empty = crew.start(buffer.empty())
        await turns()
        assert not empty.done()
        assert len(buffer) == 10
        stop.go.set()
        await within(empty)
        assert len(buffer) == 0
        await buffer.extend(rows(4, 50))
        await within(sample)


async def test_flush_draws_anew() -> None:
    buffer = ReplayBuffer(TensorStorage(10), batch_size=4, prefetch=2)
    async with buffer:
        await buffer.extend(rows(10))
        await buffer.sample()
        await buffer.extend(rows(10, 100))
        assert await buffer.flush() == 2
        assert await buffer.flush() == 0
        assert min(numbers(await buffer.sample())) >= 100


async def test_flush_leaves_those_who_wait_their_ticket() -> None:
    stop = Stop()

    def transform(data: Any) -> Any:
        if not stop.come.is_set:
            stop()
        return data

    buffer = ReplayBuffer(TensorStorage(10), batch_size=4, transform=transform, workers=2, prefetch=1)
    async with buffer, Crew() as crew:
        await buffer.extend(rows(10))
        sample = crew.start(buffer.sample())
        await stop.come.reached()
        # Had its batch been ready at once, flush() would have come too late for it. So latency must not show here.
        assert await buffer.flush() == 1
        stop.go.set()
        assert (await within(sample)).number == 0
        assert (await within(buffer.sample())).number == 2


async def test_priority_updates_do_not_wait_for_gathers_but_for_writes() -> None:
    sampler, gather, write = DiarySampler(), Stop(), Stop()
    storage = ThreadedStorage(100)
    buffer = ReplayBuffer(storage, sampler=sampler, batch_size=4, workers=2)
    async with buffer, Crew() as crew:
        await buffer.extend(rows(10))
        storage.on_gather, storage.on_write = gather, write
        sample = crew.start(buffer.sample())
        await gather.come.reached()
        await within(buffer.update_priority([1], 1.0))
        gather.go.set()
        await within(sample)
        extend = crew.start(buffer.extend(rows(1)))
        await write.come.reached()
        update = crew.start(buffer.update_priority([1], 2.0))
        await turns()
        assert not update.done()
        write.go.set()
        await outcomes(extend, update)
        assert sampler.diary == [("written", 10), ("draw", 10), ("priority", 1), ("written", 11), ("priority", 2)]


async def test_the_callers_arrays_may_be_reused_after_a_write() -> None:
    buffer = ReplayBuffer(ThreadedStorage(100), sampler=SamplerWithoutReplacement(shuffle=False), batch_size=100)
    async with buffer:
        items = {"number": np.zeros(10, np.int64)}
        for step in range(10):
            items["number"][:] = step
            await buffer.extend(items)
            items["number"][:] = -1
        assert numbers(await buffer.sample()) == [step for step in range(10) for _ in range(10)]


async def test_writes_that_wait_when_the_buffer_closes_write_nothing() -> None:
    stop = Stop()
    buffer = ReplayBuffer(ThreadedStorage(100, on_gather=stop), batch_size=4)
    async with Crew() as crew:
        await buffer.open()
        await buffer.extend(rows(10))
        sample = crew.start(buffer.sample())
        await stop.come.reached()
        writers = [crew.start(buffer.extend(rows(1))) for _ in range(3)]
        await turns()
        close = crew.start(buffer.aclose())
        await turns()
        stop.go.set()
        ends = await outcomes(sample, *writers, close)
        assert all(isinstance(end, BufferClosedError) for end in ends[:4])
        assert (len(buffer), buffer.write_count) == (10, 10)
