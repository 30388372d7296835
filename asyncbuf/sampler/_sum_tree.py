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

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from asyncbuf.rows import Float64Array, Int64Array

_BITS = 4
_CHILDREN = 1 << _BITS
_TOP = 4096
# How many changes are kept until the nodes above are computed, if nobody asks before.
_MOST_PENDING = 256
# Weights of which the least is known together.
_BLOCK_BITS = 10
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
        self._changed: list[Int64Array] = []
        self._is_top_stale = True
        self._running = torch.zeros(len(self._levels[-1]), dtype=torch.float64, device="cpu")
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
            self._minima.changed(rows, before, leaves.take(rows))
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
        for below, level in zip(self._levels, self._levels[1:], strict=False):
            families = below.reshape(-1, _CHILDREN)
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
        return float(self._sums()[-1])

    def _sums(self) -> torch.Tensor:
        """Running sums of the top level: float64 ``[nodes]``."""
        self._update()
        if self._is_top_stale:
            torch.cumsum(torch.from_numpy(self._levels[-1]), 0, out=self._running)
            self._is_top_stale = False
        return self._running

    def find(self, values: Float64Array) -> Int64Array:
        """The rows at some points of the running sum of all weights.

        Args:
            values: float64 ``[n]``, at least 0 and below ``total``, which must be positive.

        Returns:
            int64 ``[n]``. Never a row of weight 0.
        """
        sums, top = self._sums().numpy(), self._levels[-1]
        # In their order, which is quicker to search, and reads memory from one end to the other. Not by torch, which
        # would search with several threads.
        order = values.argsort()
        values = values.take(order)
        nodes: Int64Array = sums[: self._tops - 1].searchsorted(values, side="right")
        rest = values - (sums.take(nodes) - top.take(nodes))
        firsts = np.arange(0, len(values) * _CHILDREN, _CHILDREN)
        for level in reversed(self._levels[:-1]):
            families = level.reshape(-1, _CHILDREN).take(nodes, axis=0)
            running = torch.cumsum(torch.from_numpy(families), 1).numpy()
            before = running - families
            running[:, -1] = np.inf
            child = (running <= rest[:, None]).argmin(axis=1)
            nodes <<= _BITS
            nodes += child
            child += firsts
            rest -= before.take(child)
        weights = self._levels[0].take(nodes)
        if not weights.min(initial=np.inf) > 0:
            for place in np.flatnonzero(weights <= 0):
                nodes[place] = self._nearest(int(nodes[place]))
        found = np.empty_like(nodes)
        found[order] = nodes
        return found

    def _nearest(self, row: int) -> int:
        """The next row of positive weight, or else the last one: rounding has put a value just beside its row."""
        full = np.flatnonzero(self._levels[0] > 0)
        return int(full[min(int(full.searchsorted(row)), len(full) - 1)])


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

    def changed(self, rows: Int64Array, before: Float64Array, after: Float64Array) -> None:
        """Weights have changed: float64 ``[rows]`` each; of a row that is named twice, the last."""
        blocks = rows >> _BLOCK_BITS
        known = self._minima.take(blocks)
        was_least = (before <= known) & (before > 0)
        if was_least.any():
            self._is_stale[blocks[was_least]] = True
        is_less = (after < known) & (after > 0)
        if is_less.any():
            np.minimum.at(self._minima, blocks[is_less], after[is_less])

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


def _sums(families: Float64Array) -> Float64Array:
    """The sum of the children of each node: float64 ``[n, 16]`` to ``[n]``."""
    sums: Float64Array = torch.sum(torch.from_numpy(families), 1).numpy()
    return sums
