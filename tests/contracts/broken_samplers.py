"""A sampler with everything that a sampler may have, and others that break one rule each."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf import Draw, NotYet, RandomSampler, Rows, Sampler, SamplerWithoutReplacement, WriteEvent

if TYPE_CHECKING:
    from asyncbuf.rows import Answer

CAPACITY = 24


class LeaseSampler(Sampler):
    """Leases rows, oldest item first; rows leave the table when they are handed over, and come back when dropped.

    Weighs new rows by a column, and is told priorities, too: so that there is something of everything.
    """

    columns = ("value",)

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.leased: list[int] = []
        self.weight = torch.zeros(CAPACITY, dtype=torch.float64)
        self.number = torch.zeros(CAPACITY, dtype=torch.int64)  # of the item in each row

    def may_draw(self, rows: Rows, batch_size: int) -> Answer:
        if len(self.waiting) >= batch_size:
            return True
        return NotYet(f"{len(self.waiting)} of {batch_size} rows wait to be drawn")

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        taken, self.waiting = self.waiting[:batch_size], self.waiting[batch_size:]
        self.leased = self.leased + taken
        indices = torch.tensor(taken)
        noise = torch.rand(batch_size, generator=generator, dtype=torch.float64)
        return Draw(indices, {"weight": self.weight[indices] + noise, "number": self.number[indices]})

    def check_write(self, event: WriteEvent) -> None:
        if bool((event.columns["value"] > 1000).any()):
            raise ValueError("expected values up to 1000")

    def wrote(self, event: WriteEvent) -> None:
        self._forget(event.rows)
        self.waiting = self.waiting + event.rows.tolist()
        self.weight[event.rows] = torch.from_numpy(event.columns["value"]).to(torch.float64)
        self.number[event.rows] = event.numbers

    def removed(self, indices: torch.Tensor, rows: Rows) -> None:
        self._forget(indices)

    def _forget(self, indices: torch.Tensor) -> None:
        gone = set(indices.tolist())
        self.waiting = [row for row in self.waiting if row not in gone]
        self.leased = [row for row in self.leased if row not in gone]

    def handed_over(self, draw: Draw) -> torch.Tensor | None:
        return draw.indices

    def dropped(self, draw: Draw) -> None:
        same = draw.info["number"] == self.number[draw.indices]  # a row may hold another item, in another draw
        back = [row for row in draw.indices[same].tolist() if row in self.leased]
        self.leased = [row for row in self.leased if row not in back]
        self.waiting = sorted(back + self.waiting, key=lambda row: int(self.number[row]))

    def update_priority(self, indices: torch.Tensor, priority: torch.Tensor, rows: Rows) -> None:
        self.weight[indices] = priority.to(torch.float64)

    def clear(self) -> None:
        self.waiting, self.leased = [], []

    def state_dict(self) -> dict[str, Any]:
        return {"waiting": list(self.waiting), "leased": list(self.leased), **self._by_row()}

    def _by_row(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight.clone(), "number": self.number.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        waiting, leased, weight = state["waiting"], state["leased"], state["weight"]
        number = state["number"].to(torch.int64)
        if type(waiting) is not list or type(leased) is not list or not weight.shape == number.shape == (CAPACITY,):
            raise ValueError("expected two lists of rows, weights and numbers")
        self.waiting, self.leased, self.weight, self.number = waiting, leased, weight.clone(), number.clone()


class WeightSampler(Sampler):
    """Rows by weight, with a count of draws as further state."""

    def __init__(self) -> None:
        self.weight = torch.zeros(CAPACITY, dtype=torch.float64)
        self.draws = 0

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        self.draws += 1
        valid = rows.at(torch.arange(rows.size))
        chosen = torch.multinomial(self.weight[valid], batch_size, replacement=True, generator=generator)
        return Draw(valid[chosen], {"weight": self.weight[valid[chosen]]})

    def written(self, indices: torch.Tensor, rows: Rows) -> None:
        self.weight[indices] = 1.0 + self.draws

    def update_priority(self, indices: torch.Tensor, priority: torch.Tensor, rows: Rows) -> None:
        self.weight[indices] = priority.to(torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight.clone(), "draws": self.draws}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        weight, draws = state["weight"], state["draws"]
        self.weight.copy_(weight)
        self.draws = draws


# -- draws ------------------------------------------------------------------------------------------------------------


class BlindToRemovals(Sampler):
    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        return Draw(torch.randint(rows.size, (batch_size,), generator=generator))


class BeyondTheEnd(Sampler):
    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        return Draw(torch.randint(rows.size + 1, (batch_size,), generator=generator))


class ForgetsClear(LeaseSampler):
    def clear(self) -> None:
        pass


class ForgetsRemovals(LeaseSampler):
    def removed(self, indices: torch.Tensor, rows: Rows) -> None:
        pass


class ForgetsOverwriting(LeaseSampler):
    def _forget(self, indices: torch.Tensor) -> None:
        pass


class ShortIntegers(RandomSampler):
    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        draw = super().draw(rows, batch_size, generator)
        return draw._replace(indices=draw.indices.to(torch.int32))


class TooMany(RandomSampler):
    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        return super().draw(rows, batch_size + 1, generator)


class WrongShape(RandomSampler):
    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        return super().draw(rows, batch_size, generator)._replace(shape=(batch_size, 2))


class StrayJoin(RandomSampler):
    def combine(self, draw: Draw, data: Any, joined: Any) -> Any:
        return {**data, **joined}

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        draw = super().draw(rows, batch_size, generator)
        return draw._replace(joins={"next": draw.indices + 1})


class JoinsForNobody(RandomSampler):
    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        draw = super().draw(rows, batch_size, generator)
        return draw._replace(joins={"again": draw.indices})


class SameTensorAgain(Sampler):
    def __init__(self) -> None:
        self._out = torch.empty(64, dtype=torch.int64)

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        chosen = torch.randint(rows.size, (batch_size,), generator=generator)
        self._out[:batch_size] = rows.at(chosen)
        return Draw(self._out[:batch_size])

    def state_dict(self) -> dict[str, Any]:
        return {}


class PartOfItsState(WeightSampler):
    """Draws windows into what it goes on to use."""

    def __init__(self) -> None:
        super().__init__()
        self.order = torch.arange(CAPACITY)

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        if rows.valid is not None or rows.size < CAPACITY or batch_size > CAPACITY:
            return super().draw(rows, batch_size, generator)
        return Draw(self.order[:batch_size])


class SaysWhatCannotBeSaved(RandomSampler):
    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        return super().draw(rows, batch_size, generator)._replace(info={"self": self})


# -- randomness -------------------------------------------------------------------------------------------------------


class GlobalTorch(Sampler):
    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        return Draw(rows.at(torch.randint(rows.size, (batch_size,))))


class GlobalNumpy(Sampler):
    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        return Draw(rows.at(torch.from_numpy(np.random.randint(0, rows.size, batch_size))))


class GlobalPython(Sampler):
    def written(self, indices: torch.Tensor, rows: Rows) -> None:
        random.random()

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        return Draw(rows.at(torch.randint(rows.size, (batch_size,), generator=generator)))


class ItsOwnUnseeded(Sampler):
    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        return Draw(rows.at(torch.from_numpy(np.random.default_rng().integers(0, rows.size, batch_size))))


class SharedByAll(RandomSampler):
    draws = 0

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        SharedByAll.draws += 1
        return super().draw(rows, batch_size, generator)._replace(info={"draws": SharedByAll.draws})


# -- questions --------------------------------------------------------------------------------------------------------


class PromisesTooMuch(LeaseSampler):
    def may_draw(self, rows: Rows, batch_size: int) -> Answer:
        return True

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        if len(self.waiting) < batch_size:
            raise ValueError("too few")
        return super().draw(rows, batch_size, generator)


class NoReason(LeaseSampler):
    def may_draw(self, rows: Rows, batch_size: int) -> Answer:
        return super().may_draw(rows, batch_size) or NotYet("")


class SaysFalse(LeaseSampler):
    def may_draw(self, rows: Rows, batch_size: int) -> Answer:
        return bool(super().may_draw(rows, batch_size))  # type: ignore[return-value]


class ChangedByQuestions(WeightSampler):
    def may_draw(self, rows: Rows, batch_size: int) -> Answer:
        self.draws += 1
        return True


class SecretlyChangedByQuestions(WeightSampler):
    """What changes is not in its state, but shows later."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def may_draw(self, rows: Rows, batch_size: int) -> Answer:
        self.asked += 1
        return True

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        return super().draw(rows, batch_size, generator)._replace(info={"asked": self.asked})


