"""Writers begin no more items than can be trained on before they are too old."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from asyncbuf._runtime.arguments import count
from asyncbuf.limiter.base import Limiter
from asyncbuf.rows import NotYet

if TYPE_CHECKING:
    from asyncbuf.rows import Answer, Counters


class MaxStaleness(Limiter):
    """Writers wait while more items than those of ``max_age + version + 1`` batches are written or about to be.

    The capacity rule of AReaL (Fu et al., arXiv:2505.24298, 2025), for a loop that trains on one batch per version:
    sample, train, ``advance_version()``. Versions begin at 0. With a sampler that hands out the oldest items first,
    such as ``ConsumingSampler``, each item is trained on at most ``max_age`` versions after it was admitted.

    Let items be admitted when the work on them begins: ``buffer.reserve(prompt, items=8)``. Otherwise they are admitted
    when they are written, and then the work was done by an older version. Work that is overtaken by work that began
    later can still come too late, except with ``max_age=0``; ``Staleness(max_age)`` bounds the age of those, too.

    Items that left without being trained on make room for others: those that were too old, that the sampler let go
    (as ``GroupSampler(filter=...)`` does), that the writer did not keep, and those of ``remove`` and ``empty``.

    Let a write and a batch fit together: where a batch waits for ``batch_size`` items, writes of ``n`` items need
    ``max_age * batch_size`` to be at least ``n - 1``, or batches to be made of whole writes.

    Args:
        max_age: how many versions pass at most, from 0. The buffer needs a batch size, and ``staleness``.

    Raises:
        TypeError, ValueError: it is not an int of at least 0.
    """

    counts_draws: ClassVar[bool] = False
    holds_writers: ClassVar[bool] = True
    trusted: ClassVar[bool] = True
    needs_batch_size: ClassVar[bool] = True
    needs_versions: ClassVar[bool] = True

    def __init__(self, max_age: int) -> None:
        self.max_age: int = count(max_age, "max_age", 0, example=2)

    def may_write(self, counters: Counters, items: int) -> Answer:
        """True while the items can be trained on in time."""
        batch_size, ages = counters.batch_size, self.max_age + 1
        if items > ages * batch_size:
            raise ValueError(
                f"MaxStaleness: expected at most {ages * batch_size} items in one write, {ages} batch(es) of "
                f"{batch_size}, found {items}: write them in parts, or let items be older"
            )
        begun = counters.write_count - counters.given_up + counters.admitted
        most = (ages + counters.version) * batch_size
        if begun + items <= most:
            return True
        return NotYet(
            f"{begun} items are written or about to be, without those that left and were not trained on, of at most "
            f"{most}, which is (max_age {self.max_age} + version {counters.version} + 1) batches of {batch_size}, and "
            f"{items} more are to come: advance_version() makes room"
        )

    def __repr__(self) -> str:
        """As it was made."""
        return f"MaxStaleness({self.max_age})"
