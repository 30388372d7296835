"""A limiter, and the counters that it decides by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._plain.state import fields, int64s, same
from asyncbuf._runtime.shield import shielded
from asyncbuf._table.row_notes import RowBytes, UnreadRows
from asyncbuf._table.tally import Tally
from asyncbuf.errors import CheckpointCorruptError
from asyncbuf.rows import Counters

if TYPE_CHECKING:
    from asyncbuf.limiter import Limiter
    from asyncbuf.rows import Answer, Int64Array, Placement, Rows
    from asyncbuf.sampler import Sampler
    from asyncbuf.storage import Prepared, Storage
    from asyncbuf.writer import Writer

_NUMBERS = ("ahead", "settled", "batch_size")


class Limits:
    """What a limiter says of a table now.

    Args:
        limiter: the limiter.
        storage: weighs items, if the limiter counts bytes.
        writer: says which rows the next items take, if the limiter wants to know.
        sampler: may know how many items wait.
        batch_size: that of the buffer; None if it has none.

    Attributes:
        limiter: the limiter.
        drawn: number of tickets ever drawn.
        drawn_items: number of rows ever drawn, all tickets together.
        admitted: number of items that were admitted and are not written yet. Belongs to calls that wait: not saved.
        admitted_nbytes: bytes of these, if the limiter counts them.
        tally: counts what leaves. That of the table.
        version: the version of the model that makes items now; 0 if nobody counts versions. Not saved here.
        settled: number of items that count as trained on before the limiter was in force, if it counts versions.
        ahead: how many more items were written than rows drawn, as ``Counters.unread`` counts; if the limiter wants to
            know, and the sampler does not say.
        unread: the rows without a draw, if the limiter wants to know.
    """

    def __init__(
        self, limiter: Limiter, storage: Storage, writer: Writer, sampler: Sampler, batch_size: int | None = None
    ) -> None:
        self.limiter = limiter
        self.drawn = self.drawn_items = self.admitted = self.admitted_nbytes = 0
        self.tally = Tally()
        self.version = self.settled = 0
        self._storage = storage
        self._writer = writer
        self._sampler = sampler
        self._batch_size = batch_size or 0
        self.ahead = 0
        self._counts_ahead = limiter.counts_unread and sampler.unread is None
        self._bytes = RowBytes(storage.capacity) if limiter.counts_bytes else None
        self.unread = UnreadRows(storage.capacity) if limiter.counts_overwrites else None
        # What a checkpoint says nothing of, because another limiter was in force: found out once the rows are there.
        self._lacks_bytes = self._lacks_unread = self._lacks_ahead = self._lacks_settled = False

    @property
    def notes_rows(self) -> bool:
        """Whether the limiter wants to know something of each row."""
        return self._bytes is not None or self.unread is not None or self._counts_ahead

    @property
    def notes_draws(self) -> bool:
        """Whether it wants to know which rows are drawn."""
        return self.unread is not None or self._counts_ahead

    # -- questions ----------------------------------------------------------------------------------------------------

    def may_draw(self, rows: Rows, items: int) -> Answer:
        """Whether a batch of so many items may be drawn."""
        if self.limiter.trusted:
            return self.limiter.may_draw(self._counters(rows), items)
        return shielded(self.limiter.may_draw, self._counters(rows), items)

    def may_write(self, rows: Rows, items: int, nbytes: int = 0) -> Answer:
        """Whether so many items, of so many bytes each, may be written.

        Raises:
            ValueError: they never can.
        """
        counters = self._counters(rows, items * nbytes, self._overwrites(items, rows.capacity))
        if self.limiter.trusted:
            return self.limiter.may_write(counters, items)
        return shielded(self.limiter.may_write, counters, items)

    def _counters(self, rows: Rows, offered_nbytes: int = 0, overwrites: int = 0) -> Counters:
        counts_versions = self.limiter.needs_versions
        return Counters(
            rows.size,
            rows.capacity,
            rows.write_count,
            self.admitted,
            self.drawn,
            self.drawn_items,
            self._batch_size,
            self._unread(rows),
            self._nbytes(rows),
            self.admitted_nbytes,
            offered_nbytes,
            overwrites,
            self.version if counts_versions else 0,
            self.tally.given_up + self.settled if counts_versions else 0,
        )

    def _unread(self, rows: Rows) -> int:
        if not self.limiter.counts_unread:
            return 0
        return min(rows.size, self.ahead if self._counts_ahead else self._sampler.unread or 0)

    def _nbytes(self, rows: Rows) -> int:
        if self._bytes is None:
            return 0
        if self._lacks_bytes:
            self._lacks_bytes = False
            if rows.size:
                found = _valid(rows)
                self._bytes.wrote(found, shielded(self._storage.weigh_rows, torch.from_numpy(found)))
        return self._bytes.total

    def _overwrites(self, items: int, capacity: int) -> int:
        if self.unread is None or self.admitted + items > capacity:
            return 0
        return self.unread.count(self._writer.place(self.admitted + items, capacity).rows)

    # -- what happens -------------------------------------------------------------------------------------------------

    def weigh(self, prepared: Prepared) -> int:
        """Bytes of each of some items, on average; 0 if nobody counts them."""
        if self._bytes is None:
            return 0
        return -(-int(shielded(self._storage.weigh, prepared)) // prepared.count)

    def typical_nbytes(self, rows: Rows) -> int:
        """Bytes of a stored item, on average; 0 if nobody counts them, or none is stored."""
        return -(-self._nbytes(rows) // rows.size) if self._bytes is not None and rows.size else 0

    def drew(self, rows: Int64Array, size: int) -> None:
        """Rows were drawn, while so many items are stored."""
        if self.unread is not None:
            self.unread.drawn(rows)
        self.ahead = max(0, min(self.ahead, size) - len(rows))

    def wrote(self, placement: Placement, nbytes: int) -> None:
        """Items of so many bytes each were written."""
        rows = placement.rows
        self.ahead += placement.offered
        if self._bytes is not None:
            self._bytes.wrote(rows, nbytes)
        if self.unread is not None:
            self.unread.wrote(rows)

    def removed(self, rows: Int64Array, size: int) -> None:
        """Rows have left, and so many items are stored."""
        self.ahead = min(self.ahead, size)
        if self._bytes is not None:
            self._bytes.removed(rows)
        if self.unread is not None:
            self.unread.drawn(rows)

    def clear(self) -> None:
        """Every row has left."""
        self._lacks_bytes = self._lacks_unread = self._lacks_ahead = False
        self.ahead = 0
        if self._bytes is not None:
            self._bytes.clear()
        if self.unread is not None:
            self.unread.clear()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The counters of draws; kind and state of the limiter; what it wants to know of each row."""
        state = {
            "kind": type(self.limiter).__name__,
            "drawn": self.drawn,
            "drawn_items": self.drawn_items,
            "state": self.limiter.state_dict(),
        }
        if self._bytes is not None and not self._lacks_bytes:
            state["nbytes"] = torch.from_numpy(self._bytes.saved())
        if self.unread is not None:
            state["unread"] = torch.from_numpy(self.unread.rows())
        if self._counts_ahead:
            state["ahead"] = self.ahead
        if self.limiter.needs_versions:
            state["settled"], state["batch_size"] = self.settled, self._batch_size
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave out. Limiters without a state may be exchanged for each other.

        Raises:
            CheckpointMismatchError: a limiter with a state was of another kind.
        """
        kinds: dict[str, type] = dict(kind=str, drawn=int, drawn_items=int, state=dict)
        noted = ("nbytes", "unread")
        kinds |= {name: torch.Tensor for name in noted if isinstance(state, dict) and name in state}
        kinds |= {name: int for name in _NUMBERS if isinstance(state, dict) and name in state}
        kind, drawn, drawn_items, saved, *_ = fields(state, "limiter", **kinds)
        if saved or self.limiter.state_dict():
            same(kind, type(self.limiter).__name__, "limiter")
        if drawn_items < drawn or (drawn_items and not drawn):
            raise CheckpointCorruptError(
                f"limiter: expected at least one row of each of {drawn} tickets, found {drawn_items} rows"
            )
        nbytes, unread = (
            int64s(state[name], f"limiter: expected {name}").copy() if name in state else None for name in noted
        )
        self._check_notes(nbytes, unread)
        self.limiter.load_state_dict(saved)
        self.drawn, self.drawn_items = drawn, drawn_items
        self._load_notes(nbytes, unread)
        self.ahead, self._lacks_ahead = state.get("ahead", 0), "ahead" not in state
        self.settled = state.get("settled", 0)
        self._lacks_settled = "settled" not in state or state.get("batch_size") != self._batch_size

    def _check_notes(self, nbytes: Int64Array | None, unread: Int64Array | None) -> None:
        capacity = self._storage.capacity
        if nbytes is not None and (len(nbytes) != capacity or nbytes.min(initial=0) < 0):
            raise CheckpointCorruptError(f"limiter: expected the bytes of {capacity} rows, found others")
        if unread is not None and ((unread < 0) | (unread >= capacity)).any():
            raise CheckpointCorruptError(f"limiter: expected rows below {capacity} that were not drawn, found others")

    def _load_notes(self, nbytes: Int64Array | None, unread: Int64Array | None) -> None:
        self._lacks_bytes, self._lacks_unread = nbytes is None, unread is None
        if self._bytes is not None:
            self._bytes.load(np.zeros(self._storage.capacity, np.int64) if nbytes is None else nbytes)
        if self.unread is not None:
            self.unread.load(np.empty(0, np.int64) if unread is None else unread)

    def count_again(self, drawn: int, batch_size: int) -> None:
        """Set the counters of draws by the number of tickets, for a checkpoint that does not have them.

        Args:
            drawn: number of tickets.
            batch_size: rows that each is taken to have had.
        """
        self.drawn, self.drawn_items = drawn, drawn * max(1, batch_size)
        self._load_notes(None, None)
        self._lacks_ahead = self._lacks_settled = True

    def verify(self, rows: Rows) -> None:
        """Refuse a state of the limiter that does not go with the rows."""
        self.limiter.verify(rows)
        if self._lacks_ahead:
            self.ahead, self._lacks_ahead = max(0, rows.write_count - self.drawn_items), False
        if self._bytes is None and self.unread is None:
            return
        valid = np.zeros(rows.capacity, np.bool_)
        valid[_valid(rows)] = True
        if self._bytes is not None and self._bytes.of(np.flatnonzero(~valid)).any():
            raise CheckpointCorruptError("limiter: expected bytes of stored items, found some of rows without an item")
        if self.unread is None:
            return
        if self._lacks_unread:  # not known: to wait for draws loses nothing
            self.unread.load(np.flatnonzero(valid))
            self._lacks_unread = False
        elif self.unread.count(np.flatnonzero(~valid)):
            raise CheckpointCorruptError("limiter: expected stored items that were not drawn, found rows without one")

    def settle(self, rows: Rows) -> None:
        """Find out how much was trained on before the limiter was in force, once the version is known."""
        if self._lacks_settled:
            gone = rows.write_count - rows.size - self.tally.given_up
            self.settled, self._lacks_settled = max(0, gone - self.version * self._batch_size), False


def _valid(rows: Rows) -> Int64Array:
    """The valid rows: int64 ``[size]``."""
    found: Int64Array = rows.at(torch.arange(rows.size, device="cpu")).numpy()
    return found
