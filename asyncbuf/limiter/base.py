"""What the buffer asks of a limiter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from asyncbuf._plain.state import fields, same

if TYPE_CHECKING:
    from asyncbuf.rows import Answer, Counters, Rows

_ANY = (
    "counts_draws",
    "holds_writers",
    "needs_rows_to_leave",
    "needs_batch_size",
    "needs_versions",
    "counts_bytes",
    "counts_unread",
    "counts_overwrites",
)


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
        needs_versions: whether it looks at ``counters.version`` and ``counters.given_up``, which are 0 otherwise. A
            buffer without ``staleness`` refuses it.
        counts_bytes: whether it looks at the bytes of items, which are not counted otherwise.
        counts_unread: whether it looks at ``counters.unread``, which is 0 otherwise.
        counts_overwrites: whether it looks at ``counters.overwrites``, which is 0 otherwise.
    """

    counts_draws: ClassVar[bool] = False
    holds_writers: ClassVar[bool] = False
    trusted: ClassVar[bool] = False
    needs_rows_to_leave: ClassVar[bool] = False
    needs_batch_size: ClassVar[bool] = False
    needs_versions: ClassVar[bool] = False
    counts_bytes: ClassVar[bool] = False
    counts_unread: ClassVar[bool] = False
    counts_overwrites: ClassVar[bool] = False

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


class AllOf(Limiter):
    """Lets through what each of several limiters lets through. Made by ``limiter & limiter``.

    Args:
        limiters: at least two.

    Attributes:
        limiters: the limiters, none of which is one of these.
    """

    def __init__(self, *limiters: Limiter) -> None:
        parts = [limiter.limiters if isinstance(limiter, AllOf) else (limiter,) for limiter in limiters]
        self.limiters: tuple[Limiter, ...] = sum(parts, ())
        # Of the object, and not of the class: they are as those of its parts.
        vars(self)["trusted"] = all(limiter.trusted for limiter in self.limiters)
        for name in _ANY:
            vars(self)[name] = any(getattr(limiter, name) for limiter in self.limiters)

    def may_write(self, counters: Counters, items: int) -> Answer:
        """What the first of them answers that does not answer with True."""
        for limiter in self.limiters:
            if limiter.holds_writers and not (answer := limiter.may_write(counters, items)):
                return answer
        return True

    def may_draw(self, counters: Counters, items: int) -> Answer:
        """What the first of them answers that does not answer with True."""
        for limiter in self.limiters:
            if not (answer := limiter.may_draw(counters, items)):
                return answer
        return True

    def check(self, capacity: int) -> None:
        """Ask each of them."""
        for limiter in self.limiters:
            limiter.check(capacity)

    def check_batch(self, batch_size: int) -> None:
        """Ask each of them."""
        for limiter in self.limiters:
            limiter.check_batch(batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Kinds and states of those that have a state; nothing if none has."""
        states = {str(i): limiter.state_dict() for i, limiter in enumerate(self.limiters)}
        kinds = {str(i): type(limiter).__name__ for i, limiter in enumerate(self.limiters)}
        return {"kinds": kinds, "states": states} if any(states.values()) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the states, if they are those of the same limiters."""
        name = type(self).__name__
        if not self.state_dict() and not state:
            return
        kinds, states = fields(state, name, kinds=dict, states=dict)
        same(kinds, {str(i): type(limiter).__name__ for i, limiter in enumerate(self.limiters)}, f"{name}: limiters")
        found = fields(states, name, **dict.fromkeys(kinds, dict))
        before = [limiter.state_dict() for limiter in self.limiters]
        try:
            for limiter, saved in zip(self.limiters, found, strict=True):
                limiter.load_state_dict(saved)
        except BaseException:
            for limiter, saved in zip(self.limiters, before, strict=True):
                limiter.load_state_dict(saved)
            raise

    def verify(self, rows: Rows) -> None:
        """Ask each of them."""
        for limiter in self.limiters:
            limiter.verify(rows)

    def __repr__(self) -> str:
        """As it was made."""
        return " & ".join(map(repr, self.limiters))
