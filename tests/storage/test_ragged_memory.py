"""Memory of sequences: bounded in whatever order rows are written, moved a little at a time, used again for batches."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from asyncbuf import RaggedStorage, RowRange
from asyncbuf.rows import ScatteredRows
from asyncbuf.storage import _arena

ROWS = 400


def storage_of(page_tokens: int, monkeypatch: pytest.MonkeyPatch, rows: int = ROWS) -> RaggedStorage:
    monkeypatch.setattr(_arena, "PAGE_BYTES", 8 * page_tokens)
    return RaggedStorage(rows, ["tokens"])


def write(storage: RaggedStorage, lengths: list[int], rows: list[int]) -> None:
    prepared = storage.prepare(
        [{"tokens": torch.full((length,), row)} for length, row in zip(lengths, rows, strict=True)]
    )
    order = np.argsort(rows)
    if (np.diff(np.array(rows)[order]) == 1).all() and (order == np.arange(len(rows))).all():
        storage.write(prepared, [RowRange(rows[0], 0, len(rows))])
    else:
        storage.write(prepared, [RowRange(row, i, 1) for i, row in enumerate(rows)])


def check(storage: RaggedStorage, lengths: dict[int, int]) -> None:
    batch = storage.gather(torch.tensor(list(lengths)))
    assert batch["lengths"].tolist() == list(lengths.values())
    longest = max(lengths.values())
    expected = [[row] * length + [0] * (longest - length) for row, length in lengths.items()]
    assert batch["tokens"].tolist() == expected


@pytest.mark.parametrize("order", ["ring", "random", "some"])
@pytest.mark.parametrize("longest", [6, 100, 300])
def test_memory_is_bounded_in_whatever_order_rows_are_written(
    order: str, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most twice what is stored and some pages; "some" writes the same few rows again and again."""
    storage = storage_of(128, monkeypatch)
    choose = random.Random(longest)
    lengths: dict[int, int] = {}
    for step in range(1500):
        count = choose.choice((1, 1, 3))
        if order == "ring":
            rows = [(3 * step + i) % (ROWS - 2) for i in range(count)]
            rows = rows if rows == sorted(rows) else rows[:1]
        else:
            rows = sorted(choose.sample(range(ROWS if order == "random" or step < 300 else 30), count))
        sizes = [choose.randrange(longest) for _ in rows]
        write(storage, sizes, rows)
        lengths.update(zip(rows, sizes, strict=True))
        bound = 2 * sum(lengths.values()) + (_arena._SLACK_PAGES + _arena._SPARE_PAGES + 2) * 128
        assert storage.tokens == sum(lengths.values())
        assert storage.nbytes <= 8 * bound
    check(storage, lengths)


def test_memory_comes_back_as_others_are_written_after_many_were_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = storage_of(128, monkeypatch)
    write(storage, [20] * ROWS, list(range(ROWS)))
    before = storage.nbytes
    gone = torch.tensor([row for row in range(ROWS) if row % 8])
    storage.release(gone)
    assert storage.tokens == 20 * ROWS // 8
    for step in range(60):
        write(storage, [20], [step % 8])
    live = {row: 20 for row in [*range(8), *range(8, ROWS, 8)]}
    assert storage.tokens == 20 * len(live)
    assert storage.nbytes <= before // 4 + 8 * 8 * 128
    check(storage, live)
    storage.release(torch.tensor(list(live)))
    assert storage.tokens == 0
    assert storage.nbytes <= (_arena._SPARE_PAGES + 1) * 8 * 128


def test_a_write_moves_about_as_much_as_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = storage_of(256, monkeypatch)
    moved = []
    monkeypatch.setattr(RaggedStorage, "_before_move", lambda self, rows: moved.append(len(rows)))
    choose = random.Random(0)
    for row in range(ROWS):
        write(storage, [10], [row])
    assert not moved
    for _ in range(3000):
        write(storage, [10], [choose.randrange(ROWS)])
    assert 0 < sum(moved) <= 1.5 * 3000


def test_pages_of_empty_sequences_do_not_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = storage_of(64, monkeypatch)
    for step in range(500):
        write(storage, [0], [step % ROWS])
    assert storage.tokens == storage.nbytes == 0
    check(storage, dict.fromkeys(range(ROWS), 0))
    arena = storage._memory.arenas[0]  # type: ignore[union-attr]
    assert not any(map(len, arena._rows))


def test_sequences_that_are_larger_than_a_page_have_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = storage_of(64, monkeypatch)
    lengths = {0: 1000, 1: 3, 2: 64, 3: 65, 4: 0, 5: 17}
    write(storage, list(lengths.values()), list(lengths))
    check(storage, lengths)
    write(storage, [2] * 4, [0, 1, 2, 3])
    check(storage, {**dict.fromkeys(range(4), 2), 4: 0, 5: 17})
    assert storage.nbytes <= 8 * 64 * 6


def test_many_short_sequences_move_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = storage_of(4096, monkeypatch, rows=20_000)
    write(storage, [3] * 20_000, list(range(20_000)))
    storage.release(torch.arange(20_000)[torch.arange(20_000) % 5 != 0])
    for step in range(40):
        write(storage, [3], [5 * step])
    assert storage.nbytes < 8 * 3 * 20_000
    check(storage, {row: 3 for row in range(0, 20_000, 5)})


def test_rows_that_a_writer_skipped_have_no_tokens() -> None:
    storage = RaggedStorage(10, ["tokens"])
    write(storage, [5] * 10, list(range(10)))
    storage.clear()
    write(storage, [2], [7])
    frozen = storage.freeze()
    (chunk,) = frozen.chunks()
    assert chunk.tensors["lengths"].tolist() == [0] * 7 + [2]
    assert chunk.tensors["tokens"].tolist() == [7, 7]
    assert storage.tokens == 2


def test_scattered_rows_are_written_in_one_go() -> None:
    storage = RaggedStorage(10, ["tokens"])
    prepared = storage.prepare([{"tokens": [number] * number} for number in range(6)])
    storage.write(prepared, ScatteredRows(np.array([1, 4, 8]), 3))
    batch = storage.gather(torch.tensor([8, 1, 4]))
    assert batch["tokens"].tolist() == [[5, 5, 5, 5, 5], [3, 3, 3, 0, 0], [4, 4, 4, 4, 0]]


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_memory_of_a_batch_is_used_again_once_nobody_sees_it(layout: str) -> None:
    storage = RaggedStorage(8, ["tokens"], layout=layout)
    storage.expect(2)
    write(storage, [1000] * 8, list(range(8)))
    rows = torch.arange(8)
    seen = set()
    for _ in range(10):
        seen.add(storage.gather(rows)["tokens"].data_ptr())
    assert len(seen) <= 2
    kept = storage.gather(rows)["tokens"]
    view, copy = kept[1:], kept.clone()
    array = storage.gather(rows)["tokens"].numpy()
    del kept
    for _ in range(10):
        storage.gather(rows)["tokens"].fill_(-1)
    assert torch.equal(view, copy[1:])
    assert (torch.from_numpy(array) == copy).all()
