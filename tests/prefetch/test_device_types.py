"""Whatever is returned by a collate function reaches the device, with its type."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import ListStorage, PrefetchError, ReplayBuffer
from asyncbuf._prefetch.device import DeviceTransfer
from tests.helpers import seeded, within
from tests.prefetch.containers import CONTAINERS, ReadOnly
from tests.prefetch.test_device import Streams, Traveller

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.prefetch.containers import Way


@pytest.mark.parametrize("way", CONTAINERS.values(), ids=CONTAINERS)
def test_containers_are_moved_and_keep_their_type(way: Way) -> None:
    make, tensor_of = way
    value = make(torch.ones(4))
    moved = DeviceTransfer("meta", False)(value)
    assert type(moved) is type(value)
    assert tensor_of(moved).device.type == "meta"
    assert tensor_of(value).device.type == "cpu"


@pytest.mark.parametrize("way", CONTAINERS.values(), ids=CONTAINERS)
async def test_containers_by_way_of_a_buffer(way: Way) -> None:
    make, tensor_of = way
    buffer = ReplayBuffer(
        ListStorage(4), batch_size=2, collate_fn=lambda items: make(torch.stack(items)), device="meta"
    )
    await buffer.extend([torch.ones(1)] * 4)
    async with buffer:
        for _ in range(5):
            assert tensor_of((await within(buffer.sample())).data).device.type == "meta"


# These look into their tensors, which the stand-in for one does not bear.
_OUTSIDE = {
    name: way for name, way in CONTAINERS.items() if name not in ("TensorDict", "tensorclass", "PackedSequence")
}


@pytest.mark.parametrize("way", _OUTSIDE.values(), ids=_OUTSIDE)
def test_containers_are_pinned_copied_and_noted(way: Way) -> None:
    make, _ = way
    streams = Streams()
    delivery = DeviceTransfer("cpu", True, streams=streams)
    moved = delivery(make(Traveller.of(torch.ones(2), streams.log)))
    steps = [entry[0] for entry in streams.log]
    assert steps.count("pin") >= 1
    assert steps.index("pin") < steps.index("enter") < steps.index("copy") < steps.index("record") < steps.index("wait")
    streams.log.clear()
    delivery.handed_over(moved)
    assert ("used on", "stream of MainThread", "there") in streams.log


class Fleeting(ReadOnly):
    """Makes its values anew each time, so that they cannot be replaced."""

    def __getitem__(self, key: str) -> Any:
        return torch.ones(2)


class Holder:
    def __init__(self) -> None:
        self.tensors = [torch.ones(2)]


class Slotted:
    __slots__ = "tensor"

    def __init__(self) -> None:
        self.tensor = torch.ones(2)


class InPlace:
    def __init__(self) -> None:
        self.tensor = torch.ones(2)

    def to(self, device: Any) -> None:
        self.tensor = self.tensor.to(device)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Holder(), "found a Holder that holds tensors in tensors and has none: give it to"),
        (Slotted(), "found a Slotted that holds tensors in tensor"),
        (torch.distributions.Normal(torch.zeros(2), 1.0), "found a Normal that holds tensors in"),
        (Fleeting({"a": 1}), "expected a Fleeting that can be copied around other parts"),
        (InPlace(), r"expected InPlace.to\(device\) to return what it moved, found None"),
    ],
    ids=["object", "slots", "distribution", "mapping", "in place"],
)
async def test_what_cannot_be_moved_is_an_error(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        DeviceTransfer("meta", False)({"x": [value]})
    buffer = ReplayBuffer(ListStorage(1), batch_size=1, collate_fn=list, transform=lambda data: value, device="meta")
    await buffer.add(1)
    async with buffer:
        with pytest.raises(PrefetchError, match=message):
            await within(buffer.sample())


class Date:
    """Its ``to`` takes a time zone."""

    def to(self, zone: str) -> None:
        raise AssertionError


class Empty:
    def __init__(self) -> None:
        self.name = "name"
        self.values = [1, 2]


@pytest.mark.parametrize(
    "value",
    [None, 1, "text", b"bytes", np.ones(2), bytearray(b"a"), Date(), Empty(), torch.Size([1]), Holder, len, [1] * 100],
    ids=str,
)
def test_what_is_no_tensor_is_left_alone(value: Any) -> None:
    assert DeviceTransfer("meta", False)({"x": value})["x"] is value
    data = {"x": [value], "y": (value,)}
    assert DeviceTransfer("meta", False)(data) is data


class Graph:
    """Moves itself, and hides its tensors."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._hidden: Callable[[], torch.Tensor] = lambda: tensor

    def pin_memory(self) -> Graph:
        return Graph(self._hidden().pin_memory())

    def to(self, device: Any, **options: Any) -> Graph:
        return Graph(self._hidden().to(device, **options))


class Stream(Streams):
    """Tells one stream from the other."""

    def default_stream(self, target: Any) -> str:
        return "default stream"

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.log.append(("enter", stream if isinstance(stream, str) else "own stream"))
        yield
        self.log.append(("leave",))


def test_an_object_that_hides_its_tensors_is_moved_on_the_default_stream() -> None:
    streams = Stream()
    DeviceTransfer("cpu", True, streams=streams)([Graph(Traveller.of(torch.ones(2), streams.log))])
    assert streams.log == [
        ("pin", "memory"),
        ("enter", "own stream"),
        ("enter", "default stream"),
        ("copy", "pinned", "cpu", False),
        ("leave",),
        ("record",),
        ("leave",),
        ("wait",),
    ]


def test_a_tensor_that_stands_in_two_places_is_moved_once() -> None:
    tensor = torch.ones(2)
    moved = DeviceTransfer("meta", False)({"a": tensor, "b": [tensor, tensor]})
    assert moved["a"] is moved["b"][0] is moved["b"][1]


def test_only_what_is_on_the_device_is_noted_there() -> None:
    streams = Streams()
    delivery = DeviceTransfer("cpu", True, streams=streams)
    delivery.handed_over({"x": torch.ones(2, device="meta"), "y": Traveller.of(torch.ones(2), streams.log)})
    assert len(streams.log) == 1


@pytest.mark.parametrize("device", [None, "cpu"])
async def test_long_lists_of_numbers_cost_nothing(device: str | None) -> None:
    item = {"tokens": [[1] * 512 for _ in range(8)], "logp": [[-0.5] * 512 for _ in range(8)]}
    buffer = ReplayBuffer(
        ListStorage(64), batch_size=64, collate_fn=lambda items: items, device=device, generator=seeded()
    )
    await buffer.extend([item] * 64)
    times = []
    async with buffer:
        for _ in range(15):
            start = time.thread_time()  # of the event loop: nothing else may count here
            await within(buffer.sample())
            times.append(time.thread_time() - start)
    assert min(times) < 0.005
