"""User code that raises what nobody expects, where nobody expects it: nothing hangs, is lost, or is held for ever."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import (
    BufferClosedError,
    Draw,
    GatherJobs,
    PrefetchError,
    RandomSampler,
    ReplayBuffer,
    Rows,
    SamplerWithoutReplacement,
    TensorStorage,
)
from tests.helpers import (
    CountingTransform,
    Crew,
    Stop,
    ThreadedStorage,
    TransformClock,
    outcomes,
    rows,
    seeded,
    turns,
    within,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from asyncbuf import Prepared, RowRange

LARGE = 1 << 30
ODD = [ValueError, StopIteration, StopAsyncIteration, MemoryError, asyncio.CancelledError, GeneratorExit]


class Moody(TensorStorage):
    """Raises once, at the place that is asked for."""

    def __init__(self, capacity: int, place: str, kind: type[BaseException], *, large: bool) -> None:
        super().__init__(capacity)
        self.place = place
        self.kind = kind
        self.large = large
        self.left = 0

    def _perhaps(self, place: str) -> None:
        if self.left and place == self.place:
            self.left -= 1
            raise self.kind("moody")

    def gather_nbytes(self, count: int) -> int:
        self._perhaps("gather_nbytes")
        return LARGE if self.large else super().gather_nbytes(count)

    def gather(self, indices: torch.Tensor) -> Any:
        self._perhaps("gather")
        return super().gather(indices)

    def begin_gather(self, draw: Draw, *, inline: bool, parts: int) -> Any:
        self._perhaps("begin_gather")
        if self.left and self.place == "no parts":
            self.left -= 1
            return GatherJobs([], lambda: None)
        copies, combined = super().begin_gather(draw, inline=inline, parts=parts)

        def last() -> Any:
            self._perhaps("combined")
            return combined()

        return GatherJobs(copies, last)

    def write(self, prepared: Prepared, runs: Sequence[RowRange]) -> None:
        self._perhaps("write")
        super().write(prepared, runs)


async def next_numbers(buffer: ReplayBuffer, count: int) -> tuple[list[int], int]:
    """The numbers of the next batches, and how many failures were told before."""
    found: list[int] = []
    failures = 0
    while len(found) < count:
        try:
            found.append((await within(buffer.sample())).number)
        except PrefetchError:
            failures += 1
    return found, failures


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("large", [False, True], ids=["inline", "threads"])
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("place", ["gather_nbytes", "gather", "begin_gather", "combined", "no parts"])
async def test_a_gather_that_cannot_begin_or_end(
    place: str, kind: type[BaseException], large: bool, depth: int
) -> None:
    storage = Moody(50, place, kind, large=large)
    buffer = ReplayBuffer(storage, batch_size=4, prefetch=depth)
    await buffer.extend(rows(50))
    async with buffer:
        storage.left = 2
        try:
            first, failures = await next_numbers(buffer, 6)
        except (ValueError, RuntimeError, StopAsyncIteration, MemoryError, asyncio.CancelledError, GeneratorExit):
            assert place == "gather_nbytes"  # before anything was drawn it is told as it is
            storage.left = 0
            first, failures = await next_numbers(buffer, 6)
        assert first == list(range(6))
        assert failures <= 2
        assert storage.left == 0 or not large
        await within(buffer.extend(rows(5)))
        await within(buffer.snapshot())
        assert buffer.stats().waiting_writers == 0
    async with buffer:
        await within(buffer.extend(rows(5)))


@pytest.mark.parametrize("kind", ODD)
async def test_a_write_in_a_thread_that_raises(kind: type[BaseException]) -> None:
    storage = Moody(50, "write", kind, large=True)
    buffer = ReplayBuffer(storage, batch_size=4)
    items = {"x": torch.arange(20.0)[:, None].repeat(1, 20_000)}  # 1.6 MB
    await within(buffer.extend(items))
    async with buffer:
        storage.left = 1
        with pytest.raises(RuntimeError if kind is StopIteration else kind):
            await within(buffer.extend(items))
        assert len(buffer) == 20
        await within(buffer.extend(items))
        assert len(buffer) == 40
        await within(buffer.sample())


@pytest.mark.parametrize("slow", [False, True], ids=["quick", "slow"])
@pytest.mark.parametrize("kind", [kind for kind in ODD if kind is not GeneratorExit])
async def test_a_transform_that_raises_something_odd(
    kind: type[BaseException], slow: bool, transform_clock: TransformClock
) -> None:
    failing = False

    def transform(data: Any) -> Any:
        if slow:
            transform_clock.now += 0.002
        if failing:
            raise kind("odd")
        return data

    buffer = ReplayBuffer(TensorStorage(50), batch_size=4, prefetch=2, transform=transform)
    await buffer.extend(rows(50))
    async with buffer:
        assert (await next_numbers(buffer, 6))[0] == list(range(6))
        failing = True
        ends = await outcomes(*(asyncio.ensure_future(buffer.sample()) for _ in range(4)))
        assert any(isinstance(end, PrefetchError) for end in ends)
        failing = False
        found, _ = await next_numbers(buffer, 4)
        assert found == list(range(found[0], found[0] + 4))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("asyncbuf")]


class NoThreads:
    """No thread can be started while it is on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on = False
        start = threading.Thread.start

        def perhaps(thread: threading.Thread) -> None:
            if self.on and thread.name.startswith("asyncbuf"):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", perhaps)


