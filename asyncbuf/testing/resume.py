"""Is a resumed stream the one that was interrupted? For tests of your own samplers, transforms and whole buffers."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import inspect
import itertools
import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeVar, cast

import torch

from asyncbuf._plain import tree
from asyncbuf.batch import Batch
from asyncbuf.protocols import Replay, Snapshotable
from asyncbuf.testing._contract import check_arguments
from asyncbuf.testing.compare import assert_same_batch, difference

if TYPE_CHECKING:
    from asyncbuf.stats import BufferStats

T = TypeVar("T")
Played = tuple[list[Batch], dict[str, Any]]  # what came, and the state in the end


class Resumable(Replay[Any], Snapshotable, Protocol):
    """What is checked: a buffer that can be saved and says how it is."""

    def stats(self) -> BufferStats:
        """Counters, at this moment."""
        ...

    def why_blocked(self) -> str:
        """In words, what calls wait for."""
        ...


BufferT = TypeVar("BufferT", bound=Resumable)
Factory = Callable[[], BufferT | Awaitable[BufferT]]
Feed = Callable[[BufferT, int, Batch], Awaitable[object]]

WAYS = ("snapshot", "state_dict", "directory", "pickle")  # the last two reach another process


async def assert_exact_resume(
    factory: Factory[BufferT],
    *,
    steps: int = 12,
    at: Iterable[int] | Literal["every"] = "every",
    ways: Sequence[str] = WAYS,
    elastic_factory: Factory[BufferT] | None = None,
    feed: Feed[BufferT] | None = None,
    in_flight: bool = True,
    hops: int = 2,
    new_process: bool = False,
    seconds: float = 60.0,
) -> None:
    """Save a buffer at many points of its stream, restore each, and compare what comes then with the original.

    Number, indices, info, epoch, last and data must be the same bit for bit, and the state in the end, too. A last run
    is saved and restored over and over::

        async def make() -> ReplayBuffer:
            generator = torch.Generator().manual_seed(0)
            buffer = ReplayBuffer(TensorStorage(99), sampler=MySampler(), batch_size=8, prefetch=2, generator=generator)
            await buffer.extend({"obs": torch.arange(50.0)})
            return buffer

        async def write(buffer: ReplayBuffer, step: int, batch: Batch) -> None:
            await buffer.extend({"obs": torch.full((3,), float(step))})
            await buffer.update_priority(batch.indices, batch["obs"].abs())

        await assert_exact_resume(make, feed=write)

    Args:
        factory: makes a new buffer that is not open, always the same; may be async, to write items.
        steps: number of batches of the stream.
        at: after how many batches it is saved, from 0 to ``steps``.
        ways: which of ``WAYS``; pickling needs a buffer of which every part is picklable.
        elastic_factory: makes a buffer of another prefetch depth or batch size, which is restored with ``elastic``.
            With another batch size, or with ``feed``, only the batches that were in line are compared.
        feed: awaited after each batch. May write and update priorities, in ways that follow from step and batch alone.
        in_flight: whether to save at each point with a consumer waiting, too.
        hops: how many times in a row the last run is saved and restored at each point; 0 leaves that run out.
        new_process: whether directories and pickles are restored in another process, too; ``factory`` and ``feed`` must
            be importable there.
        seconds: how long a batch or a snapshot may take.

    Raises:
        AssertionError: a stream differs, says way, point, step, and what differs; or two runs of the factory do.
        TypeError, ValueError: an argument is of another kind; ``feed`` is no coroutine function; or there is
            no such way or point.
    """
    check_arguments(factory=factory, steps=steps, hops=hops, seconds=seconds)
    points = range(steps + 1) if at == "every" else list(at)
    if unknown := [*(set(ways) - set(WAYS)), *(set(points) - set(range(steps + 1)))]:
        raise ValueError(f"expected ways of {WAYS} and points from 0 to {steps}, found {unknown}")
    with tempfile.TemporaryDirectory(prefix="asyncbuf-") as folder:
        check = _Check(factory, elastic_factory, feed, steps, seconds, folder, ([], {}))
        async with await check.made() as buffer:
            check = check._replace(original=await check.play(buffer, 0))
        await check.reproducible()
        jobs = await check.save(points, ways)
        if in_flight:
            jobs += await check.save(points, ways, waiting=True)
        await check.resume_all(jobs)
        for route in [*((way,) for way in ways), ways] if hops else []:
            await check.hop(points, route, hops)
        if new_process:
            jobs = [job._replace(where=f"{job.where}, in a new process") for job in jobs if job.way in WAYS[2:]]
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                await asyncio.wrap_future(pool.submit(_resume_here, pickle.dumps((check, jobs))))


class _Saved(NamedTuple):
    """A buffer that was saved."""

    way: str
    what: Any  # the snapshot, state dict, path or pickle
    where: str  # way and point in words
    start: int  # how many batches had been handed over
    fed: int  # how many of them feed() had seen
    queued: int  # how many were in line


class _Check(NamedTuple, Generic[BufferT]):
    """What is checked, and the stream that came uninterrupted."""

    factory: Factory[BufferT]
    elastic_factory: Factory[BufferT] | None
    feed: Feed[BufferT] | None
    steps: int
    seconds: float
    folder: str
    original: Played

    async def made(self, *, elastic: bool = False) -> BufferT:
        made = (self.elastic_factory if elastic and self.elastic_factory else self.factory)()
        return await made if inspect.isawaitable(made) else made

    async def play(self, buffer: BufferT, start: int) -> Played:
        batches = [await self.step(buffer, number) for number in range(start, self.steps)]
        return batches, await self.soon(buffer.state_dict(), buffer)

    async def reproducible(self) -> None:
        """Compare two runs that nobody interrupts: else nothing could be said of one that is resumed."""
        async with await self.made() as buffer:
            batches, _ = await self.play(buffer, 0)
        hint = "two runs of the factory differ (a generator without a seed, or the global one, in a part or a feed?)"
        self.same(0, batches, hint)

    async def step(self, buffer: BufferT, number: int, asked: Awaitable[Batch] | None = None) -> Batch:
        batch = await self.soon(buffer.sample() if asked is None else asked, buffer)
        kept = _kept(batch)
        await self.fed(buffer, number, batch)
        return kept

    async def fed(self, buffer: BufferT, number: int, batch: Batch) -> None:
        """Await the feed, if there is one."""
        if self.feed is None:
            return
        answer = self.feed(buffer, number, batch)
        if not inspect.isawaitable(answer):
            raise TypeError(f"feed: expected a coroutine function (async def), found one that returned {answer!r}")
        await answer

    async def soon(self, awaitable: Awaitable[T], buffer: BufferT) -> T:
        try:
            async with asyncio.timeout(self.seconds):
                return await awaitable
        except TimeoutError:
            raise AssertionError(
                f"nothing came within {self.seconds} s from {buffer!r}: {buffer.why_blocked()}"
            ) from None

    async def save(self, points: Collection[int], ways: Sequence[str], *, waiting: bool = False) -> list[_Saved]:
        """Save at each point of one run."""
        jobs: list[_Saved] = []
        async with await self.made() as buffer:
            for step in range(self.steps + 1):
                asked = asyncio.create_task(buffer.sample()) if waiting and step < self.steps else None
                if step in points:
                    jobs += await self.save_at(buffer, step, ways, ", with a consumer waiting" if waiting else "")
                if step < self.steps:
                    self.same(step, [await self.step(buffer, step, asked)], "the run that was saved")
        return jobs

    async def save_at(self, buffer: BufferT, step: int, ways: Sequence[str], beside: str) -> list[_Saved]:
        """Save in each way, at one moment. A consumer that gets its batch before that has been served."""
        before = buffer.stats().delivered
        async with buffer.frozen():
            stats, where = buffer.stats(), f"saved after {step} batches{beside}"
            saved = [(way, await _saved(buffer, way, self.folder)) for way in ways]
        start = step + stats.delivered - before
        return [_Saved(way, what, f"{way}, {where}", start, step, stats.queued) for way, what in saved]

    async def resume_all(self, jobs: Sequence[_Saved]) -> None:
        """Go on from what was saved, and compare."""
        for saved in jobs:
            batches, end = await self.resumed(saved)
            self.same(saved.start, batches, saved.where)
            if (what := difference(end, self.original[1])) is not None:
                raise AssertionError(f"{saved.where}, the state at the end differs (no draw did): {what}")
            if self.elastic_factory is None or saved.way == "pickle":
                continue
            batches, end = await self.resumed(saved, elastic=True)
            # Draws between writes depend on the depth; what was drawn before does not.
            if self.feed is not None or end["config"] != self.original[1]["config"]:
                del batches[saved.queued :]
            self.same(saved.start, batches, f"{saved.where}, elastic")

    async def resumed(self, saved: _Saved, *, elastic: bool = False) -> Played:
        try:
            async with await self.restored(saved, elastic=elastic) as buffer:
                if saved.fed < saved.start:
                    await self.fed(buffer, saved.fed, self.original[0][saved.fed])
                return await self.play(buffer, saved.start)
        except Exception as error:
            error.add_note(f"resumed from {saved.where}")
            raise

    async def restored(self, saved: _Saved, *, elastic: bool = False) -> BufferT:
        if saved.way == "pickle":
            return cast("BufferT", pickle.loads(saved.what))
        buffer = await self.made(elastic=elastic)
        load = buffer.restore if saved.way == "snapshot" else buffer.load
        await (buffer.load_state_dict if saved.way == "state_dict" else load)(saved.what, elastic=elastic)
        return buffer

    async def hop(self, points: Collection[int], route: Sequence[str], hops: int) -> None:
        """One run that is saved and restored at every point, in one way after the other."""
        where = f"{' and '.join(route)}, saved and restored {hops} times at each point"
        ways = itertools.cycle(route)
        buffer = await (await self.made()).open()
        try:
            for step in range(self.steps + 1):
                for way in itertools.islice(ways, hops if step in points else 0):
                    async with buffer.frozen() if way == "pickle" else contextlib.nullcontext():
                        what = await _saved(buffer, way, self.folder)
                    await buffer.aclose()
                    buffer = await (await self.restored(_Saved(way, what, where, step, step, 0))).open()
                if step < self.steps:
                    self.same(step, [await self.step(buffer, step)], where)
        finally:
            await buffer.aclose()

    def same(self, start: int, batches: Sequence[Batch], where: str) -> None:
        for step, batch in enumerate(batches, start):
            assert_same_batch(batch, self.original[0][step], f"{where}, step {step}")


async def _saved(buffer: Resumable, way: str, folder: str) -> Any:
    if way != "directory":
        ways = {"snapshot": buffer.snapshot, "state_dict": buffer.state_dict}
        return await ways[way]() if way in ways else _pickled(buffer)
    path = os.path.join(tempfile.mkdtemp(dir=folder), "checkpoint")
    await buffer.save(path)
    return path


def _pickled(buffer: Resumable) -> bytes:
    try:
        return pickle.dumps(buffer)
    except Exception as error:
        error.add_note(f"ways={WAYS[:3]} leaves pickle out, for a buffer of which a part cannot be pickled")
        raise


def _kept(batch: Batch) -> Batch:
    """In memory of its own, so that nothing that is done to the batch later shows."""
    parts = {"data": batch.data, "indices": batch.indices, "info": dict(batch.info)}
    return dataclasses.replace(batch, **tree.map_leaves(_copy, parts))


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return copy.deepcopy(leaf)
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _resume_here(content: bytes) -> None:
    """In another process. Takes bytes, so that no tensor travels through shared memory."""
    check, jobs = pickle.loads(content)
    asyncio.run(check.resume_all(jobs))
