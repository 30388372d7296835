"""Memory for batches that is used again once nobody can see it any more.

First touch of memory is dear, and so is making views of it. So a batch is gathered into a *slot*, arrays with views of
the fields, and its tensors are laid over these views. Such a tensor holds a reference to its view for as long
as anything can reach the memory: the tensor itself, a view or slice of it, a numpy array over it, a graph that saved it
for the backward pass, a DLPack capsule. They all share one storage, and that holds the numpy array that it was made
from. So a slot is free when the reference counts of its views are what they were at first.
"""

from __future__ import annotations

from collections import deque
from sys import getrefcount
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncbuf.storage.layout import Group, Layout
    from asyncbuf.storage.leaf import Field

    Takes = Sequence[Callable[..., object]]

# For how many batch sizes slots are kept.
_SIZES = 4


# Fields that share the memory of a slot begin at multiples of this, as in memory of their own.
_ALIGNMENT = 64


class Part(NamedTuple):
    """An array over a part of some memory: the arguments of ``np.ndarray`` beside that memory."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int
    strides: tuple[int, ...] | None = None

    def over(self, memory: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The array."""
        return np.ndarray(self.shape, self.dtype, memory, self.offset, self.strides)


class Scratch(NamedTuple):
    """Memory that packed fields are gathered into.

    Attributes:
        records: records without fields, ``[count]``.
        groups: the places of the groups in them.
    """

    records: np.ndarray[Any, Any]
    groups: list[np.ndarray[Any, Any]]


class Pattern:
    """How the memory of batches of one size is divided: found out once, for many slots.

    Packed fields are gathered into *scratch* memory as records, and from there copied into the slot, where each field
    is dense. As bytes without a meaning: numpy copies a small field in one go then, and neighbours of a size all at
    once. A field with a block of its own is dense as it is.

    Args:
        plan: how rows lie in memory.
        fields: what lies there.
        count: number of rows.
        contiguous: whether packed fields become dense; otherwise they are views of the gathered records.

    Attributes:
        first_block: number of the first block that is gathered into a slot itself: 1 if block 0 goes through scratch.
        unused: scratch memory that nobody uses.
    """

    def __init__(self, plan: Layout, fields: Sequence[Field], count: int, *, contiguous: bool) -> None:
        groups = plan.groups if contiguous and count else ()
        self._plan = plan
        self._count = count
        self.unused: deque[Scratch] = deque()
        # Where packed fields lie in the memory of a slot, and the groups that are copied there.
        self._dense: dict[int, Part] = {}
        self._targets: list[Part] = []
        self._sources: list[Part] = []
        self.first_block = int(bool(groups))  # block 0 goes through scratch memory
        self._nbytes = 0
        for group in groups:
            self._add(group, fields, plan.records[group.block].itemsize)
        others = [(i, place) for i, place in enumerate(plan.places) if i not in self._dense]
        self._own = [(i, place) for i, place in others if place.block >= self.first_block]
        self._empty = [(i, fields[i]) for i, place in others if place.block < self.first_block]  # of no bytes

    def _add(self, group: Group, fields: Sequence[Field], stride: int) -> None:
        many, element = len(group.members), np.dtype((np.void, group.nbytes))
        # One field without an axis for the fields of the group: numpy copies it in half the time.
        shape = (many, self._count) if many > 1 else (self._count,)
        self._targets.append(Part(shape, element, self._nbytes))
        self._sources.append(Part(shape, element, group.offset, (group.nbytes, stride)[-len(shape) :]))
        for member in group.members:
            field = fields[member]
            self._dense[member] = Part((self._count, *field.shape), field.bits, self._nbytes)
            self._nbytes += group.nbytes * self._count
        self._nbytes += -self._nbytes % _ALIGNMENT

    def slot(self) -> Slot:
        """New memory for a batch."""
        records = [np.empty(self._count, record) for record in self._plan.records[self.first_block :]]
        out = [*map(np.ndarray.view, records, self._plan.opaque[self.first_block :])]
        views: dict[int, np.ndarray[Any, Any]] = {
            i: records[place.block - self.first_block][place.name] for i, place in self._own
        }
        views.update((i, np.empty((self._count, *field.shape), field.bits)) for i, field in self._empty)
        memory = np.empty(self._nbytes, np.uint8)
        views.update((i, part.over(memory)) for i, part in self._dense.items())
        ordered = [views[i] for i in range(len(self._plan.places))]
        views.clear()  # a slot counts the references to its views
        return Slot(self, out, [part.over(memory) for part in self._targets], ordered)

    def scratch(self) -> Scratch:
        """Memory for records that nobody uses, until it is put back into ``unused``."""
        try:
            return self.unused.popleft()
        except IndexError:
            records = np.empty(self._count, self._plan.records[0])
            return Scratch(records.view(self._plan.opaque[0]), [part.over(records) for part in self._sources])


