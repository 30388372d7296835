"""Sequences of different lengths: what may be written, what a batch looks like, and what is refused in which words."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import numpy as np
import pytest
import torch

from asyncbuf import (
    Draw,
    RaggedStorage,
    ReplayBuffer,
    RowRange,
    Rows,
    Sampler,
    SchemaError,
    SliceSampler,
    WriteEvent,
)
from asyncbuf.testing import assert_same_batch
from asyncbuf.testing.compare import difference
from tests.helpers import seeded
from tests.storage.ragged_items import PADS, RAGGED, columns_of, expected_batch, ragged_list

LAYOUTS = ["padded", "packed", "jagged"]


def write(storage: RaggedStorage, items: Any, row: int = 0) -> None:
    prepared = storage.prepare(items)
    storage.write(prepared, [RowRange(row, 0, prepared.count)])


def stored(*items: Any, layout: str = "padded", **options: Any) -> Any:
    """What is gathered of some items with ``tokens``."""
    storage = RaggedStorage(max(1, len(items)), ["tokens"], layout=layout, **options)
    write(storage, list(items))
    return storage.gather(torch.arange(len(items)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [ragged_list, columns_of])
def test_batches_are_as_by_hand(layout: str, make: Any) -> None:
    storage = RaggedStorage(30, RAGGED, layout=layout, pad_value=PADS)
    write(storage, make(30))
    rows = [3, 29, 0, 3, 12]
    items = ragged_list(30)
    assert difference(storage.gather(torch.tensor(rows)), expected_batch([items[row] for row in rows], layout)) is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_data_of_a_batch_can_be_written_again(layout: str) -> None:
    storage = RaggedStorage(30, RAGGED, layout=layout, pad_value=PADS)
    write(storage, ragged_list(30))
    batch = storage.gather(torch.arange(30).flip(0))
    for known in (False, True):
        other = RaggedStorage(30, RAGGED, layout=layout, pad_value=PADS)
        if known:
            write(other, ragged_list(2))
        write(other, batch)
        assert difference(other.gather(torch.arange(30)), batch) is None


def test_a_batch_of_empty_sequences() -> None:
    empty = {"tokens": torch.empty(0, dtype=torch.int64)}
    assert stored(empty, empty)["tokens"].shape == (2, 0)
    assert stored(empty, empty, layout="packed")["offsets"].tolist() == [0, 0, 0]
    assert [len(row) for row in stored(empty, empty, layout="jagged")["tokens"].unbind()] == [0, 0]


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        ([1, 2], torch.int64),
        ((True, False), torch.bool),
        ([0.5], torch.float32),
        ([1j], torch.complex64),
        ([[1, 2], [3, 4], [5, 6]], torch.int64),
        (np.arange(3, dtype=np.uint8), torch.uint8),
        (torch.ones(2, 3, dtype=torch.bfloat16), torch.bfloat16),
    ],
    ids=str,
)
def test_the_first_item_decides_the_dtype(numbers: Any, dtype: torch.dtype) -> None:
    tokens = stored({"tokens": numbers})["tokens"]
    assert tokens.dtype is dtype
    assert torch.equal(tokens[0], torch.as_tensor(numbers).to(dtype))


def test_lists_of_numbers_become_what_is_stored() -> None:
    cases: list[tuple[torch.Tensor, list[float]]] = [
        (torch.ones(1, dtype=torch.int16), [1, -2]),
        (torch.ones(1, dtype=torch.bfloat16), [1, 0.5]),
        (torch.ones(1), [3]),
        (torch.ones(1, 2), []),
        (torch.ones(1, dtype=torch.complex64), [1.5]),
    ]
    for first, later in cases:
        tokens = stored({"tokens": first}, {"tokens": later})["tokens"]
        assert tokens.dtype is first.dtype
        assert torch.equal(tokens[1, : len(later)], torch.tensor(later).to(first.dtype).reshape(-1, *first.shape[1:]))


def test_an_empty_list_is_taken_where_another_item_says_more() -> None:
    assert stored({"tokens": []}, {"tokens": [7]})["tokens"].tolist() == [[0], [7]]


def test_groups_have_lengths_of_their_own() -> None:
    storage = RaggedStorage(2, {"prompt": ["prompt"], "answer": ["answer", "logprobs"]}, layout="packed")
    items = [
        {"prompt": [1, 2, 3], "answer": [4], "logprobs": [0.5]},
        {"prompt": [], "answer": [5, 6], "logprobs": [1.5, 2.5]},
    ]
    write(storage, [items[0], {**items[1], "prompt": torch.empty(0, dtype=torch.int64)}])
    batch = storage.gather(torch.tensor([1, 0]))
    assert {key: value.tolist() for key, value in batch.items()} == {
        "prompt": [1, 2, 3],
        "answer": [5, 6, 4],
        "logprobs": [1.5, 2.5, 0.5],
        "prompt_lengths": [0, 3],
        "answer_lengths": [2, 1],
        "prompt_offsets": [0, 0, 3],
        "answer_offsets": [0, 2, 3],
    }


def test_pad_values() -> None:
    sequences = [{"tokens": [1, 2]}, {"tokens": [3]}]
    assert stored(*sequences, pad_value=-100)["tokens"].tolist() == [[1, 2], [3, -100]]
    assert stored(*sequences, pad_value={"tokens": 5})["tokens"].tolist() == [[1, 2], [3, 5]]
    floats = [{"tokens": torch.ones(2, dtype=torch.bfloat16)}, {"tokens": torch.ones(0, dtype=torch.bfloat16)}]
    assert stored(*floats, pad_value=0.5)["tokens"].tolist() == [[1, 1], [0.5, 0.5]]
    assert stored(*floats, pad_value=float("-inf"))["tokens"][1].tolist() == [float("-inf")] * 2
    flags = [{"tokens": [True, True]}, {"tokens": torch.ones(0, dtype=torch.bool)}]
    assert stored(*flags, pad_value=False)["tokens"].tolist() == [[True, True], [False, False]]


@pytest.mark.parametrize("wrong", [-1, 0.5, 256, 1e30])
def test_a_pad_value_that_does_not_fit_is_refused(wrong: float) -> None:
    with pytest.raises(SchemaError, match=r"pad_value of tokens: expected a number that fits torch.uint8"):
        stored({"tokens": torch.ones(1, dtype=torch.uint8)}, pad_value=wrong)


GOOD = {"tokens": [1, 2], "marks": torch.ones(2, 3), "deep": {"reward": 1.0}}
TENSOR = torch.ones(2, 2, dtype=torch.int64)
REFUSED: list[tuple[Any, str]] = [
    ({**GOOD, "tokens": 3}, "tokens: expected a sequence with an axis of tokens, found a single number"),
    ({**GOOD, "tokens": [1, 2, 3]}, "marks: expected 3 tokens in item 0, as in tokens, found 2"),
    ({**GOOD, "tokens": [1.5, 2]}, "tokens: expected dtype torch.int64, found a list of torch.float32"),
    ({**GOOD, "tokens": [True, False]}, "tokens: expected dtype torch.int64, found a list of torch.bool"),
    ({**GOOD, "tokens": [2**63, 1]}, "tokens: expected integers of 64 bits, found larger ones"),
    ({**GOOD, "tokens": [2**63, 2**63]}, "tokens: expected numbers that fit torch.int64, found larger ones"),
    ({**GOOD, "tokens": [2**70, 1]}, "tokens: expected a tensor, an array or a list of numbers"),
    ({**GOOD, "tokens": ["a", "b"]}, "tokens: expected a tensor, an array or a list of numbers"),
    ({**GOOD, "tokens": [[1], [2, 3]]}, "tokens: expected a tensor, an array or a list of numbers"),
    ({**GOOD, "tokens": [[1], [2]]}, r"tokens: expected tokens of shape \[\], found \[1\]"),
    ({**GOOD, "tokens": "ab"}, "tokens: expected a tensor, numpy array or number, found str"),
    ({**GOOD, "tokens": None}, "tokens: expected a tensor, numpy array or number, found NoneType"),
    ({**GOOD, "tokens": torch.ones(2, dtype=torch.int32)}, "tokens: expected dtype torch.int64, found torch.int32"),
    ({**GOOD, "tokens": TENSOR}, r"tokens: expected tokens of shape \[\], found \[2\]"),
    ({**GOOD, "tokens": torch.ones(2, dtype=torch.int64, device="meta")}, "tokens: expected a tensor with data"),
    ({**GOOD, "marks": torch.ones(2, 4)}, r"marks: expected tokens of shape \[3\], found \[4\]"),
    ({**GOOD, "deep": {"reward": torch.ones(3)}}, r"deep/reward: expected the shape \[\], found \[3\] \(fields whose"),
    ({**GOOD, "deep": {"reward": "x"}}, "deep/reward: expected a tensor, numpy array or number, found str"),
    ({**GOOD, "deep": {}}, "keys differ at deep"),
    ({**GOOD, "more": 1}, "keys differ at the top"),
    ({key: value for key, value in GOOD.items() if key != "tokens"}, "keys differ at the top.*missing.*tokens"),
    ({}, "keys differ at the top"),
    ({**GOOD, "lengths": 2}, r"expected an item without \['lengths'\], which a batch has of its own: name the group"),
    (3, "expected an item as a dict, found int"),
    (None, "expected an item as a dict, found None"),
    ([GOOD], "expected an item as a dict, found"),
]


@pytest.mark.parametrize(("item", "words"), REFUSED, ids=range(len(REFUSED)))
def test_an_item_that_does_not_fit_is_refused(item: Any, words: str) -> None:
    storage = RaggedStorage(3, ["tokens", "marks"], max_length=5)
    write(storage, [GOOD])
    with pytest.raises(SchemaError, match=words):
        storage.prepare_one(item)
    with pytest.raises(SchemaError, match=words.replace("item 0", "item 1")) as caught:
        storage.prepare([GOOD, item])
    assert "item 1" in str(caught.value)
    write(storage, [GOOD], 1)


FIRST_REFUSED: list[tuple[Any, str]] = [
    ([{"tokens": []}], "tokens: expected a tensor, an array or at least one number in the first items"),
    ([{"tokens": [1]}, {"tokens": [0.5]}], "item 1: tokens: expected dtype torch.int64"),
    ([{"other": [1]}], r"expected a tensor, numpy array or number, found int|none at \['tokens'\]"),
    ([{"other": torch.ones(1)}], r"expected items with the sequences \['tokens'\], found none at \['tokens'\]"),
    ([], "expected at least one item, found none"),
    ("ab", "expected a list of items, or a dict of columns, found str"),
    (torch.ones(3), "expected a list of items, or a dict of columns, found float32"),
    ({}, "expected items with at least one leaf, found none"),
    ({"tokens": []}, "expected at least one item, found none"),
    ({"tokens": [[1], [2]], "reward": torch.ones(3)}, "tokens: expected 3 sequences, as there are items, found 2"),
    ({"tokens": [[1], [2]], "reward": 1.0}, "reward: expected a leading axis of items, found float"),
    ({"tokens": TENSOR}, r"tokens: expected a list of sequences, or lengths of items at \['lengths', 'offsets'\]"),
    ({"tokens": TENSOR, "reward": torch.ones(2)}, "tokens: expected a list of sequences, or their lengths at"),
    ({"tokens": TENSOR, "lengths": [3, 1]}, "lengths: expected a tensor, numpy array or number, found list"),
    ({"tokens": TENSOR, "lengths": torch.tensor([3, 1])}, "tokens: expected 2 sequences of at most 3 tokens"),
    ({"tokens": TENSOR, "lengths": torch.tensor([-1, 1])}, "tokens: expected 2 sequences of at most 1 tokens"),
    ({"tokens": TENSOR, "lengths": torch.tensor([1])}, "tokens: expected 1 sequences of at most 1 tokens"),
    ({"tokens": TENSOR, "lengths": torch.ones(2)}, "lengths: expected 2 integers, found float32"),
    ({"tokens": torch.arange(3), "lengths": torch.tensor([1, 2])}, "tokens: expected 2 leading axes"),
    ({"tokens": torch.arange(3), "offsets": torch.tensor([0, 2])}, "offsets: expected ascending numbers from 0 to 3"),
    ({"tokens": torch.arange(3), "offsets": torch.tensor([0, 4, 3])}, "offsets: expected ascending numbers"),
    ({"tokens": torch.arange(3), "offsets": torch.tensor([0])}, "expected at least one item, found none"),
    ({"tokens": [[1, 2]], "reward": torch.ones(1, 2).to_sparse()}, "reward: expected a dense tensor"),
]


@pytest.mark.parametrize(("items", "words"), FIRST_REFUSED, ids=range(len(FIRST_REFUSED)))
def test_first_items_that_make_no_sense_are_refused(items: Any, words: str) -> None:
    storage = RaggedStorage(3, ["tokens"])
    with pytest.raises(SchemaError, match=words):
        storage.prepare(items)
    assert storage.fields == storage.ragged_fields == ()


def test_sequences_that_are_too_long_are_refused() -> None:
    storage = RaggedStorage(3, ["tokens"], max_length=2)
    with pytest.raises(SchemaError, match="tokens: expected at most 2 tokens, which is max_length, found 3 in item 1"):
        storage.prepare([{"tokens": [1]}, {"tokens": [1, 2, 3]}])
    write(storage, [{"tokens": [1, 2]}])
    with pytest.raises(SchemaError, match="expected at most 2 tokens"):
        storage.prepare_one({"tokens": torch.arange(3)})


ODD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"ragged": "tokens"}, TypeError, r"ragged: expected a list of paths, found 'tokens': write \['tokens'\]"),
    ({"ragged": 3}, TypeError, "ragged: expected a list of paths, found 3"),
    ({"ragged": None}, TypeError, "ragged: expected a list of paths, found None"),
    ({"ragged": [3]}, TypeError, "ragged: expected paths of fields as str, found 3"),
    ({"ragged": {"a": "b"}}, TypeError, r"ragged: expected a list of paths in the group 'a', found 'b': write \['b'\]"),
    ({"ragged": {3: ["b"]}}, TypeError, "ragged: expected names of groups as str, found 3"),
    ({"ragged": []}, ValueError, "ragged: expected at least one path of a field"),
    ({"ragged": {"a": []}}, ValueError, "ragged: expected at least one path of a field"),
    ({"ragged": ["a", "a"]}, ValueError, "ragged: expected each path once"),
    ({"ragged": {"a": ["x"], "b": ["x"]}}, ValueError, "ragged: expected each path once"),
    ({"ragged": ["lengths"]}, ValueError, "ragged: expected other paths than"),
    ({"layout": "flat"}, ValueError, r"layout: expected one of \['padded', 'packed', 'jagged'\], found 'flat'"),
    ({"pad_value": "x"}, TypeError, "pad_value: expected a number, or numbers by path, found 'x'"),
    ({"pad_value": {"y": 1}}, ValueError, r"pad_value: expected paths among \['x'\], found 'y'"),
    ({"max_length": 0}, ValueError, "max_length: expected at least 1, found 0"),
    ({"max_length": 1.5}, TypeError, "max_length: expected an int, found 1.5"),
    ({"capacity": 0}, ValueError, "capacity: expected at least 1"),
]


@pytest.mark.parametrize(("options", "error", "words"), ODD, ids=range(len(ODD)))
def test_odd_arguments(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        RaggedStorage(**{"capacity": 3, "ragged": ["x"], **options})


# -- in a buffer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_transforms_get_a_batch_of_their_own(layout: str) -> None:
    """In threads, on the event loop and with a second try."""
    tries = []

    async def spoil(data: Any) -> Any:
        tries.append(data["lengths"].tolist())
        doubled = data["tokens"] * 2
        data["tokens"].fill_(-1)
        if len(tries) % 2:
            raise ValueError("once")
        return {**data, "doubled": doubled}

    buffer = ReplayBuffer(
        RaggedStorage(30, RAGGED, layout=layout), batch_size=4, prefetch=2, transform=spoil, generator=seeded()
    )
    plain = ReplayBuffer(RaggedStorage(30, RAGGED, layout=layout), batch_size=4, generator=seeded())
    async with buffer, plain:
        for each in (buffer, plain):
            await each.extend(ragged_list(30))
        for _ in range(4):
            expected = (await plain.sample())["tokens"] * 2
            for _ in range(3):
                try:
                    found = await buffer.sample()
                except Exception:
                    continue
                break
            assert difference(found["doubled"], expected) is None


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_large_batches_are_the_same_as_small_ones(layout: str) -> None:
    """Gathered by several threads, and written by one."""
    items = [{"tokens": torch.arange(i * 1000) % 97, "wide": torch.full((3000,), i)} for i in range(40)]
    small = RaggedStorage(40, ["tokens"], layout=layout)
    write(small, items)
    async with ReplayBuffer(RaggedStorage(40, ["tokens"], layout=layout), batch_size=32, generator=seeded()) as buffer:
        await buffer.extend(items)
        for _ in range(3):
            batch = await buffer.sample()
            assert difference(batch.data, small.gather(batch.indices)) is None


class Joined(Sampler):
    """Joins each row to itself."""

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        indices = torch.randint(rows.size, (batch_size,), generator=generator)
        return Draw(indices, joins={"again": indices})

    def combine(self, draw: Draw, data: Any, joined: Any) -> Any:
        return {**data, "again": joined["again"]["tokens"]}


def steps(count: int) -> list[dict[str, Any]]:
    return [{"tokens": torch.arange(i % 4), "done": i % 10 == 9} for i in range(count)]


async def test_padded_batches_take_the_shape_of_slices() -> None:
    sampler = SliceSampler(slice_len=5, end_key="done")
    async with ReplayBuffer(RaggedStorage(40, ["tokens"]), sampler=sampler, batch_size=20) as buffer:
        await buffer.extend(steps(40))
        batch = await buffer.sample()
        assert batch["tokens"].shape[:2] == batch["lengths"].shape == (4, 5)
        assert torch.equal(batch["lengths"], batch.indices % 4)


async def test_padded_batches_are_joined() -> None:
    async with ReplayBuffer(RaggedStorage(40, ["tokens"]), sampler=Joined(), batch_size=8) as buffer:
        await buffer.extend(steps(40))
        batch = await buffer.sample()
        assert torch.equal(batch["tokens"], batch["again"])


@pytest.mark.parametrize("layout", ["packed", "jagged"])
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("make", [lambda: SliceSampler(slice_len=5, end_key="done"), Joined], ids=["slices", "joins"])
async def test_other_batches_have_no_axis_of_rows(layout: str, prefetch: int, make: Any) -> None:
    storage = RaggedStorage(40, ["tokens"], layout=layout)
    async with ReplayBuffer(storage, sampler=make(), batch_size=20, prefetch=prefetch) as buffer:
        await buffer.extend(steps(40))
        with pytest.raises(Exception) as caught:  # noqa: PT011
            await buffer.sample()
        found = f"{caught.value} {caught.value.__cause__}"
        assert re.search('expected batches with an axis of rows.*layout="padded"', found)


class Longest(Sampler):
    """Prefers long sequences, by a column."""

    columns = ("lengths", "reward")

    def __init__(self) -> None:
        self.lengths = np.zeros(40, np.int64)

    def wrote(self, event: WriteEvent) -> None:
        self.lengths[event.rows.numpy()] = event.columns["lengths"]
        assert event.columns["reward"].shape == (len(event.rows), 2)

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        return Draw(torch.from_numpy(np.argsort(-self.lengths)[:batch_size].copy()))


async def test_samplers_see_lengths() -> None:
    async with ReplayBuffer(RaggedStorage(40, ["tokens"]), sampler=Longest(), batch_size=2) as buffer:
        await buffer.add({"tokens": [1, 2, 3], "reward": torch.ones(2)})
        await buffer.extend({"tokens": [[1], [1, 2]], "reward": torch.ones(2, 2)})
        assert (await buffer.sample())["lengths"].tolist() == [3, 2]


def test_sequences_are_no_columns() -> None:
    storage = RaggedStorage(3, ["tokens"])
    prepared = storage.prepare([{"tokens": [1, 2]}])
    with pytest.raises(SchemaError, match=r"fixed shape at 'tokens', which the sampler asks for.*'lengths'"):
        storage.columns(prepared, ["tokens"])
    with pytest.raises(SchemaError, match="found"):
        storage.columns(prepared, ["nothing"])


async def test_rows_leave_and_the_ring_goes_on() -> None:
    async with ReplayBuffer(RaggedStorage(10, ["tokens"]), batch_size=6, generator=seeded()) as buffer:
        await buffer.extend([{"tokens": [number] * number} for number in range(25)])
        await buffer.remove(torch.tensor([0, 1, 2]))
        await buffer.extend([{"tokens": [number] * number} for number in range(25, 27)])
        batch = await buffer.sample()
        for row, length in zip(batch["tokens"], batch["lengths"].tolist(), strict=True):
            assert row[:length].tolist() == [length] * length
        assert_same_batch(batch, batch)
        await buffer.empty()
        await buffer.extend([{"tokens": [1]}])


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_depth_workers_and_latency_do_not_show(layout: str) -> None:
    """Batches that are large enough for threads."""

    async def late(data: Any, *, generator: torch.Generator) -> Any:
        for _ in range(random.randrange(4)):
            await asyncio.sleep(0)
        return {**data, "late": torch.rand(2, generator=generator)}

    items = [{"tokens": torch.arange(i * 211) % 97, "number": i} for i in range(60)]
    streams = []
    for depth, workers in [(0, 1), (8, 3)]:
        storage = RaggedStorage(40, ["tokens"], layout=layout)
        settings: dict[str, Any] = {"batch_size": 24, "prefetch": depth, "workers": workers, "generator": seeded()}
        async with ReplayBuffer(storage, transform=late, **settings) as buffer:
            await buffer.extend(items[20:])
            streams.append([await buffer.sample() for _ in range(6)])
    for stream in streams[1:]:
        for found, expected in zip(stream, streams[0], strict=True):
            assert_same_batch(found, expected)
