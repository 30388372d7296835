"""Calls that were meant for another method: the error says which."""

from __future__ import annotations

import os
from typing import Any

from asyncbuf._runtime.arguments import refuse_coroutine, shown
from asyncbuf.checkpoint.snapshot import Snapshot


def snapshot_of(value: Any) -> None:
    """Check that it is a snapshot.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(value, Snapshot):
        return
    refuse_coroutine(value, "snapshot")
    instead = "await buffer.snapshot() takes one"
    if isinstance(value, dict):
        instead = "write load_state_dict(...)"
    elif isinstance(value, str | os.PathLike):
        instead = "write load(...)"
    raise TypeError(f"snapshot: expected a Snapshot, found {shown(value)}: {instead}")


def state_dict_of(value: Any) -> None:
    """Check that it is no argument of another call. What is in it is looked at later.

    Raises:
        TypeError: it is one.
    """
    refuse_coroutine(value, "state_dict")
    if isinstance(value, Snapshot):
        raise TypeError("state_dict: expected a state dict, found a Snapshot: write restore(...)")
    if isinstance(value, str | os.PathLike):
        raise TypeError(f"state_dict: expected a state dict, found {shown(value)}: write load(...)")
