"""Items for a tensor storage, and short ways to write and read its rows."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from asyncbuf import RowRange, TensorStorage

if TYPE_CHECKING:
    from collections.abc import Sequence

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.complex64,
    torch.complex128,
]
NUMPY_DTYPES = ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"]


class Pair(NamedTuple):
    one: Any
    two: Any


@dataclasses.dataclass
class Step:
    obs: Any
    reward: Any


def extend(storage: TensorStorage, items: Any, row: int = 0) -> None:
    prepared = storage.prepare(items)
    storage.write(prepared, [RowRange(row, 0, prepared.count)])


def add(storage: TensorStorage, item: Any, row: int = 0) -> None:
    storage.write(storage.prepare_one(item), [RowRange(row, 0, 1)])


def gather(storage: TensorStorage, *rows: int) -> Any:
    return storage.gather(torch.tensor(rows, dtype=torch.int64))


def as_bytes(tensor: torch.Tensor) -> bytes:
    """The bits of a tensor in order, to which nan is equal to itself and 0.0 is not -0.0."""
    dense = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert isinstance(found, torch.Tensor)
    assert found.dtype is expected.dtype
    assert found.shape == expected.shape
    assert as_bytes(found) == as_bytes(expected)


def random_tensor(dtype: torch.dtype, shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """Any bits that the dtype can have."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
    size = torch.empty(0, dtype=dtype).element_size()
    count = int(np.prod(shape, dtype=np.int64))
    return torch.randint(0, 256, (count * size,), generator=generator, dtype=torch.uint8).view(dtype).reshape(*shape)
