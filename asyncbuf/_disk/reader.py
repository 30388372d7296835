"""Reads a checkpoint; every byte that it returns was checked."""

from __future__ import annotations

import stat as modes
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncbuf._disk import digests, documents, files, manifest
from asyncbuf._disk.checked_file import CheckedFile
from asyncbuf._disk.lock import Held, share
from asyncbuf._disk.manifest import FILE, INDEX, Manifest
from asyncbuf._disk.pipeline import MOST_BYTES, MOST_JOBS, begin
from asyncbuf._runtime.arguments import absolute
from asyncbuf._runtime.spare_memory import SpareMemory
from asyncbuf.errors import CheckpointCorruptError, CheckpointError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator
    from concurrent.futures import Future
    from pathlib import Path

    import numpy.typing as npt
    import torch

# How often a checkpoint may be replaced while somebody begins to read it.
_TRIES = 50


class CheckpointReader:
    """Reads one checkpoint. A save that replaces it leaves its files alone for as long as this is there.

    Args:
        path: the directory.

    Attributes:
        state: what was committed.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        CheckpointVersionError: its format is newer than this release.
        CheckpointCorruptError: its manifest is damaged, or files are missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = absolute(path)
        body, self._held = entered(self._path)
        self._data = self._path / body.data
        self._files = listed(body, self._data)
        _check_all(self._data, self._files)
        self._written_by = body.libraries
        self._version = body.version
        self.state: Any = self.document(body.state)

    def names(self, part: str) -> list[str]:
        """The files of tensors of a part, in order."""
        found = [name for name in self._files if name.startswith(f"{part}/") and name.endswith(".safetensors")]
        return sorted(found, key=lambda name: (len(name), name))

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return name in self._files

    def identity(self, name: str) -> str:
        """What stands for the contents of a file, wherever they are."""
        return identity_of(self._entry(name))

    def document(self, node: Any) -> Any:
        """What stands for plain data in the state, as that data.

        Raises:
            CheckpointCorruptError: its file is damaged.
        """
        if not isinstance(node, dict) or FILE not in node:
            return node
        name = node[FILE]
        if len(node) != 1 or not isinstance(name, str) or not name.endswith(".json"):
            raise CheckpointCorruptError(f"{self._path}: expected the name of a file of JSON, found {name!r}")
        return _document(self._data / name, self._entry(name))

    def read(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors of one file, each in memory of its own.

        Raises:
            CheckpointCorruptError: the file is missing, has another size, or is not the one that was written.
        """
        entry = self._entry(name)
        with CheckedFile(self._data / name, entry) as file:
            if file.is_sparse:
                return file.over(np.zeros(entry["bytes"], np.uint8))
            return file.alone()

    def read_all(self, part: str) -> Iterator[dict[str, torch.Tensor]]:
        """The files of a part, one after the other."""
        for name in self.names(part):
            yield self.read(name)

    def nbytes(self, name: str) -> int:
        """How many bytes a file has."""
        return int(self._entry(name)["bytes"])

    def read_over(self, name: str, content: npt.NDArray[np.uint8]) -> dict[str, torch.Tensor]:
        """As ``read``, but all tensors lie in one piece of memory.

        Args:
            name: the file.
            content: ``[nbytes]``.
        """
        with CheckedFile(self._data / name, self._entry(name)) as file:
            return file.over(np.zeros(len(content), np.uint8) if file.is_sparse else content)

    def _entry(self, name: str) -> dict[str, Any]:
        entry = self._files.get(name)
        if entry is None:
            raise CheckpointCorruptError(f"{self._path}: expected a file {name} in the manifest, found none")
        return entry


