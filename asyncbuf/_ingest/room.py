"""Room for the items of reservations: admitted by the limiter before the work on them begins."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncbuf._ingest.admission import Admission, Grant
    from asyncbuf._table.reservations import Group, Reservations, Reserved


class Room:
    """Room for some items. It counts as admitted until they are written, or it is given back.

    Args:
        admission: gave the grant.
        grant: leave to write them.

    Attributes:
        grant: the same.
    """

    __slots__ = ("_admission", "grant")

    def __init__(self, admission: Admission, grant: Grant) -> None:
        self._admission = admission
        self.grant = grant

    def end(self) -> None:
        """Hold nothing any more; who waits for room is not told yet."""
        self._admission.end(self.grant)

    def give_back(self) -> None:
        """Let others have what is left of it."""
        self._admission.give_back(self.grant)

    def shrink(self, items: int) -> None:
        """Let others have so much of it."""
        self._admission.shrink(self.grant, items)

    def restore(self, items: int, nbytes: int) -> None:
        """It is for so many items again, of so many bytes: they were not written."""
        self._admission.restore(self.grant, items, nbytes)

    async def settle(self, items: int, nbytes: int) -> None:
        """Wait until these items fit into it, of so many bytes each, which nobody knew before."""
        await self._admission.settle(self.grant, items, nbytes)


class Rooms:
    """Takes room for reservations that say how many items they will have.

    Args:
        admission: where writers wait that a limiter holds back; None if it holds back none, and nothing waits.
        reservations: the open ones.
        check_writable: refuses what the buffer does not take any more.
    """

    def __init__(
        self, admission: Admission | None, reservations: Reservations, check_writable: Callable[[], None]
    ) -> None:
        self._admission = admission
        self._reservations = reservations
        self._check_writable = check_writable

    async def new(self, items: int) -> Room | None:
        """Wait until there is room for items of a new reservation, or of a group of them; None if that is not asked.

        A call that is cancelled has taken none.

        Raises:
            ValueError: there is never room for so many.
            Exception: as of ``Admission.admit``.
        """
        if not items or self._admission is None:
            return None
        return await self._room(self._admission, items)

    async def take(self, reserved: Reserved) -> None:
        """Wait until there is room for the items of a reservation, or of its whole group, unless that has some.

        A call that is cancelled has taken none.

        Raises:
            Exception: as of ``Admission.admit``.
        """
        if not reserved.most or self._admission is None or reserved.room is not None:
            return
        if reserved.group is None:
            reserved.room = await self._room(self._admission, reserved.most)
        else:
            await self._take_whole(self._admission, reserved.group, reserved.most)

    async def _take_whole(self, admission: Admission, group: Group, most: int) -> None:
        if group.entering is None:
            group.entering = asyncio.Lock()
        async with group.entering:  # of members that begin at once, one waits for the room
            if group.room is None:
                self._check_writable()
                group.room = await self._room(admission, most * group.survivors)

    async def _room(self, admission: Admission, items: int) -> Room:
        return Room(admission, await admission.admit_reserved(items))

    def leave(self, reserved: Reserved) -> None:
        """Give room back: a reservation has ended, or nobody works on it any more."""
        holder = reserved if reserved.group is None else reserved.group
        if holder.room is None or (reserved.group is not None and self._goes_on(reserved, reserved.group)):
            return
        room, holder.room = holder.room, None
        room.give_back()

    def _goes_on(self, reserved: Reserved, group: Group) -> bool:
        """Whether a group has not ended, and somebody has a member of it to work on."""
        return self._reservations.is_open(reserved) and group.is_given_out
