"""Runs functions of the user in a fresh context: no context variable, no torch mode of anybody else reaches them.

What a batch holds must not depend on who awaits it (see ``torch_modes``), and nothing that a function sets may reach
the caller or the next batch. ``numpy.errstate`` and ``decimal`` contexts are context variables, too.
"""

from __future__ import annotations

import asyncio
import contextvars
import types
from typing import TYPE_CHECKING, Any, TypeVar

from asyncbuf._runtime.torch_modes import Swapped, are_plain, left_on, make_plain

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

T = TypeVar("T")


def shielded(function: Callable[..., T], *args: object) -> T:
    """Call a function in an empty context and with plain torch modes. Takes half a microsecond where none is set.

    Args:
        function: what to call, on the event loop or in a thread.
        *args: its arguments.

    Returns:
        What it returns.
    """
    if not are_plain():
        with Swapped():
            return contextvars.Context().run(function, *args)
    try:
        return contextvars.Context().run(function, *args)
    finally:
        # Only for the sake of others on the event loop: whoever runs next is shielded, too.
        if left_on():
            make_plain()


def without_loop(function: Callable[..., T], *args: object) -> T:
    """Call a function on the event loop that finds no running event loop there, as in a thread.

    So a function that runs a loop of its own, or refuses to block one, does the same in both places.
    """
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return function(*args)
    finally:
        asyncio._set_running_loop(loop)


@types.coroutine
def shielded_wait(function: Callable[..., Awaitable[T]], *args: object) -> Generator[Any, Any, T]:
    """Call a function as ``shielded`` does, and await what it returns in that same context.

    Each step runs with the modes that the step before has left on: ``with torch.no_grad():`` around an ``await`` holds
    for what comes after it, and for nobody else meanwhile.

    Args:
        function: returns an awaitable.
        *args: its arguments.

    Returns:
        The result of the awaitable.
    """
    context = contextvars.Context()
    steps = _steps(function, args)
    step, value = steps.send, None
    modes = Swapped()
    while True:
        modes = Swapped(modes.left)
        try:
            with modes:
                waits_for = context.run(step, value)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            value = None  # an error holds this frame, which must not hold the error
        try:
            step, value = steps.send, (yield waits_for)
        except GeneratorExit:
            with Swapped(modes.left):
                context.run(steps.close)
            raise
        except BaseException as error:
            step, value = steps.throw, error


def _steps(function: Callable[..., Awaitable[T]], args: tuple[object, ...]) -> Generator[Any, Any, T]:
    return (yield from function(*args).__await__())
