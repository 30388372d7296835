"""Standing still: for a snapshot, and to put another state in place."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from asyncbuf._prefetch.entry import Loan
from asyncbuf._prefetch.tickets import SavedTicket, Tickets

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncbuf._prefetch.drawer import Drawer
    from asyncbuf._prefetch.entry import Entry
    from asyncbuf._prefetch.fetch import Fetcher
    from asyncbuf._prefetch.in_order import InOrder
    from asyncbuf._prefetch.leases import Leases
    from asyncbuf._prefetch.pipeline import Pipeline
    from asyncbuf._prefetch.queue import TicketQueues
    from asyncbuf._runtime.lifecycle import Lifecycle
    from asyncbuf._table.gate import HistoryGate


class Hold(NamedTuple):
    """What whoever holds up the hand-over gives back.

    Attributes:
        loop: the event loop that the lock belongs to.
        lock: the lock.
    """

    loop: asyncio.AbstractEventLoop
    lock: asyncio.Lock


class TicketsAt:
    """The tickets that nobody had taken at a moment. How far each is, is asked for later.

    Args:
        tickets: counters of the moment, without the tickets.
        queue: the tickets, each with the batch size of its queue and whether that is the main one.
        unseen: those that were dropped and that stateful transforms are still to see.
    """

    def __init__(
        self, tickets: Tickets, queue: Sequence[tuple[Entry, int, bool]], unseen: Callable[[], list[SavedTicket]]
    ) -> None:
        self._tickets = tickets
        self._queue = queue
        self._unseen = unseen

    @property
    def is_settled(self) -> bool:
        """Whether nothing more will become of any of them."""
        return all(entry.settled or entry.dropped for entry, _, _ in self._queue)

    def saved(self) -> Tickets:
        """The tickets of that moment, each as far as it is now. No stateful transform may be at work."""
        queue = [SavedTicket.of(entry, size, is_main=is_main) for entry, size, is_main in self._queue]
        return replace(self._tickets, queue=queue, unseen=self._unseen())


class Standstill:
    """Brings hand-overs and stateful transforms to a stop; captures and replaces the tickets that nobody has taken.

    Args:
        pipeline: whose hand-overs are held.
        drawer: draws again after a restore.
        queues: where the tickets are.
        leases: those that consumers have for a while.
        fetcher: makes them into batches.
        in_order: the order in which stateful transforms see them.
        gate: the history.
        lifecycle: that of the buffer.
        device_step: the step of the transforms that brings a batch to its device; None without one.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        drawer: Drawer,
        queues: TicketQueues,
        leases: Leases,
        fetcher: Fetcher,
        in_order: InOrder,
        gate: HistoryGate,
        lifecycle: Lifecycle,
        device_step: int | None,
    ) -> None:
        self._pipeline = pipeline
        self._drawer = drawer
        self._queues = queues
        self._leases = leases
        self._fetcher = fetcher
        self._in_order = in_order
        self._gate = gate
        self._life = lifecycle
        self._device_step = device_step
        self._lock: Hold | None = None

    async def hold(self) -> Hold:
        """Hand nothing over until ``release``. Consumers may still ask, and the tickets that they call for are drawn.

        One holds at a time; others wait, first come, first served.
        """
        loop = asyncio.get_running_loop()
        if self._lock is None or self._lock.loop is not loop:
            # A lock belongs to one loop, a buffer that is not open to none.
            self._lock = Hold(loop, asyncio.Lock())
        hold = self._lock
        await hold.lock.acquire()
        self._pipeline.hold()
        return hold

    async def settle(self, deadline: float | None) -> None:
        """Wait until every ticket is a batch or has failed, or the time is over.

        Args:
            deadline: by the clock of the event loop; None if there is all the time.
        """
        loop = asyncio.get_running_loop()
        while self._life.reason is None and self._is_unsettled and self._in_order.stuck is None:
            left = None if deadline is None else deadline - loop.time()
            if (left is not None and left <= 0) or not await self._fetcher.step(left):
                break

    @property
    def _is_unsettled(self) -> bool:
        return bool(self._queues.in_flight or self._in_order.dropped)

    async def rest(self) -> None:
        """Begin no stateful transform until ``release``, and wait for the one that is at work."""
        await self._fetcher.rest()

    def release(self, hold: Hold) -> None:
        """End a hold: hand over again, and go on with stateful transforms."""
        if self._lock is not hold:
            return  # its event loop was closed, and another one took over
        if hold.loop.is_closed():
            self._lock = None
        else:
            hold.lock.release()
        self._fetcher.end_rest()
        self._pipeline.release()

    def waits_for(self) -> str:
        """In words, what ``settle`` and ``rest`` wait for."""
        unsettled = [entry for entry in self._queues.entries if not entry.settled]
        if not unsettled:
            return "a stateful transform that is at work"  # on a ticket that was dropped
        also = " (a stateful transform is at work)" if self._in_order.is_busy else ""
        return f"batch {unsettled[0].ticket.number}: {unsettled[0].stage.value}{also}"

    def capture(self) -> Tickets:
        """The tickets that nobody has taken, in order, each as far as it is.

        Raises:
            TimeoutError: a stateful transform is at work, so that its state is neither that before nor that after.
        """
        if self._in_order.is_busy:
            raise TimeoutError("snapshot: expected stateful transforms to have ended, found one at work")
        return self.note().saved()

    def note(self) -> TicketsAt:
        """The tickets that nobody has taken. Whoever wants them as they are must lend them in the same step."""
        main, counts, in_order = self._queues.main, self._queues.counts, self._in_order
        own = None if main is None else main.batch_size
        queue = [(entry, size, size == own) for entry, size in self._leases.untaken]
        tickets = Tickets(
            counts.drawn,
            0 if main is None else main.depth,
            0 if main is None else max(0, sum(is_main for _, _, is_main in queue) - main.depth),
            [],
            counts.delivered,
            counts.dropped,
        )
        dropped = in_order.dropped

        def unseen() -> list[SavedTicket]:
            return [
                SavedTicket.of(entry, entry.ticket.draw.indices.numel(), is_main=entry.is_prefetched)
                for entry in in_order.unseen(dropped)
            ]

        return TicketsAt(tickets, queue, unseen)

    def when_at_rest(self, action: Callable[[], None]) -> None:
        """Do something short, which must not raise, once no stateful transform is at work; at once if none is."""
        self._fetcher.when_at_rest(action)

    async def settle_those(self, tickets: TicketsAt, deadline: float | None) -> None:
        """Wait until each of some tickets is a batch or has failed, or the time is over, or the buffer is closed."""
        loop = asyncio.get_running_loop()
        while self._life.reason is None and not tickets.is_settled:
            left = None if deadline is None else deadline - loop.time()
            if (left is not None and left <= 0) or not await self._fetcher.step(left):
                break

    def lend(self) -> Loan:
        """Withhold every ticket that was just captured from consumers, until it is copied."""
        return Loan([entry for entry, _ in self._leases.untaken])

    def give_back(self, loan: Loan, count: int | None = None) -> None:
        """The next tickets of a loan are copied.

        Args:
            loan: what ``lend`` returned.
            count: how many; None for all that are left.
        """
        loan.give_back(count)
        self._queues.notify(is_stuck=self._in_order.stuck is not None)

    def restore(self, tickets: Tickets) -> None:
        """Replace the tickets that nobody has taken; consumers that wait get these, in order."""
        for queue in self._queues:
            queue.drop(spoken_for=True)
        self._leases.forget()
        self._in_order.clear()
        counts = self._queues.counts
        counts.drawn, counts.delivered, counts.dropped = tickets.number, tickets.delivered, tickets.dropped
        main = self._queues.main
        queues: dict[int, list[Entry]] = {}
        for saved in tickets.queue:
            size = main.batch_size if saved.is_main and main is not None else saved.batch_size
            queues.setdefault(size, []).append(saved.entry(self._device_step))
        for entries in queues.values():
            # Of another batch size than before, the queue may be made of two.
            entries.sort(key=lambda entry: entry.ticket.number)
        for size in dict.fromkeys([*(queue.batch_size for queue in self._queues), *queues]):
            self._queues.of(size).restore(queues.get(size, []))
        unseen = [saved.entry() for saved in tickets.unseen]
        for entry in unseen:
            entry.dropped = True
        self._fetcher.dropped(unseen)
        if self._life.reason is None:
            self._fetcher.go_on([entry for entry in self._queues.entries if not entry.settled])
        self._drawer.drop_stale()  # the buffer may be stricter than the one that was saved
        self._queues.notify(is_stuck=self._in_order.stuck is not None)
        self._gate.submit(self._drawer.table_changed)
