"""Whole runs: saved at one point in time, restored to the bit, whatever happens in between.

Run as a program (``python -m tests.checkpoint.test_checkpointer``), this module is the process whose children die.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from asyncbuf import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointVersionError,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SamplerWithoutReplacement,
    TensorStorage,
)
from asyncbuf._disk.directory import CheckpointReader, CheckpointWriter, is_checkpoint
from asyncbuf.checkpoint import components as parts_module
from asyncbuf.checkpoint.checkpointer import Checkpointer, RestoredCheckpoint
from tests.helpers import Crew, Stop, check_same, dismiss, fingerprint, seeded, take, turns, within

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test loses power, and waiting for disks takes longer than all the rest."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """The models are tiny: the threads of torch would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _global_generators() -> Iterator[None]:
    """Leave the global generators as they were."""
    state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    yield
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])


@pytest.fixture
def checkpointer(tmp_path: Path) -> Checkpointer:
    return Checkpointer(tmp_path / "runs")


# -- runs to be saved -------------------------------------------------------------------------------------------------


def noisy(data: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {**data, "x": data["x"] + torch.randn(data["x"].shape, generator=generator)}


def make_buffer(
    seed: int = 0,
    *,
    sampler: Sampler | None = None,
    prefetch: int = 3,
    workers: int = 2,
    batch_size: int = 8,
    capacity: int = 64,
    min_size: int = 1,
) -> ReplayBuffer:
    return ReplayBuffer(
        TensorStorage(capacity),
        sampler=sampler if sampler is not None else RandomSampler(),
        batch_size=batch_size,
        prefetch=prefetch,
        workers=workers,
        min_size=min_size,
        transform=noisy,
        generator=seeded(seed),
    )


def items(count: int, seed: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(count, 3, generator=seeded(seed)), "n": torch.arange(count) + 1000 * seed}


class Run:
    """A small training run that is the same in every process, seeded by how far it is."""

    def __init__(self, seed: int, **settings: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.buffer = make_buffer(seed, **settings)
        self.step = 0

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "buffer": self.buffer}

    async def train(self, steps: int) -> list[Hashable]:
        """What each step saw and did."""
        seen: list[Hashable] = []
        for _ in range(steps):
            await self.buffer.extend(items(5, self.step))
            batch = await self.buffer.sample()
            loss = self.model(batch["x"]).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            seen.append((fingerprint(batch), loss.item(), self.scheduler.get_last_lr()[0]))
        return seen

    def weights(self) -> list[Hashable]:
        return [bits(tensor) for tensor in self.model.state_dict().values()]


def bits(tensor: torch.Tensor) -> Hashable:
    return str(tensor.dtype), tuple(tensor.shape), tensor.detach().numpy().tobytes()


class Count:
    """The smallest object with a state: it counts what it was told, in order."""

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        self.loads += 1


class Fragile(Count):
    """Takes half of a state, and then raises, for the values that it does not like."""

    def __init__(self, value: int = 0, *, hates: set[int], error: type[BaseException] = ValueError) -> None:
        super().__init__(value)
        self.half = value
        self.hates = hates
        self.error = error

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.half = state["value"]
        if state["value"] in self.hates:
            raise self.error("not that one")
        super().load_state_dict(state)


# -- round trips ------------------------------------------------------------------------------------------------------

SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "random": dict,
    "no prefetch": lambda: {"prefetch": 0, "workers": 1},
    "deep": lambda: {"prefetch": 8, "workers": 3},
    "without replacement": lambda: {"sampler": SamplerWithoutReplacement()},
    "in passes of whole batches": lambda: {"sampler": SamplerWithoutReplacement(drop_last=True), "prefetch": 1},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("before", [1, 20])
async def test_run_goes_on_bit_for_bit(
    checkpointer: Checkpointer, settings: Callable[[], dict[str, Any]], before: int
) -> None:
    run = Run(0, **settings())
    async with run.buffer:
        await run.buffer.extend(items(20, 99))
        await run.train(before)
        await checkpointer.save(run.step, **run.objects, progress={"step": run.step})
        expected = await run.train(25)
    other = Run(1, **settings())
    restored = await checkpointer.restore(**other.objects)
    other.step = restored.values["progress"]["step"]
    async with other.buffer:
        check_same(await other.train(25), expected)
    assert other.weights() == run.weights()


async def test_restored_while_it_runs(checkpointer: Checkpointer) -> None:
    run = Run(0)
    async with run.buffer:
        await run.train(10)
        await checkpointer.save(10, **run.objects)
        expected = await run.train(10)
        await run.train(7)
        for _ in range(3):
            await checkpointer.restore(**run.objects)
            run.step = 10
            check_same(await run.train(10), expected)


async def test_saving_changes_nothing(checkpointer: Checkpointer) -> None:
    streams = []
    for saves in (False, True):
        run = Run(0)
        stream: list[Hashable] = []
        async with run.buffer:
            for step in range(10):
                if saves:
                    await checkpointer.save(step, **run.objects)
                stream += await run.train(1)
        streams.append([*stream, *run.weights()])
    check_same(streams[1], streams[0])


async def test_restored_again_and_again(checkpointer: Checkpointer) -> None:
    run = Run(0)
    async with run.buffer:
        await run.train(3)
        await checkpointer.save(3, **run.objects)
        expected = await run.train(12)
    for step in range(3, 15):
        other = Run(step)
        restored = await checkpointer.restore(**other.objects)
        assert restored == RestoredCheckpoint(step, checkpointer.path(step), {})
        other.step = step
        async with other.buffer:
            check_same(await other.train(1), expected[step - 3 : step - 2])
            await checkpointer.save(step + 1, **other.objects)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "Adam with a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, history_size=3),
    "groups": lambda p: torch.optim.SGD([{"params": [x], "lr": 0.01 * (i + 1)} for i, x in enumerate(p)], momentum=0.5),
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 7]),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=40),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 4, mode="exp_range", cycle_momentum=False),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.95**epoch),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], [6]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


