"""Rows of memory of one structure: made, frozen, and filled from a checkpoint."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from asyncbuf._disk.files import BLOCK_BYTES
from asyncbuf._plain.codec import dtype_name, dtype_named
from asyncbuf._plain.tree import builder, flat_keys
from asyncbuf._plain.treespec import spec_from_plain, spec_to_plain
from asyncbuf._runtime.spare_memory import SpareMemory
from asyncbuf.errors import CheckpointCorruptError
from asyncbuf.storage import _layout as layout
from asyncbuf.storage._batch_memory import BatchMemory
from asyncbuf.storage._frozen import Chunk, ChunkVersions, CopyOnWrite
from asyncbuf.storage._leaf import Field, as_bits
from asyncbuf.storage._recycling import Slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np

    from asyncbuf._plain import tree

# Rows that are copied aside together when they are about to be overwritten.
SEGMENT_BYTES = 1024 * 1024
# The less there is in a chunk, the less is written again when some of it has changed; the more, the fewer files.
CHUNK_BYTES = 8 * 1024 * 1024
_SPARE_CHUNKS = 8


class RowMemory:
    """The memory behind a known structure.

    Args:
        capacity: number of rows.
        spec: structure of an item.
        fields: its leaves, in order.
        contiguous: whether the fields of a batch have no stride along the batch axis.
        packed_bytes: up to how many bytes a field shares a block with others; by default what is fastest in memory.
    """

    def __init__(
        self,
        capacity: int,
        spec: tree.Spec,
        fields: tuple[Field, ...],
        *,
        contiguous: bool,
        packed_bytes: int | None = None,
    ) -> None:
        self.spec = spec
        self.fields = fields
        if packed_bytes is None:
            packed_bytes = layout.PACKED_DENSE_BYTES if contiguous else layout.PACKED_FIELD_BYTES
        self.layout = layout.plan(fields, packed_bytes)
        self.blocks = self._allocated(capacity)
        self._takes = [self._take_of(*each) for each in zip(self.blocks, self.layout.opaque, strict=True)]
        self.columns = columns(self.blocks, self.layout)
        self.row_nbytes = self.layout.nbytes
        widest = max(record.itemsize for record in self.layout.records)
        self.segment_rows = max(1, SEGMENT_BYTES // max(1, widest))
        segments = -(-CHUNK_BYTES // (self.segment_rows * max(1, self.row_nbytes)))
        self.versions = ChunkVersions(segments * self.segment_rows)
        self.loaded: list[int] = []  # rows of the chunks that a checkpoint had
        self.slots = Slots(BatchMemory(self.layout, fields, contiguous=contiguous))
        # For items that come as they are stored: what each leaf must be, and the keys where an item is a flat dict.
        self.flat_keys = flat_keys(spec)
        self.plain = [(None if field.is_carried else field.bits, field.shape) for field in fields]
        self._carried = [(i, field) for i, field in enumerate(fields) if field.is_carried]
        self._build = builder(spec)

    def _allocated(self, capacity: int) -> list[layout.Records]:
        return [layout.allocate(capacity, record) for record in self.layout.records]

    def _take_of(self, block: layout.Records, opaque: np.dtype[np.void]) -> Callable[..., object]:
        """What copies rows of a block, as ``numpy.take`` does: ``(indices, None, out, "clip")``."""
        return block.view(opaque).take

    def reserve(self, stop: int) -> None:
        """Be told that rows up to ``stop - 1`` will be written. May fail, where that is better than failing then."""

    def will_pass(self, start: int, stop: int) -> None:
        """Be told that rows ``start`` to ``stop - 1`` will be read or written one after the other."""

    def discard(self) -> None:
        """Be told that nobody needs the rows any more, but for what was frozen of them."""

    def kept(self, count: int) -> CopyOnWrite:
        """The first rows as they are now, while they are overwritten."""
        return CopyOnWrite(self.blocks, count, self.segment_rows)

    def frozen(self, kept: CopyOnWrite, count: int) -> FrozenRows:
        """What ``kept`` has, for a checkpoint."""
        return FrozenRows(self, kept, count)

    def gather(self, indices: np.ndarray[Any, Any]) -> Any:
        """Rows in memory that nobody else sees: a tree of tensors ``[batch, *item]``."""
        return self._tree(self.slots.gather(self._takes, indices), len(indices))

    def leaves(self, indices: np.ndarray[Any, Any]) -> list[torch.Tensor]:
        """As ``gather``, field by field and in no tree."""
        return self._typed(self.slots.gather(self._takes, indices))

    def gather_in_parts(
        self, indices: np.ndarray[Any, Any], parts: int
    ) -> tuple[Sequence[Callable[[], object]], Callable[[], Any]]:
        """As ``gather``, as functions that copy a part of the rows each, and one that makes the tree when all have."""
        count = len(indices)
        slot = self.slots.take(count)
        size = -(-count // parts)
        places = [slice(start, start + size) for start in range(0, count, size)]
        copies = [functools.partial(self.slots.fill, slot, self._takes, indices[part], part) for part in places]
        return copies, lambda: self._tree(self.slots.put(slot, count), count)

    def _typed(self, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        for i, field in self._carried:
            leaves[i] = field.typed(leaves[i])
        return leaves

    def fill(self, chunk: dict[str, torch.Tensor], start: int, most: int) -> int:
        """Copy a chunk into rows from ``start`` on: how many.

        Raises:
            CheckpointCorruptError: it has other fields, or more than ``most`` rows with those before.
        """
        names = field_names(self.fields)
        if chunk.keys() != set(names):
            raise CheckpointCorruptError(f"storage: expected the fields {names}, found {sorted(chunk)}")
        count = chunk[names[0]].shape[0] if chunk[names[0]].ndim else 0
        self.will_pass(start, min(start + count, most))
        for name, field, column in zip(names, self.fields, self.columns, strict=True):
            fill_column(column, field, chunk[name], slice(start, start + count), most)
        return count

    def _tree(self, leaves: list[torch.Tensor], count: int) -> Any:
        for i, field in self._carried:
            leaves[i] = field.typed(leaves[i])
        if self.flat_keys is not None:
            return dict(zip(self.flat_keys, leaves))  # noqa: B905 (they are as many, and to look takes a third more)
        return self._build(leaves, count)


def columns(blocks: Sequence[layout.Records], plan: layout.Layout) -> list[np.ndarray[Any, Any]]:
    """The rows of each field, ``[rows, *shape]``, as bits: views into the blocks. A block of objects is its own."""
    found = [blocks[place.block] for place in plan.places]
    return [
        block if block.dtype.hasobject else block[place.name] for block, place in zip(found, plan.places, strict=True)
    ]


class FrozenRows:
    """Rows that are kept as they were."""

    meta: Any

    def __init__(self, rows: RowMemory, kept: CopyOnWrite, count: int) -> None:
        self._rows = rows
        self._kept = kept
        self._count = count
        self._identity = rows.versions.freeze()
        self.nbytes = count * sum(field.nbytes for field in rows.fields)
        self.meta = described(rows.spec, rows.fields, count)

    def chunks(self) -> Iterator[Chunk]:
        """Rows, some tens of megabytes at a time: ``{field: [rows, *item]}``."""
        # Chunks that are read one after the other are written to files meanwhile.
        spare = SpareMemory(_SPARE_CHUNKS)
        rows = self._rows.versions.rows
        for start in range(0, self._count, rows):
            identity = self._identity(start, min(start + rows, self._count))
            yield Chunk(identity, functools.partial(self.columns, start, start + rows, spare))

    def columns(self, start: int, stop: int, spare: SpareMemory) -> dict[str, torch.Tensor]:
        """Rows ``start`` to ``stop - 1``, as far as there are such."""
        fields = self._rows.fields
        dense = arrays_of(fields, self._kept.count(start, stop), spare)

        def copy(first: int, segment: list[layout.Records]) -> None:
            # Field by field: numpy keeps the interpreter's lock while it copies whole records.
            for out, column in zip(dense, columns(segment, self._rows.layout), strict=True):
                out[first : first + len(column)] = column

        self._rows.will_pass(start, min(stop, self._count))
        self._kept.visit(start, stop, copy)
        return {
            name: field.typed(torch.from_numpy(out))
            for name, field, out in zip(field_names(fields), fields, dense, strict=True)
        }


def arrays_of(fields: Sequence[Field], count: int, spare: SpareMemory) -> list[np.ndarray[Any, Any]]:
    """Arrays ``[count, *shape]`` of bits, with anything in them, in one piece of memory.

    They lie in it as they will in a file, as far from a block of the disk: so they can be written from there.
    """
    names = field_names(fields)
    order = sorted(range(len(fields)), key=lambda number: (-fields[number].bits.itemsize, names[number]))
    memory = spare.take(sum(count * field.nbytes for field in fields) + BLOCK_BYTES)
    start = -memory.ctypes.data % BLOCK_BYTES
    arrays = {}
    for number in order:
        field = fields[number]
        raw = memory[start : start + count * field.nbytes]
        arrays[number] = raw.view(field.bits).reshape(count, *field.shape)
        start += count * field.nbytes
    return [arrays[number] for number in range(len(fields))]


def field_names(fields: Sequence[Field]) -> list[str]:
    """The paths, made different where two are the same (``{"a/b": ...}`` beside ``{"a": {"b": ...}}``)."""
    names: dict[str, None] = {}
    for field in fields:
        name, number = field.path, 2
        while name in names:
            name, number = f"{field.path}#{number}", number + 1
        names[name] = None
    return list(names)


def described(spec: tree.Spec, fields: Sequence[Field], count: int) -> dict[str, Any]:
    """Plain data that says what rows consist of, and how many there are."""
    return {
        "rows": count,
        "structure": spec_to_plain(spec),
        "fields": [
            {
                "name": name,
                "path": field.path,
                "dtype": dtype_name(field.dtype),
                "shape": list(field.shape),
            }
            for name, field in zip(field_names(fields), fields, strict=True)
        ],
    }


def parsed(meta: Any) -> tuple[tree.Spec, tuple[Field, ...], int]:
    """Structure, fields and number of rows out of a description.

    Raises:
        CheckpointCorruptError: it is none.
    """
    try:
        spec = spec_from_plain(meta["structure"])
        fields = tuple(
            Field(field["path"], dtype_named(field["dtype"]), tuple(field["shape"])) for field in meta["fields"]
        )
        names = [field["name"] for field in meta["fields"]]
        entries = [len(field) for field in meta["fields"]]
        count = meta["rows"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(f"storage: expected a description of rows, found {error!r}") from error
    sizes = [count, *(length for field in fields for length in field.shape)]
    if any(type(size) is not int or size < 0 for size in sizes) or [field.path for field in fields] != spec.paths():
        raise CheckpointCorruptError(f"storage: expected {count!r} rows of {spec}, found {[str(f) for f in fields]}")
    if names != field_names(fields) or len(meta) != 3 or any(number != 4 for number in entries):
        raise CheckpointCorruptError(
            f"storage: expected a description of the fields {field_names(fields)}, found {names}"
        )
    return spec, fields, count


def fill_column(column: np.ndarray[Any, Any], field: Field, tensor: torch.Tensor, rows: slice, most: int) -> None:
    """Copy the rows of a field out of a chunk.

    Raises:
        CheckpointCorruptError: it is another field, or goes beyond row ``most``.
    """
    count = rows.stop - rows.start
    if tensor.dtype is not field.dtype or tuple(tensor.shape) != (count, *field.shape) or rows.stop > most:
        raise CheckpointCorruptError(
            f"storage: expected {field}, {count} rows up to row {most}, "
            f"found {tensor.dtype} {list(tensor.shape)} from row {rows.start} on"
        )
    column[rows] = as_bits(tensor, field.path)[0]
