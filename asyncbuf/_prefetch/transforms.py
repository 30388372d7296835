"""From gathered rows to what a consumer gets: collate, combine, transforms, pinning, device.

A ticket may be interrupted at any time, by an error, the end of the buffer, or a snapshot that does not wait. It then
starts again from data that no function of the user has seen: what is kept of a ticket is never what a function gets.
So functions run in *units*, each with a private copy of its input and in a context of its own. A unit is all sync
functions up to the next async one; or one async function; or, in a chain with stateful transforms, any one function, so
that none of them runs twice. A quick chain that runs in the step of the gather needs no copy: the same rows can be
gathered again.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncbuf._prefetch.copies import is_small, private, private_draw
from asyncbuf._prefetch.device import DeviceTransfer
from asyncbuf._prefetch.gathered import Gathered, shaped
from asyncbuf._prefetch.offload import INLINE_BYTES
from asyncbuf._prefetch.pace import Pace
from asyncbuf._prefetch.steps import Pending, Step, has, is_stateful
from asyncbuf._prefetch.steps import mixed_seed as mixed_seed
from asyncbuf._runtime.reentry import Job, ReentryGuard
from asyncbuf._runtime.shield import shielded, without_loop
from asyncbuf._runtime.threads import Threads, finish
from asyncbuf.sampler.base import Sampler

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch

    from asyncbuf.batch import Draw

_NOT_COPIED = object()


class Partial(NamedTuple):
    """How far a ticket has come. Goes into a snapshot as ``step`` and ``data``.

    Attributes:
        step: number of the next function.
        data: its input. No function of the user holds a reference to it.
        pending: what a function of the next unit has returned already, to be awaited; None in all other cases.
    """

    step: int
    data: Any
    pending: Pending | None = None


class _Stretch:
    """What a thread has done.

    Attributes:
        progress: how far the ticket has come.
        pending: what a function returned that must be awaited, if one did.
        error: what a function raised, if one did. The units before it are part of ``progress``.
        copied: a private copy for the async function that is next.
    """

    __slots__ = ("copied", "error", "pending", "progress")

    def __init__(self, progress: Partial) -> None:
        self.progress = progress
        self.pending: Pending | None = None
        self.error: Exception | None = None
        self.copied: Any = _NOT_COPIED


class TransformChain:
    """Everything that is done to gathered rows, in order.

    Functions of the user see neither context variables nor torch modes of anybody else. What they set ends with them.

    Args:
        collate: turns gathered rows into batched tensors; None where they are.
        transforms: sync or async functions of the data. One that accepts ``generator`` gets a ``torch.Generator``
            seeded from its ticket and its position. They may change their input in place.
        foreign_collate: whether ``collate`` is the user's.
        takes_items: whether the storage gathers lists of stored items. ``collate`` then gets the items themselves in a
            list of its own.
        combine: ``combine(draw, data, joined)`` makes one tree of what was gathered for a draw with joins, after
            ``collate``. None if there are no such draws.
        device: where tensors go in the end; None leaves them.
        pin_memory: whether they are copied to page-locked memory first.
        guard: that of the buffer; refuses its calls from within these functions. One of its own if None.

    Raises:
        TypeError: a transform is not callable, or has ``state_dict`` without ``load_state_dict``.
        ValueError: there is no such device.
    """

    def __init__(
        self,
        collate: Callable[[Any], Any] | None,
        transforms: Sequence[Callable[..., Any]],
        *,
        foreign_collate: bool = False,
        takes_items: bool = False,
        combine: Callable[[Draw, Any, Any], Any] | None = None,
        device: torch.device | str | None = None,
        pin_memory: bool = False,
        guard: ReentryGuard | None = None,
    ) -> None:
        for transform in transforms:
            if not callable(transform):
                raise TypeError(f"transform: expected a callable, found {transform!r}")
            if has(transform, "state_dict") and not has(transform, "load_state_dict"):
                raise TypeError(f"transform: expected load_state_dict beside state_dict, found none in {transform!r}")
        self.transforms = tuple(transforms)
        # A transform whose state may change must see the batches in order, whatever the threads do.
        self.ordered = any(map(is_stateful, transforms))
        self._collates, self._foreign_collate, self._takes_items = collate is not None, foreign_collate, takes_items
        self._combines = _combining(combine)
        steps = [] if collate is None else [Step(collate, "collate_fn", is_foreign=foreign_collate)]
        steps += [Step.of(transform, index) for index, transform in enumerate(transforms)]
        self._delivery = DeviceTransfer(device, pin_memory)
        if self._delivery.is_needed:
            steps.append(Step(self._delivery, "device"))
        self.delivers = self._delivery.is_needed
        self.handed_over = self._delivery.handed_over if self._delivery.waits else None
        self.steps = tuple(steps)
        self._ends = [_unit_end(self.steps, start, ordered=self.ordered) for start in range(len(steps) + 1)]
        units = [self.steps[start:end] for start, end in enumerate(self._ends)]
        self._needs_copy = [any(step.is_foreign for step in unit) for unit in units]
        self._guard = ReentryGuard() if guard is None else guard
        # Functions that are quick are not worth a thread, unless they do not finish what they began.
        waits = self._delivery.waits or any(step.is_async for step in self.steps)
        self._may_be_quick = not self.ordered and not waits
        self._pace = Pace()

    @property
    def is_empty(self) -> bool:
        """Whether what is gathered is handed over as it is, whatever the draw."""
        return not self.steps and self._combines is None

    @property
    def combines(self) -> bool:
        """Whether joins are combined here, and not as soon as their rows are there."""
        return self._combines is not None

    @property
    def with_state(self) -> list[int]:
        """Which transforms have a ``state_dict``. They are not asked for it: they may be at work."""
        return [i for i, transform in enumerate(self.transforms) if has(transform, "state_dict")]

    def states(self) -> list[Any]:
        """The state of each transform; None for one that has no ``state_dict``."""
        return [getattr(t, "state_dict")() if has(t, "state_dict") else None for t in self.transforms]  # noqa: B009

    @property
    def quick(self) -> bool:
        """Whether the chain runs so fast that a thread would cost more than it saves."""
        return not self.steps or (self._may_be_quick and self._pace.is_quick)

    def runs_here(self, progress: Partial) -> bool:
        """Whether ``run_here`` is the way to go on with a ticket."""
        if progress.step or progress.pending is not None:
            return False
        return self.quick and (type(progress.data) is not Gathered or self._pace.is_quick)

    def is_done(self, progress: Partial) -> bool:
        """Whether a ticket has come to the end of the chain."""
        return progress.step == len(self.steps) and progress.pending is None and type(progress.data) is not Gathered

    def run_here(self, data: Any, seed: int, queue: object = None, *, is_own: bool = False) -> Partial:
        """Run a quick chain on the event loop.

        Args:
            data: the gathered rows.
            seed: the seed of the ticket.
            queue: where the ticket stands, for the guard.
            is_own: whether functions may change the data. If not, it stays as it is.

        Returns:
            The end of the chain; or, if it has not come to that, where ``run`` must go on.
        """
        gathered = Partial(0, data)
        if self.is_done(gathered):
            return gathered
        job = Job(self._guard, queue)
        start = time.perf_counter()
        try:
            step, result = job.run(without_loop, self._run_unit, gathered, seed, is_own)
        except BaseException:
            job.is_over = True
            raise
        if isinstance(result, Awaitable):
            self._may_be_quick = False
            return Partial(0, data, Pending(step, result, job))
        job.is_over = True
        seconds = time.perf_counter() - start
        self._pace.note(seconds, seconds)
        return Partial(step, result)

    async def run(
        self, progress: Partial, seed: int, threads: Threads, keep: Callable[[Partial], None], queue: object = None
    ) -> None:
        """Run what is left of the chain, sync functions in a thread.

        Args:
            progress: where to start.
            seed: the seed of the ticket.
            threads: where sync functions run.
            keep: is told how far the ticket has come, before anything else can happen.
            queue: where the ticket stands, for the guard.
        """
        pending, copied = progress.pending, _NOT_COPIED
        if pending is not None:
            progress = progress._replace(pending=None)
            keep(progress)  # a second try starts again from the data
        while pending is not None or not self.is_done(progress):
            if pending is None and self._is_sync(progress):
                future = threads.transform(self._run_sync, progress, seed, queue)
                progress, pending, copied = await self._kept(future, progress, keep)
                continue
            if pending is not None:
                progress = await self._awaited(pending)
            else:
                data = await _copied(progress.data, threads) if copied is _NOT_COPIED else copied
                progress = await self._run_async(progress.step, data, seed, queue)
                del data  # it may be large, and is the function's alone
            pending, copied = None, _NOT_COPIED
            keep(progress)

    # -- sync functions ------------------------------------------------------------------------------------------------

    def _is_sync(self, progress: Partial) -> bool:
        """Whether there is anything to do before the next async function."""
        return progress.step < self._ends[progress.step] or type(progress.data) is Gathered

    async def _kept(
        self, future: Future[_Stretch], progress: Partial, keep: Callable[[Partial], None]
    ) -> tuple[Partial, Pending | None, Any]:
        """Wait for a thread. What it has done is kept, even if it failed or the task was cancelled."""
        cancelled = await finish(future)
        try:
            stretch = future.result()
            if stretch.progress is not progress:
                keep(stretch.progress)
            error, stretch.error = stretch.error or cancelled, None
            try:
                if error is not None:
                    raise error
            finally:
                del error
        finally:
            del cancelled  # the error holds this frame, which must not hold the error
        return stretch.progress, stretch.pending, stretch.copied

    def _run_sync(self, progress: Partial, seed: int, queue: object) -> _Stretch:
        """Run units up to the next async function, or to a function that returns an awaitable. In a thread."""
        stretch = _Stretch(progress)
        job = Job(self._guard, queue, in_thread=True)
        start, at_work = time.perf_counter(), time.thread_time()
        try:
            while self._is_sync(stretch.progress) and stretch.pending is None:
                step, result = job.run(self._run_unit, stretch.progress, seed)
                if isinstance(result, Awaitable):
                    stretch.pending = Pending(step, result, job)
                else:
                    stretch.progress = Partial(step, result)
            if stretch.pending is None:
                self._pace.note(time.perf_counter() - start, time.thread_time() - at_work)
                if not self.is_done(stretch.progress):
                    stretch.copied = private(stretch.progress.data)
        except Exception as error:
            stretch.error = error
        finally:
            job.in_thread, job.is_over = False, stretch.pending is None
        if stretch.pending is not None or job.called_out:
            self._may_be_quick = False  # on the event loop, it would wait for the event loop
        return stretch

    def _run_unit(self, progress: Partial, seed: int, is_own: bool = False) -> tuple[int, Any]:
        """Run one unit: the step after it, and what came out. That may be an awaitable, which ends it early."""
        step, data = progress.step, progress.data if is_own else self._input(progress)
        end = self._ends[step]
        if type(data) is Gathered:
            step, data = int(self._collates), self._combined(data, seed)
            end = step if self.ordered else self._ends[step]
        while step < end:
            data = self.steps[step](data, seed)
            step += 1
            if isinstance(data, Awaitable):
                break
        return step, data

    def _input(self, progress: Partial) -> Any:
        """What a unit gets: a private copy of the data, if a function in it may change that."""
        step, data = progress.step, progress.data
        if type(data) is Gathered:
            return self._private(data)
        if not self._needs_copy[step]:
            return data
        if step == 0 and self._collates and self._takes_items and type(data) is list:
            return list(data)  # the items are the storage's: whoever changes them changes what is stored
        return private(data)

    # -- draws with joins ----------------------------------------------------------------------------------------------

    def _private(self, gathered: Gathered) -> Gathered:
        draw, data, joined = gathered.draw, gathered.data, gathered.joined
        is_foreign = self._combines is not None and self._combines.is_foreign
        if self._takes_items:
            data, joined = list(data), {name: list(part) for name, part in joined.items()}
        elif is_foreign or self._needs_copy[0]:
            data, joined = private((data, joined))
        return Gathered(private_draw(draw) if is_foreign else draw, data, joined)

    def _combined(self, gathered: Gathered, seed: int) -> Any:
        """One tree of what was gathered for a draw, collated before."""
        draw, data, joined = gathered.draw, gathered.data, gathered.joined
        if self._collates:
            data = self._collated(data, draw.shape, seed)
            joined = {name: self._collated(part, draw.joins[name].shape, seed) for name, part in joined.items()}
        if not joined:
            return data
        if self._combines is None:
            raise TypeError("combine: expected a function, because the draw has joins; found None")
        return _at_once(self._combines(Gathered(draw, data, joined), seed), "combine")

    def _collated(self, items: Any, shape: Sequence[int] | None, seed: int) -> Any:
        data = _at_once(self.steps[0](items, seed), "collate_fn")
        is_flat = shape is None or len(shape) == 1
        return data if is_flat or not self._takes_items or self._foreign_collate else shaped(data, shape or ())

    # -- async functions -----------------------------------------------------------------------------------------------

    async def _run_async(self, step: int, data: Any, seed: int, queue: object) -> Partial:
        return Partial(step + 1, await Job(self._guard, queue).wait(self.steps[step].call, data, seed))

    async def _awaited(self, pending: Pending) -> Partial:
        step = self.steps[pending.step - 1]
        return Partial(pending.step, await pending.job.wait(step.wait, pending.awaitable))


async def _copied(data: Any, threads: Threads) -> Any:
    if is_small(data, INLINE_BYTES):
        return shielded(private, data)
    future = threads.transform(private, data)
    cancelled = await finish(future)
    try:
        if cancelled is not None:
            raise cancelled
    finally:
        del cancelled
    return future.result()


def _unit_end(steps: Sequence[Step], start: int, *, ordered: bool) -> int:
    """The step after the unit that begins at ``start``; ``start`` itself before an async function and at the end."""
    end = start
    while end < len(steps) and not steps[end].is_async:
        end += 1
        if ordered:
            break
    return end


def _combining(combine: Callable[[Draw, Any, Any], Any] | None) -> Step | None:
    if combine is None:
        return None
    is_foreign = getattr(combine, "__func__", combine) is not Sampler.combine
    return Step(lambda part: combine(part.draw, part.data, part.joined), "combine", is_foreign=is_foreign)


def _at_once(result: Any, name: str) -> Any:
    """The result of a function that must not be async.

    Raises:
        TypeError: it returned an awaitable.
    """
    if not isinstance(result, Awaitable):
        return result
    if inspect.iscoroutine(result):
        result.close()
    raise TypeError(f"{name}: expected data, because the draw has joins or a shape; found an awaitable: make it sync")
