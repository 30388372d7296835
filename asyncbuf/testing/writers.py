"""The contract of a writer: rows of the storage, each once, and a state that goes on where it was saved."""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch

from asyncbuf._plain.codec import encode
from asyncbuf._table import checks
from asyncbuf._table.table import Table
from asyncbuf.buffer import ReplayBuffer
from asyncbuf.errors import ReadOnlyError, SchemaError
from asyncbuf.limiter import MinSize
from asyncbuf.sampler import RandomSampler
from asyncbuf.storage import TensorStorage
from asyncbuf.storage._frozen import tensors_of
from asyncbuf.testing._contract import Contract, check_arguments, check_malformed, is_picklable, scramble
from asyncbuf.testing.resume import WAYS, assert_exact_resume
from asyncbuf.testing.samplers import numbered_items
from asyncbuf.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from asyncbuf.batch import Batch
    from asyncbuf.rows import Placement
    from asyncbuf.storage import Prepared

_STEPS = {"write": 6.0, "write that fails": 1.0}
_ROUGH = {**_STEPS, "remove": 2.0}
_KINDS = (_STEPS, _ROUGH, {**_ROUGH, "clear": 0.7})
# How many steps a resumed history goes on; at so many it goes on to the end, after malformed states were loaded.
_AHEAD, _MALFORMED = 8, 4


async def check_writer(
    make_writer: Callable[[], Writer],
    *,
    items: Callable[[int, int], Any] = numbered_items,
    capacity: int = 13,
    seeds: Iterable[int] = range(6),
    steps: int = 50,
    seconds: float = 30.0,
) -> None:
    """Try hard to break a writer of your own.

    Places writes of all sizes, more items than there are rows among them, lets some fail before they are committed,
    removes rows, and saves and restores at every step::

        async def test_my_writer() -> None:
            await check_writer(MyWriter)

    Args:
        make_writer: makes a new writer, always the same.
        items: ``items(count, start)`` makes ``count`` items from item number ``start`` on, as a ``TensorStorage`` takes
            them. They have the leaf ``number``, int64 ``[count]``, and those that ``Writer.columns`` names.
        capacity: number of rows.
        seeds: one history for each. Of three in a row, the first removes no rows, the second does, the third calls
            ``clear`` as well.
        steps: length of a history.
        seconds: how long a whole buffer may take for a batch.

    Raises:
        AssertionError: a rule is broken. The message names it, the step, what was expected and what was found.
        TypeError, ValueError: an argument is of another kind, or out of range.
    """
    check_arguments(make_writer=make_writer, items=items, capacity=capacity, steps=steps, seconds=seconds)
    contract = Contract(type(make_writer()).__name__)
    for seed in seeds:
        _check_history(_Setting(make_writer, items, capacity, seed), steps, contract)
    contract.where = "a whole buffer, among writes and removals"
    buffers = _Buffers(make_writer, items, capacity)
    ways = WAYS if is_picklable(make_writer()) else WAYS[:3]
    with contract.kept("a buffer with it resumes exactly"):
        await assert_exact_resume(
            buffers.made, steps=6, at=(0, 2, 5), ways=ways, feed=buffers.feed, hops=1, seconds=seconds
        )


