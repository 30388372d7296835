"""From a draw to a batch: rows are gathered, transforms are run, several tickets at once."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from typing import TYPE_CHECKING

from asyncbuf._prefetch.entry import Entry, Stage
from asyncbuf._prefetch.transforms import Partial
from asyncbuf._runtime.lifecycle import State
from asyncbuf._runtime.supervisor import FAILURES, detached

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from asyncbuf._prefetch.gather import Gatherer
    from asyncbuf._prefetch.in_order import InOrder
    from asyncbuf._prefetch.offload import Offload
    from asyncbuf._prefetch.queue import TicketQueues
    from asyncbuf._prefetch.transforms import TransformChain
    from asyncbuf._runtime.lifecycle import Lifecycle
    from asyncbuf._runtime.threads import Threads
    from asyncbuf._table.gate import HistoryGate
    from asyncbuf.batch import Draw


class Fetcher:
    """Takes entries from DRAWN to READY or FAILED.

    A small gather, and transforms that turned out to be quick, run where they are asked for; large gathers run in the
    copying threads, transforms in workers (which move sync ones to threads of their own).

    Args:
        gatherer: reads rows.
        chain: what is done to gathered rows.
        gate: the history.
        queues: whose consumers look again when an entry has become a batch or has failed.
        threads: where sync transforms run.
        lifecycle: that of the buffer.
        missing: how many rows of a draw hold no item any more.
        in_order: the order in which stateful transforms see tickets.
    """

    def __init__(
        self,
        gatherer: Gatherer,
        chain: TransformChain,
        gate: HistoryGate,
        queues: TicketQueues,
        threads: Threads,
        lifecycle: Lifecycle,
        missing: Callable[[Draw], int],
        in_order: InOrder,
    ) -> None:
        self._gatherer = gatherer
        self._chain = chain
        self._gate = gate
        self._queues = queues
        self._threads = threads
        self._life = lifecycle
        self._missing = missing
        self._todo: asyncio.Queue[Entry] = asyncio.Queue()
        self._in_order = in_order
        self._steps: deque[asyncio.Future[None]] = deque()
        self._at_rest: list[Callable[[], None]] = []

    def open(self) -> None:
        """Belong to the running event loop."""
        self._gatherer.open()
        self._todo = asyncio.Queue()
        self._in_order.add(self._in_order.dropped)

    async def close(self) -> None:
        """Wait for gathers and threads; the workers have ended before."""
        await self._gatherer.close()
        await self._threads.close()
        self._not_busy()
        self.went_on()

    def abandon(self) -> None:
        """The event loop was closed in the middle of everything: what was at work there has never been."""
        self._threads.abandon()
        self._gatherer.abandon()
        self._steps.clear()
        self._at_rest.clear()
        self._in_order.is_busy = self._in_order.is_resting = False
        for entry in self._queues.entries:
            entry.gathering = False

    # -- from the draw to the batch -----------------------------------------------------------------------------------

    def make(self, entry: Entry, offload: Offload, *, is_urgent: bool) -> None:
        """Begin with an entry that was drawn in this turn of the history.

        Args:
            entry: the entry.
            offload: where rows are gathered.
            is_urgent: whether consumers wait, so that threads should share the work.
        """
        if self._chain.ordered:
            self._in_order.add([entry])
        is_quick = self._chain.quick and not (entry.ticket.draw.joins and self._chain.combines)
        if not is_quick or not self._make_here(entry, offload):
            self._gather(entry, offload, is_urgent=is_urgent)

    def _make_here(self, entry: Entry, offload: Offload) -> bool:
        """Gather and transform in this step, in which the ticket was drawn: whoever draws it tells the consumers.

        Transforms get the rows themselves, because the same ones can be gathered again as long as this step lasts.

        Returns:
            False if the rows are to be gathered elsewhere: then nothing has happened.
        """
        draw, chain, rows = entry.ticket.draw, self._chain, None
        try:
            if not self._gatherer.runs_here(draw.indices.shape[0], offload):
                return False
            rows = self._gatherer.gather(draw)
            if chain.steps:
                after = chain.run_here(rows, entry.ticket.seed, is_own=True)
                if not chain.is_done(after):
                    entry.keep(after._replace(data=self._gatherer.gather(draw)))
                    self._todo.put_nowait(entry)
                    return True
                rows = after.data
        except BaseException as error:
            try:
                if rows is not None and chain.steps:
                    self._keep_rows(entry)
            finally:
                self.fail(entry, error)
            if not isinstance(error, FAILURES):
                raise
            return True
        entry.ready(rows)
        if self._steps:
            self.went_on()
        return True

    def _keep_rows(self, entry: Entry) -> None:
        """Gather the rows of a ticket again, for its next try, because a transform has changed them."""
        with contextlib.suppress(Exception):  # then they are gathered in the next try
            entry.keep(Partial(0, self._gatherer.gather(entry.ticket.draw)))

    def go_on(self, entries: Iterable[Entry]) -> None:
        """Take entries up where they are: after a failure, or when a buffer is opened that has tickets queued."""
        entries = list(entries)
        if self._chain.ordered:
            self._in_order.add(entries)
        for entry in entries:
            if entry.progress is None:
                self._gate.submit(functools.partial(self._gather_later, entry))
            else:
                self._transform(entry)
        self.next_in_order()

    def dropped(self, entries: Iterable[Entry]) -> None:
        """Nobody gets these. Stateful transforms see those that were gathered all the same, and in their turn.

        Otherwise their state would depend on how far they had come.
        """
        if self._chain.ordered:
            self._in_order.keep_dropped(entries)
            self.next_in_order()
        self.went_on()

    def _gather_later(self, entry: Entry) -> None:
        """Gather a ticket whose gather failed in the step of its draw, if there are still items in its rows."""
        is_due = self._life.reason is None and entry.stage is Stage.DRAWN and not (entry.gathering or entry.dropped)
        if is_due and (missing := self._missing(entry.ticket.draw)):
            why = f"expected items in its rows, found none in {missing} of them, which were removed since the draw"
            self.fail(entry, LookupError(f"{why}: the batch cannot be made any more"))
        elif is_due:
            self._gather(entry, None, is_urgent=True)

    def _gather(self, entry: Entry, offload: Offload | None, *, is_urgent: bool) -> None:
        if self._life.reason is not None or entry.gathering or entry.dropped or entry.progress is not None:
            return  # its turn came late: the buffer was closed meanwhile, and perhaps opened again
        try:
            self._gatherer.begin(entry, offload, is_urgent=is_urgent, arrived=self._arrived)
        except BaseException as error:
            self.fail(entry, error)
            if not isinstance(error, FAILURES):
                raise
            return
        if entry.progress is not None:
            self._transform(entry)

    def _arrived(self, entry: Entry, error: BaseException | None) -> None:
        if error is None:
            self._transform(entry)
        else:
            self.fail(entry, error)

    def _transform(self, entry: Entry) -> None:
        """Rows are there: run the transforms here if that is quick, else let a worker do it."""
        progress = entry.progress
        assert progress is not None
        if self._chain.ordered:
            self.next_in_order()
        elif entry.dropped:
            return
        elif self._chain.runs_here(progress):
            if self._transform_here(entry):
                self._settled(entry)
        else:
            self._todo.put_nowait(entry)

    def _transform_here(self, entry: Entry) -> bool:
        """Run quick transforms: whether that made a batch. If not, the entry failed, or a worker goes on with it."""
        assert entry.progress is not None
        try:
            after = self._chain.run_here(entry.progress.data, entry.ticket.seed)
        except BaseException as error:
            self.fail(entry, error)
            if not isinstance(error, FAILURES):
                raise
            return False
        if not self._chain.is_done(after):
            entry.keep(after)
            self._todo.put_nowait(entry)
            return False
        entry.ready(after.data)
        return True

    # -- stateful transforms ------------------------------------------------------------------------------------------

    def next_in_order(self) -> None:
        """Let the next ticket have its stateful transforms, if its rows are there and none is being transformed."""
        if self._life.reason is not None:
            return  # what is left stays a ticket
        if (entry := self._in_order.next()) is not None:
            self._todo.put_nowait(entry)

    # -- workers ------------------------------------------------------------------------------------------------------

    async def work(self) -> None:
        """What each worker does until the buffer is closed."""
        while True:
            entry = await self._todo.get()
            if self._life.reason is not None:
                return  # the buffer is being closed: what is left stays a ticket
            if not entry.dropped or self._chain.ordered:
                await self._run(entry)
            if self._chain.ordered:
                self._not_busy()
                self.next_in_order()
                self._tell()

    async def _run(self, entry: Entry) -> None:
        assert entry.progress is not None
        try:
            await self._chain.run(entry.progress, entry.ticket.seed, self._threads, entry.keep, entry.is_prefetched)
        except asyncio.CancelledError as error:
            if self._is_my_cancellation():
                if self._chain.is_done(entry.progress):
                    entry.ready(entry.progress.data)
                raise
            self.fail(entry, RuntimeError(f"a transform was cancelled from within: {error!r}"))
        except Exception as error:
            self.fail(entry, error)
        else:
            entry.ready(entry.progress.data)
            self._settled(entry)

    def _is_my_cancellation(self) -> bool:
        task = asyncio.current_task()
        return self._life.state is not State.OPEN or (task is not None and task.cancelling() > 0)

    def fail(self, entry: Entry, error: BaseException) -> None:
        """The rows could not be gathered, or a transform raised."""
        entry.fail(detached(error))
        if self._chain.ordered and entry.is_prefetched:
            self._in_order.put_back(entry)  # those behind it wait until it is tried again or dropped
        self._settled(entry)

    def _settled(self, entry: Entry) -> None:
        if self._chain.ordered:
            self.next_in_order()
        self._tell()

    def _tell(self) -> None:
        """Consumers, and whoever waits for a standstill, look again."""
        self.went_on()
        self._queues.notify(is_stuck=self._in_order.stuck is not None)

    # -- standing still -----------------------------------------------------------------------------------------------

    def went_on(self) -> None:
        """Whoever waits for something to be settled looks again."""
        while self._steps:
            step = self._steps.popleft()
            if not step.done():
                step.set_result(None)

    async def step(self, seconds: float | None = None) -> bool:
        """Wait until one more entry is settled; whether one was in time."""
        step = asyncio.get_running_loop().create_future()
        self._steps.append(step)
        done, _ = await asyncio.wait({step}, timeout=seconds)
        return bool(done)

    def when_at_rest(self, action: Callable[[], None]) -> None:
        """Do something short once no stateful transform is at work, before another one begins; at once if none is.

        Args:
            action: what to do; must not raise.
        """
        if self._in_order.is_busy:
            self._at_rest.append(action)
        else:
            action()

    def _not_busy(self) -> None:
        """A stateful transform has ended."""
        self._in_order.is_busy = False
        actions, self._at_rest = self._at_rest, []
        for action in actions:
            action()

    async def rest(self) -> None:
        """Begin no stateful transform until ``end_rest``, and wait for the one that is at work."""
        self._in_order.is_resting = True
        while self._in_order.is_busy:
            await self.step()

    def end_rest(self) -> None:
        """Go on with stateful transforms."""
        self._in_order.is_resting = False
        self.next_in_order()
