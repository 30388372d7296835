"""The methods of a buffer for what comes exactly once. They only check and delegate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncbuf._ingest.claims import checked_key
from asyncbuf._ingest.producer import MOST_NUMBERS, Producer, checked_name
from asyncbuf._runtime.arguments import count, shown
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

    async def durable(self, *, key: Key | None = None, producer: str | None = None, number: int | None = None) -> None:
        """Wait until a committed checkpoint has what was written: so whoever sent it may forget it.

        Checkpoints are those of ``save``, ``save_soon`` and ``Checkpointer``, not snapshots in memory. This call begins
        none. What was restored from one is durable; after any other restore nothing is, until the next one is
        committed. For all that is written by now, leave the arguments out.

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
