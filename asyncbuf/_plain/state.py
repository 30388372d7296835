"""Checking the state dicts of components before they are taken over."""

from __future__ import annotations

from typing import Any

from asyncbuf.errors import CheckpointCorruptError, CheckpointMismatchError


def fields(state: Any, what: str, /, **kinds: type) -> list[Any]:
    """The values of a state dict, each of the type that is expected.

    Args:
        state: the state dict.
        what: whose it is, for messages.
        **kinds: name and type of each entry. An int is not negative, and a bool is not an int.

    Raises:
        CheckpointCorruptError: it is not a dict with these entries.
    """
    if not isinstance(state, dict) or state.keys() != kinds.keys():
        found = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise CheckpointCorruptError(f"{what}: expected the entries {sorted(kinds)}, found {found}")
    for name, kind in kinds.items():
        value = state[name]
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            raise CheckpointCorruptError(f"{what}: expected {name} as {kind.__name__}, found {value!r}")
    return [state[name] for name in kinds]


def same(found: Any, expected: Any, what: str) -> None:
    """Refuse a setting that differs.

    Raises:
        CheckpointMismatchError: it does; the message names both.
    """
    if found != expected:
        raise CheckpointMismatchError(f"{what}: expected {expected!r}, as in this buffer; the checkpoint has {found!r}")
