"""Items are drawn about so many times each."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from asyncbuf._runtime.arguments import count, number, shown
from asyncbuf.limiter.base import Limiter
from asyncbuf.rows import NotYet

if TYPE_CHECKING:
    from asyncbuf.rows import Answer, Counters


class SampleToInsertRatio(Limiter):
    """Holds writers and consumers back, so that each item is drawn about ``samples_per_insert`` times.

    As the rate limiter of that name of Reverb (Cassirer et al., Reverb: A Framework for Experience Replay, 2021). With
    ``diff = samples_per_insert * items written - rows drawn``, writers wait where ``diff`` would be above its highest
    value, and consumers where it would be below its lowest one. Until ``min_size`` items were written, writers never
    wait and consumers always do.

    Rows count as drawn once their ticket is, so with prefetching some batches before a consumer has them, and also if
    the ticket is dropped later. Both counts go on after a restore. The settings are those of the buffer that was
    restored, not those of the checkpoint: after a change of settings, one side may have to wait until the other has
    caught up, and ``why_blocked()`` says how far it is.

    Args:
        samples_per_insert: how often each item is drawn on average; above 0.
        min_size: number of items before the first draw; from 1.
        error_buffer: how far ``diff`` may be from ``samples_per_insert * min_size``, up and down; or its lowest and
            highest value. It must have room for a batch and a write, or both sides would wait for each other.

    Raises:
        TypeError, ValueError: an argument is not of the kind or in the range that is expected.
    """

    counts_draws: ClassVar[bool] = True
    holds_writers: ClassVar[bool] = True
    trusted: ClassVar[bool] = True

    def __init__(self, samples_per_insert: float, min_size: int, error_buffer: float | tuple[float, float]) -> None:
        self._ratio = number(samples_per_insert, "samples_per_insert", above=0.0, example=4.0)
        self._min_size = count(min_size, "min_size", 1)
        middle = self._ratio * self._min_size
        if isinstance(error_buffer, tuple | list):
            if len(error_buffer) != 2:
                raise ValueError(f"error_buffer: expected a lowest and a highest number, found {shown(error_buffer)}")
            self._lowest, self._highest = (number(bound, "error_buffer", example=512.0) for bound in error_buffer)
            if self._lowest >= self._highest:
                raise ValueError(f"error_buffer: expected the lowest number first, found {shown(error_buffer)}")
        else:
            width = number(error_buffer, "error_buffer", above=0.0, example=512.0)
            self._lowest, self._highest = middle - width, middle + width

    def may_write(self, counters: Counters, items: int) -> Answer:
        """True while ``diff`` stays in its range, and up to ``min_size``."""
        written = counters.write_count + counters.admitted + items
        if written <= self._min_size:
            return True
        self._check_room(items, counters.batch_size or 1, "a write", items)
        diff = self._ratio * written - counters.drawn_items
        if diff <= self._highest:
            return True
        behind = math.ceil(diff - self._highest)
        return NotYet(
            f"{behind} more rows must be drawn: {written} items and {counters.drawn_items} drawn rows would make "
            f"{self._ratio:g} * {written} - {counters.drawn_items} = {diff:g}, above {self._highest:g}"
        )

    def may_draw(self, counters: Counters, items: int) -> Answer:
        """True while ``diff`` stays in its range, once ``min_size`` items were written."""
        written, drawn = counters.write_count, counters.drawn_items + items
        if written < self._min_size:
            return NotYet(f"{written} of at least {self._min_size} items were written")
        self._check_room(1, items, "a batch", items)
        diff = self._ratio * written - drawn
        if diff >= self._lowest:
            return True
        missing = math.ceil((self._lowest - diff) / self._ratio)
        return NotYet(
            f"{missing} more items must be written: {written} items and {drawn} drawn rows would make "
            f"{self._ratio:g} * {written} - {drawn} = {diff:g}, below {self._lowest:g}"
        )

    def check_batch(self, batch_size: int) -> None:
        """Refuse a range without room for a batch and an item."""
        self._check_room(1, batch_size, "a batch", batch_size)

    def _check_room(self, items: int, rows: int, what: str, count: int) -> None:
        """Somebody can always go on if a write and a batch fit into the range together.

        Raises:
            ValueError: they do not.
        """
        needed = self._ratio * items + rows
        if self._highest - self._lowest < needed:
            raise ValueError(
                f"SampleToInsertRatio: expected an error_buffer of at least {needed / 2:g} for {what} of {count}, so "
                f"that writers and consumers do not wait for each other, found {(self._highest - self._lowest) / 2:g}"
            )

    def __repr__(self) -> str:
        """As it was made."""
        bounds = f"({self._lowest:g}, {self._highest:g})"
        return f"SampleToInsertRatio({self._ratio:g}, min_size={self._min_size}, error_buffer={bounds})"
