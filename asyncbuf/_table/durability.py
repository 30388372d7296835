"""What of the history is in a committed checkpoint, and who waits for that."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from asyncbuf._runtime.supervisor import detached
from asyncbuf.errors import AsyncBufError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from asyncbuf._table.deliveries import Deliveries


class Wanted(NamedTuple):
    """What somebody waits for.

    Attributes:
        items: so many items, the first ones ever written.
        producer: name of a producer; empty for none.
        number: its writes up to this number.
    """

    items: int = 0
    producer: str = ""
    number: int = -1

    def is_in(self, mark: Mark) -> bool:
        """Whether a point of the history has it."""
        return self.items <= mark.items and self.number < mark.numbers.get(self.producer, 0)


class Mark(NamedTuple):
    """A point of the history.

    Attributes:
        history: which history: a restore begins another one.
        items: number of items written.
        numbers: the next number of each producer.
    """

    history: int
    items: int
    numbers: Mapping[str, int]


class _Waiter:
    __slots__ = ("error", "wake", "wanted")

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.error: BaseException | None = None

    def settle(self, error: BaseException | None = None) -> None:
        self.error = error
        if not self.wake.done():
            self.wake.set_result(None)


class Durability:
    """Knows the newest point of the history that a committed checkpoint has.

    Args:
        deliveries: knows how far each producer is.
        written: says how many items have been written.
    """

    def __init__(self, deliveries: Deliveries, written: Callable[[], int]) -> None:
        self._deliveries = deliveries
        self._written = written
        self._history = 0
        self._durable = Mark(0, 0, {})
        self._waiting: dict[_Waiter, None] = {}

    def mark(self) -> Mark:
        """This point of the history, which is being captured."""
        return Mark(self._history, self._written(), dict(self._deliveries.next_numbers))

    def committed(self, mark: Mark) -> None:
        """A checkpoint of a point of the history is committed."""
        if mark.history != self._history or mark.items < self._durable.items:
            return
        self._durable = mark
        for waiter in [waiter for waiter in self._waiting if waiter.wanted.is_in(mark)]:
            del self._waiting[waiter]
            waiter.settle()

    def restored(self, *, is_durable: bool) -> None:
        """Another history has begun.

        Args:
            is_durable: whether it comes from a committed checkpoint.
        """
        self._history += 1
        self._durable = self.mark() if is_durable else Mark(self._history, 0, {})
        self.refuse(
            lambda: AsyncBufError(
                "durable(): a restore replaced what was waited for: see whether it is there, and write it again if not"
            )
        )

    def is_durable(self, wanted: Wanted) -> bool:
        """Whether a committed checkpoint has it."""
        return wanted.is_in(self._durable)

    async def wait(self, wanted: Wanted) -> None:
        """Wait until a committed checkpoint has it.

        Raises:
            Exception: what ``refuse`` was given.
        """
        if self.is_durable(wanted):
            return
        waiter = _Waiter(wanted)
        self._waiting[waiter] = None
        try:
            await waiter.wake
        finally:
            self._waiting.pop(waiter, None)
        if waiter.error is not None:
            error, waiter.error = waiter.error, None
            try:
                raise error
            finally:
                del error  # it holds this frame, which must not hold it in turn

    def refuse(self, error: Callable[[], Exception]) -> None:
        """Tell everybody that waits that it will not come."""
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting:
            waiter.settle(detached(error()))

    def forget(self) -> None:
        """The event loop of those that waited was closed."""
        self._waiting.clear()

    def blocked(self) -> list[str]:
        """In words, what those that wait lack."""
        if not self._waiting:
            return []
        first = next(iter(self._waiting)).wanted
        what = f"the first {first.items} items" if first.items else f"write {first.number} of {first.producer!r}"
        return [
            f"{len(self._waiting)} call(s) wait for a checkpoint to be committed, the first for one with {what}: the "
            f"newest one has {self._durable.items} of {self._written()} items"
        ]
