"""A buffer that is saved in the background: the moment of the call, who waits, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import logging
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import (
    AsyncBufError,
    CheckpointError,
    Freeze,
    ListStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SaveStage,
    TensorStorage,
    WrongLoopError,
)
from asyncbuf._disk.writer import CheckpointWriter
from tests.checkpoint.helpers import items, make_buffer
from tests.helpers import (
    CountingTransform,
    Crew,
    Stop,
    ThreadedStorage,
    check_same,
    rows,
    seeded,
    take,
    turns,
    until,
    within,
)
from tests.resume_helpers import Blocking

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def small(storage: Any = None, **settings: Any) -> ReplayBuffer:
    storage = TensorStorage(64) if storage is None else storage
    known: dict[str, Any] = {"batch_size": 4, "prefetch": 3, "workers": 2, "generator": seeded(1)}
    return ReplayBuffer(storage, **(known | settings))


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> Stop:
    """Where the thread of a save stops before it writes its first file."""
    stop = Stop()
    place = CheckpointWriter._place

    def stopping(self: CheckpointWriter, name: str) -> Path:
        if not stop.go.is_set:
            stop()
        return place(self, name)

    monkeypatch.setattr(CheckpointWriter, "_place", stopping)
    return stop


async def restored(path: Path, count: int, like: ReplayBuffer) -> tuple[int, list[Any]]:
    """How much had been written, and the next batches."""
    await like.load(path)
    written = like.write_count
    async with like:
        return written, await take(like, count)


async def test_what_is_asked_for_after_the_call_is_not_in_it(tmp_path: Path) -> None:
    buffer, twin = make_buffer(), make_buffer()
    async with buffer, twin:
        for each in (buffer, twin):
            await each.extend(items(20, 0))
            await take(each, 3)
        handle = buffer.save_soon(tmp_path / "a")
        extend, sample = buffer.extend(items(7, 1)), buffer.sample()
        await extend
        await sample
        assert await within(handle) == tmp_path / "a"
        expected = await take(twin, 6)
    written, found = await restored(tmp_path / "a", 6, make_buffer(9))
    assert written == 20
    check_same(found, expected)


@pytest.mark.usefixtures("transforms_in_threads")
async def test_batches_that_are_being_prepared_are_waited_for_and_later_writes_are_not_in_it(tmp_path: Path) -> None:
    transform = Blocking()
    buffer = small(transform=transform)
    async with buffer, Crew() as crew:
        await buffer.extend(rows(20))
        stop = transform.block()
        sampling = crew.start(buffer.sample())
        await stop.come.reached()
        handle = buffer.save_soon(tmp_path / "a")
        await within(buffer.extend(rows(5, 20)))  # writers go on
        drawn = buffer.stats().drawn
        more = [crew.start(buffer.sample()) for _ in range(2)]
        await until(lambda: buffer.stats().drawn == drawn + 2)  # and so do draws
        assert handle.progress.stage is SaveStage.WAITING
        stop.go.set()
        await within(handle)
        await within(asyncio.gather(sampling, *more))
    other = small(transform=Blocking())
    await other.load(tmp_path / "a")
    assert other.write_count == 20
    stats = other.stats()
    assert (stats.drawn, stats.queued) == (drawn, drawn)
    async with other:
        assert (await other.sample()).number == 0
    assert other.stats().retries == 0


@pytest.mark.usefixtures("transforms_in_threads")
async def test_batches_that_are_late_are_saved_as_tickets(tmp_path: Path) -> None:
    transform, twin = Blocking(), small(transform=Blocking())
    buffer = small(transform=transform)
    async with buffer, twin, Crew() as crew:
        for each in (buffer, twin):
            await each.extend(rows(20))
        stop = transform.block()
        sampling = crew.start(buffer.sample())
        await stop.come.reached()
        await within(buffer.save_soon(tmp_path / "a", timeout=0.0))
        assert not sampling.done()
        stop.go.set()
        await within(sampling)
        expected = await take(twin, 8)
    _, found = await restored(tmp_path / "a", 8, small(transform=Blocking()))
    check_same(found, expected)


async def test_a_write_before_it_is_in_it_however_long_it_takes(tmp_path: Path) -> None:
    stop = Stop()
    buffer = small(ThreadedStorage(64, on_write=stop))
    async with Crew() as crew:
        first = crew.start(buffer.extend(rows(10)))
        await stop.come.reached()
        handle = buffer.save_soon(tmp_path / "a")
        second = crew.start(buffer.extend(rows(10, 10)))
        await turns()
        assert not handle.done()
        stop.go.set()
        await within(asyncio.gather(first, second, handle))
    assert (await restored(tmp_path / "a", 0, small(ThreadedStorage(64))))[0] == 10


async def test_a_write_before_it_that_takes_too_long(tmp_path: Path) -> None:
    stop = Stop()
    buffer = small(ThreadedStorage(64, on_write=stop))
    async with Crew() as crew:
        first = crew.start(buffer.extend(rows(10)))
        await stop.come.reached()
        handle = buffer.save_soon(tmp_path / "a", timeout=0.01)
        with pytest.raises(TimeoutError, match="still waits for writes"):
            await within(handle)
        assert handle.progress.stage is SaveStage.FAILED
        stop.go.set()
        await within(first)
        await within(buffer.extend(rows(10)))  # its place in the history holds nobody up
    assert not (tmp_path / "a").exists()


@pytest.mark.usefixtures("transforms_in_threads")
@pytest.mark.parametrize("flushes", [False, True])
async def test_a_stateful_transform_ends_first_and_no_other_begins(tmp_path: Path, flushes: bool) -> None:
    stop = Stop()
    transform = CountingTransform(lambda seen: stop() if seen == 3 else None)
    buffer, twin = small(transform=transform), small(transform=CountingTransform())
    async with buffer, twin, Crew() as crew:
        for each in (buffer, twin):
            await each.extend(rows(20))
        await buffer.sample()
        await twin.sample()
        await stop.come.reached()
        handle = buffer.save_soon(tmp_path / "a")
        await within(buffer.extend(rows(10, 20)))
        if flushes:
            assert await buffer.flush() == 3
        sampling = crew.start(buffer.sample())
        await turns()
        assert not handle.done()
        stop.go.set()
        await within(handle)
        await within(sampling)
        expected = await take(twin, 8)
    _, found = await restored(tmp_path / "a", 8, small(transform=CountingTransform()))
    check_same(found, expected)


async def test_within_a_freeze_it_is_taken_at_once(tmp_path: Path) -> None:
    buffer = small()
    await buffer.extend(rows(10))
    async with buffer, Crew() as crew:
        outside = contextvars.copy_context()
        async with buffer.frozen():
            late = crew.start(buffer.extend(rows(10)), outside)
            await turns()
            await within(buffer.save_soon(tmp_path / "a"))
            assert not late.done()
        await within(late)
    assert (await restored(tmp_path / "a", 0, small()))[0] == 10


async def test_nobody_waits_for_a_save_that_waits_for_himself(tmp_path: Path) -> None:
    buffer = small()
    await buffer.extend(rows(10))
    async with Crew() as crew:
        go = asyncio.Event()

        async def other() -> Any:
            await go.wait()
            return await buffer.save_soon(tmp_path / "a")

        saving = crew.start(other())
        async with buffer.frozen():
            go.set()
            await turns()
            (handle,) = buffer._snapshots.saves.running
            with pytest.raises(AsyncBufError, match="within frozen"):
                await handle
            with pytest.raises(AsyncBufError, match="within frozen"):
                await buffer.aclose()
            await buffer.save(tmp_path / "a")  # does not wait for what comes after it
        await within(saving)


async def test_a_buffer_is_not_saved_from_within_its_transform(tmp_path: Path) -> None:
    errors: list[str] = []

    async def transform(data: Any) -> Any:
        try:
            buffer.save_soon(tmp_path / "a")
        except AsyncBufError as error:
            errors.append(str(error))
        return data

    buffer = small(transform=transform, prefetch=0)
    async with buffer:
        await buffer.extend(rows(10))
        await buffer.sample()
    assert "save_soon() was called from within a transform" in errors[0]


# -- awaiting ---------------------------------------------------------------------------------------------------------


async def test_several_await_it_and_none_of_them_cancels_it(tmp_path: Path, writing: Stop) -> None:
    buffer = small()
    await buffer.extend(rows(10))
    handle = buffer.save_soon(tmp_path / "a")

    async def wait() -> Path:
        return await handle

    async with Crew() as crew:
        tasks = [crew.start(wait()) for _ in range(3)]
        await writing.come.reached()
        tasks[0].cancel()
        await asyncio.wait({tasks[0]})
        assert tasks[0].cancelled()
        writing.go.set()
        assert await within(asyncio.gather(*tasks[1:])) == [tmp_path / "a"] * 2
    assert await handle == tmp_path / "a"
    assert handle.progress.stage is SaveStage.COMMITTED


async def test_an_error_that_nobody_awaits_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a").write_text("mine")
    buffer = small()
    handle = buffer.save_soon(tmp_path / "a")
    await buffer.aclose()
    assert handle.progress.stage is SaveStage.FAILED
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "or nothing; found a file" in caplog.text
    for _ in range(2):  # and awaited later, it is raised all the same
        with pytest.raises(CheckpointError, match="or nothing; found a file"):
            await handle
    assert len(caplog.records) == 1


async def test_an_error_that_somebody_awaits_is_raised_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a").write_text("mine")
    handle = small().save_soon(tmp_path / "a")
    with pytest.raises(CheckpointError, match="or nothing; found a file"):
        await within(handle)
    assert not caplog.records


async def test_an_error_is_logged_if_whoever_awaited_it_gave_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, writing: Stop
) -> None:
    buffer = small()
    await buffer.extend(rows(10))
    handle = buffer.save_soon(tmp_path / "a")
    await writing.come.reached()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(handle, 0.001)
    (tmp_path / "a").write_text("mine")
    writing.go.set()
    await buffer.aclose()
    assert "the save to" in caplog.text


async def test_what_cannot_be_saved_fails_the_save_and_nothing_else(tmp_path: Path) -> None:
    class Bad(SamplerWithoutReplacement):
        def state_dict(self) -> dict[str, Any]:
            raise LookupError("no state")

    buffer = small(sampler=Bad())
    async with buffer:
        await buffer.extend(rows(10))
        with pytest.raises(LookupError, match="no state"):
            await within(buffer.save_soon(tmp_path / "a"))
        await buffer.extend(rows(10))
        await buffer.sample()
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("wrong", [{"path": 3}, {"timeout": -1.0}, {"timeout": "x"}, {"base": 3}])
async def test_wrong_arguments_are_refused_by_the_call(tmp_path: Path, wrong: dict[str, Any]) -> None:
    arguments = {"path": tmp_path / "a"} | wrong
    with pytest.raises((TypeError, ValueError)):
        small().save_soon(**arguments)


async def test_an_open_buffer_is_saved_in_its_loop_alone(tmp_path: Path) -> None:
    async with small() as buffer:
        handle = buffer.save_soon(tmp_path / "a")

        async def elsewhere(save: bool) -> None:
            if save:
                buffer.save_soon(tmp_path / "b")
            await handle

        for save in (True, False):
            with pytest.raises(WrongLoopError):
                await asyncio.to_thread(asyncio.run, elsewhere(save))
        await within(handle)
    with pytest.raises(RuntimeError, match="no running event loop"):
        await asyncio.to_thread(small().save_soon, tmp_path / "b")


# -- progress ---------------------------------------------------------------------------------------------------------


async def test_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[SaveStage, int, int | None, float | None]] = []
    write_file = CheckpointWriter._write_file

    def note(self: CheckpointWriter, *arguments: Any) -> None:
        write_file(self, *arguments)
        progress = handle.progress
        seen.append((progress.stage, progress.done, progress.total, progress.fraction))

    monkeypatch.setattr(CheckpointWriter, "_write_file", note)
    buffer = small(TensorStorage(30_000), prefetch=0)
    await buffer.extend(rows(30_000, width=100))
    handle = buffer.save_soon(tmp_path / "a")
    assert str(handle.progress) == "waiting: 0.0 MB"
    assert handle.progress.fraction is None
    await within(handle)
    tensors = 30_000 * 408
    assert {stage for stage, *_ in seen} == {SaveStage.WRITING}
    assert all(total is not None and tensors <= total < tensors + 100_000 for _, _, total, _ in seen)
    assert seen[0][3] is not None
    assert 0.0 < seen[0][3] <= 1.0
    progress = handle.progress
    files = sum(file.stat().st_size for file in (tmp_path / "a").rglob("data-*/**/*") if file.is_file())
    assert progress.done == progress.total == files
    assert (progress.fraction, progress.linked, progress.stage) == (1.0, 0, SaveStage.COMMITTED)
    assert repr(handle) == f"<SaveHandle {tmp_path / 'a'}, committed: 12.3 of 12.3 MB>"


async def test_progress_counts_files_that_are_used_again(tmp_path: Path) -> None:
    buffer = small(prefetch=0)
    await buffer.extend(rows(30))
    await within(buffer.save_soon(tmp_path / "a"))
    second = buffer.save_soon(tmp_path / "b", base=tmp_path / "a")
    await within(second)
    assert 0 < second.progress.linked < second.progress.done == second.progress.total


async def test_progress_of_objects_has_no_total_before_they_are_encoded(tmp_path: Path, writing: Stop) -> None:
    buffer = small(ListStorage(100), prefetch=0)
    await buffer.extend([{"text": "x" * n} for n in range(50)])
    handle = buffer.save_soon(tmp_path / "a")
    await writing.come.reached()
    assert (handle.progress.stage, handle.progress.total) == (SaveStage.WRITING, None)
    writing.go.set()
    await within(handle)
    assert handle.progress.total == handle.progress.done > 0


# -- what is left -----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("how", ["committed", "failed", "cancelled", "cancelled at once"])
async def test_nothing_is_kept_alive(tmp_path: Path, how: str) -> None:
    if how == "failed":
        (tmp_path / "a").write_text("mine")
    storage = TensorStorage(64)
    buffer = small(storage)
    await buffer.extend(rows(10))
    handle = buffer.save_soon(tmp_path / "a")
    if how == "cancelled":
        await turns(3)
    if how.startswith("cancelled"):
        handle.cancel()
    with contextlib.suppress(CheckpointError, asyncio.CancelledError):
        await within(handle)
    refs: list[weakref.ref[Any]] = [weakref.ref(buffer), weakref.ref(storage)]
    if how != "failed":  # the error holds the frames that it was raised through, and they hold the handle
        refs.append(weakref.ref(handle))
    del buffer, storage, handle
    await turns(3)
    assert [ref() for ref in refs] == [None] * len(refs)


def test_a_loop_that_is_closed_under_it(tmp_path: Path) -> None:
    """What waited there is gone, and the buffer is saved in another loop."""
    buffer = small()
    loop = asyncio.new_event_loop()
    freezes: list[Freeze] = []

    async def begin() -> None:
        await buffer.open()
        await buffer.extend(rows(10))
        outside = contextvars.copy_context()
        freezes.append(await buffer.freeze())
        outside.run(buffer.save_soon, tmp_path / "a")

    loop.run_until_complete(begin())
    loop.set_exception_handler(lambda *_: None)  # it complains of every task that it leaves behind
    loop.close()

    async def again() -> int:
        await within(buffer.save_soon(tmp_path / "b"))
        await buffer.aclose()
        return (await restored(tmp_path / "b", 0, small()))[0]

    assert asyncio.run(again()) == 10
    assert not (tmp_path / "a").exists()


def test_the_end_of_the_loop_cancels_it_and_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> Any:
        buffer = small(TensorStorage(3000))
        await buffer.extend({"x": torch.zeros(3000, 1000)})
        handle = buffer.save_soon(tmp_path / "a")
        await turns(5)
        return handle

    handle = asyncio.run(main())
    assert handle.progress.stage is SaveStage.CANCELLED
    assert list(tmp_path.iterdir()) == []
