"""Draws, tickets and batches: what was drawn, and what a consumer gets."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, NoReturn

import torch
from torch.utils import _pytree as torch_pytree
from typing_extensions import TypeVar

from asyncbuf._plain.tree import flatten, unflatten
from asyncbuf._runtime.arguments import count
from asyncbuf._runtime.own_memory import own_memory
from asyncbuf._runtime.summary import listed, literal, summary

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    _read_only = property
else:

    def _read_only(read):
        """A property that raises the error of a frozen dataclass."""
        return property(read, _refuse, _refuse)


def _refuse(*_: Any) -> NoReturn:
    raise dataclasses.FrozenInstanceError("a Batch is read-only: dataclasses.replace(batch, data=...) makes another")


DataT_co = TypeVar("DataT_co", covariant=True, default=Any)

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class _NoInfo(dict[str, Any]):
    """What a sampler says that says nothing of its rows."""

    def __missing__(self, key: str) -> NoReturn:
        raise KeyError(
            f'{key}: the sampler of this buffer says nothing of its rows (PrioritizedSampler has "weights", NStep in a '
            'JoinedSampler has "discount")'
        )


_NUMBERS_TAG = "_asyncbuf_write_count"


class Draw(NamedTuple):
    """The rows of one batch, as a sampler chose them.

    Attributes:
        indices: the rows, int64 ``[batch]``, on the CPU.
        info: what else the sampler says of each row, such as weights: float ``[batch]``.
        epoch: number of the pass that the rows belong to; None for a sampler without passes.
        last: whether the pass ends with these rows.
        shape: how the batch axis is split, such as ``(slices, time)``: the leaves of the batch, and its indices, then
            have shape ``[slices, time, *item]``. The product is the number of rows. None for ``[batch, *item]``.
        lengths: lengths of ragged groups of rows, one after the other: int64 ``[groups]``, whose sum is the number of
            rows. None if the rows are not grouped.
        joins: further rows to gather at the same point of the history, such as next observations: int64 indices of any
            shape by name. ``Sampler.combine`` puts what was gathered together with the batch.
    """

    indices: torch.Tensor
    info: Mapping[str, Any] = _NOTHING
    epoch: int | None = None
    last: bool = False
    shape: tuple[int, ...] | None = None
    lengths: torch.Tensor | None = None
    joins: Mapping[str, torch.Tensor] = _NOTHING

    @classmethod
    def of(cls, *values: Any) -> Draw:
        """A draw of all its values in order; empty mappings are those of a draw without."""
        draw = cls(*values)
        return draw._replace(info=draw.info or _NOTHING, joins=draw.joins or _NOTHING)

    def __reduce__(self) -> tuple[Callable[..., Draw], tuple[Any, ...]]:
        """Pickle the rows of this draw, and not the memory that others share with them."""
        rest = (self.shape, self.lengths, dict(self.joins))
        return Draw.of, own_memory((self.indices, dict(self.info), self.epoch, self.last, *rest))

    def __repr__(self) -> str:
        """One short line, without the values of tensors."""
        more = _told(info=self.info, epoch=self.epoch, last=self.last, shape=self.shape)
        return f"Draw({summary(self.indices)}{more}{_told(lengths=self.lengths, joins=self.joins)})"


class Ticket(NamedTuple):
    """One numbered draw. Tickets are cheap and are made in order.

    Attributes:
        number: 0 for the first draw of the buffer, then 1, 2, ...
        draw: the rows that the sampler chose.
        seed: seed of the generator that transforms get, 63 bits.
        write_count: number of items that had been written at the draw: a row whose item has this number or a higher
            one was replaced since. 0 if that is not known.
    """

    number: int
    draw: Draw
    seed: int
    write_count: int = 0

    def __repr__(self) -> str:
        """One short line, without the values of tensors."""
        more = _told(seed=self.seed, write_count=self.write_count)
        return f"Ticket({literal(self.number)}, {self.draw!r}{more})"


@dataclasses.dataclass(frozen=True)
class _Fields:
    """The constructor of a batch, as ``dataclasses`` describes it."""

    data: Any
    indices: torch.Tensor
    info: Mapping[str, Any]
    number: int
    epoch: int | None = None
    last: bool = False
    write_count: int = 0
    lengths: torch.Tensor | None = None


class Batch(Generic[DataT_co]):
    """What a consumer gets: the gathered rows of one draw, after ``collate_fn`` and transforms. Read-only.

    ``batch["obs"]`` is short for ``batch.data["obs"]``, and ``len(batch)`` is the number of rows. Two batches are equal
    only if they are the same object. A batch is a pytree (``torch.utils._pytree.tree_map`` reaches its tensors), works
    with ``dataclasses.replace``, ``fields`` and ``asdict``, and is pickled in about the bytes of its tensors.

    Args:
        data: as the attribute; so are the others.
        indices: the rows.
        info: what the sampler says of each row.
        number: number of the ticket.
        epoch: number of the pass.
        last: whether the batch ends the pass.
        write_count: number of items that had been written at the draw.
        lengths: lengths of ragged groups of rows.
    """

    # A frozen dataclass to its users, but one that is made in a sixth of the time: each sample() makes one.
    __slots__ = ("_data", "_draw", "_indices", "_number", "_write_count")
    __match_args__ = ("data", "indices", "info", "number", "epoch", "last", "write_count", "lengths")
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]] = _Fields.__dataclass_fields__

    def __init__(
        self,
        data: DataT_co,
        indices: torch.Tensor,
        info: Mapping[str, Any],
        number: int,
        epoch: int | None = None,
        last: bool = False,
        write_count: int = 0,
        lengths: torch.Tensor | None = None,
    ) -> None:
        self._data = data
        self._draw = Draw(indices, info, epoch, last, None, lengths)
        self._number = number
        self._write_count = write_count
        self._indices: torch.Tensor | None = None

    @_read_only
    def data(self) -> DataT_co:
        """A tree whose leaves have shape ``[batch, *item]``; after ``collate_fn`` and transforms, what they return."""
        return self._data

    @_read_only
    def indices(self) -> torch.Tensor:
        """The rows that were gathered: int64 ``[batch]``, or in the shape that the sampler gave the batch.

        The tensor knows when it was drawn, so that ``buffer.update_priority(batch.indices, priority)`` leaves out rows
        that were replaced since. What is computed from it, a slice or a copy, does not.
        """
        indices = self._indices
        if indices is None:
            indices = self._indices = _dated(self._draw, self._write_count)
        return indices

    @_read_only
    def info(self) -> Mapping[str, Any]:
        """What the sampler says of each row, such as weights: float ``[batch]``."""
        return self._draw.info or _NoInfo()

    @_read_only
    def number(self) -> int:
        """Number of the ticket: 0 for the first draw of the buffer, then 1, 2, ..."""
        return self._number

    @_read_only
    def epoch(self) -> int | None:
        """Number of the pass; None for samplers without passes."""
        return self._draw.epoch

    @_read_only
    def last(self) -> bool:
        """Whether the batch ends its pass."""
        return self._draw.last

    @_read_only
    def write_count(self) -> int:
        """Number of items that had been written at the draw; 0 if that is not known.

        Items are numbered in the order in which they are written. So a row whose item has this number or a higher one
        was replaced since.
        """
        return self._write_count

    @_read_only
    def lengths(self) -> torch.Tensor | None:
        """Lengths of ragged groups of rows, one after the other: int64 ``[groups]``. None if rows are not grouped."""
        return self._draw.lengths

    def __len__(self) -> int:
        """Number of rows."""
        return self._draw.indices.numel()

    def __getitem__(self, key: Any) -> Any:
        """``data[key]``.

        Raises:
            KeyError: the data has no such key; the message lists those that there are.
            TypeError: the data has no keys.
        """
        data: Any = self._data
        try:
            return data[key]
        except KeyError:
            raise KeyError(_no_key(self, key)) from None
        except (TypeError, IndexError) as error:
            if isinstance(key, str):
                raise TypeError(f"expected data with keys for {_quoted(key)}, found {summary(data)}") from error
            raise

    def __contains__(self, key: object) -> bool:
        """``key in data``."""
        data: Any = self._data
        return key in data

    if TYPE_CHECKING:
        # Type checkers refuse what the methods below explain at run time.
        __iter__: ClassVar[None]
    else:

        def __iter__(self) -> NoReturn:
            raise TypeError("a Batch is not iterable: iterate over batch.data, or over `async for batch in buffer`")

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(_no_attribute(self, name), name=name, obj=self)

    def part(self, rank: int, world: int) -> Self:
        """The rows of one of several ranks that share the batch: each row is in the part of exactly one.

        Parts follow each other along the first axis, in the order of the ranks. If the rows cannot be divided evenly,
        the first ranks have one more each. Rows that are grouped (``lengths``), such as packed episodes or the shares
        of ``TokenBudgetSampler(ranks=world)``, are divided by groups. Tensors share the memory of the batch.

        Args:
            rank: which part, from 0 to ``world - 1``.
            world: number of ranks.

        Raises:
            ValueError: there is no such rank.
            TypeError: an argument is no int, or a leaf of the data does not have the rows along its first axis, as
                after a ``collate_fn`` that packs them: divide it yourself.
        """
        world = count(world, "world", 1, example=4)
        rank = count(rank, "rank", 0, most=world - 1, example=0)
        lengths = self.lengths
        rows = len(self.indices) if lengths is None else len(lengths)
        start, stop = (each * (rows // world) + min(each, rows % world) for each in (rank, rank + 1))
        if lengths is not None:
            ends = [0, *lengths.cumsum(0).tolist()]
            lengths, (start, stop) = lengths[start:stop], (ends[start], ends[stop])
        wanted = slice(start, stop)
        data = _rows_of(self.data, len(self.indices), wanted)
        info = _rows_of(dict(self.info), len(self.indices), wanted)
        values = (self.number, self.epoch, self.last, self.write_count, lengths)
        return type(self)(data, self.indices[wanted], info, *values)

    def __copy__(self) -> Self:
        """Share the data."""
        return type(self)(*_values(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the data."""
        return type(self)(*copy.deepcopy(_values(self), memo))

    def __replace__(self, /, **changes: Any) -> Self:
        """``copy.replace``."""
        return dataclasses.replace(self, **changes)

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        """Pickle the rows of this batch, and not the memory that other batches or fields share with them."""
        return type(self), own_memory(_values(self))

    def __repr__(self) -> str:
        """One short line of keys, shapes and dtypes, such as ``Batch(12, {obs: float32 [256, 60]}, epoch=0)``."""
        more = _told(info=self.info, epoch=self.epoch, last=self.last, lengths=self.lengths)
        return f"{type(self).__name__}({literal(self._number)}, {summary(self._data)}{more})"


