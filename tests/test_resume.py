"""Stop anywhere, resume exactly: every kind of buffer, saved at every point and in every way."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import pickle
import random
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import pytest
import torch

from asyncbuf import Batch, Draw, RandomSampler, ReplayBuffer, Rows, TensorStorage
from asyncbuf.testing import WAYS, assert_exact_resume, assert_same_batch, difference
from tests.helpers import crossed, seeded, turns, within
from tests.resume_helpers import (
    KINDS,
    SAMPLERS,
    Average,
    DictStorage,
    FavourSampler,
    InThreads,
    Kind,
    buffer_of,
    items_of,
    late,
    maker,
    noisy,
    plain,
    restored,
    saved,
    take,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEPTHS = (0, 1, 2, 3, 4, 8, 64)
WORKERS = (1, 4)
GRID = [(depth, workers) for depth in DEPTHS for workers in WORKERS]
SHALLOW = GRID[:10]
MEMORY = Path("/dev/shm")

slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def _files_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of checkpoints are written here; what a disk takes to keep them is not the question."""
    if MEMORY.is_dir():
        monkeypatch.setattr(tempfile, "tempdir", str(MEMORY))


# -- the battery ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("position", "kind"), list(enumerate(KINDS)), ids=list(KINDS))
@pytest.mark.parametrize("at", [[4], pytest.param("every", marks=slow)], ids=["one-point", "every-point"])
async def test_every_kind_resumes_at_every_point(position: int, kind: str, at: list[int] | Literal["every"]) -> None:
    # Each kind with other settings; all settings with all kinds take long and are below.
    depth, workers = SHALLOW[(3 * position + 4) % len(SHALLOW)]
    await assert_exact_resume(maker(kind, depth=depth, workers=workers, items=11), steps=6, at=at, hops=0)


@pytest.mark.parametrize(("position", "kind"), list(enumerate(KINDS)), ids=list(KINDS))
@pytest.mark.parametrize(
    ("steps", "at", "hops"), [(6, [4], 0), pytest.param(9, [0, 4, 9], 2, marks=slow)], ids=["6", "9"]
)  # the rows are overwritten in the fifth
async def test_every_kind_resumes_among_writes(position: int, kind: str, steps: int, at: list[int], hops: int) -> None:
    depth, workers = SHALLOW[(3 * position + 7) % len(SHALLOW)]
    feed = functools.partial(write, kind)
    await assert_exact_resume(
        maker(kind, depth=depth, workers=workers, items=13),
        steps=steps,
        at=at,
        feed=feed,
        hops=hops,
    )


@pytest.mark.parametrize(("depth", "workers"), crossed(DEPTHS, WORKERS, one_in=2))
async def test_every_depth_and_number_of_workers(depth: int, workers: int) -> None:
    factory = maker("passes", depth=depth, workers=workers)
    # The points lie before, on and after the end of a pass.
    other = maker("passes", depth=DEPTHS[-1 - DEPTHS.index(depth)], workers=1)
    await assert_exact_resume(factory, steps=10, at=[1, 7], elastic_factory=other, hops=1)


@slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_with_every_depth_and_number_of_workers(kind: str) -> None:
    for depth, workers in GRID:
        factory = maker(kind, depth=depth, workers=workers, items=17)
        other = maker(kind, depth=DEPTHS[-1 - DEPTHS.index(depth)], workers=1, items=17)
        await assert_exact_resume(factory, steps=12, elastic_factory=other)
        await assert_exact_resume(factory, steps=12, feed=functools.partial(write, kind))


@pytest.mark.loops_in_turn
@pytest.mark.parametrize(
    "kinds", [["stateful"], pytest.param(list(KINDS), marks=[slow, pytest.mark.timeout(1800)])], ids=["one", "all"]
)
async def test_a_new_process_goes_on(kinds: list[str]) -> None:
    for kind in kinds:
        feed = functools.partial(write, kind)
        await assert_exact_resume(maker(kind, workers=2), steps=8, at=[0, 3], feed=feed, new_process=True, hops=0)


async def test_no_batch_size_and_no_prefetch() -> None:
    # Each call says its own size; there is a line for each, and none is prefetched.
    source = ReplayBuffer(TensorStorage(20), transform=noisy, generator=seeded(1))
    await source.extend(items_of(20))
    sizes = [3, 5, 3, 2, 5, 3]
    async with source:
        for size in sizes:
            await source.sample(size)
        snapshot = await source.snapshot()
        expected = [await source.sample(size) for size in sizes]
    target = ReplayBuffer(TensorStorage(20), transform=noisy, generator=seeded(2))
    await target.restore(snapshot)
    async with target:
        for batch, size in zip(expected, sizes, strict=True):
            assert_same_batch(await target.sample(size), batch)


