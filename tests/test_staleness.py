"""Versions of the model: which items and tickets are too old, and what becomes of them."""

from __future__ import annotations

import asyncio
import pickle
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import (
    Batch,
    CheckpointCorruptError,
    ConsumingSampler,
    JoinedSampler,
    ListStorage,
    NStep,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SchemaError,
    SliceSampler,
    Staleness,
    TensorStorage,
)
from asyncbuf.testing import assert_same_batch
from tests.helpers import fingerprint, rows, seeded, turns, wander, within

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable


def made(max_age: int | None = 2, depth: int = 0, **options: Any) -> ReplayBuffer:
    policy = options.pop("staleness", None) or Staleness(max_age)
    settings: dict[str, Any] = {"batch_size": 4, "prefetch": depth, "generator": seeded(1), **options}
    return ReplayBuffer(settings.pop("storage", None) or TensorStorage(40), staleness=policy, **settings)


def ages(batch: Batch) -> list[int]:
    return sorted(set(batch.info["age"].tolist()))


async def test_each_row_has_a_version_and_an_age() -> None:
    async with made(None) as buffer:
        assert buffer.version == 0
        await buffer.extend(rows(4))
        assert await buffer.advance_version() == 1
        await buffer.extend(rows(2, 4), version=[0, 1])
        await buffer.add({key: value[0] for key, value in rows(1, 6).items()}, version=0)
        assert await buffer.advance_version(5) == buffer.version == 5
        await buffer.extend(rows(1, 7))
        batch = await buffer.sample(200)
        number = batch.indices
        expected = torch.tensor([0, 0, 0, 0, 0, 1, 0, 5])[number]
        assert torch.equal(batch.info["version"], expected)
        assert torch.equal(batch.info["age"], 5 - expected)


async def test_items_that_are_too_old_leave_with_the_tickets_that_have_them() -> None:
    async with made(1, depth=3) as buffer:
        await buffer.extend(rows(10))
        first = await buffer.sample()
        await buffer.advance_version()
        await buffer.extend(rows(10, 10))
        second = await buffer.sample()
        assert (second.number, ages(second)) == (1, [1])
        await buffer.advance_version()
        stats = buffer.stats()
        assert stats.size == 10
        assert stats.ledger.evicted == {"stale": 10}
        assert sum(stats.ledger.dropped.values()) == stats.ledger.dropped["stale"] >= 2
        assert stats.ledger.closes
        batch = await buffer.sample()
        assert ages(batch) == [1]
        assert batch.number > second.number > first.number
        assert set(batch.indices.tolist()) <= set(range(10, 20))


async def test_calls_that_wait_get_other_tickets() -> None:
    event = asyncio.Event()

    async def slow(data: Any) -> Any:
        await event.wait()
        return data

    async with made(0, depth=1, transform=slow) as buffer:
        await buffer.extend(rows(4))
        waiting = [asyncio.create_task(buffer.sample()) for _ in range(2)]
        await turns()
        await buffer.advance_version()
        event.set()
        await turns()
        assert not any(task.done() for task in waiting)
        assert "wait for data" in buffer.why_blocked()
        await buffer.extend(rows(4, 4))
        for task in waiting:
            assert ages(await within(task)) == [0]
        assert buffer.stats().ledger.closes


@pytest.mark.parametrize("make_storage", [TensorStorage, ListStorage])
async def test_writes_that_come_too_late(make_storage: Any) -> None:
    told: list[int] = []
    policy = Staleness(1, version_key="version", id_key="id", on_evict=told.extend)

    def items(ids: list[int], versions: list[Any]) -> Any:
        columns = {"id": torch.tensor(ids), "version": torch.tensor(versions)}
        if make_storage is TensorStorage:
            return columns
        return [{key: column[i] for key, column in columns.items()} for i in range(len(ids))]

    async with made(staleness=policy, storage=make_storage(20)) as buffer:
        await buffer.extend(items([0, 1], [[0, 0], [0, 1]]))
        await buffer.advance_version(3)
        assert told == [0, 1]
        assert len(await buffer.extend(items([2], [[1, 3]]))) == 0
        assert (len(buffer), buffer.write_count, told) == (0, 2, [0, 1, 2])
        written = await buffer.extend(items([3, 4, 5], [[3, 3], [1, 1], [2, 3]]))
        assert (len(written), len(buffer), told) == (2, 2, [0, 1, 2, 4])
        batch = await buffer.sample(30)
        assert set(batch["id"].tolist()) == {3, 5}
        assert set(batch.indices.tolist()) == set(written.tolist())
        assert buffer.stats().ledger.closes
        one = items([6], [[0, 0]])
        one = one[0] if make_storage is ListStorage else {key: column[0] for key, column in one.items()}
        assert await buffer.add(one) is None


