"""Opening, closing and event loops."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import AsyncBufError, BufferClosedError, ReplayBuffer, SamplerWithoutReplacement, WrongLoopError
from tests.buffer.helpers import make
from tests.helpers import check_same, rows, seeded, take

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable


async def test_use_before_opening() -> None:
    buffer = make(sampler=SamplerWithoutReplacement(), prefetch=2)
    await buffer.extend(rows(10))
    calls: list[Callable[[], Awaitable[object]]] = [
        buffer.sample,
        lambda: buffer.sample(2),
        lambda: anext(buffer.__aiter__()),
        lambda: anext(buffer.epoch()),
    ]
    for call in calls:
        with pytest.raises(BufferClosedError, match="the buffer is not open: use `async with buffer:`"):
            await call()
    assert (await buffer.skip(), await buffer.flush()) == (None, 0)
    await buffer.update_priority([0], 1.0)
    await buffer.aclose()
    assert buffer.stats().drawn == 0
    async with buffer:
        assert (await buffer.sample()).number == 0


async def test_use_after_closing() -> None:
    buffer = make(prefetch=2)
    async with buffer:
        await buffer.extend(rows(10))
        await buffer.sample()
    calls: list[Callable[[], Awaitable[object]]] = [
        buffer.sample,
        lambda: buffer.sample(2),
        lambda: buffer.extend(rows(1)),
        lambda: buffer.add(rows(1)),
    ]
    for call in calls:
        with pytest.raises(BufferClosedError, match="closed"):
            await call()
    assert len(buffer) == 10
    assert "closed" in repr(buffer)
    assert [batch async for batch in buffer] == []


async def test_opened_twice() -> None:
    buffer = make()
    async with buffer:
        with pytest.raises(AsyncBufError, match="open: expected a buffer that is not open, found one that is open"):
            await buffer.open()
        await buffer.extend(rows(10))
        assert (await buffer.sample()).number == 0


async def test_open_returns_the_buffer() -> None:
    buffer = make()
    assert await buffer.open() is buffer
    await buffer.aclose()
    async with buffer as same:
        assert same is buffer


async def test_an_error_in_the_body_passes_through() -> None:
    buffer = make()
    with pytest.raises(LookupError, match="mine"):
        await _fail_within(buffer)
    assert "closed" in repr(buffer)


async def _fail_within(buffer: ReplayBuffer) -> None:
    async with buffer:
        raise LookupError("mine")


async def test_use_from_another_event_loop() -> None:
    buffer = make(sampler=SamplerWithoutReplacement(), prefetch=2)

    def calls() -> list[Callable[[], Any]]:
        return [
            buffer.sample,
            lambda: buffer.extend(rows(1)),
            lambda: buffer.add(rows(1)),
            lambda: buffer.update_priority([0], 1.0),
            buffer.skip,
            buffer.flush,
            buffer.empty,
            buffer.finish,
            buffer.aclose,
            lambda: anext(buffer.epoch()),
        ]

    def elsewhere() -> list[BaseException | None]:
        found: list[BaseException | None] = []
        for call in calls():

            async def main(call: Callable[[], Any] = call) -> None:
                await call()

            try:
                asyncio.run(main())
            except BaseException as error:
                found.append(error)
            else:
                found.append(None)
        return found

    async with buffer:
        await buffer.extend(rows(10))
        await buffer.sample()
        before, loop = buffer.stats(), asyncio.get_running_loop()
        for error in await asyncio.to_thread(elsewhere):
            assert isinstance(error, WrongLoopError)
            assert "expected the event loop that opened the buffer" in str(error)
            assert "found another one" in str(error) or "found no running event loop" in str(error)
            assert str(error).count(f"{id(loop):#x} (running)") == 1
        assert buffer.stats() == before
        assert (await buffer.sample()).number == 1


async def test_use_without_any_event_loop() -> None:
    buffer = make()
    errors: list[BaseException] = []

    def elsewhere() -> None:
        coroutine = buffer.sample()
        try:
            coroutine.send(None)
        except BaseException as error:
            errors.append(error)
        finally:
            coroutine.close()

    async with buffer:
        await buffer.extend(rows(10))
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert isinstance(errors[0], WrongLoopError)
        assert "no running event loop" in str(errors[0])


def test_a_closed_buffer_may_change_its_event_loop() -> None:
    buffer = make(prefetch=2, generator=seeded(0), transform=lambda data: data)

    async def main(count: int) -> list[Hashable]:
        async with buffer:
            return await take(buffer, count)

    asyncio.run(_fill(buffer))
    found = [key for _ in range(4) for key in asyncio.run(main(5))]
    reference = make(generator=seeded(0))
    asyncio.run(_fill(reference))

    async def expected() -> list[Hashable]:
        async with reference:
            return await take(reference, 20)

    check_same(found, asyncio.run(expected()))


async def _fill(buffer: ReplayBuffer) -> None:
    await buffer.extend(rows(50))
