"""Writes from within a transform: one that the limiter holds back may wait for that very batch, and is refused."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import AsyncBufError, Limiter, NotYet, PrefetchError, ReplayBuffer, TensorStorage
from tests.helpers import Crew, rows, seeded, turns, within

if TYPE_CHECKING:
    from asyncbuf import Counters

BATCH = 4


class Ahead(Limiter):
    """Writers may be so many rows ahead of what was drawn."""

    def __init__(self, most: int) -> None:
        self.most = most

    def may_write(self, counters: Counters, items: int) -> Any:
        ahead = counters.write_count + counters.admitted + items - counters.drawn_items
        return True if ahead <= self.most else NotYet(f"{ahead} rows ahead of {self.most}")


def made(most: int, transform: Any, **options: Any) -> ReplayBuffer:
    options = {"prefetch": 1, **options}
    return ReplayBuffer(
        TensorStorage(50), batch_size=BATCH, limiter=Ahead(most), transform=transform, generator=seeded(), **options
    )


class Writing:
    """Transforms that write into a buffer, by `extend` or `add`, async or from a thread."""

    def __init__(self, call: str, count: int = 1) -> None:
        self.call = call
        self.count = count
        self.into: list[ReplayBuffer] = []
        self.loop = asyncio.get_running_loop()

    async def write(self) -> None:
        (buffer,) = self.into
        if self.call == "extend":
            await buffer.extend(rows(self.count))
            return
        for _ in range(self.count):
            await buffer.add({key: value[0] for key, value in rows(1).items()})

    async def in_loop(self, data: Any) -> Any:
        await self.write()
        return data

    def in_thread(self, data: Any) -> Any:
        asyncio.run_coroutine_threadsafe(self.write(), self.loop).result()
        return data


async def sample_often(buffer: ReplayBuffer) -> None:
    for _ in range(50):
        await within(buffer.sample())


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("way", ["in_loop", "in_thread"])
@pytest.mark.parametrize("call", ["extend", "add"])
async def test_held_back_is_refused(call: str, way: str, workers: int) -> None:
    writing = Writing(call, 2 * BATCH)  # more than what is drawn
    buffer = made(20, getattr(writing, way), workers=workers)
    writing.into = [buffer]
    async with buffer:
        await buffer.extend(rows(20))
        with pytest.raises(PrefetchError, match=r"extend\(\) or add\(\) was called from within a tr") as caught:
            await sample_often(buffer)
        assert isinstance(caught.value.__cause__, AsyncBufError)
        assert "the limiter may hold it back" in str(caught.value.__cause__)
        assert buffer.stats().waiting_writers == 0


@pytest.mark.parametrize("way", ["in_loop", "in_thread"])
async def test_what_is_admitted_at_once_is_written(way: str) -> None:
    writing = Writing("extend")
    buffer = made(1000, getattr(writing, way))
    writing.into = [buffer]
    async with buffer:
        await buffer.extend(rows(20))
        for _ in range(5):
            await within(buffer.sample())
        assert buffer.write_count >= 25


@pytest.mark.parametrize("way", ["in_loop", "in_thread"])
async def test_another_buffer_that_holds_it_back_is_waited_for(way: str) -> None:
    writing = Writing("extend")
    other = made(20, None)
    writing.into = [other]
    buffer = ReplayBuffer(TensorStorage(50), batch_size=BATCH, transform=getattr(writing, way), generator=seeded())
    async with buffer, other, Crew() as crew:
        await buffer.extend(rows(20))
        await other.extend(rows(20))
        sampling = crew.start(buffer.sample())
        await turns(50)
        assert not sampling.done()
        await within(other.sample())  # lets the writer in
        await within(sampling)


async def test_two_buffers_that_write_into_each_other() -> None:
    """Each transform waits for the limiter of the other buffer: one of them is told."""
    one, two = Writing("extend", 2 * BATCH), Writing("extend", 2 * BATCH)
    first = made(20, one.in_loop, prefetch=0)
    second = made(20, two.in_loop, prefetch=0)
    one.into, two.into = [second], [first]
    async with first, second, Crew() as crew:
        await first.extend(rows(20))
        await second.extend(rows(20))
        tasks = [crew.start(sample_often(buffer)) for buffer in (first, second)]
        done, _ = await asyncio.wait(tasks, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        (told,) = done
        with pytest.raises(PrefetchError, match="each would wait for the other"):
            told.result()


async def test_a_task_that_a_transform_left_behind_may_wait() -> None:
    left: list[asyncio.Task[Any]] = []

    async def leaving(data: Any) -> Any:
        if not left:
            left.append(asyncio.create_task(later()))
        return data

    async def later() -> None:
        await turns(20)
        await buffer.extend(rows(20))

    buffer = made(20, leaving, prefetch=0)
    async with buffer:
        await buffer.extend(rows(20))
        await within(buffer.sample())
        await turns(50)
        assert not left[0].done()
        for _ in range(4):
            await within(buffer.sample())
        await within(left[0])
