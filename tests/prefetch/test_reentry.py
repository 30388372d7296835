"""A call that only its own caller could answer raises at once; all others from within a transform work."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import (
    AsyncBufError,
    BufferClosedError,
    ListStorage,
    PrefetchError,
    ReplayBuffer,
    SamplerWithoutReplacement,
    Snapshot,
    TensorStorage,
)
from asyncbuf._runtime.reentry import Job, ReentryGuard, current_job
from tests.helpers import Crew, Latch, numbers, rows, seeded, turns, within

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from pathlib import Path

Calls = dict[str, "Callable[[ReplayBuffer, Path], Coroutine[Any, Any, Any]]"]


async def freeze(buffer: ReplayBuffer, path: Path) -> None:
    async with buffer.frozen():
        pass


async def iterate(buffer: ReplayBuffer, path: Path) -> None:
    async for _ in buffer:
        break


async def one_pass(buffer: ReplayBuffer, path: Path) -> None:
    async for _ in buffer.epoch():
        break


REFUSED: Calls = {
    "sample": lambda buffer, path: buffer.sample(),
    "sample of another size": lambda buffer, path: buffer.sample(2),  # there is one worker, which makes the call
    "async for": iterate,
    "epoch": one_pass,
    "snapshot": lambda buffer, path: buffer.snapshot(),
    "snapshot with a timeout": lambda buffer, path: buffer.snapshot(0.01),
    "state_dict": lambda buffer, path: buffer.state_dict(),
    "save": lambda buffer, path: buffer.save(path / "checkpoint"),
    "frozen": freeze,
    "restore": lambda buffer, path: buffer.restore(Snapshot()),
    "load_state_dict": lambda buffer, path: buffer.load_state_dict({}),
    "load": lambda buffer, path: buffer.load(path / "checkpoint"),
}
ALLOWED: Calls = {
    "extend": lambda buffer, path: buffer.extend(rows(3)),
    "add": lambda buffer, path: buffer.add({"number": 7, "wide": torch.ones(1)}),
    "update_priority": lambda buffer, path: buffer.update_priority([0], 1.0),
    "skip": lambda buffer, path: buffer.skip(),
    "flush": lambda buffer, path: buffer.flush(),
    "empty": lambda buffer, path: buffer.empty(),
    "finish": lambda buffer, path: buffer.finish(),
}


async def directly(call: Coroutine[Any, Any, Any]) -> Any:
    return await call


async def in_a_task(call: Coroutine[Any, Any, Any]) -> Any:
    return await asyncio.create_task(call)


async def gathered(call: Coroutine[Any, Any, Any]) -> Any:
    return (await asyncio.gather(call))[0]


async def with_a_timeout(call: Coroutine[Any, Any, Any]) -> Any:
    return await asyncio.wait_for(call, 60)


async def in_a_group(call: Coroutine[Any, Any, Any]) -> Any:
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(call)
    except ExceptionGroup as error:
        raise error.exceptions[0] from None


async def by_way_of_a_thread(call: Coroutine[Any, Any, Any]) -> Any:
    loop = asyncio.get_running_loop()
    return await asyncio.to_thread(lambda: asyncio.run_coroutine_threadsafe(call, loop).result())


WAYS: dict[str, Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]]] = {
    "directly": directly,
    "task": in_a_task,
    "gather": gathered,
    "wait_for": with_a_timeout,
    "task group": in_a_group,
    "thread": by_way_of_a_thread,
}


class Calling:
    """A transform, sync or async, that makes a call for its first batch and keeps what came of it."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, Any]], way: Callable[..., Awaitable[Any]]) -> None:
        self.make = make
        self.way = way
        self.found: list[Any] = []

    async def awaited(self, data: Any) -> Any:
        if not self.found:
            try:
                self.found.append(await self.way(self.make()))
            except AsyncBufError as error:
                self.found.append(error)
        return data

    def sync(self, loop: asyncio.AbstractEventLoop) -> Callable[[Any], Any]:
        return lambda data: asyncio.run_coroutine_threadsafe(self.awaited(data), loop).result()


