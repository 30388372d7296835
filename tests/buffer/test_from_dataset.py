"""Buffers over fixed data: passes, resuming, errors, and what a checkpoint has of the data."""

from __future__ import annotations

import asyncio
import functools
import pickle
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from asyncbuf import (
    Batch,
    Checkpointer,
    CheckpointMismatchError,
    DatasetStorage,
    PrefetchError,
    PrioritizedSampler,
    RandomSampler,
    ReadOnlyError,
    ReplayBuffer,
    SchemaError,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    Subset,
    TensorStorage,
    split,
)
from asyncbuf.testing import assert_exact_resume
from tests.helpers import crossed, seeded, take, within
from tests.resume_helpers import Average, late, noisy, plain

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ITEMS = 23


def columns(count: int = ITEMS, width: int = 3) -> dict[str, torch.Tensor]:
    number = torch.arange(count)
    return {"number": number, "wide": number[:, None].float().repeat(1, width)}


class Items(Dataset[Any]):
    """Items that are made when they are asked for."""

    def __init__(self, count: int = ITEMS) -> None:
        self.count = count
        self.read: list[int] = []
        self.broken: set[int] = set()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, Any]:
        if type(number) is not int:
            raise TypeError(f"expected an int, found {number!r}")
        self.read.append(number)
        if number in self.broken:
            raise OSError(f"item {number} cannot be read")
        return {"number": number, "wide": torch.full((3,), float(number))}


class ManyItems(Items):
    """Gives several at once."""

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [self[number] for number in numbers]


class Point(NamedTuple):
    number: torch.Tensor
    wide: torch.Tensor


DATA: dict[str, Callable[[], Any]] = {
    "dict": columns,
    "nested": lambda: {"number": torch.arange(ITEMS), "obs": {"wide": columns()["wide"], "more": (torch.ones(ITEMS),)}},
    "arrays": lambda: {name: leaf.numpy() for name, leaf in columns().items()},
    "named tuple": lambda: Point(**columns()),
    "dataset": Items,
    "many": ManyItems,
    "list": lambda: [Items()[number] for number in range(ITEMS)],
    "part": lambda: Subset(columns(40), range(10, 10 + ITEMS)),
    "part of a dataset": lambda: Subset(Items(40), torch.arange(10, 10 + ITEMS)),
}


def number_of(data: Any) -> torch.Tensor:
    found: torch.Tensor = data.number if isinstance(data, Point) else data["number"]
    return found


async def one_pass(buffer: ReplayBuffer) -> list[int]:
    return [int(number) for batch in [b async for b in buffer.epoch()] for number in number_of(batch.data)]


def loader(data: Any, **options: Any) -> ReplayBuffer:
    return ReplayBuffer.from_dataset(data, **{"batch_size": 4, "generator": seeded(), **options})


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("kind", DATA)
async def test_each_pass_has_each_item_once(kind: str, depth: int) -> None:
    buffer = loader(DATA[kind](), prefetch=depth)
    expected = list(range(10, 10 + ITEMS)) if kind.startswith("part") else list(range(ITEMS))
    assert len(buffer) == buffer.capacity == buffer.write_count == ITEMS
    async with buffer:
        passes = [await one_pass(buffer) for _ in range(3)]
    assert all(sorted(each) == expected for each in passes)
    assert passes[0] != passes[1] != passes[2]


@pytest.mark.parametrize("kind", DATA)
async def test_in_order_and_without_the_last(kind: str) -> None:
    async with loader(DATA[kind](), shuffle=False, drop_last=True) as buffer:
        first = 10 if kind.startswith("part") else 0
        assert await one_pass(buffer) == list(range(first, first + 20))
        batch = await buffer.sample()
        assert batch.indices.tolist() == [0, 1, 2, 3]
        if not isinstance(batch.data, Point) and "wide" in batch.data:
            assert batch["wide"].tolist() == [[float(n)] * 3 for n in range(first, first + 4)]


