"""Several tables in one storage."""

from __future__ import annotations

import asyncio
import copy
import pickle
import random
from typing import Any

import pytest

from asyncbuf import (
    ImmutableDatasetWriter,
    MaxValueWriter,
    ReadOnlyError,
    ReplayBuffer,
    ReservoirWriter,
    RoundRobinWriter,
    TableWriter,
    TensorStorage,
)
from asyncbuf.errors import CheckpointCorruptError, CheckpointMismatchError
from tests.contracts.broken_writers import StopsWhenFull
from tests.helpers import rows, seeded, within

OTHERS: dict[str, Any] = {
    "data": ImmutableDatasetWriter,
    "best": lambda: MaxValueWriter("number"),
    "sample": lambda: ReservoirWriter(seed=1),
    "stops": StopsWhenFull,
}


def made(tables: dict[str, int], writers: Any = None, **more: Any) -> ReplayBuffer:
    writer = TableWriter(tables, writers)
    return ReplayBuffer(TensorStorage(sum(tables.values())), writer=writer, batch_size=4, generator=seeded(), **more)


def others() -> ReplayBuffer:
    return made({**dict.fromkeys(OTHERS, 5), "ring": 4}, {name: make() for name, make in OTHERS.items()})


async def stored(buffer: ReplayBuffer) -> dict[int, int]:
    """Numbers by row."""
    async with buffer:
        batch = await within(buffer.sample(1000))
    return dict(zip(batch.indices.tolist(), batch["number"].tolist(), strict=True))


async def test_each_table_is_a_ring_of_its_own() -> None:
    buffer = made({"a": 3, "b": 5})
    assert (await buffer.extend(rows(4), table="b")).tolist() == [3, 4, 5, 6]
    assert (await buffer.extend(rows(4, 4), table="a")).tolist() == [1, 2, 0]
    assert await buffer.add({name: value[0] for name, value in rows(1, 8).items()}, table="b") == 7
    assert (await buffer.extend(rows(2, 9), table="b")).tolist() == [3, 4]
    assert (len(buffer), buffer.write_count) == (8, 11)
    assert await stored(buffer) == {0: 7, 1: 5, 2: 6, 3: 9, 4: 10, 5: 2, 6: 3, 7: 8}


@pytest.mark.parametrize("seed", range(8))
async def test_rows_are_those_of_separate_buffers(seed: int) -> None:
    choose, together = random.Random(seed), others()
    alone = {name: ReplayBuffer(TensorStorage(5), writer=make()) for name, make in OTHERS.items()}
    alone["ring"] = ReplayBuffer(TensorStorage(4), writer=RoundRobinWriter())
    starts = {name: 5 * i for i, name in enumerate(alone)}
    written = 0
    for step in range(60):
        name = choose.choice(list(alone))
        if choose.random() < 0.2 and len(alone[name]):
            gone = choose.sample(range(len(alone[name])), 1)
            left = await alone[name].remove(gone)
            assert await together.remove([row + starts[name] for row in gone]) == left
            continue
        items = rows(choose.choice((1, 2, 5)), written)
        items["number"] = items["number"] * 7 % 31
        try:
            expected = (await alone[name].extend(items)).tolist()
        except ReadOnlyError:
            with pytest.raises(ReadOnlyError):
                await together.extend(items, table=name)
            continue
        written += len(items["number"])
        assert [row - starts[name] for row in (await together.extend(items, table=name)).tolist()] == expected
        assert len(together) == sum(map(len, alone.values()))
        if step % 7 == 0:
            state = await together.state_dict()
            together = others()
            await together.load_state_dict(state)


