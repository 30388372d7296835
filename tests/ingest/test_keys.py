"""Writes with a key, and writes with the numbers of a producer: each takes effect once, whatever happens."""

from __future__ import annotations

import asyncio
import functools
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import (
    BufferClosedError,
    CheckpointError,
    ListStorage,
    ReplayBuffer,
    SchemaError,
    TensorStorage,
)
from tests.helpers import Crew, Stop, ThreadedStorage, outcomes, rows, seeded, turns, within
from tests.ingest.test_limiters import AtMostUnread
from tests.resume_helpers import restored, saved
from tests.snapshot.helpers import every_way

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def buffer_of(storage: Any = None, **settings: Any) -> ReplayBuffer:
    settings = {"batch_size": 4, "generator": seeded(), **settings}
    return ReplayBuffer(TensorStorage(64) if storage is None else storage, **settings)


def one(number: int) -> dict[str, torch.Tensor]:
    return {name: field[0] for name, field in rows(1, number).items()}


def stored(buffer: ReplayBuffer) -> list[int]:
    return buffer._storage.gather(torch.arange(len(buffer)))["number"].tolist()  # type: ignore[no-any-return]


# -- keys ------------------------------------------------------------------------------------------------------------


async def test_a_key_is_written_once() -> None:
    buffer = buffer_of()
    assert await buffer.add(one(0), key="a") is True
    assert await buffer.add(one(1), key="a") is False
    assert await buffer.extend(rows(3, 2), key=7) is True
    assert await buffer.extend(rows(3, 2), key=7) is False
    assert await buffer.extend(rows(1, 5), key="7") is True  # another one than 7
    assert await buffer.add(one(6)) == 5
    assert stored(buffer) == [0, 2, 3, 4, 5, 6]
    assert buffer.stats().ledger.duplicates == 2


async def test_a_duplicate_is_not_even_looked_at() -> None:
    buffer = buffer_of()
    await buffer.add(one(0), key="a")
    assert await buffer.add("no item at all", key="a") is False


async def test_the_window() -> None:
    buffer = buffer_of(key_window=3)
    for key in (1, 2, 3, 4):
        assert await buffer.add(one(key), key=key)
    assert [await buffer.add(one(9), key=key) for key in (4, 3, 2)] == [False] * 3
    assert await buffer.add(one(1), key=1)
    assert await buffer.add(one(2), key=2)  # 1 has pushed it out


async def test_empty_forgets_no_key() -> None:
    buffer = buffer_of()
    await buffer.add(one(0), key="a")
    await buffer.empty()
    assert await buffer.add(one(0), key="a") is False


async def test_of_two_concurrent_writes_one_wins() -> None:
    async with buffer_of() as buffer:
        results = await asyncio.gather(*(buffer.add(one(i), key="a") for i in range(5)))
        assert results == [True, False, False, False, False]
        assert stored(buffer) == [0]


@pytest.mark.parametrize(
    "wrong", [True, 1.0, None.__class__, b"a", ("a",), [1], torch.tensor(1), np.int64(3)], ids=repr
)
async def test_odd_keys(wrong: Any) -> None:
    buffer = buffer_of()
    with pytest.raises(TypeError, match="key: expected a str or an int, found"):
        await buffer.add(one(0), key=wrong)
    with pytest.raises(TypeError, match="key: expected a str or an int, found"):
        await buffer.extend(rows(1), key=wrong)
    assert not len(buffer)


async def test_large_keys() -> None:
    buffer = buffer_of()
    for key in (2**63, -(2**63) - 1, 10**5000):
        with pytest.raises(ValueError, match="64 bits"):
            await buffer.add(one(0), key=key)
    keys: list[int | str] = [2**63 - 1, -(2**63), "", "\ud800", "ä" * 9999, "\0"]
    for each in keys:
        assert await buffer.add(one(0), key=each)
        assert not await buffer.add(one(0), key=each)


@pytest.mark.parametrize("window", [0, -1, 2.0, True, None])
def test_odd_windows(window: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="key_window: expected"):
        buffer_of(key_window=window)


