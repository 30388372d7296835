"""Chunks of frozen contents: those of the same identity are the same, and what was written has another one."""

from __future__ import annotations

import copy
import functools
import os
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncbuf import ListStorage, ReplayBuffer, RowRange, TensorStorage
from asyncbuf.storage._frozen import Chunk, ChunkVersions, InMemoryRows, tensors_of
from asyncbuf.storage._leaf import Field
from asyncbuf.storage._row_memory import field_names
from tests.helpers import lines_of

if TYPE_CHECKING:
    from asyncbuf import Storage

ROWS = 10  # of a chunk
CAPACITY = 48


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two segments of five rows in a chunk of the one, ten items in a chunk of the other."""
    monkeypatch.setattr("asyncbuf.storage._row_memory.SEGMENT_BYTES", 5 * 8)
    monkeypatch.setattr("asyncbuf.storage._row_memory.CHUNK_BYTES", ROWS * 8)
    monkeypatch.setattr("asyncbuf.storage._frozen_items._CHUNK_ITEMS", ROWS)


def write(storage: Storage, row: int, count: int, value: int = 0) -> None:
    numbers = torch.arange(count) + 1000 * value
    items: Any = {"x": numbers} if isinstance(storage, TensorStorage) else [{"x": number} for number in numbers]
    storage.write(storage.prepare(items), [RowRange(row, 0, count)])


def filled(make: type[Any], count: int = 35) -> Any:
    storage = make(CAPACITY)
    write(storage, 0, count)
    return storage


def identities(storage: Storage) -> list[str | None]:
    return [chunk.identity for chunk in storage.freeze().chunks()]


def same(before: list[Any], after: list[Any]) -> list[bool]:
    """Which chunks kept their identity."""
    return [one == other for one, other in zip(before, after, strict=True)]


STORAGES = pytest.mark.parametrize("make", [TensorStorage, ListStorage])


@STORAGES
def test_unchanged_rows_keep_their_identity(make: type[Any]) -> None:
    storage = filled(make)
    before = identities(storage)
    assert len(set(before)) == len(before) == 4
    assert None not in before
    storage.gather(torch.arange(20))
    assert identities(storage) == before


@STORAGES
@pytest.mark.parametrize(
    ("row", "count", "kept"),
    [
        (0, 1, [False, True, True, True]),
        (9, 1, [False, True, True, True]),
        (10, 1, [True, False, True, True]),
        (9, 2, [False, False, True, True]),
        (5, 20, [False, False, False, True]),
        (34, 1, [True, True, True, False]),
        (0, 35, [False] * 4),
    ],
)
def test_a_write_changes_the_chunks_that_it_touches(make: type[Any], row: int, count: int, kept: list[bool]) -> None:
    storage = filled(make)
    before = identities(storage)
    write(storage, row, count, 1)
    assert same(before, identities(storage)) == kept


@STORAGES
def test_writes_in_several_runs(make: type[Any]) -> None:
    storage = filled(make)
    before = identities(storage)
    items: Any = {"x": torch.arange(3)} if make is TensorStorage else [{"x": torch.tensor(0)}] * 3
    storage.write(storage.prepare(items), [RowRange(31, 0, 2), RowRange(0, 2, 1)])
    assert same(before, identities(storage)) == [False, True, True, False]


@STORAGES
def test_the_same_values_are_another_write(make: type[Any]) -> None:
    storage = filled(make)
    before = identities(storage)
    write(storage, 0, 35)
    assert not any(same(before, identities(storage)))


@STORAGES
def test_the_last_chunk_changes_as_it_grows(make: type[Any]) -> None:
    storage = filled(make)
    before = identities(storage)
    write(storage, 35, 1)
    assert same(before, identities(storage)) == [True, True, True, False]
    before = identities(storage)
    write(storage, 36, 8)
    after = identities(storage)
    assert same(before, after[:4]) == [True, True, True, False]
    assert len(after) == 5


@STORAGES
def test_other_contents_have_other_identities(make: type[Any]) -> None:
    storage = filled(make)
    seen = set(identities(storage))

    def check(other: Any) -> None:
        found = identities(other)
        assert len(found) == 4
        assert not seen & set(found)
        seen.update(found)

    check(filled(make))
    check(pickle.loads(pickle.dumps(storage)))
    check(copy.deepcopy(storage))
    check(copy.copy(storage))
    storage.clear()
    write(storage, 0, 35)
    check(storage)
    storage.load_state_dict(storage.state_dict())
    check(storage)


@STORAGES
def test_cleared_storage_has_no_chunks(make: type[Any]) -> None:
    storage = filled(make)
    storage.clear()
    assert identities(storage) == []
    assert identities(make(3)) == []


def test_items_that_are_let_go_change_their_chunk() -> None:
    storage = filled(ListStorage)
    before = identities(storage)
    storage.release(torch.tensor([3, 11]))
    assert same(before, identities(storage)) == [False, False, True, True]


@STORAGES
def test_a_forked_process_has_identities_of_its_own(make: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    storage = filled(make)
    before = identities(storage)
    number = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: number + 1)
    assert not any(same(before, identities(storage)))


@STORAGES
def test_identities_are_those_of_the_freeze(make: type[Any]) -> None:
    storage = filled(make)
    before = [*storage.freeze().chunks()]
    frozen = storage.freeze()
    write(storage, 0, 35, 1)
    chunks = [*frozen.chunks()]
    assert [chunk.identity for chunk in chunks] == [chunk.identity for chunk in before]
    if make is TensorStorage:
        assert torch.equal(torch.cat([chunk.tensors["x"] for chunk in chunks]), torch.arange(35))


def test_chunks_begin_at_fixed_rows() -> None:
    for count in (1, 9, 10, 11, 35):
        chunks = [*tensors_of(filled(TensorStorage, count).freeze())]
        starts = [int(chunk["x"][0]) for chunk in chunks]
        assert starts == list(range(0, count, ROWS))
        assert torch.equal(torch.cat([chunk["x"] for chunk in chunks]), torch.arange(count))


@STORAGES
def test_nothing_is_read_before_it_is_asked_for(make: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*_: object) -> Any:
        raise AssertionError("read")

    frozen = filled(make).freeze()
    monkeypatch.setattr("asyncbuf.storage._frozen_items.to_columns", no)
    monkeypatch.setattr("asyncbuf.storage._frozen.CopyOnWrite.visit", no)
    chunks = [*frozen.chunks()]
    with pytest.raises(AssertionError, match="read"):
        assert chunks[0].tensors


def test_contents_in_memory_are_of_no_known_identity() -> None:
    rows = InMemoryRows(None, [{"x": torch.ones(2)}])
    [chunk] = rows.chunks()
    assert isinstance(chunk, Chunk)
    assert chunk.identity is None
    assert chunk.tensors["x"].tolist() == [1, 1]
    chunk.tensors.clear()
    assert next(rows.chunks()).tensors  # what a reader does with the dict does not show


async def test_buffer_that_was_restored_has_the_identities_of_what_it_was_restored_from() -> None:
    async def buffer() -> ReplayBuffer:
        made = ReplayBuffer(TensorStorage(CAPACITY), batch_size=2)
        await made.extend({"x": torch.arange(35)})
        return made

    source, target = await buffer(), await buffer()
    own, before = identities(target._storage), identities(source._storage)
    await target.restore(await source.snapshot())
    assert identities(target._storage) == before
    for each in (source, target):
        await each.extend({"x": torch.arange(1)})
    after = [identities(each._storage) for each in (source, target)]
    assert same(before, after[0]) == same(before, after[1]) == [True, True, True, False]
    assert after[0][-1] != after[1][-1]
    assert not {*own} & {*after[1]}


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    steps = []
    for _ in range(draw(st.integers(1, 12))):
        row = draw(st.integers(0, CAPACITY - 1))
        steps.append(
            (draw(st.sampled_from(["write"] * 6 + ["clear", "load"])), row, draw(st.integers(1, CAPACITY - row)))
        )
    return steps


@STORAGES
@given(programs())
@settings(max_examples=60, deadline=None)
def test_the_same_identity_means_the_same_contents(make: type[Any], program: list[tuple[str, int, int]]) -> None:
    storage = filled(make)
    known: dict[str | None, bytes] = {}
    for number, (step, row, count) in enumerate(program):
        if step == "write":
            write(storage, row, count, number)
        elif step == "clear":
            storage.clear()
        else:
            storage.load_state_dict(storage.state_dict())
        for chunk in storage.freeze().chunks():
            contents = pickle.dumps({name: tensor.tolist() for name, tensor in chunk.tensors.items()})
            assert known.setdefault(chunk.identity, contents) == contents


def test_a_write_costs_next_to_nothing() -> None:
    versions = ChunkVersions(100_000)
    for row in range(100):
        # 0.2 microseconds
        assert lines_of(functools.partial(versions.wrote, row, row + 1)) <= 8


class Compared(str):
    """A path that counts how often it is compared."""

    comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.comparisons += 1
        return str.__eq__(self, other)


def testfield_names_of_many_fields_take_time_for_each_and_not_for_each_pair() -> None:
    """They are made while a buffer stands still, in a step of the event loop."""
    paths = [f"{number}" for number in range(1_000)] + ["0", "0", "1"]
    Compared.comparisons = 0
    names = field_names(tuple(Field(Compared(path), torch.uint8, ()) for path in paths))
    assert names[-3:] == ["0#2", "0#3", "1#2"]
    assert Compared.comparisons < 2 * len(paths)
