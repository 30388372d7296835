"""Counters of a buffer."""

from __future__ import annotations

from typing import NamedTuple


class BufferStats(NamedTuple):
    """Counters of a buffer at one moment.

    Every ticket that was drawn is in one place: ``drawn == delivered + leased + queued + dropped``.

    Attributes:
        size: number of stored items.
        capacity: number of rows of the storage.
        write_count: number of items ever written, overwritten ones included.
        drawn: number of tickets ever drawn.
        delivered: number of batches ever handed to consumers; of those on lease, the acknowledged ones.
        dropped: number of tickets dropped by ``skip``, ``flush`` and ``empty``.
        queued: number of tickets in the queues, ready or not.
        in_flight: number of queued tickets whose rows are still being gathered or transformed.
        waiting_consumers: number of calls that wait for a batch.
        waiting_writers: number of calls that wait to write, those that a limiter holds back included.
        peak_queued: the highest value of ``queued`` so far.
        gather_seconds: time spent gathering rows, summed over all threads, in seconds.
        wait_seconds: time that consumers spent waiting, summed over all of them, in seconds.
        retries: number of times that a failed ticket was tried again.
        inline_gathers: number of gathers that ran on the event loop.
        thread_gathers: number of gathers that ran in a thread.
        stale_priorities: number of rows whose priorities came too late: the item had been replaced or removed.
        leased: number of batches that consumers have on lease.
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
    leased: int = 0
