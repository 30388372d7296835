"""The directory of a storage of mapped files: who has it, and what it says of itself."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._disk import files, lock
from asyncbuf._plain.tree import builder
from asyncbuf.errors import AsyncBufError, CheckpointCorruptError
from asyncbuf.storage._row_memory import described, parsed

if TYPE_CHECKING:
    from pathlib import Path

    from asyncbuf.storage._leaf import Field
    from asyncbuf.storage._mapped_rows import MappedRows

DESCRIPTION = "asyncbuf-memmap.json"
FORMAT, VERSION = "asyncbuf.memmap", 1
_NEW = DESCRIPTION + ".new"
_FOLDER = re.compile(r"rows-[0-9a-f]{16}")
_MOST_BYTES = 64 * 1024 * 1024
_HOW = "restore a checkpoint into a MemmapStorage(..., overwrite=True), which removes what is there"


class RowDirectory:
    """A directory that one storage has to itself, until it is closed.

    Args:
        path: the directory; it and those above it are made where they are missing.
        capacity: number of rows.
        overwrite: whether rows of an earlier storage are removed.

    Attributes:
        path: the directory.
        is_clean: whether its description may say that the files are as they should be.

    Raises:
        AsyncBufError: another storage has it.
        FileExistsError: there is something in it.
        OSError: it cannot be made.
    """

    def __init__(self, path: Path, capacity: int, *, overwrite: bool) -> None:
        self.path = path
        self.is_clean = False
        self._capacity = capacity
        for folder in files.make_parents(path):
            files.sync_directory(folder.parent)
        self._held = lock.alone(path)
        if self._held is None:
            raise AsyncBufError(
                f"{path}: expected a directory that no other storage has, in this process or in another, found one "
                "that is in use: close() that one first, or choose another directory"
            )
        try:
            _check_claimable(path, overwrite=overwrite)
            self.describe(None, 0, is_clean=False)
            self.sweep(None)
        except BaseException:
            self.release()
            raise

    def new_folder(self) -> Path:
        """Where new rows may go."""
        return self.path / f"rows-{secrets.token_hex(8)}"

    def describe(self, rows: MappedRows | None, count: int, *, is_clean: bool) -> None:
        """Say what is in it, in one step that survives a loss of power.

        Args:
            rows: the rows; None if there are none.
            count: how many of them were written, from row 0 on.
            is_clean: whether the files are as they should be, so that somebody may read them.
        """
        document: dict[str, Any] = {"format": FORMAT, "version": VERSION, "capacity": self._capacity, "clean": is_clean}
        if rows is not None:
            items = described(rows.spec, rows.fields, count)
            document |= {"folder": rows.folder.name, "files": rows.names, "items": items}
        new = self.path / _NEW
        files.unlink(new)
        files.write_whole(new, (json.dumps(document, indent=1) + "\n").encode())
        # Whatever fails from here on: it may be that somebody reads that it is clean.
        self.is_clean = self.is_clean or is_clean
        files.replace(new, self.path / DESCRIPTION)
        files.sync_directory(self.path)
        self.is_clean = is_clean

    def sweep(self, rows: MappedRows | None) -> None:
        """Remove rows that the description does not name: those of a process that was killed, or of before."""
        kept = None if rows is None else rows.folder.name
        for name in files.names(self.path):
            if _FOLDER.fullmatch(name) and name != kept:
                with contextlib.suppress(FileNotFoundError):
                    files.remove_tree(self.path / name)

    def release(self) -> None:
        """Leave it to others."""
        if self._held is not None:
            self._held.release()


def _check_claimable(path: Path, *, overwrite: bool) -> None:
    names = set(files.names(path)) - {_NEW}
    if DESCRIPTION not in names:
        if names:
            raise FileExistsError(
                f"{path}: expected an empty directory or one of a MemmapStorage, found {sorted(names)[:3]} in it, "
                "which are not removed: choose another directory"
            )
        return
    document = _document(path)
    if overwrite or (document.get("version") == VERSION and document.get("folder") is None):
        return
    what = "rows" if document.get("clean") is True else "rows that were not closed cleanly"
    reading = "MemmapStorage.read() gives them as fixed data; " if document.get("clean") is True else ""
    raise FileExistsError(f"{path}: expected no rows of an earlier storage, found {what}: {reading}{_HOW}")


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(bytes(files.read_whole(path / DESCRIPTION, _MOST_BYTES)))
    except ValueError as error:
        raise CheckpointCorruptError(f"{path / DESCRIPTION}: expected JSON, found {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointCorruptError(f"{path / DESCRIPTION}: expected a description of rows, found something else")
    return document


def read_rows(path: Path) -> Any:
    """The rows of a directory that was closed cleanly: a tree of tensors ``[rows, *item]`` over its files.

    Raises:
        AsyncBufError: a storage has it, or it was not closed cleanly.
        CheckpointCorruptError: description and files do not go together.
        FileNotFoundError: there is no such directory, or it is not one of a storage.
    """
    held = lock.share_now(path)
    if held is None:
        if not files.exists(path):
            raise FileNotFoundError(f"{path}: expected the directory of a MemmapStorage, found nothing")
        raise AsyncBufError(f"{path}: expected rows that nobody writes, found a storage that is open: close() it first")
    try:
        return _read(path, _document(path))
    finally:
        held.release()


def _read(path: Path, document: dict[str, Any]) -> Any:
    if document.get("version") != VERSION:
        raise AsyncBufError(
            f"{path}: expected version {VERSION} of its format, found {document.get('version')!r}: it was written by "
            "another version of asyncbuf"
        )
    if document.get("clean") is not True:
        raise AsyncBufError(
            f"{path}: expected rows that were closed cleanly, found some that were not, because the process was killed "
            f"or close() was not called: {_HOW}"
        )
    if document.get("folder") is None:
        raise AsyncBufError(f"{path}: expected rows, found a storage that was closed before anything was written")
    try:
        folder, names, capacity = str(document["folder"]), list(document["files"]), document["capacity"]
        spec, fields, count = parsed(document["items"])
        is_sound = _FOLDER.fullmatch(folder) and all("/" not in name and name.endswith(".npy") for name in names)
        if not is_sound or len(names) != len(fields) or type(capacity) is not int or count > capacity:
            raise ValueError(f"folder {folder!r}, files {names}, capacity {capacity!r}")
        leaves = [
            _tensor(path / folder / name, field, capacity)[:count] for name, field in zip(names, fields, strict=True)
        ]
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointCorruptError(f"{path}: expected a description and its files, found {error!r}") from error
    return builder(spec)(leaves, count)


def _tensor(path: Path, field: Field, capacity: int) -> torch.Tensor:
    """All rows of a field. Whoever writes to them writes to memory of his own."""
    with files.open_file(path) as file:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"{path.name} of version {version}")
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
        start = file.tell()
        if shape != (capacity, *field.shape) or is_fortran or dtype != field.bits:
            raise ValueError(f"{path.name} with {dtype} {shape}")
        nbytes = capacity * field.nbytes
        if files.status(file, path).st_size != start + nbytes:
            raise ValueError(f"{path.name} of another size")
        if not nbytes:
            return field.typed(torch.from_numpy(np.zeros(shape, field.bits)))
        memory = files.mapped(file, path, shared=False)
    rows = np.frombuffer(memory, field.bits, nbytes // field.bits.itemsize, start).reshape(shape)
    return field.typed(torch.from_numpy(rows))
