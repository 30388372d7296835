"""No leaks: what a buffer used is gone when it is closed or dropped, without the help of the garbage collector."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import threading
import tracemalloc
import warnings
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import (
    AsyncBufError,
    BufferClosedError,
    BufferFailedError,
    PrefetchError,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SchemaError,
    TensorStorage,
)
from tests.helpers import (
    Stop,
    ThreadedStorage,
    background_tasks,
    dismiss,
    outcomes,
    rows,
    turns,
    until,
    within,
    worker_tasks,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    import torch

    from asyncbuf import Draw, Rows


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # what is there now need not be looked at before the next test
    gc.disable()
    yield
    gc.enable()


def threads_of_buffers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("asyncbuf")]


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


def resident_bytes() -> int:
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Fetcher:
    """Makes buffers and looks whether they, and what they hold, are gone."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Any]] = []

    def __call__(self, *, threads: bool = False, storage: TensorStorage | None = None, **options: Any) -> ReplayBuffer:
        if storage is None:
            storage = ThreadedStorage(200) if threads else TensorStorage(200)
        buffer = ReplayBuffer(storage, batch_size=4, **options)
        self._refs += [weakref.ref(buffer), weakref.ref(storage)]
        return buffer

    def left(self) -> list[str]:
        return [type(value).__name__ for ref in self._refs if (value := ref()) is not None]


async def never_opened(make: Fetcher) -> None:
    await make(prefetch=2, workers=2).extend(rows(50))


async def never_opened_with_large_writes(make: Fetcher) -> None:
    buffer = make(threads=True)
    await asyncio.gather(buffer.extend(rows(50)), buffer.extend(rows(50)))


async def used(make: Fetcher) -> None:
    buffer = make(prefetch=2, workers=2, transform=lambda data: data)
    await buffer.extend(rows(50))
    async with buffer:
        await buffer.sample()
        await buffer.sample(7)


async def used_with_threads(make: Fetcher) -> None:
    buffer = make(threads=True, prefetch=2, workers=2, transform=lambda data: data)
    async with buffer:
        await buffer.extend(rows(50))
        await buffer.sample()


async def iterated(make: Fetcher) -> None:
    buffer = make(sampler=SamplerWithoutReplacement(), prefetch=2)
    await buffer.extend(rows(50))
    async with buffer:
        async for _ in buffer.epoch():
            pass
        async for _ in buffer:
            break


