"""A freeze as a handle: held, released by any task, expired, given up, lost."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import weakref
from typing import Any

import pytest

from asyncbuf import AsyncBufError, FreezeState, ReplayBuffer, WrongLoopError
from asyncbuf._prefetch.entry import Stage
from asyncbuf._prefetch.tickets import SavedTicket
from asyncbuf.checkpoint._freeze import MutualWaitError
from asyncbuf.testing import difference
from tests.helpers import SECONDS, CountingTransform, Crew, Stop, ThreadedStorage, outcomes, turns, until, within
from tests.resume_helpers import check_stream, items_of, late, take
from tests.snapshot.helpers import ITEMS, buffer_with, filled


class Jam:
    """An async transform that waits while it is shut."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.waiting = 0

    async def __call__(self, data: Any) -> Any:
        self.waiting += 1
        await self.is_open.wait()
        return data


class StatefulJam(Jam):
    """The same with a state."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


async def goes_on(buffer: ReplayBuffer) -> None:
    """Nothing is held back any more."""
    async with asyncio.timeout(SECONDS):
        await buffer.extend(items_of(2, 500))
        await buffer.sample()
        await buffer.snapshot()
        async with buffer.frozen():
            pass
    assert buffer.why_blocked() == "nobody waits"


async def test_it_holds_until_it_is_released() -> None:
    elsewhere = contextvars.copy_context()
    async with await filled(transform=late) as buffer, Crew() as crew:
        await buffer.sample()
        handle = await buffer.freeze()
        assert handle.is_held
        calls = (buffer.sample(), buffer.extend(items_of(3)), buffer.flush(), buffer.snapshot())
        asked = [crew.start(call, elsewhere) for call in calls]
        before = buffer.stats()
        await turns(200)
        assert not any(task.done() for task in asked)
        after = buffer.stats()
        # Those that wait for a turn in the history are counted as writers.
        assert (after.waiting_consumers, after.drawn, after.write_count) == (1, before.drawn, before.write_count)
        handle.release()
        assert handle.state is FreezeState.RELEASED
        assert not [end for end in await outcomes(*asked) if isinstance(end, BaseException)]
        await goes_on(buffer)


async def test_any_task_of_the_loop_may_release_it() -> None:
    async with await filled() as buffer:
        handle = await buffer.freeze()

        async def release() -> None:
            handle.release()

        await asyncio.create_task(release(), context=contextvars.Context())
        await goes_on(buffer)  # the task that took it is outside from then on


async def test_it_is_taken_in_one_task_and_used_in_another() -> None:
    async with await filled() as buffer:
        await buffer.sample()
        handle = await within(asyncio.create_task(buffer.freeze(), context=contextvars.Context()))
        snapshot = await within(handle.snapshot())
        with handle:
            state = await buffer.state_dict()
            with pytest.raises(AsyncBufError, match="frozen"):
                await buffer.sample()
        assert difference(snapshot.state_dict(), state) is None
        await goes_on(buffer)


async def test_what_comes_after_the_release_says_so() -> None:
    async with await filled() as buffer:
        handle = await buffer.freeze()
        for _ in range(3):
            handle.release()
        with pytest.raises(AsyncBufError, match="found one that was released"):
            await handle.snapshot()
        with pytest.raises(AsyncBufError, match="was released"), handle:
            pass
        await goes_on(buffer)
        with await buffer.freeze() as other:
            handle.release()  # leaves alone what it does not hold
            assert other.state is FreezeState.HELD
            assert "HELD" not in repr(other) == "<Freeze held>"


async def test_it_expires() -> None:
    elsewhere = contextvars.copy_context()
    async with await filled() as buffer, Crew() as crew:
        handle = await buffer.freeze(hold=0.01)
        asked = crew.start(buffer.sample(), elsewhere)
        await until(lambda: handle.state is FreezeState.EXPIRED)
        await within(asked)
        with pytest.raises(AsyncBufError, match=r"expired after 0\.01 s"):
            handle.capture()
        handle.release()
        assert handle.state is FreezeState.EXPIRED
        await goes_on(buffer)


async def test_a_release_in_time_stops_the_clock() -> None:
    async with await filled() as buffer:
        first = await buffer.freeze(hold=0.02)
        first.release()
        second = await buffer.freeze()
        loop = asyncio.get_running_loop()
        end = loop.time() + 0.02
        await until(lambda: loop.time() > end)  # the time of the first is over
        assert (first.state, second.state) == (FreezeState.RELEASED, FreezeState.HELD)
        second.release()


@pytest.mark.parametrize("hold", [0, -1.0, float("nan")])
async def test_a_hold_of_no_time_is_refused(hold: float) -> None:
    buffer = await filled()
    with pytest.raises(ValueError, match="hold: expected a positive number"):
        await buffer.freeze(hold=hold)
    await buffer.extend(items_of(1))


# -- not taken --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["timeout", "cancelled"])
@pytest.mark.parametrize("where", ["behind another", "stateful transform", "write", "gather"])
async def test_what_was_held_is_given_back(where: str, how: str) -> None:
    stop = Stop()
    storage = ThreadedStorage(ITEMS)
    jam = StatefulJam() if where == "stateful transform" else Jam()
    other = None
    async with await filled(storage=storage, transform=jam) as buffer, Crew() as crew:
        await buffer.sample()
        await buffer.snapshot()
        if where == "behind another":
            other = await within(asyncio.create_task(buffer.freeze(), context=contextvars.Context()))
        elif where == "stateful transform":
            jam.is_open.clear()
            crew.start(buffer.sample())
            await until(lambda: jam.waiting > 3)
        elif where == "write":
            storage.on_write = stop
            crew.start(buffer.extend(items_of(2)))
            await stop.come.reached()
        else:
            storage.on_gather = stop
            crew.start(buffer.sample())
            await stop.come.reached()
        call = buffer.freeze(timeout=0.02 if how == "timeout" else None)
        taking = crew.start(call, contextvars.Context())
        if how == "timeout":
            with pytest.raises(TimeoutError, match=r"freeze\(\): after 0.02 s it still waits for"):
                await within(taking)
        else:
            await turns(20)
            assert not taking.done()
            taking.cancel()
            await asyncio.wait({taking})
        if other is not None:
            other.release()
        jam.is_open.set()
        stop.go.set()
        await goes_on(buffer)


async def test_cancelled_in_the_step_in_which_it_comes() -> None:
    async with await filled() as buffer:
        for turn in range(12):
            first = await within(asyncio.create_task(buffer.freeze(), context=contextvars.Context()))
            taking = asyncio.create_task(buffer.freeze(), context=contextvars.Context())
            await turns(3)
            first.release()
            await turns(turn // 2)
            if turn % 2:
                await asyncio.sleep(0)
            taking.cancel()
            (end,) = await outcomes(taking)
            if not isinstance(end, BaseException):
                end.release()
            del end
            await goes_on(buffer)


@pytest.mark.usefixtures("last_fifth_is_long")
async def test_a_hanging_transform_holds_it_up_for_four_fifths_of_its_time() -> None:
    jam = Jam()
    async with await filled(transform=jam) as buffer, Crew() as crew:
        await buffer.sample()
        await buffer.snapshot()
        await take(buffer, 2)
        await buffer.snapshot()
        jam.is_open.clear()
        await take(buffer, 2)
        asked = [crew.start(buffer.sample()) for _ in range(3)]
        await turns()
        with await within(buffer.freeze(timeout=0.05)) as handle:
            snapshot = await handle.snapshot()
        jam.is_open.set()
        expected = [*await within(asyncio.gather(*asked)), *await take(buffer, 2)]
    async with buffer_with(transform=Jam(), seed=9) as target:
        await target.restore(snapshot)
        await check_stream(target, expected)


@pytest.mark.usefixtures("last_fifth_is_long")
async def test_stateful_transforms_do_not_begin_when_the_time_is_over() -> None:
    stop = Stop()
    transform = CountingTransform(lambda seen: stop())
    async with await filled(transform=transform, prefetch=4) as buffer, Crew() as crew:
        asked = crew.start(buffer.sample())
        await stop.come.reached()
        freezing = crew.start(buffer.freeze(timeout=0.1))
        # Four fifths are over; then the one that is at work ends, and there are four behind it.
        await until(lambda: "waits for batch 0" in buffer.why_blocked() and buffer._parts.fetcher._in_order.is_resting)
        stop.go.set()
        handle = await within(freezing)
        assert (transform.seen, buffer.stats().in_flight) == (1, 4)
        handle.release()
        await within(asked)
        await until(lambda: transform.seen == 5)


# -- several buffers --------------------------------------------------------------------------------------------------


async def test_a_coordinator_freezes_several() -> None:
    async with await filled() as a, await filled(seed=1) as b:
        handles = await within(asyncio.gather(a.freeze(), b.freeze()))
        with handles[0], handles[1]:
            states = [await buffer.state_dict() for buffer in (a, b)]
            assert [buffer.current_freeze for buffer in (a, b)] == list(handles)
            with pytest.raises(AsyncBufError, match="frozen"):
                await b.extend(items_of(1))
        assert states[0]["writer"] == states[1]["writer"]
        assert a.current_freeze is None
        await goes_on(a)
        await goes_on(b)


async def test_two_coordinators_in_opposite_order_are_told_before_their_timeouts() -> None:
    async with await filled() as a, await filled() as b, Crew() as crew:
        both_have_one = asyncio.Barrier(2)

        async def coordinate(first: ReplayBuffer, second: ReplayBuffer) -> None:
            with await first.freeze(timeout=5):
                await both_have_one.wait()
                with await second.freeze(timeout=5):
                    pass

        ends = await outcomes(crew.start(coordinate(a, b)), crew.start(coordinate(b, a)))
        assert [type(end) for end in ends if end is not None] == [MutualWaitError]
        await goes_on(a)
        await goes_on(b)


# -- lost -------------------------------------------------------------------------------------------------------------


async def test_one_that_is_dropped_complains_and_lets_go() -> None:
    async with await filled() as buffer:
        handle = await buffer.freeze()
        kept = [handle]
        del handle
        with pytest.warns(ResourceWarning, match="dropped before it was released"):
            kept.clear()
        await goes_on(buffer)


async def test_a_buffer_that_is_dropped_with_its_freeze_is_gone() -> None:
    buffer = await filled()
    handle = await buffer.freeze()
    handle.release()
    left: list[weakref.ref[Any]] = [weakref.ref(handle), weakref.ref(buffer), weakref.ref(buffer._freezer)]
    del handle, buffer
    gc.collect()
    assert [each() for each in left] == [None] * 3


async def test_another_loop_may_not_release_it() -> None:
    async with await filled() as buffer:
        handle = await buffer.freeze()

        async def elsewhere() -> None:
            with pytest.raises(WrongLoopError):
                handle.release()
            with pytest.raises(WrongLoopError):
                await handle.snapshot()

        await asyncio.to_thread(asyncio.run, elsewhere())
        assert handle.state is FreezeState.HELD
        handle.release()
        await goes_on(buffer)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_loop_that_is_closed_ends_it(is_open: bool, is_kept: bool) -> None:
    async def use() -> None:
        async with buffer:
            await goes_on(buffer)

    buffer = buffer_with()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(buffer.extend(items_of(ITEMS)))
    if is_open:
        loop.run_until_complete(buffer.open())
    handles: list[Any] = [loop.run_until_complete(buffer.freeze())]
    waiting = [loop.create_task(buffer.extend(items_of(1))), loop.create_task(buffer.snapshot())]
    loop.run_until_complete(turns())
    for task in waiting:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    if not is_kept:
        handles.clear()
        gc.collect()
    asyncio.run(use() if not is_open else _close_and(buffer, use()))
    for handle in handles:
        assert handle.is_held is False
        assert handle.state is FreezeState.EXPIRED
        with pytest.raises(AsyncBufError, match="ended with its event loop"):
            asyncio.run(handle.snapshot())
    del waiting, task
    gc.collect()


async def _close_and(buffer: ReplayBuffer, then: Any) -> None:
    await buffer.aclose()
    await then


# -- captured in one step ---------------------------------------------------------------------------------------------


async def test_a_capture_may_be_awaited_after_the_release() -> None:
    async with await filled(transform=late, prefetch=3) as buffer:
        await buffer.sample()
        with await buffer.freeze() as handle:
            expected = await buffer.state_dict()
            pending = handle.capture()
        await buffer.extend(items_of(10, 100))
        for batch in await take(buffer, 5):
            batch["wide"].fill_(-1.0)  # what is captured belongs to the snapshot
            batch.indices.fill_(0)
        assert difference((await within(pending)).state_dict(), expected) is None


async def test_captures_that_nobody_awaits_keep_no_batch_back() -> None:
    async with await filled(transform=late, prefetch=3) as buffer:
        await buffer.sample()
        with await buffer.freeze() as handle:
            first, second = handle.capture(), handle.capture()
            assert isinstance(first, asyncio.Task)
            assert isinstance(second, asyncio.Task)
            first.cancel()  # before its first step
        await take(buffer, 6)
        await asyncio.wait({first, second})
        assert first.cancelled()
        assert buffer.stats().in_flight == 0


async def test_a_batch_is_handed_over_as_soon_as_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Stop()
    plain = SavedTicket.plain

    def stops_at_the_second(self: SavedTicket) -> dict[str, Any]:
        if self.ticket.number == 2:
            stop()
        return plain(self)

    monkeypatch.setattr(SavedTicket, "plain", stops_at_the_second)
    async with await filled(transform=late, prefetch=3) as buffer, Crew() as crew:
        await buffer.sample()
        with await buffer.freeze() as handle:
            expected = handle.capture()
        await stop.come.reached()
        await until(lambda: [entry.stage for entry in buffer._parts.queues.entries] == [Stage.READY, *[Stage.LENT] * 2])
        first, second = crew.start(buffer.sample()), crew.start(buffer.sample())
        (await within(first))["wide"].zero_()
        await turns(50)
        assert not second.done()
        assert "wait for batch 2: it is a batch, which a snapshot copies first" in buffer.why_blocked()
        again = crew.start(buffer.snapshot())  # of batches that are lent already
        await buffer.flush()
        await turns(50)
        stop.go.set()
        (await within(second))["wide"].zero_()
        state = (await within(expected)).state_dict()
        await within(again)
        assert [entry["number"] for entry in state["prefetch"]["queue"]] == [1, 2, 3]
    async with buffer_with(transform=late, prefetch=3, seed=9) as target:
        await target.load_state_dict(state)
        assert all(bool(batch["wide"].any()) for batch in await take(target, 3))
