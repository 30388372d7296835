"""Random programs of writes, removals, gathers and freezes: a storage of sequences does what a dict of items does."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from asyncbuf import RaggedStorage, RowRange
from asyncbuf.batch import Draw
from asyncbuf.rows import ScatteredRows
from asyncbuf.storage import GatherJobs, _arena, _ragged_frozen
from asyncbuf.testing.compare import difference
from tests.storage.ragged_items import PADS, RAGGED, columns_of, expected_batch, ragged_item, ragged_list

CAPACITY = 24
LAYOUTS = ("padded", "packed", "jagged")


class Program:
    """A storage beside a dict of what is in it."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.layout = self.choose.choice(LAYOUTS)
        self.storage = self.new()
        self.storage.expect(self.choose.randrange(3))
        self.rows: dict[int, int] = {}
        self.frozen: list[tuple[Any, dict[int, int]]] = []
        self.written = self.cursor = 0

    def new(self) -> RaggedStorage:
        return RaggedStorage(CAPACITY, RAGGED, layout=self.layout, pad_value=PADS)

    def run(self, steps: int) -> None:
        names = ["write", "write", "write", "scatter", "release", "freeze", "read", "load", "clear", "gather"]
        for _ in range(steps):
            getattr(self, self.choose.choices(names, [3, 3, 3, 3, 2, 2, 2, 1, 0.3, 3])[0])()
            self.check_pages()
        self.gather(sorted(self.rows))

    def write(self) -> None:
        """The next rows of a ring."""
        count = self.choose.choice((1, 1, 2, 5, CAPACITY))
        first = min(count, CAPACITY - self.cursor)
        runs = [RowRange(self.cursor, 0, first), RowRange(0, first, count - first)]
        self.put(count, [run for run in runs if run.count])
        self.cursor = (self.cursor + count) % CAPACITY

    def scatter(self) -> None:
        """Any rows, and not all items are kept."""
        count = self.choose.randrange(1, CAPACITY)
        skipped = self.choose.randrange(count)
        rows = sorted(self.choose.sample(range(CAPACITY), count - skipped))
        if self.choose.random() < 0.5:
            self.put(count, ScatteredRows(torch.tensor(rows).numpy(), skipped))
        else:
            self.put(count, [RowRange(row, skipped + i, 1) for i, row in enumerate(rows)])

    def put(self, count: int, runs: Any) -> None:
        start, self.written = self.written, self.written + count
        make = self.choose.choice((ragged_list, columns_of))
        if count == 1 and self.choose.random() < 0.5:
            prepared = self.storage.prepare_one(ragged_item(start))
        else:
            prepared = self.storage.prepare(make(count, start))
        if not self.storage.is_current(prepared):
            prepared = self.storage.prepare(make(count, start))
        self.storage.write(prepared, runs)
        for run in runs:
            self.rows.update({run.row + i: start + run.item + i for i in range(run.count)})

    def release(self) -> None:
        rows = self.choose.sample(sorted(self.rows), self.choose.randrange(len(self.rows) + 1))
        if rows:
            self.storage.release(torch.tensor(rows))
            for row in rows:
                del self.rows[row]

    def clear(self) -> None:
        self.storage.clear()
        self.rows.clear()

    def gather(self, rows: list[int] | None = None) -> None:
        if rows is None and self.rows:
            rows = self.choose.choices(sorted(self.rows), k=self.choose.randrange(1, 9))
        if not rows:
            return
        parts = self.choose.choice((1, 2, 3))
        found = self.storage.begin_gather(Draw(torch.tensor(rows)), inline=self.choose.random() < 0.5, parts=parts)
        if isinstance(found, GatherJobs):
            for job in reversed(found.jobs):
                job()
            found = found.combine()
        self.check(found, [self.rows[row] for row in rows])

    def check(self, found: Any, numbers: list[int]) -> None:
        assert difference(found, expected_batch([ragged_item(number) for number in numbers], self.layout)) is None

    def freeze(self) -> None:
        self.frozen.append((self.storage.freeze(), dict(self.rows)))
        del self.frozen[:-3]

    def read(self) -> None:
        """What was frozen, loaded into another storage."""
        if self.frozen:
            frozen, rows = self.choose.choice(self.frozen)
            other = self.new()
            other.load_rows(frozen.meta, (chunk.tensors for chunk in frozen.chunks()))()
            if rows:
                self.check(other.gather(torch.tensor(sorted(rows))), [rows[row] for row in sorted(rows)])

    def load(self) -> None:
        """What was frozen, loaded into the same one; snapshots that were taken before stay readable."""
        if self.frozen:
            frozen, rows = self.choose.choice(self.frozen)
            self.storage.load_rows(frozen.meta, (chunk.tensors for chunk in frozen.chunks()))()
            self.rows = dict(rows)

    def check_pages(self) -> None:
        """What an arena counts is so; there is no page without tokens but the one that is written to."""
        memory = self.storage._memory
        for arena in [] if memory is None else memory.arenas:
            assert arena.live == int(arena.places[: self.storage._filled, 2].sum()) == int(arena._live.sum())
            assert arena._total == int(arena._sizes.sum())
            for page, size in enumerate(arena._sizes.tolist()):
                if size:
                    assert all(len(pages[page]) == size for pages in arena.values)
                    assert arena._live[page] or page == arena._cursor


@pytest.mark.parametrize(
    "seeds",
    [range(20), pytest.param(range(2000), marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
    ids=["20", "2000"],
)
@pytest.mark.parametrize("page_bytes", [64, 200, 1 << 20])
def test_a_storage_does_what_a_dict_does(page_bytes: int, seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of a few sequences, so that rows move all the time; and one page for all."""
    monkeypatch.setattr(_arena, "PAGE_BYTES", page_bytes)
    monkeypatch.setattr(_arena, "_SLACK_PAGES", 0)
    monkeypatch.setattr(
        _ragged_frozen, "STEP_ROWS", 1
    )  # or what is written next to a row that moves would keep its place
    for seed in seeds:
        Program(seed).run(30)
