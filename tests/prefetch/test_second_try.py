"""Functions that change their input in place: whatever interrupts them, every batch is made once from its rows."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import Batch, ListStorage, PrefetchError, ReplayBuffer, Snapshot, TensorStorage
from asyncbuf._prefetch.transforms import Partial, TransformChain
from asyncbuf._runtime.threads import Threads
from tests.helpers import Crew, Latch, jitter, seeded, turns, within

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Hashable

ITEMS = 40
BATCHES = 16


@pytest.fixture
async def threads() -> AsyncIterator[Threads]:
    made = Threads(2)
    yield made
    await made.close()


# -- the battery -------------------------------------------------------------------------------------------------------


class Faults:
    """Raises now and then, as long as there are some left.

    Args:
        seed: of the moments.
        count: how many.
    """

    def __init__(self, seed: int, count: int) -> None:
        self._random = random.Random(seed)
        self._left = count

    def __call__(self) -> None:
        if self._left and self._random.random() < 0.2:
            self._left -= 1
            raise LookupError("injected")


class Stateful:
    """Counts batches, and adds the count in place."""

    def __init__(self, fault: Callable[[], None]) -> None:
        self.count = 0
        self.fault = fault

    def __call__(self, data: Any) -> Any:
        data["x"].add_(self.count)
        self.fault()
        self.count += 1
        return data

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def transforms(choice: random.Random, fault: Callable[[], None]) -> list[Callable[..., Any]]:
    """A random chain of functions that work in place."""

    def add(data: Any) -> Any:
        fault()
        data["x"].add_(1)
        fault()
        return data

    def scale(data: Any, generator: torch.Generator) -> Any:
        data["x"].mul_(1 + torch.rand((), generator=generator))
        fault()
        return {"first": data["x"], **data}

    def by_numpy(data: Any) -> Any:
        data["x"].numpy()[...] *= 3
        fault()
        data["array"] = data.get("array", np.zeros(3))
        data["array"] += 1
        jitter()
        return data

    def containers(data: Any) -> Any:
        data["list"] = data.get("list", [[0], [1]])
        data["list"][0].append(len(data["list"][0]))
        data["list"].append([7])
        fault()
        data["i"] = data.pop("i") + 1
        return data

    async def later(data: Any) -> Any:
        data["x"].sub_(2)
        for _ in range(3):
            await asyncio.sleep(0)
            fault()
        data["x"].mul_(1.5)
        return data

    async def much_later(data: Any) -> Any:
        data["x"].add_(5)
        await turns(3)
        data["x"].mul_(2)
        return dict(reversed(data.items()))

    def returns_awaitable(data: Any) -> Any:
        data["x"].neg_()
        fault()
        return later(data)

    def sometimes_awaitable(data: Any) -> Any:
        data["x"].add_(0.25)
        return later(data) if data["i"].sum() % 3 == 0 else data

    palette: list[Callable[..., Any]] = [
        add,
        scale,
        by_numpy,
        containers,
        later,
        much_later,
        returns_awaitable,
        sometimes_awaitable,
    ]
    made: list[Callable[..., Any]] = choice.choices(palette, k=choice.randint(1, 4))
    if choice.random() < 0.3:
        made.insert(choice.randint(0, len(made)), Stateful(fault))
    return made


def make_buffer(seed: int, faults: int) -> ReplayBuffer:
    choice, fault = random.Random(seed), Faults(seed, faults)

    def collate(items: Any) -> Any:
        items.reverse()
        fault()
        columns = {"x": torch.stack([item["x"] for item in items]), "i": torch.stack([item["i"] for item in items])}
        return {**columns, "list": [list(item["list"]) for item in items]}

    is_list = choice.random() < 0.4
    return ReplayBuffer(
        ListStorage(ITEMS) if is_list else TensorStorage(ITEMS),
        batch_size=4,
        prefetch=choice.choice([0, 1, 3]),
        workers=choice.choice([1, 2]),
        collate_fn=collate if is_list else None,
        transform=transforms(choice, fault),
        generator=seeded(seed),
    )


async def fill(buffer: ReplayBuffer) -> None:
    for number in range(ITEMS):
        item: dict[str, Any] = {"x": torch.full((3,), float(number)), "i": torch.tensor(number)}
        is_list = isinstance(buffer._storage, ListStorage)
        await buffer.add({**item, "list": [number]} if is_list else item)


def content(value: Any) -> Hashable:
    """Everything in a batch, bit for bit."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), tuple(value.flatten().tolist())
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, tuple(value.flatten().tolist())
    if isinstance(value, dict):
        return tuple((key, content(part)) for key, part in value.items())
    return tuple(map(content, value)) if isinstance(value, list) else value


async def undisturbed(seed: int) -> list[Hashable]:
    buffer = make_buffer(seed, 0)
    await fill(buffer)
    async with buffer:
        return [content((await buffer.sample()).data) for _ in range(BATCHES)]


