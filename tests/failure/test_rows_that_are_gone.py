"""A ticket whose gather failed, and whose rows are removed before the second try: it says so, until it is dropped."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import Draw, ListStorage, PrefetchError, RandomSampler, ReplayBuffer, TensorStorage
from tests.helpers import Crew, rows, seeded, turns, within

if TYPE_CHECKING:
    from asyncbuf import Rows

ITEMS = 12


class Unreadable(TensorStorage):
    """Fails to gather as long as it is told to."""

    failing = True

    def gather(self, indices: torch.Tensor) -> Any:
        if self.failing:
            raise OSError("gather")
        return super().gather(indices)


class UnreadableList(ListStorage):
    """The same with objects."""

    failing = True

    def gather(self, indices: torch.Tensor) -> Any:
        if self.failing:
            raise OSError("gather")
        return super().gather(indices)


class Joining(RandomSampler):
    """Rows with others beside them."""

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        draw = super().draw(rows, batch_size, generator)
        return draw._replace(joins={"last": torch.full((batch_size,), ITEMS - 1)})

    def combine(self, draw: Draw, data: Any, joined: Any) -> Any:
        return data


def items_for(storage: Any, count: int) -> Any:
    return [{"number": i} for i in range(count)] if isinstance(storage, ListStorage) else rows(count)


async def failed(kind: Any, depth: int, **options: Any) -> tuple[ReplayBuffer, Any]:
    """An open buffer whose first ticket could not be gathered, and its storage."""
    storage = kind(ITEMS)
    buffer = ReplayBuffer(storage, batch_size=4, prefetch=depth, generator=seeded(), **options)
    await buffer.open()
    await buffer.extend(items_for(storage, ITEMS))
    with pytest.raises(PrefetchError, match="gather"):
        await within(buffer.sample())
    storage.failing = False
    return buffer, storage


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("kind", [Unreadable, UnreadableList])
async def test_removed_rows(kind: Any, depth: int) -> None:
    buffer, _ = await failed(kind, depth)
    async with contextlib.aclosing(buffer):
        await buffer.remove(torch.arange(8))
        for _ in range(2):
            with pytest.raises(
                PrefetchError, match=r"batch 0 .*expected items in its rows, found none in \d"
            ) as caught:
                await within(buffer.sample())
            assert isinstance(caught.value.__cause__, LookupError)
        assert await within(buffer.skip()) == 0
        for _ in range(depth):
            await within(buffer.skip())  # drawn from the same rows, and failed as well
        await within(buffer.sample())


async def test_rows_that_were_not_removed_are_gathered_again() -> None:
    buffer, _ = await failed(Unreadable, 0)
    async with contextlib.aclosing(buffer):
        state = await buffer.state_dict()
        indices = state["prefetch"]["queue"][0]["content"]["indices"]
        others = sorted(set(range(ITEMS)) - set(indices.tolist()))
        await buffer.remove(others)
        batch = await within(buffer.sample())
        assert batch.number == 0
        assert torch.equal(batch.indices, indices)


async def test_rows_of_joins() -> None:
    buffer, _ = await failed(Unreadable, 0, sampler=Joining())
    async with contextlib.aclosing(buffer):
        await buffer.remove([ITEMS - 1])
        with pytest.raises(PrefetchError, match="found none in"):
            await within(buffer.sample())
        await within(buffer.skip())


@pytest.mark.parametrize("depth", [0, 2])
async def test_empty_drops_it_if_nobody_waits(depth: int) -> None:
    buffer, _ = await failed(Unreadable, depth)
    async with contextlib.aclosing(buffer):
        await buffer.empty()
        assert buffer.stats().queued == 0
        await buffer.extend(rows(ITEMS))
        assert (await within(buffer.sample())).number == depth + 1


async def test_empty_while_a_call_waits_for_it() -> None:
    """The call is answered, with an error: its turn was before the rows were gone, and they were not read by then."""
    storage = Unreadable(ITEMS)
    async with ReplayBuffer(storage, batch_size=4, generator=seeded()) as buffer, Crew() as crew:
        await buffer.extend(rows(ITEMS))
        async with buffer.frozen():
            pass
        with pytest.raises(PrefetchError):
            await within(buffer.sample())
        freeze = await buffer.freeze()
        waiting = [crew.start(call) for call in (outside(buffer.sample), outside(buffer.empty))]
        await turns()
        storage.failing = False
        freeze.release()
        emptied = waiting[1]
        await within(emptied)
        done, _ = await asyncio.wait({waiting[0]}, timeout=20)
        assert done
        assert isinstance(waiting[0].exception(), PrefetchError) or waiting[0].result().number == 0
        await buffer.flush()
        await buffer.extend(rows(ITEMS))
        while buffer.stats().queued:
            await buffer.skip()
        await within(buffer.sample())


async def outside(call: Any) -> Any:
    return await asyncio.create_task(call(), context=contextvars.Context())


async def test_a_checkpoint_keeps_it_and_what_is_missing() -> None:
    buffer, _ = await failed(Unreadable, 0)
    async with contextlib.aclosing(buffer):
        await buffer.remove(torch.arange(ITEMS))
        snapshot = await buffer.snapshot()
    target = ReplayBuffer(TensorStorage(ITEMS), batch_size=4, generator=seeded(1))
    await target.load_state_dict({**snapshot.state_dict(), "config": {**(await target.state_dict())["config"]}})
    async with target:
        with pytest.raises(PrefetchError, match="found none in"):
            await within(target.sample())
        await within(target.skip())
        await target.extend(rows(4))
        await within(target.sample())
