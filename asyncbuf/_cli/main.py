"""``asyncbuf inspect | verify | diff | list | prune``: see ``docs/inspecting.md``.

Exit status 0: all is well. 1: something is damaged or differs. 2: wrong usage, not a checkpoint, or not to be read.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from asyncbuf import checkpoint
from asyncbuf._cli import reports
from asyncbuf._cli.printing import one_line, show
from asyncbuf._version import __version__
from asyncbuf.errors import CheckpointCorruptError, CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncbuf._cli.reports import Report

OK, BAD, UNUSABLE = 0, 1, 2
# What shells report of a command that such a signal ended.
_INTERRUPTED, _BROKEN_PIPE = 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: its arguments; those of the process by default.

    Returns:
        The exit status.
    """
    try:
        arguments = _parser().parse_args(argv)
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        _forget_output()
        return _BROKEN_PIPE
    except (CheckpointError, OSError, ValueError) as error:
        return _failed(error)
    return status


def _forget_output() -> None:
    """Nobody reads it any more, also not what is still to be flushed."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _failed(error: Exception) -> int:
    sys.stdout.flush()
    print(f"asyncbuf: {one_line(str(error))}", file=sys.stderr)
    return BAD if isinstance(error, CheckpointCorruptError) else UNUSABLE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="asyncbuf", description="Looks into checkpoints.")
    parser.add_argument("--version", action="version", version=f"asyncbuf {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Any, about: str, *paths: str, **options: Any) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=about, description=about)
        for path in paths:
            added.add_argument(path.lower(), metavar=path, **options)
        added.add_argument("--json", action="store_true", help="print JSON")
        added.set_defaults(run=run)
        return added

    inspect = command("inspect", _inspect, "Say what a checkpoint holds.", "PATH")
    inspect.add_argument("--all", action="store_true", help="show every leaf and ticket")
    command("verify", _verify, "Read checkpoints, and compare every file with its digest.", "PATH", nargs="+")
    diff = command("diff", _diff, "Say in what two checkpoints differ.", "A", "B")
    diff.add_argument("--all", action="store_true", help="show every leaf")
    command("list", _list, "List the checkpoints of a Checkpointer, the newest first.", "DIR")
    prune = command("prune", _prune, "Remove the oldest checkpoints of a Checkpointer.", "DIR")
    prune.add_argument("--keep", metavar="N", type=int, required=True, help="how many stay, at least 1")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    return parser


def _print(arguments: argparse.Namespace, report: Report, plain: Any) -> None:
    if arguments.json:
        print(json.dumps(plain, indent=2))
    else:
        show(report)


def _inspect(arguments: argparse.Namespace) -> int:
    info = checkpoint.inspect(arguments.path)
    _print(arguments, reports.of_info(info, everything=arguments.all), reports.plain(info))
    return OK


def _verify(arguments: argparse.Namespace) -> int:
    status, plain = OK, []
    for path in arguments.path:
        try:
            found = checkpoint.verify(path)
        except (CheckpointError, OSError) as error:
            status = max(status, _failed(error))
            plain.append({"path": os.path.abspath(path), "error": str(error)})
            continue
        status = max(status, OK if found.is_sound else BAD)
        plain.append(reports.plain(found))
        if not arguments.json:
            show(reports.of_verification(found))
    if arguments.json:
        print(json.dumps(plain, indent=2))
    return status


def _diff(arguments: argparse.Namespace) -> int:
    found = checkpoint.diff(arguments.a, arguments.b)
    _print(arguments, reports.of_difference(found, everything=arguments.all), reports.plain(found))
    return OK if found.is_same else BAD


def _list(arguments: argparse.Namespace) -> int:
    found = checkpoint.list_checkpoints(arguments.dir)
    _print(arguments, reports.of_list(found), [reports.plain(each) for each in found])
    return BAD if any(each.problem is not None for each in found) else OK


def _prune(arguments: argparse.Namespace) -> int:
    found = checkpoint.prune(arguments.dir, keep=arguments.keep, dry_run=arguments.dry_run)
    plain = {**reports.plain(found), "dry_run": arguments.dry_run}
    _print(arguments, reports.of_pruned(found, dry_run=arguments.dry_run), plain)
    return BAD if found.failed else OK
