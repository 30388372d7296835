"""What is in a committed checkpoint: whoever waits for that goes on at the commit, and not before."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import (
    AsyncBufError,
    BufferClosedError,
    Checkpointer,
    ReplayBuffer,
    Snapshot,
    TensorStorage,
)
from tests.helpers import Crew, ThreadedStorage, outcomes, rows, seeded, turns, within

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def buffer_of(**settings: Any) -> ReplayBuffer:
    return ReplayBuffer(TensorStorage(64), **{"batch_size": 4, "generator": seeded(), **settings})


async def by_save(buffer: ReplayBuffer, path: Path) -> None:
    await buffer.save(path / "saved")


async def by_save_soon(buffer: ReplayBuffer, path: Path) -> None:
    await buffer.save_soon(path / "saved")


async def by_snapshot(buffer: ReplayBuffer, path: Path) -> None:
    await (await buffer.snapshot()).save(path / "saved")


async def by_checkpointer(buffer: ReplayBuffer, path: Path) -> None:
    await Checkpointer(path / "steps").save(1, buffer=buffer, other=torch.zeros(3))


async def by_checkpointer_soon(buffer: ReplayBuffer, path: Path) -> None:
    await (await Checkpointer(path / "steps").save_soon(1, buffer=buffer))


async def by_freeze(buffer: ReplayBuffer, path: Path) -> None:
    async with buffer.frozen():
        await buffer.save(path / "saved")


WAYS: list[Callable[[ReplayBuffer, Path], Any]] = [
    by_save,
    by_save_soon,
    by_snapshot,
    by_checkpointer,
    by_checkpointer_soon,
    by_freeze,
]


@pytest.mark.parametrize("save", WAYS)
@pytest.mark.parametrize("is_open", [False, True])
async def test_it_goes_on_at_the_commit(save: Callable[..., Any], is_open: bool, tmp_path: Path) -> None:
    buffer = buffer_of()
    if is_open:
        await buffer.open()
    async with Crew() as crew:
        producer = buffer.producer("p")
        await buffer.extend(rows(3), key="a")
        await producer.extend(rows(2))
        waiting = [
            crew.start(call)
            for call in (buffer.durable(key="a"), producer.durable(0), buffer.durable(), producer.durable())
        ]
        await turns()
        await buffer.state_dict()  # not a checkpoint on a disk
        await turns()
        assert not any(task.done() for task in waiting)
        await within(save(buffer, tmp_path))
        await within(asyncio.gather(*waiting))
        await within(buffer.durable())
        await producer.extend(rows(1))
        late = [crew.start(buffer.durable(producer="p", number=1)), crew.start(buffer.durable())]
        await within(producer.durable(0))
        await turns()
        assert not any(task.done() for task in late)
        assert "2 call(s) wait for a checkpoint to be committed" in buffer.why_blocked()
        assert "the newest one has 5 of 6 items" in buffer.why_blocked()
        await within(save(buffer, tmp_path))
        await within(asyncio.gather(*late))
        assert "nobody waits" in buffer.why_blocked()
    await buffer.aclose()


async def test_a_write_after_the_capture_is_not_in_it(tmp_path: Path) -> None:
    async with buffer_of() as buffer, Crew() as crew:
        await buffer.add({"x": torch.zeros(1)}, key="before")
        handle = buffer.save_soon(tmp_path / "saved")
        await buffer.add({"x": torch.zeros(1)}, key="after")
        late = crew.start(buffer.durable(key="after"))
        await within(handle)
        await within(buffer.durable(key="before"))
        await turns()
        assert not late.done()


async def test_a_save_that_fails_or_is_cancelled_makes_nothing_durable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    async with buffer_of() as buffer, Crew() as crew:
        await buffer.extend(rows(3))
        waiting = crew.start(buffer.durable())
        with pytest.raises(Exception, match="file"):
            await buffer.save(tmp_path / "file")
        handle = buffer.save_soon(tmp_path / "saved")
        handle.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handle
        await turns()
        assert not waiting.done()


async def test_of_a_restore(tmp_path: Path) -> None:
    source = buffer_of()
    await source.extend(rows(3), key="a")
    await source.save(tmp_path / "saved")
    target = buffer_of()
    await target.load(tmp_path / "saved")
    await within(target.durable(key="a"))
    await within(target.durable())
    other = buffer_of()
    await other.restore(await Snapshot.load(tmp_path / "saved"))
    await within(other.durable())
    checkpointer = Checkpointer(tmp_path / "steps")
    await checkpointer.save(3, buffer=source)
    third = buffer_of()
    await checkpointer.restore(buffer=third)
    await within(third.durable())
    async with Crew() as crew:
        await third.load_state_dict(await source.state_dict())
        waiting = crew.start(third.durable())
        await turns()
        assert not waiting.done()
        await within(third.save(tmp_path / "third"))
        await within(waiting)


async def test_a_restore_tells_those_that_wait(tmp_path: Path) -> None:
    async with buffer_of() as buffer, Crew() as crew:
        await buffer.extend(rows(3))
        state = await buffer.state_dict()
        snapshot = await buffer.snapshot()
        await buffer.extend(rows(3))
        waiting = crew.start(buffer.durable())
        await turns()
        await buffer.load_state_dict(state)
        (error,) = await outcomes(waiting)
        assert isinstance(error, AsyncBufError)
        assert "a restore replaced" in str(error)
        await snapshot.save(tmp_path / "old")  # of the history before
        still = crew.start(buffer.durable())
        await turns()
        assert not still.done()


async def test_closing_tells_those_that_wait(tmp_path: Path) -> None:
    buffer = buffer_of()
    async with Crew() as crew:
        async with buffer:
            await buffer.extend(rows(3), key="a")
            waiting = crew.start(buffer.durable())
            await turns()
        (error,) = await outcomes(waiting)
        assert isinstance(error, BufferClosedError)
        with pytest.raises(BufferClosedError):
            await buffer.durable()
        await buffer.save(tmp_path / "saved")
        await within(buffer.durable(key="a"))


async def test_what_was_not_written() -> None:
    buffer = buffer_of(key_window=1)
    await buffer.add(rows(1), key="old")
    await buffer.add(rows(1), key="new")
    for key in ("old", "never", 3):
        with pytest.raises(ValueError, match="key: expected one of the last key_window keys"):
            await buffer.durable(key=key)
    with pytest.raises(ValueError, match="number: expected one that producer 'p' has written, below 0, found 0"):
        await buffer.durable(producer="p", number=0)
    await within(buffer.durable(producer="p"))
    odd: list[tuple[dict[str, Any], str]] = [
        ({"number": 0}, "expected the name of a producer beside the number"),
        ({"key": "new", "producer": "p"}, "expected a key or a producer, found both"),
        ({"key": 1.0}, "key: expected a str or an int"),
        ({"producer": 3}, "producer: expected a name"),
        ({"producer": "p", "number": 0.0}, "number: expected an int"),
    ]
    for arguments, message in odd:
        with pytest.raises((TypeError, ValueError), match=message):
            await buffer.durable(**arguments)


async def test_within_a_transform_it_raises() -> None:
    async def transform(data: Any) -> Any:
        with pytest.raises(AsyncBufError, match="durable"):
            await buffer.durable()
        return data

    buffer = buffer_of(transform=transform)
    await buffer.extend(rows(8))
    async with buffer:
        await within(buffer.sample())


async def test_cancelled_it_leaves_nothing() -> None:
    async with buffer_of() as buffer, Crew() as crew:
        await buffer.extend(rows(3))
        waiting = [crew.start(buffer.durable()) for _ in range(3)]
        await turns()
        for task in waiting:
            task.cancel()
        await outcomes(*waiting)
        assert "nobody waits" in buffer.why_blocked()


async def test_every_acknowledged_write_survives_a_crash(tmp_path: Path) -> None:
    """Producers forget what is durable. Whatever the moment of the crash, what they forgot is in the checkpoint."""
    storage = ThreadedStorage(4096)
    async with ReplayBuffer(storage, batch_size=4, generator=seeded()) as buffer, Crew() as crew:
        acknowledged = [0, 0, 0]

        async def produce(name: int) -> None:
            producer = buffer.producer(f"p{name}")
            while True:
                await producer.extend(rows(1, 1000 * name + producer.next_number))
                if producer.next_number % 4 == 0:
                    await producer.durable()
                    acknowledged[name] = producer.next_number

        for name in range(3):
            crew.start(produce(name))
        for step in range(8):
            await within(buffer.save(tmp_path / f"{step}"))
            known = list(acknowledged)
            other = ReplayBuffer(ThreadedStorage(4096), batch_size=4)
            await within(other.load(tmp_path / f"{step}"))
            for name in range(3):
                assert other.producer(f"p{name}").next_number >= known[name]
        assert min(acknowledged) > 0
