"""Values of rows, and the least of them in time that hardly depends on how many there are.

A tree of rows: each node has 128 children and names the least row below it, so that a million rows take two levels.
The order is total, whatever values are equal: of two rows with one value, the one with the newer item is less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from asyncbuf.rows import Float64Array, Int64Array

_CHILDREN = 128
_EACH_CHILD = np.arange(_CHILDREN)
_NO_ITEM = -1


class LeastRows:
    """Rows with a value and an item number each. Nodes are computed when they are needed.

    Args:
        capacity: number of rows, without an item at first.

    Attributes:
        capacity: number of rows.
        values: of each row, infinite without an item: float64 ``[capacity]``, not to be changed.
        numbers: item number of each row, -1 without an item: int64 ``[capacity]``, not to be changed.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        size = -(-capacity // _CHILDREN) * _CHILDREN
        # The last row stands for all that there are not. An empty row is greater than every other.
        self._values = np.full(size + 1, np.inf)
        self._numbers = np.full(size + 1, _NO_ITEM)
        self._levels: list[Int64Array] = []
        while size > _CHILDREN or not self._levels:
            size //= _CHILDREN
            size = size if size <= _CHILDREN else -(-size // _CHILDREN) * _CHILDREN
            self._levels.append(np.full(size, len(self._values) - 1))
        self._changed: list[Int64Array] = []
        self._pending = 0
        self._is_stale = True  # every node is to be computed
        self._least: tuple[int, float] | None = None

    @property
    def values(self) -> Float64Array:
        return self._values[: self.capacity]

    @property
    def numbers(self) -> Int64Array:
        return self._numbers[: self.capacity]

    def set(self, rows: Int64Array, values: Float64Array | float, numbers: Int64Array | int) -> None:
        """Put items into rows, each of which is given once; an infinite value and -1 for no item."""
        self._values[rows] = values
        self._numbers[rows] = numbers
        self._least = None
        if self._is_stale:
            return
        self._changed.append(rows)
        self._pending += len(rows)
        if self._pending * 8 > self.capacity:  # to compute all is then as quick, and needs no list
            self._is_stale, self._changed, self._pending = True, [], 0

    def _update(self) -> None:
        changed, is_stale = self._changed, self._is_stale
        if not changed and not is_stale:
            return
        self._is_stale, self._changed, self._pending = False, [], 0
        if is_stale:
            values, numbers = (each[:-1].reshape(-1, _CHILDREN) for each in (self._values, self._numbers))
            nodes = np.arange(len(values))
            self._levels[0][nodes] = nodes * _CHILDREN + _least_places(values, numbers)
        else:
            nodes = self._computed(0, changed[0] if len(changed) == 1 else np.concatenate(changed))
        for level in range(1, len(self._levels)):
            nodes = self._computed(level, nodes)

    def _computed(self, level: int, below: Int64Array) -> Int64Array:
        """Compute the nodes of a level above some rows or nodes that have changed: which."""
        nodes = below // _CHILDREN
        if len(nodes) > 1:
            nodes = np.unique(nodes)
        rows = nodes[:, None] * _CHILDREN + _EACH_CHILD
        if level:
            rows = self._levels[level - 1][rows]
        least = _least_places(self._values[rows], self._numbers[rows])
        self._levels[level][nodes] = rows[0, least] if len(nodes) == 1 else rows[np.arange(len(nodes)), least]
        return nodes

    @property
    def least(self) -> tuple[int, float]:
        """The least row, and its value; there must be one with an item."""
        if self._least is None:
            self._update()
            tops = self._levels[-1]
            row = int(tops[_least_places(self._values[tops][None], self._numbers[tops][None])[0]])
            self._least = row, float(self._values[row])
        return self._least

    def some_least(self, count: int) -> Int64Array:
        """The least rows, at most as many as have items, in no order: int64 ``[count]``."""
        self._update()
        nodes = np.arange(len(self._levels[-1]))
        below = [len(self._values) - 1, *map(len, self._levels)]
        for level, children in zip(reversed(self._levels), reversed(below[:-1]), strict=True):
            nodes = nodes[self._smallest(level[nodes], count)]
            nodes = (nodes[:, None] * _CHILDREN + _EACH_CHILD).ravel()
            nodes = nodes[nodes < children]
        return nodes[self._smallest(nodes, count)]

    def _smallest(self, rows: Int64Array, count: int) -> Int64Array:
        """Where the least of some rows are: int64 ``[count]``, or fewer if there are fewer rows."""
        if len(rows) <= count:
            return np.arange(len(rows))
        values = self._values[rows]
        limit = np.partition(values, count - 1)[count - 1]
        below, ties = np.flatnonzero(values < limit), np.flatnonzero(values == limit)
        missing = count - len(below)
        if len(ties) > missing:
            ties = ties[np.argpartition(-self._numbers[rows[ties]], missing - 1)[:missing]]
        return np.concatenate([below, ties])


def _least_places(values: Float64Array, numbers: Int64Array) -> Int64Array:
    """Where the least of each line is: int64 ``[n, rows]`` to ``[n]``."""
    least: Int64Array = values.argmin(axis=1)
    is_least = values == np.take_along_axis(values, least[:, None], 1)
    if np.count_nonzero(is_least) > len(values):  # of equal ones, the newest
        least = np.where(is_least, numbers, _NO_ITEM - 1).argmax(axis=1)
    return least
