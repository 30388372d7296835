"""In what the rows of two buffers differ, some thousand at a time."""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncbuf._disk.view import PIECE_BYTES
from asyncbuf._plain.state import COUNT_LIMIT
from asyncbuf.checkpoint._diff_items import ItemReader
from asyncbuf.checkpoint._leaves import Leaf, are_columns, item_count
from asyncbuf.errors import CheckpointCorruptError
from asyncbuf.writer._freed_rows import ring_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncbuf._disk.view import StoredTensor
    from asyncbuf.checkpoint._looking import BufferLook, Part
    from asyncbuf.rows import BoolArray, Int64Array


_MOST_ROWS = 1 << 16
# More rows than bytes there can only be where a row has none, and nobody stores so many of those.
_MOST_EMPTY_ROWS = 1 << 22
# What is believed of a storage whose files say nothing of rows.
_MOST_UNSEEN_ROWS = 1 << 27
_RING, _BEST = "RoundRobinWriter", "MaxValueWriter"
_BY_NUMBER, _BY_ROW = "item number", "row"


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field of the items that differs in some of them.

    Attributes:
        path: where in an item it stands, with ``#2`` at the end where two fields have the same path.
        rows: in how many of the items that both have.
    """

    path: str
    rows: int


@dataclass(frozen=True, slots=True)
class RowsDifference:
    """In what the rows of two buffers differ.

    Attributes:
        a: number of items in the first.
        b: number of items in the second.
        by: ``"item number"``: an item is the same if it has the same number and row. ``"row"``, where numbers are not
            known: if it has the same row.
        added: number of items that are in the second only.
        removed: number of items that are in the first only.
        changed: number of items that both have, with something else in them; None if they have different files that
            cannot be compared: without a field in common, of a storage that is not known, or written in different ways.
        fields: which fields these are.
    """

    a: int
    b: int
    by: str
    added: int
    removed: int
    changed: int | None
    fields: tuple[FieldDifference, ...]

    @property
    def is_same(self) -> bool:
        """Whether no item was added, removed or changed."""
        return not self.added and not self.removed and self.changed == 0


class _Chunk(NamedTuple):
    """Rows in one file.

    Attributes:
        start: the first row.
        stop: the row after the last one.
        file: the name of the file.
        tensors: those in it.
    """

    start: int
    stop: int
    file: str
    tensors: dict[str, StoredTensor]


class _Rows:
    """The rows of a buffer in a checkpoint.

    Args:
        look: the buffer.

    Attributes:
        chunks: where they are.
        fields: the fields of an item of a ``TensorStorage``, by their names in the files.
        are_items: whether they are items of a ``ListStorage``.
        count: how many are in the files, also those that hold nothing any more.
        items: reads those of a ``ListStorage``.
    """

    def __init__(self, look: BufferLook) -> None:
        self.look = look
        meta = look.meta()
        self.are_items = meta.are_items
        self.fields = {
            str(each["name"]): Leaf(str(each["path"]), "tensor", str(each["dtype"]), tuple(each["shape"]))
            for each in meta.fields or ()
        }
        is_known = meta.document is None or self.are_items or bool(self.fields)
        self.chunks = list(self._chunks()) if is_known else []
        self._starts = [chunk.start for chunk in self.chunks]
        self.count = self._count() if is_known else _unseen(look)
        nbytes = sum(tensor.nbytes for chunk in self.chunks for tensor in chunk.tensors.values())
        most = max(nbytes, _MOST_EMPTY_ROWS if is_known else _MOST_UNSEEN_ROWS)
        if self.count > most:
            raise CheckpointCorruptError(f"storage: expected at most {most} rows, found {self.count}")
        self.items = ItemReader(look)

    def _count(self) -> int:
        return self.chunks[-1].stop if self.chunks else 0

    def digests(self) -> list[str]:
        """Those of all files."""
        return [self.look.view.identity(file) for file in self.look.chunks()]

    def _chunks(self) -> Iterator[_Chunk]:
        start = 0
        for file in self.look.chunks():
            tensors = self.look.view.tensors(file)
            if not self.fields:
                stop = start + item_count(tensors, self.look.read)
            else:
                counts = {tensors[name].shape[0] for name in self.fields}
                if len(counts) != 1:
                    raise CheckpointCorruptError(f"{file}: expected as many rows of each field, found {counts}")
                stop = start + counts.pop()
            if not start <= stop < COUNT_LIMIT:
                raise CheckpointCorruptError(f"{file}: expected rows, found {stop - start}")
            yield _Chunk(start, stop, file, tensors)
            start = stop

    def chunk_of(self, row: int) -> _Chunk | None:
        """The one that has a row; None if none has."""
        place = bisect.bisect_right(self._starts, row) - 1
        return self.chunks[place] if place >= 0 and row < self.chunks[place].stop else None

    def read(self, chunk: _Chunk, name: str, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Rows of a field: uint8 ``[stop - start, bytes]``."""
        tensor = chunk.tensors[name]
        size = tensor.nbytes // (chunk.stop - chunk.start)
        content = self.look.view.read_part(tensor, (start - chunk.start) * size, (stop - chunk.start) * size)
        return content.reshape(stop - start, size)