async def test_a_lone_tensor_and_tuples() -> None:
    x, y = torch.randn(9, 2), torch.arange(9)
    async with loader(x, shuffle=False, batch_size=9) as buffer:
        assert torch.equal((await buffer.sample()).data, x)
    for data in ((x, y), TensorDataset(x, y), [(x[i], y[i]) for i in range(9)]):
        async with loader(data, shuffle=False, batch_size=9) as buffer:
            found = (await buffer.sample()).data
        assert torch.equal(found[0], x)
        assert torch.equal(found[1], y)


async def test_tensordicts() -> None:
    from tensordict import TensorDict

    data = TensorDict({"number": torch.arange(ITEMS), "inner": {"x": torch.ones(ITEMS, 2)}}, batch_size=[ITEMS])
    async with loader(data) as buffer:
        assert sorted(await one_pass(buffer)) == list(range(ITEMS))
        batch = await buffer.sample()
    assert isinstance(batch.data, TensorDict)
    assert batch.data.batch_size == torch.Size([4])


class Table:
    """What a ``datasets.Dataset`` looks like from here."""

    def __init__(self, kind: str = "int64") -> None:
        self.features = {"number": f"Value({kind})", "text": "Value(string)"}
        self.column_names = ["number", "text"]

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return [row[key] for row in self.__getitems__(list(range(ITEMS)))]
        if isinstance(key, list):
            return {name: [row[name] for row in self.__getitems__(key)] for name in self.column_names}
        return {"number": key, "text": f"text {key}"}

    def __getitems__(self, keys: list[int]) -> list[Any]:
        return [self[key] for key in keys]


async def test_tables_of_huggingface() -> None:
    async with loader(Table()) as buffer:
        batch = await buffer.sample()
        assert batch["text"] == [f"text {number}" for number in batch["number"].tolist()]
        snapshot = await buffer.snapshot()
    with pytest.raises(CheckpointMismatchError, match="fields of the data set"):
        await loader(Table("int32")).restore(snapshot)


async def test_nothing_is_read_before_it_is_asked_for_and_nothing_copied() -> None:
    data = Items(10**9)
    buffer = loader(data, prefetch=0)
    async with buffer:
        await buffer.sample()
    assert len(data.read) == 4
    whole = columns()
    async with loader(whole, shuffle=False, prefetch=0) as buffer:
        whole["wide"][0] = 99
        batch = await buffer.sample()
        assert batch["wide"][0].tolist() == [99.0] * 3
        batch["wide"].zero_()
    assert whole["wide"][1].tolist() == [1.0] * 3


async def test_memory_mapped_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(60.0).reshape(20, 3))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    async with loader({"x": mapped, "big endian": np.arange(20, dtype=">i4"), "back": np.arange(20)[::-1]}) as buffer:
        batch = await buffer.sample()
        assert buffer.stats().inline_gathers == 0
    assert torch.equal(batch["x"][:, 0], batch.indices * 3.0)
    assert torch.equal(batch["big endian"].long(), batch.indices)
    assert torch.equal(batch["back"], 19 - batch.indices)


async def test_large_batches_are_shared_by_threads() -> None:
    whole = {"x": torch.randn(3000, 4000), "y": np.random.default_rng(0).random((3000, 9)), "z": torch.arange(3000)}
    async with loader(whole, batch_size=2000, prefetch=0) as buffer:
        batch = await buffer.sample()
    for name, leaf in whole.items():
        assert torch.equal(batch[name], torch.as_tensor(leaf)[batch.indices])


async def test_items_of_a_batch_that_is_waited_for_are_read_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncbuf._runtime.threads.COPIERS", 4)
    barrier = threading.Barrier(4)

    class Meeting(Items):
        def __getitem__(self, number: int) -> Any:
            barrier.wait(10)
            return super().__getitem__(number)

    buffer = loader(Meeting(), prefetch=0, shuffle=False)
    assert isinstance(buffer._storage, DatasetStorage)
    buffer._storage._seconds = 1.0  # as if the items before had taken long
    async with buffer:
        assert (await within(buffer.sample()))["number"].tolist() == [0, 1, 2, 3]


