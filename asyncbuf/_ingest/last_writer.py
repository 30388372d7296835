"""Who wrote last: whoever waits for data is told when nobody is left to write it."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any


class LastWriter:
    """The task that wrote last. Keeps its name and not the task."""

    __slots__ = ("_name", "_task")

    def __init__(self) -> None:
        self._name = ""
        self._task: weakref.ref[asyncio.Task[Any]] | None = None

    def note(self) -> None:
        """The current task writes."""
        loop = asyncio._get_running_loop()
        task = None if loop is None else asyncio.current_task(loop)
        if task is not None and (self._task is None or self._task() is not task):
            self._task = weakref.ref(task)
            self._name = task.get_name()

    @property
    def is_gone(self) -> bool:
        """Whether there was a task that wrote, and it has ended."""
        if self._task is None:
            return False
        task = self._task()
        return task is None or task.done()

    def __str__(self) -> str:
        """Its end, in words."""
        return f"the task that wrote last, {self._name!r}, has ended"
