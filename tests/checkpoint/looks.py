"""Checkpoints to be looked into."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from asyncbuf import Checkpointer, ListStorage, ReplayBuffer, TensorStorage
from asyncbuf._disk.manifest import MANIFEST

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

ROWS = 10  # of a chunk
CAPACITY = 45


def make_chunks_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncbuf.storage._row_memory.SEGMENT_BYTES", 5 * 8)
    monkeypatch.setattr("asyncbuf.storage._row_memory.CHUNK_BYTES", ROWS * 8)
    monkeypatch.setattr("asyncbuf.storage.list._CHUNK_ITEMS", ROWS, raising=False)
    monkeypatch.setattr("asyncbuf.storage._frozen_items._CHUNK_ITEMS", ROWS)


def numbered(count: int, start: int = 0) -> dict[str, torch.Tensor]:
    """Items of eight bytes."""
    return {"x": torch.arange(start, start + count)}


def listed(count: int, start: int = 0) -> list[Any]:
    """Items of many kinds."""
    return [
        {
            "x": torch.full((2,), float(number)),
            "text": f"item {number}",
            "steps": [{"reward": 0.5}] * (number % 3),
            "pair": (number, None if number % 2 else True),
        }
        for number in range(start, start + count)
    ]


def ring(storage: Any = TensorStorage, **settings: Any) -> ReplayBuffer:
    return ReplayBuffer(storage(CAPACITY), batch_size=4, **settings)


def list_ring() -> ReplayBuffer:
    return ring(ListStorage, collate_fn=lambda items: items)


def chunks(path: Path) -> list[Path]:
    return sorted(path.glob("data-*/**/storage/*.safetensors"))


async def run_of(directory: Path, steps: int, **settings: Any) -> Checkpointer:
    """A run of so many steps, each of which writes five items into a full ring."""
    checkpointer = Checkpointer(directory, keep=None, **settings)
    buffer = ring()
    await buffer.extend(numbered(CAPACITY))
    for step in range(1, steps + 1):
        await buffer.extend(numbered(5, 1000 * step))
        await checkpointer.save(step, buffer=buffer, epoch=step, name="run")
    return checkpointer


def damage(path: Path, how: str) -> Path:
    """Spoil a chunk of a checkpoint, or its manifest: what was spoiled."""
    file = chunks(path)[1]
    if how == "flip":
        content = bytearray(file.read_bytes())
        content[-3] ^= 16
        _replace(file, bytes(content))
    elif how == "truncate":
        _replace(file, file.read_bytes()[:-1])
    elif how == "longer":
        _replace(file, file.read_bytes() + b"x")
    elif how == "delete":
        file.unlink()
    elif how == "link":
        file.rename(path / "elsewhere")
        file.symlink_to(path / "elsewhere")
    elif how == "directory":
        file.unlink()
        file.mkdir()
    else:
        file = path / MANIFEST
        _spoil_manifest(file, how)
    return file


def _spoil_manifest(file: Path, how: str) -> None:
    content = file.read_bytes()
    if how == "manifest of another":
        file.write_text(json.dumps({"format": "something else", "version": 1}))
    elif how == "manifest truncated":
        file.write_bytes(content[:-200])
    elif how == "manifest flipped":
        file.write_bytes(content.replace(b"buffer", b"buffes", 1))
    elif how == "manifest empty":
        file.write_bytes(b"")
    else:
        raise AssertionError(how)


DAMAGES = ("flip", "truncate", "longer", "delete", "link", "directory")
MANIFEST_DAMAGES = ("manifest of another", "manifest truncated", "manifest flipped", "manifest empty")


def _replace(file: Path, content: bytes) -> None:
    """Not in place: other checkpoints may have the same file."""
    file.unlink()
    file.write_bytes(content)