def _check_history(setting: _Setting, steps: int, contract: Contract) -> None:
    history = _History(setting, contract)
    points, outcomes = [], []
    handed_out: list[tuple[str, Any, Any]] = []
    for _ in range(steps):
        points.append(history.saved())
        outcomes.append(history.step())
        state = history.writer.state_dict()
        handed_out.append((contract.where, state, encode(state)))
        scramble(history.writer.state_dict())
    end = contract.state(history.writer)
    for where, state, before in handed_out:
        contract.where = f"{where}, looked at again after the last step"
        contract.same(encode(state), before, "state_dict gives out memory of its own")
    rule = "a writer that takes over a state goes on as the one that gave it out"
    ends = [*(saved["parts"]["writer"] for saved in points), end]
    for number, saved in enumerate(points):
        contract.where = f"seed {setting.seed}, resumed at step {number}"
        resumed = _History.resumed(setting, contract, saved)
        contract.same(contract.state(resumed.writer), ends[number], rule)
        stop = min(number + _AHEAD, steps)
        if number % max(1, steps // _MALFORMED) == 0:
            check_malformed(contract, resumed.writer, end)
            stop = steps
        _compare(resumed, outcomes[number:stop], ends[stop], contract, f"{rule} (resumed at step {number})")


def _compare(history: _History, outcomes: Sequence[Any], end: Any, contract: Contract, rule: str) -> None:
    for expected in outcomes:
        contract.same(history.step(), expected, rule)
    contract.same(contract.state(history.writer), end, rule, "the state at the end differs (no placement did)")


class _Setting(NamedTuple):
    """What a history is made of."""

    make_writer: Callable[[], Writer]
    items: Callable[[int, int], Any]
    capacity: int
    seed: int


class _History:
    """A table with a writer, and which item each row should have."""

    def __init__(self, setting: _Setting, contract: Contract) -> None:
        self.writer = setting.make_writer()
        self._setting = setting
        self._contract = contract
        storage = TensorStorage(setting.capacity)
        with contract.allowed("the factory makes a new writer each time"):
            self._table = Table(storage, self.writer, RandomSampler(), MinSize(1), torch.Generator())
        self._rows: dict[int, int] = {}
        self._number = self._written = 0
        self._was_removed = False

    def step(self) -> Any:
        """Go on by one step: where items went, as plain data."""
        choose = random.Random(f"{self._setting.seed}/{self._number}")
        kinds = _KINDS[self._setting.seed % len(_KINDS)]
        name = "write" if self._number == 0 else choose.choices(list(kinds), list(kinds.values()))[0]
        self._contract.where = f"seed {self._setting.seed}, step {self._number}, {name}"
        self._number += 1
        with self._contract.local():
            if name == "clear":
                outcome = self._clear()
            elif name == "remove":
                outcome = self._remove(choose)
            else:
                outcome = self._write(choose, fails=name != "write")
        self._check_books()
        return outcome

    def _write(self, choose: random.Random, *, fails: bool) -> Any:
        table, contract, capacity = self._table, self._contract, self._setting.capacity
        count = choose.choice((1, 1, 1, 2, 3, 5, capacity - 1, capacity, capacity + 2, 2 * capacity + 1))
        prepared, other = (self._prepared(number) for number in (count, choose.randrange(1, 2 * capacity)))
        with contract.unchanged(self.writer, "place changes nothing"):
            placement = self._placed(prepared)
            self._placed(other)
            again = self._placed(prepared)
            plain, same = _plain(placement), _plain(again)
            contract.require(same == plain, "place gives the same when asked again", plain, same)
        if placement is None:
            return "refused"
        self._check_placement(placement, count)
        if fails:
            return None
        table.storage.write(prepared, placement.runs)
        with contract.allowed("commit never fails, and counts what was handed in"):
            table.commit(placement)
        numbers = self._written + placement.items
        self._rows.update(zip(placement.rows.tolist(), numbers.tolist(), strict=True))
        self._written += count
        return [[run.row, run.item, run.count] for run in placement.runs]

    def _prepared(self, count: int) -> Prepared:
        return self._table.storage.prepare(self._setting.items(count, self._written))

    def _placed(self, prepared: Prepared) -> Placement | None:
        """Where the items are to go; None if the writer refuses them."""
        with self._contract.allowed("place fails only with SchemaError or ReadOnlyError"):
            try:
                writer, capacity = self.writer, self._setting.capacity
                if not writer.columns:
                    return writer.place(prepared.count, capacity)
                columns = self._table.storage.columns(prepared, writer.columns)
                return writer.place_values(prepared.count, capacity, columns)
            except (SchemaError, ReadOnlyError):
                return None

    def _check_placement(self, placement: Placement, count: int) -> None:
        contract = self._contract
        with contract.allowed("a placement has rows of the storage, each once"):
            checks.placement(placement, count, self._setting.capacity, contract.part)
        contract.require(placement.offered == count, "offered is the number of items", count, placement.offered)
        items = placement.items.tolist()
        rule = "a placement has its items in order, each once"
        contract.require(items == sorted(set(items)), rule, "ascending positions", items)

    def _remove(self, choose: random.Random) -> Any:
        rows = choose.sample(sorted(self._rows), min(len(self._rows), choose.randrange(1, 5)))
        if rows:
            with self._contract.allowed("removed never fails"):
                self._table.remove(np.array(rows, np.int64))
            self._was_removed = True
        for row in rows:
            del self._rows[row]
        return rows

    def _clear(self) -> Any:
        with self._contract.allowed("clear never fails"):
            self._table.clear()
        self._rows.clear()
        self._was_removed = False
        return None

    def _check_books(self) -> None:
        """Compare what the writer says with what should be."""
        contract, writer = self._contract, self.writer
        found = writer.write_count
        rule = "write_count is the number of items ever handed in"
        contract.require(type(found) is int and found == self._written, rule, self._written, found)
        if not self._was_removed or type(writer).removed is not Writer.removed:
            rule = "size is the number of rows that hold items"
            contract.require(writer.size == len(self._rows), rule, len(self._rows), writer.size)
        if not self._rows:
            return
        rows = np.array(sorted(self._rows), np.int64)
        expected = [self._rows[row] for row in rows.tolist()]
        if writer.computes_numbers:
            with contract.allowed("numbers never fails for valid rows"):
                numbers = writer.numbers(rows, self._setting.capacity).tolist()
            contract.require(numbers == expected, "numbers are those of the items in the rows", expected, numbers)
        stored = self._table.storage.gather(torch.from_numpy(rows))["number"].tolist()
        contract.require(stored == expected, "rows have the items that were placed there", expected, stored)

    def saved(self) -> dict[str, Any]:
        """Everything, for ``resumed``."""
        frozen = self._table.storage.freeze()
        return {
            "parts": {name: self._contract.state(part) for name, part in self._table.components()},
            "stored": (frozen.meta, list(tensors_of(frozen))),
            "rows": dict(self._rows),
            "numbers": (self._number, self._written, self._was_removed),
        }

    @classmethod
    def resumed(cls, setting: _Setting, contract: Contract, saved: dict[str, Any]) -> Self:
        """A history that goes on where another one was saved, with a writer of its own."""
        history = cls(setting, contract)
        contract.resume(history._table, saved["stored"], saved["parts"], setting.capacity)
        history._rows = dict(saved["rows"])
        history._number, history._written, history._was_removed = saved["numbers"]
        return history


class _Buffers(NamedTuple):
    """What buffers are made of."""

    make_writer: Callable[[], Writer]
    items: Callable[[int, int], Any]
    capacity: int

    async def made(self) -> ReplayBuffer:
        buffer = ReplayBuffer(
            TensorStorage(self.capacity),
            writer=self.make_writer(),
            batch_size=3,
            prefetch=2,
            generator=torch.Generator().manual_seed(0),
        )
        for count in (2 * self.capacity, self.capacity):  # some take no more than fit
            with contextlib.suppress(SchemaError, ReadOnlyError):
                await buffer.extend(self.items(count, 0))
        return buffer

    async def feed(self, buffer: ReplayBuffer, step: int, batch: Batch) -> None:
        if step % 2:
            await buffer.remove(batch.indices[:1])
        with contextlib.suppress(SchemaError, ReadOnlyError):
            await buffer.extend(self.items(5, 3 * self.capacity + 5 * step))


def _plain(placement: Placement | None) -> Any:
    return placement and (placement.offered, placement.rows.tolist(), placement.items.tolist())
