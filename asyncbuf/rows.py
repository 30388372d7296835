"""The words that writers, samplers, limiters and the table share: which rows there are, and what happens to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, overload

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

Int64Array = np.ndarray[Any, np.dtype[np.int64]]
Float64Array = np.ndarray[Any, np.dtype[np.float64]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]

NO_COLUMNS: Mapping[str, Any] = MappingProxyType({})
# Up to so many runs, an object for each is quicker than arrays.
_FEW_RUNS = 8


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


class _Scattered(Sequence[RowRange]):
    """Runs of one item each, or of few, without an object for each until somebody asks."""

    __slots__ = ("_runs", "rows")

    def __init__(self, rows: Int64Array) -> None:
        self.rows: Int64Array = rows
        self._runs: tuple[RowRange, ...] | None = None

    @property
    def items(self) -> Int64Array:
        raise NotImplementedError

    def _made(self) -> tuple[RowRange, ...]:
        if self._runs is None:
            self._runs = tuple(runs_of(self.rows, self.items))
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

    def __bool__(self) -> bool:
        """Whether there is one."""
        return len(self.rows) > 0


class ScatteredRows(_Scattered):
    """Many short runs: items that follow each other go to ascending rows.

    Args:
        rows: the rows, ascending: int64 ``[kept]``.
        item: position of the first item in what was handed to ``extend``; the others follow it.

    Attributes:
        rows: the rows.
        item: position of the first item.
    """

    __slots__ = ("item",)

    def __init__(self, rows: Int64Array, item: int) -> None:
        super().__init__(rows)
        self.item: int = item

    @property
    def items(self) -> Int64Array:
        """Positions of the items: int64 ``[kept]``."""
        return np.arange(self.item, self.item + len(self.rows), dtype=np.int64)


class ScatteredItems(_Scattered):
    """Many short runs: some of the items, in their order, go to rows in any order.

    Args:
        rows: the rows, each once: int64 ``[kept]``.
        items: positions of the items in what was handed to ``extend``, ascending: int64 ``[kept]``.

    Attributes:
        rows: the rows.
    """

    __slots__ = ("_items",)

    def __init__(self, rows: Int64Array, items: Int64Array) -> None:
        super().__init__(rows)
        self._items = items

    @property
    def items(self) -> Int64Array:
        """Positions of the items: int64 ``[kept]``."""
        return self._items


SCATTERED = (ScatteredRows, ScatteredItems)


def runs_of(rows: Int64Array, item: int | Int64Array) -> list[RowRange]:
    """Rows and items, run by run.

    Args:
        rows: the rows: int64 ``[kept]``.
        item: position of the first item, which the others follow; or that of each: int64 ``[kept]``.
    """
    if not len(rows):
        return []
    breaks = np.diff(rows) != 1
    items = range(item, item + len(rows)) if isinstance(item, int) else item
    if not isinstance(item, int):
        breaks |= np.diff(item) != 1
    starts = [0, *(np.flatnonzero(breaks) + 1).tolist()]
    return [
        RowRange(int(rows[start]), int(items[start]), stop - start)
        for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True)
    ]


def placed(offered: int, rows: Int64Array, items: Int64Array, note: Any = None) -> Placement:
    """Where some of the items go, in few objects however many they are.

    Args:
        offered: number of items that were handed in.
        rows: the rows, each once: int64 ``[kept]``.
        items: positions of the items that go there, ascending: int64 ``[kept]``.
        note: as in ``Placement``.
    """
    few = len(rows) <= _FEW_RUNS
    return Placement(offered, tuple(runs_of(rows, items)) if few else ScatteredItems(rows, items), note)


class Placement(NamedTuple):
    """Where the items of one write go.

    Attributes:
        offered: number of items that were handed in.
        runs: rows and items, run by run, in the order of the items; items that are not kept are in none.
        note: what the writer wants to find again when it commits the placement.
    """

    offered: int
    runs: Sequence[RowRange]
    note: Any = None

    @property
    def rows(self) -> Int64Array:
        """The rows that are written, in the order of the kept items: int64 ``[kept]``."""
        # By numpy, whose calls for a few rows take half the time of torch's.
        if type(self.runs) is not tuple and isinstance(self.runs, SCATTERED):  # to ask for abstract classes takes long
            return self.runs.rows.copy()
        if len(self.runs) == 1:
            (run,) = self.runs
            return np.arange(run.row, run.row + run.count, dtype=np.int64)
        runs = [np.arange(run.row, run.row + run.count, dtype=np.int64) for run in self.runs]
        return np.concatenate([np.empty(0, np.int64), *runs])

    @property
    def keeps_all(self) -> bool:
        """Whether every item that was handed in goes to a row."""
        if isinstance(self.runs, SCATTERED):
            return len(self.runs.rows) == self.offered
        return sum([run.count for run in self.runs]) == self.offered

    @property
    def items(self) -> Int64Array:
        """Positions of the kept items in what was handed in: int64 ``[kept]``."""
        if isinstance(self.runs, SCATTERED):
            return self.runs.items
        runs = [np.arange(run.item, run.item + run.count, dtype=np.int64) for run in self.runs]
        return runs[0] if len(runs) == 1 else np.concatenate([np.empty(0, np.int64), *runs])


class InTable(NamedTuple):
    """What ``TableWriter`` notes of a placement.

    Attributes:
        table: name of the table that the items go into.
        placement: the same, with rows counted from the first one of that table.
    """

    table: str
    placement: Placement


def _parts(placement: Placement, count: int) -> Iterator[Placement]:
    """So many items of a placement, then as many that follow, and so on."""
    rows, items = placement.rows, placement.items
    starts = range(0, placement.offered, count)
    ends = items.searchsorted([*starts, placement.offered]).tolist()
    for start, first, last in zip(starts, ends, ends[1:], strict=False):
        offered = min(count, placement.offered - start)
        yield Placement(offered, ScatteredItems(rows[first:last], items[first:last] - start))


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


def highest_of(rows: Rows) -> int:
    """The highest valid row; -1 if there is none."""
    if rows.valid is None or not rows.size:
        return rows.size - 1
    return int(rows.at(torch.arange(rows.size, device="cpu")).max())


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

    # -- of a storage with several tables ------------------------------------------------------------------------------

    @property
    def into(self) -> str | None:
        """Name of the table that the items go into; None if the writer has no tables."""
        note = self._placement.note
        return note.table if isinstance(note, InTable) else None

    def within(self, first: int, table: Rows) -> WriteEvent:
        """The same write, as it is in a table that ``into`` names, with rows counted from the first one of that.

        Args:
            first: number that the first item has there.
            table: that table as it is after the write.
        """
        note = self._placement.note
        return WriteEvent(note.placement, first, table, self._offered, self._priority)

    @property
    def placement(self) -> Placement:
        """Which items go where."""
        return self._placement

    def in_parts(self, count: int) -> Iterator[WriteEvent]:
        """The same write as several, of so many items each, for who must not take long over any.

        Of the table that each of them has, ``write_count`` is that of the part; the rest is as after the last one.
        """
        note = self._placement.note
        parts = _parts(self._placement, count)
        if isinstance(note, InTable):
            within = _parts(note.placement, count)
            pairs = zip(parts, within, strict=True)
            parts = (part._replace(note=InTable(note.table, inner)) for part, inner in pairs)
        for number, part in enumerate(parts):
            start = number * count
            offered = {path: column[start : start + count] for path, column in self._offered.items()}
            priority = None if self._priority is None else self._priority[start : start + count]
            table = self.table._replace(write_count=self._first + start + part.offered)
            yield WriteEvent(part, self._first + start, table, offered, priority)

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
        batch_size: that of the buffer; 0 if it has none.
        unread: number of stored items that wait to be drawn, if the sampler uses items up. With another one, each item
            written counts one more and each row drawn one less, from 0 to ``size``. If the limiter ``counts_unread``.
        nbytes: bytes of the stored items, if the limiter ``counts_bytes``.
        admitted_nbytes: bytes of the items that were admitted and are not written yet, likewise.
        offered_nbytes: bytes of the items that ``may_write`` is asked for, likewise.
        overwrites: how many stored items that no ticket was drawn for would be overwritten by those that ``may_write``
            is asked for and those that were admitted, if the limiter ``counts_overwrites``.
        version: the version of the model that makes items now, if the limiter ``needs_versions``.
        given_up: number of items that left without being trained on, likewise: they were too old, the sampler let them
            go, the writer did not keep them, or they were removed by a call.
    """

    size: int
    capacity: int
    write_count: int
    admitted: int
    drawn: int
    drawn_items: int
    batch_size: int = 0
    unread: int = 0
    nbytes: int = 0
    admitted_nbytes: int = 0
    offered_nbytes: int = 0
    overwrites: int = 0
    version: int = 0
    given_up: int = 0
