"""In what two checkpoints differ. Some megabytes of either are read at a time, and only where their digests differ."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncbuf.checkpoint._components import BUFFER
from asyncbuf.checkpoint._diff_rows import RowsDifference, compare_rows
from asyncbuf.checkpoint._inspect import fields_of
from asyncbuf.checkpoint._leaves import Found, Leaf, leaves
from asyncbuf.checkpoint._looking import looking_into

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator

    from asyncbuf._disk.view import CheckpointView, StoredTensor
    from asyncbuf.checkpoint._looking import BufferLook, PartLook

SAME, DIFFERS, ONLY_A, ONLY_B = "same", "differs", "only in a", "only in b"


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """A setting that differs: a class, the capacity, the batch size.

    Attributes:
        name: its name.
        a: what it is in the first checkpoint; None if it is not there.
        b: likewise in the second.
    """

    name: str
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class LeafDifference:
    """A tensor or number that differs, or is in one checkpoint only.

    Attributes:
        path: where it stands.
        a: what it is in the first checkpoint; None if it is not there.
        b: likewise in the second.
        changed: number of elements that differ, of tensors and arrays of one dtype and shape; otherwise None.
        elements: how many there are; likewise.
    """

    path: str
    a: Leaf | None
    b: Leaf | None
    changed: int | None
    elements: int | None


@dataclass(frozen=True, slots=True)
class PartDifference:
    """A part of both checkpoints, or of one.

    Attributes:
        name: its name.
        kind: ``"buffer"``, ``"object"`` or ``"value"``; that of the second where they differ.
        status: ``"same"``, ``"differs"``, ``"only in a"`` or ``"only in b"``.
        settings: of a buffer.
        leaves: what differs, but for the rows of a buffer.
        rows: of buffers.
    """

    name: str
    kind: str
    status: str
    settings: tuple[SettingDifference, ...] = ()
    leaves: tuple[LeafDifference, ...] = ()
    rows: RowsDifference | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """In what two checkpoints differ.

    Attributes:
        a: directory of the first.
        b: directory of the second.
        parts: every part of either.
    """

    a: str
    b: str
    parts: tuple[PartDifference, ...]

    @property
    def is_same(self) -> bool:
        """Whether both hold the same. Steps, times and file layouts do not count."""
        return all(part.status == SAME for part in self.parts)


def diff(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Difference:
    """Compare two checkpoints: parts, leaves, and rows by their item numbers.

    What is compared is what stands there, bit for bit: no type of the user is made. Digests are believed: ``verify``
    says whether they are right. Blocks: in async code, ``asyncio.to_thread(diff, a, b)``.

    Args:
        a: the directory of the first checkpoint.
        b: that of the second.

    Raises:
        CheckpointNotFoundError: one of them is no checkpoint.
        CheckpointCorruptError: one is damaged.
        CheckpointVersionError: one is newer than this release.
        OSError: one cannot be read.
        TypeError: one is no path.
    """
    with ExitStack() as stack:
        looks = [stack.enter_context(looking_into(path)) for path in (a, b)]
        first, second = ({part.name: part for part in look.parts} for look in looks)
        parts = tuple(_part(first.get(name), second.get(name)) for name in dict.fromkeys([*first, *second]))
        return Difference(str(looks[0].view.path), str(looks[1].view.path), parts)


def _part(a: PartLook | None, b: PartLook | None) -> PartDifference:
    if a is None or b is None:
        either = a or b
        assert either is not None
        return PartDifference(either.name, either.kind, ONLY_B if a is None else ONLY_A)
    if a.kind != b.kind:
        return PartDifference(b.name, b.kind, DIFFERS, (SettingDifference("kind", a.kind, b.kind),))
    if a.kind == BUFFER:
        return _buffer(b.name, a.buffer(), b.buffer())
    found = tuple(_Comparison(a.view, b.view).of(a.leaves(), b.leaves()))
    return PartDifference(b.name, b.kind, DIFFERS if found else SAME, leaves=found)


def _buffer(name: str, a: BufferLook, b: BufferLook) -> PartDifference:
    settings = tuple(
        SettingDifference(key, a.config.get(key), b.config.get(key))
        for key in dict.fromkeys([*a.config, *b.config])
        if a.config.get(key) != b.config.get(key)
    )
    comparison = _Comparison(a.view, b.view)
    found = (*comparison.of(_state(a), _state(b)), *_tickets(comparison, a, b))
    rows = compare_rows(a, b)
    is_same = not settings and not found and rows.is_same
    return PartDifference(name, BUFFER, SAME if is_same else DIFFERS, settings, found, rows)


def _state(look: BufferLook) -> Iterator[Found]:
    """Everything of a buffer but its rows and its queue."""
    for name in look.names:
        yield from leaves(*look.part(name), name)
    meta = look.meta()
    if meta.fields is not None or meta.are_items:
        # In an order of their own: items of a list may be of several kinds, of which any may be the first.
        yield from (Found(leaf, str(leaf)) for leaf in sorted(fields_of(look, "item"), key=str))
    else:
        yield from leaves(*meta, "storage")
    for key, value in look.prefetch.items():
        if key not in ("queue", "version"):
            yield from leaves(value, {}, f"prefetch/{key}")


def _tickets(comparison: _Comparison, a: BufferLook, b: BufferLook) -> Iterator[LeafDifference]:
    """What differs in the tickets of the queues, by their numbers."""
    first, second = ({int(ticket.document["number"]): ticket for ticket in look.tickets()} for look in (a, b))
    for number in sorted({*first, *second}):
        path, one, other = f"prefetch/{number}", first.get(number), second.get(number)
        if one is not None and other is not None:
            yield from comparison.of(leaves(*one, path), leaves(*other, path))
        else:
            found = Leaf(path, "ticket")
            yield LeafDifference(path, found if one else None, found if other else None, None, None)


class _Elements(NamedTuple):
    changed: int
    all: int


class _Comparison:
    """Compares leaves of two checkpoints.

    Args:
        a: the first.
        b: the second.
    """

    def __init__(self, a: CheckpointView, b: CheckpointView) -> None:
        self._views = a, b

    def of(self, a: Iterable[Found], b: Iterable[Found]) -> Iterator[LeafDifference]:
        """Those that differ."""
        first, second = _by_path(a), _by_path(b)
        for path in dict.fromkeys([*first, *second]):
            one, other = first.get(path), second.get(path)
            if one is None or other is None:
                leaf_a, leaf_b = (None if each is None else each.leaf for each in (one, other))
                yield LeafDifference(path, leaf_a, leaf_b, None, None)
                continue
            elements = self._elements(one, other)
            if elements is None or elements.changed:
                changed, number = (None, None) if elements is None or not elements.all else elements
                yield LeafDifference(path, one.leaf, other.leaf, changed, number)

    def _elements(self, a: Found, b: Found) -> _Elements | None:
        """How many elements differ; None if they cannot be compared one by one."""
        if a.leaf != b.leaf or _unnamed(a.node) != _unnamed(b.node) or len(a.tensors) != len(b.tensors):
            return None
        if len(a.tensors) == 1:
            # Of an array, the bytes are there.
            size = np.dtype(a.node["dtype"]).itemsize if "dtype" in a.node else a.tensors[0].itemsize
            return self._bytes(a.tensors[0], b.tensors[0], size)
        pairs = zip(a.tensors, b.tensors, strict=True)
        is_same = all(
            one[1:4] == other[1:4] and not self._bytes(one, other, one.itemsize).changed for one, other in pairs
        )
        return _Elements(0, 0) if is_same else None

    def _bytes(self, a: StoredTensor, b: StoredTensor, itemsize: int) -> _Elements:
        number = a.nbytes // itemsize if itemsize else 0
        one, other = self._views
        if a.start == b.start and one.identity(a.file) == other.identity(b.file):
            return _Elements(0, number)
        pieces = zip(one.pieces(a, itemsize), other.pieces(b, itemsize), strict=True)
        changed = sum(int((left != right).reshape(-1, itemsize).any(1).sum()) for left, right in pieces)
        return _Elements(changed, number)


def _by_path(found: Iterable[Found]) -> dict[str, Found]:
    """Leaves by path; where several have the same, by their order as well."""
    result: dict[str, Found] = {}
    for each in found:
        path, number = each.leaf.path, 2
        while path in result:
            path, number = f"{each.leaf.path}#{number}", number + 1
        result[path] = each
    return result


def _unnamed(node: Any) -> Any:
    """A node without the names of its tensors, which follow from all that stands before it."""
    if not isinstance(node, dict):
        return type(node), node
    if "$tensor" in node:
        return bool(node.get("grad"))
    return {key: _unnamed(child) for key, child in node.items()}
