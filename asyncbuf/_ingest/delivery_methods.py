"""The methods of a buffer for what comes exactly once. They only check and delegate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncbuf._ingest.claims import KeyClaim, checked_key
from asyncbuf._ingest.producer import Producer, checked_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncbuf._ingest.write_path import WritePath
    from asyncbuf._table.table import Table


class DeliveryMethods:
    """The part of a buffer that takes each write once."""

    _table: Table
    _writes: WritePath
    _prepare: Callable[[Any], Any]
    _prepare_one: Callable[[Any], Any]

    def _turn(self, *, within_frozen: bool = False) -> Awaitable[None]:
        raise NotImplementedError

    async def _write_once(
        self, prepare: Callable[[Any], Any], items: Any, key: Any, priority: Any, table: str | None
    ) -> bool:
        """Write what has a key: whether it was new."""
        claim = KeyClaim(self._table.deliveries, self._table.tally, checked_key(key))
        return await self._writes.write_once(claim, prepare, items, priority, table)

    def producer(self, name: str) -> Producer:
        """Make what writes under a name, with numbers that go on after a restore.

        Args:
            name: such as ``"actor-3"``.

        Raises:
            TypeError, ValueError: it is no name.
        """
        prepare = (self._prepare, self._prepare_one)
        table = self._table
        return Producer(checked_name(name), table.deliveries, table.tally, self._writes, prepare, self._turn)
