"""Rows of files that are mapped into memory."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncbuf._disk import files
from asyncbuf.storage._frozen import CopyOnWrite
from asyncbuf.storage._mapped_files import Residency, RowFile, file_name
from asyncbuf.storage._row_memory import RowMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from io import FileIO
    from pathlib import Path

    from asyncbuf._plain import tree
    from asyncbuf.storage import _layout as layout
    from asyncbuf.storage._leaf import Field

_NOTHING_PACKED = -1


class MappedRows(RowMemory):
    """The memory behind a known structure, in new files in a folder of their own.

    Nobody else ever writes into these files: what another storage writes goes to files of its own.

    Args:
        folder: the folder, which is not there.
        capacity: number of rows.
        spec: structure of an item.
        fields: its leaves, in order.
        resident_bytes: how much of the files may count as memory of this process, about.

    Attributes:
        folder: the folder.
        names: of the files, one for each field.
        lasts: whether the files stay when the rows are not needed any more.
    """

    def __init__(
        self, folder: Path, capacity: int, spec: tree.Spec, fields: tuple[Field, ...], resident_bytes: int
    ) -> None:
        self.folder = folder
        self.names = [file_name(number, field) for number, field in enumerate(fields)]
        self.lasts = False
        self._process = os.getpid()
        self._files: list[RowFile] = []
        files.mkdir(folder)
        try:
            super().__init__(capacity, spec, fields, contiguous=True, packed_bytes=_NOTHING_PACKED)
        except BaseException:
            self.discard()
            raise
        self._residency = Residency(self._files, resident_bytes)

    def let_go(self) -> None:
        """Have none of it count as memory of this process, until it is read again."""
        self._residency.let_all_go()

    def _allocated(self, capacity: int) -> list[layout.Records]:
        # Of each field a block, as nothing is packed.
        for name, field in zip(self.names, self.fields, strict=True):
            self._files.append(RowFile(self.folder / name, field, capacity))
        return [file.records(record) for file, record in zip(self._files, self.layout.records, strict=True)]

    def reserve(self, stop: int) -> None:
        """Have room on the disk for rows up to ``stop - 1``.

        Raises:
            OSError: the disk is full.
        """
        for file in self._files:
            file.reserve(stop)

    def will_pass(self, start: int, stop: int) -> None:
        """Have the disk read rows ahead, and count them."""
        self._residency.passed(stop - start)
        for file in self._residency.large:
            file.will_pass(start, stop)

    def will_read(self, indices: np.ndarray[Any, Any]) -> None:
        """As ``will_pass`` for rows anywhere."""
        self._residency.read(len(indices))
        for file in self._residency.large:
            file.will_read(indices)

    def kept(self, count: int) -> CopyOnWrite:
        """The first rows as they are now; those that are overwritten go to a file, not to memory."""
        return CopyToFile(self.folder.parent, self.blocks, count, self.segment_rows)

    def gather(self, indices: np.ndarray[Any, Any]) -> Any:
        """Rows in memory that nobody else sees: a tree of tensors ``[batch, *item]``."""
        self.will_read(indices)
        return super().gather(indices)

    def gather_in_parts(
        self, indices: np.ndarray[Any, Any], parts: int
    ) -> tuple[Sequence[Callable[[], object]], Callable[[], Any]]:
        """As ``gather``, as functions that copy a part of the rows each, and one that makes the tree when all have."""
        copies, combine = super().gather_in_parts(indices, parts)
        size = -(-len(indices) // parts)
        reads = (indices[start : start + size] for start in range(0, len(indices), size))
        return [functools.partial(self._copy, part, copy) for part, copy in zip(reads, copies, strict=True)], combine

    def _copy(self, indices: np.ndarray[Any, Any], copy: Callable[[], object]) -> None:
        self.will_read(indices)
        copy()

    # -- the files ----------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Make rows and files survive a loss of power; the name of the folder still has to be synced."""
        for file in self._files:
            file.sync()
        files.sync_directory(self.folder)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def discard(self) -> None:
        """Remove the files. What was frozen of them stays readable, until nobody needs it."""
        self.close()
        if self._process == os.getpid():
            with contextlib.suppress(FileNotFoundError):
                files.remove_tree(self.folder)

    def __del__(self) -> None:
        """Remove files that were made and never used."""
        if not self.lasts:
            with contextlib.suppress(OSError):
                self.discard()


class CopyToFile(CopyOnWrite):
    """Copies of overwritten rows go to a file without a name, so that they take no memory however many there are.

    Args:
        folder: where the file is made, with the first copy.
        blocks: records ``[rows]``, one array per block.
        rows: how many rows are kept, from row 0 on.
        step: rows of a segment.
    """

    def __init__(self, folder: Path, blocks: Sequence[layout.Records], rows: int, step: int) -> None:
        super().__init__(blocks, rows, step)
        self._folder = folder
        self._records = [block.dtype for block in blocks]
        self._file: FileIO | None = None
        self._end = 0

    def _put_aside(self, rows: list[layout.Records]) -> Any:
        if self._file is None:
            self._file = files.unnamed(self._folder)
            # Not in __del__: while that runs, whoever writes may still find this object, by its weak reference.
            weakref.finalize(self, self._file.close)
        start, content = self._end, [each.view(np.uint8).reshape(-1) for each in rows if each.nbytes]
        files.seek(self._file, self._folder, start)
        for each in content:
            files.write(self._file, self._folder, each.data)
        self._end = start + sum(each.nbytes for each in content)
        return start, len(rows[0])

    def _brought_back(self, kept: Any) -> list[layout.Records]:
        start, count = kept
        assert self._file is not None
        files.seek(self._file, self._folder, start)
        found = []
        for record in self._records:
            raw = np.empty(count * record.itemsize, np.uint8)
            if files.read_into(self._file, self._folder, raw.data) < raw.nbytes:
                raise OSError(f"{self._folder}: expected {raw.nbytes} bytes of rows that were put aside, found fewer")
            found.append(raw.view(record) if record.itemsize else np.zeros(count, record))
        return found
