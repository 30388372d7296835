"""Prioritized experience replay: rows with a higher priority are drawn more often."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._plain.state import fields, same
from asyncbuf.batch import Draw
from asyncbuf.errors import CheckpointCorruptError, SchemaError
from asyncbuf.sampler._reduction import REDUCTIONS, reduced
from asyncbuf.sampler._sum_tree import MinTree, SumTree
from asyncbuf.sampler.base import Sampler

if TYPE_CHECKING:
    from asyncbuf.rows import Float64Array, Int64Array, Rows, WriteEvent

Schedule = float | Callable[[int], float]
_NO_ITEM = -1.0


class PrioritizedSampler(Sampler):
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
        if priority_key is not None and not isinstance(priority_key, str):
            raise TypeError(f"priority_key: expected the path of a field, found {priority_key!r}")
        self._reduction = reduction
        self._priority_key = priority_key
        self.columns: tuple[str, ...] = () if priority_key is None else (priority_key,)
        self._draws = 0
        self._largest = 1.0
        self._exponent = self._value(self._alpha)
        self._priorities: Float64Array = np.empty(0)
        self._sums, self._least = SumTree(0), MinTree(0)

    # -- settings -----------------------------------------------------------------------------------------------------

    @property
    def alpha(self) -> float:
        """How much priorities count in the next draw. May be set to a number or a function, as in the constructor."""
        return self._value(self._alpha)

    @alpha.setter
    def alpha(self, alpha: Schedule) -> None:
        self._alpha = _checked("alpha", alpha)

    @property
    def beta(self) -> float:
        """How much the weights of the next draw correct. May be set, as ``alpha``."""
        return self._value(self._beta)

    @beta.setter
    def beta(self, beta: Schedule) -> None:
        self._beta = _checked("beta", beta)

    def _value(self, schedule: Schedule) -> float:
        return float(schedule(self._draws)) if callable(schedule) else schedule

    @property
    def largest_priority(self) -> float:
        """The largest priority of any row so far, which new rows get."""
        return self._largest

    def priorities(self, indices: torch.Tensor) -> torch.Tensor:
        """The priorities of rows: float64, in the shape of the indices, without ``eps``; NaN where there is no item."""
        found = torch.from_numpy(self._priorities.take(indices.numpy()))
        return torch.where(found == _NO_ITEM, torch.nan, found)

    # -- what happens to rows -----------------------------------------------------------------------------------------

    def check_write(self, event: WriteEvent) -> None:
        """Refuse priorities that are negative or not finite."""
        self._given(event)

    def _given(self, event: WriteEvent) -> Float64Array | None:
        """The priorities that came with items: float64 ``[items]``; None if none did."""
        if event.priority is not None:
            return _priorities(event.priority, "priority")
        if self._priority_key is None:
            return None
        column = event.columns[self._priority_key]
        if column.size != len(column):
            raise SchemaError(
                f"{self._priority_key}: expected one priority per item, found items of shape {list(column.shape[1:])}"
            )
        return _priorities(column.reshape(-1), self._priority_key)

    def wrote(self, event: WriteEvent) -> None:
        """Give new rows their first priority."""
        self._set(*self._first_priorities(event))

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
        gone = indices.numpy()
        self._priorities[gone] = _NO_ITEM
        self._sums.set(gone, 0.0)
        self._least.set(gone, np.inf)

    def clear(self) -> None:
        """Forget all rows, and go on with the largest priority so far."""
        self._priorities.fill(_NO_ITEM)
        self._sums.clear()
        self._least.clear()

    def update_priority(self, indices: torch.Tensor, priority: torch.Tensor, rows: Rows) -> None:
        """Give rows new priorities, which are not negative.

        Raises:
            ValueError: one is negative.
        """
        named, values = reduced(indices.numpy(), _priorities(priority.numpy(), "priority"), self._reduction)
        self._largest = max(self._largest, float(values.max()))
        self._set(named, values)

    def _set(self, rows: Int64Array, priorities: Float64Array | float) -> None:
        self._priorities[rows] = priorities
        weights = self._weights(priorities)
        self._sums.set(rows, weights)
        self._least.set(rows, weights)

    def _weights(self, priorities: Float64Array | float) -> Any:
        """Chances before they are divided by their sum."""
        return np.power(np.add(priorities, self._eps), self._exponent)

    def _allocate(self, capacity: int) -> None:
        self._priorities = np.full(capacity, _NO_ITEM)
        self._sums, self._least = SumTree(capacity), MinTree(capacity)

    def _weigh(self) -> None:
        """Compute every weight from its priority."""
        rows = np.flatnonzero(self._priorities != _NO_ITEM)
        self._sums.clear()
        self._least.clear()
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
            self._exponent = alpha
            self._weigh()
        beta = self.beta
        self._draws += 1
        places = torch.rand(count, dtype=torch.float64, generator=generator, device=generator.device)
        found = self._sums.find(places.cpu().numpy() * self._sums.total)
        # n and the sum of all weights are the same for the row with the largest correction, and cancel out.
        ratios = self._least.least / self._sums.weights.take(found)
        return found, torch.from_numpy(np.power(ratios, beta).astype(np.float32))

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Priorities, -1 for a row without an item; the largest so far; number of draws; the settings."""
        used = np.flatnonzero(self._priorities != _NO_ITEM)
        return {
            "alpha": None if callable(self._alpha) else self._alpha,
            "beta": None if callable(self._beta) else self._beta,
            "eps": self._eps,
            "draws": self._draws,
            "exponent": self._exponent,
            "largest": self._largest,
            "capacity": len(self._priorities),
            "priorities": torch.from_numpy(self._priorities[: used[-1] + 1 if len(used) else 0].copy()),
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
        priorities = _saved(found["priorities"], found["capacity"], name)
        numbers = [found[key] for key in ("alpha", "beta", "exponent", "largest") if key in found]
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise CheckpointCorruptError(f"{name}: expected finite settings that are not negative, found {numbers}")
        self._alpha, self._beta = found.get("alpha", self._alpha), found.get("beta", self._beta)
        self._draws, self._largest, self._exponent = found["draws"], found["largest"], found["exponent"]
        self._allocate(found["capacity"])
        rows = np.flatnonzero(priorities != _NO_ITEM)
        if len(rows):
            self._set(rows, priorities[rows])

    def verify(self, rows: Rows) -> None:
        """Refuse priorities of other rows than the valid ones."""
        name = type(self).__name__
        known = np.flatnonzero(self._priorities != _NO_ITEM)
        if len(self._priorities) not in (0, rows.capacity):
            raise CheckpointCorruptError(
                f"{name}: expected priorities for {rows.capacity} rows, found them for {len(self._priorities)}"
            )
        if len(known) != rows.size or not bool(rows.contains(torch.from_numpy(known)).all()):
            raise CheckpointCorruptError(
                f"{name}: expected priorities of the {rows.size} valid rows, found them of {len(known)} rows"
            )


def _saved(priorities: torch.Tensor, capacity: int, name: str) -> Float64Array:
    """Priorities out of a checkpoint, if they are some."""
    is_column = priorities.dtype is torch.float64 and priorities.ndim == 1 and priorities.layout is torch.strided
    if not is_column or priorities.device.type != "cpu" or len(priorities) > capacity or capacity >= 2**48:
        raise CheckpointCorruptError(
            f"{name}: expected float64 priorities of at most {capacity} rows, found {priorities.dtype} "
            f"{list(priorities.shape)}"
        )
    values: Float64Array = priorities.numpy()
    if not bool(((values >= 0) & (values < np.inf) | (values == _NO_ITEM)).all()):
        raise CheckpointCorruptError(f"{name}: expected priorities that are finite and not negative, found others")
    return values


def _priorities(values: np.ndarray[Any, Any], what: str) -> Float64Array:
    """Priorities of a caller as float64.

    Raises:
        ValueError: one is negative or not finite.
    """
    found = values.astype(np.float64)
    if len(found) and not (found.min() >= 0 and found.max() < np.inf):
        wrong = found[~((found >= 0) & (found < np.inf))]
        raise ValueError(f"{what}: expected finite numbers of at least 0, found {wrong[:4].tolist()}")
    return found


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number, found {value!r}")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}: expected a finite number of at least 0, found {value!r}")
    return float(value)


def _checked(name: str, schedule: Schedule) -> Schedule:
    return schedule if callable(schedule) else _number(name, schedule)
