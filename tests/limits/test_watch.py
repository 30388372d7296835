"""buffer.watch: the end of a task reaches those who wait for it, and nobody else."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from typing import Any

import pytest

from asyncbuf import (
    BufferClosedError,
    BufferFailedError,
    ConsumingSampler,
    MaxAhead,
    Queue,
    ReplayBuffer,
    TensorStorage,
)
from tests.helpers import Crew, numbers, outcomes, rows, seeded, turns, within


def made(**options: Any) -> ReplayBuffer:
    settings: dict[str, Any] = {"batch_size": 4, "sampler": ConsumingSampler(), "generator": seeded(), **options}
    return ReplayBuffer(TensorStorage(20), **settings)


class CrashedError(Exception):
    pass


async def fails(buffer: ReplayBuffer, items: int = 0) -> None:
    if items:
        await buffer.extend(rows(items))
    raise CrashedError("the environment has crashed")


async def test_a_death_reaches_who_waits_and_who_would_wait() -> None:
    async with made() as buffer, Crew() as crew:
        waiting = [crew.start(buffer.sample()) for _ in range(3)]
        await turns()
        task = buffer.watch(crew.start(fails(buffer, 6)))
        first, *others = await outcomes(*waiting)
        assert numbers(first) == [0, 1, 2, 3]  # what can be had is handed out
        for error in (*others, *await outcomes(crew.start(buffer.sample()))):
            assert isinstance(error, BufferFailedError)
            assert error.__cause__ is task.exception()
            assert "has died of CrashedError('the environment has crashed')" in str(error)
            assert "buffer.unwatch(task)" in str(error)
        with pytest.raises(BufferFailedError):  # not the end of the data
            async for _ in buffer:
                pass
        assert numbers(await within(buffer.sample(2))) == [4, 5]
        buffer.unwatch(task)
        buffer.unwatch(task)
        reader = crew.start(buffer.sample())
        await turns()
        assert not reader.done()
        await buffer.extend(rows(4, 6))
        assert numbers(await within(reader)) == [6, 7, 8, 9]


@pytest.mark.parametrize("role", [None, "producer", "consumer"])
async def test_a_cancelled_task_is_dead(role: Any) -> None:
    async with made(limiter=Queue(8)) as buffer, Crew() as crew:
        await buffer.extend(rows(8))
        task = buffer.watch(crew.start(asyncio.Event().wait()), role)
        writer = crew.start(buffer.extend(rows(1)))
        await turns()
        assert not writer.done()
        task.cancel()
        await turns(3)
        assert writer.done()
        with pytest.raises(BufferFailedError, match="was cancelled"):
            writer.result()
        with pytest.raises(BufferFailedError, match="was cancelled"):
            await within(buffer.add({"number": rows(1)["number"][0], "wide": rows(1)["wide"][0]}))
        assert len(buffer) == 8


async def test_who_waits_for_the_buffer_alone_is_not_told() -> None:
    go_on = asyncio.Event()

    async def transform(data: Any) -> Any:
        await go_on.wait()
        return data

    async with made(transform=transform) as buffer, Crew() as crew:
        await buffer.extend(rows(4))
        reader = crew.start(buffer.sample())
        await turns()
        buffer.watch(crew.start(fails(buffer)), "producer")
        await turns()
        assert not reader.done()
        go_on.set()
        assert numbers(await within(reader)) == [0, 1, 2, 3]


async def test_all_producers_have_ended_well() -> None:
    async with made() as buffer, Crew() as crew:
        go_on = asyncio.Event()

        async def collect(start: int) -> None:
            await buffer.extend(rows(5, start))
            await go_on.wait()

        async def learn() -> list[int]:
            return [number async for batch in buffer for number in numbers(batch)]

        first = buffer.watch(crew.start(collect(0)), "producer")
        second = buffer.watch(crew.start(collect(5)), "producer")
        learner = buffer.watch(crew.start(learn()), "consumer")
        await turns()
        waiting = crew.start(buffer.sample())
        await turns()
        first.cancel()
        buffer.unwatch(first)
        await turns()
        assert not learner.done()  # the other one lives
        go_on.set()
        await outcomes(second)
        found, error = await outcomes(learner, waiting)
        assert isinstance(error, BufferClosedError)
        assert "every producer that buffer.watch() was told of has ended" in str(error)
        assert found == [*range(8)]
        third = buffer.watch(crew.start(asyncio.Event().wait()), "producer")
        reader = crew.start(buffer.sample())
        await turns()
        assert not reader.done()
        buffer.unwatch(third)
        await turns()
        assert not reader.done()


async def test_all_consumers_have_ended_well() -> None:
    async with made(limiter=MaxAhead(2)) as buffer, Crew() as crew:
        learner = buffer.watch(crew.start(buffer.sample()), "consumer")
        for start in range(0, 12, 4):
            await buffer.extend(rows(4, start))
        await outcomes(learner)
        with pytest.raises(BufferClosedError, match=r"every consumer .* nobody will take batches"):
            await within(buffer.extend(rows(1, 12)))
        assert buffer.write_count == 12


@pytest.mark.parametrize("who", ["producer", "consumer"])
async def test_those_who_are_watched_wait_for_each_other(who: Any) -> None:
    async with made(limiter=Queue(8)) as buffer, Crew() as crew:
        await buffer.extend(rows(3))
        writer, reader = crew.start(buffer.extend(rows(6, 3))), crew.start(buffer.sample())
        buffer.watch(writer if who == "producer" else reader, who)
        await turns(5)
        for error in await outcomes(writer, reader):
            assert isinstance(error, BufferFailedError)
            assert "writers and consumers wait for each other" in str(error)
            assert "3 items are stored or about to be, of at most 8, and 6 more are to come" in str(error)
        await buffer.extend(rows(5, 3))  # the buffer is whole
        assert numbers(await within(buffer.sample())) == [0, 1, 2, 3]


async def test_one_of_them_lives() -> None:
    async with made(limiter=Queue(8)) as buffer, Crew() as crew:
        await buffer.extend(rows(3))
        buffer.watch(crew.start(asyncio.Event().wait()), "producer")
        writer, reader = crew.start(buffer.extend(rows(6, 3))), crew.start(buffer.sample())
        buffer.watch(writer, "producer")
        await turns(20)
        assert not writer.done()
        await buffer.remove([0, 1, 2])
        await outcomes(writer, reader)


async def test_a_death_that_nobody_was_told_of_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with made() as buffer:
        for told in (False, True):
            caplog.clear()
            task = buffer.watch(asyncio.create_task(fails(buffer)))
            await turns()
            if told:
                with pytest.raises(BufferFailedError):
                    await within(buffer.sample())
            buffer.unwatch(task)
            with caplog.at_level(logging.ERROR, "asyncio"):
                del task
                gc.collect()
            assert ("never retrieved" in caplog.text) is not told


@pytest.mark.parametrize("how", ["lives", "died", "ended"])
async def test_closing_ends_all_watching(how: str) -> None:
    async with made() as buffer, Crew() as crew:
        if how == "lives":
            task: asyncio.Task[Any] = crew.start(asyncio.Event().wait())
        else:
            task = crew.start(fails(buffer) if how == "died" else asyncio.sleep(0))
        buffer.watch(task, "producer")
        await turns()
    assert not buffer._parts.stalls.watch.is_used
    async with buffer:
        reader = crew.start(buffer.sample())
        await turns()
        assert not reader.done()
        reader.cancel()
        await outcomes(reader)
    if how == "died":
        task.exception()
    reference = weakref.ref(buffer)
    gc.disable()
    try:
        del buffer, task, reader
        crew._tasks.clear()
        await turns()
        assert reference() is None
    finally:
        gc.enable()


async def test_odd_arguments() -> None:
    buffer = made()
    for odd in (None, 3, "x", asyncio.get_running_loop().create_future(), asyncio.Task):
        with pytest.raises(TypeError, match=r"^task: expected a task"):
            buffer.watch(odd)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^task: expected a task, as of asyncio.create_task"):
        buffer.watch(fails(buffer))  # type: ignore[arg-type]
    task = asyncio.create_task(asyncio.sleep(0))
    for role in ("learner", 3, ["producer"]):
        with pytest.raises(ValueError, match=r"^role: expected one of \['producer', 'consumer'\] or None, found"):
            buffer.watch(task, role)  # type: ignore[arg-type]
    assert buffer.watch(task) is task
    await task
