"""A wait for data says when nobody is left who wrote."""

from __future__ import annotations

import asyncio
import gc

from asyncbuf import ReplayBuffer, TensorStorage
from tests.helpers import Crew, rows, turns, within


async def test_a_wait_for_data_tells_that_the_producer_has_ended() -> None:
    buffer = ReplayBuffer(TensorStorage(20), batch_size=2, min_size=10)
    go_on = asyncio.Event()

    async def collect() -> None:
        await buffer.extend(rows(3))
        await go_on.wait()
        raise RuntimeError("the environment has crashed")

    async with buffer, Crew() as crew:
        collector = asyncio.create_task(collect(), name="collector-7")
        consumer = crew.start(buffer.sample())
        await turns()
        alive = buffer.why_blocked()
        assert alive == "1 consumer(s) of batches of 2 wait for data: 3 of at least 10 items are stored"
        go_on.set()
        await asyncio.wait([collector])
        assert buffer.why_blocked() == f"{alive}; the task that wrote last, 'collector-7', has ended"
        assert isinstance(collector.exception(), RuntimeError)
        del collector
        gc.collect()
        assert buffer.why_blocked().endswith("'collector-7', has ended")
        await buffer.extend(rows(3))  # somebody else goes on
        assert "has ended" not in buffer.why_blocked()
        await buffer.extend(rows(4))
        await within(consumer)
        assert buffer.why_blocked() == "nobody waits"


async def test_who_waits_for_something_else_is_not_told() -> None:
    ready = asyncio.Event()

    async def transform(data: object) -> object:
        await ready.wait()
        return data

    buffer = ReplayBuffer(TensorStorage(20), batch_size=2, transform=transform)
    async with buffer, Crew() as crew:
        await asyncio.create_task(buffer.extend(rows(3)), name="collector-8")
        consumer = crew.start(buffer.sample())
        await turns()
        assert "its transforms have not ended" in buffer.why_blocked()
        assert "collector-8" not in buffer.why_blocked()
        ready.set()
        await within(consumer)
