"""What is wrong with a checkpoint, all of it: nothing is raised for what is damaged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from asyncbuf._disk.checked_file import CheckedFile
from asyncbuf._disk.manifest import MANIFEST
from asyncbuf._disk.pipeline import Pipeline
from asyncbuf._disk.reader import entered, faults, listed
from asyncbuf._disk.stop import Stop
from asyncbuf._disk.view import PIECE_BYTES, Usage, check_is_one, usage_of
from asyncbuf.errors import CheckpointCorruptError

if TYPE_CHECKING:
    from pathlib import Path


class Examination(NamedTuple):
    """How a checkpoint is.

    Attributes:
        usage: what its files take.
        problems: what is wrong, with the path of what it is wrong with.
    """

    usage: Usage
    problems: tuple[str, ...]


def examine(path: Path, *, reads: bool) -> Examination:
    """Look for what is wrong.

    Args:
        path: the directory.
        reads: whether files are read, and compared with their digests; otherwise only their sizes are looked at.

    Raises:
        CheckpointNotFoundError: it is no checkpoint.
        CheckpointVersionError: it is newer than this release.
        OSError: it cannot be opened.
    """
    check_is_one(path)
    try:
        body, held = entered(path)
    except CheckpointCorruptError as error:
        return Examination(usage_of([path / MANIFEST]), (str(error),))
    data = path / body.data
    try:
        problems, table = _table(body, data)
        problems += _digest_problems(data, table) if reads else [str(error) for _, error in faults(data, table)]
    finally:
        if held is not None:
            held.release()
    return Examination(usage_of([path / MANIFEST, *(data / name for name in table)]), tuple(problems))


def _table(body: Any, data: Path) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """What is known of the files, the one that says so among them."""
    try:
        return [], {**body.files, **listed(body, data)}
    except CheckpointCorruptError as error:
        return [str(error)], {}
    except OSError as error:
        return [_told(error)], {}


def _digest_problems(data: Path, table: dict[str, dict[str, Any]]) -> list[str]:
    """Read everything, several files at a time."""
    found: dict[str, str | None] = {name: str(error) for name, error in faults(data, table)}
    pipeline, stop = Pipeline(), Stop()

    def verify(name: str, entry: dict[str, Any]) -> None:
        found[name] = _problem(data / name, entry, stop)

    try:
        for name, entry in table.items():
            if name not in found:
                pipeline.add(min(entry["bytes"], PIECE_BYTES), verify, name, entry)
        pipeline.finish()
    except BaseException:
        stop.set()
        pipeline.give_up()
        raise
    return sorted(problem for problem in found.values() if problem is not None)


def _problem(path: Path, entry: dict[str, Any], stop: Stop) -> str | None:
    try:
        with CheckedFile(path, entry) as file:
            file.verify(stop)
    except CheckpointCorruptError as error:
        return str(error)
    except OSError as error:
        return _told(error)
    return None


def _told(error: OSError) -> str:
    return f"{error.filename}: expected a file that can be read, found {error.strerror or error}"
