"""Batches in which each class has a fixed share."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import ListStorage, ReplayBuffer, SchemaError, StratifiedSampler, TensorStorage
from asyncbuf.errors import CheckpointCorruptError, CheckpointMismatchError
from asyncbuf.sampler._class_rows import ClassRows
from asyncbuf.sampler._shares import apportioned
from asyncbuf.testing import assert_exact_resume
from tests.helpers import Lines, crossed, seeded, turns, within
from tests.sampler.chi_square import assert_chances

if TYPE_CHECKING:
    from asyncbuf import Batch

SIZE = 60


def items(classes: Any, start: int = 0) -> dict[str, torch.Tensor]:
    kinds = torch.as_tensor(classes)
    return {"number": torch.arange(start, start + len(kinds)), "kind": kinds}


def made(sampler: StratifiedSampler, capacity: int = SIZE, batch_size: int = 10, **more: Any) -> ReplayBuffer:
    return ReplayBuffer(TensorStorage(capacity), sampler=sampler, batch_size=batch_size, generator=seeded(), **more)


@pytest.mark.parametrize("seed", range(20))
def test_no_share_is_ever_a_row_ahead_or_behind(seed: int) -> None:
    choose = np.random.default_rng(seed)
    kinds = int(choose.integers(1, 30))
    shares = choose.dirichlet(np.full(kinds, choose.choice([0.05, 0.3, 1.0, 50.0])))
    if seed % 3 == 0:
        parts = choose.integers(0, 9, kinds)
        parts[0] += 1
        shares = parts / parts.sum()
    if seed % 4 == 1:
        shares = np.full(kinds, 1 / kinds)
    owed, given, total = np.zeros(kinds), np.zeros(kinds, np.int64), 0
    for _ in range(1500):
        count = int(choose.choice([1, 1, 2, 3, 7, 32, 33])) if seed % 2 else 1
        owed += count * shares
        counts = apportioned(owed, shares, count)
        assert counts.sum() == count
        assert counts.min() >= 0
        assert not counts[shares == 0].any()
        owed -= counts
        given += counts
        total += count
        assert np.abs(total * shares - given).max() < 1 + 1e-6


def test_shares_that_change_leave_whole_counts() -> None:
    choose = np.random.default_rng(0)
    owed = np.zeros(5)
    for _ in range(3000):
        shares = choose.dirichlet(np.full(5, 0.2)) * (choose.random(5) < 0.7)
        if not shares.any():
            continue
        count = int(choose.integers(1, 6))
        shares /= shares.sum()
        counts = apportioned(owed + count * shares, shares, count)
        assert counts.sum() == count
        assert counts.min() >= 0
        owed += count * shares - counts
        assert np.abs(owed).max() < 4


@pytest.mark.parametrize("seed", range(10))
def test_rows_of_classes_are_those_of_a_dict(seed: int) -> None:
    choose, found, expected = np.random.default_rng(seed), ClassRows(40), dict[int, int]()
    for _ in range(300):
        free = sorted(set(range(40)) - set(expected))
        count = int(choose.integers(0, min(len(free), choose.choice([2, 20])) + 1))
        if choose.random() < 0.5 and count:
            rows = choose.permutation(free)[:count]
            classes = choose.integers(-3, choose.choice([0, 30]), count)
            found.add(rows, classes)
            expected |= dict(zip(rows.tolist(), classes.tolist(), strict=True))
        else:
            rows = choose.permutation(40)[: choose.integers(1, 12)]
            found.discard(rows)
            for row in rows.tolist():
                expected.pop(row, None)
        assert found.known.tolist() == sorted(expected)
        there: dict[int, int] = {}
        for slot, value in enumerate(found.values):
            there |= dict.fromkeys(found.rows(slot).tolist(), value)
            taken = found.take(np.full(found.sizes[slot], slot), np.arange(found.sizes[slot]))
            assert taken.tolist() == found.rows(slot).tolist()
        assert there == expected


async def test_shares_are_exact_and_rows_of_a_class_equally_likely() -> None:
    shares = {0: 0.25, 1: 0.5, 5: 0.25}
    buffer = made(StratifiedSampler("kind", shares), batch_size=1000)
    kinds = torch.tensor([0, 1, 1, 5, 5, 5])[torch.arange(SIZE) % 6]
    await buffer.extend(items(kinds))
    counts = np.zeros(SIZE)
    async with buffer:
        for _ in range(1000):
            batch = await buffer.sample()
            assert torch.equal(batch.info["class"], batch["kind"])
            counts += np.bincount(batch.indices, minlength=SIZE)
    assert [counts[kinds == kind].sum() for kind in shares] == [250_000, 500_000, 250_000]
    assert_chances(counts, [shares[kind] / (kinds == kind).sum() for kind in kinds.tolist()])


async def test_equal_shares_of_the_classes_that_are_stored() -> None:
    buffer = made(StratifiedSampler("kind"), capacity=8, batch_size=6)
    await buffer.extend(items([True, False, True]))
    async with buffer:
        assert (await buffer.sample()).info["class"].tolist() == [0, 0, 0, 1, 1, 1]
        await buffer.extend(items([True] * 8))  # the others are overwritten
        assert (await buffer.sample()).info["class"].tolist() == [1] * 6
        await buffer.extend(items([False]))
        assert (await buffer.sample()).info["class"].tolist() == [0, 0, 0, 1, 1, 1]


async def test_thirds_of_a_batch_even_out() -> None:
    buffer = made(StratifiedSampler("kind"), batch_size=1)
    await buffer.extend(items([3, 1, 2]))
    async with buffer:
        found = [int((await buffer.sample()).info["class"]) for _ in range(9)]
    assert found == [1, 2, 3] * 3


async def test_consumers_wait_for_a_class_or_take_others() -> None:
    waits = made(StratifiedSampler("kind", {0: 0.5, 1: 0.5}))
    await waits.extend(items([0, 0, 7]))
    async with waits:
        waiting = asyncio.ensure_future(waits.sample())
        await turns()
        assert "no item of class 1 is stored (1 of 2 classes lack one)" in waits.why_blocked()
        await waits.extend(items([1]))
        assert (await within(waiting)).info["class"].tolist() == [0] * 5 + [1] * 5
    takes = made(StratifiedSampler("kind", {0: 0.2, 1: 0.6, 2: 0.2}, when_empty="others"))
    await takes.extend(items([0, 2, 7]))
    async with takes:
        assert (await takes.sample()).info["class"].tolist() == [0] * 5 + [2] * 5
        await takes.remove([0, 1])
        waiting = asyncio.ensure_future(takes.sample())
        await turns()
        assert "none of 1 items is of a class with a share" in takes.why_blocked()
        await takes.finish()
        with pytest.raises(Exception, match="finish"):
            await within(waiting)


@pytest.mark.parametrize("seed", range(6))
async def test_histories_are_those_of_a_dict(seed: int) -> None:
    choose = random.Random(seed)
    buffer = made(StratifiedSampler("kind"), capacity=23, batch_size=7)
    kinds: dict[int, int] = {}
    written = 0
    async with buffer:
        for _ in range(200):
            what = choose.choice(["write", "write", "draw", "draw", "remove", "empty" if written % 9 == 8 else "draw"])
            if what == "write":
                drawn = [choose.choice((-5, 0, 0, 0, 1, 2, 900)) for _ in range(choose.choice((1, 2, 5, 30)))]
                where = await buffer.extend(items(drawn, written))
                kinds |= dict(zip(where.tolist(), drawn[-len(where) :], strict=True))
                written += len(drawn)
            elif what == "remove" and kinds:
                gone = choose.sample(sorted(kinds), min(5, len(kinds)))
                await buffer.remove(gone)
                for row in gone:
                    del kinds[row]
            elif what == "empty":
                await buffer.empty()
                kinds.clear()
            elif kinds:
                batch = await within(buffer.sample())
                found = batch.info["class"].tolist()
                assert [kinds[row] for row in batch.indices.tolist()] == found == sorted(found)
                different = sorted(set(kinds.values()))
                assert all(abs(found.count(kind) - 7 / len(different)) < 2 for kind in different)


def test_the_cost_does_not_depend_on_how_much_is_stored() -> None:
    def lines(capacity: int) -> int:
        rows, generator = ClassRows(capacity), np.random.default_rng(0)
        rows.add(np.arange(capacity), generator.integers(0, 5, capacity))
        with Lines() as counted:
            for start in range(0, 200, 4):
                rows.discard(np.arange(start, start + 4))
                rows.add(np.arange(start, start + 4), generator.integers(0, 5, 4))
        return counted.count

    assert lines(1 << 17) < 1.2 * lines(1 << 10)


@pytest.mark.parametrize("storage", [TensorStorage, ListStorage])
async def test_classes_must_be_integers(storage: Any) -> None:
    buffer = ReplayBuffer(storage(8), sampler=StratifiedSampler("kind"), batch_size=2)
    wrong: list[tuple[Any, str]] = [
        (torch.tensor(0.5), "expected integers or bools that are classes, found float32"),
        (torch.zeros(2, dtype=torch.int64), r"expected one class per item, found items of shape \[2\]"),
        (
            torch.tensor(2**64 - 1, dtype=torch.uint64),
            r"expected integers or bools that are classes, found numbers from 2\*\*63",
        ),
    ]
    for value, message in wrong:
        with pytest.raises(SchemaError, match=f"kind: {message}"):
            await buffer.add({"kind": value})
    assert len(buffer) == 0
    await buffer.add({"kind": torch.tensor([3])})


@pytest.mark.parametrize(("prefetch", "shares"), crossed([0, 1, 4], [None, {0: 0.3, 2: 0.7}], one_in=2))
@pytest.mark.parametrize("at", [(3,), pytest.param("every", marks=pytest.mark.slow)], ids=["one", "every"])
async def test_exact_resume(prefetch: int, shares: Any, at: Any) -> None:
    async def make() -> ReplayBuffer:
        sampler = StratifiedSampler("kind", shares)
        buffer = made(sampler, capacity=40, batch_size=4, prefetch=prefetch, workers=2)
        await buffer.extend(items(torch.arange(25) % 3))
        return buffer

    async def feed(buffer: ReplayBuffer, step: int, batch: Batch) -> None:
        await buffer.extend(items([step % 5, 0, 2], 25 + 3 * step))
        if step % 4 == 3:
            await buffer.remove(batch.indices[:2])

    await assert_exact_resume(make, feed=feed, at=at, steps=6)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("shares", [[0, 0.5], [1, 0.5]], CheckpointMismatchError),
        ("shares", None, CheckpointCorruptError),
        ("when_empty", "others", CheckpointMismatchError),
        ("capacity", 59, CheckpointCorruptError),
        ("classes", torch.tensor([1, 0]), CheckpointCorruptError),
        ("classes", torch.tensor([0]), CheckpointCorruptError),
        ("sizes", torch.tensor([3, 1]), CheckpointCorruptError),
        ("sizes", torch.tensor([6, -1]), CheckpointCorruptError),
        ("rows", torch.tensor([0, 2, 4, 1, 1]), CheckpointCorruptError),
        ("rows", torch.tensor([0, 2, 4, 1, 5]), CheckpointCorruptError),
        ("rows", torch.tensor([0, 2, 4, 1, 60]), CheckpointCorruptError),
        ("owed", torch.tensor([2.0, 0.0], dtype=torch.float64), CheckpointCorruptError),
        ("owed", torch.tensor([torch.nan, 0.0], dtype=torch.float64), CheckpointCorruptError),
        ("owed", torch.zeros(2), CheckpointCorruptError),
    ],
)
async def test_a_state_that_is_none_is_refused(key: str, value: Any, error: type[Exception]) -> None:
    shares = {0: 0.25, 1: 0.75}
    buffer = made(StratifiedSampler("kind", shares))
    await buffer.extend(items([0, 1, 0, 1, 0]))
    state = await buffer.state_dict()
    await made(StratifiedSampler("kind", shares)).load_state_dict(state)
    state["sampler"][key] = value
    with pytest.raises(error):
        await made(StratifiedSampler("kind", shares)).load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"class_key": 3}, TypeError, "class_key: expected the path of a field, found 3"),
        ({"shares": [0.5, 0.5]}, TypeError, "shares: expected a dict with a share for each"),
        ({"shares": {}}, TypeError, "shares: expected a dict"),
        ({"shares": {0: 0.5}}, ValueError, "shares: expected shares whose sum is 1.*found a sum of 0.5"),
        ({"shares": {0: 1.5, 1: -0.5}}, ValueError, "shares: expected a share of at least 0 for 1, found -0.5"),
        ({"shares": {0: float("nan")}}, ValueError, "shares: expected a share of at least 0"),
        ({"shares": {0: "x"}}, TypeError, "shares: expected a number as the share of 0, found 'x'"),
        ({"shares": {0: True}}, TypeError, "shares: expected a number"),
        ({"shares": {"x": 1.0}}, TypeError, "shares: expected integers or bools as classes, found 'x'"),
        ({"shares": {2**63: 1.0}}, TypeError, "shares: expected integers or bools as classes"),
        ({"when_empty": "skip"}, ValueError, "when_empty: expected one of"),
        ({"when_empty": None}, ValueError, "when_empty: expected one of"),
    ],
)
def test_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        StratifiedSampler(**{"class_key": "kind", **arguments})


@pytest.mark.parametrize("seed", range(20))
def test_no_piece_of_a_class_grows_into_another(seed: int) -> None:
    """Many rows of several classes at once, some with enough room and some without."""
    chance = np.random.default_rng(seed)
    rows = ClassRows(40_000)
    expected: dict[int, set[int]] = {}
    start = 0
    while start < 36_000:
        count = int(chance.integers(1, 6_000))
        of_each = chance.integers(0, chance.integers(1, 12), count)
        added = np.arange(start, start + count)[: 40_000 - start]
        of_each = of_each[: len(added)]
        rows.add(added, of_each)
        for value in np.unique(of_each).tolist():
            expected.setdefault(value, set()).update(added[of_each == value].tolist())
        start += len(added)
        for value, wanted in expected.items():
            found = rows.rows(rows.slot(value)).tolist()
            assert len(found) == len(wanted)
            assert set(found) == wanted


@pytest.mark.parametrize("count", [4_097, 12_288, 20_000])
async def test_a_large_write_is_drawn_whole_and_restored(count: int) -> None:
    buffer = ReplayBuffer(TensorStorage(count), sampler=StratifiedSampler("label"), batch_size=6)
    await buffer.extend({"label": torch.arange(count) % 6})
    other = ReplayBuffer(TensorStorage(count), sampler=StratifiedSampler("label"), batch_size=6)
    await other.load_state_dict(await buffer.state_dict())
    assert len(other) == count
