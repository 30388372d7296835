"""The comparisons: what is measured against what."""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from typing import TYPE_CHECKING, Any, Literal

import torch

from asyncbuf import ListStorage, RaggedStorage, ReplayBuffer, SamplerWithoutReplacement, TensorStorage
from tests.benchmarks.checkpoints import checkpoints
from tests.benchmarks.harness import Comparison, Contender, awaiting, blocking
from tests.benchmarks.peers import floors, peers, queue, select
from tests.benchmarks.samplers import joins, priorities, slices
from tests.benchmarks.workloads import ATARI, MUJOCO, Workload, nested, padded, tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

MOST_KEPT = 512
KEPT_BYTES = 64 * 1024 * 1024
"""How many batches a consumer keeps that keeps some: so many, or as many as have so many bytes."""


async def opened(items: Any, capacity: int, **settings: Any) -> ReplayBuffer:
    """A buffer with items in it."""
    storage = settings.pop("storage", None) or TensorStorage(capacity)
    buffer = ReplayBuffer(storage, generator=torch.Generator().manual_seed(0), **settings)
    await buffer.extend(items)
    return await buffer.open()


async def sample(work: Workload, batch_size: int, scale: float, rounds: int) -> AsyncIterator[Comparison]:
    """``sample()`` without prefetch, against everything: with batches that are dropped at once, and that are kept."""
    count = max(batch_size, int(work.rows * scale))
    items = work.make(count)
    buffer = await opened(items, count, batch_size=batch_size)
    others, missing = peers(items, count, batch_size)
    nbytes = batch_size * work.nbytes
    calls = 1 + int(scale * max(60, min(1000, 25e6 / nbytes)))
    title = f"sample(), {work.name}, batch {batch_size}, {count:,} rows of {work.nbytes:,} bytes"
    for keep in (0, max(1, min(MOST_KEPT, KEPT_BYTES // nbytes))):
        contenders = [awaiting("asyncbuf", buffer.sample, keep)]
        contenders += [] if keep else floors(items, batch_size)
        contenders += [select(items, batch_size, keep), queue(items, batch_size, 2, keep)]
        contenders += [other.sampling(keep) for other in others]
        what = f"the last {keep} batches are kept" if keep else "batches are dropped"
        yield Comparison(f"{title}; {what}", contenders, calls, rounds, missing)
    await buffer.aclose()


async def sequences(scale: float, rounds: int) -> AsyncIterator[Comparison]:
    """Sequences of different lengths, padded when they are sampled, or packed."""
    count, batch_size = int(10_000 * scale) + 32, 32
    items = tokens(count)
    calls, title = max(1, int(100 * scale)), f"sample(), {batch_size} sequences of 200 to 4,000 tokens"

    def some() -> list[torch.Tensor]:
        return [items[i] for i in torch.randint(count, (batch_size,)).tolist()]

    async def ragged(layout: Literal["padded", "packed"]) -> ReplayBuffer:
        storage = RaggedStorage(count, ["tokens"], layout=layout)
        return await opened({"tokens": items}, count, storage=storage, batch_size=batch_size)

    collated = await opened(items, count, storage=ListStorage(count), batch_size=batch_size, collate_fn=padded)
    one, other = await ragged("padded"), await ragged("packed")
    contenders = [
        awaiting("asyncbuf, RaggedStorage", one.sample),
        awaiting("asyncbuf, ListStorage", collated.sample),
        blocking("list and pad_sequence", lambda: padded(some())),
    ]
    missing: list[str] = []
    try:
        from torchrl.data import ListStorage as TheirStorage
        from torchrl.data import ReplayBuffer as Theirs

        peer: Any = Theirs(storage=TheirStorage(count), batch_size=batch_size, collate_fn=padded)
        peer.extend(items)
        contenders.append(blocking("TorchRL, ListStorage", peer.sample))
    except ImportError:
        missing = ["TorchRL"]
    yield Comparison(f"{title}, padded", contenders, calls, rounds, missing, [one.aclose, collated.aclose])
    packed = [awaiting("asyncbuf, RaggedStorage", other.sample), blocking("list and cat", lambda: torch.cat(some()))]
    yield Comparison(f"{title}, packed", packed, calls, rounds, [], [other.aclose])


async def tensordicts(scale: float, rounds: int) -> AsyncIterator[Comparison]:
    """Nested TensorDicts in and out."""
    count, batch_size = int(MUJOCO.rows * scale) + 256, 256
    try:
        items = nested(MUJOCO.make(count))
    except ImportError:
        return
    buffer = await opened(items, count, batch_size=batch_size)
    contenders = [awaiting("asyncbuf", buffer.sample)]
    missing: list[str] = []
    try:
        from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

        peer: Any = TensorDictReplayBuffer(storage=LazyTensorStorage(count), batch_size=batch_size)
        peer.extend(items)
        contenders.append(blocking("TorchRL", peer.sample))
    except ImportError:
        missing = ["TorchRL"]
    title = f"sample(), nested TensorDicts, batch {batch_size}"
    yield Comparison(title, contenders, max(1, int(500 * scale)), rounds, missing, [buffer.aclose])


async def extend(scale: float, rounds: int) -> AsyncIterator[Comparison]:
    """Writing 1, 64 and 1,024 rows, as the arrays that environments return and as tensors, into full buffers."""
    capacity = int(200_000 * scale) + 2048
    stored = MUJOCO.make(capacity)
    buffer = await opened(stored, capacity, batch_size=256)
    others, missing = peers(stored, capacity, 256)
    for count in (1, 64, 1024):
        items = MUJOCO.make(count)
        arrays = {key: value.numpy() for key, value in items.items()}
        contenders = [
            awaiting("asyncbuf, arrays", functools.partial(buffer.extend, arrays)),
            awaiting("asyncbuf, tensors", functools.partial(buffer.extend, items)),
        ]
        for other in others:
            what: Any = items
            if other.name.startswith("TorchRL"):
                from tensordict import TensorDict

                what = TensorDict(items, batch_size=[count])
            elif other.name == "cpprb":
                what = arrays
            if "prefetch" not in other.name:
                contenders.append(blocking(other.name, functools.partial(other.extend, what)))
        title = f"extend() of {count} MuJoCo-like rows, into a full buffer"
        yield Comparison(title, contenders, max(1, int(scale * 100_000 / (count + 100))), rounds, missing)
    await buffer.aclose()


async def training(work: Workload, scale: float, rounds: int) -> AsyncIterator[Comparison]:
    """A loop whose step takes 2 ms without the interpreter's lock: what is lost to the buffer."""
    batch_size = 256
    count = max(batch_size, int(work.rows * scale))
    items = work.make(count)
    buffer = await opened(items, count, batch_size=batch_size, prefetch=2, workers=1)
    others, missing = peers(items, count, batch_size)

    def step() -> None:
        time.sleep(0.002)

    async def ours(calls: int) -> None:
        for _ in range(calls):
            await buffer.sample()
            step()

    async def alone(calls: int) -> None:
        for _ in range(calls):
            step()

    def loop(call: Callable[[], Any]) -> Callable[[], Any]:
        def both() -> None:
            call()
            step()

        return both

    contenders = [Contender("asyncbuf, prefetch 2", ours), Contender("the step alone", alone)]
    contenders += [
        blocking(other.name, loop(other.sample))
        for other in others
        if "prefetch 2" in other.name or not other.name.startswith("TorchRL")
    ]
    title = f"training loop with a step of 2 ms, {work.name}, batch {batch_size}"
    yield Comparison(title, contenders, max(1, int(100 * scale)), rounds, missing, [buffer.aclose])


async def scaling(scale: float, rounds: int) -> AsyncIterator[Comparison]:
    """From ten thousand rows to ten million, with both samplers, beside the bare gather."""
    batch_size, field = 256, {"x": torch.zeros(1, 40)}
    for count in (10_000, 100_000, 1_000_000, 10_000_000):
        count = max(batch_size, int(count * scale))
        items = {"x": field["x"].repeat(count, 1)}
        contenders = []
        close: list[Callable[[], Awaitable[object]]] = []
        for sampler in (None, SamplerWithoutReplacement()):
            buffer = await opened(items, count, batch_size=batch_size, sampler=sampler)
            name = "RandomSampler" if sampler is None else "SamplerWithoutReplacement"
            contenders.append(awaiting(f"asyncbuf, {name}", buffer.sample))
            close.append(buffer.aclose)
        contenders.append(floors({"obs": items["x"]}, batch_size)[1])
        calls = max(1, int(1000 * scale))
        yield Comparison(f"sample(), {count:,} rows of 160 bytes", contenders, calls, rounds, [], close)


async def imports(scale: float, rounds: int) -> AsyncIterator[Comparison]:
    """What an import adds to that of torch, in a process of its own."""

    def importing(name: str, module: str) -> Contender:
        async def run(calls: int) -> None:
            for _ in range(calls):
                process = await asyncio.create_subprocess_exec(sys.executable, "-c", f"import torch, {module}")
                assert await process.wait() == 0

        return Contender(name, run)

    contenders = [importing("torch and asyncbuf", "asyncbuf"), importing("torch", "torch")]
    missing: list[str] = []
    try:
        import torchrl  # noqa: F401

        contenders.append(importing("torch and torchrl.data", "torchrl.data"))
    except ImportError:
        missing = ["TorchRL"]
    yield Comparison("import", contenders, 1, rounds, missing)


async def everything(names: set[str], scale: float, rounds: int) -> AsyncIterator[Comparison]:
    """The comparisons that were asked for, one after the other, so that their data need not fit together."""
    suites: list[tuple[str, AsyncIterator[Comparison]]] = [
        ("sample", sample(MUJOCO, 32, scale, rounds)),
        ("sample", sample(MUJOCO, 256, scale, rounds)),
        ("sample", sample(MUJOCO, 4096, scale, rounds)),
        ("atari", sample(ATARI, 256, scale, rounds)),
        ("tokens", sequences(scale, rounds)),
        ("nested", tensordicts(scale, rounds)),
        ("extend", extend(scale, rounds)),
        ("loop", training(MUJOCO, scale, rounds)),
        ("loop", training(ATARI, scale, rounds)),
        ("scale", scaling(scale, rounds)),
        ("priorities", priorities(scale, rounds)),
        ("slices", slices(scale, rounds)),
        ("joins", joins(scale, rounds)),
        ("import", imports(scale, rounds)),
        ("save", checkpoints(scale, rounds)),
    ]
    for name, suite in suites:
        if name in names:
            async for comparison in suite:
                yield comparison


NAMES = (
    *("sample", "atari", "tokens", "nested", "extend", "loop", "scale"),
    *("priorities", "slices", "joins", "import", "save"),
)
"""What can be asked for."""
DEFAULT = ("sample", "tokens", "nested", "extend", "loop")
"""What is measured unless something is asked for, in about two minutes."""
