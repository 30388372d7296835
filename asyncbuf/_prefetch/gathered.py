"""What was gathered for a draw that is more than a list of rows: one with joins, or with a shape."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._prefetch.containers import ATOMS, is_tensor_collection, kind_of
from asyncbuf.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncbuf.batch import Draw


class Gathered:
    """The rows of a draw with joins, before they are combined.

    Args:
        draw: the draw.
        data: what the storage gathered for ``draw.indices``.
        joined: what it gathered for each of ``draw.joins``, by name.
    """

    __slots__ = ("data", "draw", "joined")

    def __init__(self, draw: Draw, data: Any, joined: Mapping[str, Any]) -> None:
        self.draw = draw
        self.data = data
        self.joined = dict(joined)


def rows_to_gather(draw: Draw) -> list[torch.Tensor]:
    """The rows of a draw, and those of each of its joins: int64 ``[rows]`` each, gathered each into its own memory."""
    return [draw.indices, *[indices.reshape(-1) for indices in draw.joins.values()]]


def arranged(draw: Draw, parts: Sequence[Any], *, are_items: bool) -> Any:
    """What was gathered for ``rows_to_gather(draw)``, in the shapes that the draw asks for.

    Args:
        draw: the draw.
        parts: for each, a tree whose leaves have a leading axis of rows; or a list of items that are not collated yet.
        are_items: whether it is such a list.

    Returns:
        The tree ``[*shape, *item]`` of a draw without joins; otherwise what ``combine`` gets. Items are shaped when
        they have been collated.
    """
    data = parts[0]
    if are_items:
        is_flat = draw.shape is None and not draw.joins
        return data if is_flat else Gathered(draw, data, dict(zip(draw.joins, parts[1:], strict=True)))
    if draw.shape is not None:
        data = shaped(data, draw.shape)
    if not draw.joins:
        return data
    joined = {}
    for (name, indices), part in zip(draw.joins.items(), parts[1:], strict=True):
        joined[name] = part if indices.ndim == 1 else shaped(part, indices.shape)
    return Gathered(draw, data, joined)


def shaped(data: Any, shape: Sequence[int]) -> Any:
    """Split the leading axis of every leaf: from ``[rows, *item]`` to ``[*shape, *item]``. Tensors become views.

    Args:
        data: a tree of tensors, arrays, TensorDicts, and lists of strings or other objects, one for each row.
        shape: lengths of the new axes; their product is the number of rows.

    Returns:
        The same tree. A list becomes a list of lists.

    Raises:
        SchemaError: a leaf has another number of rows.
    """
    sizes = tuple(shape)
    rows = math.prod(sizes)
    if isinstance(data, torch.Tensor):
        _check_rows(data.shape[0] if data.ndim else None, rows, sizes)
        # A view of any tensor, dense or not: an axis can always be split.
        return data.view(*sizes, *data.shape[1:])
    if isinstance(data, np.ndarray):
        _check_rows(data.shape[0] if data.ndim else None, rows, sizes)
        return data.reshape(*sizes, *data.shape[1:])
    if is_tensor_collection(data):
        _check_rows(data.batch_size[0] if data.batch_size else None, rows, sizes)
        return data.reshape(*sizes, *data.batch_size[1:])
    if type(data) is list and len(data) == rows and all(type(part) in ATOMS for part in data):
        return _nested(data, sizes)
    kind = kind_of(data)
    if kind is None:
        raise SchemaError(
            f"expected a leaf with an axis of {rows} rows to be split into {list(sizes)}, found a {type(data).__name__}"
        )
    parts = kind.parts(data)
    return kind.rebuild(data, parts, [shaped(part, sizes) for part in parts])


def _check_rows(found: int | None, rows: int, sizes: tuple[int, ...]) -> None:
    if found != rows:
        has = "no axis" if found is None else f"{found}"
        raise SchemaError(f"expected a leading axis of {rows} rows to be split into {list(sizes)}, found {has}")


def _nested(values: list[Any], sizes: tuple[int, ...]) -> list[Any]:
    for size in reversed(sizes[1:]):
        # With an axis of length 0 there is no value either.
        values = [values[i : i + size] for i in range(0, len(values), size or 1)]
    return values
