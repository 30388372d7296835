"""Passes: every row once, then again from the start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from asyncbuf._plain.state import fields, same
from asyncbuf.batch import Draw
from asyncbuf.errors import CheckpointCorruptError
from asyncbuf.sampler.base import Sampler
from asyncbuf.sampler.permutation import Permutation

if TYPE_CHECKING:
    from asyncbuf.rows import Rows


class SamplerWithoutReplacement(Sampler):
    """Draws every row once per pass.

    A pass covers the rows that were valid when its first batch was drawn; items that come later join at the next pass.
    Prefetching never begins a pass before a consumer asks for its first batch, so what was written until then is in it.

    Args:
        drop_last: leave out the rows at the end of a pass that do not fill a batch.
        shuffle: a new random order for each pass; otherwise rows come in their order.
    """

    def __init__(self, *, drop_last: bool = False, shuffle: bool = True) -> None:
        self._drop_last = drop_last
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._length = 0
        self._seed = 0
        self._order: Permutation | None = None

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        """The next rows of the pass; the last batch of a pass may be shorter, unless ``drop_last``.

        Raises:
            ValueError: with ``drop_last``, a pass has fewer rows than a batch.
        """
        left = self._length - self._position
        if left == 0 or (self._drop_last and left < batch_size):
            self._begin(rows.size, batch_size, generator)
        start, stop = self._position, min(self._position + batch_size, self._length)
        indices = torch.arange(start, stop, device="cpu") if self._order is None else self._order[start:stop]
        epoch, self._position = self._epoch, stop
        left = self._length - stop
        last = left == 0 or (self._drop_last and left < batch_size)
        if last:
            self._end()
        return Draw(indices, epoch=epoch, last=last)

    def _begin(self, size: int, batch_size: int, generator: torch.Generator) -> None:
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

    def _end(self) -> None:
        self._epoch += 1
        self._position = self._length = 0
        self._order = None

    def clear(self) -> None:
        """End the pass where it is; the next one begins with what is written then."""
        if self._position < self._length:
            self._end()

    def state_dict(self) -> dict[str, Any]:
        """Number, length, position and seed of the pass: a few numbers, however long the pass is."""
        return {
            "drop_last": self._drop_last,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "position": self._position,
            "length": self._length,
            "seed": self._seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on within the pass that was saved."""
        name = type(self).__name__
        kinds: dict[str, type] = dict(drop_last=bool, shuffle=bool, epoch=int, position=int, length=int, seed=int)
        drop_last, shuffle, epoch, position, length, seed = fields(state, name, **kinds)
        same(drop_last, self._drop_last, f"{name}: drop_last")
        same(shuffle, self._shuffle, f"{name}: shuffle")
        if position > length or seed >= 2**63:
            raise CheckpointCorruptError(f"{name}: expected a position up to {length}, found {position} (seed {seed})")
        self._order = Permutation(length, seed) if shuffle and position < length else None
        self._epoch, self._position, self._length, self._seed = epoch, position, length, seed

    def verify(self, rows: Rows) -> None:
        """Refuse a pass over more rows than there are."""
        if self._length > rows.size:
            raise CheckpointCorruptError(
                f"{type(self).__name__}: expected a pass of at most {rows.size} rows, found a length of {self._length}"
            )

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
        return self._drop_last and 0 < self._length - self._position < batch_size

    @property
    def between_epochs(self) -> bool:
        """Whether the next draw begins a pass."""
        return self._position >= self._length
