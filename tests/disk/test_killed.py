"""Processes that are killed at any moment: while they save first, again or a part, prune, sweep, or load.

Run as a program (``python -m tests.disk.test_killed FOLDER KILLS SEED``), this module is the process whose children
die.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import Checkpointer, ReplayBuffer, TensorStorage
from asyncbuf.checkpoint.snapshot import Snapshot
from tests.disk.helpers import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

# Rows and numbers in a row: from a few KB to 50 MB.
SIZES = [(50, 4), (2_000, 100), (20_000, 100), (50_000, 250)]
MOST_SECONDS = 1.5


def items(start: int, count: int, width: int) -> dict[str, torch.Tensor]:
    """Items that are their own numbers."""
    numbers = torch.arange(start, start + count)
    return {"n": numbers, "x": (numbers[:, None] + torch.arange(width)).to(torch.float32)}


def new_buffer(rows: int) -> ReplayBuffer:
    return ReplayBuffer(TensorStorage(rows), batch_size=4)


def check(snapshot: Snapshot, rows: int, width: int) -> int:
    """The number of items that were written; every row must be the item that it is at that point."""
    state, frozen = snapshot.contents
    written = int(state["writer"]["write_count"])
    first = max(0, written - rows)
    order = torch.arange(first, written) % rows
    expected = items(first, written - first, width)
    for name, tensor in expected.items():
        found = torch.cat([chunk.tensors[name] for chunk in frozen.chunks()])
        wanted = torch.empty_like(tensor)
        wanted[order] = tensor
        assert found.equal(wanted), f"{name} of {written} items"
    return written


async def work(root: Path, size: tuple[int, int], seed: int, tell: Callable[[str], object]) -> None:
    """Go on from the last checkpoint, and save in every way again and again."""
    rows, width = size
    rng = random.Random(seed)
    checkpointer, buffer = Checkpointer(root / "runs", keep=2), new_buffer(rows)
    if checkpointer.latest() is not None:
        await checkpointer.restore(buffer=buffer, partial=True)
    step = (checkpointer.latest() or 0) + 1
    written = int((await buffer.snapshot()).contents[0]["writer"]["write_count"])
    while True:
        count = rng.choice([rows, max(1, rows // 20), max(1, rows // 3), 0])
        if count:
            await buffer.extend(items(written, count, width))
            written += count
        if not written:
            continue
        await checkpointer.save(step, buffer=buffer, text="y" * rng.choice([10, 200_000]))
        tell(f"runs {written}")
        step += 1
        await buffer.save(root / "one", base=checkpointer.path(step - 1) if rng.random() < 0.5 else None)
        tell(f"one {written}")
        if rng.random() < 0.3:
            await new_buffer(rows).load(root / "one")
        await buffer.save(root / f"first-{rng.randrange(4)}" / "x")


def in_child(action: Callable[[], Any]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child


def kill_amid(root: Path, size: tuple[int, int], seed: int, seconds: float) -> dict[str, int]:
    """Let a process save, and kill it after a while: what it said that it had saved."""
    told, telling = os.pipe()
    child = in_child(lambda: asyncio.run(work(root, size, seed, lambda text: os.write(telling, f"{text}\n".encode()))))
    os.close(telling)
    text, deadline = b"", time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if select.select([told], [], [], left)[0]:
            piece = os.read(told, 4096)
            assert piece, "the process ended by itself"
            text += piece
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    while piece := os.read(told, 4096):
        text += piece
    os.close(told)
    return {name: int(number) for name, number in (line.split() for line in text.decode().splitlines())}


def check_all(root: Path, size: tuple[int, int], least: dict[str, int]) -> None:
    """Every checkpoint that is there is whole and exact, and the newest is not older than what was said to be saved."""
    newest = {"runs": -1, "one": -1}
    paths = [*(root / "runs").glob("step-*"), root / "one", *root.glob("first-*/x")]
    for path in filter(Path.exists, paths):
        prefix = path.parent.name if path.parent.name == "runs" else path.name
        snapshot = snapshot_of(path)
        if snapshot is not None:
            newest[prefix] = max(newest.get(prefix, -1), check(snapshot, *size))
    assert all(newest[name] >= number for name, number in least.items()), f"{newest} but {least} was saved"
    print(json.dumps({**newest, "bytes": disk_use(root)}), flush=True)


def snapshot_of(path: Path) -> Snapshot | None:
    from asyncbuf._disk.reader import CheckpointReader

    if path.parent.name != "runs":
        return Snapshot.open(path)
    reader = CheckpointReader(path)
    assert len(str(reader.document(reader.state["parts"]["text"]["state"]))) in (10, 200_000)
    return Snapshot.read(reader, reader.state["parts"]["buffer"]["state"], "buffer/")


def disk_use(root: Path) -> int:
    """Bytes of all files, each counted once whatever its names."""
    found = {(status := file.stat()).st_ino: status.st_size for file in root.rglob("*") if file.is_file()}
    return sum(found.values())


def main() -> None:
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    rng = random.Random(seed)
    least: dict[int, dict[str, int]] = {}
    for _ in range(kills):
        which = rng.randrange(len(SIZES))
        root = folder / str(which)
        root.mkdir(exist_ok=True)
        seconds = rng.uniform(0.02, MOST_SECONDS)
        least.setdefault(which, {}).update(kill_amid(root, SIZES[which], rng.randrange(1 << 30), seconds))
        child = in_child(lambda root=root, which=which: check_all(root, SIZES[which], least[which]))  # type: ignore[misc]
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, f"after {least}"
        nbytes = SIZES[which][0] * (SIZES[which][1] * 4 + 8)
        # Two steps, one that was not pruned, seven others, and what one that was killed left beside each.
        assert disk_use(root) < 20 * (nbytes + 1_000_000)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [3, pytest.param(300, marks=pytest.mark.slow)])
def test_killed_at_any_moment(tmp_path: Path, kills: int) -> None:
    process = subprocess.run(
        [sys.executable, "-m", __name__, str(tmp_path), str(kills), "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    reports = [json.loads(line) for line in process.stdout.splitlines()]
    assert len(reports) == kills
    assert max(report["runs"] for report in reports) > 0


if __name__ == "__main__":
    main()