def batch_of(data: Any, number: int, draw: Draw, seed: int, write_count: int) -> Batch[Any]:
    """Make the batch of a ticket, as in ``batch_of(data, *ticket)``: the short way, which every ``sample()`` takes.

    Args:
        data: what was gathered, after ``collate_fn`` and transforms.
        number: number of the ticket.
        draw: the rows.
        seed: seed of the transforms, which a batch does not keep.
        write_count: number of items that had been written at the draw.
    """
    batch: Batch[Any] = _new(Batch)
    batch._data = data
    batch._draw = draw
    batch._number = number
    batch._write_count = write_count
    batch._indices = None
    return batch


def _rows_of(data: Any, rows: int, wanted: slice) -> Any:
    """Some of the rows of a tree."""
    if isinstance(data, list) and len(data) == rows:
        return data[wanted]
    leaves, spec = flatten(data, batched=True)
    for path, leaf in zip(spec.paths(), leaves, strict=True):
        if getattr(leaf, "is_nested", False) or tuple(getattr(leaf, "shape", ()))[:1] != (rows,):
            name = path or "the data"
            raise TypeError(f"part: expected {rows} rows along the first axis of {name}, found {summary(leaf)}")
    return unflatten(spec, [leaf[wanted] for leaf in leaves])


def say_again(batch: Batch[Any], draw: Draw) -> None:
    """Let a batch that nobody has yet say what its sampler says of its rows now."""
    batch._draw = draw


