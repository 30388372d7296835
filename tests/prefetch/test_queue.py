"""The queue of tickets and consumers, by itself, against invariants that are counted anew after each step."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncbuf import Draw
from asyncbuf._prefetch.entry import Entry
from asyncbuf._prefetch.offload import Offload
from asyncbuf._prefetch.queue import EpochCursor, TicketQueue, Waiter
from asyncbuf.batch import Ticket

DEPTH = 2


class QueueMachine(RuleBasedStateMachine):
    """Consumers ask, are answered in order, give up and are served; tickets are drawn, skipped, dropped, restored."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = TicketQueue(4, DEPTH, Offload())
        self.unanswered: list[Waiter] = []  # in the order in which they asked; given up ones stay until their turn
        self.number = 0
        self.epoch = 0
        self.shared = EpochCursor()

    def entry(self) -> Entry:
        draw = Draw(torch.zeros(4, dtype=torch.int64), epoch=self.epoch)
        entry = Entry(Ticket(self.number, draw, 0), is_prefetched=True)
        self.number += 1
        entry.ready(None)
        return entry

    @rule(kind=st.sampled_from(["any", "own", "shared"]))
    def ask(self, kind: str) -> None:
        cursor = {"any": None, "own": EpochCursor(), "shared": self.shared}[kind]
        waiter = Waiter(cursor)
        self.queue.waiters[waiter] = None
        self.unanswered.append(waiter)

    @precondition(lambda self: self.unanswered)
    @rule()
    def answer(self) -> None:
        self.queue.answer(self.unanswered.pop(0))

    @precondition(lambda self: self.queue.wants_more)
    @rule(ends_pass=st.booleans())
    def draw(self, ends_pass: bool) -> None:
        while (waiter := self.queue.next_starving) is not None and waiter.cursor is not None:
            if waiter.cursor.number is None:
                waiter.cursor.number = self.epoch
            if waiter.cursor.number == self.epoch:
                break
            self.queue.park_starving()
        if self.queue.wants_more:
            self.queue.append(self.entry())
        self.epoch += ends_pass

    @precondition(lambda self: self.queue.waiters)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        self.queue.give_up(data.draw(st.sampled_from(list(self.queue.waiters))))

    @precondition(lambda self: self.queue.waiters)
    @rule()
    def serve(self) -> None:
        first = self.queue.first
        assert first is not None
        entries = self.queue.entries
        if first.cursor is not None and (
            first in self.queue.parked or (entries and not first.cursor.takes(entries[0]))
        ):
            # Its pass is over: nobody stands before it who could leave it a ticket of that pass.
            assert not any(entry.ticket.draw.epoch == first.cursor.number for entry in entries)
            self.queue.give_up(first)
        elif entries:
            expected = entries[0]
            assert self.queue.hand_over() is expected
            if first.cursor is not None:
                first.cursor.begun = True

    @precondition(lambda self: self.queue.entries)
    @rule()
    def skip(self) -> None:
        first = self.queue.entries[0]
        assert self.queue.skip() is first
        assert first.dropped

    @rule(spoken_for=st.booleans())
    def drop(self, spoken_for: bool) -> None:
        kept = 0 if spoken_for else self.queue.calls
        before = list(self.queue.entries)
        assert self.queue.drop(spoken_for=spoken_for) == before[kept:]
        if spoken_for:
            self.queue.restore([])

    @rule(count=st.integers(0, 4))
    def restore(self, count: int) -> None:
        self.queue.restore([self.entry() for _ in range(count)])

    @invariant()
    def counts(self) -> None:
        queue = self.queue
        answered = [waiter for waiter in queue.waiters if waiter.answered]
        counting = [waiter for waiter in answered if waiter not in queue.parked]
        assert queue.calls == len(counting)
        assert list(queue.starving) == counting[len(queue.entries) :]
        assert set(queue.parked) <= set(answered)
        assert queue.early == sum(waiter.served for waiter in self.unanswered)
        assert not any(waiter.gone or waiter.served for waiter in queue.waiters)
        # Those whose turn has come stand before all others.
        assert list(queue.waiters)[: len(answered)] == answered

    @invariant()
    def draws_fall_on_calls(self) -> None:
        queue = self.queue
        assert queue.wants_more == (len(queue.entries) < queue.calls + DEPTH - queue.early)


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
