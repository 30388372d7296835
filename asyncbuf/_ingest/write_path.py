"""The way of items into the table: check, admit, wait for the turn, place, ask the sampler, copy, tell."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import sys
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np
import torch

from asyncbuf._ingest.claims import DuplicateError
from asyncbuf._runtime.lifecycle import State
from asyncbuf._runtime.shield import shielded
from asyncbuf._runtime.supervisor import FAILURES
from asyncbuf._runtime.threads import finish
from asyncbuf._table import checks
from asyncbuf._table.versioned import REFUSED, VersionedTable
from asyncbuf.batch import Batch, drawn_rows
from asyncbuf.errors import AsyncBufError, BufferClosedError
from asyncbuf.rows import Placement

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncbuf._ingest.admission import Admission, Grant
    from asyncbuf._ingest.claims import Claim
    from asyncbuf._ingest.last_writer import LastWriter
    from asyncbuf._ingest.room import Room
    from asyncbuf._runtime.lifecycle import Lifecycle
    from asyncbuf._runtime.threads import Threads
    from asyncbuf._table.gate import HistoryGate
    from asyncbuf._table.table import Table
    from asyncbuf.rows import Int64Array, WriteEvent
    from asyncbuf.storage import Prepared

    Prepare = Callable[[Any], Prepared]

# A larger write is copied by a thread.
INLINE_BYTES = 1024 * 1024
# A sampler that is ours is told of so many items in one step of the event loop.
_MOST_TOLD = 4096
_DONE = object()
_SAMPLER_BROKEN = "the items were written, but the sampler did not take that"


class Draws(Protocol):
    """What the writing part needs of the one that draws batches."""

    finished: bool

    def table_changed(self) -> None:
        """The table has other rows than before: consumers may have waited for them."""


class WritePath:
    """Writes and removes items, each call in its turn of the history.

    Args:
        table: what they go into.
        gate: the history.
        threads: where large writes are copied.
        admission: where writers wait that a limiter holds back; None if it holds back none.
        life: that of the buffer.
        draws: told of changes; says whether no more items are taken.
        fail: ends the background work of an open buffer with an error.
        last_writer: is told who writes.

    Attributes:
        admission: the same.
        last_writer: the task that wrote last.
    """

    def __init__(
        self,
        table: Table,
        gate: HistoryGate,
        threads: Threads,
        admission: Admission | None,
        life: Lifecycle,
        draws: Draws,
        fail: Callable[[BaseException], None],
        last_writer: LastWriter,
    ) -> None:
        self._table = table
        self._storage = table.storage_calls
        self._gate = gate
        self._threads = threads
        self.admission = admission
        self._life = life
        self._draws = draws
        self._fail = fail
        self.last_writer = last_writer
        # What parts of a user keep of a write must not depend on who writes: torch modes, numpy.errstate and the like.
        self._asks_others = table.asks_others_to_write
        self._versions = table if isinstance(table, VersionedTable) else None
        self._most_at_once = _MOST_TOLD if table.takes_parts else sys.maxsize

    async def write(
        self,
        prepare: Prepare,
        items: Any,
        priority: Any = None,
        table: Any = None,
        *,
        written: Callable[[], None] | None = None,
        version: Any = None,
        begin: Callable[[], None] | None = None,
        room: Room | None = None,
    ) -> Placement:
        """Write items: all of them or, with an error, none.

        Args:
            prepare: ``prepare`` or ``prepare_one`` of the storage.
            items: what it takes.
            priority: the priorities of the items: float ``[items]``, or one number for all; None if they have none.
            table: name of the table that they go into; None if the writer has no tables.
            written: called in the step in which the items are in the table; must not fail.
            version: the versions of the model that made the items: ints ``[items]``, or one for all; None if none was
                said.
            begin: called in the turn of the write, before anything changes; an error of it refuses the write.
            room: what was admitted for the items; None if nothing was.

        Returns:
            Where they went; with ``REFUSED`` as its note, nowhere, because all of them are too old.
        """
        self.check_writable()
        if priority is not None or table is not None or written is not None or version is not None:
            if table is not None:
                self._table.check_into(table)
            if version is not None and self._versions is None:
                raise TypeError("version: expected none, because the buffer was made without staleness; found one")
            more = {"table": table, "written": written}
            prepare = functools.partial(_prepared, prepare, priority, version, more)
        self.last_writer.note()
        prepared = prepare(items)
        if room is not None:
            return await self._write_reserved(room, prepared, prepare, items, begin)
        is_quick = self._is_small(prepared) and self._gate.is_free_for_writes
        if self.admission is not None:
            if is_quick and (placement := self._write_now(self.admission, prepared, begin)) is not None:
                return placement
            return await self._write_admitted(self.admission, prepared, prepare, items, begin)
        if is_quick:
            if begin is not None:
                return self._gate.run_now(self._write_begun, prepared, None, begin)
            return self._gate.run_now(self._write_here, prepared)
        return await self._write_in_turn(prepared, prepare, items, None, begin)

    async def write_once(
        self,
        claim: Claim,
        prepare: Prepare,
        items: Any,
        priority: Any = None,
        table: Any = None,
        version: Any = None,
        room: Room | None = None,
    ) -> bool:
        """Write items, unless they were written before; otherwise as ``write``.

        Args:
            claim: decides that in the turn of the write.
            prepare: as in ``write``.
            items: as in ``write``.
            priority: as in ``write``.
            table: as in ``write``.
            version: as in ``write``.
            room: as in ``write``.

        Returns:
            Whether they were written now.
        """
        try:
            if claim.may_be_taken():
                # A limiter must not hold back what is not written: so this is asked before, in a turn of its own.
                self.check_writable()
                await self._gate.apply(claim.begin, exclusive=True)
            placement = await self.write(
                prepare, items, priority, table, written=claim.written, version=version, begin=claim.begin, room=room
            )
        except DuplicateError:
            return False
        if placement.note is REFUSED:
            claim.refused()
            return False
        return True

    def _is_small(self, prepared: Prepared) -> bool:
        return prepared.nbytes <= INLINE_BYTES and prepared.count <= self._most_at_once

    def _write_now(
        self, admission: Admission, prepared: Prepared, begin: Callable[[], None] | None
    ) -> Placement | None:
        """Write in this step, if the limiter lets it through; otherwise None."""
        grant = admission.admit_now(prepared.count, self._table.limits.weigh(prepared))
        if grant is None:
            return None
        try:
            return self._gate.run_now(self._write_begun, prepared, grant, begin)
        finally:
            admission.give_back(grant)

    async def _write_admitted(
        self,
        admission: Admission,
        prepared: Prepared,
        prepare: Prepare,
        items: Any,
        begin: Callable[[], None] | None,
    ) -> Placement:
        grant = await admission.admit(prepared.count, self._table.limits.weigh(prepared))
        try:
            return await self._write_in_turn(self._confirmed(prepared, prepare, items), prepare, items, grant, begin)
        finally:
            admission.give_back(grant)

    async def _write_reserved(
        self, room: Room, prepared: Prepared, prepare: Prepare, items: Any, begin: Callable[[], None] | None
    ) -> Placement:
        """As ``_write_admitted``, with what was admitted before; an error leaves that as it is."""
        before = room.grant.items, room.grant.nbytes
        await room.settle(prepared.count, self._table.limits.weigh(prepared))
        try:
            confirmed = self._confirmed(prepared, prepare, items)
            return await self._write_in_turn(confirmed, prepare, items, room.grant, begin)
        except BaseException:
            room.restore(*before)  # unless they were written all the same
            raise

    async def _write_in_turn(
        self,
        prepared: Prepared,
        prepare: Prepare,
        items: Any,
        grant: Grant | None,
        begin: Callable[[], None] | None,
    ) -> Placement:
        if not self._is_small(prepared):
            return await self._write_in_thread(prepared, prepare, items, grant, begin)
        if self._gate.is_free_for_writes:
            return self._gate.run_now(self._write_begun, prepared, grant, begin)
        async with self._gate.turn(exclusive=True):
            return self._write_begun(self._confirmed(prepared, prepare, items), grant, begin)

    def _write_begun(self, prepared: Prepared, grant: Grant | None, begin: Callable[[], None] | None) -> Placement:
        if begin is not None:
            begin()
        return self._write_here(prepared, grant)

    def _write_here(self, prepared: Prepared, grant: Grant | None = None) -> Placement:
        if self._asks_others:
            placement = shielded(self._write_rows, prepared, grant)
        elif self._versions is not None and self._versions.refuses(prepared):
            return Placement(prepared.count, (), REFUSED)
        else:  # the same without what only others need: this is worth a tenth of the time of a small write
            placement = self._table.place(prepared.count)
            self._storage.write(prepared, placement.runs)
            self._table.commit(placement)
            if self._versions is not None:
                placement = self._versions.noted(placement)
            if grant is not None:
                self._end(grant, placement)
        if prepared.written is not None and placement.note is not REFUSED:
            prepared.written()
        self._draws.table_changed()
        return placement

    def _write_rows(self, prepared: Prepared, grant: Grant | None) -> Placement:
        if self._versions is not None and self._versions.refuses(prepared):
            return Placement(prepared.count, (), REFUSED)
        placement, event = self._place(prepared)
        self._storage.write(prepared, placement.runs)
        self._commit(placement, event, grant)
        return placement if self._versions is None else self._versions.noted(placement)

    def _place(self, prepared: Prepared) -> tuple[Placement, WriteEvent | None]:
        placement = self._table.place_items(prepared)
        return placement, self._table.check_write(placement, prepared) if self._table.has_write_events else None

    async def _write_in_thread(
        self,
        prepared: Prepared,
        prepare: Prepare,
        items: Any,
        grant: Grant | None,
        begin: Callable[[], None] | None,
    ) -> Placement:
        try:
            async with self._gate.turn(exclusive=True):
                prepared = self._confirmed(prepared, prepare, items)
                cancelled = None
                if begin is not None:
                    begin()
                if self._versions is not None and shielded(self._versions.refuses, prepared):
                    return Placement(prepared.count, (), REFUSED)
                placement, event = shielded(self._place, prepared)
                copied = self._threads.copy(self._storage.write, prepared, placement.runs)
                cancelled = await finish(copied)
                copied.result()
                try:
                    cancelled = await self._commit_in_parts(placement, event, grant) or cancelled
                except GeneratorExit:  # the event loop was closed, and the items are in the table all the same
                    if prepared.written is not None:
                        prepared.written()
                    raise
                if self._versions is not None:
                    placement = self._versions.noted(placement)
                if prepared.written is not None:
                    prepared.written()
                self._draws.table_changed()
        finally:
            if self._life.is_idle:
                self._threads.abandon()  # nobody would end them later
        try:
            if cancelled is not None:
                raise cancelled
        finally:
            del cancelled
        return placement

    def _confirmed(self, prepared: Prepared, prepare: Prepare, items: Any) -> Prepared:
        """What was prepared, now that its turn has come: writes before it may have closed or shaped the buffer."""
        self.check_writable()
        return prepared if self._storage.is_current(prepared) else prepare(items)

    def _commit(self, placement: Placement, event: WriteEvent | None, grant: Grant | None) -> None:
        self._make_valid(placement, grant)
        try:
            self._table.wrote(placement, event)
        except BaseException as error:
            self._broken(error, _SAMPLER_BROKEN)

    def _make_valid(self, placement: Placement, grant: Grant | None) -> None:
        try:
            self._table.commit(placement)
        except BaseException as error:
            self._broken(error, "the items were written, but the writer did not take that")
        self._end(grant, placement)

    async def _commit_in_parts(
        self, placement: Placement, event: WriteEvent | None, grant: Grant | None
    ) -> asyncio.CancelledError | None:
        """As ``_commit``; others have a turn of the event loop, not of the history, between the parts of a large write.

        Returns:
            The cancellation that came meanwhile; else None.
        """
        shielded(self._make_valid, placement, grant)
        telling = self._table.telling(placement, event, self._most_at_once)
        cancelled = None
        try:
            while shielded(next, telling, _DONE) is not _DONE:
                try:
                    await asyncio.sleep(0)
                except asyncio.CancelledError as error:
                    cancelled = error
        except BaseException as error:
            if not isinstance(error, GeneratorExit):
                self._broken(error, _SAMPLER_BROKEN)
            for _ in telling:  # the event loop was closed: nobody comes back to it
                pass
            raise
        try:
            return cancelled
        finally:
            del cancelled

    def _end(self, grant: Grant | None, placement: Placement) -> None:
        """The items are in the table: they do not count as admitted any more."""
        if grant is not None and self.admission is not None:
            self.admission.wrote(grant, placement)

    def _broken(self, error: BaseException, what: str) -> NoReturn:
        """A part has raised where it must not: its state does not go with the rows any more."""
        self._fail(error)
        if not isinstance(error, FAILURES):
            raise error
        raise AsyncBufError(
            f"{what}: {error!r}. Its state does not go with the rows any more: restore a checkpoint, or make a new "
            "buffer"
        ) from error

    def soon(self, action: Callable[[], None]) -> None:
        """Do something in the event loop of the buffer; at once, if it has none. Called from any thread."""
        loop = self._life.loop
        if loop is None:
            action()
        elif not loop.is_closed():
            loop.call_soon_threadsafe(action)

    def check_writable(self) -> None:
        """Refuse items that the buffer does not take.

        Raises:
            BufferClosedError: it was closed, or ``finish`` was called.
            BufferFailedError: the background work ended.
        """
        life = self._life
        if life.reason is not None and life.state is not State.NEW:
            raise life.reason()
        if self._draws.finished:
            raise BufferClosedError("finish() was called: the buffer takes no more items")

    async def remove(self, which: Any) -> int:
        """Remove the rows of a batch, or bare rows: how many left."""
        rows, write_count = drawn_rows(which)
        rows = shielded(checks.row_numbers, rows, self._table.storage.capacity, "remove")
        return await self._gate.apply(functools.partial(self._remove, rows, write_count), exclusive=True)

    def _remove(self, rows: Int64Array, write_count: int | None) -> int:
        try:
            count = self._table.remove(rows, write_count)
        except BaseException as error:
            self._broken(error, "rows were removed, but a part of the buffer did not take that")
        self._draws.table_changed()
        return count

    async def update_priority(self, which: Any, priority: Any) -> None:
        """Tell the sampler new priorities for the rows of a batch, or for bare rows."""
        rows, write_count = drawn_rows(which)
        update = functools.partial(
            self._update_priority, rows, priority, write_count, is_batch=isinstance(which, Batch)
        )
        await self._gate.apply(update, exclusive=False)

    def _update_priority(self, rows: Any, priority: Any, write_count: int | None, *, is_batch: bool) -> None:
        self._table.update_priority(rows, priority, write_count, is_batch=is_batch)
        self._draws.table_changed()


def _prepared(prepare: Prepare, priority: Any, version: Any, more: dict[str, Any], items: Any) -> Prepared:
    """Items that come with priorities or versions, go into a table, or with something to do when they are written."""
    found = prepare(items)
    if version is not None:
        more = {**more, "version": checks.versions(version, found.count)}
    if priority is not None:
        if isinstance(priority, float):
            priority = np.float64(priority)  # not by way of float32
        values = checks.priorities(priority, found.count, is_batch=False)
        more = {**more, "priority": values.to(torch.float64).numpy().copy()}
    return dataclasses.replace(found, **more)
