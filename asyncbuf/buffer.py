"""The buffer: puts the parts together."""

from __future__ import annotations

import asyncio
import functools
import types
import warnings
from typing import TYPE_CHECKING, Any, Generic, Self

from asyncbuf._assembly import Assembly
from asyncbuf._config import BufferConfig
from asyncbuf._from_dataset import FromDataset
from asyncbuf._ingest.delivery_methods import DeliveryMethods
from asyncbuf._prefetch.queue import EpochCursor
from asyncbuf._runtime.arguments import seconds
from asyncbuf._runtime.async_only import AsyncOnly
from asyncbuf._runtime.lifecycle import State
from asyncbuf._runtime.reentry import current_job
from asyncbuf._table.deliveries import DEFAULT_WINDOW
from asyncbuf._version_methods import VersionMethods
from asyncbuf._watch_methods import WatchMethods
from asyncbuf._write_methods import WriteMethods
from asyncbuf.batch import DataT_co
from asyncbuf.checkpoint._methods import SnapshotMethods
from asyncbuf.errors import BufferClosedError
from asyncbuf.lease import LeaseMethods
from asyncbuf.stream import BatchStream

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence
    from types import TracebackType

    import torch

    from asyncbuf._config import Transform
    from asyncbuf.batch import Batch
    from asyncbuf.limiter import Limiter
    from asyncbuf.sampler import Sampler
    from asyncbuf.staleness import Staleness
    from asyncbuf.stats import BufferStats
    from asyncbuf.storage import Storage
    from asyncbuf.writer import Writer


