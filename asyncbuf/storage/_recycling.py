"""Memory for batches that is used again once nobody can see it any more.

First touch of memory is dear, and so is making views of it. So a batch is gathered into a *slot*, arrays with views of
the fields, and its tensors are laid over these views. Such a tensor holds a reference to its view for as long
as anything can reach the memory: the tensor itself, a view or slice of it, a numpy array over it, a graph that saved it
for the backward pass, a DLPack capsule. They all share one storage, and that holds the numpy array that it was made
from. So a slot is free when the reference counts of its views are what they were at first.

Packed fields are gathered into the *scratch* memory of a slot and copied from there. No tensor lies over that, so it
goes to another slot where a slot is let go with its batch.
"""

from __future__ import annotations

from collections import deque
from sys import getrefcount
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from asyncbuf.storage._batch_memory import SlotMaker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from asyncbuf.storage._batch_memory import BatchMemory, Scratch, Slot

    Takes = Sequence[Callable[..., object]]

# For how many batch sizes slots are kept.
_SIZES = 4


class _Pool(NamedTuple):
    """Memory for batches of one size."""

    maker: SlotMaker
    slots: deque[Slot]
    scratch: deque[Scratch]


class Slots:
    """The slots of a storage.

    A slot stays here while its batch is in use, so that its memory can be taken again as soon as the batch is gone. Of
    batches that are kept for long the slots are let go, and new memory is used instead. Several threads may ask.

    Args:
        memory: how they look.

    Attributes:
        most: how many slots of a batch size are kept.
    """

    def __init__(self, memory: BatchMemory) -> None:
        self._memory = memory
        self._pools: dict[int, _Pool] = {}
        self.most = 0

    def gather(self, takes: Takes, indices: np.ndarray[Any, Any]) -> list[torch.Tensor]:
        """Copy rows into memory that nobody else sees.

        Args:
            takes: ``take`` of the rows of each block, as records without fields.
            indices: which rows.

        Returns:
            One tensor of bits for each field.
        """
        count = len(indices)
        slot = self.take(count)
        for take, out in zip(takes, slot.out):  # noqa: B905 (they are as many, and to look takes time)
            # "clip", since the indices are in range: "raise" would go through a second buffer.
            take(indices, None, out, "clip")
        for dense, packed in slot.copies:
            dense[...] = packed
        return self.put(slot, count)

    def fill(self, slot: Slot, takes: Takes, indices: np.ndarray[Any, Any], part: slice) -> None:
        """Copy rows into a part of a slot that was taken for them. Otherwise as ``gather``."""
        for take, out in zip(takes, slot.out, strict=True):
            take(indices, None, out[part], "clip")
        for dense, packed in slot.copies:
            dense[..., part] = packed[..., part]

    def take(self, count: int) -> Slot:
        """A slot for so many rows that nobody sees."""
        pool = self._pools.get(count)
        if pool is None:
            pool = self._of_another_size(count)
        # The oldest: its batch is the first to go. If it is kept, it will be let go. Each step is one operation on a
        # deque, so that threads do not meet in one slot.
        try:
            slot = pool.slots.popleft()
        except IndexError:
            pass
        else:
            if [*map(getrefcount, slot.views)] == slot.unseen:
                return slot
            pool.slots.appendleft(slot)
        try:
            scratch = pool.scratch.pop()
        except IndexError:
            scratch = None
        return pool.maker.slot(scratch)

    def put(self, slot: Slot, count: int) -> list[torch.Tensor]:
        """Put a slot into use, once all its rows are there; it may be free again one day.

        Returns:
            One tensor of bits for each field, over the memory of the slot.
        """
        tensors = [*map(torch.from_numpy, slot.views)]
        pool = self._pools.get(count)
        if pool is not None:
            slots = pool.slots
            slots.append(slot)
            if len(slots) > self.most:
                pool.scratch.append(slots.popleft().scratch)
        return tensors

    def _of_another_size(self, count: int) -> _Pool:
        for size in list(self._pools)[: 1 - _SIZES]:
            self._pools.pop(size, None)
        return self._pools.setdefault(count, _Pool(SlotMaker(self._memory, count), deque(), deque()))
