"""One stream: a batch depends on the seed and on the history before it, and on nothing else."""

from __future__ import annotations

import asyncio
import functools
import random
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from asyncbuf import (
    Batch,
    CompressedStorage,
    RandomSampler,
    ReplayBuffer,
    Rows,
    Sampler,
    SamplerWithoutReplacement,
    Storage,
    TensorStorage,
)
from tests.helpers import (
    ThreadedStorage,
    WeightedSampler,
    check_same,
    crossed,
    fingerprint,
    jitter,
    rows,
    seeded,
    take,
    turns,
    wander,
)
from tests.storage.mapped_helpers import in_files

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from asyncbuf._config import Transform

DEPTHS = (0, 1, 2, 3, 4, 8, 64)
WORKERS = (1, 2, 8)
ITEMS = 100
BATCH = 7

SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "random": RandomSampler,
    "weighted": WeightedSampler,
    "passes": SamplerWithoutReplacement,
    "full-passes": lambda: SamplerWithoutReplacement(drop_last=True),
}


class Latency:
    """Transforms with random noise and, if wanted, random latency."""

    def __init__(self, slow: bool) -> None:
        self._slow = slow

    def sync(self, data: Any, *, generator: torch.Generator) -> Any:
        if self._slow:
            jitter()
        return {**data, "sync": torch.randn(len(data["number"]), generator=generator)}

    async def coroutine(self, data: Any, *, generator: torch.Generator) -> Any:
        if self._slow:
            await wander()
        return {**data, "async": torch.randn(len(data["number"]), generator=generator)}

    def quick(self, data: Any) -> Any:
        """Fast enough to run on the event loop, once that is known."""
        return {**data, "quick": data["number"]}


class Average:
    """A transform with a state: it must see the batches in order."""

    def __init__(self, slow: bool) -> None:
        self._slow = slow
        self._average = torch.zeros(())

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"average": self._average}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._average = state["average"]

    def __call__(self, data: Any) -> Any:
        if self._slow:
            jitter()
        self._average = 0.9 * self._average + 0.1 * data["number"].float().mean()
        return {**data, "average": self._average}


TRANSFORMS: dict[str, Callable[[bool], list[Transform]]] = {
    "none": lambda slow: [],
    "quick": lambda slow: [Latency(slow).quick],
    "sync": lambda slow: [Latency(slow).sync],
    "async": lambda slow: [Latency(slow).coroutine],
    "mixed": lambda slow: [Latency(slow).quick, Latency(slow).coroutine, Latency(slow).sync],
    "stateful": lambda slow: [Average(slow)],
}


class Storages(NamedTuple):
    """How items are stored.

    Attributes:
        make: storage of a capacity, with random latencies or not.
        width: elements of the wide field: what decides whether copies are large.
    """

    make: Callable[[int, bool], Storage]
    width: int


STORAGES = {
    "inline": Storages(lambda capacity, slow: TensorStorage(capacity), 1),
    "large": Storages(lambda capacity, slow: TensorStorage(capacity), 6000),
    "compressed": Storages(lambda capacity, slow: CompressedStorage(capacity), 300),
    "memmap": Storages(lambda capacity, slow: in_files(capacity), 1),
    "threads": Storages(
        lambda capacity, slow: (
            ThreadedStorage(capacity, on_write=jitter, on_gather=jitter) if slow else ThreadedStorage(capacity)
        ),
        1,
    ),
}


async def stream(
    count: int,
    *,
    sampler: str = "random",
    transform: str = "none",
    storage: str = "inline",
    depth: int = 0,
    workers: int = 1,
    slow: bool = False,
    seed: int = 0,
) -> list[Hashable]:
    """The first batches of a buffer that is not written to meanwhile."""
    stored = STORAGES[storage]
    buffer = ReplayBuffer(
        stored.make(ITEMS, slow),
        sampler=SAMPLERS[sampler](),
        batch_size=BATCH,
        prefetch=depth,
        workers=workers,
        transform=TRANSFORMS[transform](slow),
        generator=seeded(seed),
    )
    await buffer.extend(rows(ITEMS, width=stored.width))
    async with buffer:
        return await take(buffer, count)


