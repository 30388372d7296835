"""The words that writers, samplers, limiters and the table share: which rows there are, and what happens to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, overload

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

Int64Array = np.ndarray[Any, np.dtype[np.int64]]
Float64Array = np.ndarray[Any, np.dtype[np.float64]]

NO_COLUMNS: Mapping[str, Any] = MappingProxyType({})


class NotYet(NamedTuple):
    """The answer "not now" of ``may_draw`` and ``may_write``; false in a condition.

    Attributes:
        reason: what is missing, in words and numbers, for ``why_blocked()``: ``"5 of 8 rows are stored"``.
    """

    reason: str

    def __bool__(self) -> Literal[False]:
        """False."""
        return False


Answer = Literal[True] | NotYet


@dataclass(slots=True)
class RowRange:
    """A run of items that go to neighbouring rows.

    Attributes:
        row: the first row.
        item: position of the first item in what was handed to ``extend``.
        count: how many.
    """

    row: int
    item: int
    count: int


class ScatteredRows(Sequence[RowRange]):
    """Runs of one item each, or of few, without an object for each: items go to ascending rows, one after the other.

    Args:
        rows: the rows, ascending: int64 ``[kept]``.
        item: position of the first item in what was handed to ``extend``; the others follow it.

    Attributes:
        rows: the rows.
        item: position of the first item.
    """

    __slots__ = ("_runs", "item", "rows")

    def __init__(self, rows: Int64Array, item: int) -> None:
        self.rows: Int64Array = rows
        self.item: int = item
        self._runs: tuple[RowRange, ...] | None = None

    def _made(self) -> tuple[RowRange, ...]:
        if self._runs is None:
            self._runs = tuple(runs_of(self.rows, self.item))
        return self._runs

    @overload
    def __getitem__(self, index: int) -> RowRange: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RowRange]: ...
    def __getitem__(self, index: int | slice) -> RowRange | Sequence[RowRange]:
        """One run, or several."""
        return self._made()[index]

    def __len__(self) -> int:
        """Number of runs."""
        return len(self._made())


def runs_of(rows: Int64Array, item: int) -> list[RowRange]:
    """Ascending rows, run by run; the first of them takes this item."""
    starts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist()]
    return [
        RowRange(int(rows[start]), item + start, stop - start)
        for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True)
    ]


class Placement(NamedTuple):
    """Where the items of one write go.

    Attributes:
        offered: number of items that were handed in.
        runs: rows and items, run by run, in the order of the items; items that are not kept are in none.
    """

    offered: int
    runs: Sequence[RowRange]

    @property
    def rows(self) -> Int64Array:
        """The rows that are written, in the order of the kept items: int64 ``[kept]``."""
        # By numpy, whose calls for a few rows take half the time of torch's.
        if type(self.runs) is ScatteredRows:
            return self.runs.rows.copy()
        if len(self.runs) == 1:
            (run,) = self.runs
            return np.arange(run.row, run.row + run.count, dtype=np.int64)
        runs = [np.arange(run.row, run.row + run.count, dtype=np.int64) for run in self.runs]
        return np.concatenate([np.empty(0, np.int64), *runs])

    @property
    def keeps_all(self) -> bool:
        """Whether every item that was handed in goes to a row."""
        if type(self.runs) is ScatteredRows:
            return len(self.runs.rows) == self.offered
        return sum([run.count for run in self.runs]) == self.offered

    @property
    def items(self) -> Int64Array:
        """Positions of the kept items in what was handed in: int64 ``[kept]``."""
        if type(self.runs) is ScatteredRows:
            return np.arange(self.runs.item, self.runs.item + len(self.runs.rows), dtype=np.int64)
        runs = [np.arange(run.item, run.item + run.count, dtype=np.int64) for run in self.runs]
        return runs[0] if len(runs) == 1 else np.concatenate([np.empty(0, np.int64), *runs])


class ValidRows(Protocol):
    """The valid rows of a table from which rows were removed. Positions are 0 to ``size - 1``, in a fixed order."""

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """The rows at some positions: int64, in the shape of ``positions``."""
        ...

    def contains(self, rows: torch.Tensor) -> torch.Tensor:
        """Which rows are valid: bool, in the shape of ``rows``."""
        ...


class Rows(NamedTuple):
    """What there is to draw from, at one point of the history.

    Attributes:
        size: number of valid rows.
        capacity: number of rows of the storage.
        write_count: number of items ever written.
        valid: which rows are valid, once rows were removed; None while they are 0 to ``size - 1``.
    """

    size: int
    capacity: int
    write_count: int
    valid: ValidRows | None = None

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """The rows at positions 0 to ``size - 1``: int64, in the shape of ``positions``.

        While nothing was removed, rows and positions are the same.
        """
        return positions if self.valid is None else self.valid.at(positions)

    def contains(self, rows: torch.Tensor) -> torch.Tensor:
        """Which rows are valid: bool, in the shape of ``rows``."""
        return (rows >= 0) & (rows < self.size) if self.valid is None else self.valid.contains(rows)


class WriteEvent:
    """One write, as ``Sampler.check_write`` and ``Sampler.wrote`` see it. What is not looked at is not computed.

    Args:
        placement: which items go where.
        first: item number of the first item that was handed in.
        table: the table as it is after the write.
        offered: the leaves that the sampler asked for by ``columns``, of all items that were handed in.
        priority: the priorities of all items that were handed in: float64 ``[items]``; None if there are none.

    Attributes:
        table: the table as it is after the write.
    """

    __slots__ = ("_first", "_offered", "_placement", "_priority", "table")

    def __init__(
        self,
        placement: Placement,
        first: int,
        table: Rows,
        offered: Mapping[str, Any] = NO_COLUMNS,
        priority: Float64Array | None = None,
    ) -> None:
        self._placement = placement
        self._priority = priority
        self._first = first
        self._offered = offered
        self.table: Rows = table

    @property
    def rows(self) -> torch.Tensor:
        """The rows that are written, in the order of the kept items: int64 ``[kept]``."""
        return torch.from_numpy(self._placement.rows)

    @property
    def items(self) -> torch.Tensor:
        """Positions of the kept items in what was handed to ``extend``: int64 ``[kept]``."""
        return torch.from_numpy(self._placement.items)

    @property
    def numbers(self) -> torch.Tensor:
        """Item numbers of the kept items: int64 ``[kept]``."""
        return torch.from_numpy(self._first + self._placement.items)

    @property
    def priority(self) -> Float64Array | None:
        """The priorities that came with the kept items: float64 ``[kept]``, finite; None if none did."""
        if self._priority is None or self._placement.keeps_all:
            return self._priority
        return self._priority[self._placement.items]

    @property
    def columns(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """The leaves that ``Sampler.columns`` names, of the kept items: arrays ``[kept, ...]`` by leaf path.

        They may share memory with what the caller of ``extend`` handed in: copy what is kept.
        """
        if self._placement.keeps_all:
            return self._offered
        items = self._placement.items
        return {path: column[items] for path, column in self._offered.items()}

    # -- of all items, kept or not ------------------------------------------------------------------------------------

    @property
    def first(self) -> int:
        """Item number of the first item that was handed in; those of the others follow."""
        return self._first

    @property
    def offered(self) -> Mapping[str, np.ndarray[Any, Any]]:
        """As ``columns``, of all items that were handed in, kept or not: arrays ``[offered, ...]``."""
        return self._offered

    @property
    def row_of_each(self) -> Int64Array:
        """The row of each item that was handed in, -1 for those that are not kept: int64 ``[offered]``."""
        placement = self._placement
        if placement.keeps_all:
            return placement.rows
        rows = np.full(placement.offered, -1)
        rows[placement.items] = placement.rows
        return rows


class Counters(NamedTuple):
    """What a limiter decides by.

    Attributes:
        size: number of valid rows.
        capacity: number of rows of the storage.
        write_count: number of items ever written.
        admitted: number of items that were admitted and are not written yet.
        drawn: number of tickets ever drawn.
        drawn_items: number of rows ever drawn, all tickets together.
    """

    size: int
    capacity: int
    write_count: int
    admitted: int
    drawn: int
    drawn_items: int
