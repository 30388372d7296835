"""Storages in files for tests that do not care where these are."""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch

from asyncbuf import MemmapStorage, ReplayBuffer, RowRange
from asyncbuf.storage._mapped_directory import DESCRIPTION
from tests.helpers import numbers, rows

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


def in_files(capacity: int) -> MemmapStorage:
    """A storage in a directory that is gone with it."""
    directory = tempfile.mkdtemp(prefix="asyncbuf-", dir=MEMORY)
    storage = MemmapStorage(capacity, directory)
    weakref.finalize(storage, shutil.rmtree, directory, ignore_errors=True)
    return storage


def put(storage: MemmapStorage, count: int, start: int = 0, row: int = 0, *, width: int = 1) -> None:
    storage.write(storage.prepare(rows(count, start, width=width)), [RowRange(row, 0, count)])


def stored(storage: MemmapStorage, count: int) -> list[int]:
    found: list[int] = storage.gather(torch.arange(count))["number"].tolist()
    return found


async def drawn(buffer: ReplayBuffer) -> set[int]:
    """The numbers of about all items."""
    async with buffer:
        return set(numbers(await buffer.sample(2_000)))


def described(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / DESCRIPTION).read_bytes())
    return found


def folders(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_dir())
