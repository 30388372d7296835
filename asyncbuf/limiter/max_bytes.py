"""Items take at most so many bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from asyncbuf._runtime.arguments import count
from asyncbuf.limiter.base import Limiter
from asyncbuf.rows import NotYet

if TYPE_CHECKING:
    from asyncbuf.rows import Answer, Counters


class MaxBytes(Limiter):
    """Writers wait while the stored items have so many bytes that those to come would be more than ``limit``.

    For a sampler whose items leave when they were handed over, such as ``ConsumingSampler``. Items are counted as the
    storage weighs them: as they are written in ``TensorStorage``; in ``ListStorage``, roughly, by looking at some of
    the elements of each list and dict. Items that are written together count alike.

    Args:
        limit: most bytes, from 1.

    Raises:
        TypeError, ValueError: it is not an int of at least 1.
    """

    holds_writers: ClassVar[bool] = True
    trusted: ClassVar[bool] = True
    needs_rows_to_leave: ClassVar[bool] = True
    counts_bytes: ClassVar[bool] = True

    def __init__(self, limit: int) -> None:
        self.limit: int = count(limit, "limit", 1, example=2**30)

    def may_write(self, counters: Counters, items: int) -> Answer:
        """True while there is room for the bytes of the items."""
        offered = counters.offered_nbytes
        if offered > self.limit:
            raise ValueError(
                f"MaxBytes: expected at most {self.limit} bytes in one write, found {offered} in {items} item(s): "
                "write them in parts, or raise the limit"
            )
        stored = counters.nbytes + counters.admitted_nbytes
        if stored + offered <= self.limit:
            return True
        return NotYet(f"{stored} bytes are stored or about to be, of at most {self.limit}, and {offered} are to come")

    def __repr__(self) -> str:
        """As it was made."""
        return f"MaxBytes({self.limit})"
