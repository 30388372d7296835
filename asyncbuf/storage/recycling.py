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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncbuf.storage.layout import Group, Layout, Records
    from asyncbuf.storage.leaf import Field

    Takes = Sequence[Callable[..., object]]

# For how many batch sizes slots are kept.
_SIZES = 4


class Slot:
    """Memory for one batch.

    Args:
        plan: how rows lie in memory.
        fields: what lies there.
        count: number of rows.
        contiguous: whether each field gets memory of its own, without a stride along the batch axis.

    Attributes:
        out: records without fields, one array per block: where rows are gathered.
        copies: memory that is to be filled from the records then, and the place in them: ``(to, from)``.
        views: one array of bits per field, ``[count, *item]``.
        unseen: reference counts of the views while nobody can see the memory.
    """

    __slots__ = ("copies", "out", "unseen", "views")

    def __init__(self, plan: Layout, fields: Sequence[Field], count: int, *, contiguous: bool) -> None:
        records = [np.empty(count, record) for record in plan.records]
        self.out = [*map(np.ndarray.view, records, plan.opaque)]
        # A field with a block of its own is dense as it is.
        self.views = [records[place.block][place.name] for place in plan.places]
        self.copies = []
        if contiguous and count:
            self.copies = [_moved_out(group, records[group.block], fields, self.views) for group in plan.groups]
        self.unseen = self.seen()

    def seen(self) -> list[int]:
        """Reference counts of the views now."""
        return [*map(getrefcount, self.views)]

    def fill(self, takes: Takes, indices: np.ndarray[Any, Any], part: slice) -> None:
        """Copy rows into a part of the memory.

        Args:
            takes: ``take`` of the rows of each block, as records without fields.
            indices: which rows.
            part: where in the memory they go.
        """
        for take, out in zip(takes, self.out, strict=True):
            take(indices, None, out[part], "clip")
        for dense, packed in self.copies:
            dense[..., part] = packed[..., part]


def _moved_out(
    group: Group, records: Records, fields: Sequence[Field], views: list[np.ndarray[Any, Any]]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Give the fields of a group dense memory, and put views of it in place of those of the records.

    As bytes without a meaning: numpy copies a small field in one go then, and fields of a size all at once.

    Returns:
        The dense memory and the place in the records that is to be copied there: both ``[fields, count]``, or
        ``[count]`` for one field, which costs half as much.
    """
    shape, element = (len(group.members), len(records)), np.dtype((np.void, group.nbytes))
    packed: np.ndarray[Any, Any] = np.ndarray(
        shape, element, records, group.offset, (group.nbytes, records.dtype.itemsize)
    )
    dense = np.empty(shape, element)
    for memory, i in zip(dense, group.members, strict=True):
        views[i] = memory.view(fields[i].bits).reshape(views[i].shape)
    return (dense, packed) if len(group.members) > 1 else (dense[0], packed[0])


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
        self._slots: dict[int, deque[Slot]] = {}
        self.most = 0

    def take(self, count: int) -> Slot:
        """A slot for so many rows that nobody sees."""
        slots = self._slots.get(count)
        if slots is None:
            slots = self._of_another_size(count)
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
        return Slot(self._plan, self._fields, count, contiguous=self._contiguous)

    def gather(self, takes: Takes, indices: np.ndarray[Any, Any]) -> list[torch.Tensor]:
        """Copy rows into a slot; otherwise as ``Slot.fill`` and ``put``."""
        count = len(indices)
        slot = self.take(count)
        for take, out in zip(takes, slot.out):  # noqa: B905 (they are as many, and this runs for every batch)
            # "clip", since the indices are in range: "raise" would go through a second buffer.
            take(indices, None, out, "clip")
        for dense, packed in slot.copies:
            dense[...] = packed
        return self.put(slot, count)

    def put(self, slot: Slot, count: int) -> list[torch.Tensor]:
        """Put a slot into use, once all its rows are there; it may be free again one day.

        Returns:
            One tensor of bits for each field, over the memory of the slot.
        """
        tensors = [*map(torch.from_numpy, slot.views)]
        slots = self._slots.get(count)
        if slots is not None:
            slots.append(slot)
            if len(slots) > self.most:
                slots.popleft()
        return tensors

    def _of_another_size(self, count: int) -> deque[Slot]:
        for size in list(self._slots)[: 1 - _SIZES]:
            self._slots.pop(size, None)
        return self._slots.setdefault(count, deque())
