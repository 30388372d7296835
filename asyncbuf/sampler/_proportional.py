"""What samplers share that draw rows in proportion to a number that each of them has: a priority, or a weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from asyncbuf.errors import CheckpointCorruptError, SchemaError
from asyncbuf.sampler._reduction import reduced
from asyncbuf.sampler._sum_tree import SumTree
from asyncbuf.sampler.base import Sampler

if TYPE_CHECKING:
    from asyncbuf.rows import Float64Array, Int64Array, Rows, WriteEvent

NO_ITEM = -1.0


class ProportionalSampler(Sampler):
    """Keeps a number for each row, and a sum tree of what follows from it.

    Args:
        key: path of the field of an item that is its number; None for none.
        argument: name of that argument.
        reduction: which number a row gets that is named several times in one update.

    Raises:
        TypeError: the key is no path.
    """

    what: ClassVar[str] = "priority"  # what the number is called
    plural: ClassVar[str] = "priorities"
    limit: ClassVar[float] = np.inf  # it is below that

    def __init__(self, key: str | None, argument: str, reduction: str = "last") -> None:
        if key is not None and not isinstance(key, str):
            raise TypeError(f"{argument}: expected the path of a field, found {key!r}")
        self._reduction = reduction
        self._key = key
        self.columns: tuple[str, ...] = () if key is None else (key,)
        self._priorities: Float64Array = np.empty(0)
        self._sums = SumTree(0)

    @property
    def _limit(self) -> float:
        """What a caller hands in must be below that."""
        return self.limit

    def _allocate(self, capacity: int) -> None:
        """Have room for so many rows, none of which has an item."""
        self._priorities = np.full(capacity, NO_ITEM)
        self._sums = SumTree(capacity)

    def _set(self, rows: Int64Array, priorities: Float64Array | float) -> None:
        """Rows have these numbers now; one that is named twice, the last."""
        self._priorities[rows] = priorities
        self._sums.set(rows, priorities)

    def _told(self, indices: torch.Tensor) -> torch.Tensor:
        """The numbers of rows: float64, in the shape of the indices; NaN where there is no item."""
        if not len(self._priorities):
            return torch.full(indices.shape, torch.nan, dtype=torch.float64, device="cpu")
        found = torch.from_numpy(self._priorities.take(indices.numpy()))
        return torch.where(found == NO_ITEM, torch.nan, found)

    # -- what happens to rows -----------------------------------------------------------------------------------------

    def check_write(self, event: WriteEvent) -> None:
        """Refuse numbers that are negative or not finite."""
        self._given(event)

    def _given(self, event: WriteEvent) -> Float64Array | None:
        """The numbers that came with items: float64 ``[items]``; None if none did."""
        if event.priority is not None:
            return self.checked(event.priority, "priority")
        if self._key is None:
            return None
        column = event.columns[self._key]
        if column.size != len(column):
            raise SchemaError(
                f"{self._key}: expected one {self.what} per item, found items of shape {list(column.shape[1:])}"
            )
        return self.checked(column.reshape(-1), self._key)

    def checked(self, values: np.ndarray[Any, Any], what: str) -> Float64Array:
        """Numbers of a caller as float64.

        Raises:
            ValueError: one is negative, too large, or not finite.
        """
        found, limit = values.astype(np.float64), self._limit
        if len(found) and not (found.min() >= 0 and found.max() < limit):
            wrong = found[~((found >= 0) & (found < limit))]
            most = "" if limit == np.inf else f" and below {limit:.3g}"
            hint = " (of differences, give the size: td_error.abs())" if (wrong < 0).any() else ""
            raise ValueError(f"{what}: expected finite numbers of at least 0{most}, found {wrong[:4].tolist()}{hint}")
        return found

    def wrote(self, event: WriteEvent) -> None:
        """Give new rows their numbers."""
        self._set(*self._first_priorities(event))

    def _first_priorities(self, event: WriteEvent) -> tuple[Int64Array, Float64Array | float]:
        """The rows that were written, and their numbers."""
        if not len(self._priorities):
            self._allocate(event.table.capacity)
        given = self._given(event)
        return event.rows.numpy(), 1.0 if given is None else given

    def removed(self, indices: torch.Tensor, rows: Rows) -> None:
        """Rows without an item are not drawn."""
        gone = indices.numpy()
        self._priorities[gone] = NO_ITEM
        self._sums.set(gone, 0.0)

    def clear(self) -> None:
        """Forget all rows."""
        self._priorities.fill(NO_ITEM)
        self._sums.clear()

    def update_priority(self, indices: torch.Tensor, priority: torch.Tensor, rows: Rows) -> None:
        """Give rows new numbers, which are not negative.

        Raises:
            ValueError: one is negative.
        """
        self._set(*reduced(indices.numpy(), self.checked(priority.numpy(), "priority"), self._reduction))

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _saved(self) -> torch.Tensor:
        """The numbers, ``NO_ITEM`` for a row without an item, up to the last row with one: float64 ``[rows]``."""
        used = np.flatnonzero(self._priorities != NO_ITEM)
        return torch.from_numpy(self._priorities[: used[-1] + 1 if len(used) else 0].copy())

    def _parsed(self, saved: torch.Tensor, capacity: int) -> Float64Array:
        """Numbers out of a checkpoint, if they are some."""
        name = f"{type(self).__name__}: expected"
        is_column = saved.dtype is torch.float64 and saved.ndim == 1 and saved.layout is torch.strided
        if not is_column or saved.device.type != "cpu" or len(saved) > capacity or capacity >= 2**48:
            raise CheckpointCorruptError(
                f"{name} float64 {self.plural} of at most {capacity} rows, found {saved.dtype} {list(saved.shape)}"
            )
        values: Float64Array = saved.numpy()
        if not bool(((values >= 0) & (values < self.limit) | (values == NO_ITEM)).all()):
            raise CheckpointCorruptError(f"{name} {self.plural} that are finite and not negative, found others")
        return values

    def _take_over(self, values: Float64Array, capacity: int) -> None:
        """Go on with numbers that were saved."""
        self._allocate(capacity)
        rows = np.flatnonzero(values != NO_ITEM)
        if len(rows):
            self._set(rows, values[rows])

    def verify(self, rows: Rows) -> None:
        """Refuse numbers of other rows than the valid ones."""
        name = type(self).__name__
        known = np.flatnonzero(self._priorities != NO_ITEM)
        if len(self._priorities) not in (0, rows.capacity):
            raise CheckpointCorruptError(
                f"{name}: expected {self.plural} for {rows.capacity} rows, found them for {len(self._priorities)}"
            )
        if len(known) != rows.size or not bool(rows.contains(torch.from_numpy(known)).all()):
            raise CheckpointCorruptError(
                f"{name}: expected {self.plural} of the {rows.size} valid rows, found them of {len(known)} rows"
            )
