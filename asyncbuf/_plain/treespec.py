"""The structure of a tree as plain data."""

from __future__ import annotations

from typing import Any

from asyncbuf._plain.codec import decode, encode
from asyncbuf._plain.registry import codec_of, container_names, container_of, registered_name, registered_type
from asyncbuf._plain.tree import LEAF, Spec, field_names
from asyncbuf.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError


def spec_to_plain(spec: Spec) -> Any:
    """Make a structure plain.

    Raises:
        CheckpointError: a type in it is not registered, or has a codec that would not be asked.
    """
    if spec is LEAF or spec.kind == "leaf":
        return None
    if spec.type is not None and (problem := _bypass(spec.kind, spec.type)) is not None:
        raise CheckpointError(f"structure of an item: {problem}")
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
    problem = None if kind is None else _bypass(plain["kind"], kind)
    if problem is not None:
        raise CheckpointCorruptError(f"structure of an item: {problem}")
    names = None if kind is None else field_names(plain["kind"], kind)
    if names is not None and set(keys) != names:
        raise CheckpointMismatchError(f"{plain['type']}: expected the fields {sorted(names)}, found {keys}")
    specs = tuple(spec_from_plain(child) for child in children)
    return Spec(plain["kind"], kind, tuple(keys), specs, decode(plain["aux"]))


def _bypass(kind: str, cls: type) -> str | None:
    """Why a structure must not make a class: it is no such container, or its codec alone makes it. None if it may.

    A container of the user is made by the function that was registered for it. A named tuple or a dataclass is made by
    calling the class with what stands in a file, which only ``register_type`` allows.
    """
    container, codec = container_of(cls), codec_of(cls)
    found = "leaf" if container is None else container.name
    if found != kind:
        return f"expected {cls.__qualname__} as a {found}, found it as a {kind}"
    if field_names(kind, cls) is not None and codec is not None and not codec.takes_apart:
        return (
            f"expected a {kind} that register_type made known, found {cls.__qualname__}, which has a codec of its own: "
            "only that may make one, and items of a TensorStorage are put together field by field"
        )
    return None
