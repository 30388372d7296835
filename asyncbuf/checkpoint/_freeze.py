"""Standing still: nothing is written, drawn or handed over until whoever asked for that lets go.

Locks are taken in one order everywhere: delivery, then the history. Both are given back by a plain function, so that
any task of the event loop, a timer, or the garbage collector can end a standstill.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import warnings
import weakref
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple, Self

from asyncbuf.errors import AsyncBufError, WrongLoopError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from types import TracebackType

    from asyncbuf._prefetch.standstill import Hold, Standstill
    from asyncbuf._runtime.reentry import ReentryGuard
    from asyncbuf._table.gate import HistoryGate, Turn
    from asyncbuf.checkpoint.snapshot import Snapshot

# The part of a timeout after which batches that are not ready are saved as their tickets.
_SETTLE_SHARE = 0.8


class FreezeState(enum.Enum):
    """Where a freeze is in its life."""

    HELD = "held"
    RELEASED = "released"
    EXPIRED = "expired"


class _Mark:
    """Stands for a freeze in the contexts of those that are within it."""

    __slots__ = ("is_over",)

    def __init__(self) -> None:
        self.is_over: bool = False


# A task that is started within a freeze inherits this, and is within it too, for as long as it lasts.
_within: ContextVar[tuple[_Mark, ...]] = ContextVar("asyncbuf_within", default=())


def is_within_any() -> bool:
    """Whether the caller is within a freeze, of whatever buffer."""
    return any(not mark.is_over for mark in _within.get())


class MutualWaitError(AsyncBufError):
    """Two callers that each are within a freeze would wait for the freeze of the other, for ever."""


class _Wait(NamedTuple):
    """A call from within freezes that waits for another buffer.

    Attributes:
        marks: of the freezes that the caller is within.
        freezer: that of the buffer that it waits for.
    """

    marks: tuple[_Mark, ...]
    freezer: Freezer


_waits: list[_Wait] = []


class Standing:
    """A standstill, from the moment when somebody asks for it.

    Attributes:
        what: who wants it, in words.
        waits_for: what for, in words, until it has come.
        loop: the event loop in which it is wanted.
        is_queued: whether it waits for its turn in the history.
        hold: of the delivery; None before that is held.
        turn: in the history; None before that has come.
    """

    __slots__ = ("hold", "is_queued", "loop", "turn", "waits_for", "what")

    def __init__(self, what: str, waits_for: Callable[[], str]) -> None:
        self.what = what
        self.waits_for = waits_for
        self.loop = asyncio.get_running_loop()
        self.is_queued = False
        self.hold: Hold | None = None
        self.turn: Turn | None = None


class Freeze:
    """A buffer that stands still until it is released, by ``release`` or at the end of a ``with`` block.

    The task that took it, those that enter its ``with`` block, and tasks that they start meanwhile are *within*: there,
    ``snapshot``, ``state_dict``, ``save``, ``stats``, ``why_blocked`` and pickling work at once, and a call that could
    only be answered after the end raises. Other tasks wait for the end.

    Any task of the event loop may release it, so a coordinator can freeze several buffers and let go of them elsewhere.
    """

    def __init__(
        self,
        capture: Callable[[], Awaitable[Snapshot]],
        let_go: Callable[[], None],
        hold: float | None,
    ) -> None:
        self._state = FreezeState.HELD
        self.mark: _Mark = _Mark()
        self._capture = capture
        self._let_go = let_go
        self._hold = hold
        self._loop = asyncio.get_running_loop()
        self._timer = None if hold is None else self._loop.call_later(hold, self._end, FreezeState.EXPIRED)
        self.enter_context()

    @property
    def state(self) -> FreezeState:
        """Whether the buffer still stands still, was released, or was let go when the time was over."""
        if self._state is FreezeState.HELD and self._loop.is_closed():
            self._end(FreezeState.EXPIRED)  # nobody can release it any more
        return self._state

    @property
    def is_held(self) -> bool:
        """Whether the buffer still stands still."""
        return self.state is FreezeState.HELD

    @property
    def ends_by_itself(self) -> bool:
        """Whether it has a deadline."""
        return self._timer is not None

    @property
    def is_within(self) -> bool:
        """Whether the caller is within."""
        return self.is_held and self.mark in _within.get()

    def enter_context(self) -> None:
        """Let the caller, and the tasks that it starts from now on, be within."""
        marks = [mark for mark in _within.get() if not mark.is_over and mark is not self.mark]
        _within.set((*marks, self.mark))

    def capture(self) -> Awaitable[Snapshot]:
        """Take a snapshot in this very step. It may be awaited after the release.

        Returns:
            An awaitable of the snapshot, which is complete once the batches in it are copied.

        Raises:
            AsyncBufError: the buffer does not stand still any more.
            CheckpointError: something in the buffer cannot be saved; the message says where.
        """
        self._check()
        return self._capture()

    async def snapshot(self) -> Snapshot:
        """``capture``, and wait until it is complete."""
        return await self.capture()

    def release(self) -> None:
        """Let the buffer go on. Does nothing if it was released already, or let go when its time was over.

        Raises:
            WrongLoopError: called from another event loop, or from a thread without one.
        """
        if self.is_held:
            self._check_loop()
            self._end(FreezeState.RELEASED)

    def __enter__(self) -> Self:
        """Be within.

        Raises:
            AsyncBufError: the buffer does not stand still any more.
        """
        self._check()
        self.enter_context()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release."""
        self.release()

    def __del__(self) -> None:
        """Complain about a freeze that was dropped without a release, and release it."""
        if getattr(self, "_state", None) is not FreezeState.HELD:
            return
        self._state = FreezeState.EXPIRED
        self.mark.is_over = True
        if self._loop.is_closed():
            self._let_go()
            return
        with suppress(RuntimeError):  # it was closed in this moment
            self._loop.call_soon_threadsafe(self._let_go)
        warnings.warn("a freeze was dropped before it was released", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        """The state in one line."""
        return f"<Freeze {self._state.value}>"

    def _check(self) -> None:
        if self.is_held:
            self._check_loop()
            return
        how = "was released"
        if self._state is FreezeState.EXPIRED:
            how = "ended with its event loop" if self._hold is None else f"expired after {self._hold} s"
        raise AsyncBufError(f"expected a freeze that is held, found one that {how}: take another one")

    def _check_loop(self) -> None:
        running = asyncio._get_running_loop()
        if running is not self._loop:
            raise WrongLoopError(f"expected the event loop that took the freeze, {self._loop!r}; found {running!r}")

    def _end(self, state: FreezeState) -> None:
        if self._state is not FreezeState.HELD:
            return
        self._state = state
        self.mark.is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self._let_go()


class Freezer:
    """Brings a buffer to rest, and lets it go on.

    Args:
        standstill: holds the delivery, and lets the tickets settle.
        gate: the history.
        guard: knows who waits for the buffer.

    Attributes:
        frozen: the freeze that holds the buffer, which is not kept alive by that; None if there is none.
    """

    def __init__(self, standstill: Standstill, gate: HistoryGate, guard: ReentryGuard) -> None:
        self._standstill = standstill
        self._gate = gate
        self._guard = guard
        self._asked: dict[Standing, None] = {}
        self._holder: Standing | None = None
        self.frozen: weakref.ref[Freeze] | None = None

    async def take(
        self, what: str, timeout: float | None, meanwhile: Callable[[], Awaitable[None]] | None = None
    ) -> Standing:
        """Wait until nobody writes, draws or gets a batch, and no stateful transform is at work.

        Args:
            what: who wants it, in words.
            timeout: seconds; None for as long as it takes.
            meanwhile: what to await while nothing is handed over any more. Without, batches that are being prepared are
                awaited, for four fifths of the time.

        Raises:
            TimeoutError: it did not come to rest in time, and goes on as if nobody had asked.
            MutualWaitError: whoever holds the buffer waits for the end of a freeze that the caller is within.
        """
        with self._waited_for(what):
            return await self._take(what, timeout, meanwhile)

    @contextmanager
    def _waited_for(self, what: str) -> Iterator[None]:
        """The caller waits for this buffer. If it holds others meanwhile, that is noted."""
        marks = tuple(mark for mark in _within.get() if not mark.is_over)
        if not marks:
            yield
            return
        if self._waits_for(marks):
            raise MutualWaitError(
                f"{what}: expected a buffer that will be let go, found one that is held by a call which waits for the "
                "end of the freeze around this one: each would wait for the other, for ever. Freeze several buffers "
                "in the same order everywhere, or let one Checkpointer.save() do it, outside of any freeze"
            )
        wait = _Wait(marks, self)
        _waits.append(wait)
        try:
            yield
        finally:
            _waits.remove(wait)

    def _waits_for(self, marks: tuple[_Mark, ...]) -> bool:
        """Whether whoever holds this buffer waits, through any number of others, for one of some freezes to end."""
        seen: set[Freezer] = set()
        left: list[Freezer] = [self]
        while left:
            freezer = left.pop()
            freeze = None if freezer.frozen is None else freezer.frozen()
            if freeze is None or freezer in seen or freeze.ends_by_itself:
                continue
            if freeze.mark in marks:
                return True
            seen.add(freezer)
            left += [wait.freezer for wait in _waits if freeze.mark in wait.marks]
        return False

    async def _take(
        self, what: str, timeout: float | None, meanwhile: Callable[[], Awaitable[None]] | None
    ) -> Standing:
        standing = Standing(what, lambda: f"the end of {self.held_by or 'another standstill'}")
        self._asked[standing] = None
        start = standing.loop.time()
        try:
            with self._guard.waiting(what):
                await self._come_to_rest(standing, start, timeout, meanwhile)
        except BaseException:
            self.let_go(standing)
            raise
        finally:
            self._asked.pop(standing, None)
        return standing

    async def _come_to_rest(
        self, standing: Standing, start: float, timeout: float | None, meanwhile: Callable[[], Awaitable[None]] | None
    ) -> None:
        async with self._limit(standing, timeout, timeout):
            standing.hold = await self._standstill.hold()
        self._holder = standing
        if meanwhile is not None:
            standing.waits_for = lambda: "what it reads"
            await meanwhile()
        standing.waits_for = self._standstill.waits_for
        if meanwhile is None:
            await self._standstill.settle(None if timeout is None else start + _SETTLE_SHARE * timeout)
        # Not within the limit until here: what follows mostly has not to wait, and is in time then, however late.
        left = None if timeout is None else max(0.0, start + timeout - standing.loop.time())
        async with self._limit(standing, timeout, left):
            await self._standstill.rest()
            standing.waits_for = self._ahead
            standing.is_queued = True
            standing.turn = await self._gate.enter(exclusive=True)

    @asynccontextmanager
    async def _limit(self, standing: Standing, timeout: float | None, left: float | None) -> AsyncIterator[None]:
        """``asyncio.timeout(left)``, with words."""
        scope = asyncio.timeout(left)
        try:
            async with scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise TimeoutError(
                f"{standing.what}: after {timeout} s it still waits for {standing.waits_for()}"
            ) from None

    def let_go(self, standing: Standing) -> None:
        """End a standstill, as far as it has come; to be called once, or again after its event loop was closed."""
        if self._holder is standing:
            self._holder = self.frozen = None
        try:
            if standing.turn is not None:
                self._gate.leave(standing.turn)
        finally:
            if standing.hold is not None:
                self._standstill.release(standing.hold)

    def recover(self) -> None:
        """End standstills whose event loop was closed: nobody else can."""
        if self._holder is not None and self._holder.loop.is_closed():
            self.let_go(self._holder)
        self._asked = {standing: None for standing in self._asked if not standing.loop.is_closed()}

    @property
    def held_by(self) -> str | None:
        """Who holds up consumers, in words; None while the buffer goes on."""
        return None if self._holder is None else self._holder.what

    def freeze(self, standing: Standing, capture: Callable[[], Awaitable[Snapshot]], hold: float | None) -> Freeze:
        """Hand a standstill over to whoever asked for it; the caller is within.

        Args:
            standing: the standstill.
            capture: takes a snapshot in one step.
            hold: seconds after which it ends by itself; None for never.
        """
        freeze = Freeze(capture, functools.partial(self.let_go, standing), hold)
        self.frozen = weakref.ref(freeze)
        return freeze

    @property
    def current(self) -> Freeze | None:
        """The freeze that the caller is within; None outside."""
        freeze = None if self.frozen is None else self.frozen()
        return freeze if freeze is not None and freeze.is_within else None

    @property
    def is_frozen(self) -> bool:
        """Whether a freeze holds the buffer, whoever is within."""
        freeze = None if self.frozen is None else self.frozen()
        return freeze is not None and freeze.is_held

    def refuse_within(self) -> None:
        """Refuse a call that would wait for its own caller.

        Raises:
            AsyncBufError: the caller is within a freeze of the buffer.
        """
        if self.current is not None:
            raise AsyncBufError(
                "expected no call within frozen() that would wait for the end of frozen(), found one: within, "
                "snapshot(), state_dict(), save(), stats(), why_blocked() and pickling work; all else comes after it"
            )

    def _ahead(self) -> str:
        """What stands before an exclusive turn in the history."""
        if self._gate.writing:
            return "a write that is going on"
        return f"{self._gate.readers} gather(s) of earlier batches, or writes before it"

    def blocked(self, consumers: int, without: Callable[[], list[str]]) -> list[str]:
        """In words, what consumers, writers and standstills wait for.

        Args:
            consumers: how many wait.
            without: says what consumers wait for while no standstill holds them up.
        """
        reasons = without() if self.held_by is None else []
        if self.held_by is not None and consumers:
            reasons.append(f"{consumers} consumer(s) wait for the end of {self.held_by}")
        # A standstill that waits for its turn is a write to the history.
        writers = self._gate.waiting_writers - sum(standing.is_queued for standing in self._asked)
        if writers and self.frozen is not None:
            reasons.append(f"{writers} writer(s) wait for the end of {self.held_by}")
        elif writers:
            gathers = f"{self._gate.readers} gather(s) of earlier batches"
            reasons.append(
                f"{writers} writer(s) wait behind {'a write in a thread' if self._gate.writing else gathers}"
            )
        return reasons + [f"{standing.what} waits for {standing.waits_for()}" for standing in self._asked]
