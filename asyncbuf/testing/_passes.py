"""The passes of a sampler, as a contract sees them: each has every row once, and the sampler says where it is.

A pass over slices or other groups of rows leaves out rows that are in no group, and may repeat a row as padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncbuf.batch import Draw
    from asyncbuf.rows import Rows
    from asyncbuf.sampler import Sampler
    from asyncbuf.testing._contract import Contract

_EPOCH = "epoch is the number of the pass of the next draw"
_BETWEEN = "between_epochs says whether the next draw begins a pass"
_LAST = "last says whether a pass ends with a draw"
_ONCE = "a pass has each row once"
_WHOLE = "a pass has every row, but for fewer than a batch where all batches are full"


class Place(NamedTuple):
    """Where a sampler says that it is, before a draw of some size.

    Attributes:
        epoch: number of the pass of the next draw; None without passes.
        leaves_out: whether a draw of this size leaves out what is left of the pass.
        is_between: whether the next draw begins a pass.
    """

    epoch: int | None
    leaves_out: bool
    is_between: bool

    @classmethod
    def of(cls, sampler: Sampler, batch_size: int) -> Place:
        """Ask a sampler."""
        return cls(sampler.epoch, sampler.leaves_out(batch_size), sampler.between_epochs)


class Passes:
    """Keeps the books of passes.

    Args:
        contract: the rules.
    """

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._epoch: int | None = None
        self._due: set[int] = set()  # rows that the pass must still have
        self._seen: set[int] = set()
        self._has_short = False
        self._left_out: list[tuple[str, set[int], int]] = []

    def gone(self, rows: Iterable[int]) -> None:
        """Rows were removed, or have other items now: the pass need not have them, and may have them again."""
        self._due.difference_update(rows)
        self._seen.difference_update(rows)

    def drew(self, draw: Draw, batch_size: int, table: Rows, rows: list[int], before: Place, after: Place) -> None:
        """See that a draw goes on with the pass, or begins the next one.

        Args:
            draw: the draw.
            batch_size: number of rows that were asked for.
            table: what there was to draw from.
            rows: the valid rows of that.
            before: what the sampler said before.
            after: what it says now.
        """
        require = self._contract.require
        if before.epoch is None:
            require(draw.epoch is None and not draw.last, _EPOCH, "no epoch and no last", (draw.epoch, draw.last))
            return
        require(draw.epoch == before.epoch + before.leaves_out, _EPOCH, before.epoch + before.leaves_out, draw.epoch)
        begins = draw.epoch != self._epoch
        said = before.is_between or before.leaves_out
        require(begins == said, _BETWEEN, f"{begins} before pass {draw.epoch} of {table.size} rows", said)
        if begins:
            self._epoch, self._due, self._seen = draw.epoch, set(rows), set()
        self._check_rows(draw, batch_size)
        if draw.last:
            require(after.is_between, _LAST, "between_epochs after the last draw", after)
            require(after.epoch == before.epoch + before.leaves_out + 1, _EPOCH, "the next pass after the last", after)
            if draw.shape is None:
                self._left_out.append((self._contract.where, set(self._due), batch_size))
            self._due = set()
        else:
            require(after.epoch == draw.epoch and not after.is_between, _LAST, f"pass {draw.epoch} to go on", after)

    def _check_rows(self, draw: Draw, batch_size: int) -> None:
        found = draw.indices.tolist()
        if draw.shape is not None:
            found = [row for i, row in enumerate(found) if i % draw.shape[-1] == 0 or row != found[i - 1]]
        again = [row for i, row in enumerate(found) if row in self._seen or row in found[:i]]
        self._contract.require(not again, _ONCE, "rows that the pass has not had", f"again {again}")
        self._seen.update(found)
        self._due.difference_update(found)
        self._has_short = self._has_short or len(found) < batch_size

    def check_whole(self) -> None:
        """See that no pass has lost rows; some samplers leave out the last that do not fill a batch."""
        for where, missing, batch_size in self._left_out:
            self._contract.where = where
            most = 0 if self._has_short else batch_size - 1
            self._contract.require(len(missing) <= most, _WHOLE, f"at most {most} rows left out", sorted(missing))
