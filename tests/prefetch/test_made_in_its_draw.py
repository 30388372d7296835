"""Batches that are gathered and transformed in the step of their draw: transforms get the rows themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import PrefetchError, ReplayBuffer, TensorStorage
from asyncbuf._prefetch.pace import Pace
from tests.helpers import numbers, rows, seeded, within

if TYPE_CHECKING:
    from collections.abc import Awaitable

    import torch

SIZE = 4


@pytest.fixture(autouse=True)
def quick_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "is_quick", True)


class Counting(TensorStorage):
    """Counts how often rows are gathered; may fail at a given time."""

    gathers = 0
    fails_at = -1

    def gather(self, indices: torch.Tensor) -> Any:
        self.gathers += 1
        if self.gathers == self.fails_at:
            raise OSError("no rows this time")
        return super().gather(indices)


class Faulty:
    """Changes its input in place, then raises in the calls that are named."""

    def __init__(self, *fails: int) -> None:
        self.fails = fails
        self.calls = 0

    def __call__(self, data: Any) -> Any:
        self.calls += 1
        for leaf in data.values():
            leaf.add_(1000)
        if self.calls in self.fails:
            raise LookupError(f"call {self.calls}")
        return data


def made(transform: Any, prefetch: int) -> tuple[Counting, ReplayBuffer]:
    storage = Counting(64)
    buffer = ReplayBuffer(
        storage, batch_size=SIZE, prefetch=prefetch, transform=transform, generator=seeded(), workers=1
    )
    return storage, buffer


async def stream(prefetch: int, count: int) -> list[list[int]]:
    _, buffer = made(None, prefetch)
    await buffer.extend(rows(64, 0))
    async with buffer:
        return [numbers(await within(buffer.sample())) for _ in range(count)]


@pytest.mark.parametrize("prefetch", [0, 3])
async def test_rows_are_gathered_once_and_not_copied(prefetch: int) -> None:
    storage, buffer = made(Faulty(), prefetch)
    await buffer.extend(rows(64, 0))
    async with buffer:
        found = [[number - 1000 for number in numbers(await within(buffer.sample()))] for _ in range(6)]
    assert found == await stream(prefetch, 6)
    assert storage.gathers == 6 + prefetch


@pytest.mark.parametrize("prefetch", [0, 3])
async def test_a_second_try_gets_the_rows_of_the_draw(prefetch: int) -> None:
    _, buffer = made(Faulty(3), prefetch)
    await buffer.extend(rows(64, 0))
    found: list[list[int]] = []
    failures = 0
    async with buffer:
        while len(found) < 6:
            try:
                batch = await within(buffer.sample())
            except PrefetchError:
                failures += 1
                await buffer.extend(rows(64, 0))  # the same items: later draws do not notice
                continue
            found.append([number - 1000 for number in numbers(batch)])
    assert failures == 1
    assert found == await stream(prefetch, 6)


async def test_rows_replaced_since_the_draw_are_not_seen() -> None:
    _, buffer = made(Faulty(1), 0)
    await buffer.extend(rows(64, 0))
    async with buffer:
        with pytest.raises(PrefetchError):
            await within(buffer.sample())
        await buffer.extend(rows(64, 500))
        found = [number - 1000 for number in numbers(await within(buffer.sample()))]
    assert [found] == await stream(0, 1)


async def test_rows_that_cannot_be_gathered_again_are_gathered_in_the_next_try() -> None:
    storage, buffer = made(Faulty(1), 0)
    storage.fails_at = 2  # for the second try
    await buffer.extend(rows(64, 0))
    async with buffer:
        with pytest.raises(PrefetchError, match="call 1"):
            await within(buffer.sample())
        found = [number - 1000 for number in numbers(await within(buffer.sample()))]
    assert [found] == await stream(0, 1)
    assert storage.gathers == 3


async def test_an_awaitable_keeps_the_rows_as_gathered() -> None:
    async def later(data: Any) -> Any:
        raise LookupError("later")

    calls = 0

    def seldom(data: Any) -> Any | Awaitable[Any]:
        nonlocal calls
        calls += 1
        for leaf in data.values():
            leaf.add_(1000)
        return later(data) if calls == 1 else data

    _, buffer = made(seldom, 0)
    await buffer.extend(rows(64, 0))
    async with buffer:
        with pytest.raises(PrefetchError, match="later"):
            await within(buffer.sample())
        found = [number - 1000 for number in numbers(await within(buffer.sample()))]
    assert [found] == await stream(0, 1)
