"""Getting a batch to a device: what can be seen of it without one."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import ReplayBuffer, TensorStorage
from asyncbuf._prefetch import transforms as transform
from asyncbuf._prefetch.device import DeviceTransfer
from tests.helpers import rows, seeded

if TYPE_CHECKING:
    from collections.abc import Iterator

Log = list[tuple[Any, ...]]


class Traveller(torch.Tensor):
    """Writes down where it goes."""

    journal: Log
    place: str

    @classmethod
    def of(cls, tensor: torch.Tensor, log: Log, where: str = "memory") -> Traveller:
        found: Traveller = tensor.as_subclass(cls)
        found.journal, found.place = log, where
        return found

    def pin_memory(self, *_: Any) -> Traveller:
        self.journal.append(("pin", self.place))
        return Traveller.of(self.as_subclass(torch.Tensor).clone(), self.journal, "pinned")

    def to(self, target: Any, *, non_blocking: bool = False) -> Traveller:  # type: ignore[override]
        self.journal.append(("copy", self.place, str(target), non_blocking))
        return Traveller.of(self.as_subclass(torch.Tensor).clone(), self.journal, "there")

    def record_stream(self, stream: Any) -> None:
        self.journal.append(("used on", stream, self.place))


class Streams:
    """What ``torch.cuda`` offers, without a device."""

    def __init__(self) -> None:
        self.log: Log = []
        self.made = 0

    def Stream(self, target: torch.device) -> Streams:  # noqa: N802
        self.made += 1
        return self

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        assert stream is self
        self.log.append(("enter",))
        yield
        self.log.append(("leave",))

    def current_stream(self, target: Any) -> str:
        assert str(target) == "cpu"
        return f"stream of {threading.current_thread().name}"

    def record_event(self) -> Streams:
        self.log.append(("record",))
        return self

    def synchronize(self) -> None:
        self.log.append(("wait",))


def test_copies_run_on_a_stream_of_their_own() -> None:
    streams = Streams()
    delivery = DeviceTransfer("cpu", True, streams=streams)
    assert delivery.is_needed
    assert delivery.waits
    moved = delivery({"x": Traveller.of(torch.ones(2), streams.log), "text": "text"})
    assert streams.log == [
        ("pin", "memory"),
        ("enter",),
        ("copy", "pinned", "cpu", True),
        ("record",),
        ("leave",),
        ("wait",),
    ]
    assert moved["text"] == "text"
    streams.log.clear()
    delivery.handed_over(moved)
    assert streams.log == [("used on", "stream of MainThread", "there")]
    delivery({"x": Traveller.of(torch.ones(2), streams.log)})
    assert streams.made == 1


def test_without_streams_copies_block() -> None:
    log: Log = []
    delivery = DeviceTransfer("cpu", False)
    assert not delivery.waits
    delivery({"x": Traveller.of(torch.ones(2), log)})
    assert log == [("copy", "memory", "cpu", False)]
    delivery.handed_over({"x": torch.ones(2)})


@pytest.mark.parametrize("depth", [0, 3])
async def test_a_batch_is_noted_on_the_stream_of_its_consumer(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams()
    monkeypatch.setattr(transform, "DeviceTransfer", lambda device, pins: DeviceTransfer(device, pins, streams=streams))
    buffer = ReplayBuffer(
        TensorStorage(50),
        batch_size=4,
        prefetch=depth,
        device="cpu",
        pin_memory=True,
        transform=lambda data: {"number": Traveller.of(data["number"], streams.log)},
        generator=seeded(),
    )
    await buffer.extend(rows(50))
    async with buffer:
        for number in range(6):
            assert (await buffer.sample()).number == number
        used = [entry for entry in streams.log if entry[0] == "used on"]
        assert used == [("used on", "stream of MainThread", "there")] * 6


async def test_a_restored_batch_is_brought_to_its_device_again() -> None:
    moved: list[int] = []

    class Counting(DeviceTransfer):
        def __call__(self, data: Any) -> Any:
            moved.append(int(data["number"][0]))
            return super().__call__(data)

    def make() -> ReplayBuffer:
        return ReplayBuffer(TensorStorage(50), batch_size=4, prefetch=3, device="cpu", generator=seeded())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transform, "DeviceTransfer", Counting)
        source, target = make(), make()
    await source.extend(rows(50))
    async with source:
        await source.sample()
        snapshot = await source.snapshot()
        expected = [await source.sample() for _ in range(3)]
    moved.clear()
    async with target:
        await target.restore(snapshot)
        for batch in expected:
            found = await target.sample()
            assert found.number == batch.number
            assert found["number"].equal(batch["number"])
    assert set(moved) >= {int(batch["number"][0]) for batch in expected}
