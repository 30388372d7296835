"""The order in which stateful transforms see tickets."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from asyncbuf._prefetch.entry import Entry, Stage

if TYPE_CHECKING:
    from collections.abc import Iterable


class InOrder:
    """The tickets that stateful transforms have not seen yet, by number: they see one at a time, in this order.

    Dropped tickets are among them.

    Attributes:
        is_busy: whether one is being transformed: also one that was dropped, and in a thread that outlives the rest.
        is_resting: whether none may begin.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._dropped: dict[int, Entry] = {}
        self.is_busy = self.is_resting = False
        self._at_work: Entry | None = None

    def add(self, entries: Iterable[Entry]) -> None:
        """Let entries wait for their turn."""
        last = next(reversed(self._entries), -1)
        is_sorted = True
        for entry in entries:
            number = entry.ticket.number
            is_sorted = is_sorted and number > last
            self._entries[number] = entry
            last = number
        if not is_sorted:
            self._entries = OrderedDict(sorted(self._entries.items()))

    def put_back(self, entry: Entry) -> None:
        """Let an entry that failed stand first again, if it was first before."""
        if entry.ticket.number not in self._entries:
            self._entries[entry.ticket.number] = entry
            self._entries.move_to_end(entry.ticket.number, last=False)

    def keep_dropped(self, entries: Iterable[Entry]) -> None:
        """Let dropped entries keep their turns, as long as they are not settled."""
        kept = [entry for entry in entries if not _lets_pass(entry)]
        self._dropped = {number: entry for number, entry in self._dropped.items() if not _lets_pass(entry)}
        self._dropped |= {entry.ticket.number: entry for entry in kept}
        self.add([entry for entry in kept if not (self.is_busy and entry is self._at_work)])

    @property
    def dropped(self) -> list[Entry]:
        """The dropped entries that stateful transforms are still to see."""
        return self.unseen(self._dropped.values())

    def unseen(self, entries: Iterable[Entry]) -> list[Entry]:
        """Those of some entries that stateful transforms are still to see."""
        return [entry for entry in entries if not _lets_pass(entry)]

    def clear(self) -> None:
        """Forget all of them."""
        self._entries.clear()
        self._dropped.clear()

    @property
    def _first(self) -> Entry | None:
        while (first := next(iter(self._entries.values()), None)) is not None and _lets_pass(first):
            self._entries.popitem(last=False)
        return first

    def next(self) -> Entry | None:
        """The entry whose turn it is, which is busy from now on; None if there is none, or another is busy."""
        first = None if self.is_resting else self._first
        if first is None or self.is_busy or first.stage is not Stage.GATHERED:
            return None
        self.is_busy, self._at_work = True, first
        self._entries.popitem(last=False)
        return first

    @property
    def stuck(self) -> Entry | None:
        """The failed entry that has to be tried again or dropped before those behind it can be transformed."""
        first = self._first
        return first if first is not None and first.stage is Stage.FAILED and not self.is_busy else None


def _lets_pass(entry: Entry) -> bool:
    """Whether those behind a ticket need not wait for it. One that a single call asked for holds nobody up."""
    if entry.dropped and entry.stage is Stage.DRAWN:
        return not entry.gathering  # its gather has failed before, and nobody tries that again
    return entry.is_made or (entry.stage is Stage.FAILED and (entry.dropped or not entry.is_prefetched))
