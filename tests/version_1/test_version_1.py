"""Checkpoints that the first format version wrote load, and their streams go on bit for bit.

``data/`` was written by the last commit of that version: a checkpoint for each case, and what its own stream gave next.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncbuf import Checkpointer
from tests.helpers import within
from tests.version_1.cases import (
    CASES,
    Case,
    Control,
    add_model,
    difference,
    global_draws,
    go_on,
    leaves,
    packed,
    run_values,
)

DATA = Path(__file__).parent / "data"


async def load(case: Case, buffer: Any, control: Control) -> dict[str, Any]:
    folder = DATA / case.name
    if case.way == "state":
        await buffer.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
        return {}
    if case.way == "dir":
        await buffer.load(folder / "checkpoint")
        return {}
    parts = {"model": control.model, "optimizer": control.optimizer}
    restored = await Checkpointer(folder / "checkpoint", rng=True).restore(buffer=buffer, **parts)
    assert restored.step == 7
    values = [{"values": packed([dict(leaves(one))])} for one in (restored.values, run_values())]
    assert difference(*values) is None
    after = {
        "model": dict(control.model.state_dict()),
        "optimizer": control.optimizer.state_dict(),
        "draws": global_draws(),
    }
    return {"run": packed([dict(leaves(after))])}


@pytest.mark.parametrize("is_live", [False, True], ids=["new", "in use"])
@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
async def test_it_loads_and_goes_on(case: Case, is_live: bool) -> None:
    if case.name.startswith("tensordict"):
        pytest.importorskip("tensordict")
    control = Control()
    buffer = case.build(control, seed=1)  # the seed must come from the checkpoint
    add_model(control, seed=1)
    if is_live:
        await buffer.open()
        await buffer.extend(case.items(11, 900))
        for _ in range(2):
            await buffer.sample(case.sizes.get(0, None if case.batch_size else 2))
    try:
        found = await within(load(case, buffer, control))
        if not is_live:
            await buffer.open()
        found |= await within(go_on(case, buffer, control))
    finally:
        await buffer.aclose()
    expected = torch.load(DATA / case.name / "expected.pt", weights_only=True)
    # Batch normalisation rounds differently on another processor.
    assert difference(found, expected, close="batchnorm" in case.name) is None
