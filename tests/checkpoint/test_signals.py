"""A signal that asks a program to end: it saves once more, and the stream goes on exactly.

Run as a program (``python -m tests.checkpoint.test_signals``), this module is the training run that gets the signals.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from asyncbuf import ReplayBuffer, SaveStage, StopSignal, TensorStorage
from asyncbuf.checkpoint.checkpointer import Checkpointer
from asyncbuf.testing import difference
from tests.checkpoint.helpers import Run, items
from tests.helpers import Crew, crossed, fingerprint, rows, seeded, turns, within

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

ROOT = Path(__file__).parents[2]
STEPS = 24
HANGS_AT = 9


class Child(Run):
    """The run: it may wait for data that never comes, or for a transform that never ends."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        super().__init__(0, prefetch=2, min_size=40)

    async def feed(self) -> None:
        """Write what belongs to a step. The buffer knows how much it has seen."""
        if self.buffer.write_count == 0:
            await self.buffer.extend(items(30, 100))
            if self.mode == "data":
                return  # no batch will come
        if self.buffer.write_count == 30:
            await self.buffer.extend(items(20, 101))

    async def learn(self, batch: Any) -> None:
        loss = self.model(batch["x"]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        print(self.step, abs(hash(repr(fingerprint(batch)))) % 10**12, f"{loss.item():.9e}", flush=True)
        await self.buffer.extend(items(3, self.step))


async def train(mode: str, root: Path) -> int:
    run, checkpointer = Child(mode), Checkpointer(root, keep=2)
    if checkpointer.latest() is not None:
        run.step = (await checkpointer.restore(**run.objects)).values["progress"]
    async with run.buffer, checkpointer:
        with checkpointer.on_signal() as stop:
            await run.feed()
            if mode == "data":
                print("waits", flush=True)
            async for batch in stop.iterate(run.buffer):
                await run.learn(batch)
                if run.step % 4 == 0:
                    await checkpointer.save_soon(run.step, **run.objects, progress=run.step)
                if run.step == STEPS:
                    break
        if stop.is_set():
            if mode == "hangs":
                print("hangs", flush=True)
                await asyncio.Event().wait()
            await checkpointer.save(run.step, **run.objects, progress=run.step)
    return stop.exit_code


def main(loop: str, mode: str, root: str) -> None:
    # As in a terminal: what a shell runs in the background would ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if loop == "uvloop":
        import uvloop

        sys.exit(uvloop.run(train(mode, Path(root))))
    sys.exit(asyncio.run(train(mode, Path(root))))


@contextlib.contextmanager
def child(loop: str, mode: str, root: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.checkpoint.test_signals", loop, mode, str(root)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def lines_until(process: subprocess.Popen[str], last: str) -> list[str]:
    """What a child prints, up to a line that begins so."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.strip())
        if lines[-1].split(" ")[0] == last:
            return lines
    assert process.stderr is not None
    pytest.fail(f"no {last!r} in {lines}: {process.stderr.read()}")


def ended(process: subprocess.Popen[str]) -> tuple[list[str], int, str]:
    """The last lines of a child, its exit status, and what it wrote to its standard error."""
    assert process.stdout is not None
    assert process.stderr is not None
    # Not communicate(): that knows nothing of lines that were read ahead together with those that were asked for.
    output, errors = process.stdout.read(), process.stderr.read()
    return output.split("\n")[:-1], process.wait(60), errors


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What an uninterrupted run prints."""
    with child("asyncio", "trains", tmp_path_factory.mktemp("reference")) as process:
        lines, code, errors = ended(process)
    assert code == 0, errors
    assert len(lines) == STEPS
    return lines


@pytest.mark.timeout(170)
@pytest.mark.parametrize(
    ("loop", "first", "second"),
    [
        pytest.param("asyncio", signal.SIGINT, signal.SIGTERM, marks=pytest.mark.slow),
        ("uvloop", signal.SIGTERM, signal.SIGINT),
    ],
)
def test_a_run_that_is_ended_by_signals_goes_on_exactly(
    loop: str, first: signal.Signals, second: signal.Signals, reference: list[str], tmp_path: Path
) -> None:
    printed: list[str] = []
    with child(loop, "data", tmp_path) as process:  # it waits for a batch that never comes
        lines_until(process, "waits")
        process.send_signal(first)
        lines, code, errors = ended(process)
        assert (lines, code) == ([], 128 + first), errors
    assert Checkpointer(tmp_path).steps() == [0]
    with child(loop, "trains", tmp_path) as process:
        printed += lines_until(process, "7")
        process.send_signal(second)
        lines, code, errors = ended(process)
        printed += lines
        assert code == 128 + second, errors
    assert Checkpointer(tmp_path).latest() == len(printed)
    with child(loop, "trains", tmp_path) as process:
        lines, code, errors = ended(process)
        assert code == 0, errors
    assert printed + lines == reference
    steps = Checkpointer(tmp_path).steps()
    assert len(steps) == 2
    assert steps[-1] == STEPS
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:06}" for step in steps]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("loop", "second"), crossed(["asyncio", "uvloop"], [signal.SIGINT, signal.SIGTERM], one_in=2), ids=str
)
def test_a_second_signal_ends_it_at_once(loop: str, second: signal.Signals, tmp_path: Path) -> None:
    with child(loop, "hangs", tmp_path) as process:
        lines_until(process, "5")
        process.send_signal(signal.SIGINT)
        lines_until(process, "hangs")
        process.send_signal(second)
        _, code, errors = ended(process)
    assert code == -second, errors  # by the signal itself: python does so for KeyboardInterrupt, too
    assert ("KeyboardInterrupt" in errors) == (second is signal.SIGINT)


