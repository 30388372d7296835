"""Items as rows of memory: the storage for tensors, arrays and numbers."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from asyncbuf._plain import tree
from asyncbuf._runtime.arguments import flag
from asyncbuf.errors import CheckpointCorruptError, CheckpointMismatchError, SchemaError
from asyncbuf.rows import SCATTERED, ScatteredRows
from asyncbuf.storage import _misfits as misfits
from asyncbuf.storage._columns import of_fields
from asyncbuf.storage._frozen import Frozen, InMemoryRows, tensors_of
from asyncbuf.storage._leaf import Field, as_bits, fit, scalar
from asyncbuf.storage._row_memory import RowMemory, parsed
from asyncbuf.storage.base import GatherJobs, Prepared, Runs, Storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from asyncbuf.batch import Draw
    from asyncbuf.rows import RowRange, ScatteredItems
    from asyncbuf.storage._frozen import CopyOnWrite


_SHARED = (Runs.ANYWHERE, Runs.THREAD)
_FLOAT, _BOOL = np.dtype(np.float32), np.dtype(np.bool_)
_FLOAT_MAX = float(np.finfo(np.float32).max)


class TensorStorage(Storage):
    """Rows of tensors, numpy arrays or numbers in main memory.

    The structure of an item (keys, shapes, dtypes) is taken from the first items written; later items must have the
    same. Memory becomes real only as rows fill, so ``capacity`` may be chosen freely.

    The memory of a batch is used again for a later one, once nobody can see it any more: no tensor of the batch is
    left, no view or slice of one, no numpy array over one, and no graph that needs one for its backward pass. Who keeps
    a batch keeps its memory, whatever happens to the buffer.

    Args:
        capacity: number of rows.
        contiguous: whether each tensor of a batch is dense and alone in its memory. Without, small fields of a batch
            are windows into one block, strided along the batch axis: large batches are gathered in two thirds of the
            time, but whatever saves, pickles or keeps one tensor then saves, pickles or keeps the whole block.

    Raises:
        TypeError: the capacity is not an int, or ``contiguous`` no bool.
        ValueError: the capacity is not positive.
    """

    trusted: ClassVar[bool] = True

    def __init__(self, capacity: int, *, contiguous: bool = True) -> None:
        super().__init__(capacity)
        self._contiguous = flag(contiguous, "contiguous")
        self._expected = 0
        self._rows: RowMemory | None = None
        self._filled = 0
        self._frozen: list[weakref.ref[CopyOnWrite]] = []

    @property
    def fields(self) -> tuple[Field, ...]:
        """The leaves of an item; empty before the first write."""
        return () if self._rows is None else self._rows.fields

    def prepare(self, items: Any) -> Prepared:
        """Check items whose leaves have shape ``[items, *item]`` and the structure of those before."""
        known = self._rows  # looked at once: a thread may be laying out the first rows
        if known is not None and (prepared := _plainly(known, items, batched=True)) is not None:
            return prepared
        spec, leaves = _taken_apart(known, items, batched=True)
        paths = spec.paths() if known is None else [field.path for field in known.fields]
        count = -1
        for leaf, path in zip(leaves, paths, strict=True):
            shape = getattr(leaf, "shape", None)
            if not shape:
                what = type(leaf).__name__ if shape is None else f"{type(leaf).__name__} without axes"
                hint = misfits.LIST if path.split("/")[-1].isdigit() else misfits.ONE_ITEM
                raise SchemaError(f"{path}: expected a leading axis of items, found a {what}{hint}")
            if count not in (-1, shape[0]):
                hint = misfits.ONE_ITEM if known is None else _shape_hint(known, leaves, batched=True)
                raise SchemaError(
                    f"{path}: expected {count} items along the leading axis, as in {paths[0]}, found {shape[0]}{hint}"
                )
            count = shape[0]
        if count == 0:
            raise SchemaError("expected at least one item, found none")
        return _checked(known, spec, leaves, count, _as_batch)

    def prepare_one(self, item: Any) -> Prepared:
        """Check one item, whose leaves have no leading axis."""
        known = self._rows
        if known is not None and (prepared := _plainly(known, item, batched=False)) is not None:
            return prepared
        spec, leaves = _taken_apart(known, item, batched=False)
        return _checked(known, spec, leaves, 1, _as_item)

    def is_current(self, prepared: Prepared) -> bool:
        """Whether the rows that items were checked against are still the ones in use."""
        return prepared.basis is self._rows

    def write(self, prepared: Prepared, runs: Sequence[RowRange]) -> None:
        """Copy prepared items into rows; the first ones decide how rows are laid out."""
        arrays, spec, fields = prepared.payload
        rows = self._rows
        if rows is None:
            rows = self._rows = self._new_rows(spec, fields)
        for kept in list(self._frozen):
            if (frozen := kept()) is not None:
                frozen.before_write(runs)
        if type(runs) is not tuple and isinstance(runs, SCATTERED):
            self._write_scattered(rows, arrays, runs)
            return
        noted, noted_end = rows.versions.noted
        for run in runs:
            start, end = run.row, run.row + run.count
            if start < noted or end > noted_end:
                rows.versions.wrote(start, end)
            whole = run.count == prepared.count
            for column, array in zip(rows.columns, arrays):  # noqa: B905 (as many; looking takes time)
                # The array of a single item may lack the leading axis.
                column[start:end] = array if whole else array[run.item : run.item + run.count]
            if end > self._filled:
                self._filled = end

    def _write_scattered(
        self, rows: RowMemory, arrays: Sequence[np.ndarray[Any, Any]], runs: ScatteredRows | ScatteredItems
    ) -> None:
        where = runs.rows
        rows.versions.wrote_rows(where)
        taken = slice(runs.item, runs.item + len(where)) if isinstance(runs, ScatteredRows) else runs.items
        for column, array in zip(rows.columns, arrays, strict=True):
            column[where] = array[taken]
        self._filled = max(self._filled, int(where.max()) + 1)

    def columns(self, prepared: Prepared, paths: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
        """Leaves of prepared items: arrays ``[items, *item]`` by path, perhaps over the memory that was handed in."""
        arrays, _, fields = prepared.payload
        return of_fields(fields, arrays, prepared.count, paths)

    def expect(self, batches: int) -> None:
        """Keep the memory of so many batches to use it again."""
        self._expected = batches
        if self._rows is not None:
            self._rows.slots.most = batches

    def gather(self, indices: torch.Tensor) -> Any:
        """Collect rows into tensors ``[batch, *item]`` of their own."""
        if self._rows is None:
            raise SchemaError("expected written rows, found an empty storage")
        return self._rows.gather(indices.numpy())

    def begin_gather(self, draw: Draw, *, inline: bool, parts: int) -> Any:
        """Let several threads copy into the memory of one batch, each a run of its rows.

        A subclass with a ``gather`` of its own, or ``runs`` elsewhere, has the rows gathered by that.
        """
        is_own = type(self).gather is TensorStorage.gather and self.runs in _SHARED
        if inline or parts == 1 or self._rows is None or not is_own:
            return super().begin_gather(draw, inline=inline, parts=parts)
        return GatherJobs(*self._rows.gather_in_parts(draw.indices.numpy(), parts))

    def gather_nbytes(self, count: int) -> int:
        """Bytes that gathering ``count`` rows moves."""
        return 0 if self._rows is None else count * self._rows.row_nbytes

    def clear(self) -> None:
        """Forget every item; the structure and the memory stay."""
        self._filled = 0
        if self._rows is not None:
            self._rows.versions.renew()

    def state_dict(self) -> dict[str, Any]:
        """``meta`` describes the fields, ``chunks`` hold rows from row 0 on: ``{field: [rows, *item]}``."""
        frozen = self.freeze()
        return {"meta": frozen.meta, "chunks": list(tensors_of(frozen))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the contents."""
        self.load_rows(state["meta"], iter(state["chunks"]))()

    def freeze(self) -> Frozen:
        """Takes no time: rows are kept as they are from now on, one segment at a time, when they are overwritten."""
        if self._rows is None:
            return InMemoryRows(None)
        kept = self._rows.kept(self._filled)
        self._frozen.append(weakref.ref(kept, self._frozen.remove))
        return self._rows.frozen(kept, self._filled)

    def load_rows(self, meta: Any, chunks: Iterator[dict[str, torch.Tensor]]) -> Callable[[], None]:
        """Build new rows beside the live ones."""
        if meta is None:
            return lambda: self._replace(None, 0)
        spec, fields, count = parsed(meta)
        if count > self.capacity:
            raise CheckpointMismatchError(f"storage: expected at most {self.capacity} rows, found {count}")
        if self._rows is not None and (spec, fields) != (
            self._rows.spec,
            self._rows.fields,
        ):
            expected, found = (", ".join(map(str, some)) for some in (self._rows.fields, fields))
            raise CheckpointMismatchError(f"storage: expected items of {expected}; found items of {found}")
        rows = self._new_rows(spec, fields)
        try:
            _fill(rows, chunks, count)
        except BaseException:
            rows.discard()
            raise
        return lambda: self._replace(rows, count)

    def loaded_chunks(self, identities: Sequence[str | None]) -> None:
        """Give chunks that were loaded, and not written since, the identities that they had."""
        if self._rows is not None and len(self._rows.loaded) == len(identities):
            self._rows.versions.loaded(self._rows.loaded, identities)

    def rows_in(self, meta: Any) -> int | None:
        """How many rows a description speaks of."""
        return 0 if meta is None else parsed(meta)[2]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the written rows only."""
        rows = self._rows
        columns = [] if rows is None else [column[: self._filled].copy() for column in rows.columns]
        known = None if rows is None else (rows.spec, rows.fields)
        own = {name: value for name, value in vars(self).items() if name not in ("_rows", "_filled", "_frozen")}
        return {"own": own, "known": known, "filled": self._filled, "columns": columns}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Put the rows into memory of the full capacity."""
        TensorStorage.__init__(self, state["own"]["_capacity"])
        vars(self).update(state["own"])
        if state["known"] is not None:
            self._rows = self._new_rows(*state["known"])
            self._filled = state["filled"]
            for column, rows in zip(self._rows.columns, state["columns"], strict=True):
                column[: self._filled] = rows

    def _new_rows(self, spec: tree.Spec, fields: tuple[Field, ...]) -> RowMemory:
        rows = RowMemory(self.capacity, spec, fields, contiguous=self._contiguous)
        rows.slots.most = self._expected
        return rows

    def _replace(self, rows: RowMemory | None, count: int) -> None:
        if rows is not None or self._rows is None:
            self._rows = rows
            self._frozen.clear()  # snapshots of the old rows: nobody writes to those any more
        self._filled = count


