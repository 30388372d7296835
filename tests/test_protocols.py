"""Whoever saves, reads or checks a buffer asks for a protocol: one that is no ``ReplayBuffer`` can take its place."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import Batch, Checkpointer, Replay, ReplayBuffer, Snapshot, Snapshotable, TensorStorage
from asyncbuf.testing import Resumable, assert_exact_resume
from tests.helpers import seeded, within
from tests.resume_helpers import items_of, noisy

if TYPE_CHECKING:
    from pathlib import Path


class Elsewhere:
    """A buffer that has every method of the protocols, and passes each call on to one that nobody sees."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._buffer, name)

    async def open(self) -> Elsewhere:
        await self._buffer.open()
        return self

    async def __aenter__(self) -> Elsewhere:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self._buffer.aclose()

    def __aiter__(self) -> Any:
        return aiter(self._buffer)


def make() -> ReplayBuffer:
    return ReplayBuffer(TensorStorage(30), batch_size=3, prefetch=2, transform=noisy, generator=seeded())


async def far() -> Any:
    buffer = make()
    await buffer.extend(items_of(20))
    return Elsewhere(buffer)


async def feed(buffer: Any, step: int, batch: Batch) -> None:
    await buffer.extend(items_of(1 + step % 2, 100 + step))


def typed() -> tuple[Replay[Any], Snapshotable, Resumable]:
    """What a type checker must find to be true."""
    buffer = make()
    return buffer, buffer, buffer


def test_a_buffer_is_both() -> None:
    for buffer in (make(), Elsewhere(make())):
        assert isinstance(buffer, Replay)
        assert isinstance(buffer, Snapshotable)
    others: tuple[object, ...] = (torch.nn.Linear(1, 1), Snapshot(), {}, Checkpointer("nowhere"))
    for other in others:
        assert not isinstance(other, Replay)
        assert not isinstance(other, Snapshotable)
    assert all(isinstance(buffer, Replay) for buffer in typed())


async def test_a_checkpointer_takes_whatever_is_snapshotable(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    source, near = await far(), make()
    await near.extend(items_of(20))
    async with source, near:
        await source.sample()
        await checkpointer.save(1, far=source, near=near, n=3)
        expected = [(await source.sample()).indices.tolist() for _ in range(3)]
        async with source.frozen():
            await within(checkpointer.save(2, far=source))
    target = await far()
    await checkpointer.restore(1, far=target, near=make())
    async with target:
        assert [(await target.sample()).indices.tolist() for _ in range(3)] == expected
    # The kind is that of a buffer: either can be restored into the other.
    await checkpointer.restore(1, far=make(), near=Elsewhere(make()))


@pytest.mark.parametrize("buffer", [ReplayBuffer, Elsewhere], ids=lambda kind: kind.__name__)
async def test_a_class_of_buffers_is_no_buffer(buffer: type[Any], tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    await checkpointer.save(1, n=1)
    with pytest.raises(TypeError, match="expected a buffer or an object"):
        await checkpointer.restore(n=buffer)


@pytest.mark.loops_in_turn
async def test_the_resume_battery_takes_whatever_is_resumable() -> None:
    await assert_exact_resume(far, steps=5, feed=feed, ways=["snapshot", "state_dict", "directory"])


class Named(ReplayBuffer):
    """A buffer with one argument more, which has a default."""

    def __init__(self, *arguments: Any, name: str = "x", **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.name = name


async def test_a_subclass_pickles() -> None:
    buffer = Named(TensorStorage(30), batch_size=3, generator=seeded())
    await buffer.extend(items_of(20))
    twin = pickle.loads(pickle.dumps(buffer))
    assert (type(twin), len(twin), twin.name) == (Named, 20, "x")
