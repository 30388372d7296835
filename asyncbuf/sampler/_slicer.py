"""What samplers of slices share: the arguments, where slices may begin, and the rows of those that were drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._plain.state import fields, same
from asyncbuf._runtime.arguments import count as checked_count
from asyncbuf._runtime.arguments import instance_of
from asyncbuf.batch import Draw
from asyncbuf.errors import CheckpointCorruptError
from asyncbuf.rows import NotYet
from asyncbuf.sampler._episodes import FIRST, MARK, Episodes, follow
from asyncbuf.sampler._row_set import RowSet
from asyncbuf.sampler._tracker import ItemKeys, Tracker
from asyncbuf.sampler._windows import Windows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncbuf.rows import Answer, BoolArray, Int64Array, Rows, WriteEvent


class Slicer:
    """Slices of trajectories.

    Args:
        slice_len: steps of a slice, without those of ``burn_in``; None for what ``num_slices`` makes of the batch size.
        num_slices: slices in a batch; None for what ``slice_len`` makes of the batch size.
        end_key: as of ``SliceSampler``; so are the following.
        trajectory_key: see there.
        strict_length: see there.
        burn_in: see there.
        disjoint: whether no step is in two slices, but for those of ``burn_in``.
        make_starts: makes the set of rows at which slices begin.

    Raises:
        TypeError, ValueError: an argument is not of the kind or in the range that is expected.
    """

    def __init__(
        self,
        *,
        slice_len: int | None,
        num_slices: int | None,
        end_key: str | Sequence[str] | None,
        trajectory_key: str | None,
        strict_length: bool,
        burn_in: int,
        disjoint: bool = False,
        make_starts: Callable[[int], RowSet] = RowSet,
    ) -> None:
        if (slice_len is None) == (num_slices is None):
            raise ValueError(f"expected one of slice_len and num_slices, found {slice_len} and {num_slices}")
        self._keys = ItemKeys(end_key, trajectory_key)
        self._strict = instance_of(strict_length, bool, "strict_length", example="True")
        self._burn_in = checked_count(burn_in, "burn_in", 0, example=40)
        if disjoint and burn_in and not strict_length:
            raise ValueError("burn_in: expected 0 without strict_length, where a slice may have no other steps")
        self._num_slices = None if num_slices is None else checked_count(num_slices, "num_slices", 1, example=32)
        self._disjoint = disjoint
        self._make_starts = make_starts
        self.columns = self._keys.columns
        self._length = 0  # with burn_in; 0 while it is not known
        self._tracker: Tracker | None = None
        if slice_len is not None:
            self._fix(checked_count(slice_len, "slice_len", 1, example=16) + self._burn_in)

    def _fix(self, length: int) -> None:
        self._length = length
        self._tracker = self._made(Episodes(length - self._burn_in), length)

    def _made(self, episodes: Episodes, length: int) -> Tracker:
        starts = self._make_starts(episodes.capacity)
        windows = Windows(episodes, starts, length, strict=self._strict, disjoint=self._disjoint)
        return Tracker(self._keys, episodes, windows, starts)

    @property
    def _known(self) -> Tracker:
        tracker = self._tracker
        if tracker is None:
            raise ValueError("num_slices: expected a batch_size of the buffer, which says how long slices are")
        return tracker

    @property
    def is_fixed(self) -> bool:
        """Whether it is known how long slices are."""
        return self._tracker is not None

    @property
    def length(self) -> int:
        """Steps of a slice, those of ``burn_in`` included."""
        return self._length

    @property
    def burn_in(self) -> int:
        """Steps of a slice that are there for a recurrent network to warm up."""
        return self._burn_in

    @property
    def capacity(self) -> int:
        """For how many rows there is room; after ``take_over``, the rows that were saved."""
        return 0 if self._tracker is None else self._tracker.episodes.capacity

    @property
    def starts(self) -> RowSet:
        """The rows at which slices begin."""
        return self._known.starts

    def count(self, batch_size: int) -> int:
        """Number of slices in a batch of so many rows."""
        return batch_size // max(1, self._length)

    def check(self, capacity: int, batch_size: int) -> None:
        """Refuse what can never be drawn. With ``num_slices``, the first batch size says how long slices are.

        Raises:
            ValueError: it can never be drawn.
        """
        length, slices = self._length, self._num_slices
        if not length and slices is not None:
            if batch_size % slices or batch_size // slices <= self._burn_in:
                more = f" of more than {self._burn_in} steps" if self._burn_in else ""
                raise ValueError(f"batch_size: expected {slices} slices{more} of the same length, found {batch_size}")
            length = batch_size // slices
        if batch_size % length:
            raise ValueError(f"batch_size: expected a multiple of {self._told(length)}, found {batch_size}")
        if length > capacity:
            raise ValueError(f"capacity: expected at least {self._told(length)}, found {capacity}")
        if not self._length:
            self._fix(length)

    def _told(self, length: int) -> str:
        parts = f", {self._burn_in} of them for burn_in" if self._burn_in else ""
        return f"the {length} steps of a slice{parts}"

    # -- writes -------------------------------------------------------------------------------------------------------

    def check_write(self, event: WriteEvent) -> None:
        """Refuse items that do not say which trajectory they belong to."""
        _ = self._known
        self._keys.check(event)

    def wrote(self, event: WriteEvent) -> None:
        """Items were written."""
        self._known.wrote(event)

    def removed(self, rows: Int64Array) -> None:
        """Rows have left."""
        self._known.removed(rows)

    def clear(self) -> None:
        """Every row has left."""
        if self._tracker is not None:
            self._tracker.clear()

    # -- drawing ------------------------------------------------------------------------------------------------------

    def may_draw(self, rows: Rows, least: int = 1) -> Answer:
        """Whether there are so many slices."""
        size = 0 if self._tracker is None else self._tracker.starts.size
        if size >= least:
            return True
        found = f"{size} of {least} slices" if least > 1 else "no slice"
        what = f"{self._length} items of one trajectory in a row" if self._strict else "items of one trajectory"
        return NotYet(f"{found} of {what} can be had of the {rows.size} items that are stored")

    def slices(self, firsts: Int64Array, info: dict[str, torch.Tensor] | None = None) -> Draw:
        """The slices that begin at some rows.

        Args:
            firsts: int64 ``[slices]``.
            info: what is said of each slice beside what this says.
        """
        episodes, length = self._known.episodes, self._length
        info = {} if info is None else info
        found = follow(episodes.next, firsts, length)
        if not self._strict:
            lengths = self._lengths(found)
            mask = np.arange(length) < lengths[:, None]
            if self._disjoint:
                found = np.where(mask, found, found[np.arange(len(found)), lengths - 1][:, None])
            info["lengths"], info["mask"] = torch.from_numpy(lengths), torch.from_numpy(mask)
        if self._burn_in:
            burn_in = np.zeros((len(firsts), length), np.bool_)
            burn_in[:, : self._burn_in] = True
            info["burn_in"] = torch.from_numpy(burn_in)
        info["is_start"] = torch.from_numpy((episodes.flags.take(firsts) & FIRST).view(np.bool_))
        return Draw(torch.from_numpy(found.reshape(-1)), info, shape=found.shape)

    def _lengths(self, found: Int64Array) -> Int64Array:
        """How many rows of each slice are no padding: int64 ``[slices]``."""
        goes_on: BoolArray = found[:, 1:] != found[:, :-1]
        if self._disjoint:
            goes_on &= (self._known.episodes.flags.take(found[:, 1:]) & MARK) == 0
        stops = np.append(~goes_on, np.ones((len(found), 1), np.bool_), axis=1)
        lengths: Int64Array = stops.argmax(axis=1) + 1
        return lengths

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Links between rows, the rows at which slices begin in the order of the set, and the settings."""
        tracker = self._tracker or self._made(Episodes(1), 1)
        return {
            "length": self._length,
            "strict_length": self._strict,
            "burn_in": self._burn_in,
            "episodes": tracker.episodes.state_dict(),
            "starts": torch.from_numpy(tracker.starts.rows),
        }

    def parsed(self, state: Any, name: str) -> tuple[int, Tracker | None]:
        """Length of slices and links out of a checkpoint, for ``take_over``. Changes nothing.

        Raises:
            CheckpointError: the state does not fit.
        """
        kinds: dict[str, type] = dict(length=int, strict_length=bool, burn_in=int, episodes=dict, starts=torch.Tensor)
        length, strict, burn_in, saved, starts = fields(state, name, **kinds)
        same(strict, self._strict, f"{name}: strict_length")
        same(burn_in, self._burn_in, f"{name}: burn_in")
        if length and self._length:
            same(length, self._length, f"{name}: the steps of a slice, with burn_in")
        elif 0 < length <= burn_in:
            raise CheckpointCorruptError(f"{name}: expected slices of more than {burn_in} steps, found {length}")
        episodes = Episodes.of(max(1, (length or self._length) - burn_in), saved, name)
        if not length and episodes.capacity:
            raise CheckpointCorruptError(f"{name}: expected the length of slices beside rows, found none")
        length = length or self._length
        if not length:
            return 0, None
        tracker = self._made(episodes, length)
        tracker.take_starts(starts, name)
        return length, tracker

    def take_over(self, parsed: tuple[int, Tracker | None]) -> None:
        """Go on with what was parsed."""
        self._length, self._tracker = parsed

    def verify(self, rows: Rows, name: str) -> None:
        """Refuse links of other rows than the valid ones."""
        tracker = self._tracker or self._made(Episodes(1), 1)
        tracker.verify(rows, name)
