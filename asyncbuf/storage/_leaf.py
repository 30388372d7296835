"""One leaf of an item: its dtype and shape, and the bits behind it as a numpy array."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncbuf.errors import SchemaError
from asyncbuf.storage import _misfits as misfits

# Copies go through numpy, whose row assignment and `take` are several times cheaper than torch's for small rows. Dtypes
# that numpy lacks travel as unsigned integers of the same size: only bits are moved, nothing is computed.
_BITS: dict[torch.dtype, tuple[np.dtype[Any], torch.dtype | None]] = {
    torch.bool: (np.dtype(np.bool_), None),
    torch.uint8: (np.dtype(np.uint8), None),
    torch.uint16: (np.dtype(np.uint16), None),
    torch.uint32: (np.dtype(np.uint32), None),
    torch.uint64: (np.dtype(np.uint64), None),
    torch.int8: (np.dtype(np.int8), None),
    torch.int16: (np.dtype(np.int16), None),
    torch.int32: (np.dtype(np.int32), None),
    torch.int64: (np.dtype(np.int64), None),
    torch.float16: (np.dtype(np.float16), None),
    torch.float32: (np.dtype(np.float32), None),
    torch.float64: (np.dtype(np.float64), None),
    torch.complex64: (np.dtype(np.complex64), None),
    torch.complex128: (np.dtype(np.complex128), None),
    torch.bfloat16: (np.dtype(np.uint16), torch.uint16),
    torch.float8_e4m3fn: (np.dtype(np.uint8), torch.uint8),
    torch.float8_e5m2: (np.dtype(np.uint8), torch.uint8),
    torch.float8_e4m3fnuz: (np.dtype(np.uint8), torch.uint8),
    torch.float8_e5m2fnuz: (np.dtype(np.uint8), torch.uint8),
}
_FLOAT, _BOOL = np.dtype(np.float32), np.dtype(np.bool_)
_FLOAT_MAX = float(np.finfo(np.float32).max)
_FROM_NUMPY = {bits: dtype for dtype, (bits, carrier) in _BITS.items() if carrier is None}


class Field(NamedTuple):
    """One leaf of every item.

    Attributes:
        path: its place in the item, ``obs/pixels``.
        dtype: torch dtype.
        shape: shape of one item, without the batch axis.
    """

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bits(self) -> np.dtype[Any]:
        """The numpy dtype that carries the bits."""
        return _BITS[self.dtype][0]

    @property
    def is_carried(self) -> bool:
        """Whether numpy lacks the dtype, so that the bits travel as integers."""
        return _BITS[self.dtype][1] is not None

    def typed(self, bits: torch.Tensor) -> torch.Tensor:
        """A tensor over the same memory, whose bits are read as values of the field."""
        return bits.view(self.dtype) if self.is_carried else bits

    @property
    def nbytes(self) -> int:
        """Bytes of one item."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.bits.itemsize

    def __str__(self) -> str:
        """The field in words."""
        return f"{self.path}: {str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


def as_bits(leaf: Any, path: str) -> tuple[np.ndarray[Any, Any], torch.dtype, bool]:
    """The bits of a leaf.

    Args:
        leaf: tensor on any device, numpy array, numpy scalar or Python number.
        path: its place, for messages.

    Returns:
        The bits (no copy where there need not be one), the torch dtype, and whether the dtype is only a guess, because
        a Python number has none; the bits of such a number are still those of a 64-bit (or 128-bit) value. A numpy
        scalar has a dtype, and goes into other fields as a Python number does.

    Raises:
        SchemaError: the leaf cannot be stored as a tensor.
    """
    if type(leaf) is np.ndarray or isinstance(leaf, (np.ndarray, np.generic)):
        if isinstance(leaf, np.ma.MaskedArray):
            raise SchemaError(f"{path}: expected a plain array, found one with a mask")
        array = np.asarray(leaf)
        dtype = _FROM_NUMPY.get(array.dtype)
        if dtype is None and (dtype := _FROM_NUMPY.get(array.dtype.newbyteorder("="))) is not None:
            array = array.astype(array.dtype.newbyteorder("="))
        if dtype is None:
            raise SchemaError(f"{path}: expected numbers, found a numpy array of dtype {array.dtype}")
        # gymnasium gives rewards now as float, now as numpy.float64.
        return array, dtype, isinstance(leaf, np.floating | np.signedinteger)
    if isinstance(leaf, torch.Tensor):
        return _tensor_bits(leaf, path), leaf.dtype, False
    if isinstance(leaf, bool):
        return np.asarray(leaf), torch.bool, True
    if isinstance(leaf, int):
        if not -(2**63) <= leaf < 2**64:
            raise SchemaError(f"{path}: expected an integer of 64 bits, found {leaf}")
        signed = leaf < 2**63
        return np.asarray(leaf, np.int64 if signed else np.uint64), torch.int64 if signed else torch.uint64, True
    if isinstance(leaf, (float, complex)):
        return (
            np.asarray(leaf),
            torch.get_default_dtype() if isinstance(leaf, float) else torch.complex64,
            True,
        )
    raise SchemaError(
        f"{path}: expected a tensor, numpy array or number, found {type(leaf).__name__} (ListStorage takes any object)"
    )


