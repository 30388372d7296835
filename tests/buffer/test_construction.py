"""A buffer is made of parts that fit, or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from asyncbuf import ListStorage, RandomSampler, ReplayBuffer, SamplerWithoutReplacement, TensorStorage
from tests.buffer.helpers import make
from tests.helpers import seeded


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"batch_size": 0}, ValueError, r"batch_size: expected at least 1, found 0"),
        ({"batch_size": -3}, ValueError, r"batch_size: expected at least 1, found -3"),
        ({"batch_size": True}, TypeError, r"batch_size: expected an int, found True of type bool"),
        ({"batch_size": 4.0}, TypeError, r"batch_size: expected an int, found 4.0 of type float"),
        ({"batch_size": "4"}, TypeError, r"batch_size: expected an int, found '4' of type str"),
        ({"prefetch": -1}, ValueError, r"prefetch: expected at least 0, found -1"),
        ({"prefetch": False}, TypeError, r"prefetch: expected an int, found False"),
        ({"prefetch": None}, TypeError, r"prefetch: expected an int, found None"),
        ({"prefetch": 2, "batch_size": None}, ValueError, r"batch_size: expected one, because prefetch is 2"),
        ({"workers": 0}, ValueError, r"workers: expected at least 1, found 0"),
        ({"workers": 1.5}, TypeError, r"workers: expected an int, found 1.5"),
        ({"min_size": 0}, ValueError, r"min_size: expected at least 1, found 0"),
        ({"min_size": 101}, ValueError, r"min_size: expected at most the capacity 100, found 101"),
        ({"sampler": RandomSampler}, TypeError, r"sampler: expected a Sampler, found the class RandomSampler"),
        ({"sampler": "random"}, TypeError, r"sampler: expected a Sampler, found 'random'"),
        ({"writer": 1}, TypeError, r"writer: expected a Writer, found 1"),
        ({"generator": 7}, TypeError, r"generator: expected a torch.Generator, found 7"),
        ({"transform": 3}, TypeError, r"transform: expected a callable, found 3"),
        ({"transform": [abs, None]}, TypeError, r"transform 1: expected a callable, found None"),
        ({"transform": "abs"}, TypeError, r"transform: expected a callable, found"),
        ({"collate_fn": 3}, TypeError, r"collate_fn: expected a callable, found 3"),
        (
            {"sampler": SamplerWithoutReplacement(drop_last=True), "batch_size": 101},
            ValueError,
            r"expected at most the capacity 100.*found 101",
        ),
    ],
)
def test_bad_arguments(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make(**options)


@pytest.mark.parametrize("storage", [None, 100, TensorStorage, {}])
def test_bad_storage(storage: Any) -> None:
    with pytest.raises(TypeError, match="storage: expected a Storage, found"):
        ReplayBuffer(storage)


@pytest.mark.parametrize("storage", [TensorStorage, ListStorage])
@pytest.mark.parametrize(
    ("capacity", "kind"), [(0, ValueError), (-1, ValueError), (True, TypeError), (1.0, TypeError), (None, TypeError)]
)
def test_bad_capacity(storage: Any, capacity: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"capacity: expected .*, found"):
        storage(capacity)


def test_what_it_says_of_itself() -> None:
    buffer = make(prefetch=2, workers=3)
    assert repr(buffer) == "<ReplayBuffer new 0/100 items, batch_size=4, prefetch=2, workers=3, RandomSampler>"
    assert (len(buffer), buffer.capacity, buffer.write_count, buffer.batch_size) == (0, 100, 0, 4)
    generator = seeded(1)
    assert make(generator=generator).generator is generator


def test_each_buffer_has_a_seed_of_its_own() -> None:
    seeds = {make().generator.initial_seed() for _ in range(10)}
    assert len(seeds) == 10


class HalfSampler(RandomSampler):
    def state_dict(self) -> dict[str, Any]:
        return {"half": 1}


def test_a_sampler_whose_state_could_not_be_restored_is_refused() -> None:
    with pytest.raises(TypeError, match="HalfSampler: expected load_state_dict beside its state_dict, found none"):
        ReplayBuffer(TensorStorage(10), sampler=HalfSampler())
