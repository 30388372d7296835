"""Batches on lease: given back unless their consumer gets to the end of what it does with them."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, Generic, cast

from asyncbuf._runtime.arguments import count, seconds
from asyncbuf._runtime.lifecycle import State
from asyncbuf._runtime.reentry import current_job
from asyncbuf.batch import DataT_co
from asyncbuf.errors import AsyncBufError
from asyncbuf.shard import Ranks, Shard

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from asyncbuf._assembly import Assembly
    from asyncbuf._config import BufferConfig
    from asyncbuf._prefetch.pipeline import Pipeline
    from asyncbuf._runtime.lifecycle import Lifecycle
    from asyncbuf._runtime.reentry import ReentryGuard
    from asyncbuf.batch import Batch


class Lease(Generic[DataT_co]):
    """One batch for the time of an ``async with`` block; ``buffer.lease()`` makes it.

    Args:
        take: awaited for the batch.
        end: told of the batch and whether the consumer is done with it.
        timeout: how long the block may take, in seconds; None without a limit.
    """

    __slots__ = ("_batch", "_end", "_is_used", "_limit", "_take", "_timeout")

    def __init__(
        self,
        take: Callable[[], Awaitable[Batch[DataT_co]]],
        end: Callable[[Batch[DataT_co], bool], None],
        timeout: float | None,
    ) -> None:
        self._take = take
        self._end = end
        self._timeout = timeout
        self._limit: asyncio.Timeout | None = None
        self._batch: Batch[DataT_co] | None = None
        self._is_used = False

    async def __aenter__(self) -> Batch[DataT_co]:
        """Wait for the batch.

        Raises:
            AsyncBufError: this lease was used before; the other errors are those of ``sample``.
        """
        if self._is_used:
            raise AsyncBufError("lease: expected a new one for each block, as in `async with buffer.lease() as batch`")
        self._is_used = True
        batch = self._batch = await self._take()
        if self._timeout is not None:
            self._limit = asyncio.timeout(self._timeout)
            await self._limit.__aenter__()
        return batch

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Acknowledge the batch, or with an error give it back.

        Raises:
            TimeoutError: the block took too long.
        """
        assert self._batch is not None
        is_done = False
        try:
            if self._limit is not None:
                await self._limit.__aexit__(kind, error, traceback)
            is_done = kind is None
        finally:
            self._end(self._batch, is_done)


class LeaseMethods(Generic[DataT_co]):
    """The part of a buffer that lends batches."""

    _parts: Assembly
    _pipeline: Pipeline
    _guard: ReentryGuard
    _config: BufferConfig
    _life: Lifecycle

    def _turn(self, *, within_frozen: bool = False) -> Awaitable[None]:
        raise NotImplementedError

    def lease(self, batch_size: int | None = None, *, timeout: float | None = None) -> Lease[DataT_co]:
        """``async with buffer.lease() as batch``: the next batch, for the time of the block.

        At the end of the block, the batch counts as delivered. If the block raises, is cancelled or takes too long, the
        batch goes back: the very same one is first in line for the next consumer. A snapshot that is taken meanwhile
        has it, and hands it out first after a restore. So with leases a crash loses no batch; the one that was being
        trained on comes again.

        Until its end the batch still belongs to the buffer: do not change its tensors in place. Rows that leave when
        they are handed over, as with a ``ConsumingSampler``, leave at the end of the block.

        Args:
            batch_size: as in ``sample``.
            timeout: how long the block may take once it has the batch, in seconds: then it is cancelled where it waits
                next, and raises ``TimeoutError``. None without a limit. Waiting for the batch does not count.

        Returns:
            What to use once in ``async with``; its errors are those of ``sample``.

        Raises:
            TypeError, ValueError: the timeout is no number from 0 on.
        """
        return Lease(functools.partial(self._lease, batch_size), self._end_lease, seconds(timeout))

    def shard(self, rank: int, world: int) -> Shard[DataT_co]:
        """One of several ranks, which read disjoint parts of the same batches: ``async for batch in shard``.

        Each batch is drawn once, for all ranks together, and divided as by ``batch.part(rank, world)``: so the batches
        are those of ``sample()``, whatever the number of ranks. A rank may be ahead of the slowest by the prefetch
        depth and one; then it waits. Every rank has to read: ``why_blocked()`` names those that others wait for.

        A snapshot has the batches that not all ranks have had, and after a restore all ranks get them again, as many as
        there are then. So save when all ranks have done the same steps.

        For ranks in processes of their own, each with a buffer of the same content and seed:
        ``(await buffer.sample()).part(rank, world)``.

        Args:
            rank: which rank, from 0 to ``world - 1``.
            world: number of ranks.

        Raises:
            TypeError, ValueError: there is no such rank; or ranks of another number are in the middle of a batch.
        """
        world = count(world, "world", 1, example=4)
        parts, pipeline = self._parts, self._pipeline
        ranks = parts.ranks_now.ranks
        if ranks is None or (ranks.world != world and ranks.is_even):
            depth = 0 if pipeline.main_queue is None else pipeline.main_queue.depth
            if ranks is not None:
                ranks.is_replaced = True
            end = functools.partial(pipeline.end_lease, is_done=True)
            ranks = parts.ranks_now.ranks = Ranks(world, depth + 1, end, pipeline.is_leased)
        if ranks.world != world:
            raise ValueError(f"world: expected {ranks.world}, because batches are still out for them; found {world}")
        take = functools.partial(self._lease, None)
        return Shard(ranks, rank, take, lambda: self._life.state is not State.NEW)

    async def _lease(self, batch_size: int | None) -> Batch[DataT_co]:
        if current_job() is not None:
            self._guard.check("lease", batch_size in (None, self._config.batch_size))
        await self._turn()
        queue = self._parts.queue(batch_size)
        batch = self._pipeline.take_now(queue, leased=True)
        if batch is None:
            with self._guard.waiting("lease", queue is self._pipeline.main_queue):
                batch = await self._pipeline.take(queue, leased=True)
        return cast("Batch[Any]", batch)

    def _end_lease(self, batch: Batch[Any], is_done: bool) -> None:
        self._pipeline.end_lease(batch, is_done=is_done)
