"""Calls of sample() given up at random: the batches received are the stream."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
from collections import deque
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

from asyncbuf import ReplayBuffer, SamplerWithoutReplacement, Storage, TensorStorage
from tests.cancellation.helpers import MOMENTS, later
from tests.helpers import ThreadedStorage, check_same, fingerprint, jitter, rows, seeded, take, turns, within

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable

    from asyncbuf._config import Transform


class Chaos:
    """Calls of ``sample()``, most of which are given up in one way or another.

    The ways are shuffled, but each comes equally often. Those that cancel before the call has begun are sure to give
    up, and those that are patient are sure to get a batch.

    Args:
        buffer: the buffer.
        calls: how many.
    """

    def __init__(self, buffer: ReplayBuffer, calls: int) -> None:
        self._buffer = buffer
        timed = itertools.product((self._timeout, self._wait_for, self._move_on), MOMENTS * 2)
        ways: list[Callable[[], Awaitable[None]]] = [functools.partial(way, moment) for way, moment in timed]
        ways += [functools.partial(self._cancelled_task, count) for count in range(8)]
        ways += [self._struck, self._patient] * 8
        self.sure_to_give_up = calls // len(ways) * 3  # of 48: two of wait_for() with no time, one that never began
        self._ways = ways * (calls // len(ways)) + random.sample(ways, calls % len(ways))
        random.shuffle(self._ways)
        self._waiting: deque[asyncio.Task[Any]] = deque()
        self.received: list[Hashable] = []
        self.given_up = 0

    def strike(self) -> None:
        """Something has just become ready, or is about to: cancel the first who waits, now or some turns later."""
        if self._waiting:
            later(random.randrange(6), self._waiting[0].cancel)

    async def consume(self) -> None:
        while self._ways:
            try:
                await self._ways.pop()()
            except (TimeoutError, asyncio.CancelledError):
                self.given_up += 1

    async def _sample(self) -> None:
        # In one step with the return of sample(): the order here is the order in which batches were handed over.
        self.received.append(fingerprint(await self._buffer.sample()))

    async def _timeout(self, moment: float) -> None:
        async with asyncio.timeout(moment):
            await self._sample()

    async def _wait_for(self, moment: float) -> None:
        await asyncio.wait_for(self._sample(), moment)

    async def _move_on(self, moment: float) -> None:
        with anyio.move_on_after(moment) as scope:
            await self._sample()
        self.given_up += scope.cancelled_caught

    async def _cancelled_task(self, count: int) -> None:
        task = asyncio.create_task(self._sample())
        await turns(count)
        task.cancel()
        await task

    async def _struck(self) -> None:
        task = asyncio.create_task(self._sample())
        self._waiting.append(task)
        try:
            await task
        finally:
            self._waiting.remove(task)

    async def _patient(self) -> None:
        await self._sample()


async def check_chaos(calls: int, *, consumers: int, depth: int, workers: int, threads: bool, kind: str) -> None:
    chaos: Chaos | None = None

    def sync(data: Any, *, generator: torch.Generator) -> Any:
        jitter()
        if chaos is not None and random.random() < 0.3:
            loop.call_soon_threadsafe(chaos.strike)
        return {**data, "noise": torch.rand(4, generator=generator)}

    async def coroutine(data: Any, *, generator: torch.Generator) -> Any:
        await turns(random.choice((1, 1, 20)))
        if chaos is not None:
            chaos.strike()  # the batch is ready in this very step
        return {**data, "noise": torch.rand(4, generator=generator)}

    def make(depth: int, workers: int) -> ReplayBuffer:
        storage: Storage = ThreadedStorage(50, on_gather=jitter) if threads else TensorStorage(50)
        transform: Transform | None = {"none": None, "sync": sync, "async": coroutine}[kind]
        return ReplayBuffer(
            storage,
            sampler=SamplerWithoutReplacement(),
            batch_size=4,
            prefetch=depth,
            workers=workers,
            transform=transform,
            generator=seeded(0),
        )

    loop = asyncio.get_running_loop()
    buffer = make(depth, workers)
    await buffer.extend(rows(50))
    async with buffer:
        chaos = Chaos(buffer, calls)
        await within(asyncio.gather(*(chaos.consume() for _ in range(consumers))), 500)
        rest = buffer.stats().queued
        assert buffer.stats().waiting_consumers == 0
        # Both happen often, or this would show nothing.
        assert min(chaos.given_up, len(chaos.received)) >= chaos.sure_to_give_up > calls // 20
        found = chaos.received + await take(buffer, rest)
    chaos = None
    reference = make(0, 1)
    await reference.extend(rows(50))
    async with reference:
        check_same(found, await take(reference, len(found)), "received and then taken")


CASES = [
    # consumers, depth, workers, threads, kind
    (1, 0, 1, False, "async"),
    (1, 4, 2, True, "sync"),
    (3, 0, 2, True, "none"),
    (3, 1, 1, False, "sync"),
    (5, 3, 4, True, "async"),
    (3, 8, 3, False, "async"),
]


@pytest.mark.parametrize(("consumers", "depth", "workers", "threads", "kind"), CASES)
async def test_batches_received_are_the_stream_whoever_gives_up(
    consumers: int, depth: int, workers: int, threads: bool, kind: str
) -> None:
    await check_chaos(800, consumers=consumers, depth=depth, workers=workers, threads=threads, kind=kind)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("consumers", "depth", "workers", "threads", "kind"), CASES)
async def test_batches_received_are_the_stream_in_10000_calls(
    consumers: int, depth: int, workers: int, threads: bool, kind: str
) -> None:
    await check_chaos(10_000, consumers=consumers, depth=depth, workers=workers, threads=threads, kind=kind)
