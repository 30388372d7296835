"""Values that hold no others, as columns: numbers, texts, tensors and arrays. See ``columns``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._plain.savable import SAVABLE_DTYPES, is_plain_dtype, tensor_problem
from asyncbuf._runtime.pieces import PIECE, GiveWay
from asyncbuf.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

VERSION = 1
DOCUMENT = "columns"
_SMALL = 256
_FAR = 1 << 18
_INT64 = np.dtype(np.int64)
# The dtype of numpy scalars of these kinds follows from their type.
_NUMBERS = frozenset("biufc")


class LeafWriter:
    """Makes columns of values that hold no others.

    Attributes:
        tensors: those that the columns name.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._give_way = GiveWay()
        # Which of all tensors that were written one is, by id. What is in _kept keeps its id to itself.
        self._ordinals: dict[int, int] = {}
        self._kept: list[list[torch.Tensor]] = []

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

    def nones(self, values: list[Any], depth: int) -> Any:
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
        return self._arena("str", values, _utf8)

    def byte_strings(self, values: list[Any], depth: int) -> Any:
        """Bytes."""
        return self._arena("bytes", values, _as_they_are)

    def byte_arrays(self, values: list[Any], depth: int) -> Any:
        """Bytearrays."""
        return self._arena("bytearray", values, _as_they_are)

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

    def _arena(self, tag: str, values: list[Any], render: Callable[[Sequence[Any]], Sequence[Any]]) -> Any:
        """The bytes of all values, one after the other, and how many there are of each."""
        parts: list[np.ndarray[Any, Any]] = []
        lengths: list[int] = []
        for piece in self._give_way.pieces(values, PIECE // 4):
            rendered = render(piece)
            sizes = list(map(len, rendered))
            lengths += sizes
            # numpy copies what is large without the interpreter's lock, and Python small things quickly.
            whole = [b"".join(rendered)] if sum(sizes) < _FAR else rendered
            parts.extend(np.frombuffer(each, np.uint8) for each in whole)
        return {tag: self._name(self._joined(parts)), "lengths": self._lengths(lengths)}

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
        new: list[torch.Tensor] = []
        again: list[torch.Tensor] = []
        index: list[int] = []
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
        parts = [torch.cat([_bare(value).detach().reshape(-1) for value in piece]) for piece in self._few(values)]
        return {"tensor": self._name_tensor(torch.cat(parts)), **self._shapes(shapes), **_grad(values[0])}

    def _tensors_of_a_shape(self, values: list[Any]) -> Any:
        self._number(values)
        with torch.no_grad():
            parts = [torch.stack(list(map(_bare, piece))) for piece in self._few(values)]
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

    # -- tensors of the columns ---------------------------------------------------------------------------------------

    def _lengths(self, lengths: list[int]) -> str:
        return self._name(self._numbers(lengths, _INT64))

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


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without what a derived class does."""
    return tensor if type(tensor) is torch.Tensor else tensor.detach().as_subclass(torch.Tensor)


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
