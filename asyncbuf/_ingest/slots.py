"""Reservations as those see them who work on them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch

from asyncbuf._ingest.desk import ReservedClaim, check_open
from asyncbuf._plain.blobs import from_bytes, to_bytes
from asyncbuf._plain.tree import flatten, unflatten
from asyncbuf._table.deliveries import is_key
from asyncbuf._table.reservations import Group, Reserved, Status
from asyncbuf.errors import BufferClosedError, BufferFailedError, CheckpointCorruptError, ReservationError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from asyncbuf._ingest.desk import Desk
    from asyncbuf._table.deliveries import Key


_CAUSES = {Status.FAILED: "failed", Status.LATE: "late"}


class Made(NamedTuple):
    """What a reservation is made of.

    Attributes:
        key: what its write will be known by; None for none.
        payload: what the items are made from.
        plain: both as bytes.
    """

    key: Key | None
    payload: Any
    plain: bytes

    @classmethod
    def of(cls, key: Key | None, payload: Any) -> Self:
        """What is reserved now.

        Raises:
            CheckpointError: it cannot be saved.
        """
        return cls(key, payload, to_bytes((key, payload), "payload"))


class Slot:
    """A place for items that take long to make: ``buffer.reserve(...)`` makes one.

    ::

        async def work(slot):
            async with slot:
                answer = slot.partial or ""
                while not is_complete(answer):
                    answer += await generate(slot.payload, answer)
                    slot.partial = answer  # as it is now, in every checkpoint from here on
                await slot.commit(items_of(answer))

        for slot in buffer.unfinished():  # after a restore; none in a new run
            tasks.create_task(work(slot))
        for prompt in prompts:
            tasks.create_task(work(buffer.reserve(prompt)))

    From the beginning of its block to the commit, every checkpoint has its payload and its partial result; from the
    commit on, the items. If the block ends otherwise: a cancellation, or the end of the buffer or of the program,
    leaves the reservation *unfinished*: it stays in checkpoints, and in ``buffer.unfinished()``. Any other exception,
    or the end of the block without a commit, gives it up, and ``stats().ledger`` counts it.

    A slot of a group ends its block early, and quietly, if the deadline of the group is over, or too many of its
    members have failed.

    With ``items=n`` the block waits at its beginning, before any work is done, until the limiter has room for so many
    items. Who waits for that has reserved nothing yet.
    """

    # The types are those of the attributes, which type checkers of users need not see.
    def __init__(self, desk: Any, made: Any, reserved: Any = None, most: int = 0) -> None:
        self._desk: Desk = desk
        self._most: int = most if reserved is None else reserved.most
        self._made: Made | None = made
        self._reserved: Reserved | None = reserved
        self._partial: Any = None
        self._is_partial_known = made is not None
        self._timeout: asyncio.Timeout | None = None

    @property
    def payload(self) -> Any:
        """What was reserved; after a restore, a copy of that.

        Raises:
            CheckpointError: it is damaged, or has a type that is not registered.
        """
        return self._known().payload

    @property
    def key(self) -> Key | None:
        """What its write will be known by; None for none. A member of a group has that of the group."""
        return self._known().key

    def _known(self) -> Made:
        if self._made is None:
            assert self._reserved is not None
            name = f"reservation {self._reserved.number}"
            content = from_bytes(self._reserved.payload, name)
            if type(content) is not tuple or len(content) != 2 or not (content[0] is None or is_key(content[0])):
                raise CheckpointCorruptError(f"{name}: expected a key and a payload, found something else")
            self._made = Made(*content, self._reserved.payload)
        return self._made

    @property
    def number(self) -> int | None:
        """How many reservations came before it; None before its block begins."""
        return None if self._reserved is None else self._reserved.number

    @property
    def member(self) -> int | None:
        """Its place in its group, from 0; None if it stands alone."""
        reserved = self._reserved
        return None if reserved is None or reserved.group is None else reserved.number - reserved.group.number

    @property
    def items(self) -> int | None:
        """How many items it has room for; None if that was not said."""
        return self._most or None

    @property
    def is_open(self) -> bool:
        """Whether its items may be committed."""
        reserved = self._reserved
        return reserved is not None and reserved.is_at_work and self._is_unended(reserved)

    def _is_unended(self, reserved: Reserved) -> bool:
        return self._desk.reservations.is_open(reserved) and reserved.status is Status.OPEN

    @property
    def partial(self) -> Any:
        """The partial result: what was assigned last; after a restore, a copy of that. None at first."""
        if not self._is_partial_known and self._reserved is not None:
            reserved = self._reserved
            self._partial = (
                from_bytes(reserved.partial, f"reservation {reserved.number}, partial") if reserved.partial else None
            )
            self._is_partial_known = True
        return self._partial

    @partial.setter
    def partial(self, value: Any) -> None:
        """Keep a partial result. It is copied in this step: to save what changes in it later, assign it again.

        Raises:
            CheckpointError: it holds something that cannot be saved.
            ReservationError: the block has not begun, or the reservation has ended.
        """
        reserved = self._checked()
        reserved.partial = b"" if value is None else to_bytes(value, f"reservation {reserved.number}, partial")
        self._partial, self._is_partial_known = value, True

    def _checked(self) -> Reserved:
        reserved = self._reserved
        if reserved is None or not reserved.is_at_work:
            raise ReservationError("reservation: expected a call within `async with slot:`, found one outside")
        check_open(self._desk.reservations, reserved)
        return reserved

    # -- the block ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Begin to work on it, once there is room for its items.

        Raises:
            ReservationError: it has ended, or somebody works on it.
            ValueError: the limiter never has room for so many items.
            BufferClosedError, BufferFailedError: as of ``buffer.extend``.
        """
        await self._desk.turn()
        self._desk.writes.check_writable()
        reserved = self._reserved or await self._make()
        if reserved.is_at_work:
            raise ReservationError(f"reservation {self.number}: expected one that nobody works on, found one at work")
        check_open(self._desk.reservations, reserved)
        reserved.is_given_out = reserved.is_at_work = True
        try:
            await self._begin(reserved)
        except BaseException:
            self._put_down(reserved)
            raise
        return self

    async def _make(self) -> Reserved:
        """Reserve, once there is room: who waits for that has reserved nothing yet."""
        room = await self._desk.rooms.new(self._most)
        if self._reserved is not None:  # in another task meanwhile
            if room is not None:
                room.give_back()
            return self._reserved
        reserved = self._reserved = self._desk.reservations.make(self._known().plain, most=self._most)
        reserved.room = room
        return reserved

    async def _begin(self, reserved: Reserved) -> None:
        if reserved.most:
            await self._desk.rooms.take(reserved)
            check_open(self._desk.reservations, reserved)  # it may have ended meanwhile
        if reserved.group is not None:
            await self._begin_member(reserved, reserved.group)

    def _put_down(self, reserved: Reserved) -> None:
        """Nobody works on it any more."""
        reserved.is_given_out = reserved.is_at_work = False
        if reserved.group is not None:
            reserved.group.at_work.pop(reserved, None)
        self._desk.rooms.leave(reserved)

    async def _begin_member(self, reserved: Reserved, group: Group) -> None:
        if group.when is None and group.deadline is not None:
            group.when = _now() + group.deadline
        group.at_work[reserved] = self._stop
        self._timeout = asyncio.timeout_at(group.when)
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """End the work on it."""
        is_late = False
        reserved = self._reserved
        assert reserved is not None
        timeout, self._timeout = self._timeout, None
        if timeout is not None:
            try:
                await timeout.__aexit__(kind, error, traceback)
            except TimeoutError:
                is_late = kind is not None and issubclass(kind, asyncio.CancelledError)
                if not is_late:
                    raise
        try:
            await self._end(reserved, error, is_late=is_late)
        finally:
            self._put_down(reserved)
        return is_late

    async def _end(self, reserved: Reserved, error: BaseException | None, *, is_late: bool) -> None:
        if not self._is_unended(reserved):
            return
        if not is_late and error is not None and _is_shutdown(error):
            return  # unfinished
        if reserved.group is None:
            self._desk.reservations.give_up("failed" if error is not None else "not committed", reserved)
            return
        await self._end_member(reserved, reserved.group, Status.LATE if is_late else Status.FAILED)

    # -- the items ----------------------------------------------------------------------------------------------------

    async def commit(self, items: Any, *, priority: Any = None, table: str | None = None, version: Any = None) -> bool:
        """Write the items, and end the reservation, in one step of the history.

        The items of a member of a group are copied, and become visible when every member has ended, in the order of the
        members, in one write.

        Args:
            items: as of ``buffer.extend``.
            priority: as of ``buffer.extend``; not for a member of a group.
            table: as of ``buffer.extend``; not for a member of a group.
            version: as of ``buffer.extend``; not for a member of a group, whose items have it in the field
                ``version_key``.

        Returns:
            Whether they were taken. False if the key was written before, by somebody else, or if all of them are too
            old: the reservation has ended.

        Raises:
            ReservationError: the reservation has ended: it was given up, or is from before a restore.
            SchemaError: the items do not fit; the reservation stays open. Of ``items`` that fail otherwise, too.
            ValueError: they are more than were reserved, likewise.
            BufferClosedError, BufferFailedError: as of ``buffer.extend``. The reservation stays open.
        """
        await self._desk.turn()
        reserved = self._checked()
        try:
            if reserved.group is not None:
                if priority is not None or table is not None or version is not None:
                    raise ValueError(
                        "commit: expected neither priority nor table nor version for a member of a group, found one"
                    )
                return await self._commit_member(reserved, reserved.group, items)
            claim = ReservedClaim(self._desk, reserved, self.key, (reserved, Status.HELD))
            return await self._desk.write(claim, items, reserved.most, _room_of(reserved), priority, table, version)
        finally:
            if not self._is_unended(reserved):
                self._desk.rooms.leave(reserved)

    async def _commit_member(self, reserved: Reserved, group: Group, items: Any) -> bool:
        self._desk.writes.check_writable()
        prepared = self._desk.at_most(reserved.most)(items)  # what is wrong is said at once
        is_taken = await self._hold(reserved, group, items)
        if group.room is not None:
            group.room.shrink(reserved.most - prepared.count)
        return is_taken

    async def _hold(self, reserved: Reserved, group: Group, items: Any) -> bool:
        content = to_bytes(items, f"reservation {reserved.number}, items")
        when = None if self._timeout is None else self._timeout.when()
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(None)  # it was in time
        if not group.is_last(reserved, _now()):
            reserved.items, reserved.status = content, Status.HELD
            return True
        if group.count(Status.HELD) + 1 < group.least:
            self._give_up(group)
            check_open(self._desk.reservations, reserved)
        try:
            return await self._write_group(reserved, group, Status.HELD, content)
        except BaseException:
            if self._timeout is not None and reserved.status is Status.OPEN and not self._timeout.expired():
                self._timeout.reschedule(when)  # nothing was committed
            raise

    async def _end_member(self, reserved: Reserved, group: Group, status: Status) -> None:
        """A member ends without items: the others may be too few now, or complete."""
        survivors = group.count(Status.HELD)
        is_last = group.is_last(reserved, _now())
        if survivors + (0 if is_last else group.count(Status.OPEN) - 1) < group.least:
            reserved.status = status
            self._give_up(group)
        elif is_last:
            with contextlib.suppress(SchemaError):  # then the group has ended, and this member has its own reason
                await self._write_group(reserved, group, status, b"")
        else:
            reserved.status = status
            if group.room is not None:
                group.room.shrink(reserved.most)

    def _give_up(self, group: Group) -> None:
        """Too few members of a group can have items."""
        for member in group.members:
            self._desk.reservations.give_up(_CAUSES.get(member.status, "group"), member)
        for stop in list(group.at_work.values()):
            stop()

    async def _write_group(self, reserved: Reserved, group: Group, status: Status, content: bytes) -> bool:
        """The last member ends with the write."""
        parts = [member.items for member in group.members if member is not reserved and member.status is Status.HELD]
        if content:
            parts.insert(sum(m.status is Status.HELD for m in group.members[: reserved.number - group.number]), content)
        claim = ReservedClaim(self._desk, reserved, group.key, (reserved, status))
        try:
            items = joined([from_bytes(part, f"group {group.number}") for part in parts])
            return await self._desk.write(claim, items, 0, _room_of(reserved))
        except SchemaError:
            # Those of this member fit, and those of another one do not any more: no member could ever end the group.
            self._give_up(group)
            raise

    def _stop(self) -> None:
        """End the work, since its group is given up."""
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(_now())

    def __del__(self) -> None:
        """A member of a group that nobody has begun to work on, and nobody can any more, is unfinished."""
        reserved = getattr(self, "_reserved", None)
        if reserved is None or not reserved.is_given_out or reserved.is_at_work:
            return
        reserved.is_given_out = False
        self._desk.put_down(reserved)

    def __repr__(self) -> str:
        """Its number, and whether it is open."""
        state = "at work" if self._reserved is not None and self._reserved.is_at_work else "not at work"
        return f"<Slot {self.number}, {state}>"