# -- in this process --------------------------------------------------------------------------------------------------

NUMBER = signal.SIGUSR1


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """What a handler gets that was there before."""
    seen: list[int] = []
    before = signal.signal(NUMBER, lambda number, frame: seen.append(number))
    yield seen
    signal.signal(NUMBER, before)


def send() -> None:
    os.kill(os.getpid(), NUMBER)


async def test_the_first_is_noted_and_the_second_does_what_it_did_before(
    checkpointer: Checkpointer, handled: list[int]
) -> None:
    before = signal.getsignal(NUMBER)
    with checkpointer.on_signal([NUMBER]) as stop:
        assert not stop.is_set()
        assert (stop.received, stop.exit_code) == (None, 0)
        send()
        assert stop.is_set()  # also before the event loop has a turn
        assert await within(stop.wait()) is NUMBER
        assert (stop.received, stop.exit_code) == (NUMBER, 128 + NUMBER)
        assert handled == []
        send()
        assert handled == [NUMBER]
    assert signal.getsignal(NUMBER) is before
    assert stop.is_set()
    assert repr(stop) == "<StopSignal SIGUSR1: SIGUSR1 has come>"


async def test_without_a_signal_everything_is_as_before(checkpointer: Checkpointer, handled: list[int]) -> None:
    before = signal.getsignal(NUMBER)
    with checkpointer.on_signal([NUMBER, NUMBER]) as stop:
        assert signal.getsignal(NUMBER) is not before
    assert signal.getsignal(NUMBER) is before
    assert not stop.is_set()
    send()
    assert handled == [NUMBER]
    assert not stop.is_set()
    with stop:  # may be used again
        send()
        assert stop.is_set()
    with stop:
        assert not stop.is_set()


async def test_a_handler_that_was_set_meanwhile_stays(checkpointer: Checkpointer, handled: list[int]) -> None:
    with checkpointer.on_signal([NUMBER]):
        signal.signal(NUMBER, signal.SIG_IGN)
    assert signal.getsignal(NUMBER) is signal.SIG_IGN


async def test_several_wait(checkpointer: Checkpointer, handled: list[int]) -> None:
    with checkpointer.on_signal([NUMBER]) as stop:
        async with Crew() as crew:
            waiting = [crew.start(stop.wait()) for _ in range(3)]
            await turns()
            send()
            assert await within(asyncio.gather(*waiting)) == [NUMBER] * 3


