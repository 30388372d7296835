"""Where reservations are taken, kept and become items."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from asyncbuf._ingest.claims import DuplicateError
from asyncbuf._ingest.room import Room, Rooms
from asyncbuf._table.reservations import Reserved, Status
from asyncbuf.errors import ReservationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from asyncbuf._ingest.write_path import WritePath
    from asyncbuf._table.deliveries import Deliveries, Key
    from asyncbuf._table.reservations import Reservations
    from asyncbuf._table.tally import Tally


class Desk:
    """What slots need of their buffer.

    Args:
        reservations: the open ones.
        deliveries: the keys of the window.
        tally: counts duplicates.
        writes: the way of an item.
        prepare: of the buffer's storage.
        turn: what each call awaits first.

    Attributes:
        rooms: takes room for items that are still to be made.
    """

    def __init__(
        self,
        reservations: Reservations,
        deliveries: Deliveries,
        tally: Tally,
        writes: WritePath,
        prepare: Callable[[Any], Any],
        turn: Callable[[], Awaitable[None]],
    ) -> None:
        self.reservations = reservations
        self.deliveries = deliveries
        self.tally = tally
        self.writes = writes
        self.prepare = prepare
        self.turn = turn
        self.rooms = Rooms(writes.admission, reservations, writes.check_writable)

    async def write(
        self,
        claim: ReservedClaim,
        items: Any,
        most: int,
        room: Room | None,
        priority: Any = None,
        table: Any = None,
        version: Any = None,
    ) -> bool:
        """Write the items of reservations, which end in the same step: at most so many, where there is a number."""
        return await self.writes.write_once(claim, self.at_most(most), items, priority, table, version, room)

    def put_down(self, reserved: Reserved) -> None:
        """Nobody will work on it, and room is given back. Called from any thread."""
        self.writes.soon(functools.partial(self.rooms.leave, reserved))

    def at_most(self, most: int) -> Callable[[Any], Any]:
        """The same as ``prepare``, which refuses more items than there is room for."""
        return functools.partial(_at_most, self.prepare, most) if most else self.prepare


class ReservedClaim:
    """Reservations that are open, and a key that is not in the window.

    Args:
        desk: of the buffer.
        needed: the reservation that must be open.
        key: the key; None without one.
        ending: members of the group that end with the write, and how.
    """

    def __init__(self, desk: Desk, needed: Reserved, key: Key | None, ending: tuple[Reserved, Status]) -> None:
        self._desk = desk
        self._needed = needed
        self._key = key
        self._ending = ending

    def may_be_taken(self) -> bool:
        """Whether the key is in the window now."""
        return self._key is not None and self._desk.deliveries.has(self._key)

    def begin(self) -> None:
        """Refuse what is not open any more; and end, without items, what somebody else has written."""
        check_open(self._desk.reservations, self._needed)
        if self.may_be_taken():
            self._desk.tally.duplicates += 1
            self._desk.reservations.give_up("duplicate", *_together(self._needed))
            raise DuplicateError

    def written(self) -> None:
        """All of it ends."""
        reserved, status = self._ending
        reserved.status = status
        books = self._desk.reservations
        for each in _together(reserved):
            if each.status is Status.HELD:
                books.commit(each)
            else:
                books.give_up("failed" if each.status is Status.FAILED else "late", each)
        if self._key is not None:
            self._desk.deliveries.take(self._key)

    def refused(self) -> None:
        """All of it ends without items, and the key may be used for younger ones."""
        self._desk.reservations.give_up("stale", *_together(self._needed))


def _together(reserved: Reserved) -> Sequence[Reserved]:
    return (reserved,) if reserved.group is None else reserved.group.members


def _at_most(prepare: Callable[[Any], Any], most: int, items: Any) -> Any:
    prepared = prepare(items)
    if prepared.count > most:
        raise ValueError(
            f"commit: expected at most {most} items, as many as were reserved, found {prepared.count}. The reservation "
            "stays open: commit fewer, or reserve with more items"
        )
    return prepared


def check_open(reservations: Reservations, reserved: Reserved) -> None:
    """Refuse a reservation that has ended.

    Raises:
        ReservationError: it has.
    """
    if not reservations.is_open(reserved) or reserved.status is not Status.OPEN:
        raise ReservationError(
            f"reservation {reserved.number}: expected one that is open, found one that was committed, was given up, or "
            "is from before a restore. Its items were not written; buffer.unfinished() has those that are open"
        )
