"""A wrong argument of the constructor: the error says what to write instead."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from asyncbuf import (
    ListStorage,
    MinSize,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    TensorStorage,
)
from asyncbuf._config import BufferConfig

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"generator": 42}, TypeError, "found 42: write torch.Generator().manual_seed(42)"),
    ({"generator": np.random.default_rng()}, TypeError, "Generator: write torch.Generator().manual_seed(seed)"),
    ({"generator": np.random.default_rng()}, TypeError, "expected a torch.Generator, found numpy.random"),
    ({"generator": True}, TypeError, "found True: write torch.Generator().manual_seed(seed)"),
    ({"device": "gpu"}, ValueError, '"cuda:1" or "mps"; found \'gpu\': write "cuda"'),
    ({"device": "GPU:1"}, ValueError, "found 'GPU:1': write \"cuda:1\""),
    ({"device": "CPU"}, ValueError, "found 'CPU': write \"cpu\""),
    ({"device": "abacus"}, ValueError, "found 'abacus'"),
    ({"device": True}, TypeError, "expected the name of a device or a torch.device, found True"),
    ({"device": torch.nn.Linear(1, 1)}, TypeError, "found Linear"),
    ({"prefetch": True}, TypeError, "prefetch: expected an int, found True of type bool; for example prefetch=2"),
    ({"batch_size": 32.0}, TypeError, "batch_size: expected an int, found 32.0 of type float: write batch_size=32"),
    ({"batch_size": 32.5}, TypeError, "found 32.5 of type float; for example batch_size=256"),
    ({"batch_size": float("nan")}, TypeError, "found nan of type float"),
    ({"batch_size": np.int64(32)}, TypeError, "found int64 of type int64: write batch_size=int(...)"),
    ({"batch_size": torch.tensor(32)}, TypeError, "found int64 [] of type Tensor: write batch_size=int(...)"),
    ({"batch_size": "x" * 1000}, TypeError, f"found '{'x' * 60}...' of type str"),
    ({"workers": int}, TypeError, "found the class int of type type"),
    (
        {"sampler": SamplerWithoutReplacement},
        TypeError,
        "the class SamplerWithoutReplacement: write SamplerWithoutReplacement()",
    ),
    ({"sampler": TensorStorage}, TypeError, "found the class TensorStorage; for example RandomSampler()"),
    ({"sampler": "random"}, TypeError, "found 'random'; for example RandomSampler()"),
    ({"writer": RoundRobinWriter}, TypeError, "the class RoundRobinWriter: write RoundRobinWriter()"),
    ({"pin_memory": "yes"}, TypeError, "pin_memory: expected a bool, found 'yes'"),
    ({"transform": {"obs": abs}}, TypeError, "write a function that gets the whole data"),
    ({"transform": iter([abs])}, TypeError, "write a list of functions"),
    ({"transform": {abs}}, TypeError, "write a list of functions"),
    ({"transform": [abs, 3]}, TypeError, "transform 1: expected a callable, found 3"),
    ({"transform": "normalize"}, TypeError, "transform: expected a callable, found 'normalize'"),
    ({"transform": torch.ones(1000, 1000)}, TypeError, "found float32 [1000, 1000]"),
    ({"collate_fn": torch.ones(1000)}, TypeError, "collate_fn: expected a callable, found float32 [1000]"),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_error_says_what_to_write(case: int) -> None:
    options, kind, message = WRONG[case]
    with pytest.raises(kind) as caught:
        ReplayBuffer(TensorStorage(100), **options)
    assert message in str(caught.value)
    assert str(caught.value).startswith(next(iter(options)))


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        (1000, "found 1000; for example TensorStorage(1000)"),
        (True, "found True; for example TensorStorage(capacity)"),
        (TensorStorage, "found the class TensorStorage: write TensorStorage(capacity)"),
        (ListStorage, "found the class ListStorage: write ListStorage(capacity)"),
        ({"obs": torch.ones(3)}, "found {obs: float32 [3]}; for example TensorStorage(capacity)"),
    ],
)
def test_error_of_a_storage(storage: Any, message: str) -> None:
    with pytest.raises(TypeError) as caught:
        ReplayBuffer(storage)
    assert str(caught.value) == f"storage: expected a Storage, {message}"


def test_async_transform_that_was_called() -> None:
    async def transform(data: Any) -> Any:
        return data

    called: Any = transform({})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "coroutine was never awaited" would only confuse
        with pytest.raises(TypeError, match="without calling it"):
            ReplayBuffer(TensorStorage(100), transform=called)


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_names_of_devices(device: Any) -> None:
    expected = None if device is None else torch.device("cpu")
    assert BufferConfig.checked(TensorStorage(10), device=device).device == expected


def test_number_of_a_device() -> None:
    if torch.accelerator.is_available():
        assert ReplayBuffer(TensorStorage(10), device=0)
    else:
        with pytest.raises(ValueError, match="device: expected one"):
            ReplayBuffer(TensorStorage(10), device=0)


def test_defaults() -> None:
    config = BufferConfig.checked(TensorStorage(10))
    parts = (config.sampler, config.writer, config.limiter)
    assert [*map(type, parts)] == [RandomSampler, RoundRobinWriter, MinSize]
    assert (config.batch_size, config.prefetch, config.workers, config.transforms) == (None, 0, 1, ())
    assert config.collate is None
    storage = ListStorage(10)
    assert BufferConfig.checked(storage).collate == storage.collate
    assert BufferConfig.checked(storage, collate_fn=list).collate is list


def test_arguments_make_the_same_buffer_again() -> None:
    generator = torch.Generator().manual_seed(3)
    config = BufferConfig.checked(
        TensorStorage(10), batch_size=4, prefetch=2, workers=3, min_size=5, transform=abs, generator=generator
    )
    again = BufferConfig.checked(**config.arguments, generator=generator)
    assert again.arguments == config.arguments
    assert again.transforms == (abs,)
    ReplayBuffer(**config.arguments)