def _fill(rows: RowMemory, chunks: Iterator[dict[str, torch.Tensor]], count: int) -> None:
    rows.reserve(count)
    filled = 0
    for chunk in chunks:
        rows.loaded.append(rows.fill(chunk, filled, count))
        filled += rows.loaded[-1]
    if filled != count:
        raise CheckpointCorruptError(f"storage: expected {count} rows, found {filled}")


def _plainly(known: RowMemory, items: Any, *, batched: bool) -> Prepared | None:
    """The short way for a flat dict of tensors and arrays of the very dtypes and shapes; None for anything else."""
    keys = known.flat_keys
    if keys is None or type(items) is not dict or len(items) != len(keys):
        return None
    arrays: list[np.ndarray[Any, Any]] = []
    lead: Any = None if batched else ()  # the shape ahead of that of an item
    for key, (dtype, shape) in zip(keys, known.plain):  # noqa: B905 (as many; looking takes a third of the loop)
        leaf: Any = items.get(key)
        if type(leaf) is not np.ndarray:
            if type(leaf) is torch.Tensor:
                try:
                    leaf = leaf.numpy()
                except (RuntimeError, TypeError):  # another device, a gradient, a dtype that numpy lacks
                    return None
            elif batched or (leaf := scalar(leaf, dtype)) is None:
                return None
        if lead is None:
            lead = leaf.shape[:1]
        if leaf.dtype is not dtype or leaf.shape != lead + shape:
            return None
        arrays.append(leaf)
    count = 1
    if batched and not (lead and (count := lead[0])):
        return None
    return Prepared(count, count * known.row_nbytes, (arrays, known.spec, known.fields), known)


