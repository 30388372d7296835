"""Making tickets real: rows are gathered, transforms are run, several tickets at once."""

from __future__ import annotations

import asyncio
import functools
import time
import weakref
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from asyncbuf._prefetch.offload import INLINE_BYTES
from asyncbuf._prefetch.queue import Entry, Stage
from asyncbuf._prefetch.transforms import Partial, TransformChain
from asyncbuf._runtime.supervisor import FAILURES, detached, logger
from asyncbuf._runtime.threads import Threads
from asyncbuf._runtime.torch_modes import Swapped, dispatch_modes, is_inference_on

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable
    from concurrent.futures import Future

    import torch

    from asyncbuf._prefetch.offload import Offload
    from asyncbuf._table.gate import HistoryGate
    from asyncbuf.storage import Storage


class Fetcher:
    """Takes entries from DRAWN to READY or FAILED.

    A small gather, and transforms that turned out to be quick, run where they are asked for; large gathers run in the
    copying threads, transforms in workers (which move sync ones to threads of their own).

    Args:
        storage: where rows are gathered.
        chain: what is done to gathered rows.
        gate: the history; rows that a thread gathers are held there.
        workers: how many tickets are made real at once.
        settled: called whenever an entry has become a batch or has failed. Referenced weakly: it is a method of what
            owns this.
    """

    def __init__(
        self, storage: Storage, chain: TransformChain, gate: HistoryGate, workers: int, settled: Callable[[], None]
    ) -> None:
        self._storage = storage
        self._chain = chain
        self._gate = gate
        self._report = weakref.WeakMethod(settled)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._todo: asyncio.Queue[Entry] = asyncio.Queue()
        # With stateful transforms: the tickets that were not transformed yet, in order, one at a time.
        self._order: deque[Entry] = deque()
        self._order_busy = False
        self._resting = False
        self._halted = True
        self._step: asyncio.Future[None] | None = None
        self.threads = Threads(workers)
        self.gather_seconds = 0.0
        self.inline_gathers = self.thread_gathers = 0
        self.is_stopping: Callable[[], bool] = lambda: True

    def open(self, is_stopping: Callable[[], bool]) -> None:
        """Belong to the running event loop.

        Args:
            is_stopping: whether the workers are being ended on purpose.
        """
        self._loop = asyncio.get_running_loop()
        self._todo = asyncio.Queue()
        self.is_stopping = is_stopping
        self._halted = False

    def halt(self) -> None:
        """Nothing will be settled any more: whoever waits for it goes on."""
        self._halted = True
        self.went_on()

    async def close(self) -> None:
        """Wait for the threads and end them; the workers have ended before."""
        await self.threads.close()
        self._order_busy = False
        self.is_stopping = lambda: True

    # -- from the draw to the batch -----------------------------------------------------------------------------------

    def make(self, entry: Entry, offload: Offload, *, is_urgent: bool) -> None:
        """Begin with an entry that was drawn in this turn of the history.

        Args:
            entry: the entry.
            offload: where rows are gathered.
            is_urgent: whether consumers wait, so that threads should share the work.
        """
        if self._chain.ordered:
            self._order.append(entry)
        self._gather(entry, offload, is_urgent=is_urgent)

    def gathers_now(self, batch_size: int, offload: Offload) -> bool:
        """Whether so many rows are to be gathered in the step in which they are drawn. They will be, if so."""
        nbytes = self._storage.gather_nbytes(batch_size)
        if nbytes > INLINE_BYTES:
            if not offload.gathers_here(nbytes):
                return False
            offload.drawn(nbytes)
        self.inline_gathers += 1
        return True

    def go_on(self, entries: Iterable[Entry]) -> None:
        """Take entries up where they are: after a failure, or when a buffer is opened that has tickets in line."""
        entries = list(entries)
        if self._chain.ordered:
            self._order = deque(sorted({*self._order, *entries}, key=lambda entry: entry.ticket.number))
        for entry in entries:
            if entry.progress is None:
                self._gate.submit(functools.partial(self._gather, entry, None, is_urgent=True))
            else:
                self._transform(entry)

    def _gather(self, entry: Entry, offload: Offload | None, *, is_urgent: bool) -> None:
        if self._halted or entry.gathering or entry.dropped or entry.progress is not None:
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
        """Gather the rows here, or let threads begin with it."""
        indices = entry.ticket.draw.indices
        nbytes = self._storage.gather_nbytes(indices.shape[0])
        if offload is None:
            here = nbytes <= INLINE_BYTES
        else:
            here = offload.gathers_here(nbytes)
            offload.drawn(nbytes)
        if here:
            self.inline_gathers += 1
            entry.keep(Partial(0, self.gathered(indices)))
            return
        self.thread_gathers += 1
        parts = self.threads.parts(nbytes) if is_urgent else 1
        copies, combined = self._storage.begin_gather(entry.ticket.draw, inline=False, parts=parts)
        done = self.threads.copy_together([functools.partial(self._timed, copy) for copy in copies])
        entry.gathering = True
        self._gate.acquire_read()
        done.add_done_callback(functools.partial(self._post, entry, combined))

    def gathered(self, indices: torch.Tensor) -> Any:
        """Rows of the storage; the time that took goes into the statistics."""
        if is_inference_on() or dispatch_modes():
            with Swapped():
                return self.gathered(indices)
        start = time.perf_counter()
        data = self._storage.gather(indices)
        self.gather_seconds += time.perf_counter() - start
        return data

    def _timed(self, copy: Callable[[], object]) -> None:
        start = time.perf_counter()
        copy()
        self.gather_seconds += time.perf_counter() - start

    def _post(self, entry: Entry, combined: Callable[[], Any], done: Future[Any]) -> None:
        """From the copying threads back to the event loop."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._arrived, entry, combined, done)
        except RuntimeError:
            logger.debug("the event loop was closed while rows were being gathered")

    def _arrived(self, entry: Entry, combined: Callable[[], Any], done: Future[Any]) -> None:
        entry.gathering = False
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if error is None:
            try:
                with Swapped():
                    entry.keep(Partial(0, combined()))
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
            after = self._chain.run_here(entry.progress.data, entry.ticket.seed, entry.is_prefetched)
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

    def next_in_order(self) -> None:
        """Let the next ticket have its stateful transforms, if its rows are there and none is being transformed."""
        while self._order and self._lets_pass(self._order[0]):
            self._order.popleft()
        if self._order and not self._order_busy and not self._resting and self._order[0].stage is Stage.GATHERED:
            self._order_busy = True
            self._todo.put_nowait(self._order.popleft())

    def _lets_pass(self, entry: Entry) -> bool:
        """Whether those behind a ticket need not wait for it. One that a single call asked for holds nobody up."""
        failed = entry.stage is Stage.FAILED and not entry.is_prefetched
        return failed or entry.dropped or entry.stage is Stage.READY

    # -- workers ------------------------------------------------------------------------------------------------------

    async def work(self) -> None:
        """What each worker does, for ever."""
        while True:
            entry = await self._todo.get()
            if not entry.dropped:
                await self._run(entry)
            if self._chain.ordered:
                self._order_busy = False
                self.next_in_order()
                self._tell()

    async def _run(self, entry: Entry) -> None:
        assert entry.progress is not None
        try:
            await self._chain.run(entry.progress, entry.ticket.seed, self.threads, entry.keep, entry.is_prefetched)
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
        return self.is_stopping() or (task is not None and task.cancelling() > 0)

    def fail(self, entry: Entry, error: BaseException) -> None:
        """The rows could not be gathered, or a transform raised."""
        entry.fail(detached(error))
        if self._chain.ordered and entry.is_prefetched and entry not in self._order:
            self._order.appendleft(entry)  # those behind it wait until it is tried again or dropped
        self._settled(entry)

    def _settled(self, entry: Entry) -> None:
        if self._chain.ordered:
            self.next_in_order()
        self._tell()

    def _tell(self) -> None:
        """Consumers, and whoever waits for a standstill, look again."""
        self.went_on()
        report = self._report()
        if report is not None:
            report()

    @property
    def stuck(self) -> Entry | None:
        """The failed ticket that has to be tried again or dropped before those behind it can be transformed."""
        is_stuck = self._order and self._order[0].stage is Stage.FAILED and not self._order_busy
        return self._order[0] if is_stuck else None

    @property
    def changes_state(self) -> bool:
        """Whether a stateful transform is at work."""
        return self._order_busy and not self._halted

    # -- standing still -----------------------------------------------------------------------------------------------

    def went_on(self) -> None:
        """Whoever waits for something to be settled looks again."""
        if self._step is not None and not self._step.done():
            self._step.set_result(None)

    async def step(self, seconds: float | None = None) -> bool:
        """Wait until one more entry is settled; whether one was in time."""
        self._step = asyncio.get_running_loop().create_future()
        done, _ = await asyncio.wait({self._step}, timeout=seconds)
        return bool(done)

    @asynccontextmanager
    async def resting(self) -> AsyncIterator[None]:
        """Let no stateful transform be at work meanwhile, so that its state may be replaced."""
        self._resting = True
        try:
            while self._order_busy and not self._halted:
                await self.step()
            yield
        finally:
            self._resting = False
            self.next_in_order()

    def forget(self) -> None:
        """Nobody wants the tickets that were not transformed yet."""
        self._order.clear()
