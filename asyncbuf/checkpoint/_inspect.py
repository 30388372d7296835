"""What a checkpoint holds, from its manifest and the headers of its files."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncbuf.checkpoint._components import BUFFER
from asyncbuf.checkpoint._leaves import Leaf, below, item_leaves, leaves
from asyncbuf.checkpoint._looking import BufferLook, Part, PartLook, looking_into

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

_STAGES = {None: "batch", -1: "ticket", 0: "gathered"}


@dataclass(frozen=True, slots=True)
class TicketInfo:
    """A batch that was prefetched, or is to be.

    Attributes:
        number: number of the ticket.
        rows: how many rows it has.
        stage: ``"ticket"`` if its rows were not gathered, ``"gathered"``, ``"after N steps"`` (of collating and
            transforms), or ``"batch"`` if it is finished.
        epoch: number of its pass; None without passes.
    """

    number: int
    rows: int
    stage: str
    epoch: int | None

    @property
    def is_prepared(self) -> bool:
        """Whether nothing is left to be done for it."""
        return self.stage == "batch"


@dataclass(frozen=True, slots=True)
class BufferInfo:
    """What a checkpoint holds of a buffer.

    Attributes:
        storage: class of the storage.
        writer: class of the writer.
        sampler: class of the sampler.
        limiter: class of the limiter; None in an old checkpoint.
        capacity: number of rows that there can be.
        rows: number of rows that hold items; None if its writer does not say.
        write_count: number of items ever written; likewise.
        batch_size: rows of a prefetched batch; None if each call says its own.
        prefetch: the prefetch depth.
        drawn: number of batches drawn so far.
        delivered: how many of them were handed over.
        dropped: how many were dropped.
        queue: the others, in order.
        fields: what an item consists of. Of a ``ListStorage``, what those of the first chunk do.
        state: what writer, sampler and the other parts have to go on with.
    """

    storage: str
    writer: str
    sampler: str
    limiter: str | None
    capacity: int
    rows: int | None
    write_count: int | None
    batch_size: int | None
    prefetch: int | None
    drawn: int | None
    delivered: int | None
    dropped: int | None
    queue: tuple[TicketInfo, ...]
    fields: tuple[Leaf, ...]
    state: tuple[Leaf, ...]


@dataclass(frozen=True, slots=True)
class PartInfo:
    """A part of a checkpoint.

    Attributes:
        name: its name; ``"buffer"`` in a checkpoint of a single buffer.
        kind: ``"buffer"``, ``"object"`` (a module, an optimizer, ...) or ``"value"``.
        files: number of its files.
        nbytes: bytes of them.
        shared_nbytes: how many of these are in files that other checkpoints have, too.
        buffer: of a buffer, what is in it.
        leaves: of an object or a value, its tensors and numbers.
    """

    name: str
    kind: str
    files: int
    nbytes: int
    shared_nbytes: int
    buffer: BufferInfo | None
    leaves: tuple[Leaf, ...]


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What a checkpoint holds.

    Attributes:
        path: its directory.
        step: the step of a run; None for a checkpoint of a single buffer.
        version: of the file layout.
        libraries: versions of the libraries that wrote it, by name.
        created: when it was committed, in seconds since the epoch.
        age: how long ago that is, in seconds.
        files: number of its files.
        nbytes: bytes of them.
        shared_nbytes: how many of these are in files that other checkpoints have, too (hard links).
        parts: its parts.
    """

    path: str
    step: int | None
    version: int
    libraries: Mapping[str, str]
    created: float
    age: float
    files: int
    nbytes: int
    shared_nbytes: int
    parts: tuple[PartInfo, ...]

    @property
    def own_nbytes(self) -> int:
        """Bytes that are free when it is removed."""
        return self.nbytes - self.shared_nbytes


