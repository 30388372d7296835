"""``python -m tests.benchmarks``: asyncbuf beside what users would pick instead, in one interleaved run."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table

from tests.benchmarks.suites import DEFAULT, NAMES, everything

if TYPE_CHECKING:
    from tests.benchmarks.harness import Comparison


def table(comparison: Comparison) -> Table:
    """What was measured, for people."""
    found = Table(title=f"{comparison.title}\n[dim]{comparison.rounds} rounds; {comparison.load}", title_justify="left")
    found.add_column("", no_wrap=True)
    for heading in ("median", "least", "most", "multiple of the first (least to most)"):
        found.add_column(heading, justify="right")
    for one in comparison.contenders:
        least, middle, most = comparison.ratio(one)
        times = [f"{value * 1e6:,.1f} us" for value in (one.median, min(one.seconds), max(one.seconds))]
        found.add_row(one.name, *times, f"{middle:.2f} ({least:.2f} to {most:.2f})")
    for name in comparison.missing:
        found.add_row(f"[dim]{name}: not installed")
    return found


def picture(comparisons: list[Comparison], path: Path) -> None:
    """The ratios as bars, one panel for each comparison."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.5 + sum(0.35 * len(one.contenders) + 0.9 for one in comparisons)))
    heights = [len(one.contenders) + 2 for one in comparisons]
    axes = figure.subplots(len(comparisons), 1, squeeze=False, height_ratios=heights)
    for (panel,), comparison in zip(axes, comparisons, strict=True):
        names = [one.name for one in comparison.contenders]
        ratios = [comparison.ratio(one) for one in comparison.contenders]
        middle = [ratio[1] for ratio in ratios]
        spread = [[ratio[1] - ratio[0] for ratio in ratios], [ratio[2] - ratio[1] for ratio in ratios]]
        panel.barh(names, middle, xerr=spread, color="tab:blue", ecolor="grey")
        panel.invert_yaxis()
        panel.axvline(1, color="black", linewidth=0.8)
        panel.set_title(f"{comparison.title}: time, in multiples of the first", fontsize=9, loc="left")
        panel.tick_params(labelsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


async def main(arguments: argparse.Namespace) -> None:
    """Run what was asked for, and print each table as soon as it is there."""
    console, done = Console(width=120), []
    scale, rounds = (0.0005, 1) if arguments.tiny else (1.0, arguments.rounds)
    names = NAMES if arguments.tiny else DEFAULT
    async for comparison in everything(set(arguments.suites or names), scale, rounds):
        await comparison.run()
        console.print(table(comparison), "")
        done.append(comparison)
    if arguments.json:
        arguments.json.write_text(json.dumps([comparison.plain() for comparison in done], indent=1))
    if arguments.picture:
        picture(done, arguments.picture)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "suites", nargs="*", metavar="suite", help=f"of {', '.join(NAMES)}; default {', '.join(DEFAULT)}"
    )
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop", help="event loop")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    parser.add_argument("--picture", type=Path, help="draw the ratios into this file")
    parser.add_argument("--tiny", action="store_true", help="once, with small sizes, to see that everything works")
    arguments = parser.parse_args()
    if unknown := set(arguments.suites) - set(NAMES):
        parser.error(f"expected suites of {', '.join(NAMES)}; found {', '.join(sorted(unknown))}")
    return arguments


if __name__ == "__main__":
    asked = parsed()
    torch.set_num_threads(1)
    loop = importlib.import_module(asked.loop)
    with asyncio.Runner(loop_factory=loop.new_event_loop) as runner:
        runner.run(main(asked))
