"""Writes a checkpoint: whole or not at all, wherever it ends.

``manifest.json`` says which files there are, with their sizes and digests, and is put in place in one step by a
rename. The files it names lie in a subdirectory that no other save uses. So a crash at any point leaves either the
checkpoint that was there before or the new one, also where one is written over another.

Against a loss of power, everything is synced before what names it: files, their directories, the directory that those
are in, the manifest, and once it is in place the directory that has its name. Only then old data is removed.
"""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING, Any, Self

from asyncbuf._disk import digests, files, housekeeping, manifest
from asyncbuf._disk.blocks import BlockFile, BlockMemory
from asyncbuf._disk.documents import Document
from asyncbuf._disk.housekeeping import Found
from asyncbuf._disk.links import Links
from asyncbuf._disk.lock import Held, share
from asyncbuf._disk.manifest import FILE, INDEX, MANIFEST, MANIFEST_BYTES, NAME, STATE, Manifest
from asyncbuf._disk.pipeline import Pipeline
from asyncbuf._disk.stop import Stop
from asyncbuf._disk.tensor_files import TensorFile
from asyncbuf._disk.transfer import Transfer
from asyncbuf._runtime.arguments import absolute
from asyncbuf.errors import CheckpointError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping
    from io import FileIO
    from pathlib import Path

    import torch

# How often others may make and remove a checkpoint in the way of this one.
_TRIES = 50
# What a rename onto a directory says that is there already and not empty.
_TAKEN = {errno.EEXIST, errno.ENOTEMPTY}
_IN_THE_WAY = "expected a place to save to, found that others make and remove it all the time"

_logger = logging.getLogger("asyncbuf")


