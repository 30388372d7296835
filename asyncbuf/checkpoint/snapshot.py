"""One point in time of everything a buffer is, to be saved, kept, compared or restored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import torch

from asyncbuf._disk.directory import CheckpointReader, CheckpointWriter
from asyncbuf._plain.codec import decode, encode, join, split
from asyncbuf._plain.state import fields, same
from asyncbuf._prefetch.tickets import Tickets
from asyncbuf._runtime.threads import in_thread
from asyncbuf.errors import CheckpointCorruptError, CheckpointError, CheckpointVersionError
from asyncbuf.storage.frozen import InMemoryRows

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from asyncbuf._prefetch.transforms import TransformChain
    from asyncbuf._table.table import Table
    from asyncbuf.storage.frozen import Frozen

VERSION = 1
_FORMAT = "asyncbuf.snapshot"
_SMALL_PARTS = ("writer", "sampler", "transforms", "generator")


class Snapshot:
    """A buffer at one point in time.

    Holds its own copy of everything but the rows of the storage, which are kept as they were for as long as the
    snapshot lives: rows that are overwritten meanwhile are copied aside first.

    Has ``state_dict`` and ``load_state_dict``, as a ``Stateful`` of ``torch.distributed.checkpoint``, and pickles.
    """

    def __init__(self, state: dict[str, Any] | None = None, storage: Frozen | None = None) -> None:
        self._state = {} if state is None else state
        self._storage: Frozen = InMemoryRows(None) if storage is None else storage

    def state_dict(self) -> dict[str, Any]:
        """Everything as plain data in memory of its own: tensors, numbers, strings, lists and dicts.

        ``torch.save`` writes it, and ``torch.load`` reads it with its safe default.
        """
        storage = {"meta": self._storage.meta, "chunks": list(self._storage.chunks())}
        return _copied({**self._state, "storage": storage})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Become the snapshot that a state dict was made from. The dict stays the caller's.

        Raises:
            CheckpointError: it is not the state dict of a snapshot; nothing has changed.
        """
        borrowed = self.borrowed(_copied(state_dict))
        self._state, self._storage = borrowed._state, borrowed._storage

    @classmethod
    def borrowed(cls, state_dict: Any) -> Self:
        """A snapshot that shares the memory of a state dict, for use while nobody changes that."""
        state = dict(_checked(state_dict))
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

    async def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint directory, in a thread. A checkpoint that is there already is replaced in one step.

        Raises:
            CheckpointError: something else than a checkpoint is there.
            OSError: the file system refuses.
        """
        writer = CheckpointWriter(path)
        await in_thread(self._save, writer, on_cancel=writer.stop)

    def _save(self, writer: CheckpointWriter) -> None:
        with writer:
            writer.commit({"buffer": self.write(writer)})

    @classmethod
    async def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a checkpoint directory into memory, in a thread.

        Raises:
            CheckpointNotFoundError: there is none.
            CheckpointVersionError: it is newer than this release.
            CheckpointCorruptError: it is damaged.
        """
        return await in_thread(cls._load, path)

    @classmethod
    def _load(cls, path: str | os.PathLike[str]) -> Self:
        snapshot = cls.open(path)
        return cls(snapshot._state, InMemoryRows(snapshot._storage.meta, snapshot._storage.chunks()))

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """A snapshot whose rows are read from the checkpoint when they are asked for. Blocks; otherwise as ``load``."""
        reader = CheckpointReader(path)
        document = reader.state.get("buffer") if isinstance(reader.state, dict) else None
        return cls.read(reader, document)

    def write(self, writer: CheckpointWriter, prefix: str = "") -> Any:
        """Write the files of this snapshot into a checkpoint; may block.

        Args:
            writer: the checkpoint.
            prefix: what the names of the files begin with, such as ``"buffer/"``.

        Returns:
            What JSON can hold, for ``read``.
        """
        for number, chunk in enumerate(self._storage.chunks()):
            writer.write(f"{prefix}storage/{number:05}.safetensors", chunk)
        document = dict(self._state)
        for part in (*_SMALL_PARTS, "storage"):
            plain = self._storage.meta if part == "storage" else document[part]
            document[part] = _written(writer, f"{prefix}{part}", plain)
        if "prefetch" in document:
            queue = document["prefetch"]["queue"]
            written = [_written(writer, f"{prefix}prefetch/{i:05}", entry) for i, entry in enumerate(queue)]
            document["prefetch"] = {**document["prefetch"], "queue": written}
        return document

    @classmethod
    def read(cls, reader: CheckpointReader, document: Any, prefix: str = "") -> Self:
        """The way back; the rows are read later."""
        state = dict(_checked(document))
        for part in (*_SMALL_PARTS, "storage"):
            state[part] = _joined(reader, f"{prefix}{part}", state.get(part))
        prefetch = state.get("prefetch")
        if isinstance(prefetch, dict) and isinstance(prefetch.get("queue"), list):
            queue = [_joined(reader, f"{prefix}prefetch/{i:05}", entry) for i, entry in enumerate(prefetch["queue"])]
            state["prefetch"] = {**prefetch, "queue": queue}
        return cls(state, _OnDisk(state.pop("storage"), reader, f"{prefix}storage"))

    def __getstate__(self) -> dict[str, Any]:
        """Pickle as the state dict."""
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state dict over; it was read for this object alone."""
        storage = state.pop("storage")
        self._state, self._storage = state, InMemoryRows(storage["meta"], storage["chunks"])

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
        self._part = part

    def chunks(self) -> Iterator[dict[str, torch.Tensor]]:
        """Reads and checks one file after the other."""
        return self._reader.read_all(self._part)


@dataclass(frozen=True, slots=True)
class Config:
    """What a buffer must have in common with a snapshot to take it over.

    Attributes:
        batch_size: number of items of a prefetched batch.
        depth: the prefetch depth.
    """

    batch_size: int | None
    depth: int


def capture(table: Table, chain: TransformChain, config: Config, tickets: Tickets) -> Callable[[], Snapshot]:
    """Take a snapshot, in one step: called in a turn of the history in which nothing is being written or gathered.

    Returns:
        A function that completes it, to be called in a thread before any captured batch is handed over.

    Raises:
        CheckpointError: a component holds something that cannot be saved.
    """
    generator = table.generator
    state = {
        "format": _FORMAT,
        "version": VERSION,
        "config": {**_kinds(table, chain), "capacity": table.storage.capacity, "batch_size": config.batch_size},
        "writer": encode(table.writer.state_dict(), "writer"),
        "sampler": encode(table.sampler.state_dict(), "sampler"),
        "transforms": [encode(state, f"transform {i}") for i, state in enumerate(chain.states())],
        "generator": {"device": generator.device.type, "state": generator.get_state()},
    }
    frozen = table.storage.freeze()
    return lambda: Snapshot({**state, "prefetch": tickets.plain()}, frozen)


class RestorePlan:
    """A snapshot that was read, checked and decoded for one buffer, and can be made live in one step.

    Making it may take long and belongs in a thread; it changes nothing that is live.

    Args:
        snapshot: the snapshot.
        table: storage, writer, sampler and generator that will take it over.
        chain: the transforms that will.
        config: the settings of the buffer.
        elastic: whether another prefetch depth and batch size are accepted.
        moves: whether the snapshot is used for nothing else, so that its memory may be taken over.

    Raises:
        CheckpointError: the snapshot is damaged, too new, or belongs to another kind of buffer.
    """

    def __init__(
        self, snapshot: Snapshot, table: Table, chain: TransformChain, config: Config, *, elastic: bool, moves: bool
    ) -> None:
        self._table = table
        self._chain = chain
        try:
            self._read(snapshot, config, elastic=elastic, moves=moves)
        except CheckpointError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise CheckpointCorruptError(f"snapshot: expected the state of a buffer, found {error!r}") from error

    def _read(self, snapshot: Snapshot, config: Config, *, elastic: bool, moves: bool) -> None:
        table, chain = self._table, self._chain
        state = _checked(snapshot._state)
        meta = snapshot._storage.meta
        if not moves:
            state, meta = _copied(state), _copied(meta)
        saved = state.get("config")
        kinds = _kinds(table, chain)
        capacity, batch_size = table.storage.capacity, config.batch_size
        if not isinstance(saved, dict) or saved.keys() != {*kinds, "capacity", "batch_size"}:
            raise CheckpointCorruptError(f"snapshot: expected the kinds of its parts, found {saved!r}")
        for name, kind in kinds.items():
            same(saved[name], kind, name)
        same(saved["capacity"], capacity, "capacity")
        if not elastic:
            same(saved["batch_size"], batch_size, "batch_size (elastic=True accepts another)")
        self._parts = {name: decode(state.get(name), name) for name in _SMALL_PARTS}
        if not isinstance(self._parts["transforms"], list) or len(self._parts["transforms"]) != len(chain.transforms):
            raise CheckpointCorruptError(f"transforms: expected {len(chain.transforms)} states, found something else")
        self._generator_state = _generator_state(self._parts["generator"], table.generator)
        self.tickets = Tickets(0, config.depth, 0, [])
        if "prefetch" in state:
            steps = len(chain.steps)
            self.tickets = Tickets.from_plain(
                state["prefetch"], config.depth, steps=steps, rows=capacity, elastic=elastic
            )
        self._rows = table.storage.rows_in(meta)
        self._make_rows_live = table.storage.load_rows(meta, snapshot._storage.chunks())

    def adopt(self) -> None:
        """Make it live: all of it or, with an error, none."""
        table = self._table
        pairs: list[tuple[Any, Any]] = [
            (table.writer, self._parts["writer"]),
            (table.sampler, self._parts["sampler"]),
        ]
        states = zip(self._chain.transforms, self._chain.states(), self._parts["transforms"], strict=True)
        pairs += [(transform, saved) for transform, old, saved in states if old is not None]
        before = [(component, encode(component.state_dict())) for component, _ in pairs]
        try:
            for component, saved in pairs:
                component.load_state_dict(saved)
            table.changed()
            there_are = table.storage.capacity if self._rows is None else self._rows
            if table.writer.size > there_are:
                raise CheckpointCorruptError(
                    f"writer: expected a size of at most {there_are}, the rows in storage, found {table.writer.size}"
                )
            table.sampler.verify(table.rows)
            self._make_rows_live()
        except BaseException:
            for component, old in before:
                component.load_state_dict(decode(old))
            table.changed()
            raise
        table.generator.set_state(self._generator_state)


def _kinds(table: Table, chain: TransformChain) -> dict[str, Any]:
    return {
        "storage": type(table.storage).__name__,
        "writer": type(table.writer).__name__,
        "sampler": type(table.sampler).__name__,
        "transforms": len(chain.transforms),
        "stateful_transforms": chain.with_state,
    }


def _generator_state(saved: Any, generator: torch.Generator) -> torch.Tensor:
    device, state = fields(saved, "generator", device=str, state=torch.Tensor)
    same(device, generator.device.type, "kind of generator")
    try:
        torch.Generator(generator.device).set_state(state)
    except (RuntimeError, TypeError) as error:
        raise CheckpointCorruptError(f"generator: expected the state of a generator, found {error}") from error
    return cast("torch.Tensor", state)


def _checked(state: Any) -> dict[str, Any]:
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise CheckpointCorruptError(f"snapshot: expected the format {_FORMAT!r}, found {found!r}")
    version = state.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise CheckpointVersionError(f"snapshot: expected a version from 1 to {VERSION}, found {version!r}")
    return state


def _written(writer: CheckpointWriter, name: str, plain: Any) -> Any:
    document, tensors = split(plain)
    if tensors:
        writer.write(f"{name}.safetensors", tensors)
    return document


def _joined(reader: CheckpointReader, name: str, document: Any) -> Any:
    file = f"{name}.safetensors"
    return join(document, reader.read(file) if reader.has(file) else {})


P = TypeVar("P")


def _copied(plain: P) -> P:
    """Plain data in memory of its own; what is shared stays shared."""
    copies: dict[int, torch.Tensor] = {}

    def walk(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            if id(node) not in copies:
                copies[id(node)] = node.detach().clone().requires_grad_(node.requires_grad)
            return copies[id(node)]
        if isinstance(node, list):
            return [walk(item) for item in node]
        if isinstance(node, dict):
            return {key: walk(value) for key, value in node.items()}
        return node

    return cast("P", walk(plain))
