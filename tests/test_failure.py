"""Nothing is lost when something fails, and everyone who waits is told."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

from asyncbuf import (
    AsyncBufError,
    Batch,
    BufferClosedError,
    BufferFailedError,
    Draw,
    ListStorage,
    PrefetchError,
    RandomSampler,
    ReplayBuffer,
    Rows,
    SamplerWithoutReplacement,
    SchemaError,
    Storage,
    TensorStorage,
)
from tests.helpers import (
    SECONDS,
    CountingTransform,
    Crew,
    Latch,
    Stop,
    ThreadedStorage,
    WeightedSampler,
    background_tasks,
    check_same,
    fingerprint,
    numbers,
    outcomes,
    rows,
    seeded,
    take,
    turns,
    until,
    within,
    worker_tasks,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from asyncbuf.buffer import Transform

# What "at once" may take on a slow machine. Nothing that is told at once waits for anything else.
AT_ONCE = 2.0


class Unlucky:
    """A transform that fails for some items, some times.

    Args:
        failures: how often the batch with a certain first item fails.
    """

    def __init__(self, failures: dict[int, int]) -> None:
        self.failures = failures
        self.lock = threading.Lock()

    def _check(self, data: Any) -> None:
        first = int(data["number"][0])
        with self.lock:
            if self.failures.get(first, 0):
                self.failures[first] -= 1
                raise LookupError(f"no luck with {first}")

    def sync(self, data: Any, *, generator: torch.Generator) -> Any:
        self._check(data)
        return {**data, "noise": torch.rand(4, generator=generator)}

    async def coroutine(self, data: Any, *, generator: torch.Generator) -> Any:
        await asyncio.sleep(0)
        return self.sync(data, generator=generator)


def in_order(transform: Transform | list[Transform], *, storage: Storage | None = None, **options: Any) -> ReplayBuffer:
    """A buffer whose batch ``k`` is of the items ``4 k`` to ``4 k + 3``."""
    return ReplayBuffer(
        TensorStorage(80) if storage is None else storage,
        sampler=SamplerWithoutReplacement(shuffle=False),
        batch_size=4,
        transform=transform,
        generator=seeded(0),
        **options,
    )


# -- transforms that raise --------------------------------------------------------------------------------------------


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
        ([{"a": object()}, {"a": object()}], "a: expected items that can be stacked, or a collate_fn"),
    ],
    ids=["keys", "lengths", "objects"],
)
async def test_items_that_cannot_be_stacked(items: list[Any], message: str) -> None:
    buffer = ReplayBuffer(ListStorage(10), sampler=SamplerWithoutReplacement(), batch_size=2)
    await buffer.extend(items)
    async with buffer:
        with pytest.raises(PrefetchError, match=message) as info:
            await buffer.sample()
        assert isinstance(info.value.__cause__, SchemaError)


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
        assert not buffer._queues._queues


@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
async def test_a_gather_that_fails(threads: bool) -> None:
    class Unreadable(ThreadedStorage):
        failures = 2

        def gather_nbytes(self, count: int) -> int:
            return 1 << 30 if threads else 0

        def gather(self, indices: torch.Tensor) -> Any:
            if self.failures:
                self.failures -= 1
                raise OSError("gather")
            return super().gather(indices)

    buffer = ReplayBuffer(Unreadable(10), batch_size=4)
    await buffer.extend(rows(10))
    async with buffer:
        for _ in range(2):
            with pytest.raises(PrefetchError, match="gather"):
                await within(buffer.sample())
            await within(buffer.extend(rows(1)))  # nothing is held
        assert (await within(buffer.sample())).number == 0


@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
async def test_a_write_that_fails_holds_nobody_up(threads: bool) -> None:
    class Unwritable(ThreadedStorage):
        fails = False

        def prepare(self, items: Any) -> Any:
            return super().prepare(items) if threads else TensorStorage.prepare(self, items)

        def write(self, prepared: Any, runs: Any) -> None:
            if self.fails:
                raise OSError("disk full")
            super().write(prepared, runs)

    storage = Unwritable(10)
    buffer = ReplayBuffer(storage, batch_size=4)
    async with buffer:
        await buffer.extend(rows(4))
        storage.fails = True
        with pytest.raises(OSError, match="disk full"):
            await within(buffer.extend(rows(4)))
        assert (len(buffer), buffer.write_count) == (4, 4)
        storage.fails = False
        assert (await within(buffer.extend(rows(2)))).tolist() == [4, 5]
        await within(buffer.sample())


async def test_a_failure_of_another_size_does_not_stop_the_others() -> None:
    class Stateful:
        """Fails once, with a batch of another size."""

        failures = 1

        def state_dict(self) -> dict[str, int]:
            return {"failures": self.failures}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.failures = state["failures"]

        def __call__(self, data: Any) -> Any:
            if len(data["number"]) == 3 and self.failures:
                self.failures -= 1
                raise ValueError("once")
            return data

    buffer = in_order(Stateful())
    await buffer.extend(rows(80))
    async with buffer:
        assert (await buffer.sample()).number == 0
        with pytest.raises(PrefetchError):
            await buffer.sample(3)
        # The caller has lost interest in batches of three.
        assert (await within(buffer.sample(), AT_ONCE)).number == 2


# -- transforms that hang or are cancelled ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_hanging_transform_stops_neither_writers_nor_other_batches(kind: str) -> None:
    stop = Stop()

    def sync(data: Any) -> Any:
        if int(data["number"][0]) == 0:
            stop()
        return data

    async def coroutine(data: Any) -> Any:
        if int(data["number"][0]) == 0:
            stop.come.set()
            await stop.go.reached()
        return data

    buffer = in_order(sync if kind == "sync" else coroutine, storage=ThreadedStorage(80), prefetch=3, workers=2)
    await buffer.extend(rows(80))
    async with buffer, Crew() as crew:
        first = crew.start(buffer.sample())
        await stop.come.reached()
        for _ in range(10):
            await within(buffer.extend(rows(8, 1000)))
        await until(lambda: buffer.stats().in_flight == 1)
        others = [crew.start(buffer.sample()) for _ in range(3)]
        await turns()
        assert not any(task.done() for task in (first, *others))
        stop.go.set()
        assert [batch.number for batch in await outcomes(first, *others)] == [0, 1, 2, 3]


@pytest.mark.parametrize("depth", [0, 2])
async def test_a_transform_that_raises_a_cancellation(depth: int) -> None:
    failures = [2]

    async def transform(data: Any) -> Any:
        if int(data["number"][0]) == 4 and failures[0]:
            failures[0] -= 1
            raise asyncio.CancelledError("from within")
        return data

    buffer = in_order(transform, prefetch=depth)
    await buffer.extend(rows(80))
    async with buffer:
        assert (await within(buffer.sample())).number == 0
        for _ in range(2):
            with pytest.raises(PrefetchError, match="cancelled from within"):
                await within(buffer.sample())
        assert [(await within(buffer.sample())).number for _ in range(4)] == [1, 2, 3, 4]


async def test_a_sync_transform_that_raises_a_cancellation() -> None:
    failures = [1]

    def transform(data: Any) -> Any:
        if failures[0]:
            failures[0] -= 1
            raise asyncio.CancelledError
        return data

    buffer = in_order(transform)
    await buffer.extend(rows(80))
    async with buffer:
        with pytest.raises(PrefetchError):
            await within(buffer.sample())
        assert (await within(buffer.sample())).number == 0


@pytest.mark.parametrize("way", ["asyncio.timeout", "wait_for", "fail_after", "future", "group"])
async def test_a_transform_with_a_time_limit_of_its_own(way: str) -> None:
    failures = [1]

    async def forever() -> None:
        await asyncio.Event().wait()

    async def transform(data: Any) -> Any:
        if not failures[0]:
            return data
        failures[0] -= 1
        if way == "asyncio.timeout":
            async with asyncio.timeout(0.001):
                await forever()
        elif way == "wait_for":
            await asyncio.wait_for(forever(), 0.001)
        elif way == "fail_after":
            with anyio.fail_after(0.001):
                await forever()
        elif way == "future":
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            future.cancel()
            await future
        else:
            async with asyncio.TaskGroup() as group:
                group.create_task(forever())
                raise ValueError
        return data

    buffer = in_order(transform)
    await buffer.extend(rows(80))
    async with buffer:
        with pytest.raises(PrefetchError):
            await within(buffer.sample())
        assert [(await within(buffer.sample())).number for _ in range(3)] == [0, 1, 2]


# -- code of the user that calls the buffer ---------------------------------------------------------------------------


async def test_a_transform_may_write() -> None:
    async def transform(data: Any) -> Any:
        await buffer.extend(rows(1, 1000))
        await buffer.update_priority([0], 1.0)
        assert buffer.stats().delivered >= 0
        assert "wait" in buffer.why_blocked()
        return data

    for depth, workers in ((0, 1), (3, 2)):
        buffer = in_order(transform, storage=ThreadedStorage(80), prefetch=depth, workers=workers)
        await buffer.extend(rows(80))
        async with buffer:
            assert [(await within(buffer.sample())).number for _ in range(5)] == list(range(5))


async def test_a_transform_may_ask_for_a_batch_of_another_size() -> None:
    async def transform(data: Any) -> Any:
        if len(data["number"]) == 4:
            other = await buffer.sample(2)
            assert len(other) == 2
        return data

    buffer = in_order(transform, workers=2)
    await buffer.extend(rows(80))
    async with buffer:
        for _ in range(5):
            assert len(await within(buffer.sample())) == 4


async def test_a_sync_transform_may_write_through_the_event_loop() -> None:
    loop = asyncio.get_running_loop()

    def transform(data: Any) -> Any:
        asyncio.run_coroutine_threadsafe(buffer.extend(rows(1, 1000)), loop).result(SECONDS)
        return data

    buffer = in_order(transform, storage=ThreadedStorage(80), prefetch=1, workers=2)
    await buffer.extend(rows(80))
    async with buffer:
        assert [(await within(buffer.sample())).number for _ in range(6)] == list(range(6))


async def test_a_transform_may_close_the_buffer() -> None:
    async def transform(data: Any) -> Any:
        await buffer.aclose()
        return data

    buffer = in_order(transform)
    await buffer.extend(rows(80))
    await buffer.open()
    with pytest.raises(BufferClosedError):
        await within(buffer.sample())
    await within(buffer.aclose())


# -- samplers that fail -----------------------------------------------------------------------------------------------


class Moody(WeightedSampler):
    """Fails at some of its draws."""

    def __init__(self, bad: dict[int, Callable[[], Any]]) -> None:
        self._bad = bad
        self.draws = 0

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        self.draws += 1
        if self.draws - 1 in self._bad:
            result: Draw = self._bad[self.draws - 1]()
            return result
        return super().draw(rows, batch_size, generator)


def _raise(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize("depth", [0, 2])
async def test_a_sampler_that_raises(depth: int) -> None:
    async def main(bad: dict[int, Callable[[], Any]]) -> list[Hashable]:
        buffer = ReplayBuffer(TensorStorage(80), sampler=Moody(bad), batch_size=4, prefetch=depth, generator=seeded(0))
        await buffer.extend(rows(80))
        stream: list[Hashable] = []
        async with buffer:
            while len(stream) < 10:
                try:
                    stream.append(fingerprint(await within(buffer.sample())))
                except LookupError as error:
                    assert "moody" in str(error)  # noqa: PT017
            return stream

    bad: dict[int, Callable[[], Any]] = {i: lambda: _raise(LookupError("moody")) for i in (0, 1, 4, 5, 6)}
    check_same(await main(bad), await main({}))


async def test_a_sampler_that_raises_reaches_every_consumer_in_turn() -> None:
    bad: dict[int, Callable[[], Any]] = {i: lambda: _raise(LookupError("moody")) for i in range(3)}
    buffer = ReplayBuffer(TensorStorage(80), sampler=Moody(bad), batch_size=4)
    await buffer.extend(rows(80))
    async with buffer, Crew() as crew:
        ends = await outcomes(*(crew.start(buffer.sample()) for _ in range(5)))
        # A call that comes tries again, so that fewer consumers than draws see an error.
        assert {type(end) for end in ends} == {LookupError, Batch}
        assert [end.number for end in ends if isinstance(end, Batch)] == list(
            range(sum(isinstance(end, Batch) for end in ends))
        )


@pytest.mark.parametrize(
    ("draw", "kind"),
    [
        (lambda: None, TypeError),
        (lambda: [1, 2], TypeError),
        (lambda: Draw([1, 2]), TypeError),  # type: ignore[arg-type]
        (lambda: Draw(torch.tensor([0.0])), TypeError),
        (lambda: Draw(torch.tensor([0], dtype=torch.int32)), TypeError),
        (lambda: Draw(torch.tensor([[0]])), TypeError),
        (lambda: Draw(torch.tensor(0)), TypeError),
        (lambda: Draw(torch.tensor([], dtype=torch.int64)), IndexError),
        (lambda: Draw(torch.tensor([0, 10])), IndexError),
        (lambda: Draw(torch.tensor([-1, 0])), IndexError),
    ],
    ids=["None", "list", "list-draw", "float", "int32", "2d", "0d", "empty", "too-large", "negative"],
)
async def test_a_sampler_that_returns_something_else(draw: Callable[[], Any], kind: type[Exception]) -> None:
    buffer = ReplayBuffer(TensorStorage(80), sampler=Moody({0: draw}), batch_size=4)
    await buffer.extend(rows(10))
    async with buffer:
        with pytest.raises(kind, match=r"Moody.*expected.*found"):
            await within(buffer.sample())
        assert (await within(buffer.sample())).number == 0


async def test_a_sampler_that_fails_when_told_of_a_write() -> None:
    class Deaf(RandomSampler):
        fails = False

        def written(self, indices: torch.Tensor, rows: Rows) -> None:
            if self.fails:
                raise LookupError("deaf")

    sampler = Deaf()
    buffer = ReplayBuffer(TensorStorage(80), sampler=sampler, batch_size=4)
    async with buffer, Crew() as crew:
        waiting = crew.start(buffer.sample())
        await turns()
        sampler.fails = True
        with pytest.raises(LookupError, match="deaf"):
            await buffer.extend(rows(10))
        sampler.fails = False
        # With an error none of the items is written, as extend() promises.
        assert (len(buffer), buffer.write_count) == (0, 0)
        await buffer.extend(rows(10))
        assert len(await within(waiting)) == 4


async def test_a_refused_write_leaves_the_rows_of_a_full_ring() -> None:
    class Deaf(SamplerWithoutReplacement):
        fails = False

        def written(self, indices: torch.Tensor, rows: Rows) -> None:
            if self.fails:
                raise LookupError("deaf")

    sampler = Deaf(shuffle=False)
    buffer = ReplayBuffer(TensorStorage(10), sampler=sampler, batch_size=10)
    async with buffer:
        await buffer.extend(rows(10))
        sampler.fails = True
        with pytest.raises(LookupError, match="deaf"):
            await buffer.extend(rows(3, 100))
        assert numbers(await buffer.sample()) == list(range(10))


class Interrupt(BaseException):
    """Something that is no Exception, as KeyboardInterrupt is."""


async def test_an_interrupt_within_a_draw_leaves_nobody_in_the_line() -> None:
    buffer = ReplayBuffer(TensorStorage(80), sampler=Moody({0: lambda: _raise(Interrupt())}), batch_size=4)
    await buffer.extend(rows(80))
    async with buffer:
        with pytest.raises(Interrupt):
            await buffer.sample()
        assert buffer.stats().waiting_consumers == 0
        assert (await within(buffer.sample(), AT_ONCE)).number == 0


@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
async def test_an_interrupt_within_a_gather_leaves_nobody_waiting_for_ever(threads: bool) -> None:
    class Interrupted(ThreadedStorage):
        interrupts = 1

        def gather_nbytes(self, count: int) -> int:
            return 1 << 30 if threads else 0

        def gather(self, indices: torch.Tensor) -> Any:
            if self.interrupts:
                self.interrupts -= 1
                raise Interrupt
            return super().gather(indices)

    buffer = ReplayBuffer(Interrupted(80), batch_size=4)
    await buffer.extend(rows(80))
    await check_told_of_the_interrupt(buffer)


async def test_an_interrupt_within_a_quick_transform_leaves_nobody_waiting_for_ever() -> None:
    calls = 0

    def transform(data: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise Interrupt
        return data

    buffer = in_order(transform)
    await buffer.extend(rows(80))
    await check_told_of_the_interrupt(buffer, before=8)


async def check_told_of_the_interrupt(buffer: ReplayBuffer, before: int = 0) -> None:
    """In one way or another: by the interrupt itself, as a failed batch, or because the buffer has failed."""
    async with buffer:
        await take(buffer, before)
        with pytest.raises((Interrupt, PrefetchError, BufferFailedError)):
            await within(buffer.sample(), AT_ONCE)
        # And then a batch, or the reason why there is none; but not silence.
        with contextlib.suppress(Interrupt, PrefetchError, BufferFailedError):
            assert (await within(buffer.sample(), AT_ONCE)).number == before


# -- the background work ends -----------------------------------------------------------------------------------------


async def check_told_of_the_crash(*waiting: asyncio.Task[Any], cause: type[BaseException]) -> None:
    for end in await outcomes(*waiting, seconds=AT_ONCE):
        assert isinstance(end, BufferFailedError)
        assert isinstance(end.__cause__, cause)
        assert repr(end.__cause__) in str(end)


async def check_failed_and_opens_again(buffer: ReplayBuffer, number: int) -> None:
    with pytest.raises(BufferFailedError):
        await buffer.sample()
    with pytest.raises(BufferFailedError):
        await buffer.extend(rows(1))
    await within(buffer.aclose())
    assert not background_tasks()
    async with buffer:
        assert (await within(buffer.sample())).number == number


async def test_a_crash_reaches_five_consumers_and_two_writers() -> None:
    stop = Stop()
    storage = ThreadedStorage(80)
    buffer = ReplayBuffer(storage, batch_size=4, transform=lambda data: data, workers=2)
    async with Crew() as crew:
        await buffer.open()
        await buffer.extend(rows(80))
        storage.on_gather = stop
        consumers = [crew.start(buffer.sample()) for _ in range(5)]
        await stop.come.reached()
        writers = [crew.start(buffer.extend(rows(1))) for _ in range(2)]
        await turns()
        worker_tasks()[1].cancel()
        await check_told_of_the_crash(*consumers, *writers, cause=RuntimeError)
        stop.go.set()
        await check_failed_and_opens_again(buffer, 0)


async def test_a_crash_reaches_consumers_that_wait_for_data() -> None:
    buffer = ReplayBuffer(TensorStorage(80), batch_size=4)
    async with buffer, Crew() as crew:
        consumers = [crew.start(buffer.sample()) for _ in range(5)]
        await turns()
        worker_tasks()[0].cancel()
        await check_told_of_the_crash(*consumers, cause=RuntimeError)


async def test_a_crash_reaches_consumers_while_a_transform_hangs() -> None:
    stop = Stop()

    def transform(data: Any) -> Any:
        if int(data["number"][0]) == 0:
            stop()
        return data

    buffer = in_order(transform, workers=2)
    await buffer.extend(rows(80))
    async with Crew() as crew:
        await buffer.open()
        consumers = [crew.start(buffer.sample()) for _ in range(5)]
        await stop.come.reached()
        await until(lambda: buffer.stats().in_flight == 1)
        try:
            for task in worker_tasks():  # one of them waits for the thread that hangs, the other for work
                task.cancel()
            await check_told_of_the_crash(*consumers, cause=RuntimeError)
        finally:
            stop.go.set()
        await check_failed_and_opens_again(buffer, 0)


async def test_a_cancelled_supervisor_is_a_crash() -> None:
    buffer = ReplayBuffer(TensorStorage(80), batch_size=4, workers=2)
    async with buffer, Crew() as crew:
        consumers = [crew.start(buffer.sample()) for _ in range(5)]
        await turns()
        next(task for task in background_tasks() if task.get_name() == "asyncbuf-supervisor").cancel()
        await check_told_of_the_crash(*consumers, cause=BaseException)


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_transform_that_raises_no_exception_but_an_interrupt(kind: str) -> None:
    stop = Stop()

    def sync(data: Any) -> Any:
        if not stop.come.is_set:
            stop()
            raise Interrupt("stop it all")
        return data

    async def coroutine(data: Any) -> Any:
        if not stop.come.is_set:
            stop.come.set()
            await stop.go.reached()
            raise Interrupt("stop it all")
        return data

    buffer = in_order(sync if kind == "sync" else coroutine)
    await buffer.extend(rows(80))
    async with Crew() as crew:
        await buffer.open()
        consumers = [crew.start(buffer.sample()) for _ in range(5)]
        await stop.come.reached()
        stop.go.set()
        await check_told_of_the_crash(*consumers, cause=Interrupt)
        await check_failed_and_opens_again(buffer, 0)


async def test_iteration_raises_after_a_crash() -> None:
    buffer = ReplayBuffer(TensorStorage(80), sampler=SamplerWithoutReplacement(), batch_size=4)

    async def iterate(stream: Any) -> None:
        async for _ in stream:
            pass

    async with buffer, Crew() as crew:
        waiting = [crew.start(iterate(stream)) for stream in (buffer, buffer.epoch())]
        await turns()
        worker_tasks()[0].cancel()
        await check_told_of_the_crash(*waiting, cause=RuntimeError)
        for stream in (buffer, buffer.epoch()):
            with pytest.raises(BufferFailedError):
                await iterate(stream)


# -- opening and closing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
@pytest.mark.parametrize("kind", ["sync", "coroutine"])
@pytest.mark.parametrize("depth", [0, 1, 6])
async def test_closing_and_opening_again_goes_on_exactly(depth: int, kind: str, threads: bool) -> None:
    def make() -> ReplayBuffer:
        return ReplayBuffer(
            ThreadedStorage(80) if threads else TensorStorage(80),
            sampler=SamplerWithoutReplacement(),
            batch_size=4,
            prefetch=depth,
            workers=2,
            transform=[getattr(Unlucky({}), kind), lambda data: data],
            generator=seeded(0),
        )

    expected_of, buffer = make(), make()
    await expected_of.extend(rows(80))
    async with expected_of:
        expected = await take(expected_of, 40)
    await buffer.extend(rows(80))
    found: list[Hashable] = []
    while len(found) < 40:
        async with buffer, Crew() as crew:
            found += await take(buffer, 1 + len(found) % 3)
            if len(found) % 4 == 0:  # closed while consumers wait
                waiting = [crew.start(buffer.sample()) for _ in range(2)]
                await turns(len(found) % 7)
                await buffer.aclose()
                found += [fingerprint(end) for end in await outcomes(*waiting) if isinstance(end, Batch)]
    check_same(found[:40], expected)


@pytest.mark.parametrize("depth", [0, 2])
async def test_closing_while_a_stateful_transform_runs(depth: int) -> None:
    stop = Stop()

    def hook(seen: int) -> None:
        if seen == 3:
            stop()

    buffer = in_order(CountingTransform(hook), prefetch=depth)
    await buffer.extend(rows(80))
    async with Crew() as crew:
        await buffer.open()
        seen: list[int] = []
        while len(seen) < 2:
            seen.append(int((await buffer.sample())["seen"][0]))
        waiting = crew.start(buffer.sample())
        await stop.come.reached()
        close = crew.start(buffer.aclose())
        await turns()
        stop.go.set()
        await outcomes(waiting, close)
        async with buffer:
            # What the thread made is kept: made again, it would be another.
            seen += [int((await within(buffer.sample()))["seen"][0]) for _ in range(5)]
        assert seen == [1, 2, 3, 4, 5, 6, 7]


async def test_calls_while_the_buffer_is_being_opened() -> None:
    for steps in range(6):
        for threads in (False, True):
            buffer = in_order(
                Unlucky({}).sync, storage=ThreadedStorage(80) if threads else TensorStorage(80), prefetch=2, workers=2
            )
            await buffer.extend(rows(80))

            async def sample(steps: int = steps, buffer: ReplayBuffer = buffer) -> Batch | None:
                await turns(steps)
                try:
                    return await buffer.sample()
                except BufferClosedError:
                    return None

            _, early = await within(asyncio.gather(buffer.open(), sample()))
            received = [] if early is None else [early.number]
            received += [(await within(buffer.sample())).number for _ in range(5)]
            await buffer.aclose()
            assert received == list(range(len(received)))


async def test_calls_while_the_buffer_is_being_opened_again() -> None:
    buffer = in_order(Unlucky({0: 1}).sync, prefetch=2, workers=2)
    await buffer.extend(rows(80))
    async with buffer:
        with pytest.raises(PrefetchError):
            await buffer.sample()
    _, batch = await within(asyncio.gather(buffer.open(), buffer.sample()))
    assert batch.number == 0
    assert [(await within(buffer.sample())).number for _ in range(5)] == [1, 2, 3, 4, 5]
    await buffer.aclose()


async def test_aclose_while_consumers_and_writers_wait() -> None:
    stop = Stop()
    storage = ThreadedStorage(80)
    buffer = ReplayBuffer(storage, batch_size=4, transform=lambda data: data, workers=2)
    async with Crew() as crew:
        await buffer.open()
        await buffer.extend(rows(80))
        storage.on_gather = stop
        consumers = [crew.start(buffer.sample()) for _ in range(5)]
        await stop.come.reached()
        writers = [crew.start(buffer.extend(rows(1))) for _ in range(2)]
        await turns()
        close = crew.start(buffer.aclose())
        # They are told at once, while a thread still gathers.
        assert {type(end) for end in await outcomes(*consumers, *writers, seconds=AT_ONCE)} == {BufferClosedError}
        assert not close.done()
        stop.go.set()
        await within(close)
        assert not background_tasks()


async def test_aclose_waits_for_a_write_that_a_thread_makes() -> None:
    stop = Stop()
    storage = ThreadedStorage(80)
    buffer = ReplayBuffer(storage, batch_size=4)
    async with Crew() as crew:
        await buffer.open()
        await buffer.extend(rows(10))
        storage.on_write = stop
        write = crew.start(buffer.extend(rows(3)))
        await stop.come.reached()
        close = crew.start(buffer.aclose())
        await turns()
        assert not close.done()
        stop.go.set()
        # It was under way, so it is whole.
        ends = await outcomes(write, close)
        assert ends[0].tolist() == [10, 11, 12]
        assert (len(buffer), buffer.write_count) == (13, 13)
        async with buffer:
            await within(buffer.extend(rows(1)))


async def test_opening_and_closing_at_once() -> None:
    for order in (("open", "aclose"), ("aclose", "open"), ("open", "open", "aclose", "aclose", "open")):
        for steps in range(5):
            buffer = in_order(Unlucky({}).sync, prefetch=2, workers=2)
            await buffer.extend(rows(80))

            async def call(name: str, wait: int, buffer: ReplayBuffer = buffer) -> None:
                await turns(wait)
                await getattr(buffer, name)()

            ends = await within(
                asyncio.gather(*(call(name, i * steps) for i, name in enumerate(order)), return_exceptions=True)
            )
            assert all(end is None or isinstance(end, AsyncBufError) for end in ends)
            await within(buffer.aclose())
            assert not background_tasks()
            async with buffer:
                assert (await within(buffer.sample())).number == 0


async def test_aclose_from_another_task_and_twice() -> None:
    buffer = in_order(Unlucky({}).sync, prefetch=2)
    await buffer.extend(rows(80))
    async with Crew() as crew:
        await crew.start(buffer.open())
        await buffer.sample()
        await outcomes(*(crew.start(buffer.aclose()) for _ in range(3)))
        await buffer.aclose()
        with pytest.raises(BufferClosedError):
            await buffer.sample()
        async with buffer:
            assert (await buffer.sample()).number == 1


async def test_aclose_within_iteration() -> None:
    buffer = in_order(Unlucky({}).sync, prefetch=2)
    await buffer.extend(rows(80))
    await buffer.open()
    received = []
    async for batch in buffer:
        received.append(batch.number)
        if batch.number == 2:
            await buffer.aclose()
    assert received == [0, 1, 2]


async def test_aclose_with_a_time_limit() -> None:
    stop = Stop()

    def transform(data: Any) -> Any:
        stop()
        return data

    buffer = in_order(transform)
    await buffer.extend(rows(80))
    async with Crew() as crew:
        await buffer.open()
        sample = crew.start(buffer.sample())
        await stop.come.reached()
        with pytest.raises(TimeoutError):
            await buffer.aclose(timeout=0.01)
        assert isinstance((await outcomes(sample))[0], BufferClosedError)
        with pytest.raises(AsyncBufError):
            await buffer.open()
        stop.go.set()
        await within(buffer.aclose())
        async with buffer:
            assert (await within(buffer.sample())).number == 0


async def test_a_buffer_that_closes_late_closes_by_itself() -> None:
    stop = Stop()

    def transform(data: Any) -> Any:
        stop()
        return data

    buffer = in_order(transform)
    await buffer.extend(rows(80))
    async with Crew() as crew:
        await buffer.open()
        sample = crew.start(buffer.sample())
        await stop.come.reached()
        with pytest.raises(TimeoutError):
            await buffer.aclose(timeout=0.01)
        await outcomes(sample)
        ending = background_tasks()
        stop.go.set()
        await outcomes(*ending)
        await turns()
        # Its thread and its tasks have ended: "the buffer closes when it does".
        async with buffer:
            assert (await within(buffer.sample())).number == 0


async def test_waiting_takes_no_processor_time() -> None:
    stop = Stop()

    def transform(data: Any) -> Any:
        stop()
        return data

    buffer = in_order(transform, workers=2, prefetch=2, storage=ThreadedStorage(80))
    await buffer.extend(rows(80))
    async with Crew() as crew:
        await buffer.open()
        waiting = [crew.start(buffer.sample()) for _ in range(3)]
        await stop.come.reached()
        start = time.thread_time()
        await asyncio.sleep(0.2)
        with pytest.raises(TimeoutError):
            await buffer.aclose(timeout=0.2)
        used = time.thread_time() - start
        stop.go.set()
        await within(buffer.aclose())
        await outcomes(*waiting)
    assert used < 0.05


@pytest.mark.parametrize("steps", range(4))
async def test_closing_while_a_gather_that_is_tried_again_waits_for_a_write(steps: int) -> None:
    class Unreadable(ThreadedStorage):
        failures = 1

        def gather(self, indices: torch.Tensor) -> Any:
            if self.failures:
                self.failures -= 1
                raise OSError("gather")
            return super().gather(indices)

    stop, storage = Stop(), Unreadable(80)
    buffer = ReplayBuffer(storage, batch_size=4)
    async with Crew() as crew:
        await buffer.open()
        await buffer.extend(rows(80))
        with pytest.raises(PrefetchError):
            await buffer.sample()
        storage.on_write = stop
        write = crew.start(buffer.extend(rows(1)))
        await stop.come.reached()
        again = crew.start(buffer.sample())
        await turns()
        close = crew.start(buffer.aclose())
        await turns(steps)
        stop.go.set()
        await outcomes(write, again, close)
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("asyncbuf")]
        async with buffer:
            await within(buffer.extend(rows(1)), AT_ONCE)
            assert [(await within(buffer.sample(), AT_ONCE)).number for _ in range(3)] == [0, 1, 2]
        assert not left


async def check_storm(seed: int, *, gathers_fail: bool) -> None:
    """Calls of every kind, at every moment of opening and closing: in the end everything works, and nothing is lost."""
    choose = random.Random(seed)

    class Unreliable(ThreadedStorage):
        def gather(self, indices: torch.Tensor) -> Any:
            if gathers_fail and choose.random() < 0.3:
                raise OSError("gather")
            return super().gather(indices)

    def sync(data: Any) -> Any:
        if choose.random() < 0.2:
            raise LookupError("transform")
        return data

    async def coroutine(data: Any) -> Any:
        await asyncio.sleep(0)
        return sync(data)

    storage = Unreliable(50) if choose.random() < 0.7 else TensorStorage(50)
    buffer = ReplayBuffer(
        storage,
        sampler=SamplerWithoutReplacement(),
        batch_size=4,
        prefetch=choose.choice((0, 2)),
        workers=choose.choice((1, 2)),
        transform=choose.choice(([], [sync], [coroutine], [sync, coroutine, sync])),
    )
    received: list[int] = []

    async def write() -> None:
        with contextlib.suppress(BufferClosedError):
            await buffer.extend(rows(2))

    async def read() -> None:
        with contextlib.suppress(BufferClosedError, PrefetchError):
            received.append((await buffer.sample()).number)

    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    await buffer.extend(rows(50))
    async with Crew() as crew:
        for _ in range(10):
            await buffer.open()
            tasks = [crew.start(choose.choice((write, read, read))()) for _ in range(choose.randrange(1, 7))]
            await turns(choose.randrange(8))
            if choose.random() < 0.3:
                await asyncio.sleep(0.001)
            if choose.random() < 0.5:
                for task in choose.sample(tasks, len(tasks) // 2):
                    task.cancel()
            await within(buffer.aclose(), AT_ONCE)
            assert not background_tasks()
            if choose.random() < 0.5:
                await outcomes(*tasks, seconds=AT_ONCE)
        async with buffer:
            await within(buffer.extend(rows(1)), AT_ONCE)
            for _ in range(5):
                count = len(received)
                while len(received) == count:
                    await within(read(), AT_ONCE)
    assert received == list(range(len(received)))
    assert not problems


@pytest.mark.parametrize("gathers_fail", [False, True], ids=["transforms fail", "gathers fail"])
@pytest.mark.parametrize("seeds", [15, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_opening_and_closing_at_any_moment(seeds: int, gathers_fail: bool) -> None:
    for seed in range(seeds):
        await check_storm(seed, gathers_fail=gathers_fail)


# -- the event loop ends ----------------------------------------------------------------------------------------------

LEFT_OPEN = """
import asyncio, signal, sys, threading
import torch, uvloop
from asyncbuf import ReplayBuffer, TensorStorage

