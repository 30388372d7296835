"""Small checkpoints that carry a number, and the one place to read them back."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from asyncbuf._disk.manifest import MANIFEST, is_checkpoint
from asyncbuf._disk.reader import CheckpointReader
from asyncbuf._disk.writer import CheckpointWriter

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
FILES = ("model.safetensors", "storage/00000.safetensors", "storage/00001.safetensors")


def contents(number: int) -> dict[str, dict[str, torch.Tensor]]:
    return {name: {"x": torch.full((5,), number * 10 + i)} for i, name in enumerate(FILES)}


def save(path: Path, number: int) -> None:
    with CheckpointWriter(path) as writer:
        for name, tensors in contents(number).items():
            writer.write(name, tensors)
        writer.commit({"number": number})


def load(path: Path) -> int:
    """Read all of it and return its number; whatever is not as it was saved raises."""
    reader = CheckpointReader(path)
    number = int(reader.state["number"])
    for name, tensors in contents(number).items():
        found = reader.read(name)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[key], tensors[key]) for key in tensors)
    return number


def data_of(path: Path) -> Path:
    (folder,) = path.glob("data-*")
    return folder


def leftovers(path: Path) -> list[str]:
    """The files that lie in and beside a checkpoint and belong to none."""
    found = {str(file.relative_to(path.parent)) for file in path.parent.rglob("*") if file.is_file()}
    for checkpoint in path.parent.iterdir():
        if is_checkpoint(checkpoint):
            data = json.loads((checkpoint / MANIFEST).read_bytes())["body"]["data"]
            found -= {f"{checkpoint.name}/{name}" for name in (MANIFEST, *(f"{data}/{file}" for file in FILES))}
    return sorted(found)


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def rendered(body: Any, **others: Any) -> bytes:
    digest = hashlib.sha256(json.dumps(body, indent=1).encode()).hexdigest()
    document = {"body": body, "format": "asyncbuf.checkpoint", "sha256": digest, "version": 2} | others
    return (json.dumps(document, indent=1) + "\n").encode()


def body_of(path: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((path / MANIFEST).read_bytes())["body"]
    return body


def forge(path: Path, change: Callable[[dict[str, Any]], object], **others: Any) -> None:
    body = body_of(path)
    change(body)
    (path / MANIFEST).write_bytes(rendered(body, **others))
