"""A table whose items are of versions of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncbuf._table.table import Table
from asyncbuf._table.versions import Versions
from asyncbuf.rows import NO_COLUMNS, Placement, placed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncbuf._table.versions import Coming
    from asyncbuf.batch import Draw
    from asyncbuf.rows import Int64Array, WriteEvent
    from asyncbuf.staleness import Staleness
    from asyncbuf.storage import Prepared

STALE = "stale"
# Note of the placement of a write whose items were all too old: it has changed nothing.
REFUSED = object()


class VersionedTable(Table):
    """As ``NotingTable``, if the limiter wants that. Items that are too old are not written, and leave with a version.

    Args:
        *parts: as of ``Table``.
        staleness: how old they may be.

    Attributes:
        versions: the versions.
    """

    def __init__(self, *parts: Any, staleness: Staleness) -> None:
        super().__init__(*parts)
        self.versions = Versions(staleness, self.storage.capacity)
        self._coming: Coming | None = None  # of the write that is under way

    @property
    def version(self) -> int:
        """The version of the model that makes items now."""
        return self.versions.version

    # -- writing ------------------------------------------------------------------------------------------------------

    def refuses(self, prepared: Prepared) -> bool:
        """Whether all items of a write are too old. In the turn in which they would be written."""
        paths = self.versions.columns
        columns = self.storage.columns(prepared, paths) if paths else NO_COLUMNS
        self._coming = self.versions.coming(prepared.version, columns)
        return self.versions.refuses(self._coming, prepared.count)

    def telling(self, placement: Placement, event: WriteEvent | None, most: int) -> Iterator[None]:
        """Note versions, and tell the sampler."""
        self._note(placement)
        yield from super().telling(placement, event, most)

    def _note(self, placement: Placement) -> None:
        coming, self._coming = self._coming, None
        if coming is not None:
            self.versions.wrote(coming, placement)

    def noted(self, placement: Placement) -> Placement:
        """Items were written, and the sampler knows: those leave that were too old among others that are not.

        Returns:
            Where the others went.
        """
        self._note(placement)  # unless the sampler was told
        if not self.evict_stale():
            return placement
        kept = self._index.contains(placement.rows)
        return placed(placement.offered, placement.rows[kept], placement.items[kept])

    def introduce(self) -> None:
        """As ``Table.introduce``; fixed data were there before any version."""
        super().introduce()
        self.versions.verify(self.rows)

    def _left(self, rows: Int64Array) -> None:
        super()._left(rows)
        self.versions.removed(rows)

    def clear(self) -> None:
        """Forget every item; the version stays."""
        super().clear()
        self.versions.clear()

    # -- versions -----------------------------------------------------------------------------------------------------

    def advance(self, version: int) -> None:
        """A version begins."""
        self.versions.version = self.limits.version = version

    def evict_stale(self) -> int:
        """Items that are too old leave: how many. In an exclusive turn.

        An error leaves a part in a state that does not go with the rows.
        """
        rows = self.versions.too_old()
        if not len(rows):
            return 0
        left = self.remove(rows, cause=STALE)
        self.versions.tell(rows)
        return left

    def draw(self, batch_size: int) -> Draw:
        """Ask the sampler, and say of which versions the rows are."""
        draw = Table.draw(self, batch_size)
        rows = draw.indices.numpy()
        if self.limits.notes_draws:
            self.limits.drew(rows, self._index.size)
        return self.versions.told(draw, rows)

    def told_again(self, draw: Draw) -> Draw:
        """A draw with the ages of now."""
        return self.versions.told_again(draw)

    def is_too_old(self, draw: Draw) -> bool:
        """Whether a draw has a row whose item is too old now."""
        return self.versions.is_too_old(draw)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def components(self) -> Iterator[tuple[str, Any]]:
        """Every part with a state; a checkpoint of a buffer without versions has all items of version 0."""
        yield from super().components()
        yield "versions", self.versions

    def verify(self, stored: int) -> None:
        """As ``Table.verify``."""
        super().verify(stored)
        self.limits.version = self.versions.version
        self.limits.settle(self.rows)
