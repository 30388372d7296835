"""Values as plain data: tensors, numbers, strings, lists and dicts with string keys, and nothing else.

Plain data is what a state dict consists of, so that ``torch.load`` reads it in its safe mode, and what goes into a
checkpoint as JSON beside tensors. Everything else is written as a dict whose first key begins with ``$``. No name that
stands in plain data is ever imported, or looked up anywhere but in the table of registered types.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from asyncbuf._plain import registry
from asyncbuf._plain.columns import to_columns
from asyncbuf._plain.columns_back import from_columns
from asyncbuf._plain.dtypes import DTYPES as DTYPES
from asyncbuf._plain.dtypes import dtype_name as dtype_name
from asyncbuf._plain.dtypes import dtype_named as dtype_named
from asyncbuf._plain.savable import DEPTH, is_plain_dtype, is_plain_name, tensor_problem
from asyncbuf._runtime.atoms import holds_atoms
from asyncbuf._runtime.summary import literal
from asyncbuf.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncbuf._plain.copies import LateCopies

# JSON has larger ints in a form that Python refuses to read.
_INT_BITS = 8192
_ATOMS = (type(None), bool, int, float, str)
# A list of so many numbers and texts is written as a column.
_MANY = 512


def encode(value: Any, path: str = "", late: LateCopies | None = None) -> Any:
    """Make a value plain. Tensors are cloned without their history, keeping ``requires_grad``; shared ones stay shared.

    Args:
        value: tensors, numpy arrays and scalars, None, bool, int, float, complex, str, bytes, lists, tuples, dicts,
            TensorDicts, and registered types, nested in any way without cycles.
        path: where the value stands, for messages.
        late: what copies large tensors and arrays later. Until it has, their contents mean nothing.

    Raises:
        CheckpointError: something else is in it; the message says where.
    """
    return _Encoder(late).encode(value, path)


def check(value: Any, name: str) -> None:
    """Raise the error of a value that cannot be encoded.

    Args:
        value: the value.
        name: what it is called, for messages.

    Raises:
        CheckpointError: it cannot; the message says where in it that is so. What a codec raises gets a note.
    """
    try:
        encode(value, name)
    except CheckpointError:
        raise
    except RecursionError:
        raise CheckpointError(f"{name}: expected at most {DEPTH} levels, found more") from None
    except Exception as error:
        error.add_note(f"raised while {name} was made plain")
        raise


class _Encoder:
    def __init__(self, late: LateCopies | None) -> None:
        self._late = late
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._open: set[int] = set()

    def encode(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return {"$int": hex(value)} if kind is int and value.bit_length() > _INT_BITS else value
        if is_bare_tensor(value):
            return self._tensor(value, path)
        if is_bare_array(value):
            return {
                "$ndarray": self._array(np.asarray(value), path),
                "dtype": value.dtype.str,
                "shape": list(value.shape),
            }
        if isinstance(value, np.generic):
            array = np.asarray(value)
            return {"$scalar": self._array(array, path), "dtype": array.dtype.str}
        if kind is bytes or kind is bytearray:
            return {
                f"${kind.__name__}": torch.frombuffer(bytearray(value) or bytearray(1), dtype=torch.uint8)[: len(value)]
            }
        if kind is complex:
            return {"$complex": [value.real, value.imag]}
        if kind is torch.dtype or kind is torch.device:
            return {f"${kind.__name__}": str(value).removeprefix("torch.")}
        if len(self._open) >= DEPTH:
            raise CheckpointError(f"{path[:80] or 'the value'}: expected at most {DEPTH} levels, found more")
        if id(value) in self._open:
            raise CheckpointError(f"{path or 'the value'}: expected a tree, found a container that contains itself")
        self._open.add(id(value))
        try:
            return self._container(value, kind, path)
        finally:
            self._open.discard(id(value))

    def _container(self, value: Any, kind: type, path: str) -> Any:
        if (kind is list or kind is tuple) and len(value) >= _MANY and holds_atoms(value):
            return {"$columns": to_columns([value], lambda _: self._elements(value, kind, path))}
        return self._elements(value, kind, path)

    def _elements(self, value: Any, kind: type, path: str) -> Any:
        if kind is list:
            return [self.encode(item, f"{path}/{i}") for i, item in enumerate(value)]
        if kind is tuple:
            return {"$tuple": [self.encode(item, f"{path}/{i}") for i, item in enumerate(value)]}
        codec = registry.codec_of(kind)
        if codec is not None:
            return {
                "$type": codec.name,
                "value": self.encode(codec.encode(value), path),
            }
        if kind is dict:
            if all(type(key) is str and not key.startswith("$") for key in value):
                return {key: self.encode(item, f"{path}/{key}") for key, item in value.items()}
            pairs = value.items()
            return {"$dict": [[self.encode(key, path), self.encode(item, f"{path}/{key}")] for key, item in pairs]}
        raise CheckpointError(
            f"{path or 'the value'}: expected a tensor, array, number, string, list, tuple, dict or registered type, "
            f"found {kind.__module__}.{kind.__qualname__}; {registry.HINT}"
        )

    def _tensor(self, value: torch.Tensor, path: str) -> torch.Tensor:
        problem = tensor_problem(value)
        if problem is not None:
            raise CheckpointError(f"{path or 'the value'}: {problem}")
        known = self._tensors.get(id(value))
        if known is None:
            # The original is kept beside the clone, so that its id is not taken by another object meanwhile.
            known = self._tensors[id(value)] = (value, self._copied(value, path))
        return known[1]

    def _copied(self, value: torch.Tensor, path: str) -> torch.Tensor:
        try:
            late = None if self._late is None else self._late.tensor(value)
            if late is None:
                return cloned(value)
            return late.requires_grad_() if value.requires_grad else late
        except (RuntimeError, NotImplementedError) as error:  # a class of the user, or a device
            raise CheckpointError(f"{path or 'the value'}: expected a tensor that can be copied: {error}") from error

    def _array(self, value: np.ndarray[Any, Any], path: str) -> torch.Tensor:
        if not is_plain_dtype(value.dtype):
            raise CheckpointError(f"{path or 'the value'}: expected a plain numpy dtype, found {value.dtype}")
        late = None if self._late is None else self._late.array(value)
        flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8).copy() if late is None else late
        return torch.from_numpy(flat)


def is_bare_tensor(value: Any) -> bool:
    """Whether a value is saved as a tensor: one, also of a derived class, unless that has a codec."""
    kind = type(value)
    return kind is torch.Tensor or (isinstance(value, torch.Tensor) and registry.codec_of(kind) is None)


def is_bare_array(value: Any) -> bool:
    """Whether a value is saved as an array: one, also of a derived class, unless that has a codec or a mask."""
    if type(value) is np.ndarray:
        return True
    is_plain = isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray)
    return is_plain and registry.codec_of(type(value)) is None


def cloned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy without history that requires a gradient if the original does (and is a leaf then)."""
    clone = tensor.detach().resolve_conj().resolve_neg().clone()
    return clone.requires_grad_() if tensor.requires_grad else clone