def trained(model: Any, optimizer: torch.optim.Optimizer, scheduler: Any, steps: range) -> list[Hashable]:
    seen: list[Hashable] = []
    for step in steps:
        data = items(8, step)["x"]

        def closure(data: torch.Tensor = data) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(data).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        loss: Any = optimizer.step(closure)  # type: ignore[arg-type]
        scheduler.step(*[1.0] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        seen.append(repr((loss.tolist(), rates, *map(bits, model.parameters()))))
    return seen


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [
        *((name, "ExponentialLR") for name in OPTIMIZERS),
        *(("SGD", name) for name in SCHEDULERS if name != "ExponentialLR"),
    ],
)
def test_optimizer_and_scheduler_go_on_bit_for_bit(checkpointer: Checkpointer, optimizer: str, scheduler: str) -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        made = OPTIMIZERS[optimizer](model.parameters())
        return {"model": model, "optimizer": made, "scheduler": SCHEDULERS[scheduler](made)}

    first, second = make(0), make(1)
    trained(**first, steps=range(5))
    trained(**second, steps=range(2))  # has a state of its own that must go
    asyncio.run(checkpointer.save(5, **first))
    expected = trained(**first, steps=range(5, 15))
    asyncio.run(checkpointer.restore(**second))
    check_same(trained(**second, steps=range(5, 15)), expected)


async def test_values_come_back(checkpointer: Checkpointer) -> None:
    values: dict[str, Any] = {
        "episode": 12,
        "best": float("-inf"),
        "name": "run é",
        "nothing": None,
        "flags": (True, [None, {"a": {3: "b"}}]),
        "returns": np.array([1.5, np.nan]),
        "tensor": torch.arange(3, dtype=torch.int16),
        "numpy_state": np.random.default_rng(3).bit_generator.state,
        "empty": {},
        "dash-ed": 1,
    }
    await checkpointer.save(7, **values)
    restored = await checkpointer.restore()
    assert restored.step == 7
    assert restored.path == checkpointer.path(7)
    assert repr(restored.values) == repr(values)


async def test_state_with_everything_in_it(checkpointer: Checkpointer) -> None:
    class Anything:
        def __init__(self, state: Any) -> None:
            self.state = state

        def state_dict(self) -> Any:
            return self.state

        def load_state_dict(self, state: Any) -> None:
            self.state = state

    shared = torch.ones(2)
    saved = Anything({0: [None, float("nan"), (shared, {"$tensor": 1})], "shared": shared, (1, 2): -0.0, "b": b"\0"})
    loaded = Anything({})
    await checkpointer.save(1, anything=saved)
    saved.state = None
    await checkpointer.restore(anything=loaded)
    assert repr(loaded.state) == (
        "{0: [None, nan, (tensor([1., 1.]), {'$tensor': 1})], 'shared': tensor([1., 1.]), (1, 2): -0.0, 'b': b'\\x00'}"
    )
    assert loaded.state["shared"] is loaded.state[0][2][0]


async def test_module_gets_the_versions_of_its_classes(checkpointer: Checkpointer) -> None:
    seen = []

    class Versioned(nn.Linear):
        _version = 3

        def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
            seen.append(local_metadata.get("version"))
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    model = nn.Sequential(Versioned(2, 2))
    await checkpointer.save(0, model=model)
    await checkpointer.restore(model=model)
    assert seen == [3]


async def test_large_parts_go_into_several_files(checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "_FILE_BYTES", 100)
    tensors = [torch.full((size,), float(size)) for size in (1, 5, 20, 50, 0, 3)]
    path = await checkpointer.save(0, values=tensors)
    assert len(list(path.glob("data-*/values/*.safetensors"))) > 2
    restored = await checkpointer.restore()
    assert [tensor.tolist() for tensor in restored.values["values"]] == [tensor.tolist() for tensor in tensors]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
async def test_cuda(checkpointer: Checkpointer) -> None:
    def make() -> dict[str, Any]:
        model = nn.Linear(3, 2).cuda()
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}

    first, second = make(), make()
    first["model"](torch.ones(1, 3, device="cuda")).sum().backward()
    first["optimizer"].step()
    await checkpointer.save(0, **first, rng=True, value=torch.ones(1, device="cuda"))
    expected = torch.rand(3, device="cuda")
    restored = await checkpointer.restore(**second)
    assert torch.equal(torch.rand(3, device="cuda"), expected)
    assert torch.equal(second["model"].weight, first["model"].weight)
    assert second["optimizer"].state_dict()["state"][0]["exp_avg"].device.type == "cuda"
    assert restored.values["value"].device.type == "cpu"


# -- global generators ------------------------------------------------------------------------------------------------


def drawn() -> list[Hashable]:
    return [
        *torch.rand(3).tolist(),
        *torch.randn(3).tolist(),
        *np.random.random(3),
        np.random.standard_normal(),
        random.random(),
        random.gauss(0, 1),
    ]


def disturb() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)


@pytest.mark.parametrize("by", ["constructor", "argument"])
async def test_global_generators_are_saved_if_asked_for(tmp_path: Path, by: str) -> None:
    checkpointer = Checkpointer(tmp_path, rng=by == "constructor")
    drawn()  # leaves the second half of a pair of normal numbers behind
    await checkpointer.save(0, **({"rng": True} if by == "argument" else {}))
    expected = drawn()
    disturb()
    await Checkpointer(tmp_path).restore()
    assert drawn() == expected


async def test_global_generators_are_left_alone_otherwise(checkpointer: Checkpointer) -> None:
    run = Run(0)
    async with run.buffer:
        await run.train(3)
        disturb()
        expected = drawn()
        disturb()
        await checkpointer.save(0, **run.objects)
        await checkpointer.restore(**run.objects)
    assert drawn() == expected


