"""The way back from columns: the values, or the error that what is in the file is not what ``to_columns`` makes.

How much memory this takes is decided by what is really there. A tensor is used once. Every column has at least one byte
of a tensor for each of its values, which is checked before they are made. So a small file cannot ask for much.
"""

from __future__ import annotations

import itertools
import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._plain import registry
from asyncbuf._plain.column_leaves import DOCUMENT, VERSION
from asyncbuf._plain.dtypes import dtype_named
from asyncbuf._plain.savable import DEPTH, is_plain_name
from asyncbuf._runtime.pieces import PIECE, GiveWay
from asyncbuf.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointVersionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from asyncbuf._plain.integers import Int64Array

# A level of a value is at most a column of several kinds, one of a registered type, and one of a container.
_LEVELS = 3 * DEPTH
_MOST_AXES = 64
_FEW = PIECE // 16
# As torch.unbind and torch.split, but each part has memory of its own. Their type stubs say that they return nothing.
_unbind_copy: Callable[[torch.Tensor], Sequence[torch.Tensor]] = vars(torch)["unbind_copy"]
_split_copy: Callable[[torch.Tensor, list[int]], Sequence[torch.Tensor]] = vars(torch)["split_with_sizes_copy"]


def from_columns(
    tensors: Mapping[str, torch.Tensor],
    what: str,
    codec_named: Callable[[str], registry.Codec | None] = registry.codec_named,
) -> list[Any]:
    """Read values that ``to_columns`` wrote. May be called in a thread, as that.

    Args:
        tensors: what it returned. They stay the caller's: values have memory of their own, each for itself.
        what: where they stand, for messages.
        codec_named: says what makes values of a registered type.

    Raises:
        CheckpointCorruptError: it is not what ``to_columns`` returns, or names a type that is not registered.
        CheckpointVersionError: it is of a later version.
    """
    try:
        document = json.loads(tensors[DOCUMENT].numpy().tobytes())
        if type(document) is not dict or type(document.get("version")) is not int:
            raise CheckpointCorruptError("expected a document with a version, found another one")
        if not 1 <= document["version"] <= VERSION:
            raise CheckpointVersionError(
                f"{what}: expected columns of a version from 1 to {VERSION}, found {document['version']}"
            )
        return _Reader(tensors, codec_named).all(document)
    except CheckpointVersionError:
        raise
    except CheckpointCorruptError as error:
        raise CheckpointCorruptError(f"{what}: {error}") from error
    except Exception as error:
        raise CheckpointCorruptError(f"{what}: expected columns of values, found {error!r}") from error


