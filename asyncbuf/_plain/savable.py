"""What can never become plain, whatever types are registered later, so that it is found out before it is stored."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from asyncbuf._plain import registry
from asyncbuf._runtime.atoms import ATOMS, holds_atoms

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

_DENSE = torch.strided
# What classes of tensors have that hold their numbers themselves.
_HOLDS_DATA = cast("Any", torch.Tensor).__torch_dispatch__
# How deep values may be nested.
DEPTH = 100
# The dtypes of tensors that a checkpoint can hold.
SAVABLE_DTYPES = frozenset(
    {
        *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32),
        *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64),
        *(torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    }
)
_ARRAY_DTYPE = re.compile(r"[<>|=]?(?:[biufcSU?]\d*|[mM]8(?:\[\d*[a-zA-Zμ]+\])?)")
_array_dtypes: dict[np.dtype[Any], bool] = {}


class MisfitError(Exception):
    """A part of a value does not fit.

    Args:
        problem: what was expected and what was found.

    Attributes:
        problem: the same.
        keys: where it stands, the innermost key first; filled on the way out.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.keys: list[Hashable] = []

    def told(self, prefix: str = "") -> str:
        """The place and the problem."""
        keys = [prefix] if prefix else []
        return f"{'/'.join([*keys, *map(str, reversed(self.keys))]) or 'the item'}: {self.problem}"


def tensor_problem(tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot be saved; None if it can."""
    # Quantized tensors have dtypes of their own.
    if tensor.layout is not torch.strided or tensor.dtype not in SAVABLE_DTYPES or tensor.is_nested:
        nested = ", nested" if tensor.is_nested else ""
        return f"expected a dense tensor of a common dtype, found {tensor.layout}, {tensor.dtype}{nested}"
    if tensor.is_meta:
        return "expected a tensor with data, found one on the meta device"
    kind: Any = type(tensor)
    if kind is torch.Tensor:
        return None
    if is_lazy(tensor):
        return "expected a tensor with data, found that of a lazy module, which has none before its first input"
    if kind.__torch_dispatch__ is not _HOLDS_DATA:
        return f"expected a tensor that holds its numbers itself, found a {kind.__qualname__}; {registry.HINT}"
    return None


def is_plain_dtype(dtype: np.dtype[Any]) -> bool:
    """Whether arrays of a dtype can be saved: numbers, text of a fixed length, times."""
    known = _array_dtypes.get(dtype)
    return _array_dtypes.setdefault(dtype, is_plain_name(dtype.str)) if known is None else known


def is_plain_name(name: str) -> bool:
    """``is_plain_dtype`` for the name of a dtype in a checkpoint."""
    return _ARRAY_DTYPE.fullmatch(name) is not None


def check_savable(value: Any) -> None:
    """Look for what can never be saved.

    Values of types that are not registered pass, because they may be registered before anything is saved. What a
    user's codec makes of a value is not asked for.

    Raises:
        MisfitError: there is something; the error says where.
    """
    _look(value, 0)


def _look(value: Any, depth: int) -> None:
    kind = type(value)
    if kind is torch.Tensor:
        # As tensor_problem, without its calls: most of what is looked at are sound tensors.
        if value.layout is not _DENSE or value.dtype not in SAVABLE_DTYPES or value.is_nested or value.is_meta:
            _tensor(value)
    elif kind not in ATOMS:
        _LOOKS.get(kind, _other)(value, depth)


def _dict(value: dict[Any, Any], depth: int) -> None:
    _check_depth(depth)
    key: Hashable = None
    try:
        for key, child in value.items():
            if type(key) is not str:
                _look(key, depth + 1)
            _look(child, depth + 1)
    except MisfitError as error:
        error.keys.append(key)
        raise


def _sequence(value: list[Any] | tuple[Any, ...], depth: int) -> None:
    _check_depth(depth)
    if holds_atoms(value):
        return
    place = 0
    try:
        for child in value:
            _look(child, depth + 1)
            place += 1
    except MisfitError as error:
        error.keys.append(place)
        raise


def _check_depth(depth: int) -> None:
    if depth >= DEPTH:
        raise MisfitError(f"expected at most {DEPTH} levels, found more (does it contain itself?)")


def _tensor(value: torch.Tensor) -> None:
    problem = tensor_problem(value)
    if problem is not None:
        raise MisfitError(problem)


def _array(value: np.ndarray[Any, Any] | np.generic, depth: int) -> None:
    if not is_plain_dtype(value.dtype):
        raise MisfitError(f"expected an array of numbers, text or times, found one of dtype {value.dtype}")


def _other(value: Any, depth: int) -> None:
    if isinstance(value, np.generic):
        _array(value, depth)
    elif (codec := registry.codec_of(type(value))) is not None:
        if codec.takes_apart:
            _check_depth(depth)
            _look(_taken_apart(codec, value), depth + 1)
    elif isinstance(value, torch.Tensor):
        _tensor(value)
    elif isinstance(value, np.ma.MaskedArray):
        raise MisfitError("expected a plain array, found one with a mask")
    elif isinstance(value, np.ndarray):
        _array(value, depth)


def _taken_apart(codec: registry.Codec, value: Any) -> Any:
    try:
        return codec.encode(value)
    except Exception as error:
        raise MisfitError(f"expected a {type(value).__qualname__} that can be taken apart: {error}") from error


_LOOKS: dict[type, Callable[[Any, int], None]] = {
    dict: _dict,
    list: _sequence,
    tuple: _sequence,
    np.ndarray: _array,
    np.memmap: _array,
}
