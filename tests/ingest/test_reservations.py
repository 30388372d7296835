"""Work in flight: a checkpoint has either the open reservation or its items, and what was open can be issued again."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import (
    BufferClosedError,
    CheckpointError,
    ListStorage,
    ReplayBuffer,
    ReservationError,
    SchemaError,
    Slot,
    TensorStorage,
)
from tests.helpers import Crew, Stop, ThreadedStorage, outcomes, rows, seeded, turns, within
from tests.ingest.test_limiters import AtMostUnread
from tests.resume_helpers import restored, saved
from tests.snapshot.helpers import every_way

if TYPE_CHECKING:
    from pathlib import Path


def buffer_of(storage: Any = None, **settings: Any) -> ReplayBuffer:
    storage = TensorStorage(64) if storage is None else storage
    return ReplayBuffer(storage, **{"batch_size": 4, "generator": seeded(), **settings})


def stored(buffer: ReplayBuffer) -> list[int]:
    return buffer._storage.gather(torch.arange(len(buffer)))["number"].tolist()  # type: ignore[no-any-return]


def books(buffer: ReplayBuffer) -> tuple[int, int, int, dict[str, int]]:
    """Made, fulfilled, open and given up."""
    ledger = buffer.stats().ledger
    assert ledger.closes, ledger
    return ledger.reserved, ledger.fulfilled, ledger.reserved_open, dict(ledger.given_up)


async def leave(slot: Slot, error: BaseException | None = None, partial: Any = None) -> None:
    """Begin a block, and leave it so."""
    async with slot:
        if partial is not None:
            slot.partial = partial
        if error is not None:
            raise error


async def test_from_the_reservation_to_the_items() -> None:
    buffer = buffer_of()
    slot = buffer.reserve({"prompt": "p"}, key="a")
    assert (slot.number, slot.is_open, books(buffer)[0]) == (None, False, 0)
    async with slot:
        assert (slot.number, slot.member, slot.key, slot.payload) == (0, None, "a", {"prompt": "p"})
        assert slot.is_open
        assert slot.partial is None
        slot.partial = [1, 2]
        assert books(buffer) == (1, 0, 1, {})
        assert buffer.unfinished() == []
        assert await slot.commit(rows(3))
        assert not slot.is_open
        with pytest.raises(ReservationError, match="expected one that is open"):
            await slot.commit(rows(3))
        with pytest.raises(ReservationError):
            slot.partial = 3
    assert books(buffer) == (1, 1, 0, {})
    assert stored(buffer) == [0, 1, 2]
    assert not await buffer.extend(rows(3), key="a")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ValueError("no answer"), "failed"),
        (TimeoutError(), "failed"),
        (None, "not committed"),
        (asyncio.CancelledError(), None),
        (KeyboardInterrupt(), None),
        (SystemExit(), None),
        (BufferClosedError(), None),
    ],
    ids=repr,
)
async def test_how_a_block_ends(error: BaseException | None, cause: str | None) -> None:
    buffer = buffer_of()
    with contextlib.suppress(BaseException):
        await leave(buffer.reserve("p"), error, [1])
    assert books(buffer) == (1, 0, 0 if cause else 1, {cause: 1} if cause else {})
    assert [slot.partial for slot in buffer.unfinished()] == ([] if cause else [[1]])


async def test_cancelled_work_is_taken_up_again() -> None:
    async with buffer_of() as buffer, Crew() as crew:
        begun = asyncio.Event()

        async def work(slot: Slot) -> None:
            async with slot:
                slot.partial = (slot.partial or 0) + 1
                if slot.partial == 2:
                    await slot.commit(rows(1))
                begun.set()
                await asyncio.Event().wait()

        task = crew.start(work(buffer.reserve("p")))
        await within(begun.wait())
        task.cancel()
        await outcomes(task)
        (again,) = buffer.unfinished()
        assert again.payload == "p"
        begun.clear()
        crew.start(work(again))
        await within(begun.wait())
        assert stored(buffer) == [0]
        assert books(buffer) == (1, 1, 0, {})


async def test_nobody_works_twice_on_one() -> None:
    buffer = buffer_of()
    with pytest.raises(asyncio.CancelledError):
        await leave(buffer.reserve("p"), asyncio.CancelledError())
    (one,), (two,) = buffer.unfinished(), buffer.unfinished()
    async with one:
        assert buffer.unfinished() == []
        with pytest.raises(ReservationError, match="expected one that nobody works on"):
            await two.__aenter__()
        await one.commit(rows(1))
    with pytest.raises(ReservationError, match="expected one that is open"):
        await two.__aenter__()


@every_way
async def test_a_checkpoint_has_what_is_open(way: str, tmp_path: Path) -> None:
    source = buffer_of()
    payload = {"prompt": torch.arange(3), "nested": [1, ("a", None)], "grad": torch.ones(2, requires_grad=True)}
    first, second, third = (source.reserve(payload, key=key) for key in (None, "a", 7))
    for slot in (first, second, third):
        await slot.__aenter__()
    partial = {"tokens": torch.tensor([1.5]), "text": "x"}
    second.partial = partial
    partial["text"] = "changed later"
    payload["nested"] = "changed later"
    await first.commit(rows(2))
    what = await saved(way, source, tmp_path)
    target = await restored(way, what, buffer_of())
    assert stored(target) == [0, 1]
    assert books(target) == (3, 1, 2, {})
    found = target.unfinished()
    assert [(slot.number, slot.key) for slot in found] == [(1, "a"), (2, 7)]
    assert found[0].payload["nested"] == [1, ("a", None)]
    assert found[0].payload["grad"].requires_grad
    assert found[0].partial == {"tokens": torch.tensor([1.5]), "text": "x"}
    assert found[1].partial is None
    async with found[1] as slot:
        assert await slot.commit(rows(1, 5))
    async with target.reserve("new") as slot:
        assert slot.number == 3
        await slot.commit(rows(1, 6))
    assert stored(target) == [0, 1, 5, 6]
    assert not await target.extend(rows(1), key=7)


async def test_an_old_slot_is_refused_after_a_restore() -> None:
    async with buffer_of() as buffer:
        state = await buffer.state_dict()
        async with buffer.reserve("before") as old, buffer.reserve("also before") as kept:
            later = await buffer.state_dict()
            await buffer.load_state_dict(state)
            assert not old.is_open
            with pytest.raises(ReservationError, match="from before a restore"):
                await old.commit(rows(1))
            async with buffer.reserve("of the same number") as new:
                assert new.number == old.number
                with pytest.raises(ReservationError):
                    await old.commit(rows(1))
                await buffer.load_state_dict(later)
                for slot in (old, kept, new):
                    with pytest.raises(ReservationError):
                        await slot.commit(rows(1))
        assert [slot.payload for slot in buffer.unfinished()] == ["before", "also before"]
        assert not len(buffer)


async def test_in_a_checkpoint_is_either_the_reservation_or_the_items(tmp_path: Path) -> None:
    """With copies in threads, and saves at any moment."""
    storage = ThreadedStorage(4096)
    chance = random.Random(0)
    async with buffer_of(storage) as buffer, Crew() as crew:

        async def work() -> None:
            for _ in range(8):
                async with buffer.reserve(0, key=None) as slot:
                    await turns(chance.randrange(4))
                    storage.writes_in_threads = chance.random() < 0.5
                    await slot.commit(rows(1))

        tasks = [crew.start(work()) for _ in range(6)]
        while not all(task.done() for task in tasks):
            await turns(chance.randrange(3))
            state = await within(buffer.state_dict())
            found = state["reservations"]
            assert found["made"] == state["writer"]["write_count"] + len(found["number"])


async def test_cancelled_in_the_commit() -> None:
    stop = Stop()
    async with buffer_of(ThreadedStorage(64, on_write=stop)) as buffer, Crew() as crew:

        async def work() -> None:
            async with buffer.reserve("p") as slot:
                await slot.commit(rows(1))

        blocking, waiting = crew.start(work()), crew.start(work())
        await stop.come.reached()
        await turns()
        for task in (blocking, waiting):
            task.cancel()
        await turns()
        stop.go.set()
        await outcomes(blocking, waiting)
        assert books(buffer) == (2, 1, 1, {})  # the thread had begun to copy the first
        assert len(buffer) == 1
        (left,) = buffer.unfinished()
        assert left.number == 1


async def test_a_commit_that_fails_leaves_it_open() -> None:
    buffer = buffer_of()
    await buffer.extend(rows(1))
    async with buffer.reserve("p") as slot:
        with pytest.raises(SchemaError):
            await slot.commit({"other": torch.zeros(1)})
        assert await slot.commit(rows(1))


async def test_a_key_that_was_written_meanwhile() -> None:
    async with buffer_of(limiter=AtMostUnread(1)) as buffer:
        async with buffer.reserve("p", key="a") as slot, buffer.reserve("p", key="a") as other:
            assert await slot.commit(rows(1))
            assert not await within(other.commit(rows(1)))
            assert not other.is_open
        assert books(buffer) == (2, 1, 0, {"duplicate": 1})
        assert buffer.stats().ledger.duplicates == 1


async def test_closing_leaves_them_unfinished() -> None:
    buffer = buffer_of()
    async with Crew() as crew:
        async with buffer:

            async def work() -> None:
                async with buffer.reserve("p") as slot:
                    await closing.wait()
                    await slot.commit(rows(1))

            closing = asyncio.Event()
            task = crew.start(work())
            await turns()
        closing.set()
        (error,) = await outcomes(task)
        assert isinstance(error, BufferClosedError)
    assert [slot.payload for slot in buffer.unfinished()] == ["p"]


async def test_odd_arguments() -> None:
    buffer = buffer_of()
    for payload in (object(), lambda: 0, {"x": {1, 2}}):
        with pytest.raises(CheckpointError, match="payload"):
            buffer.reserve(payload)
    with pytest.raises(TypeError, match="key"):
        buffer.reserve("p", key=1.5)  # type: ignore[arg-type]
    slot = buffer.reserve("p")
    with pytest.raises(ReservationError, match="within `async with slot:`"):
        await slot.commit(rows(1))
    async with slot:
        with pytest.raises(CheckpointError, match="partial"):
            slot.partial = object()
        assert slot.partial is None
        await slot.commit(rows(1))


async def test_any_storage() -> None:
    buffer = buffer_of(ListStorage(8), batch_size=2)
    async with buffer.reserve("p") as slot:
        assert await slot.commit(["a", "b"])
    members = await buffer.reserve_group("p", 2)
    for member in reversed(members):
        async with member:
            assert await member.commit([f"of {member.member}"])
    async with buffer:
        assert sorted((await buffer.sample(4)).indices.tolist())
    assert buffer._storage.gather(torch.arange(4)) == ["a", "b", "of 0", "of 1"]


def forged(good: dict[str, Any]) -> list[dict[str, Any]]:
    """Of two open ones that stand alone and a group of two, of which one has items."""
    assert good["number"].tolist() == [0, 1, 2, 3]
    column = torch.tensor
    return [
        {**good, "made": 3},
        {**good, "made": 5},
        {**good, "committed": 1},
        {**good, "given_up": {"failed": 1}},
        {**good, "given_up": {3: 1}},
        {**good, "number": column([0, 2, 1, 3])},
        {**good, "number": column([0, 1, 2])},
        {**good, "number": column([0.0, 1, 2, 3])},
        {**good, "group": column([-1, -1, 3, 3])},
        {**good, "group": column([-1, 2, 2, 2])},
        {**good, "group": column([-1, -1, -1, -1])},
        {**good, "status": column([0, 0, 0, 0])},
        {**good, "status": column([0, 0, 1, 1])},
        {**good, "status": column([0, 0, 1, 4])},
        {**good, "status": column([2, 0, 1, 0])},
        {**good, "status": column([0, 0, 1, 2])},
        {**good, "most": column([0, -1, 0, 0])},
        {**good, "most": column([0, 0, 0])},
        {**good, "most": column([0, 0, 1, 2])},
        {**good, "payload": [torch.zeros(3)]},
        {**good, "partial": [torch.zeros(3, dtype=torch.uint8), column([1, 1, 1])]},
        {**good, "partial": [torch.zeros(3, dtype=torch.uint8), column([4, -1, 0, 0])]},
        {**good, "groups": []},
        {**good, "groups": [torch.zeros(3, dtype=torch.uint8), column([3])]},
        {},
    ]


async def test_forged_states_are_refused() -> None:
    source = buffer_of()
    for _ in range(2):
        with pytest.raises(asyncio.CancelledError):
            await leave(source.reserve("alone"), asyncio.CancelledError())
    members = await source.reserve_group("g", 2)
    async with members[0] as member:
        await member.commit(rows(1))
    state = await source.state_dict()
    target = buffer_of()
    await target.load_state_dict(state)
    await target.load_state_dict(await target.state_dict())
    for wrong in forged(state["reservations"]):
        before = books(target)
        with pytest.raises(CheckpointError):
            await target.load_state_dict({**state, "reservations": wrong})
        assert books(target) == before
    nonsense = {**state["reservations"], "payload": [torch.zeros(8, dtype=torch.uint8), torch.tensor([8, 0, 0, 0])]}
    await target.load_state_dict({**state, "reservations": nonsense})
    for slot in target.unfinished():  # what is within is read when it is asked for
        with pytest.raises(CheckpointError):
            print(slot.payload)


async def test_work_goes_on_where_a_restore_is_refused() -> None:
    async with buffer_of(limiter=AtMostUnread(8)) as buffer:
        state = await buffer.state_dict()
        wrong = {**state, "ledger": {**state["ledger"], "overwritten": 5}}
        members = await buffer.reserve_group("prompt", 2)
        async with buffer.reserve("alone", items=4) as slot, members[0] as member:
            with pytest.raises(CheckpointError):
                await buffer.load_state_dict(wrong)
            assert slot.is_open
            slot.partial = "something"
            assert await slot.commit(rows(4))
            assert await member.commit(rows(1, 4))
        async with members[1] as member:
            assert await member.commit(rows(1, 5))
        assert len(buffer) == 6
        assert books(buffer) == (3, 3, 0, {})
        async with buffer.reserve("again") as slot:
            await buffer.load_state_dict(state)
            with pytest.raises(ReservationError):
                await slot.commit(rows(1))
