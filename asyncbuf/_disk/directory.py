"""A checkpoint as a directory: written whole or not at all, and checked to the last bit when it is read.

``manifest.json`` says which files there are, with their sizes and SHA-256 digests, and is replaced in one step by a
rename. The files it names lie in a subdirectory that no other save uses. So a crash at any point leaves either the
checkpoint that was there before or the new one, also where one is written over another.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import safetensors
import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save_file

from asyncbuf._disk.lock import DirectoryLock
from asyncbuf._plain.codec import DTYPES
from asyncbuf._plain.savable import SAVABLE_DTYPES
from asyncbuf._runtime.arguments import absolute
from asyncbuf._version import __version__
from asyncbuf.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointVersionError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

VERSION = 1
MANIFEST = "manifest.json"
MANIFEST_BYTES = 256 * 1024 * 1024
_FORMAT = "asyncbuf.checkpoint"
# A value of as many levels as may be encoded needs at most three of JSON for each.
_LEVELS = 320
# What a rename onto a directory says that is there already and not empty.
_TAKEN = {errno.EEXIST, errno.ENOTEMPTY}
_NAME = re.compile(r"[A-Za-z0-9_-]+(?:/[A-Za-z0-9_-]+)*\.safetensors")
_DATA = re.compile(r"data-[0-9a-f]{16}")
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.tmp-[0-9a-f]{16}")
# safetensors keeps its own things under this name: a tensor called so makes a file that nothing can read.
_RESERVED = "__metadata__"


class StoppedError(Exception):
    """The save was given up while its thread was at work."""


class CheckpointWriter:
    """Writes one checkpoint, file by file; nothing shows before ``commit``.

    Use as a context manager: leaving it without ``commit`` removes what was written.

    Args:
        path: the directory of the checkpoint. What is there already is replaced, if it is a checkpoint.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = self._root = self._data = absolute(path)
        self._files: dict[str, dict[str, Any]] = {}
        self._key = secrets.token_hex(8)
        self._unseen = f"{MANIFEST}.{self._key}"
        self._stopped = self._committed = self._is_new = False
        self._lock: DirectoryLock | None = None

    def __enter__(self) -> Self:
        """Make the directory that nobody sees yet.

        Raises:
            CheckpointError: something else than a checkpoint is there.
        """
        self._lock = self._present()
        self._root = self._path.with_name(f".{self._path.name}.tmp-{self._key}") if self._is_new else self._path
        self._data = self._root / f"data-{self._key}"
        if self._is_new:
            self._root.mkdir()
        self._data.mkdir()
        return self

    def _present(self) -> DirectoryLock:
        """Be at work where the checkpoint is, or will be."""
        while True:
            self._is_new = not (self._path.is_symlink() or self._path.exists())
            if self._is_new:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                return DirectoryLock(self._path.parent)
            # What a save leaves that was interrupted before its first commit is no obstacle.
            if not self._path.is_dir() or not (is_checkpoint(self._path) or _all_ours(self._path)):
                raise CheckpointError(f"{self._path}: expected a checkpoint or nothing, found something else")
            lock = DirectoryLock(self._path.parent)
            lock.enter(self._path, required=True)
            if lock.holds(self._path):
                return lock
            lock.release()  # it was removed meanwhile

    def __exit__(self, *_: object) -> None:
        """Remove what was written, unless it was committed."""
        if not self._committed:
            shutil.rmtree(
                self._data if self._root == self._path else self._root,
                ignore_errors=True,
            )
        if self._lock is not None:
            self._lock.release()

    def stop(self) -> None:
        """Give up, from another thread: the next write raises."""
        self._stopped = True

    def write(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write one file of named tensors.

        Args:
            name: ``part/00000.safetensors``.
            tensors: dense tensors on the CPU.
        """
        if self._stopped:
            raise StoppedError
        if not _NAME.fullmatch(name):
            raise CheckpointError(f"expected a name such as part/00000.safetensors, found {name!r}")
        stored = {_renamed(key): _storable(key, tensor) for key, tensor in tensors.items()}
        dtypes = {
            _renamed(key): str(tensor.dtype).removeprefix("torch.")
            for key, tensor in tensors.items()
            if _viewed(tensor)
        }
        path = self._data / name
        for folder in reversed(path.relative_to(self._data).parents[:-1]):
            (self._data / folder).mkdir(exist_ok=True)
        entry = _write_tensors(path, stored)
        self._files[name] = entry | ({"dtypes": dtypes} if dtypes else {})

    def commit(self, state: Any) -> None:
        """Make the checkpoint visible.

        Args:
            state: what JSON can hold.
        """
        if self._stopped:
            raise StoppedError
        for folder, _, _ in os.walk(self._data, topdown=False):
            _sync(Path(folder))
        body = {
            "data": self._data.name,
            "files": self._files,
            "libraries": _libraries(),
            "state": state,
        }
        _write_file(self._root / self._unseen, _rendered(body))
        (self._root / self._unseen).replace(self._root / MANIFEST)
        _sync(self._root)
        assert self._lock is not None
        if self._root != self._path:
            self._move_into_place()
        self._committed = True
        _sync(self._path.parent)
        if self._lock.exclusive():
            self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        # Of two saves at once, the one that committed last is the checkpoint.
        committed = _read_manifest(self._path)["data"]
        for entry in self._path.iterdir():
            if not _is_ours(entry) or entry.name == committed:
                continue
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)

    def _move_into_place(self) -> None:
        assert self._lock is not None
        while True:
            try:
                self._root.rename(self._path)
            except OSError as error:
                if not is_checkpoint(self._path):
                    if error.errno not in _TAKEN or self._path.exists():
                        raise
                    continue  # it was removed meanwhile
            else:
                self._lock.enter(self._path)
                return
            # Another save to the same place came first: this one replaces it, in one step as well.
            self._lock.enter(self._path, required=True)
            if self._lock.holds(self._path):
                break
        (self._root / self._data.name).rename(self._path / self._data.name)
        (self._root / MANIFEST).replace(self._path / MANIFEST)
        _sync(self._path)
        self._root.rmdir()


class CheckpointReader:
    """Reads one checkpoint; every byte that it returns was checked.

    Args:
        path: the directory.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        CheckpointVersionError: its format is newer than this release.
        CheckpointCorruptError: its manifest is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = absolute(path)
        self._lock = DirectoryLock(self._path)  # a save that replaces the checkpoint leaves these files alone
        body = _read_manifest(self._path)
        self.state: Any = body["state"]
        self._data = self._path / body["data"]
        self._files: dict[str, dict[str, Any]] = body["files"]
        for name, entry in self._files.items():
            self._check(name, entry)

    def names(self, part: str) -> list[str]:
        """The files of a part, in order."""
        return sorted(name for name in self._files if name.startswith(f"{part}/"))

    def has(self, name: str) -> bool:
        """Whether there is such a file."""
        return name in self._files

    def read(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors of one file, in memory of their own.

        Raises:
            CheckpointCorruptError: the file is missing, has another size, or is not the one that was written.
        """
        entry = self._files.get(name)
        if entry is None:
            raise CheckpointCorruptError(f"{self._path}: expected a file {name} in the manifest, found none")
        content = self._content(name, entry)
        try:
            tensors = parse_tensors(content)
        except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
            raise CheckpointCorruptError(f"{self._data / name}: expected tensors, found {error}") from error
        dtypes = entry.get("dtypes", {})
        return {_original(key): _restored(tensor, dtypes.get(key)) for key, tensor in tensors.items()}

    def read_all(self, part: str) -> Iterator[dict[str, torch.Tensor]]:
        """The files of a part, one after the other."""
        for name in self.names(part):
            yield self.read(name)

    def _check(self, name: str, entry: dict[str, Any]) -> None:
        """Look at a file without reading it, so that nothing is allocated for what is not there."""
        path = self._data / name
        try:
            found = path.lstat()
            inside = path.resolve(strict=True).is_relative_to(self._path.resolve(strict=True))
        except OSError as error:
            raise CheckpointCorruptError(f"{path}: expected a file of {entry['bytes']} bytes, found none") from error
        if not stat.S_ISREG(found.st_mode) or not inside:
            raise CheckpointCorruptError(f"{path}: expected a regular file inside the checkpoint, found something else")
        if found.st_size != entry["bytes"]:
            raise CheckpointCorruptError(f"{path}: expected {entry['bytes']} bytes, found {found.st_size}")

    def _content(self, name: str, entry: dict[str, Any]) -> bytes:
        self._check(name, entry)
        path = self._data / name
        # Read, not mapped: a file that is cut while it is mapped ends the process.
        try:
            with open(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), "rb") as file:
                content = file.read(entry["bytes"] + 1)
        except FileNotFoundError as error:
            raise CheckpointCorruptError(f"{path}: expected a file of {entry['bytes']} bytes, found none") from error
        digest = hashlib.sha256(content).hexdigest()
        if len(content) != entry["bytes"] or digest != entry["sha256"]:
            raise CheckpointCorruptError(f"{path}: expected the SHA-256 digest {entry['sha256']}, found {digest}")
        return content


def _is_ours(entry: Path) -> bool:
    """Whether it is data, or a manifest that was not yet put in place."""
    return _DATA.fullmatch(entry.name) is not None or entry.name.startswith(f"{MANIFEST}.")


def _all_ours(path: Path) -> bool:
    try:
        return all(map(_is_ours, path.iterdir()))
    except FileNotFoundError:  # removed meanwhile
        return True


def is_checkpoint(path: Path) -> bool:
    """Whether a committed checkpoint is there; it may still turn out to be damaged."""
    return (path / MANIFEST).is_file()


def sweep(directory: Path) -> None:
    """Remove what interrupted saves left beside the checkpoints in a directory, unless somebody is saving there."""
    lock = DirectoryLock(directory)
    try:
        for entry in directory.iterdir() if lock.exclusive() else ():
            if _TEMPORARY.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
    finally:
        lock.release()


def remove(path: Path) -> bool:
    """Remove a checkpoint that nobody reads: whether that was so. In one step, so that no half of it is ever found."""
    lock = DirectoryLock(path)
    try:
        if not lock.exclusive():
            return False
        gone = path.rename(path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}"))
        shutil.rmtree(gone)
    finally:
        lock.release()
    return True


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = path / MANIFEST
    try:
        size = manifest.lstat().st_size
        if manifest.is_symlink() or not manifest.is_file() or size > MANIFEST_BYTES:
            raise CheckpointCorruptError(f"{manifest}: expected a file of at most {MANIFEST_BYTES} bytes, found {size}")
        content = manifest.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointNotFoundError(f"{path}: expected a checkpoint with a {MANIFEST}, found none") from error
    try:
        document = json.loads(content, object_pairs_hook=_unique, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"{manifest}: expected JSON, found {error}") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise CheckpointCorruptError(f"{manifest}: expected the format {_FORMAT!r}, found something else")
    version = document.get("version")
    if type(version) is not int or version > VERSION or version < 1:
        raise CheckpointVersionError(f"{manifest}: expected a format version from 1 to {VERSION}, found {version!r}")
    body = document.get("body")
    try:
        is_sound = _is_shallow(body) and _well_formed(body) and _rendered(body) == content
    except (RecursionError, ValueError) as error:
        raise CheckpointCorruptError(f"{manifest}: expected the manifest that was written, found {error}") from error
    if not is_sound:
        raise CheckpointCorruptError(f"{manifest}: expected the manifest that was written, found a changed one")
    return cast("dict[str, Any]", body)


def _is_shallow(body: Any) -> bool:
    """Whether whoever walks through it will not run out of stack."""
    level = [body]
    for _ in range(_LEVELS):
        level = [
            child
            for node in level
            if isinstance(node, (dict, list))
            for child in (node.values() if isinstance(node, dict) else node)
        ]
    return not level


def _well_formed(body: Any) -> bool:
    return (
        isinstance(body, dict)
        and body.keys() == {"data", "files", "libraries", "state"}
        and isinstance(body["data"], str)
        and _DATA.fullmatch(body["data"]) is not None
        and isinstance(body["files"], dict)
        and all(_NAME.fullmatch(name) and _well_formed_file(entry) for name, entry in body["files"].items())
    )


def _well_formed_file(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and type(entry.get("bytes")) is int
        and entry["bytes"] >= 0
        and isinstance(entry.get("sha256"), str)
        and isinstance(entry.get("dtypes", {}), dict)
        and all(isinstance(name, str) and name in DTYPES for name in entry.get("dtypes", {}).values())
    )


def _rendered(body: Any) -> bytes:
    """The manifest, byte for byte: reading renders it again and compares, so that no change goes unnoticed."""
    text = json.dumps(body, indent=1, allow_nan=False, ensure_ascii=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    document = {"body": body, "format": _FORMAT, "sha256": digest, "version": VERSION}
    return (json.dumps(document, indent=1, allow_nan=False, ensure_ascii=True) + "\n").encode()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError(f"a duplicate key among {[key for key, _ in pairs][:8]}")
    return result


def _refused(constant: str) -> Any:
    raise ValueError(f"the constant {constant}")


def _libraries() -> dict[str, str]:
    return {
        "asyncbuf": __version__,
        "safetensors": safetensors.__version__,
        "torch": str(torch.__version__),
    }


def _renamed(key: str) -> str:
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{key!r}: expected the name of a tensor that is valid Unicode, found {error}") from error
    return key + "/" if key.rstrip("/") == _RESERVED else key


def _original(key: str) -> str:
    return key[:-1] if key.rstrip("/") == _RESERVED else key


def _viewed(tensor: torch.Tensor) -> bool:
    return tensor.is_complex()


def _storable(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Dense, in memory of its own, and of a dtype that safetensors has: complex numbers become pairs."""
    if tensor.dtype not in SAVABLE_DTYPES or tensor.is_meta or tensor.layout is not torch.strided:
        raise CheckpointError(
            f"{key}: expected a dense tensor of a common dtype, found {tensor.dtype}, {tensor.layout}, {tensor.device}"
        )
    plain = tensor.detach().resolve_conj().resolve_neg()
    # safetensors refuses tensors that share memory.
    return (torch.view_as_real(plain) if _viewed(plain) else plain).clone(memory_format=torch.contiguous_format)


def _restored(tensor: torch.Tensor, dtype: str | None) -> torch.Tensor:
    if dtype is None:
        return tensor
    try:
        return torch.view_as_complex(tensor).to(DTYPES[dtype])
    except RuntimeError as error:
        raise CheckpointCorruptError(f"expected pairs of numbers, found {tensor.dtype} {list(tensor.shape)}") from error


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Write a file, and say how long it is and what its digest is.

    Rendered into memory first, it would keep the interpreter's lock for as long as that takes.
    """
    with path.open("xb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path}: expected to write tensors, found {error}") from error
    path.chmod(mode)  # safetensors makes a new file, which nobody else may read
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def _write_file(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    """Make the names in a directory survive a loss of power, where the system has that."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
