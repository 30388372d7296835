"""Writers that a limiter holds back. They wait before the history, where they hold up neither draws nor snapshots."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from asyncbuf._runtime.supervisor import FAILURES, as_failure, detached

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncbuf._runtime.reentry import ReentryGuard
    from asyncbuf._runtime.stalls import Stalls
    from asyncbuf._table.table import Table
    from asyncbuf.rows import Placement


class Grant:
    """Leave to write some items, which counts until they are written or given back.

    Args:
        items: how many.
        nbytes: bytes of each.
        is_reserved: whether the items are still to be made.
    """

    __slots__ = ("is_reserved", "items", "nbytes")

    def __init__(self, items: int, nbytes: int, *, is_reserved: bool = False) -> None:
        self.items = items
        self.nbytes = nbytes
        self.is_reserved = is_reserved


class _Writer:
    """A call that waits.

    Attributes:
        items: how many it wants to write.
        nbytes: bytes of each.
        is_reserved: whether they are still to be made.
        before: a grant for the same items, which holds again if this call is not admitted.
        task: the task that waits.
        wake: resolved when it was admitted, or will not be.
        grant: what it was admitted with.
        error: why it will not be. Kept here and not in the future: an error that is raised out of a future holds the
            frames that hold the future.
    """

    __slots__ = ("before", "error", "grant", "is_reserved", "items", "nbytes", "task", "wake")

    def __init__(self, items: int, nbytes: int, *, is_reserved: bool) -> None:
        self.items = items
        self.nbytes = nbytes
        self.is_reserved = is_reserved
        self.before: Grant | None = None
        self.task: asyncio.Task[Any] | None = asyncio.current_task()
        self.wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.grant: Grant | None = None
        self.error: BaseException | None = None

    def admit(self, grant: Grant) -> None:
        """It may write."""
        self.grant = grant
        self.wake.set_result(None)

    def refuse(self, error: BaseException) -> None:
        """It will not be admitted."""
        self.error = error
        if not self.wake.done():
            self.wake.set_result(None)


class Admission:
    """First come, first served: a small write does not overtake a large one that waits.

    Items that were admitted count until they are written, so that nobody is admitted in their place.

    Args:
        table: whose limiter decides.
        guard: refuses to let a transform wait for the limiter, which may wait for the batch that it makes.
        stalls: told of calls that wait.
    """

    def __init__(self, table: Table, guard: ReentryGuard, stalls: Stalls) -> None:
        self._table = table
        self._guard = guard
        self._limits = table.limits
        # Ordered, so that taking the first and taking out any takes the same time however many there are.
        self._waiting: OrderedDict[_Writer, None] = OrderedDict()
        self._grants: set[Grant] = set()
        self._stalls = stalls

    @property
    def calls(self) -> list[tuple[object, asyncio.Task[Any] | None]]:
        """The calls that are held back, in order, each with its task."""
        return [(writer, writer.task) for writer in self._waiting if not writer.wake.done()]

    @property
    def is_writing(self) -> bool:
        """Whether items were admitted and are not written yet."""
        return bool(self._grants)

    @property
    def waiting(self) -> int:
        """Number of writers that are held back."""
        return len(self._waiting)

    def admit_now(self, items: int, nbytes: int = 0, *, is_reserved: bool = False) -> Grant | None:
        """As ``admit`` or ``admit_reserved``, without waiting; None if the call has to wait.

        Raises:
            Exception: the limiter says that they never can be written.
        """
        # Asked even if others wait: what can never be written is refused at once.
        if not self._may_write(items, nbytes) or self._waiting:
            return None
        return self._granted(items, nbytes, is_reserved=is_reserved)

    async def admit(self, items: int, nbytes: int = 0) -> Grant:
        """Wait until so many items, of so many bytes each, may be written. The caller writes them, or gives them back.

        A cancelled call was not admitted.

        Raises:
            Exception: the limiter says that they never can be written, or the buffer takes no more.
            AsyncBufError: they are held back, and the call comes from within a transform that makes a batch.
        """
        grant = self.admit_now(items, nbytes)
        return grant or await self._admitted(_Writer(items, nbytes, is_reserved=False), "extend() or add")

    # -- room for what is still to be made ----------------------------------------------------------------------------

    async def admit_reserved(self, items: int) -> Grant:
        """As ``admit``, for items that are still to be made: each counts with the mean bytes of a stored one."""
        nbytes = self._limits.typical_nbytes(self._table.rows)
        grant = self.admit_now(items, nbytes, is_reserved=True)
        return grant or await self._admitted(_Writer(items, nbytes, is_reserved=True), "reserve")

    async def settle(self, grant: Grant, items: int, nbytes: int) -> None:
        """Wait until what was admitted may be written with the bytes that it turned out to have: first in line.

        A call that is cancelled or refused leaves the grant as it was.

        Raises:
            Exception: as of ``admit``.
        """
        if nbytes == grant.nbytes or not self.end(grant):
            return
        try:
            fits = self._may_write(items, nbytes)
        except BaseException:
            self._hold(grant)
            raise
        if not fits:
            writer = _Writer(items, nbytes, is_reserved=True)
            writer.before = grant
            try:
                self.end(await self._admitted(writer, "commit", is_first=True))
            except BaseException:
                self._keep(writer)
                raise
        grant.items, grant.nbytes = items, nbytes
        self._hold(grant)

    def restore(self, grant: Grant, items: int, nbytes: int) -> None:
        """A grant is for so many items again, of so many bytes: they were not written. Nothing if it has ended."""
        if (grant.items, grant.nbytes) != (items, nbytes) and self.end(grant):
            grant.items, grant.nbytes = items, nbytes
            self._hold(grant)

    def shrink(self, grant: Grant, items: int) -> None:
        """Give back a part of a grant; does nothing if it has ended."""
        if items and self.end(grant):
            grant.items -= items
            self._hold(grant)
            self.changed()

    # -- those that wait ----------------------------------------------------------------------------------------------

    async def _admitted(self, writer: _Writer, call: str, *, is_first: bool = False) -> Grant:
        with self._guard.waiting(call, why="the limiter may hold it back until that batch is handed over"):
            await self._waited(writer, is_first=is_first)
        if writer.grant is not None:
            return writer.grant
        assert writer.error is not None
        error, writer.error = writer.error, None
        try:
            raise error
        finally:
            del error  # it holds this frame, which must not hold it in turn

    async def _waited(self, writer: _Writer, *, is_first: bool) -> None:
        self._waiting[writer] = None
        if is_first:
            self._waiting.move_to_end(writer, last=False)
        self._stalls.writer_waits(self)
        try:
            await writer.wake
        except BaseException:
            self._leave(writer)
            raise
        finally:
            writer.task = None  # it will have the error, whose frames have the writer
            self._stalls.waited()

    def _may_write(self, items: int, nbytes: int) -> bool:
        return bool(self._limits.may_write(self._table.rows, items, nbytes))

    def _granted(self, items: int, nbytes: int, *, is_reserved: bool = False) -> Grant:
        grant = Grant(items, nbytes, is_reserved=is_reserved)
        self._hold(grant)
        return grant

    def _hold(self, grant: Grant) -> None:
        self._grants.add(grant)
        self._limits.admitted += grant.items
        self._limits.admitted_nbytes += grant.items * grant.nbytes

    def _keep(self, writer: _Writer) -> None:
        """A call is not admitted: what it had before holds again, ahead of those that wait."""
        before, writer.before = writer.before, None
        if before is not None:
            self._hold(before)

    def _leave(self, writer: _Writer) -> None:
        """A call was cancelled, perhaps in the very step in which it was admitted."""
        self._keep(writer)
        if writer in self._waiting:
            del self._waiting[writer]
            self.changed()  # the one behind it may want less
        elif writer.grant is not None:
            self.give_back(writer.grant)

    def give_back(self, grant: Grant) -> None:
        """End a grant whose items were not written; does nothing if it has ended."""
        if self.end(grant):
            self.changed()
            if self._waiting and grant.is_reserved:  # work has ended that the others may have waited for
                self._stalls.look_soon()

    def wrote(self, grant: Grant, placement: Placement) -> None:
        """End a grant, whose items are in the table now."""
        if self.end(grant) and self._limits.notes_rows:
            self._limits.wrote(placement, grant.nbytes)

    def end(self, grant: Grant) -> bool:
        """End a grant; whether it had not ended before."""
        if grant not in self._grants:
            return False
        self._grants.remove(grant)
        self._limits.admitted -= grant.items
        self._limits.admitted_nbytes -= grant.items * grant.nbytes
        return True

    def changed(self) -> None:
        """The table has changed: those that wait may be admitted now, in their order."""
        while self._waiting:
            writer = next(iter(self._waiting))
            if writer.wake.done():
                del self._waiting[writer]  # cancelled: it has not been told yet
                self._keep(writer)
                continue
            try:
                if not self._may_write(writer.items, writer.nbytes):
                    return
            except BaseException as error:
                del self._waiting[writer]
                self._keep(writer)
                writer.refuse(detached(as_failure(error)))
                if not isinstance(error, FAILURES):
                    raise
            else:
                del self._waiting[writer]
                writer.admit(self._granted(writer.items, writer.nbytes, is_reserved=writer.is_reserved))

    def refuse(self, error: Callable[[], Exception]) -> None:
        """Tell everybody that waits that it will not be admitted."""
        waiting, self._waiting = self._waiting, OrderedDict()
        for writer in waiting:
            self._keep(writer)
            writer.refuse(error())

    def forget(self) -> None:
        """The event loop of those that waited or wrote was closed: none of them goes on."""
        for writer in self._waiting:
            writer.before = None
        self._waiting.clear()
        self._grants.clear()
        self._limits.admitted = self._limits.admitted_nbytes = 0

    def blocked(self) -> list[str]:
        """In words, what the first of those that wait lacks."""
        if not self._waiting:
            return []
        first = next(iter(self._waiting))
        answer = self._limits.may_write(self._table.rows, first.items, first.nbytes)
        reason = "its turn has come" if answer is True else answer.reason
        which = "the first, a reservation," if first.is_reserved else "the first"
        found = [f"{len(self._waiting)} writer(s) wait for the limiter, {which} with {first.items} item(s): {reason}"]
        reserved = [grant.items for grant in self._grants if grant.is_reserved]
        if reserved:
            found.append(f"{len(reserved)} reservation(s) or group(s) at work hold room for {sum(reserved)} item(s)")
        return found
