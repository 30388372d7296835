"""Many values as a few tensors: like values together, in columns. The way back is in ``columns_back``.

A column stands for values ``[n]``. It is a node of a small JSON document that says of which kind they are and which
tensors hold them:

=============================================  =======================================================================
``null``                                       no values
``{"none": t}``                                n times None; uint8 ``[n]``
``{"bool": t}``                                uint8 ``[n]``
``{"int": t}``, ``{"float": t}``               int64, float64 ``[n]``
``{"int": column}``                            ints of more than 64 bits, as strings such as ``-0xff``
``{"complex": t}``                             float64 ``[n, 2]``
``{"str": t, "lengths": t}``                   UTF-8 as uint8, one after the other; int64 ``[n]`` bytes of each
``{"bytes": t, "lengths": t}``                 also ``bytearray``
``{"scalar": t, "dtype": d}``                  numpy scalars; uint8
``{"tensor": t}``                              of one shape: ``[n, *shape]``; ``"grad": true`` if they require gradients
``{"tensor": t, "ndim": t, "sizes": t}``       of any shape: one after the other; axes of each, and sizes of the axes
``{"array": t, "dtype": d, "shape": [...]}``   numpy arrays of one shape; uint8
``{"array": t, "dtype": d, "ndim": t, ...}``   of any shape, ``"sizes": t`` as above
``{"again": t}``                               tensors that came before; int64 ``[n]``, which of all that did
``{"list": column, "lengths": t}``             also ``tuple``: their elements, one after the other; int64 ``[n]``
``{"dict": [column, ...], "keys": column}``    dicts with the same keys in the same order: a column for each key
``{"map": column, "keys": column, ...}``       any dicts: keys and values, one after the other, ``"lengths": t``
``{"type": name, "value": column}``            a registered type: what its codec makes of them
``{"dtype": column}``, ``{"device": column}``  those of torch, by name
``{"mixed": t, "columns": [column, ...]}``     uint8 or int32 ``[n]``: the column that has the next value
=============================================  =======================================================================

For each value there is at least one byte in a tensor, so that a small file cannot ask for much memory: where values are
empty (dicts without keys, tensors without elements), ``"marks": t`` is uint8 ``[n]``.
"""

from __future__ import annotations

import functools
import json
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from asyncbuf._plain import registry
from asyncbuf._plain.codec import encode
from asyncbuf._plain.savable import DEPTH, SAVABLE_DTYPES, is_plain_dtype, tensor_problem
from asyncbuf._runtime.pieces import PIECE, GiveWay
from asyncbuf.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

VERSION = 1
DOCUMENT = "columns"
_SMALL = 256
_INT64 = np.dtype(np.int64)
_FAR = 1 << 18
# The dtype of numpy scalars of these kinds follows from their type.
_NUMBERS = frozenset("biufc")


def to_columns(values: list[Any], names: Callable[[int], str]) -> dict[str, torch.Tensor]:
    """Write values as columns. May be called in a thread, which gives the interpreter's lock away now and then.

    Args:
        values: anything that ``codec.encode`` takes. They must not change meanwhile.
        names: says of a position what that value is called, for messages.

    Returns:
        Named tensors, in memory of their own: the document as uint8 ``[bytes]``, and those that it names. A tensor that
        stands in several places is written once.

    Raises:
        CheckpointError: a value cannot be saved; the message says which.
    """
    writer = _Writer()
    try:
        column = writer.column(values, 0)
    except Exception as error:
        _blame(values, names)
        raise CheckpointError(f"{names(0)} and following: expected values that can be saved: {error}") from error
    document = json.dumps({"version": VERSION, "items": len(values), "column": column}).encode()
    return {DOCUMENT: torch.frombuffer(bytearray(document), dtype=torch.uint8), **writer.tensors}


def _blame(values: Sequence[Any], names: Callable[[int], str]) -> None:
    """Raise the error of the first value that cannot be saved, which says where in it that is so."""
    for position, value in enumerate(values):
        try:
            encode(value, names(position))
        except CheckpointError:
            raise
        except RecursionError:
            raise CheckpointError(f"{names(position)}: expected at most {DEPTH} levels, found more") from None
        except Exception as error:  # of a codec
            error.add_note(f"raised while {names(position)} was made plain")
            raise


class _Kind(NamedTuple):
    """What is written in one way.

    Attributes:
        key: the same for types whose values go into one column.
        write: makes the node of such a column.
    """

    key: Hashable
    write: Callable[[_Writer, list[Any], int], Any]


