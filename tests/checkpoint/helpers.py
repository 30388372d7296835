"""Runs to be saved: the same in every process."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler

from asyncbuf import RandomSampler, ReplayBuffer, Sampler, TensorStorage
from tests.helpers import check_same, fingerprint, seeded

if TYPE_CHECKING:
    from collections.abc import Hashable

    from asyncbuf.checkpoint.checkpointer import Checkpointer


def noisy(data: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {**data, "x": data["x"] + torch.randn(data["x"].shape, generator=generator)}


def make_buffer(
    seed: int = 0,
    *,
    sampler: Sampler | None = None,
    prefetch: int = 3,
    workers: int = 2,
    batch_size: int = 8,
    capacity: int = 64,
    min_size: int = 1,
) -> ReplayBuffer:
    return ReplayBuffer(
        TensorStorage(capacity),
        sampler=sampler if sampler is not None else RandomSampler(),
        batch_size=batch_size,
        prefetch=prefetch,
        workers=workers,
        min_size=min_size,
        transform=noisy,
        generator=seeded(seed),
    )


def items(count: int, seed: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(count, 3, generator=seeded(seed)), "n": torch.arange(count) + 1000 * seed}


class Run:
    """A small training run that is the same in every process, seeded by how far it is."""

    def __init__(self, seed: int, **settings: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.buffer = make_buffer(seed, **settings)
        self.step = 0

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "buffer": self.buffer}

    async def train(self, steps: int) -> list[Hashable]:
        """What each step saw and did."""
        seen: list[Hashable] = []
        for _ in range(steps):
            await self.buffer.extend(items(5, self.step))
            batch = await self.buffer.sample()
            loss = self.model(batch["x"]).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            seen.append((fingerprint(batch), loss.item(), self.scheduler.get_last_lr()[0]))
        return seen

    def weights(self) -> list[Hashable]:
        return [bits(tensor) for tensor in self.model.state_dict().values()]


def bits(tensor: torch.Tensor) -> Hashable:
    return str(tensor.dtype), tuple(tensor.shape), tensor.detach().numpy().tobytes()


class Count:
    """The smallest object with a state: it counts what it was told, in order."""

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        self.loads += 1


class Fragile(Count):
    """Takes half of a state, and then raises, for the values that it does not like."""

    def __init__(self, value: int = 0, *, hates: set[int], error: type[BaseException] = ValueError) -> None:
        super().__init__(value)
        self.half = value
        self.hates = hates
        self.error = error

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.half = state["value"]
        if state["value"] in self.hates:
            raise self.error("not that one")
        super().load_state_dict(state)


def drawn() -> list[Hashable]:
    return [
        *torch.rand(3).tolist(),
        *torch.randn(3).tolist(),
        *np.random.random(3),
        np.random.standard_normal(),
        random.random(),
        random.gauss(0, 1),
    ]


def disturb() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)


async def saved_twice(checkpointer: Checkpointer) -> Run:
    run = Run(0)
    async with run.buffer:
        await run.train(5)
        await checkpointer.save(5, **run.objects, extra={"t": torch.ones(2)}, rng=True)
        await run.train(5)
        await checkpointer.save(10, **run.objects, extra={"t": torch.ones(2)}, rng=True)
    return run


@dataclasses.dataclass
class Untouched:
    """A run and its twin. What was tried with the run must not show."""

    run: Run
    twin: Run

    @classmethod
    async def start(cls, **settings: Any) -> Untouched:
        run, twin = Run(3, **settings), Run(3, **settings)
        for each in (run, twin):
            await each.buffer.open()
            await each.train(4)
        return cls(run, twin)

    async def check(self) -> None:
        try:
            check_same(await self.run.train(8), await self.twin.train(8))
            assert self.run.weights() == self.twin.weights()
        finally:
            await self.run.buffer.aclose()
            await self.twin.buffer.aclose()
