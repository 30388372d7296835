"""What the buffer asks of a writer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from asyncbuf.rows import RowRange


class Placement(NamedTuple):
    """Where the items of one write go.

    Attributes:
        offered: number of items that were handed in.
        runs: rows and items, run by run, in the order of the items; items that are not kept are in none.
    """

    offered: int
    runs: tuple[RowRange, ...]


class Writer(ABC):
    """Decides which rows the next items take. Methods are called on the event loop, in the order of the writes."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of valid rows: rows 0 to ``size - 1``."""

    @property
    @abstractmethod
    def write_count(self) -> int:
        """Number of items ever handed in (a Python int, which does not overflow)."""

    @abstractmethod
    def place(self, count: int, capacity: int) -> Placement:
        """Choose rows for ``count`` items. Changes nothing: the write may still fail."""

    @abstractmethod
    def commit(self, placement: Placement, capacity: int) -> None:
        """The items of a placement are in the storage now."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything that later placements depend on, as plain data in memory of its own."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave out.

        Raises:
            CheckpointError: it does not fit; nothing has changed.
        """

    @abstractmethod
    def clear(self) -> None:
        """Every row is invalid now; ``write_count`` goes on."""
