"""Checking the state dicts of components before they are taken over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from asyncbuf._plain.savable import tensor_problem
from asyncbuf._runtime.summary import literal
from asyncbuf.errors import CheckpointCorruptError, CheckpointMismatchError

if TYPE_CHECKING:
    from asyncbuf._plain.integers import Int64Array

# Counters are below this. So an int64 holds them, and what they grow by for as long as a machine lasts.
COUNT_LIMIT = 2**62
_ATOMS = frozenset({type(None), bool, int, float, str})


class Seed(int):
    """Stands in ``fields`` for an int of 63 bits that counts nothing."""


def fields(state: Any, what: str, /, **kinds: type) -> list[Any]:
    """The values of a state dict, each of the type that is expected.

    Args:
        state: the state dict.
        what: whose it is, for messages.
        **kinds: name and type of each entry. An int is not negative and below ``COUNT_LIMIT``, and a bool is not an
            int. ``Seed`` is an int of 63 bits.

    Raises:
        CheckpointCorruptError: it is not a dict with these entries.
    """
    if not isinstance(state, dict) or state.keys() != kinds.keys():
        found = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise CheckpointCorruptError(f"{what}: expected the entries {sorted(kinds)}, found {found}")
    for name, kind in kinds.items():
        value = state[name]
        if kind is int or kind is Seed:
            natural(value, f"{what}: expected {name}", 2**63 if kind is Seed else COUNT_LIMIT)
        elif type(value) is not kind:
            raise CheckpointCorruptError(f"{what}: expected {name} as {kind.__name__}, found {literal(value)}")
    return [state[name] for name in kinds]


def natural(value: Any, expected: str, limit: int = COUNT_LIMIT, *, least: int = 0) -> int:
    """A whole number of a state.

    Args:
        value: the number.
        expected: how the message begins, such as ``"writer: expected size"``.
        limit: what it must be below.
        least: the smallest one that may be.

    Raises:
        CheckpointCorruptError: it is none.
    """
    if type(value) is not int or not least <= value < limit:
        bits = limit.bit_length() - 1
        shown = value if type(value) is int and value.bit_length() <= 128 else literal(value)
        if type(value) is str:
            shown = repr(value[:40])
        raise CheckpointCorruptError(f"{expected} as an int from {least} to 2**{bits} - 1, found {shown}")
    return value


def int64s(tensor: torch.Tensor, expected: str) -> Int64Array:
    """Numbers of a state, which share the memory of the tensor: int64 ``[n]``.

    Args:
        tensor: the tensor.
        expected: how the message begins, such as ``"rows: expected valid"``.

    Raises:
        CheckpointCorruptError: it is another kind of tensor, or none.
    """
    if not is_int64(tensor) or tensor.ndim != 1:
        raise CheckpointCorruptError(f"{expected} as int64 [n], found {described(tensor)}")
    found: Int64Array = tensor.detach().cpu().numpy()
    return found


def is_int64(tensor: Any) -> bool:
    """Whether it is a dense tensor of int64 with data."""
    return isinstance(tensor, torch.Tensor) and tensor.dtype is torch.int64 and tensor_problem(tensor) is None


def described(value: Any) -> str:
    """What was found where a tensor was expected, in a few words."""
    if not isinstance(value, torch.Tensor):
        return literal(value)
    return literal(value) if tensor_problem(value) is None else f"{value.dtype}, {value.layout}, {value.device}"


def same(found: Any, expected: Any, what: str, hint: str = "") -> None:
    """Refuse a setting that differs.

    Raises:
        CheckpointMismatchError: it does; the message names both.
    """
    if type(found) is not type(expected) or found != expected:
        shown = repr(found) if type(found) in _ATOMS or type(found) is list else literal(found)
        raise CheckpointMismatchError(
            f"{what}: expected {expected!r}, as in this buffer; the checkpoint has {shown}{hint}"
        )


def check_plain(value: Any, what: str) -> None:
    """See that a state consists of plain data, whoever made it.

    Args:
        value: lists, dicts with string keys, numbers, strings, None, and dense tensors with data.
        what: where it stands, for messages.

    Raises:
        CheckpointCorruptError: something else is in it; the message says where.
    """
    try:
        _check_plain(value, what)
    except RecursionError:
        raise CheckpointCorruptError(f"{what}: expected plain data, found too many levels of it") from None


def _check_plain(value: Any, what: str) -> None:
    kind = type(value)
    if kind in _ATOMS:
        return
    if kind is list:
        for i, part in enumerate(value):
            if type(part) not in _ATOMS:
                _check_plain(part, f"{what}/{i}")
    elif kind is dict:
        for key, part in value.items():
            if type(key) is not str:
                raise CheckpointCorruptError(f"{what}: expected strings as keys, found {literal(key)}")
            if type(part) not in _ATOMS:
                _check_plain(part, f"{what}/{key}")
    elif not isinstance(value, torch.Tensor):
        raise CheckpointCorruptError(f"{what}: expected plain data, found {literal(value)} of type {kind.__name__}")
    elif (problem := tensor_problem(value)) is not None:
        raise CheckpointCorruptError(f"{what}: {problem}")
