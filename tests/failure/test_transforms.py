"""Transforms that raise: nothing is lost, the next call tries again, and everyone who waits is told."""

from __future__ import annotations

import asyncio
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import (
    Batch,
    Draw,
    ListStorage,
    PrefetchError,
    RandomSampler,
    ReplayBuffer,
    Rows,
    SamplerWithoutReplacement,
    SchemaError,
    TensorStorage,
)
from tests.failure.helpers import Unlucky, in_order
from tests.helpers import (
    Crew,
    Stop,
    ThreadedStorage,
    check_same,
    fingerprint,
    numbers,
    outcomes,
    rows,
    turns,
    until,
    within,
)

if TYPE_CHECKING:
    from collections.abc import Hashable


@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
@pytest.mark.parametrize("kind", ["sync", "coroutine"])
@pytest.mark.parametrize("depth", [0, 1, 4, 16])
@pytest.mark.parametrize("workers", [1, 3])
async def test_a_batch_that_fails_twice(kind: str, depth: int, workers: int, threads: bool) -> None:
    async def main(failures: dict[int, int]) -> tuple[list[Hashable], list[PrefetchError]]:
        storage = ThreadedStorage(80) if threads else TensorStorage(80)
        transform = getattr(Unlucky(failures), kind)
        buffer = in_order(transform, storage=storage, prefetch=depth, workers=workers)
        await buffer.extend(rows(80))
        stream: list[Hashable] = []
        errors: list[PrefetchError] = []
        async with buffer:
            while len(stream) < 20:
                try:
                    stream.append(fingerprint(await within(buffer.sample())))
                except PrefetchError as error:
                    assert len(stream) == 7
                    errors.append(error)
            assert buffer.stats().retries == len(errors)
        return stream, errors

    expected, none = await main({})
    found, errors = await main({28: 2})
    assert not none
    check_same(found, expected)
    assert len(errors) == 2
    for error in errors:
        assert (error.number, error.indices) == (7, (28, 29, 30, 31))
        assert isinstance(error.__cause__, LookupError)
        assert "batch 7" in str(error)
        assert "no luck with 28" in str(error)
        assert "28, 29, 30, 31" in str(error)


async def test_a_failure_pickles() -> None:
    buffer = in_order(Unlucky({0: 1}).sync)
    await buffer.extend(rows(80))
    async with buffer:
        with pytest.raises(PrefetchError) as info:
            await buffer.sample()
    copy = pickle.loads(pickle.dumps(info.value))
    assert (str(copy), copy.number, copy.indices) == (str(info.value), 0, (0, 1, 2, 3))


@pytest.mark.parametrize("depth", [0, 3])
async def test_a_failed_batch_keeps_the_rows_it_gathered(depth: int) -> None:
    buffer = in_order(Unlucky({4: 2}).sync, prefetch=depth)
    await buffer.extend(rows(80))
    async with buffer:
        await buffer.sample()
        with pytest.raises(PrefetchError):
            await buffer.sample()
        await buffer.extend(rows(80, 1000))  # every row is another now
        with pytest.raises(PrefetchError):
            await buffer.sample()
        assert numbers(await buffer.sample()) == [4, 5, 6, 7]


@pytest.mark.parametrize("depth", [0, 3])
async def test_skip_drops_the_batch_that_fails(depth: int) -> None:
    buffer = in_order(Unlucky({4: 10**9}).sync, prefetch=depth, workers=2)
    await buffer.extend(rows(80))
    async with buffer:
        assert await buffer.skip() is None
        assert (await buffer.sample()).number == 0
        for _ in range(3):
            with pytest.raises(PrefetchError):
                await buffer.sample()
        assert await buffer.skip() == 1
        assert buffer.stats().dropped == 1
        assert [(await buffer.sample()).number for _ in range(3)] == [2, 3, 4]


async def test_skip_while_consumers_wait() -> None:
    stop = Stop()

    def transform(data: Any) -> Any:
        if int(data["number"][0]) == 0:
            stop()
        return data

    buffer = in_order(transform, workers=2)
    await buffer.extend(rows(80))
    async with buffer, Crew() as crew:
        tasks = [crew.start(buffer.sample()) for _ in range(3)]
        await stop.come.reached()
        assert await buffer.skip() == 0
        assert [(await within(task)).number for task in tasks] == [1, 2, 3]
        stop.go.set()
        assert (await within(buffer.sample())).number == 4


