"""The ratio of samples to inserts stays within its range, whoever is fast."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from asyncbuf import (
    BufferFailedError,
    ConsumingSampler,
    MaxAhead,
    Queue,
    ReplayBuffer,
    SampleToInsertRatio,
    TensorStorage,
)
from tests.helpers import Crew, outcomes, rows, seeded, turns, within

if TYPE_CHECKING:
    from collections.abc import Callable

WRITERS, READERS = 8, 3


class Checked:
    """A buffer whose ratio is looked at in every step."""

    def __init__(self, ratio: float, width: float, min_size: int, prefetch: int, seed: int) -> None:
        self.buffer = ReplayBuffer(
            TensorStorage(64),
            batch_size=4,
            prefetch=prefetch,
            limiter=SampleToInsertRatio(ratio, min_size, width),
            generator=seeded(seed),
        )
        self.ratio, self.width, self.middle, self.min_size = ratio, width, ratio * min_size, min_size
        self.choose = random.Random(seed)
        self.furthest = [0.0, 0.0]

    def check(self) -> None:
        stats = self.buffer.stats()
        if stats.write_count >= self.min_size:
            off = self.ratio * stats.write_count - 4 * stats.drawn - self.middle
            assert abs(off) <= self.width, f"{off} of {self.width}"
            self.furthest = [min(self.furthest[0], off), max(self.furthest[1], off)]
        else:
            assert not stats.drawn

    async def write(self, slow: int) -> None:
        while True:
            await self.buffer.extend(rows(self.choose.randint(1, 3)))
            self.check()
            await turns(self.choose.randrange(slow))

    async def read(self, slow: int) -> None:
        while True:
            await self.buffer.sample()
            self.check()
            await turns(self.choose.randrange(slow))


@pytest.mark.parametrize(("ratio", "width", "prefetch"), [(4.0, 20.0, 0), (0.5, 6.0, 2), (1.0, 8.0, 0), (3.0, 30.0, 4)])
@pytest.mark.every_loop
async def test_the_ratio_stays_within_its_range(ratio: float, width: float, prefetch: int) -> None:
    program = Checked(ratio, width, 10, prefetch, seed=int(ratio * 10))
    choose = program.choose
    async with program.buffer, Crew() as crew:
        for slow in (1, 20):  # writers are fast, then readers
            tasks = [crew.start(program.write(choose.randint(slow, slow + 9))) for _ in range(WRITERS)]
            tasks += [crew.start(program.read(choose.randint(21 - slow, 30 - slow))) for _ in range(READERS)]
            for _ in range(2000):
                await turns(1)
                program.check()
            assert not any(task.done() for task in tasks), [task.exception() for task in tasks if task.done()]
            for task in tasks:
                task.cancel()
            await outcomes(*tasks)
    assert program.buffer.stats().drawn > 100
    assert program.furthest[0] < 0 < program.furthest[1]


LIMITS: dict[str, Callable[[], ReplayBuffer]] = {
    "ratio": lambda: ReplayBuffer(TensorStorage(64), batch_size=4, limiter=SampleToInsertRatio(1.0, 4, 8.0)),
    "ahead": lambda: ReplayBuffer(
        TensorStorage(64), batch_size=4, limiter=MaxAhead(2), sampler=ConsumingSampler(), prefetch=1
    ),
    "queue": lambda: ReplayBuffer(TensorStorage(64), batch_size=4, limiter=Queue(12), sampler=ConsumingSampler()),
    "wait": lambda: ReplayBuffer(TensorStorage(12), batch_size=4, overwrite="wait", sampler=ConsumingSampler()),
}


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("how", ["raises", "is cancelled"])
@pytest.mark.parametrize("role", ["producer", "consumer"])
async def test_a_side_that_dies_ends_the_other(name: str, how: str, role: str) -> None:
    die = asyncio.Event()
    async with LIMITS[name]() as buffer, Crew() as crew:

        async def collect(mortal: bool) -> None:
            start = 0
            while not (mortal and die.is_set()):
                await buffer.extend(rows(2, start))
                start += 2
            raise RuntimeError("the environment has crashed")

        async def learn(mortal: bool) -> None:
            while not (mortal and die.is_set()):
                await buffer.sample()
            raise RuntimeError("the loss is not finite")

        collectors = [crew.start(collect(role == "producer")) for _ in range(WRITERS)]
        learners = [crew.start(learn(role == "consumer")) for _ in range(READERS)]
        dying, left = (collectors, learners) if role == "producer" else (learners, collectors)
        buffer.watch(dying[0], role)  # type: ignore[arg-type]
        await turns(50)
        if how == "raises":
            die.set()
            await asyncio.wait(dying)
        else:
            for task in dying:
                task.cancel()
        await asyncio.wait(dying)
        await turns(40)  # until they have used up what there is
        assert all(task.done() for task in left), buffer.why_blocked()
        errors = [task.exception() for task in left]
        assert all(isinstance(error, BufferFailedError) for error in errors), errors
        assert "buffer.watch() was told of" in str(errors[0])
        for task in dying:
            if not task.cancelled():
                task.exception()
        buffer.unwatch(dying[0])
        go_on = crew.start(buffer.sample() if role == "producer" else buffer.extend(rows(2)))
        await turns()
        assert not go_on.done()  # nobody is told any more: it waits
        await within(buffer.flush())
