"""The rows of a storage at one point of the history, to be read while the history goes on."""

from __future__ import annotations

import functools
import itertools
import os
import secrets
import threading
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from asyncbuf.rows import SCATTERED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

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
        self.identity: str | None = identity
        self._read = read

    def read(self) -> dict[str, torch.Tensor]:
        """Make the tensors, as ``tensors``."""
        return self._read()

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Named tensors ``[rows, ...]``. Made whenever this is asked for, so that nothing is read for nothing."""
        return self._read()


class ChunkVersions:
    """Which rows were written between which freezes, chunk by chunk: what ``Chunk.identity`` is made of.

    Never pickled or copied with what it is about: a copy has contents, and identities, of its own.

    Args:
        rows: how finely it is noted which rows were written: the rows of a chunk, or fewer.

    Attributes:
        noted: the first of some rows and the row after the last one. That they are written is noted until the next
            freeze, so that a write within them need not be.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._freezes = 0
        self.renew()

    def renew(self) -> None:
        """All contents are other ones."""
        self._token = secrets.token_hex(8)
        self._process = os.getpid()
        self._loaded: dict[tuple[int, int], str] = {}
        self._written: dict[int, int] = {}
        self.noted = (0, 0)

    def wrote(self, start: int, stop: int) -> None:
        """Rows ``start`` to ``stop - 1`` are being written: at least one."""
        first, last = start // self.rows, (stop - 1) // self.rows
        for number in range(first, last + 1):
            self._written[number] = self._freezes + 1
        self.noted = (last * self.rows, (last + 1) * self.rows)

    def loaded(self, sizes: Sequence[int], identities: Sequence[str | None]) -> None:
        """Chunks were loaded that have identities already, which they keep until they are written.

        Args:
            sizes: rows of each.
            identities: what stands for each.
        """
        spans = itertools.pairwise(itertools.accumulate(sizes, initial=0))
        known = zip(spans, identities, strict=True)
        self._loaded = {span: identity for span, identity in known if identity is not None}

    def wrote_rows(self, rows: Int64Array) -> None:
        """Some rows are being written."""
        for number in np.unique(rows // self.rows).tolist():
            self.wrote(number * self.rows, number * self.rows + 1)

    def freeze(self) -> Callable[[int, int], str]:
        """What says the identity of rows ``start`` to ``stop - 1``, as they are now. Called in any thread, later."""
        self._freezes += 1
        self.noted = (0, 0)
        if self._process != os.getpid():
            self._fork()
        return functools.partial(_identity, self._token, self._loaded, self._written.copy(), self.rows)

    def _fork(self) -> None:
        """Writes of a forked process are its own: what was loaded and not written is known, all else gets new names."""
        written, rows = self._written, self.rows
        loaded = {span: each for span, each in self._loaded.items() if not _latest(written, rows, *span)}
        self.renew()
        self._loaded = loaded

    def __reduce__(self) -> tuple[type[ChunkVersions], tuple[int]]:
        """A copy knows nothing yet."""
        return ChunkVersions, (self.rows,)


def _identity(
    token: str, loaded: Mapping[tuple[int, int], str], written: Mapping[int, int], rows: int, start: int, stop: int
) -> str:
    latest = _latest(written, rows, start, stop)
    known = None if latest else loaded.get((start, stop))
    return known or f"{token}-{start}-{stop}-{latest}"


def _latest(written: Mapping[int, int], rows: int, start: int, stop: int) -> int:
    """At which freeze some rows were written last; 0 if never since they were loaded."""
    return max((written.get(number, 0) for number in range(start // rows, -(-stop // rows))), default=0)


class Frozen(Protocol):
    """What ``Storage.freeze`` returns.

    It may have an attribute ``nbytes``, an int: how many bytes all chunks have together, for those that watch a save.

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

    @property
    def nbytes(self) -> int:
        """How many bytes all chunks have together."""
        return sum(tensor.nbytes for tensors in self._chunks for tensor in tensors.values())

    def chunks(self) -> Iterator[Chunk]:
        """The contents; whether they are those of some storage is not known."""
        return (Chunk(None, functools.partial(dict, tensors)) for tensors in self._chunks)


class ChunksRead:
    """Chunks on their way into a storage.

    Args:
        frozen: the contents.

    Attributes:
        identities: of the chunks that were read.
    """

    def __init__(self, frozen: Frozen) -> None:
        self._frozen = frozen
        self.identities: list[str | None] = []

    def tensors(self) -> Iterator[dict[str, torch.Tensor]]:
        """The tensors of each chunk, as ``Storage.load_rows`` takes them."""
        for chunk in self._frozen.chunks():
            self.identities.append(chunk.identity)
            yield chunk.tensors


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
        if isinstance(runs, SCATTERED):
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

    def count(self, start: int, stop: int) -> int:
        """How many rows of a range there are."""
        return max(0, min(stop, self._rows) - start)

    def visit(self, start: int, stop: int, use: Callable[[int, list[Records]], None]) -> None:
        """Show the kept rows of a range, segment by segment.

        Args:
            start: the first row, where a segment begins.
            stop: the row after the last one; a segment ends there, or all of them.
            use: gets the number of the first row within the range, and records ``[rows]``, one array per block, which
                are written to as soon as it returns.
        """
        for segment in range(start // self._step, -(-min(stop, self._rows) // self._step)):
            with self._lock:
                use(segment * self._step - start, self._kept.get(segment) or self._live(segment))

    def _live(self, segment: int) -> list[Records]:
        start = segment * self._step
        stop = min(start + self._step, self._rows)
        return [block[start:stop] for block in self._blocks]

    def _copied(self, segment: int) -> list[Records]:
        return [rows.copy() for rows in self._live(segment)]
