"""Sets of whole numbers as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

Int64Array = np.ndarray[Any, np.dtype[np.int64]]


def are_distinct(values: Int64Array, limit: int) -> bool:
    """Whether values differ from each other and are from 0 to ``limit - 1``."""
    if not len(values):
        return True
    least, most = int(values.min()), int(values.max())
    if least < 0 or most >= limit:
        return False
    if most > 64 * len(values):
        return bool((np.diff(np.sort(values)) > 0).all())
    seen = np.zeros(most + 1, np.bool_)  # quicker than sorting, where it is not much larger than the values
    seen[values] = True
    return int(np.count_nonzero(seen)) == len(values)


def first_of_each(values: Int64Array) -> Int64Array:
    """The values without repetitions, each where it came first."""
    if len(values) < 1000:
        return np.array(list(dict.fromkeys(values.tolist())), np.int64)
    if (np.diff(values) > 0).all():
        return values
    _, firsts = np.unique(values, return_index=True)
    return values[np.sort(firsts)]