class Disturber:
    """Takes batches in every unkind way there is, and compares each with the one that it should be."""

    def __init__(self, buffer: ReplayBuffer, seed: int, expected: list[Hashable]) -> None:
        self.buffer = buffer
        self.random = random.Random(seed + 1)
        self.expected = expected
        self.next = 0
        self.saved: tuple[int, Snapshot] | None = None
        self.seen = 0

    async def run(self) -> None:
        await self.buffer.open()
        try:
            while self.next < BATCHES and self.seen < 6 * BATCHES:
                await self.random.choice(
                    [self.sample, self.sample, self.cancel, self.reopen, self.snapshot, self.restore]
                )()
        finally:
            await self.buffer.aclose()

    def take(self, batch: Any) -> None:
        assert batch.number == self.next
        assert content(batch.data) == self.expected[batch.number]
        self.next += 1
        self.seen += 1

    async def sample(self) -> None:
        try:
            self.take(await within(self.buffer.sample()))
        except PrefetchError as error:
            if "injected" not in str(error):
                raise

    async def cancel(self) -> None:
        task = asyncio.create_task(self.buffer.sample())
        await turns(self.random.randint(0, 8))
        task.cancel()
        found: Batch | BaseException = (await asyncio.gather(task, return_exceptions=True))[0]
        if not isinstance(found, BaseException):
            self.take(found)

    async def reopen(self) -> None:
        await turns(self.random.randint(0, 8))
        await self.buffer.aclose()
        await self.buffer.open()

    async def snapshot(self) -> None:
        try:
            snapshot = await self.buffer.snapshot(timeout=self.random.choice([0.0005, 0.005, 10]))
        except TimeoutError:
            return  # a stateful transform is at work
        if self.random.random() < 0.5:
            snapshot = Snapshot.from_state_dict(snapshot.state_dict())
        self.saved = self.next, snapshot

    async def restore(self) -> None:
        if self.saved is not None:
            self.next, snapshot = self.saved
            await self.buffer.restore(snapshot)


SEEDS = [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= 20)) for seed in range(400)]


@pytest.mark.parametrize("seed", SEEDS)
async def test_whatever_happens_every_batch_is_as_if_nothing_had_happened(seed: int) -> None:
    expected = await undisturbed(seed)
    assert expected == await undisturbed(seed)
    buffer = make_buffer(seed, 6)
    await fill(buffer)
    await Disturber(buffer, seed, expected).run()


# -- one by one --------------------------------------------------------------------------------------------------------


async def run(chain: TransformChain, kept: list[Partial], threads: Threads) -> None:
    await chain.run(kept[-1], 0, threads, kept.append)


