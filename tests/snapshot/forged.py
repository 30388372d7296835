"""Buffers of many kinds, and what a state dict can be made into by whoever wants to break one."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf import (
    Draw,
    Limiter,
    ListStorage,
    MaxValueWriter,
    NotYet,
    Placement,
    RandomSampler,
    ReplayBuffer,
    ReservoirWriter,
    RowRange,
    SamplerWithoutReplacement,
    TensorStorage,
    Writer,
)
from tests.helpers import seeded
from tests.resume_helpers import items_of, list_items

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from asyncbuf import Counters, Rows

ITEMS = 20
State = dict[str, Any]
Path = tuple[Any, ...]


class BackwardsWriter(Writer):
    """Fills rows from both ends in turn, so that the table has gaps and stores the numbers."""

    def __init__(self) -> None:
        self.written = 0

    @property
    def size(self) -> int:
        return min(self.written, ITEMS)

    @property
    def write_count(self) -> int:
        return self.written

    def place(self, count: int, capacity: int) -> Placement:
        skipped = max(0, count - capacity)
        places = [(self.written + skipped + i) % capacity for i in range(count - skipped)]
        rows = [place // 2 if place % 2 == 0 else capacity - 1 - place // 2 for place in places]
        return Placement(count, tuple(RowRange(row, skipped + i, 1) for i, row in enumerate(rows)))

    def commit(self, placement: Placement, capacity: int) -> None:
        self.written += placement.offered

    def clear(self) -> None:
        self.written += -self.written % ITEMS  # so that it begins anew at both ends

    def state_dict(self) -> dict[str, Any]:
        return {"written": self.written}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if type(state["written"]) is not int or state["written"] < 0:
            raise ValueError(f"expected a number, found {state['written']!r}")
        self.written = state["written"]


class JoiningSampler(RandomSampler):
    """Random rows, weights, and further rows beside them."""

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        draw = super().draw(rows, batch_size, generator)
        other = super().draw(rows, batch_size, generator)
        weight = torch.rand(batch_size, generator=generator)
        return draw._replace(info={"weight": weight}, joins={"other": other.indices[:, None]}, shape=(1, batch_size))

    def combine(self, draw: Draw, data: Any, joined: Any) -> Any:
        return {**data, **joined}


class Patient(Limiter):
    """A limiter with a state."""

    counts_draws = True

    def __init__(self) -> None:
        self.least = 1

    def may_draw(self, counters: Counters, items: int) -> Any:
        return True if counters.size >= self.least else NotYet(f"{counters.size} of {self.least} items are stored")

    def state_dict(self) -> dict[str, Any]:
        return {"least": self.least}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if type(state["least"]) is not int or not 0 <= state["least"] <= 1:
            raise ValueError(f"expected 0 or 1, found {state['least']!r}")
        self.least = state["least"]


class Checked:
    """A stateful transform that looks at what it loads."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if type(state["seen"]) is not int:
            raise ValueError(f"expected a number, found {state['seen']!r}")
        self.seen = state["seen"]

    def __call__(self, data: Any) -> Any:
        self.seen += 1
        return data


async def tensors(buffer: ReplayBuffer, count: int) -> None:
    await buffer.extend(items_of(count))


async def objects(buffer: ReplayBuffer, count: int) -> None:
    await buffer.extend(list_items(count))


def _buffer(storage: Any, **settings: Any) -> ReplayBuffer:
    return ReplayBuffer(storage, batch_size=3, prefetch=2, generator=seeded(), **settings)


KINDS: dict[str, Callable[[], ReplayBuffer]] = {
    "tensors, random": lambda: _buffer(TensorStorage(ITEMS)),
    "tensors, passes": lambda: _buffer(TensorStorage(ITEMS), sampler=SamplerWithoutReplacement(), transform=Checked()),
    "tensors, in order": lambda: _buffer(TensorStorage(ITEMS), sampler=SamplerWithoutReplacement(shuffle=False)),
    "tensors, gaps": lambda: _buffer(TensorStorage(ITEMS), writer=BackwardsWriter(), limiter=Patient()),
    "tensors, joins": lambda: _buffer(TensorStorage(ITEMS), sampler=JoiningSampler()),
    "tensors, best": lambda: _buffer(TensorStorage(ITEMS), writer=MaxValueWriter("number")),
    "tensors, reservoir": lambda: _buffer(TensorStorage(ITEMS), writer=ReservoirWriter(1)),
    "objects, random": lambda: _buffer(ListStorage(ITEMS)),
    "objects, passes": lambda: _buffer(ListStorage(ITEMS), sampler=SamplerWithoutReplacement(drop_last=True)),
    "objects, joins": lambda: _buffer(ListStorage(ITEMS), sampler=JoiningSampler(), transform=Checked()),
}


