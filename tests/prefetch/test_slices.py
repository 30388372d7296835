"""Many draws at once: in several steps of the event loop, all of them in one turn of the history."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import BufferClosedError, RandomSampler, ReplayBuffer, SamplerWithoutReplacement, TensorStorage
from asyncbuf._prefetch import drawer
from asyncbuf.testing import difference
from tests.helpers import Crew, check_same, dismiss, numbers, outcomes, rows, seeded, take, turns, within

if TYPE_CHECKING:
    from collections.abc import Callable

ITEMS = 60
DEPTH = 200


class Clock:
    """A millisecond for each look: a slice has the burst and three draws more."""

    def __init__(self, step: float) -> None:
        self.now = 0.0
        self.step = step

    def perf_counter(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Whether draws are slow, so that they are cut into slices."""

    def be(is_slow: bool) -> None:
        monkeypatch.setattr(drawer, "time", Clock(0.001 if is_slow else 0.0))

    be(True)
    return be


def made(depth: int = DEPTH, **options: Any) -> ReplayBuffer:
    options.setdefault("batch_size", 3)
    return ReplayBuffer(TensorStorage(ITEMS), prefetch=depth, generator=seeded(), **options)


async def filled(depth: int = DEPTH, **options: Any) -> ReplayBuffer:
    buffer = made(depth, **options)
    await buffer.extend(rows(ITEMS))
    return buffer


async def test_no_step_draws_more_than_a_slice(slow: Any) -> None:
    async with await filled() as buffer:
        sampling = asyncio.create_task(buffer.sample())
        counts = [0]
        while counts[-1] < DEPTH + 1:
            await asyncio.sleep(0)
            counts.append(buffer.stats().drawn)
        steps = [after - before for before, after in itertools.pairwise(counts)]
        assert max(steps) <= drawer._BURST + 5
        assert (await within(sampling)).number == 0
        # And again after a flush.
        assert await within(buffer.flush()) == DEPTH
        sampling = asyncio.create_task(buffer.sample())
        counts = [buffer.stats().drawn]
        while counts[-1] < 2 * DEPTH + 2:
            await asyncio.sleep(0)
            counts.append(buffer.stats().drawn)
        assert max(after - before for before, after in itertools.pairwise(counts)) <= drawer._BURST + 5
        assert (await within(sampling)).number == DEPTH + 1


