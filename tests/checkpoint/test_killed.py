"""Processes that are killed at any moment leave whole checkpoints.

Run as a program (``python -m tests.checkpoint.test_killed``), this module is the process whose children die.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf.checkpoint.checkpointer import Checkpointer
from tests.checkpoint.helpers import Run

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]


async def _save_until_killed(root: Path) -> None:
    checkpointer = Checkpointer(root, keep=2, rng=True)
    run = Run(0)
    if checkpointer.latest() is not None:
        run.step = (await checkpointer.restore(**run.objects)).values["progress"]
    async with run.buffer:
        while True:
            await run.train(1)
            await checkpointer.save(run.step, **run.objects, progress=run.step)


async def _check_latest(root: Path, expected: list[Any]) -> None:
    checkpointer = Checkpointer(root)
    steps = checkpointer.steps()
    if max(steps, default=0) >= len(expected):  # on a busy machine a process may live on after its kill is due
        expected = await _weights(steps[-1])
    for step in steps:
        run = Run(1)
        restored = await checkpointer.restore(step, **run.objects)
        assert restored.values["progress"] == step
        assert json.loads(json.dumps(repr(run.weights()))) == expected[step]
    print(json.dumps({"steps": steps, "entries": sorted(os.listdir(root)) if root.exists() else []}), flush=True)


async def _weights(steps: int) -> list[str]:
    run = Run(0)
    seen = [repr(run.weights())]
    async with run.buffer:
        for _ in range(steps):
            await run.train(1)
            seen.append(repr(run.weights()))
    return seen


def _in_child(action: Callable[[], Any]) -> int:
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return child


# What a save does to files; where it is when it is killed is told by how many of these it has done.
_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def _kill_amid(root: Path, operations: int) -> None:
    """Let a process save until it has begun so many operations on files, and kill it wherever it then is."""
    told, telling = os.pipe()

    def save() -> None:
        sys.addaudithook(lambda event, _: os.write(telling, b".") if event in _EVENTS else None)
        asyncio.run(_save_until_killed(root))

    child = _in_child(save)
    os.close(telling)
    left = operations
    while left:
        begun = os.read(told, left)
        assert begun, "the process ended by itself"
        left -= len(begun)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    os.close(told)


def main() -> None:
    root, kills = Path(sys.argv[1]), int(sys.argv[2])
    os.fsync = lambda fd: None
    torch.set_num_threads(1)
    rng = random.Random(int(sys.argv[3]))
    expected = asyncio.run(_weights(kills * 20))
    for _ in range(kills):
        _kill_amid(root, rng.randrange(1, 150))
        checked = _in_child(lambda: asyncio.run(_check_latest(root, expected)))
        assert os.waitstatus_to_exitcode(os.waitpid(checked, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kills", [4, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_killed_at_any_moment(tmp_path: Path, kills: int) -> None:
    process = subprocess.run(
        [sys.executable, "-m", __name__, str(tmp_path / "root"), str(kills), "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    reports = [json.loads(line) for line in process.stdout.splitlines()]
    latest = [max(report["steps"], default=0) for report in reports]
    assert len(reports) == kills
    assert latest == sorted(latest)
    assert latest[-1] >= 3  # it got somewhere, or nothing was tested
    # At most what the last one left, beside two checkpoints and one that was not pruned yet.
    assert len(reports[-1]["entries"]) <= 4


if __name__ == "__main__":
    main()
