"""Which data is taken for what, parts of it, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from torch.utils.data import Subset as TorchSubset

from asyncbuf import (
    CheckpointCorruptError,
    CheckpointError,
    ColumnStorage,
    DatasetStorage,
    ReadOnlyError,
    Runs,
    Storage,
    Subset,
    TensorStorage,
    split,
)
from asyncbuf.rows import RowRange
from asyncbuf.storage.dataset import storage_of

if TYPE_CHECKING:
    from collections.abc import Iterator


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> int:
        return number * number


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@dataclasses.dataclass
class Columns:
    x: torch.Tensor
    y: np.ndarray[Any, Any]


@dataclasses.dataclass
class Folder:
    """A dataset that happens to be a dataclass."""

    names: list[str]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> str:
        return self.names[number]


COLUMNS: dict[str, Any] = {
    "a tensor": torch.ones(3, 2),
    "an array": np.ones(3),
    "a dict": {"x": torch.ones(3), "y": np.ones((3, 2))},
    "a tuple": (torch.ones(3), torch.zeros(3)),
    "a dataclass": Columns(torch.ones(3), np.ones(3)),
    "a part": Subset({"x": torch.ones(9)}, [1, 2, 5]),
    "a TensorDataset": TensorDataset(torch.ones(3)),
    "a part of a TensorDataset": TorchSubset(TensorDataset(torch.ones(9)), [1, 2, 5]),
}
DATASETS: dict[str, Any] = {
    "a dataset": TorchSubset(Squares(), [1, 2, 3]),
    "a list": [1, 2, 3],
    "a list of tensors": [torch.ones(2), torch.ones(2), torch.ones(2)],
    "a dataclass with items": Folder(["a", "b", "c"]),
    "a part": Subset(Squares(), np.array([4, 4, 1], np.int32)),
}


@pytest.mark.parametrize(("data", "kind"), [*((d, ColumnStorage) for d in COLUMNS.values())] + [
    (d, DatasetStorage) for d in DATASETS.values()
])  # fmt: skip
def test_what_is_taken_for_what(data: Any, kind: type[Storage]) -> None:
    storage = storage_of(data)
    assert type(storage) is kind
    assert storage.capacity == 3


STREAM = "no place to go on from.*extend"
REFUSED: list[tuple[Any, type[Exception], str]] = [
    (Stream(), TypeError, f"expected a data set with a length, found Stream.*{STREAM}"),
    ((i for i in range(3)), TypeError, f"found generator.*{STREAM}"),
    (iter([1]), TypeError, STREAM),
    ({1, 2}, TypeError, f"expected tensors, arrays, trees.*found.*set.*{STREAM}"),
    (None, TypeError, "expected tensors, arrays, trees of those, or a data set.*found None"),
    (3, TypeError, "found 3 of type int"),
    ("text", TypeError, "found 'text' of type str"),
    (b"x", TypeError, "of type bytes"),
    (range(3), TypeError, "of type range"),
    (Squares, TypeError, "found the class Squares"),
    (TensorStorage(3), TypeError, "of type TensorStorage"),
    (torch.tensor(1.0), ValueError, "expected a leading axis of items at '.', found no axes"),
    (torch.empty(0, 3), ValueError, "expected at least one item, found empty tensors"),
    ({}, ValueError, "expected at least one item, found no tensor"),
    ([], ValueError, "expected at least one item, found a list without any"),
    ({"x": torch.ones(3), "y": torch.ones(4)}, ValueError, "expected 3 items at 'y', as at 'x', found 4"),
    ({"x": torch.ones(3), "y": 5}, TypeError, "expected a tensor or array at 'y', found int"),
    ({"train": Squares()}, TypeError, r"expected a tensor or array at 'train', found Squares.*data\['train'\]"),
    ({"x": np.array(["a", "b"])}, TypeError, "expected numbers at 'x', found an array of dtype <U1"),
    ({"x": np.array([None, 1])}, TypeError, "expected numbers at 'x', found an array of dtype object"),
    (torch.ones(3, device="meta"), TypeError, "expected dense tensors on the CPU at '.', found"),
    (torch.eye(3).to_sparse(), TypeError, "expected dense tensors on the CPU"),
]


@pytest.mark.parametrize(("data", "error", "message"), REFUSED)
def test_what_is_refused(data: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"data: .*{message}"):
        storage_of(data)


def test_the_wrong_storage() -> None:
    with pytest.raises(TypeError, match="data: expected a data set of items, found tensors or arrays"):
        DatasetStorage({"x": torch.ones(3)})
    with pytest.raises(TypeError, match="data: expected tensors, arrays or trees of those, found"):
        ColumnStorage(Squares())


@pytest.mark.parametrize("data", [{"x": torch.ones(3)}, Squares()])
def test_nothing_is_written(data: Any) -> None:
    storage = storage_of(data)
    prepared = TensorStorage(3).prepare({"x": torch.ones(1)})
    for call in (
        lambda: storage.prepare({"x": torch.ones(1)}),
        lambda: storage.prepare_one({"x": 1.0}),
        lambda: storage.write(prepared, [RowRange(0, 0, 1)]),
        storage.clear,
    ):
        with pytest.raises(ReadOnlyError, match=f"its {storage.capacity} items"):
            call()
    storage.release(torch.tensor([0]))


def test_gradients_and_kinds_of_tensors() -> None:
    leaf = torch.nn.Parameter(torch.randn(5, 2))
    storage = storage_of({"p": leaf, "half": torch.ones(5, dtype=torch.bfloat16), "turned": torch.randn(2, 5).T})
    found = storage.gather(torch.tensor([1, 4]))
    assert type(found["p"]) is torch.Tensor
    assert not found["p"].requires_grad
    assert torch.equal(found["p"], leaf[[1, 4]])
    assert found["half"].dtype is torch.bfloat16
    columns = storage.columns(TensorStorage(3).prepare({"x": torch.ones(1)}), ["half", "p"])
    assert columns["half"].dtype == np.float32
    assert columns["p"].shape == (5, 2)
    assert storage.runs is Runs.ANYWHERE


@pytest.mark.parametrize("name", ["length", "kind", "fields", "indices"])
@pytest.mark.parametrize("odd", [None, 3, -1, "x", [], {}, [["x"]], torch.ones(2), 2**70])
def test_forged_descriptions(name: str, odd: Any) -> None:
    for data in ({"x": torch.ones(3)}, Subset(Squares(), [1, 2, 3])):
        storage = storage_of(data)
        state = storage.state_dict()
        if type(odd) is type(state["dataset"][name]) and state["dataset"][name] == odd:
            continue
        state["dataset"][name] = odd
        with pytest.raises(CheckpointError, match=r"storage: .*of the data set: expected"):
            storage.load_state_dict(state)
        del state["dataset"][name]
        with pytest.raises(CheckpointCorruptError, match="storage: expected the entries"):
            storage.load_state_dict(state)
    malformed: list[Any] = [None, {}, {"dataset": 3}, {"items": 3}, []]
    for state in malformed:
        with pytest.raises(CheckpointCorruptError, match="storage: expected"):
            storage_of(Squares()).load_state_dict(state)
    with pytest.raises(CheckpointCorruptError, match="expected no chunks"):
        storage_of(Squares()).load_rows(storage_of(Squares()).state_dict(), iter([{"x": torch.ones(1)}]))


# -- parts ------------------------------------------------------------------------------------------------------------


def test_items_of_parts() -> None:
    part = Subset(Squares(), [3, 5, 7])
    assert [part[i] for i in range(len(part))] == [9, 25, 49]
    inner = Subset(part, torch.tensor([2, 0]))
    assert inner.indices.tolist() == [7, 3]
    assert isinstance(inner.data, Squares)
    assert Subset({"x": torch.arange(9) * 2}, [4])[0]["x"] == 8


@pytest.mark.parametrize(
    ("indices", "error", "message"),
    [
        ([], ValueError, "at least one"),
        ([[1]], ValueError, r"\[items\]"),
        (3, ValueError, r"\[items\]"),
        ([10], IndexError, "items 0 to 9, found 10 to 10"),
        ([-1, 2], IndexError, "items 0 to 9, found -1"),
        ([1.5], TypeError, "expected integers"),
        ([True, False], TypeError, "nonzero"),
        ("x", TypeError, "expected integers"),
        (None, TypeError, "expected integers"),
        ([[1], [2, 3]], TypeError, "expected integers"),
    ],
)
def test_odd_indices(indices: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"indices: .*{message}"):
        Subset(Squares(), indices)


@pytest.mark.parametrize("length", [2, 3, 7, 10, 99, 1000])
@pytest.mark.parametrize("fractions", [[1.0], [0.5, 0.5], [0.9, 0.1], [1 / 3] * 3, [0.7, 0.2, 0.1], [1]])
def test_parts_are_the_whole(length: int, fractions: list[float]) -> None:
    data = torch.arange(length)
    sizes = [share * length for share in fractions]
    if any(size < 0.5 for size in sizes):
        return
    try:
        parts = split(data, fractions)
    except ValueError as error:
        assert "at least one item" in str(error)  # noqa: PT017
        return
    together = np.concatenate([part.indices for part in parts])
    assert sorted(together.tolist()) == list(range(length))
    assert all(abs(len(part) - size) < 1 for part, size in zip(parts, sizes, strict=True))
    assert all((np.diff(part.indices) > 0).all() for part in parts)
    again = split(data, fractions)
    assert all(np.array_equal(one.indices, other.indices) for one, other in zip(parts, again, strict=True))


def test_sizes_are_those_of_the_largest_remainder() -> None:
    # 10 * (0.55, 0.35, 0.1) = 5.5, 3.5, 1: the first of those that lost most gets what is left over.
    assert [len(part) for part in split(torch.arange(10), [0.55, 0.35, 0.1])] == [6, 3, 1]
    assert [len(part) for part in split(torch.arange(7), [0.34, 0.33, 0.33])] == [3, 2, 2]
    assert [len(part) for part in split(range_of(1000), [0.1] * 10)] == [100] * 10


def range_of(count: int) -> torch.Tensor:
    return torch.arange(count)


def test_which_items_go_where() -> None:
    data = range_of(1000)
    one, other = (split(data, [0.5, 0.5], seed=seed)[0].indices for seed in (0, 1))
    assert 200 < len(np.intersect1d(one, other)) < 300
    assert split(data, [0.3, 0.7], shuffle=False)[0].indices.tolist() == list(range(300))
    nested = split(split(data, [0.5, 0.5])[0], [0.5, 0.5])
    assert not set(nested[0].indices) & set(nested[1].indices)
    assert set(nested[0].indices) | set(nested[1].indices) == set(one)
    # For good: other versions must make the same parts.
    assert split(range_of(12), [0.5, 0.5])[0].indices.tolist() == [2, 5, 7, 8, 10, 11]


@pytest.mark.parametrize("fractions", [None, 3, "ab", {}, [], [None], ["a"], [True], {0.5}])
def test_odd_kinds_of_fractions(fractions: Any) -> None:
    with pytest.raises(TypeError, match=r"fractions: expected a list of numbers, such as \[0.9, 0.1\], found"):
        split(torch.arange(9), fractions)


@pytest.mark.parametrize("fractions", [[0.5], [0.5, 0.6], [1.5, -0.5], [1.0, 0.0], [float("nan")], [float("inf")]])
def test_odd_fractions(fractions: Any) -> None:
    with pytest.raises(ValueError, match="fractions: expected positive numbers whose sum is 1, found"):
        split(torch.arange(9), fractions)


def test_other_odd_arguments() -> None:
    with pytest.raises(ValueError, match="fractions: expected parts of at least one item"):
        split(torch.arange(3), [0.999, 0.001])
    with pytest.raises(TypeError, match="shuffle: expected a bool"):
        split(torch.arange(3), [1.0], shuffle=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="seed: expected an int"):
        split(torch.arange(3), [1.0], seed=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="data: expected"):
        split(3, [1.0])
