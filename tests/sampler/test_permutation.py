"""Random orders, drawn or computed."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncbuf.sampler._permutation import KINDS, OLD_KIND, Permutation
from tests.sampler.chi_square import assert_independent, assert_uniform

LONG = 2**16 + 2**13 + 77


@functools.cache
def whole(length: int, seed: int) -> torch.Tensor:
    return Permutation(length, seed)[0:length]


def bins(values: torch.Tensor, length: int, count: int) -> torch.Tensor:
    """Which of ``count`` parts of the range each value lies in; the parts are equally long but for the rounding."""
    return values * count // length


@pytest.mark.parametrize(
    "length",
    [1, 2, 3, 100, 2**16 - 1, 2**16, 2**16 + 1, 2**16 + 2, LONG, 2**17 - 1, 2**17, 2**17 + 1, 2**18 + 1, 10**6],
)
def test_every_index_comes_once(length: int) -> None:
    order = whole(length, 7)
    assert order.dtype is torch.int64
    assert order.shape == (length,)
    # Counted and not sorted: with indices out of range the counts would be more than there are indices.
    assert torch.equal(torch.bincount(order), torch.ones(length, dtype=torch.int64))


@pytest.mark.parametrize("length", [1000, LONG])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_part_is_that_of_the_whole(length: int, data: st.DataObject) -> None:
    order = Permutation(length, 3)
    for _ in range(3):
        start = data.draw(st.one_of(st.integers(0, length - 1), st.sampled_from(range(0, length, 2**13))))
        stop = data.draw(st.integers(start + 1, min(start + 20_000, length + 5)))
        assert torch.equal(order[start:stop], whole(length, 3)[start:stop])


@pytest.mark.parametrize("length", [1000, LONG])
def test_part_without_positions(length: int) -> None:
    assert Permutation(length, 3)[500:500].shape == (0,)


@pytest.mark.parametrize("length", [1000, LONG])
def test_parts_own_their_memory(length: int) -> None:
    order = Permutation(length, 3)
    part = order[10:20]
    # A batch of ten rows that is kept or pickled must not bring a whole pass along.
    assert part.untyped_storage().nbytes() == 80
    part.fill_(-1)
    assert torch.equal(order[0:30], whole(length, 3)[0:30])


@pytest.mark.parametrize("length", [1000, LONG])
def test_order_depends_on_the_seed_alone(length: int) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    numpy_state = np.random.get_state(legacy=False)
    order = Permutation(length, 11)[0:length]
    assert torch.equal(torch.get_rng_state(), state)
    assert repr(np.random.get_state(legacy=False)) == repr(numpy_state)
    torch.manual_seed(6)
    assert torch.equal(Permutation(length, 11)[0:length], order)


@pytest.mark.parametrize("length", [1000, LONG])
@pytest.mark.parametrize(
    "seeds",
    [(0, 1), (1, 2), (2**31, 2**32 - 1), (0, 2**32), (5, 5 + 2**62)],
    ids=lambda seeds: f"{seeds[0]}-{seeds[1]}",
)
def test_every_bit_of_the_seed_counts(length: int, seeds: tuple[int, int]) -> None:
    one, other = whole(length, seeds[0]), whole(length, seeds[1])
    # Of two random orders, about one position holds the same index in both.
    assert int((one == other).sum()) < 10


@pytest.mark.parametrize("length", [2**16, LONG, 2**17 + 1])
@pytest.mark.parametrize("seed", range(3))
def test_positions_and_indices_are_independent(length: int, seed: int) -> None:
    order, positions = whole(length, seed), torch.arange(length)
    assert_independent(bins(positions, length, 16), bins(order, length, 16), 16)
    # The low bits, which a network of two unequal halves treats in another way than the high ones.
    assert_independent(positions % 16, order % 16, 16)
    assert_independent(bins(positions, length, 16), order % 16, 16)


@pytest.mark.parametrize("seed", range(3))
def test_successive_indices_are_independent(seed: int) -> None:
    order = whole(LONG, seed)
    for step in (1, 2, 2**8):
        one, other = order[:-step], order[step:]
        assert_independent(bins(one, LONG, 16), bins(other, LONG, 16), 16)
        assert_uniform(bins((other - one) % LONG, LONG, 64), 64)


@pytest.mark.parametrize("seed", range(3))
def test_mean_displacement(seed: int) -> None:
    order = whole(LONG, seed)
    displacement = (order - torch.arange(LONG)).abs().double() / LONG
    # Of two independent uniform numbers, the distance has mean 1/3 and variance 1/18.
    assert abs(float(displacement.mean()) - 1 / 3) < 5 * (1 / 18 / LONG) ** 0.5
    assert abs(float(displacement.var()) - 1 / 18) < 0.001


def test_number_of_fixed_points() -> None:
    # Poisson distributed with mean 1 for each order.
    total = sum(int((Permutation(LONG, seed)[0:LONG] == torch.arange(LONG)).sum()) for seed in range(20))
    assert 5 <= total <= 45


def test_orders_of_different_seeds_are_independent() -> None:
    assert_independent(bins(whole(LONG, 0), LONG, 16), bins(whole(LONG, 1), LONG, 16), 16)


@pytest.mark.parametrize("position", [0, LONG - 1])
def test_index_at_a_position_is_uniform_over_seeds(position: int) -> None:
    drawn = torch.cat([Permutation(LONG, seed)[position : position + 1] for seed in range(320)])
    assert_uniform(bins(drawn, LONG, 16), 16)


def test_an_order_of_an_earlier_version_is_what_it_was() -> None:
    order = Permutation(100_000, 7, OLD_KIND)[0:100_000]
    assert order[:8].tolist() == [64257, 74467, 37264, 58285, 68376, 96713, 36178, 54356]
    assert int((order * torch.arange(100_000)).sum()) == 249783758809058
    later = Permutation(10_000_000, 7, OLD_KIND)[5_000_000:5_000_004]
    assert later.tolist() == [6631693, 6566257, 3096627, 5592015]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [2**16 + 1, LONG, 2**17, 10**9 + 7, 2**40 + 1, 2**48 - 1])
def test_positions_are_found_again(length: int, kind: int) -> None:
    order = Permutation(length, 5, kind)
    for start in (0, length // 3, length - 100):
        found = order[start : start + 100]
        assert 0 <= int(found.min()) <= int(found.max()) < length
        assert order.positions_of(found.numpy()).tolist() == [*range(start, start + 100)]
