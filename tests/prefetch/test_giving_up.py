"""Giving up takes the same time however many others wait: counted in calls of Python functions, not in seconds."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import ReplayBuffer, SamplerWithoutReplacement, TensorStorage
from asyncbuf._table.gate import HistoryGate
from tests.helpers import rows, seeded, turns

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


async def calls_of(cancel: Callable[[], Awaitable[Any]]) -> int:
    count = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(counted)
    try:
        await cancel()
    finally:
        sys.setprofile(None)
    return count


async def cancelled(tasks: list[asyncio.Task[Any]], *, backwards: bool) -> int:
    async def cancel() -> None:
        for task in reversed(tasks) if backwards else tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    return await calls_of(cancel)


async def waiting_for_data(buffer: ReplayBuffer, count: int) -> list[asyncio.Task[Any]]:
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(buffer.sample()) for _ in range(count)]
    await turns(3)
    return tasks


async def waiting_for_a_pass(buffer: ReplayBuffer, count: int) -> list[asyncio.Task[Any]]:
    stream = buffer.epoch()
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(anext(stream)) for _ in range(count)]
    await turns(3)
    return tasks


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("depth", [0, 4, 300])
@pytest.mark.parametrize("how", [waiting_for_data, waiting_for_a_pass])
async def test_consumers_that_give_up_cost_in_proportion_to_their_number(
    how: Callable[[ReplayBuffer, int], Awaitable[list[asyncio.Task[Any]]]], depth: int, backwards: bool
) -> None:
    sampler = SamplerWithoutReplacement()
    buffer = ReplayBuffer(TensorStorage(1000), sampler=sampler, batch_size=2, prefetch=depth, min_size=600)
    await buffer.extend(rows(500))
    async with buffer:
        costs = [await cancelled(await how(buffer, count), backwards=backwards) for count in (100, 400)]
        assert buffer.stats().waiting_consumers == 0
    assert costs[1] < 4.5 * costs[0]


@pytest.mark.parametrize("backwards", [False, True])
async def test_writers_that_give_up_cost_in_proportion_to_their_number(backwards: bool) -> None:
    gate = HistoryGate()
    gate.submit(gate.acquire_read)
    costs = []
    for count in (100, 400):
        writers = [asyncio.create_task(gate.apply(lambda: None, exclusive=True)) for _ in range(count)]
        await turns(3)
        assert gate.waiting_writers == count
        costs.append(await cancelled(writers, backwards=backwards))
        assert gate.waiting_writers == 0
    assert costs[1] < 4.5 * costs[0]
    gate.release_read()
    assert gate.is_free_for_writes


async def test_a_writer_that_gives_up_first_lets_those_behind_it_go_on() -> None:
    gate = HistoryGate()
    gate.submit(gate.acquire_read)
    writer = asyncio.create_task(gate.apply(lambda: None, exclusive=True))
    await turns(3)
    done: list[int] = []
    for number in range(5):
        gate.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    assert not done
    writer.cancel()
    await asyncio.gather(writer, return_exceptions=True)
    assert done == [0, 1, 2, 3, 4]
    gate.release_read()


async def test_tickets_that_fail_cost_in_proportion_to_their_number() -> None:
    class Stateful(torch.nn.BatchNorm1d):
        def forward(self, data: Any) -> Any:
            raise ValueError("never")

    costs = []
    for depth in (50, 200):
        buffer = ReplayBuffer(
            TensorStorage(100), batch_size=2, prefetch=depth, transform=Stateful(1), generator=seeded()
        )
        await buffer.extend(rows(100))
        async with buffer:
            task = asyncio.create_task(buffer.sample())
            await asyncio.wait([task])

            async def skip_all(buffer: ReplayBuffer = buffer) -> None:
                await buffer.flush()

            costs.append(await calls_of(skip_all))
            assert task.exception() is not None
    assert costs[1] < 5 * costs[0]


async def test_consumers_that_give_up_within_a_freeze_cost_in_proportion_to_their_number() -> None:
    costs = []
    for count in (100, 400):
        buffer = ReplayBuffer(TensorStorage(100), batch_size=2, prefetch=2)
        await buffer.extend(rows(100))
        async with buffer:
            handle = await asyncio.create_task(buffer.freeze())
            costs.append(await cancelled(await waiting_for_data(buffer, count), backwards=False))
            handle.release()
            await buffer.sample()
    assert costs[1] < 4.5 * costs[0]


@pytest.mark.parametrize("is_stateful", [False, True])
async def test_closing_waits_for_transforms_that_run_and_not_for_those_that_are_due(is_stateful: bool) -> None:
    begun, may_end = threading.Event(), threading.Event()

    class Slow:
        calls = 0

        def __call__(self, data: Any) -> Any:
            self.calls += 1
            begun.set()
            assert may_end.wait(20)
            return data

    class Stateful(Slow):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    transform = Stateful() if is_stateful else Slow()
    buffer = ReplayBuffer(TensorStorage(100), batch_size=2, prefetch=20, transform=transform, generator=seeded())
    await buffer.extend(rows(100))
    await buffer.open()
    asked = asyncio.create_task(buffer.sample())
    await asyncio.to_thread(begun.wait, 20)
    closing = asyncio.create_task(buffer.aclose())
    await turns()
    may_end.set()
    await asyncio.wait_for(closing, 20)
    await asyncio.gather(asked, return_exceptions=True)
    assert transform.calls == 1
    async with buffer:  # those that were due are made now
        assert [(await buffer.sample()).number for _ in range(5)] == list(range(5))
