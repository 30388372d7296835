"""Fixed data as a storage: read when batches are made, never written, and not saved."""

from __future__ import annotations

import functools
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np
import torch

from asyncbuf._plain import tree
from asyncbuf._plain.codec import encode
from asyncbuf._plain.savable import tensor_problem
from asyncbuf._plain.state import fields, same
from asyncbuf._runtime.arguments import shown
from asyncbuf._runtime.threads import PART_BYTES
from asyncbuf.errors import CheckpointCorruptError, ReadOnlyError, SchemaError
from asyncbuf.storage._fixed_data import Subset, are_columns, digest, length_of, unwrapped
from asyncbuf.storage._frozen import InMemoryRows
from asyncbuf.storage._leaf import Field
from asyncbuf.storage._stacking import stacked
from asyncbuf.storage.base import GatherJobs, Prepared, Runs, Storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from asyncbuf._plain.integers import Int64Array
    from asyncbuf.batch import Draw
    from asyncbuf.rows import RowRange
    from asyncbuf.storage._frozen import Frozen

# Reading that takes a millisecond is shared by as many threads as a copy of so many bytes.
_BYTES_PER_SECOND = 1000 * PART_BYTES
# Items that are read faster are read by one thread: several would only wait for the lock of the interpreter.
_QUICK = 50e-6
_MOST = 1 << 16
_KINDS = "biufc"


