"""Tasks on whose work others wait: what became of them."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from asyncbuf.errors import BufferClosedError, BufferFailedError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Collection

    Reason: TypeAlias = Callable[[], Exception]

Role: TypeAlias = Literal["producer", "consumer"]
ROLES: tuple[Role, ...] = ("producer", "consumer")
_DOES = {"producer": "no items will come", "consumer": "nobody will take batches"}


class Watch:
    """The tasks that are watched. It keeps those that live or died; of those that ended well, their last name.

    Nobody is asked for the error of a dead task before somebody is told of it: until then asyncio takes it for one that
    nobody has noticed, and logs it.

    Attributes:
        live: those that have not ended, with their roles.
    """

    def __init__(self) -> None:
        self.live: dict[asyncio.Task[Any], Role | None] = {}
        self._over: dict[asyncio.Task[Any], Role | None] = {}  # that have ended, however it was
        self._dead: dict[asyncio.Task[Any], Role | None] = {}
        self._last: dict[Role, tuple[weakref.ref[asyncio.Task[Any]], str]] = {}

    @property
    def is_used(self) -> bool:
        """Whether a task is watched, or was and has ended."""
        return bool(self.live or self._over or self._dead or self._last)

    def forget(self, task: asyncio.Task[Any]) -> None:
        """Know nothing of a task any more."""
        for tasks in (self.live, self._over, self._dead):
            tasks.pop(task, None)
        self._last = {role: last for role, last in self._last.items() if last[0]() is not task}

    def clear(self) -> None:
        """Know nothing of any."""
        for tasks in (self.live, self._over, self._dead):
            tasks.clear()
        self._last.clear()

    def ended(self, task: asyncio.Task[Any]) -> None:
        """A task has ended."""
        if task in self.live:
            self._over[task] = self.live.pop(task)

    def _look(self) -> None:
        """Ask those that have ended how that was."""
        over, self._over = self._over, {}
        for task, role in over.items():
            if task.cancelled() or task.exception() is not None:
                self._dead[task] = role
            elif role is not None:
                self._last[role] = weakref.ref(task), task.get_name()

    def death(self) -> Reason | None:
        """Makes the error of a call that waits while a watched task is dead; None if none is."""
        self._look()
        for task, role in self._dead.items():
            return functools.partial(_died, weakref.ref(task), role)
        return None

    def end(self, role: Role) -> Reason | None:
        """Makes the error of a call that waits for tasks of a role, all of which have ended well; None if not."""
        self._look()
        if role not in self._last or role in self.live.values():
            return None
        message = (
            f"every {role} that buffer.watch() was told of has ended, the last one was {self._last[role][1]!r}: "
            f"{_DOES[role]}"
        )
        return functools.partial(BufferClosedError, message)

    def are_stuck(self, waiting: Collection[asyncio.Task[Any] | None]) -> bool:
        """Whether, of producers or of consumers, some are watched, and each of them has ended or waits."""
        roles = {role for role in self.live.values() if role is not None}
        return any(all(task in waiting for task, each in self.live.items() if each == role) for role in roles)


def _died(reference: weakref.ref[asyncio.Task[Any]], role: Role | None) -> Exception:
    task = reference()
    who = f"the {role or 'task'} {task.get_name()!r}" if task is not None else f"a {role or 'task'}"
    is_cancelled = task is None or task.cancelled()
    cause = None if task is None or is_cancelled else task.exception()
    how = "was cancelled" if is_cancelled else f"has died of {cause!r}"
    failure = BufferFailedError(
        f"{who}, which buffer.watch() was told of, {how}; this call would wait for others, and so perhaps for ever. "
        "After buffer.unwatch(task), calls wait again"
    )
    failure.__cause__ = cause
    return failure