class ReplayBuffer(
    FromDataset,
    SnapshotMethods,
    WriteMethods,
    DeliveryMethods,
    LeaseMethods[DataT_co],
    VersionMethods,
    WatchMethods,
    AsyncOnly,
    Generic[DataT_co],
):
    """A replay buffer and prefetching sampler for asyncio.

    Coroutines write items in with ``extend`` and ``add`` and await batches with ``sample`` and ``async for``. All calls
    belong to one event loop; writes and draws take effect in the order of the calls.

    For type checkers, the type of the data of its batches may be said, as in
    ``buffer: ReplayBuffer[dict[str, torch.Tensor]] = ReplayBuffer(storage)``. Nothing checks it at run time.

    Args:
        storage: where items live.
        sampler: which rows a batch takes; ``RandomSampler()`` if None.
        writer: which rows new items take; ``RoundRobinWriter()`` if None.
        batch_size: number of items of a batch. None if each call of ``sample`` says its own; nothing is prefetched
            then.
        prefetch: how many batches are prepared ahead of those asked for, from 0.
        workers: how many batches are gathered and transformed at once, from 1. A large batch that is waited for is
            gathered by up to four threads together, one for each core.
        min_size: consumers wait until this many items are stored, from 1: short for ``limiter=MinSize(min_size)``.
        limiter: when items may be written and batches drawn; ``MinSize(1)`` if None. Several are joined by ``&``.
        overwrite: ``"oldest"``: the ring overwrites the oldest item, read or not. ``"wait"``: writers wait while they
            would overwrite an item that no ticket was drawn for; with a sampler whose items leave, while they would
            overwrite any. Needs a ``RoundRobinWriter``.
        transform: function, or list of functions, of the data of a batch (shapes ``[batch, *item]``), sync or async.
            Sync ones run in threads, unless they turn out to be quick. One that accepts ``generator`` gets a
            ``torch.Generator`` seeded from the ticket, so its randomness does not depend on workers or timing. One
            with ``state_dict`` and ``load_state_dict`` sees the batches in order, one at a time (a module only if its
            ``state_dict`` is not empty). A transform may change the data in place: it gets a copy of its own, and a
            second try gets another. One that waits for anything should be async; none may wait for this buffer.
        collate_fn: makes batched data of what the storage gathered (of ``ListStorage``: a list of items).
        device: where the tensors of a batch go in the end; None leaves them on the CPU.
        pin_memory: whether they go through page-locked memory; needs an accelerator.
        generator: randomness of all draws; a freshly seeded one if None. Global generators are never used.
        staleness: which version of the model made each item, and how old an item may get; None if nobody counts
            versions.
        key_window: how many keys are kept of writes that have one, those written last, from 1.

    Raises:
        TypeError, ValueError: an argument is not of the kind or in the range that is expected.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        sampler: Sampler | None = None,
        writer: Writer | None = None,
        batch_size: int | None = None,
        prefetch: int = 0,
        workers: int = 1,
        min_size: int | None = None,
        limiter: Limiter | None = None,
        overwrite: str = "oldest",
        transform: Transform | Sequence[Transform] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        device: torch.device | str | int | None = None,
        pin_memory: bool = False,
        generator: torch.Generator | None = None,
        staleness: Staleness | None = None,
        key_window: int = DEFAULT_WINDOW,
    ) -> None:
        config = BufferConfig.checked(
            storage,
            sampler=sampler,
            writer=writer,
            batch_size=batch_size,
            prefetch=prefetch,
            workers=workers,
            min_size=min_size,
            limiter=limiter,
            overwrite=overwrite,
            transform=transform,
            collate_fn=collate_fn,
            device=device,
            pin_memory=pin_memory,
            generator=generator,
            staleness=staleness,
            key_window=key_window,
        )
        self._config = config
        self._arguments, self._generator = config.arguments, config.generator
        parts = self._parts = Assembly(config)
        self._storage, self._table, self._life = config.storage, parts.table, parts.life
        calls = parts.table.storage_calls
        self._prepare, self._prepare_one = calls.prepare, calls.prepare_one
        self._gate, self._guard, self._writes = parts.gate, parts.guard, parts.writes
        self._pipeline, self._freezer, self._snapshots = parts.pipeline, parts.freezer, parts.snapshots

    async def open(self) -> Self:
        """Start the background work. A closed buffer may be opened again: it goes on where it was.

        Returns:
            The buffer.

        Raises:
            AsyncBufError: it is open already, or is still being closed.
        """
        self._parts.recover()
        self._life.opened()
        try:
            await self._parts.background.open()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def aclose(self, timeout: float | None = None) -> None:
        """End the background work. Whoever waits is told at once; tickets that nobody took stay for the next ``open``.

        Then wait until saves are committed that ``save_soon`` has begun; an error of theirs is for those that await
        them. If this call is cancelled while it waits for them, they are cancelled, too, and leave nothing behind.

        Does nothing on a buffer that is not open and is not being saved. Safe to call from any task, and again.

        Args:
            timeout: how long to wait for transforms that still run in threads, and for saves, in seconds; None waits
                for them.

        Raises:
            TimeoutError: a thread still runs. It is left to end by itself, and the buffer closes when it does. Or a
                save is still being written, and goes on.
            AsyncBufError: the caller is within a transform, or within a freeze for whose end a save waits.
            TypeError, ValueError: the timeout is no number from 0 on.
        """
        timeout = seconds(timeout)
        self._parts.recover()
        saves = self._snapshots.saves
        if self._life.is_idle and not saves.running:
            return
        self._life.check_loop()
        self._guard.check_close()
        saves.check_caller()
        start = asyncio.get_running_loop().time()
        if not self._life.is_idle:
            self._parts.background.begin_close()
            if not await self._parts.background.closed(timeout):
                raise TimeoutError(f"aclose: after {timeout} s a transform still runs in a thread")
        left = None if timeout is None else max(0.0, timeout - (asyncio.get_running_loop().time() - start))
        try:
            is_saved = await saves.ended(left)
        except asyncio.CancelledError:
            await saves.cancelled()
            raise
        if not is_saved:
            raise TimeoutError(f"aclose: after {timeout} s a save is still being written")

    async def __aenter__(self) -> Self:
        """Open."""
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
        await self.aclose()

    def __del__(self) -> None:
        """Complain about a buffer that was dropped while it was open, and end its background work."""
        life = getattr(self, "_life", None)
        if life is None or life.state is not State.OPEN or life.loop is None or life.loop.is_closed():
            return
        life.loop.call_soon_threadsafe(self._parts.background.begin_close)
        warnings.warn(f"{self!r} was dropped while it was open", ResourceWarning, source=self, stacklevel=2)

    def _turn(self, *, within_frozen: bool = False) -> Awaitable[None]:
        """Give every other coroutine a turn, then ask: a loop of calls that never have to wait starves nobody."""
        if self._life.loop is not asyncio._get_running_loop():
            self._parts.recover()
            self._life.check_loop()
        if self._freezer.frozen is not None and not within_frozen:
            self._freezer.refuse_within()
        return _one_turn()

    # -- reading ------------------------------------------------------------------------------------------------------

    async def sample(self, batch_size: int | None = None) -> Batch[DataT_co]:
        """Wait for the next batch.

        A cancelled call loses nothing: the next one gets the batch. Consumers are served first come, first served.

        Args:
            batch_size: number of items, if not that of the buffer. Such a call draws its own ticket, and what is
                prefetched stays as it is.

        Raises:
            PrefetchError: the batch could not be made; the next call tries again.
            BufferClosedError: the buffer is not open, was closed while waiting, or no more data will come.
            BufferFailedError: the background work ended.
            TypeError, ValueError: no such batch size is possible.
            WrongLoopError: the buffer belongs to another event loop.
        """
        if current_job() is not None:
            self._guard.check("sample", batch_size in (None, self._config.batch_size))
        await self._turn()
        queue = self._pipeline.main_queue
        if queue is None or batch_size is not None:
            queue = self._parts.queue(batch_size)
        batch = self._pipeline.take_now(queue)
        if batch is None:
            with self._guard.waiting("sample", queue is self._pipeline.main_queue):
                batch = await self._pipeline.take(queue)
            assert batch is not None  # only a call for a certain pass gets none
        return batch

    def __aiter__(self) -> BatchStream[DataT_co]:
        """``async for batch in buffer``: batches without end, until the buffer is closed or its data has run out."""
        return BatchStream(functools.partial(self._next, None), is_finite=False)

    def epoch(self) -> BatchStream[DataT_co]:
        """``async for batch in buffer.epoch()``: what is left of the pass, or the next pass if none has begun.

        Several tasks may iterate over the object together; each batch goes to one of them.

        Raises:
            TypeError: the sampler has no passes.
        """
        self._check_passes("epoch")
        return BatchStream(functools.partial(self._next, EpochCursor()), is_finite=True)

    async def restart_epoch(self) -> int:
        """Leave out what is left of the pass, tickets that were drawn ahead included: the next batch begins a pass.

        For a pass that was broken off and shall not go on: ``epoch()`` alone goes on where it stopped. Calls that wait
        for a batch of the old pass still get it.

        Returns:
            How many tickets were dropped.

        Raises:
            TypeError: the sampler has no passes, or cannot end one.
        """
        self._check_passes("restart_epoch")
        await self._turn()
        return await self._gate.apply(self._parts.restart_epoch, exclusive=False)

    def _check_passes(self, call: str) -> None:
        if self._config.sampler.epoch is None:
            raise TypeError(f"{call}: expected a sampler with passes, found {type(self._config.sampler).__name__}")

    async def _next(self, cursor: EpochCursor | None) -> Batch[DataT_co] | None:
        """The step of a ``BatchStream``: the next batch, or None at its end."""
        if current_job() is not None:
            self._guard.check("sample", True)
        await self._turn()
        queue = self._parts.queue(None)
        batch = self._pipeline.take_now(queue, cursor)
        if batch is not None:
            return batch
        try:
            with self._guard.waiting("sample", True):
                return await self._pipeline.take(queue, cursor)
        except BufferClosedError:
            if self._life.state is State.NEW:
                raise
            return None

    async def skip(self) -> int | None:
        """Drop the ticket that is first in line, such as one that cannot be made.

        Returns:
            Its number; None if no ticket is in line.
        """
        await self._turn()
        return await self._gate.apply(
            functools.partial(self._parts.drawer.skip, self._parts.queue(None)), exclusive=False
        )

    async def flush(self) -> int:
        """Drop every ticket that was drawn ahead; the next batches are drawn from what is stored then.

        Returns:
            How many were dropped.
        """
        await self._turn()
        return await self._gate.apply(self._parts.drawer.flush, exclusive=False)

    # -- what it looks like -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of stored items."""
        return self._table.size

    @property
    def capacity(self) -> int:
        """Number of rows."""
        return self._storage.capacity

    @property
    def write_count(self) -> int:
        """Number of items ever written, overwritten ones included."""
        return self._table.write_count

    @property
    def batch_size(self) -> int | None:
        """Number of items of a batch; None if each call says its own."""
        return self._config.batch_size

    @property
    def generator(self) -> torch.Generator:
        """Randomness of the draws."""
        return self._generator

    def stats(self) -> BufferStats:
        """Counters, at this moment."""
        return self._parts.stats()

    def why_blocked(self) -> str:
        """In words, what waiting consumers and writers wait for, or what the last consumer that gave up waited for."""
        return self._parts.why_blocked()

    def __repr__(self) -> str:
        """The state in one line."""
        config = self._config
        return (
            f"<ReplayBuffer {self._life.state.value} {len(self)}/{self.capacity} items, "
            f"batch_size={config.batch_size}, prefetch={config.prefetch}, workers={config.workers}, "
            f"{type(config.sampler).__name__}>"
        )


@types.coroutine
def _one_turn() -> Generator[None, None, None]:
    """``asyncio.sleep(0)``, without the frames around it."""
    yield
