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
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

P = ParamSpec("P")
T = TypeVar("T")


class Turn:
    """A place in the queue.

    Attributes:
        run: what a draw does when its turn comes; None where a coroutine waits, which does it itself.
        exclusive: whether holds must be gone by then.
        waiter: resolved when the turn has come, or will not; None for a draw.
        error: why the turn will not come. Kept here and not in the future: an error that is raised out of a future
            holds the frames that hold the future.
        came: whether the turn has come.
    """

    __slots__ = ("came", "error", "exclusive", "run", "waiter")

    def __init__(
        self, *, exclusive: bool, run: Callable[[], None] | None = None, waiter: asyncio.Future[None] | None = None
    ) -> None:
        self.run = run
        self.exclusive = exclusive
        self.waiter = waiter
        self.error: BaseException | None = None
        self.came = False

    @property
    def given_up(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.waiter is not None and self.waiter.done()

    def refuse(self, error: BaseException) -> None:
        """Its time will not come."""
        assert self.waiter is not None
        self.error = error
        self.waiter.set_result(None)


class HistoryGate:
    """First-come readers/writer gate."""

    def __init__(self) -> None:
        self._queue: deque[Turn] = deque()
        self._readers = 0
        self._writing: Turn | None = None
        self._pumping = self._occupied = False
        self._given_up = 0
        # Those that wait for an exclusive turn, to be counted without a walk over the whole queue.
        self._writers: dict[Turn, None] = {}

    @property
    def readers(self) -> int:
        """Number of gathers that still read rows."""
        return self._readers

    @property
    def writing(self) -> bool:
        """Whether somebody whose turn has come is at it."""
        return self._writing is not None

    @property
    def is_free(self) -> bool:
        """Whether a draw that is asked for now takes effect now."""
        return not (self._queue or self._writing or self._pumping)

    @property
    def waiting_writers(self) -> int:
        """Number of writes that were asked for and have not begun."""
        return sum(not turn.given_up for turn in self._writers)

    def submit(self, action: Callable[[], None], *, exclusive: bool = False) -> Turn:
        """Run an action after all earlier writes; at once if there are none.

        Args:
            action: what to do; synchronous and short.
            exclusive: whether it must wait until no rows are being read, too.

        Returns:
            Its place, for ``withdraw``.
        """
        turn = Turn(exclusive=exclusive, run=action)
        self._queue.append(turn)
        self._pump()
        return turn

    def withdraw(self, turn: Turn) -> None:
        """Do not run an action that was submitted. Does nothing if it was run."""
        turn.run, turn.exclusive = None, False
        self._pump()

    def reset(self) -> None:
        """Forget everybody: the event loop in which they waited was closed."""
        self._queue.clear()
        self._writers.clear()
        self._readers = self._given_up = 0
        self._writing = None
        self._pumping = self._occupied = False

    def occupy(self) -> None:
        """Go on with what has its turn now in later steps of the event loop: no other turn comes before ``vacate``."""
        self._occupied = self._pumping = True

    def vacate(self) -> None:
        """What went on has ended; does nothing without."""
        if self._occupied:
            self._occupied = self._pumping = False
            self._pump()

    def acquire_read(self) -> None:
        """Rows are being read from now on; called within a draw."""
        self._readers += 1

    def release_read(self) -> None:
        """A gather has read its rows."""
        self._readers -= 1
        self._pump()

    async def apply(self, action: Callable[[], T], *, exclusive: bool) -> T:
        """Do something short in its turn.

        Args:
            action: what to do; synchronous.
            exclusive: whether it must wait until no rows are being read (a write), or not (a priority update).

        Returns:
            What the action returns. A cancelled call has not done it.
        """
        if self.is_free_for_writes if exclusive else self.is_free:
            return self.run_now(action)
        async with self.turn(exclusive=exclusive):
            return action()

    @property
    def is_free_for_writes(self) -> bool:
        """Whether a write that is asked for now takes effect now."""
        return not (self._readers or self._queue or self._writing or self._pumping)

    def run_now(self, action: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do something short whose turn is now, because nothing is in the way."""
        self._pumping = True  # draws that the action asks for come after it
        try:
            return action(*args, **kwargs)
        finally:
            self._pumping = self._occupied
            if self._queue:
                self._pump()

    @asynccontextmanager
    async def turn(self, *, exclusive: bool) -> AsyncIterator[None]:
        """Wait for a turn, and hold everything behind it off until the block ends.

        What is done in the block is done by the task that waited. So a call that is cancelled while it waits has done
        nothing, even if its turn came in the very step in which it was cancelled.
        """
        turn = await self.enter(exclusive=exclusive)
        try:
            yield
        finally:
            self.leave(turn)

    async def enter(self, *, exclusive: bool) -> Turn:
        """Wait for a turn, and hold everything behind it off until ``leave``, which any task may call."""
        turn = Turn(exclusive=exclusive, waiter=asyncio.get_running_loop().create_future())
        self._queue.append(turn)
        if exclusive:
            self._writers[turn] = None
        self._pump()
        try:
            await self._wait(turn)
        except BaseException:
            self.leave(turn)  # the turn may have come in the very step in which the wait was cancelled
            raise
        return turn

    def leave(self, turn: Turn) -> None:
        """End a turn. Does nothing if it has ended, or never came."""
        if self._writing is not turn:
            return
        assert turn.waiter is not None
        self._writing = None
        if turn.waiter.get_loop().is_closed():
            self.reset()  # those behind it waited in the same loop
        else:
            self._pump()

    async def _wait(self, turn: Turn) -> None:
        assert turn.waiter is not None
        try:
            await turn.waiter
        finally:
            if not turn.came:
                self._writers.pop(turn, None)
                self._forget_given_up()
        if turn.error is not None:
            error, turn.error = turn.error, None
            try:
                raise error
            finally:
                del error  # it holds this frame, which must not hold it in turn

    def _pump(self) -> None:
        if self._pumping:
            return
        self._pumping = True
        failure: BaseException | None = None
        try:
            while self._queue and not self._writing and not self._occupied:
                turn = self._queue[0]
                if turn.exclusive and self._readers and not turn.given_up:
                    break
                self._queue.popleft()
                if turn.run is not None:
                    try:
                        turn.run()
                    except BaseException as error:
                        failure = failure or error  # an error in one turn stops none of those behind it
                elif turn.waiter is not None and not turn.given_up:
                    turn.came = True
                    self._writers.pop(turn, None)
                    self._writing = turn
                    turn.waiter.set_result(None)
            if failure is not None:
                raise failure
        finally:
            self._pumping = self._occupied
            del failure  # it holds this frame, which must not hold it in turn

    def _forget_given_up(self) -> None:
        """A turn that nobody waits for must not hold up those behind it, nor stay in the queue for long."""
        self._given_up += 1
        if self._queue and self._queue[0].given_up:
            self._pump()
        if 2 * self._given_up > len(self._queue):
            # Seldom enough, so that giving up takes the same time however many turns there are.
            self._queue = deque(turn for turn in self._queue if not turn.given_up)
            self._given_up = 0

    def refuse(self, error: Callable[[], BaseException]) -> None:
        """Tell every coroutine that waits for its turn that it will not come."""
        for turn in self._queue:
            if not turn.given_up and turn.waiter is not None:
                turn.refuse(error())
        self._forget_given_up()
