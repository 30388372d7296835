"""Who is at work in a directory of checkpoints, in this process or in another.

Savers and readers are there together. Whoever removes something must be there alone, and leaves it to the next one
where that is not so. The locks lie on the directories themselves (``flock``), so a process that is killed leaves none
behind. Where a system or file system has no such locks, one process at a time may use a directory.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

try:
    import fcntl
except ImportError:  # pragma: no cover - not POSIX
    fcntl = None  # type: ignore[assignment, unused-ignore]

if TYPE_CHECKING:
    from pathlib import Path


class DirectoryLock:
    """Being at work in directories, until ``release``. May wait for somebody who removes something at the moment.

    Args:
        directories: those that are there are entered.
    """

    def __init__(self, *directories: Path) -> None:
        self._handles: list[int] = []
        self._process = os.getpid()
        for directory in directories:
            self.enter(directory)

    def enter(self, directory: Path, *, required: bool = False) -> None:
        """Be at work in one more directory, if it is there.

        Args:
            directory: the directory.
            required: whether to raise if it is there and cannot be opened.

        Raises:
            OSError: no file descriptor is free, or it may not be read.
        """
        try:
            handle = os.open(directory, os.O_RDONLY)
        except FileNotFoundError:
            return
        except OSError:
            if required:
                raise
            return
        self._handles.append(handle)
        if fcntl is not None:
            with contextlib.suppress(OSError):  # no such locks here
                fcntl.flock(handle, fcntl.LOCK_SH)

    def holds(self, directory: Path) -> bool:
        """Whether it is at work in what has this name now: it may have been removed while it was being entered."""
        try:
            there = os.stat(directory)
        except OSError:
            return False
        return any(os.path.samestat(os.fstat(handle), there) for handle in self._handles)

    def exclusive(self) -> bool:
        """Whether nobody else is there. If so, nobody enters before ``release``."""
        for handle in self._handles:
            if fcntl is None:
                break
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:  # no such locks here
                continue
        return True

    def release(self) -> None:
        """Be gone. In a forked process that only closes what it got: the lock is that of the process that entered."""
        while self._handles:
            handle = self._handles.pop()
            with contextlib.suppress(OSError):
                if fcntl is not None and self._process == os.getpid():
                    fcntl.flock(handle, fcntl.LOCK_UN)  # also for processes that were forked meanwhile
            os.close(handle)

    def __del__(self) -> None:
        """Be gone with the last reference."""
        self.release()
