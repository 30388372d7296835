"""Each limiter by itself: what it says, what it refuses, and how several are one."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import (
    ConsumingSampler,
    Counters,
    GroupSampler,
    Limiter,
    ListStorage,
    MaxAhead,
    MaxBytes,
    MaxStaleness,
    MaxValueWriter,
    MinSize,
    Queue,
    ReplayBuffer,
    SampleToInsertRatio,
    TensorStorage,
)
from asyncbuf.testing import check_limiter
from tests.helpers import rows

if TYPE_CHECKING:
    from collections.abc import Callable

MAKERS: dict[str, Callable[[], Limiter]] = {
    "ratio": lambda: SampleToInsertRatio(2.0, min_size=4, error_buffer=12.0),
    "ratio-below-one": lambda: SampleToInsertRatio(0.5, min_size=2, error_buffer=6),
    "ratio-bounds": lambda: SampleToInsertRatio(1.0, min_size=4, error_buffer=(0.0, 20.0)),
    "ahead": lambda: MaxAhead(2),
    "ahead-and-size": lambda: MaxAhead(3) & MinSize(5),
    "staleness": lambda: MaxStaleness(1),
    "ratio-and-size": lambda: SampleToInsertRatio(1.0, 4, 10.0) & MinSize(3),
}
LEAVING: dict[str, Callable[[], Limiter]] = {
    "queue": lambda: Queue(12),
    "bytes": lambda: MaxBytes(200),
    "queue-and-bytes": lambda: Queue(12) & MaxBytes(10_000),
    "staleness": lambda: MaxStaleness(1),
    "staleness-and-queue": lambda: MaxStaleness(2) & Queue(16),
    "queue-and-ahead": lambda: Queue(16) & MaxAhead(2),
}


@pytest.mark.parametrize("name", MAKERS)
async def test_the_contract(name: str) -> None:
    await check_limiter(MAKERS[name], seeds=range(3), steps=80)


@pytest.mark.parametrize("name", LEAVING)
async def test_the_contract_where_items_leave(name: str) -> None:
    await check_limiter(LEAVING[name], make_sampler=ConsumingSampler, seeds=range(3), steps=80)


def counters(**values: int) -> Counters:
    return Counters(
        **{"size": 0, "capacity": 100, "write_count": 0, "admitted": 0, "drawn": 0, "drawn_items": 0, **values}
    )


def test_the_ratio_is_that_of_reverb() -> None:
    limiter = SampleToInsertRatio(2.0, min_size=10, error_buffer=8.0)  # diff from 12 to 28
    assert limiter.may_write(counters(), 10) is True
    assert limiter.may_draw(counters(write_count=9), 2).reason == "9 of at least 10 items were written"  # type: ignore[union-attr]
    assert limiter.may_write(counters(write_count=10), 4) is True
    held = limiter.may_write(counters(write_count=14), 1)
    assert "2 more rows must be drawn" in str(held)
    assert "2 * 15 - 0 = 30, above 28" in str(held)
    assert limiter.may_write(counters(write_count=14, drawn_items=2), 1) is True
    assert limiter.may_draw(counters(write_count=10), 8) is True
    held = limiter.may_draw(counters(write_count=10, drawn_items=8), 3)
    assert "2 more items must be written" in str(held)


def test_a_range_without_room_is_refused() -> None:
    limiter = SampleToInsertRatio(4.0, min_size=100, error_buffer=20.0)
    with pytest.raises(ValueError, match=r"error_buffer of at least 34 for a batch of 64"):
        ReplayBuffer(TensorStorage(200), batch_size=64, limiter=limiter)
    with pytest.raises(ValueError, match=r"error_buffer of at least 20\.5 for a write of 10"):
        limiter.may_write(counters(write_count=200), 10)
    with pytest.raises(ValueError, match=r"for a batch of 64"):
        limiter.may_draw(counters(write_count=200), 64)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"limiter": Queue(8)}, r"Queue\(8\).*expected a sampler that uses items up.*found RandomSampler"),
    ({"limiter": MinSize(2) & MaxBytes(8)}, r"MaxBytes\(8\).*expected a sampler that uses items up"),
    ({"limiter": Queue(300), "sampler": ConsumingSampler()}, "at most the capacity 100, found 300"),
    ({"limiter": Queue(3), "sampler": ConsumingSampler()}, "at least the batch size 4, found 3"),
    ({"limiter": MaxAhead(2), "batch_size": None}, r"batch_size: expected one, because MaxAhead\(2\) counts batches"),
    ({"limiter": MinSize(2) & MaxAhead(2), "batch_size": None}, "batch_size: expected one"),
    ({"limiter": MinSize(1) & MinSize(101)}, "at most the capacity 100"),
    ({"overwrite": "wait", "writer": MaxValueWriter("x")}, "MaxValueWriter, which chooses by itself"),
    ({"overwrite": "newest"}, r"overwrite: expected one of \['oldest', 'wait'\], found 'newest'"),
    ({"min_size": 3, "limiter": MinSize(3)}, "found both"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_can_never_go_on_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplayBuffer(TensorStorage(100), **{"batch_size": 4, **options})


def test_several_are_one() -> None:
    limiter = MinSize(2) & MaxAhead(3) & SampleToInsertRatio(1, 2, 9)
    assert repr(limiter) == "MinSize(2) & MaxAhead(3) & SampleToInsertRatio(1, min_size=2, error_buffer=(-7, 11))"
    assert limiter.trusted
    assert limiter.counts_draws
    assert limiter.needs_batch_size
    assert not limiter.needs_rows_to_leave
    assert repr(pickle.loads(pickle.dumps(limiter))) == repr(limiter)
    with pytest.raises(TypeError):
        MinSize(2) & 3  # type: ignore[operator]


class Seen(Limiter):
    """Writes down what it is asked."""

    counts_unread = True

    def __init__(self) -> None:
        self.seen: list[Counters] = []

    def may_write(self, counters: Counters, items: int) -> Any:
        self.seen.append(counters)
        return True


class SeesBytes(Seen):
    counts_bytes = True


async def test_what_a_limiter_sees() -> None:
    limiter = SeesBytes()
    async with ReplayBuffer(TensorStorage(10), sampler=ConsumingSampler(), batch_size=3, limiter=limiter) as buffer:
        await buffer.extend(rows(5, width=2))  # 16 bytes each
        await buffer.extend(rows(2, 5, width=2))
        await buffer.sample()
        await buffer.extend(rows(1, 7, width=2))
        await buffer.remove([3])
        await buffer.empty()
        await buffer.extend(rows(1, 7, width=2))
    seen = [(each.size, each.unread, each.nbytes, each.offered_nbytes) for each in limiter.seen]
    assert seen == [(0, 0, 0, 80), (5, 5, 80, 32), (4, 4, 64, 16), (0, 0, 0, 16)]
    assert {each.batch_size for each in limiter.seen} == {3}


async def test_unread_items_of_groups_and_of_random_draws() -> None:
    seen = Seen()
    async with ReplayBuffer(TensorStorage(20), sampler=GroupSampler("number", 2), batch_size=2, limiter=seen) as buffer:
        for numbers in ([1, 1, 1], [2], [2]):
            await buffer.extend({"number": torch.tensor(numbers)})
    assert [each.unread for each in seen.seen] == [0, 2, 2]
    seen = Seen()
    async with ReplayBuffer(TensorStorage(20), batch_size=4, limiter=seen) as buffer:
        await buffer.extend(rows(10))
        await buffer.extend(rows(1))
        for _ in range(3):
            await buffer.sample()
        await buffer.extend(rows(1))
        await buffer.remove(list(range(10)))
        await buffer.extend(rows(1))
    assert [each.unread for each in seen.seen] == [0, 10, 0, 1]


async def test_bytes_of_objects() -> None:
    limiter = SeesBytes()
    buffer = ReplayBuffer(ListStorage(10), sampler=ConsumingSampler(), batch_size=1, limiter=limiter, collate_fn=list)
    await buffer.extend([b"x" * 1000, b"x" * 10])
    await buffer.add(b"x" * 500)
    assert [each.offered_nbytes for each in limiter.seen] == [1138, 564]
    assert limiter.seen[-1].nbytes == 1138
