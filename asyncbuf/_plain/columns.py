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
from asyncbuf._plain.column_leaves import DOCUMENT, VERSION, LeafWriter
from asyncbuf._plain.savable import DEPTH
from asyncbuf._runtime.pieces import PIECE
from asyncbuf.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable


def to_columns(values: list[Any], check: Callable[[int], object]) -> dict[str, torch.Tensor]:
    """Write values as columns. May be called in a thread, which gives the interpreter's lock away now and then.

    Args:
        values: anything that ``codec.encode`` takes. They must not change meanwhile.
        check: raises what says where in the value at a position something is that cannot be saved, if there is such a
            thing. Called when there is in one of them.

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
        for position in range(len(values)):
            check(position)
        raise CheckpointError(f"expected values that can be saved: {error}") from error
    document = json.dumps({"version": VERSION, "items": len(values), "column": column}).encode()
    return {DOCUMENT: torch.frombuffer(bytearray(document), dtype=torch.uint8), **writer.tensors}


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


class _Writer(LeafWriter):
    """Makes columns of values of any kinds."""

    def __init__(self) -> None:
        super().__init__()
        self._above: list[_Level] = []

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
        again: set[int] = set()
        for piece in self._give_way.pieces(values) if self._above else ():
            ids = set(map(id, piece))
            again.update(*(ids & level.ids for level in self._above))
        for value in values if again else ():
            if id(value) in again:
                again.discard(id(value))  # it may only be there at several levels
                _check_cycle(value, set(), set())

    def torch_names(self, values: list[Any], depth: int) -> Any:
        """Dtypes, or devices."""
        names = [str(value).removeprefix("torch.") for value in values]
        return {type(values[0]).__name__: self.texts(names, depth)}


def _check_cycle(value: Any, above: set[int], sound: set[int], *, is_made: bool = False) -> None:
    """Look for a container that contains itself.

    Args:
        value: where to look.
        above: the containers that it is in.
        sound: those that were looked into.
        is_made: whether a codec has just made it, so that its id will be that of something else.
    """
    codec = None if type(value) in _KINDS else registry.codec_of(type(value))
    if (codec is None and type(value) not in (list, tuple, dict)) or id(value) in sound:
        return
    if id(value) in above or len(above) > DEPTH:
        raise CheckpointError("expected a tree, found a container that contains itself")
    above.add(id(value))
    inner = value if codec is None else [codec.encode(value)]
    for part in [*inner, *inner.values()] if type(inner) is dict else inner:
        _check_cycle(part, above, sound, is_made=is_made or codec is not None)
    above.discard(id(value))
    if not is_made:
        sound.add(id(value))


def _is_odd_key(key: Any) -> bool:
    """Whether equality says too little of a key: 0.0 is -0.0, and what is equal in a tuple may be of another type."""
    return type(key) not in (str, int, bool, bytes, type(None))


def _kind_of(kind: type) -> _Kind:
    """How values of a type are written.

    Raises:
        CheckpointError: they cannot be.
    """
    known = _KINDS.get(kind)
    if known is not None:
        return known
    if issubclass(kind, np.generic):
        return _Kind(str(kind), _Writer.scalars)
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
    type(None): _Kind("none", _Writer.nones),
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
