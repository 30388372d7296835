"""Several savers, readers and removers at work in one place."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import CheckpointNotFoundError
from asyncbuf._disk.reader import CheckpointReader
from asyncbuf._disk.writer import CheckpointWriter
from asyncbuf.checkpoint.checkpointer import Checkpointer
from tests.checkpoint.helpers import Count, items, make_buffer
from tests.helpers import Crew, Stop, take, turns, within

if TYPE_CHECKING:
    from pathlib import Path


async def test_saves_from_two_tasks_take_turns(checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = 0
    stops = [Stop() for _ in range(6)]
    turn = iter(stops)
    commit = CheckpointWriter.commit

    def alone(self: CheckpointWriter, state: Any) -> None:
        nonlocal busy
        busy += 1
        assert busy == 1
        next(turn)()
        commit(self, state)
        busy -= 1

    monkeypatch.setattr(CheckpointWriter, "commit", alone)
    a, b = make_buffer(1), make_buffer(2)
    async with a, b:
        await a.extend(items(20, 0))
        await b.extend(items(20, 0))
        # The same buffers under swapped names: frozen in the order of names, they would wait for each other.
        saves = asyncio.gather(
            *(checkpointer.save(step, x=(a, b)[step % 2], y=(b, a)[step % 2], n=step) for step in range(6))
        )
        for stop in stops:
            await stop.come.reached()
            await turns(50)  # the others get as far as they can
            stop.go.set()
        paths = await within(saves)
    assert paths == [checkpointer.path(step) for step in range(6)]
    assert checkpointer.steps() == [3, 4, 5]
    assert (await checkpointer.restore(x=make_buffer(), y=make_buffer())).values == {"n": 5}


async def test_same_step_twice_is_replaced(checkpointer: Checkpointer) -> None:
    for number in range(3):
        await checkpointer.save(1, n=number, tensor=torch.ones(number))
        assert (await checkpointer.restore()).values["n"] == number
    await asyncio.gather(*(checkpointer.save(1, n=number) for number in range(3, 8)))
    assert (await checkpointer.restore()).values == {"n": 7}
    assert checkpointer.steps() == [1]
    assert len(list(checkpointer.path(1).iterdir())) == 2


def test_one_object_serves_one_loop_after_the_other(checkpointer: Checkpointer) -> None:
    async def both() -> None:
        await asyncio.gather(*(checkpointer.save(step, n=step) for step in range(4)))
        await asyncio.gather(*(checkpointer.restore() for _ in range(4)))

    for _ in range(3):
        asyncio.run(both())


async def test_no_checkpoint_goes_while_it_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(tmp_path, keep=1)
    await checkpointer.save(1, tensor=torch.ones(1), n=1)
    stop = Stop()
    read = CheckpointReader.read

    def slow(self: CheckpointReader, name: str) -> dict[str, torch.Tensor]:
        stop()
        return read(self, name)

    monkeypatch.setattr(CheckpointReader, "read", slow)
    async with Crew() as crew:
        restoring = crew.start(checkpointer.restore())
        await stop.come.reached()
        saving: list[Any] = [crew.start(checkpointer.save(step, n=step)) for step in (1, 2)]
        await turns(50)
        assert not any(task.done() for task in saving)
        stop.go.set()
        assert (await within(restoring)).values["n"] == 1
        await within(asyncio.gather(*saving))
    assert checkpointer.steps() == [2]


async def test_restoring_beside_consumers_shows_none_an_old_model(checkpointer: Checkpointer) -> None:
    buffer, count = make_buffer(), Count(3)
    async with buffer:
        await buffer.extend(items(20, 0))
        await take(buffer, 3)
        await checkpointer.save(0, buffer=buffer, count=count)
    live, old = make_buffer(7, min_size=30), Count(-1)
    seen: list[tuple[int, int]] = []

    async def consume() -> None:
        seen.append(((await live.sample()).number, old.value))

    async with live, Crew() as crew:
        tasks: list[Any] = [crew.start(consume()) for _ in range(3)]
        await turns()
        await checkpointer.restore(buffer=live, count=old)
        await within(asyncio.gather(*tasks))
    assert seen == [(3, 3), (4, 3), (5, 3)]


# -- others at work in the same place ---------------------------------------------------------------------------------


async def test_the_latest_checkpoint_may_be_removed_while_it_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer, other = Checkpointer(tmp_path, keep=1), Checkpointer(tmp_path, keep=1)
    count = Count()
    await checkpointer.save(1, count=count)
    chosen = []
    choose = checkpointer._chosen

    def choosing(step: int | None) -> int:
        chosen.append(choose(step))
        if len(chosen) < 4:  # another saver puts a later one in its place, before it is opened
            count.value = 10 * len(chosen)
            run = asyncio.new_event_loop()
            thread = threading.Thread(target=lambda: run.run_until_complete(other.save(chosen[-1] + 1, count=count)))
            thread.start()
            thread.join()
            run.close()
        return chosen[-1]

    monkeypatch.setattr(checkpointer, "_chosen", choosing)
    into = Count()
    assert (await within(checkpointer.restore(count=into))).step == 4
    assert chosen == [1, 2, 3, 4]
    assert into.value == 30
    monkeypatch.undo()
    with pytest.raises(CheckpointNotFoundError):
        await checkpointer.restore(1, count=into)


async def test_a_listing_that_misses_what_is_there_is_taken_again(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checkpointer.save(3, count=Count())
    listings = iter([[], [], [3]])
    monkeypatch.setattr(checkpointer, "steps", lambda: next(listings, [3]))
    assert (await checkpointer.restore(count=Count())).step == 3


async def test_saves_of_the_same_buffers_by_other_names_do_not_wait_for_each_other(tmp_path: Path) -> None:
    one, two = make_buffer(1), make_buffer(2)
    async with one, two:
        for buffer in (one, two):
            await buffer.extend(items(20, 1))
        first, second = Checkpointer(tmp_path / "1"), Checkpointer(tmp_path / "2")
        for step in range(5):
            saves = first.save(step, a=one, b=two), second.save(step, a=two, b=one)
            await within(asyncio.gather(*saves))
    assert first.latest() == second.latest() == 4
