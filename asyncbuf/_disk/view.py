"""Looks into a checkpoint: at the headers of its files, and at single tensors. Nothing is compared with its digest."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncbuf._disk import files, manifest
from asyncbuf._disk.checked_file import CheckedFile
from asyncbuf._disk.manifest import MANIFEST, what_is_at
from asyncbuf._disk.reader import CheckpointReader
from asyncbuf._disk.tensor_files import original_name
from asyncbuf._plain.dtypes import dtype_name
from asyncbuf.errors import CheckpointCorruptError, CheckpointNotFoundError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import numpy.typing as npt

# What is read at once.
PIECE_BYTES = 8 * 1024 * 1024


class StoredTensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        file: the name of the file.
        dtype: such as ``float32``.
        shape: its shape.
        itemsize: bytes of an element.
        start: where in the file its first byte is.
        nbytes: how many there are.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    start: int
    nbytes: int


class Usage(NamedTuple):
    """What files take.

    Attributes:
        files: how many there are.
        nbytes: bytes of all of them; what has several names counts once.
        shared: how many of these bytes are in files that have other names elsewhere: in another checkpoint.
    """

    files: int
    nbytes: int
    shared: int


class CheckpointView(CheckpointReader):
    """Looks into one checkpoint, otherwise as a reader: a save that replaces it leaves its files alone meanwhile.

    Args:
        path: the directory.

    Attributes:
        path: the directory.
        version: of the file layout.
        libraries: versions of the libraries that wrote it.
        created: when it was committed, in seconds since the epoch.

    Raises:
        CheckpointError: as of the reader, and if it is no checkpoint at all.
    """

    def __init__(self, path: Path) -> None:
        check_is_one(path)
        super().__init__(path)
        found = files.stat(path / MANIFEST)
        self.path = path
        self.version: int = self._version
        self.libraries = {str(name): str(version) for name, version in self._written_by.items()}
        self.created = 0.0 if found is None else found.st_mtime

    def close(self) -> None:
        """Be gone: the files may be removed from now on."""
        if self._held is not None:
            self._held.release()

    def usage(self, prefix: str = "") -> Usage:
        """What the files take whose names begin with something; all of them with the manifest."""
        names = [name for name in self._files if name.startswith(prefix)]
        return usage_of([self._data / name for name in names] + ([] if prefix else [self.path / MANIFEST]))

    def tensors(self, name: str) -> dict[str, StoredTensor]:
        """Where the tensors of a file are; none, if there is no such file.

        Raises:
            CheckpointCorruptError: it is no file of tensors.
        """
        if name not in self._files:
            return {}
        entry = self._entry(name)
        with CheckedFile(self._data / name, entry) as file:
            header = file.header()
        return {
            original_name(key): _stored(name, header.nbytes + place.start, place, entry.get("dtypes", {}).get(key))
            for key, place in header.places.items()
        }

    def read_part(self, tensor: StoredTensor, start: int = 0, stop: int | None = None) -> npt.NDArray[np.uint8]:
        """Some bytes of a tensor, all of them by default.

        Raises:
            CheckpointCorruptError: they are not there any more.
        """
        content = np.empty((tensor.nbytes if stop is None else stop) - start, np.uint8)
        path = self._data / tensor.file
        with files.open_file(path) as file:
            files.seek(file, path, tensor.start + start)
            if files.read_into(file, path, content.data) < len(content):
                raise CheckpointCorruptError(f"{path}: expected {tensor.start + tensor.nbytes} bytes, found fewer")
        return content

    def pieces(self, tensor: StoredTensor, itemsize: int) -> Iterator[npt.NDArray[np.uint8]]:
        """All bytes of a tensor, some megabytes at a time: whole elements of so many bytes."""
        step = max(1, PIECE_BYTES // max(1, itemsize)) * max(1, itemsize)
        for start in range(0, tensor.nbytes, step):
            yield self.read_part(tensor, start, min(start + step, tensor.nbytes))


def _stored(file: str, start: int, place: Any, pairs: str | None) -> StoredTensor:
    dtype, shape, itemsize = dtype_name(place.dtype), place.shape, place.dtype.itemsize
    if pairs is not None:
        if shape[-1:] != (2,):
            raise CheckpointCorruptError(f"{file}: expected pairs of numbers, found {dtype} {list(shape)}")
        dtype, shape, itemsize = pairs, shape[:-1], 2 * itemsize
    return StoredTensor(file, dtype, shape, itemsize, start, place.stop - place.start)


def usage_of(paths: Iterable[Path]) -> Usage:
    """What files take that belong together. A name that leads nowhere takes nothing."""
    return usage(status for path in paths if (status := files.stat(path)) is not None)


def usage(found: Iterable[os.stat_result]) -> Usage:
    """What files take that belong together, by what is known of each name."""
    names: Counter[tuple[int, int]] = Counter()
    known = {}
    for status in found:
        key = status.st_dev, status.st_ino
        names[key] += 1
        known[key] = status
    shared = sum(status.st_size for key, status in known.items() if status.st_nlink > names[key])
    return Usage(names.total(), sum(status.st_size for status in known.values()), shared)


def check_is_one(path: Path) -> None:
    """See that a directory is a checkpoint, be it damaged or newer than this release.

    Raises:
        CheckpointNotFoundError: it is none.
        OSError: that cannot be told.
    """
    if manifest.is_checkpoint(path) or _is_damaged(path):
        return
    found = f"a {MANIFEST} of something else" if files.exists(path / MANIFEST) else what_is_at(path)
    raise CheckpointNotFoundError(f"{path}: expected a checkpoint, found {found}")


def _is_damaged(path: Path) -> bool:
    """Whether it is one though its manifest does not say so any more: who else has such directories?"""
    if not files.is_regular(path / MANIFEST) or not files.is_directory(path):
        return False
    return any(manifest.DATA.fullmatch(name) for name in files.names(path))
