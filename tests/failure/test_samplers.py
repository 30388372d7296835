"""Samplers that fail or return something else: told to the consumer, and nothing is lost."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import (
    Batch,
    BufferFailedError,
    Draw,
    PrefetchError,
    RandomSampler,
    ReplayBuffer,
    Rows,
    SamplerWithoutReplacement,
    TensorStorage,
    WriteEvent,
)
from tests.failure.helpers import AT_ONCE, Interrupt, in_order
from tests.helpers import (
    Crew,
    ThreadedStorage,
    WeightedSampler,
    check_same,
    fingerprint,
    numbers,
    outcomes,
    rows,
    seeded,
    take,
    turns,
    within,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable


class Moody(WeightedSampler):
    """Fails at some of its draws."""

    def __init__(self, bad: dict[int, Callable[[], Any]]) -> None:
        self._bad = bad
        self.draws = 0

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        self.draws += 1
        if self.draws - 1 in self._bad:
            result: Draw = self._bad[self.draws - 1]()
            return result
        return super().draw(rows, batch_size, generator)


def _raise(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize("depth", [0, 2])
async def test_a_sampler_that_raises(depth: int) -> None:
    async def main(bad: dict[int, Callable[[], Any]]) -> list[Hashable]:
        buffer = ReplayBuffer(TensorStorage(80), sampler=Moody(bad), batch_size=4, prefetch=depth, generator=seeded(0))
        await buffer.extend(rows(80))
        stream: list[Hashable] = []
        async with buffer:
            while len(stream) < 10:
                try:
                    stream.append(fingerprint(await within(buffer.sample())))
                except LookupError as error:
                    assert "moody" in str(error)  # noqa: PT017
            return stream

    bad: dict[int, Callable[[], Any]] = {i: lambda: _raise(LookupError("moody")) for i in (0, 1, 4, 5, 6)}
    check_same(await main(bad), await main({}))


async def test_a_sampler_that_raises_reaches_every_consumer_in_turn() -> None:
    bad: dict[int, Callable[[], Any]] = {i: lambda: _raise(LookupError("moody")) for i in range(3)}
    buffer = ReplayBuffer(TensorStorage(80), sampler=Moody(bad), batch_size=4)
    await buffer.extend(rows(80))
    async with buffer, Crew() as crew:
        ends = await outcomes(*(crew.start(buffer.sample()) for _ in range(5)))
        # A call that comes tries again, so that fewer consumers than draws see an error.
        assert {type(end) for end in ends} == {LookupError, Batch}
        assert [end.number for end in ends if isinstance(end, Batch)] == list(
            range(sum(isinstance(end, Batch) for end in ends))
        )


@pytest.mark.parametrize(
    ("draw", "kind"),
    [
        (lambda: None, TypeError),
        (lambda: [1, 2], TypeError),
        (lambda: Draw([1, 2]), TypeError),  # type: ignore[arg-type]
        (lambda: Draw(torch.tensor([0.0])), TypeError),
        (lambda: Draw(torch.tensor([0], dtype=torch.int32)), TypeError),
        (lambda: Draw(torch.tensor([[0]])), TypeError),
        (lambda: Draw(torch.tensor(0)), TypeError),
        (lambda: Draw(torch.tensor([], dtype=torch.int64)), IndexError),
        (lambda: Draw(torch.tensor([0, 10])), IndexError),
        (lambda: Draw(torch.tensor([-1, 0])), IndexError),
    ],
    ids=["None", "list", "list-draw", "float", "int32", "2d", "0d", "empty", "too-large", "negative"],
)
async def test_a_sampler_that_returns_something_else(draw: Callable[[], Any], kind: type[Exception]) -> None:
    buffer = ReplayBuffer(TensorStorage(80), sampler=Moody({0: draw}), batch_size=4)
    await buffer.extend(rows(10))
    async with buffer:
        with pytest.raises(kind, match=r"Moody.*expected.*found"):
            await within(buffer.sample())
        assert (await within(buffer.sample())).number == 0


async def test_a_sampler_that_refuses_a_write() -> None:
    class Deaf(RandomSampler):
        fails = False

        def check_write(self, event: WriteEvent) -> None:
            if self.fails:
                raise LookupError("deaf")

    sampler = Deaf()
    buffer = ReplayBuffer(TensorStorage(80), sampler=sampler, batch_size=4)
    async with buffer, Crew() as crew:
        waiting = crew.start(buffer.sample())
        await turns()
        sampler.fails = True
        with pytest.raises(LookupError, match="deaf"):
            await buffer.extend(rows(10))
        sampler.fails = False
        # With an error none of the items is written, as extend() promises.
        assert (len(buffer), buffer.write_count) == (0, 0)
        await buffer.extend(rows(10))
        assert len(await within(waiting)) == 4


async def test_a_refused_write_leaves_the_rows_of_a_full_ring() -> None:
    class Deaf(SamplerWithoutReplacement):
        fails = False

        def check_write(self, event: WriteEvent) -> None:
            if self.fails:
                raise LookupError("deaf")

    sampler = Deaf(shuffle=False)
    buffer = ReplayBuffer(TensorStorage(10), sampler=sampler, batch_size=10)
    async with buffer:
        await buffer.extend(rows(10))
        sampler.fails = True
        with pytest.raises(LookupError, match="deaf"):
            await buffer.extend(rows(3, 100))
        assert numbers(await buffer.sample()) == list(range(10))


async def test_an_interrupt_within_a_draw_leaves_nobody_in_the_line() -> None:
    buffer = ReplayBuffer(TensorStorage(80), sampler=Moody({0: lambda: _raise(Interrupt())}), batch_size=4)
    await buffer.extend(rows(80))
    async with buffer:
        with pytest.raises(Interrupt):
            await buffer.sample()
        assert buffer.stats().waiting_consumers == 0
        assert (await within(buffer.sample(), AT_ONCE)).number == 0


@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
async def test_an_interrupt_within_a_gather_leaves_nobody_waiting_for_ever(threads: bool) -> None:
    class Interrupted(ThreadedStorage):
        interrupts = 1

        def gather_nbytes(self, count: int) -> int:
            return 1 << 30 if threads else 0

        def gather(self, indices: torch.Tensor) -> Any:
            if self.interrupts:
                self.interrupts -= 1
                raise Interrupt
            return super().gather(indices)

    buffer = ReplayBuffer(Interrupted(80), batch_size=4)
    await buffer.extend(rows(80))
    await check_told_of_the_interrupt(buffer)


async def test_an_interrupt_within_a_quick_transform_leaves_nobody_waiting_for_ever() -> None:
    calls = 0

    def transform(data: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise Interrupt
        return data

    buffer = in_order(transform)
    await buffer.extend(rows(80))
    await check_told_of_the_interrupt(buffer, before=8)


async def check_told_of_the_interrupt(buffer: ReplayBuffer, before: int = 0) -> None:
    """In one way or another: by the interrupt itself, as a failed batch, or because the buffer has failed."""
    async with buffer:
        await take(buffer, before)
        with pytest.raises((Interrupt, PrefetchError, BufferFailedError)):
            await within(buffer.sample(), AT_ONCE)
        # And then a batch, or the reason why there is none; but not silence.
        with contextlib.suppress(Interrupt, PrefetchError, BufferFailedError):
            assert (await within(buffer.sample(), AT_ONCE)).number == before
