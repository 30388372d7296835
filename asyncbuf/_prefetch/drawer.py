"""Drawing tickets: in their turn of the history, as many as the calls call for."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from asyncbuf._prefetch.entry import Entry
from asyncbuf._prefetch.transforms import mixed_seed
from asyncbuf._runtime.supervisor import FAILURES, as_failure, detached
from asyncbuf.batch import Batch, Draw, Ticket, batch_of, ticket_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from asyncbuf._prefetch.fetch import Fetcher
    from asyncbuf._prefetch.gather import Gatherer
    from asyncbuf._prefetch.in_order import InOrder
    from asyncbuf._prefetch.queue import EpochCursor, TicketQueue, TicketQueues, Waiter
    from asyncbuf._runtime.lifecycle import Lifecycle
    from asyncbuf._table.gate import HistoryGate
    from asyncbuf._table.table import Table

# So many tickets are drawn in a row before anybody looks at the clock; then, for so many seconds in one step.
_BURST = 8
_SLICE_SECONDS = 0.003
# Why a ticket is dropped, in the ledger.
STALE = "stale"


class Drawer:
    """Draws tickets for the calls of each queue, and drops them. Every method belongs into a turn of the history.

    Args:
        table: what tickets are drawn from.
        gate: the history.
        queues: where tickets go.
        gatherer: reads rows.
        fetcher: makes tickets into batches.
        in_order: knows which failed ticket holds up others.
        lifecycle: that of the buffer; nothing is drawn while it is not open.
        went_on: called after each draw and each change of the table; None if nobody waits for that.
        starved: called where a consumer, whose turn has come or that had a chance, has no ticket.

    Attributes:
        finished: whether no more items will come.
    """

    def __init__(
        self,
        table: Table,
        gate: HistoryGate,
        queues: TicketQueues,
        gatherer: Gatherer,
        fetcher: Fetcher,
        in_order: InOrder,
        lifecycle: Lifecycle,
        went_on: Callable[[], None] | None = None,
        starved: Callable[[], None] | None = None,
    ) -> None:
        self._table = table
        self._gate = gate
        self._queues = queues
        self._gatherer = gatherer
        self._fetcher = fetcher
        self._in_order = in_order
        self._life = lifecycle
        self._counts = queues.counts
        self._tally = table.tally
        self._went_on = went_on
        self._starved = starved
        self._slices = _Slices(gate, lifecycle)
        self.finished = False

    def finish(self) -> None:
        """No more items will come: consumers that wait for some are told."""
        self.finished = True
        self.table_changed()

    def is_next(self, queue: TicketQueue, cursor: EpochCursor) -> bool:
        """Whether the next ticket of a queue at which nobody waits, drawn or not, belongs to a pass."""
        if queue.entries:
            return cursor.takes(queue.entries[0])
        return cursor.number is None or cursor.number == self._next_epoch(queue)

    def _next_epoch(self, queue: TicketQueue) -> int | None:
        """Number of the pass that the next draw of a queue belongs to."""
        sampler = self._table.sampler
        epoch = sampler.epoch
        return epoch if epoch is None else epoch + sampler.leaves_out(queue.batch_size)

    # -- drawing ------------------------------------------------------------------------------------------------------

    def answer(self, queue: TicketQueue, waiter: Waiter) -> None:
        """The turn of a call in the history has come: draw what it calls for."""
        self.retry_first(queue)
        queue.answer(waiter)
        if waiter.answered or waiter.served:
            self._feed(queue)

    def table_changed(self) -> None:
        """The history went on: consumers that wait for data may have some now."""
        for queue in self._queues:
            if queue.starving:
                self._feed(queue)
        if self.finished:
            self._queues.notify_all()
        if self._went_on is not None:
            self._went_on()

    def _feed(self, queue: TicketQueue) -> None:
        """Draw what calls wait for, and tell where some still have no ticket."""
        self.fill(queue)
        if queue.starving and self._starved is not None:
            self._starved()

    def fill(self, queue: TicketQueue) -> None:
        """Draw what the calls call for: all of it in this turn of the history, and much of it in several slices."""
        if self._slices.waiting:
            self._slices.waiting.append(queue)
            return
        queue.error = None
        drawn = 0
        try:
            while queue.wants_more and self._life.reason is None and self._may_draw(queue):
                if drawn >= _BURST and self._slices.cuts(queue, drawn, self.fill):
                    break
                self._line_up(queue, self._table.draw(queue.batch_size))
                drawn += 1
        except BaseException as error:
            queue.error = detached(as_failure(error))
            if not isinstance(error, FAILURES):
                raise  # whoever is told of it first: the consumer is told, too
        finally:
            if queue.waiters:
                queue.notify()

    def catch_up(self) -> None:
        """Draw now what is left of the turn, because the buffer is being closed."""
        self._slices.hurry(self.fill)

    def abandon(self) -> None:
        """The event loop was closed in the middle of everything."""
        self._slices.forget()

    def _may_draw(self, queue: TicketQueue) -> bool:
        """Whether the ticket that is wanted may be drawn now. Consumers whose pass has no more are parked."""
        while (waiter := queue.next_starving) is not None:
            cursor = waiter.cursor
            if cursor is not None and cursor.number is None:
                cursor.number = self._next_epoch(queue)
            if cursor is None or cursor.number == self._next_epoch(queue):
                return bool(self._table.may_draw(queue.batch_size))
            queue.park_starving()
        if not queue.wants_more:
            return False
        # A pass begins when its first batch is asked for, not ahead of it.
        sampler = self._table.sampler
        begins = sampler.between_epochs or sampler.leaves_out(queue.batch_size)
        return not begins and bool(self._table.may_draw(queue.batch_size))

    def _line_up(self, queue: TicketQueue, draw: Draw, error: BaseException | None = None) -> None:
        """A draw becomes the last ticket of a queue; its rows are gathered, unless that was tried and failed."""
        counts = self._counts
        number = counts.drawn
        counts.drawn = number + 1
        seed = mixed_seed(self._table.generator.initial_seed(), number)
        ticket = Ticket(number, draw, seed, self._table.write_count)
        entry = Entry(ticket, is_prefetched=queue is self._queues.main)
        is_urgent = bool(queue.waiters)
        queue.append(entry)
        if len(queue.entries) > counts.peak_queued or len(self._queues.by_size) > 1:
            counts.peak_queued = max(counts.peak_queued, self._queues.queued)
        if error is None:
            self._fetcher.make(entry, queue.offload, is_urgent=is_urgent)
        else:
            self._fetcher.fail(entry, error)
        if self._went_on is not None:
            self._went_on()

    def retry_first(self, queue: TicketQueue) -> None:
        """Try a ticket again whose failure a consumer has seen."""
        for entry in (queue.entries[0] if queue.entries else None, self._in_order.stuck):
            if entry is not None and entry.reported and self._life.reason is None:
                self._counts.retries += 1
                entry.retry()
                self._fetcher.go_on([entry])

    def draw_batch(self, queue: TicketQueue) -> Batch | None:
        """Draw and gather a batch in one step, if that is quick: no ticket has to be queued for that.

        Returns:
            The batch; None if that is not possible now, or if the gather failed and its ticket is in the queue.
        """
        if not self._table.may_draw(queue.batch_size):
            return None
        if not self._gatherer.runs_here(queue.batch_size, queue.offload):
            return None
        draw = None
        try:
            draw = self._table.draw(queue.batch_size)
            data = self._gatherer.gather(draw)
        except BaseException as error:
            if draw is None:
                self._queues.forget(queue)
                if self.finished and isinstance(error, ValueError):
                    return None
                raise as_failure(error)  # noqa: B904 (it is the error itself, or has it as its cause)
            self._line_up(queue, draw, error)
            if not isinstance(error, FAILURES):
                raise
            return None
        counts = self._counts
        number = counts.drawn
        counts.drawn = number + 1
        if not counts.peak_queued or len(self._queues.by_size) > 1:
            counts.peak_queued = max(counts.peak_queued, self._queues.queued + 1)
        if self._went_on is not None:
            self._went_on()
        return batch_of(data, number, draw, 0, self._table.write_count)

    def entry_of(self, batch: Batch, *, is_prefetched: bool) -> Entry:
        """The ticket of a batch that was drawn and gathered in one step."""
        seed = mixed_seed(self._table.generator.initial_seed(), batch.number)
        entry = Entry(ticket_of(batch, seed), is_prefetched=is_prefetched)
        entry.made(batch)
        return entry

    # -- dropping -----------------------------------------------------------------------------------------------------

    def skip(self, queue: TicketQueue) -> int | None:
        """Drop the first ticket of a queue: its number, or None where there is none."""
        entry = queue.skip()
        if entry is None:
            return None
        queue.notify()
        self._dropped([entry], "skip")
        return entry.ticket.number

    def drop_stale(self) -> None:
        """Let go what is too old: tickets, also those that calls wait for, which get others; and stored items."""
        is_too_old = self._table.is_too_old
        dropped = [entry for queue in self._queues for entry in queue.take_out(lambda e: is_too_old(e.ticket.draw))]
        if dropped:  # ahead of the items: what they give back to the sampler may be too old itself
            self._dropped(dropped, STALE)
        self._table.evict_stale()
        for entry in self._queues.entries:
            entry.say_again(self._table.told_again(entry.ticket.draw))

    def drop_returned(self, entry: Entry) -> None:
        """Drop a ticket that came back from a consumer and is too old by now."""
        entry.dropped = True
        self._dropped([entry], STALE)

    def flush(self, cause: str = "flush") -> int:
        """Drop every ticket that no call waits for: how many.

        Args:
            cause: why, for the ledger.
        """
        dropped = [entry for queue in self._queues for entry in queue.drop()]
        self._dropped(dropped, cause)
        return len(dropped)

    def _dropped(self, entries: Sequence[Entry], cause: str) -> None:
        self._counts.dropped += len(entries)
        self._tally.drop(cause, len(entries))
        for entry in entries:
            self._table.dropped(entry.ticket.draw)
        self._fetcher.dropped(entries)
        self._gate.submit(self._let_go if self._table.lets_go else self.table_changed, exclusive=self._table.lets_go)

    def _let_go(self) -> None:
        self._table.let_go()
        self.table_changed()


class _Slices:
    """Many draws of one turn of the history, in several steps of the event loop. The turn does not end meanwhile.

    Args:
        gate: the history.
        lifecycle: that of the buffer.

    Attributes:
        waiting: the queues for which there is more to draw in this turn, in order.
    """

    def __init__(self, gate: HistoryGate, lifecycle: Lifecycle) -> None:
        self._gate = gate
        self._life = lifecycle
        self._start = 0.0
        self._hurries = False
        self._next: asyncio.Handle | None = None
        self.waiting: deque[TicketQueue] = deque()

    def cuts(self, queue: TicketQueue, drawn: int, fill: Callable[[TicketQueue], None]) -> bool:
        """Whether the rest of a queue is for a later step, which then comes by itself.

        Args:
            queue: the queue.
            drawn: how many tickets this step has drawn for it.
            fill: draws the rest. Not kept for longer than that takes: it belongs to whoever has this object.
        """
        now = time.perf_counter()
        if drawn == _BURST:
            self._start = now
        if now - self._start < _SLICE_SECONDS or self._hurries or self._life.loop is None:
            return False
        self.waiting.append(queue)
        if self._next is None:
            self._gate.occupy()
            self._next = self._life.loop.call_soon(self._go_on, fill)
        return True

    def _go_on(self, fill: Callable[[TicketQueue], None]) -> None:
        waiting, self.waiting = self.waiting, deque()
        try:
            while waiting and not self.waiting:
                fill(waiting.popleft())
        finally:
            self.waiting += waiting
            self._next = None
            if self.waiting and self._life.loop is not None:
                self._next = self._life.loop.call_soon(self._go_on, fill)
            else:
                self._gate.vacate()

    def hurry(self, fill: Callable[[TicketQueue], None]) -> None:
        """Draw the rest in this step."""
        if self._next is None:
            return
        self._next.cancel()
        self._hurries = True
        try:
            self._go_on(fill)
        finally:
            self._hurries = False

    def forget(self) -> None:
        """Leave the rest; the history has been reset."""
        self._next = None
        self.waiting.clear()
