"""The parts of one buffer, put together: each gets what it needs, and none reaches through another."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from asyncbuf._config import INDEX_NBYTES
from asyncbuf._ingest.admission import Admission
from asyncbuf._ingest.last_writer import LastWriter
from asyncbuf._ingest.write_path import WritePath
from asyncbuf._prefetch.prefetch import Prefetch
from asyncbuf._prefetch.transforms import TransformChain
from asyncbuf._runtime.arguments import count, fits_memory
from asyncbuf._runtime.lifecycle import Lifecycle
from asyncbuf._runtime.reentry import ReentryGuard
from asyncbuf._runtime.stalls import Stalls
from asyncbuf._runtime.threads import Threads
from asyncbuf._table.gate import HistoryGate
from asyncbuf._table.noting import NotingTable
from asyncbuf._table.table import Table
from asyncbuf._table.versioned import VersionedTable
from asyncbuf.checkpoint._buffer_state import BufferState, Config
from asyncbuf.checkpoint._snapshotter import Snapshotter
from asyncbuf.errors import BufferClosedError
from asyncbuf.shard import RanksNow
from asyncbuf.stats import BufferStats, Ledger

if TYPE_CHECKING:
    from asyncbuf._config import BufferConfig
    from asyncbuf._prefetch.queue import TicketQueue

# Up to so many rows of a batch, nobody asks whether they fit into memory.
_LARGE = 1 << 20


class Assembly:
    """Everything behind a buffer.

    Args:
        config: the checked arguments.

    Attributes:
        life: state and reason of the whole buffer.
        gate: the history.
        table: storage, writer, sampler, limiter and generator.
        versions: the same, if it counts versions of the model; else None.
        guard: knows which calls come from within the work that has to answer them.
        stalls: looks after calls that wait, and after the tasks that are watched.
        admission: writers that the limiter holds back; None if it holds nobody back.
        writes: the way of an item.
        queues: tickets that nobody has taken, and the consumers that wait for them.
        leases: batches that consumers have for a while.
        ranks_now: the ranks that share each batch.
        drawer: draws tickets.
        gatherer: reads their rows.
        fetcher: makes them into batches.
        pipeline: hands them over.
        background: the tasks behind it.
        snapshots: takes and restores snapshots.
        freezer: brings the buffer to rest for that.
    """

    def __init__(self, config: BufferConfig) -> None:
        storage, sampler = config.storage, config.sampler
        # Those in line, those being made, and those that consumers work on.
        storage.expect(config.prefetch + config.workers + 2)
        storage.will_collate(config.collate_fn is None)
        self.life = Lifecycle()
        self.ranks_now = RanksNow()
        self.gate = HistoryGate()
        limiter = config.limiter
        parts = storage, config.writer, sampler, limiter, config.generator, config.batch_size, config.key_window
        self.table: Table
        self.versions: VersionedTable | None = None
        if config.staleness is not None:
            self.table = self.versions = VersionedTable(*parts, staleness=config.staleness)
        else:
            self.table = (NotingTable if limiter.counts_unread or limiter.counts_overwrites else Table)(*parts)
        self.guard = ReentryGuard()
        last_writer = LastWriter()
        # Whether a version begins is up to the program.
        is_certain = sampler.trusted and limiter.trusted and not limiter.needs_versions
        self.stalls = Stalls(self.life, self.gate, last_writer, is_certain=is_certain)
        combine = sampler.combine if "combine" in sampler.hooks else None
        combines_at_once = sampler.combines_at_once and config.collate is None
        chain = TransformChain(
            config.collate,
            config.transforms,
            foreign_collate=config.collate_fn is not None,
            takes_items=storage.needs_collate,
            device=config.device,
            pin_memory=config.pin_memory,
            combine=None if combines_at_once else combine,
            guard=self.guard,
        )
        # Others can make a batch that a transform waits for, unless all must wait for that transform.
        self.guard.helpers = 0 if chain.ordered else config.workers - 1
        threads = Threads(config.workers)
        self.admission = (
            Admission(self.table, self.guard, self.stalls)
            if limiter.holds_writers or self.table.limits.notes_rows
            else None
        )
        durability = self.table.durability
        prefetch = Prefetch(
            self.table,
            chain,
            self.gate,
            threads,
            self.life,
            batch_size=config.batch_size,
            depth=config.prefetch,
            workers=config.workers,
            combine=combine if combines_at_once else None,
            refuse=(
                self.stalls.close,
                self.ranks_now.refuse,
                durability.refuse,
                *(() if self.admission is None else (self.admission.refuse,)),
            ),
            went_on=None if self.admission is None else self.admission.changed,
            stalls=self.stalls,
        )
        self.queues = prefetch.queues
        self.leases = prefetch.leases
        self.drawer = prefetch.drawer
        self.gatherer = prefetch.gatherer
        self.fetcher = prefetch.fetcher
        self.pipeline = prefetch.pipeline
        self.background = prefetch.background
        self.writes = WritePath(
            self.table, self.gate, threads, self.admission, self.life, self.drawer, self.background.fail, last_writer
        )
        state = BufferState(self.table, chain, Config(config.batch_size, config.prefetch))
        self.snapshots = Snapshotter(state, prefetch.standstill, self.gate, self.guard)
        self.freezer = self.snapshots.freezer

    def recover(self) -> None:
        """Close a buffer whose event loop was closed under it."""
        if self.life.is_orphaned:
            self.background.abandon()
            self.table.durability.forget()
            if self.admission is not None:
                self.admission.forget()
        self.freezer.recover()

    def advance_version(self, version: int | None) -> int:
        """A version of the model begins: its number. In an exclusive turn of the history.

        Raises:
            TypeError: nobody counts versions.
            ValueError: the version is not a later one.
        """
        table = self.versions
        if table is None:
            raise TypeError("advance_version: expected a buffer made with staleness=Staleness(2), found one without")
        if version is None:
            version = table.version + 1
        elif version < table.version:
            raise ValueError(f"version: expected one from {table.version} on, the current one, found {version}")
        table.advance(version)
        self.drawer.drop_stale()
        self.drawer.table_changed()
        return version

    def finish(self) -> None:
        """No more items will come; writers that wait are told. In a turn of the history."""
        self.table.finish()
        self.drawer.finish()
        if self.admission is not None:
            self.admission.refuse(functools.partial(BufferClosedError, "finish() was called: no more items are taken"))

    def restart_epoch(self) -> int:
        """End the pass of the sampler, and drop what was drawn ahead: how many tickets. In a turn of the history.

        Raises:
            TypeError: the sampler cannot end a pass; nothing has changed.
        """
        self.table.end_epoch()
        return self.drawer.flush("restart_epoch")

    def clear(self) -> None:
        """Forget items and tickets. In an exclusive turn of the history."""
        self.table.clear()
        self.drawer.flush("empty")

    def queue(self, batch_size: int | None) -> TicketQueue:
        """The queue of a batch size; that of the buffer if None.

        Raises:
            TypeError, ValueError: no such batch size is possible.
        """
        main = self.pipeline.main_queue
        if batch_size is not None:
            batch_size = count(batch_size, "batch_size", 1, example=256)
            if batch_size > _LARGE:
                row_nbytes = self.table.storage.gather_nbytes(batch_size) // batch_size
                fits_memory(batch_size, INDEX_NBYTES + row_nbytes, "batch_size")
            self.table.sampler.check(self.table.storage.capacity, batch_size)
            return self.queues.of(batch_size)
        if main is None:
            raise ValueError("batch_size: expected one, because the buffer was made without; found None")
        return main

    def stats(self) -> BufferStats:
        """Counters, at this moment."""
        table, queues, gatherer, counts = self.table, self.queues, self.gatherer, self.queues.counts
        return BufferStats(
            size=table.size,
            capacity=table.storage.capacity,
            write_count=table.write_count,
            drawn=counts.drawn,
            delivered=counts.delivered,
            dropped=counts.dropped,
            leased=len(self.leases),
            queued=queues.queued,
            in_flight=queues.in_flight,
            waiting_consumers=queues.waiting,
            waiting_writers=self.gate.waiting_writers + (0 if self.admission is None else self.admission.waiting),
            peak_queued=counts.peak_queued,
            gather_seconds=gatherer.seconds,
            wait_seconds=counts.wait_seconds,
            retries=counts.retries,
            inline_gathers=gatherer.inline,
            thread_gathers=gatherer.elsewhere,
            stale_priorities=table.stale_priorities,
            ledger=self.ledger(),
        )

    def ledger(self) -> Ledger:
        """What became of items and tickets, at this moment."""
        table, counts, tally = self.table, self.queues.counts, self.table.tally
        return Ledger(
            written=table.write_count,
            stored=table.size,
            evicted=tally.all_evicted(),
            duplicates=tally.duplicates,
            drawn=counts.drawn,
            delivered=counts.delivered,
            leased=len(self.leases),
            queued=self.queues.queued,
            dropped=dict(tally.dropped),
            reserved=table.reservations.made,
            fulfilled=table.reservations.committed,
            reserved_open=len(table.reservations),
            given_up=dict(table.reservations.given_up),
        )

    def why_blocked(self) -> str:
        """In words, who waits for what."""
        reasons = self.freezer.blocked(self.queues.waiting, self.pipeline.blocked)
        if self.admission is not None:
            reasons += self.admission.blocked()
        reasons += self.table.durability.blocked()
        if self.ranks_now.ranks is not None:
            reasons += self.ranks_now.ranks.blocked()
        if self.pipeline.waits_for_data and self.writes.last_writer.is_gone:
            reasons.append(str(self.writes.last_writer))
        if reasons:
            return "; ".join(reasons)
        last = self.pipeline.gave_up
        return "nobody waits" if last is None else f"nobody waits now; when a call last gave up, {last}"
