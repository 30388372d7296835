"""Saving and loading beside plain files, and what the event loop notices of it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf import ListStorage, ReplayBuffer, TensorStorage
from tests.benchmarks.harness import Comparison, Contender

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

ROW_BYTES = 4096
PIECE_BYTES = 8 * 1024 * 1024
TICK = 0.001


def rows(count: int) -> dict[str, torch.Tensor]:
    """Rows of 4 KB that no file system can make smaller."""
    return {"x": torch.randint(0, 256, (count, ROW_BYTES), dtype=torch.uint8)}


async def filled(count: int) -> ReplayBuffer:
    """A buffer full of them."""
    buffer = ReplayBuffer(
        TensorStorage(count), batch_size=256, prefetch=2, workers=1, generator=torch.Generator().manual_seed(0)
    )
    for start in range(0, count, 4096):
        await buffer.extend(rows(min(4096, count - start)))
    return await buffer.open()


def removed(path: Path) -> Path:
    """The path of what is not there any more, with nothing of other files left to be written."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    os.sync()
    return path


def forgotten(path: Path) -> None:
    """Let the system forget what it knows of files, so that reading them is reading from the disk."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file() and hasattr(os, "posix_fadvise"):
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_plain(content: np.ndarray[Any, Any], path: Path) -> None:
    """What writing costs at least: the same bytes in one file, synced."""
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(content), PIECE_BYTES):
            file.write(content[start : start + PIECE_BYTES].data)
        os.fsync(file.fileno())


def read_plain(path: Path) -> None:
    """What loading costs at least: the same bytes, read into memory that did not hold them before."""
    content = np.empty(path.stat().st_size, np.uint8)
    with path.open("rb", buffering=0) as file:
        for start in range(0, len(content), PIECE_BYTES):
            file.readinto(content[start : start + PIECE_BYTES].data)


def threaded(name: str, function: Callable[..., object], *args: Any, before: Any = None) -> Contender:
    """A call in a thread, as a contender."""

    async def run(calls: int) -> None:
        for _ in range(calls):
            await asyncio.to_thread(function, *args)

    return Contender(name, run, before=before)


def timed(name: str, call: Callable[[], Awaitable[object]], before: Any = None) -> Contender:
    """A call that is awaited, as a contender."""

    async def run(calls: int) -> None:
        for _ in range(calls):
            await call()

    return Contender(name, run, before=before)


async def files(folder: Path, scale: float, rounds: int) -> AsyncIterator[Comparison]:
    """A save, a second one and a load of 1 GB."""
    count = int(scale * 2**30 / ROW_BYTES) + 2048
    buffer = await filled(count)
    content = np.random.default_rng(0).integers(0, 256, count * ROW_BYTES, np.uint8)
    plain, path, second = folder / "plain", folder / "full", folder / "second"
    size = f"{count * ROW_BYTES / 2**20:,.0f} MiB of rows"

    full = timed("save()", lambda: buffer.save(path), lambda: removed(path))
    writing = threaded("one plain file, synced", write_plain, content, plain, before=lambda: removed(plain))
    yield Comparison(f"saving {size}", [full, writing], 1, rounds)
    del content

    async def load() -> None:
        other = ReplayBuffer(TensorStorage(count), batch_size=256, prefetch=2)
        await other.load(path)

    loading = timed("load()", load, functools.partial(forgotten, path))
    reading = threaded("one plain file", read_plain, plain, before=functools.partial(forgotten, plain))
    yield Comparison(f"loading {size} from the disk", [loading, reading], 1, rounds)
    again = functools.partial(buffer.save, second, base=path)
    unchanged = timed("nothing has changed", again, lambda: removed(second))
    yield Comparison(f"save(base=...) of {size}", [timed("save()", full_of(buffer, path)), unchanged], 1, rounds)
    await buffer.save(path)
    await buffer.extend(rows(max(1, count // 20)))
    changed = timed("5 % has changed", again, lambda: removed(second))
    third = folder / "third"
    anew = timed("save()", lambda: buffer.save(third), lambda: removed(third))
    yield Comparison(f"save(base=...) of {size}", [anew, changed], 1, rounds, [], [buffer.aclose])


def full_of(buffer: ReplayBuffer, path: Path) -> Callable[[], Awaitable[object]]:
    """A save of everything, to where nothing is."""

    async def save() -> None:
        removed(path)
        await buffer.save(path)

    return save


class Lags:
    """How late a clock of 1 ms comes, in seconds."""

    def __init__(self) -> None:
        self.values: list[float] = []

    async def ticks(self) -> None:
        """Until it is cancelled."""
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(TICK)
            self.values.append(time.perf_counter() - begun - TICK)

    def at(self, quantile: float) -> float:
        """A quantile: 1.0 is the longest."""
        return float(np.quantile(self.values or [0.0], quantile))


@contextlib.asynccontextmanager
async def running(*works: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Tasks that go on for as long as the block lasts."""
    tasks = [asyncio.ensure_future(work()) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def loop(folder: Path, scale: float, rounds: int) -> AsyncIterator[Comparison]:
    """The lag of the event loop while writers and consumers go on, with saves of 1 GB and without."""
    count = int(scale * 2**30 / ROW_BYTES) + 2048
    buffer = await filled(count)
    path = folder / "full"
    seconds = max(0.05, 3 * scale)
    written = rows(8)
    found: dict[str, dict[str, list[float]]] = {"with": {}, "without": {}}

    async def write() -> None:
        while True:
            await buffer.extend(written)
            await asyncio.sleep(0)

    async def one(saves: bool, step: float) -> None:
        lags, batches = Lags(), 0

        async def consume() -> None:
            nonlocal batches
            while True:
                await buffer.sample()
                if step:
                    await buffer.extend(written)
                    time.sleep(step)  # noqa: ASYNC251 (what a training step does, without the lock)
                batches += 1

        removed(path)
        async with running(*([consume] if step else [lags.ticks, write, consume])):
            await asyncio.sleep(0.1 * seconds)  # as in a run, not as in its first milliseconds
            lags.values.clear()
            batches = 0
            begun = time.perf_counter()
            if saves:
                await buffer.save(path)
            else:
                await asyncio.sleep(seconds)
            lasted = time.perf_counter() - begun
        kept = found["with" if saves else "without"]
        if step:
            kept.setdefault("step", []).append(lasted / max(1, batches))
            return
        for name, value in (("p99", lags.at(0.99)), ("longest", lags.at(1.0)), ("batch", lasted / max(1, batches))):
            kept.setdefault(name, []).append(value)

    for number in range(rounds + 1):
        for saves in (True, False):
            for step in (0.0, 0.002):
                await one(saves, step)
            if not number:
                found["with" if saves else "without"].clear()
    titles = {
        "p99": "lag of the event loop, 99th percentile",
        "longest": "lag of the event loop, longest",
        "batch": "seconds for a batch, with a writer and a consumer at full speed",
        "step": "seconds for a step of 2 ms that takes a batch and writes 8 rows",
    }
    for name, title in titles.items():
        contenders = [
            Contender(f"{kind} a save of {count * ROW_BYTES / 2**20:,.0f} MiB", replayed(found[kind][name]))
            for kind in ("without", "with")
        ]
        yield Comparison(title, contenders, 1, rounds)
    await buffer.aclose()


def replayed(values: list[float]) -> Callable[[int], Awaitable[float]]:
    """A contender's ``run`` that hands out what was measured; once more for the round that does not count."""
    left: Iterator[float] = iter([values[0], *values])

    async def run(calls: int) -> float:
        return next(left)

    return run


async def objects(folder: Path, scale: float, rounds: int) -> AsyncIterator[Comparison]:
    """A million dicts with a tensor, and scalars of numpy beside floats of Python."""
    count = max(100, int(1_000_000 * scale))
    items = [{"obs": torch.full((4,), float(number)), "reward": number / 7, "done": False} for number in range(count)]
    buffer = ReplayBuffer(ListStorage(count), batch_size=32)
    await buffer.extend(items)
    del items
    path = folder / "objects"
    longest: list[float] = []

    async def stalls(call: Callable[[], Awaitable[object]], calls: int) -> None:
        lags = Lags()
        async with running(lags.ticks):
            await call()
        longest.append(lags.at(1.0))

    async def load() -> None:
        other = ReplayBuffer(ListStorage(count), batch_size=32)
        await other.load(path)

    contenders = [
        Contender("save()", functools.partial(stalls, lambda: buffer.save(path)), before=lambda: removed(path)),
        Contender("load()", functools.partial(stalls, load)),
    ]
    yield Comparison(f"{count:,} dicts with a tensor", contenders, 1, rounds)
    contenders = [
        Contender("save()", replayed(longest[2::2])),
        Contender("load()", replayed(longest[3::2])),
    ]
    yield Comparison("longest lag of the event loop meanwhile", contenders, 1, rounds, [], [buffer.aclose])
    many = max(100, int(200_000 * scale))
    compared = []
    for name, kind in (("float", float), ("numpy.float32", np.float32)):
        other = ReplayBuffer(ListStorage(many), batch_size=32)
        await other.extend([kind(number) for number in range(many)])
        target = folder / name
        compared.append(timed(name, functools.partial(other.save, target), functools.partial(removed, target)))
    yield Comparison(f"save() of {many:,} numbers", compared, 1, rounds)


async def model(scale: float, rounds: int) -> AsyncIterator[Comparison]:
    """The lag of the event loop while 1.6 GB of a model are captured and written."""
    from asyncbuf import Checkpointer

    module = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(max(1, int(24 * scale)))))
    nbytes = sum(each.nbytes for each in module.parameters())
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:

        async def one(saves: bool, calls: int) -> float:
            lags = Lags()
            async with running(lags.ticks):
                if saves:
                    await Checkpointer(folder, keep=1).save(1, model=module)
                else:
                    await asyncio.sleep(0.5)
            return lags.at(1.0)

        contenders = [
            Contender(f"without a save of {nbytes / 2**20:,.0f} MiB", functools.partial(one, False)),
            Contender("with it", functools.partial(one, True)),
        ]
        yield Comparison("longest lag of the event loop, model", contenders, 1, rounds)


async def checkpoints(scale: float, rounds: int) -> AsyncIterator[Comparison]:
    """Everything here, in a folder of its own beside the working directory: /tmp may be memory."""
    for suite in (files, loop, objects):
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            async for comparison in suite(Path(folder), scale, rounds):
                yield comparison
    async for comparison in model(scale, rounds):
        yield comparison
