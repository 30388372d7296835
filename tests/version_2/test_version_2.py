"""Items that the second format version wrote one by one load as they were.

``data/`` was written by the last commit of that version: a ``ListStorage`` of ten items, after one batch of three.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncbuf import ListStorage, ReplayBuffer, SamplerWithoutReplacement
from tests.plain.codec_helpers import check

DATA = Path(__file__).parent / "data"


def item(number: int) -> dict[Any, Any]:
    same = torch.tensor([1.5, -0.0])
    return {
        "x": torch.arange(3.0) + number,
        "same": [same, same],
        "n": number,
        "text": f"né {number}",
        "t": (number, None, [True, 2.5]),
        "array": np.arange(2, dtype=">i4") + number,
        "scalar": np.float32(number),
        "bytes": bytes([number, 255]),
        5: complex(number, -1),
        "grad": torch.ones(1, requires_grad=True),
    }


@pytest.mark.parametrize("way", ["checkpoint", "state"])
async def test_items_of_version_2(way: str, tmp_path: Path) -> None:
    def buffer() -> ReplayBuffer[Any]:
        return ReplayBuffer(
            ListStorage(12),
            sampler=SamplerWithoutReplacement(),
            batch_size=3,
            prefetch=2,
            collate_fn=lambda items: items,
        )

    old = buffer()
    if way == "checkpoint":
        await old.load(DATA / "checkpoint")
    else:
        await old.load_state_dict(torch.load(DATA / "state.pt", weights_only=True))
    # Written anew, in the form of today, it is the same again.
    await old.save(tmp_path / "again")
    new = buffer()
    await new.load(tmp_path / "again")
    async with old, new:
        for buffer_of_items in (old, new):
            found = buffer_of_items._storage.gather(torch.arange(10))
            check(found, [item(number) for number in range(10)])
            assert all(each["same"][0] is each["same"][1] for each in found)
        for _ in range(4):
            one, other = await old.sample(), await new.sample()
            check(other.data, one.data)
            assert one.indices.tolist() == other.indices.tolist()
