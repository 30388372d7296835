"""What the buffer asks of a limiter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from asyncbuf._plain.state import fields

if TYPE_CHECKING:
    from asyncbuf.rows import Answer, Counters


class Limiter:
    """Says whether items may be written and batches be drawn, from counters of the table.

    Methods are called on the event loop and should be quick. A writer that is held back waits before the history, first
    come, first served, and holds up no draw; a consumer that is held back waits for its draw. Both are asked for again
    after each write, draw, removal and priority update.

    Attributes:
        counts_draws: whether an answer may change with the counters of draws. If not, it is asked for after writes and
            removals only.
    """

    counts_draws: ClassVar[bool] = True

    def may_write(self, counters: Counters, items: int) -> Answer:
        """Whether so many more items may be written now.

        Returns:
            True, or ``NotYet`` with the reason in words and numbers.
        """
        return True

    def may_draw(self, counters: Counters, items: int) -> Answer:
        """Whether a batch of so many items may be drawn now.

        Returns:
            True, or ``NotYet`` with the reason in words and numbers.
        """
        return True

    def check(self, capacity: int) -> None:
        """Refuse at construction what can never be met.

        Raises:
            ValueError: no buffer of this capacity ever lets a batch through.
        """

    def state_dict(self) -> dict[str, Any]:
        """What answers depend on beside the counters, as plain data in memory of its own. Settings are no state.

        Raises:
            TypeError: never in a limiter without state of its own.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave out.

        Raises:
            CheckpointError: it does not fit; nothing has changed.
        """
        fields(state, type(self).__name__)
