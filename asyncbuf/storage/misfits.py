"""What to do about items that do not fit, in words that end an error message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from asyncbuf.storage.leaf import Field

ONE_ITEM = " (add() takes one item, without that axis)"


def of_shapes(fields: Sequence[Field], leaves: Sequence[Any], *, batched: bool) -> str:
    """For leaves that have the shapes of one item where several were expected, or the reverse."""
    shapes = [tuple(getattr(leaf, "shape", ())) for leaf in leaves]
    expected = [field.shape for field in fields]
    if batched and shapes == expected:
        return " (these are the shapes of one item, which add() takes)"
    if not batched and [shape[1:] for shape in shapes] == expected and len({shape[:1] for shape in shapes}) == 1:
        return " (these are the shapes of several items, which extend() takes)"
    return ""


def of_dtype(field: Field, bits: np.ndarray[Any, Any], *, is_number: bool) -> str:
    """For a leaf of another dtype than that of its field; a Python number has none of its own."""
    exact = not (field.dtype.is_floating_point or field.dtype.is_complex)
    if not is_number:
        array = "" if field.is_carried else f" or array.astype({field.bits.name!r})"
        return f" (cast it, as in tensor.to({field.dtype}){array})"
    value = bits.item()
    if field.dtype is torch.bool or isinstance(value, bool):
        wanted = "bool" if field.dtype is torch.bool else "int" if exact else "float"
        return f" from the {type(value).__name__} {value} ({wanted}(...) makes one of it)"
    if not (exact and isinstance(value, float)):
        return f" from the {type(value).__name__} {value}"
    return (
        f" from the {type(value).__name__} {value} (the first item decides, and its number was an int: write 0.0 there "
        "in place of 0, if later ones are fractions)"
    )
