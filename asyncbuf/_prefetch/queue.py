"""A line of tickets that nobody has taken yet, and the consumers that wait for them. State only: nothing here waits."""

from __future__ import annotations

import enum
from collections import deque
from typing import TYPE_CHECKING, Any

from asyncbuf._prefetch.offload import Offload
from asyncbuf.batch import Batch, Ticket
from asyncbuf.errors import PrefetchError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator

    from asyncbuf._prefetch.transforms import Partial


# For how many batch sizes it is remembered where their rows are best gathered.
_MOST_CHOICES = 64


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
        gathering: whether a thread is gathering its rows.
        is_prefetched: whether it stands in the line of the buffer's own batch size.
        dropped: whether nobody wants it any more, so that what a thread still makes of it is let go.
    """

    __slots__ = ("batch", "dropped", "error", "gathering", "is_prefetched", "progress", "reported", "stage", "ticket")

    def __init__(self, ticket: Ticket, *, is_prefetched: bool) -> None:
        self.ticket = ticket
        self.stage = Stage.DRAWN
        self.progress: Partial | None = None
        self.batch: Batch | None = None
        self.error: BaseException | None = None
        self.reported = self.gathering = self.dropped = False
        self.is_prefetched = is_prefetched

    @property
    def settled(self) -> bool:
        """Whether it is a batch or has failed."""
        return self.stage is Stage.READY or self.stage is Stage.FAILED

    def keep(self, progress: Partial) -> None:
        """Its rows are gathered, or a step of its transforms is done."""
        self.progress = progress
        self.stage = Stage.GATHERED

    def ready(self, data: Any) -> None:
        """Its transforms are done."""
        ticket, draw = self.ticket, self.ticket.draw
        self.batch = Batch(data, draw.indices, draw.info or {}, ticket.number, draw.epoch, draw.last)
        self.progress = self.error = None
        self.stage = Stage.READY

    def fail(self, error: BaseException) -> None:
        """A transform or the gather raised."""
        self.error = error
        self.stage = Stage.FAILED

    def failure(self) -> PrefetchError:
        """What the consumer whose turn it is is told."""
        self.reported = True
        indices = self.ticket.draw.indices.tolist()
        shown = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
        try:
            why = repr(self.error)
        except Exception:
            why = type(self.error).__name__
        failure = PrefetchError(
            f"batch {self.ticket.number} could not be made from rows [{shown}]: {why}; "
            "the next sample() tries again, skip() drops it",
            self.ticket.number,
            indices,
        )
        failure.__cause__ = self.error
        return failure

    def retry(self) -> None:
        """Forget the failure; what was gathered, and the transforms that went well, stay."""
        self.error = None
        self.reported = False
        self.stage = Stage.DRAWN if self.progress is None else Stage.GATHERED


class EpochCursor:
    """A pass over the items that one or several consumers go through together.

    Attributes:
        number: number of the pass; None before the ticket of its first batch is known.
        begun: whether a batch of it was handed over.
    """

    __slots__ = ("begun", "number")

    def __init__(self) -> None:
        self.number: int | None = None
        self.begun = False

    def takes(self, entry: Entry) -> bool:
        """Whether a ticket belongs to it. If none did so far, it may turn out to be an earlier pass than expected."""
        epoch = entry.ticket.draw.epoch
        if self.number is None or (not self.begun and epoch is not None and epoch < self.number):
            self.number = epoch  # the first, or earlier: a consumer that was to take the last batch has given up
        return epoch == self.number


class Waiter:
    """A consumer in its turn.

    Attributes:
        within: the pass that it goes through; None if it takes any batch.
        wake: what it waits on; None while it does not wait.
        answered: whether its turn in the history has come.
        gone: whether it gave up before that.
        over: whether its pass has no more batches.
    """

    __slots__ = ("answered", "gone", "over", "wake", "within")

    def __init__(self, within: EpochCursor | None) -> None:
        self.within = within
        self.wake: asyncio.Future[None] | None = None
        self.answered = self.gone = self.over = False

    def notify(self) -> None:
        """Let it look again."""
        if self.wake is not None and not self.wake.done():
            self.wake.set_result(None)


class TicketQueue:
    """Tickets of one batch size, in order, and their consumers, first come, first served.

    How many tickets are drawn follows from how many batches were asked for and from nothing else: when the turn of a
    call in the history has come, it is ``answered``, and tickets are drawn until ``drawn == answered + depth``. So the
    draws fall on the calls, and neither threads nor cancelled calls (which take their count back) can move them.

    Attributes:
        batch_size: rows of a ticket.
        depth: how many tickets are drawn ahead of those asked for.
        entries: the tickets that nobody has taken.
        waiters: the consumers, in the order in which they asked. Those that are answered come first.
        taken: number of tickets that left the line by being handed over.
        answered: number of calls whose turn has come and that have not given up.
        error: why the last attempt to draw failed; None after a success.
        offload: where rows are gathered.
    """

    __slots__ = ("answered", "batch_size", "depth", "entries", "error", "offload", "taken", "waiters")

    def __init__(self, batch_size: int, depth: int, offload: Offload) -> None:
        self.batch_size = batch_size
        self.depth = depth
        self.entries: deque[Entry] = deque()
        self.waiters: deque[Waiter] = deque()
        self.taken = 0
        self.answered = 0
        self.error: BaseException | None = None
        self.offload = offload

    @property
    def wants_more(self) -> bool:
        """Whether the calls so far call for another ticket."""
        return self.taken + len(self.entries) < self.answered + self.depth

    @property
    def next_waiter(self) -> Waiter | None:
        """The consumer that the next ticket is for; None if it would be ahead of the calls."""
        there = len(self.entries)
        return self.waiters[there] if self.taken + there < self.answered else None

    @property
    def starves(self) -> bool:
        """Whether a call whose turn has come has no ticket."""
        return len(self.waiters) > len(self.entries) and self.waiters[len(self.entries)].answered

    def answer(self, waiter: Waiter) -> None:
        """The turn of a call has come."""
        if not waiter.gone:
            waiter.answered = True
            self.answered += 1

    def give_up(self, waiter: Waiter) -> None:
        """A call ends without a batch."""
        self.waiters.remove(waiter)
        if waiter.answered:
            self.answered -= 1
        waiter.gone = True

    def hand_over(self) -> Batch | None:
        """The first ticket leaves with the first consumer."""
        self.waiters.popleft()
        self.taken += 1
        return self.entries.popleft().batch

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
        self.answered = sum(waiter.answered for waiter in self.waiters)
        self.error = None

    def drop(self, *, spoken_for: bool = False) -> int:
        """Take tickets out of the line: how many.

        Args:
            spoken_for: whether to take those too that calls wait for whose turn has come.
        """
        kept = 0 if spoken_for else sum(waiter.answered for waiter in self.waiters)
        dropped = list(self.entries)[kept:]
        for entry in dropped:
            entry.dropped = True
            self.entries.pop()
        return len(dropped)


class TicketQueues:
    """The lines of a buffer: that of its own batch size, which is prefetched, and one for each other that is asked for.

    Args:
        batch_size: rows of a prefetched ticket; None if each call says its own.
        prefetch: how many tickets of that size are drawn ahead of those asked for.

    Attributes:
        main: the line of the buffer's own batch size; None if it has none.
    """

    def __init__(self, batch_size: int | None, prefetch: int) -> None:
        self._choices: dict[int, Offload] = {}
        self._lines: dict[int, TicketQueue] = {}
        self.main: TicketQueue | None = None
        if batch_size is not None:
            self.main = self._lines[batch_size] = TicketQueue(batch_size, prefetch, self._offload(batch_size))

    def of(self, batch_size: int) -> TicketQueue:
        """The line of a batch size; all but the main one draw only what is asked for."""
        line = self._lines.get(batch_size)
        if line is None:
            line = self._lines[batch_size] = TicketQueue(batch_size, 0, self._offload(batch_size))
        return line

    def _offload(self, batch_size: int) -> Offload:
        """Where batches of a size are gathered: that is learned over many calls, and outlives the line."""
        while len(self._choices) >= _MOST_CHOICES and batch_size not in self._choices:
            del self._choices[next(iter(self._choices))]
        return self._choices.setdefault(batch_size, Offload())

    def forget(self, line: TicketQueue) -> None:
        """Let the line of another batch size go that nothing is in."""
        if not line.entries and line is not self.main:
            self._lines.pop(line.batch_size, None)

    def __len__(self) -> int:
        """Number of lines."""
        return len(self._lines)

    def __iter__(self) -> Iterator[TicketQueue]:
        """The lines that there are now."""
        return iter(list(self._lines.values()))

    @property
    def entries(self) -> list[Entry]:
        """The tickets that nobody has taken, line by line."""
        return [entry for line in self._lines.values() for entry in line.entries]

    @property
    def queued(self) -> int:
        """How many tickets nobody has taken."""
        return sum([len(line.entries) for line in self._lines.values()])

    @property
    def waiting(self) -> int:
        """Number of consumers that wait."""
        return sum([len(line.waiters) for line in self._lines.values()])

    def notify(self, *, is_stuck: bool) -> None:
        """Let the first consumer of each line look, if there is something to see.

        Args:
            is_stuck: whether there is: a failed ticket that holds up those of every line.
        """
        for line in self._lines.values():
            if is_stuck and line.waiters:
                line.waiters[0].notify()
            line.notify()

    def notify_all(self) -> None:
        """Let every consumer look: something happened that concerns all of them."""
        for line in self._lines.values():
            line.notify_all()