def make_buffer(kind: str, calling: Calling, prefetch: int = 2) -> ReplayBuffer:
    sync = calling.sync(asyncio.get_running_loop())
    transform: Any = {"async": calling.awaited, "sync": sync, "awaitable": lambda data: calling.awaited(data)}.get(kind)
    return ReplayBuffer(
        TensorStorage(100),
        sampler=SamplerWithoutReplacement(),
        batch_size=4,
        prefetch=prefetch,
        transform=transform,
        collate_fn=sync if kind == "collate" else None,
        generator=seeded(),
    )


def is_about_itself(error: Any) -> bool:
    return type(error) is AsyncBufError and "of the same buffer" in str(error)


@pytest.mark.parametrize("kind", ["async", "sync", "awaitable", "collate"])
@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
async def test_calls_that_would_wait_for_themselves(
    call: Callable[..., Coroutine[Any, Any, Any]], kind: str, tmp_path: Path
) -> None:
    calling = Calling(lambda: call(buffer, tmp_path), directly)
    buffer = make_buffer(kind, calling)
    await buffer.extend(rows(20))
    async with buffer:
        await within(buffer.sample())
        assert is_about_itself(calling.found[0])
        await within(buffer.sample())


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("prefetch", [0, 2])
async def test_whoever_makes_the_call_for_a_transform(way: Callable[..., Any], prefetch: int) -> None:
    calling = Calling(lambda: buffer.sample(), way)
    buffer = make_buffer("async", calling, prefetch)
    await buffer.extend(rows(20))
    async with buffer:
        await within(buffer.sample())
    assert is_about_itself(calling.found[0])


@pytest.mark.parametrize("kind", ["async", "sync", "awaitable", "collate"])
@pytest.mark.parametrize("call", ALLOWED.values(), ids=ALLOWED)
async def test_calls_that_wait_for_nothing_of_the_kind(
    call: Callable[..., Coroutine[Any, Any, Any]], kind: str, tmp_path: Path
) -> None:
    calling = Calling(lambda: call(buffer, tmp_path), directly)
    buffer = make_buffer(kind, calling)
    await buffer.extend(rows(20))
    async with buffer:
        await within(buffer.sample())
        assert not isinstance(calling.found[0], Exception)


async def test_the_error_reaches_the_consumer() -> None:
    async def transform(data: Any) -> Any:
        return (await buffer.sample()).data

    buffer = ReplayBuffer(TensorStorage(10), batch_size=2, transform=transform)
    await buffer.extend(rows(10))
    async with buffer:
        with pytest.raises(PrefetchError, match=r"sample\(\) was called from within a transform or collate_fn"):
            await within(buffer.sample())


async def test_a_task_that_a_transform_left_behind_may_sample() -> None:
    may_go = asyncio.Event()

    async def later() -> Any:
        await may_go.wait()
        return await buffer.sample()

    async def transform(data: Any) -> Any:
        if not started:
            started.append(crew.start(later()))
        return data

    started: list[asyncio.Task[Any]] = []
    buffer = ReplayBuffer(TensorStorage(10), batch_size=2, transform=transform)
    await buffer.extend(rows(10))
    async with Crew() as crew, buffer:
        await within(buffer.sample())
        may_go.set()
        await within(started[0])


async def test_a_consumer_may_call_while_a_transform_is_at_work() -> None:
    at_work, may_go = Latch(), Latch()

    def transform(data: Any) -> Any:
        at_work.set()
        may_go.wait()
        return data

    buffer = ReplayBuffer(TensorStorage(10), batch_size=2, transform=transform)
    await buffer.extend(rows(10))
    async with Crew() as crew, buffer:
        batch = crew.start(buffer.sample())
        await at_work.reached()
        snapshot = crew.start(buffer.snapshot())
        await turns()
        may_go.set()
        await within(batch)
        await within(snapshot)


