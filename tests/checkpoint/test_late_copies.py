"""Large tensors are copied in a thread while buffers stand still, and what is saved is of one moment all the same."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import CheckpointError, register_codec
from asyncbuf._plain.copies import LateCopies
from tests.checkpoint.helpers import items, make_buffer
from tests.helpers import Crew, Stop, take, turns, within
from tests.plain.codec_helpers import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncbuf.checkpoint.checkpointer import Checkpointer


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncbuf._plain.copies._AT_ONCE_BYTES", 0)


class Weights:
    """An object with tensors of its own, which it shows without copies."""

    def __init__(self, value: float = 0.0) -> None:
        self.tensors: dict[str, Any] = {
            "one": torch.full((1000,), value),
            "two": torch.full((20, 30), value)[:, 3:9],
            "leaf": torch.full((5,), value, requires_grad=True),
            "bits": torch.full((4,), value, dtype=torch.bfloat16),
            "complex": torch.full((3,), value, dtype=torch.complex64).conj(),
            "empty": torch.zeros(0, 3),
            "number": torch.tensor(value),
        }
        self.tensors["again"] = self.tensors["one"]
        self.array = np.asfortranarray(np.full((3, 4), value, ">f8"))
        self.step = int(value)
        self.asked = 0

    def set(self, value: float) -> None:
        with torch.no_grad():
            for tensor in self.tensors.values():
                tensor.fill_(value)
        self.step = int(value)

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"tensors": dict(self.tensors), "array": self.array, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors, self.array, self.step = state["tensors"], state["array"], state["step"]


def is_of(weights: Weights, expected: Weights) -> None:
    check(weights.tensors, expected.tensors)
    check(weights.array, np.ascontiguousarray(expected.array))
    assert weights.step == expected.step
    assert weights.tensors["again"] is weights.tensors["one"]


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stop]:
    """Halts the thread that copies."""
    stop = Stop()
    make = LateCopies.make

    def halting(self: LateCopies) -> None:
        stop()
        make(self)

    monkeypatch.setattr(LateCopies, "make", halting)
    yield stop
    stop.go.set()


@pytest.mark.parametrize("at_once", [False, True])
async def test_everything_comes_back(checkpointer: Checkpointer, at_once: bool) -> None:
    weights = Weights(3.0)
    value = {"tensor": torch.ones(7), "array": np.arange(6).reshape(2, 3)}
    await checkpointer.save(1, weights=weights, value=value, at_once=at_once)
    weights.set(4.0)
    other = Weights()
    restored = await checkpointer.restore(weights=other)
    is_of(other, Weights(3.0))
    check(restored.values["value"], value)


async def test_buffers_stand_still_and_the_loop_goes_on_while_tensors_are_copied(
    checkpointer: Checkpointer, stop: Stop
) -> None:
    buffer, weights = make_buffer(), Weights(1.0)
    async with buffer, Crew() as crew:
        await buffer.extend(items(20, 0))
        await take(buffer, 2)

        async def train() -> None:
            batch = await buffer.sample()
            weights.set(float(batch.number))

        saving = crew.start(checkpointer.save(1, buffer=buffer, weights=weights))
        await stop.come.reached()
        training, writing = crew.start(train()), crew.start(buffer.extend(items(1, 1)))
        await turns(50)
        assert not training.done()
        assert not writing.done()
        stop.go.set()
        await within(saving)
        await within(asyncio.gather(training, writing))
        assert weights.step == 2
    other, restored = Weights(), make_buffer(1)
    await checkpointer.restore(buffer=restored, weights=other)
    is_of(other, Weights(1.0))
    assert weights.asked == 1
    async with restored:
        assert (await restored.sample()).number == 2


@pytest.mark.parametrize("with_buffer", [False, True])
async def test_a_change_meanwhile_is_noticed_and_all_is_captured_again(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch, with_buffer: bool
) -> None:
    weights, stop = Weights(1.0), Stop()
    make, calls = LateCopies.make, 0

    def halting(self: LateCopies) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            stop()
        make(self)

    monkeypatch.setattr(LateCopies, "make", halting)
    buffer = make_buffer()
    parts: dict[str, Any] = {"buffer": buffer} if with_buffer else {}
    async with buffer, Crew() as crew:
        await buffer.extend(items(20, 0))
        await take(buffer, 2)
        saving = crew.start(checkpointer.save(1, **parts, weights=weights))
        await stop.come.reached()
        weights.set(2.0)  # a task that waits for none of the buffers
        stop.go.set()
        await within(saving)
        assert (calls, weights.asked) == (2, 2)
        assert (await buffer.sample()).number == 2  # nothing is lent any more
    other = Weights()
    await checkpointer.restore(partial=True, weights=other)
    is_of(other, weights)


async def test_at_once_no_thread_copies(checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights(1.0)
    seen: list[int] = []
    make = LateCopies.make

    def noting(self: LateCopies) -> None:
        asyncio.get_running_loop()  # raises in a thread
        seen.append(weights.step)
        make(self)

    monkeypatch.setattr(LateCopies, "make", noting)
    await checkpointer.save(1, weights=weights, at_once=True)
    assert seen == [1]


async def test_cancelled_while_tensors_are_copied(checkpointer: Checkpointer, stop: Stop) -> None:
    buffer = make_buffer()
    async with buffer, Crew() as crew:
        await buffer.extend(items(20, 0))
        saving = crew.start(checkpointer.save(1, buffer=buffer, weights=Weights(1.0)))
        await stop.come.reached()
        saving.cancel()
        await turns()
        assert not saving.done()  # its thread is still at work
        stop.go.set()
        with pytest.raises(asyncio.CancelledError):
            await within(saving)
        assert checkpointer.steps() == []
        await within(buffer.extend(items(1, 1)))
        await within(buffer.sample())
        await checkpointer.save(2, buffer=buffer, weights=Weights(1.0))


async def test_within_a_frozen_block(checkpointer: Checkpointer) -> None:
    buffer, weights = make_buffer(), Weights(1.0)
    async with buffer:
        await buffer.extend(items(20, 0))
        async with buffer.frozen():
            await within(checkpointer.save(1, buffer=buffer, weights=weights))
            await within(checkpointer.save(2, buffer=buffer, weights=weights, at_once=True))
    assert checkpointer.steps() == [1, 2]


async def test_inference_tensors_and_deterministic_algorithms(checkpointer: Checkpointer) -> None:
    with torch.inference_mode():
        tensor = torch.arange(5.0)
    torch.use_deterministic_algorithms(True)
    try:
        await checkpointer.save(1, tensor=tensor)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (await checkpointer.restore()).values["tensor"].tolist() == [0, 1, 2, 3, 4]


# -- what cannot be saved ---------------------------------------------------------------------------------------------


class Broken(torch.Tensor):
    """A tensor whose numbers cannot be had."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("detach", "clone"):
            raise RuntimeError("no numbers today")
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return {"deep": [self.value]}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


