"""The cases of the golden checkpoints: how each buffer is built, and how its stream goes on after the save.

Only the public API of asyncbuf is used. ``CASES[name].build()`` makes a fresh buffer that is not open; ``go_on`` plays
the 12 batches that follow the save, for the original as well as for a restored buffer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncbuf import (
    Batch,
    ListStorage,
    PrefetchError,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SamplerWithoutReplacement,
    Storage,
    TensorStorage,
    register_type,
)

STEPS = 12
SECONDS = 30.0
CAPACITY = 24
BATCH = 4


# -- types of the user ------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    obs: Any
    reward: Any


@dataclasses.dataclass
class Settings:
    rate: float
    sizes: tuple[int, ...]


class Phase(enum.Enum):
    COLD = 1
    WARM = 2


register_type(Step, name="golden.Step")
register_type(Settings, name="golden.Settings")
register_type(Phase, name="golden.Phase")


# -- items: numbered from ``start``, so that what a row holds follows from its number alone -----------------------------


def flat(count: int, start: int = 0) -> Any:
    n = torch.arange(start, start + count)
    return {"obs": n[:, None] + torch.tensor([0.0, 0.25]), "act": n}


def nested(count: int, start: int = 0) -> Any:
    n = torch.arange(start, start + count)
    return {
        "obs": {
            "image": (n[:, None, None] + torch.arange(4).reshape(2, 2)).to(torch.uint8),
            "half": (n[:, None] / 8 + torch.tensor([0.0, 1.0])).to(torch.bfloat16),
        },
        "flag": n % 3 == 0,
        "wave": torch.complex(n.float(), -n.float()),
        "deep": ({"count": n}, n.double() / 3),
    }


def named(count: int, start: int = 0) -> Any:
    n = torch.arange(start, start + count)
    return Step(n[:, None].float().repeat(1, 2), n / 4)


def tensordicts(count: int, start: int = 0) -> Any:
    from tensordict import TensorDict

    n = torch.arange(start, start + count)
    later = TensorDict({"obs": n[:, None] + torch.tensor([0.5, 1.5]), "done": n % 5 == 0}, batch_size=[count])
    return TensorDict({"act": n, "next": later}, batch_size=[count])


def vectors(count: int, start: int = 0) -> Any:
    n = torch.arange(start, start + count)
    return torch.stack([(n * 7 % 13).float(), (n * 5 % 11).float(), n.float()], 1)


def texts(count: int, start: int = 0) -> Any:
    return [
        {"ids": torch.arange(i, i + 3), "text": f"item {i}", "score": i / 8, "n": i}
        for i in range(start, start + count)
    ]


def ragged(count: int, start: int = 0) -> Any:
    return [Step(torch.arange(i, i + 1 + i % 4), (f"r{i}", float(i))) for i in range(start, start + count)]


def padded(items: list[Any]) -> Any:
    """A collate function for ``ragged``."""
    ids = torch.nn.utils.rnn.pad_sequence([item.obs for item in items], batch_first=True, padding_value=-1)
    return {
        "ids": ids,
        "names": [item.reward[0] for item in items],
        "reward": torch.tensor([i.reward[1] for i in items]),
    }


# -- transforms -------------------------------------------------------------------------------------------------------


class Control:
    """What ``make_golden.py`` does to the parts of a buffer; does nothing by itself.

    Attributes:
        hold: an event for which ``Held`` waits; None if it does not.
        fail: how often ``Flaky`` and ``FlakyStorage`` raise from now on.
        stateful: the transform whose state is compared in the end; None if there is none.
        model, optimizer: of the run.
    """

    def __init__(self) -> None:
        self.hold: asyncio.Event | None = None
        self.fail = 0
        self.stateful: Any = None
        self.model: Any = None
        self.optimizer: Any = None

    def trip(self) -> None:
        if self.fail:
            self.fail -= 1
            raise RuntimeError("tripped")


def noisy(data: Any, *, generator: torch.Generator) -> Any:
    """Random numbers that belong to the ticket."""
    count = len(data["act"])
    return {**data, "noise": torch.rand(count, generator=generator)}


def doubled(data: Any) -> Any:
    return {**data, "double": data["act"] * 2}


class Held:
    """An async transform that hangs while it is held."""

    def __init__(self, control: Control) -> None:
        self.control = control

    async def __call__(self, data: Any) -> Any:
        if self.control.hold is not None:
            await self.control.hold.wait()
        return {**data, "late": data["act"] + 1000}


class Flaky:
    """A transform that raises when it is told so."""

    def __init__(self, control: Control) -> None:
        self.control = control

    def __call__(self, data: Any) -> Any:
        self.control.trip()
        return {**data, "sure": -data["act"]}


class Counting:
    """A transform with a state: number of batches, and the sum of all that it saw."""

    def __init__(self) -> None:
        self.seen = 0
        self.total = torch.zeros(2, dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "total": self.total.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.total = state["seen"], state["total"].clone()

    def __call__(self, data: Any) -> Any:
        self.seen += 1
        self.total = self.total + data["obs"].double().sum(0)
        count = len(data["act"])
        return {**data, "seen": torch.full((count,), self.seen), "total": self.total.repeat(count, 1)}


class FlakyStorage(TensorStorage):
    """Cannot gather when it is told so: the ticket stays without its rows."""

    control: Control | None = None

    def gather(self, indices: torch.Tensor) -> Any:
        if self.control is not None:
            self.control.trip()
        return super().gather(indices)


# -- cases ------------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """How a buffer is built, and how its stream goes on.

    Attributes:
        name: also the folder under ``data``.
        way: ``dir`` (buffer.save), ``state`` (state.pt, torch.save of a state dict) or ``run`` (Checkpointer).
        items: makes items from a count and the number of the first.
        sampler, storage, transforms, collate: make the parts.
        batch_size, prefetch, workers: as in ReplayBuffer.
        extends: before which of the 12 batches how many items are written.
        sizes: which of the 12 batches are asked for with ``sample(size)``.
        first: number of the first item that is written after the save.
    """

    name: str
    way: str
    items: Callable[..., Any] = flat
    sampler: Callable[[], Sampler] = RandomSampler
    storage: Callable[[int], Storage] = TensorStorage
    transforms: Callable[[Control], list[Any]] = lambda control: []
    collate: Callable[[Any], Any] | None = None
    batch_size: int | None = BATCH
    prefetch: int = 0
    workers: int = 1
    extends: Mapping[int, int] = {}
    sizes: Mapping[int, int] = {}
    first: int = 500

    def build(self, control: Control | None = None, seed: int = 0) -> ReplayBuffer:
        """A fresh buffer without items, not open."""
        control = Control() if control is None else control
        storage = self.storage(CAPACITY)
        if isinstance(storage, FlakyStorage):
            storage.control = control
        transforms = self.transforms(control)
        control.stateful = next((one for one in transforms if isinstance(one, Counting | torch.nn.Module)), None)
        return ReplayBuffer(
            storage,
            sampler=self.sampler(),
            batch_size=self.batch_size,
            prefetch=self.prefetch,
            workers=self.workers,
            transform=transforms,
            collate_fn=self.collate,
            generator=torch.Generator().manual_seed(1234 + seed),
        )


def passes(shuffle: bool = True, drop_last: bool = False) -> Callable[[], Sampler]:
    return lambda: SamplerWithoutReplacement(shuffle=shuffle, drop_last=drop_last)


def _all() -> list[Case]:
    some = {2: 3, 5: 1, 6: 9}
    return [
        # storages, depths, workers, how full the ring is
        Case("flat-p0-w1-empty", "dir", extends={0: 6, 4: 5}),
        Case("flat-p4-w4-empty", "state", prefetch=4, workers=4, extends={0: 6, 4: 5}),
        Case("flat-p1-w1-wrapped", "dir", prefetch=1, extends=some),
        Case(
            "flat-p4-w4-wrapped-noisy-closed",
            "state",
            transforms=lambda c: [noisy],
            prefetch=4,
            workers=4,
            extends=some,
        ),
        Case("flat-p4-w1-skipped-flushed", "dir", prefetch=4, extends={3: 2}),
        Case("flat-p1-w4-emptied", "state", prefetch=1, workers=4, extends={1: 2}),
        Case("nested-p4-w1-partial", "dir", nested, prefetch=4, extends=some),
        Case("nested-p1-w4-wrapped-passes", "state", nested, passes(), prefetch=1, workers=4),
        Case("named-p1-w1-wrapped", "dir", named, prefetch=1, extends=some),
        Case("tensordict-p4-w4-wrapped", "dir", tensordicts, prefetch=4, workers=4, extends=some),
        Case("list-p1-w1-partial", "state", texts, storage=ListStorage, prefetch=1, extends=some),
        Case(
            "list-p4-w4-wrapped-passes-ragged",
            "dir",
            ragged,
            passes(),
            ListStorage,
            collate=padded,
            prefetch=4,
            workers=4,
            extends=some,
        ),
        # passes
        Case("passes-shuffle-keep-p4-w4", "dir", flat, passes(), transforms=lambda c: [noisy], prefetch=4, workers=4),
        Case("passes-shuffle-drop-p1-w1", "dir", flat, passes(drop_last=True), prefetch=1, extends=some),
        Case("passes-order-keep-p0-w1", "state", flat, passes(shuffle=False), extends=some),
        Case("passes-order-drop-p4-w4", "state", flat, passes(False, True), prefetch=4, workers=4, extends={2: 3}),
        Case("passes-between-p4-w1", "state", flat, passes(), prefetch=4, extends={0: 1}),
        # tickets in every state
        Case("held-midway-p4-w4", "dir", transforms=lambda c: [noisy, Held(c), doubled], prefetch=4, workers=4),
        Case("held-waiting-p1-w1", "state", transforms=lambda c: [Held(c)], prefetch=1, extends={4: 3}),
        Case("held-sizes-p4-w1", "state", transforms=lambda c: [noisy, Held(c)], prefetch=4, sizes={0: 5, 1: 2, 7: 5}),
        Case("ready-sizes-p1-w4", "dir", transforms=lambda c: [Held(c)], prefetch=1, workers=4, sizes={3: 5, 8: 5}),
        Case(
            "ready-no-batch-size-p0-w1",
            "dir",
            transforms=lambda c: [Held(c)],
            batch_size=None,
            sizes={step: 3 + step % 2 for step in range(STEPS)},
        ),
        Case("not-gathered-p4-w1", "state", storage=FlakyStorage, prefetch=4, extends={6: 3}),
        # failures and states
        Case("failed-front-p4-w1", "dir", transforms=lambda c: [noisy, Flaky(c)], prefetch=4, extends={6: 3}),
        Case("failed-front-stateful-p4-w1", "state", transforms=lambda c: [Flaky(c), Counting()], prefetch=4),
        Case(
            "counting-p4-w4-passes",
            "dir",
            flat,
            passes(),
            transforms=lambda c: [noisy, Counting()],
            prefetch=4,
            workers=4,
            extends={3: 3},
        ),
        Case("batchnorm-p4-w4", "dir", vectors, transforms=lambda c: [torch.nn.BatchNorm1d(3)], prefetch=4, workers=4),
        # a whole run
        Case("run-p4-w4", "run", transforms=lambda c: [noisy], prefetch=4, workers=4, extends=some),
    ]


CASES: dict[str, Case] = {case.name: case for case in _all()}


# -- the run ----------------------------------------------------------------------------------------------------------


def add_model(control: Control, seed: int = 0) -> None:
    """A model and its optimizer."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        control.model = torch.nn.Linear(2, 1)
    control.optimizer = torch.optim.SGD(control.model.parameters(), lr=0.125, momentum=0.5)


