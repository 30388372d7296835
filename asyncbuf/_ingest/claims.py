"""What a write must be the first to have, for it to take effect: a key, or the next number of its producer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from asyncbuf._runtime.arguments import shown
from asyncbuf._table.deliveries import LEAST_INT, MOST_INT
from asyncbuf.errors import AsyncBufError

if TYPE_CHECKING:
    from asyncbuf._table.deliveries import Deliveries, Key
    from asyncbuf._table.tally import Tally


class DuplicateError(AsyncBufError):
    """The write took effect before. Never leaves the package."""


class Claim(Protocol):
    """Decides about a write, in its turn of the history."""

    def may_be_taken(self) -> bool:
        """Whether somebody may have taken it, at a glance; the decision is made in the turn."""
        ...

    def begin(self) -> None:
        """The turn of the write has come.

        Raises:
            DuplicateError: it is written already; that is counted.
            Exception: it must not be written.
        """

    def written(self) -> None:
        """The items are in the table. Must not fail."""

    def refused(self) -> None:
        """The items were all too old. Must not fail."""


class KeyClaim:
    """A key that is not in the window.

    Args:
        deliveries: the keys of the window.
        tally: counts duplicates.
        key: the key.
    """

    __slots__ = ("_deliveries", "_key", "_tally")

    def __init__(self, deliveries: Deliveries, tally: Tally, key: Key) -> None:
        self._deliveries = deliveries
        self._tally = tally
        self._key = key

    def may_be_taken(self) -> bool:
        """Whether it is in the window now."""
        return self._deliveries.has(self._key)

    def begin(self) -> None:
        """Refuse a key that is in the window."""
        if self._deliveries.has(self._key):
            self._tally.duplicates += 1
            raise DuplicateError

    def written(self) -> None:
        """It is in the window from now on."""
        self._deliveries.take(self._key)

    def refused(self) -> None:
        """It may be used for younger items."""


class NumberClaim:
    """The next number of a producer.

    Args:
        deliveries: knows how far each producer is.
        tally: counts duplicates.
        producer: its name.
        number: the number that the write says it has; None for the next one, whatever that is.
    """

    __slots__ = ("_deliveries", "_number", "_producer", "_tally")

    def __init__(self, deliveries: Deliveries, tally: Tally, producer: str, number: int | None) -> None:
        self._deliveries = deliveries
        self._tally = tally
        self._producer = producer
        self._number = number

    def may_be_taken(self) -> bool:
        """Whether that number was written by now."""
        return self._number is not None and self._number < self._deliveries.next_number(self._producer)

    def begin(self) -> None:
        """Refuse a number that was written, or that leaves some out."""
        if self._number is None:
            return
        expected = self._deliveries.next_number(self._producer)
        if self._number < expected:
            self._tally.duplicates += 1
            raise DuplicateError
        if self._number > expected:
            raise ValueError(
                f"number: expected {expected}, the next one of producer {self._producer!r}, found {self._number}: "
                f"{expected} to {self._number - 1} are missing. Write them first; next_number says where to go on"
            )

    def written(self) -> None:
        """The number is used up."""
        self._deliveries.took(self._producer)

    def refused(self) -> None:
        """The number is used up: nobody shall send these items again."""
        self.written()
        self._deliveries.refused += 1


def checked_key(key: Any) -> Key:
    """An argument that is a key.

    Raises:
        TypeError: it is neither a text nor an int.
        ValueError: the int has more than 64 bits.
    """
    if type(key) is str:
        return key
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, bool) or not isinstance(key, int):
        instead = ": write key=int(...)" if hasattr(key, "__index__") and not isinstance(key, bool | type) else ""
        raise TypeError(
            f"key: expected a str or an int, found {shown(key)} of type {type(key).__name__}"
            f"{instead or '; for example key=' + repr('prompt-7')}"
        )
    if not LEAST_INT <= key <= MOST_INT:
        raise ValueError(f"key: expected an int of 64 bits, found {shown(key)}: write key=str(...)")
    return int(key)
