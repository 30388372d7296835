"""Slices: pieces of trajectories, of the same length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from asyncbuf._plain.state import fields
from asyncbuf.errors import CheckpointCorruptError
from asyncbuf.sampler._row_set import NotedRowSet
from asyncbuf.sampler._slicer import Slicer
from asyncbuf.sampler.base import Sampler
from asyncbuf.sampler.without_replacement import SamplerWithoutReplacement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncbuf.batch import Draw
    from asyncbuf.rows import Answer, Rows, WriteEvent


class SliceSampler(Sampler):
    """Draws slices: items of one trajectory that follow each other, with replacement.

    Every leaf of a batch has shape ``[slices, steps, *item]``, and ``batch_size`` is the number of slices times steps.
    A slice may begin at every item from which on enough items are stored, and each such item is equally likely. So a
    slice never crosses the end of a trajectory, nor the place where the newest items meet the oldest ones, nor a place
    where items were removed. Both kinds of collecting are served: one trajectory after the other (``end_key``), and
    several environments whose items are written in turns (``trajectory_key`` as well)::

        sampler = SliceSampler(slice_len=16, end_key="done")
        buffer = ReplayBuffer(TensorStorage(1_000_000), sampler=sampler, batch_size=32 * 16)

    A draw takes the same time however much is stored: a write keeps account of where slices may begin.

    In ``batch.info``: ``is_start``, bool ``[slices]``, is true for a slice that begins with the first item of its
    trajectory. With ``burn_in``, ``burn_in`` is a bool mask ``[slices, steps]`` of those steps. Without
    ``strict_length``, ``lengths``, int64 ``[slices]``, and ``mask``, bool ``[slices, steps]``, tell items from padding.

    An item whose predecessor was not stored, or is not any more, may begin a slice, as any other. If the newest item of
    a trajectory is removed, those that follow it are a piece of their own.

    Args:
        slice_len: steps of a slice.
        num_slices: slices in a batch of the buffer's ``batch_size``, which says how long they are. A call with another
            batch size gets more or fewer slices of the same length. Exactly one of both is given.
        end_key: path of the field that is true for the last item of a trajectory, such as ``"done"``; or several such,
            as in ``("terminated", "truncated")``.
        trajectory_key: path of an integer field that tells trajectories apart; or environments, if there is an
            ``end_key`` as well. Without it, all items are taken for those of one environment.
        strict_length: leave out trajectories that are shorter than a slice. Otherwise each has one slice, from the
            first item on that is stored, which is padded by its last item.
        burn_in: steps ahead of ``slice_len`` for a recurrent network to warm up (Kapturowski et al., Recurrent
            Experience Replay in Distributed Reinforcement Learning, 2019). A slice then has ``burn_in + slice_len``
            steps, and those count for ``batch_size``, too.

    Raises:
        TypeError, ValueError: an argument is not of the kind or in the range that is expected.
    """

    trusted: bool = True
    counts_draws: bool = False

    def __init__(
        self,
        *,
        slice_len: int | None = None,
        num_slices: int | None = None,
        end_key: str | Sequence[str] | None = None,
        trajectory_key: str | None = None,
        strict_length: bool = True,
        burn_in: int = 0,
    ) -> None:
        self._slicer = Slicer(
            slice_len=slice_len,
            num_slices=num_slices,
            end_key=end_key,
            trajectory_key=trajectory_key,
            strict_length=strict_length,
            burn_in=burn_in,
        )
        self.columns: tuple[str, ...] = self._slicer.columns

    def check(self, capacity: int, batch_size: int) -> None:
        """Refuse a batch size that is not one of whole slices."""
        self._slicer.check(capacity, batch_size)

    @property
    def draw_unit(self) -> int:
        """The length of a slice: a batch size is a multiple of it."""
        return max(1, self._slicer.length)

    def check_write(self, event: WriteEvent) -> None:
        """Refuse items that do not say which trajectory they belong to."""
        self._slicer.check_write(event)

    def wrote(self, event: WriteEvent) -> None:
        """See where slices may begin now."""
        self._slicer.wrote(event)

    def removed(self, indices: torch.Tensor, rows: Rows) -> None:
        """See where slices may begin now."""
        self._slicer.removed(indices.numpy())

    def clear(self) -> None:
        """Forget all rows, and which trajectories were going on."""
        self._slicer.clear()

    def may_draw(self, rows: Rows, batch_size: int) -> Answer:
        """Not before there is a slice."""
        return self._slicer.may_draw(rows)

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        """Slices, each as likely as every other."""
        starts, count = self._slicer.starts, self._slicer.count(batch_size)
        places = torch.randint(starts.size, (count,), generator=generator, device=generator.device)
        return self._slicer.slices(starts.take(places.cpu().numpy()))

    def state_dict(self) -> dict[str, Any]:
        """Which items follow each other, and where slices may begin."""
        return self._slicer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the trajectories that were saved."""
        self._slicer.take_over(self._slicer.parsed(state, type(self).__name__))

    def verify(self, rows: Rows) -> None:
        """Refuse trajectories of other rows than the valid ones."""
        self._slicer.verify(rows, type(self).__name__)


