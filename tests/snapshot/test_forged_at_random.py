"""States in which one thing was changed at random: refused by an error of the library, or taken over whole."""

from __future__ import annotations

import contextlib
import copy
import random
from typing import TYPE_CHECKING

import pytest

from asyncbuf import CheckpointError, PrefetchError, ReplayBuffer, Snapshot
from asyncbuf.testing import difference
from tests.helpers import some, within
from tests.snapshot.forged import KINDS, State, mutate, used, write_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

MUTATIONS = 25  # of each kind and seed
FIRST = 10  # of the first seed, which is no slow test


async def states(kind: str) -> AsyncIterator[State]:
    for removed in (0, 3):
        yield await (await used(kind, removed)).state_dict()


@pytest.mark.loops_in_turn
@pytest.mark.parametrize("seed", some(range(16), fast=[0]))
@pytest.mark.parametrize("kind", KINDS)
async def test_one_change_is_refused_or_taken_over_whole(kind: str, seed: int) -> None:
    chance = random.Random(f"{kind}-{seed}")
    good = [state async for state in states(kind)]
    buffer = await used(kind, chance.choice((0, 2)))
    async with buffer:
        await buffer.sample()
        for number in range(MUTATIONS if seed else FIRST):
            before = await buffer.state_dict()
            forged = copy.deepcopy(chance.choice(good))
            what = f"{kind}, seed {seed}, change {number}: {mutate(forged, chance)}"
            with told(what):
                if await loads(buffer, forged):
                    await goes_on(buffer, kind)
                    await buffer.load_state_dict(before)
            found = difference(await within(buffer.state_dict()), before)
            assert found is None, f"{what}: the live buffer has changed: {found}"
        await buffer.sample()


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """Say what was changed, beside whatever goes wrong."""
    try:
        yield
    except BaseException as error:
        error.add_note(what)
        raise


async def loads(buffer: ReplayBuffer, state: State) -> bool:
    try:
        await within(buffer.load_state_dict(state))
    except CheckpointError as error:
        return "expected" not in str(error)
    return True


async def goes_on(buffer: ReplayBuffer, kind: str) -> None:
    """What was taken over is whole: it can be used in every way, and saved, and loaded again."""
    again = KINDS[kind]()
    await again.load_state_dict(await within(buffer.state_dict()))
    await again.restore(Snapshot.from_state_dict(await again.state_dict()))
    assert difference(await again.state_dict(), await buffer.state_dict()) is None
    for _ in range(4):
        try:
            await within(buffer.sample())
        except PrefetchError:  # what is in the items, or in a batch, is data: nobody can know what it was
            await within(buffer.skip())
    await write_of(kind)(buffer, 3)
    rows = await buffer.state_dict()
    assert len(buffer) <= buffer.capacity
    assert buffer.stats().drawn == buffer.stats().delivered + buffer.stats().queued + buffer.stats().dropped
    await buffer.remove([0, 1, 5])
    await write_of(kind)(buffer, 25)
    await within(buffer.flush())
    await within(buffer.sample())
    assert rows.keys() == (await within(buffer.state_dict())).keys()


async def test_what_is_changed_would_load_otherwise() -> None:
    for kind in KINDS:
        async for state in states(kind):
            buffer = await used(kind, 1)
            async with buffer:
                assert await loads(buffer, state)
                await goes_on(buffer, kind)