async def test_global_generators_when_they_are_not_wanted(checkpointer: Checkpointer) -> None:
    model = nn.Linear(1, 1)
    await checkpointer.save(0, rng=True, model=model)
    disturb()
    expected = drawn()
    for options in ({"rng": False}, {"partial": True}):
        disturb()
        await checkpointer.restore(model=model, **options)
        assert drawn() == expected
    await checkpointer.restore(model=model, partial=True, rng=True)
    assert drawn() != expected


async def test_global_generators_that_were_not_saved(tmp_path: Path) -> None:
    await Checkpointer(tmp_path).save(0, n=1)
    for checkpointer, options in ((Checkpointer(tmp_path), {"rng": True}), (Checkpointer(tmp_path, rng=True), {})):
        with pytest.raises(CheckpointMismatchError, match="expected global generators"):
            await checkpointer.restore(**options)
    assert (await Checkpointer(tmp_path, rng=True).restore(rng=False)).values == {"n": 1}


async def test_generators_of_devices_that_are_not_here(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_rng_state_all", lambda: [torch.zeros(16, dtype=torch.uint8)])
        await checkpointer.save(0, rng=True)
    expected = drawn()
    disturb()
    with pytest.raises(CheckpointMismatchError, match=r"at most 0 CUDA devices.*has 1.*elastic=True"):
        await checkpointer.restore()
    await checkpointer.restore(elastic=True)
    assert drawn() == expected


# -- one point in time ------------------------------------------------------------------------------------------------


async def test_state_is_that_of_the_call(checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Stop()
    write = CheckpointWriter.write

    def slow(self: CheckpointWriter, *arguments: Any) -> None:
        stop()
        write(self, *arguments)

    run = Run(0)
    async with run.buffer, Crew() as crew:
        await run.train(5)
        weights = run.weights()
        monkeypatch.setattr(CheckpointWriter, "write", slow)
        value = {"list": [1, 2]}
        saving = crew.start(checkpointer.save(5, **run.objects, value=value))
        await stop.come.reached()
        value["list"].clear()
        expected = await run.train(20)
        stop.go.set()
        await within(saving)
    other = Run(1)
    restored = await checkpointer.restore(**other.objects)
    assert other.weights() == weights
    assert restored.values["value"] == {"list": [1, 2]}
    other.step = 5
    async with other.buffer:
        check_same(await other.train(20), expected)


@pytest.mark.parametrize("seed", range(3))
async def test_saves_beside_writers_and_consumers_fit_together(tmp_path: Path, seed: int) -> None:
    checkpointer = Checkpointer(tmp_path, keep=None)
    rng = random.Random(seed)
    left, right = make_buffer(1), make_buffer(2, prefetch=1)
    seen: dict[str, Any] = {"seen_left": Count(), "seen_right": Count()}

    async def write(buffer: ReplayBuffer) -> None:
        for number in range(10_000):
            await buffer.extend(items(5, number))

    async def consume(buffer: ReplayBuffer, count: Count) -> None:
        while True:
            batch = await buffer.sample()
            assert batch.number == count.value
            count.value += 1  # the update: nothing waits between the batch and here

    async with left, right, Crew() as crew:
        await left.extend(items(20, 5))
        await right.extend(items(20, 5))
        tasks = [crew.start(write(buffer)) for buffer in (left, right)]
        tasks += [crew.start(consume(left, seen["seen_left"])) for _ in range(2)]
        tasks += [crew.start(consume(right, seen["seen_right"]))]
        for step in range(8):
            await turns(rng.randrange(60))
            await checkpointer.save(step, left=left, right=right, **seen)
        assert not any(task.done() for task in tasks)
    numbers = []
    for step in checkpointer.steps():
        buffers: dict[str, Any] = {"left": make_buffer(3), "right": make_buffer(4, prefetch=1)}
        counts: dict[str, Any] = {"seen_left": Count(), "seen_right": Count()}
        await checkpointer.restore(step, **buffers, **counts)
        for name, buffer in buffers.items():
            async with buffer:
                assert (await buffer.sample()).number == counts[f"seen_{name}"].value
        numbers.append(counts["seen_left"].value)
    assert numbers == sorted(numbers)
    assert len(set(numbers)) > 1


async def test_snapshot_is_saved_as_the_buffer_it_was(checkpointer: Checkpointer) -> None:
    buffer = make_buffer()
    async with buffer:
        await buffer.extend(items(20, 0))
        await take(buffer, 4)
        snapshot = await buffer.snapshot()
        expected = await take(buffer, 10)
        await buffer.extend(items(20, 1))
    await checkpointer.save(0, replay=snapshot)
    other = make_buffer(1)
    await checkpointer.restore(replay=other)
    async with other:
        check_same(await take(other, 10), expected)


async def test_batches_that_hang_are_saved_as_tickets(checkpointer: Checkpointer) -> None:
    hang = asyncio.Event()

    async def slow(data: Any) -> Any:
        await hang.wait()
        return data

    def make() -> ReplayBuffer:
        return ReplayBuffer(TensorStorage(8), batch_size=2, prefetch=2, transform=slow, generator=seeded())

    buffer, other = make(), make()
    async with buffer, Crew() as crew:
        await buffer.extend(items(8, 0))
        waiting = crew.start(buffer.sample())
        await turns()
        await within(checkpointer.save(0, buffer=buffer, timeout=0.01))
        hang.set()
        first = fingerprint(await waiting)
    await checkpointer.restore(buffer=other)
    async with other:
        assert fingerprint(await other.sample()) == first


# -- several at once --------------------------------------------------------------------------------------------------


async def test_saves_from_two_tasks_take_turns(checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = 0
    commit = CheckpointWriter.commit

    def alone(self: CheckpointWriter, state: Any) -> None:
        nonlocal busy
        busy += 1
        assert busy == 1
        time.sleep(0.002)
        commit(self, state)
        busy -= 1

    monkeypatch.setattr(CheckpointWriter, "commit", alone)
    a, b = make_buffer(1), make_buffer(2)
    async with a, b:
        await a.extend(items(20, 0))
        await b.extend(items(20, 0))
        # The same buffers under swapped names: frozen in the order of names, they would wait for each other.
        saves = [checkpointer.save(step, x=(a, b)[step % 2], y=(b, a)[step % 2], n=step) for step in range(6)]
        paths = await within(asyncio.gather(*saves))
    assert paths == [checkpointer.path(step) for step in range(6)]
    assert checkpointer.steps() == [3, 4, 5]
    assert (await checkpointer.restore(x=make_buffer(), y=make_buffer())).values == {"n": 5}


async def test_same_step_twice_is_replaced(checkpointer: Checkpointer) -> None:
    for number in range(3):
        await checkpointer.save(1, n=number, tensor=torch.ones(number))
        assert (await checkpointer.restore()).values["n"] == number
    await asyncio.gather(*(checkpointer.save(1, n=number) for number in range(3, 8)))
    assert (await checkpointer.restore()).values == {"n": 7}
    assert checkpointer.steps() == [1]
    assert len(list(checkpointer.path(1).iterdir())) == 2


def test_one_object_serves_one_loop_after_the_other(checkpointer: Checkpointer) -> None:
    async def both() -> None:
        await asyncio.gather(*(checkpointer.save(step, n=step) for step in range(4)))
        await asyncio.gather(*(checkpointer.restore() for _ in range(4)))

    for _ in range(3):
        asyncio.run(both())


async def test_no_checkpoint_goes_while_it_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(tmp_path, keep=1)
    await checkpointer.save(1, tensor=torch.ones(1), n=1)
    stop = Stop()
    read = CheckpointReader.read

    def slow(self: CheckpointReader, name: str) -> dict[str, torch.Tensor]:
        stop()
        return read(self, name)

    monkeypatch.setattr(CheckpointReader, "read", slow)
    async with Crew() as crew:
        restoring = crew.start(checkpointer.restore())
        await stop.come.reached()
        saving: list[Any] = [crew.start(checkpointer.save(step, n=step)) for step in (1, 2)]
        await turns(50)
        assert not any(task.done() for task in saving)
        stop.go.set()
        assert (await within(restoring)).values["n"] == 1
        await within(asyncio.gather(*saving))
    assert checkpointer.steps() == [2]


async def test_restoring_beside_consumers_shows_none_an_old_model(checkpointer: Checkpointer) -> None:
    buffer, count = make_buffer(), Count(3)
    async with buffer:
        await buffer.extend(items(20, 0))
        await take(buffer, 3)
        await checkpointer.save(0, buffer=buffer, count=count)
    live, old = make_buffer(7, min_size=30), Count(-1)
    seen: list[tuple[int, int]] = []

    async def consume() -> None:
        seen.append(((await live.sample()).number, old.value))

    async with live, Crew() as crew:
        tasks: list[Any] = [crew.start(consume()) for _ in range(3)]
        await turns()
        await checkpointer.restore(buffer=live, count=old)
        await within(asyncio.gather(*tasks))
    assert seen == [(3, 3), (4, 3), (5, 3)]


# -- what is kept -----------------------------------------------------------------------------------------------------


async def test_the_newest_are_kept(tmp_path: Path) -> None:
    for keep, expected in ((1, [9]), (3, [7, 8, 9]), (20, [*range(10)]), (None, [*range(10)])):
        checkpointer = Checkpointer(tmp_path / str(keep), keep=keep)
        for step in range(10):
            await checkpointer.save(step, n=step)
            assert checkpointer.latest() == step
        assert checkpointer.steps() == expected
        assert len(list((tmp_path / str(keep)).iterdir())) == len(expected)


async def test_steps_of_any_size_in_order(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep=None)
    for step in (1_000_000, 5, 12_345_678, 999_999):
        assert (await checkpointer.save(step, n=step)).name == f"step-{step:06}"
    for stray in (
        "step-5",
        "step-0000005",
        "step-00000x",
        "step-\u0660\u0660\u0660\u0660\u0660\u0667",
        "other",
        ".step-000009",
    ):
        (tmp_path / stray).mkdir()
    (tmp_path / "step-000077").write_text("a file")
    assert checkpointer.steps() == [5, 999_999, 1_000_000, 12_345_678]
    assert (await checkpointer.restore()).values == {"n": 12_345_678}


async def test_the_one_just_written_stays_though_higher_ones_are_there(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep=2)
    for step in (10, 20, 5, 7):
        await checkpointer.save(step, n=step)
        assert (await checkpointer.restore(step)).values == {"n": step}
    assert checkpointer.steps() == [7, 10, 20]


async def test_nothing_goes_before_the_new_one_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(tmp_path, keep=1)
    await checkpointer.save(1, n=1)

    def fail(self: CheckpointWriter, state: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(CheckpointWriter, "commit", fail)
    with pytest.raises(OSError, match="disk full"):
        await checkpointer.save(2, n=2)
    assert checkpointer.steps() == [1]
    assert os.listdir(tmp_path) == ["step-000001"]


async def test_one_that_cannot_be_removed_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = Checkpointer(tmp_path, keep=1)
    await checkpointer.save(1, n=1)
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name == "step-000001":
            raise PermissionError("no")
        return rename(self, target)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "asyncbuf"):
        patch.setattr(Path, "rename", refuse)
        await checkpointer.save(2, n=2)
    assert "step-000001 could not be removed" in caplog.text
    assert (await checkpointer.restore()).values == {"n": 2}
    await checkpointer.save(3, n=3)
    assert checkpointer.steps() == [3]


async def test_leftovers_are_swept_by_the_first_save_only(tmp_path: Path) -> None:
    stale = tmp_path / f".step-000001.tmp-{'0f' * 8}"
    stale.mkdir()
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.latest() is None
    assert stale.exists()
    await checkpointer.save(1, n=1)
    assert os.listdir(tmp_path) == ["step-000001"]
    stale.mkdir()
    await checkpointer.save(2, n=2)
    assert stale.exists()


async def test_damaged_directory_is_no_checkpoint_to_keep(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep=2)
    await checkpointer.save(1, n=1)
    (tmp_path / "step-000002").mkdir()
    for step in (3, 4):
        await checkpointer.save(step, n=step)
    assert checkpointer.steps() == [2, 3, 4]


# -- damage -----------------------------------------------------------------------------------------------------------


async def saved_twice(checkpointer: Checkpointer) -> Run:
    run = Run(0)
    async with run.buffer:
        await run.train(5)
        await checkpointer.save(5, **run.objects, extra={"t": torch.ones(2)}, rng=True)
        await run.train(5)
        await checkpointer.save(10, **run.objects, extra={"t": torch.ones(2)}, rng=True)
    return run


@dataclasses.dataclass
class Untouched:
    """A run and its twin. What was tried with the run must not show."""

    run: Run
    twin: Run

    @classmethod
    async def start(cls, **settings: Any) -> Untouched:
        run, twin = Run(3, **settings), Run(3, **settings)
        for each in (run, twin):
            await each.buffer.open()
            await each.train(4)
        return cls(run, twin)

    async def check(self) -> None:
        try:
            check_same(await self.run.train(8), await self.twin.train(8))
            assert self.run.weights() == self.twin.weights()
        finally:
            await self.run.buffer.aclose()
            await self.twin.buffer.aclose()


async def test_damage_anywhere_is_refused_and_nothing_changes(checkpointer: Checkpointer) -> None:
    await saved_twice(checkpointer)
    state = await Untouched.start()
    disturb()
    expected = drawn()
    disturb()
    files = [file for file in checkpointer.path(10).rglob("*") if file.is_file()]
    assert {file.parent.name for file in files} >= {"model", "optimizer", "extra", "rng", "storage", "prefetch"}
    rng = random.Random(0)
    for file in files:
        content = file.read_bytes()
        flipped = bytearray(content)
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        for damage in (bytes(flipped), content[:-1], None):
            file.unlink() if damage is None else file.write_bytes(damage)
            for step in (None, 10):
                with pytest.raises(CheckpointError, match="expected") as caught:
                    await checkpointer.restore(step, **state.run.objects)
                assert not isinstance(caught.value, CheckpointNotFoundError)
                assert ("restore(step=...) takes an older one, of [5]" in str(caught.value)) == (step is None)
        file.write_bytes(content)
    assert drawn() == expected
    await state.check()
    await checkpointer.restore(**Run(7).objects)


async def test_an_older_one_is_restored_if_it_is_asked_for(checkpointer: Checkpointer) -> None:
    await saved_twice(checkpointer)
    (checkpointer.path(10) / "manifest.json").unlink()
    run = Run(1)
    with pytest.raises(CheckpointCorruptError, match=r"with a manifest, found none.*older one, of \[5\]"):
        await checkpointer.restore(**run.objects)
    assert (await checkpointer.restore(5, **run.objects)).step == 5


async def test_damage_of_a_later_buffer_changes_no_earlier_one(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, count = make_buffer(1), make_buffer(2), Count(1)
    for buffer in (a, b):
        await buffer.extend(items(20, 0))
    await checkpointer.save(0, a=a, b=b, count=count)
    (file,) = checkpointer.path(0).glob("data-*/b/storage/*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    c, d, other = make_buffer(3), make_buffer(4), Count(2)
    restored: list[ReplayBuffer] = []
    restore = ReplayBuffer.restore

    async def noted(self: ReplayBuffer, *arguments: Any, **options: Any) -> None:
        restored.append(self)
        await restore(self, *arguments, **options)

    monkeypatch.setattr(ReplayBuffer, "restore", noted)
    for b_first in (False, True):
        objects: dict[str, Any] = {"b": d, "a": c} if b_first else {"a": c, "b": d}
        with pytest.raises(CheckpointCorruptError, match="digest"):
            await checkpointer.restore(**objects, count=other)
        assert (len(c), len(d), other.value) == (0, 0, 2)
        assert c not in restored  # it was not even tried


# -- mismatches -------------------------------------------------------------------------------------------------------


async def test_parts_must_be_the_same(checkpointer: Checkpointer) -> None:
    buffer, count = make_buffer(), Count(1)
    await checkpointer.save(0, buffer=buffer, count=count, extra=1)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, r"no object given: \['buffer', 'count'\]"),
        ({"count": Count()}, r"no object given: \['buffer'\]"),
        ({"buffer": buffer, "count": Count(), "model": Count()}, r"not in the checkpoint: \['model'\]"),
        ({"buffer": buffer, "counter": Count()}, r"\['counter'\], no object given: \['count'\]"),
        ({"buffer": buffer, "count": Count(), "extra": Count()}, r"\['extra'\].*plain values.*: \['extra'\]"),
        ({"buffer": Count(), "count": Count()}, "buffer: expected a ReplayBuffer, found an object"),
        ({"buffer": buffer, "count": make_buffer()}, "count: expected an object .* found a ReplayBuffer"),
        ({"buffer": await buffer.snapshot(), "count": Count()}, "buffer: expected a ReplayBuffer"),
    ]
    for objects, message in wrong:
        with pytest.raises(CheckpointMismatchError, match=message) as caught:
            await checkpointer.restore(**objects)
        assert str(checkpointer.path(0)) in str(caught.value)


async def test_partial_leaves_parts_out(checkpointer: Checkpointer) -> None:
    run = Run(0)
    async with run.buffer:
        await run.train(3)
        await checkpointer.save(3, **run.objects, extra=1)
    other = Run(1)
    restored = await checkpointer.restore(partial=True, model=other.model)
    assert other.weights() == run.weights()
    assert restored.values == {"extra": 1}
    assert len(other.buffer) == 0
    with pytest.raises(CheckpointMismatchError, match="nonsense"):
        await checkpointer.restore(partial=True, nonsense=other.model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"prefetch": 5}, "depth.*elastic"), ({"batch_size": 4}, "batch_size.*elastic"), ({"capacity": 65}, "capacity")],
)
async def test_buffer_that_does_not_fit_changes_nothing(
    checkpointer: Checkpointer, settings: dict[str, Any], message: str
) -> None:
    await saved_twice(checkpointer)
    state = await Untouched.start(**settings)
    with pytest.raises(CheckpointMismatchError, match=message):
        await checkpointer.restore(**state.run.objects)
    await state.check()