def inspect(path: str | os.PathLike[str]) -> CheckpointInfo:
    """Look into a checkpoint: its parts, what they hold, and what they take on disk.

    Reads the manifest and the headers of files, no rows and no weights, and needs no code of the program that wrote
    it. Whether what it did not read is sound, ``verify`` says. Blocks: in async code, ``asyncio.to_thread(inspect,
    path)``.

    Args:
        path: the directory of the checkpoint: of ``buffer.save``, or one step of a ``Checkpointer``.

    Raises:
        CheckpointNotFoundError: it is no checkpoint.
        CheckpointCorruptError: it is damaged.
        CheckpointVersionError: it is newer than this release.
        OSError: it cannot be read.
        TypeError: the path is none.
    """
    with looking_into(path) as look:
        view, usage = look.view, look.view.usage()
        return CheckpointInfo(
            path=str(view.path),
            step=look.step,
            version=view.version,
            libraries=view.libraries,
            created=view.created,
            age=max(0.0, time.time() - view.created),
            files=usage.files,
            nbytes=usage.nbytes,
            shared_nbytes=usage.shared,
            parts=tuple(map(_part, look.parts)),
        )


def _part(part: PartLook) -> PartInfo:
    usage = part.view.usage(part.prefix)
    is_buffer = part.kind == BUFFER
    return PartInfo(
        name=part.name,
        kind=part.kind,
        files=usage.files,
        nbytes=usage.nbytes,
        shared_nbytes=usage.shared,
        buffer=_buffer(part.buffer()) if is_buffer else None,
        leaves=() if is_buffer else tuple(found.leaf for found in part.leaves(everything=False)),
    )


def _buffer(look: BufferLook) -> BufferInfo:
    config, queue, writer, limiter = look.config, Part(look.prefetch, {}), look.part("writer"), look.part("limiter")
    tickets = tuple(map(_ticket, look.tickets()))
    drawn, delivered = queue.number("next"), queue.number("delivered")
    if delivered is None and drawn is not None:
        delivered = drawn - len(tickets)  # the first version did not count: nothing was dropped
    return BufferInfo(
        storage=str(config["storage"]),
        writer=str(config["writer"]),
        sampler=str(config["sampler"]),
        limiter=limiter.document.get("kind") if isinstance(limiter.document, dict) else None,
        capacity=int(config["capacity"]),
        rows=_rows(look, writer),
        write_count=writer.number("write_count"),
        batch_size=config["batch_size"],
        prefetch=queue.number("capacity"),
        drawn=limiter.number("drawn") if drawn is None else drawn,
        delivered=delivered,
        dropped=queue.number("dropped") or (None if drawn is None else 0),
        queue=tickets,
        fields=tuple(fields_of(look)),
        state=tuple(found.leaf for name in look.names for found in leaves(*look.part(name), name)),
    )


def _rows(look: BufferLook, writer: Part) -> int | None:
    valid = look.part("rows").tensor("valid")
    return writer.number("size") if valid is None else valid.shape[0]


def _ticket(part: Part) -> TicketInfo:
    ticket = part.document
    step = ticket["step"]
    indices = Part(ticket["content"], part.tensors).tensor("indices")
    return TicketInfo(
        number=int(ticket["number"]),
        rows=int(ticket["batch_size"]) if indices is None else indices.shape[0],
        stage=_STAGES.get(step, f"after {step} steps"),
        epoch=ticket["epoch"],
    )


def fields_of(look: BufferLook, path: str = "") -> Iterator[Leaf]:
    """What an item consists of; of a storage without chunks, what it has written instead of items.

    Args:
        look: the buffer.
        path: what the paths of the leaves begin with.
    """
    meta = look.meta()
    if meta.fields is not None:
        for field in meta.fields:
            yield Leaf(below(path, field["path"]), "tensor", str(field["dtype"]), tuple(map(int, field["shape"])))
    elif meta.are_items:
        for chunk in look.chunks()[:1]:
            yield from item_leaves(look.view.tensors(chunk), look.read, path)
    elif meta.document is not None:
        yield from (found.leaf for found in leaves(*meta, path))
