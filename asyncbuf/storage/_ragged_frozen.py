"""Items with sequences at one point of the history: read in chunks, and taken in again."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._plain.codec import dtype_name, dtype_named
from asyncbuf._plain.treespec import spec_from_plain, spec_to_plain
from asyncbuf._runtime.spare_memory import SpareMemory
from asyncbuf._runtime.summary import summary
from asyncbuf.errors import CheckpointCorruptError, CheckpointMismatchError
from asyncbuf.storage._frozen import Chunk
from asyncbuf.storage._leaf import Field, as_bits
from asyncbuf.storage._ragged_items import Items, Structure
from asyncbuf.storage._ragged_values import Packed
from asyncbuf.storage._row_memory import CHUNK_BYTES, FrozenRows, parsed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from asyncbuf.rows import Int64Array
    from asyncbuf.storage._frozen import CopyOnWrite
    from asyncbuf.storage._ragged_items import Group
    from asyncbuf.storage._ragged_memory import RaggedMemory

# How finely it is noted which rows were written, and how many are copied aside together: so many rows, or more if there
# would be too many steps to note.
STEP_ROWS = 16
_MOST_STEPS = 1 << 15
# A chunk has at most so many rows, and fewer where they are large: a half, a quarter and so on.
_CHUNK_ROWS = 4096
_SPARE_CHUNKS = 8


class FrozenRagged:
    """Rows and their sequences that are kept as they were.

    Places of sequences are kept with the rows. The sequences themselves stay where they are for as long as this holds
    their pages and ``kept`` is alive.

    Args:
        memory: where they are.
        groups: which sequences have the same lengths.
        kept: the blocks of the rows, and behind them the places of each arena.
        count: number of rows.
        step: as ``step_of``.
        identity: says that of the chunk of some rows.
    """

    def __init__(
        self,
        memory: RaggedMemory,
        groups: Sequence[Group],
        kept: CopyOnWrite,
        count: int,
        step: int,
        identity: Callable[[int, int], str],
    ) -> None:
        structure = memory.structure
        self._rows = FrozenRows(memory.rows, kept, count)
        self._kept = kept
        self._count = count
        self._step = step
        self._identity = identity
        self._blocks = len(memory.rows.blocks)
        self._token_nbytes = [arena.token_nbytes for arena in memory.arenas]
        self._row_nbytes = sum(field.nbytes for field in structure.fixed)
        # By group and field. Lists of their own: the arenas go on with theirs.
        self._pages = [[list(pages) for pages in arena.values] for arena in memory.arenas]
        self._fields = structure.ragged
        self._names = value_names([field["name"] for field in self._rows.meta["fields"]], structure.ragged)
        self.nbytes = self._rows.nbytes + sum(arena.live * arena.token_nbytes for arena in memory.arenas)
        self.meta = {
            "rows": self._rows.meta,
            "structure": spec_to_plain(structure.spec),
            "groups": [{"name": group.name, "paths": list(group.paths)} for group in groups],
            "sequences": [
                {"name": name, "path": field.path, "dtype": dtype_name(field.dtype), "shape": list(field.shape)}
                for name, field in zip(self._names, structure.ragged, strict=True)
            ],
        }

    def chunks(self) -> Iterator[Chunk]:
        """Some thousand rows or some megabytes at a time: ``{field: [rows, *item], sequences: [tokens, *token]}``."""
        spare = SpareMemory(_SPARE_CHUNKS)
        for first in range(0, self._count, _CHUNK_ROWS):
            last = min(first + _CHUNK_ROWS, self._count)
            ends = np.zeros(_CHUNK_ROWS + 1, np.int64)
            ends[1 : last - first + 1] = self._row_nbytes
            for places, nbytes in zip(self._places(first, last), self._token_nbytes, strict=True):
                ends[1 : last - first + 1] += places[:, 2] * nbytes
            for start, stop in _halves(np.cumsum(ends), 0, _CHUNK_ROWS, self._step):
                start, stop = first + start, min(first + stop, last)
                if start < stop:
                    yield Chunk(self._identity(start, stop), functools.partial(self._tensors, start, stop, spare))

    def _places(self, start: int, stop: int) -> list[Int64Array]:
        """Where sequences are, of each group: int64 ``[rows, 3]``."""
        found: list[list[Any]] = [[] for _ in self._pages]

        def copy(first: int, segment: list[Any]) -> None:
            for places, block in zip(found, segment[self._blocks :], strict=True):
                places.append(block.copy())

        self._kept.visit(start, stop, copy)
        return [np.concatenate(places)[: stop - start] for places in found]

    def _tensors(self, start: int, stop: int, spare: SpareMemory) -> dict[str, torch.Tensor]:
        tensors = self._rows.columns(start, stop, spare)
        number = 0
        for places, fields in zip(self._places(start, stop), self._pages, strict=True):
            pieces = _pieces(places)
            total = sum(count for _, _, count in pieces)
            for pages in fields:
                field = self._fields[number]
                out, at = np.empty((total, *field.shape), field.bits), 0
                for page, first, count in pieces:
                    out[at : at + count] = pages[page][first : first + count]
                    at += count
                tensors[self._names[number]] = field.typed(torch.from_numpy(out))
                number += 1
        return tensors


def step_of(capacity: int) -> int:
    """How many rows are noted and copied aside together."""
    step = STEP_ROWS
    while step < _CHUNK_ROWS and capacity > step * _MOST_STEPS:
        step *= 2
    return step


def _halves(ends: Int64Array, start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """Cut rows in halves until no piece is too large. So what changes in one half does not move cuts in the other."""
    if ends[stop] - ends[start] <= CHUNK_BYTES or stop - start <= step:
        yield start, stop
        return
    middle = (start + stop) // 2
    yield from _halves(ends, start, middle, step)
    yield from _halves(ends, middle, stop, step)


def _pieces(places: Int64Array) -> list[list[int]]:
    """Where sequences are, those in one that follow each other in a page."""
    places = places[places[:, 2] > 0]
    if not len(places):
        return []
    follows = (places[1:, 0] == places[:-1, 0]) & (places[1:, 1] == places[:-1, 1] + places[:-1, 2])
    firsts = np.concatenate([[0], np.flatnonzero(~follows) + 1])
    counts = np.add.reduceat(places[:, 2], firsts)
    found: list[list[int]] = np.column_stack([places[firsts, :2], counts]).tolist()
    return found


def value_names(taken: Sequence[str], fields: Sequence[Field]) -> list[str]:
    """The paths of sequences, made different from other names."""
    names = dict.fromkeys(taken)
    found = []
    for field in fields:
        name, number = field.path, 2
        while name in names:
            name, number = f"{field.path}#{number}", number + 1
        names[name] = None
        found.append(name)
    return found


# -- the way back -----------------------------------------------------------------------------------------------------


class Description:
    """What ``FrozenRagged.meta`` says.

    Args:
        meta: plain data.
        groups: which sequences have the same lengths, here.

    Attributes:
        structure: what an item consists of.
        count: number of rows.

    Raises:
        CheckpointCorruptError: it is none.
        CheckpointMismatchError: other fields are ragged than here.
    """

    def __init__(self, meta: Any, groups: Sequence[Group]) -> None:
        if not isinstance(meta, dict) or meta.keys() != {"rows", "structure", "groups", "sequences"}:
            raise CheckpointCorruptError(f"storage: expected a description of sequences, found {summary(meta)}")
        _, fixed, self.count = parsed(meta["rows"])
        here = [{"name": group.name, "paths": list(group.paths)} for group in groups]
        if meta["groups"] != here:
            raise CheckpointMismatchError(f"storage: expected the sequences {here}, found {summary(meta['groups'])}")
        try:
            spec = spec_from_plain(meta["structure"])
            ragged = tuple(
                Field(entry["path"], dtype_named(entry["dtype"]), tuple(entry["shape"])) for entry in meta["sequences"]
            )
            names = [entry["name"] for entry in meta["sequences"]]
            sizes = [size for field in ragged for size in field.shape]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointCorruptError(f"storage: expected a description of sequences, found {error!r}") from error
        self._fixed_names = [field["name"] for field in meta["rows"]["fields"]]
        self._names = value_names(self._fixed_names, ragged)
        self._groups = groups
        paths = [path for group in groups for path in group.paths]
        lengths = [Field(group.lengths, torch.int64, ()) for group in groups]
        is_sound = (
            [field.path for field in ragged] == paths
            and names == self._names
            and list(fixed[max(0, len(fixed) - len(groups)) :]) == lengths
            and all(type(size) is int and size >= 0 for size in sizes)
            and all(len(entry) == 4 for entry in meta["sequences"])
        )
        leaves = _leaves_of(spec, fixed[: len(fixed) - len(groups)], paths) if is_sound else None
        if leaves is None:
            found = [str(field) for field in (*fixed, *ragged)]
            raise CheckpointCorruptError(f"storage: expected the fields of {spec}, found {found}")
        self.structure = Structure(spec, leaves, fixed, ragged)

    def items(self, chunk: dict[str, torch.Tensor], most: int) -> Items:
        """The items of a chunk.

        Args:
            chunk: named tensors.
            most: how many there may be.

        Raises:
            CheckpointCorruptError: it is no such chunk.
        """
        structure = self.structure
        names = [*self._fixed_names, *self._names]
        if chunk.keys() != set(names):
            raise CheckpointCorruptError(f"storage: expected the fields {names}, found {sorted(chunk)}")
        last = chunk[self._fixed_names[-1]]
        count = last.shape[0] if last.ndim else 0
        if not 0 < count <= most:
            raise CheckpointCorruptError(f"storage: expected a chunk of 1 to {most} rows, found {count}")
        arrays = [
            _bits(chunk[name], name, field, count)
            for name, field in zip(self._fixed_names, structure.fixed, strict=True)
        ]
        sequences, tokens, number = [], [], 0
        for group, lengths in zip(self._groups, arrays[len(arrays) - len(self._groups) :], strict=True):
            size = chunk[self._names[number]].shape[0] if chunk[self._names[number]].ndim else -1
            # Each of them is looked at before they are added up: so the sum does not overflow.
            if lengths.min() < 0 or lengths.max() > max(size, 0) or lengths.sum(dtype=np.float64) != size:
                raise CheckpointCorruptError(
                    f"storage: expected {group.lengths} of 0 and more whose sum is the {size} tokens of "
                    f"{self._names[number]}, found others"
                )
            offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
            for _ in group.paths:
                name, field = self._names[number], structure.ragged[number]
                sequences.append(Packed(_bits(chunk[name], name, field, size), offsets, name))
                number += 1
            tokens.append(size)
        return Items(structure, arrays, list(sequences), tokens)


def _leaves_of(spec: Any, fixed: Sequence[Field], paths: Sequence[str]) -> tuple[int, ...] | None:
    """Which field each leaf of a tree is; None if they do not go with each other."""
    numbers = {path: number for number, path in enumerate(paths)}
    found: list[int] = []
    left = [field.path for field in fixed]
    seen: list[str] = []
    for path in spec.paths():
        if path in numbers:
            found.append(~numbers[path])
        else:
            found.append(len(seen))
            seen.append(path)
    ragged = sorted(~number for number in found if number < 0)
    return tuple(found) if seen == left and ragged == list(range(len(paths))) and spec.kind == "dict" else None


def _bits(tensor: torch.Tensor, name: str, field: Field, count: int) -> np.ndarray[Any, Any]:
    if tensor.dtype is not field.dtype or tuple(tensor.shape) != (count, *field.shape):
        raise CheckpointCorruptError(
            f"storage: expected {name} as {field} for each of {count}, found {tensor.dtype} {list(tensor.shape)}"
        )
    return as_bits(tensor, name)[0]
