"""Shows reports: as tables of rich in a terminal, if that is installed, otherwise as plain text."""

from __future__ import annotations

import importlib.util
import io
import sys
from typing import TYPE_CHECKING, Any

from asyncbuf._cli.reports import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncbuf._cli.reports import Report


def show(report: Report) -> None:
    """Print a report."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what the terminal has no letters for
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        _show_with_rich(report)
    else:
        for line in plain_lines(report):
            print(line)


def plain_lines(report: Report) -> Iterator[str]:
    """A report as plain text."""
    for number, block in enumerate(report):
        if isinstance(block, str):
            yield one_line(block)
            continue
        yield from ("", block.title) if number else (block.title,)
        lines = [[one_line(cell) for cell in row] for row in (block.header, *block.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        yield from (f"  {note}" for note in block.notes)


def one_line(text: str) -> str:
    """Text of a file without what would move the cursor, or worse."""
    return "".join(letter if letter.isprintable() else _escaped(letter) for letter in text)


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape", "backslashreplace").decode()


def _show_with_rich(report: Report) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console()
    for block in report:
        if not isinstance(block, Table):
            console.print(Text(one_line(block)))
            continue
        table: Any = RichTable(title=Text(block.title), title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
        for name in block.header:
            table.add_column(name, overflow="fold")
        for row in block.rows:
            table.add_row(*(Text(one_line(cell)) for cell in row))
        console.print(table)
        for note in block.notes:
            console.print(Text(note, style="dim"))
