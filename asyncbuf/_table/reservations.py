"""Work that was begun and has no items yet: reservations, alone and in groups, as they are in every checkpoint."""

from __future__ import annotations

import enum
import json
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from asyncbuf._plain.state import fields, int64s, natural
from asyncbuf._table.deliveries import is_key
from asyncbuf.errors import CheckpointCorruptError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable

    from asyncbuf._table.deliveries import Key
    from asyncbuf.rows import Rows

_ALONE = -1


class Room(Protocol):
    """What a limiter has admitted for items that are still to be made."""

    def end(self) -> None:
        """Hold nothing any more; who waits for room is not told yet."""

    def give_back(self) -> None:
        """Let others have what is left of it."""

    def shrink(self, items: int) -> None:
        """Let others have so much of it."""


class Status(enum.IntEnum):
    """How far a reservation is."""

    OPEN = 0
    HELD = 1  # a member of a group has items, and waits for the others
    FAILED = 2  # a member of a group has ended without any
    LATE = 3  # the same, because the deadline was over


class Group:
    """Reservations whose items become visible together.

    Attributes:
        number: number of its first member.
        size: how many members there are.
        least: how many of them must have items in the end.
        deadline: seconds from the beginning of work to the end of it; None for none.
        key: what the write will be known by; None for none.
        members: the members, in order.
        when: by the clock of the event loop, when the deadline is over; None if nobody is at work since a restore.
        at_work: the members that somebody works on, each with what stops that.
        room: for the items of all members; None while nobody works on them, or where no limiter holds writers.
        entering: held while one waits for the room of all; None before that.
    """

    __slots__ = (
        "at_work",
        "deadline",
        "entering",
        "key",
        "least",
        "members",
        "number",
        "room",
        "size",
        "text",
        "when",
    )

    def __init__(self, number: int, size: int, least: int, deadline: float | None, key: Key | None) -> None:
        self.number, self.size, self.least, self.deadline, self.key = number, size, least, deadline, key
        self.members: list[Reserved] = []
        self.when: float | None = None
        self.at_work: dict[Reserved, Callable[[], None]] = {}
        self.room: Room | None = None
        self.entering: asyncio.Lock | None = None
        self.text = json.dumps([number, size, least, deadline, key]).encode()

    def count(self, status: Status) -> int:
        """How many members are so far."""
        return sum(member.status is status for member in self.members)

    @property
    def survivors(self) -> int:
        """How many members have items, or may have some."""
        return self.count(Status.OPEN) + self.count(Status.HELD)

    @property
    def is_given_out(self) -> bool:
        """Whether somebody has a member to work on."""
        return any(member.is_given_out and member.status is Status.OPEN for member in self.members)

    def is_last(self, ending: Reserved, now: float) -> bool:
        """Whether no member but one can still have items: the deadline ends those, too, that nobody works on.

        Args:
            ending: that one.
            now: the time, by the clock of the event loop.
        """
        others = [member for member in self.members if member.status is Status.OPEN and member is not ending]
        is_over = self.when is not None and now >= self.when
        return not others or (is_over and not any(member in self.at_work for member in others))


class Reserved:
    """A reservation.

    Attributes:
        number: how many came before it.
        group: the group that it is a member of; None if it stands alone.
        status: how far it is.
        payload: key and payload, as bytes.
        partial: the partial result, as bytes; empty for none.
        items: what a member that is HELD has, as bytes.
        most: how many items it will have at most; 0 if that was not said.
        room: for these items, if it stands alone; None while nobody works on it, or where no limiter holds writers.
        is_given_out: whether somebody has it to work on.
        is_at_work: whether somebody works on it.
    """

    __slots__ = (
        "group",
        "is_at_work",
        "is_given_out",
        "items",
        "most",
        "number",
        "partial",
        "payload",
        "room",
        "status",
    )

    def __init__(self, number: int, payload: bytes, group: Group | None = None, most: int = 0) -> None:
        self.number, self.payload, self.group, self.most = number, payload, group, most
        self.room: Room | None = None
        self.partial = self.items = b""
        self.status = Status.OPEN
        self.is_given_out, self.is_at_work = True, False