async def test_elastic_takes_another_depth(checkpointer: Checkpointer) -> None:
    run = Run(0, prefetch=3)
    async with run.buffer:
        await run.buffer.extend(items(20, 0))
        await take(run.buffer, 2)
        await checkpointer.save(0, **run.objects)
        expected = await take(run.buffer, 12)
    for prefetch in (0, 1, 6):
        other = Run(1, prefetch=prefetch)
        await checkpointer.restore(elastic=True, **other.objects)
        async with other.buffer:
            check_same(await take(other.buffer, 12), expected)


async def test_other_model_changes_nothing(checkpointer: Checkpointer) -> None:
    await saved_twice(checkpointer)
    state = await Untouched.start()
    other = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
    before = [bits(tensor) for tensor in other.state_dict().values()]
    with pytest.raises(CheckpointMismatchError, match=r"(?s)model: expected a state that it takes.*size mismatch"):
        await checkpointer.restore(**{**state.run.objects, "model": other})
    assert [bits(tensor) for tensor in other.state_dict().values()] == before
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))])
    with pytest.raises(CheckpointMismatchError, match="optimizer: expected a state that it takes"):
        await checkpointer.restore(**{**state.run.objects, "optimizer": optimizer})
    await state.check()


async def test_what_is_no_run_is_refused(checkpointer: Checkpointer) -> None:
    buffer = make_buffer()
    await buffer.extend(items(9, 0))
    await buffer.save(checkpointer.path(1))
    with pytest.raises(CheckpointMismatchError, match=r"expected the checkpoint of a run \(asyncbuf\.run\), found"):
        await checkpointer.restore(buffer=buffer)
    await checkpointer.save(2, n=1)
    checkpointer.path(2).rename(checkpointer.path(3))
    with pytest.raises(CheckpointMismatchError, match="expected the checkpoint of step 3, found 2"):
        await checkpointer.restore()
    for state, error in (
        ({"format": "asyncbuf.run", "version": 2}, CheckpointVersionError),
        ({"format": "asyncbuf.run", "version": True}, CheckpointVersionError),
        ({"format": "asyncbuf.run", "version": 1, "step": 4}, CheckpointCorruptError),
        (
            {"format": "asyncbuf.run", "version": 1, "step": 4, "parts": {"a": {"kind": "b", "state": 1}}},
            CheckpointError,
        ),
        (
            {"format": "asyncbuf.run", "version": 1, "step": 4, "parts": {"a": {"kind": [], "state": 1}}},
            CheckpointError,
        ),
        ([], CheckpointMismatchError),
    ):
        with CheckpointWriter(checkpointer.path(4)) as writer:
            writer.commit(state)
        with pytest.raises(error, match="expected"):
            await checkpointer.restore()


