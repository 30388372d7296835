"""Writers of a user that look at the items."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import Placement, ReplayBuffer, RowRange, SchemaError, TensorStorage, Writer
from asyncbuf.testing import check_writer

if TYPE_CHECKING:
    from collections.abc import Mapping


class FirstGoodItems(Writer):
    """Fills the storage once, with items whose value is positive."""

    columns: tuple[str, ...] = ("value",)

    def __init__(self) -> None:
        self.used = self.offered = 0

    @property
    def size(self) -> int:
        return self.used

    @property
    def write_count(self) -> int:
        return self.offered

    def place_values(self, count: int, capacity: int, columns: Mapping[str, np.ndarray[Any, Any]]) -> Placement:
        assert len(columns["value"]) == count
        good = np.flatnonzero(columns["value"] > 0)[: capacity - self.used].tolist()
        return Placement(count, tuple(RowRange(self.used + i, item, 1) for i, item in enumerate(good)))

    def commit(self, placement: Placement, capacity: int) -> None:
        self.used += len(placement.rows)
        self.offered += placement.offered

    def clear(self) -> None:
        self.used = 0

    def state_dict(self) -> dict[str, Any]:
        return {"used": self.used, "offered": self.offered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        used, offered = int(state["used"]), int(state["offered"])
        self.used, self.offered = used, offered


class Nested(FirstGoodItems):
    columns = ("meta/value",)

    def place_values(self, count: int, capacity: int, columns: Mapping[str, np.ndarray[Any, Any]]) -> Placement:
        return super().place_values(count, capacity, {"value": columns["meta/value"]})


class Twice(FirstGoodItems):
    def place_values(self, count: int, capacity: int, columns: Mapping[str, np.ndarray[Any, Any]]) -> Placement:
        return Placement(count, (RowRange(0, 0, 1),) * 2)


class Blind(FirstGoodItems):
    columns = ()


class Undecided(Nested):
    place_values = Writer.place_values


async def test_it_passes_the_suite() -> None:
    await check_writer(FirstGoodItems, seeds=range(3), steps=24)
    with pytest.raises(AssertionError, match="Twice breaks the rule 'a placement has rows of the storage, each once'"):
        await check_writer(Twice)


@pytest.mark.parametrize("width", [1, 4000])
async def test_values_of_small_and_large_writes(width: int) -> None:
    buffer = ReplayBuffer(TensorStorage(100), writer=Nested())
    value = torch.arange(-50.0, 50.0)
    items = {"meta": {"value": value}, "wide": value[:, None].repeat(1, width)}
    assert (await buffer.extend(items)).tolist() == list(range(49))
    assert await buffer.add({"meta": {"value": torch.tensor(0.0)}, "wide": torch.ones(width)}) is None
    assert await buffer.add({"meta": {"value": torch.tensor(7.0)}, "wide": torch.ones(width)}) == 49
    assert torch.equal(buffer._storage.gather(torch.arange(49))["wide"][:, 0], torch.arange(1.0, 50.0))
    with pytest.raises(ValueError, match="expected different rows"):
        await ReplayBuffer(TensorStorage(9), writer=Twice()).extend({"value": torch.ones(3)})


async def test_what_is_missing_is_named() -> None:
    items = {"meta": {"other": torch.ones(3)}}
    buffer = ReplayBuffer(TensorStorage(9), writer=Nested())
    with pytest.raises(SchemaError, match=r"\['meta/value'\], which the sampler or writer asks for; found"):
        await buffer.extend(items)
    with pytest.raises(TypeError, match=r"Blind: expected place\(\), because it names no columns; found none"):
        await ReplayBuffer(TensorStorage(9), writer=Blind()).extend(items)
    with pytest.raises(TypeError, match=r"Undecided: expected place_values\(\), because it names columns; found none"):
        await ReplayBuffer(TensorStorage(9), writer=Undecided()).extend({"meta": {"value": torch.ones(3)}})
    assert len(buffer) == 0
