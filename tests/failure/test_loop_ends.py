"""The event loop or the program ends under an open buffer."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from asyncbuf import ReplayBuffer, TensorStorage
from tests.helpers import Latch, rows

LEFT_OPEN = """
import asyncio, signal, sys, threading
import torch, uvloop
from asyncbuf import ReplayBuffer, TensorStorage

async def main(way):
    def transform(data):
        if way == "thread":
            inside.set()
            release.wait()
        if way == "exit":
            raise SystemExit(3)
        return data

    async def sample():
        try:
            await buffer.sample()
        finally:
            release.set()

    def interrupt():
        if buffer.stats().waiting_consumers:
            signal.raise_signal(signal.SIGINT)
        else:
            asyncio.get_running_loop().call_soon(interrupt)

    inside, release = threading.Event(), threading.Event()
    buffer = ReplayBuffer(TensorStorage(100), batch_size=4, prefetch=2, workers=2, transform=transform)
    await buffer.extend({"x": torch.zeros(10)})
    await buffer.open()
    kept.append(buffer)
    if way == "waiting":
        await buffer.empty()
    if way == "interrupt":
        await buffer.empty()
        asyncio.get_running_loop().call_soon(interrupt)
        try:
            await buffer.sample()
        finally:
            await buffer.aclose()
    if way == "exit":
        ends = await asyncio.gather(*(buffer.sample() for _ in range(5)), return_exceptions=True)
        print([type(end).__name__ for end in ends], {repr(end.__cause__) for end in ends})
    if way in ("waiting", "thread"):
        kept.append(asyncio.create_task(sample()))
        while not (inside.is_set() if way == "thread" else buffer.stats().waiting_consumers):
            await asyncio.sleep(0)

# A shell lets programs that it starts in the background ignore the signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
kept = []
for way in sys.argv[1:]:
    print("way:", way, file=sys.stderr)
    for factory in (asyncio.new_event_loop, uvloop.new_event_loop):
        try:
            with asyncio.Runner(loop_factory=factory) as runner:
                runner.run(main(way))
        except KeyboardInterrupt:
            print("interrupted")
        print(way, "ended", [thread.name for thread in threading.enumerate() if thread.name.startswith("asyncbuf")])
"""


@pytest.fixture(scope="module")
def left_open() -> tuple[list[str], str]:
    """What it prints, and what it complains about."""
    pytest.importorskip("uvloop")
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", LEFT_OPEN, "idle", "waiting", "thread", "interrupt", "exit"],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout.splitlines(), process.stderr


@pytest.mark.timeout(170)  # it imports torch in a process of its own, which takes long on a busy machine
def test_a_program_may_end_with_an_open_buffer(left_open: tuple[list[str], str]) -> None:
    output, complaints = left_open
    expected = [line for way in ("idle", "waiting", "thread") for line in [f"{way} ended []"] * 2]
    expected += ["interrupted", "interrupt ended []"] * 2
    assert output[:-4] == expected
    before_exit, exit_line, _ = complaints.partition("way: exit\n")
    assert exit_line
    assert before_exit == "way: idle\nway: waiting\nway: thread\nway: interrupt\n"


@pytest.mark.timeout(170)
def test_a_transform_that_exits_tells_those_who_wait(left_open: tuple[list[str], str]) -> None:
    line = f"{['BufferFailedError'] * 5} {{'SystemExit(3)'}}"
    assert left_open[0][-4:] == [line, "exit ended []"] * 2


def test_a_buffer_outlives_the_event_loop_it_was_left_open_in() -> None:
    buffer = ReplayBuffer(TensorStorage(80), batch_size=4, workers=2)

    async def first() -> None:
        await buffer.extend(rows(80))
        await buffer.open()
        await buffer.sample()

    async def second() -> int:
        await buffer.aclose()
        async with buffer:
            return (await buffer.sample()).number

    asyncio.run(first())
    assert asyncio.run(second()) == 1


async def test_latches_of_these_tests_work() -> None:
    latch = Latch()
    thread = threading.Thread(target=latch.set)
    thread.start()
    await latch.reached()
    thread.join()
    latch.wait()
    assert latch.is_set
