"""Several limiters as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncbuf._plain.state import fields, same
from asyncbuf.limiter.base import Limiter

if TYPE_CHECKING:
    from asyncbuf.rows import Answer, Counters, Rows

_ANY = (
    "counts_draws",
    "holds_writers",
    "needs_rows_to_leave",
    "needs_batch_size",
    "counts_bytes",
    "counts_unread",
)


class AllOf(Limiter):
    """Lets through what each of several limiters lets through. Made by ``limiter & limiter``.

    Args:
        limiters: at least two.

    Attributes:
        limiters: the limiters, none of which is one of these.
    """

    trusted: bool = False  # type: ignore[misc]  # as its parts are, and so are those that follow
    counts_draws: bool = False  # type: ignore[misc]
    holds_writers: bool = False  # type: ignore[misc]
    needs_rows_to_leave: bool = False  # type: ignore[misc]
    needs_batch_size: bool = False  # type: ignore[misc]
    counts_bytes: bool = False  # type: ignore[misc]
    counts_unread: bool = False  # type: ignore[misc]

    def __init__(self, *limiters: Limiter) -> None:
        parts = [limiter.limiters if isinstance(limiter, AllOf) else (limiter,) for limiter in limiters]
        self.limiters: tuple[Limiter, ...] = sum(parts, ())
        self.trusted = all(limiter.trusted for limiter in self.limiters)
        for name in _ANY:
            setattr(self, name, any(getattr(limiter, name) for limiter in self.limiters))

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
