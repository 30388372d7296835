"""A table whose limiter wants to know which rows were drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncbuf._table.table import Table

if TYPE_CHECKING:
    from asyncbuf.batch import Draw


class NotingTable(Table):
    """As ``Table``, and notes the rows of each draw. Those of joins are no draws of their own."""

    def draw(self, batch_size: int) -> Draw:
        """Ask the sampler, and note the rows."""
        draw = super().draw(batch_size)
        self.limits.drew(draw.indices.numpy(), self._index.size)
        return draw
