"""The books of a table: how many items left it, and how many tickets were dropped, by cause."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncbuf._plain.state import fields, natural
from asyncbuf.errors import CheckpointCorruptError

if TYPE_CHECKING:
    from asyncbuf.rows import Rows

# What came before the books were begun: a writer with a history, or a checkpoint of a release that kept none.
EARLIER = "earlier"
OVERWRITTEN, NOT_KEPT = "overwritten", "not_kept"
_GIVEN_UP = ("stale", "let_go", "removed", "emptied")


class Tally:
    """Counts what leaves, wherever it leaves.

    At every moment of the history:

    - items written are those that are stored and those that were evicted,
    - tickets drawn are those delivered, leased or queued and those that were dropped.

    Args:
        earlier: number of items that left before.

    Attributes:
        overwritten: number of items whose rows new items took.
        not_kept: number of items that the writer did not keep when they were written.
        evicted: number of items that left otherwise, by cause.
        dropped: number of tickets that nobody got, by cause.
        duplicates: number of writes that were ignored, because their key or number had been seen.
    """

    __slots__ = ("dropped", "duplicates", "evicted", "not_kept", "overwritten")

    def __init__(self, earlier: int = 0) -> None:
        self.overwritten = self.not_kept = self.duplicates = 0
        self.evicted: dict[str, int] = {EARLIER: earlier} if earlier else {}
        self.dropped: dict[str, int] = {}

    def evict(self, cause: str, count: int) -> None:
        """So many items have left."""
        if count:
            self.evicted[cause] = self.evicted.get(cause, 0) + count

    def drop(self, cause: str, count: int) -> None:
        """So many tickets are dropped."""
        if count:
            self.dropped[cause] = self.dropped.get(cause, 0) + count

    def all_evicted(self) -> dict[str, int]:
        """Number of items that left, by cause: those that there were."""
        found = {OVERWRITTEN: self.overwritten, NOT_KEPT: self.not_kept, **self.evicted}
        return {cause: count for cause, count in found.items() if count}

    @property
    def given_up(self) -> int:
        """Number of items that left without being trained on, as far as that is known."""
        evicted = self.evicted
        if not evicted:
            return self.not_kept
        return self.not_kept + sum([evicted.get(cause, 0) for cause in _GIVEN_UP])

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Every count."""
        return {
            "overwritten": self.overwritten,
            "not_kept": self.not_kept,
            "duplicates": self.duplicates,
            "evicted": dict(sorted(self.evicted.items())),
            "dropped": dict(sorted(self.dropped.items())),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting where it was."""
        overwritten, not_kept, duplicates, evicted, dropped = fields(
            state, "ledger", overwritten=int, not_kept=int, duplicates=int, evicted=dict, dropped=dict
        )
        evicted, dropped = _counts(evicted, "evicted"), _counts(dropped, "dropped")
        self.overwritten, self.not_kept, self.duplicates = overwritten, not_kept, duplicates
        self.evicted, self.dropped = evicted, dropped

    def verify(self, rows: Rows) -> None:
        """Refuse counts that do not go with the table. Books that are empty are begun here.

        Raises:
            CheckpointCorruptError: they do not close.
        """
        gone, counted = rows.write_count - rows.size, sum(self.all_evicted().values())
        if counted == self.evicted.get(EARLIER, 0):
            self.evicted = {EARLIER: gone} if gone else {}
        elif counted != gone:
            raise CheckpointCorruptError(
                f"ledger: expected {gone} items to have left, of {rows.write_count} written and {rows.size} stored; "
                f"found {counted}"
            )

    def verify_dropped(self, dropped: int) -> None:
        """Refuse counts of tickets that do not go with the queue; otherwise as ``verify``."""
        counted = sum(self.dropped.values())
        if counted == self.dropped.get(EARLIER, 0):
            self.dropped = {EARLIER: dropped} if dropped else {}
        elif counted != dropped:
            raise CheckpointCorruptError(
                f"ledger: expected {dropped} dropped tickets, as in the queue, found {counted}"
            )


def _counts(found: dict[Any, Any], name: str) -> dict[str, int]:
    for cause, count in found.items():
        if type(cause) is not str:
            raise CheckpointCorruptError(f"ledger: expected {name} by cause, found {type(cause).__name__}")
        natural(count, f"ledger: expected {name} by {cause[:40]!r}", least=1)
    return dict(found)
