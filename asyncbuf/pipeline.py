"""Tickets in, batches out, in order.

Draws happen on the event loop, in their turn of the history, when batches are asked for. Gathers and transforms run
concurrently. A consumer looks at the first ticket of its line, waits for it to become a batch, and takes it out in the
very step in which it gets it: there is no moment in which a batch belongs to nobody.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from asyncbuf.background import Background, logger, without_own_frames
from asyncbuf.batch import Batch, Ticket
from asyncbuf.errors import BufferClosedError, BufferFailedError, PrefetchError
from asyncbuf.line import Entry, Line, Stage, Waiter
from asyncbuf.threads import Threads
from asyncbuf.tickets import SavedTicket, Tickets
from asyncbuf.transform import Chain, Progress, mixed_seed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from concurrent.futures import Future

    from asyncbuf.gate import HistoryGate
    from asyncbuf.source import Source

# Below this, a gather costs less than handing it to a thread and back.
INLINE_BYTES = 128 * 1024


class Pipeline:
    """Draws tickets, makes them real, and hands them over.

    Args:
        source: what tickets are drawn from.
        chain: what is done to gathered rows.
        gate: the history.
        batch_size: rows of a prefetched ticket; None if each call says its own.
        prefetch: how many tickets are drawn ahead of those asked for.
        workers: how many tickets are made real at once.
    """

    def __init__(
        self,
        source: Source,
        chain: Chain,
        gate: HistoryGate,
        *,
        batch_size: int | None,
        prefetch: int,
        workers: int,
    ) -> None:
        self._source = source
        self.chain = chain
        self._gate = gate
        self._workers = workers
        self._batch_size = batch_size
        self._lines: dict[int, Line] = {} if batch_size is None else {batch_size: Line(batch_size, prefetch)}
        self._number = 0
        self._background: Background | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unusable: Callable[[], Exception] | None = functools.partial(BufferClosedError, _NOT_OPEN)
        self.finished = False
        self.threads = Threads(workers)
        self._todo: asyncio.Queue[Entry] = asyncio.Queue()
        # With stateful transforms: the tickets that were not transformed yet, in order, one at a time.
        self._order: deque[Entry] = deque()
        self._order_busy = False
        self._resting = False
        self._delivery = asyncio.Lock()
        self._holding = False
        self._progress: asyncio.Future[None] | None = None
        self.delivered = self.dropped = self.retries = self.peak_queued = 0
        self.gather_seconds = self.wait_seconds = 0.0

    # -- opening and closing ------------------------------------------------------------------------------------------

    @property
    def unusable(self) -> Exception | None:
        """Why no batch can be had now; None while the buffer is open."""
        return None if self._unusable is None else self._unusable()

    async def open(self) -> None:
        """Start the background tasks; tickets that were left in the line are taken up again."""
        self._loop = asyncio.get_running_loop()
        self._todo = asyncio.Queue()
        self._background = Background(self._work, self._workers, crashed=self._crash, closed=self._close)
        self._unusable = None
        await self._background.started()
        self._take_all_up()

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
        for line in self._lines.values():
            line.notify_all()

    def _crash(self, error: BaseException) -> None:
        logger.error("the background work of the buffer ended: %r", error, exc_info=error)

        def reason() -> Exception:
            failure = BufferFailedError(f"the background work of the buffer ended: {error!r}")
            failure.__cause__ = error
            return failure

        self._stop(reason)

    async def _close(self) -> None:
        await self.threads.close()
        self._order_busy = False
        self._background = None

    def finish(self) -> None:
        """No more items will come: consumers that wait for some are told."""
        self.finished = True
        for line in self._lines.values():
            line.notify_all()

    # -- asking for batches -------------------------------------------------------------------------------------------

    def line(self, batch_size: int) -> Line:
        """The line of a batch size; all but the prefetched one draw only what is asked for."""
        line = self._lines.get(batch_size)
        if line is None:
            line = self._lines[batch_size] = Line(batch_size, 0)
        return line

    def next_epoch(self, line: Line) -> int | None:
        """Number of the pass that a call would get a batch of now."""
        position = len(line.waiters)
        if position < len(line.entries):
            return line.entries[position].ticket.draw.epoch
        return self._source.sampler.epoch

    async def take(self, line: Line, epoch: int | None = None) -> Batch | None:
        """Wait for the next batch of a line.

        Args:
            line: the line.
            epoch: the only pass that is wanted; None for any.

        Returns:
            The batch; None when the pass has no more.

        Raises:
            PrefetchError: the batch could not be made; the next call tries again.
            BufferClosedError, BufferFailedError: no batch will come.
        """
        waiter = Waiter(epoch)
        line.waiters.append(waiter)
        self._retry_first(line)
        self._gate.draw(functools.partial(self._answer, line, line.asked + line.depth))
        try:
            while True:
                batch = self._claim(line, waiter)
                if batch is not None or waiter.over:
                    return batch
                await self._wait(waiter)
        finally:
            # Handed over, failed or cancelled: in each case this call does not stand in line any more.
            if waiter in line.waiters:
                line.waiters.remove(waiter)
            if line.waiters:
                self._retry_first(line)
                self._redraw(line)
                line.notify()

    async def _wait(self, waiter: Waiter) -> None:
        start = time.perf_counter()
        waiter.wake = asyncio.get_running_loop().create_future()
        try:
            await waiter.wake
        finally:
            waiter.wake = None
            self.wait_seconds += time.perf_counter() - start

    def _claim(self, line: Line, waiter: Waiter) -> Batch | None:
        """Hand the first batch over, if it is this consumer's turn and the batch is there."""
        if self._unusable is not None:
            raise self._unusable()
        if self.finished and not line.entries and not self._source.drawable:
            raise BufferClosedError("finish() was called: no item will come for the batch that was waited for")
        if waiter.over or self._holding or line.waiters[0] is not waiter:
            return None
        if not line.entries:
            error, line.error = line.error, None
            if error is not None:
                raise error
            return None
        entry = line.entries[0]
        if waiter.epoch is not None and entry.ticket.draw.epoch != waiter.epoch:
            waiter.over = True
            return None
        if entry.stage is Stage.FAILED:
            raise self._failure(entry)
        if entry.batch is None:
            return None
        line.entries.popleft()
        line.waiters.popleft()
        line.taken += 1
        self.delivered += 1
        return entry.batch

    def _failure(self, entry: Entry) -> PrefetchError:
        indices = entry.ticket.draw.indices.tolist()
        shown = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
        failure = PrefetchError(
            f"batch {entry.ticket.number} could not be made from rows [{shown}]: {entry.error!r}; "
            "the next sample() tries again, skip() drops it",
            entry.ticket.number,
            indices,
        )
        failure.__cause__ = entry.error
        entry.reported = True
        return failure

    # -- drawing ------------------------------------------------------------------------------------------------------

    def _answer(self, line: Line, goal: int) -> None:
        """The turn of a call in the history has come: draw what it calls for."""
        line.goal = max(line.goal, goal)
        self._fill(line)

    def written(self) -> None:
        """The history went on: consumers that wait for data may have some now."""
        for line in self._lines.values():
            if line.waiters:
                self._fill(line)

    def _redraw(self, line: Line) -> None:
        """Draw again, in its turn, what calls before still call for."""
        if line.wants_more:
            self._gate.draw(functools.partial(self._fill, line))

    def _fill(self, line: Line) -> None:
        sampler = self._source.sampler
        line.error = None
        while self._unusable is None and line.wants_more:
            position = len(line.entries)
            waiter = line.waiters[position] if position < len(line.waiters) else None
            if waiter is None and sampler.between_epochs:
                break  # a pass begins when its first batch is asked for, not ahead of it
            if waiter is not None and waiter.epoch is not None and waiter.epoch != sampler.epoch:
                line.waiters.remove(waiter)
                waiter.over = True
                waiter.notify()
                continue
            if not self._source.drawable:
                break
            try:
                self._draw(line)
            except Exception as error:
                line.error = error
                break
        line.notify()

    def _draw(self, line: Line) -> None:
        draw = self._source.draw(line.batch_size)
        seed = mixed_seed(self._source.generator.initial_seed(), self._number)
        entry = Entry(Ticket(self._number, draw, seed))
        self._number += 1
        line.entries.append(entry)
        self.peak_queued = max(self.peak_queued, self.queued)
        if self.chain.ordered:
            self._order.append(entry)
        self._gather(entry)

    # -- making tickets real ------------------------------------------------------------------------------------------

    def _take_all_up(self) -> None:
        unsettled = [entry for entry in self._entries() if not entry.settled]
        if self.chain.ordered:
            self._order = deque(sorted(unsettled, key=lambda entry: entry.ticket.number))
        for entry in unsettled:
            self._take_up(entry)

    def _take_up(self, entry: Entry) -> None:
        if self.chain.ordered and entry not in self._order:
            self._order.appendleft(entry)
        if entry.progress is None:
            self._gate.draw(functools.partial(self._gather, entry))
        else:
            self._transform(entry)

    def _gather(self, entry: Entry) -> None:
        indices = entry.ticket.draw.indices
        if self._source.storage.gather_nbytes(len(indices)) <= INLINE_BYTES:
            try:
                data = self._gathered(indices)
            except Exception as error:
                self._failed(entry, error)
            else:
                entry.keep(Progress(0, data))
                self._transform(entry)
            return
        self._gate.hold()
        self.threads.copy(self._gathered, indices).add_done_callback(functools.partial(self._post, entry))

    def _gathered(self, indices: Any) -> Any:
        start = time.perf_counter()
        data = self._source.storage.gather(indices)
        self.gather_seconds += time.perf_counter() - start
        return data

    def _post(self, entry: Entry, future: Future[Any]) -> None:
        """From the copying thread back to the event loop."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._arrived, entry, future)
        except RuntimeError:
            logger.debug("the event loop was closed while rows were being gathered")

    def _arrived(self, entry: Entry, future: Future[Any]) -> None:
        error = future.exception()
        if error is None:
            entry.keep(Progress(0, future.result()))
        self._gate.release()
        if isinstance(error, Exception):
            self._failed(entry, error)
        elif error is None:
            self._transform(entry)

    def _transform(self, entry: Entry) -> None:
        """Rows are there: run the transforms here if that is quick, else let a worker do it."""
        progress = entry.progress
        assert progress is not None
        if entry.dropped:
            return
        if self.chain.ordered:
            self._next_in_order()
        elif self.chain.quick and progress.step == 0:
            try:
                data = self.chain.run_here(progress.data, entry.ticket.seed)
            except Exception as error:
                self._failed(entry, error)
            else:
                entry.ready(data)
                self._settled(entry)
        else:
            self._todo.put_nowait(entry)

    def _next_in_order(self) -> None:
        while self._order and (self._order[0].dropped or self._order[0].settled):
            self._order.popleft()
        if self._order and not self._order_busy and not self._resting and self._order[0].stage is Stage.GATHERED:
            self._order_busy = True
            self._todo.put_nowait(self._order.popleft())

    async def _work(self) -> None:
        while True:
            entry = await self._todo.get()
            if not entry.dropped:
                await self._run(entry)
            if self.chain.ordered:
                self._order_busy = False
                self._next_in_order()
                self._went_on()

    async def _run(self, entry: Entry) -> None:
        assert entry.progress is not None
        try:
            await self.chain.run(entry.progress, entry.ticket.seed, self.threads, entry.keep)
        except asyncio.CancelledError as error:
            if self._is_my_cancellation():
                if entry.progress.step == len(self.chain.steps):
                    entry.ready(entry.progress.data)
                raise
            self._failed(entry, RuntimeError(f"a transform was cancelled from within: {error!r}"))
        except Exception as error:
            self._failed(entry, error)
        else:
            entry.ready(entry.progress.data)
            self._settled(entry)

    def _is_my_cancellation(self) -> bool:
        task = asyncio.current_task()
        stopping = self._background is None or self._background.stopping
        return stopping or (task is not None and task.cancelling() > 0)

    def _failed(self, entry: Entry, error: Exception) -> None:
        without_own_frames(error)
        entry.fail(error)
        self._settled(entry)

    def _settled(self, entry: Entry) -> None:
        if self.chain.ordered:
            self._next_in_order()
        self._went_on()
        if not entry.dropped:
            self._notify()

    def _went_on(self) -> None:
        if self._progress is not None and not self._progress.done():
            self._progress.set_result(None)

    def _notify(self) -> None:
        for line in self._lines.values():
            line.notify()

    def _retry_first(self, line: Line) -> None:
        """Try a ticket again whose failure a consumer has seen."""
        entry = line.entries[0] if line.entries else None
        if entry is not None and entry.reported and self._unusable is None:
            self.retries += 1
            entry.retry()
            self._take_up(entry)

    # -- dropping -----------------------------------------------------------------------------------------------------

    def skip(self, line: Line) -> int | None:
        """Drop the first ticket of a line: its number, or None where there is none."""
        if not line.entries:
            return None
        entry = line.entries.popleft()
        entry.dropped = True
        self._dropped(1)
        return entry.ticket.number

    def flush(self) -> int:
        """Drop every ticket: how many. Consumers that wait get new ones."""
        count = sum(len(line.drop()) for line in self._lines.values())
        self._dropped(count)
        return count

    def _dropped(self, count: int) -> None:
        self.dropped += count
        if self.chain.ordered:
            self._next_in_order()
        self._gate.draw(self.written)

    # -- snapshots ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """Hand nothing over meanwhile. Consumers may still ask, and the tickets that they call for are drawn."""
        async with self._delivery:
            self._holding = True
            try:
                yield
            finally:
                self._holding = False
                self._notify()

    async def settle(self, seconds: float | None) -> None:
        """Wait until every ticket is a batch or has failed, or the time is over. At once while nothing is at work."""
        loop = asyncio.get_running_loop()
        deadline = None if seconds is None else loop.time() + seconds
        while self._unusable is None and self.in_flight:
            self._progress = loop.create_future()
            left = None if deadline is None else max(0.0, deadline - loop.time())
            done, _ = await asyncio.wait({self._progress}, timeout=left)
            if not done:
                break
        self._progress = None

    @asynccontextmanager
    async def resting(self) -> AsyncIterator[None]:
        """Let no stateful transform be at work meanwhile, so that its state may be replaced."""
        self._resting = True
        try:
            while self._unusable is None and self._order_busy:
                self._progress = asyncio.get_running_loop().create_future()
                await asyncio.wait({self._progress})
            yield
        finally:
            self._resting = False
            self._next_in_order()

    def capture(self) -> Tickets:
        """The tickets that nobody has taken, in order, each as far as it is."""
        main = None if self._batch_size is None else self._lines[self._batch_size]
        return Tickets(
            self._number,
            0 if main is None else main.depth,
            0 if main is None else max(0, len(main.entries) - main.depth),
            [
                SavedTicket.of(entry, line.batch_size, is_main=line is main)
                for line in self._lines.values()
                for entry in line.entries
            ],
        )

    def restore(self, tickets: Tickets) -> None:
        """Replace the tickets that nobody has taken; consumers that wait get these, in order."""
        for line in self._lines.values():
            line.drop()
        self._order.clear()
        self._number = tickets.number
        queues: dict[int, list[Entry]] = {}
        for saved in tickets.queue:
            size = self._batch_size if saved.is_main and self._batch_size is not None else saved.batch_size
            queues.setdefault(size, []).append(saved.entry())
        for size in [*self._lines, *(size for size in queues if size not in self._lines)]:
            self.line(size).restore(queues.get(size, []))
        if self._unusable is None:
            self._take_all_up()
        self._notify()
        self._gate.draw(self.written)

    # -- what it looks like -------------------------------------------------------------------------------------------

    def _entries(self) -> Iterator[Entry]:
        for line in self._lines.values():
            yield from line.entries

    @property
    def drawn(self) -> int:
        """Number of tickets ever drawn."""
        return self._number

    @property
    def queued(self) -> int:
        """Number of tickets that nobody has taken."""
        return sum(len(line.entries) for line in self._lines.values())

    @property
    def in_flight(self) -> int:
        """Number of tickets that are not settled."""
        return sum(not entry.settled for entry in self._entries())

    @property
    def waiting(self) -> int:
        """Number of consumers that wait."""
        return sum(len(line.waiters) for line in self._lines.values())

    def blocked(self) -> list[str]:
        """In words, what each line that has waiting consumers waits for."""
        return [self._blocked(line) for line in self._lines.values() if line.waiters]

    def _blocked(self, line: Line) -> str:
        who = f"{len(line.waiters)} consumer(s) of batches of {line.batch_size} wait"
        if line.entries:
            first = line.entries[0]
            return f"{who} for batch {first.ticket.number}: {first.stage.value}"
        if not self._source.drawable:
            return f"{who} for data: {self._source.writer.size} of at least {self._source.min_size} items are stored"
        return f"{who} for a draw, which is behind {self._gate.waiting_writers} write(s)"


_NOT_OPEN = "the buffer is not open: use `async with buffer:` or `await buffer.open()` first"
_CLOSED = "the buffer was closed"
