"""Items as they are, in a list: the storage for objects of any kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from asyncbuf import tree
from asyncbuf.errors import SchemaError
from asyncbuf.storage.base import Prepared, Run, Storage


class ListStorage(Storage):
    """Any objects, kept by reference and put together only when a batch is sampled.

    Without a ``collate_fn``, items are stacked leaf by leaf: tensors, arrays and numbers along a new first axis,
    strings into a list (as ``torch.utils.data.default_collate`` does), in the containers of the items.

    Args:
        capacity: number of rows.

    Raises:
        TypeError: the capacity is not an int.
        ValueError: the capacity is not positive.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._items: list[Any] = []

    def prepare(self, items: Any) -> Prepared:
        """Check that the items are a sequence of items (list, tuple, tensor or array) with at least one in it."""
        if isinstance(items, (torch.Tensor, np.ndarray)) and items.ndim > 0:
            # A row of a batched array is a view: it must not change with the array of the caller.
            items = list(items.clone()) if isinstance(items, torch.Tensor) else list(items.copy())
        if isinstance(items, (str, bytes, Mapping)) or not isinstance(items, Iterable):
            raise SchemaError(f"expected a sequence of items, found {type(items).__name__} (add() takes one item)")
        payload = list(items)
        if not payload:
            raise SchemaError("expected at least one item, found none")
        return Prepared(len(payload), 0, payload)

    def prepare_one(self, item: Any) -> Prepared:
        """Take one item of any kind."""
        return Prepared(1, 0, [item])

    def write(self, prepared: Prepared, runs: Sequence[Run]) -> None:
        """Keep the items; the list grows up to the capacity."""
        for run in runs:
            self._items.extend([None] * (run.row - len(self._items)))
            self._items[run.row : run.row + run.count] = prepared.payload[run.item : run.item + run.count]

    def gather(self, indices: torch.Tensor) -> list[Any]:
        """The items themselves, in a list."""
        return [self._items[row] for row in indices.tolist()]

    def collate(self, gathered: Any) -> Any:
        """Stack items leaf by leaf.

        Raises:
            SchemaError: the items differ in structure.
        """
        leaves, spec = tree.flatten(gathered[0], batched=False)
        columns = [leaves]
        columns.extend(tree.flatten_like(spec, item, batched=False) for item in gathered[1:])
        stacked = [default_collate(list(column)) for column in zip(*columns, strict=True)]
        return tree.unflatten(spec, stacked, batch=len(gathered))

    @property
    def needs_collate(self) -> bool:
        """True: the items are separate objects."""
        return True

    def gather_nbytes(self, count: int) -> int:
        """Bytes of the references that are copied."""
        return 8 * count

    def clear(self) -> None:
        """Forget every item."""
        self._items.clear()
