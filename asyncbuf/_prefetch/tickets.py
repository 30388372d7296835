"""The tickets that nobody has taken, as they go into a snapshot and come out of one."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from asyncbuf._plain.codec import cloned, decode, encode
from asyncbuf._plain.state import fields, same
from asyncbuf._plain.tree import map_leaves
from asyncbuf._prefetch.queue import Entry
from asyncbuf._prefetch.transforms import Partial
from asyncbuf.batch import Draw, Ticket
from asyncbuf.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointVersionError

PAYLOAD_VERSION = 1


@dataclass(frozen=True, slots=True)
class SavedTicket:
    """A ticket as far as it is.

    Attributes:
        ticket: the draw.
        batch_size: rows that were asked for.
        is_main: whether it stood in the line that is prefetched.
        step: how many steps of the transforms are done; None if it is a batch, -1 if its rows were not gathered.
        data: what a consumer gets, or what the next step starts from.
    """

    ticket: Ticket
    batch_size: int
    is_main: bool
    step: int | None
    data: Any

    @classmethod
    def of(cls, entry: Entry, batch_size: int, *, is_main: bool) -> Self:
        """What there is of a ticket now. Its tensors are the live ones."""
        if entry.batch is not None:
            return cls(entry.ticket, batch_size, is_main, None, entry.batch.data)
        if entry.progress is not None:
            return cls(entry.ticket, batch_size, is_main, entry.progress.step, entry.progress.data)
        return cls(entry.ticket, batch_size, is_main, -1, None)

    def entry(self, delivery: int | None = None) -> Entry:
        """A ticket that stands in line again.

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
        return {
            "number": ticket.number,
            "seed": ticket.seed,
            "batch_size": self.batch_size,
            "main": self.is_main,
            "epoch": draw.epoch,
            "last": draw.last,
            "step": self.step,
            # Encoded together, so that what is shared between them stays shared.
            "content": encode(
                {"indices": draw.indices, "info": dict(draw.info), "data": self.data}, f"batch {ticket.number}"
            ),
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

        return replace(self, data=map_leaves(clone, self.data))

    @classmethod
    def from_plain(cls, plain: Any, rows: int) -> Self:
        """The way back, into a storage with so many rows.

        Raises:
            CheckpointCorruptError: it is no ticket.
        """
        what = "prefetch queue"
        keys = {"number", "seed", "batch_size", "main", "epoch", "last", "step", "content"}
        if not isinstance(plain, dict) or plain.keys() != keys:
            found = sorted(map(str, plain)) if isinstance(plain, dict) else plain
            raise CheckpointCorruptError(f"{what}: expected a ticket of {sorted(keys)}, found {found!r} in the list")
        known = {key: value for key, value in plain.items() if key not in ("epoch", "step", "content")}
        number, seed, batch_size, is_main, last = fields(
            known, what, number=int, seed=int, batch_size=int, main=bool, last=bool
        )
        content = decode(plain["content"], f"batch {number}")
        if not isinstance(content, dict) or content.keys() != {"indices", "info", "data"}:
            raise CheckpointCorruptError(f"{what}: expected the content of batch {number}, found {content!r}")
        indices, info, epoch, step = content["indices"], content["info"], plain["epoch"], plain["step"]
        if not isinstance(indices, torch.Tensor) or indices.dtype is not torch.int64 or indices.ndim != 1:
            raise CheckpointCorruptError(f"{what}: expected int64 indices of batch {number}, found {indices!r}")
        if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= rows):
            raise CheckpointCorruptError(f"{what}: expected indices of rows 0 to {rows - 1}, found {indices.tolist()}")
        if not isinstance(info, dict) or seed >= 2**63:
            raise CheckpointCorruptError(f"{what}: expected an info dict, a seed of 63 bits; found {info!r}, {seed}")
        for name, value, least in (("epoch", epoch, 0), ("step", step, -1)):
            if value is not None and (type(value) is not int or value < least):
                raise CheckpointCorruptError(f"{what}: expected {name} of batch {number} as a number, found {value!r}")
        draw = Draw(indices, info, epoch, last)
        return cls(Ticket(number, draw, seed), batch_size, is_main, step, content["data"])


@dataclass(frozen=True, slots=True)
class Tickets:
    """All tickets that nobody has taken.

    Attributes:
        number: number of the next ticket.
        depth: the prefetch depth.
        ahead: how many of the prefetched line were drawn beyond the depth, for consumers that were waiting or had given
            up waiting.
        queue: the tickets, in order.
    """

    number: int
    depth: int
    ahead: int
    queue: list[SavedTicket]

    def plain(self) -> dict[str, Any]:
        """As plain data, in memory of its own."""
        return {
            "version": PAYLOAD_VERSION,
            "capacity": self.depth,
            "waiting": self.ahead,
            "next": self.number,
            "queue": [ticket.plain() for ticket in self.queue],
        }

    def cloned(self) -> Self:
        """The same tickets with tensors of their own, which have no history."""
        return replace(self, queue=[ticket.cloned() for ticket in self.queue])

    @classmethod
    def from_plain(cls, plain: Any, depth: int, *, steps: int, rows: int, elastic: bool) -> Self:
        """The way back, checked from the outside in.

        Args:
            plain: the payload.
            depth: the prefetch depth of the buffer.
            steps: number of steps of its transforms.
            rows: number of rows of its storage.
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
        if type(version) is not int or version != PAYLOAD_VERSION:
            raise CheckpointVersionError(f"{what}: expected version {PAYLOAD_VERSION}, found {version!r}")
        capacity, waiting, number = (_natural(plain, name) for name in ("capacity", "waiting", "next"))
        if not elastic:
            same(capacity, depth, "prefetch depth (elastic=True accepts another)")
        queue = plain.get("queue")
        if not isinstance(queue, list):
            raise CheckpointCorruptError(f"{what}: expected the queue as a list, found {type(queue).__name__}")
        tickets = [SavedTicket.from_plain(entry, rows) for entry in queue]
        main = sum(ticket.is_main for ticket in tickets)
        if main > capacity + waiting:
            raise CheckpointCorruptError(
                f"{what}: expected at most {capacity} batches and {waiting} for waiting consumers, found {main}"
            )
        for ticket in tickets:
            if ticket.ticket.number >= number:
                raise CheckpointCorruptError(f"{what}: expected a number below {number}, found {ticket.ticket.number}")
        if any(ticket.step is not None and ticket.step > steps for ticket in tickets):
            raise CheckpointMismatchError(f"{what}: expected at most {steps} steps of transforms, found more")
        return cls(number, capacity, waiting, tickets)


def _natural(plain: dict[str, Any], name: str) -> int:
    value = plain.get(name)
    if type(value) is not int or value < 0:
        raise CheckpointCorruptError(f"prefetch payload: expected {name} as an int of at least 0, found {value!r}")
    return value