@pytest.mark.parametrize("is_stateful", [False, True])
async def test_a_batch_of_another_size_needs_another_worker(is_stateful: bool) -> None:
    class Nested:
        async def __call__(self, data: Any) -> Any:
            if len(data["number"]) == 4:
                await buffer.sample(2)
            return data

    class Stateful(Nested):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    transform = Stateful() if is_stateful else Nested()
    buffer = ReplayBuffer(TensorStorage(50), batch_size=4, workers=2, transform=transform)
    await buffer.extend(rows(50))
    async with buffer:
        for _ in range(4):
            if is_stateful:
                with pytest.raises(PrefetchError, match="of the same buffer"):
                    await within(buffer.sample())
            else:
                assert len(await within(buffer.sample())) == 4


async def test_workers_that_all_wait_for_another() -> None:
    async def transform(data: Any) -> Any:
        if len(data["number"]) == 4:
            both.append(1)
            if len(both) == 2:
                are_both.set()
            await are_both.wait()
            await buffer.sample(2)
        return data

    both: list[int] = []
    are_both = asyncio.Event()
    buffer = ReplayBuffer(TensorStorage(50), batch_size=4, prefetch=3, workers=2, transform=transform)
    await buffer.extend(rows(50))
    failures = 0
    async with buffer:
        for _ in range(8):
            try:
                await within(buffer.sample())
            except PrefetchError as error:
                failures += "of the same buffer" in str(error)
    assert failures >= 1


async def test_sizes_that_sample_from_each_other() -> None:
    async def transform(data: Any) -> Any:
        await buffer.sample(2 if len(data["number"]) == 4 else 4)
        return data

    buffer = ReplayBuffer(TensorStorage(50), batch_size=4, workers=8, transform=transform)
    await buffer.extend(rows(50))
    async with buffer:
        with pytest.raises(PrefetchError) as caught:
            await within(buffer.sample())
    assert "of the same buffer" in "".join(_causes(caught.value))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
async def test_an_async_transform_may_close_its_buffer(way: Callable[..., Any]) -> None:
    async def transform(data: Any) -> Any:
        await way(buffer.aclose())
        return data

    buffer = ReplayBuffer(TensorStorage(10), batch_size=2, transform=transform)
    await buffer.extend(rows(10))
    await buffer.open()
    with pytest.raises(BufferClosedError):
        await within(buffer.sample())
    await within(buffer.aclose())


@pytest.mark.parametrize("kind", ["sync", "collate"])
async def test_a_thread_of_the_buffer_cannot_close_it(kind: str) -> None:
    calling = Calling(lambda: buffer.aclose(), directly)
    buffer = make_buffer(kind, calling)
    await buffer.extend(rows(20))
    async with buffer:
        await within(buffer.sample())
        assert "aclose() was called from within a sync transform" in str(calling.found[0])


# -- two buffers -------------------------------------------------------------------------------------------------------


def pair(first: Any, second: Any, *, prefetch: int = 0) -> tuple[ReplayBuffer, ReplayBuffer]:
    def make(transform: Any) -> ReplayBuffer:
        return ReplayBuffer(TensorStorage(50), batch_size=4, prefetch=prefetch, transform=transform)

    return make(first), make(second)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("is_sync", [False, True])