def _unseen(look: BufferLook) -> int:
    """How many rows a storage has of which nothing is known: up to the last one that holds an item."""
    size, valid = look.part("writer").number("size") or 0, _int64s(look, look.part("rows"), "valid")
    return size if valid is None or not len(valid) else max(size, int(valid.max()) + 1)


class _Numbers:
    """Which rows hold items, and the numbers of these.

    Args:
        rows: the rows.

    Attributes:
        are_known: whether they are item numbers; otherwise those of rows.
        size: how many rows hold items.
    """

    def __init__(self, rows: _Rows) -> None:
        look = rows.look
        writer, index = look.part("writer"), look.part("rows")
        valid, numbers = _int64s(look, index, "valid"), _int64s(look, index, "numbers")
        if numbers is None and "order" in (writer.document or ()):
            valid, numbers = _int64s(look, writer, "order"), _int64s(look, writer, "numbers")
        elif look.config["writer"] == _BEST and (by_row := _int64s(look, writer, "numbers")) is not None:
            valid = np.flatnonzero(by_row >= 0)
            numbers = by_row[valid]
        size = writer.number("size")
        self.size = len(valid) if valid is not None else rows.count if size is None else size
        if self.size > rows.count:
            raise CheckpointCorruptError(f"writer: expected at most {rows.count} rows, found {self.size}")
        self._ring = None
        self._by_row: Int64Array | None = None
        self.are_known = numbers is not None
        if valid is not None or numbers is not None:
            self._by_row = _scattered(rows.count, self.size, valid, numbers)
        elif look.config["writer"] == _RING:
            self.are_known = True
            self._ring = int(look.config["capacity"]), int(writer.number("cursor") or 0), writer.number("write_count")

    def block(self, start: int, stop: int) -> Int64Array:
        """The number of the item in each row, -1 for those without: int64 ``[stop - start]``."""
        if self._by_row is not None:
            found = np.full(stop - start, -1)
            known = self._by_row[start:stop]
            found[: len(known)] = known
            return found
        rows = np.arange(start, stop)
        numbers = rows
        if self._ring is not None:
            capacity, cursor, write_count = self._ring
            numbers = ring_numbers(rows, capacity, cursor, write_count or 0)
        return np.where(rows < self.size, numbers, -1)


def _int64s(look: BufferLook, part: Part, name: str) -> Int64Array | None:
    tensor = part.tensor(name)
    if tensor is None:
        return None
    if tensor.dtype != "int64":
        raise CheckpointCorruptError(f"{tensor.file}: expected {name} as int64, found {tensor.dtype}")
    return look.view.read_part(tensor).view(np.int64)


def _scattered(count: int, size: int, valid: Int64Array | None, numbers: Int64Array | None) -> Int64Array:
    rows = np.arange(size) if valid is None else valid
    values = rows if numbers is None else numbers
    if len(rows) != len(values) or (len(rows) and not 0 <= rows.min() <= rows.max() < count):
        raise CheckpointCorruptError(f"rows: expected different rows below {count} and their numbers, found others")
    found = np.full(count, -1)
    found[rows] = values
    return found


def compare_rows(a: BufferLook, b: BufferLook) -> RowsDifference:
    """Compare the rows of two buffers."""
    first, second = _Rows(a), _Rows(b)
    return _RowComparison(first, second).result()


