"""A pass over rows of which some leave before it has come to them, or that are not 0 to n - 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._plain.integers import are_distinct
from asyncbuf._plain.state import int64s
from asyncbuf.errors import CheckpointCorruptError

if TYPE_CHECKING:
    from asyncbuf.rows import Int64Array, Rows
    from asyncbuf.sampler._permutation import Permutation


class PassGaps:
    """The members of a pass, and which of them are gone. Members are numbered 0 to ``length - 1``.

    Args:
        length: number of members.
        rows: their rows, int64 ``[length]``; None if member n is row n.

    Attributes:
        ahead: number of members that are gone and that the pass has not come to.
    """

    def __init__(self, length: int, rows: Int64Array | None) -> None:
        self._length = length
        self._rows = rows
        self._members: Int64Array | None = None  # by row: its member + 1, 0 for none; made when it is needed
        self._gone = np.zeros(length, np.bool_)  # by member; not kept for those that the pass has passed
        self.ahead = 0

    def rows_of(self, members: Int64Array) -> Int64Array:
        """The rows of some members."""
        return members if self._rows is None else self._rows[members]

    def _members_of(self, rows: Int64Array, capacity: int) -> Int64Array:
        """The members in some rows; rows without one are left out."""
        if self._rows is None:
            return rows[rows < self._length]
        if self._members is None:
            self._members = np.zeros(capacity, np.int64)
            self._members[self._rows] = np.arange(1, self._length + 1)
        found = self._members[rows]
        return found[found > 0] - 1

    def remove(self, rows: Int64Array, capacity: int, order: Permutation | None, position: int) -> None:
        """Rows have left the table: their members are gone, unless the pass has passed them."""
        members = self._members_of(rows, capacity)
        places = members if order is None else order.positions_of(members)
        members = members[(places >= position) & ~self._gone[members]]
        self._gone[members] = True
        self.ahead += len(members)

    def take(self, order: Permutation | None, position: int, count: int) -> tuple[Int64Array, int]:
        """The rows of the next members that are there, at most ``count``, and the position behind them."""
        found: list[Int64Array] = [np.empty(0, np.int64)]
        chunk = count
        while count > 0 and position < self._length:
            stop = min(position + chunk, self._length)
            members = np.arange(position, stop) if order is None else order[position:stop].numpy()
            there = np.flatnonzero(~self._gone[members])[:count]
            if len(there) == count:
                stop = position + int(there[-1]) + 1
            passed = members[: stop - position]
            self.ahead -= int(np.count_nonzero(self._gone[passed]))
            self._gone[passed] = False
            found.append(members[there])
            count, position = count - len(there), stop
            chunk = max(chunk, min(2 * chunk, 1 << 13))
        return self.rows_of(np.concatenate(found)), position

    def state(self) -> dict[str, torch.Tensor]:
        """Rows and gone members as tensors of their own; those that say nothing are left out."""
        state = {}
        if self._rows is not None:
            state["rows"] = torch.from_numpy(self._rows.copy())
        if self.ahead:
            state["gone"] = torch.from_numpy(np.flatnonzero(self._gone))
        return state

    @classmethod
    def of(cls, name: str, length: int, tensors: dict[str, Any]) -> PassGaps | None:
        """What ``state`` gave out; None if it is nothing.

        Raises:
            CheckpointCorruptError: it contradicts itself.
        """
        if not tensors:
            return None
        arrays = {key: int64s(tensor, f"{name}: expected {key}").copy() for key, tensor in tensors.items()}
        rows, gone = arrays.get("rows"), arrays.get("gone", np.empty(0, np.int64))
        if rows is not None and (len(rows) != length or (len(rows) and rows.min() < 0)):
            raise CheckpointCorruptError(f"{name}: expected the {length} rows of a pass, found {len(rows)}")
        if len(gone) and (gone[0] < 0 or gone[-1] >= length or (np.diff(gone) <= 0).any()):
            raise CheckpointCorruptError(f"{name}: expected ascending members below {length}, found others")
        try:
            gaps = cls(length, rows)
        except (MemoryError, ValueError) as error:
            raise CheckpointCorruptError(f"{name}: expected the length of a pass, found {length}") from error
        gaps._gone[gone] = True
        gaps.ahead = len(gone)
        return gaps

    def verify(self, name: str, table: Rows, order: Permutation | None, position: int) -> None:
        """Refuse members that the pass has not come to and that are no valid rows.

        Raises:
            CheckpointCorruptError: there are some.
        """
        members = np.arange(self._length)
        rows = self.rows_of(members)
        if not are_distinct(rows, table.capacity):
            raise CheckpointCorruptError(f"{name}: expected a pass over different rows below {table.capacity}")
        members = members[~table.contains(torch.from_numpy(rows)).numpy()]
        places = members if order is None else order.positions_of(members)
        lost = members[(places >= position) & ~self._gone[members]]
        if len(lost):
            raise CheckpointCorruptError(
                f"{name}: expected a pass over valid rows, found {self.rows_of(lost).tolist()[:8]} ahead of it"
            )
