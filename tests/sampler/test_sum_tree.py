"""Sums and minima of many weights: kept up to date, exact to rounding, and found again."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncbuf.sampler import _sum_tree
from asyncbuf.sampler._sum_tree import SumTree

if TYPE_CHECKING:
    from asyncbuf.rows import Float64Array

CAPACITIES = [1, 2, 15, 16, 17, 100, 4096, 4097, 5000, 70_000]


def weighed(capacity: int, seed: int = 0, *, zeros: float = 0.3) -> tuple[SumTree, Float64Array]:
    rng = np.random.default_rng(seed)
    weights = rng.random(capacity) * np.power(10.0, rng.integers(-6, 6, capacity))
    weights[rng.random(capacity) < zeros] = 0.0
    weights[-1] = 1.0
    tree = SumTree(capacity)
    tree.set(np.arange(capacity), weights)
    return tree, weights


def close(found: float, weights: Any) -> bool:
    exact = math.fsum(weights)
    return abs(found - exact) <= 1e-12 * exact


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_sum(capacity: int) -> None:
    tree, weights = weighed(capacity)
    assert close(tree.total, weights)
    tree.clear()
    assert tree.total == 0.0
    assert not tree.weights.any()


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_find(capacity: int) -> None:
    tree, weights = weighed(capacity)
    places = np.random.default_rng(1).random(2000)
    found = tree.find(places * tree.total)
    assert found.dtype == np.int64
    assert (weights[found] > 0).all()
    running = np.cumsum(weights)
    before = running - weights
    slack = 1e-9 * running[-1]
    assert (before[found] <= places * running[-1] + slack).all()
    assert (running[found] >= places * running[-1] - slack).all()


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_the_ends_of_the_line(capacity: int) -> None:
    tree, weights = weighed(capacity)
    rows = np.flatnonzero(weights)
    ends = np.array([0.0, np.nextafter(tree.total, 0), tree.total])
    assert tree.find(ends).tolist() == [rows[0], rows[-1], rows[-1]]


def test_each_border_is_found() -> None:
    weights = (np.arange(5000) % 3).astype(np.float64)
    tree = SumTree(5000)
    tree.set(np.arange(5000), weights)
    borders = np.cumsum(weights) - weights
    rows = np.flatnonzero(weights)
    assert tree.find(borders[rows]).tolist() == rows.tolist()
    last = tree.find(borders[rows] + weights[rows] - 0.25)
    assert last.tolist() == rows.tolist()


def test_found_rows_are_in_the_order_of_the_values() -> None:
    tree, _ = weighed(70_000)
    values = np.random.default_rng(2).random(500) * tree.total
    together = tree.find(values)
    assert together.tolist() == [int(tree.find(values[i : i + 1])[0]) for i in range(len(values))]


@pytest.mark.parametrize("together", [1, 3, 100, 3000])
def test_a_tree_depends_on_its_weights_and_not_on_how_they_came(together: int) -> None:
    capacity = 20_000
    rng = np.random.default_rng(3)
    tree, weights = SumTree(capacity, knows_least=True), np.zeros(capacity)
    for _ in range(40):
        rows, values = rng.integers(0, capacity, together), rng.random(together)
        tree.set(rows, values)
        weights[rows] = values
        if rng.random() < 0.5:
            assert tree.least == weights[weights > 0].min()
            assert tree.total > 0
    fresh = SumTree(capacity, knows_least=True)
    fresh.set(np.arange(capacity), weights)
    assert (tree.total, tree.least) == (fresh.total, fresh.least)
    for one, other in zip(tree._levels, fresh._levels, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(tree._starts, fresh._starts)


def test_a_value_beside_its_row_goes_to_the_next_row_with_weight() -> None:
    tree = SumTree(100)
    tree.set(np.array([40, 60]), 1.0)
    assert [tree._nearest(row) for row in (0, 39, 40, 41, 60, 61, 99)] == [40, 40, 40, 60, 60, 60, 60]


def test_changes_are_not_kept_for_ever() -> None:
    tree = SumTree(10_000)
    for row in range(2000):
        tree.set(np.array([row]), 1.0)
    assert len(tree._changed) <= _sum_tree._MOST_PENDING
    assert tree.total == 2000.0


@pytest.mark.parametrize(
    "updates", [200_000, pytest.param(10_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_no_error_builds_up(updates: int) -> None:
    capacity, together = 100_000, 1000
    rng = np.random.default_rng(4)
    tree, weights = SumTree(capacity), np.zeros(capacity)
    for _ in range(updates // together):
        rows = rng.integers(0, capacity, together)
        values = rng.random(together) * np.power(10.0, rng.integers(-8, 8, together))
        values[rng.random(together) < 0.1] = 0.0
        tree.set(rows, values)
        weights[rows] = values
        assert (weights[tree.find(rng.random(8) * tree.total)] > 0).all()
    assert close(tree.total, weights)
    tree.set(np.arange(capacity), 0.0)
    tree.set(np.array([77]), 1e-8)
    assert tree.total == 1e-8  # nothing is left of the large weights
    assert tree.find(np.array([0.0, 0.99e-8])).tolist() == [77, 77]


@pytest.mark.parametrize("capacity", [1, 5, 1024, 1025, 5000])
@pytest.mark.parametrize("kinds", [2, 1_000_000])
def test_the_least_weight_is_known(capacity: int, kinds: int) -> None:
    rng = np.random.default_rng(capacity)
    tree, weights = SumTree(capacity, knows_least=True), np.zeros(capacity)
    assert tree.least == np.inf
    for step in range(400):
        count = int(rng.choice([1, 2, capacity // 3 + 1]))
        rows, values = rng.integers(0, capacity, count), rng.integers(0, kinds, count) / kinds
        if step % 3 == 0:
            lowest = np.flatnonzero(weights == weights[weights > 0].min(initial=np.inf))
            if len(lowest):
                rows[0], values[0] = lowest[0], rng.random() * rng.integers(0, 2)
        tree.set(rows, values)
        weights[rows] = values
        if rng.random() < 0.7:
            assert tree.least == weights[weights > 0].min(initial=np.inf)
    tree.clear()
    assert tree.least == np.inf
