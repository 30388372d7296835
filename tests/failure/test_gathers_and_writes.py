"""Gathers and writes that fail: those behind them go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import PrefetchError, ReplayBuffer, TensorStorage
from tests.failure.helpers import AT_ONCE, in_order
from tests.helpers import ThreadedStorage, rows, within

if TYPE_CHECKING:
    import torch


@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
async def test_a_gather_that_fails(threads: bool) -> None:
    class Unreadable(ThreadedStorage):
        failures = 2

        def gather_nbytes(self, count: int) -> int:
            return 1 << 30 if threads else 0

        def gather(self, indices: torch.Tensor) -> Any:
            if self.failures:
                self.failures -= 1
                raise OSError("gather")
            return super().gather(indices)

    buffer = ReplayBuffer(Unreadable(10), batch_size=4)
    await buffer.extend(rows(10))
    async with buffer:
        for _ in range(2):
            with pytest.raises(PrefetchError, match="gather"):
                await within(buffer.sample())
            await within(buffer.extend(rows(1)))  # nothing is held
        assert (await within(buffer.sample())).number == 0


@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
async def test_a_write_that_fails_holds_nobody_up(threads: bool) -> None:
    class Unwritable(ThreadedStorage):
        fails = False

        def prepare(self, items: Any) -> Any:
            return super().prepare(items) if threads else TensorStorage.prepare(self, items)

        def write(self, prepared: Any, runs: Any) -> None:
            if self.fails:
                raise OSError("disk full")
            super().write(prepared, runs)

    storage = Unwritable(10)
    buffer = ReplayBuffer(storage, batch_size=4)
    async with buffer:
        await buffer.extend(rows(4))
        storage.fails = True
        with pytest.raises(OSError, match="disk full"):
            await within(buffer.extend(rows(4)))
        assert (len(buffer), buffer.write_count) == (4, 4)
        storage.fails = False
        assert (await within(buffer.extend(rows(2)))).tolist() == [4, 5]
        await within(buffer.sample())


async def test_a_failure_of_another_size_does_not_stop_the_others() -> None:
    class Stateful:
        """Fails once, with a batch of another size."""

        failures = 1

        def state_dict(self) -> dict[str, int]:
            return {"failures": self.failures}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.failures = state["failures"]

        def __call__(self, data: Any) -> Any:
            if len(data["number"]) == 3 and self.failures:
                self.failures -= 1
                raise ValueError("once")
            return data

    buffer = in_order(Stateful())
    await buffer.extend(rows(80))
    async with buffer:
        assert (await buffer.sample()).number == 0
        with pytest.raises(PrefetchError):
            await buffer.sample(3)
        # The caller has lost interest in batches of three.
        assert (await within(buffer.sample(), AT_ONCE)).number == 2
