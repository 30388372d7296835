"""Files of named tensors in the format of safetensors, written and read piece by piece.

The safetensors package makes or reads a file as a whole, while it keeps the interpreter's lock, and in memory that
nobody used before. Here a file is hashed while it is written and read, and the lock is free meanwhile. The format is a
length (8 bytes, little-endian), so many bytes of JSON with dtype, shape and place of each tensor, and their bytes.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from asyncbuf._disk.blocks import LARGE_BYTES, BlockFile
from asyncbuf._disk.files import BLOCK_BYTES
from asyncbuf._disk.manifest import STRICT
from asyncbuf._plain.codec import DTYPES
from asyncbuf._plain.savable import SAVABLE_DTYPES
from asyncbuf.errors import CheckpointCorruptError, CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt


# What safetensors takes at most.
HEADER_BYTES = 100_000_000
# safetensors keeps its own things under this name: a tensor called so makes a file that nothing can read.
_RESERVED = "__metadata__"
_DTYPES = {
    **{"BOOL": torch.bool, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64},
    **{"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64},
    **{"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz},
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Place(NamedTuple):
    """Where a tensor is in the bytes after the header.

    Attributes:
        dtype: its dtype.
        shape: its shape.
        start: its first byte.
        stop: the byte after its last one.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


# -- writing ----------------------------------------------------------------------------------------------------------


class TensorFile:
    """Tensors that can be written to a file.

    Args:
        tensors: dense tensors on the CPU by name. They must not change until they are written.

    Attributes:
        nbytes: how many bytes the file will have.
        dtypes: what those were that are stored as pairs of numbers, by the name that they have in the file.

    Raises:
        CheckpointError: one cannot be stored.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for key, tensor in tensors.items():
            _check(key, tensor)
        named = {_renamed(key): tensor for key, tensor in tensors.items()}
        self.dtypes = {key: _dtype_name(tensor) for key, tensor in named.items() if tensor.is_complex()}
        plain = {key: _real(tensor) for key, tensor in named.items()}
        # Those with wide elements first, so that all are aligned.
        self._tensors = dict(sorted(plain.items(), key=lambda item: (-item[1].element_size(), item[0])))
        self._header = _header(self._tensors)
        self.nbytes = len(self._header) + sum(tensor.nbytes for tensor in plain.values())

    def write(self, blocks: BlockFile) -> str:
        """Write everything into a new file: its digest."""
        blocks.add(np.frombuffer(self._header, np.uint8))
        for tensor in self._tensors.values():
            blocks.add(_bytes_of(tensor.contiguous()))
        return blocks.end()


def _check(key: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in SAVABLE_DTYPES or tensor.is_meta or tensor.layout is not torch.strided:
        raise CheckpointError(
            f"{key}: expected a dense tensor of a common dtype, found {tensor.dtype}, {tensor.layout}, {tensor.device}"
        )
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{key!r}: expected the name of a tensor that is valid Unicode, found {error}") from error


def _renamed(key: str) -> str:
    return key + "/" if key.rstrip("/") == _RESERVED else key


def original_name(key: str) -> str:
    """The name of a tensor, which may be another one in the file."""
    return key[:-1] if key.rstrip("/") == _RESERVED else key


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Without history, and of a dtype that safetensors has: complex numbers become pairs."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(plain) if plain.is_complex() else plain


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    header: dict[str, Any] = {_RESERVED: {"format": "pt"}}
    start = 0
    for key, tensor in tensors.items():
        stop = start + tensor.nbytes
        header[key] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # Large tensors begin at a block, so that they may be written from where they are.
    aligned = BLOCK_BYTES if start >= LARGE_BYTES else 8
    text += b" " * (-(8 + len(text)) % aligned)
    if len(text) > HEADER_BYTES:
        raise CheckpointError(f"expected at most {HEADER_BYTES} bytes for the names of tensors, found {len(text)}")
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The memory of a dense tensor."""
    flat = tensor.reshape(-1)
    if flat.stride(0) != 1:  # a single element, whose stride means nothing but to view()
        flat = flat.clone(memory_format=torch.contiguous_format)
    found: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return found


