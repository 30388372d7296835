"""Reservations and their room: what attack found."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
import torch

from asyncbuf import (
    BufferClosedError,
    GroupSampler,
    MaxBytes,
    ReplayBuffer,
    SchemaError,
    Slot,
    Staleness,
    TensorStorage,
)
from tests.helpers import rows, turns
from tests.ingest.test_reservations import leave
from tests.ingest.test_room import admitted, made


async def test_members_that_nobody_begins_are_unfinished_and_hold_no_room() -> None:
    """As where a task group is cancelled before the first step of its tasks."""
    async with made(8) as buffer:
        members = await buffer.reserve_group("g", 4, items=2)
        tasks = [asyncio.create_task(leave(slot)) for slot in members]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        del members, tasks, task
        await turns()
        assert len(buffer.unfinished()) == 4
        assert admitted(buffer) == 0
        async with buffer.unfinished()[0] as slot:
            assert admitted(buffer) == 8
            await slot.commit(rows(1))


async def test_room_is_whole_again_after_a_write_that_failed() -> None:
    fails = [True]

    def refuse(group: Any) -> bool:
        if fails:
            fails.pop()
            raise ZeroDivisionError
        return True

    sampler = GroupSampler("number", 1, filter=refuse, filter_keys="number")
    buffer = ReplayBuffer(TensorStorage(64), sampler=sampler, limiter=MaxBytes(4096), batch_size=1)
    async with buffer, buffer.reserve("p", items=8) as slot:
        before = admitted(buffer)
        with pytest.raises(ZeroDivisionError):
            await slot.commit({"number": torch.arange(1)})
        assert admitted(buffer) == before == 8
        assert await slot.commit({"number": torch.arange(8)})


async def test_a_deadline_goes_on_after_a_commit_that_was_given_up() -> None:
    async with made(8) as buffer:
        await buffer.extend(rows(8))
        (slot,) = await buffer.reserve_group("p", 1, deadline=0.2)
        async with slot:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await slot.commit(rows(1))
            await asyncio.Event().wait()
        assert buffer.stats().ledger.given_up == {"late": 1}


async def test_a_group_whose_items_do_not_go_together_ends() -> None:
    async with made(8) as buffer:
        first, last = await buffer.reserve_group("p", 2)
        async with first:
            await first.commit({"number": torch.zeros(1, 3)})
        await buffer.extend({"number": torch.zeros(1, 4)})  # and now the first ones do not fit any more
        with pytest.raises(SchemaError):
            await _commit(last, {"number": torch.zeros(1, 4)})
        assert buffer.unfinished() == []
        assert buffer.stats().ledger.closes


async def _commit(slot: Slot, items: Any) -> None:
    async with slot:
        await slot.commit(items)


async def test_numbers_of_writes_that_were_too_old_are_saved() -> None:
    buffer = ReplayBuffer(TensorStorage(8), batch_size=1, staleness=Staleness(0, version_key="number"))
    producer = buffer.producer("actor")
    await buffer.advance_version()
    for number in range(3):
        assert not await producer.extend({"number": torch.zeros(1, dtype=torch.int64)}, number=number)
    state = await buffer.state_dict()
    other = ReplayBuffer(TensorStorage(8), batch_size=1, staleness=Staleness(0, version_key="number"))
    await other.load_state_dict(state)
    assert other.producer("actor").next_number == 3


@pytest.mark.parametrize("call", ["extend", "reserve_group"])
async def test_a_call_that_is_refused_while_it_waits_leaves_no_cycle(call: str) -> None:
    gc.collect()
    gc.disable()
    try:
        buffer = made(8)
        async with buffer:
            await buffer.extend(rows(8))
            waiting: Any = buffer.extend(rows(1)) if call == "extend" else buffer.reserve_group("p", 2, items=2)
            task = asyncio.ensure_future(waiting)
            await turns()
        await asyncio.wait([task])
        assert isinstance(task.exception(), BufferClosedError)
        alive = weakref.ref(buffer)
        del buffer, task, waiting
        await turns()
        assert alive() is None
    finally:
        gc.enable()
