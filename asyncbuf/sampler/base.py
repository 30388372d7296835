"""What the buffer asks of a sampler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncbuf._plain.state import fields

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
        """Rows are about to be overwritten: int64 ``[items]``. An error stops the write.

        Args:
            indices: the rows.
            rows: what there is to draw from afterwards.
        """

    def update_priority(self, indices: torch.Tensor, priority: torch.Tensor, rows: Rows) -> None:
        """Rows got new priorities: int64 ``[n]`` and float ``[n]``. Samplers without priorities have nothing to do."""

    def clear(self) -> None:
        """Every row is invalid now."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that later draws depend on, beside rows and generator, as plain data in memory of its own.

        Raises:
            TypeError: the sampler has attributes, and does not say how they are saved.
        """
        if vars(self):
            raise TypeError(
                f"{type(self).__name__}: expected state_dict and load_state_dict, because it has the attributes "
                f"{sorted(vars(self))}; found none"
            )
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave out.

        Raises:
            CheckpointError: it does not fit; nothing has changed.
        """
        fields(state, type(self).__name__)

    def verify(self, rows: Rows) -> None:
        """Refuse a state that was just loaded and does not go with the rows.

        Raises:
            CheckpointCorruptError: the next draw would be of rows that there are not.
        """

    def check(self, capacity: int, batch_size: int) -> None:
        """Refuse at construction what can never be drawn.

        Raises:
            ValueError: no buffer of this capacity ever holds a batch of this size.
        """

    @property
    def epoch(self) -> int | None:
        """Number of the pass that the next draw belongs to; None for samplers that have no passes."""
        return None

    def leaves_out(self, batch_size: int) -> bool:
        """Whether a draw of that size would leave out what is left of the pass, and begin the next one."""
        return False

    @property
    def between_epochs(self) -> bool:
        """Whether the next draw begins a pass. Prefetching stops there until a consumer asks for the next pass."""
        return False
