"""Batches as an asynchronous iterator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Self

from asyncbuf._runtime.async_only import NoSyncIteration
from asyncbuf.batch import DataT_co

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncbuf.batch import Batch


class BatchStream(NoSyncIteration, Generic[DataT_co]):
    """Batches of a buffer, for ``async for``. Keeps no batch back, so it may be dropped at any time.

    Several tasks may iterate over one stream; each batch goes to one of them.

    Args:
        next_batch: awaited for each batch; returns None when there are no more.
        is_finite: whether it stays at its end once that was reached, such as a pass over the items. Otherwise it goes
            on when there are batches again.
    """

    def __init__(self, next_batch: Callable[[], Awaitable[Batch[DataT_co] | None]], *, is_finite: bool) -> None:
        self._next_batch = next_batch
        self._is_finite = is_finite
        self._over = False

    def __aiter__(self) -> Self:
        """The stream itself."""
        return self

    async def __anext__(self) -> Batch[DataT_co]:
        """The next batch.

        Raises:
            StopAsyncIteration: the pass is over, the buffer was closed, or its data has run out.
            PrefetchError, BufferFailedError: as in ``sample``.
            BufferClosedError: the buffer was never opened.
        """
        if self._over:
            raise StopAsyncIteration
        batch = await self._next_batch()
        if batch is None:
            self._over = self._is_finite
            raise StopAsyncIteration
        return batch
