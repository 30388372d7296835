"""The words that writes and draws share: which rows, and what is in them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RowRange:
    """A run of items that go to neighbouring rows.

    Attributes:
        row: the first row.
        item: position of the first item in what was handed to ``extend``.
        count: how many.
    """

    row: int
    item: int
    count: int
