"""Slices of trajectories."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import (
    ListStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SchemaError,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorStorage,
    TrajectorySampler,
)
from asyncbuf.errors import CheckpointCorruptError, CheckpointMismatchError
from asyncbuf.testing import assert_exact_resume
from tests.helpers import crossed, seeded, turns, within
from tests.sampler.chi_square import deviation

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncbuf import Batch, Sampler

END: dict[str, Any] = {"end_key": "done"}


def steps(count: int, start: int = 0, *, environments: int = 1, length: int = 10) -> dict[str, torch.Tensor]:
    """Items of environments that take turns; each has trajectories of so many steps."""
    number = torch.arange(start, start + count)
    env, time = number % environments, number // environments
    return {"number": number, "env": env, "step": time % length, "done": time % length == length - 1}


def made(sampler: Sampler, capacity: int = 100, batch_size: int = 16, **more: Any) -> ReplayBuffer:
    return ReplayBuffer(TensorStorage(capacity), sampler=sampler, batch_size=batch_size, generator=seeded(), **more)


# -- what is drawn ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("environments", [1, 3, 8])
async def test_slices_are_steps_of_one_trajectory(environments: int) -> None:
    sampler = SliceSampler(slice_len=4, end_key="done", trajectory_key="env")
    buffer = made(sampler, batch_size=200)
    async with buffer:
        for start in range(0, 500, 37):  # around the ring several times
            await buffer.extend(steps(37, start, environments=environments))
            batch = await buffer.sample()
            assert batch["number"].shape == batch.indices.shape == (50, 4)
            assert (batch["number"].diff(dim=1) == environments).all()
            assert (batch["step"].diff(dim=1) == 1).all()
            assert batch["number"].min() >= start + 37 - 100
            assert (batch.info["is_start"] == (batch["step"][:, 0] == 0)).all()
            assert set(batch.info) == {"is_start"}


async def test_several_fields_may_end_a_trajectory() -> None:
    buffer = made(SliceSampler(slice_len=2, end_key=("terminated", "truncated")), batch_size=200)
    number = torch.arange(12)
    await buffer.extend({"number": number, "terminated": number == 3, "truncated": (number == 7)[:, None]})
    async with buffer:
        starts = set((await buffer.sample())["number"][:, 0].tolist())
    assert starts == {0, 1, 2, 4, 5, 6, 8, 9, 10}


async def test_trajectories_by_their_numbers() -> None:
    buffer = made(SliceSampler(slice_len=2, trajectory_key="id"), batch_size=200)
    numbers = torch.tensor([7, 7, 9, -4, 7, 9, 9, -4], dtype=torch.int16)
    await buffer.extend({"id": numbers, "at": torch.arange(8)})
    async with buffer:
        found = {tuple(line) for line in (await buffer.sample())["at"].tolist()}
    assert found == {(0, 1), (1, 4), (2, 5), (5, 6), (3, 7)}


async def test_short_trajectories_are_padded() -> None:
    buffer = made(SliceSampler(slice_len=6, strict_length=False, burn_in=2, **END), batch_size=800)
    await buffer.extend(steps(3, length=3))
    await buffer.extend(steps(12, 10, length=10))
    await buffer.extend(steps(1, 23))
    async with buffer:
        batch = await buffer.sample()
    number, mask, lengths = batch["number"], batch.info["mask"], batch.info["lengths"]
    assert number.shape == mask.shape == batch.info["burn_in"].shape == (100, 8)
    assert (batch.info["burn_in"] == (torch.arange(8) < 2)).all()
    assert (mask == (torch.arange(8) < lengths[:, None])).all()
    assert (number[:, -1] == number[torch.arange(100), lengths - 1]).all()
    assert {(int(line[0]), int(length)) for line, length in zip(number, lengths, strict=True)} == {
        *((0, 3), (10, 8), (11, 8), (12, 8)),
        (20, 3),
    }


async def test_num_slices_with_a_batch_size_of_the_buffer() -> None:
    buffer = made(SliceSampler(num_slices=4, burn_in=1, **END), batch_size=20)
    await buffer.extend(steps(40))
    async with buffer:
        assert (await buffer.sample())["step"].shape == (4, 5)
        assert (await buffer.sample(10))["step"].shape == (2, 5)
        with pytest.raises(ValueError, match="expected a multiple of the 5 steps of a slice, 1 of them for burn_in"):
            await buffer.sample(16)


async def test_num_slices_needs_a_batch_size_before_it_takes_items() -> None:
    buffer = ReplayBuffer(TensorStorage(50), sampler=SliceSampler(num_slices=4, **END))
    with pytest.raises(ValueError, match="num_slices: expected a batch_size of the buffer"):
        await buffer.extend(steps(40))
    async with buffer:
        waiting = asyncio.ensure_future(buffer.sample(20))
        await turns()
        await buffer.extend(steps(40))
        assert (await within(waiting))["step"].shape == (4, 5)


async def test_who_asks_too_early_waits() -> None:
    buffer = made(SliceSampler(slice_len=4, **END))
    async with buffer:
        waiting = asyncio.ensure_future(buffer.sample())
        await buffer.extend(steps(3, 7))
        await turns()
        assert "no slice of 4 items of one trajectory in a row" in buffer.why_blocked()
        assert "of the 3 items that are stored" in buffer.why_blocked()
        for number in range(4):
            assert not waiting.done()
            await buffer.extend(steps(1, 10 + number))
        assert (await within(waiting))["number"].tolist() == [[10, 11, 12, 13]] * 4


async def test_removed_items_split_a_trajectory() -> None:
    buffer = made(SliceSampler(slice_len=3, **END), batch_size=300)
    await buffer.extend(steps(10))
    await buffer.remove([4])
    await buffer.extend(steps(2, 20))  # into row 4, and behind the others
    async with buffer:
        starts = set((await buffer.sample())["number"][:, 0].tolist())
    assert starts == {0, 1, 5, 6, 7}


async def test_after_empty_trajectories_begin_anew() -> None:
    buffer = made(SliceSampler(slice_len=2, **END), batch_size=40)
    await buffer.extend(steps(5))
    async with buffer:
        await buffer.empty()
        await buffer.extend(steps(3, 5))
        batch = await buffer.sample()
    assert set(batch["number"][:, 0].tolist()) == {5, 6}
    assert (batch.info["is_start"] == (batch["number"][:, 0] == 5)).all()


@pytest.mark.parametrize("environments", [1, 3])
@pytest.mark.parametrize("strict", [True, False])
async def test_each_slice_is_equally_likely(environments: int, strict: bool) -> None:
    key = "env" if environments > 1 else None
    sampler = SliceSampler(slice_len=4, trajectory_key=key, strict_length=strict, **END)
    buffer = made(sampler, capacity=100, batch_size=4 * 100_000)
    for start in range(0, 250, 25):
        await buffer.extend(steps(25, start, environments=environments))
    await buffer.remove([3, 50, 51])
    counts = np.zeros(100)
    async with buffer:
        for _ in range(10):
            counts += np.bincount((await buffer.sample()).indices[:, 0], minlength=100)
    counts = counts[counts > 0]
    assert counts.sum() == 1_000_000
    assert abs(deviation(counts, len(counts) - 1)) < 3


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({**END}, ValueError, "expected one of slice_len and num_slices"),
        ({**END, "slice_len": 2, "num_slices": 2}, ValueError, "expected one of slice_len and num_slices"),
        ({"slice_len": 2}, ValueError, "found neither"),
        ({**END, "slice_len": 0}, ValueError, "slice_len"),
        ({**END, "num_slices": "2"}, TypeError, "num_slices"),
        ({**END, "slice_len": 2, "burn_in": -1}, ValueError, "burn_in"),
        ({**END, "slice_len": 2, "strict_length": 1}, TypeError, "strict_length"),
        ({"slice_len": 2, "end_key": ("done", 3)}, TypeError, "end_key"),
        ({"slice_len": 2, "trajectory_key": 3}, TypeError, "trajectory_key"),
    ],
)
@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement, PrioritizedSliceSampler])
def test_arguments(kind: Callable[..., Sampler], arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kind(**arguments)


@pytest.mark.parametrize(
    ("arguments", "batch_size", "message"),
    [
        ({"slice_len": 4}, 18, "expected a multiple of the 4 steps of a slice, found 18"),
        ({"slice_len": 101}, 202, "capacity: expected at least the 101 steps of a slice, found 100"),
        ({"num_slices": 3}, 16, "expected 3 slices of the same length, found 16"),
        ({"num_slices": 4, "burn_in": 4}, 16, "expected 4 slices of more than 4 steps of the same length, found 16"),
    ],
)
@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement, PrioritizedSliceSampler])
def test_batch_sizes(kind: Callable[..., Sampler], arguments: Any, batch_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(kind(**END, **arguments), batch_size=batch_size)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ({"done": torch.zeros(2, 3), "env": torch.zeros(2, dtype=torch.int64)}, "done: expected one value per item"),
        ({"done": torch.zeros(2), "env": torch.zeros(2)}, "env: expected integers that tell trajectories apart"),
        ({"done": torch.zeros(2)}, r"\['env'\], which the sampler or writer asks for"),
    ],
)
async def test_items_that_do_not_tell_their_trajectory(items: Any, message: str) -> None:
    buffer = made(SliceSampler(slice_len=2, trajectory_key="env", **END))
    with pytest.raises(SchemaError, match=message):
        await buffer.extend(items)
    assert len(buffer) == 0


# -- checkpoints ------------------------------------------------------------------------------------------------------

SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "slices": lambda: SliceSampler(slice_len=4, end_key="done", trajectory_key="env"),
    "short": lambda: SliceSampler(num_slices=4, trajectory_key="env", strict_length=False),
    "passes": lambda: SliceSamplerWithoutReplacement(slice_len=4, end_key="done", trajectory_key="env"),
    "passes-short": lambda: SliceSamplerWithoutReplacement(
        slice_len=4, end_key="done", trajectory_key="env", strict_length=False, drop_last=True
    ),
    "prioritized": lambda: PrioritizedSliceSampler(slice_len=4, end_key="done", trajectory_key="env"),
    "trajectories": lambda: TrajectorySampler(16, end_key="done", trajectory_key="env"),
    "packed": lambda: TrajectorySampler(16, end_key="done", trajectory_key="env", padded=False),
}


points = pytest.mark.parametrize("at", [[2, 6], pytest.param("every", marks=pytest.mark.slow)], ids=["two", "every"])


async def feed(buffer: ReplayBuffer, step: int, batch: Batch) -> None:
    await buffer.update_priority(batch, batch["number"] % 7)
    await buffer.extend(steps(5, 60 + 5 * step, environments=3, length=6))
    if step % 3 == 2:
        await buffer.remove(batch.indices.reshape(-1)[:3])


@pytest.mark.loops_in_turn
@pytest.mark.parametrize(("name", "prefetch"), crossed(list(SAMPLERS), [0, 1, 4], one_in=2))
@points
async def test_exact_resume(name: str, prefetch: int, at: Any) -> None:
    async def make() -> ReplayBuffer:
        buffer = made(SAMPLERS[name](), capacity=50, prefetch=prefetch, workers=2)
        await buffer.extend(steps(60, environments=3, length=6))
        return buffer

    await assert_exact_resume(make, feed=feed, steps=9, at=at, hops=1)


async def saved() -> dict[str, Any]:
    buffer = made(SliceSampler(slice_len=4, trajectory_key="env", **END))
    await buffer.extend(steps(30, environments=3, length=6))
    await buffer.remove([4])
    return await buffer.state_dict()


async def restored(state: dict[str, Any], sampler: Sampler | None = None) -> None:
    buffer = made(SliceSampler(slice_len=4, trajectory_key="env", **END) if sampler is None else sampler)
    await buffer.load_state_dict(state)
    async with buffer:
        await within(buffer.sample())


@pytest.mark.parametrize(
    ("key", "row", "value"),
    [
        ("numbers", 2, 100),
        ("numbers", 2, -2),
        ("numbers", 2, -1),
        ("next", 2, 30),
        ("next", 2, -1),
        ("next", 5, 2),
        ("next", 2, 6),
        ("flags", 2, 8),
        ("keys", 0, 1),
        ("tails", 0, 3),
        ("tails", 0, -1),
        ("tails", 0, 200),
        ("steps", 0, 0),
    ],
)
async def test_links_that_contradict_each_other_are_refused(key: str, row: int, value: int) -> None:
    state = await saved()
    await restored(state)
    state["sampler"]["episodes"][key][row] = value
    with pytest.raises(CheckpointCorruptError):
        await restored(state)


@pytest.mark.parametrize("wrong", ["short", "other", "twice", "beyond", "float", "flat"])
async def test_starts_that_are_none_are_refused(wrong: str) -> None:
    state = await saved()
    starts = state["sampler"]["starts"]
    missing = next(row for row in range(30) if row not in starts.tolist())
    state["sampler"]["starts"] = {
        "short": starts[1:],
        "other": torch.cat([starts[1:], torch.tensor([missing])]),
        "twice": torch.cat([starts[1:], starts[1:2]]),
        "beyond": torch.cat([starts[1:], torch.tensor([1 << 40])]),
        "float": starts.double(),
        "flat": starts[None],
    }[wrong]
    with pytest.raises(CheckpointCorruptError, match="rows at which slices begin"):
        await restored(state)


async def test_trajectories_of_other_rows_are_refused() -> None:
    state, other = await saved(), made(SliceSampler(slice_len=4, trajectory_key="env", **END))
    await other.extend(steps(20, environments=3, length=6))
    state["sampler"] = (await other.state_dict())["sampler"]
    with pytest.raises(CheckpointCorruptError, match="expected the trajectories of 29 valid rows, found those of 20"):
        await restored(state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slice_len": 8}, "steps of a slice"),
        ({"slice_len": 4, "strict_length": False}, "strict_length"),
        ({"slice_len": 3, "burn_in": 1}, "burn_in"),
        ({"num_slices": 2}, "steps of a slice"),
    ],
)
async def test_other_settings_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointMismatchError, match=message):
        await restored(await saved(), SliceSampler(trajectory_key="env", **END, **arguments))
    await restored(await saved(), SliceSampler(num_slices=4, trajectory_key="env", **END))


async def test_a_length_that_follows_from_a_batch_size_is_restored() -> None:
    buffer = ReplayBuffer(TensorStorage(50), sampler=SliceSampler(num_slices=4, **END), generator=seeded())
    async with buffer:
        waiting = asyncio.ensure_future(buffer.sample(20))
        await turns()
        await buffer.extend(steps(40))
        await within(waiting)
        state = await buffer.state_dict()
    other = ReplayBuffer(TensorStorage(50), sampler=SliceSampler(num_slices=4, **END))
    empty = await other.state_dict()
    await other.load_state_dict(state)
    async with other:
        assert (await other.sample(10))["step"].shape == (2, 5)
    await other.load_state_dict(empty)
    assert len(other) == 0


async def test_items_that_are_kept_as_they_are() -> None:
    buffer = ReplayBuffer(ListStorage(50), sampler=SliceSampler(slice_len=3, **END), batch_size=6)
    for number in range(7):
        await buffer.add({"at": number, "done": number == 3})
    async with buffer:
        batch = await buffer.sample()
    assert (torch.as_tensor(batch["at"]).diff(dim=1) == 1).all()
