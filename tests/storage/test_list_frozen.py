"""Items that were frozen stay as they were, in chunks that are the same with every save."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncbuf import ListStorage, ReplayBuffer, RowRange
from asyncbuf._plain.columns_back import from_columns
from asyncbuf._runtime.collector import collections_paused
from asyncbuf.storage._weight import mean_weight, weight
from tests.helpers import within
from tests.plain.codec_helpers import Celsius, Point, check

if TYPE_CHECKING:
    from pathlib import Path

    from asyncbuf.storage._frozen import Frozen

CAPACITY = 40


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of at most 16 items, noted by four, kept by eight."""
    monkeypatch.setattr("asyncbuf.storage._frozen_items._CHUNK_ITEMS", 16)
    monkeypatch.setattr("asyncbuf.storage._frozen_items._NOTED_ITEMS", 4)
    monkeypatch.setattr("asyncbuf.storage._frozen_items._SEGMENT_ITEMS", 8)


def write(storage: ListStorage, row: int, items: list[Any]) -> None:
    storage.write(storage.prepare(items), [RowRange(row, 0, len(items))])


def contents(frozen: Frozen) -> list[Any]:
    return [item for chunk in frozen.chunks() for item in from_columns(chunk.tensors, "test")]


def identities(storage: ListStorage) -> list[str | None]:
    return [chunk.identity for chunk in storage.freeze().chunks()]


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    kinds = st.sampled_from(["write"] * 5 + ["freeze"] * 3 + ["release", "clear", "load", "drop"])
    return [(draw(kinds), draw(st.integers(0, CAPACITY - 1)), draw(st.integers(1, 12))) for _ in range(20)]


@given(programs())
@settings(max_examples=60, deadline=None)
def test_what_was_frozen_stays_as_it_was(program: list[tuple[str, int, int]]) -> None:
    storage = ListStorage(CAPACITY)
    live: list[Any] = []
    frozen: list[tuple[Frozen, list[Any]]] = []
    known: dict[str | None, Any] = {}
    for number, (step, row, count) in enumerate(program):
        if step == "write":
            row = min(row, len(live))
            items: list[Any] = [f"{number}-{i}" for i in range(min(count, CAPACITY - row))]
            write(storage, row, items)
            live[row : row + len(items)] = items
        elif step == "release" and live:
            storage.release(torch.tensor([row % len(live)]))
            live[row % len(live)] = None
        elif step == "clear":
            storage.clear()
            live = []
        elif step == "load":
            storage.load_state_dict(storage.state_dict())
        elif step == "drop" and frozen:
            frozen.pop(row % len(frozen))
        elif step == "freeze":
            frozen.append((storage.freeze(), list(live)))
    for one, expected in frozen:
        assert one.meta == {"items": len(expected)}
        assert contents(one) == expected
        assert contents(one) == expected
        for chunk in one.chunks():
            found = from_columns(chunk.tensors, "test")
            assert known.setdefault(chunk.identity, found) == found


def test_freezing_copies_nothing_and_ends_with_what_was_frozen() -> None:
    storage = ListStorage(CAPACITY)
    write(storage, 0, list(range(CAPACITY)))
    frozen: Any = storage.freeze()
    assert frozen._items is storage._items
    write(storage, 9, ["new"])
    assert frozen._kept == {1: list(range(8, 16))}
    del frozen
    gc.collect()
    assert not storage._frozen


def test_writes_are_noted_more_finely_than_chunks() -> None:
    storage = ListStorage(CAPACITY)
    write(storage, 0, list(range(CAPACITY)))
    before = identities(storage)
    assert len(before) == 3
    write(storage, 17, [0])
    assert [one == other for one, other in zip(before, identities(storage), strict=True)] == [True, False, True]


def test_chunks_of_large_items_are_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncbuf.storage._frozen_items._CHUNK_BYTES", 5000)
    storage = ListStorage(CAPACITY)
    write(storage, 0, [torch.zeros(250) for _ in range(16)] + [1] * 16)
    chunks = [*storage.freeze().chunks()]
    assert [len(from_columns(chunk.tensors, "test")) for chunk in chunks] == [4, 4, 4, 4, 16]
    before = identities(storage)
    write(storage, 5, [torch.ones(250)])
    same = [one == other for one, other in zip(before, identities(storage), strict=True)]
    assert same == [True, False, True, True, True]