def ticket_of(batch: Batch[Any], seed: int) -> Ticket:
    """The ticket that ``batch_of`` has made a batch of."""
    return Ticket(batch._number, batch._draw, seed, batch._write_count)


def drawn_rows(batch_or_indices: Any) -> tuple[Any, int | None]:
    """The rows of a batch, and how many items had been written when they were drawn.

    Args:
        batch_or_indices: a batch, its ``indices``, or rows of any other origin.

    Returns:
        The rows, and the write count of their draw; None if that is not known.
    """
    if isinstance(batch_or_indices, Batch):
        return batch_or_indices.indices, batch_or_indices.write_count or None
    return batch_or_indices, getattr(batch_or_indices, _NUMBERS_TAG, None)


_new = object.__new__


def _dated(draw: Draw, write_count: int) -> torch.Tensor:
    """The indices of a draw as a tensor that says when they were drawn."""
    indices = draw.indices
    if draw.shape is not None:
        indices = indices.reshape(draw.shape)
    if write_count and isinstance(indices, torch.Tensor):
        if getattr(indices, _NUMBERS_TAG, write_count) != write_count:
            indices = indices.detach()  # a sampler that draws the same tensor again: each batch has its own date
        setattr(indices, _NUMBERS_TAG, write_count)
    return indices


