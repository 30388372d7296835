"""Snapshots of a buffer, and all the ways in which they are taken and restored."""

from __future__ import annotations

import asyncio
import functools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self

import torch

from asyncbuf._runtime.reentry import ReentryGuard, current_job
from asyncbuf._runtime.threads import in_thread
from asyncbuf.checkpoint.snapshot import Config, RestorePlan, Snapshot, capture
from asyncbuf.errors import AsyncBufError

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Awaitable, Callable

    from asyncbuf._prefetch.pipeline import Pipeline
    from asyncbuf._table.gate import HistoryGate
    from asyncbuf._table.table import Table


class Snapshotter:
    """The part of a buffer that can be saved, restored and pickled."""

    _table: Table
    _pipeline: Pipeline
    _gate: HistoryGate
    _guard: ReentryGuard
    _config: Config
    _generator: torch.Generator
    _arguments: dict[str, Any]
    _state: str
    _frozen_by: asyncio.Task[Any] | None

    def _turn(self, *, within_frozen: bool = False) -> Awaitable[None]:
        raise NotImplementedError

    async def snapshot(self, timeout: float | None = None) -> Snapshot:
        """Take everything at one point of the history. Consumers are held up for as long as that takes.

        Works before the buffer is opened, while it runs and after it was closed. Waits until the batches that are being
        prepared are ready; they are part of the snapshot.

        Args:
            timeout: seconds. When four fifths are over, batches that are not ready are saved as their tickets with the
                rows that were gathered, and made after a restore. None waits for all of them.

        Raises:
            TimeoutError: a write or a gather did not end in time.
            CheckpointError: something in the buffer cannot be saved; the message says where.
        """
        self._check_caller("snapshot")
        with self._guard.waiting("snapshot"):
            return await self._snapshot(timeout)

    def _check_caller(self, call: str) -> None:
        if current_job() is not None:
            self._guard.check(call)

    async def _snapshot(self, timeout: float | None) -> Snapshot:
        await self._turn(within_frozen=True)
        if self._frozen_by is not None and self._frozen_by is asyncio.current_task():
            return await in_thread(self._capture())
        async with asyncio.timeout(timeout):
            async with self._pipeline.holding():
                async with self._still(None if timeout is None else 0.8 * timeout):
                    complete = self._capture()
                return await in_thread(complete)  # reads the batches, which nobody gets meanwhile

    @asynccontextmanager
    async def _still(self, seconds: float | None) -> AsyncIterator[None]:
        """Nothing is written or drawn meanwhile, and no stateful transform is at work, unless the time was over."""
        loop = asyncio.get_running_loop()
        deadline = None if seconds is None else loop.time() + seconds
        while True:
            await self._pipeline.settle(deadline)
            async with self._gate.turn(exclusive=True):
                is_late = deadline is not None and loop.time() >= deadline
                if is_late or not self._pipeline.fetcher.changes_state:
                    yield
                    return
            # Draws that were asked for before the turn came have given it work.

    def _capture(self) -> Callable[[], Snapshot]:
        return capture(self._table, self._pipeline.chain, self._config, self._pipeline.capture())

    @asynccontextmanager
    async def frozen(self, timeout: float | None = None) -> AsyncIterator[Self]:
        """``async with buffer.frozen():`` stands still: nothing is written, drawn or handed over meanwhile.

        For whatever must happen at one point of the history together with the buffer, such as ``pickle.dumps(buffer)``.
        ``snapshot``, ``state_dict`` and ``save`` may be awaited within; other calls would wait for ever and raise.

        Args:
            timeout: seconds to wait for batches that are being prepared, as in ``snapshot``.
        """
        self._check_caller("frozen")
        await self._turn()
        with self._guard.waiting("frozen"):
            async with self._standing_still(timeout):
                yield self

    @asynccontextmanager
    async def _standing_still(self, timeout: float | None) -> AsyncIterator[None]:
        async with self._pipeline.holding(), self._still(timeout):
            self._frozen_by = asyncio.current_task()
            try:
                yield
            finally:
                self._frozen_by = None

    async def restore(self, snapshot: Snapshot, *, elastic: bool = False) -> None:
        """Become what a snapshot holds. The snapshot stays as it is.

        Batches that are in line or being prepared are dropped; consumers that wait get those of the snapshot. The
        generator keeps its identity and gets the saved state.

        Args:
            snapshot: the snapshot.
            elastic: accept another prefetch depth or batch size than those of the buffer: first come the saved batches
                as they are, and drawing starts again when fewer than the depth are left.

        Raises:
            CheckpointError: it does not fit, or is damaged. The buffer goes on as if nothing had been tried.
        """
        self._check_caller("restore")
        await self._turn()
        await self._adopt(lambda: self._plan(snapshot, elastic=elastic, moves=False))

    def _plan(self, snapshot: Snapshot, *, elastic: bool, moves: bool) -> RestorePlan:
        return RestorePlan(snapshot, self._table, self._pipeline.chain, self._config, elastic=elastic, moves=moves)

    async def _adopt(self, make_plan: Callable[[], RestorePlan]) -> None:
        with self._guard.waiting("restore"):
            await self._adopt_held(make_plan)

    async def _adopt_held(self, make_plan: Callable[[], RestorePlan]) -> None:
        async with self._pipeline.holding():
            plan = await in_thread(make_plan)
            async with self._pipeline.fetcher.resting():
                await self._gate.apply(functools.partial(self._make_live, plan), exclusive=True)

    def _make_live(self, plan: RestorePlan) -> None:
        plan.adopt()
        self._pipeline.restore(plan.tickets)

    async def state_dict(self, timeout: float | None = None) -> dict[str, Any]:
        """``snapshot(timeout).state_dict()``: plain data in memory of its own."""
        snapshot = await self.snapshot(timeout)
        return await in_thread(snapshot.state_dict)

    async def load_state_dict(self, state_dict: dict[str, Any], *, elastic: bool = False) -> None:
        """``restore`` from a state dict, which stays the caller's."""
        self._check_caller("load_state_dict")
        await self._turn()
        await self._adopt(lambda: self._plan(Snapshot.borrowed(state_dict), elastic=elastic, moves=False))

    async def save(self, path: str | os.PathLike[str], timeout: float | None = None) -> None:
        """Write a checkpoint directory of this moment. Consumers and writers go on while it is being written.

        Args:
            path: the directory. A checkpoint that is there already is replaced in one step; a crash at any point
                leaves either the one or the other.
            timeout: as in ``snapshot``; the writing itself takes as long as it takes.

        Raises:
            CheckpointError: something in the buffer cannot be saved, or something else than a checkpoint is there.
            TimeoutError: as in ``snapshot``.
            OSError: the file system refuses.
        """
        snapshot = await self.snapshot(timeout)
        await snapshot.save(path)

    async def load(self, path: str | os.PathLike[str], *, elastic: bool = False) -> None:
        """``restore`` from a checkpoint directory: everything is read and checked before anything changes.

        Raises:
            CheckpointNotFoundError: there is no checkpoint.
            CheckpointError: as in ``restore``.
        """
        self._check_caller("load")
        await self._turn()
        await self._adopt(lambda: self._plan(Snapshot.open(path), elastic=elastic, moves=True))

    dumps = save
    loads = load

    def __getstate__(self) -> dict[str, Any]:
        """Pickle a buffer that stands still, with its parts.

        Raises:
            TypeError: it is running. ``async with buffer.frozen():`` makes it stand still.
        """
        if self._state not in ("new", "closed") and self._frozen_by is None:
            raise TypeError(
                f"pickle: expected a buffer that is not open, or `async with buffer.frozen():` around; found {self!r}"
            )
        return {
            "arguments": self._arguments,
            "device": str(self._generator.device),
            "generator": self._generator.get_state(),
            "tickets": self._pipeline.capture().cloned(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a buffer that was not opened yet and goes on where the pickled one was."""
        generator = torch.Generator(state["device"])
        generator.set_state(state["generator"])
        self.__init__(**state["arguments"], generator=generator)  # type: ignore[misc]
        self._pipeline.restore(state["tickets"])

    def _check_not_frozen(self) -> None:
        if self._frozen_by is not None and self._frozen_by is asyncio.current_task():
            raise AsyncBufError("expected no call that would wait for the end of frozen(), within frozen(); found one")
