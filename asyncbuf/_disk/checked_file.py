"""One file of a checkpoint, read and hashed piece by piece."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Self

from asyncbuf._disk import digests, files
from asyncbuf._disk import tensor_files as tensors
from asyncbuf._disk.documents import MOST_LINE_BYTES
from asyncbuf.errors import CheckpointCorruptError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import FileIO
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt
    import torch

    from asyncbuf._disk.stop import Stop

# What is read and hashed at once. The interpreter's lock is free meanwhile, and dear to get back where many want it.
_PIECE_BYTES = 8 * 1024 * 1024
_LINES_BYTES = 1024 * 1024
# A file is sparse if less than one in so many of its bytes is on the disk.
_SPARSE = 8


class CheckedFile:
    """Reads a file from its beginning; ``end`` says whether it is the one that was written.

    Args:
        path: the file.
        entry: what the manifest says of it.
    """

    def __init__(self, path: Path, entry: dict[str, Any]) -> None:
        self._path = path
        self._nbytes: int = entry["bytes"]
        self._kind, self._expected = digests.of_entry(entry)
        self._dtypes: dict[str, str] = entry.get("dtypes", {})
        self._digest = digests.new(self._kind)
        self._file: FileIO = self._opened()

    def _opened(self) -> FileIO:
        try:
            return files.open_file(self._path)
        except FileNotFoundError as error:
            raise CheckpointCorruptError(
                f"{self._path}: expected a file of {self._nbytes} bytes, found none"
            ) from error
        except OSError as error:
            if files.is_regular(self._path):
                raise
            raise CheckpointCorruptError(f"{self._path}: expected a regular file, found something else") from error

    def __enter__(self) -> Self:
        """Look at its size.

        Raises:
            CheckpointCorruptError: it is another one.
        """
        try:
            found = files.status(self._file, self._path)
            if found.st_size != self._nbytes:
                raise CheckpointCorruptError(f"{self._path}: expected {self._nbytes} bytes, found {found.st_size}")
        except BaseException:
            self._file.close()
            raise
        blocks = getattr(found, "st_blocks", None) if hasattr(os, "SEEK_DATA") else None
        self.is_sparse = blocks is not None and blocks * 512 * _SPARSE < self._nbytes > _LINES_BYTES
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self._file.close()

    def alone(self) -> dict[str, torch.Tensor]:
        """Its tensors, each in memory of its own."""
        found = tensors.alone(self.header(), self._dtypes, self._fill)
        self.end()
        return found

    def header(self) -> tensors.Header:
        """Where its tensors are; what follows is not read."""
        content = bytearray(8)
        self._fill(memoryview(content))
        size = int.from_bytes(content, "little")
        if size <= min(tensors.HEADER_BYTES, self._nbytes - 8):
            text = bytearray(size)
            self._fill(memoryview(text))
            content += text
        return self._header(memoryview(content))

    def verify(self, stop: Stop) -> None:
        """Read all of it, and compare its digest.

        Args:
            stop: ends it early.
        """
        piece = memoryview(bytearray(min(self._nbytes, _PIECE_BYTES)))
        for start in range(0, self._nbytes, _PIECE_BYTES):
            stop.check()
            self._fill(piece[: self._nbytes - start])
        self.end()

    def over(self, content: npt.NDArray[np.uint8]) -> dict[str, torch.Tensor]:
        """Its tensors over a piece of memory ``[nbytes]``; zeros, for a sparse file."""
        view = content.data
        if self.is_sparse:
            files.read_sparse(self._file, self._path, view)
            for start in range(0, len(view), _PIECE_BYTES):
                self._digest.update(view[start : start + _PIECE_BYTES])
        else:
            self._fill(view)
        self.end()
        return tensors.over(content, self._header(view), self._dtypes)

    def lines(self) -> Iterator[bytearray]:
        """Its lines, of which none may be long.

        Raises:
            ValueError: one is, or the last one does not end.
        """
        begun = bytearray()
        left = self._nbytes
        while left:
            piece = bytearray(min(left, _LINES_BYTES))
            self._fill(memoryview(piece))
            left -= len(piece)
            *whole, rest = piece.split(b"\n")
            for line in whole:
                yield begun + line
                begun = bytearray()
            begun += rest
            if len(begun) > MOST_LINE_BYTES:
                raise ValueError(f"a line of more than {MOST_LINE_BYTES} bytes")
        if begun:
            raise ValueError("a line that does not end")

    def end(self) -> None:
        """Compare the digest of everything that was read.

        Raises:
            CheckpointCorruptError: it is another file.
        """
        found = self._digest.hexdigest()
        if found != self._expected:
            raise CheckpointCorruptError(
                f"{self._path}: expected the {self._kind} digest {self._expected}, found {found}"
            )

    def _header(self, content: memoryview) -> tensors.Header:
        try:
            return tensors.read_header(content, self._nbytes)
        except (ValueError, RecursionError) as error:
            raise CheckpointCorruptError(f"{self._path}: expected tensors, found {error}") from error

    def _fill(self, content: memoryview) -> None:
        for start in range(0, len(content), _PIECE_BYTES):
            piece = content[start : start + _PIECE_BYTES]
            count = files.read_into(self._file, self._path, piece)
            self._digest.update(piece[:count])
            if count < len(piece):
                raise CheckpointCorruptError(f"{self._path}: expected {self._nbytes} bytes, found fewer")
