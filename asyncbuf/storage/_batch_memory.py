"""Memory that rows are gathered into: where each field of a batch lies."""

from __future__ import annotations

from sys import getrefcount
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncbuf.storage._layout import Group, Layout
    from asyncbuf.storage._leaf import Field

    Array = np.ndarray[Any, Any]
    # Shape, dtype, number of the array (None for one of its own), offset and strides.
    _View = tuple[tuple[int, ...], np.dtype[Any], int | None, int, tuple[int, ...] | None]


class Scratch(NamedTuple):
    """Memory for the packed records of a batch, until their fields are copied out. Nobody else sees it.

    Attributes:
        records: where they are gathered, ``[count]``: one array, or none if no fields are copied.
        packed: the fields of each group there, ``[fields, count]``, or ``[count]`` for one.
    """

    records: list[Array]
    packed: list[Array]


class Slot:
    """Memory for one batch.

    Attributes:
        out: where the rows of each block are gathered, an array of records ``[count]``.
        copies: what is copied then: ``(to, from)``, in the shape of ``Scratch.packed``.
        views: the memory as bits of each field, ``[count, *item]``.
        unseen: reference counts of the views while nobody can see the memory.
        scratch: the part of it that nobody ever sees.
    """

    __slots__ = ("copies", "out", "scratch", "unseen", "views")

    def __init__(self, out: list[Array], dense: list[Array], views: list[Array], scratch: Scratch) -> None:
        self.out = scratch.records + out
        self.copies = [*zip(dense, scratch.packed, strict=True)]
        self.views = views
        self.scratch = scratch
        self.unseen = [*map(getrefcount, views)]


class _Window(NamedTuple):
    """Where a field lies in a slot.

    Attributes:
        array: number of the array, first among those of blocks that are not copied, then among those of groups.
        offset: bytes to its first value.
        row_offset: more bytes, for each row of the batch.
        strides: bytes to the next value along each axis; None for a dense field.
    """

    array: int
    offset: int = 0
    row_offset: int = 0
    strides: tuple[int, ...] | None = None


class BatchMemory:
    """How the memory of batches looks, whatever their size.

    Args:
        plan: how rows lie in memory.
        fields: what lies there.
        contiguous: whether each field gets memory without a stride along the batch axis. Without, packed fields are
            windows into the records of the batch.
    """

    def __init__(self, plan: Layout, fields: Sequence[Field], *, contiguous: bool) -> None:
        # All of them are in block 0.
        self.groups = plan.groups if contiguous else ()
        self.packed, self.direct = (plan.opaque[:1], plan.opaque[1:]) if self.groups else ((), plan.opaque)
        self.fields = [(field, self._window(plan, field, i)) for i, field in enumerate(fields)]

    def _window(self, plan: Layout, field: Field, number: int) -> _Window | None:
        if not field.nbytes:
            return None  # has no bytes to lie anywhere
        for i, group in enumerate(self.groups):
            if number in group.members:
                return _Window(len(self.direct) + i, row_offset=group.members.index(number) * group.nbytes)
        block, offset = plan.places[number].block, plan.offset(number)
        inner = np.empty(field.shape, field.bits).strides
        return _Window(block - len(self.packed), offset, strides=(plan.records[block].itemsize, *inner))


class SlotMaker:
    """Makes slots for batches of one size.

    Args:
        memory: how they look.
        count: number of rows of a batch.
    """

    def __init__(self, memory: BatchMemory, count: int) -> None:
        self._count = count
        self._packed = memory.packed
        self._direct = memory.direct
        # As bytes without a meaning: numpy copies a small field in one go then, and fields of a size all at once. A
        # second axis of length 1 would double what that costs.
        self._groups = [
            (group, (len(group.members), count)[-min(2, len(group.members)) :], np.dtype((np.void, group.nbytes)))
            for group in memory.groups
        ]
        self._views = [_view_of(field, window, count) for field, window in memory.fields]

    def slot(self, scratch: Scratch | None) -> Slot:
        """Memory for a batch.

        Args:
            scratch: that of a slot that is not used any more; None makes one.
        """
        out = [np.empty(self._count, record) for record in self._direct]
        dense = [np.empty(shape, element) for _, shape, element in self._groups]
        arrays = out + dense
        views = [
            np.empty(shape, bits) if array is None else np.ndarray(shape, bits, arrays[array], offset, strides)
            for shape, bits, array, offset, strides in self._views
        ]
        return Slot(out, dense, views, self._scratch() if scratch is None else scratch)

    def _scratch(self) -> Scratch:
        records = [np.empty(self._count, record) for record in self._packed]
        return Scratch(
            records, [self._place(group, shape, element, records[0]) for group, shape, element in self._groups]
        )

    def _place(self, group: Group, shape: tuple[int, ...], element: np.dtype[np.void], records: Array) -> Array:
        """The fields of a group within records."""
        if not self._count:
            return np.empty(shape, element)
        strides = (group.nbytes, records.itemsize)[-len(shape) :]
        return np.ndarray(shape, element, records, group.offset, strides)


def _view_of(field: Field, window: _Window | None, count: int) -> _View:
    shape = (count, *field.shape)
    if window is None or not count:
        return shape, field.bits, None, 0, None
    return shape, field.bits, window.array, window.offset + window.row_offset * count, window.strides