async def test_an_item_that_cannot_be_read() -> None:
    data = Items()
    data.broken = {5}
    async with loader(data, shuffle=False) as buffer:
        assert (await buffer.sample())["number"].tolist() == [0, 1, 2, 3]
        for _ in range(2):
            with pytest.raises(PrefetchError, match="item 5 cannot be read") as caught:
                await within(buffer.sample())
            assert isinstance(caught.value.__cause__, OSError)
            assert caught.value.indices == (4, 5, 6, 7)
        data.broken = set()
        assert (await within(buffer.sample()))["number"].tolist() == [4, 5, 6, 7]
        assert (await within(buffer.sample()))["number"].tolist() == [8, 9, 10, 11]


async def test_a_dataset_that_gives_fewer_items() -> None:
    class Short(Items):
        def __getitems__(self, numbers: list[int]) -> list[Any]:
            return [self[number] for number in numbers[1:]]

    async with loader(Short(), batch_size=9) as buffer:
        with pytest.raises(PrefetchError, match="__getitems__: expected"):
            await within(buffer.sample())


async def test_items_that_differ_and_collate_fn() -> None:
    texts = [{"tokens": torch.arange(n)} for n in range(1, 9)]
    async with loader(texts) as buffer:
        with pytest.raises(PrefetchError, match="tokens: expected items that can be stacked, or a collate_fn"):
            await within(buffer.sample())

    def padded(items: list[Any]) -> Any:
        return torch.nn.utils.rnn.pad_sequence([item["tokens"] for item in items], batch_first=True)

    async with loader(texts, collate_fn=padded, shuffle=False) as buffer:
        assert (await buffer.sample()).data.shape == (4, 4)


async def test_writes_are_refused_and_removals_are_not() -> None:
    async with loader(columns(), prefetch=2) as buffer:
        for call in (buffer.extend(columns(3)), buffer.add({"number": 3}), buffer.empty()):
            with pytest.raises(ReadOnlyError, match=r"fixed data.*its 23 items.*remove\(\) takes single items out"):
                await call
        batch = await buffer.sample()
        assert await buffer.remove(batch) == 4
        rest = await one_pass(buffer)
        assert len(set(rest)) == ITEMS - 4
        gone = set(batch["number"].tolist())
        assert sorted(await one_pass(buffer)) == sorted(set(range(ITEMS)) - gone)


@pytest.mark.parametrize("depth", [0, 1, 4])
async def test_a_pass_goes_on_unless_it_is_started_afresh(depth: int) -> None:
    async with loader(columns(), prefetch=depth) as buffer:

        async def some(count: int) -> list[int]:
            found: list[int] = []
            async for batch in buffer.epoch():
                found += batch["number"].tolist()
                if len(found) == 4 * count:
                    break
            return found

        begun = await some(2)
        assert sorted(begun + await one_pass(buffer)) == list(range(ITEMS))
        await some(2)
        await buffer.restart_epoch()
        assert sorted(await one_pass(buffer)) == list(range(ITEMS))
        await some(5)  # with a depth, the last batch of the pass is drawn now
        await buffer.restart_epoch()
        assert sorted(await one_pass(buffer)) == list(range(ITEMS))
        await buffer.restart_epoch()
        assert await buffer.restart_epoch() == 0
        assert sorted(await one_pass(buffer)) == list(range(ITEMS))
        epochs = [(await buffer.sample()).epoch for _ in range(2)]
        assert epochs[0] == epochs[1]
        await buffer.restart_epoch()
        assert (await buffer.sample()).epoch == epochs[0] + 1  # type: ignore[operator]


