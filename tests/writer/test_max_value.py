"""The items with the largest values, against a plain list that takes them one by one."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    ListStorage,
    MaxValueWriter,
    ReplayBuffer,
    Rows,
    SchemaError,
    TensorStorage,
)
from asyncbuf._plain.codec import decode, encode
from asyncbuf.rows import ScatteredItems
from asyncbuf.writer._least import LeastRows
from tests.helpers import seeded

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncbuf import Placement


class Model:
    """Row by row: the value and number of its item. One item after the other, by the words of the documentation."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rows: dict[int, tuple[float, int]] = {}
        self.freed: list[int] = []
        self.used = 0
        self.written = 0

    def write(self, values: list[float]) -> None:
        for value in values:
            row = self.row_for(value)
            if row is not None:
                self.rows[row] = value, self.written
            self.written += 1

    def row_for(self, value: float) -> int | None:
        if self.freed:
            return self.freed.pop(0)
        if self.used < self.capacity:
            self.used += 1
            return self.used - 1
        row = min(self.rows, key=lambda row: (self.rows[row][0], -self.rows[row][1]))
        return row if value > self.rows[row][0] else None

    def remove(self, rows: list[int]) -> None:
        self.freed += rows
        for row in rows:
            del self.rows[row]

    def clear(self) -> None:
        self.rows, self.freed, self.used = {}, [], 0


def write(writer: MaxValueWriter, values: Any, capacity: int) -> Placement:
    column = np.asarray(values)
    placement = writer.place_values(len(column), capacity, {"score": column})
    writer.commit(placement, capacity)
    return placement


def reloaded(writer: MaxValueWriter) -> MaxValueWriter:
    other = MaxValueWriter("score")
    state = encode(writer.state_dict(), "writer")
    other.load_state_dict(decode(state, "writer"))
    again = other.state_dict()
    assert all(torch.equal(again[name], state[name]) for name in ("values", "numbers", "free"))
    return other


def held(writer: MaxValueWriter) -> dict[int, tuple[float, int]]:
    state = writer.state_dict()
    pairs = zip(state["values"].tolist(), state["numbers"].tolist(), strict=True)
    return {row: pair for row, pair in enumerate(pairs) if pair[1] >= 0}


@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed: int) -> None:
    choose = random.Random(seed)
    capacity = choose.choice([1, 2, 3, 9, 40, 300])
    kinds: list[Callable[[], float]] = [
        lambda: float(choose.randrange(4)),  # most are equal
        choose.random,
        lambda: choose.choice([-np.inf, np.inf, 0.0, -0.0, 1.0]),
    ]
    value = choose.choice(kinds)
    writer, model = MaxValueWriter("score"), Model(capacity)
    stored: dict[int, int] = {}
    for _ in range(40):
        step = choose.random()
        if step < 0.1 and model.rows:
            gone = choose.sample(sorted(model.rows), choose.randrange(1, len(model.rows) + 1))
            writer.removed(torch.tensor(gone), capacity)
            model.remove(gone)
            for row in gone:
                del stored[row]
        elif step < 0.13:
            writer.clear()
            model.clear()
            stored.clear()
        else:
            values = [value() for _ in range(choose.choice([1, 1, 2, 5, 30, 2 * capacity + 3]))]
            first = model.written
            placement = write(writer, values, capacity)
            rows, items = placement.rows.tolist(), placement.items.tolist()
            assert len(set(rows)) == len(rows)
            assert items == sorted(set(items))
            stored.update(zip(rows, [first + item for item in items], strict=True))
            model.write(values)
        assert held(writer) == model.rows
        assert stored == {row: number for row, (_, number) in model.rows.items()}
        assert writer.size == len(model.rows)
        assert writer.write_count == model.written
        where = np.array(sorted(stored), np.int64)
        assert writer.numbers(where, capacity).tolist() == [stored[row] for row in where.tolist()]
        if choose.random() < 0.2:
            writer = reloaded(writer)


