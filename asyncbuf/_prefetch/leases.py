"""Batches that consumers have for a while: until they say that they are done, or give them back."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncbuf._prefetch.entry import Entry
    from asyncbuf._prefetch.queue import TicketQueue, TicketQueues
    from asyncbuf.batch import Batch


class Leases:
    """Tickets that are out on lease. They left their queue, and nobody else gets them; a snapshot still has them.

    Args:
        queues: where they come from, and go back to.
    """

    def __init__(self, queues: TicketQueues) -> None:
        self._queues = queues
        self._out: dict[Batch, tuple[Entry, int]] = {}

    def __len__(self) -> int:
        """How many are out."""
        return len(self._out)

    def begin(self, entry: Entry, queue: TicketQueue) -> None:
        """A consumer gets the batch of a ticket that has just left its queue."""
        assert entry.batch is not None
        self._out[entry.batch] = entry, queue.batch_size

    def entry(self, batch: Batch) -> Entry | None:
        """The ticket of a batch; None if another state was put in place meanwhile."""
        return self._out.get(batch, (None, 0))[0]

    def acknowledge(self, batch: Batch) -> Entry | None:
        """The consumer is done with it: the ticket, or None if another state was put in place meanwhile."""
        return self._out.pop(batch, (None, 0))[0]

    def give_back(self, batch: Batch) -> TicketQueue | None:
        """The ticket stands in its queue again, ahead of all later ones.

        Returns:
            The queue; None if another state was put in place meanwhile.
        """
        entry, batch_size = self._out.pop(batch, (None, 0))
        if entry is None:
            return None
        queue = self._queues.of(batch_size)
        queue.put_back(entry)
        return queue

    def give_all_back(self) -> None:
        """The event loop of those that had them was closed."""
        for batch in list(self._out):
            self.give_back(batch)

    def forget(self) -> None:
        """Another state was put in place, to which they do not belong."""
        self._out.clear()

    @property
    def untaken(self) -> Iterator[tuple[Entry, int]]:
        """Every ticket that nobody has taken for good, on lease or not, and the batch size of its queue.

        Those of one queue follow each other in the order of their numbers.
        """
        sizes = [*(queue.batch_size for queue in self._queues), *(size for _, size in self._out.values())]
        for size in dict.fromkeys(sizes):
            out = [entry for entry, of in self._out.values() if of == size]
            queue = self._queues.by_size.get(size)
            entries = [*out, *(() if queue is None else queue.entries)]
            if out:
                entries.sort(key=lambda entry: entry.ticket.number)
            yield from ((entry, size) for entry in entries)
