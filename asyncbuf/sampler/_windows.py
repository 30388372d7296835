"""Where slices may begin: kept up to date as rows come and leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from asyncbuf.sampler._episodes import END, FIRST, MARK, follow
from asyncbuf.sampler._row_set import grown, row_type

if TYPE_CHECKING:
    from asyncbuf.rows import BoolArray, Int64Array
    from asyncbuf.sampler._episodes import Cut, Episodes, Joined, Pieces
    from asyncbuf.sampler._row_set import RowArray, RowSet

_UNKNOWN = -1


class Pending:
    """The newest rows of open trajectories, up to a number of them: where they begin, and how many they are.

    So it is known which row is so many items before the newest, without going back to it. What is kept is looked at
    before it is used: if the row has left, the newest rows are followed back once more.

    Args:
        episodes: the links.
        most: how many rows, at least 1.
    """

    def __init__(self, episodes: Episodes, most: int) -> None:
        self._episodes = episodes
        self._most = most
        self._begins: Int64Array = np.zeros(0, np.int64)  # by slot
        self._counts: Int64Array = np.zeros(0, np.int64)
        self._numbers: Int64Array = np.zeros(0, np.int64)  # the entry of Episodes.numbers, which changes with the item

    def forget(self) -> None:
        """A chain was split: follow all of them back."""
        self._counts.fill(_UNKNOWN)

    def of_one(self, slot: int, tail: int) -> tuple[int, int]:
        """Where the pending rows of a trajectory begin, and how many they are.

        Args:
            slot: where it is kept.
            tail: its newest row.
        """
        if slot < len(self._counts):
            begin, count = self._begins.item(slot), self._counts.item(slot)
            if count >= 0 and self._episodes.numbers.item(begin) == self._numbers.item(slot):
                return begin, count
        begins, counts = self._followed(np.array([tail]))
        return begins.item(), counts.item()

    def of(self, slots: Int64Array, tails: Int64Array) -> tuple[Int64Array, Int64Array]:
        """As ``of_one``, for several: int64 ``[n]`` each."""
        self._reserve(slots)
        begins, counts = self._begins[slots], self._counts[slots]
        is_stale = (counts < 0) | (self._episodes.numbers.take(begins) != self._numbers[slots])
        if is_stale.any():
            begins[is_stale], counts[is_stale] = self._followed(tails[is_stale])
        return begins, counts

    def _followed(self, tails: Int64Array) -> tuple[Int64Array, Int64Array]:
        back = follow(self._episodes.prev, tails, self._most)
        return back[:, -1], 1 + (back[:, 1:] != back[:, :-1]).sum(axis=1)

    def put_one(self, slot: int, begin: int, count: int) -> None:
        """Keep what is pending of a trajectory."""
        if slot >= len(self._counts):
            self._reserve(np.array([slot]))
        self._begins[slot] = begin
        self._counts[slot] = count
        self._numbers[slot] = self._episodes.numbers.item(begin)

    def go_on(self, pieces: Pieces) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Take over the items of a write, and keep what is pending then.

        Returns:
            Of each piece where the rows began that were pending before (its own first row, if none were) and how many
            they were: int64 ``[pieces]`` each. And the rows of these that are not pending any more: int64.
        """
        most, firsts, counts = self._most, pieces.firsts, pieces.counts
        begins, had = pieces.rows[firsts], np.zeros(len(firsts), np.int64)
        goes_on = np.flatnonzero(pieces.tails >= 0)
        begins[goes_on], had[goes_on] = self.of(pieces.slots, pieces.tails[goes_on])
        passed = np.clip(had + counts - most, 0, had)  # so many of those are not pending any more
        ways = follow(self._episodes.next, begins[goes_on], 1 + int(passed.max(initial=0)))
        # Where a piece has as many items as can be pending, they begin in it; else at or behind where they began.
        now = begins.copy()
        now[goes_on] = ways[np.arange(len(goes_on)), passed[goes_on]]
        pending = np.minimum(had + counts, most)
        is_within = pending <= counts
        now[is_within] = pieces.rows[(firsts + counts - pending)[is_within]]
        self._put(pieces.open_slots, now[pieces.open_pieces], pending[pieces.open_pieces])
        return begins, had, ways[np.arange(ways.shape[1]) < passed[goes_on, None]]

    def _put(self, slots: Int64Array, begins: Int64Array, counts: Int64Array) -> None:
        self._reserve(slots)
        self._begins[slots], self._counts[slots] = begins, counts
        self._numbers[slots] = self._episodes.numbers.take(begins)

    def _reserve(self, slots: Int64Array) -> None:
        missing = int(slots.max(initial=-1)) + 1 - len(self._counts)
        if missing > 0:
            missing += len(self._counts)
            self._begins = np.append(self._begins, np.zeros(missing, np.int64))
            self._counts = np.append(self._counts, np.full(missing, _UNKNOWN))
            self._numbers = np.append(self._numbers, np.zeros(missing, np.int64))


