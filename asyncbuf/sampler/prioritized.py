"""Prioritized experience replay: rows with a higher priority are drawn more often."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._plain.state import fields, same
from asyncbuf.batch import Draw
from asyncbuf.errors import CheckpointCorruptError
from asyncbuf.sampler._proportional import NO_ITEM, ProportionalSampler
from asyncbuf.sampler._reduction import REDUCTIONS, reduced
from asyncbuf.sampler._sum_tree import SumTree

if TYPE_CHECKING:
    from asyncbuf.rows import Float64Array, Int64Array, Rows, WriteEvent

Schedule = float | Callable[[int], float]

# Weights have fewer digits than that before or behind the point, so that sums of many are finite.
_MOST_DIGITS = 280
_MOST_ALPHA = 1000


class PrioritizedSampler(ProportionalSampler):
    """Draws each row with a chance in proportion to ``(priority + eps) ** alpha``, with replacement.

    Proportional prioritization of Schaul et al., Prioritized Experience Replay (2016), on a sum tree: a draw and an
    update take the same time whatever the capacity is. ``batch.info["weights"]`` corrects for the uneven chances:
    ``(1 / (n * chance)) ** beta`` of each row, divided by the largest that any stored row could get; float32
    ``[batch]``.

    A new row gets the largest priority of any row so far (1 at first), so that it is soon drawn; or what
    ``extend(items, priority=...)`` says, or the value of the field ``priority_key`` of its item. After a step, tell the
    new priorities::

        batch = await buffer.sample()
        loss, td_error = learn(batch, batch.info["weights"])
        await buffer.update_priority(batch, td_error.abs())

    Args:
        alpha: how much priorities count: 0 for not at all, 1 for in full. Or a function of the number of draws so far;
            whenever its value changes, all weights are computed anew.
        beta: how much weights correct, from 0 for not at all to 1 for in full. Or a function of the number of draws so
            far, such as ``lambda draws: min(1.0, 0.4 + draws * 6e-7)``.
        eps: added to every priority, so that none is 0.
        reduction: which priority a row gets that is named several times in one update: ``"max"``, ``"min"``,
            ``"mean"``, ``"sum"`` or ``"last"``.
        priority_key: path of the field of an item that is its priority, such as ``"td_error"`` or ``"meta/priority"``;
            None for none.

    Raises:
        TypeError, ValueError: an argument is not of the kind or in the range that is expected.
    """

    trusted: bool = True

    def __init__(
        self,
        alpha: Schedule = 0.6,
        beta: Schedule = 0.4,
        *,
        eps: float = 1e-8,
        reduction: str = "max",
        priority_key: str | None = None,
    ) -> None:
        self._alpha = _checked("alpha", alpha)
        self._beta = _checked("beta", beta)
        self._eps = _number("eps", eps)
        if self._eps <= 0:
            raise ValueError(f"eps: expected a positive number, found {eps}")
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction: expected one of {sorted(REDUCTIONS)}, found {reduction!r}")
        super().__init__(priority_key, "priority_key", reduction)
        self._draws = 0
        self._largest = 1.0
        self._exponent = self._fitting(self.alpha, self._largest)
        _ = self.beta  # a function may be a wrong one

    # -- settings -----------------------------------------------------------------------------------------------------

    @property
    def alpha(self) -> float:
        """How much priorities count in the next draw. May be set to a number or a function, as in the constructor."""
        return self._value("alpha", self._alpha)

    @alpha.setter
    def alpha(self, alpha: Schedule) -> None:
        self._alpha = _checked("alpha", alpha)

    @property
    def beta(self) -> float:
        """How much the weights of the next draw correct. May be set, as ``alpha``."""
        return self._value("beta", self._beta)

    @beta.setter
    def beta(self, beta: Schedule) -> None:
        self._beta = _checked("beta", beta)

    def _value(self, name: str, schedule: Schedule) -> float:
        return _number(name, schedule(self._draws)) if callable(schedule) else schedule

    def _fitting(self, alpha: float, largest: float) -> float:
        """An exponent with which no weight is so large or small that their sums mean nothing.

        Raises:
            ValueError: it is another one.
        """
        if alpha >= _MOST_ALPHA:
            raise ValueError(
                f"alpha: expected an exponent below {_MOST_ALPHA}, such as 0.6, found {alpha:.6g} (the storage has the "
                "capacity)"
            )
        logs = alpha * math.log10(self._eps), alpha * math.log10(largest + self._eps)
        if not -_MOST_DIGITS < min(logs) <= max(logs) < _MOST_DIGITS:
            raise ValueError(
                f"alpha: expected {largest:.3g}, the largest priority, and eps {self._eps:.3g} to be below "
                f"1e{_MOST_DIGITS} and above 1e-{_MOST_DIGITS} to its power, found {alpha:.3g}"
            )
        return alpha

    @property
    def _limit(self) -> float:
        """A larger priority would be no number to the power of ``alpha``."""
        digits = _MOST_DIGITS / self._exponent if self._exponent else math.inf
        return 10.0**digits if digits < sys.float_info.max_10_exp else math.inf

    @property
    def largest_priority(self) -> float:
        """The largest priority of any row so far, which new rows get."""
        return self._largest

    def priorities(self, indices: torch.Tensor) -> torch.Tensor:
        """The priorities of rows: float64, in the shape of the indices, without ``eps``; NaN where there is no item."""
        return self._told(indices)

    # -- what happens to rows -----------------------------------------------------------------------------------------

    def _first_priorities(self, event: WriteEvent) -> tuple[Int64Array, Float64Array | float]:
        """The rows that were written, and their priorities."""
        if not len(self._priorities):
            self._allocate(event.table.capacity)
        given = self._given(event)
        rows = event.rows.numpy()
        if given is None:
            return rows, self._largest
        self._largest = max(self._largest, float(given.max(initial=0.0)))
        return rows, given

    def removed(self, indices: torch.Tensor, rows: Rows) -> None:
        """Rows without an item are not drawn."""
        super().removed(indices, rows)

    def clear(self) -> None:
        """Forget all rows, and go on with the largest priority so far."""
        super().clear()

    def update_priority(self, indices: torch.Tensor, priority: torch.Tensor, rows: Rows) -> None:
        """Give rows new priorities, which are not negative.

        Raises:
            ValueError: one is negative.
        """
        named, values = indices.numpy(), self.checked(priority.numpy(), "priority")
        self._priorities[named] = values
        if self._reduction == "sum" or (self._priorities.take(named) != values).any():  # a row is named twice
            named, values = reduced(named, values, self._reduction)
        self._largest = max(self._largest, float(values.max()))
        self._set(named, values)

    def _set(self, rows: Int64Array, priorities: Float64Array | float) -> None:
        self._priorities[rows] = priorities
        self._sums.set(rows, self._weights(priorities))

    def _weights(self, priorities: Float64Array | float) -> Any:
        """Chances before they are divided by their sum."""
        return np.power(np.add(priorities, self._eps), self._exponent)

    def _allocate(self, capacity: int) -> None:
        super()._allocate(capacity)
        self._sums = SumTree(capacity, knows_least=True)

    def _weigh(self) -> None:
        """Compute every weight from its priority."""
        rows = np.flatnonzero(self._priorities != NO_ITEM)
        self._sums.clear()
        if len(rows):
            self._set(rows, self._priorities[rows])

    # -- drawing ------------------------------------------------------------------------------------------------------

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        """``batch_size`` rows, each with its chance, and their weights."""
        found, corrections = self._drawn(batch_size, generator)
        return Draw(torch.from_numpy(found), {"weights": corrections})

    def _drawn(self, count: int, generator: torch.Generator) -> tuple[Int64Array, torch.Tensor]:
        """So many rows, and their weights: int64 and float32 ``[count]``."""
        if (alpha := self.alpha) != self._exponent:
            self._exponent = self._fitting(alpha, self._largest)
            self._weigh()
        beta = self.beta
        self._draws += 1
        places = torch.rand(count, dtype=torch.float64, generator=generator, device=generator.device)
        found = self._sums.find(places.cpu().numpy() * self._sums.total)
        # n and the sum of all weights are the same for the row with the largest correction, and cancel out.
        ratios = self._sums.least / self._sums.weights.take(found)
        return found, torch.from_numpy(np.power(ratios, beta).astype(np.float32))

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Priorities, -1 for a row without an item; the largest so far; number of draws; the settings."""
        return {
            "alpha": None if callable(self._alpha) else self._alpha,
            "beta": None if callable(self._beta) else self._beta,
            "eps": self._eps,
            "draws": self._draws,
            "exponent": self._exponent,
            "largest": self._largest,
            "capacity": len(self._priorities),
            "priorities": self._saved(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the priorities that were saved; with the saved alpha and beta, too, unless they are functions."""
        name = type(self).__name__
        if isinstance(state, dict):
            for key, schedule in (("alpha", self._alpha), ("beta", self._beta)):
                same(state.get(key, 0.0) is None, callable(schedule), f"{name}: whether {key} is a function")
        kinds: dict[str, type] = dict(
            eps=float, draws=int, exponent=float, largest=float, capacity=int, priorities=torch.Tensor
        )
        kinds |= {key: float for key in ("alpha", "beta") if isinstance(state, dict) and state.get(key) is not None}
        given = {key: value for key, value in state.items() if value is not None} if isinstance(state, dict) else state
        found = dict(zip(kinds, fields(given, name, **kinds), strict=True))
        same(found["eps"], self._eps, f"{name}: eps")
        priorities = self._parsed(found["priorities"], found["capacity"])
        numbers = [found[key] for key in ("alpha", "beta", "exponent", "largest") if key in found]
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise CheckpointCorruptError(f"{name}: expected finite settings that are not negative, found {numbers}")
        try:
            self._fitting(found["exponent"], max(1.0, found["largest"]))
        except ValueError as error:
            raise CheckpointCorruptError(f"{name}: {error}") from error
        self._alpha, self._beta = found.get("alpha", self._alpha), found.get("beta", self._beta)
        self._draws, self._largest, self._exponent = found["draws"], found["largest"], found["exponent"]
        self._take_over(priorities, found["capacity"])


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number, found {value!r}")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}: expected a finite number of at least 0, found {value!r}")
    return float(value)


def _checked(name: str, schedule: Schedule) -> Schedule:
    return schedule if callable(schedule) else _number(name, schedule)
