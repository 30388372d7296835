"""``manifest.json``: what is in a checkpoint. Only a directory whose manifest says so is one.

A manifest is small, so that it is parsed at once without holding anybody up; what would make it large is in files of
its own (see ``documents``). In version 1 it held everything. One of that version that is large is proven by its digest
before it is parsed, and then line by line.
"""

from __future__ import annotations

import hashlib
import json
import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import safetensors
import torch

from asyncbuf._disk import digests, files
from asyncbuf._plain.codec import DTYPES
from asyncbuf._version import __version__
from asyncbuf.errors import CheckpointCorruptError, CheckpointNotFoundError, CheckpointVersionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

VERSION = 2
MANIFEST = "manifest.json"
# What is parsed at once: some milliseconds.
MANIFEST_BYTES = 1024 * 1024
# What version 1 could be as large as.
OLD_MANIFEST_BYTES = 256 * 1024 * 1024
# A value of as many levels as may be encoded needs at most three of JSON for each.
LEVELS = 320
FORMAT = "asyncbuf.checkpoint"
KEY = r"[0-9a-f]{16}"
DATA = re.compile(rf"data-{KEY}")
NAME = re.compile(r"[A-Za-z0-9_-]+(?:/[A-Za-z0-9_-]+)*\.(?:safetensors|json)")
# Files that hold what is too large for a manifest, and the key of the object that stands for one.
INDEX, STATE = "index.json", "state.json"
FILE = "$$file"

_HEAD = b'{\n "body": '
_TAIL = rb',\n "format": "asyncbuf\.checkpoint",\n "sha256": "([0-9a-f]{64})",\n "version": (\d+)\n}\n\Z'
_TAIL_BYTES = 160
# Where a damaged manifest is searched for what it was.
_SEARCHED_BYTES = 4096
_SAYS_OURS = re.compile(rb'"format":\s*"asyncbuf\.checkpoint"')
_SHOWN = 4
_PIECE_BYTES = 1024 * 1024


class Manifest(NamedTuple):
    """The body of a manifest.

    Attributes:
        data: the name of the directory that the files are in.
        files: what is known of each file, by name. Where there are many, they are listed in ``INDEX`` instead.
        state: what JSON can hold.
        libraries: versions of the libraries that wrote it, by name; for people. Of one that is to be written: empty.
        version: of the file layout.
    """

    data: str
    files: dict[str, dict[str, Any]]
    state: Any
    libraries: Mapping[str, Any] = MappingProxyType({})
    version: int = VERSION


def render(manifest: Manifest) -> bytes:
    """The content of ``manifest.json``, byte for byte the same for the same body."""
    body = {
        "data": manifest.data,
        "files": manifest.files,
        "libraries": _libraries(),
        "state": manifest.state,
    }
    digest = hashlib.sha256(_dumped(body)).hexdigest()
    return _dumped({"body": body, "format": FORMAT, "sha256": digest, "version": VERSION}) + b"\n"


def draft() -> bytes:
    """What says that a directory is ours before it has a manifest."""
    return _dumped({"format": FORMAT, "version": VERSION, "draft": True}) + b"\n"


def read(path: Path) -> Manifest:
    """The manifest of a checkpoint, checked.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointVersionError: its format is newer than this release.
        CheckpointCorruptError: it is damaged.
    """
    manifest = path / MANIFEST
    return parse(_content(manifest, path), manifest)


def is_checkpoint(path: Path) -> bool:
    """Whether the manifest in a directory says that it is a checkpoint, be it damaged or newer than this release."""
    manifest = path / MANIFEST
    if not files.is_regular(manifest):
        return False
    try:
        size, content = files.ends(manifest, MANIFEST_BYTES, _SEARCHED_BYTES)
    except FileNotFoundError:
        return False
    if size <= MANIFEST_BYTES:
        try:
            document = json.loads(content)
        except (ValueError, RecursionError):
            pass  # damaged
        else:
            return isinstance(document, dict) and document.get("format") == FORMAT
    return _SAYS_OURS.search(content[-_SEARCHED_BYTES:]) is not None


