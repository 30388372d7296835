"""Counters of a buffer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Ledger:
    """What became of every item and of every ticket, at one moment, since the buffer began; restarts included.

    Three identities hold at every moment: ``written == stored + sum(evicted)``,
    ``drawn == delivered + leased + queued + sum(dropped)`` and
    ``reserved == fulfilled + reserved_open + sum(given_up)``. ``closes`` says whether they do; ``str`` shows it all.

    Attributes:
        written: number of items ever written.
        stored: number of items in the table.
        evicted: number of items that left, by cause. ``overwritten``: newer items took their rows, perhaps of the same
            write. ``not_kept``: the writer chose not to keep them when they came. ``consumed``: the sampler let them go
            with their last batch. ``let_go``: the sampler had no more use for them, as for a group that was filtered
            out. ``removed`` and ``emptied``: by ``remove()`` and ``empty()``. ``earlier``: before these books began.
        duplicates: number of writes that were ignored, because their key or number had been seen.
        drawn: number of tickets ever drawn.
        delivered: number of batches handed to consumers.
        leased: number of batches that were lent and are not acknowledged.
        queued: number of tickets in the queues.
        dropped: number of tickets that nobody got, by cause: ``skip``, ``flush``, ``empty``, ``restart_epoch``,
            ``earlier``.
        reserved: number of reservations ever made.
        fulfilled: how many of them became items.
        reserved_open: how many are open; members of a group stay so until the group is complete.
        given_up: number of reservations that ended otherwise, by cause. ``failed``: by an exception. ``not committed``:
            the block ended without a commit. ``late``: the deadline of the group was over. ``group``: too few members
            of the group were left. ``duplicate``: the key had been written.
    """

    written: int = 0
    stored: int = 0
    evicted: Mapping[str, int] = field(default_factory=dict, hash=False)
    duplicates: int = 0
    drawn: int = 0
    delivered: int = 0
    leased: int = 0
    queued: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict, hash=False)
    reserved: int = 0
    fulfilled: int = 0
    reserved_open: int = 0
    given_up: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def closes(self) -> bool:
        """Whether every item and every ticket is accounted for."""
        return not self.lost_items and not self.lost_tickets and not self.lost_reservations

    @property
    def lost_items(self) -> int:
        """Number of items that are nowhere: 0; a negative number if some are in two places."""
        return self.written - self.stored - sum(self.evicted.values())

    @property
    def lost_tickets(self) -> int:
        """Number of tickets that are nowhere: 0; a negative number if some are in two places."""
        return self.drawn - self.delivered - self.leased - self.queued - sum(self.dropped.values())

    @property
    def lost_reservations(self) -> int:
        """Number of reservations that are nowhere: 0; a negative number if some are in two places."""
        return self.reserved - self.fulfilled - self.reserved_open - sum(self.given_up.values())

    def __str__(self) -> str:
        """A line for items, one for tickets, and one for reservations if there were any."""
        reservations = (
            f"\nreservations: {self.reserved} made = {self.fulfilled} fulfilled + {self.reserved_open} open + "
            f"{_sum('given up', self.given_up)}{_lost(self.lost_reservations)}"
        )
        lines = "\n".join(
            (
                f"items:   {self.written} written = {self.stored} stored + {_sum('evicted', self.evicted)}"
                f"{_lost(self.lost_items)}; {self.duplicates} duplicate write(s)",
                f"tickets: {self.drawn} drawn = {self.delivered} delivered + {self.leased} leased + "
                f"{self.queued} queued + {_sum('dropped', self.dropped)}{_lost(self.lost_tickets)}",
            )
        )
        return lines + (reservations if self.reserved else "")


def _sum(name: str, counts: Mapping[str, int]) -> str:
    causes = ", ".join(f"{count} {cause}" for cause, count in counts.items())
    return f"{sum(counts.values())} {name}" + (f" ({causes})" if causes else "")


def _lost(count: int) -> str:
    return f" + {count} LOST" if count > 0 else f" - {-count} TWICE" if count else ""


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
        ledger: what became of every item and of every ticket.
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
    ledger: Ledger = Ledger()
