"""A checkpointer that saves in the background: one at a time, the newest that waits, and none lost at the end."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import CheckpointError, SaveHandle, SaveStage, SupersededError
from asyncbuf.checkpoint import _components
from asyncbuf.checkpoint import checkpointer as module
from asyncbuf.checkpoint.checkpointer import Checkpointer
from tests.checkpoint.helpers import Count, Run
from tests.helpers import Crew, Latch, check_same, turns, within

if TYPE_CHECKING:
    from pathlib import Path

    from asyncbuf._disk.writer import CheckpointWriter
    from asyncbuf.checkpoint._components import Captured


class Writing:
    """Lets the threads of saves through one by one, and notes the steps in the order in which they were written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[int] = []
        self.at_work = 0
        self.come: dict[int, Latch] = {}
        self.go: dict[int, Latch] = {}
        write = Checkpointer._write
        lock = threading.Lock()

        def held(checkpointer: Checkpointer, writer: CheckpointWriter, step: int, captured: Any) -> None:
            with lock:
                self.at_work += 1
                assert self.at_work == 1
                self.steps.append(step)
            self.latch(self.come, step).set()
            if step in self.go:
                self.go[step].wait()
            try:
                write(checkpointer, writer, step, captured)
            finally:
                self.at_work -= 1

        monkeypatch.setattr(Checkpointer, "_write", held)

    def hold(self, step: int) -> Latch:
        """Hold the save of a step up, before it writes anything, until the latch is set."""
        return self.latch(self.go, step)

    async def begun(self, step: int) -> None:
        await self.latch(self.come, step).reached()

    @staticmethod
    def latch(latches: dict[int, Latch], step: int) -> Latch:
        return latches.setdefault(step, Latch())


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> Writing:
    return Writing(monkeypatch)


def stages(*handles: SaveHandle) -> list[SaveStage]:
    return [handle.progress.stage for handle in handles]


async def value_of(checkpointer: Checkpointer, step: int) -> int:
    count = Count()
    await checkpointer.restore(step, count=count)
    return count.value


async def test_a_run_goes_on_from_what_was_captured_at_the_call(checkpointer: Checkpointer, writing: Writing) -> None:
    run, twin, other = Run(0), Run(0), Run(1)
    async with run.buffer, twin.buffer, checkpointer:
        for each in (run, twin):
            await each.train(5)
        go = writing.hold(5)
        handle = await checkpointer.save_soon(5, **run.objects, progress=run.step)
        check_same(await run.train(5), await twin.train(5))  # it goes on while nothing is written
        assert stages(handle) == [SaveStage.WRITING]
        go.set()
        assert await within(handle) == checkpointer.path(5)
        await run.train(5)
    restored = await checkpointer.restore(**other.objects)
    assert restored.values == {"progress": 5}
    other.step = 5
    async with other.buffer:
        fresh = Run(0)
        async with fresh.buffer:
            await fresh.train(5)
            check_same(await other.train(10), await fresh.train(10))
        assert other.weights() == fresh.weights()


async def test_the_newest_that_waits_is_written(checkpointer: Checkpointer, writing: Writing) -> None:
    go = writing.hold(1)
    count = Count(1)
    handles = [await checkpointer.save_soon(1, count=count)]
    await writing.begun(1)
    for step in range(2, 6):
        count.value = step
        handles.append(await checkpointer.save_soon(step, count=count))
        await turns(step)
    assert stages(*handles) == [SaveStage.WRITING, *[SaveStage.SUPERSEDED] * 3, SaveStage.WAITING]
    for handle in handles[1:4]:
        with pytest.raises(SupersededError, match="a newer save"):
            await handle
        assert handle.done()
        assert not handle.cancel()
    go.set()
    assert [await within(handles[0]), await within(handles[4])] == [checkpointer.path(1), checkpointer.path(5)]
    assert writing.steps == checkpointer.steps() == [1, 5]
    assert await value_of(checkpointer, 5) == 5


