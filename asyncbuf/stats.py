"""What a buffer counts."""

from __future__ import annotations

from typing import NamedTuple


class BufferStats(NamedTuple):
    """A moment in the life of a buffer.

    Attributes:
        size: number of stored items.
        capacity: number of rows.
        write_count: number of items ever written, overwritten ones included.
        drawn: number of tickets ever drawn.
        delivered: number of batches handed to consumers.
        dropped: number of tickets dropped by ``skip``, ``flush`` and ``empty``.
        queued: number of tickets that nobody has taken yet.
        in_flight: how many of those are still being gathered or transformed.
        waiting_consumers: number of coroutines waiting for a batch.
        waiting_writers: number of coroutines waiting to write, those that a limiter holds back included.
        peak_queued: the largest value that ``queued`` ever had.
        gather_seconds: time spent gathering rows, all threads together.
        wait_seconds: time that consumers spent waiting, all together.
        retries: number of tickets that were tried again after a failure.
        inline_gathers: how often rows were gathered on the event loop.
        thread_gathers: how often in a thread.
        stale_priorities: number of rows whose priorities came too late: the item had been replaced or removed.
    """

    size: int
    capacity: int
    write_count: int
    drawn: int
    delivered: int
    dropped: int
    queued: int
    in_flight: int
    waiting_consumers: int
    waiting_writers: int
    peak_queued: int
    gather_seconds: float
    wait_seconds: float
    retries: int
    inline_gathers: int
    thread_gathers: int
    stale_priorities: int = 0
