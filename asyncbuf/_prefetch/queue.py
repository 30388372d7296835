"""Queues of tickets that nobody has taken yet, and the consumers that wait for them. State only: nothing here waits."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any

from asyncbuf._prefetch.counts import Counts
from asyncbuf._prefetch.offload import Offload

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator

    from asyncbuf._prefetch.entry import Entry


# For how many batch sizes it is remembered where their rows are best gathered.
_MOST_CHOICES = 64


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
        cursor: the pass that it goes through; None if it takes any batch.
        wake: what it waits on; None while it does not wait.
        answered: whether its turn in the history has come.
        gone: whether it gave up.
        served: whether it has got its batch.
        task: the task that waits; None while it does not wait.
        failure: makes the error that it is told if it still has no ticket; None if it may wait.
    """

    __slots__ = ("answered", "cursor", "failure", "gone", "served", "task", "wake")

    def __init__(self, cursor: EpochCursor | None) -> None:
        self.cursor = cursor
        self.wake: asyncio.Future[None] | None = None
        self.answered = self.gone = self.served = False
        self.task: asyncio.Task[Any] | None = None
        self.failure: Callable[[], Exception] | None = None

    def notify(self) -> None:
        """Let it look again."""
        if self.wake is not None and not self.wake.done():
            self.wake.set_result(None)


Waiters = OrderedDict[Waiter, None]


class TicketQueue:
    """Tickets of one batch size, in order, and their consumers, first come, first served.

    How many tickets are drawn follows from how many batches were asked for and from nothing else: when the turn of a
    call in the history has come, it counts as a *call*, and tickets are drawn until there are ``calls + depth``. So the
    draws fall on the calls, and neither threads nor cancelled calls (which take their count back) can move them.

    The consumers whose turn has come stand in three groups, in the order in which they asked: those for which there is
    a ticket; those that *starve*; and those that are *parked*, because the next ticket is one of a later pass than
    theirs. Parked ones do not count: if one before them gives up, they get its ticket, and their pass is over as soon
    as they stand first. Every change takes the same time, however many tickets and consumers there are.

    Attributes:
        batch_size: rows of a ticket.
        depth: how many tickets are drawn ahead of those asked for.
        entries: the tickets that nobody has taken.
        waiters: the consumers, in the order in which they asked.
        starving: those that count and have no ticket.
        parked: those whose pass has no ticket left for them.
        calls: number of consumers that count and wait.
        early: number of consumers that got a batch before their turn in the history had come: their draw is still due.
        error: why the last attempt to draw failed; None after a success.
        offload: where rows are gathered.
    """

    __slots__ = (
        "batch_size",
        "calls",
        "depth",
        "early",
        "entries",
        "error",
        "offload",
        "parked",
        "starving",
        "waiters",
    )

    def __init__(self, batch_size: int, depth: int, offload: Offload) -> None:
        self.batch_size = batch_size
        self.depth = depth
        self.entries: deque[Entry] = deque()
        self.waiters: Waiters = OrderedDict()
        self.starving: Waiters = OrderedDict()
        self.parked: Waiters = OrderedDict()
        self.calls = self.early = 0
        self.error: BaseException | None = None
        self.offload = offload

    @property
    def wants_more(self) -> bool:
        """Whether the calls so far call for another ticket."""
        return len(self.entries) < self.calls + self.depth - self.early

    @property
    def next_starving(self) -> Waiter | None:
        """The consumer that the next ticket is for; None if it would be ahead of the calls."""
        return next(iter(self.starving), None)

    @property
    def first(self) -> Waiter | None:
        """The consumer whose turn it is."""
        return next(iter(self.waiters), None)

    # -- consumers ----------------------------------------------------------------------------------------------------

    def answer(self, waiter: Waiter) -> None:
        """The turn of a call in the history has come."""
        if waiter.served:
            self.early -= 1
        elif not waiter.gone:
            waiter.answered = True
            self._place(waiter)

    def _place(self, waiter: Waiter) -> None:
        if self.calls >= len(self.entries):
            self.starving[waiter] = None
        elif waiter.cursor is not None and not waiter.cursor.takes(self.entries[self.calls]):
            self.parked[waiter] = None
            return
        self.calls += 1

    def park_starving(self) -> None:
        """The pass of the first starving consumer has no more tickets."""
        waiter, _ = self.starving.popitem(last=False)
        self.parked[waiter] = None
        self.calls -= 1

    def give_up(self, waiter: Waiter) -> None:
        """A call ends without a batch; its ticket, if it had one, is for the next."""
        waiter.gone = True
        self.waiters.pop(waiter, None)
        if not waiter.answered or self.parked.pop(waiter, self) is None:
            return
        self.calls -= 1
        if self.starving.pop(waiter, self) is None:
            return
        if self.parked:
            self.parked.popitem(last=False)  # it asked before those that starve, and gets what there is of its pass
            self.calls += 1
        elif self.starving:
            self.starving.popitem(last=False)

    def hand_over(self) -> Entry:
        """The first ticket leaves with the first consumer, if there is one."""
        if self.waiters:
            waiter, _ = self.waiters.popitem(last=False)
            waiter.served = True
            if not waiter.answered:
                self.early += 1
                return self.entries.popleft()
        self.calls -= 1
        return self.entries.popleft()

    def notify(self) -> None:
        """Let the first consumer look, if there is something to see."""
        waiter = self.first
        if waiter is None:
            return
        is_ready = self.entries[0].settled if self.entries else self.error is not None
        if is_ready or waiter in self.parked:
            waiter.notify()

    def notify_all(self) -> None:
        """Let every consumer look: something happened that concerns all of them."""
        for waiter in self.waiters:
            waiter.notify()

    # -- tickets ------------------------------------------------------------------------------------------------------

    def append(self, entry: Entry) -> None:
        """A ticket was drawn: for the first consumer that starves, or ahead of the calls."""
        self.entries.append(entry)
        if self.starving:
            self.starving.popitem(last=False)

    def restore(self, entries: list[Entry]) -> None:
        """Start over with other tickets; consumers that wait go on waiting."""
        self.entries = deque(entries)
        self.error = None
        self._place_all()

    def _place_all(self) -> None:
        self.calls = 0
        self.starving.clear()
        self.parked.clear()
        for waiter in self.waiters:
            if waiter.answered:
                self._place(waiter)

    def skip(self) -> Entry | None:
        """Take the first ticket out, whether or not a call waits for it."""
        if not self.entries:
            return None
        entry = self.entries.popleft()
        entry.dropped = True
        self._place_all()
        return entry

    def take_out(self, is_unwanted: Callable[[Entry], bool]) -> list[Entry]:
        """Take tickets out, whether or not calls wait for them: those calls get the next ones."""
        dropped = [entry for entry in self.entries if is_unwanted(entry)]
        if dropped:
            for entry in dropped:
                entry.dropped = True
            self.entries = deque(entry for entry in self.entries if not entry.dropped)
            self._place_all()
        return dropped

    def put_back(self, entry: Entry) -> None:
        """A ticket that had left is here again, ahead of all later ones."""
        later = 0
        while later < len(self.entries) and self.entries[later].ticket.number < entry.ticket.number:
            later += 1
        self.entries.insert(later, entry)
        self._place_all()

    def drop(self, *, spoken_for: bool = False) -> list[Entry]:
        """Take tickets out of the queue.

        Args:
            spoken_for: whether to take those too that calls wait for whose turn has come.

        Returns:
            The tickets, in order.
        """
        kept = 0 if spoken_for else self.calls
        dropped: list[Entry] = []
        while len(self.entries) > kept:
            dropped.append(self.entries.pop())
            dropped[-1].dropped = True
        return dropped[::-1]


