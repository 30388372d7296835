"""Checks of arguments. Their errors say what was expected, what was found, and what to write instead."""

from __future__ import annotations

from typing import Any

from asyncbuf._runtime.summary import literal

_TEXT_LENGTH = 60


def shown(value: Any) -> str:
    """What was found, in a few words."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if type(value) is str:
        return repr(value if len(value) <= _TEXT_LENGTH else f"{value[:_TEXT_LENGTH]}...")
    return literal(value)


def instance_of(value: Any, kind: type, name: str, *, example: str, arguments: str = "") -> Any:
    """Check that an argument is an instance of a class.

    Args:
        value: the argument.
        kind: the class.
        name: name of the argument.
        example: an expression that makes such an instance.
        arguments: what a class of that kind is called with.

    Returns:
        The argument.

    Raises:
        TypeError: it is something else; perhaps the class itself.
    """
    if isinstance(value, kind):
        return value
    is_class = isinstance(value, type) and issubclass(value, kind)
    instead = f": write {value.__name__}({arguments})" if is_class else f"; for example {example}"
    raise TypeError(f"{name}: expected a {kind.__name__}, found {shown(value)}{instead}")


def count(value: Any, name: str, least: int, *, example: int | None = None) -> int:
    """Check that an argument is a whole number.

    Args:
        value: the argument.
        name: name of the argument.
        least: the smallest number that is allowed.
        example: a number that makes sense.

    Returns:
        The argument.

    Raises:
        TypeError: it is not an int.
        ValueError: it is smaller than ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{name}: expected an int, found {shown(value)} of type {type(value).__name__}"
            f"{_instead_of(value, name, example)}"
        )
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, found {value}")
    return value


def _instead_of(value: Any, name: str, example: int | None) -> str:
    if isinstance(value, float) and value.is_integer():
        return f": write {name}={value:.0f}"
    if hasattr(value, "__index__") and not isinstance(value, bool | type):
        return f": write {name}=int(...)"
    return "" if example is None else f"; for example {name}={example}"