async def test_no_checkpoint(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "nowhere")
    assert checkpointer.steps() == []
    assert checkpointer.latest() is None
    with pytest.raises(CheckpointNotFoundError, match="nowhere: expected a checkpoint, found none"):
        await checkpointer.restore(count=Count())
    assert not (tmp_path / "nowhere").exists()
    await checkpointer.save(4, n=1)
    with pytest.raises(
        CheckpointNotFoundError, match=r"step-000003: expected a checkpoint, found those of steps \[4\]"
    ):
        await checkpointer.restore(3)


# -- all or nothing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
async def test_objects_before_the_one_that_fails_are_put_back(
    checkpointer: Checkpointer, error: type[BaseException]
) -> None:
    await checkpointer.save(0, a=Count(1), b=Count(2), c=Count(3))
    a, b, c = Count(10), Fragile(20, hates={2}, error=error), Count(30)
    with pytest.raises(CheckpointMismatchError if error is ValueError else error, match="not that one") as caught:
        await checkpointer.restore(a=a, b=b, c=c)
    if error is ValueError:
        assert str(caught.value).startswith("b: expected a state that it takes")
        assert isinstance(caught.value.__cause__, ValueError)
    assert (a.value, b.value, b.half, c.value, c.loads) == (10, 20, 20, 30, 0)


