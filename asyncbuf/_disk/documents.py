"""Plain data in files of its own: JSON in lines that are short enough to be parsed, and made, one at a time.

The last line is the value. What is too large for a line stands in lines before it, and an object whose only key is one
of these says where. Lines are counted from 0, and each is used once.

==============================  ===============================================================
``{"$$list": [2, 5]}``          a list: those of lines 2 and 5, one after the other
``{"$$object": [2, 5]}``        an object: the entries of those in lines 2 and 5
``{"$$entries": [2, 5]}``       an object: lists of its keys and values, in pairs
``{"$$text": [2, 5]}``          a text: those of lines 2 and 5, one after the other
==============================  ===============================================================

No key of plain data begins with ``$$`` otherwise (see ``asyncbuf._plain.codec``).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from asyncbuf._disk.manifest import STRICT, is_shallow, unique
from asyncbuf.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# What goes into a line, about: a fraction of a millisecond.
_LINE_BYTES = 64 * 1024
_TEXT_CHARACTERS = 16 * 1024
# What a line may be at most: some milliseconds.
MOST_LINE_BYTES = 1024 * 1024
_ITEMS = 512
_NUMBERS = {int, float, bool, type(None)}
_DIGITS = 26  # of any number but a large int
LIST, OBJECT, ENTRIES, TEXT = "$$list", "$$object", "$$entries", "$$text"


class Document:
    """A value taken apart into lines.

    Args:
        value: what JSON can hold.
        emit: gets one line after the other, as soon as it is made.

    Attributes:
        value: what is left of the value for the last line.
        lines: how many lines there are.

    Raises:
        CheckpointError: there is more of it than lines can refer to.
    """

    def __init__(self, value: Any, emit: Callable[[bytes], None]) -> None:
        self._emit = emit
        self.lines = 0
        self.value, _ = self._taken(value)

    def end(self) -> None:
        """Emit the last line."""
        self.line(self.value)

    def line(self, value: Any) -> int:
        """Emit a line: its number."""
        line = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
        if len(line) > MOST_LINE_BYTES:
            raise CheckpointError(f"expected plain data of at most some gigabytes, found a line of {len(line)} bytes")
        self._emit(line)
        self.lines += 1
        return self.lines - 1

    def _taken(self, node: Any) -> tuple[Any, int]:
        """What stands for a value within a line, and about how many bytes that takes.

        Calls itself once a level, since there may be hundreds.
        """
        kind = type(node)
        if kind is str:
            return self._text(node)
        if kind is list:
            return self._list(node)
        if kind is dict:
            return self._object(node)
        return node, _bytes_of(node)

    def _text(self, text: str) -> tuple[Any, int]:
        if len(text) <= _TEXT_CHARACTERS:
            return text, _bytes_of(text)
        starts = range(0, len(text), _TEXT_CHARACTERS)
        return _reference(TEXT, [self.line(text[start : start + _TEXT_CHARACTERS]) for start in starts])

    def _list(self, items: list[Any]) -> tuple[Any, int]:
        group = _Group(self, LIST, [])
        for start in range(0, len(items), _ITEMS):
            some = items[start : start + _ITEMS]
            if set(map(type, some)) <= _NUMBERS and (size := sum(map(_bytes_of, some))) < _LINE_BYTES:
                group.make_room(size)
                group.members += some
                continue
            for item in some:
                taken, size = self._taken(item)
                group.make_room(size)
                group.members.append(taken)
        return group.closed()

    def _object(self, entries: dict[str, Any]) -> tuple[Any, int]:
        if any(len(key) > _TEXT_CHARACTERS for key in entries):
            return self._entries(entries)
        group = _Group(self, OBJECT, {})
        for key, value in entries.items():
            taken, size = self._taken(value)
            group.make_room(size + _bytes_of(key))
            group.members[key] = taken
        return group.closed()

    def _entries(self, entries: dict[str, Any]) -> tuple[Any, int]:
        group = _Group(self, ENTRIES, [])
        for key, value in entries.items():
            (taken_key, key_size), (taken, size) = self._taken(key), self._taken(value)
            group.make_room(size + key_size)
            group.members.append([taken_key, taken])
        return group.closed(always=True)


class _Group:
    """Members together in one container, or in several lines if they do not fit into one."""

    def __init__(self, document: Document, tag: str, members: Any) -> None:
        self._document = document
        self._tag = tag
        self._lines: list[int] = []
        self._filled = 2
        self.members = members

    def make_room(self, size: int) -> None:
        if self.members and self._filled + size > _LINE_BYTES:
            self._lines.append(self._document.line(self.members))
            self.members = type(self.members)()
            self._filled = 2
        self._filled += size + 2

    def closed(self, *, always: bool = False) -> tuple[Any, int]:
        if not self._lines and not always:
            return self.members, self._filled
        return _reference(self._tag, [*self._lines, self._document.line(self.members)])


def _reference(tag: str, lines: list[int]) -> tuple[Any, int]:
    return {tag: lines}, 20 + 10 * len(lines)


def _bytes_of(atom: Any) -> int:
    if type(atom) is str:
        return (1 if atom.isascii() else 6) * len(atom) + 2
    return _DIGITS + atom.bit_length() // 3 if type(atom) is int else _DIGITS


def joined(lines: Iterable[bytes | bytearray]) -> Any:
    """The value that lines stand for.

    Raises:
        ValueError: they are not what ``Document`` makes.
    """
    waiting: dict[int, Any] = {}

    def resolve(pairs: list[tuple[str, Any]]) -> Any:
        node = unique(pairs)
        if len(node) != 1:
            return node
        [(tag, numbers)] = pairs
        join = _JOINS.get(tag)
        return node if join is None else join([waiting.pop(number) for number in numbers])

    strict = {**STRICT, "object_pairs_hook": resolve}
    last = -1
    try:
        for last, line in enumerate(lines):
            waiting[last] = json.loads(line, **strict)
        value = waiting.pop(last)
    except (LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"lines that do not fit together ({error!r})") from error
    if waiting or not is_shallow(value):
        raise ValueError("lines that nothing refers to, or too many levels")
    return value


def _text(parts: list[Any]) -> str:
    return "".join(parts)


def _list(parts: list[Any]) -> list[Any]:
    result: list[Any] = []
    for part in parts:
        if not isinstance(part, list):
            raise TypeError("a part of a list that is none")
        result += part
    return result


def _object(parts: list[Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    count = 0
    for part in parts:
        result.update(part)
        count += len(part)
    if len(result) != count:
        raise ValueError("a duplicate key")
    return result


def _from_entries(parts: list[Any]) -> dict[str, Any]:
    return unique([(key, value) for key, value in _list(parts)])


_JOINS: dict[str, Callable[[list[Any]], Any]] = {
    LIST: _list,
    OBJECT: _object,
    ENTRIES: _from_entries,
    TEXT: _text,
}
