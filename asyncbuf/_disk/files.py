"""All that is done to files goes through here: a thin layer over ``os``, so that it can be watched and disturbed.

An error always names the path. Nothing here tries again, and nothing is decided here.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import stat as modes
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import FileIO
    from typing import TypeAlias

    Bytes: TypeAlias = bytes | bytearray | memoryview

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# What is written past the page cache begins and ends at multiples of this.
BLOCK_BYTES = 4096
_DIRECT: int = getattr(os, "O_DIRECT", 0)
# So that more may be mapped than there is memory. Python names the flag from 3.13 on.
NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
# What a system says that lacks a call, or lacks it for this kind of file.
LACKING = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
_PIECE_BYTES = 1024 * 1024
_BARRED = frozenset({errno.EACCES, errno.EPERM})


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Errors in the block name the path: calls on an open file do not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


# -- directories ------------------------------------------------------------------------------------------------------


def mkdir(path: Path) -> None:
    """Make a directory that is not there."""
    path.mkdir()


def make_parents(path: Path) -> list[Path]:
    """Make a directory and those above it that are missing.

    Returns:
        Those that were made, the highest first. The names of all of them still have to be synced.
    """
    missing = []
    while not exists(path):
        missing.append(path)
        path = path.parent
    if not is_directory(path):
        raise NotADirectoryError(errno.ENOTDIR, "expected a directory, found something else", str(path))
    for folder in reversed(missing):
        try:
            mkdir(folder)
        except FileExistsError:  # somebody else made it meanwhile, and may not sync it
            if not is_directory(folder):
                raise
    return missing[::-1]


def names(path: Path) -> list[str]:
    """What is in a directory."""
    return sorted(os.listdir(path))


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a loss of power, where the system has that."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        if error.errno not in _BARRED:
            raise
        os.sync()  # it may be entered but not read: everything there is, then
        return
    try:
        with _naming(path):
            _sync(handle)
    finally:
        os.close(handle)


def rmdir(path: Path) -> None:
    """Remove an empty directory."""
    path.rmdir()


def remove_tree(path: Path) -> None:
    """Remove a directory and everything in it. Links in it are removed and not followed."""
    shutil.rmtree(path)


# -- what is there ----------------------------------------------------------------------------------------------------


def stat(path: Path, *, follow: bool = False) -> os.stat_result | None:
    """What is known of a file or directory; None if there is none."""
    try:
        return os.stat(path, follow_symlinks=follow)
    except (FileNotFoundError, NotADirectoryError):
        return None


def statuses_below(path: Path) -> list[os.stat_result]:
    """What is known of every file below a directory. Links are not followed."""
    paths = [Path(folder) / name for folder, _, names in os.walk(path) for name in names]
    return [found for each in paths if (found := stat(each)) is not None]


def exists(path: Path) -> bool:
    """Whether something is there, be it a link that leads nowhere."""
    return stat(path) is not None


def is_regular(path: Path) -> bool:
    """Whether a file is there, and no link to one."""
    found = stat(path)
    return found is not None and modes.S_ISREG(found.st_mode)


def is_link(path: Path) -> bool:
    """Whether a symbolic link is there."""
    found = stat(path)
    return found is not None and modes.S_ISLNK(found.st_mode)


def is_directory(path: Path) -> bool:
    """Whether a directory is there, or a link to one."""
    try:
        found = stat(path, follow=True)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False
    return found is not None and modes.S_ISDIR(found.st_mode)


# -- files ------------------------------------------------------------------------------------------------------------


def create(path: Path) -> FileIO:
    """Open a new file for writing; it must not be there."""
    return open(path, "xb", buffering=0)


def create_to_map(path: Path) -> FileIO:
    """Open a new file for reading and writing; it must not be there."""
    return open(path, "x+b", buffering=0)


def unnamed(folder: Path) -> FileIO:
    """Open a new file without a name, for reading and writing: it is gone when it is closed."""
    with _naming(folder):
        handle, name = tempfile.mkstemp(dir=folder, prefix=".unnamed-")
    os.unlink(name)
    return open(handle, "w+b", buffering=0)


def open_file(path: Path) -> FileIO:
    """Open a regular file for reading. A link is not followed, and a pipe is not waited for.

    Raises:
        OSError: also if it is something else.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    if not modes.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "expected a regular file, found something else", str(path))
    return open(handle, "rb", buffering=0)


def set_direct(file: FileIO, is_direct: bool) -> bool:
    """Write past the page cache from now on, or through it again.

    Past it, only whole blocks are taken, out of memory that begins at one.

    Returns:
        Whether the system can do that.
    """
    if fcntl is None or not _DIRECT:
        return False
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | _DIRECT if is_direct else flags & ~_DIRECT)
    except OSError as error:
        if error.errno not in LACKING:
            raise
        return False
    return True


def _is_direct(file: FileIO) -> bool:
    return fcntl is not None and bool(fcntl.fcntl(file, fcntl.F_GETFL) & _DIRECT)


