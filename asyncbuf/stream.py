"""Batches of a buffer as an asynchronous iterator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from asyncbuf._prefetch.queue import EpochCursor
from asyncbuf.errors import BufferClosedError

if TYPE_CHECKING:
    from asyncbuf.batch import Batch
    from asyncbuf.buffer import ReplayBuffer


class BatchStream:
    """Batches of a buffer, for ``async for``. Keeps no batch back, so it may be dropped at any time.

    Several tasks may iterate over one stream; each batch goes to one of them.

    Attributes:
        within: the pass of the sampler that it ends with; None if it is endless.
    """

    def __init__(self, buffer: ReplayBuffer, *, one_pass: bool) -> None:
        self._buffer = buffer
        self.within = EpochCursor() if one_pass else None
        self._over = False

    def __aiter__(self) -> Self:
        """The stream itself."""
        return self

    async def __anext__(self) -> Batch:
        """The next batch.

        Raises:
            StopAsyncIteration: the pass is over, the buffer was closed, or its data has run out.
            PrefetchError, BufferFailedError: as in ``sample``.
            BufferClosedError: the buffer was never opened.
        """
        if self._over:
            raise StopAsyncIteration
        try:
            batch = await self._buffer.next_of(self)
        except BufferClosedError:
            if not self._buffer.was_opened:
                raise
            batch = None
        if batch is None:
            self._over = self.within is not None
            raise StopAsyncIteration
        return batch
