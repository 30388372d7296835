"""Whole numbers for each batch that follow fixed shares exactly, over however many batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncbuf._runtime.arguments import shown

if TYPE_CHECKING:
    from asyncbuf.rows import Float64Array, Int64Array

# Less than that is the rounding of floats, and not a part of a row.
_ROUNDING = 1e-9


def checked_shares(shares: Any, name: str, *, example: str) -> dict[Any, float]:
    """Shares by key, which are 1 together.

    Raises:
        TypeError, ValueError: they are something else.
    """
    if not isinstance(shares, Mapping) or not shares:
        raise TypeError(f"{name}: expected a dict with a share for each, such as {example}; found {shown(shares)}")
    for key, share in shares.items():
        if isinstance(share, bool) or not isinstance(share, int | float | np.floating):
            raise TypeError(f"{name}: expected a number as the share of {shown(key)}, found {shown(share)}")
        if not (math.isfinite(share) and share >= 0):
            raise ValueError(f"{name}: expected a share of at least 0 for {shown(key)}, found {share}")
    total = math.fsum(shares.values())
    if abs(total - 1.0) > 1e-6:
        raise ValueError(f"{name}: expected shares whose sum is 1, such as {example}; found a sum of {total:.6g}")
    return {key: float(share) / total for key, share in shares.items()}


def apportioned(owed: Float64Array, shares: Float64Array, count: int) -> Int64Array:
    """How many of so many rows each of several kinds gets, so that none is ever a whole row ahead or behind.

    ``owed`` is what the kinds should have got by the end of this batch, less what they got in those before: what was
    left over then, and ``count * shares``. What is owed in full is given. What remains of the batch goes to those that
    are owed a part of a row, the first to those that will be owed all of it soonest. As with tasks that must run at
    fixed rates on one processor, where the earliest deadline first keeps them all (Liu and Layland, 1973), each kind
    then has got its share of all rows so far, rounded up or down, after every batch. Giving the rest to the largest
    remainders would not do: a kind with a small share may be ahead for many batches.

    Args:
        owed: float64 ``[kinds]``, whose sum is ``count``.
        shares: float64 ``[kinds]``, at least 0, of which one is not 0.
        count: number of rows.

    Returns:
        int64 ``[kinds]``, at least 0, whose sum is ``count``.
    """
    counts: Int64Array = np.maximum(np.floor(owed + _ROUNDING), 0.0).astype(np.int64)
    left = count - int(counts.sum())
    while left < 0:  # only after shares have changed: some are ahead that get nothing now
        most = np.flatnonzero(counts > 0)
        most = most[(owed - counts)[most].argsort(kind="stable")][:-left]
        counts[most] -= 1
        left += len(most)
    if left:
        rest = owed - counts
        able = np.flatnonzero(shares > 0)
        due = np.round((1.0 - rest[able]) / shares[able], 6)  # in rows: what is equal but for rounding is equal
        soonest = able[np.lexsort((due, rest[able] <= _ROUNDING))]
        while left:
            counts[soonest[:left]] += 1
            left -= len(soonest[:left])
    return counts