class TicketQueues:
    """The queues of a buffer: that of its own batch size, which is prefetched, and one for each other that is in use.

    Args:
        batch_size: rows of a prefetched ticket; None if each call says its own.
        prefetch: how many tickets of that size are drawn ahead of those asked for.

    Attributes:
        main: the queue of the buffer's own batch size; None if it has none.
        counts: what is counted of all of them.
        by_size: the queues that are in use, by batch size.
    """

    def __init__(self, batch_size: int | None, prefetch: int) -> None:
        self.counts = Counts()
        self._offloads: dict[int, Offload] = {}
        self.by_size: dict[int, TicketQueue] = {}
        self.main: TicketQueue | None = None
        if batch_size is not None:
            self.main = self.by_size[batch_size] = TicketQueue(batch_size, prefetch, self._offload(batch_size))

    def of(self, batch_size: int) -> TicketQueue:
        """The queue of a batch size; all but the main one draw only what is asked for."""
        queue = self.by_size.get(batch_size)
        if queue is None:
            queue = self.by_size[batch_size] = TicketQueue(batch_size, 0, self._offload(batch_size))
        return queue

    def _offload(self, batch_size: int) -> Offload:
        """Where batches of a size are gathered: that is learned over many calls, and outlives the queue."""
        while len(self._offloads) >= _MOST_CHOICES and batch_size not in self._offloads:
            del self._offloads[next(iter(self._offloads))]
        return self._offloads.setdefault(batch_size, Offload())

    def forget(self, queue: TicketQueue) -> None:
        """Let the queue of another batch size go once nothing is in it."""
        if not queue.entries and queue is not self.main:
            self.by_size.pop(queue.batch_size, None)

    def __iter__(self) -> Iterator[TicketQueue]:
        """The queues that there are now."""
        return iter(list(self.by_size.values()))

    @property
    def sizes(self) -> list[int]:
        """The batch sizes that were asked for, as far as that is kept."""
        return list(self._offloads)

    @property
    def entries(self) -> list[Entry]:
        """The tickets that nobody has taken, line by queue."""
        return [entry for queue in self.by_size.values() for entry in queue.entries]

    @property
    def queued(self) -> int:
        """How many tickets nobody has taken."""
        return sum([len(queue.entries) for queue in self.by_size.values()])

    @property
    def in_flight(self) -> int:
        """How many of those are not settled."""
        return sum(not entry.settled for queue in self.by_size.values() for entry in queue.entries)

    @property
    def waiting(self) -> int:
        """Number of consumers that wait."""
        return sum([len(queue.waiters) for queue in self.by_size.values()])

    def notify(self, *, is_stuck: bool) -> None:
        """Let the first consumer of each queue look, if there is something to see.

        Args:
            is_stuck: whether there is: a failed ticket that holds up those of every queue.
        """
        for queue in self.by_size.values():
            if is_stuck and (first := queue.first) is not None:
                first.notify()
            queue.notify()

    def abandon(self) -> None:
        """Forget the consumers: the event loop in which they waited was closed."""
        for queue in self:
            for entry in queue.entries:
                entry.give_back()
            queue.waiters.clear()
            queue.early = 0
            queue.restore(list(queue.entries))

    def notify_all(self) -> None:
        """Let every consumer look: something happened that concerns all of them."""
        for queue in self.by_size.values():
            queue.notify_all()
