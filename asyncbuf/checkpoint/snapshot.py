"""One point in time of everything a buffer is, to be saved, kept, compared or restored."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import torch

from asyncbuf._disk.reader import CheckpointReader, ReadAhead
from asyncbuf._disk.writer import CheckpointWriter
from asyncbuf._plain.codec import join, split
from asyncbuf._plain.layout import laid_out, layout_of
from asyncbuf._plain.memory import check_memory
from asyncbuf._plain.state import check_plain
from asyncbuf._runtime.arguments import absolute
from asyncbuf._runtime.summary import literal, summary
from asyncbuf._runtime.threads import in_thread
from asyncbuf.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointVersionError
from asyncbuf.storage._frozen import Chunk, InMemoryRows, tensors_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from asyncbuf.storage._frozen import Frozen

VERSION = 3
FORMAT = "asyncbuf.snapshot"
# What stands in the state of a snapshot beside the states of the parts of a buffer.
_RESERVED = {"format", "version", "config", "prefetch", "storage", "layout", "scattered"}


class Snapshot:
    """A buffer at one point in time.

    Holds its own copy of everything but the rows of the storage, which are kept as they were for as long as the
    snapshot lives: rows that are overwritten meanwhile are copied aside first.

    Has ``state_dict`` and ``load_state_dict``, as a ``Stateful`` of ``torch.distributed.checkpoint``, which loads it by
    ``asyncbuf.integrations.dcp``; and pickles.
    """

    def __init__(
        self,
        state: dict[str, Any] | None = None,
        storage: Frozen | None = None,
        on_commit: Callable[[], None] | None = None,
    ) -> None:
        if state is not None and not isinstance(state, dict):
            raise TypeError(
                f"state: expected a dict, found {summary(state)}; Snapshot.from_state_dict takes state dicts"
            )
        self._state = {} if state is None else state
        self._storage: Frozen = InMemoryRows(None) if storage is None else storage
        self._on_commit = on_commit
        self._is_committed = False

    @property
    def is_committed(self) -> bool:
        """Whether a committed checkpoint directory has all of it."""
        return self._is_committed

    def committed(self) -> None:
        """A checkpoint directory has all of it now. May be called in any thread."""
        self._is_committed = True
        if self._on_commit is not None:
            self._on_commit()

    def state_dict(self) -> dict[str, Any]:
        """Everything as plain data in memory of its own: tensors, numbers, strings, lists and dicts.

        ``torch.save`` writes it, and ``torch.load`` reads it with its safe default. ``torch.distributed.checkpoint``
        forgets what is empty and in which order keys stand, so ``"layout"`` says it.
        """
        storage = {"meta": self._storage.meta, "chunks": list(tensors_of(self._storage))}
        state = copied({**self._state, "storage": storage})
        if self._state:
            state["layout"] = layout_of(state)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Become the snapshot that a state dict was made from. The dict stays the caller's.

        Raises:
            CheckpointError: it is not the state dict of a snapshot; nothing has changed.
        """
        check_plain(checked(state_dict), "snapshot")
        check_memory(state_dict, "snapshot")
        borrowed = self.borrowed(copied(state_dict))
        self._state, self._storage = borrowed._state, borrowed._storage
        self._on_commit, self._is_committed = None, False

    @classmethod
    def borrowed(cls, state_dict: Any) -> Self:
        """A snapshot that shares the memory of a state dict, for use while nobody changes that."""
        state = dict(checked(state_dict))
        layout = state.pop("layout", None)
        if state.pop("scattered", False):  # says who has kept the leaves alone, such as asyncbuf.integrations.dcp
            state = laid_out(state, layout)
        check_memory(state, "snapshot")
        storage = state.pop("storage", None)
        if not isinstance(storage, dict) or storage.keys() != {"meta", "chunks"}:
            raise CheckpointCorruptError(f"storage: expected meta and chunks, found {type(storage).__name__}")
        if not isinstance(storage["chunks"], list) or not all(isinstance(chunk, dict) for chunk in storage["chunks"]):
            raise CheckpointCorruptError("storage: expected the chunks as a list of dicts, found something else")
        return cls(state, InMemoryRows(storage["meta"], storage["chunks"]))

    @classmethod
    def from_state_dict(cls, state_dict: dict[str, Any]) -> Self:
        """A snapshot from a state dict; otherwise as ``load_state_dict``."""
        snapshot = cls()
        snapshot.load_state_dict(state_dict)
        return snapshot

    async def save(self, path: str | os.PathLike[str], *, base: str | os.PathLike[str] | None = None) -> None:
        """Write a checkpoint directory, in a thread. A checkpoint that is there already is replaced in one step.

        Args:
            path: the directory.
            base: another checkpoint of the same buffer, beside this one. Rows that have not changed since are not
                written again: their files get a second name. Either checkpoint may be removed later. One that is
                replaced is used so without being asked for.

        Raises:
            CheckpointError: something else than a checkpoint is there.
            OSError: the file system refuses.
        """
        writer = CheckpointWriter(path, base)
        await in_thread(self.write_alone, writer, on_cancel=writer.stop)

    def write_alone(self, writer: CheckpointWriter) -> None:
        """Make a checkpoint that holds nothing else; blocks."""
        with writer:
            writer.expect(self.nbytes)
            writer.commit({"buffer": self.write(writer)})
        self.committed()

    @classmethod
    async def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a checkpoint directory into memory, in a thread.

        Raises:
            CheckpointNotFoundError: there is none.
            CheckpointVersionError: it is newer than this release.
            CheckpointCorruptError: it is damaged.
        """
        return await in_thread(cls._load, absolute(path))

    @classmethod
    def _load(cls, path: str | os.PathLike[str]) -> Self:
        snapshot = cls.open(path)
        loaded = cls(snapshot._state, InMemoryRows(snapshot._storage.meta, tensors_of(snapshot._storage)))
        loaded._is_committed = True
        return loaded

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """A snapshot whose rows are read from the checkpoint when they are asked for. Blocks; otherwise as ``load``."""
        reader = CheckpointReader(path)
        document = reader.state.get("buffer") if isinstance(reader.state, dict) else None
        if document is None and isinstance(reader.state, dict) and isinstance(reader.state.get("parts"), dict):
            found = ", ".join(map(str, reader.state["parts"]))
            raise CheckpointMismatchError(
                f"{absolute(path)}: expected the checkpoint of a buffer, found a step of a run with the parts {found}: "
                f"write await Checkpointer(directory).restore(step, partial=True, name=buffer)"
            )
        return cls.read(reader, document)

    @property
    def contents(self) -> tuple[dict[str, Any], Frozen]:
        """State and rows as they are, in the memory of the snapshot."""
        return self._state, self._storage

    @property
    def nbytes(self) -> int | None:
        """How many bytes its tensors have; None if only reading the rows would tell, as with items of any kind."""
        rows: int | None = getattr(self._storage, "nbytes", None)
        return None if rows is None else rows + nbytes_of(self._state)

    def write(self, writer: CheckpointWriter, prefix: str = "") -> Any:
        """Write the files of this snapshot into a checkpoint; may block.

        Args:
            writer: the checkpoint.
            prefix: what the names of the files begin with, such as ``"buffer/"``.

        Returns:
            What JSON can hold, for ``read``.
        """
        for number, chunk in enumerate(self._storage.chunks()):
            writer.write_chunk(f"{prefix}storage/{number:05}.safetensors", chunk.identity, chunk.read)
        document = dict(self._state)
        document["storage"] = self._storage.meta
        for part in (*parts_of(document), "storage"):
            document[part] = _written(writer, f"{prefix}{part}", document[part])
        if "prefetch" in document:
            queue = document["prefetch"]["queue"]
            written = [_written(writer, f"{prefix}prefetch/{i:05}", entry) for i, entry in enumerate(queue)]
            document["prefetch"] = {**document["prefetch"], "queue": written}
        return document

    @classmethod
    def read(cls, reader: CheckpointReader, document: Any, prefix: str = "") -> Self:
        """The way back; the rows are read later."""
        state = dict(checked(document))
        for part in (*parts_of(state), "storage"):
            state[part] = _joined(reader, f"{prefix}{part}", state.get(part))
        prefetch = state.get("prefetch")
        if isinstance(prefetch, dict) and isinstance(prefetch.get("queue"), list):
            queue = [_joined(reader, f"{prefix}prefetch/{i:05}", entry) for i, entry in enumerate(prefetch["queue"])]
            state["prefetch"] = {**prefetch, "queue": queue}
        snapshot = cls(state, _OnDisk(state.pop("storage"), reader, f"{prefix}storage"))
        snapshot._is_committed = True
        return snapshot

    def __getstate__(self) -> dict[str, Any]:
        """Pickle as the state dict."""
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state dict over; it was read for this object alone."""
        storage = state.pop("storage")
        state.pop("layout", None)
        self._state, self._storage = state, InMemoryRows(storage["meta"], storage["chunks"])
        self._on_commit, self._is_committed = None, False

    def __repr__(self) -> str:
        """What it holds, in one line."""
        config, prefetch = self._state.get("config", {}), self._state.get("prefetch") or {}
        writer = self._state.get("writer")
        size = writer.get("size") if isinstance(writer, dict) else None
        queue = [entry.get("number") for entry in prefetch.get("queue", [])]
        return (
            f"<Snapshot of {size}/{config.get('capacity')} items in {config.get('storage')}, {config.get('sampler')}, "
            f"batch_size={config.get('batch_size')}, next ticket {prefetch.get('next')}, prefetched {queue}>"
        )


