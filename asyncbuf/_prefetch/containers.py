"""Containers as collate functions and transforms return them: what is in them, and the same around other parts.

``asyncbuf._plain.tree`` knows the containers that can be stored and saved. A batch may consist of others: any mapping
or sequence, a set, a dataclass, a dict with attributes. Here the type always stays.
"""

from __future__ import annotations

import array
import copy
import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncbuf._plain import registry

_NUMBERS = frozenset({bool, int, float})
_IMMUTABLE_SCALARS = frozenset(np.sctypeDict.values()) - {np.void, np.object_}
ATOMS = frozenset(
    {
        *_NUMBERS,
        *_IMMUTABLE_SCALARS,
        type(None),
        complex,
        str,
        bytes,
        torch.dtype,
        torch.device,
        torch.Size,
        range,
        type,
    }
)
"""Types whose values cannot change and hold nothing that can."""
_NO_CONTAINERS = (str, bytes, bytearray, memoryview, range, array.array, torch.Size)
_PLAIN_CONTAINERS = frozenset({"dict", "list", "tuple", "namedtuple", "dataclass"})
_TENSOR_COLLECTIONS = frozenset({"tensordict", "tensorclass"})
# From this length on it pays to look at a list of numbers as a whole.
_LONG = 16


class Kind(NamedTuple):
    """How one kind of container is handled.

    Attributes:
        parts: what is in it, in order.
        rebuild: ``rebuild(value, old, new)`` is the same container with new parts in place of the old ones.
    """

    parts: Callable[[Any], list[Any]]
    rebuild: Callable[[Any, list[Any], list[Any]], Any]


def holds_atoms_only(values: Any) -> bool:
    """Whether a list or tuple holds numbers and strings only. Quick for long lists of numbers: 4 ns a number."""
    if len(values) >= _LONG and type(values[0]) in _NUMBERS:
        try:
            # The sum of anything else, such as a tensor, is no plain number.
            if type(sum(values)) in _NUMBERS:
                return True
        except Exception:
            pass  # not numbers alone
    return ATOMS.issuperset(map(type, values))


def kind_of(value: Any) -> Kind | None:
    """How a value is handled; None for a leaf."""
    cls = type(value)
    kind = _EXACT.get(cls)
    if kind is not None or cls in ATOMS:
        return kind
    if isinstance(value, torch.Tensor | np.ndarray):
        return None
    container = registry.container_of(cls)
    if container is not None and container.name not in _PLAIN_CONTAINERS:
        return _registered(container)
    return _kind_of(cls)


def _kind_of(cls: type) -> Kind | None:
    try:
        return _kinds[cls]
    except KeyError:
        return _kinds.setdefault(cls, _looked_up(cls))


def _looked_up(cls: type) -> Kind | None:
    if issubclass(cls, _NO_CONTAINERS):
        return None
    for base, kind in _FAMILIES:
        if issubclass(cls, base):
            return _NAMED_TUPLE if base is tuple and hasattr(cls, "_make") else kind
    return _DATACLASS if dataclasses.is_dataclass(cls) else None


def is_tensor_collection(value: Any) -> bool:
    """Whether it is a TensorDict or tensorclass, which moves and copies its tensors itself."""
    container = registry.container_of(type(value))
    return container is not None and container.name in _TENSOR_COLLECTIONS


def _registered(container: registry.Container) -> Kind:
    if container.name in _TENSOR_COLLECTIONS:
        return _TENSOR_COLLECTION

    def parts(value: Any) -> list[Any]:
        return list(container.flatten(value, False)[1])

    def rebuild(value: Any, old: list[Any], new: list[Any]) -> Any:
        keys, _, aux = container.flatten(value, False)
        return container.unflatten(type(value) if container.keeps_type else None, tuple(keys), new, aux, None)

    return Kind(parts, rebuild)


def _values(value: Any) -> list[Any]:
    return list(value.values())


def _attributes(value: Any) -> list[Any]:
    return [getattr(value, name) for name in _field_names(value)]


def _field_names(value: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]


def _with_items(value: Any, old: list[Any], new: list[Any]) -> Any:
    """A dict or list of a class of its own: copied, then filled by its own means."""
    made = copy.copy(value)
    for key, part in zip(list(value) if isinstance(value, dict) else range(len(old)), new, strict=True):
        made[key] = part
    return _with_attributes(made, old, new)


def _with_fields(value: Any, old: list[Any], new: list[Any]) -> Any:
    made = copy.copy(value)
    for name, part in zip(_field_names(value), new, strict=True):
        object.__setattr__(made, name, part)  # a frozen one, too
    return _with_attributes(made, old, new)


def _with_attributes(made: Any, old: list[Any], new: list[Any]) -> Any:
    """Some classes keep their parts a second time, as attributes."""
    places = {id(before): after for before, after in zip(old, new, strict=True) if before is not after}
    for name, attribute in list(getattr(made, "__dict__", {}).items()):
        if id(attribute) in places:
            vars(made)[name] = places[id(attribute)]
    return made


def _from_mapping(value: Any, old: list[Any], new: list[Any]) -> Any:
    return _with_parts(value, old, new, lambda: type(value)(dict(zip(value, new, strict=True))), _values)


def _from_list(value: Any, old: list[Any], new: list[Any]) -> Any:
    return _with_parts(value, old, new, lambda: type(value)(new), list)


def _with_parts(
    value: Any, old: list[Any], new: list[Any], make: Callable[[], Any], parts: Callable[[Any], list[Any]]
) -> Any:
    """A class that nothing is known of: copied around the new parts, or else made by its constructor."""
    memo = {id(before): after for before, after in zip(old, new, strict=True) if type(before) not in ATOMS}
    attempts: tuple[Callable[[], Any], ...] = (lambda: copy.deepcopy(value, memo), make)
    for attempt in attempts:
        try:
            made = attempt()
            found = parts(made)
        except Exception:  # its methods may do anything
            continue
        if (
            type(made) is type(value)
            and len(found) == len(new)
            and all(a is b for a, b in zip(found, new, strict=True))
        ):
            return made
    raise TypeError(
        f"expected a {type(value).__qualname__} that can be copied around other parts, or made by its constructor from "
        "them; found one that cannot: return a dict, list or dataclass, or use asyncbuf.register_container"
    )


def _from_set(value: Any, old: list[Any], new: list[Any]) -> Any:
    return type(value)(new)


_kinds: weakref.WeakKeyDictionary[type, Kind | None] = weakref.WeakKeyDictionary()
_EXACT: dict[type, Kind] = {
    dict: Kind(_values, lambda value, old, new: dict(zip(value, new, strict=True))),
    list: Kind(list, lambda value, old, new: new),
    tuple: Kind(list, lambda value, old, new: tuple(new)),
}
# Its flatten would refuse what is no tensor.
_TENSOR_COLLECTION = Kind(_values, lambda value, old, new: value)
_NAMED_TUPLE = Kind(list, lambda value, old, new: type(value)._make(new))
_DATACLASS = Kind(_attributes, _with_fields)
_FAMILIES: tuple[tuple[type, Kind], ...] = (
    (dict, Kind(_values, _with_items)),
    (list, Kind(list, _with_items)),
    (tuple, Kind(list, _from_list)),
    (Mapping, Kind(_values, _from_mapping)),
    (Sequence, Kind(list, _from_list)),
    (Set, Kind(list, _from_set)),
)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a batch, wherever they are in its containers."""
    found: list[torch.Tensor] = []
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif (kind := kind_of(value)) is not None and not (type(value) in (list, tuple) and holds_atoms_only(value)):
            left += reversed(kind.parts(value))
    return found