class Slot:
    """Memory for one batch.

    Args:
        pattern: how it is divided.
        out: records without fields, one array per block that is gathered into the slot itself.
        dense: where groups of packed fields are copied to.
        views: one array of bits per field, ``[count, *item]``.

    Attributes:
        unseen: reference counts of the views while nobody can see the memory.
    """

    __slots__ = ("dense", "out", "pattern", "unseen", "views")

    def __init__(
        self,
        pattern: Pattern,
        out: list[np.ndarray[Any, Any]],
        dense: list[np.ndarray[Any, Any]],
        views: list[np.ndarray[Any, Any]],
    ) -> None:
        self.pattern = pattern
        self.out = out
        self.dense = dense
        self.views = views
        self.unseen = [*map(getrefcount, views)]

    def fill(self, takes: Takes, indices: np.ndarray[Any, Any], part: slice) -> None:
        """Copy rows into a part of the memory; several threads may do so for different parts.

        Args:
            takes: ``take`` of the rows of each block, as records without fields.
            indices: which rows.
            part: where in the memory they go.
        """
        pattern = self.pattern
        if pattern.first_block:
            scratch = pattern.scratch()
            records, packed = scratch
            takes[0](indices, None, records[part], "clip")
            for dense, source in zip(self.dense, packed, strict=True):
                dense[..., part] = source[..., part]
            pattern.unused.append(scratch)
        for take, out in zip(takes[pattern.first_block :], self.out, strict=True):
            take(indices, None, out[part], "clip")


class Slots:
    """The slots of a storage.

    A slot stays here while its batch is in use, so that its memory can be taken again as soon as the batch is gone. Of
    batches that are kept for long the slots are let go, and new memory is used instead. Several threads may ask.

    Args:
        plan: how rows lie in memory.
        fields: what lies there.
        contiguous: as in ``Slot``.

    Attributes:
        most: how many slots of a batch size are kept.
    """

    def __init__(self, plan: Layout, fields: Sequence[Field], *, contiguous: bool) -> None:
        self._plan = plan
        self._fields = fields
        self._contiguous = contiguous
        self._slots: dict[int, tuple[Pattern, deque[Slot]]] = {}
        self.most = 0

    def take(self, count: int) -> Slot:
        """A slot for so many rows that nobody sees."""
        known = self._slots.get(count)
        if known is None:
            known = self._of_another_size(count)
        pattern, slots = known
        # The oldest: its batch is the first to go. If it is kept, it will be let go. Each step is one operation on the
        # deque, so that threads do not meet in one slot.
        try:
            slot = slots.popleft()
        except IndexError:
            pass
        else:
            if [*map(getrefcount, slot.views)] == slot.unseen:
                return slot
            slots.appendleft(slot)
        return pattern.slot()

    def gather(self, takes: Takes, indices: np.ndarray[Any, Any]) -> list[torch.Tensor]:
        """Copy rows into a slot; otherwise as ``Slot.fill`` and ``put``."""
        count = len(indices)
        slot = self.take(count)
        pattern = slot.pattern
        # "clip", since the indices are in range: "raise" would go through a second buffer.
        if pattern.first_block:
            scratch = pattern.scratch()
            takes[0](indices, None, scratch.records, "clip")
            for dense, packed in zip(slot.dense, scratch.groups):  # noqa: B905 (as many; this runs for every batch)
                dense[...] = packed
            pattern.unused.append(scratch)
            takes = takes[1:]
        for take, out in zip(takes, slot.out):  # noqa: B905 (they are as many, and this runs for every batch)
            take(indices, None, out, "clip")
        return self.put(slot, count)

    def put(self, slot: Slot, count: int) -> list[torch.Tensor]:
        """Put a slot into use, once all its rows are there; it may be free again one day.

        Returns:
            One tensor of bits for each field, over the memory of the slot.
        """
        tensors = [*map(torch.from_numpy, slot.views)]
        known = self._slots.get(count)
        if known is not None:
            slots = known[1]
            slots.append(slot)
            if len(slots) > self.most:
                slots.popleft()
        return tensors

    def _of_another_size(self, count: int) -> tuple[Pattern, deque[Slot]]:
        for size in list(self._slots)[: 1 - _SIZES]:
            self._slots.pop(size, None)
        pattern = Pattern(self._plan, self._fields, count, contiguous=self._contiguous)
        return self._slots.setdefault(count, (pattern, deque()))
