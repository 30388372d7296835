"""A sampler whose batches have more than the rows that were drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from asyncbuf._plain.state import fields
from asyncbuf._runtime.arguments import instance_of, shown
from asyncbuf.errors import CheckpointCorruptError, SchemaError
from asyncbuf.sampler._episodes import Episodes
from asyncbuf.sampler._join import Join, JoinedRows
from asyncbuf.sampler._row_set import RowSet
from asyncbuf.sampler._spans import Links, NoStarts, Spans
from asyncbuf.sampler._tracker import ItemKeys, Tracker
from asyncbuf.sampler.base import Sampler

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncbuf.batch import Draw
    from asyncbuf.rows import Answer, Rows, WriteEvent

_OWN_HOOKS = {"check_write", "wrote", "removed", "combine", "state_dict", "load_state_dict"}


class JoinedSampler(Sampler):
    """Draws as another sampler does, and joins to each row what belongs to it from other rows of its trajectory.

    ``NStep`` makes n-step returns, ``FrameStack`` stacks of frames, ``Hindsight`` other goals::

        sampler = JoinedSampler(PrioritizedSampler(), NStep(3, gamma=0.99), end_key=("terminated", "truncated"))
        buffer = ReplayBuffer(TensorStorage(1_000_000), sampler=sampler, batch_size=256)

    All rows of a batch are read at one point of the history. Which items follow each other is kept up to date as they
    are written, also where several environments take turns (``trajectory_key``): a draw takes the same time however
    much is stored. Items are dicts, nested or not, or TensorDicts.

    ``update_priority``, passes, weights and all else go to the other sampler. With one that draws slices, everything
    below has the axes ``[slices, steps]`` in place of ``[batch]``.

    Args:
        sampler: which rows are drawn.
        *joins: what is joined to them, in this order: at least one.
        end_key: path of the field that is true for the last item of a trajectory, such as ``"done"``; or several, such
            as ``("terminated", "truncated")``.
        trajectory_key: path of an integer field that tells trajectories apart; or environments, if there is an
            ``end_key`` as well. Without it, all items are taken for those of one environment.

    Raises:
        TypeError, ValueError: an argument is not of the kind or in the range that is expected.
    """

    def __init__(
        self,
        sampler: Sampler,
        *joins: Join,
        end_key: str | Sequence[str] | None = None,
        trajectory_key: str | None = None,
    ) -> None:
        self._sampler: Sampler = instance_of(sampler, Sampler, "sampler", example="RandomSampler()")
        if "combine" in sampler.hooks:
            raise TypeError(
                f"sampler: expected one without joins of its own, found a {type(sampler).__name__}: give all joins to "
                "one JoinedSampler"
            )
        if not joins:
            raise TypeError("joins: expected at least one, such as NStep(3, 0.99), found none")
        for join in joins:
            if not isinstance(join, Join):
                raise TypeError(f"joins: expected NStep, FrameStack or Hindsight, found {shown(join)}")
        kinds = [type(join) for join in joins]
        if len(set(kinds)) < len(kinds):
            raise ValueError(f"joins: expected each kind once, found {[kind.__name__ for kind in kinds]}")
        for number, join in enumerate(joins):
            join.follows(joins[:number])
        self._joins = joins
        self._keys = ItemKeys(end_key, trajectory_key)
        paths = [*sampler.columns, *self._keys.columns, *(path for join in joins for path in join.columns)]
        self.columns: tuple[str, ...] = tuple(dict.fromkeys(paths))
        self.hooks: frozenset[str] = sampler.hooks | _OWN_HOOKS
        self.trusted: bool = sampler.trusted
        self.counts_draws: bool = sampler.counts_draws
        self.combines_at_once: bool = all(join.is_quick for join in joins)
        self._tracker, self._links = self._made(Episodes(1))

    def _made(self, episodes: Episodes) -> tuple[Tracker, Links]:
        needs_spans = any(join.needs_spans for join in self._joins)
        spans = Spans(episodes) if needs_spans else None
        rule = NoStarts(episodes) if spans is None else spans
        return Tracker(self._keys, episodes, rule, RowSet(0)), Links(episodes, spans)

    @property
    def sampler(self) -> Sampler:
        """The sampler that decides which rows are drawn."""
        return self._sampler

    # -- what happens to rows -----------------------------------------------------------------------------------------

    def use_tables(self, tables: Mapping[str, range]) -> None:
        """Tell the sampler."""
        self._sampler.use_tables(tables)

    def check(self, capacity: int, batch_size: int) -> None:
        """Refuse what can never be drawn."""
        self._sampler.check(capacity, batch_size)

    def check_write(self, event: WriteEvent) -> None:
        """Refuse items that lack what the joins need."""
        self._keys.check(event)
        for join in self._joins:
            join.check_write(event)
        if "check_write" in self._sampler.hooks:
            self._sampler.check_write(event)

    def wrote(self, event: WriteEvent) -> None:
        """See which items follow each other now."""
        self._tracker.wrote(event)
        for join in self._joins:
            join.wrote(event)
        if "wrote" in self._sampler.hooks:
            self._sampler.wrote(event)

    def written(self, indices: torch.Tensor, rows: Rows) -> None:
        """Tell the sampler."""
        self._sampler.written(indices, rows)

    def removed(self, indices: torch.Tensor, rows: Rows) -> None:
        """See which items follow each other now."""
        self._tracker.removed(indices.numpy())
        if "removed" in self._sampler.hooks:
            self._sampler.removed(indices, rows)

    def clear(self) -> None:
        """Forget all rows, and which trajectories were going on."""
        self._tracker.clear()
        self._sampler.clear()

    def group_priority(self, indices: Any, priority: Any) -> tuple[Any, Any]:
        """As the sampler says."""
        return self._sampler.group_priority(indices, priority)

    def update_priority(self, indices: torch.Tensor, priority: torch.Tensor, rows: Rows) -> None:
        """Tell the sampler."""
        self._sampler.update_priority(indices, priority, rows)

    # -- drawing ------------------------------------------------------------------------------------------------------

    def may_draw(self, rows: Rows, batch_size: int) -> Answer:
        """Whether the sampler can draw."""
        return self._sampler.may_draw(rows, batch_size)

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        """The rows that the sampler draws, and those that belong to them."""
        draw = self._sampler.draw(rows, batch_size, generator)
        drawn = JoinedRows(draw.indices.numpy())
        for join in self._joins:
            join.draw(self._links, drawn, generator)
        joins = {name: torch.from_numpy(indices) for name, indices in drawn.joins.items()}
        info = {**draw.info, **drawn.info}
        if draw.shape is not None:
            joins = {name: indices.reshape(*draw.shape, *indices.shape[1:]) for name, indices in joins.items()}
            info |= {name: value.reshape(*draw.shape, *value.shape[1:]) for name, value in drawn.info.items()}
        return draw._replace(info=info, joins=joins)

    def combine(self, draw: Draw, data: Any, joined: Mapping[str, Any]) -> Any:
        """One tree of the batch and what was joined to it."""
        if not hasattr(data, "keys"):
            raise SchemaError(f"JoinedSampler: expected items that are dicts, found a {type(data).__name__}")
        data = data.copy()
        for join in self._joins:
            data = join.combine(draw, data, joined)
        return data

    def handed_over(self, draw: Draw) -> torch.Tensor | None:
        """Tell the sampler."""
        return self._sampler.handed_over(draw)

    def dropped(self, draw: Draw) -> None:
        """Tell the sampler."""
        self._sampler.dropped(draw)

    def leaving(self) -> torch.Tensor | None:
        """As the sampler says."""
        return self._sampler.leaving()

    def finished(self) -> None:
        """Tell the sampler."""
        self._sampler.finished()

    @property
    def draw_unit(self) -> int:
        """As the sampler says."""
        return self._sampler.draw_unit

    def end_epoch(self) -> None:
        """Tell the sampler."""
        self._sampler.end_epoch()

    @property
    def unread(self) -> int | None:
        """As the sampler says."""
        return self._sampler.unread

    @property
    def epoch(self) -> int | None:
        """Number of the pass of the sampler."""
        return self._sampler.epoch

    def leaves_out(self, batch_size: int) -> bool:
        """As the sampler says."""
        return self._sampler.leaves_out(batch_size)

    @property
    def between_epochs(self) -> bool:
        """As the sampler says."""
        return self._sampler.between_epochs

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State of the sampler, which items follow each other, and what the joins know of them."""
        episodes = self._tracker.episodes
        is_stored = episodes.numbers[: episodes.stop] > 0
        return {
            "sampler": self._sampler.state_dict(),
            "episodes": episodes.state_dict(),
            "joins": [join.state_dict(is_stored) for join in self._joins],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the trajectories that were saved."""
        name = type(self).__name__
        kinds: dict[str, type] = dict(sampler=dict, episodes=dict, joins=list)
        sampler, episodes, joins = fields(state, name, **kinds)
        if len(joins) != len(self._joins):
            raise CheckpointCorruptError(f"{name}: expected {len(self._joins)} joins, found {len(joins)}")
        parsed = [join.parsed(saved, name) for join, saved in zip(self._joins, joins, strict=True)]
        made = self._made(Episodes.of(1, episodes, name))
        made[0].take_starts(torch.empty(0, dtype=torch.int64), name)
        self._sampler.load_state_dict(sampler)
        self._tracker, self._links = made
        for join, found in zip(self._joins, parsed, strict=True):
            join.take_over(found)

    def verify(self, rows: Rows) -> None:
        """Refuse trajectories of other rows than the valid ones."""
        name = type(self).__name__
        for join in self._joins:
            join.verify(self._tracker.episodes.stop, rows, name)
        self._tracker.verify(rows, name)
        self._sampler.verify(rows)
