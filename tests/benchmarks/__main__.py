"""``python -m tests.benchmarks``: the table; ``--tiny`` runs everything once, to see that it works."""

from __future__ import annotations

import argparse
import asyncio

import torch

from tests.benchmarks import sample
from tests.benchmarks.harness import interleave, load, ratio

try:
    from uvloop import new_event_loop
except ImportError:
    from asyncio import new_event_loop  # type: ignore[assignment, unused-ignore]


async def main(rounds: int, calls: int, count: int) -> None:
    """Run and print."""
    print(f"sample(), batch {sample.BATCH}, {count} rows of 165 bytes; {load()}")
    found = await sample.contenders(count)
    await interleave(found, rounds=rounds, calls=calls)
    ours = found[0]
    for contender in found:
        least, middle, most = ratio(contender, ours)
        print(
            f"{contender.name:>14}: {contender.median * 1e6:8.1f} us, "
            f"{middle:5.2f} x asyncbuf (least {least:.2f}, most {most:.2f})"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="once, with small sizes")
    tiny = parser.parse_args().tiny
    torch.set_num_threads(1)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main(1, 10, 1_000) if tiny else main(15, 2_000, 1_000_000))
