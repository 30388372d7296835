"""Passes: every row once, then again from the start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._plain.state import Seed, fields, same
from asyncbuf._runtime.arguments import flag
from asyncbuf.batch import Draw
from asyncbuf.errors import CheckpointCorruptError
from asyncbuf.rows import NotYet
from asyncbuf.sampler._pass_gaps import PassGaps
from asyncbuf.sampler._permutation import KINDS, LATEST_KIND, OLD_KIND, Permutation
from asyncbuf.sampler.base import Sampler

if TYPE_CHECKING:
    from asyncbuf.rows import Answer, Rows


class SamplerWithoutReplacement(Sampler):
    """Draws every row once per pass.

    A pass covers the rows that were valid when its first batch was drawn; items that come later join at the next pass.
    Prefetching never begins a pass before a consumer asks for its first batch, so what was written until then is in it.
    Rows that are removed leave the pass: it ends with the last row that is there, and an item that takes such a row
    again joins at the next pass.

    Args:
        drop_last: leave out the rows at the end of a pass that do not fill a batch.
        shuffle: a new random order for each pass; otherwise rows come in their order.

    Raises:
        TypeError: one of them is no bool.
    """

    trusted: bool = True
    counts_draws: bool = False  # a pass can begin as soon as, and as long as, there are rows for a batch

    def __init__(self, *, drop_last: bool = False, shuffle: bool = True) -> None:
        self._drop_last = flag(drop_last, "drop_last")
        self._shuffle = flag(shuffle, "shuffle")
        self._epoch = 0
        self._position = 0
        self._length = 0
        self._seed = 0
        self._order: Permutation | None = None
        self._gaps: PassGaps | None = None

    def may_draw(self, rows: Rows, batch_size: int) -> Answer:
        """With ``drop_last``, not before there are rows for a batch."""
        if not self._drop_last or rows.size >= batch_size:
            return True
        return NotYet(f"{rows.size} of the {batch_size} rows of a batch are stored, and drop_last leaves out fewer")

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        """The next rows of the pass; the last batch of a pass may be shorter, unless ``drop_last``.

        Raises:
            ValueError: with ``drop_last``, a pass has fewer rows than a batch.
        """
        gaps = self._gaps
        left = self._length - self._position if gaps is None else self._left
        if left == 0 or (self._drop_last and left < batch_size):
            self._begin(rows, batch_size, generator)
            gaps = self._gaps
        epoch, start = self._epoch, self._position
        if gaps is None:
            stop = min(start + batch_size, self._length)
            indices = torch.arange(start, stop, device="cpu") if self._order is None else self._order[start:stop]
        else:
            found, stop = gaps.take(self._order, start, batch_size)
            indices = torch.from_numpy(found)
        self._position = stop
        left = self._length - stop if gaps is None else self._left
        last = left == 0 or (self._drop_last and left < batch_size)
        if last:
            self._end()
        return Draw(indices, epoch=epoch, last=last)

    @property
    def _left(self) -> int:
        """How many rows of the pass are still to come."""
        left = self._length - self._position
        return left if self._gaps is None else left - self._gaps.ahead

    def _begin(self, rows: Rows, batch_size: int, generator: torch.Generator) -> None:
        size = rows.size
        if self._drop_last and size < batch_size:
            raise ValueError(
                f"batch size: expected at most {size}, the rows of a pass, because of drop_last; found {batch_size}"
            )
        if self._position < self._length:
            self._end()  # a call with a larger batch size than those before leaves out what does not fill its batch
        self._position, self._length = 0, size
        if self._shuffle:
            seed = torch.randint(2**63 - 1, (), generator=generator, device=generator.device)
            self._seed = int(seed.item())
            self._order = Permutation(size, self._seed)
        if rows.valid is not None:
            members = rows.at(torch.arange(size, device="cpu")).numpy()
            self._gaps = PassGaps(size, members if self._shuffle else _ascending(members, rows.capacity))

    def _end(self) -> None:
        self._epoch += 1
        self._position = self._length = 0
        self._order = None
        self._gaps = None

    def removed(self, indices: torch.Tensor, rows: Rows) -> None:
        """Leave out rows that the pass has not come to. If none is left, it ends."""
        if self._position >= self._length:
            return
        if self._gaps is None:
            self._gaps = PassGaps(self._length, None)
        self._gaps.remove(indices.numpy(), rows.capacity, self._order, self._position)
        if not self._left:
            self._end()

    def clear(self) -> None:
        """End the pass where it is; the next one begins with what is written then."""
        self.end_epoch()

    def end_epoch(self) -> None:
        """End the pass where it is."""
        if self._position < self._length:
            self._end()

    def state_dict(self) -> dict[str, Any]:
        """Number, length, position and seed of the pass: a few numbers, however long the pass is.

        Of a pass that lost rows, or that began when some were missing, its rows and those that are gone as well.
        """
        state = {
            "drop_last": self._drop_last,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "position": self._position,
            "length": self._length,
            "seed": self._seed,
            "order": LATEST_KIND if self._order is None else self._order.kind,
        }
        return state if self._gaps is None else {**state, **self._gaps.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on within the pass that was saved."""
        name = type(self).__name__
        gaps: dict[str, Any] = {key: state[key] for key in ("rows", "gone") if isinstance(state, dict) and key in state}
        plain = state
        if isinstance(state, dict):
            plain = {"order": OLD_KIND, **{key: value for key, value in state.items() if key not in gaps}}
        kinds: dict[str, type] = dict(
            drop_last=bool, shuffle=bool, epoch=int, position=int, length=int, seed=Seed, order=int
        )
        drop_last, shuffle, epoch, position, length, seed, kind = fields(plain, name, **kinds)
        same(drop_last, self._drop_last, f"{name}: drop_last")
        same(shuffle, self._shuffle, f"{name}: shuffle")
        if length >= 2**48:
            raise CheckpointCorruptError(f"{name}: expected the length of a pass, found one beyond every storage")
        if position > length:
            raise CheckpointCorruptError(f"{name}: expected a position up to {length}, found {position}")
        if kind not in KINDS:
            raise CheckpointCorruptError(f"{name}: expected an order of one of the kinds {KINDS}, found {kind}")
        found = PassGaps.of(name, length, gaps)
        self._order = Permutation(length, seed, kind) if shuffle and position < length else None
        self._epoch, self._position, self._length, self._seed = epoch, position, length, seed
        self._gaps = found

    def verify(self, rows: Rows) -> None:
        """Refuse a pass over more rows than there are, or over rows that are not valid."""
        name = type(self).__name__
        is_dense = self._gaps is None and rows.valid is None
        most = rows.size if is_dense else rows.capacity
        if self._length > most:
            raise CheckpointCorruptError(
                f"{name}: expected a pass of at most {most} rows, found a length of {self._length}"
            )
        if not is_dense and self._position < self._length:
            gaps = PassGaps(self._length, None) if self._gaps is None else self._gaps
            gaps.verify(name, rows, self._order, self._position)

    def check(self, capacity: int, batch_size: int) -> None:
        """Refuse a batch size that no pass can fill."""
        if self._drop_last and batch_size > capacity:
            raise ValueError(
                f"batch size: expected at most the capacity {capacity}, because of drop_last; found {batch_size}"
            )

    @property
    def epoch(self) -> int:
        """Number of the pass that the next draw belongs to."""
        return self._epoch

    def leaves_out(self, batch_size: int) -> bool:
        """With ``drop_last``: whether some rows are left, but fewer than a batch."""
        return self._drop_last and 0 < self._left < batch_size

    @property
    def between_epochs(self) -> bool:
        """Whether the next draw begins a pass."""
        return self._position >= self._length


def _ascending(rows: np.ndarray[Any, np.dtype[np.int64]], capacity: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Different rows in their order."""
    is_there = np.zeros(capacity, np.bool_)
    is_there[rows] = True
    return np.flatnonzero(is_there)
