"""What the modules of this folder share."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import torch

from asyncbuf import ReplayBuffer, SamplerWithoutReplacement, Storage, TensorStorage
from tests.helpers import seeded

if TYPE_CHECKING:
    from asyncbuf._config import Transform

# What "at once" may take on a machine that is busy with other things. Nothing that is told at once waits for anything
# else, which in these tests would last for ever.
AT_ONCE = 20.0


class Unlucky:
    """A transform that fails for some items, some times.

    Args:
        failures: how often the batch with a certain first item fails.
    """

    def __init__(self, failures: dict[int, int]) -> None:
        self.failures = failures
        self.lock = threading.Lock()

    def _check(self, data: Any) -> None:
        first = int(data["number"][0])
        with self.lock:
            if self.failures.get(first, 0):
                self.failures[first] -= 1
                raise LookupError(f"no luck with {first}")

    def sync(self, data: Any, *, generator: torch.Generator) -> Any:
        self._check(data)
        return {**data, "noise": torch.rand(4, generator=generator)}

    async def coroutine(self, data: Any, *, generator: torch.Generator) -> Any:
        await asyncio.sleep(0)
        return self.sync(data, generator=generator)


def in_order(transform: Transform | list[Transform], *, storage: Storage | None = None, **options: Any) -> ReplayBuffer:
    """A buffer whose batch ``k`` is of the items ``4 k`` to ``4 k + 3``."""
    return ReplayBuffer(
        TensorStorage(80) if storage is None else storage,
        sampler=SamplerWithoutReplacement(shuffle=False),
        batch_size=4,
        transform=transform,
        generator=seeded(0),
        **options,
    )


class Interrupt(BaseException):
    """Something that is no Exception, as KeyboardInterrupt is."""
