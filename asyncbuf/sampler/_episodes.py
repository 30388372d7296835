"""Which items of a table follow each other in a trajectory: kept up to date on every write and removal.

Rows are linked in the order of their items, wherever a writer puts them. A row of which the predecessor is not stored
(any more) is the first of a *chain*; a trajectory that lost rows in its middle is several chains. The cost of a write
does not depend on how much is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch

from asyncbuf._plain.integers import are_distinct
from asyncbuf._plain.state import fields
from asyncbuf.errors import CheckpointCorruptError
from asyncbuf.sampler._row_set import grown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncbuf.rows import BoolArray, Int64Array
    from asyncbuf.sampler._row_set import RowArray

# What is noted of a row.
FIRST = np.uint8(1)  # its item begins a trajectory
END = np.uint8(2)  # its item ends one
MARK = np.uint8(4)  # the number of its step is a multiple of the block length
_OPEN = np.uint8(8)  # the next item of its trajectory will follow it
_NOT_OPEN = np.uint8(255 - 8)

# How many trajectories are remembered that go on, but of which the newest item is not stored.
_MOST_LOST = 1024


class Cut(NamedTuple):
    """Rows that have left.

    Attributes:
        gone: those rows, int64.
        lasts: rows that are the last of their chains now, because what followed has left, int64.
        heads: rows that are the first of their chains now, because what came before has left, int64.
    """

    gone: Int64Array
    lasts: Int64Array
    heads: Int64Array


class Pieces(NamedTuple):
    """Items of one write that were kept, trajectory by trajectory. A piece is a run of items that follow each other.

    Attributes:
        rows: their rows, int64 ``[items]``.
        firsts: where each piece begins among them, int64 ``[pieces]``.
        counts: how many items each has, int64 ``[pieces]``.
        tails: the row that the first item of the piece follows; -1 for a piece that begins a chain: int64 ``[pieces]``.
        slots: where those trajectories were kept as open ones that pieces go on with: int64, one for each tail.
        steps: number of the step of the first item of each piece in its trajectory, int64 ``[pieces]``.
        ended: whether the last item of a piece ends its trajectory, bool ``[pieces]``.
        open_slots: the slots of the trajectories that are open with an item of this write as their newest, int64.
        open_pieces: the pieces that those items are the last of, int64.
    """

    rows: Int64Array
    firsts: Int64Array
    counts: Int64Array
    tails: Int64Array
    slots: Int64Array
    steps: Int64Array
    ended: BoolArray
    open_slots: Int64Array
    open_pieces: Int64Array


class Joined(NamedTuple):
    """As ``Pieces``, for one item: its row, what it follows, slots before and after (-1 for none), and its step."""

    row: int
    tail: int
    slot: int
    open_slot: int
    step: int


class Episodes:
    """Links between rows.

    A trajectory is open from its first item until an item that ends it. Of open trajectories the key, the newest row
    and the number of items are kept. One whose newest row leaves the table is *lost*: the next item begins a chain,
    but not a trajectory. Only some lost ones are remembered; an item of one that was forgotten counts as a first one.

    Args:
        block: steps that are a multiple of this number are marked.

    Attributes:
        next: by row, the row of the next item of its trajectory; the row itself if that is not stored.
        prev: by row, the row of the item before; the row itself if that is not stored.
        numbers: by row, the number of its item, and 1; 0 for a row without an item.
        flags: by row, ``FIRST``, ``END``, ``MARK``.
    """

    def __init__(self, block: int) -> None:
        self._block = block
        self.next: RowArray = np.zeros(0, np.int32)
        self.prev: RowArray = np.zeros(0, np.int32)
        self.numbers: Int64Array = np.zeros(0, np.int64)
        self.flags: np.ndarray[Any, np.dtype[np.uint8]] = np.zeros(0, np.uint8)
        self._slot_of: RowArray = np.zeros(0, np.int32)  # by row, if it is the newest one of an open trajectory
        self._forget()

    def _forget(self) -> None:
        self._open: dict[int, int] = {}  # slots by key
        self._lost: dict[int, int] = {}  # numbers of items by key
        self._keys: list[int] = []  # by slot
        self._free: list[int] = []  # slots
        self._tails: Int64Array = np.zeros(16, np.int64)  # newest rows by slot
        self._steps: Int64Array = np.zeros(16, np.int64)  # numbers of items by slot

    @property
    def capacity(self) -> int:
        """For how many rows there is room."""
        return len(self.next)

    @property
    def stop(self) -> int:
        """The row behind the last one with an item."""
        used = np.flatnonzero(self.numbers)
        return int(used[-1]) + 1 if len(used) else 0

    def reserve(self, capacity: int) -> None:
        """Have room for so many rows."""
        if capacity > len(self.next):
            self.next, self.prev = grown(self.next, capacity), grown(self.prev, capacity)
            self.numbers, self.flags = grown(self.numbers, capacity), grown(self.flags, capacity)
            self._slot_of = grown(self._slot_of, capacity)

    def clear(self) -> None:
        """Forget everything."""
        self.numbers = np.zeros(len(self.numbers), np.int64)  # takes no time, where filling would
        self._forget()

    def is_head(self, rows: RowArray) -> BoolArray:
        """Which rows are the first of their chains."""
        found: BoolArray = self.prev.take(rows) == rows
        return found

    # -- open trajectories --------------------------------------------------------------------------------------------

    def _open_slot(self, key: int) -> int:
        if self._free:
            slot = self._free.pop()
            self._keys[slot] = key
        else:
            slot = len(self._keys)
            self._keys.append(key)
            if slot >= len(self._tails):
                self._tails, self._steps = np.resize(self._tails, 2 * slot), np.resize(self._steps, 2 * slot)
        self._open[key] = slot
        return slot

    def _close(self, key: int) -> None:
        slot = self._open.pop(key, -1)
        if slot >= 0:
            self._free.append(slot)

    def _lose(self, key: int, step: int) -> None:
        """The newest item of an open trajectory is not stored."""
        self._close(key)
        self._lost[key] = step
        if len(self._lost) > _MOST_LOST:
            del self._lost[next(iter(self._lost))]

    # -- rows that leave ----------------------------------------------------------------------------------------------

    def cut(self, rows: Int64Array) -> Cut:
        """Different rows with items leave."""
        self.numbers[rows] = 0
        for row in rows[(self.flags.take(rows) & _OPEN) > 0].tolist():
            slot = self._slot_of.item(row)
            self._lose(self._keys[slot], self._steps.item(slot))
        before, after = self.prev.take(rows).astype(np.int64), self.next.take(rows).astype(np.int64)
        lasts, heads = before[self.numbers.take(before) > 0], after[self.numbers.take(after) > 0]
        self.next[lasts] = lasts
        self.prev[heads] = heads
        return Cut(rows, lasts, heads)

    def cut_head(self, row: int) -> int:
        """The first row of a chain leaves: the row that is first now, -1 for none."""
        self.numbers[row] = 0
        if self.flags.item(row) & 8:
            slot = self._slot_of.item(row)
            self._lose(self._keys[slot], self._steps.item(slot))
        after: int = self.next.item(row)
        if after == row:
            return -1
        self.prev[after] = after
        return after

    # -- rows that come -----------------------------------------------------------------------------------------------

    def join(self, row: int, key: int, *, ends: bool, number: int) -> Joined:
        """An item was written to a row that is free.

        Args:
            row: the row.
            key: of its trajectory.
            ends: whether it ends that.
            number: its item number.
        """
        slot = before = self._open.get(key, -1)
        tail, step = -1, 0
        if slot >= 0:
            tail, step = self._tails.item(slot), self._steps.item(slot)
            self.next[tail] = row
            self.flags[tail] &= _NOT_OPEN
        elif self._lost:
            step = self._lost.pop(key, 0)
        self.next[row] = row
        self.prev[row] = row if tail < 0 else tail
        self.numbers[row] = number + 1
        self.flags[row] = (step == 0) + 2 * ends + 4 * (step % self._block == 0) + 8 * (not ends)
        if ends:
            self._close(key)
            return Joined(row, tail, before, -1, step)
        if slot < 0:
            slot = self._open_slot(key)
        self._tails[slot] = row
        self._steps[slot] = step + 1
        self._slot_of[row] = slot
        return Joined(row, tail, before, slot, step)

    def join_many(self, rows: Int64Array, keys: Int64Array | None, ends: BoolArray | None, first: int) -> Pieces:
        """Items were written to rows that are free.

        Args:
            rows: of all items that were handed in, -1 for those that are not kept: int64 ``[items]``, at least one.
            keys: of their trajectories, int64 ``[items]``; None if they are all of one.
            ends: which of them end their trajectories, bool ``[items]``; None if none does.
            first: item number of the first.
        """
        count = len(rows)
        numbers = np.arange(first + 1, first + count + 1)
        ends = np.zeros(count, np.bool_) if ends is None else ends
        groups, names = np.zeros(1, np.int64), [0]  # where the items of each key begin, and the keys
        if keys is not None:
            order = keys.argsort(kind="stable")
            rows, keys, ends, numbers = rows[order], keys[order], ends[order], numbers[order]
            groups = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
            names = keys[groups].tolist()
        lasts = np.append(groups[1:], count) - 1
        slots, tails, done = self._known(names)
        steps = _steps(ends, groups, done)
        before = np.empty(count, np.int64)  # the row that each item follows, -1 for none
        before[1:] = rows[:-1]
        before[groups] = tails
        before[steps == 0] = -1
        is_first = before < 0
        is_first[groups] = True
        slots_now = self._settle(names, slots, ends[lasts], rows[lasts], steps[lasts] + 1)
        is_open = slots_now >= 0
        newest, goes_on = lasts[is_open], slots[(tails >= 0) & (rows[groups] >= 0)]
        if rows.min() < 0:
            kept = rows >= 0
            newest = np.cumsum(kept)[newest] - 1
            rows, steps, ends, numbers = rows[kept], steps[kept], ends[kept], numbers[kept]
            before, is_first = before[kept], is_first[kept]
        self._put(rows, before, numbers, steps, ends)
        self.flags[rows[newest]] |= _OPEN
        self._slot_of[rows[newest]] = slots_now[is_open]
        firsts = np.flatnonzero(is_first)
        counts = np.append(firsts[1:], len(rows)) - firsts if len(firsts) else firsts
        return Pieces(
            rows,
            firsts,
            counts,
            before[firsts],
            goes_on,
            steps[firsts],
            ends[firsts + counts - 1],
            slots_now[is_open],
            firsts.searchsorted(newest, side="right") - 1,
        )

    def _known(self, names: Sequence[int]) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Slots, newest rows and numbers of items of trajectories: -1, -1 and 0 for those that are not open."""
        slots = np.array([self._open.get(key, -1) for key in names])
        is_open = slots >= 0
        tails = np.where(is_open, self._tails.take(slots, mode="clip"), -1)
        done = np.where(is_open, self._steps.take(slots, mode="clip"), 0)
        if self._lost:
            done += np.array([self._lost.pop(key, 0) for key in names])
        self.flags[tails[is_open]] &= _NOT_OPEN
        return slots, tails, done

    def _settle(
        self, names: Sequence[int], slots: Int64Array, ended: BoolArray, newest: Int64Array, steps: Int64Array
    ) -> Int64Array:
        """Note which trajectories are open after a write: their slots, -1 for those that are closed or lost."""
        is_lost = (newest < 0) & ~ended
        if ended.any() or is_lost.any():
            for i in np.flatnonzero(ended).tolist():
                self._close(names[i])
            for i in np.flatnonzero(is_lost).tolist():
                self._lose(names[i], steps.item(i))
        stay = ~(ended | is_lost)
        slots = np.where(stay, slots, -1)
        for i in np.flatnonzero((slots < 0) & stay).tolist():
            slots[i] = self._open_slot(names[i])
        self._tails[slots[stay]] = newest[stay]
        self._steps[slots[stay]] = steps[stay]
        return slots

    def _put(
        self, rows: Int64Array, before: Int64Array, numbers: Int64Array, steps: Int64Array, ends: BoolArray
    ) -> None:
        """Note of rows what they follow (-1 for nothing), numbers, steps, and ends."""
        has_before = before >= 0
        self.next[rows] = rows
        self.next[before[has_before]] = rows[has_before]
        self.prev[rows] = np.where(has_before, before, rows)
        self.numbers[rows] = numbers
        flags = (steps == 0).view(np.uint8) + (ends.view(np.uint8) << 1)
        flags += (steps % self._block == 0).view(np.uint8) << 2 if self._block > 1 else MARK
        self.flags[rows] = flags

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Numbers, links and flags by row; keys, rows and numbers of items of open trajectories, -1 for lost rows."""
        stop = self.stop
        numbers = self.numbers[:stop] - 1
        is_there = numbers >= 0
        slots = np.fromiter(self._open.values(), np.int64, len(self._open))
        lost = np.fromiter(self._lost.values(), np.int64, len(self._lost))
        state = {
            "numbers": numbers,
            "next": np.where(is_there, self.next[:stop].astype(np.int64), -1),
            "flags": np.where(is_there, self.flags[:stop], np.uint8(0)),
            "keys": np.array([*self._open, *self._lost], np.int64),
            "tails": np.concatenate([self._tails[slots], np.full(len(lost), -1)]),
            "steps": np.concatenate([self._steps[slots], lost]),
        }
        return {name: torch.from_numpy(array) for name, array in state.items()}

    @classmethod
    def of(cls, block: int, state: Any, name: str) -> Self:
        """What ``state_dict`` gave out.

        Raises:
            CheckpointCorruptError: it contradicts itself.
        """
        kinds: dict[str, type] = dict.fromkeys(("numbers", "next", "flags", "keys", "tails", "steps"), torch.Tensor)
        found = dict(zip(kinds, map(_plain, fields(state, name, **kinds)), strict=True))
        numbers, links, flags, keys, tails, steps = found.values()
        is_int64 = all(array is not None and array.dtype == np.int64 for key, array in found.items() if key != "flags")
        if not is_int64 or flags is None or flags.dtype != np.uint8 or not len(numbers) == len(links) == len(flags):
            raise CheckpointCorruptError(f"{name}: expected numbers, links and flags of the same rows, found others")
        rows = np.flatnonzero(numbers >= 0)
        if numbers.min(initial=0) < -1 or links[rows].min(initial=0) < 0 or links.max(initial=-1) >= len(links):
            raise CheckpointCorruptError(f"{name}: expected links between stored rows, found others")
        linked = rows[links[rows] != rows]
        if (numbers[links[linked]] <= numbers[linked]).any() or not are_distinct(links[linked], len(links)):
            raise CheckpointCorruptError(f"{name}: expected each row to be followed by a later one, found others")
        newest = np.flatnonzero(flags & _OPEN)
        stored = tails[tails >= 0]
        are_keys = len(keys) == len(tails) == len(steps) and len(set(keys.tolist())) == len(keys)
        if not are_keys or not np.array_equal(np.sort(stored), newest) or steps.min(initial=1) < 1:
            raise CheckpointCorruptError(f"{name}: expected the newest rows of open trajectories, found others")
        if (links[newest] != newest).any() or (tails[len(stored) :] >= 0).any():
            raise CheckpointCorruptError(f"{name}: expected open trajectories before lost ones, found others")
        episodes = cls(block)
        episodes.reserve(len(numbers))
        episodes.numbers[:] = numbers + 1
        episodes.next[rows], episodes.prev[rows] = links[rows], rows
        episodes.prev[links[linked]] = linked
        episodes.flags[:] = flags
        for key, tail, step in zip(keys.tolist(), tails.tolist(), steps.tolist(), strict=True):
            if tail < 0:
                episodes._lost[key] = step
                continue
            slot = episodes._open_slot(key)
            episodes._tails[slot], episodes._steps[slot], episodes._slot_of[tail] = tail, step, slot
        return episodes


def _plain(tensor: torch.Tensor) -> Any:
    """A flat tensor of a checkpoint as an array; None for another one."""
    is_flat = tensor.ndim == 1 and tensor.layout is torch.strided and tensor.device.type == "cpu"
    return tensor.detach().numpy() if is_flat and tensor.dtype in (torch.int64, torch.uint8) else None


def _steps(ends: BoolArray, groups: Int64Array, done: Int64Array) -> Int64Array:
    """Number of the step of each item in its trajectory.

    Args:
        ends: which items end their trajectories, trajectory by trajectory: bool ``[items]``.
        groups: where the items of each key begin, int64 ``[keys]``.
        done: how many items the trajectory had before that the first of these belongs to, int64 ``[keys]``.
    """
    begins = np.concatenate(([True], ends[:-1]))
    begins[groups] = True
    where = np.flatnonzero(begins)
    offsets = where.copy()  # the step is the position less this
    offsets[where.searchsorted(groups)] -= done
    steps: Int64Array = np.arange(len(ends)) - np.repeat(offsets, np.diff(np.append(where, len(ends))))
    return steps


def follow(links: RowArray, rows: Int64Array, count: int) -> Int64Array:
    """Rows and those that they are linked to, one after the other; the last is repeated.

    Rows of one writer lie at equal distances, as long as as many environments take turns. So all are guessed from the
    first link, and looked at together; only where that was wrong, links are followed one by one.

    Args:
        links: by row, the next one, or the row itself.
        rows: the first rows, int64 ``[n]``.
        count: how many rows each should have, at least 1.

    Returns:
        int64 ``[n, count]``.
    """
    found = rows[:, None] + (links.take(rows) - rows)[:, None] * np.arange(count)
    found %= max(1, len(links))
    is_right = links.take(found[:, :-1]) == found[:, 1:]
    if is_right.all():
        return found
    wrong = np.flatnonzero(~is_right.all(axis=1))
    known = is_right[wrong].argmin(axis=1)  # up to here the guess is right
    reached = found[wrong, known]
    # A chain that ends here needs no more than its last row; of the others, some turn to another distance.
    found[wrong] = np.where(np.arange(count) <= known[:, None], found[wrong], reached[:, None])
    goes_on = links.take(reached) != reached
    wrong, known, reached = wrong[goes_on], known[goes_on], reached[goes_on]
    if len(wrong):
        _walk(links, found, wrong, known, reached)
    return found


def _walk(links: RowArray, found: Int64Array, which: Int64Array, known: Int64Array, rows: Int64Array) -> None:
    """Follow links one by one, for those lines of ``found`` that are known up to some column."""
    columns = known + 1
    rows = links.take(rows).astype(np.int64)
    while len(which):
        found[which, columns] = rows
        columns = columns + 1
        rows = links.take(rows).astype(np.int64)
        within = columns < found.shape[1]
        which, columns, rows = which[within], columns[within], rows[within]
