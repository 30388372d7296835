"""What belongs to one buffer must not be given to another one."""

from __future__ import annotations

import gc
import weakref
from typing import Any

# By identity: parts of a user may compare equal, or not be hashable. An owner holds its parts, so that no other object
# takes their identities while it lives.
_OWNERS: dict[int, weakref.ref[Any]] = {}


def claim(owner: Any, **parts: Any) -> None:
    """Make parts belong to an owner, for as long as it lives. It must hold them.

    A part without attributes has no state that two owners could spoil: it may be shared.

    Raises:
        ValueError: a part belongs to another one.
    """
    stateful = {name: part for name, part in parts.items() if getattr(part, "__dict__", True)}
    if any(_is_taken(part) for part in stateful.values()):
        gc.collect()  # an owner that was dropped, but is part of a reference cycle
    for name, part in stateful.items():
        if _is_taken(part):
            raise ValueError(
                f"{name}: expected a {type(part).__name__} that no other buffer uses, found one that another one does: "
                f"each would spoil what the other keeps in it. Make one {name} for each buffer (a closed buffer can be "
                "opened again, and keeps its parts until it is dropped)"
            )
    for part in stateful.values():
        _OWNERS[id(part)] = weakref.ref(owner, _Release(id(part)))


def _is_taken(part: Any) -> bool:
    owner = _OWNERS.get(id(part))
    return owner is not None and owner() is not None


class _Release:
    """The owner of a part is gone."""

    __slots__ = ("_identity",)

    def __init__(self, identity: int) -> None:
        self._identity = identity

    def __call__(self, owner: weakref.ref[Any]) -> None:
        if _OWNERS.get(self._identity) is owner:
            del _OWNERS[self._identity]