class _FixedStorage(Storage):
    """What both kinds have in common: all rows are there from the start, and stay as they are.

    A checkpoint has a description of the data and not the data: it goes on over the same data only.
    """

    is_fixed: ClassVar[bool] = True

    def __init__(self, data: Any) -> None:
        super().__init__(length_of(data))
        self._data = data.data if isinstance(data, Subset) else data
        self._indices: Int64Array | None = data.indices if isinstance(data, Subset) else None
        self._digest = digest(self._indices)

    def _places(self, rows: torch.Tensor) -> torch.Tensor:
        """Where the items of some rows are in the data."""
        return rows if self._indices is None else torch.from_numpy(self._indices[rows.numpy()])

    def description(self) -> dict[str, Any]:
        """What the data is like, as plain data."""
        raise NotImplementedError

    def prepare(self, items: Any) -> Prepared:
        """Refuse to be written to.

        Raises:
            ReadOnlyError: always.
        """
        self._refuse("written to")

    def prepare_one(self, item: Any) -> Prepared:
        """Refuse to be written to."""
        self._refuse("written to")

    def write(self, prepared: Prepared, runs: Sequence[RowRange]) -> None:
        """Refuse to be written to."""
        self._refuse("written to")

    def clear(self) -> None:
        """Refuse to be emptied."""
        self._refuse("emptied")

    def _refuse(self, what: str) -> NoReturn:
        raise ReadOnlyError(
            f"expected no write to a buffer of fixed data, which has its {self.capacity} items: it cannot be {what}; "
            "remove() takes single items out"
        )

    def state_dict(self) -> dict[str, Any]:
        """The description of the data."""
        return {"dataset": {"length": self.capacity, **self.description(), "indices": self._digest}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See that the data is like that of the checkpoint."""
        self.load_rows(state, iter(()))

    def freeze(self) -> Frozen:
        """The description, which takes no time."""
        return InMemoryRows(encode(self.state_dict()))

    def load_rows(self, meta: Any, chunks: Iterator[dict[str, torch.Tensor]]) -> Callable[[], None]:
        """See that the data is like that of the checkpoint.

        Raises:
            CheckpointMismatchError: it is not.
        """
        (found,) = fields(meta, "storage", dataset=dict)
        expected = self.state_dict()["dataset"]
        if found.keys() != expected.keys():
            raise CheckpointCorruptError(f"storage: expected the entries {sorted(expected)}, found {sorted(found)}")
        for name, value in expected.items():
            same(found[name], value, f"storage: {name} of the data set")
        for _ in chunks:
            raise CheckpointCorruptError("storage: expected no chunks for fixed data, found some")
        return _nothing

    def rows_in(self, meta: Any) -> int | None:
        """Number of items."""
        return self.capacity


def _nothing() -> None:
    pass


class DatasetStorage(_FixedStorage):
    """The items of a dataset, read one by one in threads, when batches are made.

    Args:
        data: an object with ``__len__`` and ``__getitem__``, such as a ``torch.utils.data.Dataset``, a
            ``datasets.Dataset`` or a list of items. If it has ``__getitems__``, that is called with a list of numbers
            and returns as many items. Several threads may read beside each other.

    Raises:
        TypeError: it has no length or no items.
        ValueError: it is empty.
    """

    runs = Runs.THREAD

    def __init__(self, data: Any) -> None:
        if are_columns(data.data if isinstance(data, Subset) else data):
            raise TypeError("data: expected a data set of items, found tensors or arrays")
        super().__init__(data)
        self._stacks = False
        self._seconds: float | None = None  # the least that reading an item of a batch took so far

    def description(self) -> dict[str, Any]:
        """Its class, and its columns where it says them."""
        features = getattr(self._data, "features", None)
        names = getattr(self._data, "column_names", None)
        found = {str(name): str(kind) for name, kind in features.items()} if isinstance(features, dict) else {}
        if not found and isinstance(names, list):
            found = {str(name): "" for name in names}
        return {"kind": type(self._data).__qualname__, "fields": [[name, kind] for name, kind in found.items()]}

    def gather(self, indices: torch.Tensor) -> Any:
        """The items: stacked, or in a list for a ``collate_fn``.

        Raises:
            SchemaError: they are to be stacked, and differ in structure.
        """
        return self._together(self._read(indices))

    def _together(self, items: list[Any]) -> Any:
        return stacked(items) if self._stacks else items

    def _read(self, indices: torch.Tensor) -> list[Any]:
        places = self._places(indices).tolist()
        several = getattr(self._data, "__getitems__", None)
        start = time.perf_counter()
        items = [self._data[place] for place in places] if several is None else list(several(places))
        took = (time.perf_counter() - start) / len(places)
        self._seconds = took if self._seconds is None else min(self._seconds, took)
        if len(items) != len(places):
            raise ValueError(
                f"{type(self._data).__name__}.__getitems__: expected {len(places)} items, found {len(items)}"
            )
        return items

    def begin_gather(self, draw: Draw, *, inline: bool, parts: int) -> GatherJobs:
        """Let threads read some of the items each. The last one to end puts them together."""
        pieces = draw.indices.tensor_split(max(1, min(parts, len(draw.indices))))
        found: list[list[Any]] = [[] for _ in pieces]
        whole: list[Any] = []
        others = threading.Semaphore(len(pieces) - 1)

        def read(number: int) -> None:
            found[number] = self._read(pieces[number])
            if not others.acquire(blocking=False):
                whole.append(self._together([item for items in found for item in items]))

        return GatherJobs([functools.partial(read, number) for number in range(len(pieces))], lambda: whole[0])

    def gather_nbytes(self, count: int) -> int:
        """Bytes that take as long to copy as the items to read, if that can be shared."""
        seconds = self._seconds or 0.0
        return int(count * seconds * _BYTES_PER_SECOND) if seconds >= _QUICK and count < _MOST else 0

    def columns(self, prepared: Prepared, paths: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
        """Refuse: every item would have to be read.

        Raises:
            SchemaError: always.
        """
        raise SchemaError(
            f"expected tensors or arrays for a sampler that asks for {list(paths)} of all items, found a "
            f"{type(self._data).__name__}, whose items are read one by one"
        )

    def will_collate(self, whether: bool) -> None:
        """Stack items in the threads that read them, or leave that to a ``collate_fn`` from now on."""
        self._stacks = whether

    def collate(self, gathered: Any) -> Any:
        """Stack items leaf by leaf.

        Raises:
            SchemaError: the items differ in structure.
        """
        return stacked(gathered)

    @property
    def needs_collate(self) -> bool:
        """Whether it gathers lists of items."""
        return not self._stacks


class ColumnStorage(_FixedStorage):
    """Tensors and arrays that are in memory, or memory-mapped, already: rows are gathered from them as they are.

    Args:
        data: a tensor, an array, or a tree of those (dict, tuple, TensorDict, ...), each ``[items, ...]``. They must
            not be changed as long as a buffer reads them.

    Raises:
        TypeError: a leaf is of another kind.
        ValueError: the leaves differ in length, or there is no item.
    """

    trusted: ClassVar[bool] = True

    def __init__(self, data: Any) -> None:
        whole = data.data if isinstance(data, Subset) else data
        if not are_columns(whole):
            raise TypeError(f"data: expected tensors, arrays or trees of those, found {shown(data)}")
        super().__init__(data)
        leaves, self._spec = tree.flatten(whole, batched=True)
        paths = self._spec.paths()
        self._columns = [_Column(leaf, path) for leaf, path in zip(leaves, paths, strict=True)]
        self._fields = [[path, *column.kind] for path, column in zip(paths, self._columns, strict=True)]
        self._row_nbytes = sum(column.row_nbytes for column in self._columns)
        if any(column.is_mapped for column in self._columns):
            self.runs = Runs.THREAD  # a page of the file may have to be read

    def description(self) -> dict[str, Any]:
        """Names, dtypes and shapes of the columns."""
        return {"kind": str(self._spec), "fields": self._fields}

    def gather(self, indices: torch.Tensor) -> Any:
        """Collect rows into tensors ``[batch, ...]`` of their own."""
        places = self._places(indices)
        return tree.unflatten(self._spec, [column.take(places) for column in self._columns], batch=len(places))

    def begin_gather(self, draw: Draw, *, inline: bool, parts: int) -> Any:
        """Let several threads copy into the memory of one batch, each a run of its rows."""
        if inline or parts == 1:
            return super().begin_gather(draw, inline=inline, parts=parts)
        places = self._places(draw.indices)
        leaves = [column.room(len(places)) for column in self._columns]

        def copy(part: torch.Tensor, start: int) -> None:
            for column, leaf in zip(self._columns, leaves, strict=True):
                column.take(part, out=leaf[start : start + len(part)])

        pieces = places.tensor_split(min(parts, len(places)))
        starts = np.cumsum([0, *map(len, pieces)]).tolist()
        jobs = [functools.partial(copy, *each) for each in zip(pieces, starts, strict=False)]
        return GatherJobs(jobs, lambda: tree.unflatten(self._spec, leaves, batch=len(places)))

    def columns(self, prepared: Prepared, paths: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
        """Columns of all items, for a sampler: arrays ``[items, ...]`` by path, perhaps over the data itself.

        Raises:
            SchemaError: there is no such column.
        """
        there = self._spec.paths()
        if missing := [path for path in paths if path not in there]:
            raise SchemaError(f"expected data with {missing}, which the sampler asks for; found {there}")
        return {path: self._columns[there.index(path)].values(self._indices) for path in paths}

    def gather_nbytes(self, count: int) -> int:
        """Bytes that gathering ``count`` rows moves."""
        return count * self._row_nbytes


class _Column:
    """One leaf of the data.

    Attributes:
        kind: dtype and shape of what an item has of it, in words.
        row_nbytes: bytes of that.
        is_mapped: whether it may have to be read from a disk.
    """

    def __init__(self, leaf: Any, path: str) -> None:
        self.is_mapped = isinstance(leaf, np.memmap) or type(leaf).__name__ == "MemoryMappedTensor"
        if isinstance(leaf, np.ndarray):
            if leaf.dtype.kind not in _KINDS:
                raise TypeError(f"data: expected numbers at {path!r}, found an array of dtype {leaf.dtype}")
            self._array: np.ndarray[Any, Any] | None = leaf
            self._tensor = torch.empty(0)
            if leaf.flags.writeable and leaf.dtype.isnative and min(leaf.strides, default=0) >= 0:
                self._tensor, self._array = torch.from_numpy(np.asarray(leaf)), None
        else:
            problem = tensor_problem(leaf)
            if problem is None and leaf.device.type != "cpu":
                problem = f"a tensor on {leaf.device} (device= moves batches there)"
            if problem is not None:
                raise TypeError(f"data: expected dense tensors on the CPU at {path!r}, found {problem}")
            self._tensor, self._array = leaf.detach().as_subclass(torch.Tensor), None
        sample = self.take(torch.zeros(1, dtype=torch.int64, device="cpu"))
        self._dtype, self._shape = sample.dtype, sample.shape[1:]
        self.kind = [str(sample.dtype), list(self._shape)]
        self.row_nbytes = sample.nbytes

    def take(self, places: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Rows in memory of their own: ``[places, ...]``."""
        if self._array is None:
            return torch.index_select(self._tensor, 0, places, out=out)
        taken = self._array[places.numpy()]
        found = torch.from_numpy(taken if taken.dtype.isnative else taken.astype(taken.dtype.newbyteorder("=")))
        return found if out is None else out.copy_(found)

    def values(self, places: Int64Array | None) -> np.ndarray[Any, Any]:
        """The values of some items or of all, as numpy has them."""
        if self._array is not None:
            return self._array if places is None else self._array[places]
        rows = self._tensor if places is None else self.take(torch.from_numpy(places))
        is_carried = Field("", self._dtype, ()).is_carried  # a dtype that numpy lacks
        found: np.ndarray[Any, Any] = (rows.to(torch.float32) if is_carried else rows).numpy()
        return found

    def room(self, count: int) -> torch.Tensor:
        """Memory for so many rows."""
        return torch.empty(count, *self._shape, dtype=self._dtype, device="cpu")


def storage_of(data: Any) -> DatasetStorage | ColumnStorage:
    """The storage for fixed data of either kind.

    Raises:
        TypeError: it is none of both.
        ValueError: there is no item, or columns differ in length.
    """
    data = unwrapped(data)
    length_of(data)
    return ColumnStorage(data) if are_columns(data.data if isinstance(data, Subset) else data) else DatasetStorage(data)
