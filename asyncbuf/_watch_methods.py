"""The methods of a buffer that watch tasks."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any, TypeVar

from asyncbuf._runtime.arguments import shown
from asyncbuf._runtime.watch import ROLES

if TYPE_CHECKING:
    from asyncbuf._assembly import Assembly
    from asyncbuf._runtime.watch import Role

T = TypeVar("T")


class WatchMethods:
    """The part of a buffer that tells those who wait of the end of those they wait for."""

    _parts: Assembly

    def watch(self, task: asyncio.Task[T], role: Role | None = None) -> asyncio.Task[T]:
        """Let the death of a task reach the calls that wait for others.

        In use: ``collector = buffer.watch(asyncio.create_task(collect(buffer)), "producer")``.

        Once the task has raised, or was cancelled, each ``sample``, ``async for``, ``extend`` and ``add`` that waits
        for what others must do, or would have to, raises ``BufferFailedError`` with that error as its cause, until
        ``unwatch``. Batches that can be had without waiting for others are still handed out; what is stored stays.

        With a role, its end counts, too. When every watched producer has ended well, consumers that wait for data are
        told as after ``finish()``: ``sample`` raises ``BufferClosedError``, and ``async for`` ends. Likewise writers
        that the limiter holds back, when every watched consumer has ended. So watch all tasks of a role, or none. And
        when all of them wait themselves, so that nobody can go on, both sides are told with ``BufferFailedError``.

        The buffer keeps a task that it watches. Closing the buffer ends all watching.

        Args:
            task: the task. One that has ended counts at once.
            role: ``"producer"``, ``"consumer"``, or None for a task whose death alone counts.

        Returns:
            The task.

        Raises:
            TypeError: it is no task.
            ValueError: there is no such role.
        """
        _check_task(task)
        if role is not None and (not isinstance(role, str) or role not in ROLES):
            raise ValueError(f"role: expected one of {list(ROLES)} or None, found {shown(role)}")
        self._parts.stalls.add(task, role)
        return task

    def unwatch(self, task: asyncio.Task[Any]) -> None:
        """Watch a task no longer, and forget its end. Does nothing with one that is not watched.

        Args:
            task: the task.

        Raises:
            TypeError: it is no task.
        """
        _check_task(task)
        self._parts.stalls.remove(task)


def _check_task(task: object) -> None:
    if isinstance(task, asyncio.Task):
        return
    if inspect.iscoroutine(task):
        task.close()  # nobody will await it, and Python would complain of that
    raise TypeError(f"task: expected a task, as of asyncio.create_task(...), found {shown(task)}")
