"""Writers are at most so many batches ahead of consumers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from asyncbuf._runtime.arguments import count
from asyncbuf.limiter.base import Limiter
from asyncbuf.rows import NotYet

if TYPE_CHECKING:
    from asyncbuf.rows import Answer, Counters


class MaxAhead(Limiter):
    """Writers wait while items for so many batches are stored that no ticket was drawn for.

    It bounds how old data is when it is trained on. With a sampler that uses items up, those are the items that wait to
    be drawn (of ``GroupSampler``, in complete groups). With any other, each item written counts one more and each row
    drawn one less, from 0 up to the number that is stored: draws are not saved up, and removed items are forgotten.

    Let a write and a batch fit together: where a batch waits for ``batch_size`` items, writes of ``n`` items need
    ``batches * batch_size`` to be at least ``batch_size - 1 + n``.

    Args:
        batches: how many batches, from 1. The buffer needs a batch size.

    Raises:
        TypeError, ValueError: it is not an int of at least 1.
    """

    counts_draws: ClassVar[bool] = False
    holds_writers: ClassVar[bool] = True
    trusted: ClassVar[bool] = True
    needs_batch_size: ClassVar[bool] = True
    counts_unread: ClassVar[bool] = True

    def __init__(self, batches: int) -> None:
        self.batches: int = count(batches, "batches", 1, example=2)

    def may_write(self, counters: Counters, items: int) -> Answer:
        """True while there is room for the items."""
        most = self.batches * counters.batch_size
        if items > most:
            raise ValueError(
                f"MaxAhead: expected at most {most} items in one write, {self.batches} batch(es) of "
                f"{counters.batch_size}, found {items}: write them in parts, or let writers be more batches ahead"
            )
        ahead = counters.unread + counters.admitted
        if ahead + items <= most:
            return True
        return NotYet(
            f"{ahead} items are ahead of the draws, of at most {most}, {self.batches} batch(es) of "
            f"{counters.batch_size}, and {items} more are to come"
        )

    def __repr__(self) -> str:
        """As it was made."""
        return f"MaxAhead({self.batches})"
