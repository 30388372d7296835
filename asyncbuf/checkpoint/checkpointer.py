"""Checkpoints of a whole training run: buffers, models, optimizers and plain values at one point in time.

One directory per step, committed whole (see ``asyncbuf._disk.writer``)::

    runs/step-000100/
      manifest.json                      which parts there are, and everything that is not a tensor
      data-.../buffer/storage/00000.safetensors ...
      data-.../model/00000.safetensors ...
"""

from __future__ import annotations

import asyncio
import logging
import operator
import re
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from asyncbuf._disk.manifest import is_checkpoint, what_is_at
from asyncbuf._disk.writer import CheckpointWriter
from asyncbuf._runtime.arguments import absolute, count, flag, seconds, shown
from asyncbuf._runtime.reentry import current_job
from asyncbuf._runtime.summary import summary
from asyncbuf._runtime.threads import in_thread
from asyncbuf.checkpoint._components import Captured, capture, is_stateful
from asyncbuf.checkpoint._freeze import is_within_any
from asyncbuf.checkpoint._global_generators import GlobalGenerators
from asyncbuf.checkpoint._run_plan import FORMAT, RNG, VERSION, RunPlan
from asyncbuf.checkpoint._steps import checkpoints_in, remove_steps, step_path, steps_in
from asyncbuf.checkpoint.saving import BackgroundSaves, SaveHandle, SaveJob
from asyncbuf.checkpoint.snapshotable import is_snapshotable
from asyncbuf.checkpoint.stopping import DEFAULT_SIGNALS, StopSignal
from asyncbuf.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointVersionError,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path
    from types import TracebackType

_LISTINGS = 5
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_ARGUMENTS = {"step", "rng", "timeout", "at_once", "elastic", "partial"}

_logger = logging.getLogger("asyncbuf")


@dataclass(frozen=True, slots=True)
class RestoredCheckpoint:
    """What a checkpoint held, beside what went into objects.

    Attributes:
        step: the step that it was saved at.
        path: its directory.
        values: the parts that are plain values, by name.
    """

    step: int
    path: Path
    values: dict[str, Any]

    def __repr__(self) -> str:
        """One short line, without the values of tensors."""
        return f"RestoredCheckpoint(step={self.step}, path={str(self.path)!r}, values={summary(self.values)})"


