"""A ticket in a queue, and how far it is."""

from __future__ import annotations

import enum
from collections import deque
from typing import TYPE_CHECKING, Any

from asyncbuf.batch import Batch, Ticket, batch_of, say_again
from asyncbuf.errors import PrefetchError

if TYPE_CHECKING:
    from asyncbuf._prefetch.transforms import Partial
    from asyncbuf.batch import Draw


class Stage(enum.Enum):
    """How far a ticket is."""

    DRAWN = "its rows are being gathered"
    GATHERED = "its transforms have not ended"
    READY = "it is a batch"
    LENT = "it is a batch, which a snapshot copies first"
    FAILED = "a transform raised"


class Entry:
    """A ticket in a queue.

    Attributes:
        ticket: the draw.
        stage: how far it is.
        progress: where its transforms go on; None until its rows are gathered.
        batch: what a consumer gets, once READY.
        lent: the same while it is LENT.
        loans: of snapshots that have not copied yet what there is of it.
        error: why it FAILED.
        reported: whether a consumer was told of the failure.
        gathering: whether a thread is gathering its rows.
        is_prefetched: whether it stands in the queue of the buffer's own batch size.
        dropped: whether nobody wants it any more, so that what a thread still makes of it is let go.
    """

    __slots__ = (
        "batch",
        "dropped",
        "error",
        "gathering",
        "is_prefetched",
        "lent",
        "loans",
        "progress",
        "reported",
        "stage",
        "ticket",
    )

    def __init__(self, ticket: Ticket, *, is_prefetched: bool) -> None:
        self.ticket = ticket
        self.stage = Stage.DRAWN
        self.progress: Partial | None = None
        self.batch: Batch | None = None
        self.lent: Batch | None = None
        self.loans: tuple[Loan, ...] = ()
        self.error: BaseException | None = None
        self.reported = self.gathering = self.dropped = False
        self.is_prefetched = is_prefetched

    @property
    def settled(self) -> bool:
        """Whether it is a batch or has failed."""
        return self.is_made or self.stage is Stage.FAILED

    @property
    def is_made(self) -> bool:
        """Whether it is a batch."""
        return self.stage is Stage.READY or self.stage is Stage.LENT

    def keep(self, progress: Partial) -> None:
        """Its rows are gathered, or a step of its transforms is done."""
        self.progress = progress
        self.stage = Stage.GATHERED

    def ready(self, data: Any) -> None:
        """Its transforms are done."""
        self.made(batch_of(data, *self.ticket))

    def made(self, batch: Batch) -> None:
        """It is a batch."""
        self.batch = batch
        self.progress = self.error = None
        self.stage = Stage.READY
        if self.loans:
            self._withhold()

    def say_again(self, draw: Draw) -> None:
        """What the sampler says of the rows is other than at the draw."""
        if draw is self.ticket.draw:
            return
        self.ticket = self.ticket._replace(draw=draw)
        if (batch := self.batch or self.lent) is not None:
            say_again(batch, draw)

    def lend(self, loan: Loan) -> None:
        """A snapshot shares its tensors from now on: nobody gets the batch before they are copied."""
        self.loans += (loan,)
        if self.stage is Stage.READY:
            self._withhold()

    def _withhold(self) -> None:
        self.lent, self.batch = self.batch, None
        self.stage = Stage.LENT

    def give_back(self, loan: Loan | None = None) -> None:
        """A snapshot has copied it, or needs it no more; None for all that share it."""
        self.loans = () if loan is None else tuple(other for other in self.loans if other is not loan)
        if not self.loans and self.stage is Stage.LENT:
            self.batch, self.lent = self.lent, None
            self.stage = Stage.READY

    def fail(self, error: BaseException) -> None:
        """A transform or the gather raised."""
        self.error = error
        self.stage = Stage.FAILED

    def failure(self) -> PrefetchError:
        """What the consumer whose turn it is is told."""
        self.reported = True
        indices = self.ticket.draw.indices.tolist()
        shown = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
        try:
            why = repr(self.error)
        except Exception:
            why = type(self.error).__name__
        failure = PrefetchError(
            f"batch {self.ticket.number} could not be made from rows [{shown}]: {why}; "
            "the next sample() tries again, skip() drops it",
            self.ticket.number,
            indices,
        )
        failure.__cause__ = self.error
        return failure

    def retry(self) -> None:
        """Forget the failure; what was gathered, and the transforms that went well, stay."""
        self.error = None
        self.reported = False
        self.stage = Stage.DRAWN if self.progress is None else Stage.GATHERED


class Loan:
    """Tickets whose tensors a snapshot shares until it has copied them.

    Args:
        entries: the tickets, in the order in which they are copied.
    """

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = deque(entries)
        for entry in entries:
            entry.lend(self)

    def give_back(self, count: int | None = None) -> None:
        """The next tickets are copied.

        Args:
            count: how many; None for all that are left.
        """
        for _ in range(len(self._entries) if count is None else min(count, len(self._entries))):
            self._entries.popleft().give_back(self)
