"""Writes large files in whole blocks, past the page cache where the system can do that.

What is saved is not read again soon. Through the page cache, each byte is copied into memory that the kernel has to
find first, which can cost more time of a processor than the digest and the disk together, and drives out pages that a
program still needs.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from asyncbuf._disk import digests, files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from io import FileIO
    from pathlib import Path

    import numpy.typing as npt

    from asyncbuf._disk.stop import Stop

# What is put together before it is written. More of it would lie in pages of 2 MB, whose first touch takes long.
_MEMORY_BYTES = 2 * 1024 * 1024
# What is hashed and written at a time. Getting the interpreter's lock back costs more than a smaller piece.
_PIECE_BYTES = 8 * 1024 * 1024
# Smaller files go through the page cache.
LARGE_BYTES = 1024 * 1024
# Fewer bytes are copied before they are written, even where they lie as they will in the file.
_LEAST_BYTES = 256 * 1024


class BlockMemory:
    """Memory for files that are being written, used again by the next ones. For any number of threads."""

    def __init__(self) -> None:
        self._free: list[npt.NDArray[np.uint8]] = []

    @contextmanager
    def lent(self, nbytes: int) -> Iterator[npt.NDArray[np.uint8]]:
        """Memory for the duration of a block, that begins at a block.

        Args:
            nbytes: the bytes of the file.
        """
        if nbytes < LARGE_BYTES:
            yield np.empty(nbytes, np.uint8)
            return
        try:
            memory = self._free.pop()
        except IndexError:
            whole = np.empty(_MEMORY_BYTES + files.BLOCK_BYTES, np.uint8)
            skipped = -whole.ctypes.data % files.BLOCK_BYTES
            memory = whole[skipped : skipped + _MEMORY_BYTES]
        yield memory
        self._free.append(memory)


class BlockFile:
    """A new file that is hashed while it is written.

    Args:
        file: the file, empty.
        path: where it is, for messages.
        memory: what is put together before it is written, ``[nbytes]``.
        stop: ends it early.
        wrote: told how many bytes were written, after each piece.
        turns: held while a processor is busy with it.
    """

    def __init__(
        self,
        file: FileIO,
        path: Path,
        memory: npt.NDArray[np.uint8],
        stop: Stop,
        wrote: Callable[[int], None],
        turns: AbstractContextManager[object],
    ) -> None:
        self._file = file
        self._path = path
        self._memory = memory
        self._stop = stop
        self._wrote = wrote
        self._turns = turns
        self._filled = 0
        self._digest = digests.new()
        self._is_direct = len(memory) >= LARGE_BYTES and files.set_direct(file, True)

    def add(self, content: npt.NDArray[np.uint8]) -> None:
        """Write bytes ``[n]``, now or later. They must not change until the end."""
        begun = -self._filled % files.BLOCK_BYTES
        whole = (len(content) - begun) // files.BLOCK_BYTES * files.BLOCK_BYTES
        if self._is_direct and whole >= _LEAST_BYTES and (content.ctypes.data + begun) % files.BLOCK_BYTES == 0:
            self._copy(content[:begun])
            self._flush()
            for start in range(begun, begun + whole, _PIECE_BYTES):
                self._write(content[start : min(start + _PIECE_BYTES, begun + whole)])
            content = content[begun + whole :]
        self._copy(content)

    def _copy(self, content: npt.NDArray[np.uint8]) -> None:
        while len(content):
            room = self._memory[self._filled :][: len(content)]
            with self._turns:
                np.copyto(room, content[: len(room)])
            self._filled += len(room)
            content = content[len(room) :]
            if self._filled == len(self._memory):
                self._flush()

    def _flush(self) -> None:
        self._write(self._memory[: self._filled])
        self._filled = 0

    def end(self) -> str:
        """Write what is left: the digest of everything."""
        left = self._memory[: self._filled]
        whole = len(left) - len(left) % files.BLOCK_BYTES if self._is_direct else len(left)
        self._write(left[:whole])
        if whole < len(left):
            files.set_direct(self._file, False)
            self._write(left[whole:])
        return self._digest.hexdigest()

    def _write(self, content: npt.NDArray[np.uint8]) -> None:
        self._stop.check()
        with self._turns:
            self._digest.update(content.data)
        files.write(self._file, self._path, content.data)
        self._wrote(len(content))
