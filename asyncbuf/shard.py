"""One stream of batches, of which several ranks read a part each."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, Self

from asyncbuf._runtime.arguments import count
from asyncbuf._runtime.async_only import NoSyncIteration
from asyncbuf.batch import DataT_co
from asyncbuf.errors import BufferClosedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncbuf.batch import Batch


class Ranks:
    """The ranks that share the batches of a buffer, and the batches that not all of them have had.

    Those are on lease: a snapshot has them, and after a restore all ranks get them again.

    Args:
        world: number of ranks.
        ahead: how many batches a rank may be ahead of the last one.
        end: told that every rank has had its part of a batch.
        is_known: whether a batch is still on lease: not if another state was put in place.

    Attributes:
        is_replaced: whether ranks of another number read now.
    """

    def __init__(
        self,
        world: int,
        ahead: int,
        end: Callable[[Batch[Any]], None],
        is_known: Callable[[Batch[Any]], bool],
    ) -> None:
        self.world = world
        self._ahead = ahead
        self._end = end
        self._is_known = is_known
        self.is_replaced = False
        self._batches: deque[Batch[Any]] = deque()
        self._had = [0] * world  # how many of these batches each rank has had
        self._lock = asyncio.Lock()
        self._waiting: set[asyncio.Future[Callable[[], Exception] | None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def next(self, rank: int, take: Callable[[], Awaitable[Batch[Any]]]) -> Batch[Any]:
        """The part of a rank of its next batch.

        Args:
            rank: the rank.
            take: awaited for the next batch of the buffer, on lease.
        """
        if self.is_replaced:
            raise ValueError(
                f"world: expected no rank of {self.world} any more, since ranks of another number read now"
            )
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._lock = loop, asyncio.Lock()
        while True:
            self._forget_unknown()
            if self._had[rank] < len(self._batches):
                return self._part(rank)
            if self._had[rank] >= self._ahead:
                await self._others(loop)
                continue
            async with self._lock:
                # It is the next batch of the others, too. If it fails, they try themselves.
                if self._had[rank] >= len(self._batches):
                    self._batches.append(await take())

    def _part(self, rank: int) -> Batch[Any]:
        part = self._batches[self._had[rank]].part(rank, self.world)
        self._had[rank] += 1
        while min(self._had):
            self._had = [had - 1 for had in self._had]
            self._end(self._batches.popleft())
        self._wake()
        return part

    async def _others(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait until another rank has read."""
        wake: asyncio.Future[Callable[[], Exception] | None] = loop.create_future()
        self._waiting.add(wake)
        try:
            error = await wake
        finally:
            self._waiting.discard(wake)
        if error is not None:
            raise error()

    def _wake(self) -> None:
        for wake in self._waiting:
            if not wake.done():
                wake.set_result(None)

    def refuse(self, error: Callable[[], Exception]) -> None:
        """Tell those that wait for other ranks that nothing will come."""
        for wake in self._waiting:
            if not wake.done():
                wake.set_result(error)

    @property
    def is_even(self) -> bool:
        """Whether all ranks have had the same batches."""
        self._forget_unknown()
        return not self._batches

    def _forget_unknown(self) -> None:
        """Begin anew if another state was put in place: it has the batches that not all ranks have had."""
        while self._batches and not self._is_known(self._batches[0]):
            self._batches.popleft()
            self._had = [max(0, had - 1) for had in self._had]

    def blocked(self) -> list[str]:
        """In words, for which ranks others wait."""
        most, least = max(self._had), min(self._had)
        if most < self._ahead or most == least or not self._batches:
            return []
        late = [rank for rank, had in enumerate(self._had) if had == least]
        return [f"ranks {late} of {self.world} have not had batch {self._batches[least].number}, and the others wait"]


class RanksNow:
    """The ranks that read from a buffer now.

    Attributes:
        ranks: all of them; None before there are any.
    """

    def __init__(self) -> None:
        self.ranks: Ranks | None = None

    def refuse(self, error: Callable[[], Exception]) -> None:
        """Tell those that wait for other ranks that nothing will come."""
        if self.ranks is not None:
            self.ranks.refuse(error)


class Shard(NoSyncIteration, Generic[DataT_co]):
    """The part of one rank of every batch; ``buffer.shard(rank, world)`` makes it.

    Args:
        ranks: all of them.
        rank: this one.
        take: awaited for the next batch of the buffer, on lease.
        was_opened: whether the buffer was ever opened.
    """

    def __init__(
        self, ranks: Ranks, rank: int, take: Callable[[], Awaitable[Batch[Any]]], was_opened: Callable[[], bool]
    ) -> None:
        self._ranks = ranks
        self._was_opened = was_opened
        self._take = take
        self.rank: int = count(rank, "rank", 0, most=ranks.world - 1, example=0)
        self.world: int = ranks.world

    async def sample(self) -> Batch[DataT_co]:
        """The part of this rank of its next batch: its rows, with the number of the whole batch.

        A cancelled call loses nothing.

        Raises:
            TypeError: the data cannot be divided: see ``Batch.part``.
            PrefetchError, BufferClosedError, BufferFailedError: as of ``buffer.sample``.
        """
        await asyncio.sleep(0)  # a loop of calls that never have to wait starves nobody
        return await self._ranks.next(self.rank, self._take)

    def __aiter__(self) -> Self:
        """The shard itself."""
        return self

    async def __anext__(self) -> Batch[DataT_co]:
        """As ``sample``; the end when the buffer is closed, or its data has run out."""
        try:
            return await self.sample()
        except BufferClosedError:
            if not self._was_opened():
                raise
            raise StopAsyncIteration from None

    def __repr__(self) -> str:
        """Which rank it is."""
        return f"<Shard {self.rank} of {self.world}>"