async def test_who_awaits_a_save_that_gives_way_is_told(checkpointer: Checkpointer, writing: Writing) -> None:
    go = writing.hold(1)
    first = await checkpointer.save_soon(1, n=1)
    await writing.begun(1)
    second = await checkpointer.save_soon(2, n=2)
    async with Crew() as crew:

        async def wait() -> Path:
            return await second

        waiting = crew.start(wait())
        await turns()
        await checkpointer.save_soon(3, n=3)
        with pytest.raises(SupersededError):
            await within(waiting)
    go.set()
    await within(first)
    await within(checkpointer.wait())
    assert checkpointer.steps() == [1, 3]


async def test_one_that_gives_way_is_not_logged(
    checkpointer: Checkpointer, writing: Writing, caplog: pytest.LogCaptureFixture
) -> None:
    go = writing.hold(1)
    for step in (1, 2, 3):
        await checkpointer.save_soon(step, n=step)
        if step == 1:
            await writing.begun(1)
    go.set()
    await within(checkpointer.wait())
    assert not caplog.records


async def test_memory_of_one_that_gives_way_is_free_at_once(
    checkpointer: Checkpointer, writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[weakref.ref[torch.Tensor]] = []
    real = _components.capture

    async def noting(*arguments: Any, **options: Any) -> dict[str, Captured]:
        captured = await real(*arguments, **options)
        copies.extend(weakref.ref(tensor) for part in captured.values() for tensor in part.tensors.values())
        return captured

    monkeypatch.setattr(module, "capture", noting)
    gc.collect()
    gc.disable()
    try:
        go = writing.hold(1)
        await checkpointer.save_soon(1, x=torch.zeros(1000))
        await writing.begun(1)
        second = await checkpointer.save_soon(2, x=torch.zeros(1000))
        assert copies[1]() is not None
        third = await checkpointer.save_soon(3, x=torch.zeros(1000))
        assert copies[1]() is None
        assert not second.done()  # in the very step
        assert third.cancel()
        await turns()
        assert copies[2]() is None
        go.set()
        await within(checkpointer.wait())
        assert copies[0]() is None
    finally:
        gc.enable()


async def test_a_capture_that_fails_makes_nobody_give_way(checkpointer: Checkpointer, writing: Writing) -> None:
    go = writing.hold(1)
    await checkpointer.save_soon(1, n=1)
    await writing.begun(1)
    second = await checkpointer.save_soon(2, n=2)
    with pytest.raises(CheckpointError):
        await checkpointer.save_soon(3, n=object())
    with pytest.raises(TypeError, match="step"):
        await checkpointer.save_soon("3", n=1)  # type: ignore[arg-type]
    go.set()
    await within(second)
    assert checkpointer.steps() == [1, 2]


# -- and save ---------------------------------------------------------------------------------------------------------


async def test_a_plain_save_is_written_in_the_order_of_captures_and_never_gives_way(
    checkpointer: Checkpointer, writing: Writing
) -> None:
    go = writing.hold(1)
    async with Crew() as crew:
        first = await checkpointer.save_soon(1, n=1)
        await writing.begun(1)
        second = await checkpointer.save_soon(2, n=2)
        third = crew.start(checkpointer.save(3, n=3))
        await turns()
        assert stages(second) == [SaveStage.WAITING]  # nobody gives way to a plain save
        fourth = await checkpointer.save_soon(4, n=4)
        assert stages(second) == [SaveStage.SUPERSEDED]
        fifth = await checkpointer.save_soon(5, n=5)
        await turns()
        go.set()
        await within(asyncio.gather(third, checkpointer.wait()))
    assert writing.steps == [1, 3, 5]
    assert stages(first, second, fourth, fifth) == [
        SaveStage.COMMITTED,
        SaveStage.SUPERSEDED,
        SaveStage.SUPERSEDED,
        SaveStage.COMMITTED,
    ]


@pytest.mark.parametrize("first_is_plain", [False, True])
async def test_of_two_saves_of_one_step_the_later_one_stays(
    checkpointer: Checkpointer, writing: Writing, first_is_plain: bool
) -> None:
    async def save(value: int, *, plain: bool) -> None:
        saved = checkpointer.save if plain else checkpointer.save_soon
        found = await saved(7, count=Count(value))
        if isinstance(found, SaveHandle):
            await found

    go = writing.hold(7)
    async with Crew() as crew:
        first = crew.start(save(1, plain=first_is_plain))
        await writing.begun(7)
        second = crew.start(save(2, plain=not first_is_plain))
        await turns(20)
        assert not second.done()
        go.set()
        await within(asyncio.gather(first, second))
    assert writing.steps == [7, 7]
    assert await value_of(checkpointer, 7) == 2


async def test_a_restore_comes_after_what_is_being_written(checkpointer: Checkpointer, writing: Writing) -> None:
    await checkpointer.save(1, count=Count(1))
    go = writing.hold(2)
    await checkpointer.save_soon(2, count=Count(2))
    await writing.begun(2)
    async with Crew() as crew:
        reading = crew.start(value_of(checkpointer, 1))
        await turns(20)
        assert not reading.done()
        go.set()
        assert await within(reading) == 1
    assert await value_of(checkpointer, 2) == 2


# -- the end ----------------------------------------------------------------------------------------------------------


async def test_the_end_of_the_block_loses_no_save(checkpointer: Checkpointer) -> None:
    async with checkpointer:
        for step in range(10):
            handle = await checkpointer.save_soon(step, n=step)
    assert handle.done()
    assert checkpointer.latest() == 9


async def test_an_error_nobody_was_told_of_is_raised_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = Checkpointer(tmp_path)
    (tmp_path / "step-000001").write_text("mine")
    with pytest.raises(CheckpointError, match="or nothing; found a file"):
        async with checkpointer:
            await checkpointer.save_soon(1, n=1)
    assert not caplog.records

    async def failing() -> None:
        async with checkpointer:
            await checkpointer.save_soon(1, n=1)
            raise KeyError

    with pytest.raises(KeyError):
        await failing()
    assert "the save to" in caplog.text
    await checkpointer.wait()  # told once


async def test_an_error_that_was_raised_elsewhere_is_not_raised_at_the_end(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    (tmp_path / "step-000001").write_text("mine")
    async with checkpointer:
        with pytest.raises(CheckpointError):
            await within(await checkpointer.save_soon(1, n=1))


async def test_several_errors_at_the_end(tmp_path: Path, writing: Writing) -> None:
    checkpointer = Checkpointer(tmp_path)
    go = writing.hold(1)
    for step in (1, 2):
        (tmp_path / f"step-00000{step}").write_text("mine")
        await checkpointer.save_soon(step, n=1)
        if step == 1:
            await writing.begun(1)
    async with Crew() as crew:
        waiting = crew.start(checkpointer.wait())
        await turns()
        go.set()
        with pytest.raises(ExceptionGroup, match="several saves failed") as found:
            await within(waiting)
    assert len(found.value.exceptions) == 2


async def test_wait_leaves_the_saves_alone_when_it_is_cancelled_and_the_block_does_not(
    checkpointer: Checkpointer, writing: Writing
) -> None:
    go = writing.hold(1)

    async def block() -> None:
        async with checkpointer:
            await entered.wait()

    entered = asyncio.Event()
    async with Crew() as crew:
        leaving = crew.start(block())
        handle = await checkpointer.save_soon(1, n=1)
        await writing.begun(1)
        waiting = crew.start(checkpointer.wait())
        await turns()
        waiting.cancel()
        await turns()
        assert waiting.cancelled()
        assert not handle.done()
        entered.set()
        await turns()
        leaving.cancel()
        await turns()
        assert not leaving.done()
        go.set()
        await asyncio.wait({leaving})
        assert leaving.cancelled()
    assert stages(handle) == [SaveStage.CANCELLED]
    assert checkpointer.steps() == []


async def test_total_and_progress(checkpointer: Checkpointer) -> None:
    handle = await checkpointer.save_soon(1, model=torch.nn.Linear(300, 300), n=3)
    assert handle.progress.total is None
    await within(handle)
    total = handle.progress.total
    assert total is not None
    assert 300 * 301 * 4 <= total == handle.progress.done < 300 * 301 * 4 + 3000
    second = await checkpointer.save_soon(2, model=torch.nn.Linear(300, 300), n=3)
    await within(second)
    assert second.progress.fraction == 1.0
