"""The checkpoints of a run at a glance, and removing the oldest."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncbuf._disk import files
from asyncbuf._disk.examination import examine
from asyncbuf._disk.manifest import MANIFEST, is_checkpoint
from asyncbuf._disk.view import Usage, check_is_one, usage
from asyncbuf._runtime.arguments import absolute, count, flag
from asyncbuf.checkpoint._steps import checkpoints_in, remove_steps, step_path, steps_in
from asyncbuf.errors import CheckpointError, CheckpointNotFoundError, CheckpointVersionError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """One step of a run.

    Attributes:
        step: the step.
        path: its directory.
        created: when it was committed, in seconds since the epoch.
        age: how long ago that is, in seconds.
        files: number of its files.
        nbytes: bytes of them.
        shared_nbytes: how many of these are in files that other checkpoints have, too (hard links).
        problem: what is wrong with it, as far as manifest and sizes of files say; None if they are as they should be.
    """

    step: int
    path: str
    created: float
    age: float
    files: int
    nbytes: int
    shared_nbytes: int
    problem: str | None

    @property
    def own_nbytes(self) -> int:
        """Bytes that are free when it alone is removed."""
        return self.nbytes - self.shared_nbytes


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was removed, and what was not.

    Attributes:
        directory: where the checkpoints are.
        kept: steps that stay, the newest first.
        removed: steps that were removed, or would be, the newest first.
        busy: steps that were to go and are read or written by somebody just now. They are still there.
        failed: steps that were to go and could not be removed, each with what the file system said.
        nbytes: bytes that are free now, or would be.
    """

    directory: str
    kept: tuple[int, ...]
    removed: tuple[int, ...]
    busy: tuple[int, ...]
    failed: tuple[tuple[int, str], ...]
    nbytes: int


def list_checkpoints(directory: str | os.PathLike[str]) -> tuple[ListedCheckpoint, ...]:
    """The checkpoints of a ``Checkpointer``, the newest first.

    Reads their manifests, and looks at the sizes of files. Blocks: in async code, ``asyncio.to_thread``.

    Args:
        directory: that of the ``Checkpointer``.

    Raises:
        CheckpointNotFoundError: there is no such directory.
        CheckpointError: it is a checkpoint itself.
        OSError: it cannot be read.
        TypeError: it is no path.
    """
    where = _checked(directory)
    listed = [_listed(where, step) for step in reversed(steps_in(where))]
    return tuple(each for each in listed if each is not None)


def prune(directory: str | os.PathLike[str], *, keep: int, dry_run: bool = False) -> Pruned:
    """Remove the oldest checkpoints of a ``Checkpointer``, as that does itself.

    Those that somebody reads or writes just now stay. A checkpoint that is visibly damaged does not count as one of
    those that are kept, and stays while it is newer than they are. Blocks: in async code, ``asyncio.to_thread``.

    Args:
        directory: that of the ``Checkpointer``.
        keep: how many stay, at least 1: those with the highest steps.
        dry_run: only say what would be removed.

    Raises:
        CheckpointError, OSError: as of ``list_checkpoints``.
        TypeError, ValueError: an argument is none.
    """
    where = _checked(directory)
    count(keep, "keep", 1, example=3)
    flag(dry_run, "dry_run")
    steps = checkpoints_in(where)[::-1]
    removed = surplus = _surplus(where, steps, keep)
    found = {step: files.statuses_below(step_path(where, step)) for step in surplus}
    failed: dict[int, str] = {}
    if not dry_run:
        # The oldest first, so that those that are left when this is interrupted are the newest.
        done = remove_steps(where, surplus[::-1], lambda step, error: failed.update({step: str(error)}))
        removed = [step for step in surplus if step in done]
    taken = usage(status for step in removed for status in found[step])
    return Pruned(
        directory=str(where),
        kept=tuple(step for step in steps if step not in surplus),
        removed=tuple(removed),
        busy=tuple(step for step in surplus if step not in removed and step not in failed),
        failed=tuple(failed.items()),
        nbytes=taken.nbytes - taken.shared,
    )


def _checked(directory: str | os.PathLike[str]) -> Path:
    where = absolute(directory, "directory")
    if not files.is_directory(where):
        found = "something else" if files.exists(where) else "none"
        raise CheckpointNotFoundError(f"{where}: expected a directory of checkpoints, found {found}")
    if is_checkpoint(where):
        raise CheckpointError(
            f"{where}: expected a directory of checkpoints, found a single one: {where.parent} is that of a run"
        )
    return where


def _listed(directory: Path, step: int) -> ListedCheckpoint | None:
    """One that is there; None if it is none, or was removed meanwhile."""
    path = step_path(directory, step)
    problem, taken = None, Usage(0, 0, 0)
    try:
        check_is_one(path)
        examination = examine(path, reads=False)
        taken, problem = examination.usage, next(iter(examination.problems), None)
    except CheckpointNotFoundError:
        return None
    except (CheckpointError, OSError) as error:
        problem = str(error)
    manifest = files.stat(path / MANIFEST)
    created = 0.0 if manifest is None else manifest.st_mtime
    age = max(0.0, time.time() - created)
    return ListedCheckpoint(step, str(path), created, age, taken.files, taken.nbytes, taken.shared, problem)


def _surplus(directory: Path, steps: Iterable[int], keep: int) -> list[int]:
    """Those of some steps, the newest first, before which enough sound ones come."""
    surplus = []
    for step in steps:
        if keep:
            keep -= _counts(step_path(directory, step))
        else:
            surplus.append(step)
    return surplus


def _counts(path: Path) -> bool:
    """Whether it is a checkpoint that one can go back to, as far as shows; what a newer release wrote is one."""
    try:
        return not examine(path, reads=False).problems
    except CheckpointVersionError:
        return True
    except (CheckpointError, OSError):
        return False
