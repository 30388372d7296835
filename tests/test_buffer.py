"""The buffer as its users see it, and what it says to bad input."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as torch_pytree

from asyncbuf import (
    AsyncBufError,
    Batch,
    BatchStream,
    BufferClosedError,
    Draw,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Rows,
    SamplerWithoutReplacement,
    SchemaError,
    TensorStorage,
    WrongLoopError,
)
from tests.helpers import (
    Crew,
    DiarySampler,
    Latch,
    Stop,
    ThreadedStorage,
    check_same,
    numbers,
    outcomes,
    rows,
    seeded,
    take,
    turns,
    until,
    within,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable


def make(capacity: int = 100, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(TensorStorage(capacity), **{"batch_size": 4, **options})


# -- construction -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"batch_size": 0}, ValueError, r"batch_size: expected at least 1, found 0"),
        ({"batch_size": -3}, ValueError, r"batch_size: expected at least 1, found -3"),
        ({"batch_size": True}, TypeError, r"batch_size: expected an int, found True of type bool"),
        ({"batch_size": 4.0}, TypeError, r"batch_size: expected an int, found 4.0 of type float"),
        ({"batch_size": "4"}, TypeError, r"batch_size: expected an int, found '4' of type str"),
        ({"prefetch": -1}, ValueError, r"prefetch: expected at least 0, found -1"),
        ({"prefetch": False}, TypeError, r"prefetch: expected an int, found False"),
        ({"prefetch": None}, TypeError, r"prefetch: expected an int, found None"),
        ({"prefetch": 2, "batch_size": None}, ValueError, r"batch_size: expected one, because prefetch is 2"),
        ({"workers": 0}, ValueError, r"workers: expected at least 1, found 0"),
        ({"workers": 1.5}, TypeError, r"workers: expected an int, found 1.5"),
        ({"min_size": 0}, ValueError, r"min_size: expected at least 1, found 0"),
        ({"min_size": 101}, ValueError, r"min_size: expected at most the capacity 100, found 101"),
        ({"sampler": RandomSampler}, TypeError, r"sampler: expected a Sampler, found <class"),
        ({"sampler": "random"}, TypeError, r"sampler: expected a Sampler, found 'random'"),
        ({"writer": 1}, TypeError, r"writer: expected a Writer, found 1"),
        ({"generator": 7}, TypeError, r"generator: expected a Generator, found 7"),
        ({"transform": 3}, TypeError, r"transform: expected a callable, found 3"),
        ({"transform": [abs, None]}, TypeError, r"transform: expected a callable, found None"),
        ({"transform": "abs"}, TypeError, r"transform: expected a callable, found"),
        ({"collate_fn": 3}, TypeError, r"collate_fn: expected a callable, found 3"),
        (
            {"sampler": SamplerWithoutReplacement(drop_last=True), "batch_size": 101},
            ValueError,
            r"expected at most the capacity 100.*found 101",
        ),
    ],
)
def test_bad_arguments(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make(**options)


@pytest.mark.parametrize("storage", [None, 100, TensorStorage, {}])
def test_bad_storage(storage: Any) -> None:
    with pytest.raises(TypeError, match="storage: expected a Storage, found"):
        ReplayBuffer(storage)


@pytest.mark.parametrize("storage", [TensorStorage, ListStorage])
@pytest.mark.parametrize(
    ("capacity", "kind"), [(0, ValueError), (-1, ValueError), (True, TypeError), (1.0, TypeError), (None, TypeError)]
)
def test_bad_capacity(storage: Any, capacity: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"capacity: expected .*, found"):
        storage(capacity)


def test_what_it_says_of_itself() -> None:
    buffer = make(prefetch=2, workers=3)
    assert repr(buffer) == "<ReplayBuffer new 0/100 items, batch_size=4, prefetch=2, workers=3, RandomSampler>"
    assert (len(buffer), buffer.capacity, buffer.write_count, buffer.batch_size) == (0, 100, 0, 4)
    generator = seeded(1)
    assert make(generator=generator).generator is generator


def test_each_buffer_has_a_seed_of_its_own() -> None:
    seeds = {make().generator.initial_seed() for _ in range(10)}
    assert len(seeds) == 10


# -- writing ----------------------------------------------------------------------------------------------------------


async def check_unharmed(buffer: ReplayBuffer, call: Callable[[], Awaitable[object]], message: str) -> None:
    """A refused write says why and leaves everything as it was."""
    await until(lambda: buffer.stats().in_flight == 0)
    before = buffer.stats()
    with pytest.raises(SchemaError, match=message):
        await call()
    assert buffer.stats() == before
    await buffer.extend(rows(1))
    assert buffer.write_count == before.write_count + 1
    assert all(torch.isfinite((await within(buffer.sample()))["wide"]).flatten().tolist())


GOOD = rows(3)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (
            {"number": GOOD["number"]},
            r"keys differ.*expected \['number', 'wide'\], found \['number'\].*missing \['wide'\]",
        ),
        ({**GOOD, "more": GOOD["number"]}, r"keys differ.*unknown \['more'\]"),
        ({"Number": GOOD["number"], "wide": GOOD["wide"]}, r"missing \['number'\], unknown \['Number'\]"),
        ({**GOOD, "wide": torch.zeros(3, 2)}, r"wide: expected items of shape \[1\], found \[2\]"),
        ({**GOOD, "wide": torch.zeros(3)}, r"wide: expected items of shape \[1\], found \[\]"),
        ({**GOOD, "wide": torch.zeros(3, 1, 1)}, r"wide: expected items of shape \[1\], found \[1, 1\]"),
        ({**GOOD, "wide": torch.zeros(3, 1, dtype=torch.float64)}, r"wide: expected dtype torch.float32.*float64"),
        ({**GOOD, "number": GOOD["number"].int()}, r"number: expected dtype torch.int64, found torch.int32"),
        ({**GOOD, "number": np.zeros(3)}, r"number: expected dtype torch.int64, found torch.float64"),
        ({**GOOD, "wide": torch.zeros(2, 1)}, r"wide: expected 3 items.*as in number, found 2"),
        ({**GOOD, "wide": torch.zeros(())}, r"wide: expected a leading axis of items"),
        ({"number": torch.zeros(0, dtype=torch.int64), "wide": torch.zeros(0, 1)}, r"at least one item, found none"),
        ({**GOOD, "wide": object()}, r"wide: expected a leading axis of items, found a object"),
        ({**GOOD, "wide": "three"}, r"wide: expected"),
        ({**GOOD, "wide": None}, r"wide: expected"),
        (
            {**GOOD, "wide": np.array([["a"], ["b"], ["c"]])},
            r"wide: expected numbers, found a numpy array of dtype <U1",
        ),
        ({**GOOD, "wide": np.array([[object()]] * 3)}, r"wide: expected numbers, found a numpy array of dtype object"),
        ({**GOOD, "wide": {"deeper": GOOD["wide"]}}, r"structure differs at wide: expected leaf, found dict"),
        (GOOD["number"], r"structure differs at the top: expected dict, found leaf of type Tensor"),
        ([GOOD], r"structure differs at the top: expected dict, found list"),
        ({}, r"keys differ.*found \[\]"),
        (None, r"structure differs at the top: expected dict, found leaf of type NoneType"),
        ({**GOOD, "wide": torch.zeros(3, 1).to_mkldnn()}, r"wide: expected a dense tensor"),
    ],
)
@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
async def test_bad_items(items: Any, message: str, threads: bool) -> None:
    buffer = ReplayBuffer(ThreadedStorage(100) if threads else TensorStorage(100), batch_size=4, prefetch=2)
    async with buffer:
        await buffer.extend(rows(10))
        await buffer.sample()
        await check_unharmed(buffer, lambda: buffer.extend(items), message)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ({}, "at least one leaf"),
        ([], "at least one leaf"),
        (torch.zeros(()), "leading axis"),
        (torch.zeros(0), "at least one item"),
        ({"a": torch.zeros(3), "b": torch.zeros(2)}, "b: expected 3 items"),
        ({"a": [torch.zeros(3), object()]}, "a/1: expected"),
        (3, "leading axis"),
        ("abc", "expected"),
        (None, "expected"),
    ],
)
async def test_bad_first_items_leave_the_structure_open(items: Any, message: str) -> None:
    buffer = make()
    with pytest.raises(SchemaError, match=message):
        await buffer.extend(items)
    assert (len(buffer), buffer.write_count) == (0, 0)
    await buffer.extend({"entirely": torch.zeros(5, 2)})
    assert len(buffer) == 5


async def test_bad_items_of_add() -> None:
    buffer = make()
    async with buffer:
        await buffer.extend(rows(10))
        await check_unharmed(buffer, lambda: buffer.add(rows(1)), r"number: expected items of shape \[\], found \[1\]")
        assert await buffer.add({"number": 5, "wide": np.array([2.5], np.float32)}) == 11


@pytest.mark.parametrize("items", [{}, {"a": 1}, "abc", b"bytes", 3, None, torch.tensor(3)])
async def test_bad_items_of_a_list(items: Any) -> None:
    buffer = ReplayBuffer(ListStorage(10), batch_size=4)
    with pytest.raises(SchemaError, match="expected a sequence of items, found"):
        await buffer.extend(items)
    with pytest.raises(SchemaError, match="at least one item"):
        await buffer.extend([])
    assert len(buffer) == 0


async def test_items_that_raise_while_they_are_read() -> None:
    def items() -> Any:
        yield 1
        raise LookupError("halfway")

    buffer = ReplayBuffer(ListStorage(10), batch_size=4)
    with pytest.raises(LookupError, match="halfway"):
        await buffer.extend(items())
    assert (len(buffer), buffer.write_count) == (0, 0)


@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
@pytest.mark.parametrize("before", [0, 3, 7, 10, 12])
@pytest.mark.parametrize("count", [1, 7, 10, 11, 25, 100])
async def test_rows_are_those_of_a_ring(count: int, before: int, threads: bool) -> None:
    capacity = 10
    buffer = ReplayBuffer(
        ThreadedStorage(capacity) if threads else TensorStorage(capacity),
        sampler=SamplerWithoutReplacement(shuffle=False),
        batch_size=capacity,
    )
    ring = [-1] * capacity
    where: list[int] = []
    for number in range(before + count):
        if number == before:
            where = []
        ring[number % capacity] = number
        where.append(number % capacity)
    if before:
        await buffer.extend(rows(before))
    assert (await buffer.extend(rows(count, before))).tolist() == where[-capacity:]
    assert buffer.write_count == before + count
    assert len(buffer) == min(capacity, before + count)
    async with buffer:
        assert numbers(await buffer.sample()) == [number for number in ring if number >= 0]


async def test_add_and_extend_do_the_same() -> None:
    async def main(one_by_one: bool) -> list[Hashable]:
        buffer = make(10, generator=seeded(0))
        if one_by_one:
            items = rows(25)
            found = [await buffer.add({key: value[i] for key, value in items.items()}) for i in range(25)]
            assert found == [i % 10 for i in range(25)]
        else:
            await buffer.extend(rows(25))
        async with buffer:
            return await take(buffer, 5)

    check_same(await main(True), await main(False))


async def test_finish() -> None:
    buffer = make(min_size=5)
    async with buffer, Crew() as crew:
        await buffer.extend(rows(3))
        waiting = [crew.start(buffer.sample()) for _ in range(3)]
        await turns()
        assert not any(task.done() for task in waiting)
        await buffer.finish()
        ends = await outcomes(*waiting)
        assert all(isinstance(end, BufferClosedError) and "finish()" in str(end) for end in ends)
        with pytest.raises(BufferClosedError, match=r"finish\(\) was called"):
            await buffer.extend(rows(3))
        with pytest.raises(BufferClosedError, match=r"finish\(\) was called"):
            await buffer.add({key: value[0] for key, value in rows(1).items()})
        with pytest.raises(BufferClosedError, match=r"finish\(\) was called"):
            await within(buffer.sample())
        assert len(buffer) == 3


async def test_finish_waits_for_its_turn_and_batches_go_on() -> None:
    stop = Stop()
    buffer = ReplayBuffer(ThreadedStorage(100, on_write=stop), batch_size=4, min_size=5)
    async with buffer, Crew() as crew:
        waiting = crew.start(buffer.sample())
        write = crew.start(buffer.extend(rows(10)))
        await stop.come.reached()
        finish = crew.start(buffer.finish())
        late = crew.start(buffer.extend(rows(10)))
        await turns()
        assert not finish.done()
        stop.go.set()
        ends = await outcomes(waiting, write, finish, late)
        assert isinstance(ends[0], Batch)
        assert isinstance(ends[3], BufferClosedError)
        assert len(buffer) == 10
        for _ in range(5):
            await within(buffer.sample())


async def test_consumers_wait_until_enough_is_stored() -> None:
    buffer = make(min_size=10, prefetch=2)
    async with buffer, Crew() as crew:
        waiting = [crew.start(buffer.sample()) for _ in range(3)]
        for start in range(9):
            await buffer.extend(rows(1, start))
            await turns()
            assert not any(task.done() for task in waiting)
        await buffer.extend(rows(1, 9))
        assert [batch.number for batch in await outcomes(*waiting)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("indices", "priority", "kind", "message"),
    [
        ([0, 1], [1.0], None, ""),
        ([0, 1], 1.0, None, ""),
        ([], [], None, ""),
        ([0, 1, 2], [1.0, 2.0], ValueError, "priority: expected 3 values.*found 2"),
        ([0.5], [1.0], TypeError, "indices: expected integers, found torch.float32"),
        ([True], [1.0], TypeError, "indices: expected integers, found torch.bool"),
        ([0], [float("nan")], ValueError, "expected finite values"),
        ([0], [float("inf")], ValueError, "expected finite values"),
        ([100], [1.0], IndexError, "indices: expected rows 0 to 99, found 100"),
        ([-1], [1.0], IndexError, "indices: expected rows 0 to 99, found -1"),
    ],
)
async def test_priorities(indices: Any, priority: Any, kind: type[Exception] | None, message: str) -> None:
    buffer = make()
    async with buffer:
        await buffer.extend(rows(10))
        if kind is None:
            await buffer.update_priority(indices, priority)
        else:
            with pytest.raises(kind, match=message):
                await buffer.update_priority(indices, priority)
        await within(buffer.sample())


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "kind"),
    [
        (0, ValueError),
        (-1, ValueError),
        (True, TypeError),
        (2.0, TypeError),
        ("2", TypeError),
        (np.int64(2), TypeError),
    ],
)
async def test_bad_size_of_a_call(size: Any, kind: type[Exception]) -> None:
    buffer = make(prefetch=2)
    async with buffer:
        await buffer.extend(rows(10))
        await buffer.sample()
        before = buffer.stats()
        with pytest.raises(kind, match=r"batch_size: expected .*, found"):
            await buffer.sample(size)
        assert buffer.stats() == before
        assert (await buffer.sample()).number == 1


async def test_a_call_that_must_say_its_size() -> None:
    buffer = make(batch_size=None)
    async with buffer:
        await buffer.extend(rows(10))
        with pytest.raises(ValueError, match="batch_size: expected one"):
            await buffer.sample()
        with pytest.raises(ValueError, match="batch_size: expected one"):
            await anext(buffer.__aiter__())
        assert [len(await buffer.sample(size)) for size in (1, 3, 12)] == [1, 3, 12]


async def test_another_size_draws_its_own_ticket() -> None:
    buffer = make(prefetch=3, workers=2, transform=lambda data: data, generator=seeded(0))
    async with buffer:
        await buffer.extend(rows(10))
        assert (await buffer.sample()).number == 0
        other = await buffer.sample(7)
        assert (other.number, len(other), buffer.stats().queued) == (4, 7, 3)
        assert [(await buffer.sample()).number for _ in range(5)] == [1, 2, 3, 5, 6]
        assert (await buffer.sample(4)).number == 7  # the size of the buffer is no other size


async def test_other_sizes_at_once_are_served_in_order() -> None:
    buffer = make(prefetch=1, workers=3, transform=lambda data: data)
    async with buffer:
        await buffer.extend(rows(10))
        sizes = [4, 2, 3, 2, 4, 3, 2]
        batches = await within(asyncio.gather(*(buffer.sample(size) for size in sizes)))
        assert [len(batch) for batch in batches] == sizes
        for size in (2, 3, 4):
            found = [batch.number for batch in batches if len(batch) == size]
            assert found == sorted(found)
        assert len({batch.number for batch in batches}) == len(sizes)


async def test_many_other_sizes_do_not_slow_the_buffer_down() -> None:
    buffer = make(10_000)

    async def seconds() -> float:
        """Of a hundred batches, the best of ten times."""
        found = []
        for _ in range(10):
            start = time.perf_counter()
            for _ in range(100):
                await buffer.sample()
            found.append(time.perf_counter() - start)
        return min(found)

    async with buffer:
        await buffer.extend(rows(10_000))
        before = await seconds()
        for size in range(1, 3000):
            await buffer.sample(size)
        assert await seconds() < 2.5 * before


async def test_a_size_larger_than_a_pass() -> None:
    buffer = make(sampler=SamplerWithoutReplacement(drop_last=True), prefetch=1)
    async with buffer:
        await buffer.extend(rows(3))
        with pytest.raises(ValueError, match=r"expected at most 3, the rows of a pass, because of drop_last; found 4"):
            await within(buffer.sample())
        with pytest.raises(ValueError, match=r"expected at most the capacity 100"):
            await within(buffer.sample(101))
        await buffer.extend(rows(3, 3))
        assert len(await within(buffer.sample())) == 4
        assert len(await within(buffer.sample(6))) == 6


async def test_a_size_larger_than_what_is_left_of_a_pass() -> None:
    buffer = make(sampler=SamplerWithoutReplacement(drop_last=True))
    async with buffer:
        await buffer.extend(rows(10))
        await buffer.sample()
        # Six rows are left: drop_last leaves them out, and the batch begins the next pass.
        batch = await within(buffer.sample(8))
        assert (len(batch), batch.epoch, batch.last) == (8, 1, True)
        assert (await within(buffer.sample())).epoch == 2


async def test_another_size_does_not_stop_the_calls_of_the_buffers_own_size() -> None:
    buffer = make(sampler=SamplerWithoutReplacement(drop_last=True))
    async with buffer:
        await buffer.extend(rows(10))
        assert [len(await buffer.sample(size)) for size in (4, 3)] == [4, 3]
        # Three rows are left of the pass: fewer than a batch, so drop_last leaves them out.
        assert (await within(buffer.sample())).epoch == 1


async def test_a_short_last_batch() -> None:
    buffer = make(sampler=SamplerWithoutReplacement(), prefetch=2)
    async with buffer:
        await buffer.extend(rows(10))
        batches = [await buffer.sample() for _ in range(4)]
        assert [(len(batch), batch.last, batch.epoch) for batch in batches] == [
            (4, False, 0),
            (4, False, 0),
            (2, True, 0),
            (4, False, 1),
        ]


# -- batches ----------------------------------------------------------------------------------------------------------


async def test_a_batch() -> None:
    buffer = make()
    async with buffer:
        await buffer.extend(rows(10))
        batch = await buffer.sample()
        assert len(batch) == 4
        assert batch["number"].equal(batch.data["number"])
        assert batch["number"].equal(batch.indices)
        assert (batch.number, batch.epoch, batch.last, dict(batch.info)) == (0, None, False, {})
        with pytest.raises(AttributeError):
            batch.number = 1  # type: ignore[misc]
        doubled: Batch = torch_pytree.tree_map(lambda leaf: 2 * leaf, batch)  # type: ignore[no-untyped-call, unused-ignore]
        assert isinstance(doubled, Batch)
        assert doubled["number"].equal(2 * batch["number"])
        assert doubled.indices.equal(2 * batch.indices)


async def test_a_batch_belongs_to_its_consumer() -> None:
    buffer = make(sampler=SamplerWithoutReplacement(), prefetch=2)
    async with buffer:
        await buffer.extend(rows(8))
        for _ in range(4):
            seen: list[int] = []
            for _ in range(2):
                batch = await buffer.sample()
                seen += numbers(batch)
                batch["number"].fill_(-1)
                batch.indices.fill_(-1)
            assert sorted(seen) == list(range(8))


async def test_collate_and_transforms_in_order() -> None:
    def collate(items: list[int]) -> torch.Tensor:
        return torch.tensor(items)

    async def double(data: torch.Tensor) -> torch.Tensor:
        return 2 * data

    class Add:
        def __call__(self, data: torch.Tensor) -> torch.Tensor:
            return data + 1

    class AddLater:
        async def __call__(self, data: torch.Tensor) -> torch.Tensor:
            await asyncio.sleep(0)
            return data + 100

    buffer = ReplayBuffer(
        ListStorage(10),
        batch_size=4,
        collate_fn=collate,
        transform=[Add(), double, AddLater(), functools.partial(torch.mul, other=10)],
    )
    await buffer.extend([1, 2, 3])
    async with buffer:
        for _ in range(10):
            batch = await buffer.sample()
            assert batch.data.equal((2 * (batch.indices + 1 + 1) + 100) * 10)


async def test_a_transform_gets_a_generator_of_its_own() -> None:
    seeds: list[int] = []

    def noise(data: Any, generator: torch.Generator) -> Any:
        seeds.append(generator.initial_seed())
        return data

    buffer = make(transform=[noise, noise], generator=seeded(0), prefetch=2, workers=2)
    async with buffer:
        await buffer.extend(rows(10))
        for _ in range(5):
            await buffer.sample()
    assert len(set(seeds)) == len(seeds) >= 10


async def test_devices() -> None:
    buffer = make(device="meta")
    async with buffer:
        await buffer.extend(rows(10))
        assert (await buffer.sample())["wide"].device.type == "meta"


# -- life -------------------------------------------------------------------------------------------------------------


async def test_use_before_opening() -> None:
    buffer = make(sampler=SamplerWithoutReplacement(), prefetch=2)
    await buffer.extend(rows(10))
    calls: list[Callable[[], Awaitable[object]]] = [
        buffer.sample,
        lambda: buffer.sample(2),
        lambda: anext(buffer.__aiter__()),
        lambda: anext(buffer.epoch()),
    ]
    for call in calls:
        with pytest.raises(BufferClosedError, match="the buffer is not open: use `async with buffer:`"):
            await call()
    assert (await buffer.skip(), await buffer.flush()) == (None, 0)
    await buffer.update_priority([0], 1.0)
    await buffer.aclose()
    assert buffer.stats().drawn == 0
    async with buffer:
        assert (await buffer.sample()).number == 0


async def test_use_after_closing() -> None:
    buffer = make(prefetch=2)
    async with buffer:
        await buffer.extend(rows(10))
        await buffer.sample()
    calls: list[Callable[[], Awaitable[object]]] = [
        buffer.sample,
        lambda: buffer.sample(2),
        lambda: buffer.extend(rows(1)),
        lambda: buffer.add(rows(1)),
    ]
    for call in calls:
        with pytest.raises(BufferClosedError, match="closed"):
            await call()
    assert len(buffer) == 10
    assert "closed" in repr(buffer)
    assert [batch async for batch in buffer] == []


async def test_opened_twice() -> None:
    buffer = make()
    async with buffer:
        with pytest.raises(AsyncBufError, match="open: expected a buffer that is not open, found one that is open"):
            await buffer.open()
        await buffer.extend(rows(10))
        assert (await buffer.sample()).number == 0


async def test_open_returns_the_buffer() -> None:
    buffer = make()
    assert await buffer.open() is buffer
    await buffer.aclose()
    async with buffer as same:
        assert same is buffer


async def test_an_error_in_the_body_passes_through() -> None:
    buffer = make()
    with pytest.raises(LookupError, match="mine"):
        await _fail_within(buffer)
    assert "closed" in repr(buffer)


async def _fail_within(buffer: ReplayBuffer) -> None:
    async with buffer:
        raise LookupError("mine")


async def test_use_from_another_event_loop() -> None:
    buffer = make(sampler=SamplerWithoutReplacement(), prefetch=2)

    def calls() -> list[Callable[[], Any]]:
        return [
            buffer.sample,
            lambda: buffer.extend(rows(1)),
            lambda: buffer.add(rows(1)),
            lambda: buffer.update_priority([0], 1.0),
            buffer.skip,
            buffer.flush,
            buffer.empty,
            buffer.finish,
            buffer.aclose,
            lambda: anext(buffer.epoch()),
        ]

    def elsewhere() -> list[BaseException | None]:
        found: list[BaseException | None] = []
        for call in calls():

            async def main(call: Callable[[], Any] = call) -> None:
                await call()

            try:
                asyncio.run(main())
            except BaseException as error:
                found.append(error)
            else:
                found.append(None)
        return found

    async with buffer:
        await buffer.extend(rows(10))
        await buffer.sample()
        before = buffer.stats()
        for error in await asyncio.to_thread(elsewhere):
            assert isinstance(error, WrongLoopError)
            assert "expected the event loop that opened the buffer" in str(error)
            assert "found" in str(error)
        assert buffer.stats() == before
        assert (await buffer.sample()).number == 1


async def test_use_without_any_event_loop() -> None:
    buffer = make()
    errors: list[BaseException] = []

    def elsewhere() -> None:
        coroutine = buffer.sample()
        try:
            coroutine.send(None)
        except BaseException as error:
            errors.append(error)
        finally:
            coroutine.close()

    async with buffer:
        await buffer.extend(rows(10))
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert isinstance(errors[0], WrongLoopError)
        assert "no running event loop" in str(errors[0])


def test_a_closed_buffer_may_change_its_event_loop() -> None:
    buffer = make(prefetch=2, generator=seeded(0), transform=lambda data: data)

    async def main(count: int) -> list[Hashable]:
        async with buffer:
            return await take(buffer, count)

    asyncio.run(_fill(buffer))
    found = [key for _ in range(4) for key in asyncio.run(main(5))]
    reference = make(generator=seeded(0))
    asyncio.run(_fill(reference))

    async def expected() -> list[Hashable]:
        async with reference:
            return await take(reference, 20)

    check_same(found, asyncio.run(expected()))


async def _fill(buffer: ReplayBuffer) -> None:
    await buffer.extend(rows(50))


# -- what it looks like -----------------------------------------------------------------------------------------------


async def test_counters() -> None:
    buffer = make(prefetch=3)
    async with buffer:
        await buffer.extend(rows(110))
        for _ in range(5):
            await buffer.sample()
        await buffer.skip()
        stats = buffer.stats()
        assert stats.size == stats.capacity == 100
        assert stats.write_count == 110
        assert (stats.drawn, stats.delivered, stats.dropped, stats.queued) == (8, 5, 1, 2)
        assert stats.drawn == stats.delivered + stats.dropped + stats.queued
        assert (stats.in_flight, stats.waiting_consumers, stats.waiting_writers, stats.retries) == (0, 0, 0, 0)
        assert stats.peak_queued == 4
        assert stats.gather_seconds > 0
        assert stats.wait_seconds >= 0
        assert buffer.why_blocked() == "nobody waits"


async def test_blocked_on_data() -> None:
    buffer = make(min_size=10)
    async with buffer, Crew() as crew:
        await buffer.extend(rows(3))
        waiting = [crew.start(buffer.sample()) for _ in range(2)]
        waiting.append(crew.start(buffer.sample(7)))
        await turns()
        assert buffer.stats().waiting_consumers == 3
        assert buffer.why_blocked() == (
            "2 consumer(s) of batches of 4 wait for data: 3 of at least 10 items are stored; "
            "1 consumer(s) of batches of 7 wait for data: 3 of at least 10 items are stored"
        )
        await buffer.extend(rows(10))
        await outcomes(*waiting)
        assert buffer.why_blocked() == "nobody waits"
        assert buffer.stats().wait_seconds > 0


async def test_what_a_call_waited_for_that_gave_up() -> None:
    buffer = make(min_size=10)
    async with buffer:
        await buffer.extend(rows(3))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(buffer.sample(), 0.01)
        assert buffer.why_blocked() == (
            "nobody waits now; when a call last gave up, 1 consumer(s) of batches of 4 wait for data: "
            "3 of at least 10 items are stored"
        )


class HalfSampler(RandomSampler):
    def state_dict(self) -> dict[str, Any]:
        return {"half": 1}


def test_a_sampler_whose_state_could_not_be_restored_is_refused() -> None:
    with pytest.raises(TypeError, match="HalfSampler: expected load_state_dict beside its state_dict, found none"):
        ReplayBuffer(TensorStorage(10), sampler=HalfSampler())


async def test_blocked_on_a_gather_and_writers_behind_it() -> None:
    stop = Stop()
    storage = ThreadedStorage(100)
    buffer = ReplayBuffer(storage, batch_size=4, workers=2)
    async with buffer, Crew() as crew:
        await buffer.extend(rows(10))
        storage.on_gather = stop
        waiting: list[asyncio.Task[Any]] = [crew.start(buffer.sample()) for _ in range(2)]
        await stop.come.reached()
        waiting += [crew.start(buffer.extend(rows(1))) for _ in range(3)]
        await turns()
        stats = buffer.stats()
        assert (stats.waiting_consumers, stats.waiting_writers, stats.in_flight, stats.queued) == (2, 3, 2, 2)
        assert buffer.why_blocked() == (
            "2 consumer(s) of batches of 4 wait for batch 0: its rows are being gathered; "
            "3 writer(s) wait behind 2 gather(s) of earlier batches"
        )
        late = crew.start(buffer.sample(2))
        await turns()
        assert "1 consumer(s) of batches of 2 wait for a draw, which is behind 3 write(s)" in buffer.why_blocked()
        stop.go.set()
        await outcomes(*waiting, late)
        assert buffer.why_blocked() == "nobody waits"


async def test_writers_that_gave_up_are_not_counted() -> None:
    stop = Stop()
    storage = ThreadedStorage(100)
    buffer = ReplayBuffer(storage, batch_size=4)
    async with buffer, Crew() as crew:
        await buffer.extend(rows(10))
        storage.on_gather = stop
        sample = crew.start(buffer.sample())
        await stop.come.reached()
        writers = [crew.start(buffer.extend(rows(1))) for _ in range(3)]
        await turns()
        writers[1].cancel()
        writers[2].cancel()
        await turns()
        try:
            assert buffer.stats().waiting_writers == 1
            assert "1 writer(s) wait behind" in buffer.why_blocked()
        finally:
            stop.go.set()
        await outcomes(sample, *writers)


async def test_blocked_on_a_write_in_a_thread() -> None:
    stop = Stop()
    storage = ThreadedStorage(100)
    buffer = ReplayBuffer(storage, batch_size=4)
    async with buffer, Crew() as crew:
        await buffer.extend(rows(10))
        storage.on_write = stop
        write = crew.start(buffer.extend(rows(1)))
        await stop.come.reached()
        sample = crew.start(buffer.sample())
        await turns()
        try:
            # The write that is under way is what the draw waits for.
            assert "behind 0 write" not in buffer.why_blocked()
            assert "1 consumer(s) of batches of 4 wait for a draw, which is behind" in buffer.why_blocked()
            second = crew.start(buffer.extend(rows(1)))
            await turns()
            assert "1 writer(s) wait behind a write in a thread" in buffer.why_blocked()
        finally:
            stop.go.set()
        await outcomes(write, sample, second)


async def test_blocked_on_a_transform_and_on_a_failure() -> None:
    come, go = Latch(), Latch()

    async def transform(data: Any) -> Any:
        come.set()
        await go.reached()
        raise ValueError

    buffer = make(transform=transform)
    async with buffer, Crew() as crew:
        await buffer.extend(rows(10))
        sample = crew.start(buffer.sample())
        await come.reached()
        assert buffer.why_blocked() == "1 consumer(s) of batches of 4 wait for batch 0: its transforms have not ended"
        assert buffer.stats().in_flight == 1
        go.set()
        await outcomes(sample)
        assert buffer.why_blocked() == "nobody waits"
        stats = buffer.stats()
        assert (stats.queued, stats.in_flight, stats.retries) == (1, 0, 0)
        await outcomes(crew.start(buffer.sample()))
        assert buffer.stats().retries == 1


async def test_idle_with_a_full_queue() -> None:
    buffer = make(prefetch=3, transform=lambda data: data)
    async with buffer:
        await buffer.extend(rows(10))
        await buffer.sample()
        await until(lambda: buffer.stats().in_flight == 0)
        assert buffer.stats().queued == 3
        assert buffer.why_blocked() == "nobody waits"


# -- parts of one's own -----------------------------------------------------------------------------------------------


async def test_a_sampler_of_ones_own_sees_the_history() -> None:
    sampler = DiarySampler()
    buffer = make(sampler=sampler)
    async with buffer:
        await buffer.extend(rows(10))
        await buffer.sample()
        await buffer.update_priority([3], 9.0)
    assert sampler.diary == [("written", 10), ("draw", 10), ("priority", 9)]


async def test_a_sampler_of_ones_own_may_return_fewer_rows() -> None:
    class Few(RandomSampler):
        def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
            return Draw(torch.arange(2), {"weight": torch.ones(2)})

    buffer = make(sampler=Few(), writer=RoundRobinWriter())
    async with buffer:
        await buffer.extend(rows(10))
        batch = await buffer.sample()
        assert (len(batch), batch.info["weight"].tolist()) == (2, [1.0, 1.0])


async def test_streams_are_iterators() -> None:
    buffer = make(sampler=SamplerWithoutReplacement())
    stream = buffer.epoch()
    assert isinstance(stream, BatchStream)
    assert aiter(stream) is stream
