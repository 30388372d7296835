"""Storages, limiters and states of parts of a user: all of them are called in an empty context and plain modes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import GatherJobs, Limiter, ListStorage, MinSize, RandomSampler, ReplayBuffer, Runs, TensorStorage
from tests.helpers import rows, seeded, within
from tests.runtime.test_shield import EXPECTED, STATES, seen, set_everything

if TYPE_CHECKING:
    from collections.abc import Callable

ITEMS = 20


class Looking:
    """Keeps what each method sees, and then sets all that it can."""

    def __init__(self) -> None:
        self.found: dict[str, list[Any]] = {}

    def look(self, where: str) -> None:
        self.found.setdefault(where, []).append(seen())
        set_everything()


METHODS = (
    *("prepare", "prepare_one", "is_current", "write", "gather", "begin_gather", "gather_nbytes"),
    *("clear", "release", "freeze", "columns"),
)


def looking_storage(looking: Looking, runs: Runs, large: bool) -> TensorStorage:
    """A storage whose every method looks."""

    def wrapped(name: str) -> Any:
        method = getattr(TensorStorage, name)

        def look(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = method(self, *args, **kwargs)
            looking.look(name)  # last, because it sets what makes the method fail
            return result

        return look

    methods: dict[str, Any] = {name: wrapped(name) for name in METHODS}
    if large:
        methods["gather_nbytes"] = lambda self, count: 1 << 30

    def begin_gather(self: Any, draw: Any, *, inline: bool, parts: int) -> Any:
        def job() -> None:
            looking.look("job")

        def combine() -> Any:
            data = TensorStorage.gather(self, draw.indices)
            looking.look("combine")
            return data

        async def wait() -> Any:
            data = TensorStorage.gather(self, draw.indices)
            await asyncio.sleep(0)
            looking.look("awaited")
            return data

        looking.look("begin_gather")
        return wait() if runs is Runs.AWAIT else GatherJobs([job, job], combine)

    methods["begin_gather"] = begin_gather
    return type("LookingStorage", (TensorStorage,), {"runs": runs, **methods})(ITEMS)  # type: ignore[no-any-return]


class LookingLimiter(Limiter):
    """A limiter that looks."""

    def __init__(self, looking: Looking) -> None:
        self.looking = looking

    def may_write(self, counters: Any, items: int) -> Any:
        self.looking.look("may_write")
        return True

    def may_draw(self, counters: Any, items: int) -> Any:
        self.looking.look("may_draw")
        return True

    def state_dict(self) -> dict[str, Any]:
        self.looking.look("state_dict")
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.looking.look("load_state_dict")


class ColumnSampler(RandomSampler):
    """Asks for columns."""

    columns = ("number",)

    def check_write(self, event: Any) -> None:
        event.columns["number"]

    def wrote(self, event: Any) -> None:
        pass


KINDS: dict[str, tuple[Runs, bool]] = {
    "inline": (Runs.LOOP, False),
    "anywhere": (Runs.ANYWHERE, False),
    "threads": (Runs.ANYWHERE, True),
    "awaitable": (Runs.AWAIT, False),
}


# Without the one that refuses all operations: extend() could not even return the rows to its caller.
STATES_OF_CALLERS = {name: state for name, state in STATES.items() if name != "dispatch mode"}


@pytest.mark.parametrize("state", STATES_OF_CALLERS.values(), ids=STATES_OF_CALLERS)
@pytest.mark.parametrize("kind", KINDS)
async def test_every_method_sees_what_it_would_see_in_a_fresh_thread(kind: str, state: Callable[[], Any]) -> None:
    looking = Looking()
    storage = looking_storage(looking, *KINDS[kind])
    buffer = ReplayBuffer(
        storage, sampler=ColumnSampler(), limiter=LookingLimiter(looking), batch_size=4, prefetch=1, generator=seeded()
    )
    items = rows(ITEMS)
    single = {key: value[0] for key, value in rows(1).items()}
    before = seen()
    async with buffer:
        with state():
            await within(buffer.extend(items))
            await within(buffer.add(single))
            for _ in range(3):
                await within(buffer.sample())
            await within(buffer.remove([1]))
            snapshot = await within(buffer.snapshot())
            await within(buffer.extend(items))
            await within(buffer.restore(snapshot))
            await within(buffer.sample())
            await within(buffer.empty())
            await within(buffer.extend(items))
            await within(buffer.sample(3))
    assert seen() == before
    for where, found in looking.found.items():
        assert found == [EXPECTED] * len(found), where
    expected = {*METHODS, "may_write", "may_draw", "state_dict", "load_state_dict"} - {"is_current"}
    expected -= {"begin_gather"} if kind in ("inline", "anywhere") else {"gather"}
    expected |= {"threads": {"job", "combine"}, "awaitable": {"awaited"}}.get(kind, set())
    expected -= {"gather_nbytes"} if kind in ("inline", "threads") else set()
    assert looking.found.keys() - {"is_current"} == expected


def test_only_what_is_ours_goes_without() -> None:
    class Mine(TensorStorage):
        pass

    class MineList(ListStorage):
        trusted = True

    class MineLimiter(MinSize):
        pass

    assert [kind.trusted for kind in (TensorStorage, ListStorage, Mine, MineList)] == [True, True, False, True]
    assert [kind.trusted for kind in (Limiter, MinSize, MineLimiter)] == [False, True, False]


async def test_batches_of_a_storage_are_the_same_whoever_awaits_them() -> None:
    class Noting(TensorStorage):
        def gather(self, indices: torch.Tensor) -> Any:
            data = super().gather(indices)
            made = torch.ones(len(indices), 2) @ torch.ones(2, 2, requires_grad=True)
            return {**data, "made": made.detach() * float(made.requires_grad)}

    async def stream(state: Callable[[], Any], prefetch: int) -> list[Any]:
        buffer = ReplayBuffer(Noting(ITEMS), batch_size=4, prefetch=prefetch, generator=seeded())
        await buffer.extend(rows(ITEMS))
        found = []
        async with buffer:
            for _ in range(4):
                with state():
                    batch = await within(buffer.sample())
                found.append({key: (value.tolist(), value.dtype, value.device) for key, value in batch.data.items()})
        return found

    expected = await stream(STATES["numpy"], 0)
    for prefetch in (0, 2):
        for state in STATES.values():
            assert await stream(state, prefetch) == expected