async def test_object_that_fails_beside_a_buffer_changes_nothing(checkpointer: Checkpointer) -> None:
    run = Run(0)
    async with run.buffer:
        await run.train(5)
        await checkpointer.save(0, **run.objects, count=Count(1))
    state = await Untouched.start()
    with pytest.raises(CheckpointMismatchError, match="count: expected a state that it takes"):
        await checkpointer.restore(**state.run.objects, count=Fragile(hates={1}))
    await state.check()


async def test_buffers_before_the_one_that_fails_are_put_back(checkpointer: Checkpointer) -> None:
    saved: dict[str, Any] = {"a": make_buffer(1), "b": make_buffer(2)}
    for buffer in saved.values():
        await buffer.extend(items(20, 0))
    await checkpointer.save(0, **saved, count=Count(1))
    a, b, count = make_buffer(3), make_buffer(4, prefetch=1), Count(5)
    twin = make_buffer(3)
    for buffer in (a, twin):
        await buffer.extend(items(11, 6))
    with pytest.raises(CheckpointMismatchError, match="depth"):
        await checkpointer.restore(a=a, b=b, count=count)
    assert count.value == 5
    async with a, twin:
        check_same(await take(a, 12), await take(twin, 12))


async def test_object_that_does_not_take_back_its_own_state_is_named(checkpointer: Checkpointer) -> None:
    buffer = make_buffer()
    await checkpointer.save(0, a=Count(1), b=Count(2), buffer=buffer)
    a, b = Fragile(10, hates={10}), Count(20)
    with pytest.raises(CheckpointError, match="a: expected that it takes back its own state"):
        await checkpointer.restore(a=a, b=b, buffer=buffer)
    assert b.value == 20


