"""Gathering: the rows of a draw are read, on the event loop, in threads, or as the storage wishes."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import time
from typing import TYPE_CHECKING, Any

from asyncbuf._prefetch.gathered import Gathered, arranged, rows_to_gather
from asyncbuf._prefetch.offload import INLINE_BYTES
from asyncbuf._prefetch.transforms import Partial
from asyncbuf._runtime.supervisor import FAILURES, logger
from asyncbuf._runtime.torch_modes import Swapped, dispatch_modes, is_inference_on
from asyncbuf.batch import Draw
from asyncbuf.errors import SchemaError
from asyncbuf.storage.base import GatherJobs, Runs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from concurrent.futures import Future

    from asyncbuf._prefetch.entry import Entry
    from asyncbuf._prefetch.offload import Offload
    from asyncbuf._runtime.threads import Threads
    from asyncbuf._table.gate import HistoryGate
    from asyncbuf.storage._shielded import StorageCalls

    Combine = Callable[[Draw, Any, Any], Any]
    Arrived = Callable[[Entry, BaseException | None], None]


class Gatherer:
    """Reads the rows of tickets. Until that has ended, it holds a read lock in the history.

    Args:
        storage: where the rows are.
        gate: the history.
        threads: where large gathers run.
        combine: makes one tree of the rows of a draw and those of its joins, in the step in which the last of them is
            there; None if that is left to the transforms, or if there are no joins.

    Attributes:
        seconds: time spent gathering, all threads together.
        inline: how often rows were gathered on the event loop.
        elsewhere: how often in threads, or as the storage wished.
    """

    def __init__(
        self, storage: StorageCalls, gate: HistoryGate, threads: Threads, combine: Combine | None = None
    ) -> None:
        self._storage = storage
        self._combine = combine
        self._rows_per_row = 1  # that are gathered for each that is drawn, as the last draw with joins had it
        self._gate = gate
        self._threads = threads
        self._loop: asyncio.AbstractEventLoop | None = None
        self._awaited: set[asyncio.Task[None]] = set()
        self._runs_anywhere = storage.runs is Runs.ANYWHERE
        self.seconds = 0.0
        self.inline = self.elsewhere = 0

    def open(self) -> None:
        """Belong to the running event loop."""
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """Wait for what a storage does in its own way."""
        while self._awaited:
            await asyncio.wait(self._awaited)

    def abandon(self) -> None:
        """The event loop was closed in the middle of everything."""
        self._awaited.clear()

    def runs_here(self, count: int, offload: Offload | None) -> bool:
        """Decide to gather so many rows in this step, and count it; the caller must then gather.

        As the storage says, or else as was found to be faster.

        Args:
            count: number of rows, without those of joins.
            offload: where rows are gathered; None to decide by their size alone.
        """
        if not self._runs_anywhere:
            if self._storage.runs is not Runs.LOOP:
                return False
        elif (nbytes := self._storage.gather_nbytes(count * self._rows_per_row)) > INLINE_BYTES:
            if offload is None or not offload.gathers_here(nbytes):
                return False
            offload.drawn(nbytes)
        self.inline += 1
        return True

    def gather(self, draw: Draw) -> Any:
        """The rows of a draw, with its joins, in the shape that it asks for; the time goes into the statistics."""
        if is_inference_on() or dispatch_modes():
            with Swapped():
                return self.gather(draw)
        start = time.perf_counter()
        if draw.joins:
            parts = [self._storage.gather(rows) for rows in rows_to_gather(draw)]
            self.seconds += time.perf_counter() - start
            return self._put_together(draw, parts)
        rows = self._storage.gather(draw.indices)
        self.seconds += time.perf_counter() - start
        return rows if draw.shape is None else self._put_together(draw, [rows])

    def begin(self, entry: Entry, offload: Offload | None, *, is_urgent: bool, arrived: Arrived) -> None:
        """Gather the rows here, or let threads or the storage itself begin with it.

        Args:
            entry: the ticket. If its rows were gathered here, it has them afterwards.
            offload: where rows are gathered; None to decide by their size alone.
            is_urgent: whether consumers wait, so that threads should share the work.
            arrived: called on the event loop with the entry and what went wrong, unless the rows were gathered here.
        """
        draw = entry.ticket.draw
        count = draw.indices.shape[0]
        if self.runs_here(count, offload):
            entry.keep(Partial(0, self.gather(draw)))
            return
        self.elsewhere += 1
        nbytes = self._storage.gather_nbytes(count * self._rows_per_row)
        if offload is not None:
            offload.drawn(nbytes)
        parts = self._threads.parts(nbytes) if is_urgent else 1
        rows = self._begun(draw, parts)
        if isinstance(rows, GatherJobs):
            done = self._threads.copy_together([functools.partial(self._timed, job) for job in rows.jobs])
            self._reads(entry)
            done.add_done_callback(functools.partial(self._post, entry, rows.combine, arrived))
        elif inspect.isawaitable(rows):
            self._reads(entry)
            task = asyncio.create_task(self._await_rows(entry, rows, arrived), context=contextvars.Context())
            self._awaited.add(task)
            task.add_done_callback(self._awaited.discard)
        else:
            entry.keep(Partial(0, self._put_together(draw, rows)))

    def _begun(self, draw: Draw, threads: int) -> Any:
        """As ``Storage.begin_gather``, for the rows of a draw and those of its joins: a list of what was gathered."""
        begun = [self._storage.begin_gather(draw, inline=False, parts=threads)]
        try:
            begun += [
                self._storage.begin_gather(Draw(rows), inline=False, parts=threads) for rows in rows_to_gather(draw)[1:]
            ]
        except BaseException:
            for part in begun:
                if inspect.iscoroutine(part):
                    part.close()
            raise
        if any(inspect.isawaitable(part) for part in begun):
            return _all_of(begun)
        if not any(isinstance(part, GatherJobs) for part in begun):
            return begun
        jobs = [job for part in begun if isinstance(part, GatherJobs) for job in part.jobs]
        return GatherJobs(jobs, lambda: [part.combine() if isinstance(part, GatherJobs) else part for part in begun])

    def _put_together(self, draw: Draw, parts: Sequence[Any]) -> Any:
        """Gathered rows, in the shape and with the joins that the draw asked for."""
        if draw.shape is None and not draw.joins:
            return parts[0]
        if not self._storage.splits_rows:
            raise SchemaError(
                "expected batches with an axis of rows, because the sampler draws slices or joins further rows; "
                'found sequences that are packed: RaggedStorage(..., layout="padded") has one'
            )
        if draw.joins:
            joined = sum(indices.numel() for indices in draw.joins.values())
            self._rows_per_row = 1 + joined // draw.indices.numel()
        found = arranged(draw, parts, are_items=self._storage.needs_collate)
        if self._combine is None or type(found) is not Gathered:
            return found
        return self._combine(draw, found.data, found.joined)

    def _timed(self, copy: Callable[[], object]) -> None:
        start = time.perf_counter()
        copy()
        self.seconds += time.perf_counter() - start

    def _reads(self, entry: Entry) -> None:
        """Its rows are being read from now on, until ``_ended``."""
        entry.gathering = True
        self._gate.acquire_read()

    async def _await_rows(self, entry: Entry, rows: Awaitable[Any], arrived: Arrived) -> None:
        start = time.perf_counter()
        try:
            data = await rows
        except BaseException as error:
            self._ended(entry, arrived, error)
            if not isinstance(error, FAILURES):
                raise
        else:
            self.seconds += time.perf_counter() - start
            self._ended(entry, arrived, None, lambda: data)

    def _post(self, entry: Entry, combine: Callable[[], Any], arrived: Arrived, done: Future[Any]) -> None:
        """From the copying threads back to the event loop."""
        assert self._loop is not None
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        try:
            self._loop.call_soon_threadsafe(self._ended, entry, arrived, error, combine)
        except RuntimeError:
            logger.debug("the event loop was closed while rows were being gathered")

    def _ended(
        self,
        entry: Entry,
        arrived: Arrived,
        error: BaseException | None,
        combine: Callable[[], Any] | None = None,
    ) -> None:
        """All rows of an entry are read, or could not be."""
        entry.gathering = False
        if combine is not None and error is None:
            try:
                with Swapped():
                    entry.keep(Partial(0, self._put_together(entry.ticket.draw, combine())))
            except BaseException as failure:
                error = failure
        self._gate.release_read()
        arrived(entry, error)


async def _all_of(begun: Sequence[Any]) -> list[Any]:
    """Those parts that are awaitable, awaited one after the other, and the others as they are."""
    return [await part if inspect.isawaitable(part) else part for part in begun]
