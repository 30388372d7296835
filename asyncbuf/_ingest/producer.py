"""A producer, which numbers its writes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from asyncbuf._ingest.claims import NumberClaim
from asyncbuf._runtime.arguments import count, shown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncbuf._ingest.write_path import WritePath
    from asyncbuf._table.deliveries import Deliveries

MOST_NUMBERS = 2**62 - 1


class Producer:
    """Writes under a name, each write with a number: 0, 1, 2, ... ``buffer.producer("actor-3")`` makes one.

    A number is used up when its write takes effect, and only then; ``next_number`` is in every checkpoint. So whoever
    can make its items again from their number loses none and writes none twice::

        producer = buffer.producer("actor-3")
        for number in range(producer.next_number, 1000):  # after a restore it goes on where the checkpoint was
            await producer.extend(await episode(number), number=number)

    A call that was cancelled, or whose outcome got lost with a connection, is made again with the same number: if it
    was written, it is ignored now. Without ``number`` a write takes the next one in its turn, in the order of the
    calls; to repeat such a one exactly, see whether ``next_number`` has moved.

    All producers of a name are one: they share their numbers.

    Attributes:
        name: the name.
    """

    def __init__(
        self,
        name: str,
        deliveries: Any,
        tally: Any,
        writes: Any,
        prepare: tuple[Callable[[Any], Any], Callable[[Any], Any]],
        turn: Callable[[], Awaitable[None]],
        durable: Callable[..., Awaitable[None]],
    ) -> None:
        self.name: str = name
        # The types are those of the attributes, which type checkers of users need not see.
        self._deliveries: Deliveries = deliveries
        self._writes: WritePath = writes
        self._prepare, self._prepare_one = prepare
        self._turn = turn
        self._durable = durable
        self._claim = functools.partial(NumberClaim, deliveries, tally, name)

    @property
    def next_number(self) -> int:
        """The number that the next write has: how many writes of this producer are in the buffer's history."""
        return self._deliveries.next_number(self.name)

    async def extend(
        self, items: Any, *, number: int | None = None, priority: Any = None, table: str | None = None
    ) -> bool:
        """Write items as one write, all of them or, with an error, none.

        Args:
            items: as of ``buffer.extend``.
            number: the number of this write; None for the next one.
            priority: as of ``buffer.extend``.
            table: as of ``buffer.extend``.

        Returns:
            Whether they were written. False if the number was written before: then it is ignored, and counted in
            ``stats().ledger.duplicates``.

        Raises:
            ValueError: the number leaves others out. It is not used up.
            SchemaError, BufferClosedError, BufferFailedError, TypeError: as of ``buffer.extend``.
        """
        return await self._write(self._prepare, items, number, priority, table)

    async def add(
        self, item: Any, *, number: int | None = None, priority: Any = None, table: str | None = None
    ) -> bool:
        """Write one item, whose leaves have no leading axis; otherwise as ``extend``."""
        return await self._write(self._prepare_one, item, number, priority, table)

    async def _write(
        self, prepare: Callable[[Any], Any], items: Any, number: int | None, priority: Any, table: str | None
    ) -> bool:
        if number is not None:
            count(number, "number", 0, most=MOST_NUMBERS, example=0)
        await self._turn()
        return await self._writes.write_once(self._claim(number), prepare, items, priority, table)

    async def durable(self, number: int | None = None) -> None:
        """Wait until a committed checkpoint has a write; otherwise as ``buffer.durable``.

        Args:
            number: its number; None for all that was written by now.
        """
        await self._durable(producer=self.name, number=number)

    def __repr__(self) -> str:
        """Its name and how far it is."""
        return f"<Producer {self.name!r}, next_number={self.next_number}>"


def checked_name(name: Any) -> str:
    """An argument that is the name of a producer.

    Raises:
        TypeError: it is no text.
        ValueError: it is empty.
    """
    if not isinstance(name, str):
        raise TypeError(f'producer: expected a name such as "actor-3", found {shown(name)}')
    if not name:
        raise ValueError('producer: expected a name such as "actor-3", found an empty one')
    return str.__str__(name)
