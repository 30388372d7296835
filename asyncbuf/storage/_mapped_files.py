"""Files of rows that are mapped into memory: one for each field, in the format of numpy (``.npy``)."""

from __future__ import annotations

import errno
import io
import mmap
import re
import threading
from typing import TYPE_CHECKING

import numpy as np

from asyncbuf._disk import files

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from asyncbuf.rows import Int64Array
    from asyncbuf.storage._layout import Records
    from asyncbuf.storage._leaf import Field

# Room on the disk is taken in such steps, or less where that is all there is.
_STEP_BYTES = 64 * 1024 * 1024
# A page fault maps neighbours, too, which are in the page cache already.
_AROUND_BYTES = 64 * 1024
# Into how many parts the memory is divided, of which one at a time is let go.
_PARTS = 64
# Of more rows the disk is not told ahead: that would take longer than what is won.
_MOST_AHEAD = 4096


def file_name(number: int, field: Field) -> str:
    """The name of the file of a field: its path, as far as a file may be called so."""
    return f"{number:03d}-{re.sub(r'[^A-Za-z0-9_.-]+', '.', field.path)[:64]}.npy"


def _header(field: Field, capacity: int) -> bytes:
    header = io.BytesIO()
    described = {
        "descr": np.lib.format.dtype_to_descr(field.bits),
        "fortran_order": False,
        "shape": (capacity, *field.shape),
    }
    np.lib.format.write_array_header_1_0(header, described)
    return header.getvalue()


class RowFile:
    """The rows of one field, in a new file of the full capacity that takes room only where rows were written.

    Args:
        path: the file, which is not there.
        field: the field.
        capacity: number of rows.
    """

    def __init__(self, path: Path, field: Field, capacity: int) -> None:
        header = _header(field, capacity)
        self.path = path
        self.row_nbytes = field.nbytes
        self.nbytes = capacity * field.nbytes
        self._capacity = capacity
        self._start = self._room = len(header)
        self._memory: mmap.mmap | None = None
        self._file = files.create_to_map(path)
        files.write(self._file, path, header)
        if self.nbytes:
            files.resize(self._file, path, self._start + self.nbytes)
            self._memory = files.mapped(self._file, path, shared=True)
            # Rows are read anywhere: what lies around them would be read for nothing.
            self._memory.madvise(mmap.MADV_RANDOM)

    def records(self, record: np.dtype[np.void]) -> Records:
        """The rows ``[capacity]``."""
        if self._memory is None:
            return np.zeros(self._capacity, record)
        return np.frombuffer(self._memory, record, self._capacity, self._start)

    def reserve(self, stop: int) -> None:
        """Have room for rows up to ``stop - 1``.

        Raises:
            OSError: the disk is full.
        """
        end = self._start + self.nbytes
        needed = self._start + min(stop, self._capacity) * self.row_nbytes
        if needed <= self._room:
            return
        room = min(end, max(needed, self._room + _STEP_BYTES))
        try:
            files.allocate(self._file, self.path, self._room, room - self._room)
        except OSError as error:
            if error.errno != errno.ENOSPC or room == needed:
                raise
            room = needed
            files.allocate(self._file, self.path, self._room, room - self._room)
        self._room = room

    def will_read(self, rows: Int64Array) -> None:
        """Have the disk read some rows all at once: page faults would wait for one page after the other."""
        nbytes = self.row_nbytes
        for start in (rows[:_MOST_AHEAD] * nbytes + self._start).tolist():
            self._need(start, start + nbytes)

    def will_pass(self, start: int, stop: int) -> None:
        """As ``will_read`` for neighbouring rows."""
        if stop > start and not self._file.closed:
            # Not by the way of the others, which keeps the interpreter's lock: this may be much.
            nbytes = (stop - start) * self.row_nbytes
            files.will_read(self._file, self.path, self._start + start * self.row_nbytes, nbytes)

    def _need(self, start: int, stop: int) -> None:
        if self._memory is not None:
            start -= start % mmap.PAGESIZE
            self._memory.madvise(mmap.MADV_WILLNEED, start, stop - start)

    def let_go(self, part: int) -> None:
        """Have the pages of a part of the memory not counted as those of this process. They stay in the page cache."""
        if self._memory is None:
            return
        size = -(-len(self._memory) // (_PARTS * mmap.PAGESIZE)) * mmap.PAGESIZE
        start = part * size
        if start < len(self._memory):
            self._memory.madvise(mmap.MADV_DONTNEED, start, min(size, len(self._memory) - start))

    def sync(self) -> None:
        """Make what was written survive a loss of power."""
        # The first does the work, while others have the interpreter's lock; systems that leave mapped memory out of it
        # need the second.
        files.sync(self._file, self.path)
        if self._memory is not None:
            self._memory.flush()

    def close(self) -> None:
        """Close the file. Its memory stays for those that have arrays over it."""
        self._file.close()
        self._memory = None

    def __del__(self) -> None:
        """Close, also where the constructor came to no end."""
        if hasattr(self, "_file"):
            self.close()


class Residency:
    """Bounds how much of mapped files counts as memory of this process (``VmRSS``).

    The pages that were read stay mapped, until all of memory is full of them. Here the memory is divided into parts,
    and each time that a part's share was read, the part that is next in turn is let go.

    Args:
        mapped: the files.
        most: bytes that may be resident, about.
    """

    def __init__(self, mapped: Sequence[RowFile], most: int) -> None:
        small = most // (4 * max(1, len(mapped)))
        self.large = [each for each in mapped if each.nbytes > small]
        self._row_nbytes = sum(each.row_nbytes for each in self.large)
        left = most - sum(each.nbytes for each in mapped if each.nbytes <= small)
        self._share = max(mmap.PAGESIZE, left // _PARTS)
        self._read = self._next = 0
        self._lock = threading.Lock()

    def read(self, rows: int) -> None:
        """So many rows were read or written, anywhere."""
        self._count(rows * (self._row_nbytes + _AROUND_BYTES * len(self.large)))

    def passed(self, rows: int) -> None:
        """So many neighbouring rows were."""
        self._count(rows * self._row_nbytes + _AROUND_BYTES * len(self.large))

    def _count(self, nbytes: int) -> None:
        # Threads may get in each other's way here, and then some bytes are not counted.
        self._read += nbytes
        if self._read < self._share or not self._lock.acquire(blocking=False):
            return
        try:
            parts, self._read = divmod(self._read, self._share)
            self._let_go(min(parts, _PARTS))
        finally:
            self._lock.release()

    def let_all_go(self) -> None:
        """Have nothing resident for the moment."""
        with self._lock:
            self._let_go(_PARTS)

    def _let_go(self, parts: int) -> None:
        for _ in range(parts):
            for each in self.large:
                each.let_go(self._next)
            self._next = (self._next + 1) % _PARTS