def _values(batch: Batch[Any]) -> tuple[Any, ...]:
    """What the constructor takes."""
    draw = batch._draw
    rest = (batch.number, draw.epoch, draw.last, batch.write_count, draw.lengths)
    return batch.data, batch.indices, dict(draw.info), *rest


# -- messages ---------------------------------------------------------------------------------------------------------

_HINTS = {
    "to": "ReplayBuffer(..., device=...) makes batches on a device, and `.to()` moves a tensor of batch.data",
    "cuda": 'ReplayBuffer(..., device="cuda") makes batches on a GPU, and `.cuda()` moves a tensor of batch.data',
    "shape": "len(batch) is the number of rows",
    "size": "len(batch) is the number of rows",
}


def _told(**parts: Any) -> str:
    """Arguments for a ``repr``, those left out that say nothing."""
    telling = {name: value for name, value in parts.items() if value is not None and value is not False}
    return "".join(
        f", {name}={literal(value)}"
        for name, value in telling.items()
        if not (isinstance(value, Mapping) and not value)
    )


def _quoted(key: str) -> str:
    return f'batch["{key[:80]}"]'


def _no_key(batch: Batch[Any], key: Any) -> str:
    data = batch.data
    there_are = f" {listed(data.keys())}" if isinstance(data, Mapping) else " of the data"
    hint = f"; batch.{key} is an attribute" if key in Batch.__match_args__ else ""
    if isinstance(key, str) and key in batch.info:
        hint = f'; the sampler says it: batch.info["{key}"]'
    return f"expected one of the keys{there_are}; found {listed([key])}{hint}"


def _no_attribute(batch: Batch[Any], name: str) -> str:
    message = f"{type(batch).__name__!r} object has no attribute {name!r}"
    if name.startswith("_"):
        return message  # asked for by copy, pickle and the like; a batch that is being made has no data yet
    data = batch._data
    if isinstance(data, Mapping) and name in data:
        return f"{message}: write {_quoted(name)}"
    if name in _HINTS:
        return f"{message}: {_HINTS[name]}"
    if hasattr(data, name):
        return f"{message}: write batch.data.{name}"
    return f"{message}; its data is {summary(data)}"


# -- as a pytree ------------------------------------------------------------------------------------------------------


def _flatten(batch: Batch[Any]) -> tuple[list[Any], tuple[int, int | None, bool, int]]:
    children = [batch.data, batch.indices, dict(batch.info)]
    if batch.lengths is not None:
        children.append(batch.lengths)  # only where there are some: None would be a leaf
    return children, (batch.number, batch.epoch, batch.last, batch.write_count)


def _unflatten(children: Any, context: Any) -> Batch[Any]:
    data, indices, info, *lengths = children
    return Batch(data, indices, info, *context, **({"lengths": lengths[0]} if lengths else {}))


torch_pytree.register_pytree_node(Batch, _flatten, _unflatten, serialized_type_name="asyncbuf.Batch")
