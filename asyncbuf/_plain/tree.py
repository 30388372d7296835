"""Pytrees: taking items apart into leaves, and putting leaves together again.

A tree is built of dicts, lists, tuples, named tuples, dataclasses and registered containers (TensorDict registers
itself when the extra is installed). Everything else is a leaf. The structure is a :class:`Spec`, which can be
compared, described in words, and used to put together the same structure around other leaves.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from asyncbuf._plain import registry
from asyncbuf._plain.registry import Container
from asyncbuf.errors import SchemaError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """The structure of a tree.

    Attributes:
        kind: name of the container, or ``"leaf"``.
        type: the type to put together again; None for a leaf.
        keys: one key per child: dict keys, field names or positions.
        children: the structure below each key.
        aux: what else the container needs.
    """

    kind: str
    type: Any = None
    keys: tuple[Hashable, ...] = ()
    children: tuple[Spec, ...] = ()
    aux: Hashable = None

    def paths(self, prefix: str = "") -> list[str]:
        """Names of the leaves in order, ``obs/pixels`` for the leaf below two dict keys; ``"."`` for a lone leaf."""
        if self.kind == "leaf":
            return [prefix or "."]
        return [
            path
            for key, child in zip(self.keys, self.children, strict=True)
            for path in child.paths(f"{prefix}/{key}" if prefix else str(key))
        ]

    def __str__(self) -> str:
        """The structure in one line, as in ``dict(obs, action)``."""
        if self.kind == "leaf":
            return "leaf"
        inner = ", ".join(
            str(key) if child.kind == "leaf" else f"{key}: {child}"
            for key, child in zip(self.keys, self.children, strict=True)
        )
        return f"{self.kind}({inner})"


LEAF = Spec("leaf")


def _sequence(value: Any, batched: bool) -> tuple[tuple[Hashable, ...], Sequence[Any], None]:
    return tuple(range(len(value))), value, None


def _mapping(value: Any, batched: bool) -> tuple[tuple[Hashable, ...], Sequence[Any], None]:
    return tuple(value), list(value.values()), None


def _named_tuple(value: Any, batched: bool) -> tuple[tuple[Hashable, ...], Sequence[Any], None]:
    return tuple(value._fields), value, None


def _dataclass(value: Any, batched: bool) -> tuple[tuple[Hashable, ...], Sequence[Any], None]:
    # What the constructor does not take, it makes from the rest.
    names = tuple(field.name for field in dataclasses.fields(value) if field.init)
    return names, [getattr(value, name) for name in names], None


def _built_by_name(kind: Any, keys: tuple[Any, ...], children: Sequence[Any], aux: None, batch: int | None) -> Any:
    # By name and not by position: the class may have been written anew since the structure was saved.
    return kind(**dict(zip(keys, children, strict=True)))


_DICT = Container(
    "dict",
    _mapping,
    lambda kind, keys, children, aux, batch: dict(zip(keys, children, strict=True)),
    False,
)
_LIST = Container("list", _sequence, lambda kind, keys, children, aux, batch: list(children), False)
_TUPLE = Container("tuple", _sequence, lambda kind, keys, children, aux, batch: tuple(children), False)
_NAMED_TUPLE = Container("namedtuple", _named_tuple, _built_by_name)
_DATACLASS = Container(
    "dataclass",
    _dataclass,
    _built_by_name,
)


def _built_in(cls: type) -> Container | None:
    if issubclass(cls, dict):
        return _DICT
    if issubclass(cls, tuple):
        return _NAMED_TUPLE if hasattr(cls, "_fields") else _TUPLE
    if issubclass(cls, list):
        return _LIST
    return _DATACLASS if dataclasses.is_dataclass(cls) else None


registry.add_built_in((_DICT, _LIST, _TUPLE, _NAMED_TUPLE, _DATACLASS), _built_in)


def field_names(kind: str, cls: Any) -> set[str] | None:
    """The keys that values of a class have today; None where the class does not say."""
    if kind == _NAMED_TUPLE.name:
        return set(getattr(cls, "_fields", ()))
    if kind == _DATACLASS.name:
        return {field.name for field in dataclasses.fields(cls) if field.init}
    return None


def flatten(tree: Any, *, batched: bool) -> tuple[list[Any], Spec]:
    """Take a tree apart.

    Args:
        tree: any tree.
        batched: whether the leaves have a leading batch axis.

    Returns:
        The leaves in order, and the structure.
    """
    leaves: list[Any] = []
    return leaves, _flatten_into(tree, batched, leaves)


def _taken_apart(
    container: Container, tree: Any, batched: bool
) -> tuple[tuple[Hashable, ...], Sequence[Any], Hashable]:
    keys, children, aux = container.flatten(tree, batched)
    if len(keys) != len(children) or len(set(keys)) != len(keys):
        raise SchemaError(
            f"{container.name}: expected one key per child, each once, found {list(keys)} for {len(children)} children"
        )
    return keys, children, aux


def _flatten_into(tree: Any, batched: bool, leaves: list[Any]) -> Spec:
    container = registry.container_of(type(tree))
    if container is None:
        leaves.append(tree)
        return LEAF
    keys, children, aux = _taken_apart(container, tree, batched)
    specs = tuple(_flatten_into(child, batched, leaves) for child in children)
    return Spec(container.name, type(tree) if container.keeps_type else None, keys, specs, aux)


def flat_keys(spec: Spec) -> tuple[Hashable, ...] | None:
    """The keys of a structure that is a dict of leaves, the common case; None for any other."""
    is_flat = spec.kind == _DICT.name and all(child.kind == LEAF.kind for child in spec.children)
    return spec.keys if is_flat else None


def flatten_like(spec: Spec, tree: Any, *, batched: bool) -> list[Any]:
    """Take a tree apart that must have a known structure; dict keys may come in any order.

    Args:
        spec: the structure that is expected.
        tree: the tree.
        batched: whether the leaves have a leading batch axis.

    Raises:
        SchemaError: the structure differs; the message names the place.
    """
    if type(tree) is dict and (keys := flat_keys(spec)) is not None:
        # The common case, a flat dict, without a walk.
        leaves = [tree[key] for key in keys if key in tree]
        if len(leaves) == len(tree) == len(keys) and all(registry.container_of(type(leaf)) is None for leaf in leaves):
            return leaves
    leaves = []
    _flatten_like_into(spec, tree, batched, "", leaves)
    return leaves


def _flatten_like_into(spec: Spec, tree: Any, batched: bool, path: str, leaves: list[Any]) -> None:
    container = registry.container_of(type(tree))
    kind = "leaf" if container is None else container.name
    if kind != spec.kind or (spec.type is not None and type(tree) is not spec.type):
        found = f"{kind} of type {type(tree).__qualname__}"
        wanted = spec.kind if spec.type is None else f"{spec.kind} of type {spec.type.__qualname__}"
        is_listed = spec.kind == "leaf" and kind in ("list", "tuple") and bool(path)
        hint = " (torch.tensor(...) makes one of a list of numbers)" if is_listed else ""
        raise SchemaError(f"structure differs at {path or 'the top'}: expected {wanted}, found {found}{hint}")
    if container is None:
        leaves.append(tree)
        return
    keys, children, aux = _taken_apart(container, tree, batched)
    if set(keys) != set(spec.keys):
        missing = [key for key in spec.keys if key not in keys]
        extra = [key for key in keys if key not in spec.keys]
        raise SchemaError(
            f"keys differ at {path or 'the top'}: expected {list(spec.keys)}, found {list(keys)} "
            f"(missing {missing}, unknown {extra})"
        )
    if aux != spec.aux:
        raise SchemaError(f"{kind} at {path or 'the top'} differs: expected {spec.aux}, found {aux}")
    by_key = dict(zip(keys, children, strict=True))
    for key, child in zip(spec.keys, spec.children, strict=True):
        _flatten_like_into(child, by_key[key], batched, f"{path}/{key}" if path else str(key), leaves)


def unflatten(spec: Spec, leaves: Sequence[Any], *, batch: int | None = None) -> Any:
    """Put leaves together into a structure.

    Args:
        spec: the structure.
        leaves: one value per leaf, in order.
        batch: length of the leading batch axis of the leaves, None where they have none.

    Returns:
        The tree.
    """
    return builder(spec)(leaves, batch)


def builder(spec: Spec) -> Callable[[Sequence[Any], int | None], Any]:
    """What ``unflatten`` does for one structure, made ready for many uses."""
    if (keys := flat_keys(spec)) is not None:
        return lambda leaves, batch: dict(zip(keys, leaves, strict=True))
    return lambda leaves, batch: _build(spec, iter(leaves).__next__, batch)


def _build(spec: Spec, take: Callable[[], Any], batch: int | None) -> Any:
    if spec.kind == "leaf":
        return take()
    children = [_build(child, take, batch) for child in spec.children]
    return registry.container_named(spec.kind).unflatten(spec.type, spec.keys, children, spec.aux, batch)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to every leaf; the structure stays, and so do the leading axes of TensorDicts."""
    leaves, spec = flatten(tree, batched=False)
    return unflatten(spec, [function(leaf) for leaf in leaves])
