"""One value for each row, where rows are named several times."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from asyncbuf.rows import Float64Array, Int64Array

REDUCTIONS = frozenset({"max", "min", "mean", "sum", "last"})


def reduced(rows: Int64Array, values: Float64Array, reduction: str) -> tuple[Int64Array, Float64Array]:
    """Rows and values to be assigned in this order, so that each row gets the value that the reduction asks for.

    Args:
        rows: int64 ``[n]``.
        values: float64 ``[n]``.
        reduction: one of ``REDUCTIONS``.

    Returns:
        Both. A row may still be named several times: the last value counts.
    """
    if reduction == "last":
        return rows, values
    if reduction in ("max", "min"):
        order = values.argsort(kind="stable")
        order = order if reduction == "max" else order[::-1]
        return rows[order], values[order]
    different, which = np.unique(rows, return_inverse=True)
    sums = np.zeros(len(different))
    np.add.at(sums, which, values)
    return different, sums / np.bincount(which) if reduction == "mean" else sums