@pytest.mark.parametrize("kind", ["rising", "falling", "any", "equal"])
def test_many_items_at_once_are_as_one_by_one(kind: str) -> None:
    generator = np.random.default_rng(0)
    values = {
        "rising": np.arange(5000.0),
        "falling": -np.arange(5000.0),
        "any": generator.random(5000),
        "equal": generator.integers(0, 3, 5000),
    }[kind]
    together, alone = MaxValueWriter("score"), MaxValueWriter("score")
    for part in np.split(values, [700, 1500, 4900]):
        write(together, part, 1000)
    for value in values:
        write(alone, [value], 1000)
    assert held(together) == held(alone)
    numbers = sorted(number for _, number in held(together).values())
    assert numbers == sorted(np.lexsort((np.arange(5000), -values))[:1000].tolist())


def test_the_least_of_more_rows_than_one_level_names() -> None:
    generator = np.random.default_rng(1)
    tree = LeastRows(40_000)  # three levels
    values = generator.integers(0, 50, 40_000).astype(np.float64)
    numbers = generator.permutation(40_000)
    tree.set(np.arange(40_000), values, numbers)
    for _ in range(30):
        order = np.lexsort((-numbers, values))
        assert tree.least == (order[0], values[order[0]])
        for count in (1, 7, 300, 39_999, 40_000):
            assert sorted(tree.some_least(count).tolist()) == sorted(order[:count].tolist())
        changed = generator.choice(40_000, int(generator.choice([1, 3, 500, 20_000])), replace=False)
        values[changed] = generator.integers(0, 50, len(changed))
        numbers[changed] = numbers[changed] + 40_000
        tree.set(changed, values[changed], numbers[changed])


async def test_in_a_buffer_the_best_items_are_stored() -> None:
    buffer = ReplayBuffer(TensorStorage(100), writer=MaxValueWriter("meta/score"), batch_size=100)
    score = torch.rand(3000, generator=seeded())
    rows = []
    for start in (0, 50, 1000):
        part = score[start : {0: 50, 50: 1000, 1000: 3000}[start]]
        rows.append(await buffer.extend({"obs": part[:, None] * 2, "meta": {"score": part}}))
    assert len(rows[0]) == 50
    async with buffer:
        for row in (await buffer.sample(100)).indices.tolist():
            assert 0 <= row < 100
        stored = buffer._storage.gather(torch.arange(100))
    assert sorted(stored["meta"]["score"].tolist()) == sorted(score.sort(descending=True)[0][:100].tolist())
    assert torch.equal(stored["obs"][:, 0], stored["meta"]["score"] * 2)
    assert len(buffer) == 100
    assert buffer.write_count == 3000


async def test_what_add_returns() -> None:
    buffer = ReplayBuffer(TensorStorage(2), writer=MaxValueWriter("score"))
    found = [await buffer.add({"score": score}) for score in (3.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0)]
    # Of equal values the older stays; of two that are smallest, the newer makes room.
    assert found == [0, 1, None, 1, None, 1, None, 1]
    assert (await buffer.extend({"score": torch.zeros(9)})).tolist() == []


async def test_items_of_a_list() -> None:
    buffer = ReplayBuffer(ListStorage(3), writer=MaxValueWriter("meta/0"), collate_fn=list)
    for i in range(10):
        await buffer.add({"name": str(i), "meta": [i * 7 % 10, None]})
    await buffer.extend([{"name": "best", "meta": [99, None]}, {"name": "worst", "meta": [-1, None]}])
    items = buffer._storage.gather(torch.arange(3))
    assert sorted(item["name"] for item in items) == ["4", "7", "best"]  # 8, 9 and 99


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.uint8])
async def test_dtypes_of_values(dtype: torch.dtype) -> None:
    buffer = ReplayBuffer(TensorStorage(2), writer=MaxValueWriter("score"))
    assert (await buffer.extend({"score": torch.tensor([0, 1, 0, 1]).to(dtype)})).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (
            {"score": torch.tensor([1.0, float("nan")])},
            "score: expected values that can be compared, found NaN in item 1",
        ),
        ({"score": torch.ones(2, 3)}, r"score: expected one real number per item, found float32 of shape \[3\]"),
        ({"score": torch.ones(2, dtype=torch.complex64)}, "score: expected one real number per item, found complex64"),
        ({"obs": torch.ones(2)}, "score.*the sampler or writer asks for"),
    ],
)
async def test_what_is_refused(items: Any, message: str) -> None:
    buffer = ReplayBuffer(TensorStorage(2), writer=MaxValueWriter("score"))
    with pytest.raises(SchemaError, match=message):
        await buffer.extend(items)
    assert len(buffer) == buffer.write_count == 0
    wide = {"score": torch.ones(1, 1)}
    assert (await buffer.extend(wide)).tolist() == [0]


