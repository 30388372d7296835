"""Saves in the background that are given up, or whose buffer or loop ends: whole or not there, and nothing beside."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import BufferFailedError, ReplayBuffer, SaveHandle, SaveStage, TensorStorage
from asyncbuf._disk import housekeeping
from asyncbuf._disk.manifest import MANIFEST, is_checkpoint
from asyncbuf._disk.writer import CheckpointWriter
from asyncbuf.checkpoint.checkpointer import Checkpointer
from tests.checkpoint.helpers import Count
from tests.disk.traced import LOOKS, OPERATIONS, watched
from tests.helpers import Crew, Latch, Stop, ThreadedStorage, outcomes, rows, seeded, take, turns, until, within

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path


def make_buffer(storage: Any = None, **settings: Any) -> ReplayBuffer:
    storage = TensorStorage(64) if storage is None else storage
    known: dict[str, Any] = {"batch_size": 4, "prefetch": 2, "generator": seeded(1)}
    return ReplayBuffer(storage, **(known | settings))


async def written(path: Path) -> int:
    """How many items had been written to the buffer that a checkpoint is of; all of it is read."""
    buffer = make_buffer()
    await buffer.load(path)
    return buffer.write_count


def stopping_at(stop: Stop) -> Callable[[Any], Any]:
    """A transform that changes nothing and takes long."""

    def transform(data: Any) -> Any:
        stop()
        return data

    return transform


def leftovers(root: Path) -> list[str]:
    """What belongs to no checkpoint."""
    left = []
    for entry in root.iterdir():
        if not is_checkpoint(entry):
            left.append(entry.name)
            continue
        data = housekeeping.committed(entry)
        left += [f"{entry.name}/{name.name}" for name in entry.iterdir() if name.name not in (MANIFEST, data)]
    return left


class CancelAt:
    """Cancels a handle when a thread is about to do something to a file; the thread waits until that was done.

    Args:
        at: the number of the operation.
    """

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen: list[str] = []
        self.handle: SaveHandle | None = None
        self.was_in_time: bool | None = None
        self._loop = asyncio.get_running_loop()
        self._done = Latch()

    def __call__(self, name: str, path: Path) -> None:
        if self.handle is None:
            return
        self.seen.append(f"{name} {path.name}")
        if len(self.seen) == self.at:
            self._loop.call_soon_threadsafe(self._cancel)
            self._done.wait()

    def _cancel(self) -> None:
        assert self.handle is not None
        self.was_in_time = self.handle.cancel()
        self._done.set()


async def given_up_at(at: int, save: Callable[[], Awaitable[SaveHandle]]) -> CancelAt:
    """Give a save up at one of its operations, and check that the handle says the truth."""
    cancel = CancelAt(at)
    with watched(cancel, OPERATIONS + LOOKS):
        handle = cancel.handle = await save()
        try:
            await within(handle)
        except asyncio.CancelledError:
            assert cancel.was_in_time
            assert handle.progress.stage is SaveStage.CANCELLED
        else:
            assert not cancel.was_in_time
            assert handle.progress.stage is SaveStage.COMMITTED
    assert handle.cancel() is False
    return cancel


@pytest.mark.timeout(170)
@pytest.mark.parametrize("case", ["first", "replaced", "linked"])
async def test_given_up_at_each_operation(tmp_path: Path, case: str) -> None:
    root = tmp_path / "root"
    buffer = make_buffer()
    async with buffer:
        await buffer.extend(rows(20))
        await take(buffer, 2)
        in_time = []
        for at in range(1, 500):
            if root.exists():
                for entry in root.iterdir():
                    housekeeping.remove(entry)
            await buffer.save(root / "old")
            before = buffer.write_count
            await buffer.extend(rows(3, before))
            path = root / ("old" if case == "replaced" else "new")

            async def save(path: Path = path) -> SaveHandle:
                return buffer.save_soon(path, base=root / "old" if case == "linked" else None)

            cancel = await given_up_at(at, save)
            where = f"{at}: {cancel.seen[-1]}"
            if len(cancel.seen) < at:
                break
            in_time.append(bool(cancel.was_in_time))
            assert leftovers(root) == [], where
            if case != "replaced" or cancel.was_in_time:
                assert await written(root / "old") == before, where
            if cancel.was_in_time and case != "replaced":
                assert not path.exists(), where
            elif not cancel.was_in_time:
                assert await written(path) == before + 3, where
    assert in_time.count(True) > 20
    assert in_time.count(False) > 3  # after the commit
    assert sorted(in_time, reverse=True) == in_time


@pytest.mark.timeout(170)
async def test_a_checkpointer_given_up_at_each_operation(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "runs", keep=2)
    buffer, count = make_buffer(), Count(0)
    await buffer.extend(rows(20))
    for step in range(2):
        count.value = step
        await checkpointer.save(step, buffer=buffer, count=count)
    cancel, step = None, 1
    for at in range(1, 500, 3):
        before = checkpointer.steps()
        step += 1
        count.value = step
        cancel = await given_up_at(at, functools.partial(checkpointer.save_soon, step, buffer=buffer, count=count))
        if len(cancel.seen) < at:
            break
        kept = before if cancel.was_in_time else [before[-1], step]
        found = [each for each in checkpointer.steps() if each in kept]
        assert found == kept, cancel.seen[-1]
        other = Count()
        assert (await checkpointer.restore(buffer=make_buffer(), count=other)).step == other.value == kept[-1]
        assert leftovers(tmp_path / "runs") == [], cancel.seen[-1]
    assert cancel is not None
    assert len(cancel.seen) > 30


@pytest.mark.parametrize("seed", range(4))
async def test_given_up_at_any_moment(tmp_path: Path, seed: int) -> None:
    """The moments before its thread has begun and after it has ended are among them."""
    rng = random.Random(seed)
    buffer, twin = make_buffer(), make_buffer()
    async with buffer, twin:
        for number in range(30):
            for each in (buffer, twin):
                await each.extend(rows(5, number))
            path = tmp_path / rng.choice("ab")
            before = await written(path) if path.exists() else None
            handle = buffer.save_soon(path, timeout=rng.choice((None, 0.0)))
            await turns(rng.choice((0, 0, 1, 2, 3, 5, 8, 20, 100, 1000)))
            was_in_time = handle.cancel()
            await outcomes(asyncio.ensure_future(handle))
            assert (handle.progress.stage is SaveStage.CANCELLED) == was_in_time
            assert await take(buffer, 1) == await take(twin, 1)
            if was_in_time:
                assert (await written(path) if path.exists() else None) == before
            else:
                assert await written(path) == buffer.write_count
            assert leftovers(tmp_path) == []


async def test_given_up_before_its_moment_has_come(tmp_path: Path) -> None:
    stop = Stop()
    buffer = make_buffer(ThreadedStorage(64, on_write=stop))
    async with Crew() as crew:
        first = crew.start(buffer.extend(rows(10)))
        await stop.come.reached()
        handle = buffer.save_soon(tmp_path / "a")
        await turns(3)
        assert handle.cancel()
        with pytest.raises(asyncio.CancelledError):
            await within(handle)
        stop.go.set()
        await within(first)
        await within(buffer.extend(rows(10)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("transforms_in_threads")
async def test_given_up_while_a_transform_is_at_work_gives_the_batches_back(tmp_path: Path) -> None:
    stop = Stop()
    buffer = make_buffer(transform=stopping_at(stop))
    async with buffer, Crew() as crew:
        await buffer.extend(rows(10))
        sampling = crew.start(buffer.sample())
        await stop.come.reached()
        handle = buffer.save_soon(tmp_path / "a")
        await turns(3)
        assert handle.cancel()
        await turns(3)
        assert handle.done()
        stop.go.set()
        assert (await within(sampling)).number == 0
    assert list(tmp_path.iterdir()) == []


# -- several ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> Stop:
    """Where the thread of the first save stops before it writes its first file."""
    stop = Stop()
    place = CheckpointWriter._place

    def stopping(self: CheckpointWriter, name: str) -> Path:
        if not stop.come.is_set:
            stop()
        return place(self, name)

    monkeypatch.setattr(CheckpointWriter, "_place", stopping)
    return stop


async def test_of_saves_to_one_path_the_last_one_stays(tmp_path: Path, writing: Stop) -> None:
    buffer = make_buffer()
    await buffer.extend(rows(10))
    handles = [buffer.save_soon(tmp_path / "a")]
    await writing.come.reached()
    for _ in range(3):
        await buffer.extend(rows(10))
        handles.append(buffer.save_soon(tmp_path / "a"))
    await within(buffer.save_soon(tmp_path / "b"))  # another path waits for none of them
    async with Crew() as crew:
        await buffer.extend(rows(10))
        last = crew.start(buffer.save(tmp_path / "a"))
        await turns()
        assert not last.done()
        assert not any(handle.done() for handle in handles)
        assert handles[2].cancel()
        writing.go.set()
        await within(last)
    stages = [handle.progress.stage for handle in handles]
    assert stages == [SaveStage.COMMITTED] * 2 + [SaveStage.CANCELLED, SaveStage.COMMITTED]
    assert await written(tmp_path / "a") == 50
    assert await written(tmp_path / "b") == 40
    assert leftovers(tmp_path) == []


# -- the end of the buffer --------------------------------------------------------------------------------------------


async def test_aclose_waits_for_a_save(tmp_path: Path, writing: Stop) -> None:
    buffer = make_buffer()
    async with Crew() as crew, buffer:
        await buffer.extend(rows(10))
        handle = buffer.save_soon(tmp_path / "a")
        await writing.come.reached()
        closing = [crew.start(buffer.aclose()) for _ in range(2)]
        await until(lambda: buffer._life.is_idle)  # the background work has ended: what is left is the save
        with pytest.raises(TimeoutError, match="a save is still being written"):
            await buffer.aclose(0.001)
        assert not closing[0].done()
        writing.go.set()
        await within(asyncio.gather(*closing))
        assert handle.done()
    assert await written(await handle) == 10


async def test_a_save_is_cancelled_with_the_aclose_that_waits_for_it(tmp_path: Path, writing: Stop) -> None:
    buffer = make_buffer()
    async with Crew() as crew:
        await buffer.open()
        await buffer.extend(rows(10))
        handle = buffer.save_soon(tmp_path / "a")
        await writing.come.reached()
        closing = crew.start(buffer.aclose())
        await turns(20)
        closing.cancel()
        await turns()
        closing.cancel()  # still waits for the thread
        await turns()
        assert not closing.done()
        writing.go.set()
        await asyncio.wait({closing})
        assert closing.cancelled()
    assert handle.progress.stage is SaveStage.CANCELLED
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("transforms_in_threads")
async def test_a_buffer_that_is_closed_before_its_batches_are_ready(tmp_path: Path) -> None:
    stop = Stop()
    buffer = make_buffer(transform=stopping_at(stop))
    async with Crew() as crew:
        await buffer.open()
        await buffer.extend(rows(10))
        sampling = crew.start(buffer.sample())
        await stop.come.reached()
        handle = buffer.save_soon(tmp_path / "a")
        closing = crew.start(buffer.aclose())
        await turns()
        stop.go.set()
        await within(closing)
        await outcomes(sampling)
    await within(handle)
    other = make_buffer(transform=lambda data: data)
    await other.load(tmp_path / "a")
    assert other.stats().queued == 3
    async with other:
        assert (await other.sample()).number == 0


async def test_a_save_outlives_the_failure_of_its_buffer(tmp_path: Path) -> None:
    stop = Stop()
    buffer = make_buffer(ThreadedStorage(64, on_write=stop))
    async with Crew() as crew:
        await buffer.open()
        first = crew.start(buffer.extend(rows(10)))
        await stop.come.reached()
        handle = buffer.save_soon(tmp_path / "a")
        late = crew.start(buffer.extend(rows(10)))
        await turns()
        buffer._parts.background.fail(ValueError("broken"))
        stop.go.set()
        found = await outcomes(first, late)
        assert isinstance(found[1], BufferFailedError)
        await within(handle)
        await buffer.aclose()
    other = make_buffer(ThreadedStorage(64))
    await other.load(tmp_path / "a")
    assert other.write_count == 10


async def test_a_worker_that_crashes_meanwhile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    crash = asyncio.Event()

    async def transform(data: Any) -> Any:
        await crash.wait()
        raise SystemExit(3)

    buffer = make_buffer(transform=transform)
    await buffer.open()
    async with Crew() as crew:
        await buffer.extend(rows(10))
        sampling = crew.start(buffer.sample())
        await until(lambda: buffer.stats().drawn == 3)
        handle = buffer.save_soon(tmp_path / "a")
        crash.set()
        assert isinstance((await outcomes(sampling))[0], BufferFailedError)
        await within(handle)
    with contextlib.suppress(BufferFailedError):
        await buffer.aclose()
    assert json.loads((tmp_path / "a" / MANIFEST).read_bytes())
    assert "broken" not in caplog.text
