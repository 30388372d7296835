"""Tells once when items are lost that nobody has read."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

from asyncbuf._runtime.supervisor import logger
from asyncbuf.errors import ItemsLostWarning

if TYPE_CHECKING:
    from types import FrameType

_PACKAGE = __name__.partition(".")[0]


def warn_of_loss(sampler: str, lost: str) -> None:
    """Warn, in the name of whoever has called the package.

    The items are written by now. So where the program makes errors of warnings, this one goes to the log instead: an
    error would say that nothing was written.

    Args:
        sampler: its kind.
        lost: what was lost, in words.
    """
    message = (
        f"{sampler}: {lost} before a batch had it, because new items overwrote them. "
        f"More may follow; `lost` of the sampler counts them. To lose none, let writers wait for room: "
        f'ReplayBuffer(..., overwrite="wait"), or limiter=Queue(capacity)'
    )
    try:
        warnings.warn(message, ItemsLostWarning, stacklevel=_level())
    except ItemsLostWarning:
        logger.warning("%s", message)


def _level() -> int:
    """The ``stacklevel`` of the first caller outside of the package."""
    frame: FrameType | None = sys._getframe(1)
    level = 0
    while frame is not None:
        level += 1
        if frame.f_globals.get("__name__", "").partition(".")[0] not in (_PACKAGE, "contextlib"):
            return level
        frame = frame.f_back
    return 2
