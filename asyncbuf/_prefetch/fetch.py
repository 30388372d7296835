"""From a draw to a batch: rows are gathered, transforms are run, several tickets at once."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any

from asyncbuf._prefetch.gathered import arranged, with_joins
from asyncbuf._prefetch.offload import INLINE_BYTES
from asyncbuf._prefetch.queue import Entry, Stage
from asyncbuf._prefetch.transforms import Partial, TransformChain
from asyncbuf._runtime.lifecycle import State
from asyncbuf._runtime.supervisor import FAILURES, detached, logger
from asyncbuf._runtime.torch_modes import Swapped, dispatch_modes, is_inference_on
from asyncbuf.storage.base import GatherJobs, Runs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from concurrent.futures import Future

    from asyncbuf._prefetch.offload import Offload
    from asyncbuf._prefetch.queue import TicketQueues
    from asyncbuf._runtime.lifecycle import Lifecycle
    from asyncbuf._runtime.threads import Threads
    from asyncbuf._table.gate import HistoryGate
    from asyncbuf.batch import Draw
    from asyncbuf.storage import Storage


class Fetcher:
    """Takes entries from DRAWN to READY or FAILED.

    A small gather, and transforms that turned out to be quick, run where they are asked for; large gathers run in the
    copying threads, transforms in workers (which move sync ones to threads of their own).

    Args:
        storage: where rows are gathered.
        chain: what is done to gathered rows.
        gate: the history; rows that are still being gathered hold a read lock there.
        queues: whose consumers look again when an entry has become a batch or has failed.
        threads: where large gathers and sync transforms run.
        lifecycle: that of the buffer.

    Attributes:
        gather_seconds: time spent gathering, all threads together.
        inline_gathers: how often rows were gathered on the event loop.
        thread_gathers: how often elsewhere.
    """

    def __init__(
        self,
        storage: Storage,
        chain: TransformChain,
        gate: HistoryGate,
        queues: TicketQueues,
        threads: Threads,
        lifecycle: Lifecycle,
    ) -> None:
        self._storage = storage
        self._chain = chain
        self._gate = gate
        self._queues = queues
        self._threads = threads
        self._life = lifecycle
        self._loop: asyncio.AbstractEventLoop | None = None
        self._todo: asyncio.Queue[Entry] = asyncio.Queue()
        self._awaited: set[asyncio.Task[None]] = set()
        self._in_order = _InOrder()
        self._resting = False
        self._steps: deque[asyncio.Future[None]] = deque()
        self._gathers_inline = storage.runs in (Runs.ANYWHERE, Runs.LOOP)
        self.gather_seconds = 0.0
        self.inline_gathers = self.thread_gathers = 0

    def open(self) -> None:
        """Belong to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._todo = asyncio.Queue()

    async def close(self) -> None:
        """Wait for gathers and threads; the workers have ended before."""
        while self._awaited:
            await asyncio.wait(self._awaited)
        await self._threads.close()
        self._in_order.is_busy = False
        self.went_on()

    def abandon(self) -> None:
        """The event loop was closed in the middle of everything: what was at work there has never been."""
        self._threads.abandon()
        self._awaited.clear()
        self._steps.clear()
        self._in_order.is_busy = self._resting = False
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
        self._gather(entry, offload, is_urgent=is_urgent)

    def gathers_now(self, batch_size: int, offload: Offload) -> bool:
        """Decide to gather a draw in the step in which it is drawn, and count it; the caller must then gather."""
        if not self._gathers_inline:
            return False
        nbytes = self._storage.gather_nbytes(batch_size)
        if nbytes > INLINE_BYTES:
            if not offload.gathers_here(nbytes):
                return False
            offload.drawn(nbytes)
        self.inline_gathers += 1
        return True

    def go_on(self, entries: Iterable[Entry]) -> None:
        """Take entries up where they are: after a failure, or when a buffer is opened that has tickets queued."""
        entries = list(entries)
        if self._chain.ordered:
            self._in_order.add(entries)
        for entry in entries:
            if entry.progress is None:
                self._gate.submit(functools.partial(self._gather, entry, None, is_urgent=True))
            else:
                self._transform(entry)

    def _gather(self, entry: Entry, offload: Offload | None, *, is_urgent: bool) -> None:
        if self._life.reason is not None or entry.gathering or entry.dropped or entry.progress is not None:
            return  # its turn came late: the buffer was closed meanwhile, and perhaps opened again
        try:
            self._begin_gather(entry, offload, is_urgent=is_urgent)
        except BaseException as error:
            self.fail(entry, error)
            if not isinstance(error, FAILURES):
                raise
            return
        if entry.progress is not None:
            self._transform(entry)

    def _begin_gather(self, entry: Entry, offload: Offload | None, *, is_urgent: bool) -> None:
        """Gather the rows here, or let threads or the storage itself begin with it."""
        draw = with_joins(entry.ticket.draw)
        nbytes = self._storage.gather_nbytes(draw.indices.shape[0])
        if self._runs_here(nbytes, offload):
            self.inline_gathers += 1
            entry.keep(self._arranged(entry, self.gathered(draw)))
            return
        self.thread_gathers += 1
        parts = self._threads.parts(nbytes) if is_urgent else 1
        rows = self._storage.begin_gather(draw, inline=False, parts=parts)
        if isinstance(rows, GatherJobs):
            done = self._threads.copy_together([functools.partial(self._timed, job) for job in rows.jobs])
            self._reads(entry)
            done.add_done_callback(functools.partial(self._post, entry, rows.combine))
        elif inspect.isawaitable(rows):
            self._reads(entry)
            task = asyncio.create_task(self._await_rows(entry, rows), context=contextvars.Context())
            self._awaited.add(task)
            task.add_done_callback(self._awaited.discard)
        else:
            entry.keep(self._arranged(entry, rows))

    def _arranged(self, entry: Entry, rows: Any) -> Partial:
        """Gathered rows, in the shape and with the joins that the draw asked for."""
        draw = entry.ticket.draw
        if draw.shape is None and not draw.joins:
            return Partial(0, rows)
        return Partial(0, arranged(draw, rows, are_items=self._storage.needs_collate))

    def _runs_here(self, nbytes: int, offload: Offload | None) -> bool:
        """Whether rows are gathered on the event loop: as the storage says, or else what was found to be faster."""
        runs = self._storage.runs
        if runs is not Runs.ANYWHERE:
            return runs is Runs.LOOP
        if offload is None:
            return nbytes <= INLINE_BYTES
        here = offload.gathers_here(nbytes)
        offload.drawn(nbytes)
        return here

    def gathered(self, draw: Draw) -> Any:
        """Rows of the storage; the time that took goes into the statistics."""
        if is_inference_on() or dispatch_modes():
            with Swapped():
                return self.gathered(draw)
        start = time.perf_counter()
        data = self._storage.gather(draw.indices)
        self.gather_seconds += time.perf_counter() - start
        return data

    def _timed(self, copy: Callable[[], object]) -> None:
        start = time.perf_counter()
        copy()
        self.gather_seconds += time.perf_counter() - start

    def _reads(self, entry: Entry) -> None:
        """Its rows are being read from now on, until ``_arrived``."""
        entry.gathering = True
        self._gate.acquire_read()

    async def _await_rows(self, entry: Entry, rows: Awaitable[Any]) -> None:
        start = time.perf_counter()
        try:
            data = await rows
        except BaseException as error:
            self._arrived(entry, error)
            if not isinstance(error, FAILURES):
                raise
        else:
            self.gather_seconds += time.perf_counter() - start
            self._arrived(entry, None, lambda: data)

    def _post(self, entry: Entry, combine: Callable[[], Any], done: Future[Any]) -> None:
        """From the copying threads back to the event loop."""
        assert self._loop is not None
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        try:
            self._loop.call_soon_threadsafe(self._arrived, entry, error, combine)
        except RuntimeError:
            logger.debug("the event loop was closed while rows were being gathered")

    def _arrived(self, entry: Entry, error: BaseException | None, combine: Callable[[], Any] | None = None) -> None:
        """All rows of an entry are read, or could not be."""
        entry.gathering = False
        if combine is not None and error is None:
            try:
                with Swapped():
                    entry.keep(self._arranged(entry, combine()))
            except BaseException as failure:
                error = failure
        self._gate.release_read()
        if error is None:
            self._transform(entry)
        else:
            self.fail(entry, error)

    def _transform(self, entry: Entry) -> None:
        """Rows are there: run the transforms here if that is quick, else let a worker do it."""
        progress = entry.progress
        assert progress is not None
        if entry.dropped:
            return
        if self._chain.ordered:
            self.next_in_order()
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
        if not self._resting and (entry := self._in_order.next()) is not None:
            self._todo.put_nowait(entry)

    @property
    def stuck(self) -> Entry | None:
        """The failed ticket that has to be tried again or dropped before those behind it can be transformed."""
        return self._in_order.stuck

    @property
    def changes_state(self) -> bool:
        """Whether a stateful transform is at work: also on a dropped ticket, and in a thread that outlives the rest."""
        return self._in_order.is_busy

    def forget(self) -> None:
        """Nobody wants the tickets that were not transformed yet."""
        self._in_order.clear()

    # -- workers ------------------------------------------------------------------------------------------------------

    async def work(self) -> None:
        """What each worker does, for ever."""
        while True:
            entry = await self._todo.get()
            if not entry.dropped:
                await self._run(entry)
            if self._chain.ordered:
                self._in_order.is_busy = False
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
        self._queues.notify(is_stuck=self.stuck is not None)

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

    async def rest(self) -> None:
        """Begin no stateful transform until ``end_rest``, and wait for the one that is at work."""
        self._resting = True
        while self.changes_state:
            await self.step()

    def end_rest(self) -> None:
        """Go on with stateful transforms."""
        self._resting = False
        self.next_in_order()


