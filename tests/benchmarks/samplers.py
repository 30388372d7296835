"""Samplers beyond uniform ones: priorities, slices, and what is joined to rows."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf import (
    FrameStack,
    JoinedSampler,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    TensorStorage,
)
from tests.benchmarks.harness import Comparison, Contender, awaiting, blocking
from tests.benchmarks.workloads import MUJOCO

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from asyncbuf import Sampler

EPISODE = 200
PIECE = 100_000


async def filled(
    count: int, make: Callable[[int, int], Any], sampler: Sampler, batch_size: int, **settings: Any
) -> ReplayBuffer:
    """An open buffer with so many items."""
    generator = torch.Generator().manual_seed(0)
    buffer = ReplayBuffer(TensorStorage(count), sampler=sampler, batch_size=batch_size, generator=generator, **settings)
    for start in range(0, count, PIECE):
        await buffer.extend(make(start, min(PIECE, count - start)))
    return await buffer.open()


def steps(start: int, count: int) -> dict[str, torch.Tensor]:
    """MuJoCo-like steps; every 200th ends an episode."""
    number = torch.arange(start, start + count)
    return {**MUJOCO.make(count), "terminated": number % EPISODE == EPISODE - 1}


def their_steps(start: int, count: int) -> Any:
    """The same as TorchRL has them."""
    from tensordict import TensorDict

    items = steps(start, count)
    done = items["terminated"][:, None]
    number = torch.arange(start, start + count)
    items["episode"] = number // EPISODE
    later = TensorDict({"done": done, "obs": items["next_obs"]}, batch_size=[count])
    return TensorDict({**items, "next": later}, batch_size=[count])


async def priorities(scale: float, rounds: int) -> AsyncIterator[Comparison]:
    """A prioritized batch and its new priorities, end to end."""
    count, batch_size = int(1_000_000 * scale) + 512, 256
    buffer = await filled(count, steps, PrioritizedSampler(), batch_size)
    uniform = await filled(count, steps, RandomSampler(), batch_size)
    errors = torch.rand(1000, batch_size)
    turn = iter(range(10**9))
    for start in range(0, count, PIECE):
        rows = torch.arange(start, min(start + PIECE, count))
        await buffer.update_priority(rows, torch.rand(len(rows)))

    async def both() -> None:
        batch = await buffer.sample()
        await buffer.update_priority(batch, errors[next(turn) % 1000])

    contenders = [
        awaiting("asyncbuf, sample and update", both),
        awaiting("asyncbuf, sample alone", buffer.sample),
        awaiting("asyncbuf, uniform sample", uniform.sample),
    ]
    missing: list[str] = []
    try:
        contenders.append(blocking("cpprb", _cpprb(count, batch_size, errors)))
    except ImportError:
        missing.append("cpprb")
    try:
        contenders.append(blocking("TorchRL", _torchrl_priorities(count, batch_size, errors)))
    except (ImportError, RuntimeError, AttributeError):
        missing.append("TorchRL, or its extension,")
    title = f"prioritized sample() and update_priority(), batch {batch_size}, {count:,} rows of 165 bytes"
    calls = max(1, int(500 * scale))
    yield Comparison(title, contenders, calls, rounds, missing, [buffer.aclose, uniform.aclose])


def _cpprb(count: int, batch_size: int, errors: torch.Tensor) -> Callable[[], None]:
    from cpprb import PrioritizedReplayBuffer

    items = {key: value.numpy() for key, value in steps(0, min(count, PIECE)).items()}
    fields = {key: {"shape": tuple(value.shape[1:]) or 1, "dtype": value.dtype} for key, value in items.items()}
    peer = PrioritizedReplayBuffer(count, fields)
    for start in range(0, count, PIECE):
        peer.add(**{key: value.numpy() for key, value in steps(start, min(PIECE, count - start)).items()})
    turn = iter(range(10**9))

    def both() -> None:
        batch = peer.sample(batch_size, beta=0.4)
        peer.update_priorities(batch["indexes"], errors[next(turn) % 1000].numpy())

    both()
    return both


def _torchrl_priorities(count: int, batch_size: int, errors: torch.Tensor) -> Callable[[], None]:
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.data.replay_buffers.samplers import PrioritizedSampler as Theirs

    logging.getLogger("torchrl").setLevel(logging.WARNING)
    peer: Any = TensorDictReplayBuffer(
        storage=LazyTensorStorage(count), sampler=Theirs(count, alpha=0.6, beta=0.4), batch_size=batch_size
    )
    for start in range(0, count, PIECE):
        peer.extend(their_steps(start, min(PIECE, count - start)))
    turn = iter(range(10**9))

    def both() -> None:
        batch = peer.sample()
        peer.update_priority(batch["index"], errors[next(turn) % 1000])

    both()
    return both


async def slices(scale: float, rounds: int) -> AsyncIterator[Comparison]:
    """Slices of 16 steps, with and without a write before each batch, from ten thousand rows to ten million."""
    length, batch_size = 16, 32 * 16
    for rows in (10_000, 1_000_000, 10_000_000):
        count = int(rows * scale) + 1_000
        ours = await filled(count, steps, SliceSampler(slice_len=length, end_key="terminated"), batch_size)
        one = [{key: value[0] for key, value in steps(start, 1).items()} for start in range(2 * EPISODE)]
        turn = iter(range(10**9))

        async def write_and_sample(ours: ReplayBuffer = ours, one: Any = one, turn: Any = turn) -> None:
            await ours.add(one[next(turn) % len(one)])
            await ours.sample()

        contenders = [
            awaiting("asyncbuf", ours.sample),
            awaiting("asyncbuf, a write before each", write_and_sample),
        ]
        missing: list[str] = []
        try:
            if rows <= 1_000_000:
                contenders += _torchrl_slices(count, length, batch_size)
        except ImportError:
            missing.append("TorchRL")
        title = f"sample() of 32 slices of {length} steps, {count:,} rows of 165 bytes"
        yield Comparison(title, contenders, max(1, int(200 * scale)), rounds, missing, [ours.aclose])


def _torchrl_slices(count: int, length: int, batch_size: int) -> list[Contender]:
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.data.replay_buffers.samplers import SliceSampler as Theirs

    logging.getLogger("torchrl").setLevel(logging.WARNING)
    sampler = Theirs(slice_len=length, traj_key="episode", cache_values=True, strict_length=True)
    peer: Any = TensorDictReplayBuffer(storage=LazyTensorStorage(count), sampler=sampler, batch_size=batch_size)
    for start in range(0, count, PIECE):
        peer.extend(their_steps(start, min(PIECE, count - start)))
    one = their_steps(0, 2 * EPISODE)
    turn = iter(range(10**9))

    def write_and_sample() -> None:
        peer.add(one[next(turn) % len(one)])
        peer.sample()

    return [
        blocking("TorchRL, cached", peer.sample),
        blocking("TorchRL, a write before each", write_and_sample),
    ]


async def joins(scale: float, rounds: int) -> AsyncIterator[Comparison]:
    """n-step returns against plain batches, and stacks of frames against stored ones."""
    count, batch_size = int(1_000_000 * scale) + 512, 256
    close: list[Callable[[], Awaitable[object]]] = []
    contenders = []
    for name, sampler in (
        ("plain batches", RandomSampler()),
        ("three steps", JoinedSampler(RandomSampler(), NStep(3, 0.99), end_key="terminated")),
        ("ten steps", JoinedSampler(RandomSampler(), NStep(10, 0.99), end_key="terminated")),
    ):
        buffer = await filled(count, steps, sampler, batch_size)
        contenders.append(awaiting(name, buffer.sample))
        close.append(buffer.aclose)
    title = f"n-step returns, batch {batch_size}, {count:,} rows of 165 bytes"
    yield Comparison(title, contenders, max(1, int(1000 * scale)), rounds, [], close)
    for both in (False, True):
        async for comparison in _frames(scale, rounds, both=both):
            yield comparison


async def _frames(scale: float, rounds: int, *, both: bool) -> AsyncIterator[Comparison]:
    count, batch_size, k = int(20_000 * scale) + 128, 32, 4
    size = (84, 84)

    def single(start: int, count: int) -> dict[str, torch.Tensor]:
        number = torch.arange(start, start + count)
        frames = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (count, *size), np.uint8))
        return {"obs": frames, "action": number, "done": number % EPISODE == EPISODE - 1}

    def stored(start: int, count: int) -> dict[str, torch.Tensor]:
        items = single(start, count)
        stack = items["obs"][:, None].repeat(1, k, 1, 1)
        return {**items, "obs": stack, **({"next_obs": stack} if both else {})}

    sampler = JoinedSampler(RandomSampler(), FrameStack(k, next_key="next_obs" if both else None), end_key="done")
    stacks = await filled(count // (2 if both else 1), functools.partial(stored), RandomSampler(), batch_size)
    frames = await filled(count, single, sampler, batch_size)
    contenders = [awaiting("stored stacks", stacks.sample), awaiting("single frames, stacked", frames.sample)]
    what = "before and after the step" if both else "before the step"
    title = f"stacks of {k} frames of 84 x 84 {what}, batch {batch_size}"
    yield Comparison(title, contenders, max(1, int(200 * scale)), rounds, [], [stacks.aclose, frames.aclose])
