"""Tickets and batches: what was drawn, and what a consumer gets."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils import _pytree as torch_pytree

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Draw(NamedTuple):
    """What a sampler decides.

    Attributes:
        indices: the rows of a batch, int64 ``[batch]``, on the CPU.
        info: what else there is to say of each row, such as weights ``[batch]``.
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

    def __reduce__(self) -> tuple[type[Draw], tuple[Any, ...]]:
        """Pickle, which a read-only mapping does not."""
        rest = (self.shape, self.lengths, dict(self.joins))
        return Draw, (self.indices, dict(self.info), self.epoch, self.last, *rest)


class Ticket(NamedTuple):
    """One numbered draw. Tickets are cheap and are made in order.

    Attributes:
        number: 0 for the first draw of the buffer, then 1, 2, ...
        draw: what the sampler decided.
        seed: seed of the generator that transforms get, 63 bits.
        write_count: number of items that had been written when it was drawn: a row whose item has a number from this on
            was replaced since.
    """

    number: int
    draw: Draw
    seed: int
    write_count: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A ticket made real. Also a pytree: ``torch.utils._pytree.tree_map`` reaches the tensors.

    Attributes:
        data: a tree whose leaves have shape ``[batch, *item]``; after ``collate_fn`` and transforms, what they return.
        indices: the rows it was gathered from, int64 ``[batch]``.
        info: what the sampler says of each row.
        number: number of the ticket.
        epoch: number of the pass, None for samplers without passes.
        last: whether it ends a pass.
    """

    data: Any
    indices: torch.Tensor
    info: Mapping[str, Any]
    number: int
    epoch: int | None = None
    last: bool = False

    def __getitem__(self, key: Any) -> Any:
        """``data[key]``."""
        return self.data[key]

    def __contains__(self, key: object) -> bool:
        """``key in data``."""
        return key in self.data

    # Without this, Python would try batch[0], batch[1], ... as if it were a list.
    __iter__ = None

    def __len__(self) -> int:
        """Number of items."""
        return self.indices.shape[0]


def batch_of(data: Any, number: int, draw: Draw, seed: int, write_count: int) -> Batch:
    """The batch of a ticket: what was made of its rows, with what there is to say of its draw."""
    indices = draw.indices if draw.shape is None else draw.indices.view(draw.shape)
    return Batch(data, indices, draw.info or {}, number, draw.epoch, draw.last)


def _flatten(batch: Batch) -> tuple[list[Any], tuple[int, int | None, bool]]:
    return [batch.data, batch.indices, dict(batch.info)], (batch.number, batch.epoch, batch.last)


def _unflatten(children: Any, context: Any) -> Batch:
    return Batch(*children, *context)


torch_pytree.register_pytree_node(Batch, _flatten, _unflatten, serialized_type_name="asyncbuf.Batch")