def _room_of(reserved: Reserved) -> Any:
    return reserved.room if reserved.group is None else reserved.group.room


def _now() -> float:
    return asyncio.get_running_loop().time()


def _is_shutdown(error: BaseException) -> bool:
    """Whether an error says nothing of the work itself: it goes on after a restart."""
    return not isinstance(error, Exception) or isinstance(error, BufferClosedError | BufferFailedError)


def joined(parts: list[Any]) -> Any:
    """Several batches of items as one.

    Raises:
        SchemaError: they differ in structure, or cannot be joined.
    """
    if all(isinstance(part, list | tuple) for part in parts):
        return [item for part in parts for item in part]
    flat = [flatten(part, batched=True) for part in parts]
    spec = flat[0][1]
    if any(other != spec for _, other in flat):
        raise SchemaError(f"expected the items of all members as {spec}, found others")
    try:
        columns = [_cat(leaves) for leaves in zip(*(leaves for leaves, _ in flat), strict=True)]
    except (TypeError, ValueError, RuntimeError) as error:
        raise SchemaError(f"expected items that can be joined, found {error!r}") from error
    count = len(columns[0]) if columns else 0
    return unflatten(spec, columns, batch=count)


def _cat(leaves: Sequence[Any]) -> Any:
    if all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return torch.cat(list(leaves))
    if all(isinstance(leaf, np.ndarray) for leaf in leaves):
        return np.concatenate(leaves)
    return [value for leaf in leaves for value in leaf]