def decode(plain: Any, path: str = "") -> Any:
    """The way back from plain data.

    Args:
        plain: what ``encode`` returned. Tensors are taken over as they are.
        path: where the value stands, for messages.

    Raises:
        CheckpointCorruptError: it is not what ``encode`` returns, or names a type that is not registered.
    """
    try:
        return _decode(plain, path)
    except CheckpointCorruptError:
        raise
    except Exception as error:
        raise CheckpointCorruptError(f"{path or 'the value'}: expected an encoded value, found {error!r}") from error


def _decode(plain: Any, path: str) -> Any:
    if type(plain) in _ATOMS or isinstance(plain, torch.Tensor):
        return plain
    if type(plain) is list:
        return [_decode(item, f"{path}/{i}") for i, item in enumerate(plain)]
    if type(plain) is not dict:
        raise CheckpointCorruptError(f"{path or 'the value'}: expected plain data, found {type(plain).__name__}")
    tag = next(iter(plain), "")
    if not tag.startswith("$"):
        return {key: _decode(item, f"{path}/{key}") for key, item in plain.items()}
    decoder = _DECODERS.get(tag)
    if decoder is None:
        raise CheckpointCorruptError(f"{path or 'the value'}: expected one of {sorted(_DECODERS)}, found {tag!r}")
    if plain.keys() != (keys := {tag, *_MORE_KEYS.get(tag, ())}):
        raise CheckpointCorruptError(
            f"{path or 'the value'}: expected the entries {sorted(keys)}, found {sorted(map(str, plain))}"
        )
    return decoder(plain, path)


def _typed(plain: Any, path: str) -> Any:
    name = plain["$type"]
    codec = registry.codec_named(name)
    if codec is None:
        raise CheckpointMismatchError(f"{path or 'the value'}: {registry.unknown(name)}")
    return codec.decode(_decode(plain["value"], path))