class _InOrder:
    """The tickets that stateful transforms have not seen yet, by number: they see one at a time, in this order.

    Attributes:
        is_busy: whether one is being transformed.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self.is_busy = False

    def add(self, entries: Iterable[Entry]) -> None:
        """Let entries wait for their turn."""
        last = next(reversed(self._entries), -1)
        is_sorted = True
        for entry in entries:
            number = entry.ticket.number
            is_sorted = is_sorted and number > last
            self._entries[number] = entry
            last = number
        if not is_sorted:
            self._entries = OrderedDict(sorted(self._entries.items()))

    def put_back(self, entry: Entry) -> None:
        """Let an entry that failed stand first again, if it was first before."""
        if entry.ticket.number not in self._entries:
            self._entries[entry.ticket.number] = entry
            self._entries.move_to_end(entry.ticket.number, last=False)

    def clear(self) -> None:
        """Forget all of them."""
        self._entries.clear()

    @property
    def _first(self) -> Entry | None:
        return next(iter(self._entries.values()), None)

    def next(self) -> Entry | None:
        """The entry whose turn it is, which is busy from now on; None if there is none, or another is busy."""
        while (first := self._first) is not None and _lets_pass(first):
            self._entries.popitem(last=False)
        if first is None or self.is_busy or first.stage is not Stage.GATHERED:
            return None
        self.is_busy = True
        self._entries.popitem(last=False)
        return first

    @property
    def stuck(self) -> Entry | None:
        """The first entry, if it has failed and none is busy."""
        first = self._first
        return first if first is not None and first.stage is Stage.FAILED and not self.is_busy else None


def _lets_pass(entry: Entry) -> bool:
    """Whether those behind a ticket need not wait for it. One that a single call asked for holds nobody up."""
    failed = entry.stage is Stage.FAILED and not entry.is_prefetched
    return failed or entry.dropped or entry.is_made