class ChangedByCheckWrite(WeightSampler):
    def check_write(self, event: WriteEvent) -> None:
        self.weight[event.rows] = 1.0


class FailsWithoutRows(WeightSampler):
    def may_draw(self, rows: Rows, batch_size: int) -> Answer:
        return True if float(self.weight[: rows.size].max()) >= 0 else NotYet("no weight")


class NeverReady(WeightSampler):
    def may_draw(self, rows: Rows, batch_size: int) -> Answer:
        return NotYet("not today")


class ClosedByDraws(LeaseSampler):
    """Says that draws do not change the answer, and they do."""

    counts_draws: bool = False


# -- hooks ------------------------------------------------------------------------------------------------------------


class KeepsColumns(LeaseSampler):
    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None

    def wrote(self, event: WriteEvent) -> None:
        super().wrote(event)
        self.kept = event.columns["value"]

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        draw = super().draw(rows, batch_size, generator)
        return draw._replace(info={**draw.info, "last": float(self.kept[0])})

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "kept": None if self.kept is None else self.kept.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        kept = state["kept"]
        if kept is not None and not isinstance(kept, np.ndarray):
            raise ValueError("expected an array")
        super().load_state_dict(state)
        self.kept = kept


class FailsWhenRowsLeave(WeightSampler):
    def removed(self, indices: torch.Tensor, rows: Rows) -> None:
        if len(indices) > 2:
            raise IndexError("out of range")


