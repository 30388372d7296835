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
    from collections.abc import Sequence

    from asyncbuf.storage.layout import Layout, Records

# For how many batch sizes slots are kept.
_SIZES = 4


class Slot:
    """Memory for one batch.

    Args:
        plan: how rows lie in memory.
        count: number of rows.
        contiguous: whether each field gets memory of its own, without a stride along the batch axis.

    Attributes:
        unseen: reference counts of the views while nobody can see the memory.
    """

    __slots__ = ("_copies", "_out", "_views", "unseen")

    def __init__(self, plan: Layout, count: int, *, contiguous: bool) -> None:
        records = [np.empty(count, record) for record in plan.records]
        self._out = [*map(np.ndarray.view, records, plan.opaque)]
        packed = self._views = [records[place.block][place.name] for place in plan.places]
        if contiguous:
            # A field with a block of its own is dense as it is.
            self._views = [view if view.flags.c_contiguous else np.empty(view.shape, view.dtype) for view in packed]
        self._copies = [(dense, view) for dense, view in zip(self._views, packed, strict=True) if dense is not view]
        del packed
        self.unseen = self.seen()

    def seen(self) -> list[int]:
        """Reference counts of the views now."""
        return [*map(getrefcount, self._views)]

    def copy(self, blocks: Sequence[Records], indices: np.ndarray[Any, Any], part: slice | None = None) -> None:
        """Copy rows into the memory.

        Args:
            blocks: the rows, as records without fields.
            indices: which of them.
            part: where in the memory they go; None if they fill it.
        """
        for i, out in enumerate(self._out if part is None else [out[part] for out in self._out]):
            # "clip", since the indices are in range: "raise" would go through a second buffer.
            blocks[i].take(indices, None, out, "clip")
        for dense, packed in self._copies:
            where = ... if part is None else part
            dense[where] = packed[where]

    def tensors(self) -> list[torch.Tensor]:
        """One tensor of bits for each field, over the memory, once all rows are there."""
        return [*map(torch.from_numpy, self._views)]


class Slots:
    """The slots of a storage.

    A slot stays here while its batch is in use, so that its memory can be taken again as soon as the batch is gone. Of
    batches that are kept for long the slots are let go, and new memory is used instead. Several threads may ask.

    Args:
        plan: how rows lie in memory.
        contiguous: as in ``Slot``.

    Attributes:
        most: how many slots of a batch size are kept.
    """

    def __init__(self, plan: Layout, *, contiguous: bool) -> None:
        self._plan = plan
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
            if slot.seen() == slot.unseen:
                return slot
            slots.appendleft(slot)
        return Slot(self._plan, count, contiguous=self._contiguous)

    def put(self, slot: Slot, count: int) -> None:
        """A slot is in use now, and may be free one day."""
        slots = self._slots.get(count)
        if slots is not None:
            slots.append(slot)
            if len(slots) > self.most:
                slots.popleft()

    def _of_another_size(self, count: int) -> deque[Slot]:
        for size in list(self._slots)[: 1 - _SIZES]:
            self._slots.pop(size, None)
        return self._slots.setdefault(count, deque())
