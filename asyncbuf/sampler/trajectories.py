"""Whole trajectories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._plain.state import fields, same
from asyncbuf._runtime.arguments import count, instance_of
from asyncbuf.batch import Draw
from asyncbuf.rows import NotYet
from asyncbuf.sampler._episodes import Episodes, follow
from asyncbuf.sampler._row_set import RowSet
from asyncbuf.sampler._tracker import ItemKeys, Tracker
from asyncbuf.sampler._windows import Whole
from asyncbuf.sampler.base import Sampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncbuf.rows import Answer, Rows, WriteEvent


class TrajectorySampler(Sampler):
    """Draws whole trajectories, each as likely as every other, with replacement.

    Those that are stored from their first item to the one that ends them, and have at most ``max_len`` items. A batch
    has ``batch_size / max_len`` of them, so that it never has more than ``batch_size`` rows::

        sampler = TrajectorySampler(200, end_key=("terminated", "truncated"))
        buffer = ReplayBuffer(TensorStorage(100_000), sampler=sampler, batch_size=32 * 200)

    With ``padded``, every leaf of a batch has shape ``[trajectories, steps, *item]``, with as many steps as the longest
    one of the batch has; shorter ones are padded by their last item. ``batch.info["lengths"]``, int64
    ``[trajectories]``, and ``batch.info["mask"]``, bool ``[trajectories, steps]``, tell items from padding. Otherwise
    leaves have shape ``[rows, *item]``, one trajectory after the other, and ``batch.lengths`` has their lengths.

    A trajectory of which the first items were overwritten, or any was removed, is not drawn any more.

    Args:
        max_len: how many items a trajectory may have. Longer ones are left out.
        end_key: path of the field that is true for the last item of a trajectory, such as ``"done"``; or several such.
        trajectory_key: path of an integer field that tells trajectories or environments apart, if several take turns.
        padded: whether trajectories are padded to the same length.

    Raises:
        TypeError, ValueError: an argument is not of the kind or in the range that is expected.
    """

    trusted: bool = True
    counts_draws: bool = False

    def __init__(
        self,
        max_len: int,
        *,
        end_key: str | Sequence[str],
        trajectory_key: str | None = None,
        padded: bool = True,
    ) -> None:
        self._longest = count(max_len, "max_len", 1, example=200)
        self._keys = ItemKeys(end_key, trajectory_key)
        if not self._keys.tells_ends:
            raise ValueError("end_key: expected the field that tells where a trajectory ends, found none")
        self._padded: bool = instance_of(padded, bool, "padded", example="True")
        self.columns: tuple[str, ...] = self._keys.columns
        self._tracker, self._whole = self._made(Episodes(1))

    @property
    def padded(self) -> bool:
        """Whether trajectories are padded to the same length."""
        return self._padded

    @property
    def draw_unit(self) -> int:
        """The largest number of items of a trajectory: a batch size is a multiple of it."""
        return self._longest

    def _made(self, episodes: Episodes) -> tuple[Tracker, Whole]:
        starts = RowSet(episodes.capacity)
        whole = Whole(episodes, starts, self._longest)
        return Tracker(self._keys, episodes, whole, starts), whole

    def check(self, capacity: int, batch_size: int) -> None:
        """Refuse a batch size that does not say how many trajectories there are in a batch."""
        if batch_size % self._longest:
            raise ValueError(
                f"batch_size: expected a multiple of the {self._longest} items that a trajectory may have, "
                f"found {batch_size}"
            )

    def check_write(self, event: WriteEvent) -> None:
        """Refuse items that do not say which trajectory they belong to."""
        self._keys.check(event)

    def wrote(self, event: WriteEvent) -> None:
        """See which trajectories are whole now."""
        self._tracker.wrote(event)

    def removed(self, indices: torch.Tensor, rows: Rows) -> None:
        """See which trajectories are whole now."""
        self._tracker.removed(indices.numpy())

    def clear(self) -> None:
        """Forget all rows, and which trajectories were going on."""
        self._tracker.clear()

    def may_draw(self, rows: Rows, batch_size: int) -> Answer:
        """Not before there is a whole trajectory."""
        if self._tracker.starts.size:
            return True
        return NotYet(
            f"none of the trajectories of the {rows.size} items that are stored is whole, with at most {self._longest}"
        )

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        """Whole trajectories."""
        starts, trajectories = self._tracker.starts, batch_size // self._longest
        places = torch.randint(starts.size, (trajectories,), generator=generator, device=generator.device)
        heads = starts.take(places.cpu().numpy())
        lengths = self._whole.lengths(heads)
        found = follow(self._tracker.episodes.next, heads, int(lengths.max()))
        mask = np.arange(found.shape[1]) < lengths[:, None]
        if not self._padded:
            return Draw(torch.from_numpy(found[mask]), lengths=torch.from_numpy(lengths))
        info = {"lengths": torch.from_numpy(lengths), "mask": torch.from_numpy(mask)}
        return Draw(torch.from_numpy(found.reshape(-1)), info, shape=found.shape)

    def state_dict(self) -> dict[str, Any]:
        """Which items follow each other, and where whole trajectories begin."""
        return {
            "max_len": self._longest,
            "padded": self._padded,
            "episodes": self._tracker.episodes.state_dict(),
            "starts": torch.from_numpy(self._tracker.starts.rows),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the trajectories that were saved."""
        name = type(self).__name__
        kinds: dict[str, type] = dict(max_len=int, padded=bool, episodes=dict, starts=torch.Tensor)
        longest, padded, episodes, starts = fields(state, name, **kinds)
        same(longest, self._longest, f"{name}: max_len")
        same(padded, self._padded, f"{name}: padded")
        made = self._made(Episodes.of(1, episodes, name))
        made[0].take_starts(starts, name)
        self._tracker, self._whole = made

    def verify(self, rows: Rows) -> None:
        """Refuse trajectories of other rows than the valid ones."""
        self._tracker.verify(rows, type(self).__name__)
