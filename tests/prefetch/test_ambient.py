"""A batch does not depend on who awaits it, nor on where and after what its transforms run."""

from __future__ import annotations

import asyncio
import contextvars
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import ListStorage, ReplayBuffer, TensorStorage
from tests.helpers import seeded, within
from tests.runtime.test_shield import EXPECTED, STATES, seen, set_everything

if TYPE_CHECKING:
    from collections.abc import Callable

variable = contextvars.ContextVar("variable", default="unset")
KINDS = ["quick", "slow", "async", "awaitable", "collate", "stateful"]


class Looking:
    """A transform that keeps what it sees, and then sets all that it can."""

    def __init__(self, kind: str, spoils: bool) -> None:
        self.kind = kind
        self.spoils = spoils
        self.found: list[Any] = []

    def __call__(self, data: Any) -> Any:
        self.found.append(seen())
        if self.kind == "slow":
            time.sleep(0.001)
        if self.spoils:
            set_everything()
        return data

    async def awaited(self, data: Any) -> Any:
        self(data)
        await asyncio.sleep(0)
        return data

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def make_buffer(looking: Looking, prefetch: int) -> ReplayBuffer:
    transform: dict[str, Any] = {
        "async": looking.awaited,
        "awaitable": lambda data: looking.awaited(data),
        "collate": None,
        "stateful": looking,
    }
    return ReplayBuffer(
        TensorStorage(20),
        batch_size=4,
        prefetch=prefetch,
        workers=2,
        collate_fn=looking.__call__ if looking.kind == "collate" else None,
        transform=transform.get(looking.kind, lambda data: looking(data)),
        generator=seeded(),
    )


@pytest.mark.parametrize("spoils", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefetch", [0, 2])
async def test_every_transform_sees_the_same(kind: str, prefetch: int, spoils: bool) -> None:
    looking = Looking(kind, spoils)
    buffer = make_buffer(looking, prefetch)
    await buffer.extend({"x": torch.ones(20)})
    before = seen()
    with np.errstate(all="raise"):
        async with buffer:
            for state in STATES.values():
                with state():
                    await within(buffer.sample())
            for _ in range(6):
                await within(buffer.sample())
    assert looking.found == [EXPECTED] * len(looking.found)
    assert len(looking.found) >= len(STATES) + 6
    assert seen() == before


async def test_batches_are_the_same_whoever_awaits_them() -> None:
    def transform(data: Any) -> Any:
        quotient = np.full(1, 1e-40, np.float32) * np.full(
            1, 1e-5, np.float32
        )  # underflows, which is silent unless somebody wants to know
        return {"x": data["x"] * 3, "made": torch.ones(2), "quotient": torch.from_numpy(quotient)}

    async def stream(state: Callable[[], Any], prefetch: int) -> list[Any]:
        buffer = ReplayBuffer(
            TensorStorage(20), batch_size=4, prefetch=prefetch, transform=transform, generator=seeded()
        )
        await buffer.extend({"x": torch.arange(20.0)})
        found = []
        async with buffer:
            for _ in range(12):
                with state():
                    batch = await within(buffer.sample())
                found.append({key: (value.tolist(), value.device, type(value)) for key, value in batch.data.items()})
        return found

    expected = await stream(lambda: np.errstate(), 0)
    for prefetch in (0, 2):
        for state in STATES.values():
            assert await stream(state, prefetch) == expected


async def test_a_context_variable_does_not_go_from_one_batch_to_the_next() -> None:
    def transform(data: Any) -> Any:
        before = variable.get()
        variable.set("set")
        return [before]

    async def awaited(data: Any) -> Any:
        await asyncio.sleep(0)
        return data + transform(data)

    buffer = ReplayBuffer(
        ListStorage(4), batch_size=1, prefetch=1, collate_fn=transform, transform=[awaited, lambda data: data]
    )
    await buffer.add("item")
    variable.set("of the caller")
    async with buffer:
        found = [(await within(buffer.sample())).data for _ in range(8)]
    assert found == [["unset", "unset"]] * 8
    assert variable.get() == "of the caller"


async def test_a_transform_may_run_a_loop_of_its_own_wherever_it_runs() -> None:
    loop = asyncio.new_event_loop()

    async def ask(value: Any) -> Any:
        return value * 2

    def transform(data: Any) -> Any:
        return {"x": loop.run_until_complete(ask(data["x"]))}

    buffer = ReplayBuffer(TensorStorage(4), batch_size=1, transform=transform)
    await buffer.extend({"x": torch.ones(4)})
    try:
        async with buffer:
            for _ in range(20):
                assert (await within(buffer.sample()))["x"].item() == 2
    finally:
        loop.close()


async def test_a_transform_that_waits_for_the_event_loop_stays_off_it() -> None:
    loop = asyncio.get_running_loop()

    async def ask(value: Any) -> Any:
        return value * 2

    def transform(data: Any) -> Any:
        return {"x": asyncio.run_coroutine_threadsafe(ask(data["x"]), loop).result()}

    buffer = ReplayBuffer(TensorStorage(4), batch_size=1, transform=transform)
    await buffer.extend({"x": torch.ones(4)})
    async with buffer:
        for _ in range(100):
            assert (await within(buffer.sample()))["x"].item() == 2
