"""Several parts of one part: all take over their states, or none does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable


class _Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def load_all(parts: Iterable[_Stateful], states: Iterable[Any]) -> None:
    """Let each part take over its state. If one refuses, those before it get their own back.

    Raises:
        CheckpointError: one refuses; nothing has changed.
    """
    before: list[tuple[_Stateful, dict[str, Any]]] = []
    try:
        for part, state in zip(parts, states, strict=True):
            own = part.state_dict()
            part.load_state_dict(state)
            before.append((part, own))
    except BaseException:
        for part, own in before:
            part.load_state_dict(own)
        raise
