"""Limits and the state of a buffer: exact resume, one stream, old checkpoints, forged states."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import (
    Batch,
    CheckpointCorruptError,
    ConsumingSampler,
    Limiter,
    ListStorage,
    MaxAhead,
    MaxBytes,
    MaxStaleness,
    MinSize,
    Queue,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SamplerWithoutReplacement,
    SampleToInsertRatio,
    Staleness,
    TensorStorage,
)
from asyncbuf.testing import assert_exact_resume
from tests.helpers import Crew, check_same, numbers, rows, seeded, turns, within

if TYPE_CHECKING:
    from collections.abc import Callable


def ratio() -> Limiter:
    return SampleToInsertRatio(1.0, 6, 12.0)


LIMITS: dict[str, tuple[Callable[[], Sampler], Callable[[], Limiter], str]] = {
    "ratio": (RandomSampler, ratio, "oldest"),
    "ratio-wait": (SamplerWithoutReplacement, ratio, "wait"),
    "ahead": (RandomSampler, lambda: MaxAhead(4) & MinSize(3), "oldest"),
    "ahead-consuming": (ConsumingSampler, lambda: MaxAhead(4), "oldest"),
    "queue": (ConsumingSampler, lambda: Queue(16), "oldest"),
    "bytes": (ConsumingSampler, lambda: MaxBytes(16 * 16), "wait"),
    "staleness": (ConsumingSampler, lambda: MaxStaleness(2), "oldest"),
    "staleness-wait": (ConsumingSampler, lambda: MaxStaleness(2), "wait"),
}


async def make(name: str, depth: int = 0, workers: int = 1) -> ReplayBuffer:
    sampler, limiter, overwrite = LIMITS[name]
    buffer = ReplayBuffer(
        TensorStorage(24),
        sampler=sampler(),
        limiter=limiter(),
        overwrite=overwrite,
        batch_size=3,
        prefetch=depth,
        workers=workers,
        generator=seeded(),
        staleness=Staleness(2) if name.startswith("staleness") else None,
    )
    await buffer.extend(rows(9, width=2))
    return buffer


async def feed(buffer: ReplayBuffer, step: int, batch: Batch) -> None:
    if buffer._config.staleness is not None:
        await buffer.advance_version()
    await within(buffer.extend(rows(3, 9 + 3 * step, width=2)))


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("depth", [0, 1])
async def test_exact_resume(name: str, depth: int) -> None:
    await assert_exact_resume(functools.partial(make, name, depth), feed=feed, steps=7, at=[0, 2, 6])


@pytest.mark.parametrize("name", LIMITS)
async def test_one_stream(name: str) -> None:
    """Who is held back, and how many workers there are, moves no batch."""

    async def stream(workers: int, hurry: int) -> list[list[int]]:
        found: list[list[int]] = []
        buffer = await make(name, workers=workers)
        async with buffer, Crew() as crew:

            async def collect() -> None:
                for step in range(12):
                    await buffer.extend(rows(3, 9 + 3 * step, width=2))

            if hurry:
                writer = crew.start(collect())
                for _ in range(3):
                    await turns(hurry)
                    found.append(numbers(await within(buffer.sample())))
                writer.cancel()
            else:
                found += [numbers(await within(buffer.sample())) for _ in range(3)]
        return found

    expected = await stream(1, 0)
    check_same(await stream(2, 0), expected)
    if name in (
        "queue",
        "ahead-consuming",
        "bytes",
        "staleness",
    ):  # writes decide what comes later, not what comes first
        check_same(await stream(1, 3), expected)
        check_same(await stream(2, 1), expected)


FORGED: list[tuple[str, str, Any]] = [
    ("bytes", "nbytes", torch.zeros(3, dtype=torch.int64)),
    ("bytes", "nbytes", torch.full((24,), -1)),
    ("bytes", "nbytes", torch.full((24,), 16)),  # of rows without an item
    ("bytes", "nbytes", torch.zeros(24)),
    ("staleness", "settled", -1),
    ("staleness", "settled", 1.5),
    ("staleness", "batch_size", "3"),
    ("ahead", "ahead", -1),
    ("ahead", "ahead", 1.5),
    ("ratio-wait", "unread", torch.tensor([23])),
    ("ratio-wait", "unread", [1]),
]


@pytest.mark.parametrize(("name", "entry", "value"), FORGED)
async def test_a_forged_state_changes_nothing(name: str, entry: str, value: Any) -> None:
    buffer = await make(name)
    state = await buffer.state_dict()
    before = repr(state["limiter"])
    state["limiter"][entry] = value
    with pytest.raises(CheckpointCorruptError):
        await buffer.load_state_dict(state)
    assert repr((await buffer.state_dict())["limiter"]) == before


@pytest.mark.parametrize("name", LIMITS)
async def test_a_checkpoint_without_limits_is_taken(name: str) -> None:
    """As those of earlier releases are, and of buffers with other limits: what is not known is found out again."""
    source = ReplayBuffer(TensorStorage(24), sampler=LIMITS[name][0](), batch_size=3, generator=seeded())
    await source.extend(rows(9, width=2))
    async with source:
        await source.sample()
        state = await source.state_dict()
    target = await make(name)
    await target.load_state_dict(state)
    rows_now = target._table.rows
    counters = target._table.limits._counters(rows_now)
    limiter = target._config.limiter
    left = 6 if LIMITS[name][0] is ConsumingSampler else 9
    assert counters.unread == (6 if limiter.counts_unread else 0)
    assert counters.nbytes == (16 * left if limiter.counts_bytes else 0)
    async with target:
        await within(feed(target, 0, None))  # type: ignore[arg-type]
        await within(target.sample())
    policy = target._config.staleness
    back = ReplayBuffer(
        TensorStorage(24), sampler=LIMITS[name][0](), batch_size=3, generator=seeded(), staleness=policy
    )
    await back.load_state_dict(await target.state_dict())  # and the other way round


async def test_objects_are_weighed_again() -> None:
    source = ReplayBuffer(ListStorage(9), sampler=ConsumingSampler(), batch_size=1, collate_fn=list)
    await source.extend([b"x" * 936] * 3)
    limiter = MaxBytes(4000)
    target = ReplayBuffer(ListStorage(9), sampler=ConsumingSampler(), batch_size=1, collate_fn=list, limiter=limiter)
    await target.load_state_dict(await source.state_dict())
    async with target, Crew() as crew:
        writer = crew.start(target.extend([b"y" * 936] * 2))
        await turns()
        assert "3000 bytes are stored or about to be, of at most 4000, and 2000 are to come" in target.why_blocked()
        await target.sample()
        await within(writer)
        with pytest.raises(ValueError, match=r"at most 4000 bytes in one write, found 5000 in 5 item\(s\): write them"):
            await target.extend([b"y" * 936] * 5)