def run_values() -> dict[str, Any]:
    """Plain values of every kind."""
    progress = {
        "episode": 12,
        "ratio": 0.1,
        "nan": float("nan"),
        "inf": float("-inf"),
        "large": 3**50,
        "none": None,
        "yes": True,
        "names": ["a", "\u00e4"],
        "pair": (1, (2.5, "x")),
        "raw": b"ab\0",
        "keys": {1: "one", (2, 3): "two"},
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "scalar": np.float32(1.5),
        "z": 1 - 2j,
        "dtype": torch.bfloat16,
        "counter": Counter("abca"),
        "step": Step(torch.ones(2), 0.5),
        "settings": Settings(0.5, (1, 2)),
        "phase": Phase.WARM,
    }
    return {"progress": progress, "note": "golden", "table": torch.arange(4.0).to(torch.bfloat16)}


def global_draws() -> list[Any]:
    """What comes from the global generators now."""
    return [
        torch.rand(3).tolist(),
        torch.randint(1000, (3,)).tolist(),
        np.random.rand(3).tolist(),
        np.random.normal(),
        random.random(),
        random.gauss(0, 1),
    ]


# -- going on ---------------------------------------------------------------------------------------------------------


async def next_batch(buffer: ReplayBuffer, size: int | None) -> Batch:
    """The next batch. A failure is retried once: the original is told of one that a restored buffer does not know."""
    async with asyncio.timeout(SECONDS):
        try:
            return await buffer.sample(size)
        except PrefetchError:
            return await buffer.sample(size)


