"""What a buffer is to those who use it, so that another one, such as one in another process, can take its place.

``Replay`` is what those who write and read need; ``Snapshotable`` is what those who save and restore need. Neither has
anything that a buffer from afar could not have: no size and no generator that is there without waiting.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from asyncbuf.batch import Batch, DataT_co
from asyncbuf.checkpoint.snapshotable import Snapshotable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import Self

    import torch

__all__ = ["Replay", "Snapshotable"]


@runtime_checkable
class Replay(Protocol[DataT_co]):
    """Items in, batches out. The methods mean what those of ``ReplayBuffer`` do."""

    async def open(self) -> Self:
        """Start the background work."""
        ...

    async def aclose(self, timeout: float | None = None) -> None:
        """End the background work."""

    async def __aenter__(self) -> Self:
        """Open."""
        ...

    async def __aexit__(self, kind: Any, error: Any, traceback: Any) -> None:
        """Close."""

    async def extend(self, items: Any, *, priority: Any = None) -> torch.Tensor:
        """Write items: the rows of those that stay, int64 ``[items]``."""
        ...

    async def add(self, item: Any, *, priority: Any = None) -> int | None:
        """Write one item: its row, or None if it is not kept."""

    async def update_priority(self, batch_or_indices: Batch[Any] | Any, priority: Any) -> None:
        """Tell the sampler new priorities of rows."""

    async def remove(self, batch_or_indices: Batch[Any] | Any) -> int:
        """Remove items: how many."""
        ...

    async def empty(self) -> None:
        """Forget every item, and the tickets drawn from them."""

    async def finish(self) -> None:
        """Say that no more items will come."""

    async def sample(self, batch_size: int | None = None) -> Batch[DataT_co]:
        """Wait for the next batch."""
        ...

    async def skip(self) -> int | None:
        """Drop the ticket that is first in line: its number, or None without one."""

    async def flush(self) -> int:
        """Drop every ticket that was drawn ahead: how many."""
        ...

    def __aiter__(self) -> AsyncIterator[Batch[DataT_co]]:
        """Batches without end, until the buffer is closed or its data has run out."""
        ...

    def epoch(self) -> AsyncIterator[Batch[DataT_co]]:
        """What is left of the pass over the items, or the next pass if none has begun."""
        ...