def failing(times: int, inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that works in place and then fails so many times."""
    left = [times]

    def function(data: Any) -> Any:
        data = inner(data)
        if left[0]:
            left[0] -= 1
            raise LookupError
        return data

    return function


def add_to_tensor(data: Any) -> Any:
    data["x"].add_(1)
    return data


def add_by_numpy(data: Any) -> Any:
    data["x"].numpy()[...] += 1
    return data


def add_to_array(data: Any) -> Any:
    data["array"] += 1
    data["x"] = data["x"] + 1
    return data


def add_to_lists(data: Any) -> Any:
    data["nested"][0].append(1)
    data["x"] = data["x"] + len(data["nested"][0])
    return data


def replace(data: Any) -> Any:
    data["x"] = data.pop("x") + len(data)
    data["more"] = 1
    return data


WORKERS = [add_to_tensor, add_by_numpy, add_to_array, add_to_lists, replace]


def sample_data() -> dict[str, Any]:
    return {"x": torch.ones(4), "array": np.zeros(3), "nested": ([0], {"y": bytearray(b"ab")})}


@pytest.mark.parametrize("where", ["first", "after async", "after stateful", "collate"])
@pytest.mark.parametrize("work", WORKERS)
async def test_a_second_try_finds_its_input_as_it_was(work: Callable[[Any], Any], where: str, threads: Threads) -> None:
    async def same(data: Any) -> Any:
        return data

    function = failing(2, work)
    chains = {
        "first": TransformChain(None, [function]),
        "after async": TransformChain(None, [same, function]),
        "after stateful": TransformChain(None, [Stateful(lambda: None), function]),
        "collate": TransformChain(function, [lambda data: data], foreign_collate=True),
    }
    kept = [Partial(0, sample_data())]
    for _ in range(2):
        with pytest.raises(LookupError):
            await run(chains[where], kept, threads)
    await run(chains[where], kept, threads)
    assert content(kept[-1].data["x"]) == content(work(sample_data())["x"])
    assert content(kept[0].data["x"]) == content(sample_data()["x"])


async def test_a_stateful_function_that_was_done_is_not_called_again(threads: Threads) -> None:
    calls: list[str] = []

    class Noting(Stateful):
        def __call__(self, data: Any) -> Any:
            calls.append("stateful")
            return super().__call__(data)

    def noting(data: Any) -> Any:
        calls.append("other")
        return data

    last = failing(1, add_to_tensor)
    kept = [Partial(0, {"x": torch.ones(1)})]
    chain = TransformChain(None, [noting, Noting(lambda: None), last, noting])
    with pytest.raises(LookupError):
        await run(chain, kept, threads)
    await run(chain, kept, threads)
    assert calls == ["other", "stateful", "other"]
    assert kept[-1].data["x"].item() == 2


async def test_an_awaitable_is_awaited_and_the_function_is_not_called_again(threads: Threads) -> None:
    calls: list[int] = []

    async def later(data: Any) -> Any:
        await asyncio.sleep(0)
        data["x"].add_(10)
        return data

    def seldom(data: Any) -> Any:
        calls.append(1)
        data["x"].add_(1)
        return later(data) if len(calls) == 2 else data

    chain = TransformChain(None, [seldom])
    data = {"x": torch.zeros(1)}
    assert chain.is_done(chain.run_here(data, 0))
    here = chain.run_here(data, 0)
    assert here.pending is not None
    assert not chain.is_done(here)
    kept = [here]
    await run(chain, kept, threads)
    assert kept[-1].data["x"].item() == 11
    assert len(calls) == 2
    assert data["x"].item() == 0
    assert not chain.quick


async def test_an_awaitable_that_nobody_awaits_is_closed(threads: Threads) -> None:
    async def later(data: Any) -> Any:
        raise AssertionError

    chain = TransformChain(None, [lambda data: later(data)])
    kept = [chain.run_here({"x": torch.zeros(1)}, 0)]
    assert kept[0].pending is not None
    kept.clear()  # a coroutine that was never awaited would warn now


async def test_what_a_thread_returned_as_awaitable_is_not_awaited_after_a_cancellation(threads: Threads) -> None:
    at_work, may_go = Latch(), Latch()

    async def later(data: Any) -> Any:
        raise AssertionError

    def slow(data: Any) -> Any:
        at_work.set()
        may_go.wait()
        return later(data)

    kept: list[Partial] = []
    async with Crew() as crew:
        task = crew.start(TransformChain(None, [slow]).run(Partial(0, 1), 0, threads, kept.append))
        await at_work.reached()
        task.cancel()
        may_go.set()
        with pytest.raises(asyncio.CancelledError):
            await within(task)
    assert kept == []


@pytest.mark.usefixtures("last_fifth_is_long")
async def test_a_bare_ticket_is_saved_as_gathered_while_a_transform_is_at_work() -> None:
    at_work, may_go = Latch(), Latch()

    def transform(data: Any) -> Any:
        data["x"].add_(1000)
        at_work.set()
        may_go.wait()
        return data

    def make(function: Any) -> ReplayBuffer:
        return ReplayBuffer(TensorStorage(10), batch_size=2, transform=function, generator=seeded())

    source, target = make(transform), make(lambda data: data)
    await source.extend({"x": torch.arange(10.0)})
    async with Crew() as crew, source:
        batch = crew.start(source.sample())
        await at_work.reached()
        snapshot = await source.snapshot(timeout=0.1)
        may_go.set()
        found = await within(batch)
    async with target:
        await target.restore(snapshot)
        assert (await within(target.sample()))["x"].equal(found["x"] - 1000)


async def test_a_large_batch_is_copied_in_a_thread(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from asyncbuf._prefetch import transforms as module

    where: list[str] = []

    def private(value: Any) -> Any:
        where.append(threading.current_thread().name)
        return value

    async def same(data: Any) -> Any:
        return data

    monkeypatch.setattr(module, "private", private)
    for size in (10, 1 << 20):
        await run(TransformChain(None, [same]), [Partial(0, {"x": torch.zeros(size)})], threads)
    await run(TransformChain(None, [same]), [Partial(0, [[1] * 100] * 100)], threads)
    assert [name.startswith("asyncbuf-transform") for name in where] == [False, True, True]


async def test_where_no_function_of_the_user_runs_nothing_is_copied(threads: Threads) -> None:
    data = {"x": torch.zeros(4)}
    kept = [Partial(0, data)]
    await run(TransformChain(None, [], device="cpu"), kept, threads)
    assert kept[-1].data is data
    collated: list[Any] = []

    def collate(items: Any) -> Any:
        collated.append(items)
        return torch.stack(items)

    items = [torch.zeros(2), torch.ones(2)]
    await run(TransformChain(collate, [], takes_items=True, foreign_collate=True), [Partial(0, items)], threads)
    assert collated[0] is not items
    assert all(a is b for a, b in zip(collated[0], items, strict=True))