async def go_on(
    case: Case, buffer: ReplayBuffer, control: Control, pending: Sequence[asyncio.Future[Batch]] = ()
) -> dict[str, Any]:
    """The 12 batches after the save, packed. ``pending`` are consumers of the original that waited at the save."""
    batches, written = [], case.first
    for step in range(STEPS):
        if (count := case.extends.get(step)) is not None:
            await buffer.extend(case.items(count, written))
            written += count
        if step < len(pending):
            batch = await asyncio.wait_for(pending[step], SECONDS)
        else:
            batch = await next_batch(buffer, case.sizes.get(step))
        batches.append(dict(leaves(content(batch))))
    extra: dict[str, Any] = {
        "size": len(buffer),
        "write_count": buffer.write_count,
        "drawn_next": buffer.stats().queued,
    }
    if control.stateful is not None:
        await buffer.snapshot(SECONDS)  # until what was drawn ahead has been made
        extra["state"] = control.stateful.state_dict()
    return {"batches": packed(batches), "extra": packed([dict(leaves(extra))])}


def content(batch: Batch) -> dict[str, Any]:
    """All there is to a batch."""
    names = ("number", "epoch", "last", "indices", "info", "data")
    values = {name: getattr(batch, name) for name in names}
    return {**values, "info": dict(batch.info)}


def leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Leaves by path; the path says the types of the containers, too."""
    if isinstance(value, torch.Tensor):
        grad = "+grad" if value.requires_grad else ""
        return [(path + grad, value.detach().clone(memory_format=torch.contiguous_format))]
    if isinstance(value, np.ndarray):
        return [(f"{path}<{value.dtype.str}>", torch.from_numpy(value.copy()))]
    if isinstance(value, np.generic | torch.dtype | complex | enum.Enum | bytes):
        return [(path, f"{type(value).__name__} {value!r}")]
    kind = type(value).__name__
    if kind == "TensorDict":
        pairs = [(f"{kind}{list(value.batch_size)[1:]}.{key}", value[key]) for key in value.keys()]
    elif isinstance(value, Mapping):
        pairs = [(f"{kind}.{key!r}" if type(key) is not str else key, item) for key, item in value.items()]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        pairs = [(f"{kind}.{key}", getattr(value, key)) for key in value._fields]
    elif dataclasses.is_dataclass(value):
        pairs = [(f"{kind}.{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    elif isinstance(value, list | tuple) and not (value and all(isinstance(one, str) for one in value)):
        pairs = [(f"{kind}.{i}", item) for i, item in enumerate(value)]
    else:
        return [(path, list(value) if isinstance(value, list | tuple) else repr(value) if value != value else value)]
    return [leaf for key, item in pairs for leaf in leaves(item, f"{path}/{key}")] or [(path, f"empty {kind}")]


def packed(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """The leaves of all batches one after the other in one tensor: a file of few, small parts."""
    paths = list(dict.fromkeys(path for batch in batches for path in batch))
    result: dict[str, Any] = {}
    for path in paths:
        values = [batch.get(path, "absent") for batch in batches]
        if all(isinstance(value, torch.Tensor) for value in values) and len({v.dtype for v in values}) == 1:
            cells = torch.cat([value.reshape(-1) for value in values])
            result[path] = {"shapes": [list(value.shape) for value in values], "cells": cells}
        else:
            result[path] = values
    return result


def difference(found: Any, expected: Any, *, close: bool = False) -> str | None:
    """What differs first between two results of ``go_on``; None if nothing does, bit for bit."""
    for part in expected:
        ours, theirs = found[part], expected[part]
        if list(ours) != list(theirs):
            return f"{part}: leaves {sorted(ours)}, expected {sorted(theirs)}"
        for path, want in theirs.items():
            have = ours[path]
            if isinstance(want, list) or isinstance(have, list):
                if type(have) is not type(want):
                    return f"{part}{path}: {have}, expected {want}"
                for step, (one, other) in enumerate(zip(have, want, strict=True)):
                    if type(one) is not type(other) or not _equal(one, other):
                        return f"{part} {step}, {path}: {one!r}, expected {other!r}"
                continue
            if have["shapes"] != want["shapes"] or have["cells"].dtype != want["cells"].dtype:
                return f"{part}{path}: {have['shapes']} {have['cells'].dtype}, expected {want['shapes']} {want['cells'].dtype}"
            if close and want["cells"].is_floating_point():
                wrong = ~torch.isclose(have["cells"], want["cells"], rtol=1e-5, atol=1e-5, equal_nan=True)
            else:
                wrong = (_bytes(have["cells"]) != _bytes(want["cells"])).any(-1)
            if wrong.any():
                at = int(wrong.nonzero()[0])
                step = int((np.cumsum([np.prod(shape) for shape in want["shapes"]]) <= at).sum())
                return f"{part} {step}, {path}: {have['cells'][at]}, expected {want['cells'][at]}"
    return None


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool((_bytes(one) == _bytes(other)).all())
    return bool(one == other)


def _bytes(cells: torch.Tensor) -> torch.Tensor:
    flat = cells.reshape(-1).contiguous()
    return flat.view(torch.uint8).reshape(flat.numel(), flat.element_size()) if flat.numel() else torch.zeros(0, 1)
