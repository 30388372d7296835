"""One part in two buffers, and one buffer in two processes: refused, in words that say what to do."""

from __future__ import annotations

import asyncio
import copy
import gc
import multiprocessing
import os
import pickle
import sys
from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import (
    AsyncBufError,
    ListStorage,
    MinSize,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    TensorStorage,
)
from tests.helpers import rows, seeded, within

if TYPE_CHECKING:
    from collections.abc import Callable

PARTS: dict[str, Callable[[], Any]] = {
    "storage": lambda: TensorStorage(10),
    "sampler": SamplerWithoutReplacement,
    "writer": RoundRobinWriter,
    "limiter": lambda: MinSize(2),
}


def made(**parts: Any) -> ReplayBuffer:
    storage = parts.pop("storage", None) or TensorStorage(10)
    return ReplayBuffer(storage, batch_size=2, **parts)


@pytest.mark.parametrize("name", PARTS)
async def test_a_part_of_another_buffer_is_refused(name: str) -> None:
    part = PARTS[name]()
    first = made(**{name: part})
    kind = type(part).__name__
    with pytest.raises(ValueError, match=f"^{name}: expected a {kind} that no other buffer uses.*Make one {name} for"):
        made(**{name: part})
    await first.extend(rows(5))  # the first is as it was
    assert len(first) == 5


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_buffer_that_is_gone(name: str) -> None:
    part = PARTS[name]()
    first = made(**{name: part})
    del first
    second = made(**{name: part})
    assert second.capacity == 10


def test_a_part_of_a_buffer_that_is_gone_but_for_a_cycle() -> None:
    part = TensorStorage(10)
    gc.disable()
    try:
        first = made(storage=part)
        first.itself = first  # type: ignore[attr-defined]
        del first
        made(storage=part)
    finally:
        gc.enable()


async def test_a_part_of_a_closed_buffer_is_still_its_own() -> None:
    storage = TensorStorage(10)
    async with made(storage=storage) as first:
        await first.extend(rows(5))
    with pytest.raises(ValueError, match="a closed buffer can be opened again"):
        made(storage=storage)
    async with first:
        assert len(await within(first.sample())) == 2


def test_a_part_of_a_buffer_that_could_not_be_made() -> None:
    storage, sampler = TensorStorage(10), SamplerWithoutReplacement()
    first = made(sampler=sampler)
    with pytest.raises(ValueError, match="sampler"):
        made(storage=storage, sampler=sampler)
    del first
    made(storage=storage, sampler=sampler)


def test_a_part_without_a_state_may_be_shared() -> None:
    sampler = RandomSampler()
    assert made(sampler=sampler) is not made(sampler=sampler)


def test_parts_are_told_apart_by_identity() -> None:
    class Everything(TensorStorage):
        """Compares equal to all others, and cannot be hashed."""

        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

    first, second = made(storage=Everything(10)), made(storage=Everything(10))
    assert first is not second


async def test_copies_have_parts_of_their_own() -> None:
    buffer = made(sampler=SamplerWithoutReplacement(), limiter=MinSize(2), generator=seeded())
    await buffer.extend(rows(6))
    others = [copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))]
    for other in others:
        await other.extend(rows(2, 6))
        assert (len(other), len(buffer)) == (8, 6)


async def test_a_shallow_copy_would_share_its_parts() -> None:
    buffer = made()
    with pytest.raises(ValueError, match="storage: expected a TensorStorage that no other buffer uses"):
        copy.copy(buffer)


# -- processes --------------------------------------------------------------------------------------------------------

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
REFUSED = 3
CALLS: dict[str, Callable[[ReplayBuffer], Any]] = {
    "extend": lambda buffer: buffer.extend(rows(2)),
    "add": lambda buffer: buffer.add({"number": 1}),
    "sample": lambda buffer: buffer.sample(),
    "stream": lambda buffer: anext(aiter(buffer)),
    "remove": lambda buffer: buffer.remove([0]),
    "update_priority": lambda buffer: buffer.update_priority([0], 1.0),
    "empty": lambda buffer: buffer.empty(),
    "finish": lambda buffer: buffer.finish(),
    "flush": lambda buffer: buffer.flush(),
    "skip": lambda buffer: buffer.skip(),
    "snapshot": lambda buffer: buffer.snapshot(),
    "open": lambda buffer: buffer.open(),
    "aclose": lambda buffer: buffer.aclose(),
}


def in_child(work: Callable[[], Any]) -> int:
    """The exit status of a forked process."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(30)
    if child.exitcode is None:
        child.kill()
        child.join()
    assert child.exitcode is not None
    return child.exitcode


def refused(call: Callable[[], Any]) -> None:
    """Exits with REFUSED if the call is refused in words."""

    async def run() -> None:
        await call()

    try:
        asyncio.run(run())
    except AsyncBufError as error:
        sys.exit(REFUSED if "forked" in str(error) and "pickle.dumps(buffer)" in str(error) else 4)
    sys.exit(5)


@needs_fork
@pytest.mark.parametrize("name", CALLS)
def test_a_forked_child_is_refused(name: str) -> None:
    buffer = made()
    asyncio.run(buffer.extend(rows(4)))
    assert in_child(lambda: refused(lambda: CALLS[name](buffer))) == REFUSED
    assert asyncio.run(buffer.extend(rows(1))).tolist() == [4]


@needs_fork
@pytest.mark.parametrize("state", ["open", "closed"])
def test_a_child_of_a_buffer_that_is_open_or_was(state: str) -> None:
    found: list[int] = []

    async def parent() -> None:
        async with made() as buffer:
            await buffer.extend(rows(4))
            if state == "open":
                found.append(in_child(lambda: leave_loop(lambda: refused(lambda: buffer.extend(rows(1))))))
            else:
                await buffer.aclose()
                found.append(in_child(lambda: leave_loop(lambda: refused(lambda: buffer.open()))))

    asyncio.run(parent())
    assert found == [REFUSED]


def leave_loop(work: Callable[[], Any]) -> None:
    """In a child, the loop of the parent counts as running."""
    asyncio._set_running_loop(None)
    work()


@needs_fork
def test_a_child_may_drop_what_it_inherited_and_make_its_own() -> None:
    buffer = ReplayBuffer(ListStorage(10))

    def work() -> None:
        nonlocal buffer
        pickled = asyncio.run(fill(ReplayBuffer(ListStorage(10))))
        assert "inherited" in repr(buffer)
        buffer = pickled  # the inherited one goes without a word
        gc.collect()
        sys.exit(REFUSED if len(buffer) == 3 else 5)

    async def fill(other: ReplayBuffer) -> ReplayBuffer:
        await other.extend([1, 2, 3])
        again: ReplayBuffer = pickle.loads(pickle.dumps(other))
        return again

    assert in_child(work) == REFUSED