async def test_a_large_write_is_refused_in_its_thread_as_well() -> None:
    buffer = ReplayBuffer(TensorStorage(9), writer=MaxValueWriter("score"))
    items = {"score": torch.arange(4000.0), "wide": torch.ones(4000, 500)}
    await buffer.extend(items)
    before = await buffer.state_dict()
    items["score"][7] = float("nan")
    with pytest.raises(SchemaError, match="NaN in item 7"):
        await buffer.extend(items)
    assert buffer.write_count == 4000
    assert (await buffer.state_dict())["writer"]["write_count"] == before["writer"]["write_count"]


def test_few_objects_for_many_items() -> None:
    writer = MaxValueWriter("score")
    write(writer, np.zeros(1000), 1000)
    assert type(write(writer, np.arange(1, 500.0), 1000).runs) is ScatteredItems


def saved() -> dict[str, Any]:
    writer = MaxValueWriter("score")
    write(writer, [3.0, 1.0, 2.0, 5.0], 6)
    writer.removed(torch.tensor([1]), 6)
    return writer.state_dict()


FORGED: dict[str, tuple[str, Any]] = {
    "NaN": ("values", torch.tensor([3.0, float("nan"), 2.0, 5.0], dtype=torch.float64)),
    "too few values": ("values", torch.ones(3, dtype=torch.float64)),
    "other values": ("values", torch.ones(4)),
    "values in two dimensions": ("values", torch.ones(4, 1, dtype=torch.float64)),
    "a value in a free row": ("values", torch.ones(4, dtype=torch.float64)),
    "a number twice": ("numbers", torch.tensor([0, -1, 2, 2])),
    "a number that was not written": ("numbers", torch.tensor([0, -1, 2, 4])),
    "a negative number": ("numbers", torch.tensor([0, -1, -2, 3])),
    "an item in a free row": ("numbers", torch.tensor([0, 1, 2, 3])),
    "no free row": ("free", torch.empty(0, dtype=torch.int64)),
    "a free row twice": ("free", torch.tensor([1, 1])),
    "a free row that holds an item": ("free", torch.tensor([0])),
    "a free row beyond": ("free", torch.tensor([4])),
    "floats": ("free", torch.tensor([1.0])),
    "a count below the numbers": ("write_count", 3),
    "a negative count": ("write_count", -1),
    "no tensor": ("numbers", [0, -1, 2, 3]),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_states_change_nothing(name: str) -> None:
    entry, value = FORGED[name]
    writer = MaxValueWriter("score")
    write(writer, [1.0, 2.0], 6)
    before = held(writer)
    with pytest.raises(CheckpointCorruptError, match="MaxValueWriter"):
        writer.load_state_dict({**saved(), entry: value})
    assert held(writer) == before


def test_states_of_other_writers_and_tables() -> None:
    writer = MaxValueWriter("other")
    with pytest.raises(CheckpointMismatchError, match=r"rank_key: expected 'other'.*has 'score'"):
        writer.load_state_dict(saved())
    writer = MaxValueWriter("score")
    writer.load_state_dict(saved())
    for rows in (Rows(4, 6, 4), Rows(3, 6, 4), Rows(3, 2, 4)):
        with pytest.raises(CheckpointError, match="valid rows"):
            writer.verify(rows)


def test_arguments() -> None:
    odd: Any
    for odd in (None, 3, b"x", [], ("a",), torch.ones(1)):
        with pytest.raises(TypeError, match="rank_key: expected the path of a field as a str, found"):
            MaxValueWriter(odd)
