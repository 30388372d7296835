"""Snapshots: one point in time of everything, whatever is written meanwhile, and nobody is held up."""

from __future__ import annotations

import asyncio
import gc
import pickle
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import Snapshot, TensorStorage
from asyncbuf.testing import difference
from tests.helpers import SECONDS, Crew, until, within
from tests.resume_helpers import late, noisy
from tests.snapshot.helpers import State, buffer_with, filled, queue_of, rows_of, slow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

RING = 600  # rows of 4 KB: three segments of memory


def numbered(start: int, count: int) -> dict[str, torch.Tensor]:
    number = torch.arange(start, start + count)
    return {"number": number, "wide": number[:, None].repeat(1, 512)}


def check_consistent(state: State, capacity: int) -> None:
    """Every row holds the newest item that the cursor says was written to it, and all of it."""
    writer = state["writer"]
    count, size = writer["write_count"], writer["size"]
    assert (writer["cursor"], size) == (count % capacity, min(count, capacity))
    row = torch.arange(size)
    newest = row + capacity * ((count - 1 - row) // capacity)
    assert rows_of(state, "number").equal(newest)
    wide = rows_of(state, "wide")
    assert wide.equal(newest[:, None].expand_as(wide))
    for entry in queue_of(state):
        check_whole(entry["content"]["indices"], entry["content"]["data"], capacity)


def check_whole(indices: torch.Tensor, data: Any, capacity: int) -> None:
    assert (data["number"] % capacity).equal(indices)
    assert data["wide"].equal(data["number"][:, None].expand_as(data["wide"]))


@pytest.mark.parametrize("count", [50, pytest.param(4000, marks=[slow, pytest.mark.timeout(1800)])])
async def test_snapshots_among_writers_are_consistent(count: int, tmp_path: Path) -> None:
    buffer = buffer_with(storage=TensorStorage(RING), batch_size=4, transform=late, workers=2)
    written, over = 0, False

    async def produce() -> None:
        nonlocal written
        while not over:
            size = random.choice((1, 7, 60))  # inline and in a thread
            start, written = written, written + size
            async with asyncio.timeout(SECONDS):
                await buffer.extend(numbered(start, size))

    async def consume() -> None:
        while not over:
            async with asyncio.timeout(SECONDS):
                batch = await buffer.sample()
            check_whole(batch.indices, batch.data, RING)

    async def snapshots() -> None:
        nonlocal over
        for i in range(count):
            snapshot = await within(buffer.snapshot(timeout=SECONDS), 2 * SECONDS)
            before = buffer.write_count
            while i % 2 and buffer.write_count < before + RING:  # noqa: ASYNC110 - until every row has been overwritten
                await asyncio.sleep(0)
            if i % 10 == 0:
                await snapshot.save(tmp_path / "it")
                snapshot = await Snapshot.load(tmp_path / "it")
            check_consistent(await asyncio.to_thread(snapshot.state_dict), RING)
        over = True

    async with buffer, asyncio.TaskGroup() as tasks:
        for work in (produce, produce, produce, consume, consume, snapshots):
            tasks.create_task(work())


async def test_rows_are_kept_only_while_a_snapshot_lives() -> None:
    buffer = buffer_with(storage=TensorStorage(RING), batch_size=4)
    await buffer.extend(numbered(0, RING))
    first = await buffer.snapshot()
    await buffer.extend(numbered(RING, 100))
    second = await buffer.snapshot()
    await buffer.extend(numbered(RING + 100, RING))
    await buffer.empty()
    await buffer.extend(numbered(0, 10))
    for snapshot, count in ((first, RING), (second, RING + 100)):
        state = snapshot.state_dict()
        assert state["writer"]["write_count"] == count
        check_consistent(state, RING)
        assert difference(snapshot.state_dict(), state) is None  # and again
    storage = buffer._storage
    assert isinstance(storage, TensorStorage)
    del first, second, snapshot
    gc.collect()
    assert len(storage._frozen) == 0


async def test_pickle_use_and_discard_leaves_nothing() -> None:
    source = await filled(transform=[noisy, late], workers=4)
    async with source:
        await source.sample()
        async with source.frozen():
            content = pickle.dumps(source)
    tasks, threads = len(asyncio.all_tasks()), threading.active_count()
    for _ in range(100):
        async with pickle.loads(content) as buffer:
            await buffer.sample()
            await buffer.snapshot()
        del buffer
    assert len(asyncio.all_tasks()) == tasks
    assert threading.active_count() <= threads


# -- how long it holds others up --------------------------------------------------------------------------------------


class Pauses:
    """The longest time between two steps of something that should never pause."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.steps = 0
        self._last: float | None = None

    def step(self) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self.longest = max(self.longest, now - self._last)
        self._last = now
        self.steps += 1


def have_gone(pauses: Sequence[Pauses], steps: int) -> Callable[[], bool]:
    return lambda: all(each.steps >= steps for each in pauses)


@slow
@pytest.mark.timeout(300)
async def test_a_save_of_500_megabytes_stalls_nobody(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    rows, width = 9_000, 56_000  # 504 MB
    buffer = buffer_with(storage=TensorStorage(rows), batch_size=32, transform=None, workers=2)
    for start in range(0, rows, 500):
        await buffer.extend({"number": torch.arange(start, start + 500), "pixels": torch.ones(500, width).byte()})
    item = {"number": torch.tensor(0), "pixels": torch.zeros(width, dtype=torch.uint8)}
    over = False

    async def sample(pauses: Pauses) -> None:
        while not over:
            await buffer.sample()
            pauses.step()

    async def extend(pauses: Pauses) -> None:
        while not over:
            await buffer.add(item)
            pauses.step()
            await asyncio.sleep(0.001)

    async def beat(pauses: Pauses) -> None:
        while not over:
            await asyncio.sleep(0.001)
            pauses.step()

    longest: dict[str, dict[str, float]] = {}
    all_pauses: list[Pauses] = []
    calls: dict[str, Callable[[], Any]] = {
        "idle": lambda: until(have_gone(all_pauses[2:], 2000)),
        "save": lambda: buffer.save(tmp_path / "it"),
    }
    async with buffer, Crew() as crew:
        for what, call in calls.items():
            over, all_pauses = False, [Pauses(), Pauses(), Pauses()]
            tasks = [crew.start(loop(p)) for loop, p in zip((sample, extend, beat), all_pauses, strict=True)]
            await until(have_gone(all_pauses, 100))
            began = time.perf_counter()
            await call()
            longest[what] = {"seconds": time.perf_counter() - began}
            over = True
            await asyncio.gather(*tasks)
            names = ("sample", "extend", "loop")
            longest[what] |= {name: p.longest for name, p in zip(names, all_pauses, strict=True)}
    record_property("longest", longest)
    print(longest)
    assert max(longest["save"][name] for name in ("sample", "extend", "loop")) < 0.1