def _array_of(data: torch.Tensor, dtype: str, shape: list[int]) -> np.ndarray[Any, Any]:
    if not is_plain_name(dtype):
        raise CheckpointCorruptError(f"expected a plain numpy dtype, found {dtype!r}")
    array: np.ndarray[Any, Any] = np.empty(shape, np.dtype(dtype))
    if data.shape != (array.nbytes,):
        raise CheckpointCorruptError(f"expected {array.nbytes} bytes for {dtype} {shape}, found {list(data.shape)}")
    array.reshape(-1).view(np.uint8)[:] = np.frombuffer(_bytes_of(data), np.uint8)
    return array


def _bytes_of(data: Any) -> bytes:
    if not isinstance(data, torch.Tensor) or data.dtype is not torch.uint8 or data.ndim != 1:
        raise CheckpointCorruptError(f"expected bytes as a uint8 tensor [n], found {literal(data)}")
    found: bytes = data.numpy().tobytes()
    return found


def _list_of(value: Any) -> list[Any]:
    if type(value) is not list:
        raise CheckpointCorruptError(f"expected a list, found {literal(value)}")
    return value


def _only(values: list[Any]) -> Any:
    if len(values) != 1:
        raise CheckpointCorruptError(f"expected a column of one value, found {len(values)}")
    return values[0]


# What stands beside the tag.
_MORE_KEYS = {"$ndarray": ("dtype", "shape"), "$scalar": ("dtype",), "$type": ("value",)}
_DECODERS: dict[str, Callable[[Any, str], Any]] = {
    "$tuple": lambda plain, path: tuple(_decode(_list_of(plain["$tuple"]), path)),
    "$dict": lambda plain, path: {
        _decode(k, path): _decode(v, f"{path}/{k}") for k, v in map(_list_of, _list_of(plain["$dict"]))
    },
    "$ndarray": lambda plain, path: _array_of(plain["$ndarray"], plain["dtype"], plain["shape"]),
    "$scalar": lambda plain, path: _array_of(plain["$scalar"], plain["dtype"], [])[()],
    "$bytes": lambda plain, path: _bytes_of(plain["$bytes"]),
    "$bytearray": lambda plain, path: bytearray(_bytes_of(plain["$bytearray"])),
    "$columns": lambda plain, path: _only(from_columns(plain["$columns"], path)),
    "$int": lambda plain, path: int(plain["$int"], 16),
    "$complex": lambda plain, path: complex(*_list_of(plain["$complex"])),
    "$dtype": lambda plain, path: dtype_named(plain["$dtype"]),
    "$device": lambda plain, path: torch.device(plain["$device"]),
    "$type": _typed,
}


class Split(NamedTuple):
    """Plain data as JSON and tensors.

    Attributes:
        document: what JSON can hold; a tensor is ``{"$tensor": name}``.
        tensors: the tensors by name.
    """

    document: Any
    tensors: dict[str, torch.Tensor]


def split(plain: Any, prefix: str = "") -> Split:
    """Take the tensors out of plain data. A tensor that stands in several places is taken once."""
    tensors: dict[str, torch.Tensor] = {}
    return Split(_split(plain, prefix, {}, tensors), tensors)


def _split(node: Any, prefix: str, names: dict[int, str], tensors: dict[str, torch.Tensor]) -> Any:
    # Not a function within the other one: that would refer to itself, and keep the tensors until the collector comes.
    if isinstance(node, torch.Tensor):
        name = names.get(id(node))
        if name is None:
            name = names[id(node)] = f"{prefix}{len(names)}"
            tensors[name] = node
        return {"$tensor": name, "grad": True} if node.requires_grad else {"$tensor": name}
    if isinstance(node, list):
        return [_split(item, prefix, names, tensors) for item in node]
    if isinstance(node, dict):
        return {key: _split(item, prefix, names, tensors) for key, item in node.items()}
    if isinstance(node, float) and not np.isfinite(node):
        return {"$float": str(node)}
    return node


def join(document: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Put tensors back into their places.

    Raises:
        CheckpointCorruptError: a tensor is missing, or the document is not what ``split`` makes.
    """
    if isinstance(document, list):
        return [join(item, tensors) for item in document]
    if not isinstance(document, dict):
        return document
    if "$float" in document:
        return _special_float(document["$float"])
    if "$tensor" not in document:
        return {key: join(item, tensors) for key, item in document.items()}
    name = document["$tensor"]
    if not isinstance(name, str) or name not in tensors:
        raise CheckpointCorruptError(f"expected a tensor named {name!r}, found {sorted(tensors)[:8]}")
    tensor = tensors[name]
    if not document.get("grad"):
        return tensor
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise CheckpointCorruptError(f"expected a tensor that can require a gradient, found {name!r} of {tensor.dtype}")
    return tensor.requires_grad_()


def _special_float(text: Any) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise CheckpointCorruptError(f"expected nan, inf or -inf, found {text!r}")
    return float(text)
