"""What the prefetching counts."""

from __future__ import annotations


class Counts:
    """Counters of tickets and batches; ``drawn == delivered + leased + queued + dropped`` at any moment.

    Attributes:
        drawn: number of tickets ever drawn, and the number of the next one.
        delivered: number of batches that consumers have for good.
        dropped: number of tickets that nobody gets.
        retries: number of tickets that were tried again after a failure.
        peak_queued: the largest number of tickets that nobody had taken.
        wait_seconds: time that consumers spent waiting, all together.
    """

    __slots__ = ("delivered", "drawn", "dropped", "peak_queued", "retries", "wait_seconds")

    def __init__(self) -> None:
        self.drawn = self.delivered = self.dropped = self.retries = self.peak_queued = 0
        self.wait_seconds = 0.0
