"""Standing still: for a snapshot, and to put another state in place."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from asyncbuf._prefetch.tickets import SavedTicket, Tickets

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncbuf._prefetch.drawer import Drawer
    from asyncbuf._prefetch.fetch import Fetcher
    from asyncbuf._prefetch.pipeline import Pipeline
    from asyncbuf._prefetch.queue import Entry, TicketQueues
    from asyncbuf._runtime.lifecycle import Lifecycle
    from asyncbuf._table.gate import HistoryGate


class Standstill:
    """Brings hand-overs and stateful transforms to a stop; captures and replaces the tickets that nobody has taken.

    Args:
        pipeline: whose hand-overs are held.
        drawer: draws again after a restore.
        queues: where the tickets are.
        fetcher: makes them into batches.
        gate: the history.
        lifecycle: that of the buffer.
        device_step: the step of the transforms that brings a batch to its device; None without one.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        drawer: Drawer,
        queues: TicketQueues,
        fetcher: Fetcher,
        gate: HistoryGate,
        lifecycle: Lifecycle,
        device_step: int | None,
    ) -> None:
        self._pipeline = pipeline
        self._drawer = drawer
        self._queues = queues
        self._fetcher = fetcher
        self._gate = gate
        self._life = lifecycle
        self._device_step = device_step
        self._lock: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """Hand nothing over meanwhile. Consumers may still ask, and the tickets that they call for are drawn."""
        loop = asyncio.get_running_loop()
        if self._lock is None or self._lock[0] is not loop:
            # A lock belongs to one loop, a buffer that is not open to none.
            self._lock = (loop, asyncio.Lock())
        async with self._lock[1]:
            self._pipeline.hold()
            try:
                yield
            finally:
                self._pipeline.release()

    @property
    def is_at_work(self) -> bool:
        """Whether a ticket that is wanted is still being made, or a stateful transform is at work."""
        return (self._queues.in_flight > 0 and self._fetcher.stuck is None) or self._fetcher.changes_state

    @property
    def changes_state(self) -> bool:
        """Whether a stateful transform is at work, on a ticket that is wanted or on one that was dropped."""
        return self._fetcher.changes_state

    async def settle(self, deadline: float | None) -> None:
        """Wait until every ticket is a batch or has failed, or the time is over. At once while nothing is at work.

        Args:
            deadline: by the clock of the event loop; None if there is all the time.
        """
        loop = asyncio.get_running_loop()
        while self._life.reason is None and self.is_at_work:
            if not await self._fetcher.step(None if deadline is None else max(0.0, deadline - loop.time())):
                return

    @asynccontextmanager
    async def resting(self) -> AsyncIterator[None]:
        """Let no stateful transform be at work meanwhile, so that its state may be replaced."""
        async with self._fetcher.resting():
            yield

    def capture(self) -> Tickets:
        """The tickets that nobody has taken, in order, each as far as it is.

        Raises:
            TimeoutError: a stateful transform is at work, so that its state is neither that before nor that after.
        """
        if self._fetcher.changes_state:
            raise TimeoutError("snapshot: expected stateful transforms to have ended in time, found one at work")
        main = self._queues.main
        return Tickets(
            self._queues.counts.drawn,
            0 if main is None else main.depth,
            0 if main is None else max(0, len(main.entries) - main.depth),
            [
                SavedTicket.of(entry, queue.batch_size, is_main=queue is main)
                for queue in self._queues
                for entry in queue.entries
            ],
        )

    def restore(self, tickets: Tickets) -> None:
        """Replace the tickets that nobody has taken; consumers that wait get these, in order."""
        for queue in self._queues:
            queue.drop(spoken_for=True)
        self._fetcher.forget()
        counts = self._queues.counts
        counts.drawn = tickets.number
        counts.dropped = 0
        counts.delivered = tickets.number - len(tickets.queue)
        main = self._queues.main
        queues: dict[int, list[Entry]] = {}
        for saved in tickets.queue:
            size = main.batch_size if saved.is_main and main is not None else saved.batch_size
            queues.setdefault(size, []).append(saved.entry(self._device_step))
        for size in dict.fromkeys([*(queue.batch_size for queue in self._queues), *queues]):
            self._queues.of(size).restore(queues.get(size, []))
        if self._life.reason is None:
            self._fetcher.go_on([entry for entry in self._queues.entries if not entry.settled])
        self._queues.notify(is_stuck=self._fetcher.stuck is not None)
        self._gate.submit(self._drawer.table_changed)
