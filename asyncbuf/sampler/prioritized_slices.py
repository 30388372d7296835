"""Prioritized experience replay of slices."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._plain.state import fields
from asyncbuf._runtime.arguments import cpu_tensor, fraction
from asyncbuf.errors import CheckpointCorruptError
from asyncbuf.sampler._row_set import NotedRowSet
from asyncbuf.sampler._slicer import Slicer
from asyncbuf.sampler.prioritized import PrioritizedSampler, Schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncbuf.batch import Draw
    from asyncbuf.rows import Answer, BoolArray, Float64Array, Int64Array, Rows, WriteEvent


class PrioritizedSliceSampler(PrioritizedSampler):
    """Draws slices as ``SliceSampler`` does, with chances as those of ``PrioritizedSampler``.

    The priority of a slice is that of the row at which it begins. A new row gets the largest so far, or what came with
    its item; a row at which no slice may begin is never drawn, whatever its priority. ``batch.info["weights"]`` has the
    importance weight of each slice: float32 ``[slices]``.

    After a step, tell how wrong the slices were::

        batch = await buffer.sample()
        loss, td_error = learn(batch, batch.info["weights"])  # td_error: [slices, steps]
        await buffer.update_priority(batch, td_error.abs())

    Of priorities ``[slices, steps]``, a slice gets ``eta * max + (1 - eta) * mean`` over its steps, those of
    ``burn_in`` and of padding left out (Kapturowski et al., Recurrent Experience Replay in Distributed Reinforcement
    Learning, 2019). ``[slices, slice_len]``, without the steps of ``burn_in``, is taken in the same way, and
    ``[slices]`` as it is. Given with rows that are no batch, priorities are those of the slices that begin there.

    Args:
        alpha: as of ``PrioritizedSampler``.
        beta: as of ``PrioritizedSampler``.
        slice_len: as of ``SliceSampler``; so are the next five.
        num_slices: slices in a batch of the buffer's ``batch_size``.
        end_key: path of the field that is true for the last item of a trajectory; or several such.
        trajectory_key: path of an integer field that tells trajectories or environments apart.
        strict_length: leave out trajectories that are shorter than a slice; otherwise they are padded.
        burn_in: steps ahead of ``slice_len``.
        eta: from 0 to 1, how much the largest of the priorities of a slice counts.
        eps: as of ``PrioritizedSampler``; so are the following.
        reduction: which priority a slice gets that is named several times in one update.
        priority_key: path of the field of an item that is its priority.

    Raises:
        TypeError, ValueError: an argument is not of the kind or in the range that is expected.
    """

    trusted: bool = True
    counts_draws: bool = False

    def __init__(
        self,
        alpha: Schedule = 0.6,
        beta: Schedule = 0.4,
        *,
        slice_len: int | None = None,
        num_slices: int | None = None,
        end_key: str | Sequence[str] | None = None,
        trajectory_key: str | None = None,
        strict_length: bool = True,
        burn_in: int = 0,
        eta: float = 0.9,
        eps: float = 1e-8,
        reduction: str = "max",
        priority_key: str | None = None,
    ) -> None:
        super().__init__(alpha, beta, eps=eps, reduction=reduction, priority_key=priority_key)
        self._slicer = Slicer(
            slice_len=slice_len,
            num_slices=num_slices,
            end_key=end_key,
            trajectory_key=trajectory_key,
            strict_length=strict_length,
            burn_in=burn_in,
            make_starts=NotedRowSet,
        )
        self._eta = fraction(eta, "eta", example=0.9)
        self.columns: tuple[str, ...] = tuple(dict.fromkeys((*self.columns, *self._slicer.columns)))

    def check(self, capacity: int, batch_size: int) -> None:
        """Refuse a batch size that is not one of whole slices."""
        self._slicer.check(capacity, batch_size)

    @property
    def draw_unit(self) -> int:
        """The length of a slice: a batch size is a multiple of it."""
        return max(1, self._slicer.length)

    # -- what happens to rows -----------------------------------------------------------------------------------------

    def check_write(self, event: WriteEvent) -> None:
        """Refuse items that do not say which trajectory they belong to, and priorities that are none."""
        self._slicer.check_write(event)
        super().check_write(event)

    def wrote(self, event: WriteEvent) -> None:
        """Give new rows their first priority, and see where slices may begin now."""
        self._slicer.wrote(event)
        rows, priorities = self._first_priorities(event)
        self._priorities[rows] = priorities
        self._weigh_noted()

    def removed(self, indices: torch.Tensor, rows: Rows) -> None:
        """See where slices may begin now."""
        self._slicer.removed(indices.numpy())
        super().removed(indices, rows)
        self._weigh_noted()

    def clear(self) -> None:
        """Forget all rows, and go on with the largest priority so far."""
        self._slicer.clear()
        super().clear()

    def _weigh_noted(self) -> None:
        """Weigh the rows at which slices begin now, or do not any more. No others change their weights."""
        starts = self._slicer.starts
        assert isinstance(starts, NotedRowSet)
        added, discarded = starts.noted()
        if len(discarded):
            self._sums.set(discarded, 0.0)
            added = added[starts.holds(added)]  # some may have been discarded later in the same write
        if len(added):
            weights = self._weights(self._priorities.take(added))
            self._sums.set(added, weights)

    def _set(self, rows: Int64Array, priorities: Float64Array | float) -> None:
        """Keep priorities, and weigh those rows at which slices begin."""
        self._priorities[rows] = priorities
        rows = rows[self._slicer.starts.holds(rows)]
        super()._set(rows, self._priorities.take(rows))

    # -- priorities ---------------------------------------------------------------------------------------------------

    def group_priority(self, indices: Any, priority: Any) -> tuple[Any, Any]:
        """Of the priorities of a batch, those of its slices.

        Raises:
            TypeError, ValueError: they do not fit the batch, or one is negative.
        """
        length = self._slicer.length
        if not isinstance(indices, torch.Tensor) or indices.ndim != 2 or indices.shape[1] != length:
            return indices, priority
        values = _values(priority)
        rows = indices.detach().cpu().numpy()
        firsts = rows[:, 0]
        if not values.ndim or values.shape in ((len(rows),), (len(rows), 1)):
            return firsts, values.reshape(-1) if values.ndim else values
        burn_in = self._slicer.burn_in
        shapes = [rows.shape, (len(rows), length - burn_in)]
        flat = [(rows.size,), (len(rows) * (length - burn_in),)]
        # [steps, slices] has as many values, and would give each to another slice.
        if values.shape not in [*shapes, *flat, *((*shape, 1) for shape in shapes)]:
            steps = f"[{len(rows)}, {length}]" + (f", [{len(rows)}, {length - burn_in}]" if burn_in else "")
            raise ValueError(f"priority: expected values {steps} or [{len(rows)}], found {list(values.shape)}")
        values = values.reshape(len(rows), -1)
        values = values[:, burn_in:] if values.shape[1] == length else values
        counts = np.ones(rows.shape, np.bool_)
        counts[:, 1:] = rows[:, 1:] != rows[:, :-1]  # padding repeats a row
        return self._mixed(firsts, values, counts[:, burn_in:])

    def _mixed(self, firsts: Int64Array, values: Float64Array, counts: BoolArray) -> tuple[Int64Array, Float64Array]:
        """``eta * max + (1 - eta) * mean`` of the values that count, of the slices that have some."""
        if (wrong := values[counts & ~(values >= 0)]).size:
            hint = " (of differences, give the size: td_error.abs())" if (wrong < 0).any() else ""
            raise ValueError(f"priority: expected finite numbers of at least 0, found {wrong[:4].tolist()}{hint}")
        values = np.where(counts, values, 0.0)
        steps = counts.sum(axis=1)
        some = steps > 0
        means = values[some].sum(axis=1) / steps[some]
        return firsts[some], self._eta * values[some].max(axis=1) + (1.0 - self._eta) * means

    # -- drawing ------------------------------------------------------------------------------------------------------

    def may_draw(self, rows: Rows, batch_size: int) -> Answer:
        """Not before there is a slice."""
        return self._slicer.may_draw(rows)

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        """Slices, each with its chance, and their weights."""
        found, corrections = self._drawn(self._slicer.count(batch_size), generator)
        return self._slicer.slices(found, {"weights": corrections})

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Priorities as those of ``PrioritizedSampler``, and trajectories as those of ``SliceSampler``."""
        return {"priorities": super().state_dict(), "slices": self._slicer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the priorities and the trajectories that were saved."""
        name = type(self).__name__
        kinds: dict[str, type] = {"priorities": dict, "slices": dict}
        priorities, slices = fields(state, name, **kinds)
        slicer = copy.copy(self._slicer)
        slicer.take_over(slicer.parsed(slices, name))
        rows = priorities.get("priorities")
        if isinstance(rows, torch.Tensor) and rows.shape[:1] != (slicer.capacity,):
            raise CheckpointCorruptError(
                f"{name}: expected priorities of {slicer.capacity} rows, found {list(rows.shape)}"
            )
        before, self._slicer = self._slicer, slicer
        try:
            super().load_state_dict(priorities)  # which weighs the rows at which slices begin
        except BaseException:
            self._slicer = before
            raise
        if slicer.is_fixed:
            self._weigh_noted()

    def verify(self, rows: Rows) -> None:
        """Refuse priorities and trajectories of other rows than the valid ones."""
        super().verify(rows)
        self._slicer.verify(rows, type(self).__name__)


def _values(priority: Any) -> Float64Array:
    """Priorities of a caller as float64.

    Raises:
        TypeError: they are no real numbers.
    """
    found = cpu_tensor(priority, "priority", expected="numbers")
    if found.is_complex() or found.dtype is torch.bool:
        raise TypeError(f"priority: expected real numbers, found {found.dtype}")
    values: Float64Array = found.to(torch.float64).numpy()
    return values
