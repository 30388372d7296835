"""Storages in files for tests that do not care where these are."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path

from asyncbuf import MemmapStorage

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


def in_files(capacity: int) -> MemmapStorage:
    """A storage in a directory that is gone with it."""
    directory = tempfile.mkdtemp(prefix="asyncbuf-", dir=MEMORY)
    storage = MemmapStorage(capacity, directory)
    weakref.finalize(storage, shutil.rmtree, directory, ignore_errors=True)
    return storage
