"""The structure of a tree as plain data."""

from __future__ import annotations

from typing import Any

from asyncbuf._plain.codec import decode, encode
from asyncbuf._plain.registry import container_names, registered_name, registered_type
from asyncbuf._plain.tree import LEAF, Spec, field_names
from asyncbuf.errors import CheckpointCorruptError, CheckpointMismatchError


def spec_to_plain(spec: Spec) -> Any:
    """Make a structure plain.

    Raises:
        CheckpointError: a type in it is not registered.
    """
    if spec is LEAF or spec.kind == "leaf":
        return None
    return {
        "kind": spec.kind,
        "type": None if spec.type is None else registered_name(spec.type),
        "keys": encode(list(spec.keys)),
        "children": [spec_to_plain(child) for child in spec.children],
        "aux": encode(spec.aux),
    }


def spec_from_plain(plain: Any) -> Spec:
    """The way back.

    Raises:
        CheckpointCorruptError: it is no structure, or names a type that is not registered.
        CheckpointMismatchError: a class has other fields by now.
    """
    if plain is None:
        return LEAF
    if not isinstance(plain, dict) or plain.keys() != {
        "kind",
        "type",
        "keys",
        "children",
        "aux",
    }:
        raise CheckpointCorruptError(f"expected a structure, found {plain!r}")
    keys, children = decode(plain["keys"]), plain["children"]
    if not isinstance(keys, list) or not isinstance(children, list) or len(keys) != len(children):
        raise CheckpointCorruptError(f"expected one key per child, found {keys!r} and {children!r}")
    if plain["kind"] not in container_names():
        raise CheckpointCorruptError(f"expected a kind of {sorted(container_names())}, found {plain['kind']!r}")
    kind = None if plain["type"] is None else registered_type(plain["type"])
    names = None if kind is None else field_names(plain["kind"], kind)
    if names is not None and set(keys) != names:
        raise CheckpointMismatchError(f"{plain['type']}: expected the fields {sorted(names)}, found {keys}")
    specs = tuple(spec_from_plain(child) for child in children)
    return Spec(plain["kind"], kind, tuple(keys), specs, decode(plain["aux"]))
