"""How rows lie in memory.

What a batch costs is the number of gathers, so the small fields of a row are packed side by side into one padded
block: one gather brings them all, and the fields of a batch are typed views into what it brought. A field of several
kilobytes gains nothing from that and has a column of its own.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from asyncbuf.storage.leaf import Field

PACKED_FIELD_BYTES = 2048
_ALIGNMENT = 16


class Place(NamedTuple):
    """Where a field lies.

    Attributes:
        block: number of the block.
        offset: bytes from the start of a row of the block.
    """

    block: int
    offset: int


class Layout(NamedTuple):
    """The blocks of a row, and where each field lies.

    Attributes:
        strides: bytes of a row, one per block.
        places: one per field.
    """

    strides: tuple[int, ...]
    places: tuple[Place, ...]


def plan(fields: Sequence[Field]) -> Layout:
    """Pack fields of at most ``PACKED_FIELD_BYTES`` into block 0, widest elements first; others get their own block."""
    places: dict[int, Place] = {}
    small = [i for i, field in enumerate(fields) if field.nbytes <= PACKED_FIELD_BYTES]
    used = 0
    # Widest elements first: every field is then aligned to its element without a gap before it.
    for i in sorted(small, key=lambda i: -fields[i].bits.itemsize):
        places[i] = Place(0, used)
        used += fields[i].nbytes
    strides = [_padded(used, len(small))] if small else []
    for i, field in enumerate(fields):
        if i not in places:
            places[i] = Place(len(strides), 0)
            strides.append(field.nbytes)
    return Layout(tuple(strides), tuple(places[i] for i in range(len(fields))))


def _padded(used: int, count: int) -> int:
    # A lone small field needs no padding: its rows are aligned by themselves.
    return used if count == 1 else -(-used // _ALIGNMENT) * _ALIGNMENT


def allocate(capacity: int, stride: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Zeroed rows ``[capacity, stride]`` of bytes, whose pages become real memory only when they are written."""
    if capacity * stride == 0:
        return np.zeros((capacity, stride), np.uint8)
    flags = {}
    if hasattr(mmap, "MAP_PRIVATE"):
        # Without a reservation, so that a capacity beyond today's memory may be asked for before it is filled.
        flags["flags"] = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return np.frombuffer(mmap.mmap(-1, capacity * stride, **flags), np.uint8).reshape(capacity, stride)


def numpy_view(block: np.ndarray[Any, Any], field: Field, offset: int) -> np.ndarray[Any, Any]:
    """The rows of one field, ``[rows, *shape]``, as bits."""
    inner = np.empty(field.shape, field.bits).strides if field.nbytes == 0 else _inner_strides(field)
    return np.ndarray(
        (block.shape[0], *field.shape),
        field.bits,
        buffer=block.data,
        offset=offset,
        strides=(block.shape[1], *inner),
    )


def _inner_strides(field: Field) -> tuple[int, ...]:
    strides: list[int] = []
    step = field.bits.itemsize
    for length in reversed(field.shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def torch_view(block: torch.Tensor, stride: int, field: Field, offset: int) -> torch.Tensor:
    """The rows of one field as a typed tensor ``[rows, *shape]`` over a block of bytes.

    Args:
        block: uint8 ``[rows * stride]``.
        stride: bytes of a row.
        field: the field.
        offset: bytes from the start of a row.
    """
    size = field.bits.itemsize
    rows = block.shape[0] // stride
    inner = tuple(step // size for step in _inner_strides(field))
    return block.view(field.dtype).as_strided((rows, *field.shape), (stride // size, *inner), offset // size)
