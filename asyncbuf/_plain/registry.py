"""Which types are known: to trees as containers, and to checkpoints by codecs.

The one place where types are registered. A package that is optional registers its types when it is needed: see
``when_imported``.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from asyncbuf._plain.nested import NestedTensor, from_parts, parts_of
from asyncbuf._runtime.arguments import flag, shown
from asyncbuf.errors import CheckpointError, CheckpointMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

T = TypeVar("T")
HINT = "asyncbuf.register_type and asyncbuf.register_codec make types known"
LEAF_KIND = "leaf"


# -- optional packages ------------------------------------------------------------------------------------------------

_optional: dict[str, Callable[[], None]] = {}


def when_imported(package: str, register: Callable[[], None]) -> None:
    """Register the types of an optional package, once, as soon as one of them may turn up.

    A value of such a type can only reach us if its package was imported, so nothing is imported for its sake. A
    checkpoint may name one before; then the package is imported.

    Args:
        package: name of the package; the names of its codecs are this, or begin with this and a dot.
        register: makes its types known.
    """
    _optional[package] = register


def _load_imported() -> None:
    for package in [name for name in _optional if name in sys.modules]:
        _optional.pop(package)()


# -- containers -------------------------------------------------------------------------------------------------------


class Container(NamedTuple):
    """How one type of container is taken apart and put together.

    Attributes:
        name: a stable name for the type, used in messages and in checkpoints.
        flatten: ``flatten(value, batched) -> (keys, children, aux)``. ``batched`` says whether the leaves have a
            leading batch axis; ``aux`` is what else is needed, of plain hashable values, the batch axis left out.
        unflatten: ``unflatten(type, keys, children, aux, batch) -> value``. ``batch`` is the length of the leading
            batch axis, or None where there is none.
        keeps_type: whether the exact type is part of the structure. Where it is not, ``unflatten`` gets None for
            it, and subclasses come back as the plain type (their constructors may want anything).
    """

    name: str
    flatten: Callable[[Any, bool], tuple[tuple[Hashable, ...], Sequence[Any], Hashable]]
    unflatten: Callable[[Any, tuple[Any, ...], Sequence[Any], Any, int | None], Any]
    keeps_type: bool = True


_containers: dict[type, Container | None] = {}
_container_names: dict[str, Container] = {}
_families: list[Callable[[type], Container | None]] = []
_built_in: list[Callable[[type], Container | None]] = []
_looked_up: dict[type, Container | None] = {}


def add_built_in(containers: Iterable[Container], find: Callable[[type], Container | None]) -> None:
    """Make the containers of Python known.

    Args:
        containers: all of them.
        find: that of a type, or None.
    """
    _container_names.update({container.name: container for container in containers})
    _built_in.append(find)


def register_container(cls: type, container: Container) -> None:
    """Teach trees a type of container.

    Args:
        cls: the type; its subclasses count too.
        container: how it is taken apart and put together.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: the name is taken by another container.
    """
    _check_class(cls, "register_container")
    if not isinstance(container, Container):
        raise TypeError(f"container: expected a Container, found {shown(container)}")
    _check_name(container.name)
    taken = _container_names.get(container.name)
    if container.name == LEAF_KIND or (taken is not None and taken is not _containers.get(cls)):
        names = sorted([LEAF_KIND, *_container_names])
        raise ValueError(f"container name {container.name!r} is taken: expected a name not in {names}")
    _containers[cls] = container
    _container_names[container.name] = container
    _looked_up.clear()


def register_leaf(cls: type) -> None:
    """Teach trees that values of a type are leaves, though it belongs to a family of containers or derives from one."""
    _containers[cls] = None
    _looked_up.clear()


def register_family(container: Container, belongs: Callable[[type], bool]) -> None:
    """Teach trees types that have no common base, such as those that a class decorator makes.

    Args:
        container: how they are taken apart and put together.
        belongs: whether a type is one of them.
    """
    _container_names[container.name] = container
    _families.append(lambda cls: container if belongs(cls) else None)
    _looked_up.clear()


def container_names() -> set[str]:
    """The kinds of container that are known."""
    _load_imported()
    return set(_container_names)


def container_named(name: str) -> Container:
    """The container of a kind that is known."""
    return _container_names[name]


def container_of(cls: type) -> Container | None:
    """How values of a type are taken apart; None for leaves."""
    try:
        return _looked_up[cls]
    except KeyError:
        return _looked_up.setdefault(cls, _look_up(cls))


def _look_up(cls: type) -> Container | None:
    _load_imported()
    for parent in cls.__mro__:
        if parent in _containers:
            return _containers[parent]
    for find in (*_families, *_built_in):
        if (container := find(cls)) is not None:
            return container
    return None


# -- codecs -----------------------------------------------------------------------------------------------------------


class Codec(NamedTuple):
    """How values of one type become plain.

    Attributes:
        name: what stands for the type in a checkpoint; must stay the same between releases.
        encode: from the value to something that is plain or has codecs itself.
        decode: back.
        subclasses: whether it serves subclasses too.
        takes_apart: whether ``encode`` costs nothing and only shows what is in a value, so that it may be called to
            look inside.
    """

    name: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    subclasses: bool = False
    takes_apart: bool = False


_codecs: dict[type, Codec] = {}
_codec_names: dict[str, Codec] = {}
_codecs_looked_up: dict[type, Codec | None] = {}


def register_codec(
    cls: type[T],
    encode: Callable[[T], Any],
    decode: Callable[[Any], T],
    *,
    name: str = "",
    subclasses: bool = False,
) -> None:
    """Let values of a type into snapshots and checkpoints.

    Args:
        cls: the type.
        encode: from a value to tensors, arrays, numbers, strings, lists, tuples, dicts or registered types.
        decode: the way back; gets what ``encode`` returned.
        name: what stands for the type in a checkpoint; the qualified name with its module by default.
        subclasses: whether values of subclasses go the same way; they come back as what ``decode`` returns.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: the name is taken by another type.
    """
    _check_class(cls, "register_codec")
    _check_name(name)
    flag(subclasses, "subclasses")
    for function, which in ((encode, "encode"), (decode, "decode")):
        if not callable(function):
            raise TypeError(f"{which}: expected a function, found {shown(function)}")
    add_codec(cls, Codec(name or _full_name(cls), encode, decode, subclasses))


def add_codec(cls: type, codec: Codec) -> None:
    """``register_codec`` for a codec as it is.

    Raises:
        ValueError: the name is taken by another type.
    """
    taken = _codec_names.get(codec.name)
    if taken is not None and _codecs.get(cls) is not taken:
        raise ValueError(
            f"codec name {codec.name!r}: expected one that is free, found that it is taken by another type"
        )
    _codecs[cls] = _codec_names[codec.name] = codec
    _codecs_looked_up.clear()


def _check_class(cls: Any, what: str) -> None:
    if not isinstance(cls, type):
        raise TypeError(f"{what}: expected a class, found {shown(cls)}: write type(...) for that of an object")


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"name: expected a str, found {shown(name)}")


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def register_type(cls: type[T], *, name: str = "") -> type[T]:
    """Let a dataclass, named tuple or enum into snapshots and checkpoints, field by field. Also a class decorator.

    Args:
        cls: the type.
        name: what stands for it in a checkpoint; the qualified name with its module by default.

    Returns:
        The type.

    Raises:
        TypeError: it is none of the three.
        ValueError: the name is taken by another type.
    """
    _check_class(cls, "register_type")
    _check_name(name)
    make: Any = cls
    encode: Callable[[Any], Any]
    if issubclass(cls, enum.Flag):
        encode, decode = _value_of, make  # a combination of members has no name
    elif issubclass(cls, enum.Enum):
        encode, decode = _name_of, lambda plain: make[plain]
    elif dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls) if field.init]
        encode, decode = _taker_apart(names), lambda plain: make(**plain)
    elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
        encode, decode = _taker_apart(list(make._fields)), lambda plain: make(**plain)
    else:
        raise TypeError(f"register_type: expected a dataclass, named tuple or enum, found {cls!r}")
    add_codec(cls, Codec(name or _full_name(cls), encode, decode, takes_apart=True))
    return cls


def _taker_apart(names: Sequence[str]) -> Callable[[Any], dict[str, Any]]:
    return lambda value: {name: getattr(value, name) for name in names}


def _value_of(member: enum.Enum) -> Any:
    return member.value


def _name_of(member: enum.Enum) -> str:
    return member.name


add_codec(collections.Counter, Codec("collections.Counter", dict, collections.Counter, takes_apart=True))
add_codec(collections.OrderedDict, Codec("collections.OrderedDict", dict, collections.OrderedDict, takes_apart=True))
add_codec(torch.Size, Codec("torch.Size", list, torch.Size, takes_apart=True))
add_codec(NestedTensor, Codec("torch.jagged", parts_of, from_parts, takes_apart=True))


def codec_of(kind: type) -> Codec | None:
    """The codec of a type, if it has one."""
    try:
        return _codecs_looked_up[kind]
    except KeyError:
        return _codecs_looked_up.setdefault(kind, _look_up_codec(kind))


def _look_up_codec(kind: type) -> Codec | None:
    _load_imported()
    for parent in kind.__mro__:
        codec = _codecs.get(parent)
        if codec is not None and (parent is kind or codec.subclasses):
            return codec
    return None


def registered_name(kind: type) -> str:
    """What stands for a type in a checkpoint.

    Raises:
        CheckpointError: it is not registered.
    """
    codec = codec_of(kind)
    if codec is None:
        raise CheckpointError(f"expected a registered type, found {kind.__module__}.{kind.__qualname__}; {HINT}")
    return codec.name


def registered_type(name: str) -> type:
    """The type that a name stands for.

    Raises:
        CheckpointMismatchError: no registered type has that name.
    """
    for kind, codec in _codecs.items():
        if codec.name == name:
            return kind
    raise CheckpointMismatchError(unknown(name))


def codec_named(name: str) -> Codec | None:
    """The codec that stands in a checkpoint under a name, if there is one."""
    if (package := str(name).partition(".")[0]) in _optional:
        _optional.pop(package)()
    return _codec_names.get(name)


def unknown(name: Any) -> str:
    """The message about a type that is not registered."""
    known = sorted(_codec_names)
    return f"expected a registered type, found {name!r}, known are {known}; {HINT}, which is to be done before loading"