async def told_that_no_thread_starts(buffer: ReplayBuffer, no_threads: NoThreads, calls: int) -> None:
    """Every call is, and can go on afterwards."""
    no_threads.on = True
    for _ in range(calls):
        with pytest.raises(PrefetchError, match="can't start new thread"):
            await within(buffer.sample())
    no_threads.on = False


@pytest.mark.parametrize("depth", [0, 2])
async def test_a_gather_for_which_no_thread_can_be_started(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    no_threads = NoThreads(monkeypatch)
    buffer = ReplayBuffer(Moody(50, "", ValueError, large=True), batch_size=4, prefetch=depth)
    await buffer.extend(rows(50))
    async with buffer:
        await told_that_no_thread_starts(buffer, no_threads, 2)
        assert (await next_numbers(buffer, 5))[0] == list(range(5))
        await within(buffer.extend(rows(5)))


async def test_a_transform_for_which_no_thread_can_be_started_does_not_run_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_threads = NoThreads(monkeypatch)
    buffer = ReplayBuffer(TensorStorage(50), batch_size=4, transform=CountingTransform())
    await buffer.extend(rows(50))
    async with buffer:
        await told_that_no_thread_starts(buffer, no_threads, 3)
        assert [int((await within(buffer.sample()))["seen"][0]) for _ in range(3)] == [1, 2, 3]


async def test_a_write_for_which_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    no_threads = NoThreads(monkeypatch)
    buffer = ReplayBuffer(ThreadedStorage(50), batch_size=4)
    await within(buffer.extend(rows(10)))
    async with buffer:
        no_threads.on = True
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await within(buffer.extend(rows(10)))
        no_threads.on = False
        assert len(buffer) == 10
        await within(buffer.extend(rows(10)))
        assert len(buffer) == 20


class Stubborn(RandomSampler):
    """Raises at some of its draws."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind
        self.bad: set[int] | range = set()
        self.draws = 0

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        self.draws += 1
        if self.draws in self.bad:
            raise self.kind("stubborn")
        return super().draw(rows, batch_size, generator)


@pytest.mark.parametrize("kind", [ValueError, asyncio.CancelledError, GeneratorExit])
async def test_a_draw_that_fails_when_data_comes_is_none_of_the_write(kind: type[BaseException]) -> None:
    sampler = Stubborn(kind)
    buffer = ReplayBuffer(TensorStorage(50), sampler=sampler)
    async with buffer, Crew() as crew:
        consumers = [crew.start(buffer.sample(size)) for size in (2, 3)]
        await turns()
        sampler.bad = range(1, 3)
        assert (await within(buffer.extend(rows(4)))).tolist() == [0, 1, 2, 3]
        for end in await outcomes(*consumers):
            assert isinstance(end, (ValueError, RuntimeError))
        assert (await within(buffer.sample(2))).number == 0


async def test_a_draw_that_fails_after_a_batch_was_taken_does_not_lose_it() -> None:
    sampler, stop = Stubborn(asyncio.CancelledError), Stop()

    def transform(data: Any) -> Any:
        stop()
        return data

    storage = ThreadedStorage(50)
    buffer = ReplayBuffer(storage, sampler=sampler, batch_size=4, transform=transform, workers=2)
    await buffer.extend(rows(50))
    async with buffer, Crew() as crew:
        first = crew.start(buffer.sample())
        await stop.come.reached()
        write = crew.start(buffer.extend(rows(10)))
        second = crew.start(buffer.sample())
        sampler.bad = range(2, 4)
        await outcomes(write)
        stop.go.set()
        one, two = await outcomes(first, second)
        assert one.number == 0
        assert isinstance(two, RuntimeError)
        assert (await within(buffer.sample())).number == 1


# More than the interpreter has room for on its stack, which is what is asked here.
@pytest.mark.parametrize("count", [1200, pytest.param(3000, marks=pytest.mark.slow)])
async def test_thousands_of_failing_turns_in_a_row(count: int) -> None:
    sampler, stop = Stubborn(asyncio.CancelledError), Stop()
    storage = ThreadedStorage(50)
    buffer = ReplayBuffer(storage, sampler=sampler, batch_size=4)
    await buffer.extend(rows(10))
    storage.on_write = stop
    async with buffer, Crew() as crew:
        write = crew.start(buffer.extend(rows(10)))
        await stop.come.reached()
        sampler.bad = range(1, 10_000)
        consumers = [crew.start(buffer.sample()) for _ in range(count)]
        await turns()
        stop.go.set()
        ends = await outcomes(write, *consumers)
        assert ends[0].tolist() == list(range(10, 20))
        assert all(isinstance(end, RuntimeError) for end in ends[1:])
        sampler.bad = set()
        assert (await within(buffer.sample())).number == 0


@pytest.mark.usefixtures("transform_clock")  # a machine that is busy must not move the transforms to threads
async def test_a_restore_whose_transforms_raise_something_odd_is_live() -> None:
    kind: type[BaseException] | None = None

    def transform(data: Any) -> Any:
        if kind is not None:
            raise kind("odd")
        return data

    buffer = ReplayBuffer(TensorStorage(50), batch_size=4, prefetch=3, transform=transform)
    await buffer.extend(rows(50))
    async with buffer:
        await next_numbers(buffer, 10)
        kind = ValueError
        for _ in range(3):
            await within(buffer.sample())  # those behind fail
        await turns(50)
        snapshot = await within(buffer.snapshot())
        kind = asyncio.CancelledError
        await within(buffer.restore(snapshot))
        kind = None
        assert (await next_numbers(buffer, 5))[0] == [13, 14, 15, 16, 17]


async def test_an_error_that_cannot_be_shown() -> None:
    class UnshownError(Exception):
        def __repr__(self) -> str:
            raise ValueError

        __str__ = __repr__

    failing = True

    def transform(data: Any) -> Any:
        if failing:
            raise UnshownError
        return data

    buffer = ReplayBuffer(TensorStorage(50), batch_size=4, transform=transform)
    await buffer.extend(rows(50))
    async with buffer:
        with pytest.raises(PrefetchError, match="UnshownError"):
            await within(buffer.sample())
        failing = False
        assert (await within(buffer.sample())).number == 0


# -- consumers that must be told --------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 3])
async def test_skip_wakes_the_consumer_whose_batch_is_next(depth: int) -> None:
    stop = asyncio.Event()
    seen = 0

    async def transform(data: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == 1:
            await stop.wait()
        return data

    buffer = ReplayBuffer(TensorStorage(8), batch_size=2, prefetch=depth, workers=2, transform=transform)
    async with buffer, Crew() as crew:
        await buffer.extend(rows(8))
        consumer = crew.start(buffer.sample())
        await turns(30)
        assert await within(buffer.skip()) == 0
        assert (await outcomes(consumer))[0].number == 1
        stop.set()


@pytest.mark.parametrize("how", ["skip", "restore"])
async def test_a_consumer_whose_ticket_goes_after_finish_is_told(how: str) -> None:
    stop = asyncio.Event()

    async def transform(data: Any) -> Any:
        await stop.wait()
        return data

    buffer = ReplayBuffer(TensorStorage(50), batch_size=4, transform=transform)
    async with buffer, Crew() as crew:
        empty = await within(buffer.snapshot())
        await buffer.extend(rows(10))
        consumer = crew.start(buffer.sample())
        await turns()
        await buffer.finish()
        if how == "skip":
            await buffer.empty()
            assert await within(buffer.skip()) == 0
        else:
            await within(buffer.restore(empty))
        assert isinstance((await outcomes(consumer))[0], BufferClosedError)
        stop.set()


async def test_a_failed_ticket_that_holds_up_another_size_is_told_to_whoever_waits() -> None:
    failing = True

    class Failing(CountingTransform):
        def __call__(self, data: Any) -> Any:
            if self.seen == 1 and failing:
                raise ValueError("the second one")
            return super().__call__(data)

    buffer = ReplayBuffer(TensorStorage(50), batch_size=4, prefetch=2, transform=Failing())
    await buffer.extend(rows(50))
    async with buffer:
        assert (await within(buffer.sample())).number == 0
        for _ in range(3):
            with pytest.raises(PrefetchError, match="batch 1 could not be made"):
                await within(buffer.sample(5))
        failing = False
        other = await within(buffer.sample(5))
        assert (other.number, int(other["seen"][0])) == (3, 4)
        assert [(await within(buffer.sample())).number for _ in range(3)] == [1, 2, 4]


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "write in progress"])
async def test_passes_do_not_depend_on_what_is_in_the_way(busy: bool, depth: int) -> None:
    stop = Stop()
    storage = ThreadedStorage(8, on_write=stop if busy else lambda: None)
    buffer = ReplayBuffer(
        storage, batch_size=4, prefetch=depth, sampler=SamplerWithoutReplacement(), generator=seeded()
    )
    storage.writes_in_threads = False
    stop.go.set()
    await buffer.extend(rows(8))
    stop.go = type(stop.go)()
    async with buffer, Crew() as crew:
        if busy:
            storage.writes_in_threads = True
            write = crew.start(buffer.extend(rows(8)))
            await turns()
        found: dict[str, list[tuple[int, int | None]]] = {name: [] for name in "abc"}

        async def go_through(name: str) -> None:
            found[name] += [(batch.number, batch.epoch) async for batch in buffer.epoch()]

        tasks = [crew.start(go_through(name)) for name in found]
        await turns(30)
        stop.go.set()
        await outcomes(*tasks)
        if busy:
            await outcomes(write)
        passes = sorted(number for part in found.values() for number, _ in part)
        assert passes == list(range(len(passes)))
        # Three calls at once: two fall on the first pass, one on the second.
        assert [part[0][1] for part in found.values()] == [0, 0, 1]
        assert all(len({epoch for _, epoch in part}) == 1 for part in found.values())


# -- the modes of torch -----------------------------------------------------------------------------------------------


@pytest.fixture
def meta_by_default() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("meta_by_default")
@pytest.mark.parametrize("shuffle", [None, True, False])
async def test_a_default_device_changes_nothing(shuffle: bool | None) -> None:
    sampler = None if shuffle is None else SamplerWithoutReplacement(shuffle=shuffle)
    buffer = ReplayBuffer(TensorStorage(50), sampler=sampler, batch_size=4, prefetch=1)
    await buffer.extend({"x": torch.arange(50.0, device="cpu")})
    await buffer.add({"x": 7})
    await buffer.update_priority([1, 2], 0.5)
    async with buffer:
        for _ in range(5):
            batch = await within(buffer.sample())
            assert batch["x"].is_cpu
            assert batch.indices.is_cpu


@pytest.mark.parametrize("large", [False, True], ids=["inline", "threads"])
@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
@pytest.mark.parametrize("depth", [0, 2])
async def test_batches_of_others_are_no_inference_tensors(depth: int, sampler: Callable[[], Any], large: bool) -> None:
    buffer = ReplayBuffer(Moody(50, "", ValueError, large=large), sampler=sampler(), batch_size=4, prefetch=depth)
    await buffer.extend({"x": torch.arange(50.0)[:, None]})
    weight = torch.ones(1, requires_grad=True)
    async with buffer:
        for _ in range(3):
            with torch.inference_mode():
                await within(buffer.sample())
            batch = await within(buffer.sample())
            assert not batch["x"].is_inference()
            assert not batch.indices.is_inference()
            (weight * batch["x"]).sum().backward()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
async def test_a_transform_does_not_see_the_modes_of_the_caller(
    mode: Callable[[], Any], transform_clock: TransformClock
) -> None:
    weight = torch.eye(3, requires_grad=True)
    streams = []
    for slow in (False, True):

        def transform(data: Any, slow: bool = slow) -> Any:
            if slow:
                transform_clock.now += 0.002
            return {"y": data["x"] @ weight}

        buffer = ReplayBuffer(TensorStorage(50), batch_size=4, prefetch=2, transform=transform)
        await buffer.extend({"x": torch.ones(50, 3)})
        found = []
        async with buffer:
            for _ in range(12):
                with mode():
                    y = (await within(buffer.sample()))["y"]
                found.append((y.dtype, y.requires_grad, y.is_inference()))
        streams.append(found)
    assert streams[0] == streams[1] == [(torch.float32, True, False)] * 12


async def test_add_says_when_an_item_is_not_kept() -> None:
    from asyncbuf import Placement, RoundRobinWriter

    class Choosy(RoundRobinWriter):
        def place(self, count: int, capacity: int) -> Placement:
            return Placement(0, ()) if self.write_count == 2 else super().place(count, capacity)

    buffer = ReplayBuffer(TensorStorage(50), writer=Choosy())
    assert [await buffer.add({"x": 1.0}) for _ in range(4)] == [0, 1, None, None]
    assert len(buffer) == 2


async def test_a_size_of_its_own_learns_where_it_is_gathered() -> None:
    buffer = ReplayBuffer(TensorStorage(1000))
    await buffer.extend({"x": torch.zeros(1000, 256)})
    async with buffer:
        for _ in range(60):
            await buffer.sample(512)  # 512 KB
    assert buffer.stats().thread_gathers > 0
