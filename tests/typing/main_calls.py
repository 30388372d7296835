"""What type checkers make of the main calls. Never run: mypy and pyright read it.

A line with an ignore must be an error: both checkers complain of an ignore that is not needed.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_type

import torch

from asyncbuf import (
    Batch,
    BatchStream,
    BufferStats,
    Checkpointer,
    Draw,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    RestoredCheckpoint,
    Rows,
    Sampler,
    Snapshot,
    TensorStorage,
)

Fields = dict[str, torch.Tensor]


@dataclasses.dataclass
class Step:
    obs: torch.Tensor
    reward: torch.Tensor


# -- the type of the data ---------------------------------------------------------------------------------------------


async def data_of_any_type() -> None:
    buffer = ReplayBuffer(TensorStorage(1000), batch_size=32, prefetch=2)
    assert_type(buffer, ReplayBuffer[Any])
    batch = await buffer.sample()
    assert_type(batch, Batch[Any])
    assert_type(batch["obs"], Any)
    assert_type(batch.data, Any)


async def data_of_one_type() -> None:
    buffer: ReplayBuffer[Fields] = ReplayBuffer(TensorStorage(1000), batch_size=32)
    async with buffer as opened:
        assert_type(opened, ReplayBuffer[Fields])
        assert_type(await buffer.sample(), Batch[Fields])
        assert_type(await buffer.sample(8), Batch[Fields])
        assert_type((await buffer.sample()).data["obs"], torch.Tensor)
        async for batch in buffer:
            assert_type(batch, Batch[Fields])
        assert_type(buffer.epoch(), BatchStream[Fields])
        async for batch in buffer.epoch():
            assert_type(batch.data, Fields)


async def data_of_a_class_of_ones_own() -> None:
    buffer = ReplayBuffer[Step](ListStorage(1000), batch_size=32)
    batch = await buffer.sample()
    assert_type(batch.data.reward, torch.Tensor)
    batch.data.rewards  # type: ignore[attr-defined]  # noqa: B018


def a_narrower_type_is_accepted(buffer: ReplayBuffer[Fields], batch: Batch[Fields]) -> None:
    wide: ReplayBuffer[Mapping[str, torch.Tensor]] = buffer
    wide_batch: Batch[Mapping[str, torch.Tensor]] = batch
    wrong: ReplayBuffer[torch.Tensor] = buffer  # type: ignore[assignment]
    print(wide, wide_batch, wrong)


# -- writing and reading ----------------------------------------------------------------------------------------------


async def writing(buffer: ReplayBuffer[Fields], batch: Batch[Fields]) -> None:
    assert_type(await buffer.extend({"obs": torch.ones(3, 2)}), torch.Tensor)
    assert_type(await buffer.add({"obs": torch.ones(2)}), int | None)
    assert_type(await buffer.skip(), int | None)
    assert_type(await buffer.flush(), int)
    await buffer.update_priority(batch.indices, torch.ones(len(batch)))
    assert_type(buffer.stats(), BufferStats)
    assert_type(buffer.stats().gather_seconds, float)
    assert_type(len(buffer), int)
    assert_type(buffer.generator, torch.Generator)


def reading(batch: Batch[Fields]) -> None:
    assert_type(batch.data, Fields)
    assert_type(batch.indices, torch.Tensor)
    assert_type(batch.info, Mapping[str, Any])
    assert_type(batch.number, int)
    assert_type(batch.epoch, int | None)
    assert_type(batch.last, bool)
    assert_type(batch.write_count, int)
    assert_type(batch.lengths, torch.Tensor | None)
    assert_type(len(batch), int)
    assert_type("obs" in batch, bool)
    assert_type(dataclasses.replace(batch, number=3), Batch[Fields])


def mistakes(buffer: ReplayBuffer, batch: Batch) -> None:
    batch.obs  # type: ignore[attr-defined]  # noqa: B018
    batch.number = 3  # type: ignore[misc]
    for _ in batch:  # type: ignore[misc]
        pass
    for _ in buffer:  # type: ignore[attr-defined]
        pass
    for _ in buffer.epoch():  # type: ignore[attr-defined]
        pass
    with buffer:  # type: ignore[attr-defined]
        pass
    buffer[0]  # type: ignore[index]
    buffer.sample()["obs"]  # type: ignore[index]
    ReplayBuffer(1000)  # type: ignore[arg-type]
    ReplayBuffer(TensorStorage(1000), generator=42)  # type: ignore[arg-type]
    ReplayBuffer(TensorStorage(1000), sampler=RandomSampler)  # type: ignore[arg-type]


# -- snapshots and checkpoints ----------------------------------------------------------------------------------------


async def snapshots(buffer: ReplayBuffer[Fields], model: torch.nn.Module) -> None:
    snapshot = await buffer.snapshot(timeout=5.0)
    assert_type(snapshot, Snapshot)
    assert_type(snapshot.state_dict(), dict[str, Any])
    assert_type(await Snapshot.load("checkpoint"), Snapshot)
    assert_type(await buffer.state_dict(), dict[str, Any])
    async with buffer.frozen() as frozen:
        assert_type(frozen, ReplayBuffer[Fields])
    checkpointer = Checkpointer(Path("runs"), keep=3)
    assert_type(await checkpointer.save(100, buffer=buffer, model=model, loss=0.5), Path)
    restored = await checkpointer.restore(buffer=buffer, model=model)
    assert_type(restored, RestoredCheckpoint)
    assert_type(restored.step, int)
    assert_type(restored.values, dict[str, Any])


# -- a part of one's own ----------------------------------------------------------------------------------------------


class Newest(Sampler):
    """Always the newest rows."""

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        assert_type(rows.size, int)
        return Draw(torch.arange(rows.size)[-batch_size:])


def parts() -> ReplayBuffer[Fields]:
    return ReplayBuffer(
        TensorStorage(1000, contiguous=True),
        sampler=Newest(),
        batch_size=32,
        transform=[lambda data: data, torch.nn.Identity()],
        device="cpu",
        generator=torch.Generator().manual_seed(0),
    )
