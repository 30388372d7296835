"""What several test modules share."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import hashlib
import itertools
import random
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pytest
import torch
from torch.utils import _pytree as torch_pytree

from asyncbuf import Batch, Draw, Prepared, RandomSampler, ReplayBuffer, RowRange, Rows, TensorStorage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Hashable, Iterable, Sequence
    from contextvars import Context
    from types import FrameType

T = TypeVar("T")

# Far more than anything that is waited for takes on a slow machine: a wait that is this long has failed.
SECONDS = 20.0

_LARGE = 1 << 30


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(count: int, start: int = 0, *, width: int = 1) -> dict[str, torch.Tensor]:
    """Items that carry a number of their own in every field: ``start``, ``start + 1``, ..."""
    number = torch.arange(start, start + count)
    return {"number": number, "wide": number[:, None].to(torch.float32).repeat(1, width)}


def numbers(batch: Batch) -> list[int]:
    """The numbers of the items of a batch."""
    return [int(number) for number in batch["number"]]


def some(values: Iterable[Any], *, fast: Collection[Any]) -> list[Any]:
    """Values of a parameter, of which the default run has some and ``-m slow`` the others.

    Args:
        values: all of them; a tuple is of several parameters.
        fast: those of the default run: the least, the most, and one between them.
    """
    values = list(values)
    assert all(value in values for value in fast)
    return [value if value in fast else _slow(value) for value in values]


def crossed(*values: Collection[Any], one_in: int) -> list[Any]:
    """Every combination of the values of several parameters, of which the default run has one in so many.

    They lie on diagonals: the default run has every value of every parameter, in changing company.
    """
    positions = itertools.product(*(range(len(each)) for each in values))
    combinations = itertools.product(*values)
    return [
        combination if sum(where) % one_in == 0 else _slow(combination)
        for where, combination in zip(positions, combinations, strict=True)
    ]


def _slow(value: Any) -> Any:
    return pytest.param(*value if isinstance(value, tuple) else (value,), marks=pytest.mark.slow)


async def turns(count: int = 10) -> None:
    """Let everything that is ready run, several times over."""
    for _ in range(count):
        await asyncio.sleep(0)


async def wander() -> None:
    """Some turns of the loop: few, or so many that threads get somewhere meanwhile, and not from any seed."""
    await turns(random.choice((0, 1, 2, 10, 100)))


def jitter() -> None:
    """What a call in a thread takes: anything from nothing to a millisecond, and not from any seed.

    The time is the work itself. Nothing waits for it to pass.
    """
    time.sleep(random.choice((0.0, 0.0, 0.0, 0.0002, 0.001)))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that has no event: what a thread has done, or a counter."""
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.0005)


async def within(awaitable: Awaitable[T], seconds: float = SECONDS) -> T:
    """The result, which must come in time."""
    return await asyncio.wait_for(awaitable, seconds)


async def outcomes(*tasks: asyncio.Future[Any], seconds: float = SECONDS) -> list[Any]:
    """Results and errors of tasks, which must all end in time."""
    _, pending = await asyncio.wait(tasks, timeout=seconds)
    assert not pending, f"{len(pending)} of {len(tasks)} still wait"
    return await asyncio.gather(*tasks, return_exceptions=True)