async def with_a_state(make: Fetcher) -> None:
    class Stateful:
        def state_dict(self) -> dict[str, int]:
            return {"state": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            assert state == {"state": 1}

        def __call__(self, data: Any) -> Any:
            return data

    buffer = make(transform=Stateful(), prefetch=2)
    await buffer.extend(rows(50))
    async with buffer:
        await buffer.sample()


async def transform_that_raises(make: Fetcher) -> None:
    def transform(data: Any) -> Any:
        raise ValueError

    buffer = make(transform=transform, prefetch=2)
    await buffer.extend(rows(50))
    async with buffer:
        for _ in range(3):
            with contextlib.suppress(PrefetchError):
                await buffer.sample()


async def async_transform_that_raises(make: Fetcher) -> None:
    async def transform(data: Any) -> Any:
        raise ValueError

    buffer = make(transform=transform, prefetch=2)
    await buffer.extend(rows(50))
    async with buffer:
        for _ in range(3):
            with contextlib.suppress(PrefetchError):
                await buffer.sample()


async def transform_that_raises_a_group(make: Fetcher) -> None:
    async def fail() -> None:
        raise ValueError

    async def transform(data: Any) -> Any:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            raise LookupError

    buffer = make(transform=transform, prefetch=2)
    await buffer.extend(rows(50))
    async with buffer:
        for _ in range(3):
            with contextlib.suppress(PrefetchError):
                await buffer.sample()


async def quick_transform_that_raises(make: Fetcher) -> None:
    calls = 0

    def transform(data: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 8:
            raise ValueError
        return data

    buffer = make(transform=transform)
    await buffer.extend(rows(50))
    async with buffer:
        for _ in range(9):
            with contextlib.suppress(PrefetchError):
                await buffer.sample()


class Unreadable(ThreadedStorage):
    """Cannot be read."""

    def gather(self, indices: torch.Tensor) -> Any:
        raise OSError


async def gather_that_raises(make: Fetcher) -> None:
    class Small(Unreadable):
        def gather_nbytes(self, count: int) -> int:
            return 0

    buffer = make(storage=Small(200))
    await buffer.extend(rows(50))
    async with buffer:
        for _ in range(3):
            with contextlib.suppress(PrefetchError):
                await buffer.sample()


async def large_gather_that_raises(make: Fetcher) -> None:
    buffer = make(storage=Unreadable(200))
    await buffer.extend(rows(50))
    async with buffer:
        for _ in range(3):
            with contextlib.suppress(PrefetchError):
                await buffer.sample()


async def sampler_that_raises(make: Fetcher) -> None:
    class Broken(RandomSampler):
        def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
            raise LookupError

    buffer = make(sampler=Broken())
    await buffer.extend(rows(50))
    async with buffer:
        for _ in range(3):
            with contextlib.suppress(LookupError):
                await buffer.sample()


async def refused_writes(make: Fetcher) -> None:
    buffer = make()
    await buffer.extend(rows(50))
    async with buffer:
        with contextlib.suppress(SchemaError):
            await buffer.extend({"other": [1]})


async def writes_refused_in_their_turn(make: Fetcher) -> None:
    buffer = make(threads=True)
    async with buffer:
        await asyncio.gather(buffer.extend(rows(50)), buffer.extend({"other": rows(3)}), return_exceptions=True)


async def given_up_calls(make: Fetcher) -> None:
    buffer = make()
    async with buffer:
        for _ in range(3):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.001):
                    await buffer.sample()


async def cancelled_calls(make: Fetcher) -> None:
    stop = Stop()

    def transform(data: Any) -> Any:
        stop()
        return data

    buffer = make(transform=transform)
    await buffer.extend(rows(50))
    async with buffer:
        task = asyncio.create_task(buffer.sample())
        await stop.come.reached()
        await dismiss([task])
        stop.go.set()


async def cancelled_write(make: Fetcher) -> None:
    stop = Stop()
    buffer = make(storage=ThreadedStorage(200, on_write=stop))
    async with buffer:
        task = asyncio.create_task(buffer.extend(rows(50)))
        await stop.come.reached()
        task.cancel()
        await turns()
        stop.go.set()
        await outcomes(task)


async def _hold_a_gather(buffer: ReplayBuffer, storage: ThreadedStorage) -> tuple[Stop, list[asyncio.Task[Any]]]:
    """A consumer whose rows are being gathered, and two writers that wait for it."""
    stop = Stop()
    await buffer.extend(rows(50))
    storage.on_gather = stop
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(buffer.sample())]
    await stop.come.reached()
    tasks += [asyncio.create_task(buffer.extend(rows(1))) for _ in range(2)]
    await turns()
    return stop, tasks


async def cancelled_waiting_writes(make: Fetcher) -> None:
    storage = ThreadedStorage(200)
    buffer = make(storage=storage)
    async with buffer:
        stop, tasks = await _hold_a_gather(buffer, storage)
        await dismiss(tasks)
        stop.go.set()


async def closed_while_all_wait(make: Fetcher) -> None:
    storage = ThreadedStorage(200)
    buffer = make(storage=storage)
    async with buffer:
        stop, tasks = await _hold_a_gather(buffer, storage)
        close = asyncio.create_task(buffer.aclose())
        await turns()
        stop.go.set()
        ends = await outcomes(*tasks, close)
        assert [type(end) for end in ends[:3]] == [BufferClosedError] * 3


