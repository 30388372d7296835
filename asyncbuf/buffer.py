"""The buffer: puts the parts together."""

from __future__ import annotations

import asyncio
import functools
import types
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch

from asyncbuf._prefetch.offload import WRITE_INLINE_BYTES
from asyncbuf._prefetch.pipeline import Pipeline
from asyncbuf._prefetch.transforms import TransformChain
from asyncbuf._runtime.arguments import count, expect
from asyncbuf._runtime.reentry import ReentryGuard, current_job
from asyncbuf._runtime.threads import finish
from asyncbuf._table.gate import HistoryGate
from asyncbuf._table.table import Table
from asyncbuf.checkpoint.snapshot import Config
from asyncbuf.checkpoint.snapshotter import Snapshotter
from asyncbuf.errors import AsyncBufError, BufferClosedError, WrongLoopError
from asyncbuf.sampler import RandomSampler, Sampler
from asyncbuf.stats import BufferStats
from asyncbuf.storage import Prepared, Storage
from asyncbuf.stream import BatchStream
from asyncbuf.writer import Placement, RoundRobinWriter, Writer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Generator
    from types import TracebackType

    from asyncbuf._prefetch.queue import TicketQueue
    from asyncbuf.batch import Batch

Transform = Callable[..., Any]


class ReplayBuffer(Snapshotter):
    """A replay buffer and prefetching sampler for asyncio.

    Coroutines write items in with ``extend`` and ``add`` and await batches with ``sample`` and ``async for``. All calls
    belong to one event loop; writes and draws take effect in the order of the calls.

    Args:
        storage: where items live.
        sampler: which rows a batch takes; ``RandomSampler()`` if None.
        writer: which rows new items take; ``RoundRobinWriter()`` if None.
        batch_size: number of items of a batch. None if each call of ``sample`` says its own; nothing is prefetched
            then.
        prefetch: how many batches are prepared ahead of those asked for, from 0.
        workers: how many batches are gathered and transformed at once, from 1. A large batch that is waited for is
            gathered by up to four threads together, one for each core.
        min_size: consumers wait until this many items are stored, from 1.
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
        min_size: int = 1,
        transform: Transform | Sequence[Transform] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        device: torch.device | str | None = None,
        pin_memory: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        expect(storage, Storage, "storage")
        self._sampler: Sampler = expect(RandomSampler() if sampler is None else sampler, Sampler, "sampler")
        self._writer: Writer = expect(RoundRobinWriter() if writer is None else writer, Writer, "writer")
        if generator is None:
            generator = torch.Generator()
            generator.seed()
        self._generator: torch.Generator = expect(generator, torch.Generator, "generator")
        self._batch_size = None if batch_size is None else count(batch_size, "batch_size", 1)
        self._prefetch = count(prefetch, "prefetch", 0)
        if self._prefetch and self._batch_size is None:
            raise ValueError(f"batch_size: expected one, because prefetch is {prefetch}; found None")
        self._workers = count(workers, "workers", 1)
        min_size = count(min_size, "min_size", 1)
        if min_size > storage.capacity:
            raise ValueError(f"min_size: expected at most the capacity {storage.capacity}, found {min_size}")
        kind = type(self._sampler)
        if kind.state_dict is not Sampler.state_dict and kind.load_state_dict is Sampler.load_state_dict:
            raise TypeError(f"{kind.__name__}: expected load_state_dict beside its state_dict, found none")
        if self._batch_size is not None:
            self._sampler.check(storage.capacity, self._batch_size)
        self._storage = storage
        # Those in line, those being made, and those that consumers work on.
        storage.expect(self._prefetch + self._workers + 2)
        self._gate = HistoryGate()
        self._table = Table(storage, self._writer, self._sampler, self._generator, min_size)
        if collate_fn is not None and not callable(collate_fn):
            raise TypeError(f"collate_fn: expected a callable, found {collate_fn!r}")
        collate = collate_fn if collate_fn is not None else storage.collate if storage.needs_collate else None
        self._guard = ReentryGuard()
        chain = TransformChain(
            collate,
            _listed(transform),
            foreign_collate=collate_fn is not None,
            takes_items=storage.needs_collate,
            device=device,
            pin_memory=pin_memory,
            guard=self._guard,
        )
        # Others can make a batch that a transform waits for, unless all must wait for that transform.
        self._guard.helpers = 0 if chain.ordered else self._workers - 1
        self._pipeline = Pipeline(
            self._table,
            chain,
            self._gate,
            batch_size=self._batch_size,
            prefetch=self._prefetch,
            workers=self._workers,
        )
        self._config = Config(self._batch_size, self._prefetch)
        self._arguments = {
            "storage": storage,
            "sampler": self._sampler,
            "writer": self._writer,
            "batch_size": batch_size,
            "prefetch": prefetch,
            "workers": workers,
            "min_size": min_size,
            "transform": list(chain.transforms),
            "collate_fn": collate_fn,
            "device": device,
            "pin_memory": pin_memory,
        }
        self._frozen_by: asyncio.Task[Any] | None = None
        self._state = "new"
        self._loop: asyncio.AbstractEventLoop | None = None

    async def open(self) -> Self:
        """Start the background work. A closed buffer may be opened again: it goes on where it was.

        Returns:
            The buffer.

        Raises:
            AsyncBufError: it is open already, or is still being closed.
        """
        if self._state == "closing" and self._pipeline.is_closed:
            self._state = "closed"  # nobody waited for the end
        if self._state not in ("new", "closed"):
            raise AsyncBufError(f"open: expected a buffer that is not open, found one that is {self._state}")
        self._state = "open"
        self._loop = asyncio.get_running_loop()
        try:
            await self._pipeline.open()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def aclose(self, timeout: float | None = None) -> None:
        """End the background work. Whoever waits is told at once; tickets that nobody took stay for the next ``open``.

        Does nothing on a buffer that is not open. Safe to call from any task, and again.

        Args:
            timeout: how long to wait for transforms that still run in threads, in seconds; None waits for them.

        Raises:
            TimeoutError: a thread still runs. It is left to end by itself, and the buffer closes when it does.
        """
        if self._state in ("new", "closed"):
            return
        self._guard.check_close()
        if not (self._pipeline.is_closed and self._loop is not None and self._loop.is_closed()):
            self._check_loop()
        self._state = "closing"
        self._pipeline.begin_close()
        if not await self._pipeline.closed(timeout):
            raise TimeoutError(f"aclose: after {timeout} s a transform still runs in a thread")
        if self._state == "closing":  # else another task has closed, and perhaps opened, it meanwhile
            self._state = "closed"

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
        if getattr(self, "_state", "new") != "open" or self._loop is None or self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._pipeline.begin_close)
        warnings.warn(f"{self!r} was dropped while it was open", ResourceWarning, source=self, stacklevel=2)

    def _check_loop(self) -> None:
        running = asyncio._get_running_loop()
        if self._loop not in (None, running) and self._state not in ("new", "closed"):
            found = "no running event loop" if running is None else f"{running!r}"
            raise WrongLoopError(
                f"expected the event loop that opened the buffer, {self._loop!r}; found {found} "
                "(asyncio.run_coroutine_threadsafe reaches it from another thread)"
            )

    def _turn(self, *, within_frozen: bool = False) -> Awaitable[None]:
        """Give every other coroutine a turn, then ask: a loop of calls that never have to wait starves nobody."""
        if self._loop is not asyncio._get_running_loop():
            self._check_loop()
        if self._frozen_by is not None and not within_frozen:
            self._check_not_frozen()
        return _one_turn()

    # -- writing ------------------------------------------------------------------------------------------------------

    async def extend(self, items: Any) -> torch.Tensor:
        """Write items: all of them or, with an error, none.

        A call that is cancelled while it waits for its turn has written none. Once a thread copies them, which it does
        with more than 1 MiB, all of them are written before the call ends as cancelled.

        Args:
            items: a tree whose leaves have shape ``[items, *item]``, which are copied; for ``ListStorage`` a sequence
                of items, which are kept as they are. Of more items than the capacity the last ones stay.

        Returns:
            The rows of the items that stay, in order: int64 ``[min(items, capacity)]``.

        Raises:
            SchemaError: keys, shapes or dtypes differ from those of the items before, or there is no item.
            BufferClosedError: the buffer was closed, or ``finish`` was called.
            BufferFailedError: the background work ended.
        """
        return await self._write(self._storage.prepare, items)

    async def add(self, item: Any) -> int | None:
        """Write one item, whose leaves have no leading axis; otherwise as ``extend``.

        Returns:
            Its row; None if the writer does not keep it.
        """
        rows = await self._write(self._storage.prepare_one, item)
        return int(rows[0]) if len(rows) else None

    async def _write(self, prepare: Callable[[Any], Prepared], items: Any) -> torch.Tensor:
        await self._turn()
        self._check_writable()
        prepared = prepare(items)
        if prepared.nbytes > WRITE_INLINE_BYTES:
            return await self._write_in_thread(prepared, prepare, items)
        if self._gate.is_free_for_writes:
            return self._gate.run_now(self._write_here, prepared)
        async with self._gate.turn(exclusive=True):
            return self._write_here(self._confirmed(prepared, prepare, items))

    def _write_here(self, prepared: Prepared) -> torch.Tensor:
        placement = self._table.place(prepared)
        self._storage.write(prepared, placement.runs)
        return self._commit(placement)

    async def _write_in_thread(
        self, prepared: Prepared, prepare: Callable[[Any], Prepared], items: Any
    ) -> torch.Tensor:
        threads = self._pipeline.fetcher.threads
        async with self._gate.turn(exclusive=True):
            prepared = self._confirmed(prepared, prepare, items)
            placement = self._table.place(prepared)
            copied = threads.copy(self._storage.write, prepared, placement.runs)
            cancelled = await finish(copied)
            copied.result()
            rows = self._commit(placement)
        if self._state in ("new", "closed"):
            threads.abandon()  # nobody would end them later
        try:
            if cancelled is not None:
                raise cancelled
        finally:
            del cancelled
        return rows

    def _confirmed(self, prepared: Prepared, prepare: Callable[[Any], Prepared], items: Any) -> Prepared:
        """What was prepared, now that its turn has come: writes before it may have closed or shaped the buffer."""
        self._check_writable()
        return prepared if self._storage.is_current(prepared) else prepare(items)

    def _commit(self, placement: Placement) -> torch.Tensor:
        rows = self._table.commit(placement)
        self._pipeline.written()
        return rows

    def _check_writable(self) -> None:
        if self._state != "new" and (error := self._pipeline.unusable) is not None:
            raise error
        if self._pipeline.finished:
            raise BufferClosedError("finish() was called: the buffer takes no more items")

    async def finish(self) -> None:
        """Say that no more items will come. Whoever waits for data that cannot come any more is told at once.

        ``extend`` and ``add`` raise from here on. Batches can be had as long as enough items are stored.
        """
        await self._turn()
        await self._gate.apply(self._pipeline.finish, exclusive=False)

    async def empty(self) -> None:
        """Forget every item, and the tickets drawn from them; ``write_count`` and the numbers of tickets go on."""
        await self._turn()
        await self._gate.apply(self._clear, exclusive=True)

    def _clear(self) -> None:
        self._table.clear()
        self._pipeline.flush()

    async def update_priority(self, indices: Any, priority: Any) -> None:
        """Tell the sampler new priorities; samplers without priorities ignore them.

        Args:
            indices: rows, as in ``batch.indices``: integers ``[n]``.
            priority: float ``[n]``, or one number for all.

        Raises:
            TypeError, ValueError, IndexError: they do not fit each other or the storage.
        """
        await self._turn()
        await self._gate.apply(functools.partial(self._table.update_priority, indices, priority), exclusive=False)

    # -- reading ------------------------------------------------------------------------------------------------------

    async def sample(self, batch_size: int | None = None) -> Batch:
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
            self._guard.check("sample", batch_size in (None, self._batch_size))
        await self._turn()
        line = self._pipeline.main_line
        if line is None or batch_size is not None:
            line = self._line(batch_size)
        batch = self._pipeline.take_now(line)
        if batch is None:
            with self._guard.waiting("sample", line is self._pipeline.main_line):
                batch = await self._pipeline.take(line)
            assert batch is not None  # only a call for a certain pass gets none
        return batch

    def _line(self, batch_size: int | None) -> TicketQueue:
        if batch_size is not None:
            batch_size = count(batch_size, "batch_size", 1)
            self._sampler.check(self.capacity, batch_size)
        elif self._pipeline.main_line is None:
            raise ValueError("batch_size: expected one, because the buffer was made without; found None")
        else:
            return self._pipeline.main_line
        return self._pipeline.line(batch_size)

    def __aiter__(self) -> BatchStream:
        """``async for batch in buffer``: batches without end, until the buffer is closed or its data has run out."""
        return BatchStream(self, one_pass=False)

    def epoch(self) -> BatchStream:
        """``async for batch in buffer.epoch()``: what is left of the pass, or the next pass if none has begun.

        Several tasks may iterate over the object together; each batch goes to one of them.

        Raises:
            TypeError: the sampler has no passes.
        """
        if self._sampler.epoch is None:
            raise TypeError(f"epoch: expected a sampler with passes, found {type(self._sampler).__name__}")
        return BatchStream(self, one_pass=True)

    async def next_of(self, stream: BatchStream) -> Batch | None:
        """The step of a ``BatchStream``: the next batch, or None at the end of its pass."""
        if current_job() is not None:
            self._guard.check("sample", True)
        await self._turn()
        line = self._line(None)
        batch = self._pipeline.take_now(line, stream.within)
        if batch is None:
            with self._guard.waiting("sample", True):
                batch = await self._pipeline.take(line, stream.within)
        return batch

    @property
    def was_opened(self) -> bool:
        """Whether the buffer is or was open."""
        return self._state != "new"

    async def skip(self) -> int | None:
        """Drop the ticket that is first in line, such as one that cannot be made.

        Returns:
            Its number; None if no ticket is in line.
        """
        await self._turn()
        return await self._gate.apply(functools.partial(self._pipeline.skip, self._line(None)), exclusive=False)

    async def flush(self) -> int:
        """Drop every ticket that was drawn ahead; the next batches are drawn from what is stored then.

        Returns:
            How many were dropped.
        """
        await self._turn()
        return await self._gate.apply(self._pipeline.flush, exclusive=False)

    # -- what it looks like -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of stored items."""
        return self._writer.size

    @property
    def capacity(self) -> int:
        """Number of rows."""
        return self._storage.capacity

    @property
    def write_count(self) -> int:
        """Number of items ever written, overwritten ones included."""
        return self._writer.write_count

    @property
    def batch_size(self) -> int | None:
        """Number of items of a batch; None if each call says its own."""
        return self._batch_size

    @property
    def generator(self) -> torch.Generator:
        """Randomness of the draws."""
        return self._generator

    def stats(self) -> BufferStats:
        """Counters, at this moment."""
        pipeline = self._pipeline
        return BufferStats(
            size=len(self),
            capacity=self.capacity,
            write_count=self.write_count,
            drawn=pipeline.drawn,
            delivered=pipeline.delivered,
            dropped=pipeline.dropped,
            queued=pipeline.queued,
            in_flight=pipeline.in_flight,
            waiting_consumers=pipeline.waiting,
            waiting_writers=self._gate.waiting_writers,
            peak_queued=pipeline.peak_queued,
            gather_seconds=pipeline.fetcher.gather_seconds,
            wait_seconds=pipeline.wait_seconds,
            retries=pipeline.retries,
            inline_gathers=pipeline.fetcher.inline_gathers,
            thread_gathers=pipeline.fetcher.thread_gathers,
        )

    def why_blocked(self) -> str:
        """In words, what waiting consumers and writers wait for, or what the last consumer that gave up waited for."""
        reasons = self._pipeline.blocked()
        if writers := self._gate.waiting_writers:
            behind = (
                "a write in a thread" if self._gate.writing else f"{self._gate.readers} gather(s) of earlier batches"
            )
            reasons.append(f"{writers} writer(s) wait behind {behind}")
        if reasons:
            return "; ".join(reasons)
        last = self._pipeline.gave_up
        return "nobody waits" if last is None else f"nobody waits now; when a call last gave up, {last}"

    def __repr__(self) -> str:
        """The state in one line."""
        return (
            f"<ReplayBuffer {self._state} {len(self)}/{self.capacity} items, batch_size={self._batch_size}, "
            f"prefetch={self._prefetch}, workers={self._workers}, {type(self._sampler).__name__}>"
        )


@types.coroutine
def _one_turn() -> Generator[None, None, None]:
    """``asyncio.sleep(0)``, without the frames around it."""
    yield


def _listed(transform: Transform | Sequence[Transform] | None) -> list[Transform]:
    return [] if transform is None else list(transform) if isinstance(transform, Sequence) else [transform]
