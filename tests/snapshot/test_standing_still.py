"""Who is within a standstill, who waits for whom, and that nothing waits for itself or spins."""

from __future__ import annotations

import asyncio
import contextvars
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import AsyncBufError, BufferClosedError, BufferFailedError, Checkpointer, ReplayBuffer, Snapshot
from asyncbuf.testing import difference
from tests.helpers import (
    CountingTransform,
    Crew,
    Stop,
    ThreadedStorage,
    background_tasks,
    outcomes,
    turns,
    until,
    within,
)
from tests.resume_helpers import check_stream, items_of, late, take
from tests.snapshot.helpers import ITEMS, buffer_with, filled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path


async def in_task_group(call: Any) -> Any:
    async with asyncio.TaskGroup() as tasks:
        return await tasks.create_task(call)


async def gathered(call: Any) -> Any:
    return (await asyncio.gather(call, asyncio.sleep(0)))[0]


async def itself(call: Any) -> Any:
    return await call


# Each is a way to await a call within a block.
AWAITED: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "await": itself,
    "wait_for": lambda call: asyncio.wait_for(call, 60),
    "gather": gathered,
    "task group": in_task_group,
    "task": lambda call: asyncio.create_task(call),
    "task in a task": lambda call: asyncio.create_task(gathered(call)),
    "shield": asyncio.shield,
}

WORKS: dict[str, Callable[[ReplayBuffer, Path], Any]] = {
    "snapshot": lambda buffer, folder: buffer.snapshot(),
    "snapshot in time": lambda buffer, folder: buffer.snapshot(5),
    "state_dict": lambda buffer, folder: buffer.state_dict(),
    "save": lambda buffer, folder: buffer.save(folder / "it"),
    "Checkpointer.save": lambda buffer, folder: Checkpointer(folder).save(1, buffer=buffer, n=1),
}

REFUSED: dict[str, Callable[[ReplayBuffer, Snapshot], Any]] = {
    "sample": lambda buffer, snapshot: buffer.sample(),
    "sample of a size": lambda buffer, snapshot: buffer.sample(2),
    "stream": lambda buffer, snapshot: anext(aiter(buffer)),
    "extend": lambda buffer, snapshot: buffer.extend(items_of(2)),
    "add": lambda buffer, snapshot: buffer.add({name: leaf[0] for name, leaf in items_of(1).items()}),
    "remove": lambda buffer, snapshot: buffer.remove([0]),
    "empty": lambda buffer, snapshot: buffer.empty(),
    "update_priority": lambda buffer, snapshot: buffer.update_priority([0], 1.0),
    "finish": lambda buffer, snapshot: buffer.finish(),
    "skip": lambda buffer, snapshot: buffer.skip(),
    "flush": lambda buffer, snapshot: buffer.flush(),
    "restore": lambda buffer, snapshot: buffer.restore(snapshot),
    "prepare_restore": lambda buffer, snapshot: buffer.prepare_restore(snapshot),
    "load_state_dict": lambda buffer, snapshot: buffer.load_state_dict(snapshot.state_dict()),
    "load": lambda buffer, snapshot: buffer.load("nowhere"),
    "frozen": lambda buffer, snapshot: buffer.frozen().__aenter__(),
    "freeze": lambda buffer, snapshot: buffer.freeze(),
}


# -- who is within ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", WORKS)
@pytest.mark.parametrize("way", AWAITED)
async def test_what_works_within(way: str, call: str, tmp_path: Path) -> None:
    async with await filled() as buffer:
        await buffer.sample()
        before = await buffer.state_dict()
        async with asyncio.timeout(20), buffer.frozen():
            await AWAITED[way](WORKS[call](buffer, tmp_path))
            assert buffer.stats().queued == 2
            assert pickle.loads(pickle.dumps(buffer)).stats().queued == 2
            assert buffer.why_blocked() == "nobody waits"
        assert difference(await buffer.state_dict(), before) is None


