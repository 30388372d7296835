"""Rows drawn by weights of the caller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from asyncbuf._plain.integers import first_of_each
from asyncbuf._plain.state import fields, same
from asyncbuf._runtime.arguments import flag
from asyncbuf.batch import Draw
from asyncbuf.rows import NotYet
from asyncbuf.sampler._proportional import ProportionalSampler

if TYPE_CHECKING:
    from asyncbuf.rows import Answer, Float64Array, Int64Array, Rows


class WeightedSampler(ProportionalSampler):
    """Draws each row with a chance in proportion to its weight.

    The weight of an item is the field ``weight_key`` of it, or what ``extend(items, priority=...)`` says, or else 1.
    ``update_priority`` changes it. An item of weight 0 is never drawn; while all weights are 0, consumers wait. A draw
    and an update take the same time whatever the capacity is (a sum tree). If a row is named twice in one update, its
    last weight counts.

    For prioritized experience replay, with exponents and importance weights, see ``PrioritizedSampler``.

    Args:
        weight_key: path of the field of an item that is its weight, such as ``"quality"`` or ``"meta/weight"``; None
            for none.
        replacement: whether a row may be in a batch several times. If not, rows are drawn one after the other, each in
            proportion to its weight among those that the batch does not have yet; a batch waits for as many items with
            a weight above 0.

    Raises:
        TypeError: an argument is of another kind than expected.
    """

    trusted: bool = True
    counts_draws: bool = False
    what: ClassVar[str] = "weight"
    plural: ClassVar[str] = "weights"
    limit: ClassVar[float] = 1e290  # so that no sum of weights is infinite

    def __init__(self, weight_key: str | None = None, replacement: bool = True) -> None:
        super().__init__(weight_key, "weight_key")
        self._replacement = flag(replacement, "replacement")
        self._positive = 0  # number of weights above 0; not kept with replacement

    def weights(self, indices: torch.Tensor) -> torch.Tensor:
        """The weights of rows: float64, in the shape of the indices; NaN where there is no item."""
        return self._told(indices)

    # -- what happens to rows -----------------------------------------------------------------------------------------

    def _set(self, rows: Int64Array, priorities: Float64Array | float) -> None:
        """Rows have these weights now; one that is named twice, the last."""
        if self._replacement:
            super()._set(rows, priorities)
            return
        named = np.unique(rows)
        before = np.count_nonzero(self._priorities.take(named) > 0)
        super()._set(rows, priorities)
        self._positive += int(np.count_nonzero(self._priorities.take(named) > 0) - before)

    def removed(self, indices: torch.Tensor, rows: Rows) -> None:
        """Rows without an item are not drawn."""
        if not self._replacement:
            self._positive -= int(np.count_nonzero(self._priorities.take(indices.numpy()) > 0))
        super().removed(indices, rows)

    def clear(self) -> None:
        """Forget all rows."""
        super().clear()
        self._positive = 0

    def _allocate(self, capacity: int) -> None:
        super()._allocate(capacity)
        self._positive = 0

    # -- drawing ------------------------------------------------------------------------------------------------------

    def check(self, capacity: int, batch_size: int) -> None:
        """Without replacement, refuse a batch size that is larger than the number of rows."""
        if not self._replacement and batch_size > capacity:
            raise ValueError(
                f"batch_size: expected at most the capacity {capacity}, because of replacement=False, "
                f"found {batch_size}"
            )

    def may_draw(self, rows: Rows, batch_size: int) -> Answer:
        """Not before there are weights above 0: one, or without replacement as many as the batch has rows."""
        if self._replacement:
            return True if self._sums.total > 0 else NotYet(f"none of {rows.size} items has a weight above 0")
        if self._positive >= batch_size:
            return True
        return NotYet(f"{self._positive} of {batch_size} different items with a weight above 0 are stored")

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        """``batch_size`` rows, each with its chance.

        Raises:
            ValueError: there are no such rows.
        """
        answer = self.may_draw(rows, batch_size)
        if not answer:
            raise ValueError(f"batch size: expected fewer rows than {batch_size}: {answer.reason}")
        found = self._found(batch_size, generator) if self._replacement else self._distinct(batch_size, generator)
        return Draw(torch.from_numpy(found))

    def _found(self, wanted: int, generator: torch.Generator) -> Int64Array:
        places = torch.rand(wanted, dtype=torch.float64, generator=generator, device=generator.device)
        return self._sums.find(places.cpu().numpy() * self._sums.total)

    def _distinct(self, wanted: int, generator: torch.Generator) -> Int64Array:
        """Who draws one by one and leaves out what came before draws each of the others with its chance among them."""
        parts: list[Int64Array] = []
        while True:
            parts.append(first_of_each(self._found(wanted, generator)))
            wanted -= len(parts[-1])
            if not wanted:
                break
            self._sums.set(parts[-1], 0.0)  # not to be drawn again and again, if their weights are large
        for rows in parts[:-1]:
            self._sums.set(rows, self._priorities[rows])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Weights by row, -1 for a row without an item; whether there is replacement."""
        return {"replacement": self._replacement, "capacity": len(self._priorities), "weights": self._saved()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the weights that were saved."""
        name = type(self).__name__
        kinds: dict[str, type] = dict(replacement=bool, capacity=int, weights=torch.Tensor)
        replacement, capacity, weights = fields(state, name, **kinds)
        same(replacement, self._replacement, f"{name}: replacement")
        self._take_over(self._parsed(weights, capacity), capacity)
