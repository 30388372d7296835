"""The rows of a storage at one point of the history, to be read while the history goes on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch

    from asyncbuf.rows import RowRange
    from asyncbuf.storage.layout import Records

SEGMENT_BYTES = 1024 * 1024


class Frozen(Protocol):
    """What ``Storage.freeze`` returns.

    Attributes:
        meta: plain data (see ``asyncbuf._plain.codec``) that says what the chunks mean.
    """

    meta: Any

    def chunks(self) -> Iterator[dict[str, torch.Tensor]]:
        """The contents, piece by piece, as named tensors. May be called from a thread, and more than once."""
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

    def chunks(self) -> Iterator[dict[str, torch.Tensor]]:
        """The contents."""
        return iter(self._chunks)


class CopyOnWrite:
    """Rows of memory whose old contents are kept when they are overwritten.

    Memory is divided into segments of about ``SEGMENT_BYTES``. Before a write touches a segment for the first time, the
    segment is copied aside; readers take the copy where there is one and the live memory elsewhere. A lock is held for
    one segment at a time, so a write never waits for more than the copies that it causes.

    Args:
        blocks: records ``[rows]``, one array per block.
        rows: how many rows are kept, from row 0 on.
    """

    def __init__(self, blocks: Sequence[Records], rows: int) -> None:
        self._blocks = blocks
        self._rows = rows
        widest = max((block.dtype.itemsize for block in blocks), default=1)
        self._step = max(1, SEGMENT_BYTES // max(1, widest))
        self._lock = threading.Lock()
        self._kept: dict[int, list[Records]] = {}

    def before_write(self, runs: Sequence[RowRange]) -> None:
        """Keep what is about to be overwritten. Called by the thread that writes, before it does."""
        for run in runs:
            last = min(run.row + run.count, self._rows)
            for segment in range(run.row // self._step, -(-last // self._step)):
                with self._lock:
                    if segment not in self._kept:
                        self._kept[segment] = self._copied(segment)

    def segments(self) -> Iterator[list[Records]]:
        """The kept rows, segment by segment: a list of records ``[rows]``, one per block, that nobody writes to."""
        for segment in range(-(-self._rows // self._step)):
            with self._lock:
                found = self._kept.get(segment) or self._copied(segment)
            yield found

    def _copied(self, segment: int) -> list[Records]:
        start = segment * self._step
        stop = min(start + self._step, self._rows)
        return [block[start:stop].copy() for block in self._blocks]
