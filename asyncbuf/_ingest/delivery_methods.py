"""The methods of a buffer for what comes exactly once. They only check and delegate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncbuf._ingest.claims import checked_key
from asyncbuf._ingest.desk import Desk
from asyncbuf._ingest.producer import MOST_NUMBERS, Producer, checked_name
from asyncbuf._ingest.slots import Made, Slot
from asyncbuf._runtime.arguments import count, seconds, shown
from asyncbuf._runtime.lifecycle import State
from asyncbuf._runtime.reentry import current_job
from asyncbuf._table.durability import Wanted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncbuf._ingest.write_path import WritePath
    from asyncbuf._runtime.lifecycle import Lifecycle
    from asyncbuf._runtime.reentry import ReentryGuard
    from asyncbuf._table.deliveries import Deliveries, Key
    from asyncbuf._table.table import Table


_MOST_MEMBERS = 1_000_000
_MOST_ITEMS = 2**40


class DeliveryMethods:
    """The part of a buffer that takes each write once."""

    _table: Table
    _writes: WritePath
    _prepare: Callable[[Any], Any]
    _prepare_one: Callable[[Any], Any]
    _life: Lifecycle
    _guard: ReentryGuard

    def _turn(self, *, within_frozen: bool = False) -> Awaitable[None]:
        raise NotImplementedError

    def producer(self, name: str) -> Producer:
        """Make what writes under a name, with numbers that go on after a restore.

        Args:
            name: such as ``"actor-3"``.

        Raises:
            TypeError, ValueError: it is no name.
        """
        prepare = (self._prepare, self._prepare_one)
        table = self._table
        return Producer(
            checked_name(name), table.deliveries, table.tally, self._writes, prepare, self._turn, self.durable
        )

    # -- work that takes long -----------------------------------------------------------------------------------------

    def reserve(self, payload: Any, *, key: Key | None = None, items: int | None = None) -> Slot:
        """Reserve a place for items that take long to make: ``async with buffer.reserve(prompt) as slot:``.

        Args:
            payload: what the items are made from. It is copied in this call.
            key: what the write of the items will be known by, as in ``extend``.
            items: how many items it will have at most. Then its block begins once the limiter lets so many be written,
                in the order of all writers, and until its end they count as about to be written. So work is held back
                before it is done, and not after it. None if the write itself waits.

        Returns:
            The slot. The reservation is made when its block begins.

        Raises:
            CheckpointError: the payload holds something that cannot be saved.
            TypeError, ValueError: the key is none, or ``items`` is no number.
        """
        key = None if key is None else checked_key(key)
        most = 0 if items is None else count(items, "items", 1, most=_MOST_ITEMS, example=8)
        return Slot(self._desk(), Made.of(key, payload), most=most)

    async def reserve_group(
        self,
        payload: Any,
        size: int,
        *,
        key: Key | None = None,
        least: int | None = None,
        deadline: float | None = None,
        items: int | None = None,
    ) -> list[Slot]:
        """Reserve places for a group, whose items become visible together, in one write.

        Each member is a slot of its own, with a block of its own, in any task and in any order. When all have ended,
        the items of those that were committed are written, in the order of the members; if those are fewer than
        ``least``, none. A checkpoint keeps the items of members that were committed before it, and only the others are
        unfinished.

        Args:
            payload: what the items are made from, the same for all. It is copied in this call.
            size: how many members there are, from 1.
            key: what the write of the group will be known by, as in ``extend``.
            least: how many members must have items; None for all of them.
            deadline: seconds from the first block on, or from the first one after a restore. Then the blocks of members
                that have not committed end quietly, and those that nobody works on are left out when another one ends.
            items: how many items each member will have at most. Then this call waits until the limiter lets all of
                them be written, as the block of ``reserve`` does; after a restore, the first block does. A call that
                waits has reserved nothing yet.

        Returns:
            The members. All of them are reserved in the very step in which the call returns.

        Raises:
            CheckpointError: the payload holds something that cannot be saved.
            BufferClosedError, BufferFailedError: as of ``extend``.
            TypeError, ValueError: an argument is not of the kind or in the range that is expected.
        """
        key = None if key is None else checked_key(key)
        size = count(size, "size", 1, most=_MOST_MEMBERS, example=8)
        least = size if least is None else count(least, "least", 1, most=size, example=size)
        deadline = seconds(deadline, "deadline", is_positive=True)
        most = 0 if items is None else count(items, "items", 1, most=_MOST_ITEMS, example=8)
        if self._table.writer.tables:
            raise ValueError(
                "reserve_group: expected a writer without tables, because the items of a group go into no certain one; "
                f"found the tables {list(self._table.writer.tables)}: use reserve() and commit(items, table=...)"
            )
        made = Made.of(key, payload)
        await self._turn()
        self._writes.check_writable()
        desk = self._desk()
        room = await desk.rooms.new(size * most)
        members = self._table.reservations.make_group(made.plain, size, least, deadline, key, most)
        assert members[0].group is not None
        members[0].group.room = room
        return [Slot(desk, made, reserved) for reserved in members]

    def unfinished(self) -> list[Slot]:
        """The reservations that are open and that nobody works on, in the order in which they were made.

        Those are the ones of a checkpoint, after a restore, and those whose work was cancelled. Give each of them to
        whoever works on new ones; each has its payload and its partial result.
        """
        desk = self._desk()
        return [Slot(desk, None, reserved) for reserved in self._table.reservations.waiting()]

    def _desk(self) -> Desk:
        table = self._table
        return Desk(table.reservations, table.deliveries, table.tally, self._writes, self._prepare, self._turn)

    # -- what is safe -------------------------------------------------------------------------------------------------

    async def durable(self, *, key: Key | None = None, producer: str | None = None, number: int | None = None) -> None:
        """Wait until a committed checkpoint has what was written: so whoever sent it may forget it.

        Checkpoints are those of ``save``, ``save_soon`` and ``Checkpointer``, not snapshots in memory. This call begins
        none. What was restored from one is durable; after any other restore nothing is until the next one is committed.
        For all that is written by now, leave the arguments out.

        Args:
            key: the key of a write, which must be in the window.
            producer: name of a producer.
            number: number of one of its writes; None for all that it has written by now.

        Raises:
            ValueError: the key is not in the window, the number was not written, or the arguments do not go together.
            TypeError: an argument is of another kind.
            BufferClosedError, BufferFailedError: the buffer was closed, or its background work ended, before that.
            AsyncBufError: a restore took it back; or the caller is within a transform or a freeze of the buffer, whose
                end a save may wait for.
        """
        if current_job() is not None:
            self._guard.check("durable")
        _check_together(key, producer, number)
        await self._turn()
        durability, wanted = self._table.durability, self._wanted(key, producer, number)
        if durability.is_durable(wanted):
            return
        life = self._life
        if life.reason is not None and life.state is not State.NEW:
            raise life.reason()
        await durability.wait(wanted)

    def _wanted(self, key: Key | None, producer: str | None, number: int | None) -> Wanted:
        deliveries = self._table.deliveries
        if key is not None:
            items = deliveries.position(checked_key(key))
            if items is None:
                raise ValueError(
                    f"key: expected one of the last key_window keys that were written, found {shown(key)}, which was "
                    "not written, or so long ago that it is not known any more"
                )
            return Wanted(items)
        if producer is not None:
            return Wanted(0, producer, _written_number(deliveries, producer, number))
        return Wanted(self._table.write_count)


def _check_together(key: Any, producer: Any, number: Any) -> None:
    if producer is not None:
        checked_name(producer)
        if key is not None:
            raise ValueError("durable: expected a key or a producer, found both")
        if number is not None:
            count(number, "number", 0, most=MOST_NUMBERS, example=0)
    elif number is not None:
        raise ValueError("durable: expected the name of a producer beside the number, found none")


def _written_number(deliveries: Deliveries, producer: str, number: int | None) -> int:
    expected = deliveries.next_number(producer)
    if number is None:
        return expected - 1
    if number >= expected:
        raise ValueError(
            f"number: expected one that producer {producer!r} has written, below {expected}, found {number}"
        )
    return number