async def test_a_consumer_that_waits_gets_a_batch_of_the_old_pass() -> None:
    gate = asyncio.Event()

    async def held(data: Any) -> Any:
        await gate.wait()
        return data

    async with loader(columns(), transform=held) as buffer:
        asked = asyncio.create_task(buffer.sample())
        await asyncio.sleep(0)
        await within(buffer.restart_epoch())
        gate.set()
        assert (await within(asked)).epoch == 0
        assert (await within(buffer.sample())).epoch == 1


async def test_what_cannot_start_a_pass_afresh() -> None:
    async with loader(columns(), sampler=RandomSampler()) as buffer:
        with pytest.raises(TypeError, match="restart_epoch: expected a sampler with passes, found RandomSampler"):
            await buffer.restart_epoch()


async def test_samplers_that_look_at_the_items() -> None:
    data = {**columns(40), "done": torch.arange(40) % 10 == 9, "td_error": torch.arange(40).float()}
    async with loader(data, sampler=PrioritizedSampler(1.0, priority_key="td_error"), batch_size=500) as buffer:
        drawn = (await buffer.sample())["number"].bincount(minlength=40)
        assert drawn[30:].sum() > 1.5 * drawn[:20].sum()
        assert drawn[0] == 0
    part = Subset(data, range(5, 40))
    async with loader(part, sampler=SliceSampler(slice_len=5, end_key="done"), batch_size=50) as buffer:
        number = (await buffer.sample())["number"].reshape(10, 5)
        assert (number.diff() == 1).all()
        assert (number // 10 == number[:, :1] // 10).all()
        await buffer.sample()
        snapshot, expected = await buffer.snapshot(), await take(buffer, 3)
    again = loader(part, sampler=SliceSampler(slice_len=5, end_key="done"), batch_size=50)
    await again.restore(snapshot)
    async with again:
        assert await take(again, 3) == expected
    with pytest.raises(SchemaError, match=r"expected data with \['ends'\], which the sampler asks for; found"):
        loader(data, sampler=SliceSampler(slice_len=5, end_key="ends"), batch_size=5)
    with pytest.raises(SchemaError, match=r"expected tensors or arrays for a sampler that asks for.*found a Items"):
        loader(Items(), sampler=SliceSampler(slice_len=5, end_key="done"), batch_size=5)
    with pytest.raises(ValueError, match="td_error: expected finite numbers"):
        loader({**data, "td_error": -torch.ones(40)}, sampler=PrioritizedSampler(priority_key="td_error"))


async def test_passes_of_slices_start_afresh() -> None:
    sampler = SliceSamplerWithoutReplacement(slice_len=2, end_key="done")
    buffer = ReplayBuffer(TensorStorage(12), sampler=sampler, batch_size=4, generator=seeded())
    await buffer.extend({"done": torch.arange(12) % 6 == 5})
    async with buffer:
        whole = [b async for b in buffer.epoch()]
        await buffer.sample()
        await buffer.restart_epoch()
        assert len([b async for b in buffer.epoch()]) == len(whole)


# -- resuming ---------------------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "dict": {"data": "dict", "transform": [noisy]},
    "dataset": {"data": "dataset", "transform": [plain, late, noisy]},
    "in order": {"data": "many", "shuffle": False, "drop_last": True},
    "part": {"data": "part of a dataset"},
    "stateful": {"data": "dict", "stateful": True},
    "collate": {"data": "list", "collate_fn": list},
}


def made(kind: str, depth: int = 2, workers: int = 1) -> ReplayBuffer:
    options = dict(KINDS[kind])
    data = DATA[options.pop("data")]()
    if options.pop("stateful", False):
        options["transform"] = [Average(), noisy]
    return loader(data, prefetch=depth, workers=workers, **options)


async def drop_items(buffer: ReplayBuffer, step: int, batch: Batch) -> None:
    if step % 3 == 1:
        await buffer.remove(batch.indices[:2])


