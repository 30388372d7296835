"""The reader in docs/checkpoint-format.md, which knows nothing of this package, reads real checkpoints."""

from __future__ import annotations

import json
import math
import re
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import Checkpointer, ListStorage, ReplayBuffer, SamplerWithoutReplacement, TensorStorage
from asyncbuf.testing import difference
from tests.helpers import seeded, within
from tests.plain.codec_helpers import Pair
from tests.resume_helpers import KINDS, items_of, make, noisy
from tests.test_docs import ROOT, blocks, run

if TYPE_CHECKING:
    from pathlib import Path

PAGE = ROOT / "docs" / "checkpoint-format.md"


@pytest.fixture(scope="module")
def page() -> Any:
    """What the page defines."""
    module = ModuleType("checkpoint_format")
    for block in blocks(PAGE):
        if block.is_runnable:
            run(block, module)
    return module


def test_the_reader_knows_nothing_of_the_package() -> None:
    code = "\n".join(block.code for block in blocks(PAGE) if block.is_runnable)
    modules = set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE))
    assert modules == {"blake3", "hashlib", "json", "pathlib", "numpy", "torch", "safetensors"}


async def test_rows_queue_and_parts(page: Any, tmp_path: Path) -> None:
    buffer = ReplayBuffer(
        TensorStorage(20),
        sampler=SamplerWithoutReplacement(),
        batch_size=3,
        prefetch=2,
        transform=noisy,
        generator=seeded(),
    )
    items = {**items_of(25), "complex": torch.complex(torch.arange(25.0), -torch.arange(25.0))}
    await buffer.extend(items)
    await buffer.remove([4, 7])
    async with buffer:
        await within(buffer.sample())
        await buffer.save(tmp_path / "checkpoint")
        state = await buffer.state_dict()
        batches = [await within(buffer.sample()) for _ in range(2)]
    checkpoint = page.Checkpoint(tmp_path / "checkpoint")
    snapshot = checkpoint.state["buffer"]
    # The ring has gone round: items 20 to 24 are in the first rows.
    order = [*range(20, 25), *range(5, 20)]
    assert difference(checkpoint.rows(snapshot), {key: value[order] for key, value in items.items()}) is None
    assert sorted(checkpoint.part(snapshot, "rows")["valid"].tolist()) == sorted(set(range(20)) - {4, 7})
    tickets = checkpoint.queue(snapshot)
    assert [ticket["number"] for ticket in tickets] == [batch.number for batch in batches] == [1, 2]
    for ticket, batch in zip(tickets, batches, strict=True):
        assert difference(ticket["content"]["data"], batch.data) is None
        assert torch.equal(ticket["content"]["indices"], batch.indices)
        assert ticket["epoch"] == batch.epoch
    for part in ("writer", "sampler", "generator"):
        assert difference(checkpoint.part(snapshot, part), state[part]) is None


async def test_items_of_every_kind(page: Any, tmp_path: Path) -> None:
    goal = torch.ones(2)
    items: list[Any] = [
        *({"x": torch.full((2,), float(i)), "n": i, "text": f"é{i}", "goal": [goal, goal]} for i in range(3)),
        *({i: 2**70, "y": (None, True, 1.5, 1 - 2j, b"z")} for i in range(2)),
        *([np.float32(i), np.arange(i, dtype=">i4"), torch.zeros(i), [], (), "\ud800"] for i in range(3)),
        *([np.arange(3)] * 2),
        {},
        [{}],
    ]
    buffer = ReplayBuffer(ListStorage(20), batch_size=1, collate_fn=list)
    await buffer.extend(items)
    await buffer.save(tmp_path / "checkpoint")
    found = page.Checkpoint(tmp_path / "checkpoint").items()
    assert difference(found, items) is None
    assert found[0]["goal"][0] is found[0]["goal"][1] is found[2]["goal"][0]
    await buffer.extend([torch.float32, torch.device("cpu"), Pair(1, 2)])
    await buffer.save(tmp_path / "checkpoint")
    name = f"{Pair.__module__}.Pair"
    others = page.Checkpoint(tmp_path / "checkpoint").items()[len(items) :]
    assert others == ["float32", "cpu", {"$type": name, "value": {"left": 1, "right": 2}}]


async def test_values_of_every_kind_and_parts_of_a_run(page: Any, tmp_path: Path) -> None:
    buffer = await make("random")
    model = torch.nn.Linear(2, 3)
    values: dict[str, Any] = {
        "tuple": (1, [2.5, None, True], "text"),
        "dict": {1: "a", (2, 3): "b", "$x": {"y": 1}},
        "floats": [math.inf, -math.inf],
        "complex": 1 - 2j,
        "bytes": b"\0\xff",
        "array": np.arange(6, dtype=np.float16).reshape(2, 3),
        "scalar": np.int32(-7),
        "tensor": torch.tensor([1 + 1j, 2]),
        "many": [*range(1000), None, 2.5, "é", 2**80],
        "pairs": [(0.5,) * 600, [b"x"] * 600],
    }
    await Checkpointer(tmp_path).save(100, buffer=buffer, model=model, values=values)
    checkpoint = page.Checkpoint(tmp_path / "step-000100")
    assert (checkpoint.state["format"], checkpoint.state["step"]) == ("asyncbuf.run", 100)
    parts = checkpoint.state["parts"]
    assert difference(checkpoint.rows(parts["buffer"]["state"], "buffer/"), items_of(20)) is None
    assert {name: part["kind"] for name, part in parts.items()} == {
        "buffer": "buffer",
        "model": "object",
        "values": "value",
    }
    found = page.decoded(parts["values"]["state"], checkpoint.tensors("values/00000.safetensors"))
    assert difference(found, values) is None
    saved = page.decoded(parts["model"]["state"], checkpoint.tensors("model/00000.safetensors"))
    assert difference(saved["state"]["value"], dict(model.state_dict())) is None


async def test_damage_is_noticed(page: Any, tmp_path: Path) -> None:
    buffer = await make("random")
    await buffer.save(tmp_path / "checkpoint")
    manifest = tmp_path / "checkpoint" / "manifest.json"
    content = manifest.read_text("utf-8")
    manifest.write_text(content.replace('"capacity": 20', '"capacity": 21'), "utf-8")
    with pytest.raises(AssertionError):
        page.Checkpoint(tmp_path / "checkpoint")
    manifest.write_text(content, "utf-8")
    [chunk] = (tmp_path / "checkpoint").glob("data-*/storage/00000.safetensors")
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"?")
    checkpoint = page.Checkpoint(tmp_path / "checkpoint")
    with pytest.raises(AssertionError):
        checkpoint.rows(checkpoint.state["buffer"])


@pytest.mark.parametrize("kind", KINDS)
async def test_every_key_that_is_written_is_on_the_page(kind: str, tmp_path: Path) -> None:
    text = PAGE.read_text("utf-8")
    buffer = await make(kind)
    async with buffer:
        await within(buffer.sample())
        await buffer.save(tmp_path / "checkpoint")
    document = json.loads((tmp_path / "checkpoint" / "manifest.json").read_bytes())
    snapshot = document["body"]["state"]["buffer"]
    ticket = snapshot["prefetch"]["queue"][0]
    own = [document, document["body"], snapshot, snapshot["config"], snapshot["rows"], snapshot["limiter"]]
    own += [snapshot["generator"], snapshot["prefetch"], ticket, ticket["content"]]
    if kind != "user-storage":
        own.append(snapshot["storage"])
    missing = sorted({key for node in own for key in node if f"`{key}`" not in text})
    assert not missing