async def dismiss(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and see them end, whatever a failed test left them in."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Lines:
    """How many lines of Python run in a block: what it costs, on a machine that is busy as on one that is not."""

    def __init__(self) -> None:
        self.count = 0

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        self.count += event == "line"
        return self._trace

    def __enter__(self) -> Lines:
        self._before = sys.gettrace()
        gc.disable()  # the collector may call functions of others, as it does where hypothesis is imported
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        gc.enable()


def lines_of(call: Callable[[], object]) -> int:
    """How many lines of Python a call runs."""
    with Lines() as lines:
        call()
    return lines.count


class Crew(contextlib.AbstractAsyncContextManager["Crew"]):
    """Tasks that are gone at the end of the test, also of one that fails."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> Crew:
        return self

    async def __aexit__(self, *_: object) -> None:
        await dismiss(self._tasks)

    def start(self, coroutine: Coroutine[Any, Any, T], context: Context | None = None) -> asyncio.Task[T]:
        task = asyncio.create_task(coroutine, context=context)
        self._tasks.append(task)
        return task


class Latch:
    """An event for threads and coroutines alike."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        with self._lock:
            self._event.set()
            for loop, event in self._waiters:
                loop.call_soon_threadsafe(event.set)
            self._waiters.clear()

    def wait(self) -> None:
        """From a thread."""
        if not self._event.wait(SECONDS):
            raise TimeoutError("a latch was not set in time")

    async def reached(self) -> None:
        """From a coroutine."""
        with self._lock:
            if self._event.is_set():
                return
            event = asyncio.Event()
            self._waiters.append((asyncio.get_running_loop(), event))
        await within(event.wait())


class Stop:
    """A place where threads stop until they may go on: a call says that it has come, and waits."""

    def __init__(self) -> None:
        self.come = Latch()
        self.go = Latch()

    def __call__(self) -> None:
        self.come.set()
        self.go.wait()


def nothing(*_: object) -> None:
    """A hook that does nothing."""


class TransformClock:
    """Time as the chain of transforms measures it, which decides whether they are worth a thread."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.now


class ThreadedStorage(TensorStorage):
    """Says that everything is large, so that every copy of rows happens in a thread, where it first calls a hook."""

    def __init__(
        self, capacity: int, *, on_write: Callable[[], None] = nothing, on_gather: Callable[[], None] = nothing
    ) -> None:
        super().__init__(capacity)
        self.on_write = on_write
        self.on_gather = on_gather
        self.writes_in_threads = True

    def prepare(self, items: Any) -> Prepared:
        prepared = super().prepare(items)
        return dataclasses.replace(prepared, nbytes=_LARGE) if self.writes_in_threads else prepared

    def prepare_one(self, item: Any) -> Prepared:
        return dataclasses.replace(super().prepare_one(item), nbytes=_LARGE)

    def gather_nbytes(self, count: int) -> int:
        return _LARGE

    def write(self, prepared: Prepared, runs: Sequence[RowRange]) -> None:
        self.on_write()
        super().write(prepared, runs)

    def gather(self, indices: torch.Tensor) -> Any:
        self.on_gather()
        return super().gather(indices)


class CountingTransform:
    """A transform whose state is the number of batches that it has seen; it writes that beside the data.

    Args:
        hook: called with the number, before the data is returned.
    """

    def __init__(self, hook: Callable[[int], object] = nothing) -> None:
        self.seen = 0
        self._hook = hook

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]

    def __call__(self, data: Any) -> Any:
        self.seen += 1
        self._hook(self.seen)
        return {**data, "seen": torch.full((len(next(iter(data.values()))),), self.seen)}


class WeightedSampler(RandomSampler):
    """Random rows, with a weight for each."""

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        draw = super().draw(rows, batch_size, generator)
        return draw._replace(info={"weight": torch.rand(batch_size, generator=generator)})


class DiarySampler(RandomSampler):
    """Random rows; writes down the history as it is told of it."""

    def __init__(self) -> None:
        self.diary: list[tuple[str, int]] = []

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        self.diary.append(("draw", rows.write_count))
        return super().draw(rows, batch_size, generator)

    def written(self, indices: torch.Tensor, rows: Rows) -> None:
        self.diary.append(("written", rows.write_count))

    def update_priority(self, indices: torch.Tensor, priority: torch.Tensor, rows: Rows) -> None:
        self.diary.append(("priority", int(priority[0])))


def fingerprint(batch: Batch) -> Hashable:
    """Everything there is to a batch, bit for bit."""
    leaves, spec = torch_pytree.tree_flatten(batch)
    return (batch.number, batch.epoch, batch.last, str(spec), *map(_bits, leaves))


def _bits(leaf: Any) -> Hashable:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    array = np.ascontiguousarray(leaf.numpy())
    return str(leaf.dtype), tuple(leaf.shape), hashlib.blake2b(array.tobytes(), digest_size=16).digest()


async def take(buffer: ReplayBuffer, count: int) -> list[Hashable]:
    """The fingerprints of the next batches."""
    return [fingerprint(await buffer.sample()) for _ in range(count)]


def check_same(found: Sequence[object], expected: Sequence[object], what: str = "") -> None:
    """Fail where two streams differ, and say where rather than how: the batches are long."""
    wrong = [i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b]
    if wrong or len(found) != len(expected):
        pytest.fail(f"{what or 'stream'}: {len(found)} of {len(expected)} batches, different at {wrong}", pytrace=False)


def background_tasks() -> list[asyncio.Task[Any]]:
    """The tasks behind open buffers."""
    return [task for task in asyncio.all_tasks() if task.get_name().startswith("asyncbuf-")]


def worker_tasks() -> list[asyncio.Task[Any]]:
    return sorted(
        (task for task in background_tasks() if task.get_name().startswith("asyncbuf-worker-")),
        key=lambda task: task.get_name(),
    )