@pytest.mark.parametrize("kind", ["sync", "coroutine"])
@pytest.mark.parametrize("depth", [0, 4])
async def test_several_consumers_and_a_batch_that_fails(kind: str, depth: int) -> None:
    """Each failure reaches one consumer; the others get every batch, in order."""
    failures = {8: 3, 20: 1, 24: 2, 60: 4}
    buffer = in_order(getattr(Unlucky(dict(failures)), kind), prefetch=depth, workers=3)
    await buffer.extend(rows(80))
    received: list[int] = []
    errors: list[int] = []

    async def consume() -> None:
        while len(received) < 20:
            try:
                received.append((await buffer.sample()).number)
            except PrefetchError as error:
                errors.append(error.number)

    async with buffer, Crew() as crew:
        consumers = [crew.start(consume()) for _ in range(4)]
        await until(lambda: len(received) >= 20)
        await outcomes(*consumers)
    assert received == list(range(len(received)))
    assert sorted(errors) == sorted(number for first, count in failures.items() for number in [first // 4] * count)


async def test_more_waiting_consumers_than_failures() -> None:
    buffer = in_order(Unlucky({0: 2}).sync)
    await buffer.extend(rows(80))
    async with buffer, Crew() as crew:
        ends = await outcomes(*(crew.start(buffer.sample()) for _ in range(5)))
        assert [type(end) for end in ends] == [PrefetchError, PrefetchError, Batch, Batch, Batch]
        assert [end.number for end in ends] == [0, 0, 0, 1, 2]


async def test_only_the_step_that_failed_is_tried_again() -> None:
    calls: list[str] = []

    async def first(data: Any) -> Any:
        calls.append("first")
        return {**data, "first": torch.ones(4)}

    def second(data: Any) -> Any:
        calls.append("second")
        if calls.count("second") == 1:
            data["left behind"] = None
            raise ValueError
        assert "left behind" not in data
        return data

    buffer = in_order([first, second])
    await buffer.extend(rows(80))
    async with buffer:
        with pytest.raises(PrefetchError):
            await buffer.sample()
        assert set((await buffer.sample()).data) == {"number", "wide", "first"}
    assert calls == ["first", "second", "second"]


async def test_a_quick_transform_that_begins_to_fail() -> None:
    count = 0

    def transform(data: Any) -> Any:
        nonlocal count
        count += 1
        if count in (10, 11):
            raise ValueError
        return data

    buffer = in_order(transform)
    await buffer.extend(rows(80))
    errors = 0
    received: list[int] = []
    async with buffer:
        while len(received) < 20:
            try:
                received.append((await within(buffer.sample())).number)
            except PrefetchError:
                errors += 1
    assert errors == 2
    assert received == list(range(20))


async def test_a_sync_function_that_returns_an_awaitable_is_awaited() -> None:
    async def later(data: Any) -> Any:
        await asyncio.sleep(0)
        return data

    buffer = in_order(lambda data: later(data))
    await buffer.extend(rows(80))
    async with buffer:
        for number in range(8):
            batch = await within(buffer.sample())
            assert isinstance(batch.data, dict), f"batch {number} is {batch.data!r}"


async def test_a_collate_that_fails() -> None:
    def collate(items: list[int]) -> torch.Tensor:
        raise OSError("collate")

    buffer = ReplayBuffer(ListStorage(10), batch_size=4, collate_fn=collate)
    await buffer.extend([1, 2, 3])
    async with buffer:
        with pytest.raises(PrefetchError, match="collate") as info:
            await buffer.sample()
        assert isinstance(info.value.__cause__, OSError)
        assert "raised in collate_fn" in info.value.__cause__.__notes__


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([{"a": 1}, {"b": 2}], "keys differ at the top"),
        (
            [{"a": [torch.zeros(2)]}, {"a": [torch.zeros(3)]}],
            "a/0: expected items that can be stacked, or a collate_fn",
        ),
    ],
    ids=["keys", "lengths"],
)
async def test_items_that_cannot_be_stacked(items: list[Any], message: str) -> None:
    buffer = ReplayBuffer(ListStorage(10), sampler=SamplerWithoutReplacement(), batch_size=2)
    await buffer.extend(items)
    async with buffer:
        with pytest.raises(PrefetchError, match=message) as info:
            await buffer.sample()
        assert isinstance(info.value.__cause__, SchemaError)