class _OnDisk:
    """Contents in the files of a checkpoint."""

    def __init__(self, meta: Any, reader: CheckpointReader, part: str) -> None:
        self.meta = meta
        self._reader = reader
        self._names = reader.names(part)

    def chunks(self) -> Iterator[Chunk]:
        """Each reads and checks one file when its tensors are asked for, and the next ones meanwhile."""
        files = ReadAhead(self._reader, self._names)
        for number, name in enumerate(self._names):
            yield Chunk(self._reader.identity(name), functools.partial(files.read, number))


def checked(state: Any) -> dict[str, Any]:
    """The state of a snapshot, if this release knows its format.

    Raises:
        CheckpointCorruptError: it is something else.
        CheckpointVersionError: its version is not known.
    """
    found = state.get("format") if isinstance(state, dict) else state
    if not isinstance(state, dict) or type(found) is not str or found != FORMAT:
        shown = repr(found) if type(found) is str else literal(found)
        raise CheckpointCorruptError(f"snapshot: expected the format {FORMAT!r}, found {shown}")
    version = state.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        shown = repr(version) if type(version) is str else literal(version)
        raise CheckpointVersionError(f"snapshot: expected a version from 1 to {VERSION}, found {shown}")
    return state


def parts_of(state: dict[str, Any]) -> list[str]:
    """The parts of a buffer whose states are there, beside its storage."""
    return [name for name in state if name not in _RESERVED]


