"""n-step returns of drawn rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._plain.state import fields
from asyncbuf._runtime.arguments import count, field_path, field_paths, fraction
from asyncbuf.sampler._join import Column, Join, JoinedRows, put, taken
from asyncbuf.sampler._spans import steps_on

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncbuf.batch import Draw
    from asyncbuf.rows import BoolArray, Int64Array, Rows, WriteEvent
    from asyncbuf.sampler._spans import Links


class NStep(Join):
    """Rewards of several steps: what a one-step item becomes when it is drawn, for a ``JoinedSampler``.

    For an item at step *t*, with *m* as the effective number of steps, the batch has

    - ``reward``: ``r[t] + gamma * r[t+1] + ... + gamma**(m-1) * r[t+m-1]``, in the dtype of the reward;
    - ``next_obs`` (``next_keys``), ``terminated`` and the fields of ``keys``: those of the item at step *t+m-1*;
    - everything else as it was stored at step *t*;
    - ``info["steps"]``: *m*, int64 ``[batch]``;
    - ``info["return"]``: the same as ``reward``;
    - ``info["discount"]``: ``gamma**m``, or 0 where the item at step *t+m-1* is terminated: float32 ``[batch]``.

    So a target is ``batch["reward"] + batch.info["discount"] * value(batch["next_obs"])``, as of Sutton and Barto,
    Reinforcement Learning (2018), equation 7.4.

    *m* is *n*, or less: up to the item that ends the trajectory (terminated or truncated, and a truncated one still has
    a value of its next observation), up to the newest item of a trajectory that goes on, and up to an item that was
    removed. It never reaches over the place where the newest items of a ring meet the oldest ones. As more items
    come, later draws of the same row have more steps.

    Args:
        n: most steps, at least 1.
        gamma: discount of one step, from 0 to 1.
        reward_key: path of the reward, a number or tensor.
        terminated_key: path of the field that is true for an item after which there is no value; None if there is
            none. A mere time limit does not count. It need not be among the ``end_key`` of the sampler.
        next_keys: paths of what comes after the step, such as ``"next_obs"``; empty if items have no such field, as
            with a ``FrameStack`` that makes it.
        keys: paths of more fields that the batch has of the last step, such as ``"truncated"``.

    Attributes:
        n: most steps.
        last_keys: paths of all fields that the batch has of the last step.

    Raises:
        TypeError, ValueError: an argument is not of the kind or in the range that is expected.
    """

    def __init__(
        self,
        n: int,
        gamma: float,
        *,
        reward_key: str = "reward",
        terminated_key: str | None = "terminated",
        next_keys: str | Sequence[str] = ("next_obs",),
        keys: str | Sequence[str] = (),
    ) -> None:
        self.n: int = count(n, "n", 1, example=3)
        self._gamma = fraction(gamma, "gamma", example=0.99)
        self._reward = Column(field_path(reward_key, "reward_key", example="reward"))
        ends = None if terminated_key is None else field_path(terminated_key, "terminated_key", example="terminated")
        self._terminated = None if ends is None else Column(ends)
        last = [
            *field_paths(next_keys, "next_keys", example="next_obs"),
            *field_paths(keys, "keys", example="truncated"),
        ]
        self.last_keys: tuple[str, ...] = tuple(dict.fromkeys([*last, *(() if ends is None else (ends,))]))
        powers = self._gamma ** np.arange(self.n + 1)  # float64
        self._discounts = powers.astype(np.float32)
        self._factors = powers[1 : self.n, None]
        # The steps beyond have no weight at all, and an infinite reward there is no NaN.
        self._most = 1 + int(np.count_nonzero(self._factors))
        self._columns = [self._reward, *(() if self._terminated is None else (self._terminated,))]
        self.columns: tuple[str, ...] = tuple(column.path for column in self._columns)

    @property
    def reward_key(self) -> str:
        """Path of the reward."""
        return self._reward.path

    @property
    def terminated_key(self) -> str | None:
        """Path of the field that is true for an item after which there is no value; None if there is none."""
        return None if self._terminated is None else self._terminated.path

    def follows(self, joins: Sequence[Join]) -> None:
        """Refuse joins that must come after this one."""
        names = [type(join).__name__ for join in joins]
        if "FrameStack" in names:
            raise ValueError("joins: expected NStep ahead of FrameStack, whose frames come after its last step")
        if "Hindsight" in names:
            raise ValueError("NStep: expected no Hindsight beside it, whose rewards are those of one step; found one")

    def check_write(self, event: WriteEvent) -> None:
        """Refuse rewards of another shape than those before."""
        for column in self._columns:
            column.check(event)

    def wrote(self, event: WriteEvent) -> None:
        """Note the rewards."""
        for column in self._columns:
            column.wrote(event)

    def draw(self, links: Links, drawn: JoinedRows, generator: torch.Generator) -> None:
        """Add up rewards, and join the last rows."""
        way = steps_on(links.episodes.next, drawn.rows, self.n)
        drawn.last = way[-1]
        ended = None if self._terminated is None else self._terminated.take(drawn.last)
        total, steps, discounts = self.computed(way, self._reward.take(way), ended)
        drawn.info["steps"] = torch.from_numpy(steps)
        drawn.info["discount"] = torch.from_numpy(discounts)
        drawn.info["return"] = torch.from_numpy(total)
        if self.last_keys:
            drawn.joins["n_step"] = drawn.last

    def computed(
        self, way: Int64Array, rewards: np.ndarray[Any, Any], ended: np.ndarray[Any, Any] | None
    ) -> tuple[np.ndarray[Any, Any], Int64Array, np.ndarray[Any, np.dtype[np.float32]]]:
        """Add up rewards.

        Args:
            way: the rows or positions of the steps, int64 ``[n, items]``; behind the last step of a trajectory, that is
                repeated.
            rewards: those of the steps, ``[n, items, ...]``.
            ended: whether the last step of each is terminated, ``[items, ...]``; None if none is.

        Returns:
            The sums ``[items, ...]``, in the dtype of the rewards, or float32 where those are no floats; numbers of
            steps, int64 ``[items]``; discounts, float32 ``[items]``, with an axis of 1 for each axis of a reward.
        """
        total = rewards[0]
        if self.n == 1:
            steps = np.ones(way.shape[1], np.int64)
        else:
            goes_on = way[1:] != way[:-1]  # after the last item, the way stays where it is
            steps = np.add.reduce(goes_on, axis=0, dtype=np.int64)
            steps += 1
            factors, counts = self._factors[: self._most - 1], goes_on[: self._most - 1]
            if axes := (1,) * (rewards.ndim - 2):
                factors, counts = factors.reshape(-1, 1, *axes), counts.reshape(*counts.shape, *axes)
            # An infinite reward of a step that does not count is no NaN.
            more = np.where(counts, rewards[1 : self._most] * factors, 0.0)
            total = np.add.reduce(more, axis=0) + total
        discounts = self._discounts.take(steps)
        if ended is not None:
            discounts[ended.reshape(len(ended), -1).any(axis=1) if ended.ndim > 1 else ended.astype(np.bool_)] = 0.0
        # With rewards [items, 1], discounts [items] would make targets [items, items].
        discounts = discounts.reshape(-1, *(1,) * (rewards.ndim - 2))
        kind = rewards.dtype if rewards.dtype.kind == "f" else np.dtype(np.float32)
        return total.astype(kind, copy=self.n == 1), steps, discounts

    def state_dict(self, is_stored: BoolArray) -> dict[str, Any]:
        """The rewards, and which items are terminated."""
        return {column.path: column.state(is_stored) for column in self._columns}

    def parsed(self, state: Any, name: str) -> list[Any]:
        """The columns of a checkpoint."""
        found = fields(state, name, **{column.path: dict for column in self._columns})
        return [column.parsed(saved, name) for column, saved in zip(self._columns, found, strict=True)]

    def take_over(self, parsed: list[Any]) -> None:
        """Go on with the rewards that were saved."""
        for column, values in zip(self._columns, parsed, strict=True):
            column.values = values

    def verify(self, stop: int, rows: Rows, name: str) -> None:
        """Refuse rewards of other rows than there are."""
        for column in self._columns:
            column.verify(stop, rows, name)

    def combine(self, draw: Draw, data: Any, joined: Mapping[str, Any]) -> Any:
        """Put the returns, and what belongs to the last step, in the places of the first."""
        for key in self.last_keys:
            put(data, key, taken(joined["n_step"], key))
        returns: torch.Tensor = draw.info["return"]
        kind = taken(data, self._reward.path).dtype
        put(data, self._reward.path, returns.to(kind if kind.is_floating_point else returns.dtype, copy=True))
        return data
