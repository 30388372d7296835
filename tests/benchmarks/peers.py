"""What users would pick instead. Each is optional: one that is not installed is named in the table, not faked."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from tests.benchmarks.harness import Contender, blocking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Items = dict[str, torch.Tensor]


class Peer(NamedTuple):
    """A replay buffer of somebody else, filled.

    Attributes:
        name: what the table calls it.
        sample: a blocking call that returns a batch.
        extend: a blocking call that writes items.
    """

    name: str
    sample: Callable[[], Any]
    extend: Callable[[Items], Any]

    def sampling(self, keep: int) -> Contender:
        """Its ``sample``, as a contender."""
        return blocking(self.name, self.sample, keep)


class Fetcher(Protocol):
    """Makes a peer of a capacity, filled with items."""

    def __call__(self, items: Items, capacity: int, batch_size: int) -> Iterator[Peer]: ...


def torchrl(items: Items, capacity: int, batch_size: int) -> Iterator[Peer]:
    """TorchRL: in memory with TensorDicts and plain, prefetching, and in memory maps."""
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer

    logging.getLogger("torchrl").setLevel(logging.WARNING)
    kinds: list[tuple[str, Any, Any, int]] = [
        ("TorchRL, tensors", TensorDictReplayBuffer, LazyTensorStorage, 0),
        ("TorchRL, tensors, prefetch 2", TensorDictReplayBuffer, LazyTensorStorage, 2),
        ("TorchRL, tensors, prefetch 4", TensorDictReplayBuffer, LazyTensorStorage, 4),
        ("TorchRL, tensors, plain ReplayBuffer", ReplayBuffer, LazyTensorStorage, 0),
        ("TorchRL, memory map", TensorDictReplayBuffer, LazyMemmapStorage, 0),
    ]
    for name, kind, storage, prefetch in kinds:
        peer: Any = kind(storage=storage(capacity), batch_size=batch_size, prefetch=prefetch or None)
        peer.extend(TensorDict(items, batch_size=[len(items["obs"])]))
        yield Peer(name, peer.sample, lambda new, peer=peer: peer.extend(new))  # type: ignore[misc]


def cpprb(items: Items, capacity: int, batch_size: int) -> Iterator[Peer]:
    """cpprb: C++ behind Cython, numpy arrays out."""
    from cpprb import ReplayBuffer

    fields = {key: {"shape": tuple(value.shape[1:]) or 1, "dtype": value.numpy().dtype} for key, value in items.items()}
    peer = ReplayBuffer(capacity, fields)
    _add(lambda new: peer.add(**new), items)
    yield Peer("cpprb", lambda: peer.sample(batch_size), lambda new: peer.add(**new))


def stable_baselines3(items: Items, capacity: int, batch_size: int) -> Iterator[Peer]:
    """Stable-Baselines3: numpy arrays, one gather per field, tensors out."""
    from gymnasium.spaces import Box, Discrete
    from stable_baselines3.common.buffers import ReplayBuffer

    shape, dtype = items["obs"].shape[1:], items["obs"].numpy().dtype.type
    spread = (0, 255) if dtype is np.uint8 else (-np.inf, np.inf)
    action = items["action"]
    space = Discrete(18) if action.ndim == 1 else Box(-1, 1, tuple(action.shape[1:]))
    make: Any = ReplayBuffer
    box: Any = Box
    peer = make(capacity, box(*spread, tuple(shape), dtype), space, device="cpu")

    def extend(new: Items) -> None:
        n = {key: value.numpy() for key, value in new.items()}
        for i in range(len(n["obs"])):
            peer.add(
                n["obs"][i], n["next_obs"][i], n["action"][i], n["reward"][i : i + 1], n["terminated"][i : i + 1], [{}]
            )

    count = len(items["obs"])
    for name, source in (("observations", "obs"), ("next_observations", "next_obs"), ("actions", "action")):
        target = getattr(peer, name)
        target[:count] = items[source].numpy().reshape(count, *target.shape[1:])
    peer.pos, peer.full = count % capacity, count >= capacity
    yield Peer("Stable-Baselines3", lambda: peer.sample(batch_size), extend)


def _add(add: Callable[[Any], Any], items: Items) -> None:
    """In pieces, because a copy of everything may not fit beside it."""
    arrays = {key: value.numpy() for key, value in items.items()}
    for start in range(0, len(arrays["obs"]), 10_000):
        add({key: value[start : start + 10_000] for key, value in arrays.items()})


MAKERS: dict[str, Fetcher] = {"TorchRL": torchrl, "cpprb": cpprb, "Stable-Baselines3": stable_baselines3}


def peers(items: Items, capacity: int, batch_size: int) -> tuple[list[Peer], list[str]]:
    """All that are installed, and the names of the others."""
    found: list[Peer] = []
    missing: list[str] = []
    for name, make in MAKERS.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found += make(items, capacity, batch_size)
        except ImportError:
            missing.append(name)
    return found, missing


def queue(items: Items, batch_size: int, depth: int, keep: int) -> Contender:
    """What one writes by hand: a task that gathers field by field, and a bounded queue."""
    count = len(items["obs"])
    kept: deque[Items] = deque(maxlen=keep)

    async def run(calls: int) -> None:
        ready: asyncio.Queue[Items] = asyncio.Queue(depth)

        async def produce() -> None:
            for _ in range(calls):
                indices = torch.randint(count, (batch_size,))
                await ready.put({key: value.index_select(0, indices) for key, value in items.items()})

        producer = asyncio.create_task(produce())
        for _ in range(calls):
            kept.append(await ready.get())
        await producer

    return Contender("asyncio.Queue and index_select", run)


def select(items: Items, batch_size: int, keep: int) -> Contender:
    """A gather per field, by torch."""
    count = len(items["obs"])

    def call() -> Items:
        indices = torch.randint(count, (batch_size,))
        return {key: value.index_select(0, indices) for key, value in items.items()}

    return blocking("index_select per field", call, keep)


def floors(items: Items, batch_size: int) -> list[Contender]:
    """What the machine can do: a copy of as many bytes, and one gather of packed rows."""
    count = len(items["obs"])
    arrays = {key: value.numpy() for key, value in items.items()}
    rows = np.dtype([(key, value.dtype, value.shape[1:]) for key, value in arrays.items()])
    packed = np.empty(count, rows)
    for key, value in arrays.items():
        packed[key] = value
    as_bytes = torch.from_numpy(packed.view(np.uint8).reshape(count, rows.itemsize))
    window = torch.empty(batch_size, rows.itemsize, dtype=torch.uint8)
    out = np.empty(batch_size, packed.dtype)

    def copy() -> None:
        start = int(np.random.randint(count - batch_size + 1))
        window.copy_(as_bytes[start : start + batch_size])

    def gather() -> None:
        packed.take(torch.randint(count, (batch_size,)).numpy(), out=out, mode="clip")

    return [
        blocking("memory copy of the same bytes, in one piece", copy),
        blocking("one gather of packed rows, into given memory", gather),
    ]