async def main(way):
    def transform(data):
        if way == "thread":
            release.wait(0.3)
        if way == "exit":
            raise SystemExit(3)
        return data

    release = threading.Event()
    buffer = ReplayBuffer(TensorStorage(100), batch_size=4, prefetch=2, workers=2, transform=transform)
    await buffer.extend({"x": torch.zeros(10)})
    await buffer.open()
    kept.append(buffer)
    if way == "waiting":
        await buffer.empty()
    if way == "interrupt":
        await buffer.empty()
        asyncio.get_running_loop().call_later(0.02, signal.raise_signal, signal.SIGINT)
        try:
            await buffer.sample()
        finally:
            await buffer.aclose()
    if way == "exit":
        ends = await asyncio.gather(*(buffer.sample() for _ in range(5)), return_exceptions=True)
        print([type(end).__name__ for end in ends], {repr(end.__cause__) for end in ends})
    if way in ("waiting", "thread"):
        kept.append(asyncio.create_task(buffer.sample()))
        await asyncio.sleep(0.02)

# A shell lets programs that it starts in the background ignore the signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
kept = []
for way in sys.argv[1:]:
    for factory in (asyncio.new_event_loop, uvloop.new_event_loop):
        try:
            with asyncio.Runner(loop_factory=factory) as runner:
                runner.run(main(way))
        except KeyboardInterrupt:
            print("interrupted")
        print(way, "ended", [thread.name for thread in threading.enumerate() if thread.name.startswith("asyncbuf")])
