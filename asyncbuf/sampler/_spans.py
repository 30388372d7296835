"""Which rows follow each other, for what is joined to a draw; and where in its trajectory each row is."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncbuf.sampler._row_set import grown, row_type

if TYPE_CHECKING:
    from asyncbuf.rows import BoolArray, Int64Array
    from asyncbuf.sampler._episodes import Cut, Episodes, Joined, Pieces
    from asyncbuf.sampler._row_set import RowArray

# Fewer steps are quicker one by one than with a guess.
_FEW_STEPS = 12


class Links(NamedTuple):
    """What is known of the rows of a table.

    Attributes:
        episodes: which rows follow each other.
        spans: where in its chain each row is; None if no join asks for it.
    """

    episodes: Episodes
    spans: Spans | None = None


class NoStarts:
    """The rule for who needs the links alone: no row is a start."""

    def __init__(self, episodes: Episodes) -> None:
        self._episodes = episodes

    def clear(self) -> None:
        """Nothing to do."""

    def cut_head(self, row: int, head: int) -> None:
        """Nothing to do."""

    def cut(self, cut: Cut) -> None:
        """Nothing to do."""

    def joined(self, item: Joined) -> None:
        """Nothing to do."""

    def joined_many(self, pieces: Pieces) -> None:
        """Nothing to do."""

    def computed(self) -> BoolArray:
        """No row."""
        return np.zeros(self._episodes.capacity, np.bool_)


class Spans:
    """Where in its chain each row is, and where the chain begins and ends: a rule without starts.

    A *chain* is a run of rows that follow each other in one trajectory. Its rows are numbered one after the other. When
    rows leave in its middle, those in front of them become a chain of their own: that takes time with their number.

    Args:
        episodes: the links.
    """

    def __init__(self, episodes: Episodes) -> None:
        self._episodes = episodes
        self._forget()

    def _forget(self) -> None:
        kind = row_type(self._episodes.capacity)
        self._chain: RowArray = np.zeros(self._episodes.capacity, kind)  # by row
        self._place: Int64Array = np.zeros(self._episodes.capacity, np.int64)  # by row
        self._heads: Int64Array = np.zeros(0, np.int64)  # first places by chain
        self._tails: Int64Array = np.zeros(0, np.int64)  # last places by chain
        self._made = 0
        self._free: list[int] = []

    def _reserve(self) -> None:
        if self._episodes.capacity > len(self._chain):
            self._chain = grown(self._chain, self._episodes.capacity)
            self._place = grown(self._place, self._episodes.capacity)

    def _new_chains(self, count: int) -> Int64Array:
        found = [self._free.pop() for _ in range(min(count, len(self._free)))]
        missing = count - len(found)
        if missing:
            found += range(self._made, self._made + missing)
            self._made += missing
            if self._made > len(self._heads):
                more = max(self._made, 2 * len(self._heads), 64)
                self._heads, self._tails = grown(self._heads, more), grown(self._tails, more)
        return np.array(found, np.int64)

    # -- what happens to rows -----------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget everything."""
        self._forget()

    def cut_head(self, row: int, head: int) -> None:
        """The first row of a chain has left, and another is the first now, -1 for none."""
        chain = self._chain.item(row)
        if head < 0:
            self._free.append(chain)
        else:
            self._heads[chain] += 1

    def cut(self, cut: Cut) -> None:
        """Rows have left. What is in front of them becomes a chain of its own; what is behind goes on as the chain."""
        chains, places = self._chain.take(cut.gone).astype(np.int64), self._place.take(cut.gone)
        lost_tails = set(chains[places == self._tails.take(chains)].tolist())
        heads = cut.heads[np.argsort(self._place.take(cut.heads))]
        behind = dict(zip(self._chain.take(heads).tolist(), self._place.take(heads).tolist(), strict=True))
        for chain in set(chains.tolist()):
            if chain in lost_tails:
                self._free.append(chain)
            else:
                self._heads[chain] = behind[chain]
        new = self._new_chains(len(cut.lasts))
        self._tails[new] = self._place.take(cut.lasts)
        at = cut.lasts
        while len(at):
            self._chain[at] = new
            self._heads[new] = self._place.take(at)
            before = self._episodes.prev.take(at).astype(np.int64)
            goes_on = before != at
            at, new = before[goes_on], new[goes_on]

    def joined(self, item: Joined) -> None:
        """An item was written."""
        self._reserve()
        row = item.row
        if item.tail < 0:
            chain = self._new_chains(1).item()
            place = self._heads[chain] = 0
        else:
            chain = self._chain.item(item.tail)
            place = self._place.item(item.tail) + 1
        self._chain[row] = chain
        self._place[row] = self._tails[chain] = place

    def joined_many(self, pieces: Pieces) -> None:
        """Items were written."""
        self._reserve()
        if not len(pieces.rows):
            return
        goes_on = pieces.tails >= 0
        chains, places = np.empty(len(goes_on), np.int64), np.zeros(len(goes_on), np.int64)
        chains[goes_on] = self._chain.take(pieces.tails[goes_on])
        places[goes_on] = self._place.take(pieces.tails[goes_on]) + 1
        new = self._new_chains(int(np.count_nonzero(~goes_on)))
        chains[~goes_on] = new
        self._heads[new] = 0
        ages = np.arange(len(pieces.rows)) - np.repeat(pieces.firsts, pieces.counts)
        self._chain[pieces.rows] = np.repeat(chains, pieces.counts)
        self._place[pieces.rows] = np.repeat(places, pieces.counts) + ages
        self._tails[chains] = places + pieces.counts - 1

    def computed(self) -> BoolArray:
        """No row is a start. Numbers all rows anew, in time with their number: only for what was just loaded."""
        episodes = self._episodes
        self._forget()
        rows = np.flatnonzero(episodes.numbers)
        firsts = rows[episodes.prev.take(rows) == rows]
        new = self._new_chains(len(firsts))
        self._heads[new] = 0
        at, chains, place = firsts, new, 0
        while len(at):
            self._chain[at], self._place[at] = chains, place
            self._tails[chains] = place
            after = episodes.next.take(at).astype(np.int64)
            goes_on = after != at
            at, chains, place = after[goes_on], chains[goes_on], place + 1
        return np.zeros(episodes.capacity, np.bool_)

    # -- where rows are -----------------------------------------------------------------------------------------------

    def before(self, rows: Int64Array) -> Int64Array:
        """How many rows of its chain are before each row: int64, in the shape of ``rows``."""
        found: Int64Array = self._place.take(rows) - self._heads.take(self._chain.take(rows))
        return found

    def after(self, rows: Int64Array) -> Int64Array:
        """How many rows of its chain follow each row: int64, in the shape of ``rows``."""
        found: Int64Array = self._tails.take(self._chain.take(rows)) - self._place.take(rows)
        return found

    def moved(self, rows: Int64Array, steps: Int64Array) -> Int64Array:
        """The rows that are so many steps on in their chains, or back where that is negative.

        Rows of one writer lie at equal distances as long as as many environments take turns. So each row is guessed
        from the first link, and looked at; only where that was wrong, one link is followed before the next guess.

        Args:
            rows: int64 ``[n]``.
            steps: within the chains, int64 ``[n]``.
        """
        links = self._episodes
        chains, wanted = self._chain.take(rows), self._place.take(rows) + steps
        found, at = rows.copy(), rows
        open_ = np.flatnonzero(steps)
        while len(open_):
            here = at if len(at) == len(open_) else at[open_]
            left = wanted[open_] - self._place.take(here)
            onward = np.where(left > 0, links.next.take(here), links.prev.take(here)).astype(np.int64)
            guess = (here + (onward - here) * np.abs(left)) % len(self._chain)
            is_right = (self._chain.take(guess) == chains[open_]) & (self._place.take(guess) == wanted[open_])
            is_right &= links.numbers.take(guess) > 0
            found[open_[is_right]] = guess[is_right]
            open_, at = open_[~is_right], onward[~is_right]
        return found


def steps_on(links: RowArray, rows: Int64Array, count: int) -> Int64Array:
    """Rows, and those that 1, 2, ... links lead to; the last one of a chain is repeated: int64 ``[count, n]``."""
    found = np.empty((count, len(rows)), np.int64)
    found[0] = rows
    for step in range(1, count):
        found[step] = links.take(found[step - 1])
    return found
