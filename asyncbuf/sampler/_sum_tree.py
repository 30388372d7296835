"""A tree of float64 weights: their sum, to draw from, and the least of them.

Each node has sixteen children, and each level is one array, so that a few calls serve a whole batch. The top level
has up to 4,096 nodes and is searched as it is: a million weights take two levels below it.

No error builds up, however many updates there are. No node is ever adjusted by a difference: when a weight below it
changes, it is computed anew from its sixteen children. So every node is a function of the weights as they are now. A
weight goes through at most fifteen additions for each level, and through as many as there are nodes in the top level.
A computed sum of weights that are not negative is therefore off by at most a relative ``(15 levels + nodes) eps``
(Higham, Accuracy and Stability of Numerical Algorithms, section 4.2): 1e-12 for any number of weights.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncbuf.rows import BoolArray, Float64Array, Int64Array

_BITS = 4
_CHILDREN = 1 << _BITS
_TOP = 4096
# How many changes are kept until the nodes above are computed, if nobody asks before.
_MOST_PENDING = 256
# Weights of which the least is known together.
_BLOCK_BITS = 12
_BLOCK = 1 << _BLOCK_BITS


class SumTree:
    """Weights to draw from, each in proportion. Sums are computed when they are needed.

    Args:
        capacity: number of weights; all are 0 at first.
        knows_least: whether the least positive weight is asked for.
    """

    def __init__(self, capacity: int, *, knows_least: bool = False) -> None:
        self._capacity = capacity
        self._knows_least = knows_least
        self.clear()

    def __reduce__(self) -> tuple[Callable[..., SumTree], tuple[int, bool, Float64Array]]:
        return _rebuilt, (self._capacity, self._knows_least, self.weights.copy())

    def clear(self) -> None:
        """Make every weight 0."""
        size = max(1, self._capacity)
        self._levels: list[Float64Array] = []
        while True:
            self._tops = size  # those of the top level that have children
            size = -(-size // _CHILDREN) * _CHILDREN
            self._levels.append(np.zeros(size))
            if size <= _TOP:
                break
            size >>= _BITS
        self._families = [level.reshape(-1, _CHILDREN) for level in self._levels[:-1]]
        self._changed: list[Int64Array] = []
        self._is_top_stale = True
        # The sums of all nodes of the top level before each of them, and at last that of all.
        running = torch.zeros(len(self._levels[-1]) + 1, dtype=torch.float64, device="cpu")
        self._starts: Float64Array = running.numpy()
        self._ends = self._starts[1 : self._tops]
        # Not by numpy, which takes three times as long.
        self._run_up = functools.partial(torch.cumsum, torch.from_numpy(self._levels[-1]), 0, out=running[1:])
        self._memory = _Memory.of(0)
        self._minima = BlockMinima(self._levels[0]) if self._knows_least else None

    @property
    def weights(self) -> Float64Array:
        """The weights: float64 ``[capacity]``, not to be changed."""
        return self._levels[0][: self._capacity]

    def set(self, rows: Int64Array, weights: Float64Array | float) -> None:
        """Set weights; of a row that is named twice, the last.

        Args:
            rows: int64 ``[n]``.
            weights: float64 ``[n]``, or one for all.
        """
        leaves = self._levels[0]
        if self._minima is None:
            leaves[rows] = weights
        else:
            before = leaves.take(rows)
            leaves[rows] = weights
            self._minima.changed(rows, before)
        self._changed.append(rows)
        if len(self._changed) > _MOST_PENDING:
            self._update()

    def _update(self) -> None:
        """Compute the nodes above the weights that have changed."""
        if not self._changed:
            return
        nodes = self._changed[0] if len(self._changed) == 1 else np.concatenate(self._changed)
        self._changed = []
        self._is_top_stale = True
        for families, level in zip(self._families, self._levels[1:], strict=True):
            if len(nodes) * 4 >= len(families):
                level[: len(families)] = _sums(families)
                nodes = np.arange(len(families)) if len(nodes) * 64 >= len(families) else nodes >> _BITS
            else:
                # Where several rows have one node, each computes the same: to find that out takes longer.
                nodes = nodes >> _BITS
                level[nodes] = _sums(families.take(nodes, axis=0))

    @property
    def least(self) -> float:
        """The least weight that is not 0; infinite if there is none. Only with ``knows_least``."""
        assert self._minima is not None
        return self._minima.least

    @property
    def total(self) -> float:
        """The sum of all weights."""
        self._sum_up()
        return float(self._starts[-1])

    def _sum_up(self) -> None:
        """Compute every node whose weights have changed, and the running sums of the top level."""
        if self._changed:
            self._update()
        if self._is_top_stale:
            self._run_up()
            self._is_top_stale = False

    def find(self, values: Float64Array) -> Int64Array:
        """The rows at some points of the running sum of all weights.

        Args:
            values: float64 ``[n]``, at least 0 and below ``total``, which must be positive.

        Returns:
            int64 ``[n]``. Never a row of weight 0.
        """
        self._sum_up()
        memory = self._memory
        if len(memory.rest) != len(values):
            memory = self._memory = _Memory.of(len(values))
        rest, families, running, is_before, child, part = memory[:6]
        # In their order, which is quicker to search, and reads memory from one end to the other. Not by torch, which
        # would search with several threads.
        order = values.argsort()
        values.take(order, out=rest, mode="clip")
        nodes: Int64Array = self._ends.searchsorted(rest, side="right")
        rest -= self._starts.take(nodes, out=part, mode="clip")
        for level in reversed(self._families):
            level.take(nodes, axis=0, out=families, mode="clip")
            memory.run_up()
            np.less_equal(running, rest[:, None], out=is_before)
            is_before[:, -1] = False
            is_before.argmin(axis=1, out=child)
            nodes <<= _BITS
            nodes += child
            child += memory.firsts
            rest -= running.take(child, out=part, mode="clip")
            rest += families.take(child, out=part, mode="clip")
        if not self._levels[0].take(nodes).min(initial=np.inf) > 0:
            for place in np.flatnonzero(self._levels[0].take(nodes) <= 0):
                nodes[place] = self._nearest(int(nodes[place]))
        found = np.empty_like(nodes)
        found[order] = nodes
        return found

    def _nearest(self, row: int) -> int:
        """The next row of positive weight, or else the last one: rounding has put a value just beside its row."""
        full = np.flatnonzero(self._levels[0] > 0)
        return int(full[min(int(full.searchsorted(row)), len(full) - 1)])


class _Memory(NamedTuple):
    """Where values are searched for: new memory for each step would take longer than the step itself."""

    rest: Float64Array
    families: Float64Array
    running: Float64Array
    is_before: BoolArray
    child: Int64Array
    part: Float64Array
    firsts: Int64Array
    run_up: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, count: int) -> _Memory:
        """Memory for so many values."""
        families = np.empty((count, _CHILDREN))
        running = torch.empty(count, _CHILDREN, dtype=torch.float64, device="cpu")
        return cls(
            rest=np.empty(count),
            families=families,
            running=running.numpy(),
            is_before=np.empty((count, _CHILDREN), np.bool_),
            child=np.empty(count, np.int64),
            part=np.empty(count),
            firsts=np.arange(0, count * _CHILDREN, _CHILDREN),
            run_up=functools.partial(torch.cumsum, torch.from_numpy(families), 1, out=running),
        )


class BlockMinima:
    """The least positive of some weights, block by block.

    A block knows a number that none of its weights is below, and whether that is the least of them. It is looked
    through only when it stands in front of all others: a change costs a few calls, and the least weight is seldom one
    that changes.

    Args:
        weights: float64 ``[n]``, which others change.
    """

    def __init__(self, weights: Float64Array) -> None:
        self._weights = weights
        blocks = -(-len(weights) // _BLOCK)
        self._minima: Float64Array = np.full(blocks, np.inf)
        self._is_stale = np.zeros(blocks, np.bool_)

    def changed(self, rows: Int64Array, before: Float64Array) -> None:
        """Weights have changed, which were float64 ``[rows]`` before."""
        blocks, now = rows >> _BLOCK_BITS, self._weights.take(rows)
        known = self._minima.take(blocks)
        if not (np.minimum(before, now) <= known).any():
            return
        was_least = (before <= known) & (before > 0)
        self._is_stale[blocks[was_least]] = True
        is_less = (now < known) & (now > 0)
        np.minimum.at(self._minima, blocks[is_less], now[is_less])

    @property
    def least(self) -> float:
        """The least positive weight; infinite if there is none."""
        minima, is_stale = self._minima, self._is_stale
        while True:
            block = int(minima.argmin())
            if not is_stale[block]:
                return float(minima[block])
            weights = self._weights[block << _BLOCK_BITS : (block + 1) << _BLOCK_BITS]
            minima[block] = weights.min(where=weights > 0, initial=np.inf)
            is_stale[block] = False


def _rebuilt(capacity: int, knows_least: bool, weights: Float64Array) -> SumTree:
    """A copy of a tree: its arrays share memory in ways that a copy of each would lose."""
    tree = SumTree(capacity, knows_least=knows_least)
    tree.set(np.flatnonzero(weights), weights[weights > 0])
    return tree


def _sums(families: Float64Array) -> Float64Array:
    """The sum of the children of each node: float64 ``[n, 16]`` to ``[n]``."""
    sums: Float64Array = np.einsum("ij->i", families)
    return sums
