"""Buffers over fixed data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from asyncbuf._runtime.arguments import count
from asyncbuf.sampler import SamplerWithoutReplacement
from asyncbuf.storage.dataset import storage_of
from asyncbuf.writer import ImmutableDatasetWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from asyncbuf._config import Transform
    from asyncbuf._table.table import Table
    from asyncbuf.sampler import Sampler


class FromDataset:
    """The part of a buffer that makes one over fixed data."""

    _table: Table

    if TYPE_CHECKING:

        def __init__(self, storage: Any, **options: Any) -> None: ...

    @classmethod
    def from_dataset(
        cls,
        data: Any,
        *,
        batch_size: int,
        shuffle: bool = True,
        drop_last: bool = False,
        sampler: Sampler | None = None,
        prefetch: int = 2,
        workers: int = 1,
        transform: Transform | Sequence[Transform] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        device: torch.device | str | int | None = None,
        pin_memory: bool = False,
        generator: torch.Generator | None = None,
    ) -> Self:
        """A buffer over fixed data, as a loader: passes over all items, prefetched and exactly resumable.

        Nothing is copied or read before batches are made. A checkpoint has positions and not the data: it has a few
        kilobytes, and goes on over the same data only. ``extend``, ``add`` and ``empty`` raise ``ReadOnlyError``;
        ``remove`` takes items out of all that follows. Each ``epoch()`` goes through all items::

            async with ReplayBuffer.from_dataset({"x": x, "y": y}, batch_size=256) as buffer:
                async for batch in buffer.epoch(): ...

        Args:
            data: tensors or arrays ``[items, ...]``, alone or in a tree (dict, tuple, TensorDict, ...); or a dataset
                with ``__len__`` and ``__getitem__``, such as one of ``torch.utils.data``, a ``datasets.Dataset`` or a
                list, whose items are read in threads and stacked; or a ``Subset`` of either, as ``split`` makes them.
            batch_size: number of items of a batch.
            shuffle: a new random order for each pass; otherwise items come in their order.
            drop_last: leave out the items at the end of a pass that do not fill a batch.
            sampler: any other sampler, in place of passes; then neither ``shuffle`` nor ``drop_last``. It is told of
                all items at once, as if they were written. One with ``columns`` needs tensors or arrays.
            prefetch: how many batches are prepared ahead of those asked for, from 0.
            workers: how many batches are read and transformed at once, from 1.
            transform: as in the constructor. With a stateful one, a checkpoint has the prefetched batches.
            collate_fn: makes a batch of a list of items, for a dataset that is read item by item.
            device: as in the constructor.
            pin_memory: as in the constructor.
            generator: as in the constructor.

        Raises:
            TypeError, ValueError: an argument is not of the kind or in the range that is expected.
        """
        storage = storage_of(data)
        if sampler is None:
            sampler = SamplerWithoutReplacement(drop_last=drop_last, shuffle=shuffle)
        elif shuffle is not True or drop_last is not False:
            raise ValueError("sampler: expected either a sampler, or shuffle and drop_last; found both")
        buffer = cls(
            storage,
            sampler=sampler,
            writer=ImmutableDatasetWriter(storage.capacity),
            batch_size=count(batch_size, "batch_size", 1, example=256),
            prefetch=prefetch,
            workers=workers,
            transform=transform,
            collate_fn=collate_fn,
            device=device,
            pin_memory=pin_memory,
            generator=generator,
        )
        buffer._table.introduce()
        return buffer