@pytest.mark.parametrize("call", REFUSED)
@pytest.mark.parametrize("way", ["await", "wait_for", "gather", "task in a task"])
async def test_what_would_wait_for_the_end_says_so(way: str, call: str) -> None:
    async with await filled() as buffer:
        await buffer.sample()
        snapshot = await buffer.snapshot()
        async with asyncio.timeout(20), buffer.frozen():
            with pytest.raises(AsyncBufError, match="within frozen"):
                await AWAITED[way](REFUSED[call](buffer, snapshot))
            await buffer.snapshot()  # it still stands still
            assert buffer.current_freeze is not None
        assert buffer.current_freeze is None
        await take(buffer, 3)


async def test_a_second_half_of_a_restore_is_refused_within() -> None:
    async with await filled() as buffer:
        prepared = await buffer.prepare_restore(await buffer.snapshot())
        async with buffer.frozen():
            with pytest.raises(AsyncBufError, match="within frozen"):
                await prepared.apply()
        await within(prepared.apply())


async def test_a_task_that_outlives_the_block_is_outside() -> None:
    async with await filled() as buffer, Crew() as crew:
        is_over = asyncio.Event()

        async def child() -> int:
            with pytest.raises(AsyncBufError, match="frozen"):
                await buffer.sample()
            await is_over.wait()
            async with buffer.frozen():
                await buffer.snapshot()
            return (await buffer.sample()).number

        async with buffer.frozen():
            task = crew.start(child())
            await turns()
        is_over.set()
        assert await within(task) == 0


async def test_tasks_from_outside_wait() -> None:
    elsewhere = contextvars.copy_context()
    async with await filled() as buffer, Crew() as crew:
        await buffer.sample()
        snapshot = await buffer.snapshot()

        async def freeze_for_a_while() -> None:
            async with buffer.frozen():
                await buffer.snapshot()

        async with buffer.frozen():
            calls = (buffer.sample(), buffer.extend(items_of(1)), buffer.snapshot())
            others = [crew.start(call, elsewhere) for call in (*calls, freeze_for_a_while(), buffer.restore(snapshot))]
            await turns(100)
            assert not any(task.done() for task in others)
        assert not [end for end in await outcomes(*others) if isinstance(end, BaseException)]


async def test_a_block_within_the_block_of_another_buffer() -> None:
    async with await filled() as a, await filled(seed=1) as b:
        async with a.frozen(), b.frozen():
            for buffer in (a, b):
                await in_task_group(buffer.snapshot())
                with pytest.raises(AsyncBufError, match="frozen"):
                    await gathered(buffer.sample())
        async with a.frozen():
            await b.sample()
            async with b.frozen():
                await a.snapshot()
            await b.sample()
        await a.sample()


async def test_blocks_leave_nothing_in_the_context() -> None:
    async with await filled() as buffer:
        for _ in range(100):
            async with buffer.frozen():
                pass
        before = len(contextvars.copy_context())
        for _ in range(10):
            async with buffer.frozen():
                pass
        assert len(contextvars.copy_context()) == before
        (marks,) = (value for name, value in contextvars.copy_context().items() if name.name == "asyncbuf_within")
        assert len(marks) == 1


# -- a checkpointer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["save", "restore"])
async def test_a_save_within_waits_for_nobody_who_waits_for_the_end(other: str, tmp_path: Path) -> None:
    elsewhere = contextvars.copy_context()
    checkpointer = Checkpointer(tmp_path)
    async with await filled() as buffer, Crew() as crew:
        await checkpointer.save(1, buffer=buffer)
        async with asyncio.timeout(20), buffer.frozen():
            call: Any = checkpointer.save(2, buffer=buffer) if other == "save" else checkpointer.restore(buffer=buffer)
            waiting = crew.start(call, elsewhere)
            await until(lambda: "waits for the end of frozen()" in buffer.why_blocked())
            await in_task_group(checkpointer.save(3, buffer=buffer))
            with pytest.raises(AsyncBufError, match="frozen"):
                await checkpointer.restore(buffer=buffer)
        await within(waiting)
        await take(buffer, 2)


