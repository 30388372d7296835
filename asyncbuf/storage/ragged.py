"""Items with sequences of different lengths: tokens of rollouts, whole episodes."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from asyncbuf._runtime.arguments import count as whole
from asyncbuf._runtime.arguments import shown
from asyncbuf._runtime.summary import summary
from asyncbuf.errors import CheckpointCorruptError, CheckpointMismatchError, SchemaError
from asyncbuf.rows import RowRange, ScatteredRows
from asyncbuf.storage._columns import of_fields
from asyncbuf.storage._frozen import ChunkVersions, CopyOnWrite, Frozen, InMemoryRows, tensors_of
from asyncbuf.storage._ragged_frozen import Description, FrozenRagged, step_of
from asyncbuf.storage._ragged_items import Group, Items, Structure, Taker
from asyncbuf.storage._ragged_memory import Layout, RaggedMemory, pads_of
from asyncbuf.storage._row_memory import parsed
from asyncbuf.storage.base import GatherJobs, Prepared, Runs, Storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from asyncbuf.batch import Draw
    from asyncbuf.rows import Int64Array
    from asyncbuf.storage._leaf import Field

_LAYOUTS = ("padded", "packed", "jagged")


class RaggedStorage(Storage):
    """Items with sequences of different lengths, such as the tokens of rollouts, in main memory.

    An item is a dict, perhaps of dicts, of tensors, numpy arrays and numbers. Fields that are named in ``ragged`` are
    sequences: they have a leading axis of tokens whose length differs from item to item and may be 0; they may be lists
    of numbers, too. All other fields have a fixed shape, as in ``TensorStorage``. Keys, dtypes and shapes are taken
    from the first items written; later items must have the same::

        storage = RaggedStorage(10_000, ragged=["tokens", "logprobs"])
        buffer = ReplayBuffer(storage, batch_size=32)
        async with buffer:
            await buffer.add({"tokens": [5, 9, 2], "logprobs": torch.randn(3), "reward": 1.0})

    ``extend`` takes a list of such items, or one dict of columns: fields of a fixed shape as ``[items, *item]``, and
    each sequence as a list of sequences, as a jagged tensor, padded as ``[items, longest, *token]`` beside ``lengths``,
    or packed as ``[tokens, *token]`` beside ``offsets``. So the data of a batch can be written again.

    In a batch, sequences are

    - ``"padded"``: ``[batch, longest, *token]``, with ``pad_value`` behind each;
    - ``"packed"``: ``[tokens, *token]``, one after the other, and ``offsets``, int64 ``[batch + 1]``, say where each
      begins and the last one ends;
    - ``"jagged"``: nested tensors of layout ``torch.jagged``, ``[batch, *, *token]``, those of the same lengths over
      the same offsets.

    Beside the fields of an item, a batch has ``lengths``, int64 ``[batch]``. A sampler may ask for ``lengths`` as for
    a field. No item may have fields of the names ``lengths`` and ``offsets``.

    Sequences that go together in one group have the same length within an item. Where they differ, name the groups:
    ``ragged={"prompt": ["prompt"], "answer": ["answer", "logprobs"]}`` makes ``prompt_lengths`` and ``answer_lengths``
    (and ``..._offsets``).

    Tokens lie in pages of memory that rows share. They take at most twice their bytes and some megabytes more, in
    whatever order items are overwritten; after a removal of many, as soon as others are written. As with
    ``TensorStorage``, the memory of a batch is used again for a later one, once nobody can see it any more.

    Args:
        capacity: number of rows.
        ragged: paths of the fields that are sequences, such as ``"tokens"`` or ``"answer/tokens"``; or groups of them
            by name.
        layout: how sequences come in a batch.
        pad_value: what is behind a sequence that is padded: one number for all, or by path of the field, and 0 for
            those that are not named.
        max_length: how many tokens a sequence may have: longer ones are refused. None for any number.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: the capacity or ``max_length`` is not positive, no field is named or one twice, or there is no such
            layout.
    """

    trusted: ClassVar[bool] = True

    def __init__(
        self,
        capacity: int,
        ragged: Sequence[str] | Mapping[str, Sequence[str]],
        *,
        layout: str = "padded",
        pad_value: float | Mapping[str, float] = 0,
        max_length: int | None = None,
    ) -> None:
        super().__init__(capacity)
        self._groups = _groups_of(ragged)
        if layout not in _LAYOUTS:
            raise ValueError(f"layout: expected one of {list(_LAYOUTS)}, found {shown(layout)}")
        self._layout = layout
        if layout == "jagged":
            # The first one of a process makes torch import for half a second: now, and not while batches are made.
            torch.nested.nested_tensor_from_jagged(torch.zeros(0), torch.zeros(1, dtype=torch.int64))
        self._pads = _pads_of(pad_value, [path for group in self._groups for path in group.paths])
        self._max_length = None if max_length is None else whole(max_length, "max_length", 1)
        self._expected = 0
        self._filled = 0
        self._memory: RaggedMemory | None = None
        self._taker = Taker(self._groups, self._max_length)
        self._step = step_of(capacity)
        self._versions = ChunkVersions(self._step)
        self._frozen: list[weakref.ref[CopyOnWrite]] = []

    @property
    def layout(self) -> str:
        """How sequences come in a batch: ``"padded"``, ``"packed"`` or ``"jagged"``."""
        return self._layout

    @property
    def fields(self) -> tuple[Field, ...]:
        """The leaves of a fixed shape, and the lengths of each group; empty before the first write."""
        return () if self._memory is None else self._memory.structure.fixed

    @property
    def ragged_fields(self) -> tuple[Field, ...]:
        """The sequences, with the shape of one token; empty before the first write."""
        return () if self._memory is None else self._memory.structure.ragged

    @property
    def tokens(self) -> int:
        """How many tokens are stored, those of all groups together."""
        return 0 if self._memory is None else sum(arena.live for arena in self._memory.arenas)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that sequences are in."""
        return 0 if self._memory is None else sum(arena.nbytes for arena in self._memory.arenas)

    @property
    def splits_rows(self) -> bool:
        """Whether batches may be split along their rows: padded ones only."""
        return self._layout == "padded"

    # -- writing ------------------------------------------------------------------------------------------------------

    def prepare(self, items: Any) -> Prepared:
        """Check a list of items, or a dict of columns."""
        known = self._memory
        structure = None if known is None else known.structure
        if isinstance(items, dict):
            return self._prepared(known, self._taker.columns(structure, items))
        if isinstance(items, list | tuple):
            return self._prepared(known, self._taker.several(structure, items))
        raise SchemaError(f"expected a list of items, or a dict of columns, found {summary(items)}")

    def prepare_one(self, item: Any) -> Prepared:
        """Check one item."""
        known = self._memory
        return self._prepared(known, self._taker.one(None if known is None else known.structure, item))

    def _prepared(self, known: RaggedMemory | None, items: Items) -> Prepared:
        if known is None:
            pads_of(items.structure.ragged, self._pads)  # may refuse
            nbytes = sum(array.nbytes for array in items.arrays)
            nbytes += sum(
                count * field.nbytes
                for count, group in zip(items.tokens, self._fields_of(items), strict=True)
                for field in group
            )
        else:
            nbytes = known.nbytes(items)
        return Prepared(len(items.arrays[-1]), nbytes, items, known)

    def _fields_of(self, items: Items) -> Iterator[tuple[Field, ...]]:
        first = 0
        for group in self._groups:
            yield items.structure.ragged[first : first + len(group.paths)]
            first += len(group.paths)

    def is_current(self, prepared: Prepared) -> bool:
        """Whether the memory that items were checked against is still the one in use."""
        return prepared.basis is self._memory

    def write(self, prepared: Prepared, runs: Sequence[RowRange]) -> None:
        """Copy prepared items into rows; the first ones decide what later ones must be."""
        items: Items = prepared.payload
        memory = self._memory
        if memory is None:
            memory = self._memory = self._new_memory(items.structure)
        if type(runs) is ScatteredRows:
            self._reach(memory, int(runs.rows[-1]) + 1)
            self._before_write(runs)
            self._versions.wrote_rows(runs.rows)
            memory.put(runs.rows, items, runs.item)
            return
        for run in runs:
            start, stop = run.row, run.row + run.count
            if stop > self._filled:
                self._reach(memory, stop)
            if self._frozen:
                self._before_write([run])
            noted, noted_end = self._versions.noted
            if start < noted or stop > noted_end:
                self._versions.wrote(start, stop)
            if run.count == 1:
                memory.put_one(start, items, run.item)
            else:
                memory.put(np.arange(start, stop), items, run.item)

    def _reach(self, memory: RaggedMemory, stop: int) -> None:
        """Have so many rows in use. Those that nothing is written to have no tokens."""
        start = self._filled
        if stop > start:
            self._before_write([RowRange(start, 0, stop - start)])
            self._versions.wrote(start, stop)
            memory.forget(start, stop)
            self._filled = stop

    def _before_write(self, runs: Sequence[RowRange]) -> None:
        for kept in list(self._frozen):
            if (frozen := kept()) is not None:
                frozen.before_write(runs)

    def _before_move(self, rows: Int64Array) -> None:
        """Sequences get other places, and stay what they are."""
        if self._frozen:
            self._before_write(ScatteredRows(rows, 0))

    def columns(self, prepared: Prepared, paths: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
        """Leaves of a fixed shape, and lengths, of prepared items: arrays ``[items, *item]`` by path."""
        items: Items = prepared.payload
        for path in paths:
            for group in self._groups:
                if path in group.paths:
                    raise SchemaError(
                        f"expected items with a fixed shape at {path!r}, which the sampler asks for; found sequences, "
                        f"whose lengths are at {group.lengths!r}"
                    )
        return of_fields(items.structure.fixed, items.arrays, prepared.count, paths)

    def release(self, rows: torch.Tensor) -> None:
        """Let the sequences of removed items go."""
        if self._memory is not None and len(rows):
            found = np.sort(rows.numpy())  # memory is read in order then, in a third of the time
            self._before_write(ScatteredRows(found, 0))
            steps = found // self._step
            self._versions.wrote_rows(steps[np.flatnonzero(np.diff(steps, prepend=-1))] * self._step)
            self._memory.free(found)

    def clear(self) -> None:
        """Forget every item and let the memory of sequences go; the structure stays."""
        self._filled = 0
        self._versions.renew()
        if self._memory is not None:
            self._memory.clear()

    # -- gathering ----------------------------------------------------------------------------------------------------

    def expect(self, batches: int) -> None:
        """Keep the memory of so many batches to use it again."""
        self._expected = batches
        if self._memory is not None:
            self._memory.expect(batches)

    def gather(self, indices: torch.Tensor) -> Any:
        """Collect rows into tensors of their own: a dict, with ``lengths`` and, if packed, ``offsets`` in it."""
        if self._memory is None:
            raise SchemaError("expected written rows, found an empty storage")
        return self._memory.gather(indices.numpy())

    def begin_gather(self, draw: Draw, *, inline: bool, parts: int) -> Any:
        """Let several threads copy into the memory of one batch, each the sequences of some rows.

        A subclass with a ``gather`` or ``runs`` of its own has the rows gathered by that.
        """
        is_own = type(self).gather is RaggedStorage.gather and self.runs is Runs.ANYWHERE
        if inline or self._memory is None or not is_own:
            return super().begin_gather(draw, inline=inline, parts=parts)
        return GatherJobs(*self._memory.gather_in_parts(draw.indices.numpy(), parts))

    def gather_nbytes(self, count: int) -> int:
        """About how many bytes gathering ``count`` rows moves."""
        memory = self._memory
        if memory is None:
            return 0
        tokens = sum(arena.live * arena.token_nbytes for arena in memory.arenas)
        each = tokens // max(1, self._filled) * (2 if self._layout == "padded" else 1)
        return count * (memory.rows.row_nbytes + each)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """``meta`` describes the fields; ``chunks`` hold rows from row 0 on, with their sequences packed."""
        frozen = self.freeze()
        return {"meta": frozen.meta, "chunks": list(tensors_of(frozen))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the contents."""
        self.load_rows(state["meta"], iter(state["chunks"]))()

    def freeze(self) -> Frozen:
        """Takes no time: sequences are not changed where they are, and rows are kept when they are overwritten."""
        memory = self._memory
        if memory is None:
            return InMemoryRows(None)
        blocks: list[Any] = [*memory.rows.blocks, *(arena.places for arena in memory.arenas)]
        kept = CopyOnWrite(blocks, self._filled, self._step)
        self._frozen.append(weakref.ref(kept, self._frozen.remove))
        return FrozenRagged(memory, self._groups, kept, self._filled, self._step, self._versions.freeze())

    def _is_pinned(self) -> bool:
        return any(kept() is not None for kept in list(self._frozen))

    def load_rows(self, meta: Any, chunks: Iterator[dict[str, torch.Tensor]]) -> Callable[[], None]:
        """Build new rows beside the live ones."""
        if meta is None:
            for _ in chunks:
                raise CheckpointCorruptError("storage: expected no chunks without a description, found some")
            return lambda: self._replace(None, 0)
        described = Description(meta, self._groups)
        if described.count > self.capacity:
            raise CheckpointMismatchError(f"storage: expected at most {self.capacity} rows, found {described.count}")
        live = self._memory
        if live is not None and live.structure != described.structure:
            raise CheckpointMismatchError(
                f"storage: expected items of {live.structure}; found items of {described.structure}"
            )
        try:
            memory = self._new_memory(described.structure)
        except SchemaError as error:
            raise CheckpointMismatchError(f"storage: {error}") from error
        filled = 0
        for chunk in chunks:
            items = described.items(chunk, described.count - filled)
            rows = len(items.arrays[-1])
            self._check_lengths(items)
            memory.put(np.arange(filled, filled + rows), items, 0)
            memory.loaded.append(rows)
            filled += rows
        if filled != described.count:
            raise CheckpointCorruptError(f"storage: expected {described.count} rows, found {filled}")
        return lambda: self._replace(memory, filled)

    def _check_lengths(self, items: Items) -> None:
        longest = max(int(lengths.max()) for lengths in items.arrays[len(items.arrays) - len(self._groups) :])
        if self._max_length is not None and longest > self._max_length:
            raise CheckpointMismatchError(
                f"storage: expected sequences of at most {self._max_length} tokens, found one of {longest}"
            )

    def loaded_chunks(self, identities: Sequence[str | None]) -> None:
        """Give chunks that were loaded, and not written since, the identities that they had."""
        if self._memory is not None and len(self._memory.loaded) == len(identities):
            self._versions.loaded(self._memory.loaded, identities)

    def rows_in(self, meta: Any) -> int | None:
        """How many rows a description speaks of."""
        if meta is None:
            return 0
        return parsed(meta["rows"])[2] if isinstance(meta, dict) and "rows" in meta else None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the written rows only."""
        memory = ("_memory", "_filled", "_frozen", "_versions")
        return {"own": {k: v for k, v in vars(self).items() if k not in memory}, "rows": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Put the rows into memory of their own."""
        vars(self).update(
            state["own"], _memory=None, _filled=0, _frozen=[], _versions=ChunkVersions(state["own"]["_step"])
        )
        self.load_state_dict(state["rows"])

    def _new_memory(self, structure: Structure) -> RaggedMemory:
        layout = Layout(self._layout, pads_of(structure.ragged, self._pads))
        memory = RaggedMemory(self.capacity, structure, self._groups, layout, self._is_pinned, self._before_move)
        memory.expect(self._expected)
        return memory

    def _replace(self, memory: RaggedMemory | None, count: int) -> None:
        self._versions.renew()
        if memory is not None or self._memory is None:
            self._memory = memory
            self._frozen.clear()  # snapshots of the memory before: nobody writes to that any more
        elif self._memory is not None:
            self._memory.clear()
        self._filled = count


def _groups_of(ragged: Any) -> list[Group]:
    """The groups of ragged fields."""
    if isinstance(ragged, Mapping):
        groups = [Group(name, _paths(paths, name)) for name, paths in ragged.items()]
        if odd := [name for name in ragged if not isinstance(name, str) or not name]:
            raise TypeError(f"ragged: expected names of groups as str, found {shown(odd[0])}")
    else:
        groups = [Group("", _paths(ragged, ""))]
    paths = [path for group in groups for path in group.paths]
    if not paths or not all(group.paths for group in groups):
        raise ValueError('ragged: expected at least one path of a field, such as ["tokens"], found none')
    if len(set(paths)) < len(paths):
        raise ValueError(f"ragged: expected each path once, found {paths}")
    if taken := [key for group in groups for key in (group.lengths, group.offsets) if key in paths]:
        raise ValueError(f"ragged: expected other paths than {taken}, which a batch has of its own")
    return groups


def _paths(paths: Any, name: str) -> tuple[str, ...]:
    where = f" in the group {name!r}" if name else ""
    if isinstance(paths, str) or not isinstance(paths, list | tuple | set | frozenset):
        instead = f": write [{paths!r}]" if isinstance(paths, str) else '; for example ["tokens", "logprobs"]'
        raise TypeError(f"ragged: expected a list of paths{where}, found {shown(paths)}{instead}")
    for path in paths:
        if not isinstance(path, str) or not path:
            raise TypeError(f"ragged: expected paths of fields as str{where}, found {shown(path)}")
    return tuple(sorted(paths)) if isinstance(paths, set | frozenset) else tuple(paths)


def _pads_of(pad_value: Any, paths: Sequence[str]) -> dict[str, float]:
    values: dict[str, Any] = dict(pad_value) if isinstance(pad_value, Mapping) else dict.fromkeys(paths, pad_value)
    for path, value in values.items():
        if path not in paths:
            raise ValueError(f"pad_value: expected paths among {list(paths)}, found {shown(path)}")
        if not isinstance(value, int | float):
            raise TypeError(f"pad_value: expected a number, or numbers by path, found {shown(value)}")
    return values
