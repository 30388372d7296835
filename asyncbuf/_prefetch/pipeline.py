"""Tickets in, batches out, in order.

Draws happen on the event loop, in their turn of the history, when batches are asked for. Gathers and transforms run
concurrently. A consumer looks at the first ticket of its line, waits for it to become a batch, and takes it out in the
very step in which it gets it: there is no moment in which a batch belongs to nobody.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from asyncbuf._prefetch.fetch import Fetcher
from asyncbuf._prefetch.queue import Entry, EpochCursor, Stage, TicketQueue, TicketQueues, Waiter
from asyncbuf._prefetch.tickets import SavedTicket, Tickets
from asyncbuf._prefetch.transforms import mixed_seed
from asyncbuf._runtime.supervisor import FAILURES, Supervisor, as_failure, detached, logger
from asyncbuf.batch import Batch, Draw, Ticket
from asyncbuf.errors import BufferClosedError, BufferFailedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from asyncbuf._prefetch.transforms import TransformChain
    from asyncbuf._table.gate import HistoryGate
    from asyncbuf._table.table import Table


class Pipeline:
    """Draws tickets, makes them real, and hands them over.

    Args:
        table: what tickets are drawn from.
        chain: what is done to gathered rows.
        gate: the history.
        batch_size: rows of a prefetched ticket; None if each call says its own.
        prefetch: how many tickets are drawn ahead of those asked for.
        workers: how many tickets are made real at once.
    """

    def __init__(
        self,
        table: Table,
        chain: TransformChain,
        gate: HistoryGate,
        *,
        batch_size: int | None,
        prefetch: int,
        workers: int,
    ) -> None:
        self._table = table
        self.chain = chain
        self._gate = gate
        self._workers = workers
        self._lines = TicketQueues(batch_size, prefetch)
        self.main_line = self._lines.main
        self._number = 0
        self._background: Supervisor | None = None
        self._unusable: Callable[[], Exception] | None = functools.partial(BufferClosedError, _NOT_OPEN)
        self.fetcher = Fetcher(table.storage, chain, gate, workers, self._notify)
        self._delivery: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None
        self._holding = False
        self.finished = False
        self.gave_up: str | None = None
        self.delivered = self.dropped = self.retries = self.peak_queued = 0
        self.wait_seconds = 0.0

    # -- opening and closing ------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether no task and no thread is left."""
        return self._background is None

    @property
    def unusable(self) -> Exception | None:
        """Why no batch can be had now; None while the buffer is open."""
        return None if self._unusable is None else self._unusable()

    async def open(self) -> None:
        """Start the background tasks; tickets that were left in the line are taken up again."""
        background = Supervisor(self.fetcher.work, self._workers, crashed=self._crash, closed=self._close)
        self._background = background
        self.fetcher.open(lambda: background.stopping)
        self._unusable = None
        self.fetcher.go_on([entry for entry in self._lines.entries if not entry.settled])
        await background.started()

    def begin_close(self) -> None:
        """Tell everyone that waits, and let the background tasks end."""
        if self._unusable is None:
            self._stop(functools.partial(BufferClosedError, _CLOSED))
        if self._background is not None:
            self._background.stop()

    async def closed(self, seconds: float | None = None) -> bool:
        """Wait until no task and no thread is left; whether that was so in time."""
        return self._background is None or await self._background.stopped(seconds)

    def _stop(self, reason: Callable[[], Exception]) -> None:
        self._unusable = reason
        self._gate.refuse(reason)
        self.fetcher.halt()
        self._lines.notify_all()

    def _crash(self, error: BaseException) -> None:
        # Cancelled as a whole: the event loop is being shut down, with a buffer that was left open.
        level = logging.DEBUG if isinstance(error, asyncio.CancelledError) else logging.ERROR
        logger.log(level, "the background work of the buffer ended: %r", error, exc_info=error)

        def reason() -> Exception:
            failure = BufferFailedError(f"the background work of the buffer ended: {error!r}")
            failure.__cause__ = error
            return failure

        self._stop(reason)

    async def _close(self) -> None:
        await self.fetcher.close()
        self._background = None

    def finish(self) -> None:
        """No more items will come: consumers that wait for some are told."""
        self.finished = True
        self._lines.notify_all()

    # -- asking for batches -------------------------------------------------------------------------------------------

    def line(self, batch_size: int) -> TicketQueue:
        """The line of a batch size; all but the prefetched one draw only what is asked for."""
        return self._lines.of(batch_size)

    def take_now(self, line: TicketQueue, within: EpochCursor | None = None) -> Batch | None:
        """The next batch of a line, if it is there or can be made in this step, and nobody waits for it.

        What happens is what would happen in ``take``, without what a call needs that may have to wait.

        Returns:
            The batch; None if there is a reason to wait, or to raise: ``take`` knows it.
        """
        if self._unusable is not None or line.waiters or self._holding or not self._gate.is_free:
            return None
        if within is not None and not self._is_next(line, within):
            return None
        if line.entries:
            batch = line.entries[0].batch
            if batch is None:
                return None
            if self.chain.handed_over is not None:
                self.chain.handed_over(batch.data)
            line.answered += 1
            try:
                self._fill(line)
            except BaseException:
                line.answered, line.error = line.answered - 1, None
                raise
            line.entries.popleft()
        else:
            may_be_made = not (line.depth or self.chain.steps) and self._table.drawable
            if not (may_be_made and self.fetcher.gathers_now(line.batch_size, line.offload)):
                return None
            batch = self._made_now(line)
            if batch is None:
                return None
            line.answered += 1
        line.taken += 1
        self.delivered += 1
        if line is not self.main_line:
            self._lines.forget(line)
        if within is not None:
            within.number, within.begun = batch.epoch, True
        return batch

    def _made_now(self, line: TicketQueue) -> Batch | None:
        """A batch that is drawn and gathered in this step; None if that went wrong, with the ticket in the line."""
        draw = None
        try:
            draw = self._table.draw(line.batch_size)
            data = self.fetcher.gathered(draw.indices)
        except BaseException as error:
            if draw is None:
                self._lines.forget(line)
                raise as_failure(error)  # noqa: B904 (it is the error itself, or has it as its cause)
            self._line_up(line, draw, error)
            if not isinstance(error, FAILURES):
                raise
            return None
        number = self._number
        self._number = number + 1
        if not self.peak_queued or len(self._lines) > 1:
            self.peak_queued = max(self.peak_queued, self.queued + 1)
        return Batch(data, draw.indices, draw.info or {}, number, draw.epoch, draw.last)

    async def take(self, line: TicketQueue, within: EpochCursor | None = None) -> Batch | None:
        """Wait for the next batch of a line.

        Args:
            line: the line.
            within: the only pass that is wanted; None for any batch.

        Returns:
            The batch; None when the pass has no more.

        Raises:
            PrefetchError: the batch could not be made; the next call tries again.
            BufferClosedError, BufferFailedError: no batch will come.
        """
        if self._unusable is not None:
            raise self._unusable()
        waiter = Waiter(within)
        line.waiters.append(waiter)
        try:
            self._gate.submit(functools.partial(self._answer, line, waiter))
            while True:
                batch = self._claim(line, waiter)
                if batch is not None or waiter.over:
                    return batch
                await self._wait(waiter)
        except asyncio.CancelledError:
            self.gave_up = self._blocked(line)
            raise
        finally:
            self._leave(line, waiter)

    def _is_next(self, line: TicketQueue, within: EpochCursor) -> bool:
        """Whether the next ticket of a line at which nobody waits, drawn or not, belongs to a pass."""
        if line.entries:
            return within.takes(line.entries[0])
        return within.number is None or within.number == self._next_epoch(line)

    def _next_epoch(self, line: TicketQueue) -> int | None:
        """Number of the pass that the next draw of a line belongs to."""
        sampler = self._table.sampler
        epoch = sampler.epoch
        return epoch if epoch is None else epoch + sampler.leaves_out(line.batch_size)

    def _leave(self, line: TicketQueue, waiter: Waiter) -> None:
        """A call has ended, by a batch, an error or a cancellation: those behind it go on."""
        if waiter in line.waiters:
            line.give_up(waiter)
        if line.waiters:
            self._gate.submit(functools.partial(self._retry_first, line))
            if line.starves:
                self._gate.submit(functools.partial(self._fill, line))
            line.notify()
        else:
            self._lines.forget(line)

    async def _wait(self, waiter: Waiter) -> None:
        start = time.perf_counter()
        waiter.wake = asyncio.get_running_loop().create_future()
        try:
            await waiter.wake
        finally:
            waiter.wake = None
            self.wait_seconds += time.perf_counter() - start

    def _claim(self, line: TicketQueue, waiter: Waiter) -> Batch | None:
        """Hand the first batch over, if it is this consumer's turn and the batch is there."""
        if self._unusable is not None:
            raise self._unusable()
        if self.finished and not line.entries and not self._table.drawable:
            raise BufferClosedError("finish() was called: no item will come for the batch that was waited for")
        if waiter.over or self._holding or line.waiters[0] is not waiter:
            return None
        if not line.entries:
            if waiter.answered and line.error is not None:
                error, line.error = line.error, None
                try:
                    raise error
                finally:
                    del error  # it holds this frame, which must not hold it in turn
            return None
        entry = line.entries[0]
        if waiter.within is not None and not waiter.within.takes(entry):
            waiter.over = True
            return None
        if entry.stage is Stage.FAILED:
            raise entry.failure()
        if entry.batch is None:
            stuck = self.fetcher.stuck
            if stuck is not None and waiter.answered and not stuck.reported:
                raise stuck.failure()  # nobody may come for that one
            return None
        self.delivered += 1
        if waiter.within is not None:
            waiter.within.begun = True
        if self.chain.handed_over is not None:
            self.chain.handed_over(entry.batch.data)
        return line.hand_over()

    # -- drawing ------------------------------------------------------------------------------------------------------

    def _answer(self, line: TicketQueue, waiter: Waiter) -> None:
        """The turn of a call in the history has come: draw what it calls for."""
        self._retry_first(line)
        line.answer(waiter)
        if waiter.answered:
            self._fill(line)

    def written(self) -> None:
        """The history went on: consumers that wait for data may have some now."""
        for line in self._lines:
            if line.waiters and line.starves:
                self._fill(line)
        if self.finished:
            self._lines.notify_all()

    def _fill(self, line: TicketQueue) -> None:
        line.error = None
        try:
            while self._unusable is None and line.wants_more and self._may_draw(line):
                self._line_up(line, self._table.draw(line.batch_size))
        except BaseException as error:
            line.error = detached(as_failure(error))
            if not isinstance(error, FAILURES):
                raise  # whoever is told of it first: the consumer is told, too
        finally:
            line.notify()

    def _may_draw(self, line: TicketQueue) -> bool:
        sampler = self._table.sampler
        while (waiter := line.next_waiter) is not None:
            within = waiter.within
            if within is not None and within.number is None:
                within.number = self._next_epoch(line)
            if within is None or within.number == self._next_epoch(line):
                return self._table.drawable
            line.give_up(waiter)
            waiter.over = True
            waiter.notify()
        # A pass begins when its first batch is asked for, not ahead of it.
        begins = sampler.between_epochs or sampler.leaves_out(line.batch_size)
        return line.wants_more and self._table.drawable and not begins

    def _line_up(self, line: TicketQueue, draw: Draw, error: BaseException | None = None) -> None:
        """A draw becomes the last ticket of a line; its rows are gathered, unless that was tried and failed."""
        seed = mixed_seed(self._table.generator.initial_seed(), self._number)
        entry = Entry(Ticket(self._number, draw, seed), is_prefetched=line is self.main_line)
        self._number += 1
        line.entries.append(entry)
        self.peak_queued = max(self.peak_queued, self.queued)
        if error is None:
            self.fetcher.make(entry, line.offload, is_urgent=bool(line.waiters))
        else:
            self.fetcher.fail(entry, error)

    def _notify(self) -> None:
        self._lines.notify(is_stuck=self.fetcher.stuck is not None)

    def _retry_first(self, line: TicketQueue) -> None:
        """Try a ticket again whose failure a consumer has seen."""
        for entry in (line.entries[0] if line.entries else None, self.fetcher.stuck):
            if entry is not None and entry.reported and self._unusable is None:
                self.retries += 1
                entry.retry()
                self.fetcher.go_on([entry])

    # -- dropping -----------------------------------------------------------------------------------------------------

    def skip(self, line: TicketQueue) -> int | None:
        """Drop the first ticket of a line: its number, or None where there is none."""
        if not line.entries:
            return None
        entry = line.entries.popleft()
        entry.dropped = True
        line.notify()
        self._dropped(1)
        return entry.ticket.number

    def flush(self) -> int:
        """Drop every ticket that no call waits for: how many."""
        count = sum(line.drop() for line in self._lines)
        self._dropped(count)
        return count

    def _dropped(self, count: int) -> None:
        self.dropped += count
        self.fetcher.next_in_order()
        self.fetcher.went_on()
        self._gate.submit(self.written)

    # -- snapshots ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """Hand nothing over meanwhile. Consumers may still ask, and the tickets that they call for are drawn."""
        loop = asyncio.get_running_loop()
        if self._delivery is None or self._delivery[0] is not loop:
            self._delivery = (loop, asyncio.Lock())  # a lock belongs to one loop, a buffer that is not open to none
        async with self._delivery[1]:
            self._holding = True
            try:
                yield
            finally:
                self._holding = False
                self._notify()

    async def settle(self, deadline: float | None) -> None:
        """Wait until every ticket is a batch or has failed, or the time is over. At once while nothing is at work.

        Args:
            deadline: by the clock of the event loop; None if there is all the time.
        """
        loop = asyncio.get_running_loop()
        while self._unusable is None and self.in_flight and not self.fetcher.stuck:
            if not await self.fetcher.step(None if deadline is None else max(0.0, deadline - loop.time())):
                return

    def capture(self) -> Tickets:
        """The tickets that nobody has taken, in order, each as far as it is.

        Raises:
            TimeoutError: a stateful transform is at work, so that its state is neither that before nor that after.
        """
        if self.fetcher.changes_state:
            raise TimeoutError("snapshot: expected stateful transforms to have ended in time, found one at work")
        main = self.main_line
        return Tickets(
            self._number,
            0 if main is None else main.depth,
            0 if main is None else max(0, len(main.entries) - main.depth),
            [
                SavedTicket.of(entry, line.batch_size, is_main=line is main)
                for line in self._lines
                for entry in line.entries
            ],
        )

    def restore(self, tickets: Tickets) -> None:
        """Replace the tickets that nobody has taken; consumers that wait get these, in order."""
        for line in self._lines:
            line.drop(spoken_for=True)
        self.fetcher.forget()
        self._number = tickets.number
        queues: dict[int, list[Entry]] = {}
        delivery = len(self.chain.steps) - 1 if self.chain.delivers else None
        for saved in tickets.queue:
            size = self.main_line.batch_size if saved.is_main and self.main_line is not None else saved.batch_size
            queues.setdefault(size, []).append(saved.entry(delivery))
        for size in dict.fromkeys([*(line.batch_size for line in self._lines), *queues]):
            self.line(size).restore(queues.get(size, []))
        if self._unusable is None:
            self.fetcher.go_on([entry for entry in self._lines.entries if not entry.settled])
        self._notify()
        self._gate.submit(self.written)

    # -- what it looks like -------------------------------------------------------------------------------------------

    @property
    def drawn(self) -> int:
        """Number of tickets ever drawn."""
        return self._number

    @property
    def queued(self) -> int:
        """Number of tickets that nobody has taken."""
        return self._lines.queued

    @property
    def in_flight(self) -> int:
        """Number of tickets that are not settled."""
        return sum(not entry.settled for entry in self._lines.entries)

    @property
    def waiting(self) -> int:
        """Number of consumers that wait."""
        return self._lines.waiting

    def blocked(self) -> list[str]:
        """In words, what each line that has waiting consumers waits for."""
        return [self._blocked(line) for line in self._lines if line.waiters]

    def _blocked(self, line: TicketQueue) -> str:
        who = f"{len(line.waiters)} consumer(s) of batches of {line.batch_size} wait"
        if line.entries:
            first = line.entries[0]
            return f"{who} for batch {first.ticket.number}: {first.stage.value}"
        if not self._table.drawable:
            return f"{who} for data: {self._table.writer.size} of at least {self._table.min_size} items are stored"
        return f"{who} for a draw, which is behind {self._gate.waiting_writers + self._gate.writing} write(s)"


_NOT_OPEN = "the buffer is not open: use `async with buffer:` or `await buffer.open()` first"
_CLOSED = "the buffer was closed"
