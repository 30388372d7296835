"""The memory behind items with sequences: rows for what has a fixed shape, arenas for the sequences."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from asyncbuf._plain.tree import LEAF, Spec, builder
from asyncbuf.errors import SchemaError
from asyncbuf.storage._arena import Arena
from asyncbuf.storage._batch_bytes import BatchBytes
from asyncbuf.storage._leaf import number_of
from asyncbuf.storage._row_memory import RowMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from asyncbuf.rows import Int64Array
    from asyncbuf.storage._leaf import Field
    from asyncbuf.storage._ragged_items import Group, Items, Structure

    Array = np.ndarray[Any, Any]


class Layout(NamedTuple):
    """How batches look.

    Attributes:
        kind: ``"padded"``, ``"packed"`` or ``"jagged"``.
        pads: the bits behind a sequence, by ragged field.
    """

    kind: str
    pads: tuple[Any, ...]

    @property
    def is_padded(self) -> bool:
        """Whether sequences are padded."""
        return self.kind == "padded"


class RaggedMemory:
    """The memory behind a known structure.

    Args:
        capacity: number of rows.
        structure: what an item consists of.
        groups: which sequences have the same lengths.
        layout: how batches look.
        is_pinned: as for ``Arena``.
        before_move: as for ``Arena``.

    Attributes:
        structure: as the argument.
        rows: the leaves of a fixed shape, and the lengths.
        arenas: the sequences, group by group.
    """

    def __init__(
        self,
        capacity: int,
        structure: Structure,
        groups: Sequence[Group],
        layout: Layout,
        is_pinned: Callable[[], bool],
        before_move: Callable[[Int64Array], None],
    ) -> None:
        self.structure = structure
        fixed = structure.fixed
        spec = Spec("dict", None, tuple(field.path for field in fixed), (LEAF,) * len(fixed))
        self.rows = RowMemory(capacity, spec, fixed, contiguous=True)
        self.arenas: list[Arena] = []
        self._groups: list[tuple[Group, int, tuple[Field, ...]]] = []
        number = 0
        for group in groups:
            members = structure.ragged[number : number + len(group.paths)]
            self.arenas.append(Arena(capacity, members, is_pinned, before_move))
            self._groups.append((group, number, members))
            number += len(members)
        self.batches = [BatchBytes() for _ in structure.ragged]
        self._lengths = self.rows.columns[len(fixed) - len(groups) :]
        self._layout = layout
        self._build = builder(structure.spec)

    @property
    def loaded(self) -> list[int]:
        """Rows of the chunks that a checkpoint had."""
        return self.rows.loaded

    def expect(self, batches: int) -> None:
        """Keep the memory of so many batches."""
        self.rows.slots.most = batches
        for each in self.batches:
            each.most = batches

    # -- writing ------------------------------------------------------------------------------------------------------

    def put_one(self, row: int, items: Items, item: int) -> None:
        """Write one item into a row."""
        for column, array in zip(self.rows.columns, items.arrays, strict=True):
            column[row] = array[item]
        for arena, (_, first, members), lengths in zip(self.arenas, self._groups, self._of_groups(items), strict=True):
            arena.put_one(row, int(lengths[item]), items.sequences[first : first + len(members)], item)

    def put(self, rows: Int64Array, items: Items, item: int) -> None:
        """Write items, from position ``item`` on, into different rows."""
        part = slice(item, item + len(rows))
        where = slice(int(rows[0]), int(rows[0]) + len(rows)) if _is_run(rows) else rows
        for column, array in zip(self.rows.columns, items.arrays, strict=True):
            column[where] = array[part]
        for arena, (_, first, members), lengths in zip(self.arenas, self._groups, self._of_groups(items), strict=True):
            arena.put(rows, lengths[part], items.sequences[first : first + len(members)], item)

    def _of_groups(self, items: Items) -> list[Array]:
        return items.arrays[len(items.arrays) - len(self._groups) :]

    def free(self, rows: Int64Array) -> None:
        """Let the sequences of rows go."""
        for arena, lengths in zip(self.arenas, self._lengths, strict=True):
            lengths[rows] = 0
            arena.free(rows)
            arena.compact(2)

    def forget(self, start: int, stop: int) -> None:
        """Rows that were not in use have no tokens."""
        for arena, lengths in zip(self.arenas, self._lengths, strict=True):
            lengths[start:stop] = 0
            arena.forget(start, stop)

    def clear(self) -> None:
        """Let all sequences go."""
        for arena in self.arenas:
            arena.clear()

    def nbytes(self, items: Items) -> int:
        """Bytes that writing items moves."""
        tokens = sum(arena.token_nbytes * count for arena, count in zip(self.arenas, items.tokens, strict=True))
        return len(items.arrays[-1]) * self.rows.row_nbytes + tokens

    # -- gathering ----------------------------------------------------------------------------------------------------

    def gather(self, indices: Int64Array) -> Any:
        """Rows in memory that nobody else sees."""
        batch = _Batch(self.rows.leaves(indices))
        for copy in self._begun(indices, batch):
            copy(0, len(indices))
        return self._tree(batch, len(indices))

    def gather_in_parts(
        self, indices: Int64Array, parts: int
    ) -> tuple[Sequence[Callable[[], object]], Callable[[], Any]]:
        """As ``gather``, as functions that copy a part of the rows each, and one that makes the tree when all have."""
        batch, count = _Batch([]), len(indices)
        size = max(1, -(-count // parts))
        copies = self._begun(indices, batch)

        def copy(start: int) -> None:
            for each in copies:
                each(start, min(start + size, count))
            if not start:
                batch.leaves = self.rows.leaves(indices)

        return [functools.partial(copy, start) for start in range(0, max(1, count), size)], lambda: self._tree(
            batch, count
        )

    def _begun(self, indices: Int64Array, batch: _Batch) -> list[Callable[[int, int], None]]:
        """Memory for the sequences of a batch, and functions that copy those of some of its rows."""
        copies: list[Callable[[int, int], None]] = []
        for (group, first, members), arena in zip(self._groups, self.arenas, strict=True):
            places = arena.places.take(indices, 0, None, "clip")
            lengths = places[:, 2]
            copy: Callable[..., None]
            lead: tuple[int, ...]
            if self._layout.is_padded:
                longest = int(lengths.max(initial=0))
                lead, places_of_rows, copy = (len(indices), longest), places.tolist(), _pad
            else:
                offsets = np.zeros(len(indices) + 1, np.int64)
                np.cumsum(lengths, out=offsets[1:])
                batch.offsets[group.offsets] = torch.from_numpy(offsets)
                places[:, 2] = offsets[:-1]
                lead, places_of_rows, copy = (int(offsets[-1]),), [*places.tolist(), [0, 0, int(offsets[-1])]], _pack
            for number, field in enumerate(members, first):
                out = self.batches[number].take(lead[0], field.bits, (*lead[1:], *field.shape))
                batch.values.append(field.typed(torch.from_numpy(out)))
                flat = out.reshape(-1, *field.shape) if len(lead) > 1 and out.size else out
                pages, pad = arena.values[number - first], self._layout.pads[number]
                copies.append(functools.partial(copy, flat, pages, places_of_rows, lead[-1], pad))
        return copies

    def _tree(self, batch: _Batch, count: int) -> Any:
        leaves, values = batch.leaves, batch.values
        if self._layout.kind == "jagged":
            # Not in a thread: torch gives each set of offsets a number, and two threads might get the same.
            values = [
                value for group, first, members in self._groups for value in self._jagged(batch, group, first, members)
            ]
        data = self._build([leaves[i] if i >= 0 else values[~i] for i in self.structure.leaves], count)
        for place, (group, *_) in enumerate(self._groups, len(leaves) - len(self._groups)):
            data[group.lengths] = leaves[place]
        if self._layout.kind == "packed":
            data.update(batch.offsets)
        return data

    def _jagged(self, batch: _Batch, group: Group, first: int, members: tuple[Field, ...]) -> list[torch.Tensor]:
        offsets = batch.offsets[
            group.offsets
        ]  # one for all: tensors with the same offsets may be added up and the like
        return [
            torch.nested.nested_tensor_from_jagged(batch.values[number], offsets)
            for number in range(first, first + len(members))
        ]


class _Batch:
    """A batch on its way.

    Attributes:
        leaves: the leaves of a fixed shape, and the lengths.
        values: the sequences, by ragged field.
        offsets: by key, int64 ``[batch + 1]``; none where sequences are padded.
    """

    __slots__ = ("leaves", "offsets", "values")

    def __init__(self, leaves: list[torch.Tensor]) -> None:
        self.leaves = leaves
        self.values: list[torch.Tensor] = []
        self.offsets: dict[str, torch.Tensor] = {}


def _pad(
    out: Array, pages: Sequence[Array], places: Sequence[Sequence[int]], longest: int, pad: Any, start: int, stop: int
) -> None:
    """Copy the sequences of some rows, each at the beginning of ``longest`` tokens."""
    at = start * longest
    for page, first, count in places[start:stop]:
        end = at + count
        if count:  # without tokens, there need be no such page
            out[at:end] = pages[page][first : first + count]
        at += longest
        if end < at:
            out[end:at].fill(pad)


def _pack(
    out: Array, pages: Sequence[Array], places: Sequence[Sequence[int]], tokens: int, pad: Any, start: int, stop: int
) -> None:
    """Copy the sequences of some rows, one after the other; places say where each begins in place of its length."""
    page, first, at = places[start]
    for following, beginning, end in places[start + 1 : stop + 1]:
        if at < end:
            out[at:end] = pages[page][first : first + end - at]
        page, first, at = following, beginning, end


def _is_run(rows: Int64Array) -> bool:
    return bool(rows[-1] - rows[0] + 1 == len(rows)) and bool((np.diff(rows) == 1).all())


def pads_of(fields: Sequence[Field], values: Mapping[str, Any]) -> tuple[Any, ...]:
    """The bits behind a sequence, by field.

    Args:
        fields: the ragged ones.
        values: number by path; 0 where there is none.

    Raises:
        SchemaError: a number does not fit the dtype of a field.
    """
    return tuple(_pad_of(field, values.get(field.path, 0)) for field in fields)


def _pad_of(field: Field, value: Any) -> Any:
    try:
        return number_of(field, value).item()
    except SchemaError as error:
        raise SchemaError(f"pad_value of {error}") from error
