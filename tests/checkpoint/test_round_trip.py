"""Whole runs: saved and restored, they go on to the bit."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from asyncbuf import SamplerWithoutReplacement
from asyncbuf.checkpoint import _components as parts_module
from asyncbuf.checkpoint.checkpointer import Checkpointer, RestoredCheckpoint
from tests.checkpoint.helpers import Run, bits, items
from tests.helpers import check_same

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

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