@pytest.mark.parametrize(
    ("value", "least", "most"),
    [
        (1, 1, 20),
        ("x" * 1000, 1000, 1100),
        (torch.zeros(250), 1000, 1100),
        (np.zeros(125), 1000, 1100),
        ([0.5] * 8000, 60_000, 70_000),
        ([torch.zeros(10)] * 1000, 40_000, 200_000),
        ({"a": [1, (2,)], "b": b"y" * 500}, 600, 900),
        (Point("x" * 1000), 1000, 1300),
        (Celsius(1.0), 1, 2000),
        (object(), 1, 2000),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), 1, 2000),
    ],
    ids=["int", "text", "tensor", "array", "numbers", "tensors", "dict", "dataclass", "codec", "object", "nested"],
)
def test_weight(value: Any, least: int, most: int) -> None:
    assert least <= weight(value) <= most
    assert mean_weight([value] * 100) == weight(value)


def test_weight_ends_for_what_contains_itself() -> None:
    value: list[Any] = []
    value += [value, {"x": value}]
    assert weight(value) > 0


# -- the collector ----------------------------------------------------------------------------------------------------


def test_collections_pause_and_go_on() -> None:
    assert gc.isenabled()
    with collections_paused():
        assert not gc.isenabled()
        with collections_paused(keeps_objects=True):
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), collections_paused(keeps_objects=True):
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    try:
        with collections_paused(keeps_objects=True):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_collections_pause_for_several_threads() -> None:
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        with collections_paused():
            inside.set()
            done.wait(20)

    thread = threading.Thread(target=other)
    with collections_paused():
        thread.start()
        inside.wait(20)
    assert not gc.isenabled()
    done.set()
    thread.join()
    assert gc.isenabled()


def is_young(item: object) -> bool:
    return any(each is item for generation in (0, 1) for each in gc.get_objects(generation))


def test_new_objects_count_as_old_unless_some_are_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    with collections_paused(keeps_objects=True):
        made: list[Any] = [[] for _ in range(10)]
    assert is_young(made[3]) == (gc.get_freeze_count() > 0)  # those of tests/conftest.py
    frozen = gc.get_freeze_count()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    try:
        with collections_paused(keeps_objects=True):
            made = [[] for _ in range(10)]
            assert is_young(made[3])
        assert not is_young(made[3])
    finally:
        if frozen:
            gc.freeze()


# -- whole buffers ----------------------------------------------------------------------------------------------------


async def test_many_items_of_every_kind(tmp_path: Path) -> None:
    goal = torch.arange(3.0)
    items: list[Any] = [
        {"x": torch.full((2,), float(i)), "n": i, "text": "é" * (i % 5), "goal": [goal, goal], "list": [0.5] * i}
        if i % 3
        else (np.float32(i), Point(i, None))
        for i in range(CAPACITY)
    ]

    def make() -> ReplayBuffer[Any]:
        return ReplayBuffer(ListStorage(CAPACITY), batch_size=4, collate_fn=list)

    buffer, other = make(), make()
    await buffer.extend(items)
    await buffer.save(tmp_path / "one")
    await other.load(tmp_path / "one")
    check(other._storage.gather(torch.arange(CAPACITY)), items)
    state = await other.state_dict()
    again = make()
    await again.load_state_dict(state)
    found = again._storage.gather(torch.arange(CAPACITY))
    for chunk in state["storage"]["chunks"]:
        for tensor in chunk.values():
            tensor.zero_()  # the dict stays the caller's
    check(found, items)
    assert found[1]["goal"][0] is found[1]["goal"][1]


async def test_writes_go_on_while_items_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> ReplayBuffer[Any]:
        return ReplayBuffer(ListStorage(CAPACITY), batch_size=4, collate_fn=list)

    buffer = make()
    await buffer.extend(list(range(CAPACITY)))
    snapshot = await buffer.snapshot()
    saving = asyncio.create_task(snapshot.save(tmp_path / "one"))
    for i in range(100):
        await buffer.extend([f"new {i}"])
    await within(saving)
    other = make()
    await other.load(tmp_path / "one")
    assert sorted(other._storage.gather(torch.arange(CAPACITY))) == list(range(CAPACITY))


@pytest.mark.parametrize("order", ["read-only", ">f4", ">i8", "<f4"])
async def test_arrays_that_torch_does_not_take_are_stacked(order: str) -> None:
    dtype = "<f8" if order == "read-only" else order
    arrays = [np.arange(3).astype(dtype) + i for i in range(4)]
    for array in arrays:
        array.flags.writeable = order != "read-only"
    buffer = ReplayBuffer(ListStorage(4), batch_size=4)
    await buffer.extend([{"x": array} for array in arrays])
    async with buffer:
        batch = await buffer.sample()
    expected = [arrays[row].tolist() for row in batch.indices.tolist()]
    assert batch["x"].tolist() == expected
    assert batch["x"].dtype == getattr(torch, np.dtype(dtype).newbyteorder("=").name)
