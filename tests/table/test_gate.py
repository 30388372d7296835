"""One history: the gate as a state machine, and the corners that a program of chance finds too seldom."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncbuf._table.gate import HistoryGate

if TYPE_CHECKING:
    from collections.abc import Callable

# A coroutine that is woken may need a turn to go on, and one more for whoever waits for it.
_TURNS = 6


async def settle() -> None:
    """Let everything happen that can."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)


# -- any program of calls ----------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One thing that happens at the gate.

    Attributes:
        name: what.
        number: which of the holds, waiters or writes it concerns, modulo their number.
        yields: how many turns of the loop there are before the next step.
    """

    name: str
    number: int
    yields: int


_NAMES = ["draw", "hold", "apply", "write", "write", "exclusive", "release", "release", "end", "cancel", "refuse"]
_YIELDS = [0, 0, 1, 1, 2, 4]

STEPS = st.builds(Step, st.sampled_from(_NAMES), st.integers(0, 5), st.sampled_from(_YIELDS))


class Play:
    """A gate, everybody at it, and the rules it must keep.

    Each call gets a number when it asks. What it does is written down in ``history`` when it takes effect.
    """

    def __init__(self) -> None:
        self.gate = HistoryGate()
        self.asked = 0
        self.history: list[int] = []
        self.holds = 0
        self.writing: set[int] = set()
        # By number of call: whether it must be exclusive, for those that have neither taken effect nor given up.
        self.waiting: dict[int, bool] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.ends: dict[int, asyncio.Event] = {}
        self.refused: set[int] = set()
        self.exclusives: set[int] = set()

    def ask(self, exclusive: bool) -> int:
        number, self.asked = self.asked, self.asked + 1
        self.waiting[number] = exclusive
        return number

    def take_effect(self, number: int) -> None:
        exclusive = self.waiting.pop(number)
        assert not self.writing, "something took effect beside a write in a thread"
        assert not (exclusive and self.holds), "a write took effect while rows were being read"
        assert not self.history or number > self.history[-1], "the order was not kept"
        earlier = [other for other in self.waiting if other < number]
        assert all(self.given_up(other) for other in earlier), "a call overtook another one"
        self.history.append(number)

    def given_up(self, number: int) -> bool:
        task = self.tasks.get(number)
        return number in self.refused or (task is not None and (task.cancelling() > 0 or task.done()))

    # What can be asked for.

    def draw(self, hold: bool) -> None:
        number = self.ask(exclusive=False)

        def action() -> None:
            self.take_effect(number)
            if hold:
                self.gate.acquire_read()
                self.holds += 1

        self.gate.submit(action)

    def start(self, name: str) -> None:
        number = self.ask(exclusive=name != "apply")
        run = self.exclusive(number) if name == "exclusive" else self.apply(number, exclusive=name == "write")
        self.tasks[number] = asyncio.create_task(run)

    async def apply(self, number: int, exclusive: bool) -> None:
        def action() -> int:
            self.take_effect(number)
            return number

        assert await self.gate.apply(action, exclusive=exclusive) == number

    async def exclusive(self, number: int) -> None:
        end = self.ends[number] = asyncio.Event()
        self.exclusives.add(number)
        try:
            async with self.gate.turn(exclusive=True):
                assert self.gate.writing
                self.take_effect(number)
                self.writing.add(number)
                try:
                    await end.wait()
                finally:
                    self.writing.discard(number)
        finally:
            del self.ends[number]

    # What can happen.

    async def step(self, step: Step) -> None:
        if step.name in ("draw", "hold"):
            self.draw(hold=step.name == "hold")
        elif step.name in ("apply", "write", "exclusive"):
            self.start(step.name)
            await asyncio.sleep(0)  # it asks, before anybody else does
        elif step.name == "release" and self.holds:
            self.holds -= 1
            self.gate.release_read()
        elif step.name == "end" and self.ends:
            sorted(self.ends.items())[step.number % len(self.ends)][1].set()
        elif step.name == "cancel" and self.unfinished:
            self.unfinished[step.number % len(self.unfinished)].cancel()
        elif step.name == "refuse":
            self.refused |= {number for number in self.waiting if number in self.tasks}
            self.gate.refuse(lambda: ConnectionError("refused"))
        for _ in range(step.yields):
            await asyncio.sleep(0)

    @property
    def unfinished(self) -> list[asyncio.Task[None]]:
        return [task for task in self.tasks.values() if not task.done()]

    async def settle(self) -> None:
        """Let everything happen that can. Each call whose turn comes takes a step of the loop of its own."""
        before = None
        while (now := (len(self.history), len(self.unfinished))) != before:
            before = now
            await settle()

    def check_nobody_is_stuck(self) -> None:
        """Once everything has happened that can, the first who waits has a reason to."""
        waiting = {number: exclusive for number, exclusive in self.waiting.items() if not self.given_up(number)}
        assert self.gate.readers == self.holds
        assert self.gate.writing == bool(self.writing)
        if waiting:
            first = min(waiting)
            assert self.writing or (waiting[first] and self.holds), f"call {first} waits for nothing"

    async def finish(self) -> None:
        """End what still reads and writes: everybody must then have had a turn, or been told that there is none."""
        for _ in range(10 * self.asked):
            if self.holds:
                self.holds -= 1
                self.gate.release_read()
            for end in self.ends.values():
                end.set()
            await self.settle()
            if not self.holds and not self.writing:
                break
        assert not self.unfinished
        for number, task in self.tasks.items():
            if task.cancelled():
                assert number not in self.history or number in self.exclusives, "a cancelled call took effect"
                continue
            error = task.exception()
            assert error is None or (isinstance(error, ConnectionError) and number in self.refused), repr(error)
            assert (error is None) == (number in self.history)
        assert self.gate.waiting_writers == self.gate.readers == 0
        assert not self.gate.writing


@given(st.lists(STEPS, max_size=30))
@example([Step("exclusive", 0, 0), *[Step("apply", 0, 0)] * 12])  # more turns than one look at the loop sees
@settings(max_examples=100, deadline=None)
async def test_any_program(program: list[Step]) -> None:
    await run(program)


@pytest.mark.parametrize("seed", range(15))
async def test_long_program(seed: int) -> None:
    random = Random(seed)
    await run([Step(random.choice(_NAMES), random.randrange(100), random.choice(_YIELDS)) for _ in range(300)])


async def run(program: list[Step]) -> None:
    play = Play()
    try:
        for step in program:
            await play.step(step)
            if step.yields == 4:
                await play.settle()
                play.check_nobody_is_stuck()
        await play.settle()
        play.check_nobody_is_stuck()
        await play.finish()
    finally:
        for task in play.unfinished:
            task.cancel()
        await settle()


# -- corners -----------------------------------------------------------------------------------------------------------


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
