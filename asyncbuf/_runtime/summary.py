"""What a value is, in a few words: keys, shapes and dtypes, never the values of tensors."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

_DEPTH = 4
_MOST_IN_SEQUENCE = 8
_WORD_LENGTH = 40
_NO_KEY = object()
_PLAIN = (bool, int, float, type(None))


def summary(value: Any, room: int = 240) -> str:
    """Describe a tree of tensors in one short line, such as ``{obs: float32 [256, 60], reward: float32 [256]}``.

    Looks at no element of a tensor, calls no ``__repr__`` of another class, and never raises.

    Args:
        value: anything.
        room: about how many characters may be used; what does not fit is counted, as in ``... 3 more``.
    """
    return _Outline(room).of(value, _DEPTH)


def literal(value: Any) -> str:
    """Write a number, a flag, None or a short tuple of these as a program would; anything else as ``summary`` does."""
    values = value if type(value) is tuple and len(value) <= _MOST_IN_SEQUENCE else (value,)
    if all(type(one) in _PLAIN and not (type(one) is int and one.bit_length() > 64) for one in values):
        return repr(value)
    return summary(value, 80)


def listed(keys: Iterable[Any], most: int = 20) -> str:
    """Name keys in one short line, such as ``obs, action, reward``; ``...`` stands for those beyond ``most``."""
    some = list(itertools.islice(keys, most + 1))
    return ", ".join([*map(_key, some[:most]), *["..." for _ in some[most:]]])


class _Outline:
    """One description.

    Args:
        room: characters that are left. What exceeds them is counted and not shown.
    """

    def __init__(self, room: int) -> None:
        self._room = room

    def of(self, value: Any, depth: int) -> str:
        """Describe a value down to a depth."""
        room = self._room
        try:
            return self._told(value, depth)
        except Exception:  # a foreign class may raise anything when it is looked at
            self._room = room
            return self._take(_name(value))

    def _told(self, value: Any, depth: int) -> str:
        if isinstance(value, torch.Tensor):
            device = "" if value.device.type == "cpu" else f" {value.device}"
            layout = "" if value.layout is torch.strided else f" {str(value.layout).removeprefix('torch.')}"
            return self._take(f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{layout}{device}")
        if isinstance(value, np.ndarray):
            return self._take(f"{value.dtype.name} array {list(value.shape)}")
        name = _name(value)
        if type(value) is dict or isinstance(value, Mapping):
            prefix = "" if type(value) is dict else name
            return self._entries(f"{prefix}{{", value.items(), len(value.keys()), "}", depth)
        if isinstance(value, list | tuple):
            if names := getattr(value, "_fields", None):
                return self._entries(f"{name}(", zip(names, value, strict=False), len(value), ")", depth)
            left, right = "[]" if isinstance(value, list) else ("(", ",)" if len(value) == 1 else ")")
            items = ((_NO_KEY, item) for item in itertools.islice(value, _MOST_IN_SEQUENCE))
            return self._entries(left, items, len(value), right, depth)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            pairs = ((name, getattr(value, name)) for name in names)
            return self._entries(f"{name}(", pairs, len(names), ")", depth)
        return self._take(name)

    def _entries(self, left: str, pairs: Iterable[tuple[Any, Any]], count: int, right: str, depth: int) -> str:
        self._room -= len(left) + len(right)
        shown: list[str] = []
        if depth:
            for key, child in pairs:
                if self._room <= 0:
                    break
                prefix = "" if key is _NO_KEY else f"{_key(key)}: "
                self._room -= len(prefix) + 2
                shown.append(prefix + self.of(child, depth - 1))
        if len(shown) < count:
            shown.append(self._take(f"... {count - len(shown)} more" if shown else "..."))
        return f"{left}{', '.join(shown)}{right}"

    def _take(self, text: str) -> str:
        self._room -= len(text)
        return text


def _name(value: Any) -> str:
    return "None" if value is None else _short(type(value).__name__)


def _key(key: Any) -> str:
    return _short(str.__str__(key)) if isinstance(key, str) else literal(key)


def _short(text: str) -> str:
    short = text if len(text) <= _WORD_LENGTH else f"{text[:_WORD_LENGTH]}..."
    return short if short.isprintable() else repr(short)