class Kept(NamedTuple):
    """Books of reservations at one moment.

    Attributes:
        made: as of ``Reservations``.
        committed: likewise.
        given_up: likewise.
        opened: those that are open, by number.
    """

    made: int
    committed: int
    given_up: dict[str, int]
    opened: dict[int, Reserved]


class Reservations:
    """The open ones. Every change is one step.

    Attributes:
        made: number of reservations ever made.
        committed: how many of them have become items.
        given_up: how many ended otherwise, by cause.
    """

    def __init__(self) -> None:
        self.made = self.committed = 0
        self.given_up: dict[str, int] = {}
        self._open: dict[int, Reserved] = {}

    def __len__(self) -> int:
        """How many are open."""
        return len(self._open)

    def is_open(self, reserved: Reserved) -> bool:
        """Whether it is: one of before a restore is not, whatever its number."""
        return self._open.get(reserved.number) is reserved

    def make(self, payload: bytes, group: Group | None = None, most: int = 0) -> Reserved:
        """Open a new one."""
        reserved = self._open[self.made] = Reserved(self.made, payload, group, most)
        self.made += 1
        if group is not None:
            group.members.append(reserved)
        return reserved

    def make_group(
        self, payload: bytes, size: int, least: int, deadline: float | None, key: Key | None, most: int = 0
    ) -> list[Reserved]:
        """Open the members of a new group."""
        group = Group(self.made, size, least, deadline, key)
        return [self.make(payload, group, most) for _ in range(size)]

    def waiting(self) -> list[Reserved]:
        """Those that nobody has to work on, in the order in which they were made."""
        return [
            reserved for reserved in self._open.values() if not reserved.is_given_out and reserved.status is Status.OPEN
        ]

    def commit(self, *reserved: Reserved) -> None:
        """Their items are in the table."""
        for each in reserved:
            if self._open.pop(each.number, None) is not None:
                self.committed += 1

    def give_up(self, cause: str, *reserved: Reserved) -> None:
        """They end without items."""
        for each in reserved:
            if self._open.pop(each.number, None) is not None:
                self.given_up[cause] = self.given_up.get(cause, 0) + 1

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Columns of numbers, and bytes one after the other: quick however many there are."""
        found = list(self._open.values())
        groups = {each.group.number: each.group for each in found if each.group is not None}
        return {
            "made": self.made,
            "committed": self.committed,
            "given_up": dict(sorted(self.given_up.items())),
            "number": _column([each.number for each in found]),
            "group": _column([_ALONE if each.group is None else each.group.number for each in found]),
            "status": _column([each.status for each in found]),
            "most": _column([each.most for each in found]),
            "payload": _joined([each.payload for each in found]),
            "partial": _joined([each.partial for each in found]),
            "items": _joined([each.items for each in found]),
            "groups": _joined([group.text for group in groups.values()]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Open those that were open; nobody works on them."""
        kinds: dict[str, type] = dict.fromkeys(("number", "group", "status", "most"), torch.Tensor)
        parts: dict[str, type] = dict.fromkeys(("payload", "partial", "items", "groups"), list)
        made, committed, given_up, *found = fields(
            state, "reservations", made=int, committed=int, given_up=dict, **kinds, **parts
        )
        number, group, status, most = (int64s(column, "reservations: expected a column") for column in found[:4])
        payloads, partials, items = (_separate(joined, len(number)) for joined in found[4:7])
        texts = _separate(found[7], None)
        is_sound = len(group) == len(status) == len(most) == len(number) and not (np.diff(number) <= 0).any()
        if (most < 0).any():
            raise CheckpointCorruptError("reservations: expected numbers of items, found negative ones")
        if not is_sound or (len(number) and not 0 <= number[0] <= number[-1] < made):
            raise CheckpointCorruptError(f"reservations: expected ascending numbers below {made}, found others")
        if committed + len(number) + sum(_counts(given_up)) != made or ((status < 0) | (status > 3)).any():
            raise CheckpointCorruptError(f"reservations: expected {made} in all, found others")
        groups = {each.number: each for each in map(_group, texts)}
        opened: dict[int, Reserved] = {}
        columns = zip(
            number.tolist(), group.tolist(), status.tolist(), most.tolist(), payloads, partials, items, strict=True
        )
        for n, g, s, m, payload, partial, content in columns:
            if (g != _ALONE and g not in groups) or (g == _ALONE and s) or (s == Status.HELD) != bool(content):
                raise CheckpointCorruptError(f"reservations: expected a sound reservation {n}, found another one")
            each = opened[n] = Reserved(n, payload, groups.get(g), m)
            each.partial, each.items, each.status, each.is_given_out = partial, content, Status(s), False
            if each.group is not None:
                each.group.members.append(each)
        for each_group in groups.values():
            first, members = each_group.number, each_group.members
            if [member.number for member in members] != [*range(first, first + each_group.size)]:
                raise CheckpointCorruptError(f"reservations: expected {each_group.size} members of group {first}")
            if len({member.most for member in members}) > 1:
                raise CheckpointCorruptError(f"reservations: expected as many items of each member of group {first}")
            if not each_group.count(Status.OPEN):
                raise CheckpointCorruptError(f"reservations: expected an open member of group {first}, found none")
        self.made, self.committed, self.given_up = made, committed, dict(given_up)
        self._open = opened

    def kept(self) -> Kept:
        """The books as they are, for ``put_back`` or ``let_go``."""
        return Kept(self.made, self.committed, dict(self.given_up), self._open)

    def put_back(self, kept: Kept) -> None:
        """A state that was loaded is not to be: whoever works on a reservation goes on."""
        self.made, self.committed, self.given_up, self._open = kept

    def let_go(self, kept: Kept) -> None:
        """A state that was loaded has taken the place of these: whoever works on them will be refused."""
        for each in kept.opened.values():
            for holder in (each, each.group):
                if holder is not None and holder.room is not None:
                    holder.room.end()

    def verify(self, rows: Rows) -> None:
        """Nothing of it depends on the rows."""


