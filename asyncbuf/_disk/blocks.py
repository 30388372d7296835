"""Writes large files in whole blocks, past the page cache where the system can do that.

What is saved is not read again soon. Through the page cache, each byte is copied into memory that the kernel has to
find first, which can cost more time of a processor than the digest and the disk together, and drives out pages that a
program still needs.
"""

from __future__ import annotations

import mmap
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from asyncbuf._disk import digests, files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import FileIO
    from pathlib import Path

    import numpy.typing as npt

    from asyncbuf._disk.stop import Stop

# What is hashed and written at a time: a chunk of rows and its header. Getting the interpreter's lock back costs more
# than a smaller piece.
_MEMORY_BYTES = 8 * 1024 * 1024 + 64 * 1024
# Smaller files go through the page cache.
_LARGE_BYTES = 1024 * 1024


class BlockMemory:
    """Memory for files that are being written, used again by the next ones. For any number of threads."""

    def __init__(self) -> None:
        self._free: list[npt.NDArray[np.uint8]] = []

    @contextmanager
    def lent(self, nbytes: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Memory for the duration of a block, at the beginning of a page.

        Args:
            nbytes: the bytes of the file.
        """
        if nbytes < _LARGE_BYTES:
            yield np.empty(nbytes, np.uint8)
            return
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.frombuffer(mmap.mmap(-1, _MEMORY_BYTES), np.uint8)
        yield memory
        self._free.append(memory)


class BlockFile:
    """A new file that is hashed while it is written.

    Args:
        file: the file, empty.
        path: where it is, for messages.
        memory: what is put together before it is written, ``[nbytes]``.
        stop: ends it early.
    """

    def __init__(self, file: FileIO, path: Path, memory: npt.NDArray[np.uint8], stop: Stop) -> None:
        self._file = file
        self._path = path
        self._memory = memory
        self._stop = stop
        self._filled = 0
        self._digest = digests.new()
        self._is_direct = len(memory) >= _LARGE_BYTES and files.set_direct(file, True)

    def add(self, content: npt.NDArray[np.uint8]) -> None:
        """Write bytes ``[n]``, now or later."""
        while len(content):
            room = self._memory[self._filled :][: len(content)]
            np.copyto(room, content[: len(room)])
            self._filled += len(room)
            content = content[len(room) :]
            if self._filled == len(self._memory):
                self._write(self._filled)
                self._filled = 0

    def end(self) -> str:
        """Write what is left: the digest of everything."""
        whole = self._filled - self._filled % files.BLOCK_BYTES if self._is_direct else self._filled
        self._write(whole)
        if whole < self._filled:
            files.set_direct(self._file, False)
            self._write(self._filled, whole)
        return self._digest.hexdigest()

    def _write(self, stop: int, start: int = 0) -> None:
        self._stop.check()
        content = self._memory[start:stop].data
        self._digest.update(content)
        files.write(self._file, self._path, content)
