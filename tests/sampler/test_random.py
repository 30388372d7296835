"""Uniform draws with replacement."""

from __future__ import annotations

import pytest
import torch

from asyncbuf import RandomSampler, Rows
from tests.sampler.chi_square import assert_independent, assert_uniform


def stream(seed: int, size: int, batch_size: int, batches: int) -> torch.Tensor:
    sampler, generator = RandomSampler(), torch.Generator().manual_seed(seed)
    rows = Rows(size, 1000, size)
    return torch.stack([sampler.draw(rows, batch_size, generator).indices for _ in range(batches)])


def test_draw() -> None:
    draw = RandomSampler().draw(Rows(10, 100, 10), 64, torch.Generator().manual_seed(0))
    assert draw.indices.dtype is torch.int64
    assert draw.indices.shape == (64,)
    assert draw.indices.device.type == "cpu"
    assert sorted(set(draw.indices.tolist())) == list(range(10))
    assert (dict(draw.info), draw.epoch, draw.last) == ({}, None, False)


@pytest.mark.parametrize(("size", "batch_size"), [(1, 5), (5, 1), (3, 1000)])
def test_only_valid_rows_and_as_many_as_wanted(size: int, batch_size: int) -> None:
    drawn = stream(1, size, batch_size, 20)
    assert drawn.shape == (20, batch_size)
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) < size


def test_uniform() -> None:
    drawn = stream(2, 50, 100, 500)
    assert_uniform(drawn.reshape(-1), 50)
    assert_uniform(drawn[:, 0], 50)


def test_successive_draws_are_independent() -> None:
    drawn = stream(3, 12, 64, 400)
    assert_independent(drawn[:, :-1].reshape(-1), drawn[:, 1:].reshape(-1), 12)
    assert_independent(drawn[:-1].reshape(-1), drawn[1:].reshape(-1), 12)


def test_stream_depends_on_the_seed_and_on_nothing_else() -> None:
    expected = stream(4, 1000, 8, 10)
    torch.manual_seed(0)
    assert torch.equal(stream(4, 1000, 8, 10), expected)
    assert not torch.equal(stream(5, 1000, 8, 10), expected)


def test_stream_goes_on_from_the_state_of_the_generator() -> None:
    sampler, generator, rows = RandomSampler(), torch.Generator().manual_seed(6), Rows(1000, 1000, 1000)
    sampler.draw(rows, 8, generator)
    state = generator.get_state()
    expected = sampler.draw(rows, 8, generator).indices
    other = torch.Generator()
    other.set_state(state)
    assert torch.equal(RandomSampler().draw(rows, 8, other).indices, expected)


def test_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    stream(7, 10, 10, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_follow_the_rows_of_the_moment() -> None:
    sampler, generator = RandomSampler(), torch.Generator().manual_seed(8)
    assert set(sampler.draw(Rows(2, 100, 2), 50, generator).indices.tolist()) == {0, 1}
    assert int(sampler.draw(Rows(100, 100, 100), 500, generator).indices.max()) > 90
    sampler.clear()
    assert set(sampler.draw(Rows(1, 100, 101), 50, generator).indices.tolist()) == {0}


def test_no_passes_and_no_limit() -> None:
    sampler = RandomSampler()
    assert sampler.epoch is None
    assert not sampler.between_epochs
    sampler.check(capacity=1, batch_size=1000)
