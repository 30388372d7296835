"""Tickets in, batches out, in order.

Draws happen on the event loop, in their turn of the history, when batches are asked for. Gathers and transforms run
concurrently. A consumer looks at the first ticket of its queue, waits for it to become a batch, and takes it out in the
very step in which it gets it: there is no moment in which a batch belongs to nobody.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from typing import TYPE_CHECKING, NamedTuple

from asyncbuf._prefetch.fetch import Fetcher
from asyncbuf._prefetch.queue import Entry, EpochCursor, Loan, Stage, TicketQueue, TicketQueues, Waiter
from asyncbuf._prefetch.tickets import SavedTicket, Tickets
from asyncbuf._prefetch.transforms import mixed_seed
from asyncbuf._runtime.supervisor import FAILURES, Supervisor, as_failure, detached, logger
from asyncbuf.batch import Batch, Draw, Ticket, batch_of
from asyncbuf.errors import BufferClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncbuf._prefetch.transforms import TransformChain
    from asyncbuf._runtime.lifecycle import Lifecycle
    from asyncbuf._runtime.threads import Threads
    from asyncbuf._table.gate import HistoryGate
    from asyncbuf._table.table import Table


class Hold(NamedTuple):
    """What whoever holds up the hand-over gives back.

    Attributes:
        loop: the event loop that the lock belongs to.
        lock: the lock.
    """

    loop: asyncio.AbstractEventLoop
    lock: asyncio.Lock


class Pipeline:
    """Draws tickets, has them fetched, and hands them over.

    Args:
        table: what tickets are drawn from.
        chain: what is done to gathered rows.
        gate: the history.
        threads: where large gathers and sync transforms run.
        lifecycle: that of the buffer.
        batch_size: rows of a prefetched ticket; None if each call says its own.
        prefetch: how many tickets are drawn ahead of those asked for.
        workers: how many tickets are transformed at once.
        refuse: told why, when nothing will be admitted any more: each ends the waiting of its own.
    """

    def __init__(
        self,
        table: Table,
        chain: TransformChain,
        gate: HistoryGate,
        threads: Threads,
        lifecycle: Lifecycle,
        *,
        batch_size: int | None,
        prefetch: int,
        workers: int,
        refuse: Sequence[Callable[[Callable[[], Exception]], None]] = (),
    ) -> None:
        self._table = table
        self._chain = chain
        self._gate = gate
        self._life = lifecycle
        self._workers = workers
        self._queues = TicketQueues(batch_size, prefetch)
        self.main_queue = self._queues.main
        self._number = 0
        self._fetcher = Fetcher(table.storage, chain, gate, self._queues, threads, lifecycle)
        self._switch = _Switch(lifecycle, self._queues, self._fetcher, (gate.refuse, *refuse))
        self._supervisor: Supervisor | None = None
        self._hand_over_lock: Hold | None = None
        self._holding = False
        self._may_be_made_at_once = not chain.steps and not table.listens_to_hand_over
        self.finished = False
        self.gave_up: str | None = None
        self.delivered = self.dropped = self.retries = self.peak_queued = 0
        self.wait_seconds = 0.0

    # -- opening and closing ------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start the background tasks; tickets that were left in the queues are taken up again."""
        self._supervisor = Supervisor(
            self._fetcher.work, self._workers, crashed=self._switch.crash, closed=self._switch.closed
        )
        self._fetcher.open()
        self._fetcher.go_on([entry for entry in self._queues.entries if not entry.settled])
        await self._supervisor.started()

    def begin_close(self) -> None:
        """Tell everyone that waits, and let the background tasks end."""
        self._switch.close()
        if self._supervisor is not None:
            self._supervisor.stop()

    async def closed(self, seconds: float | None = None) -> bool:
        """Wait until no task and no thread is left; whether that was so in time."""
        return self._supervisor is None or await self._supervisor.stopped(seconds)

    def abandon(self) -> None:
        """The event loop was closed while the buffer was open: start over with the tickets that are there."""
        if self._supervisor is not None:
            self._supervisor.abandon()
        self._supervisor = None
        self._holding = False
        self._hand_over_lock = None
        self._gate.reset()
        self._queues.abandon()
        self._fetcher.abandon()
        self._life.closed()

    def finish(self) -> None:
        """No more items will come: consumers that wait for some are told."""
        self.finished = True
        self._queues.notify_all()

    # -- asking for batches -------------------------------------------------------------------------------------------

    def queue(self, batch_size: int) -> TicketQueue:
        """The queue of a batch size; all but the prefetched one draw only what is asked for."""
        return self._queues.of(batch_size)

    def take_now(self, queue: TicketQueue, cursor: EpochCursor | None = None) -> Batch | None:
        """Same effects as ``take``, without waiting: the call is answered and served in this step.

        Returns:
            The batch; None if there is a reason to wait, or to raise: ``take`` knows it.
        """
        if self._life.reason is not None or queue.waiters or self._holding or not self._gate.is_free:
            return None
        if cursor is not None and not self._is_next(queue, cursor):
            return None
        if not queue.entries:
            return self._make_now(queue, cursor)
        if queue.entries[0].batch is None:
            return None
        queue.calls += 1
        try:
            self._fill(queue)
        except BaseException:
            queue.calls, queue.error = queue.calls - 1, None
            raise
        return self._hand_over(queue, cursor)

    def _make_now(self, queue: TicketQueue, cursor: EpochCursor | None) -> Batch | None:
        """A batch that is drawn, gathered and handed over in this step: no ticket has to be queued for that.

        Returns:
            The batch; None if that is not possible, or if the gather failed and its ticket is in the queue.
        """
        if not self._may_be_made_at_once or queue.depth or not self._table.may_draw(queue.batch_size):
            return None
        if not self._fetcher.gathers_now(queue.batch_size, queue.offload):
            return None
        draw = None
        try:
            draw = self._table.draw(queue.batch_size)
            data = self._fetcher.gathered(draw)
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
        number = self._number
        self._number = number + 1
        if not self.peak_queued or len(self._queues) > 1:
            self.peak_queued = max(self.peak_queued, self.queued + 1)
        self.delivered += 1
        if queue is not self.main_queue:
            self._queues.forget(queue)
        if cursor is not None:
            cursor.number, cursor.begun = draw.epoch, True
        return batch_of(data, number, draw, 0, self._table.write_count)

    def _hand_over(self, queue: TicketQueue, cursor: EpochCursor | None) -> Batch:
        """The first batch of a queue goes to the first consumer."""
        entry = queue.hand_over()
        batch = entry.batch
        assert batch is not None
        self.delivered += 1
        if cursor is not None:
            cursor.number, cursor.begun = batch.epoch, True
        if self._chain.handed_over is not None:
            self._chain.handed_over(batch.data)
        if self._table.listens_to_hand_over:
            self._gate.submit(functools.partial(self._handed_over, entry.ticket), exclusive=True)
        if queue is not self.main_queue:
            self._queues.forget(queue)
        return batch

    def _handed_over(self, ticket: Ticket) -> None:
        self._table.handed_over(ticket.draw, ticket.write_count)
        self.table_changed()

    async def take(self, queue: TicketQueue, cursor: EpochCursor | None = None) -> Batch | None:
        """Wait for the next batch of a queue.

        Args:
            queue: the queue.
            cursor: the only pass that is wanted; None for any batch.

        Returns:
            The batch; None when the pass has no more.

        Raises:
            PrefetchError: the batch could not be made; the next call tries again.
            BufferClosedError, BufferFailedError: no batch will come.
        """
        if self._life.reason is not None:
            raise self._life.reason()
        waiter = Waiter(cursor)
        queue.waiters[waiter] = None
        try:
            self._gate.submit(functools.partial(self._answer, queue, waiter))
            while not self._is_served(queue, waiter):
                await self._wait(waiter)
            return None if self._is_over(queue, waiter) else self._hand_over(queue, cursor)
        except asyncio.CancelledError:
            self.gave_up = self._blocked(queue)
            raise
        finally:
            self._leave(queue, waiter)

    def _is_next(self, queue: TicketQueue, cursor: EpochCursor) -> bool:
        """Whether the next ticket of a queue at which nobody waits, drawn or not, belongs to a pass."""
        if queue.entries:
            return cursor.takes(queue.entries[0])
        return cursor.number is None or cursor.number == self._next_epoch(queue)

    def _next_epoch(self, queue: TicketQueue) -> int | None:
        """Number of the pass that the next draw of a queue belongs to."""
        sampler = self._table.sampler
        epoch = sampler.epoch
        return epoch if epoch is None else epoch + sampler.leaves_out(queue.batch_size)

    def _leave(self, queue: TicketQueue, waiter: Waiter) -> None:
        """A call has ended, by a batch, an error or a cancellation: those behind it go on."""
        if not waiter.served:
            queue.give_up(waiter)
        if queue.waiters:
            self._gate.submit(functools.partial(self._retry_first, queue))
            if queue.starving:
                self._gate.submit(functools.partial(self._fill, queue))
            queue.notify()
        else:
            self._queues.forget(queue)

    async def _wait(self, waiter: Waiter) -> None:
        start = time.perf_counter()
        waiter.wake = asyncio.get_running_loop().create_future()
        try:
            await waiter.wake
        finally:
            waiter.wake = None
            self.wait_seconds += time.perf_counter() - start

    def _is_served(self, queue: TicketQueue, waiter: Waiter) -> bool:
        """Whether the wait of a consumer is over: its batch is there, or its pass has no more.

        Raises:
            Exception: no batch will come, or the ticket that holds it up has failed.
        """
        if self._life.reason is not None:
            raise self._life.reason()
        if self.finished and not queue.entries and waiter.answered and not self._table.may_draw(queue.batch_size):
            raise BufferClosedError("finish() was called: no item will come for the batch that was waited for")
        if self._holding or queue.first is not waiter:
            return False
        if self._is_over(queue, waiter):
            return True
        if not queue.entries:
            self._raise_draw_error(queue, waiter)
            return False
        entry = queue.entries[0]
        if entry.stage is Stage.FAILED:
            raise entry.failure()
        if entry.batch is None:
            stuck = self._fetcher.stuck
            if stuck is not None and waiter.answered and not stuck.reported:
                raise stuck.failure()  # nobody may come for that one
            return False
        return True

    def _is_over(self, queue: TicketQueue, waiter: Waiter) -> bool:
        """Whether the pass of the first consumer has no more tickets."""
        if waiter.cursor is None:
            return False
        return not waiter.cursor.takes(queue.entries[0]) if queue.entries else waiter in queue.parked

    def _raise_draw_error(self, queue: TicketQueue, waiter: Waiter) -> None:
        if not waiter.answered or queue.error is None:
            return
        error, queue.error = queue.error, None
        try:
            if self.finished and isinstance(error, ValueError):
                raise BufferClosedError(f"finish() was called, and no batch can be drawn any more: {error}") from error
            raise error
        finally:
            del error  # it holds this frame, which must not hold it in turn

    # -- drawing ------------------------------------------------------------------------------------------------------

    def _answer(self, queue: TicketQueue, waiter: Waiter) -> None:
        """The turn of a call in the history has come: draw what it calls for."""
        self._retry_first(queue)
        queue.answer(waiter)
        if waiter.answered or waiter.served:
            self._fill(queue)

    def table_changed(self) -> None:
        """The history went on: consumers that wait for data may have some now."""
        for queue in self._queues:
            if queue.starving:
                self._fill(queue)
        if self.finished:
            self._queues.notify_all()

    def _fill(self, queue: TicketQueue) -> None:
        queue.error = None
        try:
            while queue.wants_more and self._life.reason is None and self._may_draw(queue):
                self._line_up(queue, self._table.draw(queue.batch_size))
        except BaseException as error:
            queue.error = detached(as_failure(error))
            if not isinstance(error, FAILURES):
                raise  # whoever is told of it first: the consumer is told, too
        finally:
            queue.notify()

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
        seed = mixed_seed(self._table.generator.initial_seed(), self._number)
        entry = Entry(Ticket(self._number, draw, seed, self._table.write_count), is_prefetched=queue is self.main_queue)
        self._number += 1
        is_urgent = bool(queue.waiters)
        queue.append(entry)
        self.peak_queued = max(self.peak_queued, self.queued)
        if error is None:
            self._fetcher.make(entry, queue.offload, is_urgent=is_urgent)
        else:
            self._fetcher.fail(entry, error)

    def _retry_first(self, queue: TicketQueue) -> None:
        """Try a ticket again whose failure a consumer has seen."""
        for entry in (queue.entries[0] if queue.entries else None, self._fetcher.stuck):
            if entry is not None and entry.reported and self._life.reason is None:
                self.retries += 1
                entry.retry()
                self._fetcher.go_on([entry])

    # -- dropping -----------------------------------------------------------------------------------------------------

    def skip(self, queue: TicketQueue) -> int | None:
        """Drop the first ticket of a queue: its number, or None where there is none."""
        entry = queue.skip()
        if entry is None:
            return None
        queue.notify()
        self._dropped([entry])
        return entry.ticket.number

    def flush(self) -> int:
        """Drop every ticket that no call waits for: how many."""
        dropped = [entry for queue in self._queues for entry in queue.drop()]
        self._dropped(dropped)
        return len(dropped)

    def _dropped(self, entries: Sequence[Entry]) -> None:
        self.dropped += len(entries)
        for entry in entries:
            self._table.dropped(entry.ticket.draw)
        self._fetcher.next_in_order()
        self._fetcher.went_on()
        self._gate.submit(self.table_changed)

    # -- snapshots ----------------------------------------------------------------------------------------------------

    async def hold(self) -> Hold:
        """Hand nothing over until ``release``. Consumers may still ask, and the tickets that they call for are drawn.

        One holds at a time; others wait, first come, first served.
        """
        loop = asyncio.get_running_loop()
        if self._hand_over_lock is None or self._hand_over_lock.loop is not loop:
            # A lock belongs to one loop, a buffer that is not open to none.
            self._hand_over_lock = Hold(loop, asyncio.Lock())
        hold = self._hand_over_lock
        await hold.lock.acquire()
        self._holding = True
        return hold

    async def settle(self, deadline: float | None) -> None:
        """Come to rest: wait until every ticket is a batch or has failed, and no stateful transform is at work.

        When the time is over, only for the stateful transform that is at work. None is begun until ``release``.

        Args:
            deadline: by the clock of the event loop; None if there is all the time.
        """
        loop = asyncio.get_running_loop()
        while self._life.reason is None and self.in_flight and self._fetcher.stuck is None:
            left = None if deadline is None else deadline - loop.time()
            if (left is not None and left <= 0) or not await self._fetcher.step(left):
                break
        await self._fetcher.rest()

    def release(self, hold: Hold) -> None:
        """End a hold: hand over again, and go on with stateful transforms."""
        if self._hand_over_lock is not hold:
            return  # its event loop was closed, and another one took over
        self._holding = False
        self._fetcher.end_rest()
        self._queues.notify(is_stuck=self._fetcher.stuck is not None)
        if hold.loop.is_closed():
            self._hand_over_lock = None
        else:
            hold.lock.release()

    def waits_for(self) -> str:
        """In words, what a standstill waits for."""
        unsettled = [entry for entry in self._queues.entries if not entry.settled]
        if not unsettled:
            return "a stateful transform that is at work"  # on a ticket that was dropped
        also = " (a stateful transform is at work)" if self._fetcher.changes_state else ""
        return f"batch {unsettled[0].ticket.number}: {unsettled[0].stage.value}{also}"

    def capture(self) -> Tickets:
        """The tickets that nobody has taken, in order, each as far as it is.

        Raises:
            TimeoutError: a stateful transform is at work, so that its state is neither that before nor that after.
        """
        if self._fetcher.changes_state:
            raise TimeoutError("snapshot: expected stateful transforms to have ended, found one at work")
        main = self.main_queue
        return Tickets(
            self._number,
            0 if main is None else main.depth,
            0 if main is None else max(0, len(main.entries) - main.depth),
            [
                SavedTicket.of(entry, queue.batch_size, is_main=queue is main)
                for queue in self._queues
                for entry in queue.entries
            ],
            self.delivered,
            self.dropped,
        )

    def lend(self) -> Loan:
        """Withhold every batch that was just captured from consumers, until it is copied."""
        return self._queues.lend()

    def give_back(self, loan: Loan, count: int | None = None) -> None:
        """The next tickets of a loan are copied.

        Args:
            loan: what ``lend`` returned.
            count: how many; None for all that are left.
        """
        loan.give_back(count)
        self._queues.notify(is_stuck=self._fetcher.stuck is not None)

    def restore(self, tickets: Tickets) -> None:
        """Replace the tickets that nobody has taken; consumers that wait get these, in order."""
        for queue in self._queues:
            queue.drop(spoken_for=True)
        self._fetcher.forget()
        self._number = tickets.number
        self.delivered, self.dropped = tickets.delivered, tickets.dropped
        queues: dict[int, list[Entry]] = {}
        device_step = len(self._chain.steps) - 1 if self._chain.delivers else None
        for saved in tickets.queue:
            size = self.main_queue.batch_size if saved.is_main and self.main_queue is not None else saved.batch_size
            queues.setdefault(size, []).append(saved.entry(device_step))
        for size in dict.fromkeys([*(queue.batch_size for queue in self._queues), *queues]):
            self.queue(size).restore(queues.get(size, []))
        if self._life.reason is None:
            self._fetcher.go_on([entry for entry in self._queues.entries if not entry.settled])
        self._queues.notify(is_stuck=self._fetcher.stuck is not None)
        self._gate.submit(self.table_changed)

    # -- what it looks like -------------------------------------------------------------------------------------------

    @property
    def drawn(self) -> int:
        """Number of tickets ever drawn."""
        return self._number

    @property
    def queued(self) -> int:
        """Number of tickets that nobody has taken."""
        return self._queues.queued

    @property
    def in_flight(self) -> int:
        """Number of tickets that are not settled."""
        return sum(not entry.settled for entry in self._queues.entries)

    @property
    def waiting(self) -> int:
        """Number of consumers that wait."""
        return self._queues.waiting

    @property
    def gathers(self) -> tuple[float, int, int]:
        """Seconds spent gathering; number of gathers on the event loop; number of gathers elsewhere."""
        fetcher = self._fetcher
        return fetcher.gather_seconds, fetcher.inline_gathers, fetcher.thread_gathers

    def blocked(self) -> list[str]:
        """In words, what each queue that has waiting consumers waits for."""
        return [self._blocked(queue) for queue in self._queues if queue.waiters]

    def _blocked(self, queue: TicketQueue) -> str:
        who = f"{len(queue.waiters)} consumer(s) of batches of {queue.batch_size} wait"
        if queue.entries:
            first = queue.entries[0]
            return f"{who} for batch {first.ticket.number}: {first.stage.value}"
        answer = self._table.may_draw(queue.batch_size)
        if answer is not True:
            return f"{who} for data: {answer.reason}"
        return f"{who} for a draw, which is behind {self._gate.waiting_writers + self._gate.writing} write(s)"