async def stream(buffer: ReplayBuffer) -> list[Any]:
    """A history in which much is asked for while draws are being cut."""
    found: list[Any] = []
    async with buffer, Crew() as crew:
        await buffer.extend(rows(ITEMS // 2))
        for step in range(4):
            calls: list[Any] = [
                buffer.sample(),
                buffer.extend(rows(5, 1000 * step)),
                buffer.sample(),
                buffer.sample(2),
                buffer.remove([step, 7]),
                buffer.sample(),
                buffer.update_priority([1], 1.0),
                buffer.extend(rows(3, 2000 * step)),
                buffer.sample(),
            ]
            ends = await outcomes(*[crew.start(call) for call in calls])
            # Not beside them: which batches a call takes that waits beside it depends on how far those are.
            ends += await outcomes(crew.start(buffer.flush()))
            for end in ends:
                assert not isinstance(end, BaseException), end
                found.append(
                    (end.number, end.indices.tolist(), numbers(end), end.write_count)
                    if hasattr(end, "write_count")
                    else torch.as_tensor(-1 if end is None else end).tolist()
                )
        found.append(await buffer.state_dict())
    return found


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
@pytest.mark.parametrize("depth", [1, 20, DEPTH])
async def test_the_stream_is_that_of_one_step(slow: Any, depth: int, sampler: Any) -> None:
    cut = await stream(made(depth, sampler=sampler(), workers=2))
    slow(False)
    whole = await stream(made(depth, sampler=sampler(), workers=2))
    check_same(cut[:-1], whole[:-1])
    assert difference(cut[-1], whole[-1]) is None


async def test_a_write_waits_for_all_of_them(slow: Any) -> None:
    async with await filled() as buffer:
        sampling = asyncio.create_task(buffer.sample())
        await turns(2)
        assert buffer.stats().drawn < DEPTH
        await within(buffer.extend(rows(10, 500)))
        assert buffer.stats().drawn == DEPTH + 1
        state = await buffer.state_dict()
        assert {ticket["write_count"] for ticket in state["prefetch"]["queue"]} == {ITEMS}
        await within(sampling)


@pytest.mark.parametrize("call", ["snapshot", "flush", "empty", "skip"])
async def test_what_comes_meanwhile_finds_all_of_them(slow: Any, call: str) -> None:
    async with await filled() as buffer:
        sampling = asyncio.create_task(buffer.sample())
        await turns(2)
        assert buffer.stats().drawn < DEPTH
        made = await within(getattr(buffer, call)())
        assert buffer.stats().drawn == DEPTH + 1
        if call == "snapshot":
            queue = made.state_dict()["prefetch"]["queue"]
            assert len(queue) in (DEPTH, DEPTH + 1)
        elif call == "flush":
            assert made == DEPTH
        await within(sampling)


async def test_closing_ends_the_turn(slow: Any) -> None:
    buffer = await (await filled()).open()
    sampling = asyncio.create_task(buffer.sample())
    await turns(2)
    assert buffer.stats().drawn < DEPTH
    writing = asyncio.create_task(buffer.extend(rows(3)))
    await turns(1)
    await within(buffer.aclose())
    assert buffer.stats().drawn == DEPTH + 1
    ends = await outcomes(sampling, writing)
    assert isinstance(ends[1], BufferClosedError)
    async with buffer:
        first = await within(buffer.sample())
        assert first.number == (1 if not isinstance(ends[0], BaseException) else 0)
        await within(buffer.extend(rows(3)))


async def test_cancelled_meanwhile(slow: Any) -> None:
    async with await filled() as buffer:
        tasks = [asyncio.create_task(buffer.sample()) for _ in range(50)]
        await turns(3)
        await dismiss(tasks)
        await within(buffer.extend(rows(3)))
        found = await take(buffer, 3)
        assert len(found) == 3


async def test_a_restore_at_another_depth_and_a_failing_sampler(slow: Any) -> None:
    class Fails(RandomSampler):
        left = 30

        def draw(self, *args: Any) -> Any:
            self.left -= 1
            if not self.left:
                raise ValueError("once")
            return super().draw(*args)

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    async with await filled(sampler=Fails()) as buffer:
        await within(buffer.sample())
        await within(buffer.extend(rows(3)))  # waits until the error has ended the turn
        assert buffer.stats().drawn == 29
        await within(buffer.sample())
        await within(buffer.extend(rows(3)))
        assert buffer.stats().queued == DEPTH
        snapshot = await buffer.snapshot()
    async with await filled(2 * DEPTH, sampler=Fails()) as other:
        await other.restore(snapshot, elastic=True)
        await within(other.sample())
        await within(other.extend(rows(3)))


def test_a_loop_that_ends_meanwhile(slow: Any) -> None:
    made_here: list[ReplayBuffer] = []

    async def begin() -> None:
        buffer = await (await filled()).open()
        made_here.append(buffer)
        sampling = asyncio.ensure_future(buffer.sample())
        await turns(2)
        assert buffer.stats().drawn < DEPTH
        await dismiss([sampling])

    async def go_on() -> None:
        async with made_here[0] as buffer:
            await within(buffer.sample())
            await within(buffer.extend(rows(3)))
            assert buffer.stats().queued == DEPTH

    asyncio.run(begin())
    asyncio.run(go_on())


async def test_the_loop_goes_round_while_thousands_are_drawn() -> None:
    """By the real clock: the slower the machine is, the more steps there are."""
    async with await filled(5000, batch_size=32) as buffer:
        sampling = asyncio.create_task(buffer.sample())
        counts = {0}
        while not sampling.done() or buffer.stats().drawn < 5001:
            await asyncio.sleep(0)
            counts.add(buffer.stats().drawn)
        assert len(counts) > 10