def _written(writer: CheckpointWriter, name: str, plain: Any) -> Any:
    document, tensors = split(plain)
    if tensors:
        writer.write(f"{name}.safetensors", tensors)
    return writer.document(f"{name}.json", document)


def _joined(reader: CheckpointReader, name: str, document: Any) -> Any:
    file = f"{name}.safetensors"
    return join(reader.document(document), reader.read(file) if reader.has(file) else {})


def nbytes_of(plain: Any) -> int:
    """How many bytes the tensors of plain data have; what is shared counts as often as it is written."""
    if isinstance(plain, torch.Tensor):
        return plain.nbytes
    if isinstance(plain, dict):
        return sum(map(nbytes_of, plain.values()))
    return sum(map(nbytes_of, plain)) if isinstance(plain, list) else 0


P = TypeVar("P")


def copied(plain: P) -> P:
    """Plain data in memory of its own; what is shared stays shared."""
    return cast("P", _copied(plain, {}))


def _copied(node: Any, copies: dict[int, torch.Tensor]) -> Any:
    if isinstance(node, torch.Tensor):
        if id(node) not in copies:
            copies[id(node)] = node.detach().clone().requires_grad_(node.requires_grad)
        return copies[id(node)]
    if isinstance(node, list):
        return [_copied(item, copies) for item in node]
    if isinstance(node, dict):
        return {key: _copied(value, copies) for key, value in node.items()}
    return node
