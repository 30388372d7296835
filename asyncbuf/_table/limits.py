"""A limiter, and the counters that it decides by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncbuf._plain.state import fields, same
from asyncbuf._runtime.shield import shielded
from asyncbuf.errors import CheckpointCorruptError
from asyncbuf.rows import Counters

if TYPE_CHECKING:
    from asyncbuf.limiter import Limiter
    from asyncbuf.rows import Answer, Rows


class Limits:
    """What a limiter says of a table now.

    Args:
        limiter: the limiter.

    Attributes:
        limiter: the limiter.
        drawn: number of tickets ever drawn.
        drawn_items: number of rows ever drawn, all tickets together.
        admitted: number of items that were admitted and are not written yet. Belongs to calls that wait: not saved.
    """

    def __init__(self, limiter: Limiter) -> None:
        self.limiter = limiter
        self.drawn = self.drawn_items = self.admitted = 0

    def may_draw(self, rows: Rows, items: int) -> Answer:
        """Whether a batch of so many items may be drawn."""
        if self.limiter.trusted:
            return self.limiter.may_draw(self._counters(rows), items)
        return shielded(self.limiter.may_draw, self._counters(rows), items)

    def may_write(self, rows: Rows, items: int) -> Answer:
        """Whether so many items may be written.

        Raises:
            ValueError: they never can.
        """
        return shielded(self.limiter.may_write, self._counters(rows), items)

    def _counters(self, rows: Rows) -> Counters:
        return Counters(rows.size, rows.capacity, rows.write_count, self.admitted, self.drawn, self.drawn_items)

    def state_dict(self) -> dict[str, Any]:
        """The counters of draws; kind and state of the limiter."""
        return {
            "kind": type(self.limiter).__name__,
            "drawn": self.drawn,
            "drawn_items": self.drawn_items,
            "state": self.limiter.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave out. Limiters without a state may be exchanged for each other.

        Raises:
            CheckpointMismatchError: a limiter with a state was of another kind.
        """
        kind, drawn, drawn_items, saved = fields(state, "limiter", kind=str, drawn=int, drawn_items=int, state=dict)
        if saved or self.limiter.state_dict():
            same(kind, type(self.limiter).__name__, "limiter")
        if drawn_items < drawn or (drawn_items and not drawn):
            raise CheckpointCorruptError(
                f"limiter: expected at least one row of each of {drawn} tickets, found {drawn_items} rows"
            )
        self.limiter.load_state_dict(saved)
        self.drawn, self.drawn_items = drawn, drawn_items

    def count_again(self, drawn: int, batch_size: int) -> None:
        """Set the counters of draws by the number of tickets, for a checkpoint that does not have them.

        Args:
            drawn: number of tickets.
            batch_size: rows that each is taken to have had.
        """
        self.drawn, self.drawn_items = drawn, drawn * max(1, batch_size)

    def verify(self, rows: Rows) -> None:
        """Refuse a state of the limiter that does not go with the rows."""
        self.limiter.verify(rows)
