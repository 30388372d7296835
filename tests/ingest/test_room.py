"""Room for work in flight: it is waited for before the work, and counts as admitted until the items are written."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import (
    AsyncBufError,
    BufferClosedError,
    ConsumingSampler,
    ListStorage,
    MaxBytes,
    MaxStaleness,
    Queue,
    ReplayBuffer,
    ReservationError,
    SchemaError,
    Slot,
    Staleness,
    TensorStorage,
)
from tests.helpers import Crew, outcomes, rows, seeded, turns, within
from tests.ingest.test_reservations import books, leave
from tests.resume_helpers import restored, saved
from tests.snapshot.helpers import every_way

if TYPE_CHECKING:
    from pathlib import Path


def made(size: int = 8, **settings: Any) -> ReplayBuffer:
    arguments: dict[str, Any] = {
        "sampler": ConsumingSampler(),
        "limiter": Queue(size),
        "batch_size": 4,
        "generator": seeded(),
    }
    storage = settings.pop("storage", None) or TensorStorage(64)
    return ReplayBuffer(storage, **{**arguments, **settings})


def admitted(buffer: ReplayBuffer) -> int:
    return buffer._table.limits.admitted


async def test_work_waits_before_it_begins() -> None:
    async with made(8) as buffer, Crew() as crew:
        begun: list[int] = []

        async def work(number: int) -> None:
            async with buffer.reserve(number, items=3) as slot:
                assert slot.items == 3
                begun.append(number)
                await go.wait()
                await slot.commit(rows(3, 10 * number))

        go = asyncio.Event()
        workers = [crew.start(work(i)) for i in range(3)]
        await turns()
        assert (begun, admitted(buffer), len(buffer)) == ([0, 1], 6, 0)
        small = crew.start(buffer.extend(rows(1, 90)))  # behind the one that waits
        await turns()
        assert not small.done()
        why = buffer.why_blocked()
        assert "2 writer(s) wait for the limiter, the first, a reservation, with 3 item(s)" in why
        assert "6 items are stored or about to be, of at most 8, and 3 more are to come" in why
        assert "2 reservation(s) or group(s) at work hold room for 6 item(s)" in why
        assert buffer.stats().waiting_writers == 2
        go.set()
        await within(asyncio.gather(*workers[:2]))
        assert (admitted(buffer), len(buffer), begun) == (0, 6, [0, 1])
        await within(buffer.sample())
        await within(asyncio.gather(workers[2], small))
        assert (admitted(buffer), len(buffer), begun) == (0, 6, [0, 1, 2])
        assert books(buffer) == (3, 3, 0, {})


async def test_nothing_waits_without_a_limiter() -> None:
    buffer = made(limiter=None)
    async with buffer.reserve("p", items=100) as slot:
        with pytest.raises(ValueError, match=r"expected at most 100 items, as many as were reserved, found 101"):
            await slot.commit(rows(101))
        assert await slot.commit(rows(2))
    for slot in await buffer.reserve_group("p", 3, items=2):
        async with slot:
            with pytest.raises(ValueError, match="expected at most 2 items"):
                await slot.commit(rows(3))
            await slot.commit(rows(1))
    assert len(buffer) == 5
    assert books(buffer) == (4, 4, 0, {})


async def test_more_or_fewer_than_reserved() -> None:
    async with made(8) as buffer:
        async with buffer.reserve("p", items=6) as slot:
            with pytest.raises(ValueError, match="The reservation stays open: commit fewer, or reserve"):
                await slot.commit(rows(7))
            with pytest.raises(SchemaError):
                await slot.commit(3)
            assert (slot.is_open, admitted(buffer)) == (True, 6)
            await slot.commit(rows(2))
            assert (admitted(buffer), len(buffer)) == (0, 2)
            await within(buffer.extend(rows(6)))
        assert admitted(buffer) == 0


@pytest.mark.parametrize("error", [ValueError(), None, asyncio.CancelledError(), KeyboardInterrupt()], ids=repr)
async def test_the_end_of_a_block_gives_room_back(error: BaseException | None) -> None:
    async with made(8) as buffer, Crew() as crew:
        slot = buffer.reserve("p", items=8)
        await slot.__aenter__()
        waiting = crew.start(buffer.extend(rows(8)))
        await turns()
        assert not waiting.done()
        await slot.__aexit__(None if error is None else type(error), error, None)
        await within(waiting)
        assert admitted(buffer) == 0


async def test_a_call_that_waits_has_reserved_nothing() -> None:
    """So a source may be told in the step in which the call returns, and no checkpoint has one without the other."""
    async with made(8) as buffer, Crew() as crew:
        await buffer.extend(rows(8))
        slots = [buffer.reserve(i, items=4) for i in range(2)]
        waiting = [crew.start(leave(slot)) for slot in slots]
        behind = crew.start(buffer.extend(rows(1)))
        await turns()
        assert len((await buffer.state_dict())["reservations"]["number"]) == 0
        for task in waiting:
            task.cancel()
        await outcomes(*waiting)
        assert buffer.unfinished() == []
        assert (admitted(buffer), buffer.stats().waiting_writers) == (0, 1)
        await buffer.sample()
        await within(behind)
        await buffer.sample()
        again, other = slots
        async with again:
            assert (admitted(buffer), len(buffer)) == (4, 1)
            await again.commit(rows(3))
        assert other.items == 4
        await buffer.sample()
        async with other:
            await other.commit(rows(4))
        assert books(buffer) == (2, 2, 0, {})


async def test_what_never_fits_is_not_reserved() -> None:
    async with made(8) as buffer:
        with pytest.raises(ValueError, match="at most 8 items in one write, found 9"):
            await leave(buffer.reserve("p", items=9))
        with pytest.raises(ValueError, match="at most 8 items in one write, found 10"):
            await buffer.reserve_group("p", 2, items=5)
        assert books(buffer)[0] == 0


@pytest.mark.parametrize("end", ["finish", "aclose"])
async def test_those_that_wait_are_told_of_the_end(end: str) -> None:
    async with made(8) as buffer, Crew() as crew:
        await buffer.extend(rows(8))
        waiting = [crew.start(leave(buffer.reserve("p", items=1))), crew.start(buffer.reserve_group("g", 2, items=1))]
        await turns()
        await getattr(buffer, end)()
        for error in await outcomes(*waiting):
            assert isinstance(error, BufferClosedError)
        assert buffer.unfinished() == []
        assert admitted(buffer) == 0


async def test_not_from_within_a_transform() -> None:
    async def transform(data: Any) -> Any:
        async with buffer.reserve("p", items=8):
            return data

    async with made(8, transform=transform) as buffer:
        await buffer.extend(rows(8))
        with pytest.raises(AsyncBufError) as caught:
            await within(buffer.sample())
        assert "reserve() was called from within a transform" in str(caught.value.__cause__ or caught.value)


async def test_after_a_restore_the_room_of_before_is_free() -> None:
    async with made(8) as buffer, Crew() as crew:
        old = buffer.reserve("old", items=6)
        await old.__aenter__()
        state = await buffer.state_dict()
        writer = crew.start(buffer.extend(rows(4)))
        late = crew.start(leave(buffer.reserve("late", items=5)))
        await turns()
        assert not writer.done()
        await buffer.load_state_dict(state)
        await within(writer)
        await turns()
        assert not late.done()
        (slot,) = buffer.unfinished()
        assert slot.items == 6
        again = crew.start(leave(slot, partial=1))
        await buffer.sample()
        assert await outcomes(late, again) == [None, None]  # it had reserved nothing that a restore could end
        with pytest.raises(ReservationError):
            await old.commit(rows(6))
        await old.__aexit__(None, None, None)
        assert admitted(buffer) == 0


@every_way
async def test_a_checkpoint_has_the_number_of_items(way: str, tmp_path: Path) -> None:
    source = made(16)
    for items in (None, 3):
        with contextlib.suppress(asyncio.CancelledError):
            await leave(source.reserve("p", items=items), asyncio.CancelledError())
    group = await source.reserve_group("g", 3, items=2)
    async with group[1] as slot:
        await slot.commit(rows(1))
    target = await restored(way, await saved(way, source, tmp_path), made(16))
    found = target.unfinished()
    assert [slot.items for slot in found] == [None, 3, 2, 2]
    async with target, Crew() as crew:
        await target.extend(rows(12))
        member = crew.start(leave(found[2]))
        await turns()
        assert not member.done()  # six for the group
        await target.sample()
        with contextlib.suppress(ValueError):
            await within(member)


async def test_bytes_are_known_at_the_commit() -> None:
    buffer = made(storage=ListStorage(64), limiter=MaxBytes(4000), batch_size=1, collate_fn=list)
    async with buffer, Crew() as crew:
        async with buffer.reserve("p", items=3) as slot:  # nothing is known of items yet
            with pytest.raises(ValueError, match="at most 4000 bytes in one write"):
                await slot.commit([b"x" * 1936] * 3)
            await slot.commit([b"x" * 936] * 2)
        limits = buffer._table.limits
        assert limits.admitted_nbytes == 0
        async with buffer.reserve("p", items=2) as slot:
            assert limits.admitted_nbytes == 2000
            waiting = crew.start(leave(buffer.reserve("q", items=1)))
            await turns()
            assert not waiting.done()
            commit = crew.start(slot.commit([b"y" * 1436] * 2))
            await turns()
            assert not commit.done()
            commit.cancel()
            await outcomes(commit)
            assert (limits.admitted, limits.admitted_nbytes) == (2, 2000)
            commit = crew.start(slot.commit([b"y" * 1436] * 2))
            await buffer.sample()
            await within(commit)  # ahead of the one that waits
            assert not waiting.done()
        while not waiting.done():
            await within(buffer.sample())
            await turns()
        assert (limits.admitted, limits.admitted_nbytes) == (0, 0)


# -- groups -----------------------------------------------------------------------------------------------------------


async def test_a_group_has_room_as_a_whole() -> None:
    async with made(8) as buffer, Crew() as crew:
        await buffer.extend(rows(4))
        call = crew.start(buffer.reserve_group("g", 3, items=2, least=1))
        await turns()
        assert not call.done()
        assert "the first, a reservation, with 6 item(s)" in buffer.why_blocked()
        await buffer.sample()
        first, second, third = await within(call)
        assert admitted(buffer) == 6
        async with second:
            await second.commit(rows(1))
            assert admitted(buffer) == 5  # one less than it said
        with pytest.raises(ValueError, match="no answer"):
            await leave(first, ValueError("no answer"))
        assert admitted(buffer) == 3
        async with third:
            await third.commit(rows(2, 4))
        assert (admitted(buffer), len(buffer)) == (0, 3)


async def test_a_group_that_is_given_up_gives_room_back() -> None:
    async with made(8) as buffer, Crew() as crew:
        members = await buffer.reserve_group("g", 4, items=2)
        writer = crew.start(buffer.extend(rows(8)))
        async with members[0] as slot:
            await slot.commit(rows(2))
        await turns()
        assert not writer.done()
        with pytest.raises(ValueError, match="no answer"):
            await leave(members[2], ValueError("no answer"))
        await within(writer)
        assert admitted(buffer) == 0


async def test_a_group_that_nobody_works_on_waits_again() -> None:
    async with made(8) as buffer, Crew() as crew:
        members = await buffer.reserve_group("g", 3, items=2, least=1)
        for number, member in enumerate(members):
            assert admitted(buffer) == 6
            with contextlib.suppress(asyncio.CancelledError):
                await leave(member, asyncio.CancelledError(), number)
        assert admitted(buffer) == 0
        await buffer.extend(rows(8))
        first, second, third = buffer.unfinished()
        begun = asyncio.Event()

        async def work(slot: Slot) -> None:
            async with slot:
                begun.set()
                await slot.commit(rows(2))

        tasks = [crew.start(work(slot)) for slot in (first, second, third)]
        await turns()
        assert buffer.stats().waiting_writers == 1  # one of them, for all
        tasks[0].cancel()
        await turns()
        assert (buffer.stats().waiting_writers, begun.is_set()) == (1, False)
        await buffer.sample()
        assert not begun.is_set()
        await buffer.sample()
        await within(asyncio.gather(*tasks[1:]))
        assert admitted(buffer) == 0  # two have ended, and nobody works on the third
        (left,) = buffer.unfinished()
        async with left:
            await left.commit(rows(1))
        assert (admitted(buffer), len(buffer)) == (0, 5)


async def test_a_cancelled_call_has_made_no_group() -> None:
    async with made(8) as buffer, Crew() as crew:
        await buffer.extend(rows(8))
        call = crew.start(buffer.reserve_group("g", 2, items=2))
        await turns()
        call.cancel()
        await outcomes(call)
        assert buffer.unfinished() == []
        assert admitted(buffer) == 0


async def test_two_tasks_that_begin_one_slot_while_there_is_no_room() -> None:
    async with made(8) as buffer, Crew() as crew:
        await buffer.extend(rows(8))
        slot = buffer.reserve("p", items=4)
        both = [crew.start(leave(slot)) for _ in range(2)]
        await turns()
        await buffer.sample()
        await buffer.sample()
        found = await outcomes(*both)
        assert sorted(type(each).__name__ for each in found) == ["NoneType", "ReservationError"]
        assert admitted(buffer) == 0


# -- anything at any moment -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
async def test_no_room_is_lost_and_none_is_given_twice(seed: int) -> None:
    chance = random.Random(seed)
    async with made(12) as buffer, Crew() as crew:

        def check() -> None:
            grants = buffer._parts.admission._grants  # type: ignore[union-attr]
            assert admitted(buffer) == sum(grant.items for grant in grants) <= 12 - len(buffer)

        async def work(slot: Slot) -> None:
            async with slot:
                await turns(chance.randrange(3))
                if chance.random() < 0.2:
                    raise ValueError("no answer")
                if chance.random() < 0.9:
                    await slot.commit(rows(chance.randint(1, slot.items or 1)))

        async def worker() -> None:
            for _ in range(12):
                if chance.random() < 0.3:
                    members = await buffer.reserve_group("g", chance.randint(1, 3), items=2, least=1)
                    tasks = [crew.start(work(slot)) for slot in members]
                    await asyncio.wait(tasks)
                elif chance.random() < 0.2:
                    await buffer.extend(rows(chance.randint(1, 3)))
                else:
                    with contextlib.suppress(ValueError):
                        await work(buffer.reserve("p", items=chance.randint(1, 4)))

        async def consume() -> None:
            while True:
                await buffer.sample(1)
                check()

        workers = [crew.start(worker()) for _ in range(5)]
        consumer = crew.start(consume())
        while not all(task.done() for task in workers):
            await turns(chance.randrange(1, 5))
            check()
            if chance.random() < 0.1:
                victim = chance.choice(workers)
                victim.cancel()
            for slot in buffer.unfinished():
                if chance.random() < 0.5:
                    crew.start(work(slot))
        await outcomes(*workers)
        await turns(50)
        for _ in range(100):
            left = buffer.unfinished()
            if not left:
                break
            await asyncio.wait([crew.start(work(slot)) for slot in left])
        await turns(20)
        assert (admitted(buffer), len(buffer)) == (0, 0)
        ledger = buffer.stats().ledger
        assert ledger.closes
        assert ledger.reserved_open == 0
        consumer.cancel()


# -- what is too old --------------------------------------------------------------------------------------------------


def versioned(told: list[int], **settings: Any) -> ReplayBuffer:
    policy = Staleness(1, version_key="version", id_key="id", on_evict=told.extend)
    return made(staleness=policy, limiter=MaxStaleness(1), **settings)


def items(ids: list[int], versions: list[int]) -> dict[str, torch.Tensor]:
    return {"id": torch.tensor(ids), "version": torch.tensor(versions)}


@pytest.mark.parametrize("reserved", [None, 3])
async def test_items_that_are_too_old_end_the_reservation(reserved: int | None) -> None:
    told: list[int] = []
    async with versioned(told) as buffer:
        async with buffer.reserve("p", key="k", items=reserved) as slot:
            await buffer.advance_version(2)
            assert not await slot.commit(items([7, 8], [0, 0]))
            assert not slot.is_open
        assert (told, admitted(buffer)) == ([7, 8], 0)
        assert books(buffer) == (1, 0, 0, {"stale": 1})
        async with buffer.reserve("p", key="k", items=reserved) as slot:  # the key is free
            assert await slot.commit(items([7, 8, 9], [2, 0, 1]))
        assert (told, len(buffer)) == ([7, 8, 8], 2)
        assert not await buffer.extend(items([1], [2]), key="k")
        assert buffer.stats().ledger.closes


async def test_the_version_of_a_commit() -> None:
    async with made(staleness=Staleness(1), limiter=None) as buffer:
        for expected, version in ((False, 0), (True, 1), (True, [0, 2]), (True, None)):
            async with buffer.reserve("p") as slot:
                if buffer.version == 0:
                    await buffer.advance_version(2)
                assert await slot.commit(rows(2), version=version) is expected
        assert sorted((await buffer.sample(5)).info["age"].tolist()) == [0, 0, 0, 1, 1]
        (member,) = await buffer.reserve_group("g", 1)
        async with member:
            with pytest.raises(ValueError, match="expected neither priority nor table nor version"):
                await member.commit(rows(1), version=2)
            await member.commit(rows(1))
    plain = made(limiter=None)
    async with plain.reserve("p") as slot:
        with pytest.raises(TypeError, match="made without staleness"):
            await slot.commit(rows(1), version=1)
        await slot.commit(rows(1))


@pytest.mark.parametrize("reserved", [None, 1])
async def test_a_group_whose_items_are_too_old(reserved: int | None) -> None:
    told: list[int] = []
    async with versioned(told) as buffer:

        async def whole(versions: list[int]) -> list[bool]:
            members = await buffer.reserve_group("g", len(versions), key="k", items=reserved)
            found = []
            for member, version in zip(members, versions, strict=True):
                async with member:
                    found.append(await member.commit(items([member.member or 0], [version])))
            return found

        await buffer.advance_version(2)
        assert await whole([0, 0, 0]) == [True, True, False]
        assert told == [0, 1, 2]
        assert books(buffer) == (3, 0, 0, {"stale": 3})
        assert admitted(buffer) == 0
        assert await whole([2, 0, 1]) == [True, True, True]
        assert (told, len(buffer)) == ([0, 1, 2, 1], 2)
        assert not await buffer.extend(items([1], [2]), key="k")


async def test_a_large_write_that_is_too_old() -> None:
    buffer = made(storage=TensorStorage(20_000), staleness=Staleness(0), limiter=None)
    large = {"x": torch.zeros(10_000, 40)}
    async with buffer:
        async with buffer.reserve("p", key="k") as slot, buffer.reserve("p", key="k") as other:
            await buffer.advance_version()
            assert not await slot.commit(large, version=0)
            assert await other.commit(large, version=1)
        async with buffer.reserve("p", key="k") as slot:
            assert not await slot.commit(large, version=0)
        assert books(buffer) == (3, 1, 0, {"stale": 1, "duplicate": 1})
