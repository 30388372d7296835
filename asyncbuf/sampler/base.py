"""What the buffer asks of a sampler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from asyncbuf.batch import Draw


class Rows(NamedTuple):
    """What there is to draw from, at one point of the history.

    Attributes:
        size: number of valid rows; they are 0 to ``size - 1``.
        capacity: number of rows of the storage.
        write_count: number of items ever written.
    """

    size: int
    capacity: int
    write_count: int


class Sampler(ABC):
    """Decides which rows a batch takes.

    The buffer calls every method on its event loop, in the order of the history, so a sampler needs no lock; it should
    be quick, because the loop waits for it. A draw depends on the sampler's state, the rows and the generator only.
    """

    @abstractmethod
    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        """Draw the rows of the next batch.

        Args:
            rows: what there is, at least one row.
            batch_size: number of rows wanted.
            generator: the only source of randomness.

        Returns:
            At most ``batch_size`` rows.

        Raises:
            ValueError: such a batch cannot be drawn from these rows; nothing has changed.
        """

    def written(self, indices: torch.Tensor, rows: Rows) -> None:
        """Rows were overwritten: int64 ``[items]``. Called after each write."""

    def update_priority(self, indices: torch.Tensor, priority: torch.Tensor, rows: Rows) -> None:
        """Rows got new priorities: int64 ``[n]`` and float ``[n]``. Samplers without priorities have nothing to do."""

    def clear(self) -> None:
        """Every row is invalid now."""

    def check(self, capacity: int, batch_size: int) -> None:
        """Refuse at construction what can never be drawn.

        Raises:
            ValueError: no buffer of this capacity ever holds a batch of this size.
        """

    @property
    def epoch(self) -> int | None:
        """Number of the pass that the next draw belongs to; None for samplers that have no passes."""
        return None

    @property
    def between_epochs(self) -> bool:
        """Whether the next draw begins a pass. Prefetching stops there until a consumer asks for the next pass."""
        return False