def write_of(kind: str) -> Any:
    return objects if kind.startswith("objects") else tensors


async def used(kind: str, removed: int) -> ReplayBuffer:
    """A closed buffer with a history: the ring has gone round, and some rows are gone."""
    buffer = KINDS[kind]()
    async with buffer:
        await write_of(kind)(buffer, ITEMS)
        await buffer.sample()
        await write_of(kind)(buffer, 5)
        if removed:
            await buffer.remove(torch.arange(2, 2 + removed))
        await buffer.sample()
    return buffer


# -- places in a state, and what is done to them ----------------------------------------------------------------------


def places(node: Any, path: Path = ()) -> Iterator[Path]:
    """Every place in a state."""
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from places(child, (*path, key))


def at(state: Any, path: Path) -> Any:
    for key in path:
        state = state[key]
    return state


def _exotic() -> list[torch.Tensor]:
    with warnings.catch_warnings(action="ignore"):  # torch says that it will do without them, or is not done yet
        quantized = torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)
        return [quantized, torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])]


EXOTIC = _exotic()


def odd_values() -> list[Any]:
    int64 = torch.arange(3)
    return [
        *(None, True, -1, 0, 1, 3, 7, 2**31, 2**61, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), 0.5, float("nan")),
        *("x", "", b"x", [], {}, (), [[]], {"x": 1}, {1: 2}, {"$tuple": "abc"}, {"$type": "os.system", "value": 1}),
        *(np.int64(3), np.arange(3), np.array("x"), np.zeros(0), object(), set(), 1j, range(3), Ellipsis),
        *(torch.empty(0), torch.tensor(3), int64, int64.float(), int64.int(), int64[None], int64 - 5, int64 * 2**61),
        *(int64.to_sparse(), torch.empty(3, dtype=torch.int64, device="meta"), torch.zeros(3, dtype=torch.complex64)),
        *EXOTIC,
        torch.zeros(3, requires_grad=True),
        torch.zeros(3, dtype=torch.uint8),
    ]


def other_numbers(value: int) -> list[int]:
    return [value + 1, value - 1, -value, value + 2**32, 2**62 - 1, 2**62, 2 * value]


def other_tensors(value: torch.Tensor) -> list[torch.Tensor]:
    found = [value[:-1] if value.ndim else value[None], value[None], value.reshape(-1), value.to("meta")]
    if value.ndim:
        found += [torch.cat([value, value[:1]]), value.flip(0), value[:1].expand_as(value), value[:0]]
    if not value.dtype.is_complex and value.dtype is not torch.bool:
        found += [value + 1, value - 1, value.to(torch.float64), value.to(torch.int32), value.to(torch.complex64)]
    if value.dtype is torch.int64:
        found += [value - 2**62, value + 2**62, value * 0, torch.where(value > 2, 2, value)]
    return found


def mutate(state: State, chance: random.Random) -> str:
    """Change one thing; in words, what."""
    path = chance.choice(list(places(state)))
    parent, key = at(state, path[:-1]), path[-1]
    value = parent[key]
    kinds = ["odd", "odd", "delete", "swap"]
    if type(value) is int:
        kinds += ["number"] * 4
    if isinstance(value, torch.Tensor):
        kinds += ["tensor"] * 4
    if isinstance(value, dict):
        kinds += ["more", "key"]
    if isinstance(value, list):
        kinds += ["reverse", "twice", "rotate"] * 2
    kind = chance.choice(kinds)
    if kind == "delete":
        del parent[key]
    elif kind == "swap":
        other = chance.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[key], parent[other] = parent[other], parent[key]
    elif kind == "more":
        value[chance.choice(["more", 3, "$tuple", "numbers"])] = chance.choice(odd_values())
    elif kind == "key" and value:
        value[chance.choice([1, "else", None])] = value.pop(chance.choice(list(value)))
    elif kind == "reverse":
        value.reverse()
    elif kind == "twice":
        value += copy.deepcopy(value[:1])
    elif kind == "rotate":
        value[:] = value[1:] + value[:1]
    else:
        choices: dict[str, Callable[[Any], list[Any]]] = {"number": other_numbers, "tensor": other_tensors}
        parent[key] = chance.choice(choices[kind](value) if kind in choices else odd_values())
    shown = repr(parent.get(key) if isinstance(parent, dict) else parent[key : key + 1])[:80]
    return f"{kind} at {'/'.join(map(str, path))}: {shown}"