"""


def left_open(*ways: str) -> tuple[list[str], str]:
    """What it prints, and what it complains about."""
    pytest.importorskip("uvloop")
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", LEFT_OPEN, *ways],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout.splitlines(), process.stderr


@pytest.mark.timeout(170)  # it imports torch in a process of its own, which takes long on a busy machine
def test_a_program_may_end_with_an_open_buffer() -> None:
    expected = [line for way in ("idle", "waiting", "thread") for line in [f"{way} ended []"] * 2]
    expected += ["interrupted", "interrupt ended []"] * 2
    assert left_open("idle", "waiting", "thread", "interrupt") == (expected, "")


@pytest.mark.timeout(170)
def test_a_transform_that_exits_tells_those_who_wait() -> None:
    line = f"{['BufferFailedError'] * 5} {{'SystemExit(3)'}}"
    assert left_open("exit")[0] == [line, "exit ended []"] * 2


def test_a_buffer_outlives_the_event_loop_it_was_left_open_in() -> None:
    buffer = ReplayBuffer(TensorStorage(80), batch_size=4, workers=2)

    async def first() -> None:
        await buffer.extend(rows(80))
        await buffer.open()
        await buffer.sample()

    async def second() -> int:
        await buffer.aclose()
        async with buffer:
            return (await buffer.sample()).number

    asyncio.run(first())
    assert asyncio.run(second()) == 1


async def test_latches_of_these_tests_work() -> None:
    latch = Latch()
    thread = threading.Thread(target=latch.set)
    thread.start()
    await latch.reached()
    thread.join()
    latch.wait()
    assert latch.is_set
