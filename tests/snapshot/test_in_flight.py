"""Snapshots in the middle of everything: waited for, cancelled, closed under, beside work that is under way."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import BufferClosedError, ReplayBuffer, TensorStorage
from asyncbuf.testing import assert_same_batch, difference
from tests.helpers import (
    CountingTransform,
    Crew,
    Stop,
    ThreadedStorage,
    background_tasks,
    nothing,
    rows,
    seeded,
    turns,
    until,
    within,
)
from tests.resume_helpers import Average, check_stream, items_of, late, restored, saved, take
from tests.snapshot.helpers import ITEMS, buffer_with, filled, queue_of, slow

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


async def test_two_snapshots_at_once() -> None:
    async with await filled(transform=late) as source:
        await source.sample()
        one, other, state = await asyncio.gather(source.snapshot(), source.snapshot(), source.state_dict())
        assert difference(one.state_dict(), other.state_dict()) is None
        assert difference(one.state_dict(), state) is None
        expected = await take(source, 4)
    async with buffer_with(transform=late, seed=9) as target:
        await asyncio.gather(target.restore(one), target.restore(other))
        await check_stream(target, expected)


async def test_two_saves_to_one_place_at_once(tmp_path: Path) -> None:
    async with await filled(prefetch=8) as source:
        await source.sample()
        await source.save(tmp_path / "it")
        for _ in range(5):
            await asyncio.gather(*(source.save(tmp_path / "it") for _ in range(4)))
            target = buffer_with(prefetch=8, seed=9)
            await target.load(tmp_path / "it")
            assert target.stats().queued == 8


def test_one_event_loop_after_the_other() -> None:
    buffer = buffer_with()

    async def main() -> None:
        await asyncio.gather(*(buffer.snapshot() for _ in range(3)))
        async with buffer:
            await buffer.extend(items_of(4))
            await take(buffer, 2)
            await asyncio.gather(*(buffer.snapshot() for _ in range(3)))

    asyncio.run(main())
    asyncio.run(main())


@pytest.mark.parametrize("timeout", [None, 3600.0])
async def test_close_while_a_snapshot_waits(timeout: float | None) -> None:
    is_open = asyncio.Event()

    async def jam(data: Any) -> Any:
        await is_open.wait()
        return data

    source = await filled(transform=jam)
    async with Crew() as crew:
        await source.open()
        asked = crew.start(source.sample())
        await turns()
        waiting = crew.start(source.snapshot(timeout))
        await turns()
        await within(source.aclose())
        with pytest.raises(BufferClosedError):
            await within(asked)
        snapshot = await within(waiting)  # of the closed buffer, and long before it would give up
        is_open.set()
        async with source:
            expected = await take(source, 5)
        async with buffer_with(transform=jam, seed=9) as target:
            await target.restore(snapshot)
            await check_stream(target, expected)


@pytest.mark.parametrize("call", ["skip", "flush", "empty"])
async def test_what_a_snapshot_waits_for_is_dropped(call: str) -> None:
    is_open = asyncio.Event()

    async def jam(data: Any) -> Any:
        await is_open.wait()
        return data

    async with await filled(transform=jam, prefetch=1, batch_size=20) as source, Crew() as crew:
        asked = crew.start(source.sample())
        await turns()
        asked.cancel()
        await source.skip()
        waiting = crew.start(source.snapshot())
        await turns()
        assert not waiting.done()
        await getattr(source, call)()
        snapshot = await within(waiting, 2)
        assert queue_of(snapshot.state_dict()) == []


async def test_a_dead_worker_does_not_stop_a_snapshot() -> None:
    source = await filled(transform=late)
    await source.open()
    await take(source, 3)
    next(task for task in background_tasks() if "worker" in task.get_name()).cancel()
    await turns()
    snapshot = await within(source.snapshot())
    await within(source.aclose())
    async with buffer_with(transform=late, seed=9) as target:
        await target.restore(snapshot)
        assert [batch.number for batch in await take(target, 4)] == [3, 4, 5, 6]


@pytest.mark.parametrize("rounds", [60, pytest.param(2000, marks=[slow, pytest.mark.timeout(900)])])
async def test_cancelled_at_random_moments(rounds: int, tmp_path: Path) -> None:
    def make(seed: int = 0) -> ReplayBuffer:
        return buffer_with(transform=[Average(), late], prefetch=3, workers=2, seed=seed)

    plain_one, source, choose = make(), make(), random.Random(0)
    await plain_one.extend(items_of(ITEMS))
    await source.extend(items_of(ITEMS))

    async def freeze() -> None:
        async with source.frozen():
            await source.state_dict()

    calls: list[Callable[[], Any]] = [source.snapshot, source.state_dict, lambda: source.save(tmp_path / "it"), freeze]
    async with plain_one, source, Crew() as crew:
        for _ in range(rounds):
            asked = crew.start(source.sample())
            tasks = [crew.start(call()) for call in choose.sample(calls, 2)]
            await turns(choose.randrange(8))
            if choose.random() < 0.5:
                await turns(choose.randrange(400))
            for task in tasks:
                task.cancel()
            assert_same_batch(await within(asked), await plain_one.sample())
        await asyncio.gather(*tasks, return_exceptions=True)
        assert difference(await within(source.state_dict()), await plain_one.state_dict()) is None
    assert [path.name for path in tmp_path.iterdir()] in ([], ["it"])


async def test_a_restore_cancelled_at_random_moments_is_all_or_nothing() -> None:
    async with await filled(transform=late) as source:
        await source.sample()
        state = await source.state_dict()
        new = await take(source, 2)
    choose = random.Random(1)
    outcomes = set()
    async with await filled(12, transform=late, seed=9) as target:
        await take(target, 20)
        old_state = await target.state_dict()
        old = await take(target, 2)
        for _ in range(60):
            await target.load_state_dict(old_state)
            task = asyncio.create_task(target.load_state_dict(state))
            await turns(choose.randrange(6))
            if (more := choose.choice((0, 0, 50, None))) is None:
                await asyncio.wait({task})
            else:
                await turns(more)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            batches = await take(target, 2)
            was_restored = batches[0].number == new[0].number
            assert was_restored == (not task.cancelled())
            outcomes.add(was_restored)
            for found, expected in zip(batches, new if was_restored else old, strict=True):
                assert_same_batch(found, expected)
            assert len(target) == (20 if was_restored else 12)
    assert outcomes == {True, False}


@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
async def test_a_write_that_waits_while_a_restore_changes_the_order_of_fields(threads: bool) -> None:
    def items(*names: str) -> dict[str, torch.Tensor]:
        return {name: torch.full((4,), ord(name)) for name in names}

    source = buffer_with()
    await source.extend(items("b", "a"))
    snapshot = await source.snapshot()

    planned, copying = Stop(), Stop()

    class SlowStorage(ThreadedStorage):
        def load_rows(self, meta: Any, chunks: Any) -> Callable[[], None]:
            make_live = super().load_rows(meta, chunks)
            planned()
            return make_live

    storage = SlowStorage(ITEMS)
    target = buffer_with(storage=storage)
    # The class of the storage is part of what must agree.
    snapshot._state["config"]["storage"] = "SlowStorage"
    async with target, Crew() as crew:
        restore = crew.start(target.restore(snapshot))
        await planned.come.reached()  # it saw an empty storage
        await target.extend(items("a", "b"))
        storage.on_write = copying
        first = crew.start(target.extend(items("a", "b")))
        await copying.come.reached()
        storage.on_write = lambda: None
        planned.go.set()
        await until(lambda: target.stats().waiting_writers == 1)
        storage.writes_in_threads = threads
        second = crew.start(target.extend(items("a", "b")))
        await turns()
        copying.go.set()
        await within(asyncio.gather(restore, first, second))
        assert len(target) == 8
        batch = await within(target.sample(64))
        assert batch["a"].tolist() == [ord("a")] * 64
        assert batch["b"].tolist() == [ord("b")] * 64


@pytest.mark.parametrize("way", ["snapshot", "state_dict", "directory", "frozen"])
async def test_stateful_transforms_that_begin_while_a_snapshot_waits_for_its_turn(way: str, tmp_path: Path) -> None:
    stop, at_work = Stop(), Stop()

    def make(storage: TensorStorage, hook: Callable[[int], object] = nothing) -> ReplayBuffer:
        transform = CountingTransform(hook)
        return ReplayBuffer(storage, batch_size=4, prefetch=1, transform=transform, generator=seeded())

    def hook(seen: int) -> None:
        if seen == 2:
            at_work()

    storage = ThreadedStorage(50)
    buffer = make(storage, hook)
    await buffer.extend(rows(20))
    async with buffer, Crew() as crew:
        await within(buffer.sample())
        await at_work.come.reached()  # the batch that is prefetched
        storage.on_write = stop
        write = crew.start(buffer.extend(rows(10)))
        await stop.come.reached()
        consumers = [crew.start(buffer.sample()) for _ in range(3)]  # their draws wait behind the write
        await turns()
        saving = crew.start(_saved_while_frozen(buffer) if way == "frozen" else saved(way, buffer, tmp_path))
        await turns()
        stop.go.set()
        await within(write)
        await turns()  # now it is the snapshot's turn; a transform is in the middle of its work, others are to begin
        assert not saving.done()
        at_work.go.set()
        what = await within(saving)
        seen = [int((await within(consumer))["seen"][0]) for consumer in consumers]
        seen += [int((await within(buffer.sample()))["seen"][0]) for _ in range(3)]
    assert seen == list(range(2, 8))
    other = await restored("state_dict" if way == "frozen" else way, what, make(ThreadedStorage(50)))
    async with other:
        assert [int((await within(other.sample()))["seen"][0]) for _ in range(6)] == seen


async def _saved_while_frozen(buffer: ReplayBuffer) -> Any:
    async with buffer.frozen():
        return await buffer.state_dict()


async def test_a_restore_asks_no_transform_for_its_state_while_it_is_at_work() -> None:
    class Busy(CountingTransform):
        stop: Stop | None = None
        at_work = False
        disturbed = False

        def __call__(self, data: Any) -> Any:
            if self.stop is not None:
                self.at_work = True
                self.stop()
                self.at_work = False
            return super().__call__(data)

        def state_dict(self) -> dict[str, int]:
            self.disturbed |= self.at_work
            return super().state_dict()

    transform = Busy()
    buffer = ReplayBuffer(TensorStorage(50), batch_size=4, prefetch=1, transform=transform)
    await buffer.extend(rows(50))
    async with buffer, Crew() as crew:
        snapshot = await within(buffer.snapshot())
        for _ in range(3):
            stop = transform.stop = Stop()
            consumer = crew.start(buffer.sample())
            await stop.come.reached()
            restoring = crew.start(buffer.restore(snapshot))
            await turns(200)
            transform.stop = None
            stop.go.set()
            await within(restoring)
            await within(consumer)
    assert not transform.disturbed
