"""The background work of a buffer: started, ended, and given up with its event loop."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from asyncbuf._runtime.supervisor import Supervisor, detached, logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncbuf._prefetch.drawer import Drawer
    from asyncbuf._prefetch.fetch import Fetcher
    from asyncbuf._prefetch.leases import Leases
    from asyncbuf._prefetch.queue import TicketQueues
    from asyncbuf._runtime.lifecycle import Lifecycle
    from asyncbuf._table.gate import HistoryGate


class Background:
    """The workers behind an open buffer.

    Args:
        lifecycle: that of the buffer.
        gate: the history.
        queues: whose tickets are made into batches.
        leases: batches that consumers have for a while.
        fetcher: whose work the workers do.
        drawer: ends what it is at before the buffer is closed.
        workers: how many.
        refuse: told why, when nobody will be admitted any more: each ends the waiting of its own.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        gate: HistoryGate,
        queues: TicketQueues,
        leases: Leases,
        fetcher: Fetcher,
        drawer: Drawer,
        workers: int,
        refuse: Sequence[Callable[[Callable[[], Exception]], None]] = (),
    ) -> None:
        self._life = lifecycle
        self._gate = gate
        self._queues = queues
        self._leases = leases
        self._fetcher = fetcher
        self._drawer = drawer
        self._workers = workers
        self._ending = _Ending(lifecycle, queues, fetcher, (gate.refuse, *refuse))
        self._supervisor: Supervisor | None = None

    async def open(self) -> None:
        """Start the workers; tickets that were left in the queues are taken up again."""
        self._supervisor = Supervisor(
            self._fetcher.work, self._workers, crashed=self._ending.crash, closed=self._ending.closed
        )
        self._fetcher.open()
        self._fetcher.go_on([entry for entry in self._queues.entries if not entry.settled])
        await self._supervisor.started()

    def begin_close(self) -> None:
        """Tell everyone that waits, and let the workers end."""
        self._drawer.catch_up()
        self._ending.close()
        if self._supervisor is not None:
            self._supervisor.stop()

    async def closed(self, seconds: float | None = None) -> bool:
        """Wait until no task and no thread is left; whether that was so in time."""
        return self._supervisor is None or await self._supervisor.stopped(seconds)

    def fail(self, error: BaseException) -> None:
        """End the work with an error, if the buffer is open: everyone that waits is told."""
        if self._life.reason is None:
            self._ending.crash(detached(error))

    def abandon(self) -> None:
        """The event loop was closed while the buffer was open: start over with the tickets that are there."""
        if self._supervisor is not None:
            self._supervisor.abandon()
        self._supervisor = None
        self._gate.reset()
        self._drawer.abandon()
        self._leases.give_all_back()
        self._queues.abandon()
        self._fetcher.abandon()
        self._life.closed()


class _Ending:
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
