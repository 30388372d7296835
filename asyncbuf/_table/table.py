"""Storage, writer, sampler and generator as one: what items go into, and what tickets are drawn from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._runtime.shield import shielded
from asyncbuf._runtime.torch_modes import Swapped, dispatch_modes, disturb_us, function_modes, is_inference_on
from asyncbuf.batch import Draw
from asyncbuf.sampler import RandomSampler, Rows, Sampler, SamplerWithoutReplacement

if TYPE_CHECKING:
    from asyncbuf.storage import Prepared, Storage
    from asyncbuf.writer import Placement, Writer

_TRUSTED = (RandomSampler, SamplerWithoutReplacement)


class Table:
    """The synchronous heart of a buffer: no method waits, and every one belongs into a turn of the history.

    Args:
        storage: where items live.
        writer: which rows they take.
        sampler: which rows a batch takes.
        generator: randomness of the draws.
        min_size: draws begin when this many items are stored.
    """

    def __init__(
        self, storage: Storage, writer: Writer, sampler: Sampler, generator: torch.Generator, min_size: int
    ) -> None:
        self.storage = storage
        self.writer = writer
        self.sampler = sampler
        self.generator = generator
        self.min_size = min_size
        self._rows: Rows | None = None
        self._tells_sampler = type(sampler).written is not Sampler.written
        self._checks_draws = type(sampler) not in _TRUSTED

    @property
    def rows(self) -> Rows:
        """What there is to draw from now."""
        rows = self._rows
        if rows is None:
            rows = self._rows = Rows(self.writer.size, self.storage.capacity, self.writer.write_count)
        return rows

    def changed(self) -> None:
        """The writer has another state now."""
        self._rows = None

    @property
    def drawable(self) -> bool:
        """Whether enough items are stored to draw."""
        return self.rows.size >= self.min_size

    def place(self, prepared: Prepared) -> Placement:
        """Choose the rows for prepared items, and tell the sampler.

        The sampler is told before the rows are overwritten: if it raises, nothing has happened yet.
        """
        placement = self.writer.place(prepared.count, self.storage.capacity)
        if self._tells_sampler:
            before = self.writer.state_dict()
            self.writer.commit(placement, self.storage.capacity)
            self.changed()
            try:
                self.sampler.written(_rows_of(placement), self.rows)
            finally:
                self.writer.load_state_dict(before)
                self.changed()
        return placement

    def commit(self, placement: Placement) -> torch.Tensor:
        """Make rows valid that were written: int64 ``[kept items]``, in the order of the items."""
        self.writer.commit(placement, self.storage.capacity)
        self.changed()
        return _rows_of(placement)

    def draw(self, batch_size: int) -> Draw:
        """Ask the sampler.

        Raises:
            ValueError: the sampler says that there is no such batch.
            TypeError, IndexError: a sampler returned something else than rows of the storage.
        """
        if not self._checks_draws:
            if (is_inference_on() or dispatch_modes() or function_modes()) and disturb_us():
                with Swapped():
                    return self.sampler.draw(self.rows, batch_size, self.generator)
            return self.sampler.draw(self.rows, batch_size, self.generator)
        draw = shielded(self.sampler.draw, self.rows, batch_size, self.generator)
        _check(draw, self.rows.size, type(self.sampler).__name__)
        return draw

    def update_priority(self, indices: Any, priority: Any) -> None:
        """Forward new priorities to the sampler.

        Raises:
            TypeError: the indices are not integers.
            ValueError: indices and priorities differ in number, or a priority is not finite.
            IndexError: an index is not a row of the storage.
        """
        where = torch.as_tensor(indices, device="cpu").detach().reshape(-1)
        value = torch.as_tensor(priority, device="cpu").detach().reshape(-1)
        if where.numel() == 0 and value.numel() == 0:
            return
        if where.dtype.is_floating_point or where.dtype.is_complex or where.dtype is torch.bool:
            raise TypeError(f"indices: expected integers, found {where.dtype}")
        if value.numel() == 1 and where.numel() != 1:
            value = value.expand_as(where)
        if where.shape != value.shape:
            raise ValueError(f"priority: expected {where.numel()} values, one per index, found {value.numel()}")
        if not torch.isfinite(value).all():
            raise ValueError("priority: expected finite values, found nan or infinity")
        _check_range(where, self.storage.capacity, "indices")
        self.sampler.update_priority(where.to(torch.int64), value, self.rows)

    def clear(self) -> None:
        """Forget every item."""
        self.storage.clear()
        self.writer.clear()
        self.changed()
        self.sampler.clear()


def _rows_of(placement: Placement) -> torch.Tensor:
    # By numpy, whose calls for a few rows take half the time.
    runs = [np.arange(run.row, run.row + run.count, dtype=np.int64) for run in placement.runs]
    return torch.from_numpy(runs[0] if len(runs) == 1 else np.concatenate([np.empty(0, np.int64), *runs]))


def _check(draw: Draw, size: int, name: str) -> None:
    if not isinstance(draw, Draw):
        raise TypeError(f"{name}.draw: expected a Draw, found {type(draw).__name__}")
    indices = draw.indices
    if not isinstance(indices, torch.Tensor) or indices.dtype is not torch.int64 or indices.ndim != 1:
        raise TypeError(f"{name}.draw: expected indices as an int64 tensor with one axis, found {indices!r}")
    if indices.numel() == 0:
        raise IndexError(f"{name}.draw: expected at least one index, found none")
    _check_range(indices, size, f"{name}.draw")


def _check_range(indices: torch.Tensor, size: int, name: str) -> None:
    if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= size):
        raise IndexError(f"{name}: expected rows 0 to {size - 1}, found {int(indices.min())} to {int(indices.max())}")
