"""The leaves of plain data in a checkpoint, found without decoding anything: no type of the user is needed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from asyncbuf._plain.columns_back import from_columns
from asyncbuf._plain.dtypes import dtype_named
from asyncbuf._plain.registry import Codec
from asyncbuf._plain.savable import is_plain_name
from asyncbuf.errors import CheckpointCorruptError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy.typing as npt

    from asyncbuf._disk.view import StoredTensor

    Read = Callable[[StoredTensor], npt.NDArray[np.uint8]]

_SHOWN = 60
_KIND_OF = {type(None): "none", bool: "bool", int: "int", float: "float", str: "str"}
# Types that are shown as what they are made of.
_LIKE_DICTS = {"collections.OrderedDict", "collections.Counter"}
COLUMNS, STRUCTURE = "columns", "structure"


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor, number, text or the like in a checkpoint.

    Attributes:
        path: where it stands, such as ``state/layer.weight``. ``[]`` stands for any element of a list, ``{}`` for any
            value of a dict, ``<Name>`` for a registered type; ``.`` is a lone leaf.
        kind: ``tensor``, ``array`` or ``scalar`` (of numpy), ``bool``, ``int``, ``float``, ``complex``, ``str``,
            ``bytes``, ``bytearray``, ``none``, ``dtype``, ``device``; ``list``, ``dict``
            or ``ticket`` for what is shown no further.
        dtype: of a tensor, array or scalar, such as ``float32``; None if it is not the same for all.
        shape: likewise; of a field of items that of one item.
        value: a number or text, in short; None for everything else.
    """

    path: str
    kind: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    value: str | None = None

    def __str__(self) -> str:
        """Such as ``obs: float32 [17]``."""
        return f"{self.path}: {self.described}"

    @property
    def described(self) -> str:
        """Such as ``float32 [17]``, ``int = 3`` or ``str``."""
        if self.value is not None:
            return f"{self.kind} = {self.value}"
        if self.kind not in ("tensor", "array", "scalar"):
            return self.kind
        words = [self.dtype or "any dtype"] if self.kind == "tensor" else [self.kind, self.dtype or "of any dtype"]
        if self.kind != "scalar":
            words.append("of any shape" if self.shape is None else str(list(self.shape)))
        return " ".join(words)


class Found(NamedTuple):
    """A leaf, and what is in it.

    Attributes:
        leaf: the leaf.
        node: what JSON has of it.
        tensors: those that it names.
    """

    leaf: Leaf
    node: Any
    tensors: tuple[StoredTensor, ...] = ()


# -- plain data -------------------------------------------------------------------------------------------------------


def leaves(node: Any, tensors: Mapping[str, StoredTensor], path: str = "") -> Iterator[Found]:
    """The leaves of plain data, in order.

    Args:
        node: what JSON holds of it.
        tensors: those that it names.
        path: where it stands.

    Raises:
        CheckpointCorruptError: it is not what ``codec.split`` makes.
    """
    here = path or "."
    if isinstance(node, list) and node:
        for position, child in enumerate(node):
            yield from leaves(child, tensors, below(path, position))
    elif not isinstance(node, dict):
        kind = "list" if isinstance(node, list) else _KIND_OF[type(node)]
        yield Found(Leaf(here, kind, value=None if node is None else _short(node)), node)
    elif not node:
        yield Found(Leaf(here, "dict", value="{}"), node)
    elif next(iter(node)).startswith("$"):
        yield from _tagged(node, tensors, path)
    else:
        for key, child in node.items():
            yield from leaves(child, tensors, below(path, key))


def below(path: str, key: Any) -> str:
    """The path of what stands in a container."""
    return f"{path}/{key}" if path else str(key)


