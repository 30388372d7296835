"""An event loop whose clock jumps: what waits for a time waits no time at all."""

from __future__ import annotations

import asyncio
import functools
import selectors
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from tests.helpers import SECONDS

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")

# An idle thread is no work, and is not waited for for long.
_THREAD_SECONDS = 0.05


class _Jumping(selectors.DefaultSelector):
    """Instead of waiting, moves the clock on. While threads are at work, waits for them first."""

    def __init__(self, *, has_threads: bool) -> None:
        super().__init__()
        self.now = 0.0
        self._has_threads = has_threads

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if found or (timeout is not None and timeout <= 0):
            return found
        if timeout is None and threading.active_count() > 1:
            found = super().select(SECONDS)
        elif timeout is not None and self._has_threads and threading.active_count() > 1:
            found = super().select(_THREAD_SECONDS)
        if not found:
            if timeout is None:
                raise RuntimeError("nothing is left that could happen: the program hangs")
            self.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own, which begins at 0.

    Args:
        has_threads: whether a thread may be at work beside a timer, and is to be waited for first.
    """

    def __init__(self, *, has_threads: bool = True) -> None:
        self._jumping = _Jumping(has_threads=has_threads)
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtually(main: Coroutine[Any, Any, T], *, has_threads: bool = True) -> T:
    """Run a program to its end; one that hangs raises a ``RuntimeError``."""
    with asyncio.Runner(loop_factory=functools.partial(VirtualLoop, has_threads=has_threads)) as runner:
        return runner.run(main)


async def pass_by(seconds: float) -> None:
    """Let so much time of such a clock pass."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    over = loop.create_future()
    timer = loop.call_later(seconds, over.set_result, None)
    try:
        await over
    finally:
        timer.cancel()