async def test_a_write_that_fails_leaves_the_key_unused() -> None:
    buffer = buffer_of()
    await buffer.add(one(0))
    with pytest.raises(SchemaError):
        await buffer.add({"other": torch.tensor(1)}, key="a")
    with pytest.raises(ValueError, match="priority"):
        await buffer.extend(rows(2), priority=[1.0] * 3, key="a")
    assert await buffer.add(one(1), key="a")
    await buffer.finish()
    with pytest.raises(BufferClosedError):
        await buffer.add(one(1), key="b")


async def test_a_copy_that_fails_leaves_the_key_unused() -> None:
    def fail() -> None:
        raise OSError("no memory")

    storage = ThreadedStorage(64, on_write=fail)
    async with buffer_of(storage) as buffer:
        producer = buffer.producer("p")
        for call in (buffer.extend(rows(2), key="a"), producer.extend(rows(2))):
            with pytest.raises(OSError, match="no memory"):
                await within(call)
        assert producer.next_number == 0
        storage.on_write = lambda: None
        assert await buffer.extend(rows(2), key="a")
        assert await producer.extend(rows(2), number=0)


async def test_a_limiter_does_not_hold_back_duplicates() -> None:
    async with buffer_of(limiter=AtMostUnread(4)) as buffer, Crew() as crew:
        producer = buffer.producer("p")
        assert await buffer.extend(rows(3), key="a")
        assert await producer.add(one(3))
        assert await within(buffer.extend(rows(3), key="a")) is False
        assert await within(producer.add(one(3), number=0)) is False
        first, second = (crew.start(buffer.extend(rows(4, 4), key="b")) for _ in range(2))
        await turns()
        assert not first.done()
        await buffer.sample()
        await turns()
        assert first.done()
        assert not second.done()  # it asked before the key was seen, and waits its turn
        await buffer.sample()
        assert await outcomes(first, second) == [True, False]
        assert buffer.stats().waiting_writers == 0
        assert await within(buffer.extend(rows(4, 8), key="c"))


# -- cancelled -------------------------------------------------------------------------------------------------------


async def test_cancelled_while_it_waits_it_was_not_written() -> None:
    stop = Stop()
    storage = ThreadedStorage(64, on_write=stop)
    async with buffer_of(storage) as buffer, Crew() as crew:
        producer = buffer.producer("p")
        blocking = crew.start(buffer.extend(rows(1), key="first"))
        await stop.come.reached()
        waiting = [crew.start(buffer.extend(rows(1, 1), key="a")), crew.start(producer.extend(rows(1, 2), number=0))]
        await turns()
        for task in waiting:
            task.cancel()
        await outcomes(*waiting)
        stop.go.set()
        assert await within(blocking)
        assert stored(buffer) == [0]
        assert await buffer.extend(rows(1, 1), key="a")
        assert await producer.extend(rows(1, 2), number=0)
        assert stored(buffer) == [0, 1, 2]


async def test_cancelled_while_a_thread_copies_it_was_written() -> None:
    stop = Stop()
    storage = ThreadedStorage(64, on_write=stop)
    async with buffer_of(storage) as buffer, Crew() as crew:
        producer = buffer.producer("p")
        calls: list[Callable[[], Any]] = [
            lambda: buffer.extend(rows(1, 1), key="a"),
            lambda: producer.extend(rows(1, 2), number=0),
            lambda: producer.extend(rows(1, 3)),
        ]
        for number, call in enumerate(calls):
            stop.__init__()  # type: ignore[misc]
            task = crew.start(call())
            await stop.come.reached()
            task.cancel()
            await turns()
            stop.go.set()
            assert isinstance((await outcomes(task))[0], asyncio.CancelledError)
            assert len(buffer) == number + 1
        assert producer.next_number == 2
        assert not await buffer.extend(rows(1, 1), key="a")
        assert not await producer.extend(rows(1, 2), number=0)
        assert not await producer.extend(rows(1, 3), number=1)
        assert stored(buffer) == [1, 2, 3]


