"""Items are removed: by batch or by row, out of passes and objects, and their rows are used again."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch

from asyncbuf import (
    AsyncBufError,
    BufferFailedError,
    Draw,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    Rows,
    SamplerWithoutReplacement,
    TensorStorage,
)
from asyncbuf.testing import assert_exact_resume
from tests.helpers import Crew, Stop, ThreadedStorage, numbers, outcomes, rows, seeded, turns, within

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncbuf import Batch, Sampler


def made(capacity: int = 20, **options: Any) -> ReplayBuffer:
    options.setdefault("batch_size", 4)
    storage = options.pop("storage", None) or TensorStorage(capacity)
    return ReplayBuffer(storage, generator=seeded(), **options)


async def contents(buffer: ReplayBuffer) -> set[int]:
    """The numbers of the items that there are, as draws find them."""
    batch = await within(buffer.sample(400))
    return set(numbers(batch))


async def test_removed_items_are_not_drawn_again() -> None:
    async with made() as buffer:
        await buffer.extend(rows(10))
        assert await buffer.remove([2, 3, 9]) == 3
        assert len(buffer) == 7
        assert await contents(buffer) == {0, 1, 4, 5, 6, 7, 8}


async def test_free_rows_are_taken_first() -> None:
    async with made(10) as buffer:
        await buffer.extend(rows(6))
        await buffer.remove([4])
        await buffer.remove([1, 2])
        assert (await buffer.extend(rows(1, 6))).tolist() == [4]
        assert (await buffer.extend(rows(4, 7))).tolist() == [1, 2, 6, 7]
        assert (await buffer.extend(rows(3, 11))).tolist() == [0, 8, 9]  # now full: the oldest makes room
        assert (len(buffer), buffer.write_count) == (10, 14)
        assert await contents(buffer) == {3, 5, *range(6, 14)}


async def test_of_a_batch_what_was_replaced_stays() -> None:
    async with made(8, batch_size=8, sampler=SamplerWithoutReplacement(shuffle=False)) as buffer:
        await buffer.extend(rows(8))
        batch = await buffer.sample()
        await buffer.extend(rows(3, 8))  # rows 0, 1, 2
        assert await buffer.remove(batch) == 5
        assert set(numbers(await within(buffer.sample()))) == {8, 9, 10}
        assert await buffer.remove(batch) == 0


async def test_the_indices_of_a_batch_are_as_good_as_the_batch() -> None:
    async with made(8, batch_size=8, sampler=SamplerWithoutReplacement(shuffle=False)) as buffer:
        await buffer.extend(rows(8))
        batch = await buffer.sample()
        await buffer.extend(rows(3, 8))
        assert await buffer.remove(batch.indices) == 5


async def test_duplicates_and_free_rows_count_once_and_not_at_all() -> None:
    buffer = made()
    await buffer.extend(rows(10))
    assert await buffer.remove([1, 1, 2, 1]) == 2
    assert await buffer.remove(torch.tensor([1, 3, 3])) == 1
    assert await buffer.remove([15]) == 0  # never written
    assert await buffer.remove([]) == 0
    assert await buffer.remove(torch.tensor(4)) == 1
    assert len(buffer) == 6


@pytest.mark.parametrize(
    ("which", "kind", "message"),
    [
        ([20], IndexError, r"remove: expected rows 0 to 19, found 20 to 20"),
        ([-1], IndexError, r"found -1 to -1"),
        ([1.0], TypeError, r"remove: expected integers, found torch.float32"),
        (torch.tensor([True]), TypeError, r"remove: expected integers, found torch.bool .mask.nonzero"),
        ([True, False], TypeError, r"expected integers, found torch.bool"),
        ({"a": 1}, TypeError, r"remove: expected a batch, or rows as integers, found {a: int}"),
        (None, TypeError, r"remove: expected a batch, or rows as integers, found None"),
    ],
)
async def test_what_is_no_row(which: Any, kind: type[Exception], message: str) -> None:
    buffer = made()
    await buffer.extend(rows(10))
    with pytest.raises(kind, match=message):
        await buffer.remove(which)
    assert len(buffer) == 10


async def test_a_removal_waits_for_gathers_of_earlier_draws() -> None:
    stop = Stop()
    storage = ThreadedStorage(20)
    async with made(storage=storage) as buffer, Crew() as crew:
        await buffer.extend(rows(10))
        storage.on_gather = stop
        reader = crew.start(buffer.sample())
        await stop.come.reached()
        removal = crew.start(buffer.remove(list(range(10))))
        await turns()
        assert not removal.done()
        stop.go.set()
        assert len(await within(reader)) == 4
        assert await within(removal) == 10
        assert len(buffer) == 0


async def test_a_cancelled_removal_has_removed_nothing() -> None:
    stop = Stop()
    storage = ThreadedStorage(20)
    async with made(storage=storage) as buffer, Crew() as crew:
        await buffer.extend(rows(10))
        storage.on_gather = stop
        reader = crew.start(buffer.sample())
        await stop.come.reached()
        removal = crew.start(buffer.remove([0]))
        await turns()
        removal.cancel()
        await outcomes(removal)
        stop.go.set()
        await within(reader)
        assert len(buffer) == 10


async def test_prefetched_batches_still_have_removed_items() -> None:
    async with made(prefetch=2) as buffer:
        await buffer.extend(rows(10))
        await buffer.sample()
        await buffer.remove(list(range(10)))
        assert set(numbers(await within(buffer.sample()))) <= set(range(10))
        assert buffer.stats().queued == 1


async def test_consumers_wait_until_there_is_something_again() -> None:
    async with made() as buffer, Crew() as crew:
        await buffer.extend(rows(3))
        await buffer.remove([0, 1, 2])
        reader = crew.start(buffer.sample())
        await turns()
        assert not reader.done()
        assert "0 of at least 1 items are stored" in buffer.why_blocked()
        await buffer.extend(rows(1, 3))
        assert set(numbers(await within(reader))) == {3}


async def test_emptying_begins_a_plain_ring_again() -> None:
    buffer = made(10)
    await buffer.extend(rows(7))
    await buffer.remove([0, 5])
    await buffer.empty()
    assert (await buffer.extend(rows(4))).tolist() == [0, 1, 2, 3]
    state = await buffer.state_dict()
    assert state["writer"] == {"cursor": 4, "size": 4, "write_count": 11}
    assert state["rows"] == {"valid": None, "numbers": None}


# -- objects ----------------------------------------------------------------------------------------------------------


class Thing:
    """An object that can be watched."""


async def test_a_removed_object_dies() -> None:
    things = [Thing() for _ in range(4)]
    refs = [weakref.ref(thing) for thing in things]
    async with ReplayBuffer(ListStorage(10), collate_fn=list, batch_size=1) as buffer:
        await buffer.extend(things)
        things.clear()
        await buffer.remove([1, 3])
        gc.collect()
        assert [ref() is None for ref in refs] == [False, True, False, True]
        assert {id(item) for item in (await buffer.sample(50)).data} == {id(refs[0]()), id(refs[2]())}


async def test_objects_take_free_rows() -> None:
    buffer = ReplayBuffer(ListStorage(4), collate_fn=list, sampler=SamplerWithoutReplacement(shuffle=False))
    await buffer.extend(["a", "b", "c"])
    await buffer.remove([1])
    assert await buffer.add("d") == 1
    snapshot = await buffer.snapshot()
    other = ReplayBuffer(ListStorage(4), collate_fn=list, sampler=SamplerWithoutReplacement(shuffle=False))
    await other.restore(snapshot)
    async with other:
        assert (await other.sample(3)).data == ["a", "d", "c"]


async def test_a_snapshot_of_freed_rows() -> None:
    buffer = ReplayBuffer(ListStorage(4), collate_fn=list)
    await buffer.extend(["a", "b", "c"])
    await buffer.remove([2, 0])
    other = ReplayBuffer(ListStorage(4), collate_fn=list)
    await other.load_state_dict(await buffer.state_dict())
    async with other:
        assert set((await other.sample(20)).data) == {"b"}
        assert await other.extend(["d", "e"]) is not None
        assert set((await other.sample(60)).data) == {"b", "d", "e"}


# -- passes -----------------------------------------------------------------------------------------------------------


async def test_a_pass_goes_on_without_what_was_removed() -> None:
    async with made(20, sampler=SamplerWithoutReplacement(shuffle=False)) as buffer:
        await buffer.extend(rows(10))
        first = await buffer.sample()
        await buffer.remove([1, 5, 8])
        await buffer.extend(rows(3, 10))  # in the rows of those: in the next pass
        second = await buffer.sample()
        assert (numbers(first), numbers(second)) == ([0, 1, 2, 3], [4, 6, 7, 9])
        assert second.last
        assert sorted(numbers(await buffer.sample(10))) == [0, 2, 3, 4, 6, 7, 9, 10, 11, 12]


async def test_a_pass_that_loses_all_that_is_left_ends() -> None:
    async with made(20, sampler=SamplerWithoutReplacement(shuffle=False)) as buffer, Crew() as crew:
        await buffer.extend(rows(6))
        stream = buffer.epoch()
        assert numbers(await anext(stream)) == [0, 1, 2, 3]
        await buffer.remove([4, 5])

        async def rest() -> list[Batch]:
            return [batch async for batch in stream]

        assert await within(crew.start(rest())) == []
        assert (await within(buffer.sample())).epoch == 1


# -- samplers that remove ----------------------------------------------------------------------------------------------


class Consuming(SamplerWithoutReplacement):
    """Each item is handed over once, and leaves then."""

    def handed_over(self, draw: Draw) -> torch.Tensor | None:
        return draw.indices


@pytest.mark.parametrize("prefetch", [0, 2])
async def test_rows_leave_when_they_are_handed_over(prefetch: int) -> None:
    async with made(20, sampler=Consuming(shuffle=False), prefetch=prefetch) as buffer:
        await buffer.extend(rows(10))
        found: list[int] = []
        for _ in range(2):
            found += numbers(await within(buffer.sample()))
        await turns()
        assert len(buffer) == 2
        await buffer.extend(rows(16, 10))
        assert len(buffer) == 18
        while len(found) < 26:
            found += numbers(await within(buffer.sample()))
        assert sorted(found) == list(range(26))
        await turns()
        assert len(buffer) == 0


async def test_of_rows_that_leave_later_those_that_were_replaced_stay() -> None:
    stop = Stop()

    def transform(data: Any) -> Any:
        stop()
        return data

    async with made(4, sampler=Consuming(shuffle=False), transform=transform) as buffer, Crew() as crew:
        await buffer.extend(rows(4))
        reader = crew.start(buffer.sample())
        await stop.come.reached()
        await buffer.extend(rows(3, 4))
        stop.go.set()
        assert numbers(await within(reader)) == [0, 1, 2, 3]
        await turns()
        assert len(buffer) == 3
        assert sorted(numbers(await within(buffer.sample()))) == [4, 5, 6]


async def test_a_sampler_that_fails_when_rows_leave_ends_the_work() -> None:
    class Deaf(RandomSampler):
        def removed(self, indices: torch.Tensor, rows: Rows) -> None:
            raise LookupError("deaf")

    async with made(sampler=Deaf()) as buffer:
        await buffer.extend(rows(10))
        with pytest.raises(AsyncBufError, match=r"rows were removed.*LookupError\('deaf'\)"):
            await buffer.remove([1])
        assert len(buffer) == 9
        with pytest.raises(BufferFailedError, match="deaf"):
            await buffer.sample()


async def test_a_sampler_is_told_which_rows_left() -> None:
    told: list[tuple[list[int], int]] = []

    class Told(RandomSampler):
        def removed(self, indices: torch.Tensor, rows: Rows) -> None:
            told.append((indices.tolist(), rows.size))

    buffer = made(sampler=Told())
    await buffer.extend(rows(10))
    await buffer.remove([7, 2, 7])
    await buffer.remove([2])
    await buffer.remove([2, 3])
    assert told == [([7, 2], 8), ([3], 7)]


async def test_a_sampler_that_draws_a_removed_row() -> None:
    class Stubborn(RandomSampler):
        def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
            return Draw(torch.tensor([0, 3]))

    async with made(sampler=Stubborn()) as buffer:
        await buffer.extend(rows(10))
        await buffer.sample()
        await buffer.remove([3])
        with pytest.raises(IndexError, match=r"Stubborn.draw: expected valid rows.*found \[3\]"):
            await buffer.sample()


# -- resume -----------------------------------------------------------------------------------------------------------

SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "random": RandomSampler,
    "passes": SamplerWithoutReplacement,
    "whole passes": lambda: SamplerWithoutReplacement(drop_last=True),
    "in order": lambda: SamplerWithoutReplacement(shuffle=False),
}


async def feed(buffer: ReplayBuffer, step: int, batch: Batch) -> None:
    """Removes, writes and updates, as step and batch say."""
    if step % 2:
        await buffer.remove(batch)
    else:
        await buffer.remove(batch.indices[:2])
    await buffer.extend(rows(2 + step % 3, 100 + 10 * step))
    await buffer.update_priority(batch, 1.0)


@pytest.mark.parametrize(
    ("sampler", "prefetch"), [("random", 3), ("passes", 0), ("passes", 3), ("whole passes", 3), ("in order", 0)]
)
@pytest.mark.parametrize(
    "at", [[1, 4], pytest.param("every", marks=pytest.mark.slow)], ids=["some-points", "every-point"]
)
async def test_what_was_removed_stays_removed_after_a_restore(
    sampler: str, prefetch: int, at: list[int] | Literal["every"]
) -> None:
    async def factory() -> ReplayBuffer:
        buffer = made(16, sampler=SAMPLERS[sampler](), prefetch=prefetch, batch_size=3)
        await buffer.extend(rows(14))
        return buffer

    await assert_exact_resume(factory, steps=6, at=at, feed=feed)


async def test_removals_among_writers_and_readers() -> None:
    """The books are right whoever comes first."""
    async with made(32, batch_size=2, prefetch=2) as buffer:
        removed = 0

        async def produce(start: int) -> None:
            for i in range(40):
                await buffer.extend(rows(2, start + 2 * i))

        async def consume() -> None:
            nonlocal removed
            while True:
                removed += await buffer.remove(await buffer.sample())

        async with Crew() as crew:
            readers = [crew.start(consume()) for _ in range(2)]
            await within(asyncio.gather(produce(0), produce(1000)))
            assert not any(reader.done() and reader.exception() for reader in readers)
        assert buffer.write_count == 160
        assert len(buffer) <= 32
        every = torch.arange(32)
        valid = buffer._table.rows.contains(every)
        assert int(valid.sum()) == len(buffer)
        assert removed > 0
