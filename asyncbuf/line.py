"""A line of tickets that nobody has taken yet, and the consumers that wait for them. State only: nothing here waits."""

from __future__ import annotations

import enum
from collections import deque
from typing import TYPE_CHECKING, Any

from asyncbuf.batch import Batch, Ticket

if TYPE_CHECKING:
    import asyncio

    from asyncbuf.transform import Progress


class Stage(enum.Enum):
    """How far a ticket is."""

    DRAWN = "its rows are being gathered"
    GATHERED = "its transforms have not ended"
    READY = "it is a batch"
    FAILED = "a transform raised"


class Entry:
    """A ticket in the line.

    Attributes:
        ticket: the draw.
        stage: how far it is.
        progress: where its transforms go on; None until its rows are gathered.
        batch: what a consumer gets, once READY.
        error: why it FAILED.
        reported: whether a consumer was told of the failure.
        dropped: whether nobody wants it any more, so that what a thread still makes of it is let go.
    """

    __slots__ = ("batch", "dropped", "error", "progress", "reported", "stage", "ticket")

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.stage = Stage.DRAWN
        self.progress: Progress | None = None
        self.batch: Batch | None = None
        self.error: Exception | None = None
        self.reported = False
        self.dropped = False

    @property
    def settled(self) -> bool:
        """Whether it is a batch or has failed."""
        return self.stage is Stage.READY or self.stage is Stage.FAILED

    def keep(self, progress: Progress) -> None:
        """Its rows are gathered, or a step of its transforms is done."""
        self.progress = progress
        self.stage = Stage.GATHERED

    def ready(self, data: Any) -> None:
        """Its transforms are done."""
        ticket, draw = self.ticket, self.ticket.draw
        self.batch = Batch(data, draw.indices, draw.info, ticket.number, draw.epoch, draw.last)
        self.progress = self.error = None
        self.stage = Stage.READY

    def fail(self, error: Exception) -> None:
        """A transform or the gather raised."""
        self.error = error
        self.stage = Stage.FAILED

    def retry(self) -> None:
        """Forget the failure; what was gathered, and the transforms that went well, stay."""
        self.error = None
        self.reported = False
        self.stage = Stage.DRAWN if self.progress is None else Stage.GATHERED


class Waiter:
    """A consumer in its turn.

    Attributes:
        epoch: the only pass it wants batches of; None for any.
        wake: what it waits on; None while it does not wait.
        over: whether its pass has no more batches.
    """

    __slots__ = ("epoch", "over", "wake")

    def __init__(self, epoch: int | None) -> None:
        self.epoch = epoch
        self.wake: asyncio.Future[None] | None = None
        self.over = False

    def notify(self) -> None:
        """Let it look again."""
        if self.wake is not None and not self.wake.done():
            self.wake.set_result(None)


class Line:
    """Tickets of one batch size, in order, and their consumers, first come, first served.

    How many tickets are drawn follows from how many batches were asked for and from nothing else: with ``asked``
    counting the calls that were served or still wait, tickets are drawn until ``drawn == asked + depth``. So the draws
    fall on the calls, and neither threads nor cancelled calls (which take their count back) can move them.

    Attributes:
        batch_size: rows of a ticket.
        depth: how many tickets are drawn ahead of those asked for.
        entries: the tickets that nobody has taken.
        waiters: the consumers, in the order in which they asked.
        taken: number of tickets that left the line by being handed over.
        goal: how many tickets may be drawn by the calls whose turn in the history has come.
        error: why the last attempt to draw failed; None after a success.
    """

    __slots__ = ("batch_size", "depth", "entries", "error", "goal", "taken", "waiters")

    def __init__(self, batch_size: int, depth: int) -> None:
        self.batch_size = batch_size
        self.depth = depth
        self.entries: deque[Entry] = deque()
        self.waiters: deque[Waiter] = deque()
        self.taken = 0
        self.goal = 0
        self.error: Exception | None = None

    @property
    def asked(self) -> int:
        """Number of batches that were handed over or are being waited for."""
        return self.taken + len(self.waiters)

    @property
    def drawn(self) -> int:
        """Number of tickets that were handed over or may still be."""
        return self.taken + len(self.entries)

    @property
    def wants_more(self) -> bool:
        """Whether the calls so far call for another ticket."""
        return self.drawn < min(self.goal, self.asked + self.depth)

    def notify(self) -> None:
        """Let the first consumer look, if there is something to see."""
        if not self.waiters:
            return
        if self.entries:
            if self.entries[0].settled:
                self.waiters[0].notify()
        elif self.error is not None:
            self.waiters[0].notify()

    def notify_all(self) -> None:
        """Let every consumer look: something happened that concerns all of them."""
        for waiter in self.waiters:
            waiter.notify()

    def restore(self, entries: list[Entry]) -> None:
        """Start over with other tickets; consumers that wait go on waiting."""
        self.entries = deque(entries)
        self.taken = 0
        self.goal = self.asked + self.depth
        self.error = None

    def drop(self) -> list[Entry]:
        """Take every ticket out of the line."""
        dropped = list(self.entries)
        self.entries.clear()
        for entry in dropped:
            entry.dropped = True
        return dropped