class Jam:
    """An async transform that may stop every ticket in front of it, so that it is unfinished."""

    is_open = True

    async def __call__(self, data: Any) -> Any:
        while not Jam.is_open:  # noqa: ASYNC110
            await asyncio.sleep(0)
        return data

    @staticmethod
    @contextlib.contextmanager
    def closed() -> Iterator[None]:
        Jam.is_open = False
        try:
            yield
        finally:
            Jam.is_open = True


# -- programs ---------------------------------------------------------------------------------------------------------


TRANSFORMS: dict[str, Callable[[], list[Any]]] = {
    "none": lambda: [Jam()],
    "noisy": lambda: [Jam(), noisy],
    "stateful": lambda: [Jam(), Average()],
    "both": lambda: [Average(), Jam(), noisy],
}


class Program:
    """Calls in a random order, the same for a seed; what each returns or raises is kept.

    Args:
        seed: decides calls and settings.
        hops: whether the buffer is saved and restored between calls, at random moments and in random ways.
    """

    def __init__(self, seed: int, folder: Path, *, hops: bool) -> None:
        choose = self._choose = random.Random(seed)
        self._elsewhere = random.Random(seed) if hops else None
        self._folder = folder
        self._written = 0
        self.settings: dict[str, Any] = {
            "kind": choose.choice(list(SAMPLERS)),
            "depth": choose.choice(DEPTHS[:6]),
            "workers": choose.choice(WORKERS),
            "transform": choose.choice(list(TRANSFORMS)),
        }
        self.calls: list[str] = []
        self.outcomes: list[Any] = []

    def buffer(self, seed: int) -> ReplayBuffer:
        return ReplayBuffer(
            TensorStorage(20),
            sampler=SAMPLERS[self.settings["kind"]](20),
            batch_size=3,
            prefetch=self.settings["depth"],
            workers=self.settings["workers"],
            transform=TRANSFORMS[self.settings["transform"]](),
            generator=seeded(seed),
        )

    async def run(self, steps: int) -> None:
        buffer = await self.buffer(0).open()
        try:
            await self.extend(buffer)
            for _ in range(steps):
                if self._elsewhere is not None and self._elsewhere.random() < 0.4:
                    buffer = await self.hop(buffer, self._elsewhere.choice(WAYS))
                call = self._choose.choice(self.possible)
                self.calls.append(call)
                try:
                    self.outcomes.append(await within(getattr(self, call)(buffer)))
                except (ValueError, TypeError) as error:
                    self.outcomes.append(repr(error))
            self.outcomes.append(await buffer.state_dict())
        finally:
            await buffer.aclose()

    possible = (
        ("sample",) * 6 + ("extend",) * 3 + ("other", "priority", "flush", "skip", "empty", "three", "give_up", "epoch")
    )

    async def hop(self, buffer: ReplayBuffer, way: str) -> ReplayBuffer:
        what = await saved(way, buffer, self._folder)
        await buffer.aclose()
        return await (await restored(way, what, self.buffer(9))).open()

    async def sample(self, buffer: ReplayBuffer) -> Any:
        return await buffer.sample()

    async def other(self, buffer: ReplayBuffer) -> Any:
        return await buffer.sample(self._choose.choice((2, 4)))

    async def extend(self, buffer: ReplayBuffer) -> Any:
        count = self._choose.randrange(1, 9)
        start, self._written = self._written, self._written + count
        return await buffer.extend(items_of(count + 3, start))

    async def priority(self, buffer: ReplayBuffer) -> None:
        rows = torch.tensor([self._choose.randrange(len(buffer)) for _ in range(3)])
        await buffer.update_priority(rows, torch.rand(3, generator=seeded(self._written)) + 0.1)

    async def flush(self, buffer: ReplayBuffer) -> Any:
        await self._settled(buffer)
        return await buffer.flush()

    async def skip(self, buffer: ReplayBuffer) -> Any:
        await self._settled(buffer)
        return await buffer.skip()

    async def _settled(self, buffer: ReplayBuffer) -> None:
        """A stateful transform has seen what is about to be dropped, or not: without this, time would decide."""
        await buffer.snapshot()

    async def empty(self, buffer: ReplayBuffer) -> Any:
        await self._settled(buffer)
        await buffer.empty()
        return await self.extend(buffer)

    async def three(self, buffer: ReplayBuffer) -> Any:
        return await asyncio.gather(*(buffer.sample() for _ in range(3)))

    async def give_up(self, buffer: ReplayBuffer) -> Any:
        """Consumers that ask and go, once those before them have what is there."""
        await self._settled(buffer)
        with Jam.closed():
            tasks = [asyncio.create_task(buffer.sample()) for _ in range(2)]
            await turns(20)
            for task in tasks:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
        return [batch for batch in done if isinstance(batch, Batch)]

    async def epoch(self, buffer: ReplayBuffer) -> Any:
        return [batch async for batch in buffer.epoch()]