async def test_a_key_of_a_write_that_came_too_late_may_be_used_again() -> None:
    async with made(0) as buffer:
        await buffer.advance_version(2)
        producer = buffer.producer("actor")
        assert not await buffer.extend(rows(2), version=1, key="prompt")
        assert await buffer.extend(rows(2), version=2, key="prompt")
        assert not await buffer.extend(rows(2), version=2, key="prompt")
        assert producer.next_number == 0
        assert buffer.stats().ledger.duplicates == 1


async def test_large_writes_in_a_thread() -> None:
    buffer = made(1, storage=TensorStorage(20_000))
    async with buffer:
        await buffer.advance_version(3)
        versions = torch.arange(10_000) % 4
        written = await buffer.extend({"x": torch.arange(10_000 * 40.0).reshape(-1, 40)}, version=versions)
        assert len(written) == len(buffer) == 5_000
        assert set(ages(await buffer.sample(500))) == {0, 1}
        assert len(await buffer.extend({"x": torch.zeros(10_000, 40)}, version=0)) == 0
        assert buffer.stats().ledger.closes


async def test_a_batch_on_lease_that_comes_back_too_old() -> None:
    async with made(0, depth=1, sampler=ConsumingSampler()) as buffer:
        await buffer.extend(rows(12))
        lease = buffer.lease()
        batch = await lease.__aenter__()
        await buffer.advance_version()
        await lease.__aexit__(ValueError, ValueError(), None)
        await turns()
        stats = buffer.stats()
        assert (stats.leased, stats.queued, stats.size) == (0, 0, 0)
        assert stats.ledger.closes
        await buffer.extend(rows(4, 20))
        assert (await within(buffer.sample())).number > batch.number


async def test_an_error_of_on_evict_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail(ids: list[int]) -> None:
        raise ZeroDivisionError

    async with made(staleness=Staleness(0, id_key="number", on_evict=fail)) as buffer:
        await buffer.extend({"number": torch.arange(4)})
        await buffer.advance_version()
        assert len(buffer) == 0
    assert "on_evict raised" in caplog.text


def _steps(count: int, start: int) -> dict[str, torch.Tensor]:
    number = torch.arange(start, start + count)
    ends = number % 6 == 5
    return {"obs": number, "next_obs": number + 1, "reward": number.float(), "terminated": ends}


SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "passes": SamplerWithoutReplacement,
    "priorities": PrioritizedSampler,
    "consuming": lambda: ConsumingSampler(order="random"),
    "slices": lambda: SliceSampler(slice_len=2, end_key="terminated"),
    "joined": lambda: JoinedSampler(RandomSampler(), NStep(3, 0.9), end_key="terminated"),
}


async def _program(name: str, depth: int, seed: int, steps: int, *, workers: int = 1, late: bool = False) -> Any:
    """Writes, versions and batches at random: the stream, and a check that no batch is too old."""

    async def transform(data: Any) -> Any:
        if late:
            await wander()
        return data

    draws = random.Random(seed)
    max_age = draws.randrange(3)
    settings: dict[str, Any] = {"workers": workers, "transform": transform}
    stream: list[Hashable] = []
    async with made(max_age, depth=depth, sampler=SAMPLERS[name](), **settings) as buffer:
        written = 0
        for _ in range(steps):
            draw = draws.random()
            if draw < 0.4 or len(buffer) < 12:
                count = draws.randrange(4, 9)
                least = max(0, buffer.version - max_age - (draws.random() < 0.1))
                version = draws.choice([None, draws.randrange(least, buffer.version + 1)])
                await buffer.extend(_steps(count, written), version=version)
                written += count
            elif draw < 0.5:
                await buffer.advance_version()
            else:
                batch = await _or_nothing(buffer)
                if batch is not None:
                    assert int(batch.info["age"].max()) <= max_age
                    assert torch.equal(batch.info["age"], buffer.version - batch.info["version"])
                    stream.append(fingerprint(batch))
        assert buffer.stats().ledger.closes
    return stream


async def _or_nothing(buffer: ReplayBuffer) -> Batch | None:
    """A batch; None if there is nothing to wait for."""
    call = asyncio.ensure_future(buffer.sample())
    await turns(3)
    while not call.done():
        if buffer.why_blocked().count("wait for data"):
            call.cancel()
            await asyncio.wait([call])
            return None
        await asyncio.sleep(0)
    return None if isinstance(call.exception(), ValueError) else call.result()


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("name", SAMPLERS)
async def test_no_batch_is_too_old_and_the_stream_follows_from_the_history(name: str, depth: int) -> None:
    expected = await _program(name, depth, 7, 150)
    assert len(expected) > 20
    assert await _program(name, depth, 7, 150, workers=3, late=True) == expected


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("depth", range(9))
async def test_no_batch_of_many_is_too_old(depth: int) -> None:
    """With the other depths 10^5 hand-overs and more."""
    handed_over = 0
    for seed in range(4):
        handed_over += len(await _program("random", depth, seed, 7_500))
    assert handed_over > 11_112  # of which nine are 10^5


