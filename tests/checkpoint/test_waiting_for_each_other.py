"""Calls that hold one buffer and want another: none waits for one that waits for it."""

from __future__ import annotations

import asyncio
import contextvars
from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import AsyncBufError, Checkpointer, ReplayBuffer, TensorStorage
from tests.helpers import Crew, Latch, rows, seeded, turns, within

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

Pair = tuple[ReplayBuffer, ReplayBuffer]


@pytest.fixture(params=["first", "last"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """Two open buffers. A save of both takes the first of the pair first, or the last."""
    made = [ReplayBuffer(TensorStorage(10), batch_size=2, prefetch=1, generator=seeded(i)) for i in range(2)]
    made.sort(key=id, reverse=request.param == "last")
    async with made[0], made[1]:
        for buffer in made:
            await buffer.extend(rows(10))
        yield made[0], made[1]


async def outside(call: Any) -> Any:
    """From a task that is within no freeze."""
    return await asyncio.create_task(call, context=contextvars.Context())


def kind(end: Any) -> str:
    if isinstance(end, AsyncBufError):
        assert "each would wait for the other" in str(end)
        return "refused"
    assert not isinstance(end, BaseException), end
    return "done"


async def ends(*tasks: asyncio.Task[Any]) -> list[str]:
    done, pending = await asyncio.wait(tasks, timeout=20)
    assert not pending, "they wait for each other"
    assert len(done) == len(tasks)
    return [kind(task.exception() or task.result()) for task in tasks]


@pytest.mark.parametrize("held", [0, 1])
@pytest.mark.parametrize("frozen_first", [True, False])
async def test_a_save_within_a_freeze_beside_another_save(
    pair: Pair, held: int, frozen_first: bool, tmp_path: Path
) -> None:
    """In whatever order they come, both end, and at most the one within the freeze is refused."""
    checkpointer = Checkpointer(tmp_path, keep=None)
    parts: dict[str, Any] = {"a": pair[0], "b": pair[1]}
    go = Latch()

    async def within_a_freeze() -> None:
        async with pair[held].frozen():
            if frozen_first:
                await go.reached()
            await checkpointer.save(1, **parts)

    async with Crew() as crew:
        if frozen_first:
            inner = crew.start(within_a_freeze(), contextvars.Context())
            await turns()
            outer = crew.start(checkpointer.save(2, **parts), contextvars.Context())
            await turns()
            go.set()
        else:
            outer = crew.start(checkpointer.save(2, **parts), contextvars.Context())
            inner = crew.start(within_a_freeze(), contextvars.Context())
        found = await ends(inner, outer)
        assert found[1] == "done"
        assert checkpointer.steps() in ([1, 2], [2])
        for buffer in pair:
            await within(buffer.sample())
            await within(buffer.extend(rows(3)))


async def test_one_waits_for_the_other_before_that_wants_the_first(tmp_path: Path) -> None:
    """The save holds one, and goes on to the other, whose holder waits for the one: it lets that go, and comes back."""
    come, go = Latch(), Latch()

    async def slow(data: Any) -> Any:
        come.set()
        await go.reached()
        return data

    def make() -> ReplayBuffer:
        return ReplayBuffer(TensorStorage(10), batch_size=2, prefetch=1, transform=slow, generator=seeded())

    taken_first, other = sorted([make(), make()], key=id)
    checkpointer = Checkpointer(tmp_path)
    async with taken_first, Crew() as crew:
        await taken_first.extend(rows(10))
        crew.start(taken_first.sample())
        await come.reached()
        outer = crew.start(checkpointer.save(2, a=taken_first, b=other), contextvars.Context())
        await turns()

        async def within_a_freeze() -> None:
            async with other.frozen():
                inside.set()
                await checkpointer.save(1, a=taken_first, b=other)

        inside = Latch()
        inner = crew.start(within_a_freeze(), contextvars.Context())
        await inside.reached()
        await turns()
        go.set()
        assert await ends(inner, outer) == ["done", "done"]
        assert checkpointer.steps() == [1, 2]


@pytest.mark.parametrize("call", ["snapshot", "freeze", "save", "checkpointer"])
async def test_two_that_are_within_freezes(pair: Pair, call: str, tmp_path: Path) -> None:
    """Each holds what the other wants: whoever asks last is told at once, and the other goes on."""
    both_hold = asyncio.Barrier(2)

    async def hold(own: ReplayBuffer, other: ReplayBuffer) -> None:
        async with own.frozen():
            async with both_hold:
                pass
            if call == "snapshot":
                await other.snapshot()
            elif call == "freeze":
                (await other.freeze()).release()
            elif call == "save":
                await other.save(tmp_path / "checkpoint")
            else:
                await Checkpointer(tmp_path / f"{id(own)}").save(1, a=own, b=other)

    async with Crew() as crew:
        tasks = [
            crew.start(hold(*buffers), contextvars.Context()) for buffers in ((pair[0], pair[1]), (pair[1], pair[0]))
        ]
        assert sorted(await ends(*tasks)) == ["done", "refused"]
    for buffer in pair:
        await within(buffer.sample())


async def test_three_in_a_ring() -> None:
    buffers = [ReplayBuffer(TensorStorage(10), batch_size=2, generator=seeded(i)) for i in range(3)]
    all_hold = asyncio.Barrier(3)

    async def hold(own: ReplayBuffer, other: ReplayBuffer) -> None:
        async with own.frozen():
            async with all_hold:
                pass
            await other.snapshot()

    async with Crew() as crew:
        tasks = [crew.start(hold(buffers[i], buffers[(i + 1) % 3]), contextvars.Context()) for i in range(3)]
        assert sorted(await ends(*tasks)) == ["done", "done", "refused"]


async def test_a_freeze_that_ends_by_itself_is_waited_for(pair: Pair) -> None:
    both_hold = asyncio.Barrier(2)

    async def hold(own: ReplayBuffer, other: ReplayBuffer, seconds: float | None) -> None:
        with await own.freeze(hold=seconds):
            async with both_hold:
                pass
            await other.snapshot()

    async with Crew() as crew:
        tasks = [
            crew.start(hold(pair[0], pair[1], None), contextvars.Context()),
            crew.start(hold(pair[1], pair[0], 0.05), contextvars.Context()),
        ]
        assert await ends(*tasks) == ["done", "done"]


async def test_a_save_from_within_a_transform_takes_no_turn(tmp_path: Path) -> None:
    """It would wait for a save that waits for the transform."""
    checkpointer = Checkpointer(tmp_path)
    come, go = Latch(), Latch()
    saved: list[Any] = []

    async def saving(data: Any) -> Any:
        come.set()
        await go.reached()
        saved.append(await checkpointer.save(1, n=1))
        return data

    buffer = ReplayBuffer(TensorStorage(10), batch_size=2, prefetch=1, transform=saving, generator=seeded())
    async with buffer, Crew() as crew:
        await buffer.extend(rows(10))
        sampling = crew.start(buffer.sample())
        await come.reached()
        saving_all = crew.start(checkpointer.save(2, buffer=buffer))
        await turns()
        go.set()
        assert await ends(sampling, saving_all) == ["done", "done"]
        assert saved
