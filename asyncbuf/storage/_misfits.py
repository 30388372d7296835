"""What to do about items that do not fit, in words that end an error message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


LIST = " (it is in a list, whose elements are fields of their own: make a tensor or an array of the list)"
ONE_ITEM = " (add() takes one item, without that axis)"


def of_shapes(expected: Sequence[tuple[int, ...]], leaves: Sequence[Any], *, batched: bool) -> str:
    """For leaves that have the shapes of one item where several were expected, or the reverse.

    Args:
        expected: the shapes of the leaves of one item.
        leaves: what was found.
        batched: whether several items were expected.
    """
    shapes = [tuple(getattr(leaf, "shape", ())) for leaf in leaves]
    expected = list(expected)
    if batched and shapes == expected:
        return " (these are the shapes of one item, which add() takes)"
    if not batched and [shape[1:] for shape in shapes] == expected and len({shape[:1] for shape in shapes}) == 1:
        return " (these are the shapes of several items, which extend() takes)"
    return ""


def of_dtype(dtype: torch.dtype, array_dtype: str | None) -> str:
    """For a tensor or array of another dtype than that of its field.

    Args:
        dtype: that of the field.
        array_dtype: the same in the words of numpy; None if numpy lacks it.
    """
    array = "" if array_dtype is None else f" or array.astype({array_dtype!r})"
    return f" (cast it, as in tensor.to({dtype}){array})"


def of_number(dtype: torch.dtype, value: complex) -> str:
    """For a Python number in a field of this dtype, which it does not go into."""
    exact = not (dtype.is_floating_point or dtype.is_complex)
    if dtype is torch.bool or isinstance(value, bool):
        wanted = "bool" if dtype is torch.bool else "int" if exact else "float"
        return f" from the {type(value).__name__} {value} ({wanted}(...) makes one of it)"
    if not (exact and isinstance(value, float)):
        return f" from the {type(value).__name__} {value}"
    return (
        f" from the {type(value).__name__} {value} (the first item decides, and its number was an int: write 0.0 there "
        "in place of 0, if later ones are fractions)"
    )
