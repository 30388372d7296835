"""Fixed data in its two kinds: columns, which have a row for each item, and datasets, which make items one by one."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from torch.utils.data import Subset as TorchSubset

from asyncbuf._plain import registry, tree
from asyncbuf._plain.counter_hash import CounterHash
from asyncbuf._runtime.arguments import count, flag, shown

if TYPE_CHECKING:
    from asyncbuf._plain.integers import Int64Array

_STREAM = (
    "a data set that is read in one order has no place to go on from and cannot be shuffled: write its items into a "
    "ReplayBuffer with extend(), or hand in a data set with __len__ and __getitem__"
)


class Subset:
    """Some items of fixed data, in an order. Nothing is copied.

    For parts that ``split`` does not make, such as the folds of a cross-validation.

    Args:
        data: what ``ReplayBuffer.from_dataset`` takes.
        indices: which items: integers ``[items]``, at least one.

    Attributes:
        data: the whole data, never a ``Subset`` itself.
        indices: which of its items: int64 ``[items]``.

    Raises:
        TypeError: the data is of another kind, or the indices are no integers.
        ValueError: there are none, or they have more than one axis.
        IndexError: one is no item.
    """

    def __init__(self, data: Any, indices: Any) -> None:
        data = unwrapped(data)
        length = length_of(data)
        found = _indices(indices)
        if int(found.min()) < 0 or int(found.max()) >= length:
            raise IndexError(f"indices: expected items 0 to {length - 1}, found {found.min()} to {found.max()}")
        is_part = isinstance(data, Subset)
        self.data: Any = data.data if is_part else data
        self.indices: Int64Array = data.indices[found] if is_part else found

    def __len__(self) -> int:
        """Number of items."""
        return len(self.indices)

    def __getitem__(self, number: int) -> Any:
        """One item; of columns, a tree of what is at its place."""
        where = int(self.indices[number])
        return tree.map_leaves(lambda leaf: leaf[where], self.data) if are_columns(self.data) else self.data[where]


def _indices(indices: Any) -> Int64Array:
    try:
        found = np.asarray(indices.cpu() if isinstance(indices, torch.Tensor) else indices)
    except (TypeError, ValueError) as error:
        raise TypeError(f"indices: expected integers, found {shown(indices)}") from error
    if found.dtype.kind not in "iu" and found.size:
        raise TypeError(f"indices: expected integers, found {found.dtype} (mask.nonzero() has the places of a mask)")
    if found.ndim != 1 or not len(found):
        raise ValueError(f"indices: expected the places of items, [items], at least one; found {list(found.shape)}")
    return found.astype(np.int64)


def split(data: Any, fractions: Sequence[float], *, shuffle: bool = True, seed: int = 0) -> list[Subset]:
    """Divide fixed data into parts that share no item, such as for training and validation. Nothing is copied.

    The same data length, fractions and seed always give the same parts. Within a part, items are in the order of the
    data::

        train, valid = split(data, [0.9, 0.1])
        async with ReplayBuffer.from_dataset(train, batch_size=256) as buffer: ...

    Args:
        data: what ``ReplayBuffer.from_dataset`` takes.
        fractions: the share of each part: positive numbers whose sum is 1. What rounding leaves over goes to the parts
            that lost most by it, so that the parts together are the whole.
        shuffle: which items go where: chosen at random, or the first ones to the first part, and so on.
        seed: fixes the choice.

    Returns:
        As many parts as there are fractions.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: the fractions are no shares of a whole, or a part would have no item.
    """
    length = length_of(data)
    sizes = _sizes(length, fractions)
    seed = count(seed, "seed", 0, most=2**63 - 1)
    items = np.arange(length)
    if flag(shuffle, "shuffle"):
        # By a hash of its own, and not by a generator whose outputs another version may change.
        items = CounterHash(seed).of(items).argsort(kind="stable")
    parts = np.split(items, np.cumsum(sizes)[:-1])
    return [Subset(data, np.sort(part)) for part in parts]


def _sizes(length: int, given: Any) -> list[int]:
    """How many items each part has: the method of the largest remainder."""
    is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes) and len(given) > 0
    if not is_list or any(isinstance(share, bool) or not isinstance(share, int | float) for share in given):
        raise TypeError(f"fractions: expected a list of numbers, such as [0.9, 0.1], found {shown(given)}")
    fractions: list[float] = list(given)
    if not all(share > 0 for share in fractions) or not math.isclose(sum(fractions), 1.0, abs_tol=1e-6):
        raise ValueError(f"fractions: expected positive numbers whose sum is 1, found {shown(fractions)}")
    exact: list[float] = [share * length for share in fractions]
    sizes = [math.floor(size + 1e-9 * length) for size in exact]
    by_loss = sorted(range(len(sizes)), key=lambda part: sizes[part] - exact[part])
    for part in by_loss[: length - sum(sizes)]:
        sizes[part] += 1
    if sum(sizes) != length or not all(sizes):
        raise ValueError(
            f"fractions: expected parts of at least one item, found {sizes} for {length} items by {list(fractions)}"
        )
    return sizes


# -- what kind it is --------------------------------------------------------------------------------------------------


def unwrapped(data: Any) -> Any:
    """The tensors of a ``TensorDataset``, or of a part of one: they need not be read item by item."""
    if type(data) is TensorDataset:
        return data.tensors
    if type(data) is TorchSubset:
        whole = unwrapped(data.dataset)
        return Subset(whole, data.indices) if isinstance(whole, Subset) or are_columns(whole) else data
    return data


def are_columns(data: Any) -> bool:
    """Whether data is a tree of columns. A list is taken for a dataset of items, as a ``DataLoader`` does."""
    if isinstance(data, torch.Tensor | np.ndarray):
        return True
    if isinstance(data, Dataset | list):
        return False
    container = registry.container_of(type(data))
    # What a user wrote as a dataclass with items of its own is a dataset.
    return container is not None and not (container.name == "dataclass" and hasattr(type(data), "__getitem__"))


def length_of(data: Any) -> int:
    """Number of items of fixed data of any kind, after a look at what kind it is.

    Raises:
        TypeError: it is none.
        ValueError: there is no item, or columns differ in length.
    """
    if isinstance(data, Subset):
        return len(data)
    if are_columns(data):
        leaves, spec = tree.flatten(data, batched=True)
        return _common_length(leaves, spec.paths())
    if isinstance(data, IterableDataset | Iterator):
        raise TypeError(f"data: expected a data set with a length, found {type(data).__name__}; {_STREAM}")
    is_map = hasattr(type(data), "__getitem__") and hasattr(type(data), "__len__")
    if not is_map or isinstance(data, str | bytes | type | range | Mapping):
        hint = f"; {_STREAM}" if hasattr(type(data), "__iter__") and not is_map else ""
        raise TypeError(
            "data: expected tensors, arrays, trees of those, or a data set with __len__ and __getitem__, found "
            f"{shown(data)} of type {type(data).__name__}{hint}"
        )
    length = len(data)
    if length < 1:
        raise ValueError(f"data: expected at least one item, found a {type(data).__name__} without any")
    return length


def _common_length(leaves: Sequence[Any], paths: Sequence[str]) -> int:
    length, first = -1, ""
    for leaf, path in zip(leaves, paths, strict=True):
        if not isinstance(leaf, torch.Tensor | np.ndarray):
            inner = f" (hand in one of its parts, such as data[{path!r}])" if hasattr(type(leaf), "__getitem__") else ""
            raise TypeError(f"data: expected a tensor or array at {path!r}, found {type(leaf).__name__}{inner}")
        if leaf.ndim == 0:
            raise ValueError(f"data: expected a leading axis of items at {path!r}, found no axes")
        if length not in (-1, len(leaf)):
            raise ValueError(f"data: expected {length} items at {path!r}, as at {first!r}, found {len(leaf)}")
        length, first = len(leaf), first or path
    if length < 1:
        raise ValueError(f"data: expected at least one item, found {'no tensor' if length < 0 else 'empty tensors'}")
    return length


def digest(indices: Int64Array | None) -> str | None:
    """What stands for the choice of a ``Subset`` in a checkpoint."""
    return None if indices is None else hashlib.sha256(np.ascontiguousarray(indices, "<i8").tobytes()).hexdigest()
