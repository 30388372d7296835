"""Writers that a limiter holds back: admitted in order, counted once, and in nobody's way."""

from __future__ import annotations

import asyncio
import gc
import pickle
import random
from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import (
    BufferClosedError,
    BufferFailedError,
    CheckpointMismatchError,
    Counters,
    Limiter,
    MinSize,
    NotYet,
    ReplayBuffer,
    TensorStorage,
)
from tests.helpers import (
    Crew,
    Stop,
    ThreadedStorage,
    numbers,
    outcomes,
    rows,
    seeded,
    turns,
    until,
    within,
    worker_tasks,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncbuf.rows import Answer


class AtMostUnread(Limiter):
    """At most so many items were written and not drawn."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.asked = 0

    def may_write(self, counters: Counters, items: int) -> Answer:
        self.asked += 1
        if items > self.most:
            raise ValueError(f"expected at most {self.most} items in one write, found {items}")
        unread = counters.write_count + counters.admitted - counters.drawn_items
        return True if unread + items <= self.most else NotYet(f"{unread} of at most {self.most} items are not drawn")

    def may_draw(self, counters: Counters, items: int) -> Answer:
        unread = counters.write_count - counters.drawn_items
        return True if unread >= items else NotYet(f"{unread} items were not drawn")


class Counting(AtMostUnread):
    """With a state: how often it let somebody draw."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.let = 0

    def may_draw(self, counters: Counters, items: int) -> Answer:
        answer = super().may_draw(counters, items)
        self.let += bool(answer)
        return answer

    def state_dict(self) -> dict[str, Any]:
        return {"let": self.let}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.let = state["let"]


def made(most: int = 8, *, capacity: int = 100, batch_size: int = 4, **options: Any) -> ReplayBuffer:
    options.setdefault("storage", TensorStorage(capacity))
    storage = options.pop("storage")
    return ReplayBuffer(storage, batch_size=batch_size, limiter=AtMostUnread(most), generator=seeded(), **options)


def unread(buffer: ReplayBuffer) -> int:
    stats = buffer.stats()
    return stats.write_count - 4 * stats.drawn


async def test_a_writer_waits_for_draws() -> None:
    async with made() as buffer, Crew() as crew:
        await buffer.extend(rows(8))
        writer = crew.start(buffer.extend(rows(4, 8)))
        await turns()
        assert not writer.done()
        assert buffer.stats().waiting_writers == 1
        assert "1 writer(s) wait for the limiter, the first with 4 item(s): 8 of at most 8 items are not drawn" in (
            buffer.why_blocked()
        )
        await within(buffer.sample())
        await within(writer)
        assert (buffer.write_count, buffer.stats().waiting_writers) == (12, 0)
        assert buffer.why_blocked() == "nobody waits"


@pytest.mark.parametrize("prefetch", [0, 2])
async def test_writers_come_in_their_order(prefetch: int) -> None:
    async with made(prefetch=prefetch) as buffer, Crew() as crew:
        writers = [crew.start(buffer.extend(rows(count, start))) for start, count in ((0, 8), (8, 6), (14, 1), (15, 5))]
        readers = [crew.start(buffer.sample()) for _ in range(5)]
        await outcomes(*writers, *readers)
        contents = await buffer.state_dict()
        assert contents["storage"]["chunks"][0]["number"].tolist() == list(range(20))


async def test_a_small_write_does_not_overtake_a_large_one() -> None:
    async with made() as buffer, Crew() as crew:
        await buffer.extend(rows(6))
        large = crew.start(buffer.extend(rows(4, 6)))
        small = crew.start(buffer.add({"number": 10, "wide": rows(1)["wide"][0]}))
        await turns()
        assert not small.done()
        large.cancel()
        await outcomes(large)
        await within(small)  # room for one was there all the time
        assert buffer.write_count == 7


async def test_consumers_wait_for_the_limiter() -> None:
    async with made() as buffer, Crew() as crew:
        await buffer.extend(rows(5))
        await within(buffer.sample())
        reader = crew.start(buffer.sample())
        await turns()
        assert not reader.done()
        assert "1 items were not drawn" in buffer.why_blocked()
        await buffer.extend(rows(3, 5))
        await within(reader)


async def test_a_write_that_can_never_be_admitted_is_refused_at_once() -> None:
    async with made() as buffer, Crew() as crew:
        await buffer.extend(rows(8))
        waiting = crew.start(buffer.extend(rows(1, 8)))
        await turns()
        with pytest.raises(ValueError, match="expected at most 8 items in one write, found 9"):
            await within(buffer.extend(rows(9)))
        await within(buffer.sample())
        await within(waiting)


async def test_a_limiter_that_fails_tells_the_writer_whose_turn_it_is() -> None:
    class Moody(AtMostUnread):
        fails = False

        def may_write(self, counters: Counters, items: int) -> Answer:
            if self.fails and items == 1:
                raise LookupError("moody")
            return super().may_write(counters, items)

    limiter = Moody(8)
    async with ReplayBuffer(TensorStorage(100), batch_size=4, limiter=limiter) as buffer, Crew() as crew:
        await buffer.extend(rows(8))
        first, second = crew.start(buffer.extend(rows(1, 8))), crew.start(buffer.extend(rows(2, 9)))
        await turns()
        limiter.fails = True
        await within(buffer.sample())
        with pytest.raises(LookupError, match="moody"):
            await within(first)
        await within(second)
        assert buffer.write_count == 10


async def test_items_that_fail_to_be_written_are_given_back() -> None:
    class Full(TensorStorage):
        fails = False

        def write(self, *args: Any) -> None:
            if self.fails:
                raise MemoryError("no room")
            super().write(*args)

    storage = Full(100)
    async with made(storage=storage) as buffer:
        storage.fails = True
        for _ in range(3):
            with pytest.raises(MemoryError):
                await buffer.extend(rows(8))
        storage.fails = False
        await within(buffer.extend(rows(8)))


async def test_a_writer_holds_up_no_snapshot_and_is_not_in_it() -> None:
    async with made() as buffer, Crew() as crew:
        await buffer.extend(rows(8))
        writer = crew.start(buffer.extend(rows(4, 8)))
        await turns()
        snapshot = await within(buffer.snapshot())
        await within(buffer.update_priority([0], 1.0))
        other = made()
        await other.restore(snapshot)
        assert other.write_count == 8
        assert not writer.done()
        async with other:
            late = crew.start(other.extend(rows(1, 8)))
            await turns()
            assert not late.done()
            await within(other.sample())
            await within(late)


@pytest.mark.parametrize("change", ["empty", "restore", "remove"])
async def test_a_writer_is_asked_for_again_after_every_change(change: str) -> None:
    class AtMostStored(Limiter):
        def may_write(self, counters: Counters, items: int) -> Answer:
            return True if counters.size + counters.admitted + items <= 8 else NotYet("full")

    async with ReplayBuffer(TensorStorage(100), limiter=AtMostStored()) as buffer, Crew() as crew:
        early = await buffer.snapshot()
        await buffer.extend(rows(8))
        writer = crew.start(buffer.extend(rows(2, 8)))
        await turns()
        assert not writer.done()
        changes: dict[str, Callable[[], Any]] = {
            "empty": buffer.empty,
            "restore": lambda: buffer.restore(early),
            "remove": lambda: buffer.remove([0, 5]),
        }
        await within(changes[change]())
        await within(writer)


async def test_writers_are_told_when_the_buffer_is_closed() -> None:
    buffer = await made().open()
    async with Crew() as crew:
        await buffer.extend(rows(8))
        writers = [crew.start(buffer.extend(rows(1, 8))) for _ in range(3)]
        await turns()
        await within(buffer.aclose())
        assert [type(error) for error in await outcomes(*writers)] == [BufferClosedError] * 3
        async with buffer:  # nothing of them is left
            late = crew.start(buffer.extend(rows(4, 8)))
            await turns()
            await within(buffer.sample())
            await within(late)


async def test_writers_are_told_when_finish_is_called() -> None:
    async with made() as buffer, Crew() as crew:
        await buffer.extend(rows(8))
        writer = crew.start(buffer.extend(rows(1, 8)))
        await turns()
        await within(buffer.finish())
        (error,) = await outcomes(writer)
        assert isinstance(error, BufferClosedError)
        assert "finish() was called" in str(error)


async def test_writers_are_told_when_the_background_work_fails() -> None:
    async with made() as buffer, Crew() as crew:
        await buffer.extend(rows(8))
        writer = crew.start(buffer.extend(rows(1, 8)))
        await turns()
        worker_tasks()[0].cancel()
        (error,) = await outcomes(writer)
        assert isinstance(error, BufferFailedError)


async def test_a_buffer_that_is_not_open_holds_writers_back_as_well() -> None:
    buffer = made()
    async with Crew() as crew:
        await buffer.extend(rows(8))
        writer = crew.start(buffer.extend(rows(4, 8)))
        await turns()
        assert not writer.done()
        async with buffer:
            await within(buffer.sample())
            await within(writer)


def test_writers_of_a_loop_that_is_gone_are_forgotten() -> None:
    buffer = made()

    async def leave() -> None:
        await buffer.open()
        await buffer.extend(rows(8))
        waiting.append(asyncio.ensure_future(buffer.extend(rows(4, 8))))
        await turns()

    waiting: list[asyncio.Future[Any]] = []
    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()
    for task in waiting:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    waiting.clear()

    async def go_on() -> None:
        async with buffer:
            gc.collect()
            await within(buffer.sample())
            await within(buffer.extend(rows(4, 8)))
            assert buffer.write_count == 12

    asyncio.run(go_on())


@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
@pytest.mark.parametrize("delay", range(8))
async def test_a_writer_cancelled_at_any_moment(threads: bool, delay: int) -> None:
    storage = ThreadedStorage(100) if threads else TensorStorage(100)
    async with made(storage=storage) as buffer, Crew() as crew:
        await buffer.extend(rows(8))
        first, second = crew.start(buffer.extend(rows(4, 8))), crew.start(buffer.extend(rows(4, 8)))
        await turns()
        await within(buffer.sample())
        await turns(delay)
        first.cancel()
        (outcome,) = await outcomes(first)
        if isinstance(outcome, asyncio.CancelledError) and buffer.write_count == 8 and not threads:
            await within(second)  # what was given back goes to the next one
        before = buffer.write_count
        assert before in (8, 12)
        while buffer.write_count < before + 4 and not second.done():
            await within(buffer.sample())
        await within(second)
        assert unread(buffer) <= 8


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
async def test_never_more_than_the_limit(seed: int, threads: bool) -> None:
    """Writers and readers that are cancelled at random: the limit holds at any moment, and nobody waits for ever."""
    choose = random.Random(seed)
    most = [0]

    storage = ThreadedStorage(200) if threads else TensorStorage(200)
    buffer = ReplayBuffer(storage, batch_size=1, limiter=AtMostUnread(8), prefetch=choose.choice((0, 2)))
    written: list[int] = []

    async def produce() -> None:
        for _ in range(30):
            count = choose.randint(1, 8)
            with_cancel = choose.random() < 0.3
            task = crew.start(buffer.extend(rows(count)))
            await turns(choose.randint(0, 3))
            if with_cancel:
                task.cancel()
            (outcome,) = await outcomes(task)
            if not isinstance(outcome, BaseException):
                written.append(count)

    async def consume() -> None:
        while True:
            await buffer.sample()
            stats = buffer.stats()
            most[0] = max(most[0], stats.write_count - stats.drawn)
            await turns(choose.randint(0, 2))

    async with buffer, Crew() as crew:
        readers = [crew.start(consume()) for _ in range(2)]
        producers = [crew.start(produce()) for _ in range(3)]
        await outcomes(*producers)
        assert most[0] <= 8
        assert buffer.write_count >= sum(written)
        assert buffer.stats().waiting_writers == 0
        for reader in readers:
            reader.cancel()


async def test_many_writers_give_up_in_time() -> None:
    limiter = AtMostUnread(8)
    async with ReplayBuffer(TensorStorage(100), batch_size=4, limiter=limiter) as buffer, Crew() as crew:
        await buffer.extend(rows(8))
        waiting = [crew.start(buffer.extend(rows(1))) for _ in range(2000)]
        await turns()
        assert buffer.stats().waiting_writers == 2000
        limiter.asked = 0
        for task in reversed(waiting):
            task.cancel()
        await outcomes(*waiting)
        assert buffer.stats().waiting_writers == 0
        assert limiter.asked <= 2000  # the first is asked for again each time, and nobody else


async def test_a_write_in_a_thread_counts_until_it_is_done() -> None:
    stop = Stop()
    storage = ThreadedStorage(100)
    async with made(storage=storage) as buffer, Crew() as crew:
        await buffer.extend(rows(4))
        storage.on_write = stop
        first = crew.start(buffer.extend(rows(4, 4)))
        await stop.come.reached()
        second = crew.start(buffer.extend(rows(1, 8)))
        await turns()
        assert buffer.stats().waiting_writers == 1
        stop.go.set()
        await within(first)
        storage.on_write = lambda: None
        assert not second.done()
        await within(buffer.sample())
        await within(second)


# -- its state --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["snapshot", "pickle"])
async def test_counters_and_state_of_the_limiter_are_saved(way: str) -> None:
    buffer = ReplayBuffer(TensorStorage(100), batch_size=4, limiter=Counting(8), generator=seeded())
    async with buffer:
        await buffer.extend(rows(8))
        await buffer.sample()
        snapshot = await buffer.snapshot()
        async with buffer.frozen():
            pickled = pickle.dumps(buffer)
    limiter = Counting(8)
    other = ReplayBuffer(TensorStorage(100), batch_size=4, limiter=limiter, generator=seeded())
    if way == "pickle":
        other = pickle.loads(pickled)
    else:
        await other.restore(snapshot)
        assert limiter.let > 0
    async with other, Crew() as crew:
        writer = crew.start(other.extend(rows(5, 8)))
        await turns()
        assert not writer.done()  # four items are unread: it knows of the batch that was drawn before
        await within(other.sample())
        await within(writer)


async def test_a_limiter_of_another_kind_does_not_take_the_state() -> None:
    snapshot = await ReplayBuffer(TensorStorage(100), limiter=Counting(8)).snapshot()
    with pytest.raises(CheckpointMismatchError, match=r"limiter: expected 'MinSize'.*the checkpoint has 'Counting'"):
        await ReplayBuffer(TensorStorage(100)).restore(snapshot)


async def test_limiters_without_a_state_may_be_exchanged() -> None:
    snapshot = await ReplayBuffer(TensorStorage(100), batch_size=4, min_size=5).snapshot()
    await made().restore(snapshot)


# -- MinSize ----------------------------------------------------------------------------------------------------------


async def test_min_size_is_a_limiter() -> None:
    async with ReplayBuffer(TensorStorage(100), batch_size=2, limiter=MinSize(5)) as buffer, Crew() as crew:
        await buffer.extend(rows(4))
        reader = crew.start(buffer.sample())
        await turns()
        assert "4 of at least 5 items are stored" in buffer.why_blocked()
        await buffer.extend(rows(1, 4))
        assert max(numbers(await within(reader))) <= 4


def test_both_a_limiter_and_a_min_size() -> None:
    with pytest.raises(ValueError, match=r"limiter: expected either a limiter or min_size.*MinSize\(5\).*found both"):
        ReplayBuffer(TensorStorage(100), min_size=5, limiter=MinSize(5))


def test_what_a_limiter_answers_is_noted_when_its_class_is_made() -> None:
    class Lazy(MinSize):
        def may_write(self, counters: Counters, items: int) -> Answer:
            return NotYet("lazy")

    assert (MinSize.holds_writers, MinSize.counts_draws) == (False, False)
    assert (Lazy.holds_writers, Lazy.counts_draws) == (True, False)
    assert (AtMostUnread.holds_writers, AtMostUnread.counts_draws) == (True, True)
    assert (Limiter.holds_writers, Limiter.counts_draws) == (False, False)


async def test_a_limiter_without_answers_lets_everybody_through() -> None:
    class Nothing(Limiter):
        pass

    async with ReplayBuffer(TensorStorage(100), batch_size=2, limiter=Nothing()) as buffer, Crew() as crew:
        reader = crew.start(buffer.sample())
        await turns()
        assert "no item is stored" in buffer.why_blocked()
        await buffer.extend(rows(1))
        await within(reader)
        await until(lambda: buffer.stats().waiting_consumers == 0)
