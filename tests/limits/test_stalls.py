"""What others report of limits that hang, on a clock that jumps: it ends in time, and says why."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import (
    BufferFailedError,
    ConsumingSampler,
    Counters,
    GroupSampler,
    Limiter,
    MaxAhead,
    MinSize,
    NotYet,
    Queue,
    ReplayBuffer,
    SampleToInsertRatio,
    TensorStorage,
)
from tests.helpers import rows, seeded
from tests.virtual_clock import pass_by, run_virtually

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


def made(**options: Any) -> ReplayBuffer:
    settings: dict[str, Any] = {"batch_size": 4, "generator": seeded(), **options}
    return ReplayBuffer(TensorStorage(40), **settings)


def now() -> float:
    return asyncio.get_running_loop().time()


async def ends(*calls: Coroutine[Any, Any, Any]) -> tuple[list[Any], float]:
    """How they end, and after how long."""
    start = now()
    return await asyncio.gather(*calls, return_exceptions=True), now() - start


# Each with how many items are there, how many are written then, and words of what is said.
STANDSTILLS: dict[str, tuple[Callable[[], ReplayBuffer], int, int, str]] = {
    "a write and a batch do not fit": (
        lambda: made(sampler=ConsumingSampler(), limiter=Queue(8)),
        3,
        6,
        "of at most 8",
    ),
    "never enough to begin": (lambda: made(limiter=MinSize(30) & MaxAhead(2)), 8, 1, "8 of at least 30 items"),
    "127 of 128": (
        lambda: made(sampler=ConsumingSampler(), limiter=Queue(32), batch_size=32),
        31,
        2,
        "31 of 32 items wait to be drawn",
    ),
    "groups of which one member is missing": (
        lambda: made(sampler=GroupSampler("number", 2), overwrite="wait"),
        40,
        1,
        "0 of 2 groups of 2 are complete; of 40 others members are missing",
    ),
}


@pytest.mark.parametrize("name", STANDSTILLS)
def test_writers_and_consumers_that_wait_for_each_other_are_told(name: str) -> None:
    make, there, more, words = STANDSTILLS[name]

    async def program() -> None:
        async with make() as buffer:
            await buffer.extend(rows(there))
            found, seconds = await ends(buffer.extend(rows(more, there)), buffer.sample())
            assert seconds <= 2.0
            for error in found:
                assert isinstance(error, BufferFailedError)
                assert "wait for each other" in str(error)
                assert words in str(error)
            assert buffer.write_count == there

    run_virtually(program())


def test_a_timeout_of_the_program_comes_first() -> None:
    async def program() -> None:
        async with made(sampler=ConsumingSampler(), limiter=Queue(8)) as buffer:
            await buffer.extend(rows(3))
            reader = asyncio.create_task(buffer.sample())
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(buffer.extend(rows(6, 3)), 0.5)
            await pass_by(5)
            assert not reader.done()  # it waits, and somebody may write
            await buffer.extend(rows(1, 3))
            await reader

    run_virtually(program())


def test_another_size_may_go_on() -> None:
    async def program() -> None:
        async with made(sampler=ConsumingSampler(), limiter=Queue(8)) as buffer:
            await buffer.extend(rows(5))
            await buffer.sample(2)
            writer, reader = asyncio.create_task(buffer.extend(rows(6, 3))), asyncio.create_task(buffer.sample())
            await pass_by(5)
            assert not reader.done()
            await buffer.sample(2)
            await writer
            await reader

    run_virtually(program())


class OtherTimes(Limiter):
    """Goes by what it likes."""

    is_open = False

    def may_write(self, counters: Counters, items: int) -> Any:
        return True if self.is_open else NotYet("it is night")

    def may_draw(self, counters: Counters, items: int) -> Any:
        return NotYet("2 of 4 stars are seen")


def test_a_long_silence_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def program() -> None:
        async with made(limiter=OtherTimes()) as buffer:
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(15):
                        await asyncio.gather(buffer.sample(), buffer.extend(rows(1)))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(9):  # that is no silence
                    await buffer.extend(rows(5))
            assert buffer._parts.stalls._silence is None  # nothing is left on the event loop

    with caplog.at_level(logging.WARNING, "asyncbuf"):
        run_virtually(program())
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("a call has waited for 10 s or longer: 1 consumer(s) of batches of 4 wait")
    assert "it is night" in record.getMessage()


def test_a_busy_line_is_no_silence(caplog: pytest.LogCaptureFixture) -> None:
    async def program() -> None:
        async with made(sampler=ConsumingSampler()) as buffer:
            readers = [asyncio.create_task(buffer.sample()) for _ in range(5)]
            for start in range(0, 20, 4):
                await pass_by(6)
                await buffer.extend(rows(4, start))
            await asyncio.gather(*readers)

    with caplog.at_level(logging.WARNING, "asyncbuf"):
        run_virtually(program())
    assert len(caplog.records) <= 1  # the last one waited half a minute


def test_other_limits_after_a_restore_never_hang_silently() -> None:
    """The limits are those of the buffer that runs; the counts are those of the checkpoint."""

    async def program() -> None:
        async with made(limiter=SampleToInsertRatio(1.0, 4, 20.0)) as source:
            await source.extend(rows(20))
            for _ in range(3):
                await source.sample()
            state = await source.state_dict()
        target = made(limiter=SampleToInsertRatio(4.0, 4, 20.0))
        await target.load_state_dict(state)
        async with target:  # 4 * 20 - 12 = 68 is above 36
            writer = asyncio.create_task(target.extend(rows(1, 20)))
            await pass_by(5)
            assert not writer.done()
            assert "36 more rows must be drawn: 21 items and 12 drawn rows would make 4 * 21 - 12 = 72" in (
                target.why_blocked()
            )
            for _ in range(9):
                await target.sample()
            await writer
        full = made(sampler=ConsumingSampler(), limiter=Queue(30))
        await full.extend(rows(30))
        state = await full.state_dict()
        less = made(sampler=ConsumingSampler(), limiter=Queue(8) & MinSize(4))
        await less.load_state_dict(state)
        async with less:
            writer = asyncio.create_task(less.extend(rows(4, 30)))
            for _ in range(7):
                assert not writer.done()
                await less.sample()
            await writer

    run_virtually(program())


def test_a_collector_that_died_does_not_let_the_trainer_wait() -> None:
    """Elsewhere, a trainer waited on an empty buffer for 3.7 hours."""

    async def program() -> None:
        async with made(min_size=16) as buffer:

            async def collect() -> None:
                for start in range(3):
                    await pass_by(60)
                    await buffer.extend(rows(1, start))
                raise ConnectionError("the server has gone")

            buffer.watch(asyncio.create_task(collect()), "producer")
            (error,), seconds = await ends(buffer.sample())
            assert isinstance(error, BufferFailedError)
            assert isinstance(error.__cause__, ConnectionError)
            assert seconds == pytest.approx(180)

    run_virtually(program())


def test_a_full_queue_does_not_hold_up_a_save() -> None:
    """Consumers have stopped, the queue is full, producers wait: and then a checkpoint is wanted."""

    async def program() -> None:
        async with made(sampler=ConsumingSampler(), limiter=Queue(8), prefetch=1) as buffer:
            await buffer.extend(rows(8))
            writers = [asyncio.create_task(buffer.extend(rows(4, 8))) for _ in range(3)]
            await pass_by(1)
            state = await asyncio.wait_for(buffer.state_dict(), 2)
            assert state["writer"]["write_count"] == 8
            await buffer.sample()
            await pass_by(1)
            assert [writer.done() for writer in writers] == [True, False, False]
            for writer in writers:
                writer.cancel()
            await asyncio.gather(*writers, return_exceptions=True)

    run_virtually(program())


def test_dropped_items_do_not_keep_writers_waiting_for_ever() -> None:
    """Elsewhere, one dropped group pinned the low-water mark, and nobody was admitted any more."""

    async def program() -> None:
        for sampler in (None, ConsumingSampler()):
            async with made(sampler=sampler, limiter=MaxAhead(2)) as buffer:
                for start in range(0, 80, 8):
                    await asyncio.wait_for(buffer.extend(rows(8, start)), 2)
                    if start % 16:
                        await buffer.remove(list(range(40)))
                    else:
                        await buffer.sample()
                        await buffer.sample()

    run_virtually(program())
