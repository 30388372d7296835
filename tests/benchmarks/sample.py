"""``sample()`` without prefetch, on rows like those of MuJoCo: five fields, 165 bytes, batch 256."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from asyncbuf import ReplayBuffer, TensorStorage
from tests.benchmarks.harness import Contender

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

BATCH = 256


def rows(count: int) -> dict[str, torch.Tensor]:
    """Transitions of a task with 17 observations and 6 actions."""
    return {
        "obs": torch.randn(count, 17),
        "action": torch.randn(count, 6),
        "reward": torch.randn(count),
        "next_obs": torch.randn(count, 17),
        "terminated": torch.zeros(count, dtype=torch.bool),
    }


async def contenders(count: int) -> list[Contender]:
    """asyncbuf, plain gathers of the same fields, and TorchRL where it is installed."""
    items = rows(count)
    generator = torch.Generator().manual_seed(0)
    buffer = ReplayBuffer(TensorStorage(count), batch_size=BATCH, generator=generator)
    await buffer.extend(items)
    await buffer.open()

    async def ours(calls: int) -> None:
        for _ in range(calls):
            await buffer.sample()

    async def plain(calls: int) -> None:
        for _ in range(calls):
            indices = torch.randint(count, (BATCH,), generator=generator)
            {key: value.index_select(0, indices) for key, value in items.items()}

    found = [Contender("asyncbuf", ours), Contender("index_select", plain)]
    if (theirs := _torchrl(items, count)) is not None:
        found.append(Contender("TorchRL", theirs))
    return found


def _torchrl(items: dict[str, torch.Tensor], count: int) -> Callable[[int], Awaitable[None]] | None:
    try:
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage
        from torchrl.data import TensorDictReplayBuffer as Peer
    except ImportError:
        return None
    peer: Any = Peer(storage=LazyTensorStorage(count), batch_size=BATCH)
    peer.extend(TensorDict(items, batch_size=[count]))

    async def theirs(calls: int) -> None:
        for _ in range(calls):
            peer.sample()

    return theirs