@pytest.mark.loops_in_turn
@pytest.mark.parametrize(
    "seeds",
    [range(6), range(6, 12), pytest.param(range(3000), marks=[slow, pytest.mark.timeout(3600)])],
    ids=["first-6", "next-6", "3000"],
)
async def test_programs_do_not_notice_that_they_are_interrupted(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        one, other = (Program(seed, tmp_path, hops=hops) for hops in (False, True))
        await one.run(30)
        await other.run(30)
        for i, (found, expected) in enumerate(zip(other.outcomes, one.outcomes, strict=True)):
            what = difference(found, expected)
            assert what is None, f"program {seed}, {one.settings}, {one.calls[: i + 1]}: {what}"


# -- the battery itself -----------------------------------------------------------------------------------------------


class Forgetful(FavourSampler):
    """Does not save its priorities."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "priorities": torch.ones(20, dtype=torch.float64)}


class Hidden:
    """A transform with a state that nobody is told of."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, data: Any) -> Any:
        self.calls += 1
        return {**data, "calls": self.calls}


class Drifting(RandomSampler):
    """Depends on what was drawn in other buffers."""

    draws = 0

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        Drifting.draws += 1
        draw = super().draw(rows, batch_size, generator)
        return draw._replace(info={"draws": Drifting.draws})


class Lossy(DictStorage):
    """Saves a little less than it has."""

    def state_dict(self) -> dict[str, Any]:
        items = {row: {**item, "wide": item["wide"].nan_to_num()} for row, item in self.items.items()}
        return {"items": items}


@pytest.mark.parametrize(
    ("kind", "ways", "message"),
    [
        (Kind(Forgetful), WAYS[:1], r"^snapshot, saved after 1 batches.*, step \d: indices differs at element \d: "),
        (Kind(Forgetful), WAYS[1:2], r"^state_dict, saved after 1 batches"),
        (Kind(transforms=lambda: [Hidden()]), WAYS[2:3], "^directory, saved after 1 .*, step 3: data/calls .*: 1, "),
        (Kind(lambda capacity: Drifting()), WAYS[:1], r"^two runs of the factory differ .*, step 0: info/draws"),
        (Kind(storage=Lossy), WAYS[:1], "^snapshot, saved after 1 batches, step 3: data/wide .*: 0.0, expected nan"),
    ],
)
async def test_it_finds_what_is_not_saved(kind: Kind, ways: list[str], message: str) -> None:
    async def factory() -> ReplayBuffer:
        buffer = buffer_of(kind)
        await buffer.extend(items_of(20))
        return buffer

    feed = functools.partial(write, "random") if kind.sampler is Forgetful else None
    with pytest.raises(AssertionError, match=message):
        await assert_exact_resume(factory, at=[1, 4], ways=ways, feed=feed)


async def test_it_says_what_it_cannot_check() -> None:
    with pytest.raises(ValueError, match="fax"):
        await assert_exact_resume(maker("random"), ways=["snapshot", "fax"])
    with pytest.raises(ValueError, match="13"):
        await assert_exact_resume(maker("random"), at=[3, 13])
    with pytest.raises(AssertionError, match=r"nothing came within 0\.2 s from .* 0/20 items"):
        await assert_exact_resume(lambda: buffer_of(Kind()), seconds=0.2)


NAN = torch.tensor([1.0, torch.nan])


@pytest.mark.parametrize(
    ("found", "expected", "message"),
    [
        (NAN, NAN.clone(), None),
        (NAN, -NAN, r"differs at element 0: 1.0, expected -1.0"),
        (torch.tensor([0.0, 0.0]), torch.tensor([0.0, -0.0]), "differs at element 1: 0.0, expected -0.0"),
        ({"a": [NAN, torch.arange(3)]}, {"a": [NAN, torch.arange(3).int()]}, r"^a/1 is Tensor torch.int64 \[3\]"),
        (torch.zeros(2, 1), torch.zeros(1, 2), r"\[2, 1\].*\[1, 2\]"),
        (torch.zeros(2), torch.zeros(2, requires_grad=True), "requires_grad=False.*requires_grad=True"),
        (torch.arange(4)[::2], torch.tensor([0, 2]), None),
        (np.float32(1), np.float64(1), "float32 .*float64"),
        (np.array(["a", None], object), np.array(["a", 1], object), "element 1"),
        (np.array([]), np.array([]), None),
        (float("nan"), float("nan"), None),
        (0.0, -0.0, "0.0, expected -0.0"),
        (True, 1, "is bool, expected int"),
        ("a", "b", "a, expected b"),
        ({"a": 1}, {"b": 1}, r"dict\(a\), expected dict\(b\)"),
        ([1], (1,), "list.*tuple"),
    ],
)
def test_difference(found: Any, expected: Any, message: str | None) -> None:
    what = difference(found, expected)
    if message is None:
        assert what is None
    else:
        assert what is not None
        assert re.search(message, what)


def test_difference_of_batches_names_the_part() -> None:
    one = Batch({"x": NAN}, torch.arange(2), {"weight": NAN}, 3, 0, False)
    assert_same_batch(one, dataclasses.replace(one))
    changes: dict[str, Any] = {"data": {"x": -NAN}, "indices": torch.tensor([0, 2]), "info": {}, "number": 4}
    for name, value in {**changes, "epoch": None, "last": True}.items():
        with pytest.raises(AssertionError, match=f"^here: {name}"):
            assert_same_batch(dataclasses.replace(one, **{name: value}), one, "here")


# -- in full ----------------------------------------------------------------------------------------------------------


class Trial(NamedTuple):
    """A buffer, and where its stream is interrupted."""

    sampler: str
    depth: int
    workers: int
    seed: int

    @property
    def is_jammed(self) -> bool:
        return self.seed % 4 == 0

    def buffer(self, *, depth: int | None = None, seed: int = 99) -> ReplayBuffer:
        transforms: list[list[Callable[..., Any]]] = [[Jam(), noisy], [late], [noisy], [plain, late, noisy]]
        return ReplayBuffer(
            (InThreads if self.seed % 4 == 2 else TensorStorage)(20),
            sampler=SAMPLERS[self.sampler](20),
            batch_size=3,
            prefetch=self.depth if depth is None else depth,
            workers=self.workers,
            transform=transforms[self.seed % 4],
            generator=seeded(seed),
        )

    async def mismatches(self, count: int) -> list[str]:
        """Interrupt it, resume it in each way and in each way into another depth, and compare what comes."""
        choose = random.Random(str(self))
        source = self.buffer(seed=self.seed)
        await source.extend(items_of(20))
        async with source:
            await take(source, choose.randrange(12))
            with Jam.closed() if self.is_jammed else contextlib.nullcontext():
                asked = asyncio.create_task(source.sample())
                await asyncio.sleep(0)
                async with source.frozen(0.02 if self.is_jammed else None):
                    served = asked.done()
                    restored = await self.restored(source, choose.choice([d for d in DEPTHS if d != self.depth]))
            expected = [] if served else [await within(asked)]
            expected += await take(source, count - len(expected))
        wrong = {way: await self.first_difference(buffer, expected) for way, buffer in restored.items()}
        return [f"{self}, {way}: {what}" for way, what in wrong.items() if what is not None]

    async def restored(self, source: ReplayBuffer, depth: int) -> dict[str, ReplayBuffer]:
        snapshot, state = await source.snapshot(), await source.state_dict()
        restored = {"pickle": pickle.loads(pickle.dumps(source))}
        with tempfile.TemporaryDirectory() as folder:
            await source.save(Path(folder) / "it")
            for elastic in (False, True):
                targets = [self.buffer(depth=depth if elastic else None) for _ in range(3)]
                await targets[0].restore(snapshot, elastic=elastic)
                await targets[1].load_state_dict(state, elastic=elastic)
                await targets[2].load(Path(folder) / "it", elastic=elastic)
                restored |= {f"{way}, elastic={elastic}": b for way, b in zip(WAYS[:3], targets, strict=True)}
        return restored

    async def first_difference(self, buffer: ReplayBuffer, expected: list[Batch]) -> str | None:
        async with buffer:
            for position, batch in enumerate(expected):
                if (what := difference(await within(buffer.sample()), batch)) is not None:
                    return f"batch {position}: {what}"
        return None


TRIALS = [(sampler, depth, workers) for sampler in SAMPLERS for depth in DEPTHS for workers in WORKERS]


@pytest.mark.loops_in_turn
@pytest.mark.parametrize("part", [0, 1])
async def test_no_mismatch(part: int) -> None:
    trials = [Trial(*settings, seed) for seed, settings in enumerate(TRIALS[::9])][part::2]
    assert [what for trial in trials for what in await trial.mismatches(8)] == []


@slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("sampler", SAMPLERS)
async def test_no_mismatch_in_full(sampler: str, record_property: Callable[[str, object], None]) -> None:
    trials = [Trial(*settings, seed) for settings in TRIALS if settings[0] == sampler for seed in range(20)]
    wrong = [what for trial in trials for what in await trial.mismatches(100)]
    record_property("resumed", 7 * len(trials))
    assert wrong == []
