"""Hindsight: goals that were reached later, in place of those that were not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._runtime.arguments import field_path, field_paths, fraction, shown
from asyncbuf.errors import SchemaError
from asyncbuf.sampler._join import Join, JoinedRows, put, taken
from asyncbuf.sampler.frame_stack import FrameStack
from asyncbuf.sampler.n_step import NStep

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from asyncbuf.batch import Draw
    from asyncbuf.rows import Int64Array
    from asyncbuf.sampler._spans import Links, Spans

_JOIN = "hindsight"
_STRATEGIES = ("future", "final", "episode")


class Hindsight(Join):
    """Relabels goals, for a ``JoinedSampler``: as if what was reached had been wanted.

    Hindsight experience replay of Andrychowicz et al. (2017). A share of the drawn rows gets another goal, namely the
    achieved goal of an item of the same trajectory, and the reward that the item has with that goal::

        def reward_fn(achieved, goal):
            return env.unwrapped.compute_reward(achieved, goal, {})

        sampler = JoinedSampler(RandomSampler(), Hindsight(reward_fn), end_key=("terminated", "truncated"))

    The fields are named as in a goal environment of gymnasium, of which ``obs`` and ``next_obs`` are stored as they
    are. ``info["relabelled"]``, bool ``[batch]``, tells which rows were changed. Only stored items of a trajectory
    count: of one that goes on, those so far; never one across a place where items were removed or overwritten.

    It does not go with ``NStep``, whose rewards of later steps belong to the old goal.

    Args:
        reward_fn: ``reward_fn(achieved, goal)``, both ``[rows, *goal]``: the rewards, ``[rows]``, as a tensor, array or
            list. It runs where transforms run, and must not draw random numbers.
        strategy: where new goals come from: ``"future"``, a random item from the drawn one on; ``"final"``, the last
            item; ``"episode"``, any item of the trajectory.
        share: which share of the rows is relabelled, from 0 to 1: each row with this chance. 0.8 is four relabelled
            ones for each other one.
        goal_key: paths of the goal, each of which is replaced.
        achieved_key: path of what was achieved by the step.
        reward_key: path of the reward.

    Raises:
        TypeError, ValueError: an argument is not of the kind or in the range that is expected.
    """

    is_quick: bool = False
    needs_spans: bool = True

    def __init__(
        self,
        reward_fn: Callable[[torch.Tensor, torch.Tensor], Any],
        *,
        strategy: str = "future",
        share: float = 0.8,
        goal_key: str | Sequence[str] = ("obs/desired_goal", "next_obs/desired_goal"),
        achieved_key: str = "next_obs/achieved_goal",
        reward_key: str = "reward",
    ) -> None:
        if not callable(reward_fn):
            raise TypeError(f"reward_fn: expected a function of achieved and wanted goals, found {shown(reward_fn)}")
        if strategy not in _STRATEGIES:
            raise ValueError(f"strategy: expected one of {list(_STRATEGIES)}, found {shown(strategy)}")
        self._reward_fn = reward_fn
        self._strategy = strategy
        self._share = fraction(share, "share", example=0.8)
        self._goal_keys = field_paths(goal_key, "goal_key", example="obs/desired_goal")
        self._achieved_key = field_path(achieved_key, "achieved_key", example="next_obs/achieved_goal")
        self._reward_key = field_path(reward_key, "reward_key", example="reward")

    def follows(self, joins: Sequence[Join]) -> None:
        """Refuse n-step returns, whose rewards would belong to the old goal."""
        if any(isinstance(join, FrameStack) for join in joins):
            raise ValueError("joins: expected Hindsight ahead of FrameStack, whose frames are no goals")
        if any(isinstance(join, NStep) for join in joins):
            raise ValueError("Hindsight: expected no NStep beside it, whose rewards belong to the old goals; found one")

    def draw(self, links: Links, drawn: JoinedRows, generator: torch.Generator) -> None:
        """Choose rows and the items whose achieved goals become theirs."""
        spans = links.spans
        assert spans is not None
        rows = drawn.rows
        chances = torch.rand(2, len(rows), dtype=torch.float64, generator=generator, device=generator.device)
        chance, place = chances.cpu().numpy()
        relabelled = chance < self._share
        others = np.flatnonzero(relabelled)
        sources = rows.copy()
        sources[others] = self._sources(spans, rows[others], place[others])
        drawn.joins[_JOIN] = sources
        drawn.info["relabelled"] = torch.from_numpy(relabelled)

    def _sources(self, spans: Spans, rows: Int64Array, place: Any) -> Int64Array:
        after = spans.after(rows)
        if self._strategy == "final":
            return spans.moved(rows, after)
        before = spans.before(rows) if self._strategy == "episode" else 0
        count = before + after + 1
        steps = np.minimum((place * count).astype(np.int64), count - 1) - before
        return spans.moved(rows, steps)

    def combine(self, draw: Draw, data: Any, joined: Mapping[str, Any]) -> Any:
        """Replace goals and rewards."""
        relabelled: torch.Tensor = draw.info["relabelled"]
        if not relabelled.any():
            return data
        goals = taken(joined[_JOIN], self._achieved_key)[relabelled]
        for key in self._goal_keys:
            found = taken(data, key).clone()
            if found.shape[relabelled.ndim :] != goals.shape[1:]:
                raise SchemaError(
                    f"{key}: expected goals of shape {list(goals.shape[1:])}, as in {self._achieved_key}, found "
                    f"{list(found.shape[relabelled.ndim :])}"
                )
            found[relabelled] = goals.to(found.dtype)
            put(data, key, found)
        rewards = taken(data, self._reward_key).clone()
        values = _rewards(self._reward_fn(taken(data, self._achieved_key)[relabelled], goals))
        if values.numel() != len(goals):
            raise ValueError(f"reward_fn: expected {len(goals)} rewards, found those of shape {list(values.shape)}")
        rewards[relabelled] = values.to(rewards.dtype).reshape(rewards[relabelled].shape)
        put(data, self._reward_key, rewards)
        return data


def _rewards(values: Any) -> torch.Tensor:
    """What a reward function returned, as a tensor.

    Raises:
        TypeError: it is something else than numbers.
    """
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"reward_fn: expected rewards [rows], found {shown(values)}") from error
