"""The errors of this package.

All of them can be pickled. A message says what was expected, what was found, where, and what to do about it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class AsyncBufError(Exception):
    """Base class of all errors of this package."""


class BufferClosedError(AsyncBufError):
    """The buffer is not open yet, was closed, or will get no more data."""


class BufferFailedError(AsyncBufError):
    """The background work of the buffer ended unexpectedly. ``__cause__`` is the error that ended it.

    Or a call waits for what nobody will do: a task died that ``buffer.watch`` was told of, and ``__cause__`` is what
    it died of; or writers and consumers wait for each other. The buffer itself is whole then.
    """


class ItemsLostWarning(UserWarning):
    """Items were overwritten that a sampler that uses items up had not handed out. Said once for each sampler."""


class WrongLoopError(AsyncBufError, RuntimeError):
    """An open buffer was used from an event loop or a thread that did not open it."""


class PrefetchError(AsyncBufError):
    """A batch could not be made: gathering, ``collate_fn`` or a transform raised. ``__cause__`` is what it raised.

    Nothing is lost. The ticket stays first in the queue, and the next ``sample()`` tries it again; ``skip()`` drops it.

    Args:
        message: what failed.
        number: number of the ticket.
        indices: the rows of the batch.

    Attributes:
        number: number of the ticket.
        indices: the rows of the batch.
    """

    def __init__(self, message: str, number: int, indices: Sequence[int]) -> None:
        super().__init__(message)
        self.number: int = number
        self.indices: tuple[int, ...] = tuple(indices)

    def __reduce__(self) -> tuple[type[PrefetchError], tuple[str, int, tuple[int, ...]], dict[str, object]]:
        """Pickle the arguments of the constructor, and notes that were added."""
        return type(self), (str(self), self.number, self.indices), self.__dict__


class SchemaError(AsyncBufError, ValueError):
    """Items differ in structure, shape or dtype from those stored before, or cannot be stored at all."""


class ReadOnlyError(AsyncBufError):
    """The buffer holds fixed data: nothing is written to it. Nothing has changed."""


class ReservationError(AsyncBufError):
    """A reservation is not open: it was committed, was given up, or is from before a restore. Nothing was written."""


class CheckpointError(AsyncBufError):
    """A snapshot or checkpoint could not be written, read or restored. No live object has changed."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at that path."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint is damaged: a file is missing, truncated, modified, or holds something else than it should."""


class CheckpointVersionError(CheckpointError):
    """A checkpoint has a format version that this release cannot read."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint is intact, but does not fit the object that it is restored into."""


class SupersededError(CheckpointError):
    """A save that waited to be written gave way to a newer one of the same ``Checkpointer``."""
