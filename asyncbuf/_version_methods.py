"""The methods of a buffer that count versions of the model."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from asyncbuf._runtime.arguments import count

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from asyncbuf._assembly import Assembly
    from asyncbuf._table.gate import HistoryGate
    from asyncbuf._table.table import Table


class VersionMethods:
    """The part of a buffer that knows which version of the model makes items."""

    _parts: Assembly
    _gate: HistoryGate
    _table: Table

    def _turn(self, *, within_frozen: bool = False) -> Awaitable[None]:
        raise NotImplementedError

    @property
    def version(self) -> int:
        """The version of the model that makes items now: 0 at first, and as long as nobody counts versions."""
        return self._table.version or 0

    async def advance_version(self, version: int | None = None) -> int:
        """Say that the model has a new version. It is an event of the history, like a write.

        From here on, items that are written without a version are of this one, and those that became too old by it
        leave, with the tickets that were drawn ahead of them: see ``Staleness``.

        Args:
            version: its number, from the current one on; None for the next one.

        Returns:
            Its number.

        Raises:
            TypeError: the buffer was made without ``staleness``, or the version is no int.
            ValueError: the version is below the current one.
        """
        if version is not None:
            version = count(version, "version", 0, most=2**53, example=1)
        await self._turn()
        return await self._gate.apply(functools.partial(self._parts.advance_version, version), exclusive=True)