class FailsForUnknownRows(LeaseSampler):
    """Does not expect rows that were replaced since they were drawn."""

    def dropped(self, draw: Draw) -> None:
        for row in draw.indices.tolist():
            self.leased.remove(row)
            self.waiting.append(row)


class GivesBackByRow(LeaseSampler):
    """Gives back the row of a draw that another item has taken, and that is in another draw."""

    def dropped(self, draw: Draw) -> None:
        back = [row for row in draw.indices.tolist() if row in self.leased]
        self.leased = [row for row in self.leased if row not in back]
        self.waiting = sorted(back + self.waiting, key=lambda row: int(self.number[row]))


class PutsBackInFront(LeaseSampler):
    """Leaves the newest of several draws in front, because the oldest is dropped first."""

    def dropped(self, draw: Draw) -> None:
        same = draw.info["number"] == self.number[draw.indices]
        back = [row for row in draw.indices[same].tolist() if row in self.leased]
        self.leased = [row for row in self.leased if row not in back]
        self.waiting = back + self.waiting


class GivesBackNothing(LeaseSampler):
    def dropped(self, draw: Draw) -> None:
        pass


class LosesRows(LeaseSampler):
    """Counts a lease that nobody gives back, once its row has another item."""

    def may_draw(self, rows: Rows, batch_size: int) -> Answer:
        return super().may_draw(rows, batch_size) if len(self.leased) < 9 else NotYet("too many leases")

    def handed_over(self, draw: Draw) -> torch.Tensor | None:
        return None

    def _forget(self, indices: torch.Tensor) -> None:
        gone = set(indices.tolist())
        self.waiting = [row for row in self.waiting if row not in gone]


class LetsOthersLeave(LeaseSampler):
    def handed_over(self, draw: Draw) -> torch.Tensor | None:
        return (draw.indices + 1) % CAPACITY


# -- states -----------------------------------------------------------------------------------------------------------


class NoState(WeightSampler):
    def state_dict(self) -> dict[str, Any]:
        return Sampler.state_dict(self)


class ForgetsAPart(WeightSampler):
    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight.clone(), "draws": 0}


class SharesItsState(WeightSampler):
    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "draws": self.draws}


class SharesAList(LeaseSampler):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "waiting": self.waiting}


