"""Storages in files for tests that do not care where these are."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path

from asyncbuf import MemmapStorage

_MEMORY = Path("/dev/shm")


def in_files(capacity: int) -> MemmapStorage:
    """A storage in a directory that is gone with it."""
    directory = tempfile.mkdtemp(prefix="asyncbuf-", dir=_MEMORY if _MEMORY.is_dir() else None)
    storage = MemmapStorage(capacity, directory)
    weakref.finalize(storage, shutil.rmtree, directory, ignore_errors=True)
    return storage
