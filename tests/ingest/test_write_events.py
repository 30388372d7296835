"""What a sampler is told of writes, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import (
    AsyncBufError,
    BufferFailedError,
    Draw,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    Rows,
    SchemaError,
    TensorStorage,
    WriteEvent,
)
from tests.helpers import Crew, Stop, ThreadedStorage, rows, turns, within

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncbuf import Prepared, RowRange


class Listening(RandomSampler):
    """Writes down what it is told; refuses and fails when it is asked to."""

    def __init__(self) -> None:
        self.checked: list[Any] = []
        self.told: list[Any] = []
        self.refuses = self.fails = False

    def check_write(self, event: WriteEvent) -> None:
        if self.refuses:
            raise LookupError("refused")
        self.checked.append(seen(event))

    def wrote(self, event: WriteEvent) -> None:
        if self.fails:
            raise LookupError("failed")
        self.told.append(seen(event))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def seen(event: WriteEvent) -> Any:
    table = event.table
    valid = table.at(torch.arange(table.size)).tolist()
    told = (event.rows.tolist(), event.items.tolist(), event.numbers.tolist())
    return (*told, valid, table.write_count, table.contains(torch.arange(table.capacity)).tolist())


class Flaky(TensorStorage):
    """Fails to write when it is asked to."""

    fails = False

    def write(self, prepared: Prepared, runs: Sequence[RowRange]) -> None:
        if self.fails:
            raise MemoryError("no room")
        super().write(prepared, runs)


async def test_a_sampler_sees_the_table_as_it_is_afterwards() -> None:
    sampler = Listening()
    buffer = ReplayBuffer(TensorStorage(4), sampler=sampler)
    await buffer.extend(rows(3))
    await buffer.extend(rows(6))  # the first two are not kept
    await buffer.remove([1])
    await buffer.add({"number": 9, "wide": rows(1)["wide"][0]})
    every = [True] * 4
    assert sampler.told == [
        ([0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2], 3, [True, True, True, False]),
        ([1, 2, 3, 0], [2, 3, 4, 5], [5, 6, 7, 8], [0, 1, 2, 3], 9, every),
        ([1], [0], [9], [0, 3, 2, 1], 10, every),
    ]
    assert sampler.checked == sampler.told  # what it is asked before is what it is told afterwards


@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
async def test_a_refused_write_has_not_happened(threads: bool) -> None:
    sampler = Listening()
    storage = ThreadedStorage(10) if threads else TensorStorage(10)
    buffer = ReplayBuffer(storage, sampler=sampler, batch_size=10)
    await buffer.extend(rows(10))
    before = await buffer.state_dict()
    sampler.refuses = True
    with pytest.raises(LookupError, match="refused"):
        await buffer.extend(rows(3, 100))
    after = await buffer.state_dict()
    assert str(after) == str(before)
    sampler.refuses = False
    await buffer.extend(rows(3, 100))
    assert len(sampler.told) == 2


@pytest.mark.parametrize("hook", ["wrote", "written"])
async def test_a_write_that_fails_is_not_told(hook: str) -> None:
    told: list[list[int]] = []

    class Wrote(RandomSampler):
        def wrote(self, event: WriteEvent) -> None:
            told.append(event.rows.tolist())

    class Written(RandomSampler):
        def written(self, indices: torch.Tensor, rows: Rows) -> None:
            told.append(indices.tolist())

    storage = Flaky(10)
    buffer = ReplayBuffer(storage, sampler=Wrote() if hook == "wrote" else Written())
    await buffer.extend(rows(2))
    storage.fails = True
    with pytest.raises(MemoryError):
        await buffer.extend(rows(3))
    storage.fails = False
    await buffer.extend(rows(1))
    assert told == [[0, 1], [2]]


async def test_a_sampler_is_told_before_the_next_draw() -> None:
    class Latest(RandomSampler):
        newest = -1

        def written(self, indices: torch.Tensor, rows: Rows) -> None:
            self.newest = int(indices[-1])

        def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
            return Draw(torch.tensor([self.newest]))

    async with ReplayBuffer(TensorStorage(10), sampler=Latest(), batch_size=1) as buffer, Crew() as crew:
        waiting = crew.start(buffer.sample())
        await turns()
        await buffer.extend(rows(3))
        assert (await within(waiting)).indices.tolist() == [2]


async def test_a_sampler_that_defines_both_forms_is_told_by_both() -> None:
    told: list[str] = []

    class Both(RandomSampler):
        def wrote(self, event: WriteEvent) -> None:
            told.append("wrote")

        def written(self, indices: torch.Tensor, rows: Rows) -> None:
            told.append("written")

    await ReplayBuffer(TensorStorage(10), sampler=Both()).extend(rows(1))
    assert sorted(told) == ["written", "wrote"]


@pytest.mark.parametrize("threads", [False, True], ids=["inline", "threads"])
async def test_a_sampler_that_fails_when_told_ends_the_work(threads: bool) -> None:
    sampler = Listening()
    storage = ThreadedStorage(20) if threads else TensorStorage(20)
    async with ReplayBuffer(storage, sampler=sampler, batch_size=4, min_size=15) as buffer, Crew() as crew:
        await buffer.extend(rows(10))
        waiting = crew.start(buffer.sample())
        await turns()
        sampler.fails = True
        with pytest.raises(AsyncBufError, match=r"the items were written.*LookupError\('failed'\).*restore"):
            await buffer.extend(rows(3))
        assert len(buffer) == 13
        with pytest.raises(BufferFailedError, match="failed"):
            await within(waiting)
        with pytest.raises(BufferFailedError, match="failed"):
            await buffer.extend(rows(1))


async def test_a_sampler_that_fails_when_told_while_the_buffer_is_not_open() -> None:
    sampler = Listening()
    buffer = ReplayBuffer(TensorStorage(20), sampler=sampler)
    snapshot = await buffer.snapshot()
    sampler.fails = True
    with pytest.raises(AsyncBufError, match="the items were written, but the sampler did not take that") as caught:
        await buffer.extend(rows(3))
    assert isinstance(caught.value.__cause__, LookupError)
    assert len(buffer) == 3
    sampler.fails = False
    await buffer.restore(snapshot)
    await buffer.extend(rows(1))


async def test_a_cancelled_write_in_a_thread_is_told_once() -> None:
    stop = Stop()
    sampler = Listening()
    async with ReplayBuffer(ThreadedStorage(20, on_write=stop), sampler=sampler) as buffer, Crew() as crew:
        write = crew.start(buffer.extend(rows(3)))
        await stop.come.reached()
        write.cancel()
        await turns()
        stop.go.set()
        await within(buffer.update_priority([0], 1.0))  # comes after it
        assert [told[0] for told in sampler.told] == [[0, 1, 2]]


# -- columns ----------------------------------------------------------------------------------------------------------


class Ends(RandomSampler):
    """Asks for leaves of the items."""

    columns = ("number", "wide")

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def check_write(self, event: WriteEvent) -> None:
        for column in event.columns.values():
            assert isinstance(column, np.ndarray)

    def wrote(self, event: WriteEvent) -> None:
        self.told.append({path: (column.shape, column.ravel().tolist()) for path, column in event.columns.items()})


def item(number: int) -> dict[str, torch.Tensor]:
    return {key: column[0] for key, column in rows(1, number, width=2).items()}


@pytest.mark.parametrize("kind", [TensorStorage, ListStorage])
async def test_columns_of_the_kept_items(kind: type[TensorStorage] | type[ListStorage]) -> None:
    sampler = Ends()
    buffer = ReplayBuffer(kind(3), sampler=sampler)

    async def extend(count: int, start: int) -> None:
        if kind is TensorStorage:
            await buffer.extend(rows(count, start, width=2))
        else:
            await buffer.extend([item(start + i) for i in range(count)])

    await extend(2, 0)
    await extend(5, 2)
    await buffer.add(item(7))
    await buffer.add(item(8))
    wide = [[number, number] for number in range(9)]
    assert sampler.told == [
        {"number": ((2,), [0, 1]), "wide": ((2, 2), [0.0, 0.0, 1.0, 1.0])},
        {"number": ((3,), [4, 5, 6]), "wide": ((3, 2), [float(x) for pair in wide[4:7] for x in pair])},
        {"number": ((1,), [7]), "wide": ((1, 2), [7.0, 7.0])},
        {"number": ((1,), [8]), "wide": ((1, 2), [8.0, 8.0])},
    ]


class Deep(RandomSampler):
    columns: tuple[str, ...] = ("obs/0/step", "done")

    def __init__(self) -> None:
        self.told: list[dict[str, list[Any]]] = []

    def wrote(self, event: WriteEvent) -> None:
        self.told.append({path: column.tolist() for path, column in event.columns.items()})


@pytest.mark.parametrize("kind", [TensorStorage, ListStorage])
async def test_columns_of_nested_items_and_plain_numbers(kind: type[TensorStorage] | type[ListStorage]) -> None:
    sampler = Deep()
    buffer = ReplayBuffer(kind(10), sampler=sampler)
    for step in range(3):
        await buffer.add({"obs": [{"step": step, "x": torch.ones(2)}], "done": step == 2, "text": 1.0})
    assert sampler.told == [{"obs/0/step": [step], "done": [step == 2]} for step in range(3)]


async def test_columns_of_dtypes_that_numpy_lacks() -> None:
    class Half(Deep):
        columns = ("x",)

    x = torch.tensor([[0.5, -1.0], [2.0, 3.0]], dtype=torch.bfloat16)
    storages: list[Any] = [TensorStorage(10), ListStorage(10)]
    for storage in storages:
        sampler = Half()
        items: Any = {"x": x} if isinstance(storage, TensorStorage) else [{"x": row} for row in x]
        await ReplayBuffer(storage, sampler=sampler).extend(items)
        assert sampler.told == [{"x": x.tolist()}]


async def test_a_column_that_lies_deeper() -> None:
    class Done(Deep):
        columns = ("done",)

    buffer = ReplayBuffer(TensorStorage(10), sampler=Done())
    with pytest.raises(SchemaError, match=r"\['done'\].*a path goes through all keys: 'next/done'"):
        await buffer.add({"obs": 1.0, "next": {"done": True}})
    assert len(buffer) == 0


@pytest.mark.parametrize("kind", [TensorStorage, ListStorage])
async def test_a_column_that_items_lack(kind: type[TensorStorage] | type[ListStorage]) -> None:
    sampler = Deep()
    buffer = ReplayBuffer(kind(10), sampler=sampler)
    with pytest.raises(SchemaError, match=r"expected.*(obs/0/step|done).*which the sampler or writer asks for; found"):
        await buffer.add({"done": True})
    assert (len(buffer), sampler.told) == (0, [])
    await buffer.add({"obs": [{"step": 0}], "done": True})


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([{"obs": [{"step": 0}], "done": False}, {"obs": [{"step": 0}]}], r"item 1: expected a leaf at 'done'"),
        ([{"obs": [{"step": "x"}], "done": False}], r"item 0: expected a number or tensor at 'obs/0/step'.*found str"),
        ([{"obs": [{"step": [1]}], "done": False}], r"item 0: expected a leaf at 'obs/0/step'"),
        (
            [{"obs": [{"step": torch.ones(n)}], "done": False} for n in (1, 2)],
            r"obs/0/step: expected the same shape in all items.*found \[\(1,\), \(2,\)\]",
        ),
    ],
)
async def test_items_without_the_columns_that_are_asked_for(items: list[Any], message: str) -> None:
    buffer = ReplayBuffer(ListStorage(10), sampler=Deep(), collate_fn=list)
    with pytest.raises(SchemaError, match=message):
        await buffer.extend(items)
    assert len(buffer) == 0


async def test_a_large_write_that_fails_leaves_no_thread() -> None:
    def fail() -> None:
        raise MemoryError("no room")

    buffer = ReplayBuffer(ThreadedStorage(20, on_write=fail))
    with pytest.raises(MemoryError):
        await buffer.extend(rows(3))
    assert len(buffer) == 0  # the thread is looked for by the fixture that watches all tests


async def test_a_sampler_that_says_it_is_trusted_is_told_all_the_same() -> None:
    class Trusting(RandomSampler):
        trusted = True

        def __init__(self) -> None:
            self.told: list[str] = []

        def check_write(self, event: WriteEvent) -> None:
            self.told.append(f"check {event.numbers.tolist()}")

        def wrote(self, event: WriteEvent) -> None:
            self.told.append(f"wrote {event.numbers.tolist()}")

    sampler = Trusting()
    buffer = ReplayBuffer(TensorStorage(10), sampler=sampler)
    await buffer.extend(rows(2))
    await buffer.extend(rows(1))
    assert sampler.told == ["check [0, 1]", "wrote [0, 1]", "check [2]", "wrote [2]"]