class TakesHalf(WeightSampler):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draws = state["draws"]
        self.weight.copy_(state["weight"])


class NotPlain(WeightSampler):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "kind": type(self)}


class RefusesItsOwn(WeightSampler):
    def verify(self, rows: Rows) -> None:
        if rows.size < CAPACITY:
            raise ValueError("expected a full table")


# -- passes -----------------------------------------------------------------------------------------------------------


class SkipsOne(SamplerWithoutReplacement):
    """Leaves out a row of each pass."""

    def _begin(self, rows: Rows, batch_size: int, generator: torch.Generator) -> None:
        super()._begin(rows, batch_size, generator)
        if self._length > 1:
            self._length -= 1


class TwiceInAPass(SamplerWithoutReplacement):
    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        draw = super().draw(rows, batch_size, generator)
        if len(draw.indices) > 1:
            draw.indices[1] = draw.indices[0]
        return draw


class WrongEpoch(SamplerWithoutReplacement):
    @property
    def epoch(self) -> int:
        return super().epoch + (self._position > 0)


class NeverLast(SamplerWithoutReplacement):
    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        return super().draw(rows, batch_size, generator)._replace(last=False)


class AlwaysBetween(SamplerWithoutReplacement):
    @property
    def between_epochs(self) -> bool:
        return True


# Each with words of the rule that it breaks.
BROKEN: list[tuple[type[Sampler], str]] = [
    (BlindToRemovals, "a draw has valid rows"),
    (BeyondTheEnd, "a draw has valid rows"),
    (ForgetsClear, "a draw has valid rows"),
    (ForgetsRemovals, "a draw has valid rows"),
    (ForgetsOverwriting, "may_draw stays|a draw has valid rows|dropped|goes on|drawn again"),
    (ShortIntegers, "a draw has valid rows"),
    (TooMany, "at most batch_size rows"),
    (WrongShape, "a draw has valid rows"),
    (StrayJoin, "a draw has valid rows"),
    (JoinsForNobody, "what it says of them fits.*combine"),
    (SameTensorAgain, "a draw stays as it was"),
    (PartOfItsState, "no business of the sampler|a draw stays as it was"),
    (SaysWhatCannotBeSaved, "what a draw says can be saved"),
    (GlobalTorch, "global generators"),
    (GlobalNumpy, "global generators"),
    (GlobalPython, "global generators"),
    (ItsOwnUnseeded, "equal samplers with equal generators"),
    (SharedByAll, "equal samplers with equal generators"),
    (PromisesTooMuch, "a draw that may_draw allows succeeds"),
    (NoReason, "NotYet with a reason"),
    (SaysFalse, "NotYet with a reason"),
    (ChangedByQuestions, "may_draw changes nothing"),
    (SecretlyChangedByQuestions, "equal samplers|questions change nothing"),
    (ChangedByCheckWrite, "check_write changes nothing"),
    (FailsWithoutRows, "may_draw never fails"),
    (NeverReady, "a batch can be drawn"),
    (ClosedByDraws, "counts_draws=False"),
    (KeepsColumns, "columns is copied"),
    (FailsWhenRowsLeave, "removed never fails"),
    (FailsForUnknownRows, "dropped never fails"),
    (GivesBackByRow, "none that took their rows since"),
    (PutsBackInFront, "come again in their order"),
    (GivesBackNothing, "dropped can be drawn again|a batch can be drawn"),
    (LosesRows, "a batch can be drawn"),
    (LetsOthersLeave, "handed_over returns rows of its draw"),
    (NoState, "state_dict gives plain data"),
    (ForgetsAPart, "goes on as the one"),
    (SharesItsState, "memory of its own"),
    (SharesAList, "memory of its own"),
    (TakesHalf, "all of a state or nothing"),
    (NotPlain, "state_dict gives plain data"),
    (RefusesItsOwn, "verify takes|load_state_dict and verify take"),
    (SkipsOne, "a pass has every row"),
    (TwiceInAPass, "a pass has each row once"),
    (WrongEpoch, "epoch is the number|last says"),
    (NeverLast, "last says"),
    (AlwaysBetween, "between_epochs says|last says"),
]
