"""Draws begin when enough is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from asyncbuf._runtime.arguments import count
from asyncbuf.limiter.base import Limiter
from asyncbuf.rows import NotYet

if TYPE_CHECKING:
    from asyncbuf.rows import Answer, Counters


class MinSize(Limiter):
    """Consumers wait until this many items are stored. Writers never wait.

    Args:
        items: how many, from 1.

    Raises:
        TypeError, ValueError: it is not an int of at least 1.
    """

    counts_draws: ClassVar[bool] = False
    trusted: ClassVar[bool] = True

    def __init__(self, items: int) -> None:
        self.items: int = count(items, "min_size", 1)

    def may_draw(self, counters: Counters, items: int) -> Answer:
        """True from ``items`` stored items on."""
        if counters.size >= self.items:
            return True
        return NotYet(f"{counters.size} of at least {self.items} items are stored")

    def check(self, capacity: int) -> None:
        """Refuse more than the capacity."""
        if self.items > capacity:
            raise ValueError(f"min_size: expected at most the capacity {capacity}, found {self.items}")

    def __repr__(self) -> str:
        """As it was made."""
        return f"MinSize({self.items})"
