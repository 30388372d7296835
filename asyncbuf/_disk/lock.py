"""Who is at work in a directory, in this process or in another.

Whoever writes or reads in a directory shares it; whoever removes it must be there alone, and leaves it to the next one
where that is not so. A lock lies on the directory itself (``flock``), so it goes where the directory is moved, and a
process that is killed leaves none behind. The threads of this process know of each other as well, so that they do not
depend on that; where a file system has no such locks, processes do not know of each other, and one warning says so.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, TypeAlias

from asyncbuf._disk import files
from asyncbuf._disk.stop import Stop

try:
    import fcntl
except ImportError:  # pragma: no cover - not POSIX
    fcntl = None  # type: ignore[assignment, unused-ignore]

if TYPE_CHECKING:
    from pathlib import Path

Identity: TypeAlias = tuple[int, int]

# A lock has no way to be waited for that could be given up, so it is asked for again and again, ever less often.
_FIRST_WAIT, _LAST_WAIT = 0.001, 0.05
# Whoever is alone in a directory removes it. It takes no longer than this, unless the process was stopped.
MOST_SECONDS = 300.0
# Without locks, what others left is theirs until nothing has been done there for so long.
ABANDONED_SECONDS = 3600.0
# What a system says that has no locks, or not on directories: network file systems want them open for writing.
_NO_LOCKS = files.LACKING | {errno.ENOLCK, errno.EBADF}

_logger = logging.getLogger("asyncbuf")


class _Places:
    """The directories in which threads of this process are at work."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        # How many share a directory; -1 for one that is there alone.
        self._counts: dict[Identity, int] = {}
        # Directories that were entered without a lock of the system, so that they are known to be of this process.
        self._visited: set[Identity] = set()
        self.has_warned = False

    def share(self, place: Identity) -> bool:
        with self._mutex:
            count = self._counts.get(place, 0)
            if count < 0:
                return False
            self._counts[place] = count + 1
            return True

    def take(self, place: Identity) -> bool:
        """Be there alone, if nobody is there."""
        with self._mutex:
            if place in self._counts:
                return False
            self._counts[place] = -1
            return True

    def leave(self, place: Identity) -> None:
        with self._mutex:
            count = self._counts.pop(place, 0)
            if count > 1:
                self._counts[place] = count - 1

    def visit(self, place: Identity) -> None:
        with self._mutex:
            self._visited.add(place)

    def has_visited(self, place: Identity) -> bool:
        with self._mutex:
            return place in self._visited

    def forget(self, place: Identity) -> None:
        """It is gone, and another one may get its inode."""
        with self._mutex:
            self._visited.discard(place)


_places = _Places()


def _after_fork() -> None:
    """The threads of the other process are not here."""
    global _places
    _places = _Places()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Held:
    """Being at work in a directory, until ``release``.

    Args:
        handle: of the open directory.
        place: the directory.
    """

    def __init__(self, handle: int, place: Identity) -> None:
        self._handle: int | None = handle
        self._place = place
        self._process = os.getpid()

    def is_at(self, directory: Path) -> bool:
        """Whether the directory has this name now: it may have been removed, and others made, meanwhile."""
        found = files.stat(directory, follow=True)
        return found is not None and (found.st_dev, found.st_ino) == self._place

    def release(self) -> None:
        """Be gone. In a forked process that only closes what it got: the lock is that of the process that entered."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        if self._process == os.getpid():
            with contextlib.suppress(OSError):
                if os.fstat(handle).st_nlink == 0:
                    _places.forget(self._place)
                if fcntl is not None:
                    fcntl.flock(handle, fcntl.LOCK_UN)  # also for processes that were forked meanwhile
            _places.leave(self._place)
        with contextlib.suppress(OSError):
            os.close(handle)

    def __del__(self) -> None:
        """Be gone with the last reference."""
        self.release()


def share(directory: Path, stop: Stop | None = None) -> Held | None:
    """Be at work in a directory beside others. Waits for somebody who is removing it at the moment.

    Args:
        directory: the directory.
        stop: gives up the waiting.

    Returns:
        None if it is not there, or was removed meanwhile.

    Raises:
        OSError: it cannot be opened, or somebody seems to be removing it for ever.
        StoppedError: it was given up.
    """
    return _enter(directory, stop or Stop(), time.monotonic() + MOST_SECONDS, alone=False)


def share_now(directory: Path) -> Held | None:
    """As ``share``, without waiting.

    Returns:
        None if somebody is there alone, or it is not there.
    """
    try:
        return _enter(directory, Stop(), 0.0, alone=False)
    except _BusyError:
        return None


def alone(directory: Path) -> Held | None:
    """Be at work in a directory alone, to remove it: nobody enters before ``release``.

    Returns:
        None if somebody else is there, it is not there, or that cannot be told.
    """
    try:
        return _enter(directory, Stop(), 0.0, alone=True)
    except OSError:
        return None


class _BusyError(OSError):
    """Somebody is there."""


def _enter(directory: Path, stop: Stop, deadline: float, *, alone: bool) -> Held | None:
    wait = _FIRST_WAIT
    while True:
        stop.check()
        try:
            return _entered(directory, alone=alone)
        except _BusyError:
            if time.monotonic() >= deadline:
                raise
        stop.wait(wait)
        wait = min(2 * wait, _LAST_WAIT)


def _entered(directory: Path, *, alone: bool) -> Held | None:
    try:
        handle = os.open(directory, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except FileNotFoundError:
        return None
    found = os.fstat(handle)
    place = found.st_dev, found.st_ino
    if not (_places.take(place) if alone else _places.share(place)):
        os.close(handle)
        raise _BusyError(errno.EBUSY, "expected nobody who removes it, found one", str(directory))
    held = Held(handle, place)
    try:
        if not _locked(handle, alone=alone):
            _without_lock(directory, found, alone=alone)
        if held.is_at(directory):
            return held
    except BlockingIOError as error:
        held.release()
        raise _BusyError(errno.EBUSY, "expected nobody who removes it, found one", str(directory)) from error
    except BaseException:
        held.release()
        raise
    held.release()
    return None


def _without_lock(directory: Path, found: os.stat_result, *, alone: bool) -> None:
    """Where there are no locks, this process knows of what it made itself, and nobody works where nothing is done."""
    place = found.st_dev, found.st_ino
    if not alone:
        _places.visit(place)
    elif not _places.has_visited(place) and time.time() - found.st_mtime < ABANDONED_SECONDS:
        raise _BusyError(errno.EBUSY, "expected to know that nobody else is there", str(directory))


def _locked(handle: int, *, alone: bool) -> bool:
    """Lock an open directory: whether there are locks at all."""
    if fcntl is not None:
        try:
            fcntl.flock(handle, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError as error:
            if alone and error.errno not in _NO_LOCKS:
                raise
        else:
            return True
    if not _places.has_warned:
        _places.has_warned = True
        _logger.warning(
            "this file system has no locks (flock): expected that one process at a time saves, loads and removes "
            "checkpoints there; tasks and threads of one process are safe"
        )
    return False