async def test_objects_that_could_never_be_stacked_are_refused() -> None:
    buffer = ReplayBuffer(ListStorage(10), batch_size=2)
    with pytest.raises(SchemaError, match=r"item 1/a: expected a tensor, array, number or string, found object"):
        await buffer.extend([{"a": 1}, {"a": object()}])
    assert len(buffer) == 0


def noisy(data: Any) -> Any:
    raise LookupError("mine")


async def noisy_later(data: Any) -> Any:
    noisy(data)


def forgetful(data: Any) -> None:
    """Lacks a return."""


async def forgetful_later(data: Any) -> None:
    """The same."""


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize(
    "transform", [noisy, noisy_later, lambda data: noisy_later(data)], ids=["sync", "async", "mixed"]
)
async def test_an_error_says_where_it_was_raised(transform: Any, depth: int) -> None:
    buffer = in_order([lambda data: data, transform], prefetch=depth)
    await buffer.extend(rows(80))
    async with buffer:
        for _ in range(2):
            with pytest.raises(PrefetchError, match="mine") as info:
                await within(buffer.sample())
            assert isinstance(info.value.__cause__, LookupError)
            (where,) = [note for note in info.value.__cause__.__notes__ if note.startswith("raised in transform")]
            assert where.startswith(f"raised in transform 1, {transform.__qualname__}")


@pytest.mark.parametrize("transform", [forgetful, forgetful_later, lambda data: forgetful_later(data)])
async def test_a_transform_that_returns_nothing(transform: Any) -> None:
    buffer = in_order(transform)
    await buffer.extend(rows(80))
    async with buffer:
        with pytest.raises(PrefetchError, match="expected the data of a batch, found None: is a return missing"):
            await within(buffer.sample())


class Interrupted(RandomSampler):
    """Is interrupted once, in the draw of a number."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.draws, self.at, self.error = 0, at, error

    def state_dict(self) -> dict[str, int]:
        return {"draws": self.draws}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.draws = state["draws"]

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        self.draws += 1
        if self.draws == self.at:
            raise self.error
        return super().draw(rows, batch_size, generator)


class Interruption(BaseException):
    """As KeyboardInterrupt, which would end the tests."""


@pytest.mark.parametrize("error", [Interruption(), LookupError()], ids=["interrupt", "error"])
@pytest.mark.parametrize("at", [1, 2, 4, 5])
@pytest.mark.parametrize("depth", [0, 2])
async def test_an_interrupted_draw_leaves_everything_in_order(depth: int, at: int, error: BaseException) -> None:
    buffer = ReplayBuffer(TensorStorage(50), sampler=Interrupted(at, error), batch_size=4, prefetch=depth)
    await buffer.extend(rows(50))
    numbers: list[int] = []
    async with buffer:
        failures = 0
        while len(numbers) < 8:
            try:
                numbers.append((await within(buffer.sample())).number)
            except (Interruption, LookupError):
                failures += 1
            stats = buffer.stats()
            assert stats.drawn == stats.delivered + stats.queued
        # One that is drawn ahead of need fails for nobody: it is drawn when the next call needs it.
        assert failures <= 1
        assert numbers == list(range(8))
        await buffer.flush()
        for _ in range(3):
            await within(buffer.sample())
        assert buffer.stats().queued == depth


async def test_an_interrupted_draw_behind_a_write_reaches_its_consumer() -> None:
    storage, stop = ThreadedStorage(50), Stop()
    storage.gather_nbytes = lambda count: 0  # type: ignore[method-assign]
    buffer = ReplayBuffer(storage, sampler=Interrupted(1, LookupError("mine")), batch_size=4)
    await buffer.extend(rows(10))
    storage.on_write = stop
    async with buffer, Crew() as crew:
        write = crew.start(buffer.extend(rows(10)))
        await stop.come.reached()
        sample = crew.start(buffer.sample())
        await turns()
        stop.go.set()
        ends = await outcomes(write, sample)
        assert ends[0].tolist() == list(range(10, 20))
        assert isinstance(ends[1], LookupError)
        assert (await within(buffer.sample())).number == 0


async def test_failed_calls_of_many_sizes_leave_nothing() -> None:
    class Never(RandomSampler):
        def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
            raise LookupError

    buffer = ReplayBuffer(TensorStorage(50), sampler=Never())
    await buffer.extend(rows(50))
    async with buffer:
        for size in range(1, 50):
            with pytest.raises(LookupError):
                await buffer.sample(size)
        assert not buffer._parts.queues.by_size
