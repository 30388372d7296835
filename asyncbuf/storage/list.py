"""Items as they are, in a list: the storage for objects of any kind."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from asyncbuf._plain.codec import decode, encode, join, split
from asyncbuf._plain.savable import MisfitError, check_savable
from asyncbuf._plain.state import natural
from asyncbuf._runtime.own_memory import packed_memory
from asyncbuf._runtime.summary import summary
from asyncbuf.errors import CheckpointCorruptError, CheckpointMismatchError, SchemaError
from asyncbuf.storage._columns import of_items
from asyncbuf.storage._frozen import Chunk, ChunkVersions, tensors_of
from asyncbuf.storage._stacking import check_stackable, stacked
from asyncbuf.storage.base import Prepared, Storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from asyncbuf.rows import RowRange
    from asyncbuf.storage._frozen import Frozen

_CHUNK_ITEMS = 1000
_STRUCTURE = "structure"


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
        self._stacks = False
        self._versions = ChunkVersions(_CHUNK_ITEMS)

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
            self._versions.wrote(run.row, run.row + run.count)
            self._items.extend([None] * (run.row - len(self._items)))
            self._items[run.row : run.row + run.count] = prepared.payload[run.item : run.item + run.count]

    def columns(self, prepared: Prepared, paths: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
        """Leaves of items: arrays ``[items, *leaf]`` by path."""
        return of_items(prepared.payload, paths)

    def release(self, rows: torch.Tensor) -> None:
        """Let removed items go."""
        for row in rows.tolist():
            self._items[row] = None
            self._versions.wrote(row, row + 1)

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

    def state_dict(self) -> dict[str, Any]:
        """``chunks`` hold items from row 0 on: their structure as JSON in ``structure``, and their tensors."""
        frozen = self.freeze()
        return {"meta": frozen.meta, "chunks": list(tensors_of(frozen))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the contents."""
        self.load_rows(state["meta"], iter(state["chunks"]))()

    def freeze(self) -> Frozen:
        """Keeps references to the items as they are; an item must not be changed once it was handed in."""
        return _FrozenItems(list(self._items), self._versions.freeze(len(self._items)))

    def load_rows(self, meta: Any, chunks: Iterator[dict[str, torch.Tensor]]) -> Callable[[], None]:
        """Build the items beside the live ones."""
        if not isinstance(meta, dict) or meta.keys() != {"items"}:
            raise CheckpointCorruptError(f"storage: expected a number of items, found {summary(meta)}")
        natural(meta["items"], "storage: expected the number of items")
        if meta["items"] > self.capacity:
            raise CheckpointMismatchError(f"storage: expected at most {self.capacity} items, found {meta['items']}")
        items: list[Any] = []
        for chunk in chunks:
            items += _items_of(chunk)
        if len(items) != meta["items"]:
            raise CheckpointCorruptError(f"storage: expected {meta['items']} items, found {len(items)}")

        def commit() -> None:
            self._items = items
            self._versions.renew()

        return commit

    def rows_in(self, meta: Any) -> int | None:
        """How many items a description speaks of."""
        return meta["items"] if isinstance(meta, dict) and type(meta.get("items")) is int else None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the items in about their own bytes, without the history of their tensors."""
        return {**vars(self), "_items": packed_memory(self._items)}

    def __copy__(self) -> ListStorage:
        """Another storage of the same items."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self), _items=list(self._items), _versions=ChunkVersions(_CHUNK_ITEMS))
        return copy

    def clear(self) -> None:
        """Forget every item."""
        self._items.clear()
        self._versions.renew()


class _FrozenItems:
    """References to the items that were there."""

    def __init__(self, items: list[Any], identities: list[str]) -> None:
        self._items = items
        self._identities = identities
        self.meta = {"items": len(items)}

    def chunks(self) -> Iterator[Chunk]:
        """Items, a thousand at a time."""
        for number, identity in enumerate(self._identities):
            yield Chunk(identity, functools.partial(self._tensors, number * _CHUNK_ITEMS))

    def _tensors(self, start: int) -> dict[str, torch.Tensor]:
        part = self._items[start : start + _CHUNK_ITEMS]
        document, tensors = split([encode(item, f"item {start + i}") for i, item in enumerate(part)])
        text = json.dumps(document, allow_nan=False).encode()
        return {_STRUCTURE: torch.frombuffer(bytearray(text), dtype=torch.uint8), **tensors}


def _items_of(chunk: dict[str, torch.Tensor]) -> list[Any]:
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
