"""Values as bytes: JSON and safetensors one after the other, so that many values are saved as one tensor of bytes."""

from __future__ import annotations

import json
from typing import Any

import safetensors
import safetensors.torch

from asyncbuf._plain.codec import decode, encode, join, split
from asyncbuf.errors import CheckpointCorruptError, CheckpointError

_HEAD = 8


def to_bytes(value: Any, path: str) -> bytes:
    """A value as bytes of its own.

    Args:
        value: what ``encode`` takes.
        path: what it is called, for messages.

    Raises:
        CheckpointError: it cannot be saved; the message says where.
    """
    document, tensors = split(encode(value, path))
    text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    head = len(text).to_bytes(_HEAD, "little")
    if not tensors:
        return head + text
    try:
        return head + text + safetensors.torch.save({name: _saved(tensor) for name, tensor in tensors.items()})
    except (KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: expected tensors that can be saved, found {error!r}") from error


def _saved(tensor: Any) -> Any:
    return tensor.detach().cpu().contiguous()


def from_bytes(content: bytes, path: str) -> Any:
    """The way back.

    Raises:
        CheckpointError: it is something else, or names a type that is not registered.
    """
    try:
        end = _HEAD + int.from_bytes(content[:_HEAD], "little")
        tensors = safetensors.torch.load(content[end:]) if len(content) > end else {}
        return decode(join(json.loads(content[_HEAD:end]), tensors), path)
    except CheckpointError:
        raise
    except (ValueError, RecursionError, safetensors.SafetensorError, KeyError, TypeError) as error:
        raise CheckpointCorruptError(f"{path}: expected a value as bytes, found {error!r}") from error
