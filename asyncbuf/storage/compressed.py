"""Items as compressed rows: the storage for big items, such as images."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from asyncbuf._runtime.arguments import shown
from asyncbuf.errors import CheckpointCorruptError
from asyncbuf.rows import ScatteredRows
from asyncbuf.storage._codecs import CODECS, best
from asyncbuf.storage._compressed_rows import META, CompressedRows
from asyncbuf.storage._frozen import InMemoryRows
from asyncbuf.storage.base import Prepared, Runs
from asyncbuf.storage.tensor import TensorStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    import torch

    from asyncbuf._plain import tree
    from asyncbuf.rows import RowRange
    from asyncbuf.storage._codecs import Codec
    from asyncbuf.storage._frozen import Frozen
    from asyncbuf.storage._leaf import Field

# To compress takes longer than anybody would wait for on an event loop; and to decompress as much longer than to copy.
_IN_A_THREAD = 1 << 30
_TIMES_A_COPY = 8


class CompressedStorage(TensorStorage):
    """Rows of tensors, numpy arrays or numbers in main memory, of which the large ones are compressed.

    Otherwise as ``TensorStorage``. A leaf of more than 512 bytes is compressed row by row when it is written, and
    decompressed when it is gathered, in threads both: use ``prefetch``. What does not get smaller is kept as it is.
    Smaller leaves are stored as they are. What comes out has the bits that went in.

    A checkpoint has the compressed bytes. One that was written with another codec can be loaded: its rows are
    compressed again.

    Args:
        capacity: number of rows.
        codec: ``"zstd"``, which needs the package ``zstandard`` (``pip install asyncbuf[zstd]``), or ``"zlib"`` of the
            standard library, which is slower and compresses less. None takes the first that is installed.
        level: how hard it tries: -7 to 22 of ``"zstd"``, 0 to 9 of ``"zlib"``. More costs time when items are written.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: the capacity is not positive, there is no such codec, or it has no such level.
        ImportError: the package of the codec is not installed.
    """

    runs: Runs = Runs.THREAD
    trusted: ClassVar[bool] = True

    def __init__(self, capacity: int, *, codec: str | None = None, level: int = 1) -> None:
        super().__init__(capacity)
        self._codec = _codec(codec, level)

    @property
    def stored_nbytes(self) -> int:
        """Bytes of all rows as they are stored. Takes some milliseconds for 100,000 rows."""
        return 0 if self._rows is None else self._compressed.stored_nbytes(self._filled)

    @property
    def _compressed(self) -> CompressedRows:
        assert isinstance(self._rows, CompressedRows)
        return self._rows

    def prepare(self, items: Any) -> Prepared:
        """Check items whose leaves have shape ``[items, *item]`` and the structure of those before."""
        return _in_a_thread(super().prepare(items))

    def prepare_one(self, item: Any) -> Prepared:
        """Check one item, whose leaves have no leading axis."""
        return _in_a_thread(super().prepare_one(item))

    def write(self, prepared: Prepared, runs: Sequence[RowRange]) -> None:
        """Compress prepared items into rows."""
        arrays, spec, fields = prepared.payload
        rows = self._new_rows(spec, fields) if self._rows is None else self._compressed
        encoded = rows.encoded(arrays, prepared.count, _kept(runs))
        self._rows = rows
        super().write(dataclasses.replace(prepared, payload=(encoded, spec, fields)), runs)

    def gather_nbytes(self, count: int) -> int:
        """About how many bytes could be copied in the time that gathering ``count`` rows takes."""
        return _TIMES_A_COPY * super().gather_nbytes(count)

    def weigh(self, prepared: Prepared) -> int:
        """Bytes of the items as they are without compression."""
        return prepared.count * (super().gather_nbytes(1) or prepared.nbytes // prepared.count)

    def weigh_rows(self, rows: torch.Tensor) -> int:
        """The same of each stored item."""
        return super().gather_nbytes(1)

    def release(self, rows: torch.Tensor) -> None:
        """Let the memory of removed items go."""
        if self._rows is None:
            return
        where: np.ndarray[Any, Any] = rows.sort().values.numpy()
        for kept in list(self._frozen):
            if (frozen := kept()) is not None:
                frozen.before_write(ScatteredRows(where, 0))
        self._compressed.release(where)

    def freeze(self) -> Frozen:
        """Takes no time: bytes are kept as they are from now on, also where rows are overwritten."""
        return InMemoryRows(None) if self._rows is None else super().freeze()

    def load_rows(self, meta: Any, chunks: Iterator[dict[str, torch.Tensor]]) -> Callable[[], None]:
        """Build new rows beside the live ones."""
        return super().load_rows(_inner(meta), chunks)

    def loaded_chunks(self, identities: Sequence[str | None]) -> None:
        """Give chunks that were loaded as they are the identities that they had."""
        if self._rows is not None and not self._compressed.was_translated:
            super().loaded_chunks(identities)

    def rows_in(self, meta: Any) -> int | None:
        """How many rows a description speaks of."""
        return super().rows_in(_inner(meta))

    def _new_rows(self, spec: tree.Spec, fields: tuple[Field, ...]) -> CompressedRows:
        rows = CompressedRows(self.capacity, spec, fields, self._codec)
        rows.slots.most = self._expected
        return rows


def _codec(name: str | None, level: int) -> Codec:
    if name is None:
        name = best()
    if not isinstance(name, str):
        raise TypeError(f"codec: expected a name of {sorted(CODECS)}, or None, found {shown(name)}")
    kind = CODECS.get(name)
    if kind is None:
        raise ValueError(f"codec: expected one of {sorted(CODECS)}, or None, found {shown(name)}")
    least, most = kind.levels
    if isinstance(level, bool) or not isinstance(level, int):
        raise TypeError(f"level: expected an int from {least} to {most}, found {shown(level)}")
    if not least <= level <= most:
        raise ValueError(f"level: expected an int from {least} to {most} for {name}, found {level}")
    try:
        return kind(level)
    except ImportError as error:
        raise ImportError(
            f"codec: expected that the package of {name} is installed, found {error}: pip install asyncbuf[zstd], or "
            'use codec="zlib"'
        ) from error


def _in_a_thread(prepared: Prepared) -> Prepared:
    prepared.nbytes = max(prepared.nbytes, _IN_A_THREAD)
    return prepared


def _kept(runs: Sequence[RowRange]) -> list[slice]:
    """The items that go into rows."""
    if type(runs) is ScatteredRows:
        return [slice(runs.item, runs.item + len(runs.rows))]
    return [slice(run.item, run.item + run.count) for run in runs]


def _inner(meta: Any) -> Any:
    if meta is None:
        return None
    if not isinstance(meta, dict) or meta.keys() != {META} or meta[META] is None:
        raise CheckpointCorruptError(f"storage: expected a description of compressed rows, found {shown(meta)}")
    return meta[META]
