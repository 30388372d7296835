"""Writing: items land in the rows of a ring, and bad ones leave everything as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import (
    Batch,
    BufferClosedError,
    ListStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SchemaError,
    TensorStorage,
)
from tests.buffer.helpers import make
from tests.helpers import (
    Crew,
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
        ([GOOD], r"found a list of 1 items: stack them for extend\(\), add\(\) them one by one"),
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
