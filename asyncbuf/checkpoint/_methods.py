"""The methods of a buffer that save, restore and pickle it. They only check and delegate."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from asyncbuf._runtime.arguments import absolute, flag, seconds
from asyncbuf._runtime.reentry import current_job
from asyncbuf._runtime.threads import in_thread
from asyncbuf.checkpoint._wrong_calls import snapshot_of, state_dict_of
from asyncbuf.checkpoint.snapshot import Snapshot

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Awaitable, Callable

    from asyncbuf._runtime.lifecycle import Lifecycle
    from asyncbuf._runtime.reentry import ReentryGuard
    from asyncbuf.checkpoint._freeze import Freeze
    from asyncbuf.checkpoint._snapshotter import Restore, Snapshotter
    from asyncbuf.checkpoint.saving import SaveHandle


class SnapshotMethods:
    """The part of a buffer that can be saved, restored and pickled."""

    _snapshots: Snapshotter
    _life: Lifecycle
    _guard: ReentryGuard
    _generator: torch.Generator
    _arguments: dict[str, Any]

    def _check_caller(self, call: str) -> None:
        """Refuse a call that could only be answered by its own caller."""
        if current_job() is not None:
            self._guard.check(call)

    def _turn(self, *, within_frozen: bool = False) -> Awaitable[None]:
        raise NotImplementedError

    # -- standing still -----------------------------------------------------------------------------------------------

    async def freeze(self, timeout: float | None = None, hold: float | None = None) -> Freeze:
        """Let the buffer stand still until the handle is released: nothing is written, drawn or handed over meanwhile.

        For a coordinator that freezes several buffers, or releases them in another task; ``frozen`` is simpler. Works
        before the buffer is opened, while it runs and after it was closed.

        The task that awaits this is within the freeze, as are tasks that it starts meanwhile: there, ``snapshot``,
        ``state_dict``, ``save``, ``stats``, ``why_blocked`` and pickling work at once, and a call that could only be
        answered after the end raises. All other tasks wait for the end.

        Args:
            timeout: seconds to wait. When four fifths are over, batches that are not ready stay tickets. None waits for
                all of them.
            hold: seconds after which it ends by itself, for a coordinator that may get lost; None for never.

        Returns:
            The handle. ``with handle:`` releases it at the end.

        Raises:
            TimeoutError: the buffer did not come to rest in time. It goes on as if nobody had asked.
            AsyncBufError: the caller is within a freeze of this buffer already.
            TypeError, ValueError: ``timeout`` is no number from 0 on, or ``hold`` is not positive.
        """
        self._check_caller("freeze")
        timeout, hold = seconds(timeout), seconds(hold, "hold", is_positive=True)
        await self._turn()
        return await self._snapshots.freeze("freeze()", timeout, hold)

    @asynccontextmanager
    async def frozen(self, timeout: float | None = None) -> AsyncIterator[Self]:
        """``async with buffer.frozen():`` stands still: nothing is written, drawn or handed over meanwhile.

        For whatever must happen at one point of the history together with the buffer, such as ``pickle.dumps(buffer)``.
        In the block and in tasks that it starts, ``snapshot``, ``state_dict``, ``save``, ``Checkpointer.save``,
        ``stats``, ``why_blocked`` and pickling work; other calls would wait for the end, and raise. A task that
        outlives the block is outside from then on.

        Args:
            timeout: seconds to wait, as in ``snapshot``.

        Raises:
            TimeoutError, AsyncBufError, TypeError, ValueError: as in ``freeze``.
        """
        self._check_caller("frozen")
        timeout = seconds(timeout)
        await self._turn()
        with await self._snapshots.freeze("frozen()", timeout):
            yield self

    @property
    def current_freeze(self) -> Freeze | None:
        """The freeze that the caller is within; None outside."""
        return self._snapshots.freezer.current

    # -- saving -------------------------------------------------------------------------------------------------------

    async def snapshot(self, timeout: float | None = None) -> Snapshot:
        """Take everything at one point of the history. Consumers are held up for as long as that takes.

        Works before the buffer is opened, while it runs and after it was closed. Waits until the batches that are being
        prepared are ready; they are part of the snapshot.

        Args:
            timeout: seconds. When four fifths are over, batches that are not ready are saved as their tickets with the
                rows that were gathered, and made after a restore. None waits for all of them.

        Raises:
            TimeoutError: a write, a gather or a stateful transform did not end in time.
            CheckpointError: something in the buffer cannot be saved; the message says where.
            TypeError, ValueError: the timeout is no number from 0 on.
        """
        self._check_caller("snapshot")
        timeout = seconds(timeout)
        await self._turn(within_frozen=True)
        return await self._snapshots.snapshot(timeout)

    async def state_dict(self, timeout: float | None = None) -> dict[str, Any]:
        """``snapshot(timeout).state_dict()``: plain data in memory of its own."""
        snapshot = await self.snapshot(timeout)
        return await in_thread(snapshot.state_dict)

    async def save(
        self,
        path: str | os.PathLike[str],
        timeout: float | None = None,
        *,
        base: str | os.PathLike[str] | None = None,
    ) -> None:
        """Write a checkpoint directory of this moment. Consumers and writers go on while it is being written.

        Args:
            path: the directory. A checkpoint that is there already is replaced in one step; a crash at any point
                leaves either the one or the other.
            timeout: as in ``snapshot``; the writing itself takes as long as it takes.
            base: another checkpoint of this buffer, in the same file system: rows that have not changed since are not
                written again. Either may be removed later. One that is replaced is used so without being asked for.

        Raises:
            CheckpointError: something in the buffer cannot be saved, or something else than a checkpoint is there.
            TimeoutError: as in ``snapshot``.
            OSError: the file system refuses.
            TypeError, ValueError: the path or the timeout is none.
        """
        # The working directory may change meanwhile.
        path, base = absolute(path), None if base is None else absolute(base, "base")
        snapshot = await self.snapshot(timeout)
        await self._snapshots.saves.ended_at(path)
        await snapshot.save(path, base=base)

    def save_soon(
        self,
        path: str | os.PathLike[str],
        timeout: float | None = None,
        *,
        base: str | os.PathLike[str] | None = None,
    ) -> SaveHandle:
        """Write a checkpoint directory of this moment, in the background.

        What is saved has its place in the history like a write: everything that was asked for before this call is in
        it, and nothing that is asked for afterwards, however long what came before takes. Writers go on as soon as that
        place has come. Consumers get no batch that was drawn before it until it is ready and copied; so this holds them
        up for as long as ``save`` does. With transforms that have a state, batches that are not ready at that moment
        are saved as their tickets, and made after a restore.

        Several saves to one path are written in the order of the calls, and ``save`` waits for those begun before it.
        ``aclose`` waits for all of them.

        Args:
            path: as in ``save``.
            timeout: seconds for the place in the history to come. When four fifths are over, batches that are not ready
                are saved as their tickets. None waits for all of them.
            base: as in ``save``.

        Returns:
            The handle: ``await handle`` waits until it is committed, and raises what ``save`` would have raised;
            ``handle.progress`` says how far it is, and ``handle.cancel()`` gives it up.

        Raises:
            AsyncBufError: the caller is within a transform of the buffer.
            RuntimeError: no event loop is running.
            TypeError, ValueError: the path or the timeout is none.
        """
        path, base = absolute(path), None if base is None else absolute(base, "base")
        self._check_caller("save_soon")
        timeout = seconds(timeout)
        self._turn(within_frozen=True)  # refuses other event loops; nobody waits
        return self._snapshots.save_soon(path, timeout, base)

    # -- restoring ----------------------------------------------------------------------------------------------------

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
            TypeError: it is no snapshot; the message says which call takes it.
        """
        self._check_caller("restore")
        snapshot_of(snapshot)
        flag(elastic, "elastic")
        await self._turn()
        await self._snapshots.restore(lambda: snapshot, elastic=elastic).apply()

    async def prepare_restore(self, snapshot: Snapshot, *, elastic: bool = False) -> Restore:
        """The first half of ``restore``: read, check and decode. For a coordinator that restores several things.

        Args:
            snapshot: the snapshot, which must not change before the second half.
            elastic: as in ``restore``.

        Returns:
            The second half, ``apply()``. Until then nothing has changed.

        Raises:
            CheckpointError: it does not fit, or is damaged.
            TypeError: as in ``restore``.
        """
        self._check_caller("prepare_restore")
        snapshot_of(snapshot)
        flag(elastic, "elastic")
        await self._turn()
        restore = self._snapshots.restore(lambda: snapshot, elastic=elastic)
        await restore.read()
        return restore

    async def load_state_dict(self, state_dict: dict[str, Any], *, elastic: bool = False) -> None:
        """``restore`` from a state dict, which stays the caller's."""
        self._check_caller("load_state_dict")
        state_dict_of(state_dict)
        flag(elastic, "elastic")
        await self._turn()
        await self._snapshots.restore(lambda: Snapshot.borrowed(state_dict), elastic=elastic).apply()

    async def load(self, path: str | os.PathLike[str], *, elastic: bool = False) -> None:
        """``restore`` from a checkpoint directory: everything is read and checked before anything changes.

        Raises:
            CheckpointNotFoundError: there is no checkpoint.
            CheckpointError: as in ``restore``.
        """
        path = absolute(path)
        flag(elastic, "elastic")
        self._check_caller("load")
        await self._turn()
        await self._snapshots.restore(lambda: Snapshot.open(path), elastic=elastic, moves=True).apply()

    dumps = save
    loads = load

    # -- pickling -----------------------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle a buffer that stands still, with its parts; unpickled, it goes on where it was once it is opened.

        Raises:
            TypeError: it is running. ``async with buffer.frozen():`` makes it stand still.
        """
        if not self._life.is_idle and not self._snapshots.freezer.is_frozen:
            raise TypeError(
                f"pickle: expected a buffer that is not open, or `async with buffer.frozen():` around; found {self!r}"
            )
        generator = self._generator
        return _rebuilt, (
            type(self),
            self._arguments,
            (str(generator.device), generator.get_state()),
            self._snapshots.pickled(),
        )


B = TypeVar("B", bound=SnapshotMethods)


def _rebuilt(
    kind: Callable[..., B], arguments: dict[str, Any], generator: tuple[str, torch.Tensor], saved: dict[str, Any]
) -> B:
    """The way back from a pickle."""
    device, state = generator
    buffer = kind(**arguments, generator=torch.Generator(device).set_state(state))
    buffer._snapshots.unpickle(saved)
    return buffer
