"""Rows whose large fields are compressed, each by itself."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf.errors import CheckpointCorruptError, CheckpointError
from asyncbuf.storage import _layout as layout
from asyncbuf.storage._codecs import CODECS
from asyncbuf.storage._frozen import ChunkVersions
from asyncbuf.storage._row_memory import FrozenRows, RowMemory, arrays_of, columns, field_names, fill_column

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from asyncbuf._plain import tree
    from asyncbuf._runtime.spare_memory import SpareMemory
    from asyncbuf.storage._codecs import Codec
    from asyncbuf.storage._frozen import CopyOnWrite
    from asyncbuf.storage._leaf import Field

    Blobs = np.ndarray[Any, np.dtype[np.object_]]

# The bytes of a chunk are counted before they are compressed.
_RATIO = 4
META = "compressed"
_ROWS, _OFFSETS = "rows", "offsets"


class CompressedRows(RowMemory):
    """The memory behind a known structure: small fields as in ``RowMemory``, and the others as compressed bytes.

    A field that is compressed has a block of objects: the bytes of each row, or None where there is nothing.

    Args:
        capacity: number of rows.
        spec: structure of an item.
        fields: its leaves, in order.
        codec: compresses.

    Attributes:
        is_compressed: which fields are.
        was_translated: whether rows were loaded that another codec had compressed.
    """

    def __init__(self, capacity: int, spec: tree.Spec, fields: tuple[Field, ...], codec: Codec) -> None:
        self._codec = codec
        self.is_compressed = [field.nbytes > layout.PACKED_DENSE_BYTES for field in fields]
        self.was_translated = False
        super().__init__(capacity, spec, fields, contiguous=True, packed_bytes=layout.PACKED_DENSE_BYTES)
        self.versions = ChunkVersions(_RATIO * self.versions.rows)

    def _allocated(self, capacity: int) -> list[layout.Records]:
        objects = {place.block for place, is_it in zip(self.layout.places, self.is_compressed, strict=True) if is_it}
        return [
            np.empty(capacity, object) if number in objects else layout.allocate(capacity, record)
            for number, record in enumerate(self.layout.records)
        ]

    def _take_of(self, block: layout.Records, opaque: np.dtype[np.void]) -> Callable[..., object]:
        return functools.partial(self._take, block) if block.dtype.hasobject else super()._take_of(block, opaque)

    def _take(
        self, block: np.ndarray[Any, Any], indices: np.ndarray[Any, Any], axis: None, out: layout.Records, mode: str
    ) -> None:
        """As ``numpy.take``: decompress rows into memory."""
        nbytes = out.dtype.itemsize
        decode = self._codec.decode
        for row, blob in zip(out.view(np.uint8).reshape(len(out), nbytes), block[indices], strict=True):
            row[:] = np.frombuffer(decode(blob, nbytes), np.uint8)

    def encoded(
        self, arrays: Sequence[np.ndarray[Any, Any]], count: int, kept: Iterable[slice]
    ) -> list[np.ndarray[Any, Any]]:
        """Items as they are stored.

        Args:
            arrays: the bits of each field, ``[items, *shape]``; those of a single item may lack the first axis.
            count: number of items.
            kept: which of them are kept.
        """
        kept = list(kept)
        return [
            self._encoded(array.reshape(count, *field.shape), kept) if is_it else array
            for field, array, is_it in zip(self.fields, arrays, self.is_compressed, strict=True)
        ]

    def _encoded(self, array: np.ndarray[Any, Any], kept: Iterable[slice]) -> Blobs:
        found = np.empty(len(array), object)
        for item in itertools.chain.from_iterable(range(part.start, part.stop) for part in kept):
            found[item] = self._codec.encode(np.ascontiguousarray(array[item]).reshape(-1).view(np.uint8))
        return found

    def release(self, rows: np.ndarray[Any, Any]) -> None:
        """Let what is in some rows go."""
        self.versions.wrote_rows(rows)
        for column, is_it in zip(self.columns, self.is_compressed, strict=True):
            if is_it:
                column[rows] = None

    def stored_nbytes(self, count: int) -> int:
        """The bytes of the first rows."""
        plain = sum(field.nbytes for field, is_it in zip(self.fields, self.is_compressed, strict=True) if not is_it)
        packed = [column[:count] for column, is_it in zip(self.columns, self.is_compressed, strict=True) if is_it]
        return count * plain + sum(len(blob) for column in packed for blob in column if blob is not None)

    def frozen(self, kept: CopyOnWrite, count: int) -> FrozenRows:
        """What ``kept`` has, for a checkpoint: compressed as it is."""
        return FrozenCompressedRows(self, self._codec.name, kept, count)

    # -- from a checkpoint --------------------------------------------------------------------------------------------

    def fill(self, chunk: dict[str, torch.Tensor], start: int, most: int) -> int:
        """Take a chunk into rows from ``start`` on: how many. Everything is decompressed once, to be sure of it.

        Raises:
            CheckpointCorruptError: it has other fields, more than ``most`` rows with those before, or bytes that cannot
                be decompressed.
            CheckpointError: its codec is not installed.
        """
        codec = self._codec_of(chunk)
        expected = set(_names_in_chunk(self, codec.name))
        if chunk.keys() != expected:
            raise CheckpointCorruptError(f"storage: expected the fields {sorted(expected)}, found {sorted(chunk)}")
        counts = set()
        for name, field, column, is_it in zip(
            field_names(self.fields), self.fields, self.columns, self.is_compressed, strict=True
        ):
            if is_it:
                blobs = self._blobs(field, chunk[f"{codec.name}/{name}"], chunk[f"{_OFFSETS}/{name}"], codec)
                if start + len(blobs) > most:
                    raise CheckpointCorruptError(f"storage: expected {field} up to row {most}, found more")
                column[start : start + len(blobs)] = blobs
                counts.add(len(blobs))
            else:
                tensor = chunk[f"{_ROWS}/{name}"]
                count = tensor.shape[0] if tensor.ndim else 0
                fill_column(column, field, tensor, slice(start, start + count), most)
                counts.add(count)
        if len(counts) > 1:
            raise CheckpointCorruptError(f"storage: expected as many rows of all fields, found {sorted(counts)}")
        return counts.pop()

    def _codec_of(self, chunk: Mapping[str, torch.Tensor]) -> Codec:
        names = {name.partition("/")[0] for name in chunk} - {_ROWS, _OFFSETS, self._codec.name}
        for name in names & CODECS.keys():
            self.was_translated = True
            try:
                return CODECS[name](1)
            except ImportError as error:
                raise CheckpointError(f"storage: expected that the codec {name} is installed, found {error}") from error
        return self._codec

    def _blobs(self, field: Field, content: torch.Tensor, offsets: torch.Tensor, codec: Codec) -> Blobs:
        """The bytes of each row, in our own codec."""
        if content.dtype is not torch.uint8 or content.ndim != 1 or offsets.dtype is not torch.int64:
            raise CheckpointCorruptError(f"storage: expected bytes of {field}, found {content.dtype} {offsets.dtype}")
        ends = offsets.tolist() if offsets.ndim == 1 else []
        if not ends or ends[0] or ends[-1] != len(content) or any(b < a for a, b in itertools.pairwise(ends)):
            raise CheckpointCorruptError(f"storage: expected ascending places of {field}, found others")
        whole = content.contiguous().numpy().data
        found = np.empty(len(ends) - 1, object)
        try:
            for row, (start, stop) in enumerate(itertools.pairwise(ends)):
                if stop > start:
                    found[row] = self._ours(bytes(whole[start:stop]), field.nbytes, codec)
        except ValueError as error:
            raise CheckpointCorruptError(f"storage: {field}: {error}") from error
        return found

    def _ours(self, blob: bytes, nbytes: int, codec: Codec) -> bytes:
        plain = codec.decode(blob, nbytes)
        return blob if codec is self._codec else self._codec.encode(np.frombuffer(plain, np.uint8))


def _names_in_chunk(rows: CompressedRows, codec: str) -> list[str]:
    names = zip(field_names(rows.fields), rows.is_compressed, strict=True)
    kinds = [(name, (codec, _OFFSETS) if is_it else (_ROWS,)) for name, is_it in names]
    return [f"{kind}/{name}" for name, prefixes in kinds for kind in prefixes]


class FrozenCompressedRows(FrozenRows):
    """Compressed rows that are kept as they were.

    Args:
        rows: the rows.
        codec: the name of what compressed them.
        kept: them, as they were.
        count: how many.
    """

    def __init__(self, rows: CompressedRows, codec: str, kept: CopyOnWrite, count: int) -> None:
        super().__init__(rows, kept, count)
        del self.nbytes  # not known before all of them are looked at
        self.meta = {META: self.meta}
        self._codec = codec
        self._is_compressed = rows.is_compressed

    def columns(self, start: int, stop: int, spare: SpareMemory) -> dict[str, torch.Tensor]:
        fields, is_compressed = self._rows.fields, self._is_compressed
        plain = [field for field, is_it in zip(fields, is_compressed, strict=True) if not is_it]
        arrays = iter(arrays_of(plain, self._kept.count(start, stop), spare)) if plain else iter(())
        found: list[Any] = [[] if is_it else next(arrays) for is_it in is_compressed]

        def copy(first: int, segment: list[layout.Records]) -> None:
            for out, column, is_it in zip(found, columns(segment, self._rows.layout), is_compressed, strict=True):
                if is_it:
                    out += column.tolist()
                else:
                    out[first : first + len(column)] = column

        self._kept.visit(start, stop, copy)
        chunk: dict[str, torch.Tensor] = {}
        for name, field, out, is_it in zip(field_names(fields), fields, found, is_compressed, strict=True):
            if is_it:
                blobs = [blob or b"" for blob in out]
                chunk[f"{self._codec}/{name}"] = _tensor(bytearray().join(blobs))
                chunk[f"{_OFFSETS}/{name}"] = torch.tensor([0, *itertools.accumulate(map(len, blobs))])
            else:
                chunk[f"{_ROWS}/{name}"] = field.typed(torch.from_numpy(out))
        return chunk


def _tensor(content: bytearray) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(content, np.uint8))
