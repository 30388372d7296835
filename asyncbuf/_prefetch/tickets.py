"""The tickets that nobody has taken, as they go into a snapshot and come out of one."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import torch

from asyncbuf._plain.codec import cloned, decode, encode
from asyncbuf._plain.state import Seed, described, fields, is_int64, natural, same
from asyncbuf._plain.tree import map_leaves
from asyncbuf._prefetch.entry import Entry
from asyncbuf._prefetch.gathered import Gathered
from asyncbuf._prefetch.transforms import Partial
from asyncbuf._runtime.summary import summary
from asyncbuf.batch import Draw, Ticket
from asyncbuf.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointVersionError

if TYPE_CHECKING:
    from collections.abc import Callable

PAYLOAD_VERSION = 2
_WHAT = "prefetch queue"
_KINDS: dict[str, type] = {"number": int, "seed": Seed, "batch_size": int, "main": bool, "last": bool}
_CONTENT = ("indices", "info", "data", "lengths", "joins", "joined")
# A ticket of version 1 says nothing of when it was drawn.
_UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class SavedTicket:
    """A ticket as far as it is.

    Attributes:
        ticket: the draw.
        batch_size: rows that were asked for.
        is_main: whether it stood in the queue that is prefetched.
        step: how many steps of the transforms are done; None if it is a batch, -1 if its rows were not gathered.
        data: what a consumer gets, or what the next step starts from: ``Gathered``, where rows were joined to it.
    """

    ticket: Ticket
    batch_size: int
    is_main: bool
    step: int | None
    data: Any

    @classmethod
    def of(cls, entry: Entry, batch_size: int, *, is_main: bool) -> Self:
        """The ticket as far as it has come; shares its tensors."""
        batch = entry.batch or entry.lent
        if batch is not None:
            return cls(entry.ticket, batch_size, is_main, None, batch.data)
        if entry.progress is not None:
            return cls(entry.ticket, batch_size, is_main, entry.progress.step, entry.progress.data)
        return cls(entry.ticket, batch_size, is_main, -1, None)

    def entry(self, delivery: int | None = None) -> Entry:
        """A ticket that stands in a queue again.

        Args:
            delivery: the step that brings a batch to its device. It is done again: tensors are saved on the CPU.
        """
        entry = Entry(self.ticket, is_prefetched=self.is_main)
        if self.step is None and delivery is not None:
            entry.keep(Partial(delivery, self.data))
        elif self.step is None:
            entry.ready(self.data)
        elif self.step >= 0:
            entry.keep(Partial(self.step, self.data))
        return entry

    def plain(self) -> dict[str, Any]:
        """As plain data, in memory of its own."""
        ticket, draw = self.ticket, self.ticket.draw
        is_gathered = type(self.data) is Gathered
        content = {
            "indices": draw.indices,
            "info": dict(draw.info),
            "lengths": draw.lengths,
            "joins": dict(draw.joins),
            "data": self.data.data if is_gathered else self.data,
            "joined": dict(self.data.joined) if is_gathered else None,
        }
        return {
            "number": ticket.number,
            "seed": ticket.seed,
            "write_count": ticket.write_count,
            "batch_size": self.batch_size,
            "main": self.is_main,
            "epoch": draw.epoch,
            "last": draw.last,
            "shape": None if draw.shape is None else list(draw.shape),
            "step": self.step,
            # Encoded together, so that what is shared between them stays shared.
            "content": encode(content, f"batch {ticket.number}"),
        }

    def cloned(self) -> Self:
        """The same with tensors of its own, which have no history; what is shared stays shared."""
        copies: dict[int, torch.Tensor] = {}

        def clone(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return copy.deepcopy(leaf)
            if id(leaf) not in copies:
                copies[id(leaf)] = cloned(leaf)
            return copies[id(leaf)]

        if type(self.data) is not Gathered:
            return replace(self, data=map_leaves(clone, self.data))
        data, joined = map_leaves(clone, (self.data.data, dict(self.data.joined)))
        return replace(self, data=Gathered(self.data.draw, data, joined))

    @classmethod
    def from_plain(cls, plain: Any, version: int, capacity: int, *, are_items: bool = False) -> Self:
        """The way back, into a storage with so many rows.

        Args:
            plain: the ticket.
            version: that of the payload.
            capacity: number of rows of the storage.
            are_items: whether the storage gathers lists of items.

        Raises:
            CheckpointCorruptError: it is no ticket.
        """
        keys = {*_KINDS, "epoch", "step", "content"} | ({"write_count", "shape"} if version > 1 else set())
        if not isinstance(plain, dict) or plain.keys() != keys:
            found = sorted(map(str, plain)) if isinstance(plain, dict) else plain
            raise CheckpointCorruptError(f"{_WHAT}: expected a ticket of {sorted(keys)}, found {found!r} in the list")
        number, seed, batch_size, is_main, _ = fields({key: plain[key] for key in _KINDS}, _WHAT, **_KINDS)
        natural(batch_size, f"{_WHAT}: expected batch_size of batch {number}", least=1)
        step, write_count = plain["step"], plain.get("write_count", _UNKNOWN)
        _check_number("step", step, number, -1)
        if version > 1:
            _check_number("write_count", write_count, number, 0, optional=False)
        draw, data = _drawn(plain, number, _CONTENT if version > 1 else _CONTENT[:3], capacity)
        _check_gathered(draw, data, step, number, are_items=are_items)
        return cls(Ticket(number, draw, seed, write_count), batch_size, is_main, step, data)

    def drawn_from(self, write_count: int) -> Self:
        """The same, if it can have been drawn after no more than so many items were written.

        Raises:
            CheckpointCorruptError: it cannot; or its rows are still to be gathered, and some were never written.
        """
        ticket = self.ticket
        if ticket.write_count == _UNKNOWN:
            ticket = ticket._replace(write_count=write_count)
        if ticket.write_count > write_count:
            raise CheckpointCorruptError(
                f"{_WHAT}: expected batch {ticket.number} to be drawn from at most {write_count} items, found "
                f"{ticket.write_count}"
            )
        if self.step == -1:
            for rows in (ticket.draw.indices, *ticket.draw.joins.values()):
                _check_rows(rows, ticket.write_count, ticket.number)
        return replace(self, ticket=ticket)


def _drawn(plain: dict[str, Any], number: int, names: tuple[str, ...], capacity: int) -> tuple[Draw, Any]:
    """The draw of a ticket, and what was made of it."""
    content = decode(plain["content"], f"batch {number}")
    if not isinstance(content, dict) or content.keys() != set(names):
        raise CheckpointCorruptError(f"{_WHAT}: expected the content of batch {number}, found {summary(content)}")
    indices, info, data = (content[name] for name in _CONTENT[:3])
    lengths, joins, joined = (content.get(name) for name in _CONTENT[3:])
    if not is_int64(indices) or indices.ndim != 1 or not len(indices):
        raise CheckpointCorruptError(
            f"{_WHAT}: expected int64 indices [rows] of batch {number}, found {described(indices)}"
        )
    _check_rows(indices, capacity, number)
    _check_number("epoch", plain["epoch"], number, 0)
    joins = {} if joins is None else joins
    if not isinstance(info, dict) or not isinstance(joins, dict) or not all(map(is_int64, joins.values())):
        raise CheckpointCorruptError(
            f"{_WHAT}: expected an info dict and int64 joins of batch {number}, found {summary(info)}, {summary(joins)}"
        )
    for rows in joins.values():
        _check_rows(rows, capacity, number)
    shape = _shape_of(plain.get("shape"), lengths, indices, number)
    draw = Draw.of(indices, info, plain["epoch"], plain["last"], shape, lengths, joins)
    if joined is None:
        return draw, data
    if not isinstance(joined, dict) or joined.keys() != joins.keys():
        raise CheckpointCorruptError(
            f"{_WHAT}: expected the joins {sorted(joins)} of batch {number}, found {summary(joined)}"
        )
    return draw, Gathered(draw, data, joined)


def _shape_of(shape: Any, lengths: Any, indices: torch.Tensor, number: int) -> tuple[int, ...] | None:
    """The shape of a draw, once it and the lengths of its groups are found to fit the rows."""
    rows = indices.shape[0]
    if lengths is not None and (
        not is_int64(lengths) or lengths.ndim != 1 or bool((lengths < 0).any()) or int(lengths.sum()) != rows
    ):
        raise CheckpointCorruptError(
            f"{_WHAT}: expected groups of {rows} rows of batch {number}, found {described(lengths)}"
        )
    if shape is None:
        return None
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape) or math.prod(shape) != rows:
        raise CheckpointCorruptError(f"{_WHAT}: expected a shape of {rows} rows of batch {number}, found {shape!r}")
    return tuple(shape)


def _check_gathered(draw: Draw, data: Any, step: int | None, number: int, *, are_items: bool) -> None:
    """Refuse what a step of the transforms cannot go on with."""
    if step == -1:
        fits, expected = data is None, "nothing, because its rows were not gathered"
    elif step != 0:
        fits, expected = type(data) is not Gathered, "one tree, because its joins are combined"
    elif are_items:
        parts = [(draw.indices, data)]
        if type(data) is Gathered:
            parts = [(draw.indices, data.data), *((draw.joins[name], data.joined[name]) for name in draw.joins)]
        fits = all(type(items) is list and len(items) == rows.numel() for rows, items in parts)
        expected = "lists of items, one for each row, because they are not collated"
    else:
        return
    if not fits:
        found = "rows and joins" if type(data) is Gathered else summary(data)
        raise CheckpointCorruptError(f"{_WHAT}: expected of batch {number} {expected}; found {found}")


def _check_rows(rows: torch.Tensor, count: int, number: int) -> None:
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= count):
        raise CheckpointCorruptError(
            f"{_WHAT}: expected indices of rows 0 to {count - 1} of batch {number}, found {rows.tolist()}"
        )


def _check_number(name: str, value: Any, number: int, least: int, *, optional: bool = True) -> None:
    if value is None and optional:
        return
    natural(value, f"{_WHAT}: expected {name} of batch {number}", least=least)


@dataclass(frozen=True, slots=True)
class Tickets:
    """All tickets that nobody has taken, and what became of the others.

    Attributes:
        number: number of the next ticket.
        depth: the prefetch depth.
        ahead: how many of the prefetched queue were drawn beyond the depth, for consumers that were waiting or had
            given up waiting.
        queue: the tickets, in order.
        delivered: number of batches that were handed to consumers.
        dropped: number of tickets that were dropped.
        unseen: those of the dropped ones that stateful transforms are still to see.
    """

    number: int
    depth: int
    ahead: int
    queue: list[SavedTicket]
    delivered: int = 0
    dropped: int = 0
    unseen: list[SavedTicket] = field(default_factory=list)

    def plain(self, copied: Callable[[], None] | None = None) -> dict[str, Any]:
        """As plain data, in memory of its own.

        Args:
            copied: called after each ticket of the queue.
        """
        queue = []
        for ticket in self.queue:
            queue.append(ticket.plain())
            if copied is not None:
                copied()
        queue += [{**ticket.plain(), "dropped": True} for ticket in self.unseen]
        return {
            "version": PAYLOAD_VERSION,
            "capacity": self.depth,
            "waiting": self.ahead,
            "next": self.number,
            # Every ticket below this one is gone: none of them may come back.
            "first": min((ticket.ticket.number for ticket in self.queue), default=self.number),
            "delivered": self.delivered,
            "dropped": self.dropped,
            "queue": queue,
        }

    def without_data(self) -> Self:
        """The same tickets as they were drawn: what was made of them can be made again."""
        return replace(self, queue=[replace(ticket, step=-1, data=None) for ticket in self.queue])

    def cloned(self) -> Self:
        """The same tickets with tensors of their own, which have no history."""
        return replace(
            self, queue=[ticket.cloned() for ticket in self.queue], unseen=[ticket.cloned() for ticket in self.unseen]
        )

    def drawn_from(self, write_count: int) -> Self:
        """The same, as those of a table into which so many items were written.

        Raises:
            CheckpointCorruptError: they cannot have been drawn from it.
        """
        return replace(
            self,
            queue=[ticket.drawn_from(write_count) for ticket in self.queue],
            unseen=[ticket.drawn_from(write_count) for ticket in self.unseen],
        )

    @classmethod
    def from_plain(
        cls,
        plain: Any,
        depth: int,
        *,
        steps: int,
        capacity: int,
        batch_size: int | None,
        are_items: bool,
        elastic: bool,
    ) -> Self:
        """The way back, checked from the outside in.

        Args:
            plain: the payload.
            depth: the prefetch depth of the buffer.
            steps: number of steps of its transforms.
            capacity: number of rows of its storage.
            batch_size: rows of a prefetched ticket, by the settings that were saved.
            are_items: whether the storage gathers lists of items.
            elastic: whether another depth is accepted.

        Raises:
            CheckpointCorruptError: the payload is malformed.
            CheckpointVersionError: its version is not known.
            CheckpointMismatchError: it was saved at another depth.
        """
        what = "prefetch payload"
        if not isinstance(plain, dict):
            raise CheckpointCorruptError(f"{what}: expected a dict, found {type(plain).__name__}")
        version = plain.get("version")
        if type(version) is not int or not 1 <= version <= PAYLOAD_VERSION:
            raise CheckpointVersionError(f"{what}: expected a version from 1 to {PAYLOAD_VERSION}, found {version!r}")
        saved_depth, ahead, number = (_natural(plain, name) for name in ("capacity", "waiting", "next"))
        if not elastic:
            same(saved_depth, depth, "prefetch depth (elastic=True accepts another)")
        known = {"version", "capacity", "waiting", "next", "first", "delivered", "dropped", "queue"}
        if not plain.keys() <= known:
            raise CheckpointCorruptError(f"{what}: expected the entries {sorted(known)}, found {sorted(plain)}")
        queue = plain.get("queue")
        if not isinstance(queue, list):
            raise CheckpointCorruptError(f"{what}: expected the queue as a list, found {type(queue).__name__}")
        parts: tuple[list[SavedTicket], list[SavedTicket]] = [], []
        for entry in queue:
            is_dropped = isinstance(entry, dict) and entry.get("dropped") is True
            entry = {key: value for key, value in entry.items() if key != "dropped"} if is_dropped else entry
            parts[is_dropped].append(SavedTicket.from_plain(entry, version, capacity, are_items=are_items))
        tickets = cls(
            number,
            saved_depth,
            ahead,
            parts[False],
            _natural(plain, "delivered") if version > 1 else number - len(queue),
            _natural(plain, "dropped") if version > 1 else 0,
            parts[True],
        )
        tickets._check(steps, batch_size)
        first = min((ticket.ticket.number for ticket in tickets.queue), default=number)
        if "first" in plain and _natural(plain, "first") != first:
            raise CheckpointCorruptError(
                f"{what}: expected {plain['first']} as the first ticket that nobody has taken, found {first}"
            )
        return tickets

    def _check(self, steps: int, batch_size: int | None) -> None:
        """Refuse tickets that do not go together."""
        what = "prefetch payload"
        main = sum(ticket.is_main for ticket in self.queue)
        if main > self.depth + self.ahead:
            raise CheckpointCorruptError(
                f"{what}: expected at most {self.depth} batches and {self.ahead} for waiting consumers, found {main}"
            )
        numbers = [ticket.ticket.number for ticket in (*self.queue, *self.unseen)]
        if len(set(numbers)) != len(numbers) or max(numbers, default=-1) >= self.number:
            raise CheckpointCorruptError(f"{what}: expected numbers below {self.number}, each once, found {numbers}")
        sizes = {ticket.batch_size for ticket in self.queue if ticket.is_main}
        if not sizes <= {batch_size}:
            raise CheckpointCorruptError(f"{what}: expected prefetched batches of {batch_size} rows, found {sizes}")
        last: dict[Any, int] = {}  # of each queue
        for ticket in self.queue:
            place = "main" if ticket.is_main else ticket.batch_size
            if ticket.ticket.number < last.get(place, -1):
                raise CheckpointCorruptError(f"{what}: expected numbers in ascending order, found {numbers}")
            last[place] = ticket.ticket.number
        if len(self.unseen) > self.dropped or any(ticket.step in (None, -1) for ticket in self.unseen):
            raise CheckpointCorruptError(
                f"{what}: expected dropped tickets that are gathered and not made, at most {self.dropped}, found others"
            )
        if self.delivered + self.dropped + len(self.queue) != self.number:
            raise CheckpointCorruptError(
                f"{what}: expected {self.number} tickets, as many as were drawn; found {self.delivered} delivered, "
                f"{self.dropped} dropped and {len(self.queue)} in the queue"
            )
        if any(ticket.step is not None and ticket.step > steps for ticket in (*self.queue, *self.unseen)):
            raise CheckpointMismatchError(f"{what}: expected at most {steps} steps of transforms, found more")


def _natural(plain: dict[str, Any], name: str) -> int:
    return natural(plain.get(name), f"prefetch payload: expected {name}")