def _as_batch(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return bits


def _as_item(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return bits[None]


def _taken_apart(known: RowMemory | None, items: Any, *, batched: bool) -> tuple[tree.Spec, list[Any]]:
    is_list = type(items) is list and any(isinstance(item, Mapping) for item in items)
    if is_list and (batched if known is None else known.spec.kind != "list"):
        what = "a tree whose leaves have a leading axis of items" if batched else "one item"
        raise SchemaError(
            f"expected {what}, found a list of {len(items)} items: stack them for extend(), add() them one by one, or "
            "use a ListStorage (a tuple of dicts is taken as a tree)"
        )
    if known is not None:
        return known.spec, tree.flatten_like(known.spec, items, batched=batched)
    leaves, spec = tree.flatten(items, batched=batched)
    if not leaves:
        raise SchemaError(f"expected items with at least one leaf, found {spec}")
    return spec, leaves


def _checked(
    known: RowMemory | None,
    spec: tree.Spec,
    leaves: list[Any],
    count: int,
    shaped: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]],
) -> Prepared:
    if known is None:
        return _first(spec, leaves, count, shaped)
    arrays = []
    for field, leaf in zip(known.fields, leaves, strict=True):
        array = shaped(fit(field, *as_bits(leaf, field.path)))
        if array.shape[1:] != field.shape:
            raise SchemaError(
                f"{field.path}: expected items of shape {list(field.shape)}, found {list(array.shape[1:])}"
                f"{_shape_hint(known, leaves, batched=shaped is _as_batch)}"
            )
        arrays.append(array)
    return Prepared(count, count * known.row_nbytes, (arrays, spec, known.fields), basis=known)


def _shape_hint(known: RowMemory, leaves: Sequence[Any], *, batched: bool) -> str:
    return misfits.of_shapes([field.shape for field in known.fields], leaves, batched=batched)


def _first(
    spec: tree.Spec,
    leaves: list[Any],
    count: int,
    shaped: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]],
) -> Prepared:
    arrays, fields = [], []
    for leaf, path in zip(leaves, spec.paths(), strict=True):
        bits, dtype, guessed = as_bits(leaf, path)
        if guessed and dtype is torch.uint64:
            raise SchemaError(f"{path}: expected an integer of 64 bits, found {leaf}")
        array = shaped(fit(Field(path, dtype, ()), bits, dtype, guessed))
        arrays.append(array)
        fields.append(Field(path, dtype, array.shape[1:]))
    nbytes = count * sum(field.nbytes for field in fields)
    return Prepared(count, nbytes, (arrays, spec, tuple(fields)))