@pytest.mark.loops_in_turn
@pytest.mark.parametrize(("kind", "settings"), crossed(KINDS, [(0, 1), (2, 1), (3, 2)], one_in=3))
async def test_every_kind_resumes_exactly(kind: str, settings: tuple[int, int]) -> None:
    depth, workers = settings
    ways = ("snapshot", "state_dict", "directory") if kind in ("collate",) else ("snapshot", "directory", "pickle")
    points = (0, 2, 5, 6, 8)
    await assert_exact_resume(lambda: made(kind, depth, workers), steps=8, at=points, ways=ways, hops=1)


@pytest.mark.loops_in_turn
@pytest.mark.parametrize("kind", ["dict", "dataset", "in order", "part"])
async def test_every_kind_resumes_among_removals(kind: str) -> None:
    await assert_exact_resume(
        lambda: made(kind, 3), steps=7, at=(0, 2, 4, 6), ways=("snapshot", "directory"), feed=drop_items, hops=1
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("depth", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_resumes_exactly_in_full(kind: str, depth: int) -> None:
    for workers in (1, 3):
        await assert_exact_resume(functools.partial(made, kind, depth, workers), steps=20, feed=drop_items)


@pytest.mark.parametrize("kind", ["dict", "dataset"])
async def test_one_stream_whatever_prefetches(kind: str) -> None:
    streams = []
    for depth, workers in ((0, 1), (1, 1), (3, 2), (8, 4)):
        async with made(kind, depth, workers) as buffer:
            streams.append(await take(buffer, 15))
    assert all(stream == streams[0] for stream in streams)


async def test_a_checkpoint_has_positions_and_not_the_data(tmp_path: Path) -> None:
    data = {"x": torch.zeros(20_000, 1000)}  # 80 MB, prefetched batches of 1 MB
    async with loader(data, batch_size=256) as buffer:
        await buffer.sample()
        checkpoints = Checkpointer(tmp_path, keep=2)
        await checkpoints.save(1, buffer=buffer)
        expected = await take(buffer, 5)
    size = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert size < 40_000
    other = loader(data, batch_size=256, generator=seeded(7))
    await checkpoints.restore(buffer=other)
    async with other:
        assert await take(other, 5) == expected


async def test_a_pickle_has_the_data() -> None:
    buffer = loader(columns())
    again = pickle.loads(pickle.dumps(buffer))
    async with buffer, again:
        assert await take(again, 8) == await take(buffer, 8)


OTHER: dict[str, tuple[Any, str]] = {
    "more items": (columns(24), "capacity: expected 24"),
    "wider": (columns(width=4), r"fields of the data set"),
    "another dtype": ({**columns(), "number": torch.arange(ITEMS).int()}, "fields of the data set"),
    "another structure": ((columns()["number"], columns()["wide"]), "kind of the data set"),
    "a dataset": (Items(), "storage: expected 'DatasetStorage'"),
    "other items": (Subset(columns(40), range(ITEMS)), "indices of the data set"),
}


@pytest.mark.parametrize("name", OTHER)
async def test_other_data_is_refused(name: str) -> None:
    data, message = OTHER[name]
    buffer = loader(columns())
    snapshot = await buffer.snapshot()
    other = loader(data)
    before = await other.state_dict()
    with pytest.raises(CheckpointMismatchError, match=message):
        await other.restore(snapshot)
    assert (await other.state_dict())["sampler"] == before["sampler"]


async def test_other_parts_are_refused() -> None:
    train, valid = split(columns(40), [0.5, 0.5])
    snapshot = await loader(train).snapshot()
    with pytest.raises(CheckpointMismatchError, match="indices of the data set"):
        await loader(valid).restore(snapshot)
    await loader(split(columns(40), [0.5, 0.5])[0]).restore(snapshot)


async def test_validation_beside_training_from_one_split() -> None:
    train, valid = split(Items(100), [0.9, 0.1])
    async with loader(train, drop_last=True) as training, loader(valid, shuffle=False, batch_size=64) as validation:
        seen = {number for batch in [await training.sample() for _ in range(22)] for number in batch["number"].tolist()}
        for _ in range(2):
            checked = await one_pass(validation)
            assert len(checked) == 10
            assert not seen & set(checked)
