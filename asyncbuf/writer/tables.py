"""Several tables in one storage, each with rows of its own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from asyncbuf._plain.load_all import load_all
from asyncbuf._plain.state import fields, same
from asyncbuf._runtime.arguments import count as checked_count
from asyncbuf._runtime.arguments import instance_of, shown
from asyncbuf.errors import CheckpointCorruptError
from asyncbuf.rows import InTable, Placement, RowRange, Rows, placed
from asyncbuf.writer.base import Writer
from asyncbuf.writer.round_robin import RoundRobinWriter

if TYPE_CHECKING:
    from asyncbuf.rows import Int64Array


class TableWriter(Writer):
    """Divides the rows of a storage among named tables, such as offline and online data; each call says which it means.

    Each table is a ring of its own, unless it has another writer::

        writer = TableWriter({"offline": 1_000_000, "online": 100_000})
        buffer = ReplayBuffer(TensorStorage(1_100_000), writer=writer, sampler=..., batch_size=256)
        await buffer.extend(dataset, table="offline")
        await buffer.add(step, table="online")

    ``MixtureSampler`` draws a fraction of each batch from each table; any other sampler draws from all rows alike.
    Storage, history and checkpoints are those of one buffer.

    Args:
        tables: number of rows of each table; together as many as the storage has.
        writers: writers of single tables, each for rows of its own from 0 on; ``RoundRobinWriter()`` for the others.

    Attributes:
        tables: the rows of each table.

    Raises:
        TypeError, ValueError: an argument is not of the kind or in the range that is expected.
    """

    trusted: ClassVar[bool] = True

    def __init__(self, tables: Mapping[str, int], writers: Mapping[str, Writer] | None = None) -> None:
        example = '{"offline": 1_000_000, "online": 100_000}'
        if not isinstance(tables, Mapping) or not tables:
            raise TypeError(
                f"tables: expected a dict with the number of rows of each, as {example}; found {shown(tables)}"
            )
        start, found = 0, {}
        for name, rows in tables.items():
            if not isinstance(name, str) or not name:
                raise TypeError(f"tables: expected names as keys, found {shown(name)}")
            found[name] = range(start, start := start + checked_count(rows, f'tables["{name}"]', 1, example=100_000))
        self.tables: Mapping[str, range] = MappingProxyType(found)
        self._writers = self._checked_writers({} if writers is None else writers)
        self._write_count = 0
        self._removed_from: set[str] = set()  # tables from which rows were removed
        if not all(writer.trusted for writer in self._writers.values()):
            vars(self)["trusted"] = False  # of this one: its placements are looked at

    def _checked_writers(self, writers: Any) -> dict[str, Writer]:
        if not isinstance(writers, Mapping):
            raise TypeError(f"writers: expected a dict with the writers of some tables, found {shown(writers)}")
        for name, writer in writers.items():
            if name not in self.tables:
                raise ValueError(f"writers: expected some of {list(self.tables)}, found {shown(name)}")
            instance_of(writer, Writer, f'writers["{name}"]', example="RoundRobinWriter()")
            if writer.tables:
                raise ValueError(f'writers["{name}"]: expected a writer without tables of its own, found one with them')
        if len({id(writer) for writer in writers.values()}) < len(writers):
            raise ValueError("writers: expected a writer of its own for each table, found one twice")
        return {name: writers.get(name) or RoundRobinWriter() for name in self.tables}

    def __reduce__(self) -> Any:
        """Pickle the rows of the tables as plain numbers."""
        state = {name: value for name, value in vars(self).items() if name != "tables"}
        return _unpickled, (type(self), {name: len(rows) for name, rows in self.tables.items()}, state)

    def check(self, capacity: int) -> None:
        """Refuse a storage with more or fewer rows than all tables together."""
        total = sum(map(len, self.tables.values()))
        if total != capacity:
            told = ", ".join(f"{len(rows)} for {name!r}" for name, rows in self.tables.items())
            raise ValueError(f"tables: expected {capacity} rows together, as many as the storage has; found {told}")

    @property
    def size(self) -> int:
        """Number of rows that hold items."""
        return sum(writer.size for writer in self._writers.values())

    @property
    def write_count(self) -> int:
        """Number of items ever handed in, whichever table they went into."""
        return self._write_count

    # -- placing ------------------------------------------------------------------------------------------------------

    def place(self, count: int, capacity: int) -> Placement:
        """Refuse items of which nobody said where they go.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"table: expected one of {list(self.tables)}, as in extend(items, table={next(iter(self.tables))!r}); "
            "found none"
        )

    def columns_of(self, table: str) -> tuple[str, ...]:
        """The leaf paths that the writer of a table wants to see."""
        return self._writers[table].columns

    def place_in(self, table: str, count: int, capacity: int, columns: Mapping[str, np.ndarray[Any, Any]]) -> Placement:
        """Rows of one table, as its writer chooses them."""
        rows, writer = self.tables[table], self._writers[table]
        size = len(rows)
        within = writer.place_values(count, size, columns) if writer.columns else writer.place(count, size)
        note = InTable(table, within)
        if type(within.runs) is tuple:
            start = rows.start
            runs = tuple([RowRange(run.row + start, run.item, run.count) for run in within.runs])
            return Placement(count, runs, note)
        return placed(count, within.rows + rows.start, within.items, note)

    def commit(self, placement: Placement, capacity: int) -> None:
        """The writer of the table goes on."""
        table, within = placement.note
        self._writers[table].commit(within, len(self.tables[table]))
        self._write_count += placement.offered

    def removed(self, rows: torch.Tensor, capacity: int) -> None:
        """Tell the writer of each table which of its rows are free."""
        for name, held in self.tables.items():
            gone = rows[(rows >= held.start) & (rows < held.stop)]
            if len(gone):
                self._removed_from.add(name)
                self._writers[name].removed(gone - held.start, len(held))

    def clear(self) -> None:
        """Start over in all tables."""
        self._removed_from.clear()
        for writer in self._writers.values():
            writer.clear()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """How many rows the tables have, from which of them rows were removed, and the state of each writer."""
        return {
            "rows": self._counts,
            "write_count": self._write_count,
            "removed_from": sorted(self._removed_from),
            "writers": {name: writer.state_dict() for name, writer in self._writers.items()},
        }

    @property
    def _counts(self) -> list[list[Any]]:
        return [[name, len(rows)] for name, rows in self.tables.items()]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let every writer go on where it was; all of them, or none."""
        name = type(self).__name__
        kinds: dict[str, type] = dict(rows=list, write_count=int, removed_from=list, writers=dict)
        rows, write_count, removed_from, writers = fields(state, name, **kinds)
        same(rows, self._counts, f"{name}: tables")
        if not all(isinstance(table, str) and table in self.tables for table in removed_from):
            raise CheckpointCorruptError(f"{name}: expected names of tables, found others")
        states = fields(writers, f"{name}: writers", **dict.fromkeys(self.tables, dict))
        load_all(self._writers.values(), states)
        self._write_count = write_count
        self._removed_from = set(removed_from)

    def verify(self, rows: Rows) -> None:
        """Let every writer look at the rows of its table."""
        total, found = sum(writer.write_count for writer in self._writers.values()), self._write_count
        if total != found:
            raise CheckpointCorruptError(
                f"{type(self).__name__}: expected a write_count of {total}, that of all tables, found {found}"
            )
        held = rows.at(torch.arange(rows.size, device="cpu")).numpy()
        for name, region in self.tables.items():
            writer = self._writers[name]
            own = held[(held >= region.start) & (held < region.stop)] - region.start
            is_dense = name not in self._removed_from and len(own) == int(own.max(initial=-1)) + 1
            valid = None if is_dense else _Some(own)
            writer.verify(Rows(len(own), len(region), writer.write_count, valid))


class _Some:
    """Some rows as the valid ones.

    Args:
        rows: different rows, int64.
    """

    def __init__(self, rows: Int64Array) -> None:
        self._rows = rows

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """The rows at some positions."""
        return torch.from_numpy(self._rows[positions.numpy()])

    def contains(self, rows: torch.Tensor) -> torch.Tensor:
        """Which rows are among them."""
        return torch.from_numpy(np.isin(rows.numpy(), self._rows))


def _unpickled(kind: type[TableWriter], tables: dict[str, int], state: dict[str, Any]) -> TableWriter:
    writer = kind.__new__(kind)
    start = 0
    writer.tables = MappingProxyType({name: range(start, start := start + rows) for name, rows in tables.items()})
    vars(writer).update(state)
    return writer
