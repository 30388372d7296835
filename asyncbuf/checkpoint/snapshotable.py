"""What a coordinator asks of a buffer: stand still, be captured, be restored."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeGuard, runtime_checkable

if TYPE_CHECKING:
    import os
    from contextlib import AbstractAsyncContextManager

    from asyncbuf.checkpoint._freeze import Freeze
    from asyncbuf.checkpoint._snapshotter import Restore
    from asyncbuf.checkpoint.snapshot import Snapshot


@runtime_checkable
class Snapshotable(Protocol):
    """Something that can be saved and restored at one point of its history, such as a ``ReplayBuffer``.

    ``Checkpointer`` takes whatever has these methods. They mean what those of ``ReplayBuffer`` do.
    """

    @property
    def current_freeze(self) -> Freeze | None:
        """The freeze that the caller is within; None outside."""

    async def freeze(self, timeout: float | None = None, hold: float | None = None) -> Freeze:
        """Stand still until the handle is released."""
        ...

    def frozen(self, timeout: float | None = None) -> AbstractAsyncContextManager[Self]:
        """Stand still until the block ends."""
        ...

    async def snapshot(self, timeout: float | None = None) -> Snapshot:
        """Everything at one point of the history."""
        ...

    async def state_dict(self, timeout: float | None = None) -> dict[str, Any]:
        """The same as plain data."""
        ...

    async def save(self, path: str | os.PathLike[str], timeout: float | None = None) -> None:
        """The same as a checkpoint directory."""

    async def restore(self, snapshot: Snapshot, *, elastic: bool = False) -> None:
        """Become what a snapshot holds."""

    async def prepare_restore(self, snapshot: Snapshot, *, elastic: bool = False) -> Restore:
        """The first half of ``restore``, which changes nothing; its ``apply()`` is the second."""
        ...

    async def load_state_dict(self, state_dict: dict[str, Any], *, elastic: bool = False) -> None:
        """Become what a state dict holds."""

    async def load(self, path: str | os.PathLike[str], *, elastic: bool = False) -> None:
        """Become what a checkpoint directory holds."""


def is_snapshotable(part: Any) -> TypeGuard[Snapshotable]:
    """Whether it is a buffer, and no class of buffers."""
    return not inspect.isclass(part) and isinstance(part, Snapshotable)