class Windows:
    """The rows at which slices begin.

    With ``strict``, those from which so many items of one trajectory are stored. Without, also the first row of each
    chain, so that a shorter one has a slice, too. With ``disjoint``, only rows that ``Episodes`` has marked; without
    ``strict`` a slice then ends before the next one begins, and each marked row begins one.

    Args:
        episodes: the links.
        starts: the rows, which are kept here.
        length: number of items of a slice.
        strict: whether each slice has so many.
        disjoint: whether only marked rows begin slices.
    """

    def __init__(self, episodes: Episodes, starts: RowSet, length: int, *, strict: bool, disjoint: bool) -> None:
        self._episodes = episodes
        self._starts = starts
        self._before = length - 1  # so many items before the newest one, a slice begins that it ends
        self._strict = strict
        self._disjoint = disjoint
        self._counts_items = strict or not disjoint  # whether slices begin because they are long enough
        self._pending = Pending(episodes, max(1, self._before))

    def clear(self) -> None:
        """Forget everything."""
        self._starts.clear()
        self._pending.forget()

    # -- rows that leave ----------------------------------------------------------------------------------------------

    def cut_head(self, row: int, head: int) -> None:
        """The first row of a chain has left, and another is the first now, -1 for none."""
        starts = self._starts
        if starts.holds_one(row):
            starts.discard_one(row)
        if not self._strict and head >= 0 and not starts.holds_one(head):
            starts.add_one(head)

    def cut(self, cut: Cut) -> None:
        """Rows have left."""
        starts, episodes = self._starts, self._episodes
        starts.discard(cut.gone[starts.holds(cut.gone)])
        if len(cut.lasts) and self._counts_items:
            self._pending.forget()
            rows = _back(episodes.prev, cut.lasts, self._before)
            rows = rows[starts.holds(rows)]
            starts.discard(rows if self._strict else rows[~episodes.is_head(rows)])
        if not self._strict:
            starts.add(cut.heads[~starts.holds(cut.heads)])

    # -- rows that come -----------------------------------------------------------------------------------------------

    def joined(self, item: Joined) -> None:
        """An item was written."""
        row = item.row
        if not self._counts_items:
            if item.tail < 0 or self._episodes.flags.item(row) & MARK:
                self._starts.add_one(row)
            return
        if item.tail < 0 and not self._strict:
            self._starts.add_one(row)
        if not self._before:
            self._begin_at(row)
            return
        begin, count = (row, 0) if item.tail < 0 else self._pending.of_one(item.slot, item.tail)
        if count < self._before:
            count += 1
        else:
            self._begin_at(begin)
            begin = self._episodes.next.item(begin)
        if item.open_slot >= 0:
            self._pending.put_one(item.open_slot, begin, count)

    def _begin_at(self, row: int) -> None:
        """So many items from this row on are stored."""
        if (not self._disjoint or self._episodes.flags.item(row) & MARK) and (
            self._strict or not self._starts.holds_one(row)
        ):
            self._starts.add_one(row)

    def joined_many(self, pieces: Pieces) -> None:
        """Items were written."""
        if not len(pieces.rows):
            return
        starts, rows = self._starts, pieces.rows
        if not self._strict:
            starts.add(rows[pieces.firsts[pieces.tails < 0]])
        if not self._counts_items:
            rows = rows[(self._episodes.flags.take(rows) & MARK) > 0]
        elif self._before:
            rows = self._long_enough(pieces)
        if self._disjoint and self._strict:
            rows = rows[(self._episodes.flags.take(rows) & MARK) > 0]
        if not self._strict:
            rows = rows[~starts.holds(rows)]
        starts.add(rows)

    def _long_enough(self, pieces: Pieces) -> Int64Array:
        """The rows from which so many items are stored since this write."""
        _, _, outer = self._pending.go_on(pieces)
        ages = np.arange(len(pieces.rows)) - np.repeat(pieces.firsts, pieces.counts)
        inner = pieces.rows[np.flatnonzero(ages >= self._before) - self._before]
        return np.concatenate([outer, inner])

    # -- checks -------------------------------------------------------------------------------------------------------

    def computed(self) -> BoolArray:
        """By row, whether slices begin there: found out from the links alone, in time with the number of rows."""
        episodes = self._episodes
        rows = np.arange(episodes.capacity)
        there = episodes.numbers > 0
        links = np.where(there, episodes.next, rows)
        marked = (episodes.flags & MARK) > 0
        if self._counts_items:
            _, moved = _reached(links, self._before)
            begins = moved == self._before
            begins &= marked if self._disjoint else True
        else:
            begins = marked
        if not self._strict:
            begins |= episodes.prev == rows
        found: BoolArray = begins & there
        return found