async def test_a_save_of_two_buffers_of_which_one_is_frozen(tmp_path: Path) -> None:
    async with await filled() as a, await filled(seed=1) as b:
        await a.sample()
        async with a.frozen():
            await Checkpointer(tmp_path).save(1, a=a, b=b)
            assert a.current_freeze is not None
            await take(b, 2)
        target = buffer_with()
        await Checkpointer(tmp_path).restore(a=target, b=buffer_with())
        async with target:
            await check_stream(target, await take(a, 3))


# -- nothing hangs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reopens", [False, True])
async def test_close_within(reopens: bool) -> None:
    elsewhere = contextvars.copy_context()
    buffer = await filled(transform=CountingTransform())
    async with Crew() as crew:
        await buffer.open()
        await buffer.sample()
        async with asyncio.timeout(20), buffer.frozen():
            before = await buffer.state_dict()
            asked = crew.start(buffer.sample(), elsewhere)
            await turns()
            await buffer.aclose()
            with pytest.raises(BufferClosedError):
                await asked
            if reopens:
                await buffer.open()
            assert difference(await buffer.state_dict(), before) is None
        if not reopens:
            await buffer.open()
        assert (await buffer.sample()).number == 1
        await buffer.aclose()


async def test_crash_within() -> None:
    elsewhere = contextvars.copy_context()
    buffer = await filled(transform=late)
    async with Crew() as crew:
        await buffer.open()
        await buffer.sample()
        async with asyncio.timeout(20), buffer.frozen():
            before = await buffer.state_dict()
            calls = (buffer.sample(), buffer.extend(items_of(1)))
            asked = [crew.start(call, elsewhere) for call in calls]
            await turns()
            next(task for task in background_tasks() if "worker" in task.get_name()).cancel()
            ends = await outcomes(*asked)
            assert [type(end) for end in ends] == [BufferFailedError] * 2
            assert difference(await buffer.state_dict(), before) is None
        await within(buffer.snapshot())
        await within(buffer.aclose())


async def test_the_holder_is_cancelled() -> None:
    async with await filled() as buffer, Crew() as crew:
        is_in = asyncio.Event()

        async def holder() -> None:
            async with buffer.frozen():
                is_in.set()
                await asyncio.Event().wait()

        holding = crew.start(holder())
        await within(is_in.wait())
        asked = crew.start(buffer.sample())
        await turns()
        holding.cancel()
        await within(asked)


async def test_an_error_in_the_block_ends_it() -> None:
    async with await filled() as buffer:
        with pytest.raises(KeyError):
            async with buffer.frozen():
                raise KeyError
        await buffer.sample()


# -- nothing spins ----------------------------------------------------------------------------------------------------

HOLDS: dict[str, Callable[[ReplayBuffer, Snapshot], Any]] = {
    "snapshot": lambda buffer, snapshot: buffer.snapshot(),
    "snapshot in time": lambda buffer, snapshot: buffer.snapshot(30),
    "state_dict": lambda buffer, snapshot: buffer.state_dict(),
    "freeze": lambda buffer, snapshot: buffer.freeze(),
    "freeze in time": lambda buffer, snapshot: buffer.freeze(30),
    "restore": lambda buffer, snapshot: buffer.restore(snapshot),
}


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("drop", ["skip", "flush", "empty"])
async def test_a_dropped_ticket_is_waited_for_while_a_stateful_transform_is_at_work(drop: str, hold: str) -> None:
    stops: list[Stop] = []
    transform = CountingTransform(lambda seen: stops[0]() if stops else None)
    async with await filled(transform=transform, prefetch=1) as buffer, Crew() as crew:
        await buffer.sample()
        snapshot = await buffer.snapshot()
        stop = Stop()
        stops.append(stop)
        await buffer.sample()
        await stop.come.reached()
        await getattr(buffer, drop)()
        waiting = crew.start(HOLDS[hold](buffer, snapshot))
        await turns(50)  # the loop goes on
        assert not waiting.done()
        # A restore reads first, in a thread.
        await until(lambda: "waits for a stateful transform that is at work" in buffer.why_blocked())
        stops.clear()
        stop.go.set()
        end = await within(waiting)
        if hold.startswith("freeze"):
            end.release()
        if drop == "empty":
            await buffer.extend(items_of(ITEMS))
        await take(buffer, 3)


