"""The prefetching of one buffer, put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncbuf._prefetch.background import Background
from asyncbuf._prefetch.drawer import Drawer
from asyncbuf._prefetch.fetch import Fetcher
from asyncbuf._prefetch.gather import Gatherer
from asyncbuf._prefetch.in_order import InOrder
from asyncbuf._prefetch.leases import Leases
from asyncbuf._prefetch.pipeline import Pipeline
from asyncbuf._prefetch.queue import TicketQueues
from asyncbuf._prefetch.standstill import Standstill

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncbuf._prefetch.gather import Combine
    from asyncbuf._prefetch.transforms import TransformChain
    from asyncbuf._runtime.lifecycle import Lifecycle
    from asyncbuf._runtime.stalls import Stalls
    from asyncbuf._runtime.threads import Threads
    from asyncbuf._table.gate import HistoryGate
    from asyncbuf._table.table import Table


class Prefetch:
    """Makes the parts, each of which gets what it needs.

    Args:
        table: what tickets are drawn from.
        chain: what is done to gathered rows.
        gate: the history.
        threads: where large gathers and sync transforms run.
        lifecycle: that of the buffer.
        batch_size: rows of a prefetched ticket; None if each call says its own.
        depth: how many tickets are drawn ahead of those asked for.
        workers: how many tickets are transformed at once.
        combine: what ``Gatherer`` does about joins.
        refuse: told why, when nobody will be admitted any more: each ends the waiting of its own.
        went_on: called after each draw and each change of the table; None if nobody waits for that.
        stalls: told of calls that wait.

    Attributes:
        queues: the tickets that nobody has taken, and the consumers that wait for them.
        leases: batches that consumers have for a while.
        drawer: draws tickets.
        gatherer: reads their rows.
        fetcher: makes them into batches.
        pipeline: hands them over.
        standstill: stops all that for a snapshot.
        background: the tasks behind it.
    """

    def __init__(
        self,
        table: Table,
        chain: TransformChain,
        gate: HistoryGate,
        threads: Threads,
        lifecycle: Lifecycle,
        *,
        batch_size: int | None,
        depth: int,
        workers: int,
        combine: Combine | None = None,
        refuse: Sequence[Callable[[Callable[[], Exception]], None]] = (),
        went_on: Callable[[], None] | None = None,
        stalls: Stalls,
    ) -> None:
        queues = self.queues = TicketQueues(batch_size, depth)
        gatherer = self.gatherer = Gatherer(table.storage_calls, gate, threads, combine)
        leases = self.leases = Leases(queues)
        in_order = InOrder()
        fetcher = self.fetcher = Fetcher(gatherer, chain, gate, queues, threads, lifecycle, table.missing, in_order)
        drawer = self.drawer = Drawer(
            table, gate, queues, gatherer, fetcher, in_order, lifecycle, went_on, stalls.starved
        )
        pipeline = self.pipeline = Pipeline(table, gate, queues, leases, drawer, in_order, chain, lifecycle, stalls)
        device_step = len(chain.steps) - 1 if chain.delivers else None
        self.standstill = Standstill(pipeline, drawer, queues, leases, fetcher, in_order, gate, lifecycle, device_step)
        self.background = Background(lifecycle, gate, queues, leases, fetcher, drawer, workers, refuse)
