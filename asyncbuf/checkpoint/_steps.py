"""The checkpoints of a run: one directory for each step, found by their names and removed by one piece of code."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from asyncbuf._disk.housekeeping import remove
from asyncbuf._disk.manifest import is_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

_STEP = re.compile(r"step-([0-9]{6,})")


def step_path(directory: Path, step: int) -> Path:
    """The directory of a step, whether or not it is there."""
    return directory / f"step-{step:06}"


def steps_in(directory: Path) -> list[int]:
    """The steps of which there are directories, in order.

    Raises:
        OSError: that cannot be told.
    """
    names = [entry.name for entry in directory.iterdir() if entry.is_dir()]
    steps = [(int(match[1]), name) for name in names if (match := _STEP.fullmatch(name))]
    return sorted(step for step, name in steps if step_path(directory, step).name == name)


def checkpoints_in(directory: Path) -> list[int]:
    """The steps of which there are checkpoints, be they damaged, in order.

    Raises:
        OSError: that cannot be told.
    """
    return [step for step in steps_in(directory) if is_checkpoint(step_path(directory, step))]


def remove_steps(directory: Path, steps: Iterable[int], failed: Callable[[int, OSError], object]) -> list[int]:
    """Remove checkpoints in which nobody is at work; the others stay.

    Args:
        directory: where they are.
        steps: which.
        failed: told of one that could not be removed.

    Returns:
        Those that were removed.
    """
    removed = []
    for step in steps:
        try:
            if remove(step_path(directory, step)):
                removed.append(step)
        except OSError as error:
            failed(step, error)
    return removed
