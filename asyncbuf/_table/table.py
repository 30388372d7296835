"""Storage, writer, sampler, limiter and generator as one: what items go into, and what tickets are drawn from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from asyncbuf._plain.integers import first_of_each
from asyncbuf._runtime.arguments import shown
from asyncbuf._runtime.shield import shielded
from asyncbuf._runtime.torch_modes import Swapped, dispatch_modes, disturb_us, function_modes, is_inference_on
from asyncbuf._table import checks
from asyncbuf._table.deliveries import DEFAULT_WINDOW, Deliveries
from asyncbuf._table.durability import Durability
from asyncbuf._table.limits import Limits
from asyncbuf._table.ownership import claim
from asyncbuf._table.reservations import Reservations
from asyncbuf._table.row_index import RowIndex
from asyncbuf._table.tally import Tally
from asyncbuf.rows import NO_COLUMNS, NotYet, Placement, RowRange, Rows, WriteEvent
from asyncbuf.storage import Prepared
from asyncbuf.storage._shielded import StorageCalls
from asyncbuf.writer import RoundRobinWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncbuf.batch import Draw
    from asyncbuf.limiter import Limiter
    from asyncbuf.rows import Answer, BoolArray, Int64Array
    from asyncbuf.sampler import Sampler
    from asyncbuf.storage import Storage
    from asyncbuf.writer import Writer

T = TypeVar("T")

_UNKNOWN = -1
_NOT_YET = Rows(0, 0, 0)  # in a write event, until the rows are written


class Table:
    """The synchronous heart of a buffer: no method waits, and every one belongs into a turn of the history.

    Args:
        storage: where items live.
        writer: which rows they take.
        sampler: which rows a batch takes.
        limiter: when items may be written and batches drawn.
        generator: randomness of the draws.
        batch_size: that of the buffer, which the limiter may look at; None if it has none.
        key_window: how many keys of writes are kept.

    Attributes:
        deliveries: which writes came before.
        durability: which of them a committed checkpoint has.
        storage_calls: the storage, as it is called while items and batches come and go.
        limits: the limiter and its counters.
        has_write_events: whether the sampler wants to see each write as a whole.
        reservations: work that has no items yet.
        lets_go: whether the sampler may let rows leave at any time.
        listens_to_hand_over: whether the sampler wants to know which batches consumers got.
        stale_priorities: number of rows whose priorities came after they were replaced or removed.
        tally: counts what leaves.

    Raises:
        ValueError: one of the parts belongs to another table.
    """

    def __init__(
        self,
        storage: Storage,
        writer: Writer,
        sampler: Sampler,
        limiter: Limiter,
        generator: torch.Generator,
        batch_size: int | None = None,
        key_window: int = DEFAULT_WINDOW,
    ) -> None:
        claim(self, storage=storage, writer=writer, sampler=sampler, limiter=limiter)
        self.storage = storage
        self.storage_calls = StorageCalls(storage)
        self.writer = writer
        self.sampler = sampler
        self.generator = generator
        self.limits = Limits(limiter, storage, writer, sampler, batch_size)
        self._checks_writes = "check_write" in sampler.hooks
        self._tells_events = "wrote" in sampler.hooks
        self._tells_rows = "written" in sampler.hooks
        self.lets_go = "leaving" in sampler.hooks
        self.listens_to_hand_over = "handed_over" in sampler.hooks
        self.has_write_events = self._checks_writes or self._tells_events
        self.stale_priorities = 0
        self._capacity = storage.capacity
        if "use_tables" in sampler.hooks:
            sampler.use_tables(writer.tables)
        self._index = RowIndex(storage.capacity, writer)
        self.deliveries = Deliveries(key_window, lambda: writer.write_count)
        self.durability = Durability(self.deliveries, lambda: writer.write_count)
        self.reservations = Reservations()
        self.tally = self.limits.tally = Tally(writer.write_count - self._index.size)
        self._rows: Rows | None = None
        # The batch size for which the answer of may_draw is yes until the rows change.
        self._open_for = _UNKNOWN
        self._asks_sampler = "may_draw" in sampler.hooks
        self._answer_holds = not limiter.counts_draws and not (self._asks_sampler and sampler.counts_draws)
        self._counts_items = not (writer.trusted and writer.computes_numbers)

    # -- what there is ------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> Rows:
        """What there is to draw from now."""
        rows = self._rows
        if rows is None:
            rows = self._rows = self._index.rows(self.writer.write_count)
        return rows

    @property
    def version(self) -> int | None:
        """The version of the model that makes items now; None if nobody counts versions."""
        return None

    @property
    def takes_parts(self) -> bool:
        """Whether the sampler may be told of a write in parts."""
        return self._tells_events and self.sampler.trusted

    @property
    def size(self) -> int:
        """Number of valid rows."""
        return self._index.size

    @property
    def write_count(self) -> int:
        """Number of items ever written."""
        return (self._rows or self.rows).write_count

    def changed(self) -> None:
        """Rows, priorities or the state of a part are other than before."""
        self._rows = None
        self._open_for = _UNKNOWN

    def replaced(self, rows: Int64Array, write_count: int) -> BoolArray:
        """Which rows were removed or got another item since so many items had been written.

        Args:
            rows: rows of the storage: int64 ``[rows]``.
            write_count: how many items.

        Returns:
            bool ``[rows]``.
        """
        index = self._index
        if index.size == self._capacity or (is_there := index.contains(rows)).all():
            if write_count == self.write_count:
                return np.zeros(len(rows), np.bool_)
            replaced: BoolArray = index.numbers(rows) >= write_count
            return replaced
        gone = ~is_there
        gone[is_there] = index.numbers(rows[is_there]) >= write_count
        return gone

    def missing(self, draw: Draw) -> int:
        """How many rows of a draw, those of its joins included, hold no item any more that could be gathered."""
        if self.storage.is_fixed:
            return 0
        rows = [indices.reshape(-1) for indices in (draw.indices, *draw.joins.values())]
        return int(np.count_nonzero(~self._index.contains(torch.cat(rows).numpy())))

    def _call(self, method: Callable[..., T], *args: object) -> T:
        """Call a method of the sampler; of one that is not ours in plain modes and an empty context."""
        return method(*args) if self.sampler.trusted else shielded(method, *args)

    # -- writing: in plain modes and an empty context, unless every part that is asked is ours ------------------------

    @property
    def asks_others_to_write(self) -> bool:
        """Whether more than a writer and a storage that are ours take part in writing."""
        writer = self.writer
        ours = writer.trusted and self.storage.trusted and not writer.columns and not writer.tables
        return self.has_write_events or self._tells_rows or not ours

    def check_into(self, table: Any) -> None:
        """Refuse the name of a table that there is not.

        Raises:
            TypeError: the writer has no tables, or this is no name.
            ValueError: it has others.
        """
        tables, name = self.writer.tables, type(self.writer).__name__
        if not tables:
            raise TypeError(f"table: expected none, because a {name} has no tables (TableWriter has), found {table!r}")
        if not isinstance(table, str):
            raise TypeError(f"table: expected one of {list(tables)}, found {shown(table)}")
        if table not in tables:
            raise ValueError(f"table: expected one of {list(tables)}, found {shown(table)}")

    def evict_stale(self) -> int:
        """Items that are too old leave: how many."""
        return 0

    def told_again(self, draw: Draw) -> Draw:
        """A draw that says what is true now of its rows."""
        return draw

    def is_too_old(self, draw: Draw) -> bool:
        """Whether a draw has a row whose item is too old now."""
        return False

    def place(self, count: int) -> Placement:
        """Choose rows for so many items. Changes nothing.

        Raises:
            TypeError, IndexError, ValueError: a writer returned something else than different rows of the storage.
        """
        placement = self.writer.place(count, self._capacity)
        if not self.writer.trusted:
            checks.placement(placement, count, self._capacity, type(self.writer).__name__)
        return placement

    def place_items(self, prepared: Prepared) -> Placement:
        """Choose rows for items, with a look at them if the writer wants one. Changes nothing.

        Raises:
            TypeError, IndexError, ValueError: as ``place``; or the writer refuses these items.
        """
        writer, table = self.writer, prepared.table
        if table is None and not writer.columns:
            return self.place(prepared.count)
        paths = writer.columns if table is None else writer.columns_of(table)
        columns = self.storage.columns(prepared, paths) if paths else NO_COLUMNS
        if table is None:
            placement = writer.place_values(prepared.count, self._capacity, columns)
        else:
            placement = writer.place_in(table, prepared.count, self._capacity, columns)
        if not writer.trusted:
            checks.placement(placement, prepared.count, self._capacity, type(writer).__name__)
        return placement

    def check_write(self, placement: Placement, prepared: Prepared) -> WriteEvent:
        """Ask the sampler whether items may be written. Changes nothing; an error refuses them.

        Returns:
            What the sampler is told when they are written.
        """
        paths, first = self.sampler.columns, self.writer.write_count
        columns = self.storage.columns(prepared, paths) if paths else NO_COLUMNS
        if not self._checks_writes:
            return WriteEvent(placement, first, _NOT_YET, columns, prepared.priority)
        after = self._index.rows_after(placement, first + placement.offered)
        event = WriteEvent(placement, first, after, columns, prepared.priority)
        self.sampler.check_write(event)
        return event

    def commit(self, placement: Placement) -> None:
        """Make rows valid that were written."""
        if self._counts_items:
            first = self.writer.write_count
            self.writer.commit(placement, self._capacity)
            checks.write_count(self.writer.write_count, first + placement.offered, type(self.writer).__name__)
            self._index.store_numbers(placement, first)
        else:
            self.writer.commit(placement, self._capacity)
        if left := placement.offered - self._index.wrote(placement):
            not_kept = 0 if type(self.writer) is RoundRobinWriter else placement.offered - len(placement.rows)
            self.tally.not_kept += not_kept
            self.tally.overwritten += left - not_kept
        self._rows = None
        self._open_for = _UNKNOWN

    def wrote(self, placement: Placement, event: WriteEvent | None) -> None:
        """Tell the sampler of rows that were written. An error leaves it in a state that does not go with the rows."""
        for _ in self.telling(placement, event, placement.offered):
            pass

    def telling(self, placement: Placement, event: WriteEvent | None, most: int) -> Iterator[None]:
        """As ``wrote``, so many items at a time if the sampler is ours; another one is told of a write as a whole."""
        if event is not None and self._tells_events:
            if self._checks_writes and self._index.sparse is None:
                self._rows = event.table
            event.table = self.rows
            if placement.offered <= most or not self.sampler.trusted:
                self.sampler.wrote(event)
            else:
                for part in event.in_parts(most):
                    self.sampler.wrote(part)
                    if self.lets_go:
                        self.let_go()
                        event.table = self.rows
                    yield
        if self._tells_rows:
            self.sampler.written(torch.from_numpy(placement.rows), self.rows)
        if self.lets_go:
            self.let_go()

    def introduce(self) -> None:
        """Tell the sampler of the rows that a fixed storage has from the start, as of one write.

        Raises:
            SchemaError: the storage cannot give the columns that the sampler asks for.
            ValueError: the sampler does not take such items.
        """
        if not (self.has_write_events or self._tells_rows):
            return
        size, paths = self.size, self.sampler.columns
        placement = Placement(size, (RowRange(0, 0, size),))
        columns = self.storage.columns(Prepared(size, 0, None), paths) if paths else NO_COLUMNS
        event = WriteEvent(placement, 0, self.rows, columns)
        if self._checks_writes:
            self._call(self.sampler.check_write, event)
        shielded(self.wrote, placement, event)

    def remove(self, rows: Int64Array, write_count: int | None = None, *, cause: str = "removed") -> int:
        """Remove rows: how many left. An error leaves a part in a state that does not go with the rows.

        Args:
            rows: rows of the storage; those that are not valid are left out.
            cause: why, for the ledger.
            write_count: number of items written when they were drawn: those that were replaced since are left out.
        """
        return shielded(self._remove, rows, write_count, cause)

    def _remove(self, rows: Int64Array, write_count: int | None, cause: str) -> int:
        rows = first_of_each(rows)
        rows = rows[~self.replaced(rows, self.write_count if write_count is None else write_count)]
        if not len(rows):
            return 0
        self._index.remove(rows)
        self.tally.evict(cause, len(rows))
        self._left(rows)
        self.changed()
        # Each in a context of its own: what one sets does not reach the next.
        shielded(self.writer.removed, torch.from_numpy(rows.copy()), self._capacity)
        shielded(self.storage.release, torch.from_numpy(rows.copy()))
        shielded(self.sampler.removed, torch.from_numpy(rows), self.rows)
        if self.lets_go:
            self.let_go()
        return len(rows)

    def _left(self, rows: Int64Array) -> None:
        """Rows have no item any more."""
        self.limits.removed(rows, self._index.size)

    def let_go(self) -> None:
        """Remove the rows for which the sampler has no more use. In an exclusive turn.

        An error leaves a part in a state that does not go with the rows.
        """
        leaving = self._call(self.sampler.leaving)
        if leaving is not None:
            self.remove(checks.row_numbers(leaving, self._capacity, "leaving"), cause="let_go")

    def clear(self) -> None:
        """Forget every item."""
        shielded(self.storage.clear)
        shielded(self.writer.clear)
        self.tally.evict("emptied", self._index.size)
        self._index.clear()
        self.limits.clear()
        self.changed()
        shielded(self.sampler.clear)

    # -- drawing ------------------------------------------------------------------------------------------------------

    def may_draw(self, batch_size: int) -> Answer:
        """Whether a batch can be drawn now, or what is missing."""
        if batch_size == self._open_for:
            return True
        rows = self.rows
        answer = self.limits.may_draw(rows, batch_size)
        if answer and self._asks_sampler:
            answer = self._call(self.sampler.may_draw, rows, batch_size)
        if answer and not rows.size:
            answer = NotYet("no item is stored")
        if answer and self._answer_holds:
            self._open_for = batch_size
        return answer

    def draw(self, batch_size: int) -> Draw:
        """Ask the sampler.

        Raises:
            ValueError: the sampler says that there is no such batch.
            TypeError, IndexError: a sampler returned something else than valid rows.
        """
        sampler, limits = self.sampler, self.limits
        if sampler.trusted:
            if (is_inference_on() or dispatch_modes() or function_modes()) and disturb_us():
                with Swapped():
                    return self.draw(batch_size)
            draw = sampler.draw(self._rows or self.rows, batch_size, self.generator)
        else:
            draw = shielded(self._checked_draw, batch_size)
        limits.drawn += 1
        limits.drawn_items += draw.indices.shape[0]
        return draw

    def _checked_draw(self, batch_size: int) -> Draw:
        sampler, rows = self.sampler, self.rows
        draw = sampler.draw(rows, batch_size, self.generator)
        checks.draw(draw, rows, type(sampler).__name__, combines="combine" in sampler.hooks)
        return draw

    def handed_over(self, draw: Draw, write_count: int) -> int:
        """A consumer has got the batch of a draw. In an exclusive turn: rows may leave.

        Args:
            draw: the draw.
            write_count: number of items written when it was drawn.

        Returns:
            How many rows left.
        """
        leaving = self._call(self.sampler.handed_over, draw)
        if leaving is None:
            return 0
        return self.remove(checks.row_numbers(leaving, self._capacity, "handed_over"), write_count, cause="consumed")

    def finish(self) -> None:
        """Tell the sampler that no more items will come."""
        self._call(self.sampler.finished)
        self.changed()

    def end_epoch(self) -> None:
        """Leave out what is left of the pass of the sampler.

        Raises:
            TypeError: the sampler does not say how.
        """
        self._call(self.sampler.end_epoch)
        self.changed()

    def dropped(self, draw: Draw) -> None:
        """Nobody gets the batch of a draw."""
        self._call(self.sampler.dropped, draw)

    def update_priority(
        self, indices: Any, priority: Any, write_count: int | None = None, *, is_batch: bool = False
    ) -> None:
        """Forward new priorities to the sampler.

        Args:
            indices: rows, integers ``[n]``.
            priority: float ``[n]``, or one number for all.
            write_count: number of items written when the rows were drawn: those that were replaced since are left out.
            is_batch: whether the rows are those of a batch, so that an array must have as many priorities.

        Raises:
            TypeError: the indices are not integers.
            ValueError: indices and priorities differ in number, or a priority is not finite.
            IndexError: an index is not a row of the storage.
        """
        shielded(self._update_priority, indices, priority, write_count, is_batch)

    def _update_priority(self, indices: Any, priority: Any, write_count: int | None, is_batch: bool) -> None:
        if "group_priority" in self.sampler.hooks:
            indices, priority = self.sampler.group_priority(indices, priority)
        rows = checks.row_numbers(indices, self._capacity, "indices")
        value = checks.priorities(priority, len(rows), is_batch=is_batch)
        if len(rows):
            # Of rows whose draw is not known, only those without an item can be left out.
            stale = self.replaced(rows, self.write_count if write_count is None else write_count)
            if stale.any():
                self.stale_priorities += int(np.count_nonzero(stale))
                rows, value = rows[~stale], value[torch.from_numpy(~stale)]
        if len(rows):
            self.sampler.update_priority(torch.from_numpy(rows), value, self.rows)
            self.changed()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def components(self) -> Iterator[tuple[str, Any]]:
        """Every part with a state, by name, in the order in which states are loaded.

        Each has ``state_dict``, ``load_state_dict``, and ``verify(rows)`` for when all are loaded (see ``verify``).
        Older checkpoints lack all of these but writer and sampler: those are then as in a new table.
        """
        yield "writer", self.writer
        yield "rows", self._index
        yield "limiter", self.limits
        yield "ledger", self.tally
        yield "deliveries", self.deliveries
        yield "reservations", self.reservations
        yield "sampler", self.sampler

    def verify(self, stored: int) -> None:
        """Refuse states that were just loaded and do not go with each other.

        Args:
            stored: number of rows that the storage has.

        Raises:
            CheckpointCorruptError: they contradict each other.
        """
        self.changed()
        checks.stored_rows(self.writer.write_count, self.size, self._index.highest() + 1, stored)
        for _, part in self.components():
            part.verify(self.rows)