@pytest.mark.parametrize("way", ["state_dict", "pickle"])
@pytest.mark.parametrize("name", ["random", "consuming", "slices"])
async def test_exact_resume(name: str, way: str) -> None:
    async def go_on(buffer: ReplayBuffer, start: int) -> list[Batch]:
        found = []
        for step in range(start, start + 6):
            await buffer.extend(_steps(9, 10 * step))
            if step % 2:
                await buffer.advance_version()
            found.append(await within(buffer.sample()))
        return found

    settings: dict[str, Any] = {"depth": 2, "sampler": SAMPLERS[name]()}
    async with made(1, **settings) as buffer:
        await go_on(buffer, 0)
        if way == "pickle":
            async with buffer.frozen():
                saved = pickle.dumps(buffer)
        else:
            state = await buffer.state_dict()
        expected = await go_on(buffer, 6)
        stats = buffer.stats()
    other = pickle.loads(saved) if way == "pickle" else made(1, depth=2, sampler=SAMPLERS[name]())
    async with other:
        if way != "pickle":
            await other.load_state_dict(state)
        for found, batch in zip(await go_on(other, 6), expected, strict=True):
            assert_same_batch(found, batch)
        assert other.version == buffer.version
        assert other.stats().ledger == stats.ledger


async def test_a_checkpoint_without_versions_and_one_of_a_more_patient_buffer() -> None:
    plain = ReplayBuffer(TensorStorage(40), batch_size=4, prefetch=2, generator=seeded(1))
    async with plain:
        await plain.extend(rows(8))
        await plain.sample()
        state = await plain.state_dict()
    async with made(1, depth=2) as buffer:
        await buffer.load_state_dict(state)
        assert buffer.version == 0
        assert len(await buffer.sample()) == 4
        await buffer.advance_version(2)
        assert len(buffer) == 0
    async with made(None, depth=2) as patient:
        await patient.extend(rows(8))
        await patient.sample()
        await patient.advance_version(7)
        await patient.extend(rows(3, 8))
        state = await patient.state_dict()
    async with made(1, depth=2) as buffer:
        await buffer.load_state_dict(state)
        await turns()
        assert len(buffer) == 3
        assert ages(await buffer.sample()) == [0]
        assert buffer.stats().ledger.closes


async def test_versions_that_do_not_go_with_the_rows() -> None:
    buffer = made(1)
    await buffer.extend(rows(8))
    state = await buffer.state_dict()
    versions = state["versions"]["versions"]
    forged: list[tuple[str, Any]] = [
        ("versions", versions[:-1]),
        ("versions", torch.cat([versions, versions])),
        ("versions", versions.float()),
        ("versions", versions + 2**62 + 1),
        ("version", -1),
        ("version", 2**63),
        ("refused", "1"),
        ("ids", torch.zeros(3, dtype=torch.int64)),
    ]
    for key, value in forged:
        wrong = {**state, "versions": {**state["versions"], key: value}}
        with pytest.raises(CheckpointCorruptError):
            await buffer.load_state_dict(wrong)
        assert len(buffer) == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_age": -1}, "max_age"),
        ({"max_age": 1.5}, "max_age"),
        ({"max_age": True}, "max_age"),
        ({"version_key": 3}, "version_key"),
        ({"id_key": ""}, "id_key"),
        ({"on_evict": 3, "id_key": "id"}, "on_evict"),
        ({"on_evict": print}, "id_key"),
    ],
)
def test_odd_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Staleness(**arguments)


async def test_odd_calls() -> None:
    buffer = made(1)
    wrong: list[Any] = [1.5, True, "1", [0, 0, 0], -1, [0, -1], 2**60]
    for version in wrong:
        with pytest.raises((TypeError, ValueError), match="version"):
            await buffer.extend(rows(2), version=version)
    await buffer.advance_version(3)
    for version in [*wrong[:3], -1, 2, 2**60]:
        with pytest.raises((TypeError, ValueError), match="version"):
            await buffer.advance_version(version)
    assert await buffer.advance_version(3) == 3
    plain = ReplayBuffer(TensorStorage(4))
    assert plain.version == 0
    with pytest.raises(TypeError, match="staleness"):
        await plain.advance_version()
    with pytest.raises(TypeError, match="staleness"):
        await plain.extend(rows(2), version=1)
    with pytest.raises(TypeError, match="staleness"):
        ReplayBuffer(TensorStorage(4), staleness=2)  # type: ignore[arg-type]
    keyed = made(staleness=Staleness(1, version_key="value"))
    with pytest.raises(SchemaError, match="value: expected integers"):
        await keyed.extend({"value": torch.zeros(2)})
    for odd in (-1, 2**53 + 1, 2**62, -(2**63)):
        with pytest.raises(SchemaError, match="value: expected versions from 0"):
            await keyed.extend({"value": torch.tensor([0, odd])})
    with pytest.raises(SchemaError, match="value"):
        await keyed.extend({"other": torch.zeros(2)})
    assert repr(Staleness(2, version_key="v")) == "Staleness(2, version_key='v')"
