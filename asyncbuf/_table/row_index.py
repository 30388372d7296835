"""Which rows of a table are valid, and which items are in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._plain.integers import are_distinct
from asyncbuf._plain.state import fields, int64s
from asyncbuf.errors import CheckpointCorruptError
from asyncbuf.rows import SCATTERED
from asyncbuf.sampler._valid_rows import SparseRows, ValidIndex

if TYPE_CHECKING:
    from asyncbuf.rows import BoolArray, Int64Array, Placement, Rows
    from asyncbuf.writer import Writer


class RowIndex(ValidIndex):
    """The valid rows, and the numbers of their items.

    Args:
        capacity: number of rows.
        writer: chooses rows; item numbers are stored here if it does not compute them.
    """

    def __init__(self, capacity: int, writer: Writer) -> None:
        super().__init__(capacity)
        self._writer = writer
        self._numbers = None if writer.computes_numbers else np.zeros(capacity, np.int64)
        self.load_state_dict({"valid": None, "numbers": None})  # the writer may have a history

    def store_numbers(self, placement: Placement, first: int) -> None:
        """Keep the item numbers of a write, if that is done here.

        Args:
            placement: where the items went.
            first: number of the first item that was handed in.
        """
        numbers = self._numbers
        if numbers is None:
            return
        if isinstance(placement.runs, SCATTERED):
            numbers[placement.runs.rows] = first + placement.runs.items
            return
        for run in placement.runs:
            start = first + run.item
            numbers[run.row : run.row + run.count] = np.arange(start, start + run.count)

    def contains(self, rows: Int64Array) -> BoolArray:
        """Which rows are valid: bool, in the shape of ``rows``."""
        if self.sparse is None:
            return (rows >= 0) & (rows < self.size)
        return self.rows(0).contains(torch.from_numpy(rows)).numpy()

    def numbers(self, rows: Int64Array) -> Int64Array:
        """Item numbers of valid rows: int64, in the shape of ``rows``."""
        if self._numbers is None:
            return self._writer.numbers(rows, self._capacity)
        return self._numbers[rows]

    def state_dict(self) -> dict[str, Any]:
        """The valid rows by position, if there are gaps; the item numbers by position, if they are stored."""
        rows = None if self.sparse is None and (self._numbers is None or not self._size) else self.by_position()
        valid = None if self.sparse is None or rows is None else torch.from_numpy(rows)
        numbers = None if self._numbers is None or rows is None else torch.from_numpy(self._numbers[rows])
        return {"valid": valid, "numbers": numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the rows of a checkpoint, once the writer has taken over its state.

        What is not said follows from the writer: without gaps, its size is that of the table. Numbers that should be
        stored and were not are those of rows that were written in their order.
        """
        kinds: dict[str, type] = dict.fromkeys(("valid", "numbers"), torch.Tensor)
        if isinstance(state, dict):
            kinds = {name: kind if state.get(name) is not None else type(None) for name, kind in kinds.items()}
        valid, numbers = (
            None if tensor is None else int64s(tensor, f"rows: expected {name}")
            for tensor, name in zip(fields(state, "rows", **kinds), kinds, strict=True)
        )
        size = self._writer.size if valid is None else len(valid)
        if size > self._capacity or (valid is not None and not are_distinct(valid, self._capacity)):
            raise CheckpointCorruptError(f"rows: expected at most {self._capacity} different rows, found others")
        if self._numbers is None and numbers is not None:
            raise CheckpointCorruptError("rows: expected no item numbers, because the writer computes them; found some")
        if numbers is None and self._numbers is not None:
            numbers = np.arange(self._writer.write_count - size, self._writer.write_count)
        if numbers is not None and len(numbers) != size:
            raise CheckpointCorruptError(f"rows: expected {size} item numbers, found {len(numbers)}")
        self._size = size
        self.sparse = None if valid is None else SparseRows.of(self._capacity, valid)
        if self._numbers is not None and numbers is not None:
            self._numbers[slice(size) if valid is None else valid] = numbers

    def verify(self, rows: Rows) -> None:
        """Refuse item numbers that there are not.

        Raises:
            CheckpointCorruptError: a number occurs twice, or is not below the number of items written.
        """
        if self._numbers is not None and not are_distinct(self._numbers[self.by_position()], rows.write_count):
            raise CheckpointCorruptError(f"rows: expected different item numbers below {rows.write_count}")

    def highest(self) -> int:
        """The highest valid row; -1 if there is none."""
        return self.size - 1 if self.sparse is None else int(self.by_position().max(initial=-1))