async def crashed_while_all_wait(make: Fetcher) -> None:
    storage = ThreadedStorage(200)
    buffer = make(storage=storage)
    async with buffer:
        stop, tasks = await _hold_a_gather(buffer, storage)
        worker_tasks()[0].cancel()
        ends = await outcomes(*tasks)
        assert [type(end) for end in ends] == [BufferFailedError] * 3
        stop.go.set()


async def used_when_not_open(make: Fetcher) -> None:
    buffer = make()
    for _ in range(2):
        with contextlib.suppress(BufferClosedError):
            await buffer.sample()
        async with buffer:
            with contextlib.suppress(AsyncBufError):
                await buffer.open()


SCENARIOS = [
    never_opened,
    never_opened_with_large_writes,
    used,
    used_with_threads,
    iterated,
    with_a_state,
    transform_that_raises,
    async_transform_that_raises,
    transform_that_raises_a_group,
    quick_transform_that_raises,
    gather_that_raises,
    large_gather_that_raises,
    sampler_that_raises,
    refused_writes,
    writes_refused_in_their_turn,
    given_up_calls,
    cancelled_calls,
    cancelled_write,
    cancelled_waiting_writes,
    closed_while_all_wait,
    crashed_while_all_wait,
    used_when_not_open,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_nothing_is_left_after(scenario: Callable[[Fetcher], Awaitable[None]]) -> None:
    make, files = Fetcher(), open_files()
    await scenario(make)
    await turns()
    assert not background_tasks()
    # A thread may need a moment to let go of what it did last.
    with contextlib.suppress(TimeoutError):
        await until(lambda: not make.left() and not threads_of_buffers())
    assert not threads_of_buffers()
    assert open_files() <= files
    assert not make.left()


# -- many times over --------------------------------------------------------------------------------------------------


def large_rows() -> dict[str, Any]:
    """1 MB."""
    return rows(100, width=2_600)


@pytest.mark.parametrize("cycles", [60, pytest.param(200, marks=pytest.mark.slow)])
async def test_many_cycles_leave_nothing(cycles: int) -> None:
    async def cycle(number: int) -> None:
        buffer = make(
            prefetch=2, workers=2, sampler=SamplerWithoutReplacement(), transform=[lambda data: data, asynchronous]
        )
        async with buffer:
            await buffer.extend(items)
            await buffer.sample()
            if number % 2:
                async for _ in buffer.epoch():
                    pass

    async def asynchronous(data: Any) -> Any:
        return data

    make, items = Fetcher(), large_rows()
    for number in range(20):
        await cycle(number)
    files, resident = open_files(), resident_bytes()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(cycles):
            await cycle(number)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    resident = resident_bytes() - resident
    await turns()
    assert not background_tasks()
    assert not threads_of_buffers()
    assert open_files() <= files
    # Left behind, each cycle would be some 20 kB of objects and 1 MB of rows. Its weak references are 1 kB.
    assert grown < 5_000 * cycles
    assert resident < 300_000 * cycles


@pytest.mark.parametrize("kind", ["never opened", "closed", "open"])
async def test_50_dropped_buffers_leave_nothing(kind: str) -> None:
    make, items = Fetcher(), large_rows()

    async def one() -> None:
        buffer = make(prefetch=2, workers=2, transform=lambda data: data)
        if kind == "never opened":
            await buffer.extend(items)
            return
        await buffer.open()
        await buffer.extend(items)
        await buffer.sample()
        if kind == "closed":
            await buffer.aclose()

    for _ in range(50):
        if kind == "open":
            with pytest.warns(ResourceWarning, match="dropped while it was open"):
                await one()
        else:
            await one()
    await until(lambda: not background_tasks() and not threads_of_buffers())
    await turns()
    assert not make.left()


async def test_a_dropped_buffer_ends_where_warnings_are_errors() -> None:
    unraisable: list[object] = []

    async def one() -> None:
        buffer = ReplayBuffer(TensorStorage(10), batch_size=4)
        await buffer.open()

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda args: unraisable.append(type(args.exc_value)))
        warnings.simplefilter("error")
        await one()
    await turns(30)
    left = background_tasks()
    await dismiss(left)
    assert unraisable == [ResourceWarning]
    assert not left


