"""One history: writes, draws and priority updates take effect in the order in which they were asked for.

A readers/writer gate, first come, first served. A draw takes effect at once when its turn comes, and may leave a *hold*
behind while a thread still gathers its rows; holds do not stop other draws, but a write waits until there are none. So
a gather sees the rows as they were at its draw, and nothing ever waits for a consumer.

Every change of state is a plain synchronous method. All methods belong to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

T = TypeVar("T")


class _Turn(NamedTuple):
    """A place in the queue.

    Attributes:
        run: what to do when the turn comes.
        alone: whether holds must be gone by then.
        waiter: the future of the coroutine that asked; None for a draw, for which nobody waits here.
    """

    run: Callable[[], None]
    alone: bool
    waiter: asyncio.Future[Any] | None


class HistoryGate:
    """First-come readers/writer gate."""

    def __init__(self) -> None:
        self._queue: deque[_Turn] = deque()
        self._holds = 0
        self._writing = False
        self._pumping = False

    @property
    def holds(self) -> int:
        """Number of gathers that still read rows."""
        return self._holds

    @property
    def writing(self) -> bool:
        """Whether a thread is copying a write."""
        return self._writing

    @property
    def waiting_writers(self) -> int:
        """Number of writes that were asked for and have not begun."""
        return sum(turn.alone for turn in self._queue)

    def draw(self, action: Callable[[], None]) -> None:
        """Do something as soon as every write asked for before it has taken effect: now, if none is waiting."""
        self._queue.append(_Turn(action, False, None))
        self._pump()

    def hold(self) -> None:
        """Rows are being read from now on; called within a draw."""
        self._holds += 1

    def release(self) -> None:
        """A gather has read its rows."""
        self._holds -= 1
        self._pump()

    async def apply(self, action: Callable[[], T], *, alone: bool) -> T:
        """Do something short in its turn.

        Args:
            action: what to do; synchronous.
            alone: whether it must wait until no rows are being read (a write), or not (a priority update).

        Returns:
            What the action returns. A cancelled wait has not done the action, unless its turn had come already.
        """
        if not self._queue and not self._writing and not self._pumping and not (alone and self._holds):
            result = action()
            # The action may have asked for draws while it looked as if nobody was at the gate.
            self._pump()
            return result
        waiter: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def run() -> None:
            try:
                result = action()
            except BaseException as error:  # whatever it is, it belongs to the coroutine that asked
                waiter.set_exception(error)
            else:
                waiter.set_result(result)

        return await self._turn(waiter, run, alone)

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Hold everything else off while a thread copies a write."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def run() -> None:
            self._writing = True
            waiter.set_result(None)

        try:
            await self._turn(waiter, run, alone=True)
            yield
        finally:
            # The turn may have come in the very step in which the wait was cancelled: look at the turn, not the wait.
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._writing = False
                self._pump()

    async def _turn(self, waiter: asyncio.Future[T], run: Callable[[], None], alone: bool) -> T:
        self._queue.append(_Turn(run, alone, waiter))
        self._pump()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self._pump()  # those behind it may go on now
            elif waiter.done():
                waiter.exception()  # seen; the cancellation says more
            raise

    def _pump(self) -> None:
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._queue and not self._writing:
                turn = self._queue[0]
                given_up = turn.waiter is not None and turn.waiter.done()
                if turn.alone and self._holds and not given_up:
                    return
                self._queue.popleft()
                if not given_up:
                    turn.run()
        finally:
            self._pumping = False

    def refuse(self, error: Callable[[], BaseException]) -> None:
        """Tell every coroutine that waits for its turn that it will not come."""
        for turn in self._queue:
            if turn.waiter is not None and not turn.waiter.done():
                turn.waiter.set_exception(error())
        self._pump()
