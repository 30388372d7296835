"""In what two items of a list differ. Values of registered types are compared by what their codecs made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._plain.codec import join
from asyncbuf._plain.columns_back import from_columns
from asyncbuf.checkpoint._leaves import STRUCTURE, Foreign, are_columns, as_torch, below, document, foreign

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncbuf.checkpoint._looking import BufferLook


class ItemReader:
    """Reads the chunks of a ``ListStorage``, and keeps the last one.

    Args:
        look: the buffer.
    """

    def __init__(self, look: BufferLook) -> None:
        self._look = look
        self._file = ""
        self._items: list[Any] = []

    def read(self, file: str) -> list[Any]:
        """The items of a chunk; those of an old chunk as the plain data that they are."""
        if self._file != file:
            self._file, self._items = "", []
            self._items = self._read(file)
            self._file = file
        return self._items

    def _read(self, file: str) -> list[Any]:
        view = self._look.view
        stored = view.tensors(file)
        tensors = {name: as_torch(view.read_part(tensor), tensor) for name, tensor in stored.items()}
        if are_columns(stored):
            return from_columns(tensors, file, foreign)
        found: list[Any] = join(document(stored[STRUCTURE], self._look.read), tensors)
        return found

    def differences(self, a: Any, b: Any) -> Iterator[str]:
        """The places in which two items differ. All elements of a list count as one place."""
        return _differences(a, b, "")


def _differences(a: Any, b: Any, path: str) -> Iterator[str]:
    if type(a) is not type(b):
        yield path or "."
    elif isinstance(a, dict):
        yield from _in_dicts(a, b, path)
    elif isinstance(a, (list, tuple)):
        if len(a) != len(b):
            yield f"{path}[]"
        else:
            for one, other in zip(a, b, strict=True):
                yield from _differences(one, other, f"{path}[]")
    elif isinstance(a, Foreign):
        typed = f"{path}<{a.name.rpartition('.')[2]}>"
        if a.name != b.name:
            yield typed
        else:
            yield from _differences(a.value, b.value, typed)
    elif not _is_same(a, b):
        yield path or "."


def _in_dicts(a: dict[Any, Any], b: dict[Any, Any], path: str) -> Iterator[str]:
    for key in dict.fromkeys([*a, *b]):
        where = below(path, key if isinstance(key, str) else repr(key))
        if key not in a or key not in b:
            yield where
        else:
            yield from _differences(a[key], b[key], where)


def _is_same(a: Any, b: Any) -> bool:
    """Whether two leaves of one type are the same, bit for bit."""
    if isinstance(a, torch.Tensor):
        is_alike = a.dtype == b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad
        return is_alike and _content(a) == _content(b)
    if isinstance(a, (np.ndarray, np.generic)):
        return bool(a.dtype == b.dtype) and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, (float, complex)):
        return np.asarray(a).tobytes() == np.asarray(b).tobytes()
    return bool(a == b)


def _content(tensor: torch.Tensor) -> bytes:
    content: bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return content