async def test_a_stream_keeps_the_buffer() -> None:
    async def main() -> None:
        stream = (await _opened(make)).epoch().__aiter__()  # nobody else holds the buffer
        assert (await anext(stream)).number == 0

    make = Fetcher()
    with pytest.warns(ResourceWarning, match="dropped while it was open"):
        await within(main())
    await until(lambda: not background_tasks())
    await turns()
    assert not make.left()


MEMORY = """
import asyncio, os, sys
import torch
from asyncbuf import ReplayBuffer, TensorStorage

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

async def main(count, calls, depth):
    fields = {"obs": (17,), "action": (6,), "reward": (), "next_obs": (17,)}
    items = {name: torch.zeros(10_000, *shape) for name, shape in fields.items()}
    items["terminated"] = torch.zeros(10_000, dtype=torch.bool)
    buffer = ReplayBuffer(TensorStorage(100 * count), batch_size=256, prefetch=depth)
    async with buffer:
        await buffer.extend(items)
        for _ in range(1000):
            await buffer.sample()
        before = resident()
        for _ in range(count // 10_000):
            await buffer.extend(items)
        stored = resident() - before
        before = resident()
        for _ in range(calls):
            await buffer.sample()
        print(stored, resident() - before)

for depth in map(int, sys.argv[3:]):
    # Each in a process of its own, made of one that has imported torch and done nothing else.
    child = os.fork()
    if child == 0:
        asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), depth))
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("calls", [8_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_memory_is_what_is_stored(calls: int) -> None:
    count, depths = 500_000, (0, 4)
    process = subprocess.run(
        [sys.executable, "-c", MEMORY, *map(str, (count, calls, *depths))], capture_output=True, text=True, check=True
    )
    for depth, line in zip(depths, process.stdout.splitlines(), strict=True):
        stored, grown = map(int, line.split())
        bytes_more, rows_more = f"{grown / 1e3:+.0f} KB after {calls:,} batches", f"{stored / (165 * count) - 1:+.1%}"
        print(f"\nprefetch {depth}: {rows_more} of the bytes stored, {bytes_more}")
        assert stored < 1.05 * 165 * count
        assert grown < 2_000_000


FAULTS = """
import asyncio, resource, sys
import torch
from asyncbuf import ReplayBuffer, TensorStorage

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

async def main(rows, batch_size, width, depth):
    buffer = ReplayBuffer(TensorStorage(rows), batch_size=batch_size, prefetch=depth)
    items = {"x": torch.zeros(rows, width, dtype=torch.uint8), "y": torch.zeros(rows)}
    async with buffer:
        await buffer.extend(items)
        for _ in range(20):
            await buffer.sample()
        before = faults()
        for _ in range(100):
            await buffer.sample()
        print(faults() - before)

for arguments in sys.argv[1:]:
    asyncio.run(main(*map(int, arguments.split())))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts page faults as Linux does")
def test_a_batch_that_is_dropped_touches_no_new_page() -> None:
    # One process for all of them: most of the time it imports torch.
    cases = [(rows, 256, width, depth) for rows, width in ((10_000, 165), (1_000, 2 * 4 * 84 * 84)) for depth in (0, 4)]
    arguments = [" ".join(map(str, case)) for case in cases]
    process = subprocess.run([sys.executable, "-c", FAULTS, *arguments], capture_output=True, text=True, check=True)
    for case, faults in zip(cases, map(int, process.stdout.split()), strict=True):
        _, batch_size, width, _ = case
        # As many batches as there are slots may be the first in theirs.
        assert faults < 10 * batch_size * width / 4096, case


async def _opened(make: Fetcher) -> ReplayBuffer:
    buffer = make(sampler=SamplerWithoutReplacement())
    await buffer.extend(rows(50))
    return await buffer.open()
