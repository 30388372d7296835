"""Whether a checkpoint is as it was written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncbuf._disk.examination import examine
from asyncbuf._runtime.arguments import absolute

if TYPE_CHECKING:
    import os


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found when every byte of a checkpoint was read.

    Attributes:
        path: its directory.
        files: number of files that were read or looked for.
        nbytes: bytes of them.
        problems: what is wrong, file by file. None of them: the checkpoint is as it was written.
    """

    path: str
    files: int
    nbytes: int
    problems: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify(path: str | os.PathLike[str]) -> Verification:
    """Read every file of a checkpoint, and compare it with its digest. Damage is what it returns, and no error.

    Blocks for as long as reading takes, with some megabytes of memory: in async code, ``asyncio.to_thread(verify,
    path)``.

    Args:
        path: the directory of the checkpoint: of ``buffer.save``, or one step of a ``Checkpointer``.

    Raises:
        CheckpointNotFoundError: it is no checkpoint.
        CheckpointVersionError: it is newer than this release.
        OSError: the directory cannot be read.
        TypeError: the path is none.
    """
    where = absolute(path)
    found = examine(where, reads=True)
    return Verification(str(where), found.usage.files, found.usage.nbytes, found.problems)