@pytest.mark.parametrize("seed", range(4))
async def test_writers_that_try_again_write_everything_once(seed: int) -> None:
    """Whenever they are cancelled, and however large their writes are."""
    chance = random.Random(seed)
    storage = ThreadedStorage(4096)
    async with buffer_of(storage) as buffer, Crew() as crew:

        async def insist(call: Callable[[], Any]) -> None:
            while True:
                storage.writes_in_threads = chance.random() < 0.5
                task = crew.start(call())
                await turns(chance.randrange(8))
                task.cancel()
                (result,) = await outcomes(task)
                if not isinstance(result, asyncio.CancelledError):
                    assert isinstance(result, bool)
                    return

        async def by_key(writer: int) -> None:
            for i in range(25):
                number = 1000 * writer + i
                await insist(functools.partial(buffer.add, one(number), key=f"item {number}"))

        async def by_number(writer: int) -> None:
            producer = buffer.producer(f"producer {writer}")
            for i in range(25):
                number = 1000 * writer + i
                await insist(functools.partial(producer.add, one(number), number=i))

        await within(asyncio.gather(by_key(0), by_key(1), by_number(2), by_number(3)))
        assert sorted(stored(buffer)) == [1000 * writer + i for writer in range(4) for i in range(25)]
        assert buffer.stats().ledger.closes


# -- producers -------------------------------------------------------------------------------------------------------


async def test_numbers_follow_the_calls() -> None:
    async with buffer_of(ThreadedStorage(64)) as buffer:
        producer, same = buffer.producer("p"), buffer.producer("p")
        calls = [producer.extend(rows(1, 0)), same.add(one(1)), producer.extend(rows(2, 2), number=2), same.add(one(4))]
        assert await within(asyncio.gather(*calls)) == [True] * 4
        assert stored(buffer) == [0, 1, 2, 3, 4]
        assert producer.next_number == same.next_number == 4
        assert buffer.producer("q").next_number == 0
        assert repr(producer) == "<Producer 'p', next_number=4>"


async def test_a_number_that_failed_goes_to_the_next_write() -> None:
    async with buffer_of() as buffer:
        await buffer.add(one(0))
        producer = buffer.producer("p")
        calls = [producer.add(one(1)), producer.add({"wrong": torch.tensor(1)}), producer.add(one(2))]
        first, second, third = await asyncio.gather(*calls, return_exceptions=True)
        assert (first, third) == (True, True)
        assert isinstance(second, SchemaError)
        assert producer.next_number == 2


async def test_a_gap_is_refused() -> None:
    buffer = buffer_of()
    producer = buffer.producer("p")
    await producer.add(one(0))
    with pytest.raises(
        ValueError, match=r"number: expected 1, the next one of producer 'p', found 3: 1 to 2 are missing"
    ):
        await producer.add(one(1), number=3)
    assert await producer.add(one(1), number=1)
    assert not await producer.add(one(1), number=1)
    assert not await producer.add(one(0), number=0)
    assert buffer.stats().ledger.duplicates == 2


@pytest.mark.parametrize("name", [3, b"p", None, ["p"], ""])
def test_odd_names(name: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"producer: expected a name such as \"actor-3\", found"):
        buffer_of().producer(name)


@pytest.mark.parametrize("number", [-1, 1.0, "1", True, 2**62])
async def test_odd_numbers(number: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="number: expected"):
        await buffer_of().producer("p").add(one(0), number=number)


# -- checkpoints -----------------------------------------------------------------------------------------------------


@every_way
@pytest.mark.parametrize("written", [0, 1, 1023, 1024, 1025, 3000])
async def test_a_checkpoint_has_the_window(way: str, written: int, tmp_path: Path) -> None:
    window = 2000
    source = buffer_of(key_window=window)
    for i in range(written):
        await source.add(one(i), key=i if i % 3 else f"key {i}")
    for _ in range(5):
        await source.producer("p").add(one(0))
    what = await saved(way, source, tmp_path)
    target = await restored(way, what, buffer_of(key_window=window))
    assert target.producer("p").next_number == 5
    again = await saved("state_dict", target, tmp_path)
    third = await restored("state_dict", again, buffer_of(key_window=window))
    for buffer in (target, third):
        for i in range(window + 500, written - window + 200, -101):
            if 0 <= i < written:
                seen = not await buffer.add(one(i), key=i if i % 3 else f"key {i}")
                assert seen == (i >= written - window), i
        assert not await buffer.producer("p").add(one(0), number=4)
        assert await buffer.producer("p").add(one(0), number=5)


