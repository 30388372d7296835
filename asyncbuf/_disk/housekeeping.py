"""What is at a place, and removing what saves left there that did not come to their end.

Only a manifest, or the draft of one, makes a directory ours; and only what nobody is at work in is removed. A save that
is under way is at work in its directory and in its data directory, a reader in the data directory that it reads.
"""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import os
import re
import secrets
from typing import TYPE_CHECKING

from asyncbuf._disk import files
from asyncbuf._disk.lock import alone
from asyncbuf._disk.manifest import DATA, FORMAT, KEY, MANIFEST, is_checkpoint, read
from asyncbuf.errors import CheckpointError, CheckpointNotFoundError

if TYPE_CHECKING:
    from pathlib import Path

# A name on Linux and macOS; a temporary one is never longer than the name that it stands for may be.
_NAME_BYTES = 255
_DRAFT_BYTES = 1024
# How often what seems to be something else is looked at.
_LOOKS = 5
_UNSEEN = re.compile(rf"(?:manifest\.json\.|draft-)({KEY})")
_TEMPORARY = re.compile(rf"\..+\.tmp-{KEY}")

_logger = logging.getLogger("asyncbuf")


class Found(enum.Enum):
    """What is at a place."""

    NOTHING = "nothing"
    OURS = "a checkpoint, or what a save left that did not come to its end"
    OTHER = "something else"


def found_at(path: Path) -> Found:
    """Whether a checkpoint may be made there."""
    for _ in range(_LOOKS):
        if not files.is_directory(path):
            return Found.OTHER if files.exists(path) else Found.NOTHING
        # One may be removed, and another one put in its place, while it is looked at: then neither a manifest nor a
        # draft is found. So what is no checkpoint is looked at again.
        with contextlib.suppress(FileNotFoundError):
            if is_checkpoint(path) or _is_unfinished(path):
                return Found.OURS
    return Found.OTHER


def data_name(key: str) -> str:
    """The name of a data directory."""
    return f"data-{key}"


def unseen_name(key: str) -> str:
    """The name of a manifest that is not yet in place."""
    return f"{MANIFEST}.{key}"


def draft_name(key: str) -> str:
    """The name of what says that a directory is ours before it has a manifest."""
    return f"draft-{key}"


def temporary(path: Path, key: str) -> Path:
    """A name beside a path that nobody looks at."""
    tail = f".tmp-{key}"
    room = _NAME_BYTES - 1 - len(tail)
    name = path.name
    while len(os.fsencode(name)) > room:
        name = name[:-1]
    return path.with_name(f".{name}{tail}")


def new_key() -> str:
    """What makes the names of a save differ from those of all others."""
    return secrets.token_hex(8)


def _is_unfinished(path: Path) -> bool:
    """Whether all that is in a directory was left by saves before their first commit; also if nothing is."""
    names = files.names(path)
    if not all(DATA.fullmatch(name) or _UNSEEN.fullmatch(name) for name in names):
        return False
    drafts = [path / name for name in names if name.startswith("draft-")]
    return any(map(_is_draft, drafts)) or not any(_has_content(path / name) for name in names)


def _is_draft(path: Path) -> bool:
    try:
        document = json.loads(files.read_whole(path, _DRAFT_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("format") == FORMAT


def _has_content(path: Path) -> bool:
    found = files.stat(path)
    if found is None:
        return False
    return bool(files.names(path)) if files.is_directory(path) else found.st_size > 0


def committed(path: Path) -> str | None:
    """The name of the data directory of the checkpoint that is at a place; None if there is no checkpoint.

    Raises:
        OSError, CheckpointError: that cannot be told.
    """
    try:
        return read(path).data
    except CheckpointNotFoundError:
        return None


def tidy(path: Path) -> None:
    """Remove what the manifest of a checkpoint does not name, unless somebody is at work there."""
    names = files.names(path)
    for name in filter(DATA.fullmatch, names):
        held = alone(path / name)
        if held is None:
            continue
        try:
            # A save that was at work there has ended. Whether it committed is looked up after that was seen.
            if committed(path) != name:
                files.remove_tree(path / name)
        finally:
            held.release()
    for name in names:
        left = _UNSEEN.fullmatch(name)
        # A save makes its data directory first.
        if left is not None and not files.exists(path / data_name(left[1])):
            files.unlink(path / name)


def sweep(directory: Path) -> None:
    """Remove what saves left beside the checkpoints in a directory that did not come to their end."""
    for name in filter(_TEMPORARY.fullmatch, files.names(directory)):
        path = directory / name
        if files.is_link(path) or not files.is_directory(path):
            continue
        try:
            _remove_temporary(path)
        except (OSError, CheckpointError) as error:
            _logger.warning("%s, which a save left, could not be removed: %r", path, error)


def _remove_temporary(path: Path) -> None:
    held = alone(path)
    if held is None:
        return
    try:
        if found_at(path) is Found.OURS:
            remove_ours(path)
    finally:
        held.release()


def remove_ours(path: Path) -> None:
    """Remove a directory that is ours; what says so goes last, so that the rest can be removed another time."""
    names = files.names(path)
    proofs = [name for name in names if name == MANIFEST or name.startswith("draft-")]
    for name in names:
        if files.is_directory(path / name) and not files.is_link(path / name):
            files.remove_tree(path / name)
        elif name not in proofs:
            files.unlink(path / name)
    for name in proofs:
        files.unlink(path / name)
    files.rmdir(path)


def remove(path: Path) -> bool:
    """Remove a checkpoint in which nobody is at work: whether that was so. No half of it is ever found."""
    held = alone(path)
    if held is None:
        return False
    inside = []
    try:
        for name in filter(DATA.fullmatch, files.names(path)):
            inside.append(alone(path / name))
            if inside[-1] is None:
                return False
        gone = temporary(path, new_key())
        files.rename(path, gone)
        remove_ours(gone)
    finally:
        for each in (*inside, held):
            if each is not None:
                each.release()
    return True
