"""Groups of reservations: visible as a whole, in the order of the members, with those that are left."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import ReplayBuffer, ReservationError, SchemaError, Slot
from tests.helpers import Crew, outcomes, rows, turns
from tests.ingest.test_reservations import books, buffer_of, leave, stored
from tests.resume_helpers import restored, saved
from tests.snapshot.helpers import every_way
from tests.virtual_clock import pass_by, run_virtually

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path


async def commit(slot: Slot, number: int | None = None) -> bool:
    async with slot:
        assert slot.member is not None
        is_taken = await slot.commit(rows(1, slot.member if number is None else number))
    return is_taken


async def fail(slot: Slot) -> None:
    with pytest.raises(ValueError, match="no answer"):
        await leave(slot, ValueError("no answer"))


async def test_visible_when_complete_in_the_order_of_the_members() -> None:
    buffer = buffer_of()
    slots = await buffer.reserve_group({"prompt": 1}, 4, key="g")
    assert [slot.payload for slot in slots] == [{"prompt": 1}] * 4
    for member in (2, 0, 3):
        assert await commit(slots[member])
        assert not len(buffer)
        with pytest.raises(ReservationError):
            await commit(slots[member])
    assert books(buffer) == (4, 0, 4, {})
    assert await commit(slots[1])
    assert stored(buffer) == [0, 1, 2, 3]
    assert books(buffer) == (4, 4, 0, {})
    assert not await buffer.extend(rows(1), key="g")


async def test_what_was_committed_is_a_copy() -> None:
    buffer = buffer_of()
    slots = await buffer.reserve_group("p", 2)
    items = rows(1, 7)
    async with slots[0] as slot:
        await slot.commit(items)
        items["number"].fill_(-1)
    await commit(slots[1], 8)
    assert stored(buffer) == [7, 8]


@pytest.mark.parametrize(
    ("least", "ends", "expected"),
    [
        (4, "cccc", [0, 1, 2, 3]),
        (4, "cccf", None),
        (4, "f", None),
        (3, "cccf", [0, 1, 2]),
        (3, "fccc", [1, 2, 3]),
        (3, "fcf", None),
        (1, "ffcf", [2]),
        (1, "ffff", None),
        (2, "cffc", [0, 3]),
    ],
)
async def test_the_least_number(least: int, ends: str, expected: list[int] | None) -> None:
    buffer = buffer_of()
    slots = await buffer.reserve_group("p", 4, least=least, key="k")
    for slot, end in zip(slots, ends, strict=False):
        await (commit(slot) if end == "c" else fail(slot))
        made, _, is_open, _ = books(buffer)
        assert made == 4
        assert is_open in (0, 4) or expected is not None
    failed = ends.count("f")
    if expected is None:
        assert books(buffer) == (4, 0, 0, {"failed": failed} | ({"group": 4 - failed} if failed < 4 else {}))
        assert not len(buffer)
        assert await buffer.extend(rows(1), key="k")  # the key stays unused
        for slot in slots:
            with pytest.raises(ReservationError):
                await commit(slot)
    else:
        assert stored(buffer) == expected
        assert books(buffer) == (4, len(expected), 0, {"failed": failed} if failed else {})


async def test_too_few_are_left_and_the_others_stop() -> None:
    async with buffer_of() as buffer, Crew() as crew:
        slots = await buffer.reserve_group("p", 3)
        ended = []

        async def hang(slot: Slot) -> None:
            async with slot:
                await asyncio.Event().wait()
            ended.append(slot.member)

        tasks = [crew.start(hang(slot)) for slot in slots[1:]]
        await turns()
        await fail(slots[0])
        await outcomes(*tasks)
        assert ended == [1, 2]
        assert books(buffer) == (3, 0, 0, {"failed": 1, "group": 2})


async def test_a_group_whose_key_was_written() -> None:
    buffer = buffer_of()
    slots = await buffer.reserve_group("p", 2, key="k")
    await commit(slots[0])
    assert await buffer.extend(rows(1, 9), key="k")
    assert not await commit(slots[1])
    assert stored(buffer) == [9]
    assert books(buffer) == (2, 0, 0, {"duplicate": 2})


async def test_items_that_do_not_fit() -> None:
    buffer = buffer_of()
    await buffer.extend(rows(1))
    slots = await buffer.reserve_group("p", 2)
    async with slots[0] as slot:
        with pytest.raises(SchemaError):
            await slot.commit({"other": torch.zeros(1)})
        with pytest.raises(ValueError, match="neither priority nor table"):
            await slot.commit(rows(1), priority=1.0)
        await slot.commit(rows(1))
    await commit(slots[1])
    assert len(buffer) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "size: expected at least 1"),
        ({"size": 2.0}, "size: expected an int"),
        ({"size": 2, "least": 3}, "least: expected at most 2"),
        ({"size": 2, "least": 0}, "least: expected at least 1"),
        ({"size": 2, "deadline": 0}, "deadline: expected a positive"),
        ({"size": 2, "deadline": "x"}, "deadline: expected a number"),
        ({"size": 2, "key": 1.0}, "key: expected"),
    ],
    ids=str,
)
async def test_odd_arguments(arguments: dict[str, Any], message: str) -> None:
    buffer = buffer_of()
    with pytest.raises((TypeError, ValueError), match=message):
        await buffer.reserve_group("p", **arguments)
    assert books(buffer) == (0, 0, 0, {})


@every_way
async def test_after_a_restore_only_the_others_are_unfinished(way: str, tmp_path: Path) -> None:
    source = buffer_of()
    slots = await source.reserve_group("p", 4, key="k", least=2)
    await commit(slots[3])
    await fail(slots[1])
    with pytest.raises(asyncio.CancelledError):
        await leave(slots[0], asyncio.CancelledError(), "half")
    what = await saved(way, source, tmp_path)
    target = await restored(way, what, buffer_of())
    left = target.unfinished()
    assert [(slot.member, slot.partial, slot.key) for slot in left] == [(0, "half", "k"), (2, None, "k")]
    for slot in reversed(left):
        assert await commit(slot)
    assert stored(target) == [0, 2, 3]
    assert books(target) == (4, 3, 0, {"failed": 1})
    assert not await target.extend(rows(1), key="k")


# -- deadlines -------------------------------------------------------------------------------------------------------


def in_virtual_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        run_virtually(test(), has_threads=False)

    run.__name__ = test.__name__
    return run


@in_virtual_time
async def test_late_members_are_left_out() -> None:
    async with buffer_of() as buffer, Crew() as crew:
        slots = await buffer.reserve_group("p", 4, least=2, deadline=10.0)

        async def work(slot: Slot, seconds: float) -> bool:
            async with slot:
                await pass_by(seconds)
                await slot.commit(rows(1, slot.member or 0))
                return True
            return False

        tasks = [crew.start(work(slot, seconds)) for slot, seconds in zip(slots, (1, 60, 3, 90), strict=True)]
        await pass_by(9)
        assert not len(buffer)
        assert await outcomes(*tasks) == [True, False, True, False]
        assert asyncio.get_running_loop().time() == 10
        assert stored(buffer) == [0, 2]
        assert books(buffer) == (4, 2, 0, {"late": 2})


@in_virtual_time
async def test_too_late_for_too_many() -> None:
    async with buffer_of() as buffer:
        slots = await buffer.reserve_group("p", 3, deadline=5)

        async def hang(slot: Slot) -> None:
            async with slot:
                await pass_by(100)

        await commit(slots[1])
        await asyncio.gather(hang(slots[0]), hang(slots[2]))
        assert asyncio.get_running_loop().time() == 5
        assert books(buffer)[:3] == (3, 0, 0)
        assert not len(buffer)


@in_virtual_time
async def test_nobody_works_on_the_last_member() -> None:
    async with buffer_of() as buffer:
        slots = await buffer.reserve_group("p", 3, least=1, deadline=5)
        await commit(slots[0])
        async with slots[1] as slot:
            await pass_by(4)
            await slot.commit(rows(1, 1))
            await pass_by(3)  # committed in time: the block may go on
        assert not len(buffer)  # the third may still begin
        async with slots[2]:
            await pass_by(3)
        assert stored(buffer) == [0, 1]
        assert books(buffer) == (3, 2, 0, {"late": 1})


@in_virtual_time
async def test_a_cancellation_is_none_of_a_deadline() -> None:
    async with buffer_of() as buffer, Crew() as crew:
        slots = await buffer.reserve_group("p", 2, least=1, deadline=5)

        async def hang(slot: Slot) -> None:
            async with slot:
                await pass_by(100)

        task = crew.start(hang(slots[0]))
        await pass_by(1)
        task.cancel()
        assert isinstance((await outcomes(task))[0], asyncio.CancelledError)
        assert [slot.member for slot in buffer.unfinished()] == [0]
        await pass_by(10)
        with pytest.raises(ValueError, match="x"):
            await leave(slots[1], ValueError("x"))
        assert books(buffer)[2] == 0


@in_virtual_time
async def test_the_time_begins_anew_after_a_restore() -> None:
    source = buffer_of()
    slots = await source.reserve_group("p", 2, least=1, deadline=10)
    await commit(slots[0])
    await pass_by(50)
    state = await source.state_dict()
    target = buffer_of()
    await target.load_state_dict(state)
    (slot,) = target.unfinished()
    async with slot:
        await pass_by(9)
        assert await slot.commit(rows(1, 1))
    assert stored(target) == [0, 1]


@in_virtual_time
async def test_random_groups_close_their_books() -> None:
    """Members that commit, fail, hang or are cancelled, with restores in between: whole groups, each once."""
    chance = random.Random(1)
    buffer = buffer_of(key_window=10_000)
    written: Counter[int] = Counter()

    async def work(slot: Slot) -> None:
        async with slot:
            await pass_by(chance.choice((0.1, 1, 5, 30)))
            slot.partial = chance.random()
            if chance.random() < 0.15:
                raise ValueError("failed")
            group = slot.payload
            await slot.commit({"number": torch.tensor([8 * group + (slot.member or 0)])})

    async def drain(buffer: ReplayBuffer) -> None:
        if len(buffer):
            found = stored(buffer)
            for group in {number // 8 for number in found}:
                members = [number % 8 for number in found if number // 8 == group]
                assert members == sorted(set(members))
                assert len(members) >= 4
                written[group] += 1
            await buffer.empty()

    made = 0
    for _ in range(30):
        async with Crew() as crew:
            slots = buffer.unfinished()
            for _ in range(3):
                slots += await buffer.reserve_group(made, 6, key=made, least=4, deadline=20)
                made += 1
            for slot in slots:
                crew.start(work(slot))
            await pass_by(chance.choice((0.5, 3, 25)))
        await turns()
        ledger = buffer.stats().ledger
        assert ledger.closes, ledger
        await drain(buffer)
        if chance.random() < 0.5:
            state = await buffer.state_dict()
            buffer = buffer_of(key_window=10_000)
            await buffer.load_state_dict(state)
    async with Crew() as crew:
        for slot in buffer.unfinished():
            crew.start(work(slot))
        await pass_by(100)
    await drain(buffer)
    ledger = buffer.stats().ledger
    assert ledger.closes, ledger
    assert max(written.values()) == 1
    assert set(ledger.given_up) == {"failed", "late", "group"}


# -- the lengths of rollouts -----------------------------------------------------------------------------------------


def length_of(prompt: int) -> int:
    """Tokens of the answer to a prompt: heavy-tailed."""
    return 1 + int(10 * np.random.default_rng(prompt).pareto(1.3))


class Run:
    """Rollouts of 64 actors, killed again and again, and resumed from the last checkpoint.

    Args:
        rollouts: how many are to finish.
        forgets: whether what is in flight is lost at a restart, as without reservations.
    """

    def __init__(self, rollouts: int, *, forgets: bool = False) -> None:
        self.rollouts = rollouts
        self.forgets = forgets
        self.buffer = buffer_of()
        self.following = 0
        self.lengths: list[int] = []
        self.is_over = asyncio.Event()

    async def work(self, slot: Slot) -> None:
        async with slot:
            done = slot.partial or 0
            length = length_of(slot.payload)
            while done < length:
                step = min(16, length - done)
                await pass_by(step)
                done += step
                slot.partial = done
            await slot.commit(rows(1))
            self.lengths.append(length)
            if len(self.lengths) == self.rollouts:
                self.is_over.set()

    async def actor(self, mine: list[Slot]) -> None:
        while True:
            if not mine:
                self.following += 1
                mine.append(self.buffer.reserve(self.following))
            await self.work(mine.pop())

    async def until_killed(self, chance: random.Random | None) -> None:
        """A checkpoint, and a kill some time later."""
        async with Crew() as crew:
            left = [] if self.forgets else self.buffer.unfinished()
            for start in range(64):
                crew.start(self.actor(left[start::64]))
            if chance is None:
                await self.is_over.wait()
                return
            await pass_by(chance.expovariate(1 / 60))
            state = await self.buffer.state_dict()
            following, lengths = self.following, list(self.lengths)
            await pass_by(chance.expovariate(1 / 20))
        self.buffer, self.following, self.lengths = buffer_of(), following, lengths
        await self.buffer.load_state_dict(state)
        assert self.buffer.stats().ledger.closes


async def finished_lengths(rollouts: int, chance: random.Random | None = None, *, forgets: bool = False) -> list[int]:
    run = Run(rollouts, forgets=forgets)
    while len(run.lengths) < rollouts:
        await run.until_killed(chance)
    return run.lengths[:rollouts]


def distance(first: list[int], second: list[int]) -> float:
    """Kolmogorov and Smirnov: the largest difference of the two distributions, times the root of the number."""
    both = np.sort(np.concatenate([first, second]))
    parts = [np.searchsorted(np.sort(each), both, side="right") / len(each) for each in (first, second)]
    return float(np.abs(parts[0] - parts[1]).max() * (len(first) * len(second) / (len(first) + len(second))) ** 0.5)


def test_kills_do_not_bias_the_lengths_of_rollouts() -> None:
    rollouts = 10_000
    whole = run_virtually(finished_lengths(rollouts), has_threads=False)
    killed = run_virtually(finished_lengths(rollouts, random.Random(5)), has_threads=False)
    assert distance(whole, killed) < 1.63  # exceeded by chance in 1 % of cases
    lost = run_virtually(finished_lengths(rollouts, random.Random(5), forgets=True), has_threads=False)
    assert distance(whole, lost) > 2.5  # what this is there for
