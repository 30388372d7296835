"""A limiter of the ratio of draws to writes, and others that break one rule each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from asyncbuf import Counters, Limiter, NotYet

if TYPE_CHECKING:
    from asyncbuf.rows import Answer


class RatioLimiter(Limiter):
    """Each item is drawn about so many times: neither side gets further ahead than a margin.

    Args:
        ratio: rows that are drawn for each item that is written.
        margin: by how many rows either side may be ahead.
        least: number of items before the first draw.
    """

    def __init__(self, ratio: float = 2.0, margin: float = 20.0, least: int = 4) -> None:
        self.ratio = ratio
        self.margin = margin
        self.least = least

    def may_write(self, counters: Counters, items: int) -> Answer:
        if self.ratio * items > 2 * self.margin:
            raise ValueError(f"expected writes of at most {2 * self.margin / self.ratio} items, found {items}")
        ahead = self.ratio * (counters.write_count + counters.admitted + items - self.least) - counters.drawn_items
        return True if ahead <= self.margin else NotYet(f"writers would be {ahead} rows ahead of {self.margin}")

    def may_draw(self, counters: Counters, items: int) -> Answer:
        if counters.size < self.least:
            return NotYet(f"{counters.size} of {self.least} items are stored")
        ahead = counters.drawn_items + items - self.ratio * (counters.write_count - self.least)
        return True if ahead <= self.margin else NotYet(f"draws would be {ahead} rows ahead of {self.margin}")


class Room(Limiter):
    """Sound where rows leave: writers wait until there are rows for their items."""

    def may_write(self, counters: Counters, items: int) -> Answer:
        room = counters.capacity - counters.size - counters.admitted
        return True if items <= room else NotYet(f"there is room for {room} of {items} items")


class SaysFalse(RatioLimiter):
    def may_draw(self, counters: Counters, items: int) -> Answer:
        return bool(super().may_draw(counters, items))  # type: ignore[return-value]


class NoReason(RatioLimiter):
    def may_write(self, counters: Counters, items: int) -> Answer:
        return super().may_write(counters, items) or NotYet(" ")


class CountsQuestions(RatioLimiter):
    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def may_write(self, counters: Counters, items: int) -> Answer:
        self.asked += 1
        return super().may_write(counters, items) if self.asked % 5 else NotYet("tired")


class SavesQuestions(CountsQuestions):
    def may_write(self, counters: Counters, items: int) -> Answer:
        self.asked += 1
        return RatioLimiter.may_write(self, counters, items)

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.asked = state["asked"]


class HoldsNobody(RatioLimiter):
    holds_writers: ClassVar[bool] = False


class ClosedByDraws(RatioLimiter):
    counts_draws: ClassVar[bool] = False


class StandsStill(RatioLimiter):
    """Writers wait for draws, and draws for writers."""

    def __init__(self) -> None:
        super().__init__(margin=1.0)


class FailsWithoutItems(RatioLimiter):
    def may_draw(self, counters: Counters, items: int) -> Answer:
        return True if counters.drawn_items / counters.write_count < 5 else NotYet("too many draws")

    def may_write(self, counters: Counters, items: int) -> Answer:
        return True


class PrefersLarge(RatioLimiter):
    def may_write(self, counters: Counters, items: int) -> Answer:
        return True if items > 1 or counters.write_count < 9 else NotYet("write more at once")


class ClosedByItems(Limiter):
    def may_draw(self, counters: Counters, items: int) -> Answer:
        return True if counters.write_count < 30 else NotYet("too late")


class ForgetsAdmitted(RatioLimiter):
    def may_write(self, counters: Counters, items: int) -> Answer:
        return super().may_write(counters._replace(admitted=-counters.admitted), items)


class WantsUnread(Limiter):
    def may_write(self, counters: Counters, items: int) -> Answer:
        return True if counters.unread or not counters.write_count else NotYet("everything was drawn")


class PrefersHeavy(Limiter):
    counts_bytes: ClassVar[bool] = True

    def may_write(self, counters: Counters, items: int) -> Answer:
        light = 0 < counters.offered_nbytes < 32 and counters.nbytes > 64
        return NotYet("write more bytes at once") if light else True


class OverwritesAdmitted(Limiter):
    """Looks at what is overwritten, and takes what was admitted for free rows."""

    counts_overwrites: ClassVar[bool] = True

    def may_write(self, counters: Counters, items: int) -> Answer:
        return True if counters.overwrites <= 2 * counters.admitted else NotYet("items would be lost")


class TakesAnyState(SavesQuestions):
    def may_write(self, counters: Counters, items: int) -> Answer:
        return RatioLimiter.may_write(self, counters, items)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.asked = 5
        self.asked = state["asked"]


# Each with words of the rule that it breaks.
BROKEN: list[tuple[type[Limiter], str]] = [
    (SaysFalse, "NotYet with a reason"),
    (NoReason, "NotYet with a reason"),
    (CountsQuestions, "from the counters and the state alone"),
    (SavesQuestions, "questions change nothing"),
    (HoldsNobody, "holds_writers=False"),
    (ClosedByDraws, "counts_draws=False"),
    (StandsStill, "somebody can always go on"),
    (FailsWithoutItems, "may_draw never fails"),
    (PrefersLarge, "fewer items are no harder"),
    (ClosedByItems, "an item more hinders no draw"),
    (ForgetsAdmitted, "items that were admitted help no write"),
    (WantsUnread, "a draw more hinders no write"),
    (PrefersHeavy, "fewer items are no harder"),
    (OverwritesAdmitted, "items that were admitted help no write"),
    (TakesAnyState, "all of a state or nothing"),
]
