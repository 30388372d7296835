"""Every error that asyncbuf raises on purpose.

All of them pickle, and each message says what was expected and what was found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class AsyncBufError(Exception):
    """Base class of the errors of this package."""


class BufferClosedError(AsyncBufError):
    """The buffer is not open: not yet, not any more, or no more data will come."""


class BufferFailedError(AsyncBufError):
    """The background work of the buffer ended unexpectedly; the cause is attached."""


class WrongLoopError(AsyncBufError, RuntimeError):
    """An open buffer was used from another event loop, or from another thread, than the one that opened it."""


class PrefetchError(AsyncBufError):
    """A ticket could not be made into a batch; the original error is the cause.

    Nothing is lost: the ticket stays first in line, and the next ``sample()`` tries it again.

    Attributes:
        number: number of the ticket.
        indices: the rows that the ticket draws.
    """

    def __init__(self, message: str, number: int, indices: Sequence[int]) -> None:
        super().__init__(message)
        self.number: int = number
        self.indices: tuple[int, ...] = tuple(indices)

    def __reduce__(self) -> tuple[type[PrefetchError], tuple[str, int, tuple[int, ...]], dict[str, object]]:
        """Pickle by the arguments of the constructor, notes included."""
        return type(self), (str(self), self.number, self.indices), self.__dict__


class SchemaError(AsyncBufError, ValueError):
    """Items do not have the structure, shapes or dtypes of the items stored before them."""


class CheckpointError(AsyncBufError):
    """A snapshot or checkpoint could not be written, read or restored. What is live has not changed."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at that place."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint is damaged: a file is missing, cut, changed or not what it claims to be."""


class CheckpointVersionError(CheckpointError):
    """A checkpoint has a format version that this release does not know."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint is sound but belongs to something else than what it is restored into."""
