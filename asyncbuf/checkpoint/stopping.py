"""Signals that ask a program to end, noted so that it can save once more."""

from __future__ import annotations

import asyncio
import contextlib
import operator
import signal
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from asyncbuf._runtime.arguments import shown

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
    from types import FrameType, TracebackType

T = TypeVar("T")

DEFAULT_SIGNALS: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Knows whether a signal has asked the program to end. ``Checkpointer.on_signal`` makes one.

    While its ``with`` block lasts, the first of the signals is noted and does nothing else. From then on, and after the
    block, signals do what they did before.

    Handlers are those of the process: they are set with ``signal.signal``, and so replace the one by which
    ``asyncio.run`` cancels its task on SIGINT, until they put it back. ``loop.add_signal_handler`` must not be used for
    the same signals meanwhile.

    Args:
        signals: which ones, as numbers or ``signal.Signals``.

    Raises:
        TypeError, ValueError: one is no signal.
    """

    def __init__(self, signals: Iterable[int]) -> None:
        if not isinstance(signals, Iterable):
            raise TypeError(f"signals: expected several, such as [signal.SIGTERM], found {shown(signals)}")
        self._signals = tuple(dict.fromkeys(map(_signal, signals)))
        self._before: dict[signal.Signals, Any] = {}
        self._received: signal.Signals | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event = asyncio.Event()
        self._scopes: set[asyncio.Timeout] = set()

    def __enter__(self) -> Self:
        """Note signals from now on.

        Raises:
            RuntimeError: no event loop is running, or this is not the main thread, which alone may handle signals.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("on_signal: expected the main thread, which alone may handle signals; found another one")
        self._loop = asyncio.get_running_loop()
        self._event, self._received = asyncio.Event(), None
        try:
            for number in self._signals:
                self._before[number] = signal.signal(number, self._note)
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Let signals do what they did before."""
        self._restore()

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            # Somebody may have set another one meanwhile. One that was not set from Python cannot be put back.
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal, between any two steps of the main thread."""
        self._received = signal.Signals(number)
        self._restore()
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the event loop was closed
                self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        self._event.set()
        for scope in self._scopes:
            scope.reschedule(asyncio.get_running_loop().time())

    @property
    def received(self) -> signal.Signals | None:
        """The signal that came; None as long as none has."""
        return self._received

    @property
    def exit_code(self) -> int:
        """With what the program should end: 128 and the number of the signal, as shells have it; 0 without one."""
        return 0 if self._received is None else 128 + self._received

    def is_set(self) -> bool:
        """Whether a signal has come. Also true in a step of the event loop that takes long, before it ends."""
        return self._received is not None

    async def wait(self) -> signal.Signals:
        """Wait for a signal: which one."""
        await self._event.wait()
        assert self._received is not None
        return self._received

    def iterate(self, source: AsyncIterable[T]) -> AsyncIterator[T]:
        """``async for batch in stop.iterate(buffer)``: what the buffer gives, until a signal comes.

        It ends as soon as the signal has come and the body of the loop is done: also while it waits for a batch, which
        is cancelled then. A buffer loses nothing by that: the batch stays first in line, and is in the next checkpoint.

        Args:
            source: a buffer, ``buffer.epoch()``, or another async iterable that may be cancelled while it waits.
        """
        return _Until(self, source)

    async def next_of(self, take: Callable[[], Awaitable[T]]) -> T:
        """Await something, unless a signal comes first.

        Args:
            take: begins it. It is cancelled when the signal comes.

        Raises:
            StopAsyncIteration: a signal has come.
        """
        if self.is_set():
            raise StopAsyncIteration
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes.add(scope)
                return await take()
        except TimeoutError:
            if not scope.expired():
                raise
            raise StopAsyncIteration from None
        finally:
            self._scopes.discard(scope)

    def __repr__(self) -> str:
        """Which signal has come, if one has."""
        names = ", ".join(number.name for number in self._signals)
        return f"<StopSignal {names}: {'none' if self._received is None else self._received.name} has come>"


class _Until(Generic[T]):
    """What an async iterable gives, until a signal comes."""

    def __init__(self, stop: StopSignal, source: AsyncIterable[T]) -> None:
        self._stop = stop
        self._take = aiter(source).__anext__

    def __aiter__(self) -> Self:
        """Itself."""
        return self

    def __anext__(self) -> Awaitable[T]:
        """The next one."""
        return self._stop.next_of(self._take)


def _signal(number: Any) -> signal.Signals:
    try:
        return signal.Signals(operator.index(number))
    except TypeError:
        raise TypeError(f"signals: expected numbers such as signal.SIGTERM, found {shown(number)}") from None
    except ValueError:
        raise ValueError(f"signals: expected signals that this system has, found {number}") from None
