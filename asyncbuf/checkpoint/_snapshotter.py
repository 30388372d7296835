"""Snapshots of a buffer: taken, restored, and taken apart for pickling."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from asyncbuf._disk.writer import CheckpointWriter
from asyncbuf._runtime.reentry import current_job
from asyncbuf._runtime.shield import shielded
from asyncbuf._runtime.threads import in_thread
from asyncbuf.checkpoint._buffer_state import RestorePlan
from asyncbuf.checkpoint._freeze import Freezer
from asyncbuf.checkpoint._requested import RequestedSnapshot
from asyncbuf.checkpoint.saving import BackgroundSaves, SaveHandle, SaveJob

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from asyncbuf._prefetch.entry import Loan
    from asyncbuf._prefetch.standstill import Standstill
    from asyncbuf._runtime.reentry import ReentryGuard
    from asyncbuf._table.gate import HistoryGate
    from asyncbuf.checkpoint._buffer_state import BufferState, Complete
    from asyncbuf.checkpoint._freeze import Freeze
    from asyncbuf.checkpoint.snapshot import Snapshot


class Restore:
    """A snapshot on its way into a buffer. To be applied once.

    Args:
        plan: reads, checks and decodes the snapshot; called in a thread.
        freezer: brings the buffer to rest.
        standstill: takes the tickets.
    """

    def __init__(self, plan: Callable[[], RestorePlan], freezer: Freezer, standstill: Standstill) -> None:
        self._make_plan = plan
        self._freezer = freezer
        self._standstill = standstill
        self._plan: RestorePlan | None = None

    async def read(self) -> None:
        """Read, check and decode everything. Changes nothing, and lets the buffer go on.

        Raises:
            CheckpointError: it does not fit, or is damaged.
        """
        if self._plan is None:
            self._plan = await in_thread(self._make_plan)

    async def apply(self) -> None:
        """Make it live, in one step: all of it or, with an error, none. The last thing that this awaits is that step.

        Reads it first, if that was not done. Nothing is handed over from the call on.

        Raises:
            CheckpointError: it does not fit, or is damaged.
            AsyncBufError: the caller is within a freeze of the buffer.
        """
        self._freezer.refuse_within()
        standing = await self._freezer.take("a restore", None, self.read)
        assert self._plan is not None
        try:
            self._standstill.restore(self._plan.adopt())
        finally:
            self._freezer.let_go(standing)


class Snapshotter:
    """Takes snapshots of a buffer and restores them.

    Args:
        state: the parts of the buffer that have state.
        standstill: its tickets.
        gate: its history.
        guard: knows who waits for the buffer.

    Attributes:
        freezer: brings the buffer to rest for that.
        saves: those that go on in the background.
    """

    def __init__(self, state: BufferState, standstill: Standstill, gate: HistoryGate, guard: ReentryGuard) -> None:
        self._state = state
        self._standstill = standstill
        self._gate = gate
        self._guard = guard
        self.saves = BackgroundSaves()
        self.freezer = Freezer(standstill, gate, guard)
        self._completing: set[asyncio.Task[Snapshot]] = set()

    async def freeze(self, what: str, timeout: float | None, hold: float | None = None) -> Freeze:
        """Bring the buffer to rest; the caller is within then. Otherwise as ``ReplayBuffer.freeze``.

        Args:
            what: who wants it, in words.
            timeout: seconds; None for as long as it takes.
            hold: seconds after which it goes on by itself; None for never.
        """
        standing = await self.freezer.take(what, timeout)
        return self.freezer.freeze(standing, self._capture, hold)

    async def snapshot(self, timeout: float | None) -> Snapshot:
        """Everything at one point of the history."""
        if (freeze := self.freezer.current) is not None:
            return await freeze.capture()
        standing = await self.freezer.take("a snapshot", timeout)
        try:
            complete, loan = self._captured()
        finally:
            self.freezer.let_go(standing)
        return await self._complete(complete, loan)

    def _captured(self) -> tuple[Complete, Loan]:
        """A snapshot of this moment that still has to copy its tickets. They are lent for that."""
        complete = self._state.capture(self._standstill.capture())
        return complete, self._standstill.lend()

    async def _complete(self, complete: Complete, loan: Loan) -> Snapshot:
        """Let a thread copy the tickets. Each may be handed over as soon as it is copied."""
        loop = asyncio.get_running_loop()

        def copied() -> None:
            loop.call_soon_threadsafe(self._standstill.give_back, loan, 1)

        try:
            return await in_thread(complete, copied)
        finally:
            self._standstill.give_back(loan)

    def _capture(self) -> asyncio.Task[Snapshot]:
        """Take a snapshot in this step, which a task completes."""
        complete, loan = self._captured()
        task = asyncio.create_task(self._complete(complete, loan), name="asyncbuf-snapshot")
        self._completing.add(task)
        task.add_done_callback(self._completing.discard)
        # A task that is cancelled before its first step gives nothing back.
        task.add_done_callback(lambda _: self._standstill.give_back(loan))
        return task

    def save_soon(self, path: Path, timeout: float | None, base: Path | None) -> SaveHandle:
        """Save this moment, in the background. Otherwise as ``ReplayBuffer.save_soon``."""
        is_within = self.freezer.current is not None
        requested = RequestedSnapshot(self._state, self._standstill, self._gate, timeout, is_now=is_within)
        job = SaveJob(path, requested.release)

        async def save() -> None:
            snapshot = await requested.complete()
            requested.release()
            await self.saves.ended_at(path, before=handle)
            await job.write(snapshot.write_alone, CheckpointWriter(path, base, job.transfer))

        def check() -> None:
            if not requested.is_taken:
                self._check_wait()

        job.save = save
        handle = SaveHandle(job, check)
        return self.saves.add(handle)

    def _check_wait(self) -> None:
        """Refuse to wait for a turn in the history that cannot come before the caller goes on."""
        if current_job() is not None:
            self._guard.check("await of a save")
        self.freezer.refuse_within()

    def restore(self, opened: Callable[[], Snapshot], *, elastic: bool, moves: bool = False) -> Restore:
        """A snapshot on its way into the buffer.

        Args:
            opened: gives the snapshot; called in a thread.
            elastic: whether another prefetch depth and batch size are accepted.
            moves: whether the snapshot is used for nothing else, so that its memory may be taken over.
        """
        state = self._state

        def plan() -> RestorePlan:
            return RestorePlan(opened(), state, elastic=elastic, moves=moves)

        return Restore(plan, self.freezer, self._standstill)

    def pickled(self) -> dict[str, Any]:
        """What is not in the arguments of the buffer, for ``unpickle``; called while it stands still."""
        state = self._state
        # Storage, writer and sampler are pickled themselves.
        parts = {part.name: shielded(part.capture) for part in state.parts if part.name in state.fresh}
        return {"tickets": self._standstill.capture().cloned(), "fresh": state.fresh, "parts": parts}

    def unpickle(self, state: dict[str, Any]) -> None:
        """Go on where the pickled buffer was."""
        self._state.fresh = state["fresh"]
        for part in self._state.parts:
            if part.name in state["parts"]:
                shielded(part.load, part.read(state["parts"][part.name]))
        self._state.table.changed()
        self._standstill.restore(state["tickets"])
