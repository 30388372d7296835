"""Checks of arguments that say what was expected and what was found."""

from __future__ import annotations

from typing import Any


def expect(value: Any, kind: type, name: str) -> Any:
    """The value, which must be of a kind.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected a {kind.__name__}, found {value!r}")
    return value


def count(value: Any, name: str, least: int) -> int:
    """The value, which must be a whole number.

    Raises:
        TypeError: it is not an int.
        ValueError: it is smaller than ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, found {value!r} of type {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, found {value}")
    return value