class _Switch:
    """Ends all waiting, when the buffer is closed or its background work has failed.

    Args:
        lifecycle: that of the buffer.
        queues: whose consumers are told.
        fetcher: whose threads are waited for at the end.
        refuse: told why, each for those that wait with it.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        queues: TicketQueues,
        fetcher: Fetcher,
        refuse: Sequence[Callable[[Callable[[], Exception]], None]],
    ) -> None:
        self._life = lifecycle
        self._queues = queues
        self._fetcher = fetcher
        self._refuse = refuse

    def close(self) -> None:
        """The end is wanted."""
        self._life.closing()
        self._end_waiting()

    def crash(self, error: BaseException) -> None:
        """The background work has ended by itself."""
        # Cancelled as a whole: the event loop is being shut down, with a buffer that was left open.
        level = logging.DEBUG if isinstance(error, asyncio.CancelledError) else logging.ERROR
        logger.log(level, "the background work of the buffer ended: %r", error, exc_info=error)
        self._life.failed(error)
        self._end_waiting()

    async def closed(self) -> None:
        """Wait for threads; then nothing is left."""
        await self._fetcher.close()
        self._life.closed()

    def _end_waiting(self) -> None:
        assert self._life.reason is not None
        for refuse in self._refuse:
            refuse(self._life.reason)
        self._fetcher.went_on()
        self._queues.notify_all()
