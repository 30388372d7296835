"""How far counts are from what chance would make of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

# With fixed seeds a test does not fail by chance from run to run; of all seeds, about one in a million would be beyond.
LIMIT = 5.0


def deviation(counts: np.ndarray[Any, Any], freedom: int) -> float:
    """Standard deviations between the chi-square statistic of counts that should be equal and its mean.

    Counts that are more even than chance makes them give a negative number.
    """
    expected = counts.mean()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - freedom) / math.sqrt(2 * freedom)


def assert_uniform(values: Any, kinds: int) -> None:
    """Integers from 0 to ``kinds - 1`` that should come equally often."""
    counts = np.bincount(np.asarray(values), minlength=kinds)
    assert len(counts) == kinds
    assert abs(deviation(counts, kinds - 1)) < LIMIT


def assert_independent(one: Any, other: Any, kinds: int) -> None:
    """Pairs of integers from 0 to ``kinds - 1``, each equally often, that should not depend on each other."""
    pairs = np.bincount(np.asarray(one) * kinds + np.asarray(other), minlength=kinds * kinds)
    assert len(pairs) == kinds * kinds
    assert abs(deviation(pairs, (kinds - 1) ** 2)) < LIMIT


def assert_chances(counts: Any, chances: Any) -> None:
    """Counts that should be in proportion to some numbers, all of them positive: within 3 sigma of the chi-square."""
    found, wanted = np.asarray(counts, np.float64), np.asarray(chances, np.float64)
    expected = found.sum() * wanted / wanted.sum()
    freedom = len(found) - 1
    statistic = float(((found - expected) ** 2 / expected).sum())
    assert abs(statistic - freedom) < 3 * math.sqrt(2 * freedom)