async def check_depths_and_workers(
    count: int, sampler: str, transform: str, storage: str, depths: Iterable[int]
) -> None:
    expected = await stream(count, sampler=sampler, transform=transform, storage=storage)
    for depth in depths:
        for workers in WORKERS:
            found = await stream(
                count, sampler=sampler, transform=transform, storage=storage, depth=depth, workers=workers, slow=True
            )
            check_same(found, expected, f"prefetch {depth}, {workers} workers")


CASES = [
    ("random", "sync", "inline"),
    ("weighted", "async", "large"),
    ("weighted", "mixed", "threads"),
    ("weighted", "mixed", "memmap"),
    ("passes", "async", "compressed"),
    ("passes", "quick", "inline"),
    ("passes", "sync", "threads"),
    ("full-passes", "none", "threads"),
    ("passes", "stateful", "threads"),
    ("random", "stateful", "inline"),
]


@pytest.mark.parametrize(("sampler", "transform", "storage"), CASES)
@pytest.mark.parametrize(
    ("count", "depths"),
    [
        (35, (0, 3, 64)),
        pytest.param(35, DEPTHS, marks=pytest.mark.slow),
        pytest.param(500, DEPTHS, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
    ids=["35-some", "35", "500"],
)
async def test_depth_workers_and_latency_do_not_show(
    sampler: str, transform: str, storage: str, count: int, depths: Sequence[int]
) -> None:
    await check_depths_and_workers(count, sampler, transform, storage, depths)


@pytest.mark.loops_in_turn
@pytest.mark.parametrize(
    "seeds",
    [range(6), range(6, 12), pytest.param(range(200), marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
    ids=["first-6", "next-6", "200"],
)
async def test_no_mismatch_in_seeded_runs(seeds: range) -> None:
    mismatches = []
    for seed in seeds:
        choose = random.Random(seed)
        sampler, transform, storage = (choose.choice(list(kinds)) for kinds in (SAMPLERS, TRANSFORMS, STORAGES))
        depth, workers = choose.choice(DEPTHS), choose.choice(WORKERS)
        some_stream = functools.partial(stream, 60, seed=seed, sampler=sampler, transform=transform, storage=storage)
        if await some_stream(depth=depth, workers=workers, slow=True) != await some_stream():
            mismatches.append((seed, depth, workers, sampler, transform, storage))
    assert not mismatches


@pytest.mark.parametrize("depth", [0, 4])
@pytest.mark.parametrize("sampler", SAMPLERS)
async def test_draws_are_those_of_the_sampler_asked_in_order(sampler: str, depth: int) -> None:
    reference, generator, held = SAMPLERS[sampler](), seeded(3), Rows(ITEMS, ITEMS, ITEMS)
    buffer = ReplayBuffer(
        TensorStorage(ITEMS),
        sampler=SAMPLERS[sampler](),
        batch_size=BATCH,
        prefetch=depth,
        workers=2,
        transform=Latency(True).sync,
        generator=seeded(3),
    )
    await buffer.extend(rows(ITEMS))
    async with buffer:
        for number in range(50):
            batch, draw = await buffer.sample(), reference.draw(held, BATCH, generator)
            assert batch.number == number
            assert batch.indices.equal(draw.indices)
            assert batch["number"].equal(draw.indices)
            assert (batch.epoch, batch.last) == (draw.epoch, draw.last)
            assert set(batch.info) == set(draw.info)
            assert all(batch.info[key].equal(draw.info[key]) for key in draw.info)


async def test_nothing_is_drawn_before_the_first_call() -> None:
    generator = seeded(0)
    buffer = ReplayBuffer(TensorStorage(ITEMS), batch_size=BATCH, prefetch=8, generator=generator)
    await buffer.extend(rows(ITEMS))
    async with buffer:
        await turns()
        assert buffer.stats().drawn == 0
        assert generator.get_state().equal(seeded(0).get_state())
        await buffer.sample()
        assert buffer.stats().drawn == 9


async def test_global_generators_are_left_alone() -> None:
    torch.manual_seed(7)
    before, python = torch.get_rng_state(), random.getstate()
    # Without latencies, which come from the global generator of Python.
    await stream(20, sampler="weighted", transform="mixed", depth=4, workers=2)
    await stream(20, sampler="passes", transform="mixed", depth=4, workers=2)
    assert torch.get_rng_state().equal(before)
    assert random.getstate() == python


# -- with writes in between -------------------------------------------------------------------------------------------

Program = list[list[str]]


def program(seed: int, steps: int) -> Program:
    """Steps one after the other; what stands together in a step is asked for at once, in that order."""
    choose = random.Random(seed)
    together = [
        ["sample"],
        ["extend"],
        ["extend", "sample"],
        ["sample", "extend"],
        ["extend", "extend", "sample"],
        ["sample", "extend", "sample", "extend", "sample"],
        ["extend", "other", "sample"],
        ["sample", "priority", "sample"],
    ]
    return [["extend"], *(choose.choice(together) for _ in range(steps))]


async def play(
    what: Program,
    *,
    sampler: str,
    storage: str,
    transform: str = "sync",
    depth: int = 0,
    workers: int = 1,
    slow: bool = False,
) -> list[Hashable]:
    """The batches that a program gets of a buffer whose rows are overwritten again and again."""
    stored = STORAGES[storage]
    buffer = ReplayBuffer(
        stored.make(40, slow),
        sampler=SAMPLERS[sampler](),
        batch_size=5,
        prefetch=depth,
        workers=workers,
        transform=TRANSFORMS[transform](slow),
        generator=seeded(1),
    )
    written = 0
    batches: list[Hashable] = []

    async def extend() -> None:
        nonlocal written
        start, count = written, 3 + written % 7
        written += count
        await buffer.extend(rows(count, start, width=stored.width))

    calls: dict[str, Callable[[], Any]] = {
        "extend": extend,
        "sample": buffer.sample,
        "other": lambda: buffer.sample(3),
        "priority": lambda: buffer.update_priority([0, 1], 2.0),
    }
    async with buffer:
        for step in what:
            results = await asyncio.gather(*(calls[call]() for call in step))
            batches.extend(fingerprint(result) for result in results if isinstance(result, Batch))
    return batches


STORAGES_AND_TRANSFORMS = ["inline-sync", "large-async", "threads-none", "threads-sync", "threads-async"]


@pytest.mark.parametrize(
    ("kinds", "sampler", "depth"), crossed(STORAGES_AND_TRANSFORMS, ["random", "passes"], [0, 1, 4], one_in=3)
)
async def test_workers_and_latency_do_not_show_among_writes(kinds: str, sampler: str, depth: int) -> None:
    storage, transform = kinds.split("-")
    what = program(depth, 25)
    expected = await play(what, sampler=sampler, storage=storage, transform=transform, depth=depth)
    for workers in WORKERS:
        found = await play(
            what, sampler=sampler, storage=storage, transform=transform, depth=depth, workers=workers, slow=True
        )
        check_same(found, expected, f"{workers} workers")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sampler", ["random", "weighted", "passes"])
@pytest.mark.parametrize("depth", DEPTHS)
async def test_workers_and_latency_do_not_show_among_writes_in_200_programs(sampler: str, depth: int) -> None:
    for seed in range(200 // len(DEPTHS) + 1):
        what = program(seed, 40)
        expected = await play(what, sampler=sampler, storage="threads", depth=depth)
        for workers in WORKERS:
            found = await play(what, sampler=sampler, storage="threads", depth=depth, workers=workers, slow=True)
            check_same(found, expected, f"program {seed}, {workers} workers")


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("sampler", ["random", "passes"])
@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 12), marks=pytest.mark.slow)], ids=["first-2", "next-10"]
)
async def test_it_does_not_show_which_copies_threads_make(sampler: str, depth: int, seeds: range) -> None:
    for seed in seeds:
        what = program(seed, 40)
        expected = await play(what, sampler=sampler, storage="inline", depth=depth)
        found = await play(what, sampler=sampler, storage="threads", depth=depth, workers=2, slow=True)
        check_same(found, expected, f"program {seed}")


@pytest.mark.parametrize("depth", [0, 4])
@pytest.mark.parametrize("sampler", ["weighted", "passes"])
@pytest.mark.parametrize("storage", ["inline", "threads"])
def test_the_event_loop_does_not_show(sampler: str, storage: str, depth: int) -> None:
    uvloop = pytest.importorskip("uvloop")
    what = program(5, 30)

    async def main(slow: bool) -> list[Hashable]:
        return await play(what, sampler=sampler, storage=storage, depth=depth, workers=2, slow=slow)

    with asyncio.Runner() as runner:
        expected = runner.run(main(False))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(main(True))
    check_same(found, expected)


async def test_latency_does_not_decide_what_empty_drops() -> None:
    # A batch is asked for, then the buffer is emptied, then filled with other items.
    async def main(slow: bool) -> list[Hashable]:
        buffer = ReplayBuffer(
            TensorStorage(100), batch_size=4, transform=Latency(slow).sync if slow else None, generator=seeded(0)
        )
        await buffer.extend(rows(10))
        async with buffer:
            batch, _, _ = await asyncio.gather(buffer.sample(), buffer.empty(), buffer.extend(rows(10, 1000)))
            return [batch.number, *batch["number"].tolist()]

    check_same(await main(True), await main(False))


async def test_a_cancelled_call_does_not_move_later_draws() -> None:
    async def main(cancelled: bool) -> list[Hashable]:
        buffer = ReplayBuffer(ThreadedStorage(100), batch_size=4, generator=seeded(0))
        async with buffer:
            if cancelled:  # it waits for data, and gives up before there is any
                task = asyncio.create_task(buffer.sample())
                await turns()
                task.cancel()
                await asyncio.wait({task})
            results = await asyncio.gather(buffer.extend(rows(5)), buffer.extend(rows(50, 5)), buffer.sample())
            return [fingerprint(results[2])]

    check_same(await main(True), await main(False))


async def test_a_refused_call_does_not_move_later_draws() -> None:
    async def main(refused: bool) -> list[Hashable]:
        buffer = ReplayBuffer(ThreadedStorage(100), batch_size=4, generator=seeded(0))
        if refused:
            with pytest.raises(Exception, match="not open"):
                await buffer.sample()
        async with buffer:
            results = await asyncio.gather(buffer.extend(rows(5)), buffer.extend(rows(50, 5)), buffer.sample())
            return [fingerprint(results[2])]

    check_same(await main(True), await main(False))


@pytest.mark.parametrize("depth", [0, 3])
async def test_a_failing_stateful_transform_does_not_let_later_batches_pass(depth: int) -> None:
    class Count:
        """Numbers the batches that it has seen; fails once."""

        def __init__(self) -> None:
            self.seen = 0
            self.failures = 1

        def state_dict(self) -> dict[str, int]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.seen = state["seen"]

        def __call__(self, data: Any) -> Any:
            if self.seen == 3 and self.failures:
                self.failures -= 1
                raise ValueError("once")
            self.seen += 1
            return {**data, "seen": torch.tensor(self.seen)}

    buffer = ReplayBuffer(
        TensorStorage(100), batch_size=4, prefetch=depth, transform=Count(), generator=seeded(0), workers=2
    )
    await buffer.extend(rows(50))
    seen: list[int] = []
    async with buffer:
        while len(seen) < 10:
            try:
                batch = await buffer.sample()
            except Exception:
                continue
            seen.append(int(batch["seen"]))
    assert seen == list(range(1, 11))
