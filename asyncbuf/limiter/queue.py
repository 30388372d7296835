"""At most so many items are stored, and none is overwritten."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from asyncbuf._runtime.arguments import count
from asyncbuf.limiter.base import Limiter
from asyncbuf.rows import NotYet

if TYPE_CHECKING:
    from asyncbuf.rows import Answer, Counters


class Queue(Limiter):
    """Writers wait while ``size`` items are stored, until some of them leave.

    For a sampler whose items leave when they were handed over, such as ``ConsumingSampler``: with it, the buffer is a
    bounded queue in which nothing is lost. (In Reverb, the rate limiter of a queue; consumers wait by the sampler.)
    An item of a ticket that waits in the prefetch queue is stored until a consumer has got its batch.

    Args:
        size: most items; from 1, and at least a batch.

    Raises:
        TypeError, ValueError: it is not an int of at least 1.
    """

    holds_writers: ClassVar[bool] = True
    trusted: ClassVar[bool] = True
    needs_rows_to_leave: ClassVar[bool] = True

    def __init__(self, size: int) -> None:
        self.size: int = count(size, "size", 1, example=1024)

    def may_write(self, counters: Counters, items: int) -> Answer:
        """True while there is room for the items."""
        if items > self.size:
            raise ValueError(
                f"Queue: expected at most {self.size} items in one write, found {items}: write them in parts, or make "
                "the queue larger"
            )
        stored = counters.size + counters.admitted
        if stored + items <= self.size:
            return True
        return NotYet(f"{stored} items are stored or about to be, of at most {self.size}, and {items} more are to come")

    def may_draw(self, counters: Counters, items: int) -> Answer:
        """True, except for a batch that is never stored as a whole."""
        if items > self.size:
            raise ValueError(f"Queue: expected batches of at most its size {self.size}, found {items}")
        return True

    def check(self, capacity: int) -> None:
        """Refuse more than the capacity: writers would overwrite items."""
        if self.size > capacity:
            raise ValueError(f"Queue: expected a size of at most the capacity {capacity}, found {self.size}")

    def check_batch(self, batch_size: int) -> None:
        """Refuse a batch that is larger than the queue."""
        if batch_size > self.size:
            raise ValueError(f"Queue: expected a size of at least the batch size {batch_size}, found {self.size}")

    def __repr__(self) -> str:
        """As it was made."""
        return f"Queue({self.size})"