@pytest.mark.parametrize("hold", HOLDS)
async def test_whoever_waits_for_a_stateful_transform_can_give_up(hold: str) -> None:
    stops: list[Stop] = []
    transform = CountingTransform(lambda seen: stops[0]() if stops else None)
    async with await filled(transform=transform, prefetch=1) as buffer, Crew() as crew:
        await buffer.sample()
        snapshot = await buffer.snapshot()
        stop = Stop()
        stops.append(stop)
        await buffer.sample()
        await stop.come.reached()
        await buffer.flush()
        waiting = crew.start(HOLDS[hold](buffer, snapshot))
        await turns()
        waiting.cancel()
        await asyncio.wait({waiting}, timeout=20)
        assert waiting.cancelled()
        for call in (buffer.snapshot(0.01), buffer.freeze(0.01)):
            with pytest.raises(TimeoutError, match="waits for a stateful transform that is at work"):
                await within(call)
        stops.clear()
        stop.go.set()
        await within(buffer.snapshot())
        await take(buffer, 3)


async def test_a_buffer_that_is_being_closed_is_not_captured_while_a_transform_changes_its_state() -> None:
    stops: list[Stop] = []
    transform = CountingTransform(lambda seen: stops[0]() if stops else None)
    buffer = await filled(transform=transform, prefetch=1)
    async with Crew() as crew:
        await buffer.open()
        await buffer.sample()
        await buffer.snapshot()
        stop = Stop()
        stops.append(stop)
        await buffer.sample()
        await stop.come.reached()
        with pytest.raises(TimeoutError):
            await buffer.aclose(0.01)
        waiting = crew.start(buffer.snapshot())
        await turns(50)
        assert not waiting.done()
        stops.clear()
        stop.go.set()
        state = (await within(waiting)).state_dict()
        await within(buffer.aclose())
    assert state["transforms"][0]["seen"] == transform.seen == 3
    assert state["prefetch"]["queue"][0]["step"] in (None, 1)


# -- what it says -----------------------------------------------------------------------------------------------------


async def test_why_blocked_within() -> None:
    elsewhere = contextvars.copy_context()
    async with await filled() as buffer, Crew() as crew:
        async with buffer.frozen():
            calls = [buffer.sample() for _ in range(3)] + [buffer.extend(items_of(1)) for _ in range(2)]
            others = [crew.start(call, elsewhere) for call in calls]
            others.append(crew.start(buffer.save("unused"), elsewhere))
            await turns()
            assert buffer.why_blocked() == (
                "3 consumer(s) wait for the end of frozen(); 2 writer(s) wait for the end of frozen(); "
                "a snapshot waits for the end of frozen()"
            )
            others.pop().cancel()
        await outcomes(*others)
        with await buffer.freeze():
            asked = crew.start(buffer.sample(), elsewhere)
            await turns()
            assert buffer.why_blocked() == "1 consumer(s) wait for the end of freeze()"
        await within(asked)
        assert buffer.why_blocked() == "nobody waits"


async def test_why_blocked_while_a_snapshot_waits() -> None:
    is_open = asyncio.Event()
    stop = Stop()

    async def jam(data: Any) -> Any:
        await is_open.wait()
        return data

    storage = ThreadedStorage(ITEMS)
    async with await filled(transform=jam, storage=storage, prefetch=0) as buffer, Crew() as crew:
        asked = crew.start(buffer.sample())
        await until(lambda: "transforms have not ended" in buffer.why_blocked())
        waiting = crew.start(buffer.snapshot())
        await turns()
        assert buffer.why_blocked() == (
            "1 consumer(s) wait for the end of a snapshot; a snapshot waits for batch 0: its transforms have not ended"
        )
        is_open.set()
        await outcomes(asked, waiting)
        storage.on_write = stop
        write = crew.start(buffer.extend(items_of(1)))
        await stop.come.reached()
        waiting = crew.start(buffer.snapshot())
        await turns()
        assert buffer.why_blocked() == "a snapshot waits for a write that is going on"
        stop.go.set()
        await outcomes(write, waiting)