class ReadAhead:
    """Reads files before they are asked for, in memory that is used again. To be asked by one thread at a time.

    Args:
        reader: the checkpoint.
        names: the files, in the order in which they will be asked for.
    """

    def __init__(self, reader: CheckpointReader, names: list[str]) -> None:
        self._reader = reader
        self._names = names
        self._spare = SpareMemory(MOST_JOBS + 1)
        self._begun: dict[int, Future[dict[str, torch.Tensor]]] = {}

    def read(self, number: int) -> dict[str, torch.Tensor]:
        """The tensors of a file; the next ones are read meanwhile."""
        self._begun = {other: future for other, future in self._begun.items() if other >= number}
        ahead = 0
        for other in range(number, min(number + MOST_JOBS, len(self._names))):
            ahead += self._reader.nbytes(self._names[other])
            if other not in self._begun and (other == number or ahead <= MOST_BYTES):
                self._begun[other] = self._begin(self._names[other])
        return self._begun.pop(number).result()

    def _begin(self, name: str) -> Future[dict[str, torch.Tensor]]:
        return begin(self._reader.read_over, name, self._memory(name))

    def _memory(self, name: str) -> npt.NDArray[np.uint8]:
        try:
            return self._spare.take(self._reader.nbytes(name))
        except MemoryError as error:
            raise CheckpointError(f"{name}: expected more memory; it has {self._reader.nbytes(name)} bytes") from error


def identity_of(entry: dict[str, Any]) -> str:
    """What stands for the contents of a file of which only the digest is known, and what its pairs of numbers are."""
    pairs = [f"{key}={dtype}" for key, dtype in sorted(entry.get("dtypes", {}).items())]
    return ":".join([*digests.of_entry(entry), *pairs])


def table_of(path: Path) -> tuple[Path, dict[str, dict[str, Any]]]:
    """The data directory of a checkpoint, and what is known of the files in it.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    body = manifest.read(path)
    return path / body.data, listed(body, path / body.data)


def listed(body: Manifest, data: Path) -> dict[str, dict[str, Any]]:
    """What is known of the files in a data directory.

    Raises:
        CheckpointCorruptError: the file that says so is damaged.
    """
    if INDEX not in body.files:
        return body.files
    _check_all(data, body.files)
    table = _document(data / INDEX, body.files[INDEX])
    if not manifest.are_files(table):
        raise CheckpointCorruptError(f"{data / INDEX}: expected what is known of files, found something else")
    found: dict[str, dict[str, Any]] = table
    return found


def entered(path: Path) -> tuple[Manifest, Held | None]:
    """Be at work in the data directory of a checkpoint, which may be replaced meanwhile.

    Raises:
        CheckpointError: there is none, or its manifest is damaged or too new.
    """
    body = manifest.read(path)
    for _ in range(_TRIES):
        try:
            held = share(path / body.data)
        except NotADirectoryError:
            held = None
        again = manifest.read(path)
        if again.data == body.data:
            return again, held
        body = again
    raise CheckpointCorruptError(f"{path}: expected a checkpoint, found one that others replace all the time")


def _check_all(data: Path, table: dict[str, dict[str, Any]]) -> None:
    """Look at files without reading them, so that nothing is allocated for what is not there."""
    for _, error in faults(data, table):
        raise error


def faults(data: Path, table: dict[str, dict[str, Any]]) -> Iterator[tuple[str, CheckpointCorruptError]]:
    """What is wrong with files and folders, by name, as far as that shows without reading them."""
    folders = {data, *((data / name).parent for name in table)}
    folders |= {folder for each in list(folders) for folder in each.parents if data in folder.parents}
    for folder in sorted(folders):
        if files.is_link(folder) or not files.is_directory(folder):
            error = f"{folder}: expected a directory inside the checkpoint, found something else"
            yield folder.name, CheckpointCorruptError(error)
    for name, entry in table.items():
        problem = _problem(files.stat(data / name), entry)
        if problem is not None:
            yield name, CheckpointCorruptError(f"{data / name}: expected {problem}")


def _problem(found: os.stat_result | None, entry: dict[str, Any]) -> str | None:
    if found is None:
        return f"a file of {entry['bytes']} bytes, found none"
    if not modes.S_ISREG(found.st_mode):
        return "a regular file inside the checkpoint, found something else"
    return None if found.st_size == entry["bytes"] else f"{entry['bytes']} bytes, found {found.st_size}"


def _document(path: Path, entry: dict[str, Any]) -> Any:
    with CheckedFile(path, entry) as file:
        try:
            value = documents.joined(file.lines())
        except ValueError as error:
            raise CheckpointCorruptError(f"{path}: expected lines of JSON, found {error}") from error
        file.end()
    return value