async def test_a_transform_may_sample_from_another_buffer(is_sync: bool, prefetch: int) -> None:
    loop = asyncio.get_running_loop()

    async def mix(data: Any) -> Any:
        return {"number": data["number"], "other": (await other.sample())["number"]}

    def mix_in_thread(data: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(mix(data), loop).result()

    buffer, other = pair(mix_in_thread if is_sync else mix, lambda data: data, prefetch=prefetch)
    await buffer.extend(rows(50))
    await other.extend(rows(50, 100))
    async with other, buffer:
        for _ in range(30):  # so many that one would be tried on the event loop, if it seemed to be quick
            batch = await within(buffer.sample())
            assert min(int(number) for number in batch["other"]) >= 100
        await within(buffer.snapshot())
        await within(other.snapshot())


@pytest.mark.parametrize("prefetch", [0, 2])
async def test_two_buffers_that_sample_from_each_other(prefetch: int) -> None:
    async def from_second(data: Any) -> Any:
        await second.sample()
        return data

    async def from_first(data: Any) -> Any:
        await first.sample()
        return data

    first, second = pair(from_second, from_first, prefetch=prefetch)
    await first.extend(rows(50))
    await second.extend(rows(50))
    async with first, second:
        with pytest.raises(PrefetchError) as caught:
            await within(first.sample())
    assert "of another buffer" in "".join(_causes(caught.value))


async def test_three_buffers_in_a_ring() -> None:
    def sampling(number: int) -> Any:
        async def transform(data: Any) -> Any:
            await ring[(number + 1) % 3].sample()
            return data

        return transform

    ring = [ReplayBuffer(TensorStorage(50), batch_size=4, transform=sampling(number)) for number in range(3)]
    for buffer in ring:
        await buffer.extend(rows(50))
    async with ring[0], ring[1], ring[2]:
        with pytest.raises(PrefetchError) as caught:
            await within(ring[1].sample())
    assert "of another buffer" in "".join(_causes(caught.value))


def _causes(error: BaseException | None) -> list[str]:
    return [] if error is None else [str(error), *_causes(error.__cause__)]


async def test_one_samples_from_the_other_after_the_other_has_sampled_from_it() -> None:
    turn = iter([True, False])

    async def from_second(data: Any) -> Any:
        if next(turn, False):
            await second.sample()
        return data

    async def from_first(data: Any) -> Any:
        if not asked:
            asked.append(True)
            return data
        return (await first.sample()).data

    asked: list[bool] = []
    first, second = pair(from_second, from_first)
    await first.extend(rows(50))
    await second.extend(rows(50))
    async with first, second:
        assert len(numbers(await within(first.sample()))) == 4
        assert len(numbers(await within(second.sample()))) == 4


# -- the guard itself --------------------------------------------------------------------------------------------------


def test_a_job_is_known_within_only() -> None:
    guard = ReentryGuard()
    job = Job(guard)
    assert current_job() is None
    assert job.run(current_job) is job
    assert current_job() is None
    guard.check("anything")
    with guard.waiting("sample"):
        pass


def test_a_job_that_is_over_may_call() -> None:
    guard = ReentryGuard()
    job = Job(guard)
    with pytest.raises(AsyncBufError):
        job.run(guard.check, "sample")
    job.is_over = True
    job.run(guard.check, "sample")


def test_what_a_job_that_is_over_waits_for_does_not_count() -> None:
    first, second = ReentryGuard(), ReentryGuard()
    job, other = Job(first), Job(second)

    def wait_and_check() -> None:
        with second.waiting("sample"):
            other.run(nested)

    def nested() -> None:
        first.check("sample")

    with pytest.raises(AsyncBufError, match="of another buffer"):
        job.run(wait_and_check)
    other.run(nested)
    job.is_over = True
    job.run(wait_and_check)


def test_a_thread_of_its_own_is_nobody() -> None:
    guard = ReentryGuard()
    found: list[Any] = []

    def start() -> None:
        thread = threading.Thread(target=lambda: found.append(current_job()))
        thread.start()
        thread.join()

    Job(guard).run(start)
    assert found == [None]


async def test_a_sync_transform_that_asks_a_buffer_is_never_run_on_the_event_loop() -> None:
    loop = asyncio.get_running_loop()
    where: list[str] = []

    def transform(data: Any) -> Any:
        where.append(threading.current_thread().name)
        asyncio.run_coroutine_threadsafe(other.update_priority([0], 1.0), loop).result()
        asyncio.run_coroutine_threadsafe(other.sample(), loop).result()
        return data

    other = ReplayBuffer(ListStorage(10), batch_size=1, collate_fn=list)
    buffer = ReplayBuffer(TensorStorage(10), batch_size=1, transform=transform)
    await other.extend([torch.ones(1)])
    await buffer.extend(rows(10))
    async with other, buffer:
        for _ in range(20):
            await within(buffer.sample())
    assert all(name.startswith("asyncbuf-transform") for name in where)