class CheckpointWriter:
    """Writes one checkpoint, file by file; nothing shows before ``commit``.

    Use as a context manager: leaving it without ``commit`` removes what was written.

    Args:
        path: the directory of the checkpoint. What is there already is replaced, if it is a checkpoint.
        base: another checkpoint, whose files are used again where nothing has changed. Those of the one that is
            replaced are in any case.
        transfer: counts the bytes.

    Attributes:
        base: as the argument; may be set until the writer is entered.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        base: str | os.PathLike[str] | None = None,
        transfer: Transfer | None = None,
    ) -> None:
        self._path = self._root = self._data = absolute(path)
        self.base: Path | None = None if base is None else absolute(base, "base")
        self._key = housekeeping.new_key()
        self._stop = Stop()
        self._committed = False
        self._made: list[Path] = []
        self._folders: set[Path] = set()
        self._files: dict[str, dict[str, Any]] = {}
        self._held: list[Held] = []
        self._links = Links()
        self._pipeline = Pipeline()
        self._transfer = Transfer() if transfer is None else transfer
        self._memory = BlockMemory()

    # -- beginning and end --------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Make the directory that nobody sees yet.

        Raises:
            CheckpointError: something else than a checkpoint is there.
        """
        try:
            self._begin()
        except BaseException:
            self._clear()
            self._leave()
            raise
        return self

    def _begin(self) -> None:
        self._enter_root()
        has_manifest = self._root == self._path and manifest.is_checkpoint(self._path)
        if has_manifest:
            self._afterwards(lambda: housekeeping.tidy(self._path))
            self._links.add(self._path)
        if self.base is not None and self.base != self._path:
            self._links.add(self.base, is_expected=True)
        self._make_data()
        if not has_manifest:
            with files.create(self._root / housekeeping.draft_name(self._key)) as file:
                files.write(file, self._root, manifest.draft())

    def _make_data(self) -> None:
        for _ in range(_TRIES):
            self._data = self._root / housekeeping.data_name(self._key)
            files.mkdir(self._data)
            held = share(self._data, self._stop)
            if held is not None:
                self._held.append(held)
                return
            self._key = housekeeping.new_key()  # removed before it was seen that somebody is at work there
        raise CheckpointError(f"{self._path}: {_IN_THE_WAY}")

    def _enter_root(self) -> None:
        """Be at work where the checkpoint is, or where it is made."""
        for _ in range(_TRIES):
            self._stop.check()
            found = housekeeping.found_at(self._path)
            if found is Found.OTHER:
                raise self._found_other()
            if found is Found.NOTHING:
                self._made += files.make_parents(self._path.parent)
                # Before anything is written: there may be no room but for what others left.
                self._afterwards(lambda: housekeeping.sweep(self._path.parent))
                self._root = housekeeping.temporary(self._path, self._key)
                files.mkdir(self._root)
            else:
                self._root = self._path
            held = share(self._root, self._stop)
            if held is not None:
                self._held.append(held)
                return
            self._key = housekeeping.new_key()  # removed meanwhile
        raise CheckpointError(f"{self._path}: {_IN_THE_WAY}")

    def _found_other(self) -> CheckpointError:
        found = manifest.what_is_at(self._path)
        return CheckpointError(f"{self._path}: expected a checkpoint to replace, or nothing; found {found}")

    def __exit__(self, *_: object) -> None:
        """Remove what was written, unless it was committed."""
        if not self._committed:
            self._clear()
        self._leave()

    def _leave(self) -> None:
        for held in self._held:
            held.release()
        if self._committed:
            self._afterwards(lambda: housekeeping.tidy(self._path))

    def _clear(self) -> None:
        """Remove what was written, unless it is the checkpoint: what reported an error may have been done."""
        self._stop.set()
        self._pipeline.give_up()
        self._afterwards(self._clear_path)
        if self._root != self._path:
            self._afterwards(self._clear_root)

    def _clear_path(self) -> None:
        name = housekeeping.data_name(self._key)
        if not files.is_directory(self._path):
            return
        if files.exists(self._path / name) and housekeeping.committed(self._path) != name:
            files.remove_tree(self._path / name)
        files.unlink(self._path / housekeeping.unseen_name(self._key))
        files.unlink(self._path / housekeeping.draft_name(self._key))

    def _clear_root(self) -> None:
        if files.exists(self._root):
            housekeeping.remove_ours(self._root)

    def stop(self) -> bool:
        """Give up, from another thread: what is being written ends, and so does waiting for others.

        Returns:
            False if it is being committed, or was: nothing has happened then.
        """
        return self._stop.set()

    @property
    def is_committed(self) -> bool:
        """Whether the checkpoint is in place."""
        return self._committed

    def expect(self, nbytes: int | None) -> None:
        """Tell whoever watches how many bytes of tensors there will be; None if that is not known yet."""
        self._transfer.total = nbytes

    # -- files --------------------------------------------------------------------------------------------------------

    def write(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write one file of named tensors. Other threads do that; an error of theirs is raised by a later call.

        Args:
            name: ``part/00000.safetensors``.
            tensors: dense tensors on the CPU, which must not change until ``commit``.
        """
        self._write(name, tensors, None)

    def write_chunk(self, name: str, identity: str | None, tensors: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """Write one file of named tensors, or use that of another checkpoint again. Otherwise as ``write``.

        Args:
            name: as in ``write``.
            identity: stands for the tensors: a file that was written of the same identity has the same. None if that
                is not known.
            tensors: makes them, if they are to be written.
        """
        self._stop.check()
        if identity is not None and name not in self._files:
            entry = self._links.link(identity, self._place(name))
            if entry is not None:
                self._files[name] = entry
                self._transfer.used_again(entry["bytes"])
                return
        with self._pipeline.turns:
            made = tensors()
        self._write(name, made, identity)

    def _write(self, name: str, tensors: Mapping[str, torch.Tensor], identity: str | None) -> None:
        self._stop.check()
        path = self._place(name)
        content = TensorFile(tensors)
        entry: dict[str, Any] = {"bytes": 0, digests.KIND: ""}
        if content.dtypes:
            entry["dtypes"] = content.dtypes
        if identity is not None:
            entry["identity"] = identity
        self._files[name] = entry
        self._pipeline.add(content.nbytes, self._write_file, path, content, entry)

    def _write_file(self, path: Path, content: TensorFile, entry: dict[str, Any]) -> None:
        with self._memory.lent(content.nbytes) as memory, files.create(path) as file:
            blocks = BlockFile(file, path, memory, self._stop, self._transfer.wrote, self._pipeline.turns)
            entry[digests.KIND] = content.write(blocks)
            files.sync(file, path)
            found = files.status(file, path)
        entry["bytes"] = found.st_size
        if "identity" in entry:
            entry["stamp"] = [found.st_ino, found.st_mtime_ns]

    def document(self, name: str, value: Any) -> Any:
        """Write plain data, if it is large, into a file of its own.

        Args:
            name: ``part.json``.
            value: what JSON can hold.

        Returns:
            What is to stand for it in the state, for ``CheckpointReader.document``.
        """
        self._stop.check()
        with _LineFile(lambda: self._place(name), self._stop) as lines:
            document = Document(value, lines.add)
            if not document.lines:
                return document.value
            if not manifest.is_shallow(value):
                raise CheckpointError(f"{name}: expected at most {manifest.LEVELS} levels, found more")
            document.end()
            self._files[name] = lines.end()
            self._transfer.wrote(self._files[name]["bytes"])
        return {FILE: name}

    def _place(self, name: str) -> Path:
        if not NAME.fullmatch(name):
            raise CheckpointError(f"expected a name such as part/00000.safetensors, found {name!r}")
        if name in self._files:
            raise FileExistsError(f"{name}: expected one file of this name, found two")
        path = self._data / name
        for folder in reversed(path.relative_to(self._data).parents[:-1]):
            if self._data / folder not in self._folders:
                files.mkdir(self._data / folder)
                self._folders.add(self._data / folder)
        return path

    # -- the commit ---------------------------------------------------------------------------------------------------

    def commit(self, state: Any) -> None:
        """Make the checkpoint visible.

        Once it is, and would survive a loss of power, nothing that goes wrong is an error of the save any more.

        Args:
            state: what JSON can hold.
        """
        self._stop.check()
        content = self._rendered(self.document(STATE, state))
        self._transfer.total = self._transfer.done
        for folder in sorted(self._folders, key=lambda each: -len(each.parts)):
            files.sync_directory(folder)
        files.sync_directory(self._data)
        files.sync_directory(self._root)
        unseen = self._root / housekeeping.unseen_name(self._key)
        self._stop.check()
        files.write_whole(unseen, content)
        if self._root == self._path:
            # Whether it is given up is decided here, so that whoever gives it up knows what will be there.
            self._stop.too_late()
            self._put(unseen, self._root)
        else:
            self._put(unseen, self._root)
            self._move_into_place()
        self._committed = True

    def _rendered(self, state: Any) -> bytes:
        """The manifest, once all files are written, and proven to be one that can be read."""
        self._pipeline.finish()
        table = self.document(INDEX, self._files)
        listed = {INDEX: self._files[INDEX]} if INDEX in self._files else table
        content = manifest.render(Manifest(self._data.name, listed, state))
        if len(content) > MANIFEST_BYTES:
            raise CheckpointError(f"expected a manifest of at most {MANIFEST_BYTES} bytes, found {len(content)}")
        manifest.parse(content, self._root / MANIFEST)
        return content

    def _put(self, unseen: Path, root: Path) -> None:
        """Put the manifest in place, and make that survive a loss of power."""
        try:
            files.replace(unseen, root / MANIFEST)
        except OSError as error:
            # What a network file system could not answer may have been done.
            if housekeeping.committed(root) != self._data.name:
                raise
            _logger.warning("%s: the manifest was put in place, and yet reported %r", root, error)
        files.sync_directory(root)

    def _move_into_place(self) -> None:
        for folder in self._made:
            files.sync_directory(folder.parent)
        for _ in range(_TRIES):
            self._stop.too_late()
            if self._is_moved():
                return
            self._stop.in_time()
            if self._is_merged():
                return
        raise CheckpointError(f"{self._path}: {_IN_THE_WAY}")

    def _is_moved(self) -> bool:
        """Rename the new directory to its name: whether that was free."""
        self._afterwards(lambda: files.unlink(self._root / housekeeping.draft_name(self._key)))
        try:
            files.rename(self._root, self._path)
        except OSError as error:
            if files.exists(self._root) or housekeeping.committed(self._path) != self._data.name:
                if error.errno in _TAKEN:
                    return False
                raise
            _logger.warning("%s: the checkpoint was put in place, and yet reported %r", self._path, error)
        files.sync_directory(self._path.parent)
        return True

    def _is_merged(self) -> bool:
        """Replace the checkpoint of another save that came first, in one step as well: whether it is still there."""
        found = housekeeping.found_at(self._path)
        if found is Found.OTHER:
            raise self._found_other()
        held = None if found is Found.NOTHING else share(self._path, self._stop)
        if held is None:
            return False
        self._held.append(held)
        self._stop.too_late()
        files.rename(self._data, self._path / self._data.name)
        files.sync_directory(self._path)
        self._put(self._root / MANIFEST, self._path)
        self._afterwards(lambda: housekeeping.remove_ours(self._root))
        return True

    def _afterwards(self, action: Callable[[], object]) -> None:
        """Do what is no part of the save."""
        try:
            action()
        except (OSError, CheckpointError) as error:
            _logger.warning("%s: what is not needed any more could not be removed: %r", self._path, error)


class _LineFile:
    """A file of lines that is made with the first of them.

    Args:
        place: says where, and makes the directories on the way.
        stop: ends it early.
    """

    def __init__(self, place: Callable[[], Path], stop: Stop) -> None:
        self._place = place
        self._stop = stop
        self._digest = digests.new()
        self._file: FileIO | None = None
        self._path: Path | None = None
        self._nbytes = 0

    def __enter__(self) -> Self:
        """Nothing is there yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def add(self, line: bytes) -> None:
        """Write a line."""
        self._stop.check()
        if self._file is None or self._path is None:
            self._path = self._place()
            self._file = files.create(self._path)
        content = line + b"\n"
        files.write(self._file, self._path, content)
        self._digest.update(content)
        self._nbytes += len(content)

    def end(self) -> dict[str, Any]:
        """Make it last: what the manifest says of it."""
        assert self._file is not None
        assert self._path is not None
        files.sync(self._file, self._path)
        return {"bytes": self._nbytes, digests.KIND: self._digest.hexdigest()}
