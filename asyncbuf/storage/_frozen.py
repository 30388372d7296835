"""The rows of a storage at one point of the history, to be read while the history goes on."""

from __future__ import annotations

import functools
import os
import secrets
import threading
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from asyncbuf.rows import ScatteredRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch

    from asyncbuf.rows import Int64Array, RowRange
    from asyncbuf.storage._layout import Records


class Chunk:
    """A piece of the contents of a storage.

    Args:
        identity: as the attribute.
        read: makes the tensors.

    Attributes:
        identity: stands for the rows and what is in them. Another chunk of the same identity, from any other freeze,
            has the same tensors. None if that is not known.
    """

    __slots__ = ("_read", "identity")

    def __init__(self, identity: str | None, read: Callable[[], dict[str, torch.Tensor]]) -> None:
        self.identity = identity
        self._read = read

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Named tensors ``[rows, ...]``. Made whenever this is asked for, so that nothing is read for nothing."""
        return self._read()


class ChunkVersions:
    """Which rows were written between which freezes, chunk by chunk: what ``Chunk.identity`` is made of.

    Never pickled or copied with what it is about: a copy has contents, and identities, of its own.

    Args:
        rows: rows of a chunk; the first chunk begins at row 0.

    Attributes:
        noted: the first row of a chunk and the row after its last one. That it is written is noted until the next
            freeze, so that a write within it need not be.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._freezes = 0
        self.renew()

    def renew(self) -> None:
        """All contents are other ones."""
        self._token = secrets.token_hex(8)
        self._written: dict[int, int] = {}
        self.noted = (0, 0)

    def wrote(self, start: int, stop: int) -> None:
        """Rows ``start`` to ``stop - 1`` are being written: at least one."""
        first, last = start // self.rows, (stop - 1) // self.rows
        for number in range(first, last + 1):
            self._written[number] = self._freezes + 1
        self.noted = (last * self.rows, (last + 1) * self.rows)

    def wrote_rows(self, rows: Int64Array) -> None:
        """Some rows are being written."""
        for number in np.unique(rows // self.rows).tolist():
            self.wrote(number * self.rows, number * self.rows + 1)

    def freeze(self, count: int) -> list[str]:
        """The identities of the chunks of so many rows, as they are now."""
        self._freezes += 1
        self.noted = (0, 0)
        # A forked process has the same token, and writes of its own.
        token, written = f"{self._token}-{os.getpid():x}", self._written
        starts = range(0, count, self.rows)
        return [
            f"{token}-{start}-{min(start + self.rows, count)}-{written.get(number, 0)}"
            for number, start in enumerate(starts)
        ]

    def __reduce__(self) -> tuple[type[ChunkVersions], tuple[int]]:
        """A copy knows nothing yet."""
        return ChunkVersions, (self.rows,)


class Frozen(Protocol):
    """What ``Storage.freeze`` returns.

    Attributes:
        meta: plain data (see ``asyncbuf._plain.codec``) that says what the chunks mean.
    """

    meta: Any

    def chunks(self) -> Iterator[Chunk]:
        """The contents, piece by piece. May be called from a thread, and more than once."""
        ...


class InMemoryRows:
    """Contents that are in memory already, such as those of a loaded checkpoint.

    Args:
        meta: plain data.
        chunks: named tensors.
    """

    def __init__(self, meta: Any, chunks: Iterable[dict[str, torch.Tensor]] = ()) -> None:
        self.meta = meta
        self._chunks = list(chunks)

    def chunks(self) -> Iterator[Chunk]:
        """The contents; whether they are those of some storage is not known."""
        return (Chunk(None, functools.partial(dict, tensors)) for tensors in self._chunks)


def tensors_of(frozen: Frozen) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of each chunk, as ``Storage.load_rows`` takes them."""
    return (chunk.tensors for chunk in frozen.chunks())


class CopyOnWrite:
    """Rows of memory whose old contents are kept when they are overwritten.

    Memory is divided into segments of about a megabyte. Before a write touches a segment for the first time, the
    segment is copied aside; readers take the copy where there is one and the live memory elsewhere. A lock is held for
    one segment at a time, so a write never waits for more than the copies that it causes.

    Args:
        blocks: records ``[rows]``, one array per block.
        rows: how many rows are kept, from row 0 on.
        step: rows of a segment.
    """

    def __init__(self, blocks: Sequence[Records], rows: int, step: int) -> None:
        self._blocks = blocks
        self._rows = rows
        self._step = step
        self._lock = threading.Lock()
        self._kept: dict[int, list[Records]] = {}

    def before_write(self, runs: Sequence[RowRange]) -> None:
        """Keep what is about to be overwritten. Called by the thread that writes, before it does."""
        if type(runs) is ScatteredRows:
            self._keep(np.unique(runs.rows[runs.rows < self._rows] // self._step).tolist())
            return
        for run in runs:
            last = min(run.row + run.count, self._rows)
            self._keep(range(run.row // self._step, -(-last // self._step)))

    def _keep(self, segments: Iterable[int]) -> None:
        for segment in segments:
            with self._lock:
                if segment not in self._kept:
                    self._kept[segment] = self._copied(segment)

    def segments(self, start: int, stop: int) -> Iterator[list[Records]]:
        """The kept rows of a range, segment by segment: records ``[rows]``, one per block, that nobody writes to.

        Args:
            start: the first row, where a segment begins.
            stop: the row after the last one; a segment ends there, or all of them.
        """
        for segment in range(start // self._step, -(-min(stop, self._rows) // self._step)):
            with self._lock:
                found = self._kept.get(segment) or self._copied(segment)
            yield found

    def _copied(self, segment: int) -> list[Records]:
        start = segment * self._step
        stop = min(start + self._step, self._rows)
        return [block[start:stop].copy() for block in self._blocks]