async def test_another_window_than_that_of_the_checkpoint() -> None:
    source = buffer_of(key_window=50)
    for i in range(60):
        await source.add(one(i), key=i)
    state = await source.state_dict()
    for window, least in ((10, 50), (50, 10), (100, 10)):
        target = buffer_of(key_window=window)
        await target.load_state_dict(state)
        assert [await target.add(one(0), key=i) for i in (least, 59)] == [False, False]
        assert await target.add(one(0), key=least - 1)


async def test_the_window_moves_on_after_a_restore() -> None:
    """Over many blocks, with restores at odd places: always the last so many keys."""
    chance = random.Random(3)
    buffer = buffer_of(key_window=2500)
    written: list[int] = []
    while len(written) < 9000:
        for _ in range(chance.randrange(1500)):
            await buffer.add(one(0), key=len(written))
            written.append(len(written))
        state = await buffer.state_dict()
        buffer = buffer_of(key_window=2500)
        await buffer.load_state_dict(state)
        deliveries = buffer._table.deliveries
        assert [key for key in range(len(written)) if deliveries.has(key)] == written[-2500:]


def forged(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Deliveries that no buffer has written; of a state with three keys and a producer."""

    def text(value: str) -> torch.Tensor:
        return torch.frombuffer(bytearray(value.encode()), dtype=torch.uint8)

    good = state["deliveries"]
    return [
        {**good, "keys": [text('["a","a","b"]')]},
        {**good, "keys": [text('["a","b"]')]},
        {**good, "keys": [text('["a","b",1.5]')]},
        {**good, "keys": [text('["a","b",true]')]},
        {**good, "keys": [text('["a","b",null]')]},
        {**good, "keys": [text(f'["a","b",{2**63}]')]},
        {**good, "keys": [text('{"a":1}')]},
        {**good, "keys": [text("[" * 100_000)]},
        {**good, "keys": [text("nonsense")]},
        {**good, "keys": [torch.zeros(3)]},
        {**good, "keys": ["abc"]},
        {**good, "keys": []},
        {**good, "positions": [torch.tensor([3, 2, 1])]},
        {**good, "positions": [torch.tensor([0, 1, 2])]},
        {**good, "positions": [torch.tensor([1, 2, 99])]},
        {**good, "positions": [torch.tensor([1.0, 2.0, 3.0])]},
        {**good, "gone": 4},
        {**good, "gone": -1},
        {**good, "refused": -1},
        {**good, "producers": [text("[3]")]},
        {**good, "producers": [text('["p","p"]')], "numbers": [torch.tensor([1, 1])]},
        {**good, "numbers": [torch.tensor([0])]},
        {**good, "numbers": [torch.tensor([99])]},
        {**good, "numbers": []},
        {**good, "more": 1},
        {},
    ]


async def test_forged_states_are_refused() -> None:
    source = buffer_of()
    for key in ("a", "b", 3):
        await source.add(one(0), key=key)
    await source.producer("p").add(one(0))
    state = await source.state_dict()
    target = buffer_of()
    await target.add(one(0), key="mine")
    for wrong in forged(state):
        with pytest.raises(CheckpointError):
            await target.load_state_dict({**state, "deliveries": wrong})
        assert not await target.add(one(0), key="mine")
    await target.load_state_dict(state)
    assert await target.add(one(0), key="mine")


async def test_any_storage() -> None:
    buffer = buffer_of(ListStorage(8), batch_size=2)
    assert await buffer.extend(["a", "b"], key="x")
    assert not await buffer.extend(["a", "b"], key="x")
    assert await buffer.producer("p").add("c")
    assert len(buffer) == 3