class SliceSamplerWithoutReplacement(Sampler):
    """Draws every slice once per pass, where no item is in two slices.

    Trajectories are cut into slices one after the other, from their first item on: of a trajectory of 100 items, six
    slices of 16 in each pass, and with ``strict_length=False`` a last one of four. So a pass has every item once, but
    for those at the end of a trajectory that fill no slice, and those at the edge of what was overwritten or removed.
    (TorchRL's sampler of this name draws one slice of each trajectory per pass, and leaves out most of a long one.)

    As in ``SamplerWithoutReplacement``, a pass covers the slices that there were when its first batch was drawn;
    ``batch.epoch`` is its number, ``batch.last`` is true for its last batch, and ``buffer.epoch()`` iterates over it. A
    slice of which items are overwritten or removed leaves the pass.

    Shapes, ``batch.info`` and the other arguments are those of ``SliceSampler``. With ``burn_in`` no item is twice
    among the other steps of the slices of a pass; the first ``burn_in`` items of a trajectory are only ever such steps.

    Args:
        slice_len: steps of a slice.
        num_slices: slices in a batch of the buffer's ``batch_size``.
        end_key: path of the field that is true for the last item of a trajectory; or several such.
        trajectory_key: path of an integer field that tells trajectories or environments apart.
        strict_length: leave out what is shorter than a slice; otherwise it is padded.
        burn_in: steps ahead of ``slice_len``; not without ``strict_length``.
        drop_last: leave out the slices at the end of a pass that do not fill a batch.
        shuffle: a new random order for each pass; otherwise slices come in the order of their rows.

    Raises:
        TypeError, ValueError: an argument is not of the kind or in the range that is expected.
    """

    trusted: bool = True
    counts_draws: bool = False

    def __init__(
        self,
        *,
        slice_len: int | None = None,
        num_slices: int | None = None,
        end_key: str | Sequence[str] | None = None,
        trajectory_key: str | None = None,
        strict_length: bool = True,
        burn_in: int = 0,
        drop_last: bool = False,
        shuffle: bool = True,
    ) -> None:
        self._slicer = Slicer(
            slice_len=slice_len,
            num_slices=num_slices,
            end_key=end_key,
            trajectory_key=trajectory_key,
            strict_length=strict_length,
            burn_in=burn_in,
            disjoint=True,
            make_starts=NotedRowSet,
        )
        self._drop_last = drop_last
        # The pass goes over the rows at which slices begin, as if they were a table.
        self._pass = SamplerWithoutReplacement(drop_last=drop_last, shuffle=shuffle)
        self.columns: tuple[str, ...] = self._slicer.columns

    def _begins(self, rows: Rows) -> Rows:
        """The rows at which slices begin."""
        starts = self._slicer.starts
        return rows._replace(size=starts.size, valid=starts)

    def check(self, capacity: int, batch_size: int) -> None:
        """Refuse a batch size that is not one of whole slices, or that no pass can fill."""
        self._slicer.check(capacity, batch_size)
        if self._drop_last and batch_size > capacity:
            raise ValueError(
                f"batch_size: expected at most the capacity {capacity}, because of drop_last; found {batch_size}"
            )

    @property
    def draw_unit(self) -> int:
        """The length of a slice: a batch size is a multiple of it."""
        return max(1, self._slicer.length)

    def check_write(self, event: WriteEvent) -> None:
        """Refuse items that do not say which trajectory they belong to."""
        self._slicer.check_write(event)

    def wrote(self, event: WriteEvent) -> None:
        """See where slices begin now; those that are gone leave the pass."""
        self._slicer.wrote(event)
        self._see_what_left(event.table)

    def removed(self, indices: torch.Tensor, rows: Rows) -> None:
        """See where slices begin now; those that are gone leave the pass."""
        self._slicer.removed(indices.numpy())
        self._see_what_left(rows)

    def _see_what_left(self, rows: Rows) -> None:
        starts = self._slicer.starts
        assert isinstance(starts, NotedRowSet)
        _, discarded = starts.noted()
        if len(discarded):
            self._pass.removed(torch.from_numpy(discarded), self._begins(rows))

    def clear(self) -> None:
        """Forget all rows, which trajectories were going on, and the pass."""
        self._slicer.clear()
        self._pass.clear()

    def may_draw(self, rows: Rows, batch_size: int) -> Answer:
        """Not before there is a slice; with ``drop_last``, not before there are those of a batch."""
        return self._slicer.may_draw(rows, self._slicer.count(batch_size) if self._drop_last else 1)

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        """The next slices of the pass; the last batch of a pass may have fewer, unless ``drop_last``."""
        drawn = self._pass.draw(self._begins(rows), self._slicer.count(batch_size), generator)
        return self._slicer.slices(drawn.indices.numpy())._replace(epoch=drawn.epoch, last=drawn.last)

    @property
    def epoch(self) -> int:
        """Number of the pass that the next draw belongs to."""
        return self._pass.epoch

    def leaves_out(self, batch_size: int) -> bool:
        """With ``drop_last``: whether some slices are left, but fewer than those of a batch."""
        return self._pass.leaves_out(self._slicer.count(batch_size))

    def end_epoch(self) -> None:
        """End the pass where it is."""
        self._pass.end_epoch()

    @property
    def between_epochs(self) -> bool:
        """Whether the next draw begins a pass."""
        return self._pass.between_epochs

    def state_dict(self) -> dict[str, Any]:
        """Which items follow each other, where slices begin, and where the pass is."""
        return {"slices": self._slicer.state_dict(), "pass": self._pass.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on within the pass that was saved."""
        name = type(self).__name__
        kinds: dict[str, type] = {"slices": dict, "pass": dict}
        slices, passed = fields(state, name, **kinds)
        parsed = self._slicer.parsed(slices, name)
        self._pass.load_state_dict(passed)
        self._slicer.take_over(parsed)

    def verify(self, rows: Rows) -> None:
        """Refuse trajectories of other rows than the valid ones, and a pass over rows that begin no slices."""
        name = type(self).__name__
        self._slicer.verify(rows, name)
        if self._slicer.is_fixed:
            self._pass.verify(self._begins(rows))
        elif not self._pass.between_epochs:
            raise CheckpointCorruptError(f"{name}: expected the length of slices beside a pass, found none")
