"""A checkpoint is of one point in time, whatever goes on while it is written."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import ReplayBuffer, TensorStorage
from asyncbuf._disk.writer import CheckpointWriter
from asyncbuf.checkpoint.checkpointer import Checkpointer
from tests.checkpoint.helpers import Count, Run, items, make_buffer
from tests.helpers import Crew, Stop, check_same, fingerprint, seeded, take, turns, until, within

if TYPE_CHECKING:
    from pathlib import Path


async def test_state_is_that_of_the_call(checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Stop()
    write = CheckpointWriter.write

    def slow(self: CheckpointWriter, *arguments: Any) -> None:
        stop()
        write(self, *arguments)

    run = Run(0)
    async with run.buffer, Crew() as crew:
        await run.train(5)
        weights = run.weights()
        monkeypatch.setattr(CheckpointWriter, "write", slow)
        value = {"list": [1, 2]}
        saving = crew.start(checkpointer.save(5, **run.objects, value=value))
        await stop.come.reached()
        value["list"].clear()
        expected = await run.train(20)
        stop.go.set()
        await within(saving)
    other = Run(1)
    restored = await checkpointer.restore(**other.objects)
    assert other.weights() == weights
    assert restored.values["value"] == {"list": [1, 2]}
    other.step = 5
    async with other.buffer:
        check_same(await other.train(20), expected)


@pytest.mark.parametrize("seed", range(4))
async def test_saves_beside_writers_and_consumers_fit_together(tmp_path: Path, seed: int) -> None:
    checkpointer = Checkpointer(tmp_path, keep=None)
    rng = random.Random(seed)
    left, right = make_buffer(1), make_buffer(2, prefetch=1)
    seen: dict[str, Any] = {"seen_left": Count(), "seen_right": Count()}

    async def write(buffer: ReplayBuffer) -> None:
        for number in itertools.count():
            await buffer.extend(items(5, number))

    async def consume(buffer: ReplayBuffer, count: Count) -> None:
        while True:
            batch = await buffer.sample()
            assert batch.number == count.value
            count.value += 1  # the update: nothing waits between the batch and here

    async with left, right, Crew() as crew:
        await left.extend(items(20, 5))
        await right.extend(items(20, 5))
        tasks = [crew.start(write(buffer)) for buffer in (left, right)]
        tasks += [crew.start(consume(left, seen["seen_left"])) for _ in range(2)]
        tasks += [crew.start(consume(right, seen["seen_right"]))]
        for step in range(8):
            await turns(rng.randrange(60))
            if step == 4:  # at least once the consumers get on between two saves
                saved = seen["seen_left"].value
                await until(lambda saved=saved: seen["seen_left"].value > saved)  # type: ignore[misc]
            await checkpointer.save(step, left=left, right=right, **seen)
        assert not any(task.done() for task in tasks)
    numbers = []
    for step in checkpointer.steps():
        buffers: dict[str, Any] = {"left": make_buffer(3), "right": make_buffer(4, prefetch=1)}
        counts: dict[str, Any] = {"seen_left": Count(), "seen_right": Count()}
        await checkpointer.restore(step, **buffers, **counts)
        for name, buffer in buffers.items():
            async with buffer:
                assert (await buffer.sample()).number == counts[f"seen_{name}"].value
        numbers.append(counts["seen_left"].value)
    assert numbers == sorted(numbers)
    assert len(set(numbers)) > 1


async def test_snapshot_is_saved_as_the_buffer_it_was(checkpointer: Checkpointer) -> None:
    buffer = make_buffer()
    async with buffer:
        await buffer.extend(items(20, 0))
        await take(buffer, 4)
        snapshot = await buffer.snapshot()
        expected = await take(buffer, 10)
        await buffer.extend(items(20, 1))
    await checkpointer.save(0, replay=snapshot)
    other = make_buffer(1)
    await checkpointer.restore(replay=other)
    async with other:
        check_same(await take(other, 10), expected)


@pytest.mark.usefixtures("last_fifth_is_long")
async def test_batches_that_hang_are_saved_as_tickets(checkpointer: Checkpointer) -> None:
    hang = asyncio.Event()

    async def slow(data: Any) -> Any:
        await hang.wait()
        return data

    def make() -> ReplayBuffer:
        return ReplayBuffer(TensorStorage(8), batch_size=2, prefetch=2, transform=slow, generator=seeded())

    buffer, other = make(), make()
    async with buffer, Crew() as crew:
        await buffer.extend(items(8, 0))
        waiting = crew.start(buffer.sample())
        await turns()
        await within(checkpointer.save(0, buffer=buffer, timeout=0.01))
        hang.set()
        first = fingerprint(await waiting)
    await checkpointer.restore(buffer=other)
    async with other:
        assert fingerprint(await other.sample()) == first