def masked() -> Any:
    with pytest.warns(UserWarning, match="MaskedTensors"):
        return torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False]))


ODD: dict[str, Any] = {
    "lazy module": (lambda: torch.nn.LazyLinear(3), "model.*lazy"),
    "lazy batch norm": (lambda: torch.nn.LazyBatchNorm1d(), "model.*lazy"),
    "meta module": (lambda: torch.nn.Linear(2, 3, device="meta"), "model.*meta"),
    "masked": (lambda: Holder(masked()), "model/deep/0.*MaskedTensor"),
    "sparse": (lambda: Holder(torch.eye(2).to_sparse()), "model/deep/0.*dense"),
    "masked array": (lambda: Holder(np.ma.masked_array([1], [True])), "model/deep/0.*MaskedArray"),
    "broken": (lambda: Holder(torch.ones(2).as_subclass(Broken)), "model/deep/0.*no numbers"),
}


@pytest.mark.parametrize(("make", "message"), ODD.values(), ids=ODD)
async def test_objects_that_cannot_be_saved(checkpointer: Checkpointer, make: Any, message: str) -> None:
    buffer = make_buffer()
    async with buffer:
        await buffer.extend(items(20, 0))
        with pytest.raises(CheckpointError, match=message):
            await checkpointer.save(1, buffer=buffer, model=make())
        await within(buffer.sample())
    assert checkpointer.steps() == []


class Named(torch.Tensor):
    """A tensor that has a codec."""


register_codec(
    Named,
    lambda value: value.as_subclass(torch.Tensor),
    lambda plain: plain.as_subclass(Named),
    name="test_late_copies.Named",
)


async def test_a_derived_tensor_with_a_codec_goes_by_it(checkpointer: Checkpointer) -> None:
    await checkpointer.save(1, value=torch.ones(2).as_subclass(Named))
    found = (await checkpointer.restore()).values["value"]
    assert type(found) is Named
    assert found.tolist() == [1, 1]
