"""Items as they are, in a list: the storage for objects of any kind."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from asyncbuf._plain.codec import decode, join
from asyncbuf._plain.column_leaves import DOCUMENT
from asyncbuf._plain.columns_back import from_columns
from asyncbuf._plain.savable import MisfitError, check_savable
from asyncbuf._plain.state import natural
from asyncbuf._runtime.collector import collections_paused, count_as_old
from asyncbuf._runtime.own_memory import packed_memory
from asyncbuf._runtime.summary import summary
from asyncbuf.errors import CheckpointCorruptError, CheckpointMismatchError, SchemaError
from asyncbuf.storage._columns import of_items
from asyncbuf.storage._frozen import tensors_of
from asyncbuf.storage._frozen_items import FrozenItems, new_versions
from asyncbuf.storage._stacking import check_stackable, stacked
from asyncbuf.storage._weight import mean_weight, weight
from asyncbuf.storage.base import Prepared, Storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from asyncbuf.rows import RowRange
    from asyncbuf.storage._frozen import Frozen

_MANY = 100_000
_STRUCTURE = "structure"  # of chunks before version 3 of a snapshot


_MOST_WEIGHED = 256


class ListStorage(Storage):
    """Any objects, kept by reference and put together only when a batch is sampled.

    Without a ``collate_fn``, items are stacked leaf by leaf: tensors, arrays and numbers along a new first axis,
    strings into a list (as ``torch.utils.data.default_collate`` does), in the containers of the items.

    An item is refused if it holds what can never be saved: object arrays, tensors without dense data, arrays with a
    mask; and without a ``collate_fn`` what can never be stacked. An object of a class of your own is taken, and saved
    once its class is registered with ``register_type`` or ``register_codec``.

    Args:
        capacity: number of rows.

    Raises:
        TypeError: the capacity is not an int.
        ValueError: the capacity is not positive.
    """

    trusted: ClassVar[bool] = True

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._items: list[Any] = []
        self._sizes: Sequence[int] = ()
        self._stacks = False
        self._versions = new_versions()
        self._frozen: list[weakref.ref[FrozenItems]] = []
        self._is_old = False

    def prepare(self, items: Any) -> Prepared:
        """Check that the items are a sequence of items (list, tuple, tensor or array) with at least one in it."""
        if isinstance(items, (torch.Tensor, np.ndarray)) and items.ndim > 0:
            # A row of a batched array is a view: it must not change with the array of the caller.
            items = list(items.clone()) if isinstance(items, torch.Tensor) else list(items.copy())
        is_scalar = isinstance(items, (torch.Tensor, np.ndarray))  # those with axes are lists by now
        if is_scalar or isinstance(items, (str, bytes, Mapping)) or not isinstance(items, Iterable):
            raise SchemaError(f"expected a sequence of items, found {type(items).__name__} (add() takes one item)")
        payload = list(items)
        if not payload:
            raise SchemaError("expected at least one item, found none")
        number = 0
        try:
            for item in payload:
                self._check(item)
                number += 1
        except MisfitError as error:
            raise SchemaError(error.told(f"item {number}")) from error
        return Prepared(len(payload), 0, payload)

    def prepare_one(self, item: Any) -> Prepared:
        """Check that one item holds nothing that could never be saved or sampled."""
        try:
            self._check(item)
        except MisfitError as error:
            raise SchemaError(error.told()) from error
        return Prepared(1, 0, [item])

    def _check(self, item: Any) -> None:
        check_savable(item)
        if self._stacks:
            check_stackable(item)

    def write(self, prepared: Prepared, runs: Sequence[RowRange]) -> None:
        """Keep the items; the list grows up to the capacity."""
        for run in runs:
            self._will_write(run.row, run.row + run.count)
            self._items.extend([None] * (run.row - len(self._items)))
            self._items[run.row : run.row + run.count] = prepared.payload[run.item : run.item + run.count]

    def columns(self, prepared: Prepared, paths: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
        """Leaves of items: arrays ``[items, *leaf]`` by path."""
        return of_items(prepared.payload, paths)

    def release(self, rows: torch.Tensor) -> None:
        """Let removed items go."""
        for row in rows.tolist():
            self._will_write(row, row + 1)
            self._items[row] = None

    def _will_write(self, start: int, stop: int) -> None:
        self._versions.wrote(start, stop)
        for reference in self._frozen:
            if (frozen := reference()) is not None:
                frozen.before_write(start, stop)

    def gather(self, indices: torch.Tensor) -> list[Any]:
        """The items themselves, in a list."""
        return [self._items[row] for row in indices.tolist()]

    def will_collate(self, whether: bool) -> None:
        """Refuse items of which no batch can be made by ``collate``, or take them from now on."""
        self._stacks = whether

    def collate(self, gathered: Any) -> Any:
        """Stack items leaf by leaf.

        Raises:
            SchemaError: the items differ in structure.
        """
        return stacked(gathered)

    @property
    def needs_collate(self) -> bool:
        """True: the items are separate objects."""
        return True

    def gather_nbytes(self, count: int) -> int:
        """Bytes of the references that are copied."""
        return 8 * count

    def weigh(self, prepared: Prepared) -> int:
        """About as many bytes as the items have in a checkpoint. Of a large write, only some items are looked at."""
        items = prepared.payload
        if len(items) <= _MOST_WEIGHED:
            return round(sum(weight(item) for item in items))
        return round(mean_weight(items) * len(items))

    def weigh_rows(self, rows: torch.Tensor) -> int:
        """The same of each of some stored items, on average."""
        return round(mean_weight(self.gather(rows)))

    def state_dict(self) -> dict[str, Any]:
        """``chunks`` hold items from row 0 on, in columns (see ``asyncbuf._plain.columns``)."""
        frozen = self.freeze()
        return {"meta": frozen.meta, "chunks": list(tensors_of(frozen))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the contents."""
        self.load_rows(state["meta"], iter(state["chunks"]))()

    def freeze(self) -> Frozen:
        """Takes no time: references are kept as they are from now on, some at a time, when rows are written again.

        An item must not be changed once it was handed in.
        """
        if not self._is_old and len(self._items) >= _MANY and gc.isenabled():
            count_as_old()  # a collection that looks at each element of a new list takes tens of milliseconds
            self._is_old = True
        frozen = FrozenItems(self._items, self._versions.freeze())
        self._frozen.append(weakref.ref(frozen, self._frozen.remove))
        return frozen

    def load_rows(self, meta: Any, chunks: Iterator[dict[str, torch.Tensor]]) -> Callable[[], None]:
        """Build the items beside the live ones."""
        if not isinstance(meta, dict) or meta.keys() != {"items"}:
            raise CheckpointCorruptError(f"storage: expected a number of items, found {summary(meta)}")
        natural(meta["items"], "storage: expected the number of items")
        if meta["items"] > self.capacity:
            raise CheckpointMismatchError(f"storage: expected at most {self.capacity} items, found {meta['items']}")
        items: list[Any] = []
        sizes = []
        with collections_paused(keeps_objects=True):
            for chunk in chunks:
                before = len(items)
                items += from_columns(chunk, "storage: a chunk of items") if DOCUMENT in chunk else _items_of(chunk)
                sizes.append(len(items) - before)
        if len(items) != meta["items"]:
            raise CheckpointCorruptError(f"storage: expected {meta['items']} items, found {len(items)}")

        return lambda: self._replace(items, sizes)

    def loaded_chunks(self, identities: Sequence[str | None]) -> None:
        """Give chunks that were loaded, and not written since, the identities that they had."""
        if len(self._sizes) == len(identities):
            self._versions.loaded(self._sizes, identities)

    def _replace(self, items: list[Any], sizes: Sequence[int] = ()) -> None:
        self._items = items  # what was frozen keeps the list before
        self._sizes = sizes  # of the chunks that they came in
        self._frozen = []
        self._is_old = False
        self._versions.renew()

    def rows_in(self, meta: Any) -> int | None:
        """How many items a description speaks of."""
        return meta["items"] if isinstance(meta, dict) and type(meta.get("items")) is int else None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the items in about their own bytes, without the history of their tensors."""
        return {**vars(self), "_items": packed_memory(self._items), "_frozen": [], "_is_old": False}

    def __copy__(self) -> ListStorage:
        """Another storage of the same items."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self), _items=list(self._items), _versions=new_versions(), _frozen=[], _is_old=False)
        return copy

    def clear(self) -> None:
        """Forget every item."""
        self._replace([])


def _items_of(chunk: dict[str, torch.Tensor]) -> list[Any]:
    """The items of a chunk of an older version, which are encoded one by one."""
    tensors = dict(chunk)
    text = tensors.pop(_STRUCTURE, None)
    try:
        if text is None:
            raise ValueError("no structure")
        # In memory of their own: the chunk may be part of a state dict that somebody keeps.
        plain = join(json.loads(text.numpy().tobytes()), {name: tensor.clone() for name, tensor in tensors.items()})
        if type(plain) is not list:
            raise ValueError(f"a {type(plain).__name__} and no list")
        items = [decode(item, "item") for item in plain]
    except (ValueError, TypeError, RuntimeError, LookupError, AttributeError) as error:
        raise CheckpointCorruptError(f"storage: expected a chunk of items, found {error!r}") from error
    return items