class Checkpointer:
    """Saves a whole training run again and again, and restores it.

    One process at a time saves into a directory; others may restore from it. Everything that is written is JSON and
    safetensors, and reading runs no code. ``register_type`` and ``register_codec`` widen what can be saved.

    Args:
        directory: where the checkpoints lie, one directory ``step-000100`` each. It is made when the first is saved.
        keep: how many checkpoints are kept, those with the highest steps; None keeps all.
        rng: whether the global generators of torch, numpy and ``random`` belong to the run.

    Raises:
        TypeError, ValueError: the directory is no path, ``keep`` not an int of at least 1, or ``rng`` no bool.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int | None = 3, rng: bool = False) -> None:
        self._directory = absolute(directory, "directory")
        self._keep = None if keep is None else count(keep, "keep", 1, example=3)
        self._rng = flag(rng, "rng")
        self._last: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._locks: dict[str, asyncio.Lock] = {}
        self._saves = BackgroundSaves()

    # -- what there is ------------------------------------------------------------------------------------------------

    def path(self, step: int) -> Path:
        """The directory of a step, whether or not it is there."""
        return step_path(self._directory, _step(step))

    def steps(self) -> list[int]:
        """The steps that were saved, in order. Whether each can be read shows when it is restored."""
        try:
            return steps_in(self._directory)
        except FileNotFoundError:
            return []

    def latest(self) -> int | None:
        """The highest step that was saved; None if there is none."""
        return max(self.steps(), default=None)

    def __repr__(self) -> str:
        """Where, and how."""
        return f"<Checkpointer {self._directory}, keep={self._keep}, rng={self._rng}>"

    # -- saving -------------------------------------------------------------------------------------------------------

    async def save(
        self,
        step: int,
        *,
        rng: bool | None = None,
        timeout: float | None = None,
        at_once: bool = False,
        **parts: Any,
    ) -> Path:
        """Save everything at one point in time, then write it while the run goes on.

        All buffers stand still while they and the other parts are captured, in one step of the event loop: states are
        asked for, and everything but large tensors and arrays on the CPU is copied. Those are copied in a thread, and
        the buffers stand still for that long, too, so that whoever waits for a batch of them changes nothing. The event
        loop goes on. If a tensor is changed all the same, by a task that does not wait for these buffers, everything
        is captured again and copied at once.

        So what is saved fits together if it is called by the task that trains, or if nothing waits in that task between
        getting a batch and the end of its update. Changes that torch does not count (through ``tensor.data``, ``numpy``
        or arrays) are not noticed: a program that makes such ones in other tasks, which do not wait for these buffers,
        needs ``at_once``. The event loop does not wait for disks. Calls from several tasks are served in order.

        Args:
            step: what the checkpoint is known by, from 0. One that is there already is replaced in one step.
            rng: overrides the ``rng`` of the constructor.
            timeout: seconds to wait for batches that are being prepared; after that they are saved as tickets.
            at_once: copy large tensors in the same step, too. The event loop waits for that, roughly 1 ms for 2 MB.
            **parts: by name: buffers and snapshots; objects with ``state_dict`` and ``load_state_dict``; and plain
                values such as numbers, strings, tensors, lists and dicts, which ``restore`` hands back. Tensors may be
                on any device: they are copied there first, and then to the CPU.

        Returns:
            The directory of the checkpoint. It is committed, and checkpoints beyond ``keep`` are gone.

        Raises:
            CheckpointError: something cannot be saved, the message says where; or something else is in its place.
            OSError: the file system refuses.
            TypeError, ValueError: a step, name or part is none.
        """
        path = self.path(step)
        timeout = self._checked(parts, rng, timeout, at_once)
        async with self._turn("capture"):
            captured = await capture(parts, timeout, at_once=at_once)
        async with self._lock("disk"):
            writer = CheckpointWriter(path)
            await in_thread(self._write, writer, _step(step), captured, on_cancel=writer.stop)
        return path

    async def save_soon(
        self,
        step: int,
        *,
        rng: bool | None = None,
        timeout: float | None = None,
        at_once: bool = False,
        **parts: Any,
    ) -> SaveHandle:
        """Capture everything at one point in time, as ``save`` does, and write it in the background.

        This waits only until everything is captured, so that the caller may change it then; ``await handle`` waits for
        the commit. One save is written at a time, those of ``save`` included, in the order in which they were captured.
        Of those that were begun here and wait for that, only the newest is written: older ones give way as soon as a
        newer one is captured, and their memory is free. So what waits is never more than one copy, however slow the
        disk is. A call of ``save`` never gives way, and makes no other one give way.

        ``await checkpointer.wait()``, or the end of ``async with checkpointer:``, waits for all of them: when the event
        loop ends, a save that is still at work is cancelled.

        Args:
            step: as in ``save``.
            rng: as in ``save``.
            timeout: as in ``save``.
            at_once: as in ``save``.
            **parts: as in ``save``.

        Returns:
            The handle. Awaiting it raises ``SupersededError`` if a newer one came before it was written.

        Raises:
            CheckpointError, TimeoutError, TypeError, ValueError: as ``save``; nothing was begun then.
        """
        path = self.path(step)
        timeout = self._checked(parts, rng, timeout, at_once)
        async with self._turn("capture"):
            captured = await capture(parts, timeout, at_once=at_once)
            # No await until it is among those that wait: so the newest is the one that was captured last.
            return self._write_soon(path, _step(step), captured)

    def _write_soon(self, path: Path, step: int, captured: dict[str, Captured]) -> SaveHandle:
        for older in self._saves.running:
            older.give_way(path)
        job = SaveJob(path, captured.clear)

        async def save() -> None:
            async with self._lock("disk"):
                await job.write(self._write, CheckpointWriter(path, transfer=job.transfer), step, captured)

        job.save = save
        return self._saves.add(SaveHandle(job))

    def _checked(self, parts: dict[str, Any], rng: bool | None, timeout: float | None, at_once: bool) -> float | None:
        """Check the arguments of a save; add the global generators, if they are wanted."""
        _check_names(parts)
        timeout = seconds(timeout)
        flag(at_once, "at_once")
        if self._rng if rng is None else flag(rng, "rng"):
            parts[RNG] = GlobalGenerators()
        return timeout

    def _write(self, writer: CheckpointWriter, step: int, captured: dict[str, Captured]) -> None:
        writer.base = self._base(step)
        sizes = [part.nbytes for part in captured.values()]
        with writer:
            writer.expect(sum(filter(None, sizes)) if None not in sizes else None)
            parts = {name: part.write(writer, name) for name, part in captured.items()}
            writer.commit({"format": FORMAT, "version": VERSION, "step": step, "parts": parts})
        for part in captured.values():
            if part.snapshot is not None:
                part.snapshot.committed()
        if self._last is None:
            self._warn_of_others(step)
        self._last = step
        self._prune(step)

    def _warn_of_others(self, step: int) -> None:
        """Say so if a run begins anew where another one is, whose later steps look like the latest ones."""
        try:
            later = [other for other in self.steps() if other > step]
        except OSError:
            return
        if later:
            _logger.warning(
                "%s: step %d was saved beside later ones, up to %d, which this Checkpointer has neither saved nor "
                "restored: latest() and restore() take those; use another directory, or remove them",
                self._directory,
                step,
                later[-1],
            )

    def _base(self, step: int) -> Path | None:
        """The checkpoint that most of a new one may be the same as: that of the last step saved or restored here."""
        try:
            steps = [other for other in self.steps() if other != step]
        except OSError:
            steps = []  # it may be entered but not read
        if not steps:
            return None
        return self.path(self._last if self._last in steps else steps[-1])

    def _prune(self, written: int) -> None:
        """Remove the oldest checkpoints. The new one is committed, so a failure here is none of the save."""
        if self._keep is None:
            return
        try:
            committed = checkpoints_in(self._directory)
        except OSError as error:
            _logger.warning("old checkpoints in %s could not be looked for: %r", self._directory, error)
            return
        remove_steps(self._directory, [step for step in committed[: -self._keep] if step != written], self._not_removed)

    def _not_removed(self, step: int, error: OSError) -> None:
        _logger.warning("the old checkpoint %s could not be removed: %r", self.path(step), error)

    async def wait(self) -> None:
        """Wait until every save that ``save_soon`` has begun is committed, or has ended otherwise.

        If this wait is cancelled, the saves go on. None is lost by ending the program after it.

        Raises:
            Exception: what one has failed with that ended meanwhile and that nobody else was told of; an
                ``ExceptionGroup`` if several have. A save that gave way or was cancelled has not failed.
        """
        await self._saves.ended_or_raised()

    async def __aenter__(self) -> Self:
        """Nothing has to be begun."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """As ``wait``; but if this is cancelled, so are the saves. If the block has raised, their errors are logged."""
        try:
            if kind is None:
                await self._saves.ended_or_raised()
            else:
                await self._saves.ended()
        except asyncio.CancelledError:
            await self._saves.cancelled()
            raise

    def on_signal(self, signals: Iterable[int] = DEFAULT_SIGNALS) -> StopSignal:
        """Be told of a signal that asks the program to end, in time to save once more.

        ::

            async with buffer, checkpointer:
                with checkpointer.on_signal() as stop:
                    async for batch in stop.iterate(buffer):  # ends with the signal, also while it waits
                        ...
                        step += 1
                await checkpointer.save(step, buffer=buffer, ...)
            sys.exit(stop.exit_code)  # 128 + the number of the signal, or 0

        The first signal is noted, and does nothing else. A second one does what it would have done without the block:
        with ``asyncio.run``, SIGINT cancels the task that it runs, and SIGTERM ends the process at once. So a program
        that does not react, or whose last save takes too long, can still be ended; a checkpoint is whole or not there,
        whatever happens.

        Args:
            signals: which ones, as numbers or ``signal.Signals``.

        Returns:
            A context manager, for ``with`` in a coroutine of the main thread.

        Raises:
            TypeError, ValueError: one is no signal.
        """
        return StopSignal(signals)

    # -- restoring ----------------------------------------------------------------------------------------------------

    async def restore(
        self,
        step: int | None = None,
        *,
        elastic: bool = False,
        partial: bool = False,
        rng: bool | None = None,
        **objects: Any,
    ) -> RestoredCheckpoint:
        """Put buffers and objects back to where they were. Either all of them change or, with an error, none.

        Everything is read, checked and decoded first. Then each object proves that it takes its state, and gets its own
        back; the buffers are restored; and in the very step in which the last buffer takes over, the objects are
        loaded. So no consumer sees an old model beside restored batches, and ``load_state_dict`` of an object is
        called more than once. With several buffers, restore before they are opened: if a later one fails, those before
        it go back to what they were, but cannot take back what they handed out meanwhile.

        Args:
            step: which checkpoint; None for the latest. An older one is taken only if it is asked for.
            elastic: accept another prefetch depth or batch size of buffers, and fewer CUDA devices.
            partial: leave out parts for which no object is given, such as the buffer when a policy is evaluated.
            rng: whether the global generators are set: True demands that they were saved, False leaves them alone.
                None sets them if they were saved (and not ``partial``), and demands them if the constructor says so.
            **objects: by the names of the save: buffers, and objects with ``load_state_dict``.

        Raises:
            CheckpointNotFoundError: there is no checkpoint, or none of this step.
            CheckpointCorruptError, CheckpointVersionError: it is damaged, or newer than this release.
            CheckpointMismatchError: it has other parts, or an object does not take its state.
            TypeError, ValueError: a step, name or object is none.
        """
        _check_names(objects)
        flag(elastic, "elastic")
        flag(partial, "partial")
        if rng is not None:
            flag(rng, "rng")
        for name, part in objects.items():
            if not is_snapshotable(part) and not is_stateful(part):
                raise TypeError(
                    f"{name}: expected a buffer or an object with state_dict and load_state_dict, found "
                    f"{type(part).__name__}; plain values come back in the result"
                )
        demanded = self._rng and not partial if rng is None else rng
        async with self._turn("restore"):
            while True:
                chosen = self._chosen(step)
                plan = RunPlan(self.path(chosen), chosen, objects, partial=partial)
                if demanded or (rng is None and not partial):
                    plan.add_generators(GlobalGenerators(elastic=elastic), demanded=demanded)
                try:
                    async with self._lock("disk"):  # no save prunes or replaces meanwhile what is being read
                        await plan.read(elastic=elastic)
                    await plan.apply()
                except (CheckpointCorruptError, CheckpointVersionError, CheckpointNotFoundError) as error:
                    if step is None and not plan.path.exists():
                        continue  # another save has committed a later one, and removed this one before it was opened
                    others = [other for other in self.steps() if other != chosen]
                    if step is not None or not others:
                        raise
                    raise type(error)(f"{error}; restore(step=...) takes an older one, of {others}") from error
                self._last = chosen
                return RestoredCheckpoint(chosen, plan.path, plan.values)

    def _chosen(self, step: int | None) -> int:
        # A listing may miss what is put in place while it goes on, and find no longer what that replaces.
        steps = next(filter(None, (self.steps() for _ in range(_LISTINGS))), [])
        if step is None and not steps:
            found = what_is_at(self._directory)
            if is_checkpoint(self._directory):
                found = "the checkpoint of a buffer, which await buffer.load(path) reads"
            raise CheckpointNotFoundError(
                f"{self._directory}: expected the directories of steps, such as step-000100; found {found}"
            )
        chosen = steps[-1] if step is None else _step(step)
        if chosen not in steps:
            raise CheckpointNotFoundError(f"{self.path(chosen)}: expected a checkpoint, found those of steps {steps}")
        return chosen

    def _turn(self, what: str) -> AbstractAsyncContextManager[None]:
        """A lock under which buffers are waited for.

        Whoever is within a freeze or a transform does not take it: another one might hold it while it waits for the end
        of that.
        """
        return nullcontext() if is_within_any() or current_job() is not None else self._lock(what)

    def _lock(self, what: str) -> asyncio.Lock:
        """A lock of the running loop, so that one object may serve one loop after the other."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._locks = loop, {}
        return self._locks.setdefault(what, asyncio.Lock())


def _step(step: Any) -> int:
    try:
        number = None if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = None
    if number is None:
        is_part = is_snapshotable(step) or is_stateful(step)
        instead = ": write save(step, name=...) and restore(name=...)" if is_part else "; for example save(100, ...)"
        raise TypeError(f"step: expected an int, found {shown(step)}{instead}")
    if number < 0:
        raise ValueError(f"step: expected at least 0, found {number}")
    return number


def _check_names(parts: dict[str, Any]) -> None:
    buffers: dict[int, str] = {}
    for name, part in parts.items():
        if not _NAME.fullmatch(name) or name in _ARGUMENTS:
            raise ValueError(
                f"expected the name of a part in letters, digits, '_' and '-', and none of {sorted(_ARGUMENTS)}; "
                f"found {name!r}"
            )
        if is_snapshotable(part) and buffers.setdefault(id(part), name) != name:
            raise ValueError(f"expected each buffer once, found the same as {buffers[id(part)]} and {name}")
