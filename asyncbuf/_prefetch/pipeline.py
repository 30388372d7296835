"""Batches out, in order: how consumers get them.

A consumer looks at the first ticket of its queue, waits for it to become a batch, and takes it out in the very step in
which it gets it: there is no moment in which a batch belongs to nobody.
"""

from __future__ import annotations

import asyncio
import functools
import time
from typing import TYPE_CHECKING, Any

from asyncbuf._prefetch.entry import Stage
from asyncbuf._prefetch.queue import TicketQueue, Waiter
from asyncbuf.errors import BufferClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncbuf._prefetch.drawer import Drawer
    from asyncbuf._prefetch.in_order import InOrder
    from asyncbuf._prefetch.leases import Leases
    from asyncbuf._prefetch.queue import EpochCursor, TicketQueues
    from asyncbuf._prefetch.transforms import TransformChain
    from asyncbuf._runtime.lifecycle import Lifecycle
    from asyncbuf._runtime.stalls import Stalls
    from asyncbuf._table.gate import HistoryGate
    from asyncbuf._table.table import Table
    from asyncbuf.batch import Batch, Ticket


class Pipeline:
    """Answers the calls of consumers, and hands batches over to them, first come, first served.

    Args:
        table: told of hand-overs.
        gate: the history.
        queues: where tickets and consumers wait.
        leases: batches that consumers have for a while.
        drawer: draws what calls call for.
        in_order: knows which failed ticket holds up others.
        chain: the transforms.
        lifecycle: that of the buffer.
        stalls: told of calls that wait.

    Attributes:
        gave_up: in words, what the last consumer that gave up waited for.
    """

    def __init__(
        self,
        table: Table,
        gate: HistoryGate,
        queues: TicketQueues,
        leases: Leases,
        drawer: Drawer,
        in_order: InOrder,
        chain: TransformChain,
        lifecycle: Lifecycle,
        stalls: Stalls,
    ) -> None:
        self._table = table
        self._gate = gate
        self._queues = queues
        self._leases = leases
        self._counts = queues.counts
        self._drawer = drawer
        self._in_order = in_order
        self._chain = chain
        self._life = lifecycle
        self._stalls = stalls
        self._held = False
        self._ended: list[Batch] = []  # on lease, and acknowledged while the buffer stood still
        self._may_be_drawn_as_batch = chain.is_empty and not table.listens_to_hand_over
        self.main_queue = queues.main
        self.gave_up: str | None = None

    def queue(self, batch_size: int) -> TicketQueue:
        """The queue of a batch size; all but the prefetched one draw only what is asked for."""
        return self._queues.of(batch_size)

    def take_now(self, queue: TicketQueue, cursor: EpochCursor | None = None, *, leased: bool = False) -> Batch | None:
        """Same effects as ``take``, without waiting: the call is answered and served in this step.

        Returns:
            The batch; None if there is a reason to wait, or to raise: ``take`` knows it.
        """
        if self._life.reason is not None or queue.waiters or self._held or not self._gate.is_free:
            return None
        if cursor is not None and not self._drawer.is_next(queue, cursor):
            return None
        if not queue.entries:
            return self._make_now(queue, cursor, leased=leased)
        if queue.entries[0].batch is None:
            return None
        queue.calls += 1
        try:
            self._drawer.fill(queue)
        except BaseException:
            queue.calls, queue.error = queue.calls - 1, None
            raise
        return self._hand_over(queue, cursor, leased=leased)

    def _make_now(self, queue: TicketQueue, cursor: EpochCursor | None, *, leased: bool) -> Batch | None:
        """A batch that is drawn, gathered and handed over in this step: no ticket has to be queued for that."""
        if not self._may_be_drawn_as_batch or queue.depth:
            return None
        batch = self._drawer.draw_batch(queue)
        if batch is None:
            return None
        if leased:
            self._leases.begin(self._drawer.entry_of(batch, is_prefetched=queue is self.main_queue), queue)
        else:
            self._counts.delivered += 1
        if queue is not self.main_queue:
            self._queues.forget(queue)
        if cursor is not None:
            cursor.number, cursor.begun = batch.epoch, True
        return batch

    def _hand_over(self, queue: TicketQueue, cursor: EpochCursor | None, *, leased: bool) -> Batch:
        """The first batch of a queue goes to the first consumer."""
        entry = queue.hand_over()
        batch = entry.batch
        assert batch is not None
        if cursor is not None:
            cursor.number, cursor.begun = batch.epoch, True
        if self._chain.handed_over is not None:
            self._chain.handed_over(batch.data)
        if leased:
            self._leases.begin(entry, queue)
        else:
            self._taken(entry.ticket)
        if queue is not self.main_queue:
            self._queues.forget(queue)
        return batch

    def _taken(self, ticket: Ticket) -> None:
        """A consumer has a batch for good."""
        self._counts.delivered += 1
        if self._table.listens_to_hand_over:
            self._gate.submit(functools.partial(self._handed_over, ticket), exclusive=True)

    def is_leased(self, batch: Batch) -> bool:
        """Whether a consumer has it on lease, and no other state was put in place."""
        return self._leases.entry(batch) is not None

    def end_lease(self, batch: Batch, *, is_done: bool) -> None:
        """A consumer is done with a batch that it had on lease, or gives it back: it is then first in line.

        One that is too old by then is dropped. Does nothing if another state was put in place meanwhile, to which the
        batch does not belong.
        """
        if is_done and self._held:  # all that is captured while the buffer stands still has the batch
            self._ended.append(batch)
        elif is_done:
            entry = self._leases.acknowledge(batch)
            if entry is not None:
                self._taken(entry.ticket)
                if self._drawer.finished:
                    self._queues.notify_all()
                self._stalls.starved()
        elif (entry := self._leases.entry(batch)) is not None and self._table.is_too_old(entry.ticket.draw):
            self._gate.submit(functools.partial(self._drop, batch))
        elif entry is not None:
            entry.say_again(self._table.told_again(entry.ticket.draw))
            queue = self._leases.give_back(batch)
            assert queue is not None
            queue.notify()

    def _drop(self, batch: Batch) -> None:
        entry = self._leases.acknowledge(batch)
        if entry is not None:
            self._drawer.drop_returned(entry)

    def _handed_over(self, ticket: Ticket) -> None:
        self._table.handed_over(ticket.draw, ticket.write_count)
        self._drawer.table_changed()

    async def take(
        self, queue: TicketQueue, cursor: EpochCursor | None = None, *, leased: bool = False
    ) -> Batch | None:
        """Wait for the next batch of a queue.

        Args:
            queue: the queue.
            cursor: the only pass that is wanted; None for any batch.
            leased: whether the consumer has it only until ``end_lease``.

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
        loop, start = asyncio.get_running_loop(), 0.0
        try:
            self._gate.submit(functools.partial(self._drawer.answer, queue, waiter))
            while not self._is_served(queue, waiter):
                # Not in a coroutine of its own: of thousands that are cancelled at once, each keeps its frames.
                waiter.wake = loop.create_future()
                waiter.task = asyncio.current_task(loop)
                self._stalls.consumer_waits(self)
                start = time.perf_counter()
                await waiter.wake
                self._counts.wait_seconds += time.perf_counter() - start
            return None if self._is_over(queue, waiter) else self._hand_over(queue, cursor, leased=leased)
        except asyncio.CancelledError:
            self._counts.wait_seconds += time.perf_counter() - start if start else 0.0
            self.gave_up = self._blocked(queue)
            raise
        finally:
            self._leave(queue, waiter)

    def _leave(self, queue: TicketQueue, waiter: Waiter) -> None:
        """A call has ended, by a batch, an error or a cancellation: those behind it go on."""
        if not waiter.served:
            queue.give_up(waiter)
        if queue.waiters:
            self._gate.submit(functools.partial(self._drawer.retry_first, queue))
            if queue.starving:
                self._gate.submit(functools.partial(self._drawer.fill, queue))
            queue.notify()
        else:
            self._queues.forget(queue)
        if self._in_order.stuck is not None:
            self._queues.notify(is_stuck=True)
        waiter.task = None
        self._stalls.waited()
        self._stalls.starved()

    def _is_served(self, queue: TicketQueue, waiter: Waiter) -> bool:
        """Whether the wait of a consumer is over: its batch is there, or its pass has no more.

        Raises:
            Exception: no batch will come, or the ticket that holds it up has failed.
        """
        if self._life.reason is not None:
            raise self._life.reason()
        if (
            self._drawer.finished
            and not queue.entries
            and waiter.answered
            and not self._leases  # what is out may come back
            and not self._table.may_draw(queue.batch_size)
        ):
            raise BufferClosedError("finish() was called: no item will come for the batch that was waited for")
        if waiter.failure is not None and waiter in queue.starving:
            raise waiter.failure()
        if self._held or queue.first is not waiter:
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
            stuck = self._in_order.stuck
            if stuck is not None and waiter.answered and not (stuck.reported and self._may_be_retried()):
                raise stuck.failure()  # nobody may come for that one
            return False
        return True

    def _may_be_retried(self) -> bool:
        """Whether a consumer waits that may try the ticket again that holds up the others."""
        main = self.main_queue
        return main is not None and bool(main.waiters)

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
            if self._drawer.finished and isinstance(error, ValueError):
                raise BufferClosedError(f"finish() was called, and no batch can be drawn any more: {error}") from error
            raise error
        finally:
            del error  # it holds this frame, which must not hold it in turn

    def hold(self) -> None:
        """Hand nothing over until ``release``. Consumers may still ask, and the tickets they call for are drawn."""
        self._held = True

    def release(self) -> None:
        """Hand over again."""
        self._held = False
        ended, self._ended = self._ended, []
        for batch in ended:
            self.end_lease(batch, is_done=True)
        self._queues.notify(is_stuck=self._in_order.stuck is not None)
        self._stalls.starved()

    # -- what calls wait for ------------------------------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """Whether nothing is handed over for now."""
        return self._held

    @property
    def has_leases(self) -> bool:
        """Whether a batch is on lease, after whose end calls may go on."""
        return bool(self._leases)

    @property
    def first_calls(self) -> list[object]:
        """The first call of each queue."""
        return [queue.first for queue in self._queues if queue.waiters]

    @property
    def starving(self) -> list[tuple[object, asyncio.Task[Any] | None]]:
        """The calls that wait for a draw that is not possible, each with its task."""
        return [(waiter, waiter.task) for queue in self._lacking() for waiter in queue.starving]

    @property
    def is_starved(self) -> bool:
        """Whether no ticket is left, and none of any size in use may be drawn now."""
        return not self._queues.queued and not any(self._may_draw(size) for size in self._queues.sizes)

    def refuse_starving(self, error: Callable[[], Exception]) -> None:
        """Tell the calls that wait for a draw that is not possible."""
        for queue in self._lacking():
            for waiter in queue.starving:
                waiter.failure = error
                waiter.notify()

    def _lacking(self) -> list[TicketQueue]:
        return [queue for queue in self._queues if queue.starving and not self._may_draw(queue.batch_size)]

    def _may_draw(self, batch_size: int) -> bool:
        """Whether a draw is possible; also if it fails, which the calls are told by it."""
        try:
            return bool(self._table.may_draw(batch_size))
        except Exception:
            return True

    @property
    def waits_for_data(self) -> bool:
        """Whether consumers wait for a draw that is not possible yet."""
        return any(
            queue.waiters and not queue.entries and self._table.may_draw(queue.batch_size) is not True
            for queue in self._queues
        )

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