class _Level:
    """Containers whose contents are being written.

    Args:
        values: the containers.
    """

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    @functools.cached_property
    def ids(self) -> set[int]:
        """Who they are. Asked for only if there are containers below."""
        return set(map(id, self._values))


class _Writer:
    """Makes columns.

    Attributes:
        tensors: those that the columns name.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._give_way = GiveWay()
        self._above: list[_Level] = []
        # Which of all tensors that were written one is, by id. What is in _kept keeps its id to itself.
        self._ordinals: dict[int, int] = {}
        self._kept: list[list[torch.Tensor]] = []

    def column(self, values: list[Any], depth: int) -> Any:
        """The node for values of any kinds."""
        types: set[type] = set()
        for piece in self._give_way.pieces(values):
            types.update(map(type, piece))
        kinds = {kind: _kind_of(kind) for kind in types}
        if len({kind.key for kind in kinds.values()}) > 1:
            return self._split(
                values,
                self._give_way.mapped(lambda value: kinds[type(value)], values),
                lambda kind, part: kind.write(self, part, depth),
            )
        for kind in kinds.values():
            return kind.write(self, values, depth)
        return None

    def _split(self, values: list[Any], keys: list[Any], write: Callable[[Any, list[Any]], Any]) -> Any:
        """A column for each key, of the values that have it."""
        places: dict[Any, int] = {}
        groups: list[list[Any]] = []
        index: list[int] = []
        for piece in self._give_way.pieces(range(len(values)), PIECE // 16):
            for number in piece:
                key = keys[number]
                place = places.get(key)
                if place is None:
                    place = places[key] = len(groups)
                    groups.append([])
                groups[place].append(values[number])
                index.append(place)
        if len(groups) == 1:
            return write(keys[0], values)
        dtype = np.dtype(np.uint8 if len(groups) <= _SMALL else np.int32)
        return {
            "mixed": self._name(self._numbers(index, dtype)),
            "columns": [write(key, group) for key, group in zip(places, groups, strict=True)],
        }

    # -- numbers and text ---------------------------------------------------------------------------------------------

    def none(self, values: list[Any], depth: int) -> Any:
        """Nones."""
        return {"none": self._marks(len(values))}

    def bools(self, values: list[Any], depth: int) -> Any:
        """Bools."""
        return {"bool": self._name(self._numbers(values, np.dtype(np.uint8)))}

    def ints(self, values: list[Any], depth: int) -> Any:
        """Ints."""
        try:
            return {"int": self._name(self._numbers(values, np.dtype(np.int64)))}
        except OverflowError:
            return {"int": self.texts(self._give_way.mapped(hex, values), depth)}

    def floats(self, values: list[Any], depth: int) -> Any:
        """Floats."""
        return {"float": self._name(self._numbers(values, np.dtype(np.float64)))}

    def complexes(self, values: list[Any], depth: int) -> Any:
        """Complex numbers."""
        pairs = self._numbers(values, np.dtype(np.complex128)).view(np.float64)
        return {"complex": self._name(pairs.reshape(-1, 2))}

    def texts(self, values: list[Any], depth: int) -> Any:
        """Strings."""
        return {"str": (arena := self._arena(values, _utf8))[0], "lengths": arena[1]}

    def byte_strings(self, values: list[Any], depth: int) -> Any:
        """Bytes."""
        return {"bytes": (arena := self._arena(values, _as_they_are))[0], "lengths": arena[1]}

    def byte_arrays(self, values: list[Any], depth: int) -> Any:
        """Bytearrays."""
        return {"bytearray": (arena := self._arena(values, _as_they_are))[0], "lengths": arena[1]}

    def scalars(self, values: list[Any], depth: int) -> Any:
        """Numpy scalars of one type."""
        dtype = values[0].dtype
        if dtype.kind in _NUMBERS:
            # Their very bytes: those of a long double that mean nothing, too.
            parts = [np.frombuffer(b"".join(piece), np.uint8) for piece in self._give_way.pieces(values)]
            return {"scalar": self._name(self._joined(parts)), "dtype": dtype.str}
        # The dtype is no matter of the type alone.
        return self._split(values, [np.asarray(value).dtype for value in values], self._scalars)

    def _scalars(self, dtype: np.dtype[Any], values: list[Any]) -> Any:
        _check_dtype(dtype)
        return {"scalar": self._name(_as_bytes(self._numbers(values, dtype))), "dtype": dtype.str}

    def _numbers(self, values: list[Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = np.empty(len(values), dtype)
        start = 0
        for piece in self._give_way.pieces(values):
            found[start : start + len(piece)] = np.array(piece, dtype)
            start += len(piece)
        return found

    def _arena(self, values: list[Any], render: Callable[[Sequence[Any]], Sequence[Any]]) -> tuple[str, str]:
        """Names of the bytes of all values, one after the other, and of how many there are of each."""
        parts: list[np.ndarray[Any, Any]] = []
        lengths: list[int] = []
        for piece in self._give_way.pieces(values, PIECE // 4):
            rendered = render(piece)
            sizes = list(map(len, rendered))
            lengths += sizes
            # numpy copies what is large without the interpreter's lock, and Python small things quickly.
            whole = [b"".join(rendered)] if sum(sizes) < _FAR else rendered
            parts.extend(np.frombuffer(each, np.uint8) for each in whole)
        return self._name(self._joined(parts)), self._lengths(lengths)

    def _joined(self, parts: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        """Bytes one after the other, in memory of their own."""
        while len(parts) > PIECE // 16:
            parts = [np.concatenate(piece) for piece in self._few(parts)]
        return np.concatenate([*parts, np.empty(0, np.uint8)])

    # -- tensors and arrays -------------------------------------------------------------------------------------------

    def every_tensor(self, values: list[Any], depth: int) -> Any:
        """Tensors, each written once."""
        ids = self._give_way.mapped(id, values, PIECE)
        if len(set(ids)) == len(ids) and self._ordinals.keys().isdisjoint(ids):
            return self._new_tensors(values)
        seen: set[int] = set()
        new, again, index = [], [], []
        for number, value in zip(ids, values, strict=True):
            is_again = number in self._ordinals or number in seen
            seen.add(number)
            index.append(int(is_again))
            (again if is_again else new).append(value)
        if not new:
            return self._old_tensors(again)
        name = self._name(self._numbers(index, np.dtype(np.uint8)))
        # The new ones come first, so that the others come after what they repeat.
        return {"mixed": name, "columns": [self._new_tensors(new), self._old_tensors(again)]}

    def _old_tensors(self, values: list[Any]) -> Any:
        return {"again": self._name(self._numbers([self._ordinals[id(value)] for value in values], _INT64))}

    def _new_tensors(self, values: list[Any]) -> Any:
        for piece in self._few(values):
            _check_tensors(piece)
        if all(_are_alike(piece, values[0]) for piece in self._few(values)):
            return self._tensors_of_a_shape(values)
        keys = self._give_way.mapped(_kind_of_tensor, values)
        return self._split(values, keys, lambda _, part: self._tensors_of_a_kind(part))

    def _tensors_of_a_kind(self, values: list[Any]) -> Any:
        shapes = [tuple(value.shape) for value in values]
        if len(set(shapes)) == 1:
            return self._tensors_of_a_shape(values)
        self._number(values)
        parts = [torch.cat([value.detach().reshape(-1) for value in piece]) for piece in self._few(values)]
        return {"tensor": self._name_tensor(torch.cat(parts)), **self._shapes(shapes), **_grad(values[0])}

    def _tensors_of_a_shape(self, values: list[Any]) -> Any:
        self._number(values)
        with torch.no_grad():
            parts = [torch.stack(list(piece)) for piece in self._few(values)]
        stacked = parts[0] if len(parts) == 1 else torch.cat(parts)
        marks = {} if values[0].numel() else {"marks": self._marks(len(values))}
        return {"tensor": self._name_tensor(stacked), **_grad(values[0]), **marks}

    def _few(self, values: Sequence[Any]) -> Iterator[Sequence[Any]]:
        return self._give_way.pieces(values, PIECE // 16)

    def _number(self, values: list[torch.Tensor]) -> None:
        self._kept.append(values)
        start = len(self._ordinals)
        self._ordinals.update(zip(map(id, values), range(start, start + len(values)), strict=True))

    def arrays(self, values: list[Any], depth: int) -> Any:
        """Numpy arrays."""
        plain = self._give_way.mapped(np.asarray, values)
        keys = [(value.dtype, value.shape) for value in plain]
        if len(set(keys)) == 1:
            return self._arrays_of_a_shape(plain)
        return self._split(plain, [dtype for dtype, _ in keys], self._arrays_of_a_dtype)

    def _arrays_of_a_shape(self, values: list[np.ndarray[Any, Any]]) -> Any:
        dtype, shape = values[0].dtype, values[0].shape
        marks = {} if values[0].nbytes else {"marks": self._marks(len(values))}
        return {"array": self._rendered(dtype, values), "dtype": dtype.str, "shape": list(shape), **marks}

    def _arrays_of_a_dtype(self, dtype: np.dtype[Any], values: list[np.ndarray[Any, Any]]) -> Any:
        shapes = [value.shape for value in values]
        if len(set(shapes)) == 1:
            return self._arrays_of_a_shape(values)
        return {"array": self._rendered(dtype, values), "dtype": dtype.str, **self._shapes(shapes)}

    def _rendered(self, dtype: np.dtype[Any], values: list[np.ndarray[Any, Any]]) -> str:
        _check_dtype(dtype)
        return self._name(self._joined(self._give_way.mapped(_as_bytes, values)))

    def _shapes(self, shapes: list[tuple[int, ...]]) -> dict[str, str]:
        sizes = [size for shape in shapes for size in shape]
        ndim = self._numbers([len(shape) for shape in shapes], _INT64)
        return {"ndim": self._name(ndim), "sizes": self._name(self._numbers(sizes, _INT64))}

    # -- containers ---------------------------------------------------------------------------------------------------

    def lists(self, values: list[Any], depth: int) -> Any:
        """Lists."""
        self._check_cycles(values)
        elements, lengths = self._flattened(values)
        return {"list": self._below(values, elements, depth), "lengths": self._lengths(lengths)}

    def tuples(self, values: list[Any], depth: int) -> Any:
        """Tuples."""
        self._check_cycles(values)
        elements, lengths = self._flattened(values)
        return {"tuple": self._below(values, elements, depth), "lengths": self._lengths(lengths)}

    def dicts(self, values: list[Any], depth: int) -> Any:
        """Dicts."""
        self._check_cycles(values)
        keys = list(values[0])
        if not self._have_keys(values, keys):
            contents, lengths = self._flattened([list(value.values()) for value in values])
            names, _ = self._flattened([list(value) for value in values])
            node = {"map": self._below(values, contents, depth), "keys": self._below(values, names, depth)}
            return {**node, "lengths": self._lengths(lengths)}
        marks = {} if keys else {"marks": self._marks(len(values))}
        below = [
            self._below(values, self._give_way.mapped(operator.itemgetter(key), values, PIECE // 4), depth)
            for key in keys
        ]
        # The keys come after the values, as above: a tensor may be among both.
        return {"dict": below, "keys": self._below(values, keys, depth), **marks}

    def _have_keys(self, values: list[Any], keys: list[Any]) -> bool:
        """Whether all dicts have these keys in this order; the very objects, or of the same types."""
        count = len(keys)
        types = [type(key) for key in keys]
        for piece in self._few(values):
            for value in piece:
                if len(value) != count:
                    return False
                if not all(map(operator.is_, value, keys)) and (
                    list(map(type, value)) != types or any(map(_is_odd_key, value)) or list(value) != keys
                ):
                    return False
        return True

    def _lengths(self, lengths: list[int]) -> str:
        return self._name(self._numbers(lengths, _INT64))

    def _flattened(self, values: list[Any]) -> tuple[list[Any], list[int]]:
        """The elements of all, and how many there are of each."""
        elements: list[Any] = []
        lengths = []
        for value in values:
            before = len(elements)
            if len(value) <= PIECE:
                elements += value
            else:
                for piece in self._give_way.pieces(value):
                    elements += piece
            lengths.append(len(elements) - before)
            self._give_way()
        return elements, lengths

    def typed(self, values: list[Any], depth: int, codec: registry.Codec) -> Any:
        """Values of a registered type."""
        self._check_cycles(values)
        encoded = self._give_way.mapped(codec.encode, values)
        return {"type": codec.name, "value": self._below(values, encoded, depth)}

    def _below(self, values: list[Any], inner: list[Any], depth: int) -> Any:
        """The column of what is in values."""
        if depth >= DEPTH:
            raise CheckpointError(f"expected at most {DEPTH} levels, found more")
        self._above.append(_Level(values))
        try:
            return self.column(inner, depth + 1)
        finally:
            self._above.pop()

    def _check_cycles(self, values: list[Any]) -> None:
        """Refuse containers that contain themselves: of those, there would be ever more with each level."""
        if not self._above:
            return
        for value in {
            id(value): value for value in values if any(id(value) in level.ids for level in self._above)
        }.values():
            encode(value)  # which notices; a value that is only there at several levels is taken

    def torch_names(self, values: list[Any], depth: int) -> Any:
        """Dtypes, or devices."""
        names = [str(value).removeprefix("torch.") for value in values]
        return {type(values[0]).__name__: self.texts(names, depth)}

    # -- tensors of the columns ---------------------------------------------------------------------------------------

    def _marks(self, count: int) -> str:
        return self._name(np.zeros(count, np.uint8))

    def _name(self, array: np.ndarray[Any, Any]) -> str:
        name = str(len(self.tensors))
        self.tensors[name] = torch.from_numpy(array)
        return name

    def _name_tensor(self, tensor: torch.Tensor) -> str:
        name = str(len(self.tensors))
        self.tensors[name] = tensor.detach().resolve_conj().resolve_neg().cpu()
        return name


def _is_odd_key(key: Any) -> bool:
    """Whether equality says too little of a key: 0.0 is -0.0, and what is equal in a tuple may be of another type."""
    return type(key) not in (str, int, bool, bytes, type(None))


def _grad(tensor: torch.Tensor) -> dict[str, bool]:
    return {"grad": True} if tensor.requires_grad else {}


def _check_tensors(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        # Most are sound: this is quicker than a call for each.
        if (
            type(tensor) is not torch.Tensor
            or tensor.layout is not torch.strided
            or tensor.dtype not in SAVABLE_DTYPES
            or tensor.is_nested
            or tensor.is_meta
        ) and (problem := tensor_problem(tensor)) is not None:
            raise CheckpointError(problem)


def _are_alike(tensors: Sequence[torch.Tensor], first: torch.Tensor) -> bool:
    """Whether they can be stacked as they are."""
    dtype, shape, grad, device = first.dtype, first.shape, first.requires_grad, first.device
    return all(
        tensor.dtype is dtype and tensor.requires_grad is grad and tensor.shape == shape and tensor.device == device
        for tensor in tensors
    )


def _kind_of_tensor(tensor: torch.Tensor) -> Hashable:
    return tensor.dtype, tensor.requires_grad, tensor.device


def _check_dtype(dtype: np.dtype[Any]) -> None:
    if not is_plain_dtype(dtype):
        raise CheckpointError(f"expected a plain numpy dtype, found {dtype}")


def _as_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bytes of an array, in C order: uint8 ``[bytes]``; the memory is that of the array where that is possible."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _utf8(texts: Sequence[str]) -> list[bytes]:
    return [
        text.encode("utf-8", "surrogatepass")
        if len(text) < _FAR
        else b"".join(
            text[start : start + _FAR].encode("utf-8", "surrogatepass") for start in range(0, len(text), _FAR)
        )
        for text in texts
    ]


def _as_they_are(values: Sequence[Any]) -> Sequence[Any]:
    return values


def _kind_of(kind: type) -> _Kind:
    """How values of a type are written.

    Raises:
        CheckpointError: they cannot be.
    """
    known = _KINDS.get(kind)
    if known is not None:
        return known
    if issubclass(kind, np.generic):
        return _Kind(kind, _Writer.scalars)
    codec = registry.codec_of(kind)
    if codec is not None:
        return _Kind(codec, lambda writer, values, depth: writer.typed(values, depth, codec))
    if issubclass(kind, torch.Tensor):
        return _TENSOR
    if issubclass(kind, np.ndarray) and not issubclass(kind, np.ma.MaskedArray):
        return _ARRAY
    raise CheckpointError(f"expected values of a registered type, found {kind.__qualname__}; {registry.HINT}")


_TENSOR = _Kind("tensor", _Writer.every_tensor)
_ARRAY = _Kind("array", _Writer.arrays)
_KINDS: dict[type, _Kind] = {
    type(None): _Kind("none", _Writer.none),
    bool: _Kind("bool", _Writer.bools),
    int: _Kind("int", _Writer.ints),
    float: _Kind("float", _Writer.floats),
    complex: _Kind("complex", _Writer.complexes),
    str: _Kind("str", _Writer.texts),
    bytes: _Kind("bytes", _Writer.byte_strings),
    bytearray: _Kind("bytearray", _Writer.byte_arrays),
    list: _Kind("list", _Writer.lists),
    tuple: _Kind("tuple", _Writer.tuples),
    dict: _Kind("dict", _Writer.dicts),
    torch.Tensor: _TENSOR,
    np.ndarray: _ARRAY,
    torch.dtype: _Kind("dtype", _Writer.torch_names),
    torch.device: _Kind("device", _Writer.torch_names),
}
