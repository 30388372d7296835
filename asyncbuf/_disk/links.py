"""Files of other checkpoints that are used again: a second name for the same file, so that both checkpoints are whole.

Nobody ever writes into a file of a checkpoint, and a file is gone with its last name. So either may be removed.
"""

from __future__ import annotations

import logging
import stat as modes
from typing import TYPE_CHECKING, Any

from asyncbuf._disk import files
from asyncbuf._disk.reader import identity_of, table_of
from asyncbuf.errors import CheckpointError

if TYPE_CHECKING:
    import os
    from pathlib import Path

_logger = logging.getLogger("asyncbuf")


class Links:
    """The files of other checkpoints, by what is in them."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Path, dict[str, Any]]] = {}

    def add(self, path: Path, *, is_expected: bool = False) -> None:
        """Use the files of a checkpoint. Where that cannot be read, everything is written anew.

        Args:
            path: its directory.
            is_expected: whether to say so.
        """
        try:
            data, table = table_of(path)
        except (OSError, CheckpointError) as error:
            if is_expected:
                _logger.warning(
                    "everything is written: base expected a checkpoint whose files can be used again: %s", error
                )
            return
        for name, entry in table.items():
            if "stamp" in entry:
                found = data / name, entry
                self._known.setdefault(identity_of(entry), found)
                if "identity" in entry:
                    self._known.setdefault(entry["identity"], found)

    def link(self, identity: str, target: Path) -> dict[str, Any] | None:
        """Give a file another name.

        Args:
            identity: what is to be in it.
            target: the name.

        Returns:
            What the manifest says of the file; None if there is none, it is not as it was written, or cannot have
            another name.
        """
        found = self._known.get(identity)
        if found is None:
            return None
        source, entry = found
        try:
            files.link(source, target)
            # Looked at when it has the new name, which nobody exchanges for something else.
            if _is_as_written(files.stat(target), entry):
                return {**entry, "identity": identity}
        except OSError as error:
            _logger.debug("%s cannot be used again, and is written anew: %r", source, error)
        files.unlink(target)
        return None


def _is_as_written(found: os.stat_result | None, entry: dict[str, Any]) -> bool:
    return (
        found is not None
        and modes.S_ISREG(found.st_mode)
        and found.st_size == entry["bytes"]
        and [found.st_ino, found.st_mtime_ns] == entry["stamp"]
    )
