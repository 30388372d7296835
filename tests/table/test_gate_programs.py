"""One history: the gate as a state machine, driven by any program of calls."""

from __future__ import annotations

import asyncio
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncbuf._table.gate import HistoryGate
from tests.table.gate_helpers import settle


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
