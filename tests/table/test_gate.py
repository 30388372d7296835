"""One history: the corners of the gate that a program of chance finds too seldom."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from typing import TYPE_CHECKING

import pytest

from asyncbuf._table.gate import HistoryGate
from tests.table.gate_helpers import settle

if TYPE_CHECKING:
    from collections.abc import Callable


class Log(list[str]):
    """What took effect, in order."""

    def note(self, name: str) -> Callable[[], str]:
        def action() -> str:
            self.append(name)
            return name

        return action


async def ask(gate: HistoryGate, log: Log, name: str, *, exclusive: bool = True) -> asyncio.Task[str]:
    """A task that has asked for its turn, and waits unless that has come."""
    task = asyncio.create_task(gate.apply(log.note(name), exclusive=exclusive))
    await asyncio.sleep(0)
    return task


async def hold_exclusive(gate: HistoryGate, end: asyncio.Event) -> None:
    async with gate.turn(exclusive=True):
        await end.wait()


async def test_nobody_waits_at_an_empty_gate() -> None:
    gate, log = HistoryGate(), Log()
    coroutine = gate.apply(log.note("write"), exclusive=True)
    with pytest.raises(StopIteration) as caught:
        coroutine.send(None)  # it ends in the first step
    assert caught.value.value == "write"
    gate.submit(lambda: log.append("draw"))
    assert log == ["write", "draw"]


async def test_holds_stop_writes_and_nothing_else() -> None:
    gate, log = HistoryGate(), Log()
    gate.submit(gate.acquire_read)
    gate.submit(gate.acquire_read)
    assert gate.readers == 2
    assert await gate.apply(log.note("priority"), exclusive=False) == "priority"
    gate.submit(lambda: log.append("draw"))
    write = await ask(gate, log, "write")
    assert log == ["priority", "draw"]
    assert gate.waiting_writers == 1
    gate.release_read()
    assert log == ["priority", "draw"]
    gate.release_read()
    # The turn comes in the step of the release. The task that waited for it does the rest.
    assert gate.writing
    assert gate.waiting_writers == 0
    gate.submit(lambda: log.append("behind"))
    assert log == ["priority", "draw"]
    assert await write == "write"
    assert log == ["priority", "draw", "write", "behind"]
    assert gate.waiting_writers == 0


async def test_everything_asked_for_after_a_waiting_write_waits_behind_it() -> None:
    gate, log = HistoryGate(), Log()
    gate.submit(gate.acquire_read)
    tasks = [await ask(gate, log, "write 1")]
    gate.submit(lambda: log.append("draw"))
    tasks += [await ask(gate, log, "priority", exclusive=False), await ask(gate, log, "write 2")]
    await settle()
    assert log == []
    assert gate.waiting_writers == 2
    gate.release_read()
    assert await asyncio.gather(*tasks) == ["write 1", "priority", "write 2"]
    assert log == ["write 1", "draw", "priority", "write 2"]


async def test_hold_of_a_draw_behind_a_write_stops_the_next_write() -> None:
    gate, log = HistoryGate(), Log()
    gate.submit(gate.acquire_read)
    first = await ask(gate, log, "write 1")
    gate.submit(gate.acquire_read)
    second = await ask(gate, log, "write 2")
    gate.release_read()
    await first
    await settle()
    assert (log, gate.readers, second.done()) == (["write 1"], 1, False)
    gate.release_read()
    await second
    assert log == ["write 1", "write 2"]


async def test_exclusive_holds_everything_off() -> None:
    gate, log, end = HistoryGate(), Log(), asyncio.Event()
    writer = asyncio.create_task(hold_exclusive(gate, end))
    await settle()
    assert gate.writing
    gate.submit(lambda: log.append("draw"))
    priority = await ask(gate, log, "priority", exclusive=False)
    await settle()
    assert log == []
    end.set()
    await writer
    assert not gate.writing
    assert log == ["draw", "priority"]
    await priority


async def test_exclusive_waits_for_holds_and_lets_go_after_an_error() -> None:
    gate, log = HistoryGate(), Log()
    gate.submit(gate.acquire_read)

    async def fail() -> None:
        async with gate.turn(exclusive=True):
            log.append("in")
            raise KeyError("broken")

    task = asyncio.create_task(fail())
    await settle()
    assert (log, gate.waiting_writers, gate.writing) == ([], 1, False)
    gate.release_read()
    with pytest.raises(KeyError, match="broken"):
        await task
    assert not gate.writing
    assert await gate.apply(log.note("after"), exclusive=True) == "after"
    assert log == ["in", "after"]


@pytest.mark.parametrize("waits", [False, True])
async def test_error_of_an_action_reaches_who_asked_and_nobody_else(waits: bool) -> None:
    gate, log = HistoryGate(), Log()

    def fail() -> None:
        log.append("fail")
        raise LookupError("mine")

    if waits:
        gate.submit(gate.acquire_read)
    failing = asyncio.create_task(gate.apply(fail, exclusive=True))
    await asyncio.sleep(0)
    behind = await ask(gate, log, "behind")
    if waits:
        gate.release_read()
    with pytest.raises(LookupError, match="mine"):
        await failing
    assert await behind == "behind"
    assert log == ["fail", "behind"]


async def test_error_of_a_draw_leaves_nobody_behind_it_stuck() -> None:
    gate, log = HistoryGate(), Log()

    def fail() -> None:
        raise LookupError("of the draw")

    gate.submit(gate.acquire_read)
    before = await ask(gate, log, "before")
    gate.submit(fail)
    behind = await ask(gate, log, "behind")
    gate.release_read()
    with contextlib.suppress(LookupError):  # it reaches whoever lets it come
        await before
    assert log[0] == "before"
    await settle()
    assert behind.done()
    assert await behind == "behind"


async def test_draw_within_an_action_comes_after_those_who_wait() -> None:
    gate, log = HistoryGate(), Log()
    gate.submit(gate.acquire_read)

    def action() -> None:
        log.append("action")
        gate.submit(lambda: log.append("draw"))
        log.append("action ends")

    first = asyncio.create_task(gate.apply(action, exclusive=True))
    await asyncio.sleep(0)
    second = await ask(gate, log, "second")
    gate.release_read()
    await asyncio.gather(first, second)
    assert log == ["action", "action ends", "second", "draw"]


async def test_draw_within_an_action_never_comes_in_the_middle_of_it() -> None:
    # The same as above where nobody waits: when the action asks must not decide what the draw sees.
    gate, log = HistoryGate(), Log()

    def action() -> None:
        log.append("action")
        gate.submit(lambda: log.append("draw"))
        log.append("action ends")

    await gate.apply(action, exclusive=True)
    assert log == ["action", "action ends", "draw"]


async def test_draws_within_draws_are_not_nested() -> None:
    gate, log = HistoryGate(), Log()

    def outer() -> None:
        gate.submit(lambda: log.append("inner"))
        log.append("outer")

    gate.submit(outer)
    assert log == ["outer", "inner"]


async def test_cancelled_waiter_is_skipped() -> None:
    gate, log = HistoryGate(), Log()
    gate.submit(gate.acquire_read)
    tasks = [await ask(gate, log, f"write {i}") for i in range(3)]
    tasks[1].cancel()
    await asyncio.wait(tasks[1:2])
    gate.release_read()
    await asyncio.wait(tasks)
    assert log == ["write 0", "write 2"]
    assert tasks[1].cancelled()


async def test_cancelled_waiter_no_longer_counts() -> None:
    gate, log = HistoryGate(), Log()
    gate.submit(gate.acquire_read)
    tasks = [await ask(gate, log, f"write {i}") for i in range(3)]
    tasks[1].cancel()
    await asyncio.wait(tasks[1:2])
    assert gate.waiting_writers == 2
    tasks[0].cancel()
    tasks[2].cancel()
    await asyncio.wait(tasks)
    assert gate.waiting_writers == 0
    gate.release_read()


async def test_what_a_cancelled_waiter_wanted_to_write_is_let_go() -> None:
    class Payload:
        def write(self) -> None:
            raise AssertionError

    gate, log = HistoryGate(), Log()
    gate.submit(gate.acquire_read)
    first = await ask(gate, log, "first")
    payload = Payload()
    alive = weakref.ref(payload)
    second = asyncio.create_task(gate.apply(payload.write, exclusive=True))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    del payload, second
    gc.collect()
    # Before the hold is gone, which may take as long as a gather does.
    assert alive() is None
    gate.release_read()
    assert await first == "first"


async def test_those_behind_a_cancelled_write_go_on_at_once() -> None:
    gate, log = HistoryGate(), Log()
    gate.submit(gate.acquire_read)
    write = await ask(gate, log, "write")
    gate.submit(lambda: log.append("draw"))
    priority = await ask(gate, log, "priority", exclusive=False)
    write.cancel()
    await settle()
    assert gate.readers == 1  # still
    assert log == ["draw", "priority"]
    assert await priority == "priority"


async def test_cancelled_in_the_step_in_which_the_turn_comes() -> None:
    gate, log = HistoryGate(), Log()
    gate.submit(gate.acquire_read)
    write, behind = await ask(gate, log, "write"), await ask(gate, log, "behind")
    gate.release_read()
    write.cancel()
    with pytest.raises(asyncio.CancelledError):
        await write
    # Who is told that it was cancelled must be able to rely on it.
    assert await behind == "behind"
    assert log == ["behind"]


async def test_cancelled_in_the_step_before_the_turn_comes() -> None:
    gate, log = HistoryGate(), Log()
    gate.submit(gate.acquire_read)
    write, behind = await ask(gate, log, "write"), await ask(gate, log, "behind")
    write.cancel()
    gate.release_read()
    with pytest.raises(asyncio.CancelledError):
        await write
    assert await behind == "behind"
    assert log == ["behind"]


@pytest.mark.parametrize("released_first", [True, False])
async def test_exclusive_cancelled_as_its_turn_comes_lets_go(released_first: bool) -> None:
    gate, log, end = HistoryGate(), Log(), asyncio.Event()
    gate.submit(gate.acquire_read)
    writer = asyncio.create_task(hold_exclusive(gate, end))
    await asyncio.sleep(0)
    behind = await ask(gate, log, "behind")
    if released_first:
        gate.release_read()
        assert gate.writing
    writer.cancel()
    if not released_first:
        gate.release_read()
    with pytest.raises(asyncio.CancelledError):
        await writer
    await settle()
    assert not gate.writing
    assert await behind == "behind"


async def test_exclusive_cancelled_within_lets_go() -> None:
    gate, log, end = HistoryGate(), Log(), asyncio.Event()
    writer = asyncio.create_task(hold_exclusive(gate, end))
    await settle()
    behind = await ask(gate, log, "behind")
    writer.cancel()
    await asyncio.wait([writer])
    assert not gate.writing
    assert await behind == "behind"


@pytest.mark.parametrize("how", ["cancelled", "refused"])
async def test_exclusive_that_had_no_turn_does_not_end_that_of_another(how: str) -> None:
    gate, log, end = HistoryGate(), Log(), asyncio.Event()
    first = asyncio.create_task(hold_exclusive(gate, end))
    await settle()
    second = asyncio.create_task(hold_exclusive(gate, end))
    await settle()
    if how == "cancelled":
        second.cancel()
    else:
        gate.refuse(lambda: ConnectionError("refused"))
    await asyncio.wait([second])
    assert gate.writing
    behind = await ask(gate, log, "behind")
    assert log == []
    end.set()
    await first
    assert await behind == "behind"
    assert second.cancelled() or isinstance(second.exception(), ConnectionError)


async def test_exclusive_ones_come_one_by_one() -> None:
    gate = HistoryGate()
    inside: list[int] = []

    async def write(number: int) -> None:
        async with gate.turn(exclusive=True):
            inside.append(number)
            await settle()
            assert inside[-1] == number

    await asyncio.gather(*map(write, range(4)))
    assert inside == [0, 1, 2, 3]


async def test_refuse_tells_every_waiter_and_leaves_draws_in_place() -> None:
    gate, log, end = HistoryGate(), Log(), asyncio.Event()
    gate.submit(gate.acquire_read)
    write = await ask(gate, log, "write")
    exclusive = asyncio.create_task(hold_exclusive(gate, end))
    await asyncio.sleep(0)
    priority = await ask(gate, log, "priority", exclusive=False)
    gate.submit(lambda: log.append("draw"))
    errors: list[ConnectionError] = []

    def error() -> ConnectionError:
        errors.append(ConnectionError(len(errors)))
        return errors[-1]

    gate.refuse(error)
    results = await asyncio.gather(write, exclusive, priority, return_exceptions=True)
    # Each gets an error of its own, with a traceback of its own.
    assert [*results] == [*errors]
    assert len({id(result) for result in results}) == 3
    assert log == ["draw"]
    assert not gate.writing
    assert gate.waiting_writers == 0
    gate.release_read()
    assert await gate.apply(log.note("later"), exclusive=True) == "later"


async def test_refuse_does_not_disturb_the_write_that_is_under_way() -> None:
    gate, log, end = HistoryGate(), Log(), asyncio.Event()
    writer = asyncio.create_task(hold_exclusive(gate, end))
    await settle()
    behind = await ask(gate, log, "behind")
    gate.refuse(lambda: ConnectionError("refused"))
    with pytest.raises(ConnectionError, match="refused"):
        await behind
    assert gate.writing
    assert gate.waiting_writers == 0
    end.set()
    await writer
    assert not gate.writing
    assert log == []


async def test_refused_in_the_step_in_which_it_is_cancelled() -> None:
    gate, log = HistoryGate(), Log()
    gate.submit(gate.acquire_read)
    one, other = await ask(gate, log, "one"), await ask(gate, log, "other")
    one.cancel()
    gate.refuse(lambda: ConnectionError("refused"))
    other.cancel()
    await asyncio.wait([one, other])
    assert one.cancelled()
    assert other.cancelled()
    gate.release_read()
    assert log == []
