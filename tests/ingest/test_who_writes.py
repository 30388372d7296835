"""What parts of a user make of a write, a removal or a priority does not depend on who asks for it."""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import (
    Draw,
    NotYet,
    Placement,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Rows,
    TensorStorage,
    WriteEvent,
)
from tests.helpers import ThreadedStorage, rows, turns, within

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from asyncbuf.rows import Answer

whose: contextvars.ContextVar[str] = contextvars.ContextVar("whose", default="nobody's")


def around() -> tuple[Any, ...]:
    """What a part can see of whoever made it run."""
    tensor = torch.ones(2, requires_grad=True) * 2
    return tensor.requires_grad, tensor.is_inference(), np.geterr()["divide"], whose.get(), torch.ones(1).device.type


class Nosy(RandomSampler):
    def __init__(self) -> None:
        self.seen: dict[str, tuple[Any, ...]] = {}
        self.kept = torch.zeros(20)

    def look(self, name: str) -> None:
        self.seen[name] = around()

    def may_draw(self, rows: Rows, batch_size: int) -> Answer:
        self.look("may_draw")
        return True if rows.size else NotYet("nothing")

    def check_write(self, event: WriteEvent) -> None:
        self.look("check_write")

    def wrote(self, event: WriteEvent) -> None:
        self.look("wrote")
        self.kept = self.kept.index_fill(0, event.rows, 1.0)

    def written(self, indices: torch.Tensor, rows: Rows) -> None:
        self.look("written")
        self.kept[indices] += 1  # what inference mode had made could not be changed in place later

    def removed(self, indices: torch.Tensor, rows: Rows) -> None:
        self.look("removed")

    def update_priority(self, indices: torch.Tensor, priority: torch.Tensor, rows: Rows) -> None:
        self.look("update_priority")
        self.kept[indices] = priority

    def handed_over(self, draw: Draw) -> torch.Tensor | None:
        self.look("handed_over")
        return None

    def dropped(self, draw: Draw) -> None:
        self.look("dropped")


class NosyWriter(RoundRobinWriter):
    seen: dict[str, tuple[Any, ...]]

    def __init__(self) -> None:
        super().__init__()
        self.seen = {}

    def place(self, count: int, capacity: int) -> Placement:
        self.seen["place"] = around()
        return super().place(count, capacity)

    def commit(self, placement: Placement, capacity: int) -> None:
        self.seen["commit"] = around()
        super().commit(placement, capacity)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "errstate": lambda: np.errstate(divide="raise"),
    "device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
@pytest.mark.parametrize("mode", MODES)
async def test_what_a_part_sees(mode: str, threads: bool) -> None:
    sampler, writer = Nosy(), NosyWriter()
    storage = ThreadedStorage(20) if threads else TensorStorage(20)
    buffer = ReplayBuffer(storage, sampler=sampler, writer=writer, batch_size=4, prefetch=1)
    items = rows(5)
    token = whose.set("mine")
    async with buffer:
        for _ in range(2):
            with MODES[mode]():
                await buffer.extend(items)
                await within(buffer.sample())
                await buffer.update_priority([1, 2], 0.5)
                await buffer.remove([0])
                await buffer.flush()
                await turns()
        await buffer.extend(items)
    whose.reset(token)
    plain = (True, False, np.geterr()["divide"], "nobody's", "cpu")
    names = {"may_draw", "check_write", "wrote", "written", "removed", "update_priority", "handed_over", "dropped"}
    assert sampler.seen == dict.fromkeys(names, plain)
    assert writer.seen == dict.fromkeys(("place", "commit"), plain)


@pytest.mark.parametrize("mode", MODES)
async def test_rows_are_removed_written_and_saved_in_any_mode(mode: str) -> None:
    buffer = ReplayBuffer(TensorStorage(20), batch_size=4)
    items = rows(10)
    async with buffer:
        with MODES[mode]():
            await buffer.extend(items)
            batch = await within(buffer.sample())
            assert await buffer.remove([3, 4]) == 2
            await buffer.update_priority(batch, 1.0)
            await buffer.extend(items)
            await within(buffer.sample())
            state = await buffer.state_dict()
        await buffer.load_state_dict(state)
        with MODES[mode]():
            await buffer.load_state_dict(state)
            assert len(buffer) == 18
