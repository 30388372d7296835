"""Items that are used up: each is handed out a number of times, and leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._plain.integers import are_distinct
from asyncbuf._plain.state import fields, int64s, same
from asyncbuf._runtime.arguments import count, shown
from asyncbuf.batch import Draw
from asyncbuf.errors import CheckpointCorruptError
from asyncbuf.rows import NotYet
from asyncbuf.sampler._distinct import distinct
from asyncbuf.sampler._items import verify_items
from asyncbuf.sampler._line import Line
from asyncbuf.sampler._loss import warn_of_loss
from asyncbuf.sampler._row_set import RowSet
from asyncbuf.sampler.base import Sampler

if TYPE_CHECKING:
    from asyncbuf.rows import Answer, Int64Array, Rows, WriteEvent

    Int32Array = np.ndarray[Any, np.dtype[np.int32]]

ORDERS = ("fifo", "lifo", "random")
_MOST_TIMES = 2**31 - 1


class ConsumingSampler(Sampler):
    """Hands every item out ``times`` times, and then removes it, which frees its row.

    For on-policy learning, or as a queue. A batch waits until enough items do. No item is twice in a batch.

    With ``times`` above 1, an item that was drawn stands behind all that wait at that moment. So with ``"fifo"`` and
    data that stands still, all items come once, and then all again.

    An item leaves when the last of its batches was handed over to a consumer. If a ticket is dropped instead (by
    ``skip``, ``flush``), its items are the next ones to be drawn, in their order. Items that are overwritten before
    they were drawn that often are not drawn again, and are counted in ``lost``; the first of them are worth an
    ``ItemsLostWarning``. A sampler cannot prevent that: with ``overwrite="wait"``, or ``limiter=Queue(size)``, writers
    wait until rows are free.

    After ``finish()``, fewer items may be left than a batch has. They make no batch; ``await buffer.sample(n)`` with a
    smaller ``n`` gets them, and ``waiting`` says how many there are.

    ``batch.info["number"]`` has the item number of each row, int64 ``[batch]``.

    Args:
        times: in how many batches each item is.
        order: which of the items that wait come first: ``"fifo"``, the oldest ones; ``"lifo"``, the newest ones, and
            those that were drawn before only when no new ones wait; ``"random"``, any of them, each as likely as the
            others.

    Raises:
        TypeError, ValueError: an argument is not of the kind or in the range that is expected.
    """

    trusted: bool = True

    def __init__(self, times: int = 1, order: str = "fifo") -> None:
        self._times = count(times, "times", 1, most=_MOST_TIMES, example=1)
        if not isinstance(order, str) or order not in ORDERS:
            raise ValueError(f"order: expected one of {list(ORDERS)}, found {shown(order)}")
        self._order = order
        self._lost = 0
        self._allocate(0)

    def _allocate(self, capacity: int) -> None:
        self._keys: Int64Array = np.zeros(capacity, np.int64)  # by row: the number of its item, and 1; 0 for none
        self._left: Int32Array = np.zeros(capacity, np.int32)  # by row: in how many more batches it will be drawn
        self._due: Int32Array = np.zeros(capacity, np.int32)  # by row: how many more batches are to be handed over
        self._forget_all()

    def _forget_all(self) -> None:
        """No item waits."""
        self._waiting = 0  # the number of items that may be drawn, each of which is in one of these:
        self._returned: list[tuple[Int64Array, Int64Array]] = []  # of dropped tickets: rows and keys
        self._fresh = Line()
        self._again = self._fresh if self._order == "fifo" else Line()
        self._any = RowSet(len(self._keys) if self._order == "random" else 0)

    # -- what is there ------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Number of items that may be drawn, each counted once."""
        return self._waiting

    @property
    def unread(self) -> int:
        """The same, for limiters."""
        return self._waiting

    @property
    def lost(self) -> int:
        """Number of items so far that were overwritten, or not kept at all, before they were drawn ``times`` times."""
        return self._lost

    # -- what happens to rows -----------------------------------------------------------------------------------------

    def wrote(self, event: WriteEvent) -> None:
        """New items wait."""
        if not len(self._keys):
            self._allocate(event.table.capacity)
        rows = event.rows.numpy()
        offered = event.table.write_count - event.first
        if lost := self._forget(rows) + offered - len(rows):
            self._lose(lost)
        self._keys[rows] = event.numbers.numpy() + 1
        self._left[rows] = self._due[rows] = self._times
        self._wait(rows, self._fresh)

    def _lose(self, count: int) -> None:
        is_first, self._lost = not self._lost, self._lost + count
        if is_first:
            warn_of_loss(type(self).__name__, f"{count} item(s) left")

    def _wait(self, rows: Int64Array, line: Line) -> None:
        """Items may be drawn that could not before."""
        self._waiting += len(rows)
        if self._order == "random":
            self._any.add(rows)
        else:
            line.push(rows, self._keys)

    def removed(self, indices: torch.Tensor, rows: Rows) -> None:
        """Items have left."""
        self._forget(indices.numpy())

    def _forget(self, rows: Int64Array) -> int:
        """Rows have other items now, or none: how many waited there."""
        waited = rows[(self._keys.take(rows) > 0) & (self._left.take(rows) > 0)]
        self._keys[rows] = 0
        self._waiting -= len(waited)
        if self._order == "random" and len(waited):
            self._any.discard(waited)
        return len(waited)

    def clear(self) -> None:
        """No item is there."""
        self._keys = np.zeros(len(self._keys), np.int64)  # takes no time, where filling would
        self._forget_all()

    # -- drawing ------------------------------------------------------------------------------------------------------

    def check(self, capacity: int, batch_size: int) -> None:
        """Refuse a batch size that is larger than the number of rows: no item is twice in a batch."""
        if batch_size > capacity:
            raise ValueError(f"batch_size: expected at most the capacity {capacity}, found {batch_size}")

    def may_draw(self, rows: Rows, batch_size: int) -> Answer:
        """Not before as many items wait."""
        if self._waiting >= batch_size:
            return True
        return NotYet(f"{self._waiting} of {batch_size} items wait to be drawn")

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        """The items whose turn it is.

        Raises:
            ValueError: fewer items wait.
        """
        if batch_size > self._waiting:
            raise ValueError(f"batch size: expected at most {self._waiting}, the items that wait, found {batch_size}")
        if self._order == "random":
            found = self._any.take(distinct(self._waiting, batch_size, generator))
        else:
            found = self._next(batch_size)
        self._waiting -= batch_size
        left = self._left.take(found) - 1
        self._left[found] = left
        if self._order == "random":
            self._any.discard(found[left == 0])
            self._waiting += int(np.count_nonzero(left))
        elif self._times > 1:
            self._wait(found[left > 0], self._again)
        return Draw(torch.from_numpy(found), {"number": torch.from_numpy(self._keys.take(found) - 1)})

    def _next(self, wanted: int) -> Int64Array:
        """Take the rows that are first in line."""
        parts = [self._take_returned(wanted)] if self._returned else []
        wanted -= sum(map(len, parts))
        if wanted and self._order == "lifo":
            parts.append(self._fresh.take_last(wanted, self._keys))
            wanted -= len(parts[-1])
        if wanted:
            parts.append(self._again.take_first(wanted, self._keys))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _take_returned(self, wanted: int) -> Int64Array:
        rows, keys = self._sorted_returned()
        self._returned = [(rows[wanted:], keys[wanted:])] if len(rows) > wanted else []
        return rows[:wanted]

    def _sorted_returned(self) -> tuple[Int64Array, Int64Array]:
        """Rows and keys of the items of dropped tickets that may be drawn again, in their order."""
        none = np.empty(0, np.int64)
        rows = np.concatenate([none, *(part for part, _ in self._returned)])
        keys = np.concatenate([none, *(part for _, part in self._returned)])
        is_there = self._keys.take(rows) == keys
        rows, keys = rows[is_there], keys[is_there]
        order = keys.argsort() if self._order == "fifo" else keys.argsort()[::-1]
        return rows[order], keys[order]

    def handed_over(self, draw: Draw) -> torch.Tensor | None:
        """Items of which this was the last batch leave."""
        rows = self._under_way(draw)
        due = self._due.take(rows) - 1
        self._due[rows] = due
        leaving = rows[due == 0]
        return torch.from_numpy(leaving) if len(leaving) else None

    def dropped(self, draw: Draw) -> None:
        """Its items are drawn again."""
        rows = self._under_way(draw)
        left = self._left.take(rows) + 1
        self._left[rows] = left
        back = rows[left == 1]  # the others wait as it is
        if self._order == "random":
            self._wait(back, self._fresh)
        elif len(back):
            self._waiting += len(back)
            self._returned.append((back, self._keys.take(back)))

    def _under_way(self, draw: Draw) -> Int64Array:
        """The rows of a draw that still have its items, of which a batch is under way."""
        rows: Int64Array = draw.indices.numpy()
        numbers = draw.info.get("number")
        if not isinstance(numbers, torch.Tensor) or numbers.shape != rows.shape:
            return rows[:0]  # a draw of another sampler, out of a checkpoint
        is_there = (self._keys.take(rows) == numbers.numpy() + 1) & (self._due.take(rows) > self._left.take(rows))
        found: Int64Array = rows[is_there]
        return found

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Of every item its row, number, and how often it is still drawn and handed over; who stands where in line."""
        rows = np.flatnonzero(self._keys)
        line = self._any.rows if self._order == "random" else self._fresh.rows(self._keys)
        again = np.empty(0, np.int64) if self._again is self._fresh else self._again.rows(self._keys)
        columns = {
            "rows": rows,
            "numbers": self._keys[rows] - 1,
            "left": self._left[rows].astype(np.int64),
            "due": self._due[rows].astype(np.int64),
            "line": line,
            "again": again,
            "returned": self._sorted_returned()[0],
        }
        return {
            "times": self._times,
            "order": self._order,
            "lost": self._lost,
            "capacity": len(self._keys),
            **{name: torch.from_numpy(column) for name, column in columns.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the items that were saved, each where it stood in line."""
        name = type(self).__name__
        kinds: dict[str, type] = dict(times=int, order=str, lost=int, capacity=int)
        names = ("rows", "numbers", "left", "due", "line", "again", "returned")
        times, order, lost, capacity, *found = fields(state, name, **kinds, **dict.fromkeys(names, torch.Tensor))
        same(times, self._times, f"{name}: times")
        same(order, self._order, f"{name}: order")
        rows, numbers, left, due, *lines = (
            int64s(tensor, f"{name}: expected {each}").copy() for each, tensor in zip(names, found, strict=True)
        )
        if not (len(numbers) == len(left) == len(due) == len(rows)) or capacity >= 2**48:
            raise CheckpointCorruptError(f"{name}: expected as many numbers as rows, found {len(numbers)}, {len(rows)}")
        in_line = np.concatenate(lines)
        is_sound = are_distinct(rows, capacity) and are_distinct(numbers, 2**62) and are_distinct(in_line, capacity)
        if not is_sound or not ((left >= 0) & (left <= due) & (due > 0) & (due <= times)).all():
            raise CheckpointCorruptError(f"{name}: expected items, each due up to {times} times; found others")
        others = {"fifo": lines[1:2], "lifo": [], "random": lines[1:]}[order]
        if not np.array_equal(np.sort(in_line), np.sort(rows[left > 0])) or any(map(len, others)):
            raise CheckpointCorruptError(f"{name}: expected the items that wait in line, found others")
        self._lost = lost
        self._allocate(capacity)
        self._keys[rows], self._left[rows], self._due[rows] = numbers + 1, left, due
        self._wait(lines[0], self._fresh)
        self._wait(lines[1], self._again)
        self._waiting += len(lines[2])
        if len(lines[2]):
            self._returned.append((lines[2], self._keys.take(lines[2])))

    def verify(self, rows: Rows) -> None:
        """Refuse other items than those of the table."""
        verify_items(type(self).__name__, self._keys, self._keys > 0, rows)
