"""Stacks of frames, made of single ones when they are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._runtime.arguments import count, field_path, shown
from asyncbuf.errors import SchemaError
from asyncbuf.sampler._join import Join, JoinedRows, put, taken
from asyncbuf.sampler._spans import steps_on

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncbuf.batch import Draw
    from asyncbuf.rows import Int64Array
    from asyncbuf.sampler._spans import Links

_OBS, _NEXT = "frames", "next_frames"


class FrameStack(Join):
    """The last frames of each drawn item, for a ``JoinedSampler``. Each frame is stored once, and not ``k`` times.

    Items have one frame each. In the batch, the field ``key`` has the ``k`` last frames of the trajectory, oldest
    first: ``[batch, k, *frame]``. At the beginning of a trajectory, and where earlier frames were overwritten or
    removed, there are fewer: the oldest one fills the rest, or zeros do. A stack never reaches into another trajectory.

    With ``next_key``, the batch has the ``k`` frames after the step, too (with ``NStep`` before this one, after its
    last step). If items have a field of that name, it is the newest of these frames. If not, that is the frame of the
    following item, and items need not store each frame twice. After the last item of a trajectory there is no such
    item, nor after the newest one: then the frame of the item itself stands in for it, and ``info["has_next"]``, bool
    ``[batch]``, is false. After a terminated item nothing depends on it. After a truncated one a value would, so store
    the next frame (``next_key`` as a field of items), or leave those rows out of the loss.

    Args:
        k: number of frames, from 1.
        key: path of the frame, a tensor of any shape.
        next_key: path of the frames after the step in the batch; None for none.
        is_next_stored: whether items have the field ``next_key``.
        pad: whether the oldest frame (``"first"``) or zeros (``"zero"``) fill a stack. With zeros,
            ``info["frames_mask"]`` and ``info["next_frames_mask"]``, bool ``[batch, k]``, tell frames from zeros.

    Raises:
        TypeError, ValueError: an argument is not of the kind or in the range that is expected.
    """

    def __init__(
        self,
        k: int,
        key: str = "obs",
        *,
        next_key: str | None = None,
        is_next_stored: bool = False,
        pad: str = "first",
    ) -> None:
        self._k = count(k, "k", 1, example=4)
        self._key = field_path(key, "key", example="obs")
        self._next_key = None if next_key is None else field_path(next_key, "next_key", example="next_obs")
        if self._next_key == self._key:
            raise ValueError(f"next_key: expected another path than that of the frame, found {shown(next_key)}")
        if not isinstance(is_next_stored, bool):
            raise TypeError(f"is_next_stored: expected a bool, found {shown(is_next_stored)}")
        if is_next_stored and next_key is None:
            raise ValueError("next_key: expected the path of the stored frame, because of is_next_stored; found None")
        self._is_next_stored = is_next_stored
        if pad not in ("first", "zero"):
            raise ValueError(f"pad: expected 'first' or 'zero', found {shown(pad)}")
        self._pads_with_zeros = pad == "zero"

    def draw(self, links: Links, drawn: JoinedRows, generator: torch.Generator) -> None:
        """Join the rows of the frames."""
        prev = links.episodes.prev
        self._join(_OBS, steps_on(prev, drawn.rows, self._k), drawn)
        if self._next_key is None:
            return
        if self._is_next_stored:
            way = steps_on(prev, drawn.last, max(1, self._k - 1))
            self._join(_NEXT, np.concatenate([drawn.last[None], way])[: self._k], drawn, ways_from=1)
            return
        following = links.episodes.next.take(drawn.last).astype(np.int64)
        has_next = following != drawn.last
        drawn.info["has_next"] = torch.from_numpy(has_next)
        way = steps_on(prev, following, self._k)
        if not has_next.all():
            # The frame of the item itself stands in for the one that is not there.
            way = np.where(has_next, way, np.concatenate([following[None], way[:-1]]))
        self._join(_NEXT, way, drawn, ways_from=1)

    def _join(self, name: str, way: Int64Array, drawn: JoinedRows, ways_from: int = 0) -> None:
        """Join rows from the newest to the oldest, those from ``ways_from`` on each before the one ahead of it."""
        drawn.joins[name] = way[::-1].T.copy()
        if self._pads_with_zeros:
            mask = np.ones((len(way[0]), self._k), np.bool_)
            for age in range(ways_from + 1, self._k):
                mask[:, self._k - 1 - age] = way[age] != way[age - 1]
            drawn.info[f"{name}_mask"] = torch.from_numpy(mask)

    def combine(self, draw: Draw, data: Any, joined: Mapping[str, Any]) -> Any:
        """Put the stacks in the places of the frames."""
        put(data, self._key, self._stack(_OBS, draw, joined))
        if self._next_key is None:
            return data
        stack = self._stack(_NEXT, draw, joined)
        if self._is_next_stored:
            axis = 1 if draw.shape is None else len(draw.shape)
            frames = taken(joined[_NEXT], self._next_key)
            if frames.shape != stack.shape or frames.dtype is not stack.dtype:
                raise SchemaError(
                    f"{self._next_key}: expected frames as in {self._key}, {stack.dtype} "
                    f"{list(stack.shape[axis + 1 :])}, found {frames.dtype} {list(frames.shape[axis + 1 :])}"
                )
            stack.select(axis, -1).copy_(frames.select(axis, -1))
        put(data, self._next_key, stack)
        return data

    def _stack(self, name: str, draw: Draw, joined: Mapping[str, Any]) -> torch.Tensor:
        stack: torch.Tensor = taken(joined[name], self._key)
        if self._pads_with_zeros and not (mask := draw.info[f"{name}_mask"]).all():
            stack[~mask] = 0
        return stack
