"""Items put together leaf by leaf, and what no batch can be made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import default_collate

from asyncbuf._plain import tree
from asyncbuf._plain.registry import container_of
from asyncbuf._plain.savable import DEPTH, MisfitError
from asyncbuf._runtime.atoms import holds_atoms
from asyncbuf.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

_ATOMS = frozenset({bool, int, float, str, bytes})
_ARRAY_KINDS = frozenset("biufc")
_HINT = "a collate_fn makes batches of other things"
# Whether values of other types can be put together, by type; asked of default_collate once.
_others: dict[type, bool] = {}


def stacked(items: Sequence[Any]) -> Any:
    """Stack items leaf by leaf, as ``default_collate`` does, in the containers of the items.

    Raises:
        SchemaError: the items differ in structure, or cannot be stacked.
    """
    leaves, spec = tree.flatten(items[0], batched=False)
    columns: Iterable[Sequence[Any]] | None = _plain_columns(items, tree.flat_keys(spec))
    if columns is None:
        columns = zip(*[leaves, *(tree.flatten_like(spec, item, batched=False) for item in items[1:])], strict=True)
    batched = []
    for path, column in zip(spec.paths(), columns, strict=True):
        try:
            batched.append(default_collate(_ordinary(column)))
        except (RuntimeError, TypeError, ValueError) as error:
            raise SchemaError(f"{path}: expected items that can be stacked, or a collate_fn: {error}") from error
    return tree.unflatten(spec, batched, batch=len(items))


def _plain_columns(items: Sequence[Any], keys: tuple[Hashable, ...] | None) -> list[list[Any]] | None:
    """The leaves of items that are flat dicts, without a walk through each; None for any other."""
    if keys is None or not all(type(item) is dict and len(item) == len(keys) for item in items):
        return None
    try:
        columns = [[item[key] for item in items] for key in keys]
    except KeyError:
        return None
    kinds = {kind for column in columns for kind in set(map(type, column))}
    return columns if all(container_of(kind) is None for kind in kinds) else None


def _ordinary(column: Sequence[Any]) -> list[Any]:
    """The same, with copies of the arrays that torch does not take: rows of a memory map, other orders of bytes."""
    if not isinstance(column[0], np.ndarray):
        return list(column)
    return [
        array
        if not isinstance(array, np.ndarray) or (array.flags.writeable and array.dtype.isnative)
        else array.astype(array.dtype.newbyteorder("="))
        for array in column
    ]


def check_stackable(value: Any, depth: int = 0) -> None:
    """Look for what cannot be stacked, not even with itself. What is shaped otherwise than in other items passes.

    Raises:
        MisfitError: there is something; the error says where.
    """
    kind = type(value)
    if kind in _ATOMS or ((kind is list or kind is tuple) and holds_atoms(value, _ATOMS)):
        return
    container = container_of(kind)
    if container is None:
        _check_leaf(value)
        return
    if depth >= DEPTH:
        raise MisfitError(f"expected at most {DEPTH} levels, found more (does it contain itself?)")
    try:
        keys, children, _ = container.flatten(value, False)
    except SchemaError as error:
        raise MisfitError(str(error)) from error
    place = 0
    try:
        for child in children:
            check_stackable(child, depth + 1)
            place += 1
    except MisfitError as error:
        error.keys.append(keys[place])
        raise


def _check_leaf(value: Any) -> None:
    if isinstance(value, torch.Tensor):
        return
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind not in _ARRAY_KINDS:
            raise MisfitError(f"expected numbers, found a numpy value of dtype {value.dtype}; {_HINT}")
    elif not _is_collatable(value):
        raise MisfitError(f"expected a tensor, array, number or string, found {type(value).__qualname__}; {_HINT}")


def _is_collatable(value: Any) -> bool:
    known = _others.get(type(value))
    if known is None:
        try:
            default_collate([value])
            known = True
        except Exception:
            known = False
        _others[type(value)] = known
    return known
