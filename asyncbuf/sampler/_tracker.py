"""What a sampler of trajectories does about writes and removals: read the keys of the items, link rows, note starts."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from blake3 import blake3

from asyncbuf._runtime.arguments import field_path, field_paths
from asyncbuf.errors import CheckpointCorruptError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncbuf.rows import BoolArray, Int64Array, Rows, WriteEvent
    from asyncbuf.sampler._episodes import Cut, Episodes, Joined, Pieces
    from asyncbuf.sampler._row_set import RowSet


# So many items are written one by one in less time than together.
_FEW = 32


class Rule(Protocol):
    """Which rows are starts."""

    def clear(self) -> None:
        """No row is stored any more."""

    def cut_head(self, row: int, head: int) -> None:
        """The first row of a chain has left, and another is the first now, -1 for none."""

    def cut(self, cut: Cut) -> None:
        """Rows have left."""

    def joined(self, item: Joined) -> None:
        """An item was written."""

    def joined_many(self, pieces: Pieces) -> None:
        """Items were written."""

    def computed(self) -> BoolArray:
        """By row, whether it is a start: found out from the links alone."""
        ...


class ItemKeys:
    """The fields of an item that say which trajectory it belongs to.

    Args:
        end_key: path of the field that is true for the last item of a trajectory, or several such; None for none.
        trajectory_key: path of the field with the number of the trajectory, or of the environment; None for none.

    Attributes:
        columns: all paths.

    Raises:
        TypeError, ValueError: they are no paths, or there is none.
    """

    def __init__(self, end_key: str | Sequence[str] | None, trajectory_key: str | None) -> None:
        ends = () if end_key is None else field_paths(end_key, "end_key", example="done")
        if trajectory_key is not None:
            field_path(trajectory_key, "trajectory_key", example="env")
        if not ends and trajectory_key is None:
            raise ValueError('expected an end_key such as "done", or a trajectory_key such as "env"; found neither')
        self._ends = ends
        self._trajectory = trajectory_key
        self.columns = ends if trajectory_key is None or trajectory_key in ends else (*ends, trajectory_key)

    @property
    def tells_ends(self) -> bool:
        """Whether items say that their trajectory ends."""
        return bool(self._ends)

    def check(self, event: WriteEvent) -> None:
        """Refuse items whose fields are not of the kind that is expected.

        Raises:
            SchemaError: an item has more than one value, or the number of a trajectory is no integer.
        """
        self.check_columns(event.offered)

    def check_columns(self, offered: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """As ``check``, for columns by path."""
        for path in self.columns:
            column = offered[path]
            if column.size != len(column):
                raise SchemaError(f"{path}: expected one value per item, found items of shape {list(column.shape[1:])}")
        if self._trajectory is not None and offered[self._trajectory].dtype.kind not in "iub":
            found = offered[self._trajectory].dtype
            raise SchemaError(f"{self._trajectory}: expected integers that tell trajectories apart, found {found}")

    def of_one(self, event: WriteEvent) -> tuple[int, bool]:
        """Trajectory of the one item of a write, and whether the item ends it."""
        offered = event.offered
        ends = False
        for path in self._ends:
            ends = ends or bool(offered[path].item())
        key = 0 if self._trajectory is None else int(offered[self._trajectory].astype(np.int64).item())
        return key if event.into is None else key ^ _mark(event.into), ends

    def of(self, event: WriteEvent) -> tuple[Int64Array | None, BoolArray | None]:
        """As ``of_one``, for the items of a write: int64 ``[offered]`` and bool ``[offered]``, None where no key is."""
        keys, ends = self.of_columns(event.offered)
        if event.into is not None:
            keys = np.zeros(len(event.row_of_each), np.int64) if keys is None else keys
            keys = keys ^ _mark(event.into)
        return keys, ends

    def of_columns(self, offered: Mapping[str, np.ndarray[Any, Any]]) -> tuple[Int64Array | None, BoolArray | None]:
        """As ``of``, for columns by path."""
        ends: BoolArray | None = None
        for path in self._ends:
            here = offered[path].reshape(-1) != 0
            ends = here if ends is None else ends | here
        keys = None if self._trajectory is None else offered[self._trajectory].reshape(-1).astype(np.int64)
        return keys, ends


@functools.cache
def _mark(table: str) -> int:
    """A number of 63 bits for a table: a trajectory in one does not go on in another that has one of the same key."""
    return int.from_bytes(blake3(table.encode()).digest(8), "little") >> 1


class Tracker:
    """Keeps links and starts up to date.

    Args:
        keys: the fields of the items.
        episodes: the links.
        rule: which rows are starts.
        starts: the starts, which the rule keeps.
    """

    def __init__(self, keys: ItemKeys, episodes: Episodes, rule: Rule, starts: RowSet) -> None:
        self._keys = keys
        self._rule = rule
        self.episodes = episodes
        self.starts = starts

    def reserve(self, capacity: int) -> None:
        """Have room for the rows of a table."""
        if capacity > self.episodes.capacity:
            self.episodes.reserve(capacity)
            self.starts.reserve(capacity)

    def wrote(self, event: WriteEvent) -> None:
        """Items were written."""
        self.reserve(event.table.capacity)
        rows = event.row_of_each
        count = len(rows)
        if count == 1 and (row := rows.item()) >= 0:
            key, is_end = self._keys.of_one(event)
            self._wrote_one(row, key, event.first, ends=is_end)
            return
        keys, ends = self._keys.of(event)
        if count <= _FEW and min(few := rows.tolist()) >= 0:
            of_each = [0] * count if keys is None else keys.tolist()
            are_ends = [False] * count if ends is None else ends.tolist()
            for number, row in enumerate(few):
                self._wrote_one(row, of_each[number], event.first + number, ends=are_ends[number])
            return
        self.removed(rows[rows >= 0])
        self._rule.joined_many(self.episodes.join_many(rows, keys, ends, event.first))

    def _wrote_one(self, row: int, key: int, number: int, *, ends: bool) -> None:
        episodes, rule = self.episodes, self._rule
        if episodes.numbers.item(row):
            if episodes.prev.item(row) == row:
                rule.cut_head(row, episodes.cut_head(row))
            else:
                rule.cut(episodes.cut(np.array([row])))
        rule.joined(episodes.join(row, key, ends=ends, number=number))

    def removed(self, rows: Int64Array) -> None:
        """Rows have left, or get other items."""
        rows = rows[self.episodes.numbers.take(rows) > 0]
        if len(rows):
            self._rule.cut(self.episodes.cut(rows))

    def clear(self) -> None:
        """Every row has left."""
        self.episodes.clear()
        self._rule.clear()

    def take_starts(self, saved: torch.Tensor, name: str) -> None:
        """Put the starts of a checkpoint into the set, which is empty.

        Raises:
            CheckpointCorruptError: they are other ones than the links say.
        """
        wanted = self._rule.computed()
        rows = saved.detach().numpy() if saved.dtype is torch.int64 and saved.device.type == "cpu" else None
        if rows is not None and rows.ndim == 1 and len(rows) == np.count_nonzero(wanted):
            found = np.zeros(len(wanted), np.bool_)
            if rows.min(initial=0) >= 0 and rows.max(initial=-1) < len(wanted):
                found[rows] = True
            if np.array_equal(found, wanted):
                self.starts.add(rows.copy())
                return
        raise CheckpointCorruptError(f"{name}: expected the rows at which slices begin, found others")

    def verify(self, rows: Rows, name: str) -> None:
        """Refuse links of other rows than the valid ones.

        Raises:
            CheckpointCorruptError: they do not go with the table.
        """
        numbers = self.episodes.numbers
        known = np.flatnonzero(numbers)
        if len(known) != rows.size or not bool(rows.contains(torch.from_numpy(known)).all()):
            raise CheckpointCorruptError(
                f"{name}: expected the trajectories of {rows.size} valid rows, found those of {len(known)} rows"
            )
        if numbers.max(initial=0) > rows.write_count or self.episodes.capacity > rows.capacity:
            raise CheckpointCorruptError(
                f"{name}: expected items below {rows.write_count} in {rows.capacity} rows, found more"
            )
        self.reserve(rows.capacity)
