"""What is stored: rows like those of common tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class Workload(NamedTuple):
    """A kind of items.

    Attributes:
        name: what the table calls it.
        nbytes: bytes of an item.
        rows: how many are stored.
        make: makes so many, as a flat dict of tensors ``[items, *shape]``.
    """

    name: str
    nbytes: int
    rows: int
    make: Callable[[int], dict[str, torch.Tensor]]


def mujoco(count: int) -> dict[str, torch.Tensor]:
    """Transitions of a task with 17 observations and 6 actions: five fields, 165 bytes."""
    return {
        "obs": torch.randn(count, 17),
        "action": torch.randn(count, 6),
        "reward": torch.randn(count),
        "next_obs": torch.randn(count, 17),
        "terminated": torch.zeros(count, dtype=torch.bool),
    }


def atari(count: int) -> dict[str, torch.Tensor]:
    """Two stacks of four frames, 84 x 84 pixels: 56 KB."""
    return {
        "obs": torch.randint(256, (count, 4, 84, 84), dtype=torch.uint8),
        "action": torch.randint(18, (count,)),
        "reward": torch.randn(count),
        "next_obs": torch.randint(256, (count, 4, 84, 84), dtype=torch.uint8),
        "terminated": torch.zeros(count, dtype=torch.bool),
    }


def tokens(count: int) -> list[torch.Tensor]:
    """Sequences of 200 to 4,000 int64 tokens."""
    lengths = torch.randint(200, 4001, (count,)).tolist()
    return [torch.randint(32_000, (length,)) for length in lengths]


def padded(sequences: list[Any]) -> torch.Tensor:
    """Sequences as one tensor ``[batch, longest]``, filled up with 0."""
    return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)


def nested(items: dict[str, torch.Tensor]) -> Any:
    """Transitions in the shape that TorchRL gives them: a TensorDict with another one in it."""
    from tensordict import TensorDict

    now = {key: value for key, value in items.items() if not key.startswith(("next_", "reward", "terminated"))}
    later = {"obs": items["next_obs"], "reward": items["reward"], "terminated": items["terminated"]}
    count = len(items["obs"])
    return TensorDict({**now, "next": TensorDict(later, batch_size=[count])}, batch_size=[count])


MUJOCO = Workload("MuJoCo-like", 165, 1_000_000, mujoco)
ATARI = Workload("Atari-like", 56_461, 20_000, atari)