async def test_who_waits_for_batches_is_woken_and_loses_none(checkpointer: Checkpointer, handled: list[int]) -> None:
    buffer = ReplayBuffer(TensorStorage(64), batch_size=4, min_size=10, generator=seeded(1))
    twin = ReplayBuffer(TensorStorage(64), batch_size=4, min_size=10, generator=seeded(1))
    async with buffer, twin, Crew() as crew:
        with checkpointer.on_signal([NUMBER]) as stop:

            async def consume() -> list[Any]:
                return [batch async for batch in stop.iterate(buffer)]

            consuming = [crew.start(consume()) for _ in range(3)]
            await turns()
            assert buffer.stats().waiting_consumers == 3
            send()
            assert await within(asyncio.gather(*consuming)) == [[], [], []]
            assert [batch async for batch in stop.iterate(buffer)] == []
        await buffer.extend(rows(20))
        await twin.extend(rows(20))
        for _ in range(3):
            assert difference(await within(buffer.sample()), await within(twin.sample())) is None


async def test_the_body_of_the_loop_is_not_interrupted(checkpointer: Checkpointer, handled: list[int]) -> None:
    buffer = ReplayBuffer(TensorStorage(64), batch_size=4, prefetch=2)
    seen = 0
    async with buffer:
        await buffer.extend(rows(20))
        with checkpointer.on_signal([NUMBER]) as stop:
            async for batch in stop.iterate(buffer):
                seen += 1
                if batch.number == 4:
                    send()
                    await turns(20)
                    seen += 100
    assert seen == 105


async def test_other_errors_and_ends_pass(checkpointer: Checkpointer, handled: list[int]) -> None:
    async def source(error: BaseException | None) -> AsyncIterator[int]:
        yield 1
        await asyncio.sleep(0)
        if error is not None:
            raise error

    with checkpointer.on_signal([NUMBER]) as stop:
        assert [number async for number in stop.iterate(source(None))] == [1]
        for error in (TimeoutError("its own"), KeyError("x"), asyncio.CancelledError()):
            with pytest.raises(type(error)):
                [number async for number in stop.iterate(source(error))]
        assert stop._scopes == set()


async def test_a_task_that_is_cancelled_while_it_waits_is_cancelled(
    checkpointer: Checkpointer, handled: list[int]
) -> None:
    event = asyncio.Event()

    async def source() -> AsyncIterator[int]:
        await event.wait()
        yield 1

    with checkpointer.on_signal([NUMBER]) as stop:
        async with Crew() as crew:

            async def consume() -> None:
                async for _ in stop.iterate(source()):
                    pass

            consuming = crew.start(consume())
            await turns()
            send()
            consuming.cancel()
            await asyncio.wait({consuming})
            assert consuming.cancelled()


async def test_the_last_save_can_be_given_up(checkpointer: Checkpointer, handled: list[int]) -> None:
    async with checkpointer:
        with checkpointer.on_signal([NUMBER]) as stop:
            send()
            await stop.wait()
        handle = await checkpointer.save_soon(1, n=1)
        handle.cancel()
    assert handle.progress.stage is SaveStage.CANCELLED


@pytest.mark.parametrize("wrong", [["SIGTERM"], [None], [1.5], [99_999], [0]])
def test_what_is_no_signal(checkpointer: Checkpointer, wrong: list[Any]) -> None:
    with pytest.raises((TypeError, ValueError), match="signals: expected"):
        checkpointer.on_signal(wrong)


async def test_a_signal_that_cannot_be_handled_leaves_the_others(
    checkpointer: Checkpointer, handled: list[int]
) -> None:
    before = signal.getsignal(NUMBER)
    with pytest.raises(OSError, match="Invalid argument"), checkpointer.on_signal([NUMBER, signal.SIGKILL]):
        pass
    assert signal.getsignal(NUMBER) is before


def test_elsewhere_than_in_a_coroutine_of_the_main_thread(checkpointer: Checkpointer) -> None:
    errors: list[str] = []

    async def enter() -> None:
        with checkpointer.on_signal():
            pass

    def run() -> None:
        try:
            asyncio.run(enter())
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "main thread" in errors[0]
    with pytest.raises(RuntimeError, match="no running event loop"), checkpointer.on_signal():
        pass


def test_where_the_loop_is_closed_when_it_comes(checkpointer: Checkpointer, handled: list[int]) -> None:
    stop = StopSignal([NUMBER])

    async def enter() -> None:
        stop.__enter__()

    asyncio.run(enter())
    send()
    assert stop.is_set()
    assert handled == []
    send()
    assert handled == [NUMBER]


if __name__ == "__main__":
    main(*sys.argv[1:])
