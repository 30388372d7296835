"""Leaves of items as arrays, for samplers that ask for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._plain import registry
from asyncbuf._runtime.summary import summary
from asyncbuf.errors import SchemaError
from asyncbuf.storage._leaf import Field, as_bits

if TYPE_CHECKING:
    from collections.abc import Sequence

    Column = np.ndarray[Any, Any]

_MISSING = object()


def of_fields(fields: Sequence[Field], arrays: Sequence[Column], count: int, paths: Sequence[str]) -> dict[str, Column]:
    """The columns at some paths among those of prepared items.

    Args:
        fields: the leaves of an item.
        arrays: the bits of each, ``[count, *item]``; those of a single item may lack the first axis.
        count: number of items.
        paths: which columns.

    Raises:
        SchemaError: there is no such leaf.
    """
    columns = {}
    for field, array in zip(fields, arrays, strict=True):
        if field.path in paths:
            values = _values(array, field) if field.is_carried else array
            columns[field.path] = values if values.ndim > len(field.shape) else values.reshape(count, *field.shape)
    if len(columns) < len(set(paths)):
        missing, there = [path for path in paths if path not in columns], [field.path for field in fields]
        deeper = [path for path in there for name in missing if path.endswith(f"/{name}")]
        hint = f" (a path goes through all keys: {deeper[0]!r})" if deeper else ""
        raise SchemaError(f"expected items with {missing}, which the sampler or writer asks for; found {there}{hint}")
    return columns


def _values(bits: Column, field: Field) -> Column:
    """Bits of a dtype that numpy lacks as values, float32."""
    values: Column = field.typed(torch.from_numpy(bits)).to(torch.float32).numpy()
    return values


def of_items(items: Sequence[Any], paths: Sequence[str]) -> dict[str, Column]:
    """The columns at some paths of separate items.

    Raises:
        SchemaError: an item has no such leaf, one that is no number or tensor, or one of another shape.
    """
    return {path: _stacked([_value(item, path, f"item {i}") for i, item in enumerate(items)], path) for path in paths}


def _value(item: Any, path: str, where: str) -> Column:
    leaf = _leaf(item, path)
    if leaf is _MISSING:
        raise SchemaError(
            f"{where}: expected a leaf at {path!r}, which the sampler or writer asks for; found {summary(item)}"
        )
    try:
        bits, dtype, guessed = as_bits(leaf, path)
    except SchemaError as error:
        raise SchemaError(
            f"{where}: expected a number or tensor at {path!r}, which the sampler or writer asks for; found "
            f"{summary(leaf)}"
        ) from error
    field = Field(path, dtype, bits.shape)
    return _values(bits, field) if field.is_carried and not guessed else bits


def _leaf(node: Any, path: str) -> Any:
    """What is at a path, named as in ``Spec.paths``."""
    container = registry.container_of(type(node))
    if container is None:
        return node if path in ("", ".") else _MISSING
    keys, children, _ = container.flatten(node, False)
    for key, child in zip(keys, children, strict=True):
        name = str(key)
        if path == name or path.startswith(f"{name}/"):
            leaf = _leaf(child, path[len(name) + 1 :])
            if leaf is not _MISSING:
                return leaf
    return _MISSING


def _stacked(values: list[Column], path: str) -> Column:
    shapes = {value.shape for value in values}
    if len(shapes) > 1:
        raise SchemaError(
            f"{path}: expected the same shape in all items, because the sampler or writer asks for it; found "
            f"{sorted(shapes)}"
        )
    return np.stack(values)