class _Reader:
    """Reads columns.

    Args:
        tensors: those that they name, and the document.
        codec_named: as in ``from_columns``.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], codec_named: Callable[[str], registry.Codec | None]
    ) -> None:
        self._codec_named = codec_named
        self._left = {name: tensor for name, tensor in tensors.items() if name != DOCUMENT}
        self._seen: list[torch.Tensor] = []
        self._give_way = GiveWay()
        self._level = 0

    def all(self, document: dict[str, Any]) -> list[Any]:
        """The values of a document."""
        count = document.get("items")
        if document.keys() != {"version", "items", "column"} or type(count) is not int or count < 0:
            raise CheckpointCorruptError(f"expected items in a column, found {sorted(document)} and {count!r}")
        values = self.column(document["column"], count)
        if self._left:
            raise CheckpointCorruptError(f"expected no other tensors than those of columns, found {sorted(self._left)}")
        return values

    def column(self, node: Any, count: int) -> list[Any]:
        """The values of a column."""
        if node is None and count == 0:
            return []
        if type(node) is not dict or not node or count == 0:
            raise CheckpointCorruptError(f"expected a column of {count} values, found {_shown(node)}")
        tag = next(iter(node))
        read, needed, optional = _READERS.get(tag, (None, (), ()))
        if read is None or not {tag, *needed} <= node.keys() <= {tag, *needed, *optional}:
            raise CheckpointCorruptError(f"expected a column of a known kind, found {_shown(node)}")
        if self._level >= _LEVELS:
            raise CheckpointCorruptError(f"expected at most {_LEVELS} levels of columns, found more")
        self._level += 1
        try:
            values: list[Any] = read(self, node, count)
            return values
        finally:
            self._level -= 1

    # -- tensors of the columns ---------------------------------------------------------------------------------------

    def _tensor(self, name: Any) -> torch.Tensor:
        """A tensor that really has as many numbers as it says."""
        tensor = self._left.pop(name, None) if type(name) is str else None
        if tensor is None:
            raise CheckpointCorruptError(f"expected a tensor that no other column has, found the name {_shown(name)}")
        if tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() < tensor.nbytes:
            raise CheckpointCorruptError(f"expected a dense tensor, found {name!r} of {tensor.layout}")
        return tensor.detach()

    def _array(self, name: Any, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> np.ndarray[Any, Any]:
        """A tensor as an array, of a dtype; of one axis, or of a shape."""
        tensor = self._tensor(name)
        if tensor.dtype is not dtype or (tensor.ndim != 1 if shape is None else tensor.shape != shape):
            wanted = "[n]" if shape is None else list(shape)
            raise CheckpointCorruptError(
                f"expected a tensor {name!r} of {dtype} {wanted}, found {tensor.dtype} {list(tensor.shape)}"
            )
        found: np.ndarray[Any, Any] = tensor.contiguous().numpy()
        return found

    def _bytes(self, name: Any, nbytes: int) -> np.ndarray[Any, Any]:
        return self._array(name, torch.uint8, (nbytes,))

    def _sizes(self, name: Any, count: int) -> tuple[list[int], int]:
        """Numbers that are not negative, and their sum."""
        found: Int64Array = self._array(name, torch.int64, (count,))
        if count and (found.min() < 0 or int(found.max()) * count >= 2**63):
            raise CheckpointCorruptError(f"expected lengths, found numbers from {found.min()} to {found.max()}")
        return self._listed(found), int(found.sum())

    def _marks(self, node: dict[str, Any], count: int, *, are_needed: bool) -> None:
        """See that there is a byte for each value, where the values have none themselves."""
        if are_needed != ("marks" in node):
            raise CheckpointCorruptError("expected marks for values that are empty, and only for those")
        if are_needed:
            self._bytes(node["marks"], count)

    def _listed(self, array: np.ndarray[Any, Any]) -> list[Any]:
        """``array.tolist()``."""
        found: list[Any] = []
        for start in range(0, len(array), PIECE):
            found += array[start : start + PIECE].tolist()
            self._give_way()
        return found

    def _spans(self, lengths: list[int]) -> Iterator[list[tuple[int, int]]]:
        """Start and end of each of what lies one after the other, some at a time."""
        start = 0
        for piece in self._give_way.pieces(lengths, _FEW):
            ends = list(itertools.accumulate(piece, initial=start))
            start = ends[-1]
            yield list(itertools.pairwise(ends))

    # -- numbers and text ---------------------------------------------------------------------------------------------

    def none(self, node: dict[str, Any], count: int) -> list[Any]:
        """Nones."""
        self._bytes(node["none"], count)
        return [None] * count

    def bools(self, node: dict[str, Any], count: int) -> list[Any]:
        """Bools."""
        found = self._bytes(node["bool"], count)
        if found.max() > 1:
            raise CheckpointCorruptError(f"expected bools as 0 and 1, found {found.max()}")
        return self._listed(found.view(np.bool_))

    def ints(self, node: dict[str, Any], count: int) -> list[Any]:
        """Ints."""
        if type(node["int"]) is str:
            return self._listed(self._array(node["int"], torch.int64, (count,)))
        return self._give_way.mapped(lambda text: int(text, 16), self._of_kind(node["int"], "str", count))

    def floats(self, node: dict[str, Any], count: int) -> list[Any]:
        """Floats."""
        return self._listed(self._array(node["float"], torch.float64, (count,)))

    def complexes(self, node: dict[str, Any], count: int) -> list[Any]:
        """Complex numbers."""
        pairs = self._array(node["complex"], torch.float64, (count, 2))
        return self._listed(pairs.reshape(-1).view(np.complex128))

    def texts(self, node: dict[str, Any], count: int) -> list[Any]:
        """Strings."""
        lengths, total = self._sizes(node["lengths"], count)
        content = _view(self._bytes(node["str"], total))
        found: list[Any] = []
        for spans in self._spans(lengths):
            first, last = spans[0][0], spans[-1][1]
            part = content[first:last].tobytes()
            if part.isascii() and last - first < 2**20:
                text = part.decode("ascii")
                found += [text[start - first : end - first] for start, end in spans]
            else:
                found += [_decoded(content[start:end]) for start, end in spans]
        return found

    def byte_strings(self, node: dict[str, Any], count: int) -> list[Any]:
        """Bytes, or bytearrays."""
        tag = next(iter(node))
        make: Callable[[memoryview], Any] = bytes if tag == "bytes" else bytearray
        lengths, total = self._sizes(node["lengths"], count)
        content = _view(self._bytes(node[tag], total))
        return [make(content[start:end]) for spans in self._spans(lengths) for start, end in spans]

    def scalars(self, node: dict[str, Any], count: int) -> list[Any]:
        """Numpy scalars."""
        dtype = _dtype(node["dtype"])
        if not dtype.itemsize:
            raise CheckpointCorruptError(f"expected the dtype of scalars, found {dtype}")
        array = self._bytes(node["scalar"], count * dtype.itemsize).view(dtype)
        found: list[Any] = []
        for start in range(0, count, PIECE):
            found.extend(iter(array[start : start + PIECE]))  # scalars
            self._give_way()
        return found

    # -- tensors and arrays -------------------------------------------------------------------------------------------

    def tensors(self, node: dict[str, Any], count: int) -> list[Any]:
        """Tensors, each in memory of its own."""
        tensor = self._tensor(node["tensor"])
        found = self._of_any_shape(tensor, node, count) if "ndim" in node else self._of_a_shape(tensor, node, count)
        if "grad" in node:
            if node["grad"] is not True or not (tensor.is_floating_point() or tensor.is_complex()):
                raise CheckpointCorruptError(f"expected tensors that can require gradients, found {tensor.dtype}")
            for each in found:
                each.requires_grad_()
        self._seen += found
        return found

    def _of_a_shape(self, tensor: torch.Tensor, node: dict[str, Any], count: int) -> list[torch.Tensor]:
        if not tensor.ndim or len(tensor) != count:
            raise CheckpointCorruptError(f"expected {count} tensors, found {list(tensor.shape)}")
        self._marks(node, count, are_needed=not tensor.numel())
        found: list[torch.Tensor] = []
        for start in range(0, count, _FEW):
            # A row of the whole would keep all of it in memory.
            found += _unbind_copy(tensor[start : start + _FEW])
            self._give_way()
        return found

    def _of_any_shape(self, tensor: torch.Tensor, node: dict[str, Any], count: int) -> list[torch.Tensor]:
        self._marks(node, count, are_needed=False)
        shapes, lengths = self._shapes(node, count)
        if tensor.ndim != 1 or len(tensor) != sum(lengths):
            raise CheckpointCorruptError(f"expected {sum(lengths)} numbers of tensors, found {list(tensor.shape)}")
        found: list[torch.Tensor] = []
        for spans in self._spans(lengths):
            part = tensor[spans[0][0] : spans[-1][1]]
            found += _split_copy(part, [end - start for start, end in spans])
        return [each.reshape(shape) for each, shape in zip(found, shapes, strict=True)]

    def arrays(self, node: dict[str, Any], count: int) -> list[Any]:
        """Numpy arrays, each in memory of its own."""
        dtype = _dtype(node["dtype"])
        if "ndim" in node:
            return self._arrays_of_any_shape(dtype, node, count)
        shape = node.get("shape")
        if type(shape) is not list or len(shape) > _MOST_AXES or any(type(n) is not int or n < 0 for n in shape):
            raise CheckpointCorruptError(f"expected the shape of arrays, found {_shown(shape)}")
        nbytes = math.prod(shape) * dtype.itemsize
        self._marks(node, count, are_needed=not nbytes)
        content = self._bytes(node["array"], count * nbytes)
        if not nbytes:
            return [np.empty(shape, dtype) for _ in range(count)]
        whole = content.view(dtype).reshape(count, *shape)
        # With the dots, what has no axes is still an array.
        return self._give_way.mapped(lambda place: whole[place, ...].copy(), range(count))

    def _arrays_of_any_shape(self, dtype: np.dtype[Any], node: dict[str, Any], count: int) -> list[Any]:
        self._marks(node, count, are_needed=False)
        shapes, lengths = self._shapes(node, count)
        if "shape" in node or not dtype.itemsize:
            raise CheckpointCorruptError(f"expected the shapes of arrays of {dtype}, found several")
        content = self._bytes(node["array"], sum(lengths) * dtype.itemsize).view(dtype)
        rows = (content[start:end].copy() for spans in self._spans(lengths) for start, end in spans)
        return [row.reshape(shape) for row, shape in zip(rows, shapes, strict=True)]

    def _shapes(self, node: dict[str, Any], count: int) -> tuple[list[tuple[int, ...]], list[int]]:
        """Shapes, and how many numbers each has."""
        axes, total = self._sizes(node["ndim"], count)
        if max(axes) > _MOST_AXES or "sizes" not in node:
            raise CheckpointCorruptError(f"expected shapes of at most {_MOST_AXES} axes, found {max(axes)}")
        sizes, _ = self._sizes(node["sizes"], total)
        shapes = [tuple(sizes[start:end]) for spans in self._spans(axes) for start, end in spans]
        return shapes, self._give_way.mapped(math.prod, shapes)

    def again(self, node: dict[str, Any], count: int) -> list[Any]:
        """Tensors that came before."""
        places = self._array(node["again"], torch.int64, (count,))
        if places.min() < 0 or places.max() >= len(self._seen):
            raise CheckpointCorruptError(
                f"expected one of {len(self._seen)} tensors before, found numbers up to {places.max()}"
            )
        return [self._seen[place] for place in self._listed(places)]

    # -- containers ---------------------------------------------------------------------------------------------------

    def lists(self, node: dict[str, Any], count: int) -> list[Any]:
        """Lists."""
        lengths, total = self._sizes(node["lengths"], count)
        elements = self.column(node["list"], total)
        return [elements[start:end] for spans in self._spans(lengths) for start, end in spans]

    def tuples(self, node: dict[str, Any], count: int) -> list[Any]:
        """Tuples."""
        lengths, total = self._sizes(node["lengths"], count)
        elements = self.column(node["tuple"], total)
        return [tuple(elements[start:end]) for spans in self._spans(lengths) for start, end in spans]

    def dicts(self, node: dict[str, Any], count: int) -> list[Any]:
        """Dicts of the same keys."""
        nodes = _list(node["dict"])
        self._marks(node, count, are_needed=not nodes)
        columns = [self.column(column, count) for column in nodes]
        keys = self.column(node["keys"], len(nodes))
        if len(set(keys)) != len(keys):
            raise CheckpointCorruptError("expected the keys of dicts, each once, found one twice")
        if not keys:
            return [{} for _ in range(count)]
        found: list[Any] = []
        rows = zip(*columns, strict=True)
        while part := [dict(zip(keys, row, strict=True)) for row in itertools.islice(rows, _FEW)]:
            found += part
            self._give_way()
        return found

    def maps(self, node: dict[str, Any], count: int) -> list[Any]:
        """Dicts of any keys."""
        lengths, total = self._sizes(node["lengths"], count)
        values = self.column(node["map"], total)
        keys = self.column(node["keys"], total)
        found = [
            dict(zip(keys[start:end], values[start:end], strict=True))
            for spans in self._spans(lengths)
            for start, end in spans
        ]
        if any(map(int.__ne__, map(len, found), lengths)):
            raise CheckpointCorruptError("expected the keys of a dict, each once, found one twice")
        return found

    def typed(self, node: dict[str, Any], count: int) -> list[Any]:
        """Values of a registered type."""
        codec = self._codec_named(node["type"]) if type(node["type"]) is str else None
        if codec is None:
            raise CheckpointMismatchError(registry.unknown(node["type"]))
        return self._give_way.mapped(codec.decode, self.column(node["value"], count))

    def torch_names(self, node: dict[str, Any], count: int) -> list[Any]:
        """Dtypes, or devices."""
        tag = next(iter(node))
        make: Callable[[str], Any] = dtype_named if tag == "dtype" else torch.device
        return list(map(make, self._of_kind(node[tag], "str", count)))

    def _of_kind(self, node: Any, tag: str, count: int) -> list[Any]:
        if type(node) is not dict or next(iter(node), None) != tag:
            raise CheckpointCorruptError(f"expected a column of {tag}, found {_shown(node)}")
        return self.column(node, count)

    def mixed(self, node: dict[str, Any], count: int) -> list[Any]:
        """Values of several kinds."""
        nodes = _list(node["columns"])
        dtype = torch.uint8 if len(nodes) <= 256 else torch.int32
        index = self._array(node["mixed"], dtype, (count,))
        if index.min() < 0 or index.max() >= len(nodes):
            raise CheckpointCorruptError(f"expected numbers of {len(nodes)} columns, found {index.max()}")
        counts = np.bincount(index, minlength=len(nodes)).tolist()
        columns = [self.column(column, number) for column, number in zip(nodes, counts, strict=True)]
        next_of = [iter(column).__next__ for column in columns]
        found: list[Any] = []
        for piece in self._give_way.pieces(self._listed(index)):
            found += [next_of[place]() for place in piece]
        return found


def _list(node: Any) -> list[Any]:
    if type(node) is not list:
        raise CheckpointCorruptError(f"expected a list of columns, found {_shown(node)}")
    return node


def _dtype(name: Any) -> np.dtype[Any]:
    if type(name) is not str or not is_plain_name(name):
        raise CheckpointCorruptError(f"expected a plain numpy dtype, found {_shown(name)}")
    return np.dtype(name)


def _view(array: np.ndarray[Any, Any]) -> memoryview:
    return array.data


def _decoded(content: memoryview) -> str:
    return content.tobytes().decode("utf-8", "surrogatepass")


def _shown(node: Any) -> str:
    if type(node) is dict:
        return f"a dict of {[str(key)[:20] for key in itertools.islice(node, 4)]}"
    return f"{type(node).__name__} {str(node)[:40]}" if not isinstance(node, list) else "a list"


# The reader of each kind, what must stand beside its tag, and what may.
_Read = Any
_READERS: dict[str, tuple[_Read, Sequence[str], Sequence[str]]] = {
    "none": (_Reader.none, (), ()),
    "bool": (_Reader.bools, (), ()),
    "int": (_Reader.ints, (), ()),
    "float": (_Reader.floats, (), ()),
    "complex": (_Reader.complexes, (), ()),
    "str": (_Reader.texts, ("lengths",), ()),
    "bytes": (_Reader.byte_strings, ("lengths",), ()),
    "bytearray": (_Reader.byte_strings, ("lengths",), ()),
    "scalar": (_Reader.scalars, ("dtype",), ()),
    "tensor": (_Reader.tensors, (), ("grad", "marks", "ndim", "sizes")),
    "array": (_Reader.arrays, ("dtype",), ("shape", "marks", "ndim", "sizes")),
    "again": (_Reader.again, (), ()),
    "list": (_Reader.lists, ("lengths",), ()),
    "tuple": (_Reader.tuples, ("lengths",), ()),
    "dict": (_Reader.dicts, ("keys",), ("marks",)),
    "map": (_Reader.maps, ("keys", "lengths"), ()),
    "type": (_Reader.typed, ("value",), ()),
    "dtype": (_Reader.torch_names, (), ()),
    "device": (_Reader.torch_names, (), ()),
    "mixed": (_Reader.mixed, ("columns",), ()),
}