def _column(values: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.int64))


def _joined(parts: list[bytes]) -> list[torch.Tensor]:
    """Bytes of all, and how many each has; empty if there are none."""
    whole = bytearray().join(parts)
    if not whole:
        return []
    return [torch.frombuffer(whole, dtype=torch.uint8), _column(list(map(len, parts)))]


def _separate(joined: list[Any], count: int | None) -> list[bytes]:
    """The parts that were joined; empty ones if all were."""
    if not joined:
        return [b""] * (count or 0)
    if len(joined) != 2 or not isinstance(joined[0], torch.Tensor) or joined[0].dtype is not torch.uint8:
        raise CheckpointCorruptError("reservations: expected bytes and lengths, found something else")
    lengths = int64s(joined[1], "reservations: expected lengths").tolist()
    if joined[0].ndim != 1 or min(lengths, default=0) < 0 or sum(lengths) != len(joined[0]):
        raise CheckpointCorruptError("reservations: expected as many bytes as the lengths say, found others")
    if count is not None and len(lengths) != count:
        raise CheckpointCorruptError(f"reservations: expected {count} lengths, found {len(lengths)}")
    whole = joined[0].numpy().tobytes()
    return [whole[start:stop] for start, stop in pairwise(accumulate(lengths, initial=0))]


def _group(text: bytes) -> Group:
    try:
        number, size, least, deadline, key = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointCorruptError(f"reservations: expected a group, found {error}") from error
    natural(number, "reservations: expected the number of a group")
    natural(size, "reservations: expected the size of a group", least=1)
    natural(least, "reservations: expected the least of a group", size + 1, least=1)
    is_time = deadline is None or (type(deadline) in (int, float) and 0 < deadline < 1e18)
    if not is_time or not (key is None or is_key(key)):
        raise CheckpointCorruptError("reservations: expected deadline and key of a group, found others")
    return Group(number, size, least, deadline, key)


def _counts(given_up: dict[Any, Any]) -> Iterable[int]:
    if not all(type(cause) is str for cause in given_up):
        raise CheckpointCorruptError("reservations: expected what was given up by cause, found something else")
    return [natural(count, "reservations: expected a count", least=1) for count in given_up.values()]
