"""A data set that is written once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from asyncbuf import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    ImmutableDatasetWriter,
    ReadOnlyError,
    ReplayBuffer,
    Rows,
    SamplerWithoutReplacement,
    SchemaError,
    TensorStorage,
)
from tests.helpers import numbers, rows, seeded, take


def filled(capacity: int = 20) -> ReplayBuffer:
    return ReplayBuffer(
        TensorStorage(capacity),
        sampler=SamplerWithoutReplacement(),
        writer=ImmutableDatasetWriter(),
        batch_size=4,
        prefetch=2,
        generator=seeded(),
    )


async def test_it_is_written_once() -> None:
    buffer = filled()
    with pytest.raises(SchemaError, match="expected a data set of at most 20 items, the capacity, found 21"):
        await buffer.extend(rows(21))
    await buffer.extend(rows(12))
    for write in (buffer.extend(rows(1)), buffer.add({"number": torch.tensor(1), "wide": torch.ones(1)})):
        with pytest.raises(ReadOnlyError, match=r"expected no write.*its 12 items; found one of 1"):
            await write
    wide = {"number": torch.arange(8), "wide": torch.ones(8, 100_000)}
    with pytest.raises(SchemaError):  # as everywhere, the structure is looked at first
        await buffer.extend(wide)
    assert len(buffer) == buffer.write_count == 12
    async with buffer:
        seen = [number for batch in [await buffer.sample() for _ in range(3)] for number in numbers(batch)]
    assert sorted(seen) == list(range(12))


async def test_removed_rows_stay_free_and_empty_begins_anew() -> None:
    buffer = filled()
    await buffer.extend(rows(12))
    assert await buffer.remove([3, 4]) == 2
    with pytest.raises(ReadOnlyError):
        await buffer.extend(rows(1))
    other = filled()
    await other.restore(await buffer.snapshot())
    assert len(other) == 10
    await buffer.empty()
    await buffer.extend(rows(20, start=50))
    assert buffer.write_count == 32
    async with buffer:
        assert len(await take(buffer, 5)) == 5


def test_numbers() -> None:
    writer = ImmutableDatasetWriter()
    for count in (5, 8):
        writer.commit(writer.place(count, 9), 9)
        writer.clear()
    writer.commit(writer.place(4, 9), 9)
    assert writer.numbers(np.arange(4), 9).tolist() == [13, 14, 15, 16]


def test_a_storage_that_has_its_items_already() -> None:
    writer = ImmutableDatasetWriter(7)
    assert writer.size == writer.write_count == 7
    with pytest.raises(ReadOnlyError, match="its 7 items"):
        writer.place(1, 7)
    with pytest.raises(CheckpointMismatchError, match=r"number of items: expected 7.*has 6"):
        writer.load_state_dict(ImmutableDatasetWriter(6).state_dict())


@pytest.mark.parametrize(
    "change", [{"size": 6}, {"total": 4}, {"write_count": 4}, {"size": -1}, {"total": "x"}, {"more": 1}]
)
def test_forged_states_change_nothing(change: dict[str, Any]) -> None:
    writer = ImmutableDatasetWriter()
    writer.commit(writer.place(5, 9), 9)
    before = writer.state_dict()
    with pytest.raises(CheckpointCorruptError, match="ImmutableDatasetWriter: expected"):
        writer.load_state_dict({**before, **change})
    assert writer.state_dict() == before
    for table in (Rows(4, 9, 5), Rows(5, 4, 5)):
        with pytest.raises(CheckpointCorruptError, match="ImmutableDatasetWriter: expected"):
            writer.verify(table)


def test_arguments() -> None:
    for odd in (None, "x", 1.0, True):
        with pytest.raises(TypeError, match="items: expected an int, found"):
            ImmutableDatasetWriter(odd)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="items: expected at least 0, found -1"):
        ImmutableDatasetWriter(-1)