def _short(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 4 * _SHOWN:
        return f"an int of {value.bit_length()} bits"
    text = repr(value[: _SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _tagged(node: dict[str, Any], tensors: Mapping[str, StoredTensor], path: str) -> Iterator[Found]:
    tag = next(iter(node))
    inner = node[tag]
    if tag == "$type":
        name = str(inner)
        typed = path if name in _LIKE_DICTS else f"{path}<{name.rpartition('.')[2]}>"
        yield from leaves(node["value"], tensors, typed)
    elif tag == "$tuple" and inner:
        yield from leaves(inner, tensors, path)
    elif tag == "$dict" and inner:
        for key, child in inner:
            yield from leaves(child, tensors, below(path, key if isinstance(key, str) else _key(key)))
    else:
        named = tuple(tensor_of(each, tensors) for each in _references(node))
        yield Found(_special(tag, node, named, path or "."), node, named)


def _key(key: Any) -> str:
    if isinstance(key, dict) and "$tuple" in key:
        return f"({', '.join(map(_key, key['$tuple']))})"
    return _short(key)


def _special(tag: str, node: dict[str, Any], named: tuple[StoredTensor, ...], path: str) -> Leaf:
    kind, inner = tag.removeprefix("$"), node[tag]
    if tag == "$tensor":
        return Leaf(path, kind, named[0].dtype, named[0].shape)
    if tag in ("$ndarray", "$scalar"):
        shape = tuple(map(int, node.get("shape", ())))
        return Leaf(path, "array" if tag == "$ndarray" else kind, numpy_name(node["dtype"]), shape)
    if tag in ("$bytes", "$bytearray"):
        return Leaf(path, kind, value=f"{named[0].nbytes} bytes")
    if tag == "$columns":
        return Leaf(path, "list")
    if tag == "$complex":
        return Leaf(path, kind, value=str(complex(*map(float, inner))))
    if tag in ("$tuple", "$dict"):
        return Leaf(path, kind, value="()" if tag == "$tuple" else "{}")
    if tag in ("$float", "$int", "$dtype", "$device"):
        return Leaf(path, kind, value=str(inner)[:_SHOWN])
    raise CheckpointCorruptError(f"{path}: expected an encoded value, found {tag[:_SHOWN]!r}")


def _references(node: Any) -> Iterator[dict[str, Any]]:
    """What stands for tensors in a node."""
    if isinstance(node, dict):
        if "$tensor" in node:
            yield node
        else:
            for child in node.values():
                yield from _references(child)


def tensor_of(node: Any, tensors: Mapping[str, StoredTensor]) -> StoredTensor:
    """The tensor that a node stands for.

    Raises:
        CheckpointCorruptError: there is no such tensor.
    """
    name = node.get("$tensor") if isinstance(node, dict) else None
    found = tensors.get(name) if isinstance(name, str) else None
    if found is None:
        raise CheckpointCorruptError(f"expected a tensor named {name!r}, found {sorted(tensors)[:8]}")
    return found


def numpy_name(dtype: Any) -> str:
    """The name of a numpy dtype in a checkpoint, as people write it."""
    return np.dtype(dtype).name if isinstance(dtype, str) and is_plain_name(dtype) else str(dtype)[:_SHOWN]


# -- items of a list --------------------------------------------------------------------------------------------------


def item_leaves(tensors: Mapping[str, StoredTensor], read: Read, path: str = "") -> Iterator[Leaf]:
    """What the items in a chunk of a ``ListStorage`` consist of, each kind of leaf once.

    Args:
        tensors: those of the chunk.
        read: reads one.
        path: what the paths of the leaves begin with.
    """
    if not are_columns(tensors):
        items = document(tensors[STRUCTURE], read)
        found: Iterator[Leaf] = (
            Leaf(each.leaf.path, each.leaf.kind, each.leaf.dtype, each.leaf.shape)
            for each in leaves(items[0] if items else [], tensors, path)
        )
    else:
        found = _Outline(tensors, read).of(document(tensors[COLUMNS], read)["column"], path)
    yield from dict.fromkeys(found)


def item_count(tensors: Mapping[str, StoredTensor], read: Read) -> int:
    """How many items are in a chunk of a ``ListStorage``."""
    if not are_columns(tensors):
        return len(document(tensors[STRUCTURE], read))
    return int(document(tensors[COLUMNS], read)["items"])


def are_columns(tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether a chunk of a ``ListStorage`` is written in columns, and not item by item as it once was."""
    return COLUMNS in tensors or STRUCTURE not in tensors


def document(tensor: StoredTensor, read: Read) -> Any:
    """The JSON in a tensor."""
    return json.loads(read(tensor).tobytes())


class _Outline:
    """The leaves of columns.

    Args:
        tensors: those that the columns name.
        read: reads one.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], read: Read) -> None:
        self._tensors = tensors
        self._read = read

    def of(self, node: Any, path: str) -> Iterator[Leaf]:
        """The leaves of a column."""
        here = path or "."
        if node is None:
            yield Leaf(here, "list")
            return
        tag = next(iter(node))
        if tag in ("list", "tuple", "map") and node[tag] is None:  # all of them are empty
            yield Leaf(here, "dict" if tag == "map" else tag)
        elif tag in ("list", "tuple"):
            yield from self.of(node[tag], f"{path}[]")
        elif tag == "map":
            yield from self.of(node[tag], f"{path}{{}}")
        elif tag == "dict":
            yield from self._dict(node, path)
        elif tag == "mixed":
            for column in node["columns"]:
                yield from self.of(column, path)
        elif tag == "type":
            name = str(node[tag])
            typed = path if name in _LIKE_DICTS else f"{path}<{name.rpartition('.')[2]}>"
            yield from self.of(node["value"], typed)
        elif tag == "again":
            yield Leaf(here, "tensor")
        elif tag in ("tensor", "array", "scalar"):
            yield self._numbers(tag, node, here)
        else:
            yield Leaf(here, tag)

    def _dict(self, node: dict[str, Any], path: str) -> Iterator[Leaf]:
        if not node["dict"]:
            yield Leaf(path or ".", "dict")
        for key, column in zip(self._keys(node["keys"], len(node["dict"])), node["dict"], strict=True):
            yield from self.of(column, below(path, key if isinstance(key, str) else _key(key)))

    def _keys(self, node: Any, count: int) -> list[Any]:
        """The keys of a dict, which are a column as well."""
        named = {name: self._tensors[name] for name in _names(node)}
        read = {name: as_torch(self._read(tensor), tensor) for name, tensor in named.items()}
        content = json.dumps({"version": 1, "items": count, "column": node}).encode()
        read[COLUMNS] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return from_columns(read, "keys", foreign)

    def _numbers(self, tag: str, node: dict[str, Any], path: str) -> Leaf:
        stored = self._tensors[node[tag]]
        dtype = stored.dtype if tag == "tensor" else numpy_name(node["dtype"])
        if "ndim" in node:
            return Leaf(path, tag, dtype)
        shape = stored.shape[1:] if tag == "tensor" else tuple(map(int, node.get("shape", ())))
        return Leaf(path, tag, dtype, shape)


class Foreign:
    """A value of a registered type, without that type.

    Args:
        name: what stands for the type.
        value: what its codec made of the value.
    """

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.value = value

    def __eq__(self, other: object) -> bool:
        """Of the same type, with the same in it; for keys."""
        return isinstance(other, Foreign) and (self.name, self.value) == (other.name, other.value)

    def __hash__(self) -> int:
        """What is in it may have no hash."""
        return hash(self.name)

    def __repr__(self) -> str:
        """Such as ``Phase('WARM')``."""
        return f"{self.name.rpartition('.')[2]}({_short(self.value)})"


def foreign(name: str) -> Codec:
    """Stands for the codec of any registered type, for ``from_columns``."""
    return Codec(name, lambda value: value, lambda value: Foreign(name, value))


def as_torch(content: npt.NDArray[np.uint8], stored: StoredTensor) -> torch.Tensor:
    """A tensor whose bytes were read."""
    return torch.from_numpy(content).view(dtype_named(stored.dtype)).reshape(stored.shape)


def _names(node: Any) -> Iterator[str]:
    """The tensors that a column of keys names."""
    if isinstance(node, dict):
        for key, child in node.items():
            if isinstance(child, str) and key not in ("type", "dtype"):
                yield child
            yield from _names(child)
    elif isinstance(node, list):
        for child in node:
            yield from _names(child)