async def test_failed_save_leaves_the_run_as_it_was(checkpointer: Checkpointer) -> None:
    class Broken(Count):
        def state_dict(self) -> dict[str, Any]:
            raise ArithmeticError("broken")

    class Async(Count):
        async def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
            return {}

    wrong: list[tuple[Any, type[Exception], str]] = [
        (Broken(), ArithmeticError, "broken"),
        (Async(), TypeError, "wrong: expected a state_dict that is not async, found that of Async"),
        ({"a": [1, object()]}, CheckpointError, r"wrong/a/1: expected"),
        (Count, CheckpointError, r"wrong: expected .* found builtins.type"),
        (Count({1, 2}), CheckpointError, r"wrong/value: expected .* found builtins.set"),  # type: ignore[arg-type]
    ]
    state = await Untouched.start()
    for part, error, message in wrong:
        with pytest.raises(error, match=message):
            await checkpointer.save(0, **state.run.objects, wrong=part)
    assert checkpointer.steps() == []
    await state.check()


# -- cancelled --------------------------------------------------------------------------------------------------------


async def test_save_cancelled_at_each_of_its_files(checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(0)
    names: list[str] = []
    stop, at = Stop(), -1
    write = CheckpointWriter.write

    def stopping(self: CheckpointWriter, name: str, tensors: Any) -> None:
        names.append(name)
        if len(names) == at:
            stop()
        write(self, name, tensors)

    monkeypatch.setattr(CheckpointWriter, "write", stopping)
    async with run.buffer:
        await run.train(5)
        await checkpointer.save(1, **run.objects, n=1)
        for at in range(1, len(names) + 1):
            for step in (1, 2):
                names.clear()
                stop = Stop()
                saving = asyncio.create_task(checkpointer.save(step, **run.objects, n=2))
                await stop.come.reached()
                saving.cancel()
                await turns()
                assert not saving.done()  # its thread is still at work
                stop.go.set()
                with pytest.raises(asyncio.CancelledError):
                    await within(saving)
                assert len(names) <= at + 1
                assert [entry.name for entry in checkpointer.path(1).parent.iterdir()] == ["step-000001"]
        at = -1
        other = Run(1)
        assert (await checkpointer.restore(**other.objects)).values == {"n": 1}
        await run.train(3)
        await checkpointer.save(2, **run.objects, n=2)
    assert (await checkpointer.restore(**other.objects)).values == {"n": 2}


@pytest.mark.parametrize("seed", range(2))
async def test_save_cancelled_at_any_moment(checkpointer: Checkpointer, seed: int) -> None:
    rng = random.Random(seed)
    run, twin = Run(0), Run(0)
    async with run.buffer, twin.buffer:
        await checkpointer.save(0, **run.objects, n=0)
        for number in range(1, 25):
            check_same(await run.train(1), await twin.train(1))
            saving = asyncio.create_task(checkpointer.save(rng.choice([0, number]), **run.objects, n=number))
            await turns(rng.randrange(12))
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random() * 0.02)
            await dismiss([saving])
            restored = await checkpointer.restore(partial=True)
            committed = not saving.cancelled() or restored.values["n"] == number
            assert committed or restored.values["n"] < number
    folder = checkpointer.path(0).parent
    assert all(entry.name.startswith("step-") for entry in folder.iterdir())
    for step in checkpointer.steps():
        await checkpointer.restore(step, **Run(1).objects)


