"""Waiting that nothing will end: who waits is told, and a long silence is logged."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import re
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from asyncbuf._runtime.lifecycle import State
from asyncbuf._runtime.supervisor import logger
from asyncbuf._runtime.watch import Watch
from asyncbuf.errors import BufferFailedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncbuf._runtime.lifecycle import Lifecycle
    from asyncbuf._runtime.watch import Role

    Calls: TypeAlias = "list[tuple[object, asyncio.Task[Any] | None]]"
    Reason: TypeAlias = Callable[[], Exception]

# After so many seconds in which nothing moves, writers and consumers that wait for each other are told.
GRACE_SECONDS = 1.0
# After so many seconds of a wait, the log says what for.
SILENT_SECONDS = 10.0
_MOST_REASONS = 64
_ADVICE = (
    "writers and consumers wait for each other, and so for ever. Let a write and a batch fit into the limits together: "
    "raise the limit, or write fewer items at once"
)


class Consumers(Protocol):
    """What must be known of those that wait for batches."""

    @property
    def starving(self) -> Calls:
        """The calls that wait for a draw that is not possible, each with its task."""
        ...

    @property
    def is_starved(self) -> bool:
        """Whether no ticket is left, and none of any size in use may be drawn now."""
        ...

    @property
    def is_held(self) -> bool:
        """Whether nothing is handed over for now."""
        ...

    @property
    def has_leases(self) -> bool:
        """Whether a batch is on lease, after whose end calls may go on."""
        ...

    @property
    def first_calls(self) -> list[object]:
        """The first call of each queue."""
        ...

    def refuse_starving(self, error: Reason) -> None:
        """Tell those that starve."""

    def blocked(self) -> list[str]:
        """In words, what each queue that has waiting consumers waits for."""
        ...


class Writers(Protocol):
    """What must be known of those that wait to write."""

    @property
    def calls(self) -> Calls:
        """The calls that are held back, in order, each with its task."""
        ...

    @property
    def is_writing(self) -> bool:
        """Whether items were admitted and are not written yet."""
        ...

    def refuse(self, error: Reason) -> None:
        """Tell them."""

    def blocked(self) -> list[str]:
        """In words, what the first of them lacks."""
        ...


class LastWriter(Protocol):
    """The task that wrote last. Its end, in words, is its ``str``."""

    @property
    def is_gone(self) -> bool:
        """Whether there was a task that wrote, and it has ended."""
        ...


class Gate(Protocol):
    """What must be known of the history."""

    @property
    def is_free(self) -> bool:
        """Whether nobody is at it, or waits for a turn."""
        ...


class Stalls:
    """Looks after calls that wait. Costs nothing while none does.

    Args:
        life: that of the buffer.
        gate: the history.
        last_writer: the task that wrote last.
        is_certain: whether what lets writers and consumers go on is known. A part of a user may go by what it likes.

    Attributes:
        watch: the tasks that are watched.
    """

    def __init__(self, life: Lifecycle, gate: Gate, last_writer: LastWriter, *, is_certain: bool) -> None:
        self.watch = Watch()
        self._life = life
        self._gate = gate
        self._last_writer = last_writer
        self._is_certain = is_certain
        # Known while calls wait: who waits is held by this, and holds it, and both shall be free afterwards.
        self._consumers: Consumers | None = None
        self._writers: Writers | None = None
        self._said: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next: asyncio.Handle | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._silence: asyncio.TimerHandle | None = None

    # -- the tasks that are watched -----------------------------------------------------------------------------------

    def add(self, task: asyncio.Task[Any], role: Role | None) -> None:
        """Watch a task, or watch it in another role."""
        self.remove(task)
        self.watch.live[task] = role
        task.add_done_callback(self._ended)

    def remove(self, task: asyncio.Task[Any]) -> None:
        """Watch a task no longer, and forget what became of it."""
        task.remove_done_callback(self._ended)
        self.watch.forget(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.watch.ended(task)
        self._look()

    # -- what it is told ----------------------------------------------------------------------------------------------

    def starved(self) -> None:
        """A consumer waits for data."""
        if self.watch.is_used or self._held_back:
            self.look_soon()

    def look_soon(self) -> None:
        """Somebody begins to wait for others, or a watched task has ended: look when this step is over."""
        loop = self._here()
        if loop is not None and self._next is None:
            self._next = loop.call_soon(self._look, context=contextvars.Context())

    def consumer_waits(self, consumers: Consumers) -> None:
        """A call begins to wait for a batch."""
        self._consumers = consumers
        self._waits()

    def writer_waits(self, writers: Writers) -> None:
        """A call begins to wait, because it is held back."""
        self._writers = writers
        self._waits()
        self.look_soon()

    def _waits(self) -> None:
        loop = self._here()
        if loop is not None and self._silence is None:
            self._listen(loop)

    def waited(self) -> None:
        """A call waits no more."""
        if not self._calls():
            self._stop()

    def close(self, error: object = None) -> None:
        """Everybody is told otherwise from here on: watch nobody, and leave nothing on the event loop."""
        self._stop()
        for task in self.watch.live:
            task.remove_done_callback(self._ended)
        self.watch.clear()
        self._said.clear()

    def _stop(self) -> None:
        for handle in (self._next, self._grace, self._silence):
            if handle is not None:
                handle.cancel()
        self._next = self._grace = self._silence = self._consumers = self._writers = None

    def _here(self) -> asyncio.AbstractEventLoop | None:
        """The running event loop; what was to come on another one never will."""
        loop = asyncio._get_running_loop()
        if loop is not self._loop:
            self._next = self._grace = self._silence = None
            self._loop = loop
        return loop

    # -- waits that nothing will end ----------------------------------------------------------------------------------

    def _look(self) -> None:
        self._here()
        if self._next is not None:
            self._next.cancel()  # if this is not it
            self._next = None
        if self._life.reason is not None and self._life.state is not State.NEW:
            return
        consumers, writers = self._starving, self._held_back
        if not consumers and not writers:
            return
        if (error := self.watch.death()) is not None:
            self._tell(error, error)
            return
        if self._is_busy:
            return
        ended = self.watch.end("producer"), self.watch.end("consumer")
        self._tell(*ended)
        if consumers and writers and ended == (None, None):
            self._check_standstill()

    def _tell(self, consumers: Callable[[], Exception] | None, writers: Callable[[], Exception] | None) -> None:
        if consumers is not None and self._consumers is not None:
            self._consumers.refuse_starving(consumers)
        if writers is not None and self._writers is not None:
            self._writers.refuse(writers)

    @property
    def _starving(self) -> Calls:
        return [] if self._consumers is None else self._consumers.starving

    @property
    def _held_back(self) -> Calls:
        return [] if self._writers is None else self._writers.calls

    @property
    def _is_busy(self) -> bool:
        """Whether something goes on by itself, after which calls may go on."""
        writing = self._writers is not None and self._writers.is_writing
        consumers = self._consumers
        is_held = consumers is not None and (consumers.is_held or consumers.has_leases)
        return writing or is_held or not self._gate.is_free

    def _check_standstill(self) -> None:
        """Writers and consumers wait. See whether anything is left that could end that."""
        found = self._standstill()
        if found is None:
            return
        tasks = {task for _, task in found}
        if self._is_certain and self.watch.are_stuck(tasks):
            self._end_standstill()
        elif self._grace is None and self._loop is not None:
            # Who waits may have a timeout of its own, and go on otherwise.
            calls = [call for call, _ in found]
            self._grace = self._loop.call_later(GRACE_SECONDS, self._still, calls, context=contextvars.Context())

    def _standstill(self) -> Calls | None:
        """The calls that wait for each other, with their tasks; None if they do not."""
        writers, consumers = self._held_back, self._starving
        if not writers or not consumers or self._is_busy:
            return None
        is_starved = self._consumers is not None and self._consumers.is_starved
        return [*writers, *consumers] if is_starved else None

    def _still(self, calls: list[object]) -> None:
        self._grace = None
        found = self._standstill()
        if found is None:
            return
        if [call for call, _ in found] != calls:
            self._check_standstill()
        elif self._is_certain:
            self._end_standstill()

    def _end_standstill(self) -> None:
        error = functools.partial(BufferFailedError, f"{_ADVICE}. {self._why(is_log=False)}")
        self._tell(error, error)

    def _why(self, *, is_log: bool) -> str:
        """In words, who waits for what."""
        consumers, writers = self._consumers, self._writers
        reasons = []
        if consumers is not None and consumers.first_calls:
            held = ["consumers wait for the end of a snapshot or a freeze"]
            reasons += held if consumers.is_held else consumers.blocked()
        if writers is not None:
            reasons += writers.blocked()
        if is_log and self._starving and self._last_writer.is_gone:
            reasons.append(str(self._last_writer))
        return "; ".join(reasons)

    # -- silence ------------------------------------------------------------------------------------------------------

    def _calls(self) -> list[object]:
        """The first call of each line of those that wait."""
        first = [call for call, _ in self._held_back[:1]]
        return first if self._consumers is None else [*first, *self._consumers.first_calls]

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        self._silence = loop.call_later(SILENT_SECONDS, self._say, self._calls(), context=contextvars.Context())

    def _say(self, calls: list[object]) -> None:
        self._silence = None
        waiting = self._calls()
        if any(call in waiting for call in calls):
            self._log(self._why(is_log=True))
        if waiting and self._loop is not None:
            self._listen(self._loop)

    def _log(self, why: str) -> None:
        kind = re.sub(r"\d+", "#", why)
        if kind not in self._said and len(self._said) < _MOST_REASONS:
            self._said.add(kind)
            logger.warning("a call has waited for %g s or longer: %s. This is said once", SILENT_SECONDS, why)
