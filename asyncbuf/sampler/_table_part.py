"""One table of several and its sampler, which is told what a buffer of its own would tell it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from asyncbuf._plain.integers import are_distinct
from asyncbuf._plain.state import fields, int64s, same
from asyncbuf.errors import CheckpointCorruptError
from asyncbuf.rows import NotYet, Rows
from asyncbuf.sampler._valid_rows import ValidIndex

if TYPE_CHECKING:
    from asyncbuf.batch import Draw
    from asyncbuf.rows import Answer, Int64Array, WriteEvent
    from asyncbuf.sampler.base import Sampler


class TablePart:
    """A table and its sampler. Rows are counted from the first one of the table, and items from its first item.

    Args:
        name: of the table.
        sampler: of the table.
        held: its rows in the storage.

    Attributes:
        name: of the table.
        sampler: of the table.
        start: its first row in the storage.
    """

    def __init__(self, name: str, sampler: Sampler, held: range) -> None:
        self.name = name
        self.sampler = sampler
        self.start = held.start
        self._capacity = len(held)
        self._index = ValidIndex(len(held))
        self._written = 0
        self._rows: Rows | None = None

    @property
    def held(self) -> range:
        """The rows of the table in the storage."""
        return range(self.start, self.start + self._capacity)

    @property
    def is_new(self) -> bool:
        """Whether nothing was ever written."""
        return not self._written

    @property
    def rows(self) -> Rows:
        """What there is to draw from."""
        if self._rows is None:
            self._rows = self._index.rows(self._written)
        return self._rows

    # -- what happens to rows -----------------------------------------------------------------------------------------

    def check_write(self, event: WriteEvent) -> None:
        """Items are about to be written."""
        if "check_write" in self.sampler.hooks:
            first, placement = self._written, event.within(0, self.rows).placement
            after = self._index.rows_after(placement, first + placement.offered)
            self.sampler.check_write(event.within(first, after))

    def wrote(self, event: WriteEvent) -> None:
        """Items were written."""
        sampler, first = self.sampler, self._written
        placement = event.within(0, self.rows).placement
        self._index.wrote(placement)
        self._written = first + placement.offered
        self._rows = None
        if "wrote" in sampler.hooks:
            sampler.wrote(event.within(first, self.rows))
        if "written" in sampler.hooks:
            sampler.written(torch.from_numpy(placement.rows), self.rows)

    def removed(self, rows: Int64Array) -> None:
        """Rows have left."""
        self._index.remove(rows)
        self._rows = None
        if "removed" in self.sampler.hooks:
            self.sampler.removed(torch.from_numpy(rows), self.rows)

    def clear(self) -> None:
        """All rows have left."""
        self._index.clear()
        self._rows = None
        self.sampler.clear()

    # -- drawing ------------------------------------------------------------------------------------------------------

    def may_draw(self, count: int) -> Answer:
        """Whether so many rows can be drawn now."""
        rows = self._rows or self.rows
        if not rows.size:
            return NotYet(f"table {self.name!r}: no item is stored")
        if count and "may_draw" in self.sampler.hooks:
            answer = self.sampler.may_draw(rows, count)
            return answer or NotYet(f"table {self.name!r}: {answer.reason}")
        return True

    def draw(self, count: int, generator: torch.Generator) -> list[Draw]:
        """Draw so many rows. Where a pass ends before that, the next one begins.

        Raises:
            TypeError, IndexError, ValueError: the sampler draws something else.
        """
        sampler, rows = self.sampler, self._rows or self.rows
        draws = [sampler.draw(rows, count, generator)]
        missing = count - draws[0].indices.shape[0]
        is_exact = draws[0].lengths is None  # ragged groups have as many rows as it happens
        if missing and is_exact and not sampler.hooks & {"handed_over", "dropped"}:
            while missing > 0:
                draws.append(sampler.draw(rows, missing, generator))
                if not len(draws[-1].indices):
                    raise IndexError(f"table {self.name!r}: expected rows of {type(sampler).__name__}, found none")
                missing -= len(draws[-1].indices)
        if not sampler.trusted and not all(bool(rows.contains(draw.indices).all()) for draw in draws):
            raise IndexError(f"table {self.name!r}: expected valid rows of {type(sampler).__name__}, found others")
        return draws

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Which rows are valid, how many items were written, and the state of the sampler."""
        index = self._index
        return {
            "held": [self.start, self._capacity],
            "written": self._written,
            "size": index.size,
            "valid": None if index.sparse is None else torch.from_numpy(index.by_position()),
            "sampler": self.sampler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the rows that were saved."""
        name = f"table {self.name!r}"
        is_dense = isinstance(state, dict) and state.get("valid") is None
        kinds: dict[str, type] = dict(
            held=list, written=int, size=int, valid=type(None) if is_dense else torch.Tensor, sampler=dict
        )
        held, written, size, valid, sampler = fields(state, name, **kinds)
        same(held, [self.start, self._capacity], f"{name}: rows")
        rows = None if valid is None else int64s(valid, f"{name}: expected valid rows").copy()
        if size > min(written, self._capacity) or (rows is not None and len(rows) != size):
            raise CheckpointCorruptError(f"{name}: expected at most {self._capacity} rows and as many as written")
        if rows is not None and not are_distinct(rows, self._capacity):
            raise CheckpointCorruptError(f"{name}: expected different rows below {self._capacity}, found others")
        self.sampler.load_state_dict(sampler)
        self._index = ValidIndex.of(self._capacity, size, rows)
        self._written = written
        self._rows = None

    def verify(self, rows: Rows) -> None:
        """Refuse other rows than those of the whole table, and let the sampler look at them.

        Args:
            rows: those of the storage.
        """
        own = torch.from_numpy(self._index.by_position() + self.start)
        if not bool(rows.contains(own).all()):
            raise CheckpointCorruptError(f"table {self.name!r}: expected valid rows, found others")
        self.sampler.verify(self.rows)


def local(rows: torch.Tensor, part: TablePart) -> Int64Array:
    """Those of some rows of the storage that are in a table, as its own: int64, in memory of its own."""
    found: Int64Array = rows.numpy() - part.start
    return found[(found >= 0) & (found < len(part.held))]
