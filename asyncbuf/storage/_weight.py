"""About how many bytes an item takes in a checkpoint, found out from a small part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._plain import registry

if TYPE_CHECKING:
    from collections.abc import Sequence

_NUMBERS = frozenset({type(None), bool, int, float, complex})
_NUMBER = 8
# Of what is written beside the bytes of a value, and of the time that a value takes whatever its size.
_OBJECT = 64
_UNKNOWN = 1024
_SAMPLE = 16
_DEPTH = 8


def weight(value: Any, depth: int = 0) -> float:
    """Bytes of a value, roughly. Looks at no more than some elements of each list and dict in it."""
    kind = type(value)
    if kind in _NUMBERS:
        return _NUMBER
    if kind is str or kind is bytes or kind is bytearray:
        return _OBJECT + len(value)
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return _OBJECT + _nbytes(value)
    if depth >= _DEPTH:
        return _UNKNOWN
    if kind is dict:
        return _OBJECT + _sum(list(value.values()), depth)
    if kind is list or kind is tuple:
        return _OBJECT + _sum(value, depth)
    codec = registry.codec_of(kind)
    if codec is None or not codec.takes_apart:
        return _UNKNOWN
    try:
        return _OBJECT + weight(codec.encode(value), depth + 1)
    except Exception:  # that of a user; what cannot be encoded is told when it is saved
        return _UNKNOWN


def mean_weight(items: Sequence[Any]) -> float:
    """The mean of some of the items; the same of the same items."""
    some = _some(items)
    return sum(weight(item) for item in some) / len(some)


def _sum(values: Sequence[Any], depth: int) -> float:
    some = _some(values)
    return sum(weight(value, depth + 1) for value in some) * len(values) / max(1, len(some))


def _some(values: Sequence[Any]) -> Sequence[Any]:
    count = len(values)
    return values if count <= _SAMPLE else [values[i * count // _SAMPLE] for i in range(_SAMPLE)]


def _nbytes(value: Any) -> int:
    try:
        return int(value.nbytes)
    except (RuntimeError, ValueError):  # a tensor that does not know
        return _UNKNOWN
