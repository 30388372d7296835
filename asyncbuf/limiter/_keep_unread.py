"""No item is overwritten before a batch was drawn from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from asyncbuf.limiter.base import Limiter
from asyncbuf.rows import NotYet

if TYPE_CHECKING:
    from asyncbuf.rows import Answer, Counters


class KeepUnread(Limiter):
    """Writers wait while they would overwrite an item that no ticket was drawn for. For ``overwrite="wait"``."""

    holds_writers: ClassVar[bool] = True
    trusted: ClassVar[bool] = True
    counts_overwrites: ClassVar[bool] = True

    def may_write(self, counters: Counters, items: int) -> Answer:
        """True while every row that the items take is free, or was drawn."""
        if items > counters.capacity:
            raise ValueError(
                f'overwrite="wait": expected writes of at most {counters.capacity} items, the capacity, found {items}: '
                "write them in parts"
            )
        if counters.admitted + items > counters.capacity:
            return NotYet(
                f"{counters.admitted} items are about to be written, and {items} more are to come, which is above the "
                f"capacity {counters.capacity}"
            )
        if not counters.overwrites:
            return True
        return NotYet(
            f"no batch was drawn yet from {counters.overwrites} stored item(s) that {items} more would overwrite"
        )

    def __repr__(self) -> str:
        """What makes it."""
        return 'overwrite="wait"'
