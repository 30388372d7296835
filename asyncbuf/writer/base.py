"""What the buffer asks of a writer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import torch

    from asyncbuf.rows import Int64Array, Placement, Rows


class Writer(ABC):
    """Decides which rows the next items take. Methods are called on the event loop, in the order of the writes.

    Which rows are valid is known to the table: those that were written, until they are removed. A writer may place
    items in any rows.

    A writer defines ``place``; or ``columns`` and ``place_values``, if it must see the items to place them.

    Attributes:
        columns: leaf paths of items, such as ``("score",)`` or ``("meta/score",)``, whose values ``place_values`` gets.
        tables: the rows of each named table, for a writer that has several in one storage (``TableWriter``).
        computes_numbers: whether ``numbers`` can tell the item numbers of rows; if not, the table stores them. Not
            inherited: a subclass says so itself.
        trusted: whether placements are used without a look at their rows. Not inherited, either.
    """

    columns: tuple[str, ...] = ()
    tables: Mapping[str, range] = MappingProxyType({})
    computes_numbers: ClassVar[bool] = False
    trusted: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A subclass may place items otherwise: what its base declares does not hold for it."""
        super().__init_subclass__(**kwargs)
        for name in ("computes_numbers", "trusted"):
            if name not in vars(cls):
                setattr(cls, name, False)

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of rows that hold items: rows 0 to ``size - 1``, unless rows were removed."""

    @property
    @abstractmethod
    def write_count(self) -> int:
        """Number of items ever handed in (a Python int, which does not overflow)."""

    def place(self, count: int, capacity: int) -> Placement:
        """Choose rows for ``count`` items, no row twice. Changes nothing: the write may still fail.

        Raises:
            SchemaError, ReadOnlyError: the writer refuses the items.
        """
        raise TypeError(f"{type(self).__name__}: expected place(), because it names no columns; found none")

    def place_values(self, count: int, capacity: int, columns: Mapping[str, np.ndarray[Any, Any]]) -> Placement:
        """As ``place``, for a writer with ``columns``, and called in its stead.

        Args:
            count: number of items.
            capacity: number of rows.
            columns: the leaves that ``columns`` names: arrays ``[count, ...]`` by path. They may share memory with what
                the caller of ``extend`` handed in: copy what is kept.
        """
        raise TypeError(f"{type(self).__name__}: expected place_values(), because it names columns; found none")

    def columns_of(self, table: str) -> tuple[str, ...]:
        """As ``columns``, for items that go into one of the ``tables``."""
        raise TypeError(f"{type(self).__name__}: expected columns_of(), because it has tables; found none")

    def place_in(self, table: str, count: int, capacity: int, columns: Mapping[str, np.ndarray[Any, Any]]) -> Placement:
        """As ``place_values``, for items that go into one of the ``tables``."""
        raise TypeError(f"{type(self).__name__}: expected place_in(), because it has tables; found none")

    def check(self, capacity: int) -> None:
        """Refuse a capacity that the writer is not made for. Asked when the buffer is made.

        Raises:
            ValueError: it is another one.
        """

    @abstractmethod
    def commit(self, placement: Placement, capacity: int) -> None:
        """The items of a placement are in the storage now: ``write_count`` grows by ``placement.offered``."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything that later placements depend on, as plain data in memory of its own."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave out.

        Raises:
            CheckpointError: it does not fit; nothing has changed.
        """

    def verify(self, rows: Rows) -> None:
        """Refuse a state that was just loaded and does not go with the rows of the table.

        Raises:
            CheckpointCorruptError: the next items would go where they must not.
        """

    @abstractmethod
    def clear(self) -> None:
        """Every row is invalid now; ``write_count`` goes on."""

    def numbers(self, rows: Int64Array, capacity: int) -> Int64Array:
        """Item numbers of valid rows, int64 in the shape of ``rows``: only with ``computes_numbers``."""
        raise TypeError(f"{type(self).__name__}: expected numbers(), because it says computes_numbers; found none")

    def removed(self, rows: torch.Tensor, capacity: int) -> None:
        """Valid rows have left the table: int64 ``[rows]``. A writer that can takes them again for the next items."""
