"""What the buffer asks of a limiter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from asyncbuf._plain.state import fields

if TYPE_CHECKING:
    from asyncbuf.rows import Answer, Counters, Rows


class Limiter:
    """Says whether items may be written and batches be drawn, from counters of the table.

    Methods are called on the event loop and should be quick. A writer that is held back waits before the history, first
    come, first served, and holds up no draw; a consumer that is held back waits for its draw. Both are asked for again
    after each write, draw, removal and priority update.

    Attributes:
        counts_draws: whether the answer of ``may_draw`` may change by draws alone. If not, it is asked for after writes
            and removals only. A class that defines ``may_draw`` is taken for one, unless it says otherwise.
        trusted: whether its methods may be called in the context and the torch modes of whoever happens to call. Not
            inherited: a subclass says so itself.
        holds_writers: whether ``may_write`` is asked. So it is in a class that defines it, unless it says otherwise.
        needs_rows_to_leave: whether writers wait for rows to leave. A buffer refuses it with a sampler that lets none
            leave, where they would wait for ever.
        needs_batch_size: whether it looks at ``counters.batch_size``. A buffer without one refuses it.
        counts_bytes: whether it looks at the bytes of items, which are not counted otherwise.
        counts_unread: whether it looks at ``counters.overwrites``, which is not found out otherwise.
    """

    counts_draws: ClassVar[bool] = False
    holds_writers: ClassVar[bool] = False
    trusted: ClassVar[bool] = False
    needs_rows_to_leave: ClassVar[bool] = False
    needs_batch_size: ClassVar[bool] = False
    counts_bytes: ClassVar[bool] = False
    counts_unread: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Note which questions the class answers itself."""
        super().__init_subclass__(**kwargs)
        if "trusted" not in vars(cls):
            cls.trusted = False
        for method, declared in (("may_draw", "counts_draws"), ("may_write", "holds_writers")):
            if method in vars(cls) and declared not in vars(cls):
                setattr(cls, declared, True)

    def may_write(self, counters: Counters, items: int) -> Answer:
        """Whether so many more items may be written now, beside those that were admitted and are not written yet.

        Returns:
            True, or ``NotYet`` with the reason in words and numbers.

        Raises:
            ValueError: so many items can never be written by one call; the call raises it instead of waiting for ever.
        """
        return True

    def may_draw(self, counters: Counters, items: int) -> Answer:
        """Whether a batch of so many items may be drawn now.

        Returns:
            True, or ``NotYet`` with the reason in words and numbers.

        Raises:
            ValueError: so many can never be drawn at once; the call raises it instead of waiting for ever.
        """
        return True

    def check(self, capacity: int) -> None:
        """Refuse at construction what can never be met.

        Raises:
            ValueError: no buffer of this capacity ever lets a batch through.
        """

    def check_batch(self, batch_size: int) -> None:
        """Refuse at construction a batch size of the buffer with which nobody could go on one day.

        Raises:
            ValueError: it is one.
        """

    def __and__(self, other: Limiter) -> Limiter:
        """A limiter that lets through what both do."""
        return AllOf(self, other) if isinstance(other, Limiter) else NotImplemented

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

    def verify(self, rows: Rows) -> None:
        """Refuse a state that was just loaded and does not go with the rows of the table.

        Raises:
            CheckpointCorruptError: it does not.
        """


from asyncbuf.limiter._all_of import AllOf  # noqa: E402 (it is a limiter, and limiters are joined by it)
