"""Items as they are, in a list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from asyncbuf import ListStorage, RowRange, SchemaError

if TYPE_CHECKING:
    from collections.abc import Callable


class Pair(NamedTuple):
    one: Any
    two: Any


def extend(storage: ListStorage, items: Any, row: int = 0) -> None:
    prepared = storage.prepare(items)
    storage.write(prepared, [RowRange(row, 0, prepared.count)])


def gather(storage: ListStorage, *rows: int) -> list[Any]:
    return storage.gather(torch.tensor(rows, dtype=torch.int64))


@pytest.mark.parametrize(
    "make",
    [list, tuple, iter, lambda items: (item for item in items)],
    ids=["list", "tuple", "iterator", "generator"],
)
def test_sequences_of_items(make: Callable[[Any], Any]) -> None:
    storage = ListStorage(3)
    extend(storage, make(["a", "b", "c"]))
    assert gather(storage, 2, 0, 0) == ["c", "a", "a"]


def test_any_object_comes_back_itself() -> None:
    item = object()
    storage = ListStorage(2)
    prepared = storage.prepare_one(item)
    assert (prepared.count, storage.is_current(prepared)) == (1, True)
    storage.write(prepared, [RowRange(0, 0, 1)])
    extend(storage, [None], row=1)
    found = gather(storage, 0, 1)
    assert found[0] is item
    assert found[1] is None


def test_prepare_one_does_not_look_into_the_item() -> None:
    storage = ListStorage(1)
    storage.write(storage.prepare_one([1, 2, 3]), [RowRange(0, 0, 1)])
    assert gather(storage, 0) == [[1, 2, 3]]


@pytest.mark.parametrize("make", [torch.arange, np.arange], ids=["tensor", "array"])
def test_rows_of_an_array_do_not_change_with_it(make: Callable[[int], Any]) -> None:
    array = make(6).reshape(3, 2)
    storage = ListStorage(3)
    prepared = storage.prepare(array)
    assert prepared.count == 3
    storage.write(prepared, [RowRange(0, 0, 3)])
    array[:] = -1
    assert [row.tolist() for row in gather(storage, 0, 1, 2)] == [[0, 1], [2, 3], [4, 5]]


def test_the_list_of_the_caller_is_not_kept() -> None:
    items = [1, 2, 3]
    storage = ListStorage(3)
    prepared = storage.prepare(items)
    items.clear()
    storage.write(prepared, [RowRange(0, 0, 3)])
    assert gather(storage, 0, 1, 2) == [1, 2, 3]
    gather(storage, 0, 1, 2).clear()
    assert gather(storage, 0, 1, 2) == [1, 2, 3]


@st.composite
def writes(draw: st.DrawFn) -> tuple[int, list[tuple[int, list[RowRange]]]]:
    capacity = draw(st.integers(1, 8))
    made = []
    for _ in range(draw(st.integers(1, 5))):
        count = draw(st.integers(1, 10))
        runs = []
        for _ in range(draw(st.integers(0, 3))):
            length = draw(st.integers(0, min(count, capacity)))
            runs.append(RowRange(draw(st.integers(0, capacity - length)), draw(st.integers(0, count - length)), length))
        made.append((count, runs))
    return capacity, made


@given(writes())
@settings(max_examples=60, deadline=None)
def test_writes_against_a_dict(program: tuple[int, list[tuple[int, list[RowRange]]]]) -> None:
    capacity, made = program
    storage = ListStorage(capacity)
    model: dict[int, tuple[int, int]] = {}
    for number, (count, runs) in enumerate(made):
        items = [(number, i) for i in range(count)]
        storage.write(storage.prepare(items), runs)
        for run in runs:
            model.update(zip(range(run.row, run.row + run.count), items[run.item : run.item + run.count], strict=True))
    assert gather(storage, *model) == list(model.values())


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ({"a": [1]}, "expected a sequence of items, found dict (add() takes one item)"),
        ("abc", "expected a sequence of items, found str (add() takes one item)"),
        (b"abc", "expected a sequence of items, found bytes (add() takes one item)"),
        (5, "expected a sequence of items, found int (add() takes one item)"),
        (None, "expected a sequence of items, found NoneType (add() takes one item)"),
        (torch.tensor(1), "expected a sequence of items, found Tensor (add() takes one item)"),
        (np.array(1), "expected a sequence of items, found ndarray (add() takes one item)"),
        ([], "expected at least one item, found none"),
        (torch.zeros(0, 3), "expected at least one item, found none"),
        (iter(()), "expected at least one item, found none"),
    ],
    ids=["dict", "str", "bytes", "int", "None", "0-d tensor", "0-d array", "empty", "empty tensor", "empty iterator"],
)
def test_what_is_not_a_sequence_of_items(items: Any, message: str) -> None:
    storage = ListStorage(3)
    extend(storage, ["a", "b"])
    with pytest.raises(SchemaError) as caught:
        storage.prepare(items)
    assert str(caught.value) == message
    assert gather(storage, 0, 1) == ["a", "b"]


def test_clear_lets_go_of_the_items() -> None:
    storage = ListStorage(3)
    extend(storage, ["a", "b"])
    storage.clear()
    with pytest.raises(IndexError):
        gather(storage, 0)
    extend(storage, ["c"])
    assert gather(storage, 0) == ["c"]


def test_collate_stacks_leaf_by_leaf() -> None:
    items = [
        {"t": torch.full((2,), i), "n": np.full(3, i, np.float32), "d": {"s": f"s{i}", "p": Pair(i, [i > 0])}}
        for i in range(3)
    ]
    storage = ListStorage(3)
    extend(storage, items)
    assert storage.needs_collate
    batch = storage.collate(gather(storage, 2, 0))
    assert list(batch) == ["t", "n", "d"]
    assert batch["t"].tolist() == [[2, 2], [0, 0]]
    assert batch["n"].dtype is torch.float32
    assert batch["n"].tolist() == [[2, 2, 2], [0, 0, 0]]
    assert batch["d"]["s"] == ["s2", "s0"]
    assert type(batch["d"]["p"]) is Pair
    assert batch["d"]["p"].one.tolist() == [2, 0]
    assert type(batch["d"]["p"].two) is list
    assert batch["d"]["p"].two[0].tolist() == [True, False]


def test_collate_of_tensordicts() -> None:
    storage = ListStorage(2)
    extend(storage, [TensorDict({"a": torch.full((3,), i)}, batch_size=[3]) for i in range(2)])
    batch = storage.collate(gather(storage, 1, 0))
    assert isinstance(batch, TensorDict)
    assert batch.batch_size == torch.Size([2, 3])
    assert batch["a"].tolist() == [[1, 1, 1], [0, 0, 0]]


def test_collate_takes_keys_in_any_order() -> None:
    storage = ListStorage(2)
    batch = storage.collate([{"a": 1, "b": 2}, {"b": 4, "a": 3}])
    assert {key: value.tolist() for key, value in batch.items()} == {"a": [1, 3], "b": [2, 4]}


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([{"a": 1}, {"b": 1}], r"keys differ at the top: expected \['a'\], found \['b'\]"),
        ([{"a": 1}, {}], r"keys differ at the top: expected \['a'\], found \[\]"),
        ([{"a": 1}, {"a": [1]}], "structure differs at a: expected leaf, found list of type list"),
        ([1, {"a": 1}], "structure differs at the top: expected leaf, found dict of type dict"),
    ],
    ids=["other key", "no key", "nested", "leaf"],
)
def test_collate_refuses_items_of_different_structure(items: list[Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        ListStorage(2).collate(items)


def test_gather_moves_references_only() -> None:
    storage = ListStorage(5)
    prepared = storage.prepare([torch.zeros(1 << 20)] * 3)
    assert (prepared.count, prepared.nbytes) == (3, 0)
    assert storage.gather_nbytes(3) == 24


@pytest.mark.parametrize(
    ("capacity", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (2.0, TypeError)]
)
def test_capacity(capacity: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"capacity: expected .* found {capacity}"):
        ListStorage(capacity)
    assert ListStorage(4).capacity == 4
