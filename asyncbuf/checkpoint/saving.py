"""Saves that go on in the background: how far they are, how they end, and that none is forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import enum
import logging
from typing import TYPE_CHECKING, Any, NoReturn

from asyncbuf._disk.transfer import Transfer
from asyncbuf._runtime.supervisor import detached
from asyncbuf._runtime.threads import in_thread
from asyncbuf.errors import AsyncBufError, SupersededError, WrongLoopError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Iterator
    from pathlib import Path

    from asyncbuf._disk.writer import CheckpointWriter

_logger = logging.getLogger("asyncbuf")

# All bytes may be in place before the commit.
_NOT_YET = 0.999


class SaveStage(enum.Enum):
    """How far a save is."""

    WAITING = "waiting"
    WRITING = "writing"
    COMMITTED = "committed"
    SUPERSEDED = "superseded"
    CANCELLED = "cancelled"
    FAILED = "failed"


class SaveProgress:
    """How far a save has come. What it says changes while the save goes on.

    Bytes are those of the files of the checkpoint. A file that an earlier checkpoint has already, and that only gets a
    second name, counts like one that is written, because what can be used again shows only on the way.
    """

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._stage = SaveStage.WAITING

    @property
    def stage(self) -> SaveStage:
        """WAITING for the moment that is saved, or for another save to end; WRITING; or how it ended."""
        return self._stage

    @property
    def done(self) -> int:
        """Bytes that are in place."""
        return self._transfer.done

    @property
    def linked(self) -> int:
        """How many of them were not written, because an earlier checkpoint has the file."""
        return self._transfer.linked

    @property
    def total(self) -> int | None:
        """How many bytes there will be.

        The bytes of all tensors, known when writing begins; exact, with headers and plain data, from when all files but
        the manifest are written. None before, which with a ``ListStorage`` is until then.
        """
        return self._transfer.total

    @property
    def fraction(self) -> float | None:
        """From 0.0 to 1.0, which is a committed save and no other; None as long as the total is not known."""
        if self._stage is SaveStage.COMMITTED:
            return 1.0
        total, done = self.total, self.done
        return None if total is None else min(_NOT_YET, done / max(1, total))

    def moved_to(self, stage: SaveStage) -> None:
        """The save is at another stage."""
        self._stage = stage

    def __repr__(self) -> str:
        """Such as ``<SaveProgress writing: 12.5 of 80.0 MB>``."""
        return f"<SaveProgress {self}>"

    def __str__(self) -> str:
        """Such as ``writing: 12.5 of 80.0 MB``."""
        total = self.total
        of = "" if total is None else f" of {max(total, self.done) / 1e6:.1f}"
        return f"{self._stage.value}: {self.done / 1e6:.1f}{of} MB"


class SaveJob:
    """A save as those see it who do it.

    Args:
        path: where it will be.
        release: lets go of what was captured; called as soon as nobody wants it any more, perhaps more than once.

    Attributes:
        path: as the argument.
        transfer: counts its bytes.
        progress: shows them.
        writer: writes it; None before that.
        error: why it has failed; None if it has not.
        save: does it; None once it has ended.
    """

    def __init__(self, path: Path, release: Callable[[], None]) -> None:
        self.path = path
        self.transfer: Transfer = Transfer()
        self.progress: SaveProgress = SaveProgress(self.transfer)
        self.writer: CheckpointWriter | None = None
        self.error: Exception | None = None
        self.save: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._release: Callable[[], None] | None = release

    async def write(self, function: Callable[..., object], writer: CheckpointWriter, *args: object) -> None:
        """Let a thread write. What is committed is never reported as cancelled, even if the loop is being ended.

        Args:
            function: writes and commits.
            writer: its first argument.
            *args: the others.
        """
        self.writer = writer
        self.progress.moved_to(SaveStage.WRITING)
        try:
            await in_thread(function, writer, *args, on_cancel=writer.stop)
        except asyncio.CancelledError:
            if not writer.is_committed:
                raise

    def ended(self, stage: SaveStage, error: Exception | None = None) -> None:
        """It has ended, in one of several ways; nothing that is said later changes that."""
        if self.progress.stage in (SaveStage.WAITING, SaveStage.WRITING):
            self.progress.moved_to(stage)
            self.error = error
        release, self._release, self.save = self._release, None, None
        if release is not None:
            release()


class SaveHandle:
    """A save that goes on in the background. ``await handle`` waits until it is committed, and returns the path.

    Several tasks may await it, or none. An error that nobody awaits is logged. Cancelling a task that awaits it does
    not cancel the save; ``cancel`` does.

    Attributes:
        path: the directory of the checkpoint.
        progress: how far it has come.
    """

    def __init__(self, job: SaveJob, check: Callable[[], None] | None = None) -> None:
        self.path: Path = job.path
        self.progress: SaveProgress = job.progress
        self._job = job
        self._check = check
        self._awaiting = 0
        self._is_told = False
        self._is_given_up = False
        self._loop = asyncio.get_running_loop()
        # What is at work in it belongs to nobody: neither to a freeze nor to a transform that the caller is within.
        self._task = self._loop.create_task(_carried_out(job), name="asyncbuf-save", context=contextvars.Context())
        self._task.add_done_callback(self._has_ended)

    def __await__(self) -> Generator[Any, Any, Path]:
        """Wait until it is committed.

        Returns:
            The path.

        Raises:
            asyncio.CancelledError: ``cancel`` was called, or the event loop was ended.
            SupersededError: it gave way to a newer one.
            AsyncBufError: it waits for the caller, who is within a freeze or a transform of the buffer.
            WrongLoopError: it belongs to another event loop.
            Exception: whatever ``save`` raises.
        """
        if not self.done():
            self._check_caller()
            with self.watched():
                yield from asyncio.wait({self._task}).__await__()
                self._is_told = True
        if self.progress.stage is SaveStage.COMMITTED:
            return self.path
        self._is_told = True
        error = self._job.error
        try:
            raise asyncio.CancelledError(f"the save to {self.path} was cancelled") if error is None else error
        finally:
            del error, self  # the error holds this frame, which must not hold what holds it

    def _check_caller(self) -> None:
        """Refuse to wait for what waits for the caller."""
        if asyncio.get_running_loop() is not self._loop:
            raise WrongLoopError(
                f"expected the event loop in which the save goes on, {self._loop!r}; found another one"
            )
        if self._check is not None and self.progress.stage is SaveStage.WAITING:
            self._check()

    def cancel(self) -> bool:
        """Give the save up: nothing of it will be left, and what it would have replaced stays.

        Returns:
            Whether that was in time. False if it is committed, is just being committed, or has ended otherwise.
        """
        if self.done() or (self._job.writer is not None and not self._job.writer.stop()):
            return False
        self._is_given_up = True
        self._task.cancel()
        return True

    def done(self) -> bool:
        """Whether it has ended, in whatever way; then nothing of it is at work any more."""
        return self._task.done()

    async def ended(self) -> None:
        """Wait for the end, whatever that is; not for a save that waits for the caller, and so comes after it."""
        with contextlib.suppress(AsyncBufError):
            self._check_caller()
            await asyncio.wait({self._task})

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """In the block, somebody waits to be told of an error, so that it is not logged; unless it is not told then."""
        self._awaiting += 1
        try:
            yield
        finally:
            self._awaiting -= 1
            if self._awaiting == 0 and self.done():
                self._log_untold()

    def tell(self) -> Exception | None:
        """The error of the save, which is not logged then; None if it has not failed, or somebody has heard of it."""
        error = None if self._is_told else self._job.error
        self._is_told = True
        return None if isinstance(error, SupersededError) else error

    def give_way(self, by: Path) -> None:
        """Let a newer save go first, if this one has not begun to write: let go of what was captured at once."""
        if self.done() or self.progress.stage is not SaveStage.WAITING:
            return
        error = SupersededError(f"{self.path}: it had not been written when a newer save was asked for, to {by}")
        self._job.ended(SaveStage.SUPERSEDED, error)
        self._task.cancel()

    def _has_ended(self, task: asyncio.Task[None]) -> None:
        # A task that is cancelled before its first step has done nothing at all.
        self._job.ended(SaveStage.CANCELLED)
        self._check = None
        if self.progress.stage is SaveStage.CANCELLED and not self._is_given_up:
            _logger.warning("the save to %s ended with its event loop: nothing was saved", self.path)
        if self._awaiting == 0:
            self._log_untold()

    def _log_untold(self) -> None:
        error = self._job.error
        if error is None or self._is_told:
            return
        self._is_told = True
        if not isinstance(error, SupersededError):
            _logger.error("the save to %s failed: %r", self.path, error, exc_info=error)

    def __repr__(self) -> str:
        """Where, and how far."""
        return f"<SaveHandle {self.path}, {self.progress}>"


async def _carried_out(job: SaveJob) -> None:
    """Do a save, and note how it ended. Nothing is raised: the task would keep the error, and the error all frames."""
    try:
        assert job.save is not None
        await job.save()
    except asyncio.CancelledError:
        job.ended(SaveStage.CANCELLED)
    except Exception as error:
        job.ended(SaveStage.FAILED, detached(error))
    except BaseException as error:
        job.ended(SaveStage.FAILED, RuntimeError(f"the save ended by {error!r}"))
        raise
    else:
        job.ended(SaveStage.COMMITTED)


class BackgroundSaves:
    """The saves that were begun and have not ended."""

    def __init__(self) -> None:
        self._handles: dict[SaveHandle, None] = {}

    def add(self, handle: SaveHandle) -> SaveHandle:
        """Look after a save, until it has ended."""
        if not handle.done():
            self._handles[handle] = None
            handle._task.add_done_callback(lambda _: self._handles.pop(handle, None))
        return handle

    @property
    def running(self) -> list[SaveHandle]:
        """Those of this event loop, in the order in which they were begun."""
        loop = asyncio.get_running_loop()
        self._handles = {handle: None for handle in self._handles if not handle._loop.is_closed()}
        return [handle for handle in self._handles if handle._loop is loop]

    async def ended_at(self, path: Path, before: SaveHandle | None = None) -> None:
        """Wait for those to one path, so that what was asked for later is what stays.

        Args:
            path: the directory.
            before: wait only for those that were begun before this one.
        """
        for handle in self.running:
            if handle is before:
                return
            if handle.path == path:
                await handle.ended()

    def check_caller(self) -> None:
        """Refuse to wait for all of them, if one of them waits for the caller.

        Raises:
            AsyncBufError: one does.
        """
        for handle in self.running:
            handle._check_caller()

    async def ended(self, seconds: float | None = None) -> bool:
        """Wait until none is left; whether that was so in time.

        Args:
            seconds: how long; None for as long as it takes.
        """
        tasks = {handle._task for handle in self.running}
        return not tasks or not (await asyncio.wait(tasks, timeout=seconds))[1]

    async def ended_or_raised(self) -> None:
        """Wait until none is left, and raise what those have failed with that nobody was told of."""
        handles = self.running
        with contextlib.ExitStack() as stack:
            for handle in handles:
                stack.enter_context(handle.watched())
            await self.ended()
            errors = [error for handle in handles if (error := handle.tell()) is not None]
        if errors:
            _raise_together(errors)

    async def cancelled(self) -> None:
        """Cancel all of them, and wait until they are gone, however often the caller is cancelled meanwhile."""
        left = {handle._task for handle in self.running}
        for handle in self.running:
            handle.cancel()
        while left:
            with contextlib.suppress(asyncio.CancelledError):
                _, left = await asyncio.wait(left)


def _raise_together(errors: list[Exception]) -> NoReturn:
    try:
        if len(errors) == 1:
            raise errors[0]
        raise ExceptionGroup("several saves failed", errors)
    finally:
        del errors  # they hold this frame, which must not hold them in turn