class Whole:
    """The first rows of trajectories that are stored from their first item to that which ends them.

    Args:
        episodes: the links.
        starts: the rows, which are kept here.
        longest: how many items a trajectory may have.
    """

    def __init__(self, episodes: Episodes, starts: RowSet, longest: int) -> None:
        self._episodes = episodes
        self._starts = starts
        self._longest = longest
        self._pending = Pending(episodes, longest)
        self._lengths: RowArray = np.zeros(0, np.int32)  # by row

    def lengths(self, heads: Int64Array) -> Int64Array:
        """How many items the trajectories have that begin in some rows."""
        return self._lengths.take(heads).astype(np.int64)

    def clear(self) -> None:
        """Forget everything."""
        self._starts.clear()
        self._pending.forget()

    def cut_head(self, row: int, head: int) -> None:
        """The first row of a chain has left, and another is the first now, -1 for none."""
        if self._starts.holds_one(row):
            self._starts.discard_one(row)

    def cut(self, cut: Cut) -> None:
        """Rows have left."""
        starts = self._starts
        starts.discard(cut.gone[starts.holds(cut.gone)])
        if len(cut.lasts):
            self._pending.forget()
            rows = _back(self._episodes.prev, cut.lasts, self._longest)
            starts.discard(rows[starts.holds(rows)])

    def joined(self, item: Joined) -> None:
        """An item was written."""
        begin, count = (item.row, 0) if item.tail < 0 else self._pending.of_one(item.slot, item.tail)
        if item.open_slot < 0:
            if count == item.step < self._longest:
                self._add(np.array([begin]), np.array([count + 1]))
            return
        if count < self._longest:
            count += 1
        else:
            begin = self._episodes.next.item(begin)
        self._pending.put_one(item.open_slot, begin, count)

    def joined_many(self, pieces: Pieces) -> None:
        """Items were written."""
        if not len(pieces.rows):
            return
        begins, had, _ = self._pending.go_on(pieces)
        lengths = had + pieces.counts
        is_whole = pieces.ended & (had == pieces.steps) & (lengths <= self._longest)
        self._add(begins[is_whole], lengths[is_whole])

    def _add(self, heads: Int64Array, lengths: Int64Array) -> None:
        if self._episodes.capacity > len(self._lengths):
            self._lengths = grown(self._lengths, self._episodes.capacity)
        self._lengths[heads] = lengths
        self._starts.add(heads)

    def computed(self) -> BoolArray:
        """By row, whether a whole trajectory begins there: found out from the links alone, as are the lengths."""
        episodes = self._episodes
        rows = np.arange(episodes.capacity)
        there = episodes.numbers > 0
        lasts, moved = _reached(np.where(there, episodes.next, rows), self._longest - 1)
        self._lengths = (moved + 1).astype(row_type(episodes.capacity))
        is_whole: BoolArray = there & (episodes.prev == rows) & (episodes.flags & FIRST > 0)
        is_whole &= episodes.flags[lasts] & END > 0
        return is_whole


def _back(prev: RowArray, rows: Int64Array, count: int) -> Int64Array:
    """Rows of different chains, and those before them: up to ``count`` of each chain, each once."""
    found = [np.empty(0, np.int64)]
    for _ in range(count):
        if not len(rows):
            break
        found.append(rows)
        before = prev.take(rows).astype(np.int64)
        rows = before[before != rows]
    return np.concatenate(found)


def _reached(links: Int64Array, count: int) -> tuple[Int64Array, Int64Array]:
    """Where so many links lead from each row, and how many of them lead on to another row. In log2(count) steps."""
    at = np.arange(len(links))
    moved = np.zeros(len(links), np.int64)
    far, steps = links, (links != at).astype(np.int64)  # 1, 2, 4, ... links on, and how many of those lead on
    while count:
        if count & 1:
            moved += steps[at]
            at = far[at]
        count >>= 1
        if count:
            steps = steps + steps[far]
            far = far[far]
    return at, moved
