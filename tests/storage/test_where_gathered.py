"""Storages that gather on the event loop, in threads, or asynchronously: what they return, and what a buffer does."""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import torch

from asyncbuf import Draw, GatherJobs, PrefetchError, ReplayBuffer, RowRange, Runs, TensorStorage
from tests.helpers import Crew, Latch, seeded, take, turns, within

if TYPE_CHECKING:
    from collections.abc import Awaitable

ROWS = 64
SMALL, LARGE = 8, 1 << 30


class Watched(TensorStorage):
    """Writes down which threads gather, and says of every gather that it is as large as it is told.

    Args:
        nbytes: the size of a gather.
    """

    def __init__(self, nbytes: int = SMALL) -> None:
        super().__init__(ROWS)
        self.nbytes = nbytes
        self.threads: list[threading.Thread] = []

    def gather(self, indices: torch.Tensor) -> Any:
        self.threads.append(threading.current_thread())
        return super().gather(indices)

    def gather_nbytes(self, count: int) -> int:
        return self.nbytes


class OnLoop(Watched):
    runs = Runs.LOOP


class InThread(Watched):
    runs = Runs.THREAD


class Remote(Watched):
    """Rows that come from elsewhere, when they may."""

    runs = Runs.AWAIT

    def __init__(self, nbytes: int = SMALL) -> None:
        super().__init__(nbytes)
        self.fails = 0
        self.asked = Latch()
        self.answer = Latch()
        self.answer.set()

    def begin_gather(self, draw: Draw, *, inline: bool, parts: int) -> Awaitable[Any]:
        return self._rows_of(draw)

    async def _rows_of(self, draw: Draw) -> Any:
        self.asked.set()
        await self.answer.reached()
        await turns(3)
        if self.fails:
            self.fails -= 1
            raise ConnectionError("the other machine")
        return TensorStorage.gather(self, draw.indices)


class Unfinished(Watched):
    runs = Runs.AWAIT


StorageT = TypeVar("StorageT", bound=TensorStorage)


def written(storage: StorageT) -> StorageT:
    storage.write(storage.prepare({"x": torch.arange(ROWS)}), [RowRange(0, 0, ROWS)])
    return storage


async def buffer_of(storage: TensorStorage, prefetch: int = 0) -> ReplayBuffer:
    buffer = ReplayBuffer(storage, batch_size=4, prefetch=prefetch, generator=seeded(1))
    await buffer.extend({"x": torch.arange(ROWS)})
    return buffer


async def rows_of(begun: Any) -> Any:
    """Do what a storage asks for."""
    if inspect.isawaitable(begun):
        return await begun
    if not isinstance(begun, GatherJobs):
        return begun
    threads = [threading.Thread(target=job) for job in begun.jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return begun.combine()


# -- what a storage returns -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("make", [Watched, OnLoop, InThread, Remote])
async def test_rows_are_the_same_wherever_they_are_gathered(make: type[Watched], inline: bool, parts: int) -> None:
    storage = written(make())
    indices = torch.tensor([5, 0, 5, 63, 7])
    begun = storage.begin_gather(Draw(indices), inline=inline, parts=parts)
    assert isinstance(begun, dict) == (make is OnLoop or (make is Watched and inline))
    assert isinstance(begun, GatherJobs) == (make is InThread or (make is Watched and not inline))
    assert inspect.isawaitable(begun) == (make is Remote)
    assert (await rows_of(begun))["x"].equal(indices)
    here = threading.current_thread()
    assert all((thread is here) == isinstance(begun, dict) for thread in storage.threads)


def test_jobs_of_a_large_gather_share_its_rows() -> None:
    storage = written(TensorStorage(ROWS))
    begun = storage.begin_gather(Draw(torch.arange(10)), inline=False, parts=4)
    assert isinstance(begun, GatherJobs)
    assert len(begun.jobs) == 4
    for job in reversed(begun.jobs):
        job()
    assert begun.combine()["x"].equal(torch.arange(10))


def test_a_subclass_says_where_it_runs() -> None:
    class Own(TensorStorage):
        runs = Runs.LOOP

    found = written(Own(ROWS)).begin_gather(Draw(torch.arange(10)), inline=False, parts=4)
    assert found["x"].equal(torch.arange(10))


def test_a_storage_that_is_awaited_must_say_how() -> None:
    with pytest.raises(TypeError, match="Unfinished runs AWAIT: expected a begin_gather of its own"):
        written(Unfinished()).begin_gather(Draw(torch.arange(2)), inline=False, parts=1)


# -- what a buffer does with it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("nbytes", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("make", [OnLoop, InThread, Remote])
async def test_same_stream_from_where_it_runs(make: type[Watched], nbytes: int, prefetch: int) -> None:
    async with await buffer_of(TensorStorage(ROWS)) as plain:
        expected = await take(plain, 20)
    storage = make(nbytes)
    async with await buffer_of(storage, prefetch) as buffer:
        assert await take(buffer, 20) == expected
    here = threading.current_thread()
    assert all((thread is here) == (make is OnLoop) for thread in storage.threads)
    assert bool(storage.threads) == (make is not Remote)


async def test_a_write_waits_for_rows_that_are_on_their_way() -> None:
    storage = Remote()
    async with await buffer_of(storage) as buffer, Crew() as crew:
        storage.answer = Latch()
        sampling = crew.start(buffer.sample())
        await storage.asked.reached()
        writing = crew.start(buffer.extend({"x": -torch.ones(ROWS, dtype=torch.int64)}))
        await turns(20)
        assert not writing.done()
        storage.answer.set()
        batch = await within(sampling)
        assert batch["x"].equal(batch.indices)
        await within(writing)
        assert (await buffer.sample())["x"].eq(-1).all()


async def test_rows_that_do_not_come_are_asked_for_again() -> None:
    storage = Remote()
    async with await buffer_of(storage) as buffer:
        storage.fails = 2
        for _ in range(2):
            with pytest.raises(PrefetchError, match="the other machine"):
                await buffer.sample()
        batch = await buffer.sample()
        assert batch.number == 0
        assert batch["x"].equal(batch.indices)
        await within(buffer.extend({"x": torch.arange(3)}))  # nothing is held any more


async def test_consumer_that_gives_up_leaves_the_batch_to_the_next() -> None:
    storage = Remote()
    async with await buffer_of(storage) as buffer, Crew() as crew:
        storage.answer = Latch()
        sampling = crew.start(buffer.sample())
        await storage.asked.reached()
        sampling.cancel()
        await asyncio.wait({sampling})
        storage.answer.set()
        assert (await within(buffer.sample())).number == 0


async def test_closing_waits_for_rows_that_are_on_their_way() -> None:
    storage = Remote()
    buffer = await buffer_of(storage, prefetch=2)
    storage.answer = Latch()
    async with Crew() as crew:
        await buffer.open()
        sampling = crew.start(buffer.sample())
        await storage.asked.reached()
        closing = crew.start(buffer.aclose())
        await turns(20)
        storage.answer.set()
        await within(closing)
        await asyncio.wait({sampling})
    async with buffer:
        assert (await within(buffer.sample())).number in (0, 1)


async def test_a_buffer_over_an_unfinished_storage_says_so() -> None:
    async with await buffer_of(Unfinished()) as buffer:
        with pytest.raises(PrefetchError, match="expected a begin_gather of its own"):
            await buffer.sample()