# -- reading ----------------------------------------------------------------------------------------------------------


class Header(NamedTuple):
    """What stands before the bytes of the tensors.

    Attributes:
        nbytes: how many bytes it takes.
        places: where the tensors are, by name, the first ones first.
    """

    nbytes: int
    places: dict[str, Place]


def read_header(content: memoryview, nbytes: int) -> Header:
    """Parse a header, of which nothing is believed.

    Args:
        content: the file from its beginning; all of the header is there, if it is one.
        nbytes: how many bytes the file has.

    Raises:
        ValueError: it is none, or the tensors do not fill the file, one after the other.
    """
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or size > min(HEADER_BYTES, nbytes - 8, len(content) - 8):
        raise ValueError(f"a header of {size} bytes")
    document = json.loads(bytes(content[8 : 8 + size]), **STRICT)
    if not isinstance(document, dict):
        raise ValueError("a header that is no object")
    document.pop(_RESERVED, None)
    found = sorted(((key, _place(key, entry)) for key, entry in document.items()), key=lambda item: item[1].start)
    end = 0
    for key, place in found:
        # Empty tensors may lie anywhere between the others.
        if place.start != end:
            raise ValueError(f"a gap before {key!r}")
        end = place.stop
    if end != nbytes - 8 - size:
        raise ValueError(f"{end} bytes of tensors in {nbytes - 8 - size}")
    return Header(8 + size, dict(found))


def _place(key: str, entry: Any) -> Place:
    try:
        dtype, shape, (start, stop) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{key!r} without dtype, shape or place") from error
    if not isinstance(shape, list) or any(type(number) is not int or number < 0 for number in (*shape, start, stop)):
        raise ValueError(f"{key!r} of a shape or in a place that is none")
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{key!r} in {stop - start} bytes")
    return Place(dtype, tuple(shape), start, stop)


def over(content: npt.NDArray[np.uint8], header: Header, dtypes: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """The tensors of a file whose bytes are in memory, over that memory.

    Args:
        content: uint8 array of the whole file.
        header: of the file.
        dtypes: of those that are stored as pairs of numbers.
    """
    tensors = {}
    for key, place in header.places.items():
        pair = dtypes.get(key)
        part = _part(content, header.nbytes + place.start, place, 1 if pair is None else 2)
        tensors[original_name(key)] = _typed(part, place, pair)
    return tensors


def _part(content: npt.NDArray[np.uint8], start: int, place: Place, numbers: int) -> torch.Tensor:
    """The bytes of a tensor, each of whose elements consists of so many numbers."""
    part = content[start : start + place.stop - place.start]
    # A processor may refuse a complex number that does not begin at a multiple of its own size. In the file each
    # number does, and those of others lie anywhere.
    if part.ctypes.data % (numbers * place.dtype.itemsize):
        return torch.from_numpy(part).clone()
    return torch.from_numpy(part)


def alone(header: Header, dtypes: Mapping[str, str], fill: Callable[[memoryview], None]) -> dict[str, torch.Tensor]:
    """The tensors of a file, each in memory of its own.

    Args:
        header: of the file.
        dtypes: of those that are stored as pairs of numbers.
        fill: reads the next bytes of the file into memory.
    """
    tensors = {}
    for key, place in header.places.items():
        raw = torch.empty(place.stop - place.start, dtype=torch.uint8)
        fill(raw.numpy().data)
        tensors[original_name(key)] = _typed(raw, place, dtypes.get(key))
    return tensors


def _typed(raw: torch.Tensor, place: Place, dtype: str | None) -> torch.Tensor:
    tensor = raw.view(place.dtype).reshape(place.shape)
    if dtype is None:
        return tensor
    try:
        return torch.view_as_complex(tensor).to(DTYPES[dtype])
    except RuntimeError as error:
        raise CheckpointCorruptError(f"expected pairs of numbers, found {tensor.dtype} {list(tensor.shape)}") from error