async def test_restore_cancelled_while_it_reads_changes_nothing(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await saved_twice(checkpointer)
    state = await Untouched.start()
    read = CheckpointReader.read
    names: list[str] = []
    stop, at = Stop(), -1

    def stopping(self: CheckpointReader, name: str) -> dict[str, torch.Tensor]:
        names.append(name)
        if len(names) == at:
            stop()
        return read(self, name)

    monkeypatch.setattr(CheckpointReader, "read", stopping)
    await checkpointer.restore(**Run(1).objects)
    for at in range(1, len(names) + 1):  # noqa: B007 -- the reader looks at it
        names.clear()
        stop = Stop()
        restoring = asyncio.create_task(checkpointer.restore(**state.run.objects))
        await stop.come.reached()
        restoring.cancel()
        stop.go.set()
        with pytest.raises(asyncio.CancelledError):
            await within(restoring)
    await state.check()


# -- killed -----------------------------------------------------------------------------------------------------------


async def _save_until_killed(root: Path) -> None:
    checkpointer = Checkpointer(root, keep=2, rng=True)
    run = Run(0)
    if checkpointer.latest() is not None:
        run.step = (await checkpointer.restore(**run.objects)).values["progress"]
    async with run.buffer:
        while True:
            await run.train(1)
            await checkpointer.save(run.step, **run.objects, progress=run.step)


async def _check_latest(root: Path, expected: list[Any]) -> None:
    checkpointer = Checkpointer(root)
    steps = checkpointer.steps()
    for step in steps:
        run = Run(1)
        restored = await checkpointer.restore(step, **run.objects)
        assert restored.values["progress"] == step
        assert json.loads(json.dumps(repr(run.weights()))) == expected[step]
    print(json.dumps({"steps": steps, "entries": sorted(os.listdir(root)) if root.exists() else []}), flush=True)


async def _weights(steps: int) -> list[str]:
    run = Run(0)
    seen = [repr(run.weights())]
    async with run.buffer:
        for _ in range(steps):
            await run.train(1)
            seen.append(repr(run.weights()))
    return seen


def _in_child(action: Callable[[], Any]) -> int:
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def main() -> None:
    root, kills = Path(sys.argv[1]), int(sys.argv[2])
    os.fsync = lambda fd: None
    torch.set_num_threads(1)
    rng = random.Random(int(sys.argv[3]))
    expected = asyncio.run(_weights(kills * 20))
    for _ in range(kills):
        child = _in_child(lambda: asyncio.run(_save_until_killed(root)))
        time.sleep(rng.random() * 0.15)
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        checked = _in_child(lambda: asyncio.run(_check_latest(root, expected)))
        assert os.waitstatus_to_exitcode(os.waitpid(checked, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_moment(tmp_path: Path) -> None:
    kills = 15
    process = subprocess.run(
        [sys.executable, "-m", __name__, str(tmp_path / "root"), str(kills), "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    reports = [json.loads(line) for line in process.stdout.splitlines()]
    latest = [max(report["steps"], default=0) for report in reports]
    assert len(reports) == kills
    assert latest == sorted(latest)
    assert latest[-1] >= 3  # it got somewhere, or nothing was tested
    # At most what the last one left, beside two checkpoints and one that was not pruned yet.
    assert len(reports[-1]["entries"]) <= 4


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (1.5, TypeError)])
def test_keep_is_checked(tmp_path: Path, keep: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="keep: expected"):
        Checkpointer(tmp_path, keep=keep)


@pytest.mark.parametrize(("step", "error"), [(-1, ValueError), (True, TypeError), (1.5, TypeError), ("1", TypeError)])
async def test_step_is_checked(checkpointer: Checkpointer, step: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        await checkpointer.save(step, n=1)
    await checkpointer.save(1, n=1)
    with pytest.raises(error):
        await checkpointer.restore(step)


async def test_step_may_be_of_numpy_or_torch(checkpointer: Checkpointer) -> None:
    assert (await checkpointer.save(np.int64(3), n=1)).name == "step-000003"  # type: ignore[arg-type]
    assert (await checkpointer.save(torch.tensor(4), n=1)).name == "step-000004"  # type: ignore[arg-type]
    restored = await checkpointer.restore(np.int64(4))  # type: ignore[arg-type]
    assert type(restored.step) is int


@pytest.mark.parametrize("name", ["a b", "", "../x", "a/b", "é", "a.b", "elastic", "partial"])
async def test_names_are_checked(checkpointer: Checkpointer, name: str) -> None:
    parts: dict[str, Any] = {name: 1}
    with pytest.raises(ValueError, match="expected the name of a part"):
        await checkpointer.save(1, **parts)


async def test_same_buffer_twice_is_refused(checkpointer: Checkpointer) -> None:
    buffer = make_buffer()
    for call in (checkpointer.save(1, a=buffer, b=buffer), checkpointer.restore(1, a=buffer, b=buffer)):
        with pytest.raises(ValueError, match="each buffer once, found the same as a and b"):
            await within(call)


async def test_plain_values_are_not_given_to_restore(checkpointer: Checkpointer) -> None:
    await checkpointer.save(1, extra={"a": 1})
    with pytest.raises(TypeError, match=r"extra: expected .* found dict; plain values come back in the result"):
        await checkpointer.restore(extra={})


async def test_something_else_in_its_place_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "step-000001").mkdir()
    (tmp_path / "step-000001" / "thesis.txt").write_text("precious")
    with pytest.raises(CheckpointError, match="step-000001: expected a checkpoint or nothing"):
        await Checkpointer(tmp_path).save(1, n=1)
    assert not is_checkpoint(tmp_path / "step-000001")


def test_repr(tmp_path: Path) -> None:
    assert repr(Checkpointer(tmp_path, keep=None, rng=True)) == f"<Checkpointer {tmp_path}, keep=None, rng=True>"


if __name__ == "__main__":
    main()


# -- others at work in the same place ---------------------------------------------------------------------------------


async def test_the_latest_checkpoint_may_be_removed_while_it_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer, other = Checkpointer(tmp_path, keep=1), Checkpointer(tmp_path, keep=1)
    count = Count()
    await checkpointer.save(1, count=count)
    chosen = []
    choose = checkpointer._chosen

    def choosing(step: int | None) -> int:
        chosen.append(choose(step))
        if len(chosen) < 4:  # another saver puts a later one in its place, before it is opened
            count.value = 10 * len(chosen)
            run = asyncio.new_event_loop()
            thread = threading.Thread(target=lambda: run.run_until_complete(other.save(chosen[-1] + 1, count=count)))
            thread.start()
            thread.join()
            run.close()
        return chosen[-1]

    monkeypatch.setattr(checkpointer, "_chosen", choosing)
    into = Count()
    assert (await within(checkpointer.restore(count=into))).step == 4
    assert chosen == [1, 2, 3, 4]
    assert into.value == 30
    monkeypatch.undo()
    with pytest.raises(CheckpointNotFoundError):
        await checkpointer.restore(1, count=into)


async def test_a_listing_that_misses_what_is_there_is_taken_again(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checkpointer.save(3, count=Count())
    listings = iter([[], [], [3]])
    monkeypatch.setattr(checkpointer, "steps", lambda: next(listings, [3]))
    assert (await checkpointer.restore(count=Count())).step == 3


async def test_saves_of_the_same_buffers_by_other_names_do_not_wait_for_each_other(tmp_path: Path) -> None:
    one, two = make_buffer(1), make_buffer(2)
    async with one, two:
        for buffer in (one, two):
            await buffer.extend(items(20, 1))
        first, second = Checkpointer(tmp_path / "1"), Checkpointer(tmp_path / "2")
        for step in range(5):
            saves = first.save(step, a=one, b=two), second.save(step, a=two, b=one)
            await within(asyncio.gather(*saves))
    assert first.latest() == second.latest() == 4
