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


_NO_OFFSETS = np.zeros(1, np.int64)


class Layout(NamedTuple):
    """How batches look.

    Attributes:
        kind: ``"padded"``, ``"packed"`` or ``"jagged"``.
        pads: the bits behind a sequence, by ragged field.
    """

    kind: str
    pads: tuple[Any, ...]


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
        self.batches = [BatchBytes(field) for field in structure.ragged]
        self._lengths = self.rows.columns[len(fixed) - len(groups) :]
        self._has_leaves = len(fixed) > len(groups)
        self._layout = layout
        self._is_padded = layout.kind == "padded"
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
            arena.compact(1)

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
        batch = _Batch()
        if self._has_leaves:
            batch.leaves = self.rows.leaves(indices)
        for part in self._begun(indices, batch):
            part.copy(0, len(indices))
        return self._tree(batch, len(indices))

    def gather_in_parts(
        self, indices: Int64Array, parts: int
    ) -> tuple[Sequence[Callable[[], object]], Callable[[], Any]]:
        """As ``gather``, as functions that copy a part of the rows each, and one that makes the tree when all have."""
        batch, count = _Batch(), len(indices)
        size = max(1, -(-count // parts))
        begun = self._begun(indices, batch)

        def copy(start: int) -> None:
            for part in begun:
                part.copy(start, min(start + size, count))
            if not start and self._has_leaves:
                batch.leaves = self.rows.leaves(indices)

        jobs = [functools.partial(copy, start) for start in range(0, max(1, count), size)]
        return jobs, lambda: self._tree(batch, count)

    def _begun(self, indices: Int64Array, batch: _Batch) -> list[_Padded | _Packed]:
        """Memory for the sequences of a batch, and what copies those of some of its rows."""
        begun: list[_Padded | _Packed] = []
        for (group, first, members), arena in zip(self._groups, self.arenas):  # noqa: B905 (as many)
            places = arena.places.take(indices, 0, None, "clip")
            listed = places.tolist()
            batch.lengths.append(torch.from_numpy(places[:, 2].copy()))
            longest, offsets = 0, _NO_OFFSETS
            if self._is_padded:
                longest = max([place[2] for place in listed], default=0)
                lead: tuple[int, ...] = (len(listed), longest)
            else:
                offsets = np.empty(len(listed) + 1, np.int64)
                offsets[0] = 0
                places[:, 2].cumsum(out=offsets[1:])
                batch.offsets[group.offsets] = torch.from_numpy(offsets)
                lead = (int(offsets[-1]),)
            number = first
            for field, pages in zip(members, arena.values):  # noqa: B905 (as many)
                out = self.batches[number].take(*lead)
                values = torch.from_numpy(out)
                batch.values.append(field.typed(values) if field.is_carried else values)
                if self._is_padded:
                    flat = out.reshape(lead[0] * longest, *field.shape)
                    begun.append(_Padded(flat, pages, listed, longest, self._layout.pads[number]))
                else:
                    begun.append(_Packed(out, pages, listed, offsets))
                number += 1
        return begun

    def _tree(self, batch: _Batch, count: int) -> Any:
        leaves, values = batch.leaves, batch.values
        if self._layout.kind == "jagged":
            # Not in a thread: torch gives each set of offsets a number, and two threads might get the same.
            values = [
                torch.nested.nested_tensor_from_jagged(batch.values[number], batch.offsets[group.offsets])
                for group, first, members in self._groups
                for number in range(first, first + len(members))
            ]
        data = self._build([leaves[i] if i >= 0 else values[~i] for i in self.structure.leaves], count)
        for (group, _, _), lengths in zip(self._groups, batch.lengths):  # noqa: B905 (as many)
            data[group.lengths] = lengths
        if self._layout.kind == "packed":
            data.update(batch.offsets)
        return data


class _Batch:
    """A batch on its way.

    Attributes:
        leaves: the leaves of a fixed shape, if there are any.
        lengths: of each group, int64 ``[batch]``.
        values: the sequences, by ragged field.
        offsets: by key, int64 ``[batch + 1]``; none where sequences are padded.
    """

    __slots__ = ("leaves", "lengths", "offsets", "values")

    def __init__(self) -> None:
        self.leaves: list[torch.Tensor] = []
        self.lengths: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.offsets: dict[str, torch.Tensor] = {}


class _Padded:
    """Copies the sequences of rows, each to the beginning of as many tokens as the longest has.

    Args:
        out: ``[batch * longest, *token]``.
        pages: values of each page.
        places: of each row: page, first token, and how many.
        longest: tokens of the longest.
        pad: what goes behind each.
    """

    __slots__ = ("_longest", "_out", "_pad", "_pages", "_places")

    def __init__(
        self, out: Array, pages: Sequence[Array], places: Sequence[Sequence[int]], longest: int, pad: Any
    ) -> None:
        self._out = out
        self._pages = pages
        self._places = places
        self._longest = longest
        self._pad = pad

    def copy(self, start: int, stop: int) -> None:
        """Copy those of rows ``start`` to ``stop - 1`` of the batch."""
        out, pages, longest, pad = self._out, self._pages, self._longest, self._pad
        at = start * longest
        for page, first, count in self._places[start:stop]:
            end = at + count
            if count:  # without tokens, there need be no such page
                out[at:end] = pages[page][first : first + count]
            at += longest
            if end < at:
                out[end:at].fill(pad)


class _Packed:
    """Copies the sequences of rows, one after the other.

    Args:
        out: ``[tokens, *token]``.
        pages: values of each page.
        places: of each row: page, first token, and how many.
        offsets: where each begins: int64 ``[batch + 1]``.
    """

    __slots__ = ("_offsets", "_out", "_pages", "_places")

    def __init__(
        self, out: Array, pages: Sequence[Array], places: Sequence[Sequence[int]], offsets: Int64Array
    ) -> None:
        self._out = out
        self._pages = pages
        self._places = places
        self._offsets = offsets

    def copy(self, start: int, stop: int) -> None:
        """Copy those of rows ``start`` to ``stop - 1`` of the batch."""
        out, pages = self._out, self._pages
        at = int(self._offsets[start])
        for page, first, count in self._places[start:stop]:
            if count:
                end = at + count
                out[at:end] = pages[page][first : first + count]
                at = end


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
