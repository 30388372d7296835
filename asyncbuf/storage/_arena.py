"""Memory for sequences of different lengths: pages that are filled one after the other.

A sequence lies in one page, in one piece, and is never changed there: a row that is written again gets another place.
A page whose sequences are all gone is filled anew. So what is read of a page while writes go on stays as it was for as
long as the page is not filled anew, and it is not while something *pins* the pages.

A ring empties pages in the order in which it filled them. Where rows are overwritten or removed in another order, pages
become sparse. Then the sparsest are emptied: what is left in them is copied to where writes go on. Pages take at most
twice the memory of the sequences in them and some pages more. For that, each token that is written makes at most about
one token move.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from asyncbuf.storage import _layout as layout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncbuf.rows import Int64Array
    from asyncbuf.storage._leaf import Field

    Values = np.ndarray[Any, Any]

PAGE_BYTES = 256 * 1024
# A sequence that does not fit into the rest of a page and is larger than this part of one gets a page of its own.
_LARGE_PART = 4
# So many pages are kept for sequences to come, though nothing is in them.
_SPARE_PAGES = 2
# So many pages there may be beyond twice what is stored.
_SLACK_PAGES = 4
# Sequences that are shorter on average are collected by index: a copy of each would take longer.
_SHORT = 32


class Sequences(Protocol):
    """Sequences that can be copied one after the other."""

    def copy(self, start: int, stop: int, out: Values) -> None:
        """Copy sequences ``start`` to ``stop - 1`` into memory of their size, ``[tokens, *token]``."""
        ...


class PageSequences:
    """Sequences within one array.

    Args:
        values: the array, ``[tokens, *token]``.
        starts: where each begins: int64 ``[sequences]``.
        lengths: of each: int64 ``[sequences]``.
    """

    def __init__(self, values: Values, starts: Int64Array, lengths: Int64Array) -> None:
        self._values = values
        self._starts = starts
        self._lengths = lengths

    def copy(self, start: int, stop: int, out: Values) -> None:
        """Copy sequences one after the other."""
        starts, lengths = self._starts[start:stop], self._lengths[start:stop]
        if len(out) < _SHORT * len(starts):
            skipped = starts - (np.cumsum(lengths) - lengths)
            out[...] = self._values[np.repeat(skipped, lengths) + np.arange(len(out))]
            return
        at = 0
        for first, count in zip(starts.tolist(), lengths.tolist(), strict=True):
            out[at : at + count] = self._values[first : first + count]
            at += count


class Arena:
    """Sequences of some fields that have the same lengths.

    Args:
        capacity: number of rows.
        fields: what a token consists of; the shape of each is that of one token.
        is_pinned: whether somebody may still read what was in pages that are empty by now.
        before_move: called with rows, int64 ``[rows]``, before they get other places.

    Attributes:
        places: where the sequence of each row is: int64 ``[capacity, 3]``, the page, its first token there, and how
            many tokens it has. The first two mean nothing for a sequence without tokens.
        values: by field, the values of each page ``[tokens, *token]``; None where there is no such page any more.
        live: number of tokens that are stored.
        token_nbytes: bytes of a token, all fields together.
    """

    def __init__(
        self,
        capacity: int,
        fields: Sequence[Field],
        is_pinned: Callable[[], bool],
        before_move: Callable[[Int64Array], None],
    ) -> None:
        words: Any = layout.allocate(3 * capacity, np.dtype(np.int64))  # type: ignore[arg-type]
        self.places: Int64Array = words.reshape(capacity, 3)
        self._fields = fields
        self._is_pinned = is_pinned
        self._before_move = before_move
        self.token_nbytes = sum(field.nbytes for field in fields)
        self.page_tokens = max(1, PAGE_BYTES // max(1, self.token_nbytes))
        self._spare: list[list[Values]] = []
        self.clear()

    def clear(self) -> None:
        """Let all pages go. The places of rows mean nothing then."""
        self.values: list[list[Any]] = [[] for _ in self._fields]
        self.live = 0
        # Of each page: tokens that rows have there, tokens that it has room for (0 if there is none), and which rows
        # were written there.
        self._live = np.zeros(16, np.int64)
        self._sizes = np.zeros(16, np.int64)
        self._rows: list[array[int]] = []
        self._free_numbers: list[int] = []
        self._cursor, self._used = -1, 0
        self._total = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return (self._total + len(self._spare) * self.page_tokens) * self.token_nbytes

    # -- writing ------------------------------------------------------------------------------------------------------

    def put_one(self, row: int, length: int, sources: Sequence[Sequences], item: int) -> None:
        """Give a row a sequence: number ``item`` of each source. What it had is gone."""
        self.free_one(row)
        if not length:
            return
        page, start = self._room(length)
        for values, source in zip(self.values, sources, strict=True):
            source.copy(item, item + 1, values[page][start : start + length])
        self.places[row] = (page, start, length)
        self._rows[page].append(row)
        self._live[page] += length
        self.live += length
        self.compact(1)

    def put(self, rows: Int64Array, lengths: Int64Array, sources: Sequence[Sequences], item: int) -> None:
        """Give different rows sequences: those from number ``item`` of each source on."""
        self.free(rows)
        self._append(rows, lengths, sources, item)
        self.compact(1 + 4 * int(lengths.sum()) // self.page_tokens)

    def _append(self, rows: Int64Array, lengths: Int64Array, sources: Sequence[Sequences], item: int) -> None:
        ends = np.cumsum(lengths)
        done, written = 0, 0
        while done < len(rows):
            room = self.page_tokens - self._used if self._cursor >= 0 else -1
            stop = int(np.searchsorted(ends, written + room, "right"))
            if stop > done:
                size = int(ends[stop - 1]) - written
                page, start = self._cursor, self._used
                self._used += size
            else:  # not even the next one fits
                stop = done + 1
                size = int(lengths[done])
                page, start = self._room(size)
            part = slice(done, stop)
            for values, source in zip(self.values, sources, strict=True):
                source.copy(item + done, item + stop, values[page][start : start + size])
            self._placed(rows[part], page, start, lengths[part])
            done, written = stop, written + size

    def _placed(self, rows: Int64Array, page: int, start: int, lengths: Int64Array) -> None:
        size = int(lengths.sum())
        self.places[rows, 0] = page
        self.places[rows, 1] = start + np.cumsum(lengths) - lengths
        self.places[rows, 2] = lengths
        self._rows[page].frombytes(rows[lengths > 0].tobytes())
        self._live[page] += size
        self.live += size

    def _room(self, size: int) -> tuple[int, int]:
        """A place for a sequence: page and first token."""
        if self._cursor < 0 or self._used + size > self.page_tokens:
            if size * _LARGE_PART > self.page_tokens:
                return self._add([np.empty((size, *field.shape), field.bits) for field in self._fields], size), 0
            self._open()
        start = self._used
        self._used += size
        return self._cursor, start

    def _open(self) -> None:
        """Write into an empty page from now on."""
        before, size = self._cursor, self.page_tokens
        values = self._spare.pop() if self._spare else None
        self._cursor = self._add(values or [np.empty((size, *field.shape), field.bits) for field in self._fields], size)
        self._used = 0
        if before >= 0 and not self._live[before]:
            self._drop(before)

    def _add(self, values: Sequence[Values], size: int) -> int:
        """A page more: its number."""
        if self._free_numbers:
            number = self._free_numbers.pop()
            self._rows[number] = array("q")
        else:
            number = len(self._rows)
            self._rows.append(array("q"))
            for pages in self.values:
                pages.append(None)
            if number == len(self._live):
                self._live, self._sizes = (np.append(each, np.zeros_like(each)) for each in (self._live, self._sizes))
        for pages, array_of_field in zip(self.values, values, strict=True):
            pages[number] = array_of_field
        self._live[number], self._sizes[number] = 0, size
        self._total += size
        return number

    # -- letting go ---------------------------------------------------------------------------------------------------

    def free_one(self, row: int) -> None:
        """A row has no tokens any more."""
        page, _, length = self.places[row].tolist()
        if length:
            self.places[row, 2] = 0
            self.live -= length
            self._live[page] -= length
            if not self._live[page]:
                self._emptied(page)

    def free(self, rows: Int64Array) -> None:
        """Different rows have no tokens any more."""
        places = self.places[rows]
        places = places[places[:, 2] > 0]
        if not len(places):
            return
        self.places[rows, 2] = 0
        self.live -= int(places[:, 2].sum())
        np.subtract.at(self._live, places[:, 0], places[:, 2])
        pages = np.unique(places[:, 0])
        for page in pages[self._live[pages] == 0].tolist():
            self._emptied(page)

    def forget(self, start: int, stop: int) -> None:
        """Rows that were not in use have no tokens, whatever their places say."""
        self.places[start:stop, 2] = 0

    def _emptied(self, page: int) -> None:
        if page != self._cursor:
            self._drop(page)
        elif not self._is_pinned():
            self._used = 0
            self._rows[page] = array("q")

    def _drop(self, page: int) -> None:
        size = int(self._sizes[page])
        if size == self.page_tokens and len(self._spare) < _SPARE_PAGES and not self._is_pinned():
            self._spare.append([pages[page] for pages in self.values])
        for pages in self.values:
            pages[page] = None
        self._rows[page] = array("q")
        self._sizes[page] = 0
        self._total -= size
        self._free_numbers.append(page)

    def compact(self, pages: int) -> None:
        """Empty sparse pages, as many as are too many, but at most ``pages`` of them."""
        while pages > 0 and self._total > 2 * self.live + _SLACK_PAGES * self.page_tokens:
            sparse = self._sparsest()
            if sparse is None:
                return
            self._move(sparse)
            pages -= 1

    def _sparsest(self) -> int | None:
        live = np.where(self._sizes == self.page_tokens, self._live, self.page_tokens)
        if self._cursor >= 0:
            live[self._cursor] = self.page_tokens
        page = int(live.argmin())
        return page if live[page] < self.page_tokens else None

    def _move(self, page: int) -> None:
        """Move what is left in a page to where writes go on."""
        rows = np.unique(np.frombuffer(self._rows[page], np.int64))
        places = self.places[rows]
        rows = rows[(places[:, 0] == page) & (places[:, 2] > 0)]
        rows = rows[self.places[rows, 1].argsort()]
        self._before_move(rows)
        _, starts, lengths = self.places[rows].T
        sources = [PageSequences(pages[page], starts, lengths) for pages in self.values]
        self.live -= int(self._live[page])
        self._live[page] = 0
        self._append(rows, lengths, sources, 0)
        self._drop(page)