def _tensor_bits(leaf: torch.Tensor, path: str) -> np.ndarray[Any, Any]:
    if leaf.layout is not torch.strided or leaf.is_nested or leaf.dtype not in _BITS:
        raise SchemaError(f"{path}: expected a dense tensor of a plain dtype, found {leaf.dtype}, {leaf.layout}")
    if leaf.is_meta:
        raise SchemaError(f"{path}: expected a tensor with data, found one on the meta device")
    carrier = _BITS[leaf.dtype][1]
    try:
        plain = leaf.detach()
        if plain.device.type != "cpu":
            plain = plain.cpu()
        plain = plain.resolve_conj().resolve_neg()
        bits: np.ndarray[Any, Any] = (plain if carrier is None else plain.view(carrier)).numpy()
    except (ValueError, TypeError, RuntimeError) as error:  # numpy has fewer axes, and no tensors without memory
        raise SchemaError(f"{path}: expected a tensor that numpy can hold: {error}") from error
    return bits


def fit(field: Field, bits: np.ndarray[Any, Any], dtype: torch.dtype, guessed: bool) -> np.ndarray[Any, Any]:
    """The bits, if they have the dtype of the field; Python numbers are converted where nothing is lost in kind.

    Raises:
        SchemaError: another dtype.
    """
    if dtype is field.dtype and not (guessed and bits.dtype != field.bits):
        return bits
    if guessed and dtype is not torch.bool and field.dtype is not torch.bool and torch.can_cast(dtype, field.dtype):
        return number_of(field, bits.item())
    raise SchemaError(f"{field.path}: expected dtype {field.dtype}, found {dtype}{_hint(field, bits, guessed)}")


def _hint(field: Field, bits: np.ndarray[Any, Any], guessed: bool) -> str:
    if guessed:
        return misfits.of_number(field.dtype, bits.item())
    return misfits.of_dtype(field.dtype, None if field.is_carried else field.bits.name)


def _in_range(value: complex, most: float) -> bool:
    """Whether a number stays finite if it is finite, instead of becoming infinite or the largest one."""
    return all(abs(part) <= most or not math.isfinite(part) for part in (value.real, value.imag))


def number_of(field: Field, value: complex) -> np.ndarray[Any, Any]:
    """The bits of a Python number in the dtype of a field.

    Raises:
        SchemaError: it does not fit.
    """
    exact = not (field.dtype.is_floating_point or field.dtype.is_complex)
    try:
        number = torch.tensor(value, dtype=field.dtype, device="cpu")
        fits = number.item() == value if exact else _in_range(value, torch.finfo(field.dtype).max)
    except (RuntimeError, OverflowError, ValueError):
        number, fits = None, False
    if number is None or not fits:
        raise SchemaError(f"{field.path}: expected a number that fits {field.dtype}, found {value}")
    return _tensor_bits(number, field.path)


def scalar(leaf: Any, dtype: np.dtype[Any] | None) -> np.ndarray[Any, Any] | None:
    """A number as an array of this dtype, where nothing can go wrong; None otherwise."""
    if isinstance(leaf, np.generic):
        return np.asarray(leaf)
    kind = type(leaf)
    if (kind is float and dtype is _FLOAT and abs(leaf) <= _FLOAT_MAX) or (kind is bool and dtype is _BOOL):
        return np.array(leaf, dtype)
    return None
