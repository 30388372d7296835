"""A snapshot of the moment in which it is asked for, which nobody has to wait for.

``Freezer`` brings a buffer to rest first, and takes what is there then: writes and draws that are asked for meanwhile
are part of it. Here the place in the history is taken with the request, like that of a write, and nothing that is asked
for later gets in. The rows and most parts are taken in that turn. A stateful transform that is at work then has to end
before its state can be taken; no other one begins in between. Batches that are being prepared are lent, so that nobody
gets them, until they are ready and copied.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from asyncbuf._runtime.supervisor import detached
from asyncbuf._runtime.threads import in_thread

if TYPE_CHECKING:
    from asyncbuf._prefetch.entry import Loan
    from asyncbuf._prefetch.standstill import Standstill, TicketsAt
    from asyncbuf._prefetch.tickets import Tickets
    from asyncbuf._table.gate import HistoryGate, Turn
    from asyncbuf.checkpoint._buffer_state import BufferState, Taken
    from asyncbuf.checkpoint.snapshot import Snapshot

# The part of a timeout after which batches that are not ready are saved as their tickets.
_SETTLE_SHARE = 0.8


class RequestedSnapshot:
    """A snapshot of the moment in which this object is made. Whoever makes it calls ``release`` in the end.

    Args:
        state: the parts of the buffer.
        standstill: its tickets.
        gate: its history.
        timeout: seconds for the turn to come, and for batches that are being prepared; None for as long as it takes.
        is_now: whether the caller holds the history, so that its turn is now.
    """

    def __init__(
        self, state: BufferState, standstill: Standstill, gate: HistoryGate, timeout: float | None, *, is_now: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        self._state = state
        self._standstill = standstill
        self._gate = gate
        self._timeout = timeout
        self._start = loop.time()
        self._is_over = False
        self._came: asyncio.Future[None] = loop.create_future()
        self._error: BaseException | None = None
        self._taken: Taken | None = None
        self._noted: TicketsAt | None = None
        self._tickets: Tickets | None = None
        self._loan: Loan | None = None
        self._turn: Turn | None = None
        if is_now:
            self._take()
        else:
            self._turn = gate.submit(self._take, exclusive=True)

    @property
    def is_taken(self) -> bool:
        """Whether its turn has come."""
        return self._taken is not None or self._came.done()

    def _take(self) -> None:
        """The turn has come: nothing is being written or gathered. Must not raise: others wait for their turns."""
        if self._is_over:
            return
        try:
            self._taken = self._state.take()
            self._noted = self._standstill.note()
            self._loan = self._standstill.lend()
            self._standstill.when_at_rest(self._take_transforms)
        except BaseException as error:
            self._fail(error)

    def _take_transforms(self) -> None:
        """No stateful transform is at work, and none has begun since the turn. Must not raise."""
        if self._is_over or self._taken is None or self._noted is None:
            return
        try:
            self._state.take_transforms(self._taken)
            if self._state.is_ordered:
                # What becomes of them from now on changes states that are taken.
                self._tickets = self._noted.saved()
        except BaseException as error:
            self._fail(error)
        else:
            self._settle_future()

    def _fail(self, error: BaseException) -> None:
        self._error = detached(error)
        self._settle_future()

    def _settle_future(self) -> None:
        if not self._came.done():
            self._came.set_result(None)

    async def complete(self) -> Snapshot:
        """Wait until it is there.

        Raises:
            TimeoutError: a write, a gather or a stateful transform before it did not end in time.
            CheckpointError: something cannot be saved; the message says where.
        """
        await self._moment()
        deadline = None if self._timeout is None else self._start + _SETTLE_SHARE * self._timeout
        assert self._noted is not None
        assert self._taken is not None
        if self._tickets is None:
            await self._standstill.settle_those(self._noted, deadline)
            self._tickets = self._noted.saved()
        loop = asyncio.get_running_loop()

        def copied() -> None:
            loop.call_soon_threadsafe(self._give_back, 1)

        return await in_thread(self._taken.snapshot, self._tickets, copied)

    async def _moment(self) -> None:
        """Wait until everything is taken that may change."""
        left = None
        if self._timeout is not None:
            left = max(0.0, self._start + self._timeout - asyncio.get_running_loop().time())
        if not self._came.done():
            await asyncio.wait({self._came}, timeout=left)
        if not self._came.done():
            what = "writes or gathers before it" if self._taken is None else "a stateful transform that is at work"
            raise TimeoutError(f"save_soon: after {self._timeout} s it still waits for {what}")
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # it holds this frame, which must not hold it in turn

    def _give_back(self, count: int | None = None) -> None:
        if self._loan is not None:
            self._standstill.give_back(self._loan, count)

    def release(self) -> None:
        """Nobody wants it any more: let go of everything. May be called again."""
        if self._is_over:
            return
        self._is_over = True
        if self._turn is not None and self._taken is None:
            self._gate.withdraw(self._turn)
        self._give_back()
        self._taken = self._noted = self._tickets = self._loan = self._turn = None
