"""Sequences as they are handed in: separate, packed or padded, of tensors, arrays or Python numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch

from asyncbuf.errors import SchemaError
from asyncbuf.storage._leaf import as_bits, fit

if TYPE_CHECKING:
    from asyncbuf.rows import Int64Array
    from asyncbuf.storage._leaf import Field

    Array = np.ndarray[Any, Any]

_DTYPES = {"b": torch.bool, "i": torch.int64, "u": torch.int64, "c": torch.complex64}


class Separate:
    """Sequences that are arrays of their own.

    Args:
        arrays: bits of each, ``[tokens, *token]``.
    """

    def __init__(self, arrays: list[Array]) -> None:
        self._arrays = arrays

    def copy(self, start: int, stop: int, out: Array) -> None:
        """Copy sequences one after the other."""
        if stop == start + 1:
            out[...] = self._arrays[start]
        elif stop > start:
            np.concatenate(self._arrays[start:stop], out=out)


class Packed:
    """Sequences that lie one after the other.

    Args:
        values: bits of all, ``[tokens, *token]``.
        offsets: where each begins, and where the last one ends: int64 ``[sequences + 1]``.
        key: name of the offsets, for messages.

    Attributes:
        lengths: number of tokens of each.

    Raises:
        SchemaError: the offsets do not go with the values.
    """

    def __init__(self, values: Array, offsets: Int64Array, key: str) -> None:
        self.lengths = np.diff(offsets)
        if offsets[0] != 0 or offsets[-1] != len(values) or (self.lengths < 0).any():
            raise SchemaError(f"{key}: expected ascending numbers from 0 to {len(values)}, found others")
        self._values = values
        self._offsets = offsets

    def copy(self, start: int, stop: int, out: Array) -> None:
        """Copy sequences one after the other."""
        out[...] = self._values[self._offsets[start] : self._offsets[stop]]


class Padded:
    """Sequences that have something behind them, up to a common length.

    Args:
        values: bits of all, ``[sequences, longest, *token]``.
        lengths: number of tokens of each: int64 ``[sequences]``.
        path: name of the field, for messages.

    Attributes:
        lengths: as the argument.

    Raises:
        SchemaError: the lengths do not go with the values.
    """

    def __init__(self, values: Array, lengths: Int64Array, path: str) -> None:
        if len(values) != len(lengths) or ((lengths < 0) | (lengths > values.shape[1])).any():
            raise SchemaError(
                f"{path}: expected {len(lengths)} sequences of at most {max(0, int(lengths.max()))} tokens, as their "
                f"lengths say, found {list(values.shape[:2])}"
            )
        self.lengths = lengths
        self._values = values

    def copy(self, start: int, stop: int, out: Array) -> None:
        """Copy sequences one after the other."""
        at = 0
        for number, length in enumerate(self.lengths[start:stop].tolist(), start):
            out[at : at + length] = self._values[number, :length]
            at += length


def is_open(leaf: Any) -> bool:
    """Whether a sequence says nothing of its dtype: an empty list."""
    return isinstance(leaf, list | tuple) and not len(leaf)


@overload
def bits_of(field: None, leaf: Any, where: str) -> tuple[Array, torch.dtype]: ...
@overload
def bits_of(field: Field, leaf: Any, where: str) -> Array: ...
def bits_of(field: Field | None, leaf: Any, where: str) -> Array | tuple[Array, torch.dtype]:
    """The bits of a sequence ``[tokens, *token]``, no copy where there need not be one.

    Args:
        field: what a token must be; None if that is not known, and to be found out.
        leaf: tensor, array, or list of numbers.
        where: begins a message.

    Returns:
        The bits, and the dtype if it was not known.

    Raises:
        SchemaError: it is no sequence of such tokens.
    """
    path = where if field is None else f"{where}{field.path}"
    if isinstance(leaf, list | tuple):
        return _of_numbers(field, leaf, path)
    bits, dtype, guessed = as_bits(leaf, path)
    if not bits.ndim:
        raise SchemaError(f"{path}: expected a sequence with an axis of tokens, found a single number")
    if field is None:
        return bits, dtype
    named = field._replace(path=path) if where else field
    return _shaped(field, fit(named, bits, dtype, guessed), path)


def _shaped(field: Field, bits: Array, path: str) -> Array:
    if bits.shape[1:] != field.shape:
        raise SchemaError(f"{path}: expected tokens of shape {list(field.shape)}, found {list(bits.shape[1:])}")
    return bits


def _of_numbers(field: Field | None, leaf: Any, path: str) -> Array | tuple[Array, torch.dtype]:
    if field is not None and is_open(leaf):
        return np.empty((0, *field.shape), field.bits)
    try:
        array = np.array(leaf)
    except (ValueError, TypeError, RuntimeError) as error:
        raise SchemaError(f"{path}: expected a tensor, an array or a list of numbers, found {error}") from error
    if array.dtype.kind == "f" and all(type(number) is int for number in leaf):
        raise SchemaError(f"{path}: expected integers of 64 bits, found larger ones")
    if array.dtype.kind == "f":
        dtype = torch.get_default_dtype()
    elif (known := _DTYPES.get(array.dtype.kind)) is not None:
        dtype = known
    else:
        raise SchemaError(f"{path}: expected a tensor, an array or a list of numbers, found a list of other things")
    if field is None:
        return _converted(array, dtype, path), dtype
    is_bool = torch.bool in (dtype, field.dtype)
    if dtype is not field.dtype and (is_bool or not torch.can_cast(dtype, field.dtype)):
        raise SchemaError(f"{path}: expected dtype {field.dtype}, found a list of {dtype}")
    return _shaped(field, _converted(array, field.dtype, path), path)


def _converted(array: Array, dtype: torch.dtype, path: str) -> Array:
    """Numbers as bits of a dtype."""
    try:
        tensor = torch.from_numpy(array).to(dtype)
        is_exact = not (dtype.is_floating_point or dtype.is_complex)
        back = tensor.numpy() if is_exact else tensor.to(torch.complex128).numpy()
        fits = np.array_equal(back, array) if is_exact else np.array_equal(np.isfinite(back), np.isfinite(array))
        if fits:
            return as_bits(tensor, path)[0]
    except (RuntimeError, TypeError, OverflowError):
        pass  # as where they do not fit
    raise SchemaError(f"{path}: expected numbers that fit {dtype}, found larger ones")
