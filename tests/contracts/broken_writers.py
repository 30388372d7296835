"""Writers that break one rule each."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from asyncbuf import Placement, RoundRobinWriter, RowRange, Writer

if TYPE_CHECKING:
    from asyncbuf.rows import Int64Array


class StopsWhenFull(Writer):
    """Sound: keeps the first items, and no others once every row is taken."""

    def __init__(self) -> None:
        self.used = 0
        self.offered = 0

    @property
    def size(self) -> int:
        return self.used

    @property
    def write_count(self) -> int:
        return self.offered

    def place(self, count: int, capacity: int) -> Placement:
        kept = min(count, capacity - self.used)
        return Placement(count, (RowRange(self.used, 0, kept),) if kept else ())

    def commit(self, placement: Placement, capacity: int) -> None:
        self.used += sum(run.count for run in placement.runs)
        self.offered += placement.offered

    def clear(self) -> None:
        self.used = 0

    def state_dict(self) -> dict[str, Any]:
        return {"used": self.used, "offered": self.offered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        used, offered = state["used"], state["offered"]
        if type(used) is not int or type(offered) is not int:
            raise ValueError("expected two numbers")
        self.used, self.offered = used, offered


class RowTwice(StopsWhenFull):
    def place(self, count: int, capacity: int) -> Placement:
        return Placement(count, (RowRange(0, 0, 1), RowRange(0, 1, 1)) if count > 1 else (RowRange(0, 0, 1),))


class BeyondTheEnd(StopsWhenFull):
    def place(self, count: int, capacity: int) -> Placement:
        return Placement(count, (RowRange(self.used, 0, count),))


class MovesInPlace(RoundRobinWriter):
    def place(self, count: int, capacity: int) -> Placement:
        placement = super().place(count, capacity)
        self._cursor = (self._cursor + count) % capacity
        return placement


class ItemsInAnyOrder(StopsWhenFull):
    def place(self, count: int, capacity: int) -> Placement:
        kept = min(count, capacity - self.used)
        runs = [RowRange(self.used + i, kept - 1 - i, 1) for i in range(kept)]
        return Placement(count, tuple(runs))


class MiscountsOffered(StopsWhenFull):
    def place(self, count: int, capacity: int) -> Placement:
        placement = super().place(count, capacity)
        return placement._replace(offered=sum(run.count for run in placement.runs))


class CountsKeptOnly(StopsWhenFull):
    def commit(self, placement: Placement, capacity: int) -> None:
        super().commit(placement._replace(offered=len(placement.rows)), capacity)


class WrongSize(StopsWhenFull):
    @property
    def size(self) -> int:
        return max(0, self.used - 1)


class WrongNumbers(RoundRobinWriter):
    computes_numbers: ClassVar[bool] = True

    def numbers(self, rows: Int64Array, capacity: int) -> Int64Array:
        return rows


class ByChance(StopsWhenFull):
    def place(self, count: int, capacity: int) -> Placement:
        return Placement(count, (RowRange(random.randrange(capacity), 0, 1),))


class StartsCountingAgain(StopsWhenFull):
    def clear(self) -> None:
        super().clear()
        self.offered = 0


class ForgetsClear(StopsWhenFull):
    def clear(self) -> None:
        pass


class FailsWhenRowsLeave(RoundRobinWriter):
    def removed(self, rows: torch.Tensor, capacity: int) -> None:
        raise NotImplementedError


class ForgetsItsCursor(RoundRobinWriter):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "cursor": 0}


class SharesItsState(StopsWhenFull):
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(1, dtype=torch.int64)

    def commit(self, placement: Placement, capacity: int) -> None:
        super().commit(placement, capacity)
        self.total += placement.offered

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        total = state["total"].clone()
        super().load_state_dict(state)
        self.total = total


class TakesHalf(StopsWhenFull):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.used = state["used"]
        self.offered = state["offered"]


# Each with words of the rule that it breaks.
BROKEN: list[tuple[type[Writer], str]] = [
    (RowTwice, "a placement has rows of the storage, each once"),
    (BeyondTheEnd, "a placement has rows of the storage, each once"),
    (MovesInPlace, "place changes nothing|gives the same"),
    (ItemsInAnyOrder, "items in order"),
    (MiscountsOffered, "offered is the number"),
    (CountsKeptOnly, "commit never fails, and counts|write_count is"),
    (WrongSize, "size is"),
    (WrongNumbers, "numbers are"),
    (ByChance, "gives the same|global generators"),
    (StartsCountingAgain, "write_count is"),
    (ForgetsClear, "size is"),
    (FailsWhenRowsLeave, "removed never fails"),
    (ForgetsItsCursor, "take what state_dict gave out|goes on as"),
    (SharesItsState, "memory of its own"),
    (TakesHalf, "all of a state or nothing"),
]