def what_is_at(path: Path) -> str:
    """In words, what is where a checkpoint was expected."""
    if files.is_directory(path):
        names = files.names(path)
        shown = ", ".join(map(ascii, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
        return f"a directory with {shown}" if names else "an empty directory"
    if files.is_link(path):
        return "a link that leads to no directory"
    return "a file" if files.is_regular(path) else "something else" if files.exists(path) else "nothing"


def _content(manifest: Path, path: Path) -> bytearray:
    try:
        if not files.is_regular(manifest):
            if files.exists(manifest):
                raise CheckpointCorruptError(f"{manifest}: expected a file, found something else")
            raise CheckpointNotFoundError(f"{path}: expected a checkpoint with a {MANIFEST}, found {what_is_at(path)}")
        size, content = files.ends(manifest, MANIFEST_BYTES, _TAIL_BYTES)
        if MANIFEST_BYTES < size <= OLD_MANIFEST_BYTES and _ending(content, 1) is not None:
            content = files.read_whole(manifest, size + 1)
        elif size > MANIFEST_BYTES:
            raise CheckpointCorruptError(f"{manifest}: expected at most {MANIFEST_BYTES} bytes, found {size}")
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{path}: expected a checkpoint with a {MANIFEST}, found nothing") from error
    return content


def _ending(content: bytes | bytearray, version: int) -> re.Match[bytes] | None:
    found = re.search(_TAIL, content[-_TAIL_BYTES:])
    return found if found is not None and found[2] == b"%d" % version else None


def parse(content: bytes | bytearray, manifest: Path) -> Manifest:
    """Check the content of a manifest; otherwise as ``read``.

    Args:
        content: all of it.
        manifest: where it is, for messages.
    """
    version = 1 if len(content) > MANIFEST_BYTES else _version(content, manifest)
    try:
        text = _body(content, version)
        body = json.loads(text, **STRICT) if len(text) <= MANIFEST_BYTES else _by_lines(text)
        is_sound = is_shallow(body) and _well_formed(body)
    except (RecursionError, ValueError) as error:
        raise CheckpointCorruptError(f"{manifest}: expected the manifest that was written, found {error}") from error
    if not is_sound:
        raise CheckpointCorruptError(f"{manifest}: expected the manifest that was written, found a changed one")
    return Manifest(body["data"], body["files"], body["state"], body["libraries"], version)


def _version(content: bytes | bytearray, manifest: Path) -> int:
    """The version that a small manifest says it has."""
    try:
        document = json.loads(content, **STRICT)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"{manifest}: expected JSON, found {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointCorruptError(f"{manifest}: expected the format {FORMAT!r}, found something else")
    version = document.get("version")
    if type(version) is not int or version > VERSION or version < 1:
        raise CheckpointVersionError(f"{manifest}: expected a format version from 1 to {VERSION}, found {version!r}")
    return version


def _body(content: bytes | bytearray, version: int) -> bytearray:
    """The body as it was hashed. In the manifest it has one more space before each line.

    Raises:
        ValueError: it is not what was written, byte for byte.
    """
    ending = _ending(content, version)
    if ending is None or not content.startswith(_HEAD):
        raise ValueError("a changed one")
    text, digest = bytearray(), hashlib.sha256()
    for piece in _pieces(content, len(_HEAD), len(content) - len(ending[0])):
        text += piece
        digest.update(piece)
    if digest.hexdigest().encode() != ending[1]:
        raise ValueError("a changed one")
    return text


def _pieces(content: bytes | bytearray, start: int, end: int) -> Iterator[bytes | bytearray]:
    while start < end:
        # A piece ends where a line does; strings have no line ends in them.
        stop = content.find(b"\n ", min(start + _PIECE_BYTES, end), end)
        stop = end if stop < 0 else stop
        yield content[start:stop].replace(b"\n ", b"\n")
        start = stop


def _by_lines(text: bytearray) -> Any:
    """Parse what ``json.dumps(..., indent=1)`` wrote without holding the interpreter's lock for long.

    Raises:
        ValueError: it is something else.
    """
    root: list[Any] = []
    stack: list[Any] = [root]
    for line in _lines(text):
        if line in (b"}", b"]"):
            stack.pop()
            continue
        if not 0 < len(stack) <= LEVELS:
            raise ValueError("more levels than can be")
        opens = line[-1:] in (b"{", b"[")
        whole = line + (b"}" if line[-1:] == b"{" else b"]") if opens else line
        if isinstance(stack[-1], dict):
            [(key, value)] = json.loads(b"{" + whole + b"}", **STRICT).items()
            if key in stack[-1]:
                raise ValueError(f"a duplicate key {key!r}")
            stack[-1][key] = value
        else:
            value = json.loads(whole, **STRICT)
            stack[-1].append(value)
        if opens:
            stack.append(value)
    [body] = root
    return body


def _lines(text: bytearray) -> Iterator[bytes]:
    start = 0
    while start < len(text):
        stop = text.find(b"\n", start)
        stop = len(text) if stop < 0 else stop
        yield bytes(text[start:stop]).strip().removesuffix(b",")
        start = stop + 1


def is_shallow(value: Any) -> bool:
    """Whether whoever walks through it will not run out of stack."""
    level = [value]
    for _ in range(LEVELS):
        level = [
            child
            for node in level
            if isinstance(node, (dict, list))
            for child in (node.values() if isinstance(node, dict) else node)
        ]
    return not level


def _well_formed(body: Any) -> bool:
    return (
        isinstance(body, dict)
        and body.keys() == {"data", "files", "libraries", "state"}
        and isinstance(body["data"], str)
        and DATA.fullmatch(body["data"]) is not None
        and are_files(body["files"])
        and isinstance(body["libraries"], dict)
    )


def are_files(table: Any) -> bool:
    """Whether it is what a manifest says of files, by name."""
    return isinstance(table, dict) and all(NAME.fullmatch(name) and _is_entry(entry) for name, entry in table.items())


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and type(entry.get("bytes")) is int
        and entry["bytes"] >= 0
        and _has_digest(entry)
        and isinstance(entry.get("identity", ""), str)
        and isinstance(entry.get("dtypes", {}), dict)
        and all(isinstance(name, str) and name in DTYPES for name in entry.get("dtypes", {}).values())
        and _is_stamp(entry.get("stamp", [0, 0]))
    )


def _has_digest(entry: dict[str, Any]) -> bool:
    try:
        digests.of_entry(entry)
    except ValueError:
        return False
    return True


def _is_stamp(stamp: Any) -> bool:
    return isinstance(stamp, list) and len(stamp) == 2 and all(type(number) is int for number in stamp)


def _dumped(value: Any) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False, ensure_ascii=True).encode()


def _libraries() -> dict[str, str]:
    return {
        "asyncbuf": __version__,
        "safetensors": safetensors.__version__,
        "torch": str(torch.__version__),
    }


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys are there once.

    Raises:
        ValueError: one is there twice.
    """
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError(f"a duplicate key among {[key for key, _ in pairs][:8]}")
    return result


def refuse(constant: str) -> Any:
    """For what JSON has no constants for.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"the constant {constant}")


STRICT: dict[str, Any] = {"object_pairs_hook": unique, "parse_constant": refuse}