def write(file: FileIO, path: Path, content: Bytes) -> None:
    """Write all of it."""
    left = memoryview(content)
    with _naming(path):
        while len(left):
            try:
                left = left[file.write(left) :]
            except OSError as error:
                # A file system may take no blocks of this size, or less than a whole one of the last.
                if error.errno != errno.EINVAL or not _is_direct(file):
                    raise
                set_direct(file, False)


def read_into(file: FileIO, path: Path, content: memoryview) -> int:
    """Fill a piece of memory from a file.

    Returns:
        How many bytes there were, which is less at the end of the file.
    """
    done = 0
    with _naming(path):
        while done < len(content) and (count := file.readinto(content[done:])):
            done += count
    return done


def seek(file: FileIO, path: Path, start: int) -> None:
    """Go to a place in a file."""
    with _naming(path):
        file.seek(start)


def read_sparse(file: FileIO, path: Path, content: memoryview) -> None:
    """Fill zeroed memory from a file of which most is not on the disk, without touching the rest."""
    start = 0
    with _naming(path):
        while start < len(content):
            try:
                start = os.lseek(file.fileno(), start, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                return  # only holes are left
            stop = min(os.lseek(file.fileno(), start, os.SEEK_HOLE), len(content))
            file.seek(start)
            read_into(file, path, content[start:stop])
            start = stop


def resize(file: FileIO, path: Path, nbytes: int) -> None:
    """Let a file have so many bytes, of which new ones are a hole."""
    with _naming(path):
        file.truncate(nbytes)


def allocate(file: FileIO, path: Path, start: int, nbytes: int) -> None:
    """Have room on the disk for bytes of a file that were never written, so that writing them does not fail for that.

    What is written through memory into a hole, where the disk is full, would end the process (SIGBUS).
    """
    with _naming(path):
        try:
            os.posix_fallocate(file.fileno(), start, nbytes)
        except (OSError, AttributeError) as error:
            if isinstance(error, OSError) and error.errno not in LACKING:
                raise
            _fill(file, path, start, nbytes)


def _fill(file: FileIO, path: Path, start: int, nbytes: int) -> None:
    """Zeros take the room, where a system has no better way."""
    file.seek(start)
    for done in range(0, nbytes, _PIECE_BYTES):
        write(file, path, bytes(min(_PIECE_BYTES, nbytes - done)))


def will_read(file: FileIO, path: Path, start: int, nbytes: int) -> None:
    """Have the system read a part of a file ahead, where it can."""
    if hasattr(os, "posix_fadvise"):
        with _naming(path):
            os.posix_fadvise(file.fileno(), start, nbytes, os.POSIX_FADV_WILLNEED)


def mapped(file: FileIO, path: Path, *, shared: bool) -> mmap.mmap:
    """A whole file as memory.

    Args:
        file: the file, which has at least one byte.
        path: where it is, for messages.
        shared: whether what is written to the memory is written to the file. Otherwise nobody else sees it.
    """
    with _naming(path):
        if shared:
            return mmap.mmap(file.fileno(), 0)
        flags = mmap.MAP_PRIVATE | NO_RESERVE
        return mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def sync(file: FileIO, path: Path) -> None:
    """Make what was written survive a loss of power, where the system has that."""
    with _naming(path):
        _sync(file.fileno())


def status(file: FileIO, path: Path) -> os.stat_result:
    """What is known of an open file."""
    with _naming(path):
        return os.fstat(file.fileno())


def write_whole(path: Path, content: bytes) -> None:
    """Write a new file that survives a loss of power; its name has to be synced, too."""
    with create(path) as file:
        write(file, path, content)
        sync(file, path)


def read_whole(path: Path, most: int) -> bytearray:
    """The first bytes of a regular file, at most so many."""
    with open_file(path) as file:
        return _read(file, path, most)


def ends(path: Path, most: int, last: int) -> tuple[int, bytearray]:
    """A regular file, if it is small, or how it ends.

    Args:
        path: the file.
        most: the bytes of a small file.
        last: the bytes that are read of a larger one.

    Returns:
        How many bytes it has, and those that were read.
    """
    with open_file(path) as file, _naming(path):
        size = os.fstat(file.fileno()).st_size
        if size > most:
            file.seek(size - last)
        return size, _read(file, path, most)


def _read(file: FileIO, path: Path, most: int) -> bytearray:
    content = bytearray()
    with _naming(path):
        while len(content) < most and (piece := file.read(min(most - len(content), _PIECE_BYTES))):
            content += piece
    return content


def _sync(handle: int) -> None:
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in LACKING:
            raise


# -- names ------------------------------------------------------------------------------------------------------------


def rename(source: Path, target: Path) -> None:
    """Move a file, or a directory to where nothing or an empty one is."""
    os.rename(source, target)


def replace(source: Path, target: Path) -> None:
    """Move a file to where another one may be, in one step."""
    os.replace(source, target)


def link(source: Path, target: Path) -> None:
    """Give a file a second name. A link is not followed."""
    os.link(source, target, follow_symlinks=False)


def unlink(path: Path) -> None:
    """Remove a file, if it is there."""
    path.unlink(missing_ok=True)