class _RowComparison:
    """Compares rows.

    Args:
        a: those of the first buffer.
        b: those of the second.
    """

    def __init__(self, a: _Rows, b: _Rows) -> None:
        self._a, self._b = a, b
        self._numbers = _Numbers(a), _Numbers(b)
        self._by_number = all(numbers.are_known for numbers in self._numbers)
        self._fields = [name for name, leaf in a.fields.items() if leaf == b.fields.get(name)]
        self._are_items = a.are_items and b.are_items
        self._is_same = a.digests() == b.digests()
        self._are_compared = self._is_same or self._are_items or bool(self._fields)
        self._changed = 0
        self._changed_fields: Counter[str] = Counter()
        self._common = 0

    def result(self) -> RowsDifference:
        """What was found."""
        for start, stop in self._blocks():
            self._compare(start, stop)
        size_a, size_b = (numbers.size for numbers in self._numbers)
        return RowsDifference(
            a=size_a,
            b=size_b,
            by=_BY_NUMBER if self._by_number else _BY_ROW,
            added=size_b - self._common,
            removed=size_a - self._common,
            changed=self._changed if self._are_compared or not self._common else None,
            fields=tuple(FieldDifference(path, rows) for path, rows in self._changed_fields.items()),
        )

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Runs of rows that both have, each in one chunk of either."""
        end = min(self._a.count, self._b.count)
        edges = {chunk.stop for rows in (self._a, self._b) for chunk in rows.chunks if chunk.stop < end}
        row = 0
        for edge in sorted({*edges, end}):
            for start in range(row, edge, _MOST_ROWS):
                yield start, min(start + _MOST_ROWS, edge)
            row = edge

    def _compare(self, start: int, stop: int) -> None:
        one, other = (numbers.block(start, stop) for numbers in self._numbers)
        both = (one >= 0) & (other >= 0)
        if self._by_number:
            both &= one == other
        self._common += int(both.sum())
        chunk_a, chunk_b = self._a.chunk_of(start), self._b.chunk_of(start)
        if chunk_a is None or chunk_b is None or not both.any() or self._is_same_file(chunk_a, chunk_b):
            return
        if self._are_items:
            self._compare_items(chunk_a, chunk_b, start, both)
        elif self._fields:
            self._compare_fields(chunk_a, chunk_b, start, both)

    def _is_same_file(self, a: _Chunk, b: _Chunk) -> bool:
        digests = self._a.look.view.identity(a.file), self._b.look.view.identity(b.file)
        return a.start == b.start and digests[0] == digests[1]

    def _compare_fields(self, a: _Chunk, b: _Chunk, start: int, both: BoolArray) -> None:
        changed = np.zeros(len(both), np.bool_)
        for name in self._fields:
            differs = self._differing(a, b, name, start, len(both)) & both
            if number := int(differs.sum()):
                self._changed_fields[name] += number
            changed |= differs
        self._changed += int(changed.sum())

    def _differing(self, a: _Chunk, b: _Chunk, name: str, start: int, count: int) -> BoolArray:
        """In which of some rows a field differs, read some megabytes at a time."""
        size = max(1, a.tensors[name].nbytes // (a.stop - a.start))
        step = max(1, PIECE_BYTES // size)
        parts = []
        for first in range(start, start + count, step):
            last = min(first + step, start + count)
            one, other = self._a.read(a, name, first, last), self._b.read(b, name, first, last)
            if one.shape != other.shape:
                raise CheckpointCorruptError(f"{b.file}: expected rows of {one.shape[1]} bytes, found others")
            parts.append((one != other).any(1))
        return np.concatenate(parts)

    def _compare_items(self, a: _Chunk, b: _Chunk, start: int, both: BoolArray) -> None:
        if are_columns(a.tensors) != are_columns(b.tensors):
            self._are_compared = False
            return
        one, other = self._a.items.read(a.file), self._b.items.read(b.file)
        for offset in np.flatnonzero(both).tolist():
            row = start + offset
            paths = dict.fromkeys(self._a.items.differences(one[row - a.start], other[row - b.start]))
            self._changed += bool(paths)
            self._changed_fields.update(list(paths))
