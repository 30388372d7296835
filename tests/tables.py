"""A writer with tables for tests that do not say which table items go into."""

from __future__ import annotations

from asyncbuf import Placement, TableWriter


class TurnsWriter(TableWriter):
    """Each write goes into some table, which follows from the number of its first item."""

    def place(self, count: int, capacity: int) -> Placement:
        names = list(self.tables)
        table = names[(self.write_count * 2654435761 >> 9) % len(names)]
        return self.place_in(table, count, capacity, {})


def two_tables(capacity: int) -> TurnsWriter:
    """Two tables of about the same size."""
    return TurnsWriter({"one": capacity // 2, "other": capacity - capacity // 2})