async def test_nothing_happens_without_a_table_that_there_is() -> None:
    buffer = made({"a": 3, "b": 5})
    wrong: Any
    for wrong, error, message in (
        ("c", ValueError, r"table: expected one of \['a', 'b'\], found 'c'"),
        (3, TypeError, r"table: expected one of \['a', 'b'\], found 3"),
        ([], TypeError, r"table: expected one of \['a', 'b'\]"),
        (None, ValueError, r"table: expected one of \['a', 'b'\], as in extend\(items, table='a'\); found none"),
    ):
        with pytest.raises(error, match=message):
            await buffer.extend(rows(2), table=wrong)
        with pytest.raises(error, match=message):
            await buffer.add({name: value[0] for name, value in rows(1).items()}, table=wrong)
    ring = ReplayBuffer(TensorStorage(4))
    with pytest.raises(TypeError, match="table: expected none, because a RoundRobinWriter has no tables"):
        await ring.extend(rows(2), table="a")
    assert buffer.write_count == ring.write_count == 0
    await buffer.extend(rows(2), table="b")
    assert buffer.write_count == 2


async def test_large_writes_and_priorities_go_into_tables() -> None:
    buffer = made({"a": 3, "b": 5})
    await asyncio.gather(
        *(buffer.extend(rows(3, 3 * i, width=200_000), table="b" if i % 2 else "a", priority=1.0) for i in range(4))
    )
    assert (len(buffer), buffer.write_count) == (8, 12)


def test_copies_and_pickles() -> None:
    writer = TableWriter({"a": 3, "b": 5}, {"b": ReservoirWriter(seed=3)})
    for other in (copy.deepcopy(writer), pickle.loads(pickle.dumps(writer))):
        assert dict(other.tables) == {"a": range(3), "b": range(3, 8)}
        assert other.state_dict() == writer.state_dict()


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("rows", [["a", 5], ["b", 3]], CheckpointMismatchError),
        ("rows", [["a", 3], ["c", 5]], CheckpointMismatchError),
        ("write_count", 5, CheckpointCorruptError),
        ("removed_from", ["c"], CheckpointCorruptError),
        ("removed_from", [[]], CheckpointCorruptError),
        ("writers", {}, CheckpointCorruptError),
        ("writers", {"a": {}, "b": {}}, CheckpointCorruptError),
    ],
)
async def test_a_state_that_is_none_is_refused(key: str, value: Any, error: type[Exception]) -> None:
    buffer = made({"a": 3, "b": 5})
    await buffer.extend(rows(4), table="b")
    state = await buffer.state_dict()
    target = made({"a": 3, "b": 5})
    await target.load_state_dict(state)
    state["writer"][key] = value
    with pytest.raises(error):
        await target.load_state_dict(state)
    assert (await target.extend(rows(2), table="b")).tolist() == [7, 3]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tables": ["a"]}, TypeError, "tables: expected a dict with the number of rows of each"),
        ({"tables": {}}, TypeError, "tables: expected a dict"),
        ({"tables": {1: 2}}, TypeError, "tables: expected names as keys, found 1"),
        ({"tables": {"": 2}}, TypeError, "tables: expected names as keys, found ''"),
        ({"tables": {"a": 0}}, ValueError, r'tables\["a"\]: expected at least 1, found 0'),
        ({"tables": {"a": 1.5}}, TypeError, r'tables\["a"\]: expected an int, found 1.5'),
        ({"writers": []}, TypeError, "writers: expected a dict"),
        ({"writers": {"c": RoundRobinWriter()}}, ValueError, r"writers: expected some of \['a', 'b'\], found 'c'"),
        ({"writers": {"a": RoundRobinWriter}}, TypeError, r'writers\["a"\]: expected a Writer.*RoundRobinWriter\(\)'),
        ({"writers": {"a": TableWriter({"x": 1})}}, ValueError, "expected a writer without tables of its own"),
        ({"writers": dict.fromkeys("ab", RoundRobinWriter())}, ValueError, "expected a writer of its own for each"),
    ],
)
def test_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TableWriter(**{"tables": {"a": 3, "b": 5}, **arguments})


def test_tables_have_all_rows_of_the_storage() -> None:
    with pytest.raises(ValueError, match=r"tables: expected 9 rows together.*found 3 for 'a', 5 for 'b'"):
        ReplayBuffer(TensorStorage(9), writer=TableWriter({"a": 3, "b": 5}))
