"""Batches: what is in them and how they are made."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest
import torch
from torch.utils import _pytree as torch_pytree

from asyncbuf import (
    Batch,
    BatchStream,
    Draw,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Rows,
    SamplerWithoutReplacement,
)
from tests.buffer.helpers import make
from tests.helpers import DiarySampler, numbers, rows, seeded


async def test_a_batch() -> None:
    buffer = make()
    async with buffer:
        await buffer.extend(rows(10))
        batch = await buffer.sample()
        assert len(batch) == 4
        assert batch["number"].equal(batch.data["number"])
        assert batch["number"].equal(batch.indices)
        assert (batch.number, batch.epoch, batch.last, dict(batch.info)) == (0, None, False, {})
        with pytest.raises(AttributeError):
            batch.number = 1  # type: ignore[misc]
        doubled: Batch = torch_pytree.tree_map(lambda leaf: 2 * leaf, batch)  # type: ignore[no-untyped-call, unused-ignore]
        assert isinstance(doubled, Batch)
        assert doubled["number"].equal(2 * batch["number"])
        assert doubled.indices.equal(2 * batch.indices)


async def test_a_batch_belongs_to_its_consumer() -> None:
    buffer = make(sampler=SamplerWithoutReplacement(), prefetch=2)
    async with buffer:
        await buffer.extend(rows(8))
        for _ in range(4):
            seen: list[int] = []
            for _ in range(2):
                batch = await buffer.sample()
                seen += numbers(batch)
                batch["number"].fill_(-1)
                batch.indices.fill_(-1)
            assert sorted(seen) == list(range(8))


async def test_collate_and_transforms_in_order() -> None:
    def collate(items: list[int]) -> torch.Tensor:
        return torch.tensor(items)

    async def double(data: torch.Tensor) -> torch.Tensor:
        return 2 * data

    class Add:
        def __call__(self, data: torch.Tensor) -> torch.Tensor:
            return data + 1

    class AddLater:
        async def __call__(self, data: torch.Tensor) -> torch.Tensor:
            await asyncio.sleep(0)
            return data + 100

    buffer = ReplayBuffer(
        ListStorage(10),
        batch_size=4,
        collate_fn=collate,
        transform=[Add(), double, AddLater(), functools.partial(torch.mul, other=10)],
    )
    await buffer.extend([1, 2, 3])
    async with buffer:
        for _ in range(10):
            batch = await buffer.sample()
            assert batch.data.equal((2 * (batch.indices + 1 + 1) + 100) * 10)


async def test_a_transform_gets_a_generator_of_its_own() -> None:
    seeds: list[int] = []

    def noise(data: Any, generator: torch.Generator) -> Any:
        seeds.append(generator.initial_seed())
        return data

    buffer = make(transform=[noise, noise], generator=seeded(0), prefetch=2, workers=2)
    async with buffer:
        await buffer.extend(rows(10))
        for _ in range(5):
            await buffer.sample()
    assert len(set(seeds)) == len(seeds) >= 10


async def test_devices() -> None:
    buffer = make(device="meta")
    async with buffer:
        await buffer.extend(rows(10))
        assert (await buffer.sample())["wide"].device.type == "meta"


# -- parts of one's own -----------------------------------------------------------------------------------------------


async def test_a_sampler_of_ones_own_sees_the_history() -> None:
    sampler = DiarySampler()
    buffer = make(sampler=sampler)
    async with buffer:
        await buffer.extend(rows(10))
        await buffer.sample()
        await buffer.update_priority([3], 9.0)
    assert sampler.diary == [("written", 10), ("draw", 10), ("priority", 9)]


async def test_a_sampler_of_ones_own_may_return_fewer_rows() -> None:
    class Few(RandomSampler):
        def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
            return Draw(torch.arange(2), {"weight": torch.ones(2)})

    buffer = make(sampler=Few(), writer=RoundRobinWriter())
    async with buffer:
        await buffer.extend(rows(10))
        batch = await buffer.sample()
        assert (len(batch), batch.info["weight"].tolist()) == (2, [1.0, 1.0])


async def test_streams_are_iterators() -> None:
    buffer = make(sampler=SamplerWithoutReplacement())
    stream = buffer.epoch()
    assert isinstance(stream, BatchStream)
    assert aiter(stream) is stream
