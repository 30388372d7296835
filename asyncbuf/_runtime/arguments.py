"""Checks of arguments. Their errors say what was expected, what was found, and what to write instead."""

from __future__ import annotations

import inspect
import math
import os
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from asyncbuf._runtime.summary import literal
from asyncbuf.errors import CheckpointError

_TEXT_LENGTH = 60
# In seconds, 30 years: what is longer is never over, and some event loops cannot count it.
_FOREVER = 1e9
_MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**62


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


def count(value: Any, name: str, least: int, *, most: int | None = None, example: int | None = None) -> int:
    """Check that an argument is a whole number.

    Args:
        value: the argument.
        name: name of the argument.
        least: the smallest number that is allowed.
        most: the largest one; None for any.
        example: a number that makes sense.

    Returns:
        The argument.

    Raises:
        TypeError: it is not an int.
        ValueError: it is smaller than ``least``, or larger than ``most``.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{name}: expected an int, found {shown(value)} of type {type(value).__name__}"
            f"{_instead_of(value, name, example)}"
        )
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, found {value}")
    if most is not None and value > most:
        raise ValueError(f"{name}: expected at most {most}, found {value}")
    return value


def fits_memory(rows: int, row_nbytes: int, name: str) -> None:
    """Check that so many rows can be in the memory of this machine at all.

    Args:
        rows: the argument.
        row_nbytes: bytes of one.
        name: name of the argument.

    Raises:
        ValueError: they cannot.
    """
    if rows * row_nbytes > _MEMORY:
        raise ValueError(
            f"{name}: expected a number of rows that fit into memory ({_MEMORY >> 30} GiB), found {rows} rows of "
            f"{row_nbytes} bytes"
        )


def _instead_of(value: Any, name: str, example: int | None) -> str:
    if isinstance(value, float) and value.is_integer():
        return f": write {name}={value:.0f}"
    if hasattr(value, "__index__") and not isinstance(value, bool | type):
        return f": write {name}=int(...)"
    return "" if example is None else f"; for example {name}={example}"


def flag(value: Any, name: str) -> bool:
    """Check that an argument is True or False.

    Raises:
        TypeError: it is something else. Not even 0 and 1 are taken: they may be meant for another argument.
    """
    if isinstance(value, bool):
        return value
    raise TypeError(
        f"{name}: expected a bool, found {shown(value)} of type {type(value).__name__}; for example {name}=True"
    )


def seconds(value: Any, name: str = "timeout", *, is_positive: bool = False) -> float | None:
    """Check that an argument is a time.

    Args:
        value: the argument, in seconds.
        name: name of the argument.
        is_positive: whether 0 is refused, too.

    Returns:
        The time; None if there is no limit: of None, and of infinity and the like.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative or not a number.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"{name}: expected a number of seconds, or None for no limit; found {shown(value)} of type "
            f"{type(value).__name__}"
        )
    time = float(value)
    if not time >= 0 or (is_positive and not time > 0):
        least = "a positive number of seconds" if is_positive else "a number of seconds from 0 on"
        raise ValueError(f"{name}: expected {least}, or None for no limit; found {value!r}")
    return None if time > _FOREVER else time


def absolute(value: Any, name: str = "path") -> Path:
    """The path as it is meant now, whatever the working directory will be.

    Raises:
        TypeError: it is none.
        CheckpointError: no file system has such a path, or the working directory is gone.
    """
    try:
        found = os.fspath(value)
    except TypeError:
        found = None
    if not isinstance(found, str):
        refuse_coroutine(value, name)
        raise TypeError(f"{name}: expected a path as a str or pathlib.Path, found {shown(value)}")
    try:
        if b"\0" in os.fsencode(found):
            raise ValueError("a null character in it")
        return Path(found).absolute()
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{name}: {found!r}: expected a path, found {error}") from error


def refuse_coroutine(value: Any, name: str) -> None:
    """Refuse what an async function returned, where its result is meant.

    Raises:
        TypeError: it is a coroutine.
    """
    if inspect.iscoroutine(value):
        called = value.__name__
        value.close()  # nobody will await it, and Python would complain of that
        raise TypeError(f"{name}: expected the result of {called}(), found the coroutine: write `await` before it")


def factory(value: Any, name: str) -> None:
    """Check that an argument makes new objects.

    Raises:
        TypeError: it is not callable; perhaps one of those objects.
    """
    if not callable(value):
        raise TypeError(
            f"{name}: expected a function that makes a new one each time, found {shown(value)}: write lambda: ..."
        )


def field_paths(value: Any, name: str, *, example: str) -> tuple[str, ...]:
    """Check an argument that is the path of a field, or several.

    Raises:
        TypeError: it is something else.
    """
    found: tuple[Any, ...] = (value,) if isinstance(value, str) else (None,)
    if isinstance(value, list | tuple):
        found = tuple(value)
    if not all(isinstance(path, str) and path for path in found):
        raise TypeError(f"{name}: expected the path of a field such as {example!r}, or several, found {shown(value)}")
    return found


def field_path(value: Any, name: str, *, example: str) -> str:
    """Check an argument that is the path of a field.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(value, str) or not value:
        raise TypeError(f"{name}: expected the path of a field such as {example!r}, found {shown(value)}")
    return value


def fraction(value: Any, name: str, *, example: float) -> float:
    """Check an argument that is a number from 0 to 1.

    Raises:
        TypeError: it is no number.
        ValueError: it is another one.
    """
    message = f"{name}: expected a number from 0 to 1, such as {example}, found {shown(value)}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(message)
    if not 0 <= value <= 1:
        raise ValueError(message)
    return float(value)


def number(value: Any, name: str, *, above: float = -math.inf, example: float) -> float:
    """Check that an argument is a finite number.

    Args:
        value: the argument.
        name: name of the argument.
        above: it must be larger than that.
        example: a number that makes sense.

    Raises:
        TypeError: it is no number.
        ValueError: it is not finite, or too small.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, found {shown(value)}; for example {name}={example:g}")
    found = float(value)
    if not (math.isfinite(found) and found > above):
        least = "" if above == -math.inf else f" above {above:g}"
        raise ValueError(f"{name}: expected a finite number{least}, found {shown(value)}")
    return found


def cpu_tensor(value: Any, name: str, *, expected: str) -> torch.Tensor:
    """An argument that is a tensor, or can be made one, on the CPU and without a graph.

    Args:
        value: the argument.
        name: name of the argument.
        expected: what it must be, such as ``"numbers"``.

    Raises:
        TypeError: it is something else.
    """
    try:
        return torch.as_tensor(value, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"{name}: expected {expected}, found {shown(value)}") from error
