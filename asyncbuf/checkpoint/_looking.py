"""What is in a checkpoint, as it is on disk: parts, their documents and where their tensors are."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncbuf._disk.view import CheckpointView, StoredTensor
from asyncbuf._runtime.arguments import absolute
from asyncbuf.checkpoint._components import BUFFER
from asyncbuf.checkpoint._leaves import Found, leaves
from asyncbuf.checkpoint._run_plan import FORMAT, parts_of_run
from asyncbuf.checkpoint.snapshot import checked, parts_of
from asyncbuf.errors import CheckpointCorruptError, CheckpointError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    import numpy as np
    import numpy.typing as npt


@contextmanager
def looking_into(path: str | os.PathLike[str]) -> Iterator[Look]:
    """Look into a checkpoint while the block lasts.

    Raises:
        TypeError: the path is none.
        CheckpointError: there is none, it is damaged, or newer than this release.
        OSError: it cannot be read.
    """
    where = absolute(path)
    view = CheckpointView(where)
    try:
        yield Look(view)
    except (CheckpointError, OSError, KeyboardInterrupt) as error:
        if isinstance(error, CheckpointError) and str(where) not in str(error):
            raise type(error)(f"{where}: {error}") from error
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, MemoryError) as error:
        raise CheckpointCorruptError(f"{where}: expected what asyncbuf writes, found {error!r}") from error
    finally:
        view.close()


class Look:
    """A checkpoint that is looked into.

    Args:
        view: the checkpoint.

    Attributes:
        view: the checkpoint.
        step: of a run.
        parts: what it consists of.
    """

    def __init__(self, view: CheckpointView) -> None:
        self.view = view
        self.step: int | None = None
        state = view.state
        if isinstance(state, dict) and state.get("format") == FORMAT:
            self.step = int(state["step"])
            parts = parts_of_run(state, view.path)
            self.parts = [PartLook(view, name, part["kind"], part["state"], f"{name}/") for name, part in parts.items()]
        else:
            snapshot = state.get("buffer") if isinstance(state, dict) else None
            self.parts = [PartLook(view, "buffer", BUFFER, snapshot, "")]


class PartLook(NamedTuple):
    """A part of a checkpoint.

    Attributes:
        view: the checkpoint.
        name: its name.
        kind: ``buffer``, ``object`` or ``value``.
        state: what the manifest says of it.
        prefix: what the names of its files begin with.
    """

    view: CheckpointView
    name: str
    kind: str
    state: Any
    prefix: str

    def leaves(self, *, everything: bool = True) -> Iterator[Found]:
        """The leaves of an object or a value.

        Args:
            everything: also what torch notes beside the state of a module.
        """
        tensors: dict[str, StoredTensor] = {}
        for file in self.view.names(self.prefix.removesuffix("/")):
            tensors.update(self.view.tensors(file))
        document = self.view.document(self.state)
        if self.kind == "object" and isinstance(document, dict):
            yield from leaves(document["state"], tensors)
            if everything and document["metadata"] is not None:
                yield from leaves(document["metadata"], tensors, "metadata")
        else:
            yield from leaves(document, tensors)

    def buffer(self) -> BufferLook:
        """What is in a buffer."""
        return BufferLook(self.view, checked(self.state), self.prefix)


class Part(NamedTuple):
    """The state of a part of a buffer.

    Attributes:
        document: what JSON has of it.
        tensors: those that it names.
    """

    document: Any
    tensors: dict[str, StoredTensor]

    def number(self, name: str) -> int | None:
        """A whole number that it has under a name; None if it has none."""
        value = self.document.get(name) if isinstance(self.document, dict) else None
        return value if type(value) is int else None

    def tensor(self, name: str) -> StoredTensor | None:
        """A tensor that it has under a name; None if it has none."""
        node = self.document.get(name) if isinstance(self.document, dict) else None
        key = node.get("$tensor") if isinstance(node, dict) else None
        return self.tensors.get(key) if isinstance(key, str) else None


class Meta(Part):
    """What a storage has written beside its chunks."""

    @property
    def fields(self) -> list[dict[str, Any]] | None:
        """The fields of a ``TensorStorage``; None of any other."""
        meta = self.document
        if not isinstance(meta, dict) or meta.keys() != {"rows", "fields", "structure"}:
            return None
        found: list[dict[str, Any]] = meta["fields"]
        return found

    @property
    def are_items(self) -> bool:
        """Whether the chunks are those of a ``ListStorage``."""
        meta = self.document
        return isinstance(meta, dict) and meta.keys() == {"items"} and type(meta["items"]) is int


class BufferLook(NamedTuple):
    """A snapshot of a buffer.

    Attributes:
        view: the checkpoint.
        state: what the manifest says of the snapshot.
        prefix: what the names of its files begin with.
    """

    view: CheckpointView
    state: dict[str, Any]
    prefix: str

    @property
    def config(self) -> dict[str, Any]:
        """Classes and settings."""
        found: dict[str, Any] = self.state["config"]
        return found

    @property
    def names(self) -> list[str]:
        """The parts that have a state, without the storage."""
        return parts_of(self.state)

    def part(self, name: str) -> Part:
        """The state of a part; empty if it is not there."""
        return self._part(name, self.state.get(name))

    def _part(self, name: str, node: Any) -> Part:
        return Part(self.view.document(node), self.view.tensors(f"{self.prefix}{name}.safetensors"))

    @property
    def prefetch(self) -> dict[str, Any]:
        """The queue, as the manifest has it; empty if it was not saved."""
        found: dict[str, Any] = self.state.get("prefetch") or {}
        return found

    def tickets(self) -> Iterator[Part]:
        """The prefetched tickets in order, one after the other."""
        for number, node in enumerate(self.prefetch.get("queue", ())):
            part = self._part(f"prefetch/{number:05}", node)
            if part.document.get("dropped") is not True:
                yield part

    def chunks(self) -> list[str]:
        """The files of the rows, in order."""
        return self.view.names(f"{self.prefix}storage")

    def meta(self) -> Meta:
        """What the storage has written beside its chunks."""
        return Meta(*self.part("storage"))

    def read(self, tensor: StoredTensor) -> npt.NDArray[np.uint8]:
        """All bytes of a tensor, which is taken to be small."""
        return self.view.read_part(tensor)
