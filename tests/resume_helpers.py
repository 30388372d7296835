"""Buffers of every kind that can be saved, made the same each time, and small things for tests that save them.

What is here is importable from another process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import pickle
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from asyncbuf import (
    Batch,
    CompressedStorage,
    ConsumingSampler,
    Draw,
    FrameStack,
    Hindsight,
    JoinedSampler,
    ListStorage,
    MaxValueWriter,
    MixtureSampler,
    NStep,
    Placement,
    Prepared,
    PrioritizedSampler,
    RaggedStorage,
    RandomSampler,
    ReplayBuffer,
    ReservoirWriter,
    RoundRobinWriter,
    RowRange,
    Rows,
    Sampler,
    SamplerWithoutReplacement,
    Storage,
    StratifiedSampler,
    TensorStorage,
    WeightedSampler,
    Writer,
)
from asyncbuf.testing import assert_same_batch, difference
from tests.helpers import Stop, seeded, within
from tests.helpers import WeightedSampler as MultinomialSampler
from tests.storage.ragged_items import RAGGED, ragged_list
from tests.tables import two_tables

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
    from pathlib import Path

    from tensordict import TensorDict


def items_of(count: int, start: int = 0) -> dict[str, torch.Tensor]:
    """Items that carry their number, NaNs and negative zeros among them."""
    number = torch.arange(start, start + count)
    wide = number[:, None].to(torch.float32).repeat(1, 3)
    wide[:, 1] = torch.where(number % 2 == 0, torch.nan, -0.0)
    return {"number": number, "wide": wide}


async def reached(stop: Stop) -> None:
    """Until a thread has come to a stop."""
    await within(stop.come.reached())


class Blocking:
    """A sync transform that waits in its thread while there is a ``stop``.

    A test that uses it needs the fixture ``transforms_in_threads``: on the event loop it would stop that.
    """

    def __init__(self) -> None:
        self.stop: Stop | None = None
        self.calls = 0

    def __call__(self, data: Any) -> Any:
        self.calls += 1
        stop = self.stop
        if stop is not None:
            stop()
        return {**data, "seen": data["number"] + 1}

    def block(self) -> Stop:
        """Stop from the next call on."""
        self.stop = Stop()
        return self.stop

    def release(self) -> None:
        stop, self.stop = self.stop, None
        if stop is not None:
            stop.go.set()

    def __reduce__(self) -> Any:
        return Blocking, ()


class Failing:
    """A transform that raises while ``broken``."""

    def __init__(self) -> None:
        self.broken = False

    def __call__(self, data: Any) -> Any:
        if self.broken:
            raise ValueError("broken on purpose")
        return {**data, "seen": data["number"] + 1}


class InThreads(TensorStorage):
    """Says that everything is large, so that every copy of rows happens in a thread."""

    def prepare(self, items: Any) -> Prepared:
        return dataclasses.replace(super().prepare(items), nbytes=1 << 30)

    def gather_nbytes(self, count: int) -> int:
        return 1 << 30


# -- parts that a user may write --------------------------------------------------------------------------------------


class FavourSampler(Sampler):
    """Prefers rows by priority; new rows get the largest there was. State of every kind, changed by every method."""

    def __init__(self, capacity: int) -> None:
        self.priorities = torch.zeros(capacity, dtype=torch.float64)
        self.largest = 1.0
        self.draws = 0
        self.names: dict[str, Any] = {"last": (0, None), "bytes": b"\0"}

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        self.draws += 1
        indices = torch.multinomial(self.priorities[: rows.size], batch_size, True, generator=generator)
        self.priorities[indices[0]] *= 0.5
        self.names["last"] = (self.draws, int(indices[0]))
        return Draw(indices, {"priority": self.priorities[indices], "draws": self.draws})

    def written(self, indices: torch.Tensor, rows: Rows) -> None:
        self.priorities[indices] = self.largest

    def update_priority(self, indices: torch.Tensor, priority: torch.Tensor, rows: Rows) -> None:
        self.priorities[indices] = priority.to(torch.float64)
        self.largest = max(self.largest, float(priority.max()))

    def clear(self) -> None:
        self.priorities.zero_()

    def state_dict(self) -> dict[str, Any]:
        state = {"priorities": self.priorities.clone(), "largest": self.largest, "draws": self.draws}
        return {**state, "names": dict(self.names)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.priorities.copy_(state["priorities"])
        self.largest, self.draws, self.names = state["largest"], state["draws"], dict(state["names"])


class ThinningWriter(RoundRobinWriter):
    """Keeps the first of every two items that are handed in."""

    def __init__(self) -> None:
        super().__init__()
        self.offered = 0

    def place(self, count: int, capacity: int) -> Placement:
        kept = [item for item in range(count) if (self.offered + item) % 2 == 0][-capacity:]
        runs = (RowRange((self.cursor + i) % capacity, item, 1) for i, item in enumerate(kept))
        return Placement(count, tuple(runs))

    def commit(self, placement: Placement, capacity: int) -> None:
        self.offered += placement.offered
        super().commit(placement, capacity)

    def state_dict(self) -> dict[str, Any]:
        return {"ring": super().state_dict(), "offered": self.offered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state["ring"])
        self.offered = state["offered"]


class DictStorage(Storage):
    """Items in a dict, saved through ``state_dict`` alone."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.items: dict[int, Any] = {}

    def prepare(self, items: Any) -> Prepared:
        count = len(items["number"])
        return Prepared(count, 0, [{key: value[i].clone() for key, value in items.items()} for i in range(count)])

    def prepare_one(self, item: Any) -> Prepared:
        return Prepared(1, 0, [item])

    def write(self, prepared: Prepared, runs: Sequence[RowRange]) -> None:
        for run in runs:
            for i in range(run.count):
                self.items[run.row + i] = prepared.payload[run.item + i]

    def gather(self, indices: torch.Tensor) -> Any:
        items = [self.items[row] for row in indices.tolist()]
        return {key: torch.stack([item[key] for item in items]) for key in items[0]}

    def gather_nbytes(self, count: int) -> int:
        return 0

    def state_dict(self) -> dict[str, Any]:
        return {"items": dict(self.items)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items = dict(state["items"])

    def clear(self) -> None:
        self.items.clear()


# -- transforms -------------------------------------------------------------------------------------------------------


def plain(data: Any) -> Any:
    return {**data, "plain": data["number"] * 2}


def noisy(data: Any, *, generator: torch.Generator) -> Any:
    return {**data, "noise": torch.randn(len(data["number"]), generator=generator)}


async def late(data: Any, *, generator: torch.Generator) -> Any:
    """Takes its time, and not from any seed."""
    for _ in range(random.randrange(4)):
        await asyncio.sleep(0)
    return {**data, "late": torch.rand(len(data["number"]), generator=generator)}


class Average:
    """A transform with a state: it must see the batches in order."""

    def __init__(self) -> None:
        self.average = torch.zeros(())
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average, self.seen = state["average"], state["seen"]

    def __call__(self, data: Any) -> Any:
        self.seen += 1
        self.average = 0.9 * self.average + 0.1 * data["number"].float().mean()
        return {**data, "average": self.average.clone(), "seen": self.seen}


class Weighing:
    """Multiplies with a parameter: its outputs have a history."""

    def __init__(self) -> None:
        self.weight = torch.full((3,), 0.5, requires_grad=True)

    def __call__(self, data: Any) -> Any:
        product = data["wide"] * self.weight
        return {"number": data["number"], "product": product, "again": product, "leaf": self.weight}


class Scaling(torch.nn.Module):
    """A module as a transform, whose buffer changes with every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(1)

    def forward(self, data: Any) -> Any:
        return {**data, "scaled": self.norm(data["number"][:, None].float())}


def of_all_kinds(data: Any) -> Any:
    """Leaves of all kinds that may be in a batch."""
    number = data["number"].numpy()
    return {
        "none": None,
        "numbers": [1, True, 2.5, float("nan"), -0.0, 1j],
        "texts": ("text", b"bytes"),
        "arrays": {"array": number.astype(np.float16), 3: number[0], "dates": np.datetime64("2024-01-01")},
        "dtypes": [data["number"].to(dtype) for dtype in (torch.bfloat16, torch.complex64, torch.bool, torch.uint8)],
        "empty": torch.empty(0, 3),
        "conjugate": torch.complex(data["wide"], data["wide"]).conj(),
    }


def tensordict_of(count: int, start: int = 0) -> TensorDict:
    from tensordict import TensorDict

    fields = items_of(count, start)
    return TensorDict({"number": fields["number"], "deep": {"wide": fields["wide"]}}, batch_size=[count])


def large_items(count: int, start: int = 0) -> dict[str, torch.Tensor]:
    """Items with a leaf that is large enough to be compressed."""
    items = items_of(count, start)
    return {**items, "image": items["number"][:, None].repeat(1, 200)}


def to_tensordict(data: Any) -> Any:
    from tensordict import TensorDict

    return TensorDict({"deep": {"wide": data["wide"]}, "number": data["number"]}, batch_size=[len(data["number"])])


def list_items(count: int, start: int = 0) -> list[Any]:
    """Nested items with texts in them."""
    return [{"number": torch.tensor(i), "deep": (float(i), [f"item {i}"])} for i in range(start, start + count)]


def list_of_tensordicts(count: int, start: int = 0) -> list[Any]:
    return list(tensordict_of(count, start).unbind(0))


def items_with_history(count: int, start: int = 0) -> list[Any]:
    """Items that were computed from a parameter and remember it."""
    weight = torch.tensor(2.0, requires_grad=True)
    return [{"number": torch.tensor(i), "product": weight * i} for i in range(start, start + count)]


def steps_of(count: int, start: int = 0) -> dict[str, Any]:
    """Steps of two environments in turns, with goals."""
    number = torch.arange(start, start + count)
    goal = (number % 3)[:, None].float()
    return {**items_of(count, start), "env": number % 2, "done": number % 7 > 4, "goal": goal, "reached": goal + 1}


def separate_steps_of(count: int, start: int = 0) -> list[dict[str, Any]]:
    steps = steps_of(count, start)
    return [{name: column[i].clone() for name, column in steps.items()} for i in range(count)]


def joined(capacity: int) -> Sampler:
    returns = NStep(3, 0.9, reward_key="number", terminated_key="done", next_keys="reached")
    frames = FrameStack(2, "wide", next_key="next_wide")
    return JoinedSampler(PrioritizedSampler(), returns, frames, end_key="done", trajectory_key="env")


def is_reached(achieved: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    return (achieved == goal)[:, 0]


def relabelled(capacity: int) -> Sampler:
    goals = Hindsight(is_reached, goal_key="goal", achieved_key="reached", reward_key="number")
    return JoinedSampler(SamplerWithoutReplacement(), goals, end_key="done", trajectory_key="env")


# -- buffers ----------------------------------------------------------------------------------------------------------

ITEMS = 20


class Kind(NamedTuple):
    """What a buffer is made of.

    Attributes:
        sampler, storage, writer, transforms: make the parts; storage and sampler from the capacity.
        items: makes items from a count and the number of the first.
        collate: as ``collate_fn``.
    """

    sampler: Callable[[int], Sampler] = lambda capacity: RandomSampler()
    storage: Callable[[int], Storage] = TensorStorage
    items: Callable[[int, int], Any] = items_of
    writer: Callable[[], Writer] = RoundRobinWriter
    transforms: Callable[[], list[Any]] = list
    collate: Callable[[Any], Any] | None = None


def passes(*, drop_last: bool = False, shuffle: bool = True) -> Callable[[int], Sampler]:
    return lambda capacity: SamplerWithoutReplacement(drop_last=drop_last, shuffle=shuffle)


def ragged_storage(layout: str) -> Callable[[int], Storage]:
    return functools.partial(RaggedStorage, ragged=RAGGED, layout=layout)


def mixture(capacity: int) -> Sampler:
    samplers = {"one": PrioritizedSampler(), "other": SamplerWithoutReplacement()}
    return MixtureSampler(samplers, {"one": 0.4, "other": 0.6}, when_empty="others")


SAMPLERS: dict[str, Callable[[int], Sampler]] = {
    "random": lambda capacity: RandomSampler(),
    "weighted": lambda capacity: MultinomialSampler(),
    "favour": FavourSampler,
    "passes": passes(),
    "passes-drop": passes(drop_last=True),
    "passes-order": passes(shuffle=False),
    "passes-order-drop": passes(drop_last=True, shuffle=False),
}

KINDS: dict[str, Kind] = {
    "random": Kind(),
    "weighted-noisy": Kind(SAMPLERS["weighted"], transforms=lambda: [noisy]),
    "favour": Kind(FavourSampler, transforms=lambda: [late]),
    "passes": Kind(passes(), transforms=lambda: [plain, late, noisy]),
    "passes-drop": Kind(passes(drop_last=True), InThreads, transforms=lambda: [noisy]),
    "passes-order": Kind(passes(shuffle=False), transforms=lambda: [plain]),
    "passes-order-drop": Kind(passes(drop_last=True, shuffle=False)),
    "stateful": Kind(passes(), transforms=lambda: [Average(), noisy]),
    "module": Kind(transforms=lambda: [Scaling(), noisy]),
    "history": Kind(transforms=lambda: [Weighing()]),
    "kinds": Kind(transforms=lambda: [of_all_kinds]),
    "list": Kind(passes(), ListStorage, list_items),
    "list-collate": Kind(SAMPLERS["random"], ListStorage, list_items, collate=list),
    "list-history": Kind(SAMPLERS["random"], ListStorage, items_with_history),
    "list-tensordict": Kind(passes(), ListStorage, list_of_tensordicts),
    "tensordict": Kind(items=tensordict_of),
    "tensordict-transform": Kind(transforms=lambda: [late, to_tensordict]),
    "compressed": Kind(passes(), CompressedStorage, large_items, transforms=lambda: [noisy]),
    "joined": Kind(joined, items=steps_of, transforms=lambda: [noisy]),
    "relabelled": Kind(relabelled, ListStorage, separate_steps_of, transforms=lambda: [late]),
    "weights": Kind(lambda capacity: WeightedSampler("number")),
    "weights-distinct": Kind(lambda capacity: WeightedSampler(replacement=False)),
    "stratified": Kind(lambda capacity: StratifiedSampler("number"), transforms=lambda: [noisy]),
    "consuming": Kind(lambda capacity: ConsumingSampler(60)),
    "consuming-random": Kind(lambda capacity: ConsumingSampler(60, "random")),
    "mixture": Kind(mixture, writer=lambda: two_tables(ITEMS)),
    "user-writer": Kind(passes(), writer=ThinningWriter),
    "best-items": Kind(passes(), writer=lambda: MaxValueWriter("number"), transforms=lambda: [noisy]),
    "reservoir": Kind(passes(), writer=ReservoirWriter),
    "user-storage": Kind(FavourSampler, DictStorage, transforms=lambda: [noisy]),
    "ragged-padded": Kind(passes(), ragged_storage("padded"), ragged_list, transforms=lambda: [late]),
    "ragged-packed": Kind(FavourSampler, ragged_storage("packed"), ragged_list),
    "ragged-jagged": Kind(storage=ragged_storage("jagged"), items=ragged_list, transforms=lambda: [plain, late]),
}


def buffer_of(kind: Kind, *, depth: int = 2, workers: int = 1, seed: int = 0, batch_size: int = 3) -> ReplayBuffer:
    """A buffer without items."""
    return ReplayBuffer(
        kind.storage(ITEMS),
        sampler=kind.sampler(ITEMS),
        writer=kind.writer(),
        batch_size=batch_size,
        prefetch=depth,
        workers=workers,
        transform=kind.transforms(),
        collate_fn=kind.collate,
        generator=seeded(seed),
    )


async def make(
    name: str, *, depth: int = 2, workers: int = 1, seed: int = 0, batch_size: int = 3, items: int = ITEMS
) -> ReplayBuffer:
    """A buffer of a known kind with items."""
    buffer = buffer_of(KINDS[name], depth=depth, workers=workers, seed=seed, batch_size=batch_size)
    await buffer.extend(KINDS[name].items(items, 0))
    return buffer


def maker(name: str, **settings: int) -> Callable[[], Awaitable[ReplayBuffer]]:
    """A factory, which another process can have."""
    return functools.partial(make, name, **settings)


async def write(name: str, buffer: ReplayBuffer, step: int, batch: Batch) -> None:
    """Overwrites rows and moves priorities, as step and batch say."""
    await buffer.extend(KINDS[name].items(1 + step % 3, 100 + 10 * step))
    await buffer.update_priority(batch.indices, 1.0 + 0.25 * (batch.indices % 4))


async def take(buffer: ReplayBuffer, count: int) -> list[Batch]:
    """The next batches."""
    return [await within(buffer.sample()) for _ in range(count)]


async def check_stream(buffer: ReplayBuffer, expected: Iterable[Batch], where: str = "resumed") -> None:
    """The next batches are these."""
    for batch in expected:
        assert_same_batch(await within(buffer.sample()), batch, f"{where}, batch {batch.number}")


async def saved(way: str, buffer: ReplayBuffer, folder: Path, timeout: float | None = None) -> Any:
    """Save in one of the four ways."""
    if way == "snapshot":
        return await within(buffer.snapshot(timeout))
    if way == "state_dict":
        return await within(buffer.state_dict(timeout))
    if way == "directory":
        path = folder / f"{len(list(folder.iterdir()))}"
        await within(buffer.save(path, timeout))
        return path
    async with buffer.frozen(timeout):
        return pickle.dumps(buffer)


async def restored(way: str, what: Any, target: ReplayBuffer, *, elastic: bool = False) -> ReplayBuffer:
    """The way back; a pickle makes its own buffer."""
    if way == "pickle":
        unpickled: ReplayBuffer = pickle.loads(what)
        return unpickled
    loads = {"snapshot": target.restore, "state_dict": target.load_state_dict, "directory": target.load}
    load: Any = loads[way]
    await within(load(what, elastic=elastic))
    return target


@asynccontextmanager
async def unchanged(buffer: ReplayBuffer) -> AsyncIterator[None]:
    """Everything is as before afterwards, queue included."""
    before = await buffer.state_dict()
    yield
    what = difference(await within(buffer.state_dict()), before)
    assert what is None, f"the live buffer has changed: {what}"
