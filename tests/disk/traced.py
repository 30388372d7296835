"""What is done to files, in order: as the thin layer does it, or as the system is asked by a process under strace."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from asyncbuf._disk import files
from tests.disk.helpers import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Each changes something, or makes it last.
OPERATIONS = (
    *("mkdir", "create", "write", "sync", "sync_directory"),
    *("rename", "replace", "link", "unlink", "rmdir", "remove_tree"),
)
LOOKS = ("names", "stat", "open_file", "read_into", "status", "ends", "read_whole")
STRACE = shutil.which("strace")
needs_strace = pytest.mark.skipif(
    STRACE is None or not sys.platform.startswith("linux"), reason="needs strace, and a system where it may trace"
)


class Done(NamedTuple):
    """An operation.

    Attributes:
        name: what was done: ``create``, ``sync``, ``sync_directory``, ``rename`` or another one.
        path: the file or directory, or what is renamed or linked.
        target: where that goes.
    """

    name: str
    path: Path
    target: Path | None = None


@contextmanager
def watched(before: Callable[[str, Path], None], names: tuple[str, ...] = OPERATIONS) -> Iterator[list[Done]]:
    """Note what is done to files in the block.

    Args:
        before: called before each operation, which does not happen if it raises.
        names: which operations are noted.
    """
    done: list[Done] = []

    def wrapped(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            paths = [argument for argument in arguments if isinstance(argument, Path)]
            before(name, paths[0])
            result = operation(*arguments, **options)
            done.append(Done(name, *paths[:2]))
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(files, name, wrapped(name, getattr(files, name)))
        yield done


# -- strace -----------------------------------------------------------------------------------------------------------

CALLS = "openat,mkdir,write,pwrite64,fsync,fdatasync,rename,renameat,renameat2,link,linkat,unlink,unlinkat,rmdir"
CALLS += ",getdents64,flock,chmod,fchmod"
_UNFINISHED = " <unfinished ...>"
_RESUMED = re.compile(r"<\.\.\. \w+ resumed>")
_LINE = re.compile(r"^\d+ +(?:\S+ )?(\w+)\((.*)\) += +(-?\d+)")


def strace(root: Path, script: str, *arguments: str, inject: str | None = None) -> tuple[list[str], int, str]:
    """Run a program under strace.

    Args:
        root: only calls that have to do with what is in this directory are traced.
        script: the program.
        *arguments: its arguments.
        inject: a fault, as strace takes it.

    Returns:
        The lines of the trace, the exit status of the program, and what it wrote to its standard error.
    """
    assert STRACE is not None
    log = root.parent / f"{root.name}.strace"
    command = [STRACE, "-f", "-qq", "-y", "-s", "0", "-e", f"trace={CALLS}", "-e", "signal=none", "-o", str(log)]
    command += [] if inject is None else ["-e", f"inject={inject}"]
    process = subprocess.run(
        [*command, sys.executable, "-c", script, str(root), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    lines = _whole(log.read_text().splitlines())
    return [line for line in lines if str(root) in line], process.returncode, process.stderr


def _whole(lines: list[str]) -> list[str]:
    """Calls during which other threads made calls stand in two lines: put together where they end."""
    begun: dict[str, str] = {}
    whole = []
    for line in lines:
        thread = line.split(" ", 1)[0]
        if line.endswith(_UNFINISHED):
            begun[thread] = line.removesuffix(_UNFINISHED)
        elif found := _RESUMED.search(line):
            whole.append(begun.pop(thread, "") + line[found.end() :])
        else:
            whole.append(line)
    return whole


def done_of(lines: list[str]) -> list[Done]:
    """What a trace says was done, as ``watched`` notes it."""
    done = []
    for line in lines:
        found = _LINE.match(line)
        if found is None or int(found[3]) < 0:
            continue
        call, given = found[1], found[2]
        names = [Path(name) for name in re.findall(r'"([^"]*)"', given)]
        handle = re.match(r"\d+<([^>]*)>", given)
        if call in ("fsync", "fdatasync") and handle:
            done.append(Done("fsync", Path(handle[1])))
        elif call in ("write", "pwrite64") and handle:
            done.append(Done("write", Path(handle[1])))
        elif call == "openat" and "O_CREAT" in given:
            done.append(Done("create", names[-1]))
        elif call.startswith(("rename", "link")):
            done.append(Done(call.rstrip("at2"), *names[:2]))
        elif call.startswith(("unlink", "rmdir")):
            done.append(Done("unlink", names[-1]))
        elif call == "mkdir":
            done.append(Done("mkdir", names[0]))
    return done
