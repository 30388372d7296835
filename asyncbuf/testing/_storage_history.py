"""A storage beside a plain dict of what should be in it, and everything that a buffer may do to it."""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from asyncbuf._plain import tree
from asyncbuf._plain.codec import join, split
from asyncbuf.batch import Draw
from asyncbuf.errors import SchemaError
from asyncbuf.rows import RowRange
from asyncbuf.storage import GatherJobs, Runs
from asyncbuf.testing._contract import Contract, scramble_leaves

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
    from concurrent.futures import ThreadPoolExecutor

    from asyncbuf.storage import Frozen, Prepared, Storage

_KEPT_BATCHES = 8
_SHAPES = ((True, 1), (False, 1), (False, 2), (False, 4))


class Shelf(NamedTuple):
    """What a storage is made of and filled with.

    Attributes:
        make_storage: makes a storage of so many rows.
        items: makes items from a count and the number of the first.
        expected: what gathering rows with items of these numbers must give.
        keeps_references: whether items are kept as they are, so that changes to them show.
        capacity: number of rows.
        identities: the chunks that had an identity so far.
    """

    make_storage: Callable[[int], Storage]
    items: Callable[[int, int], Any]
    expected: Callable[[Sequence[int]], Any]
    keeps_references: bool
    capacity: int
    identities: dict[str, dict[str, torch.Tensor]]

    def item(self, number: int) -> Any:
        """One item as ``add`` takes it."""
        return first_of(self.items(1, number))


def first_of(items: Any) -> Any:
    """The first of a batch of items, without the leading axis."""
    if _is_sequence(items):
        return items[0]
    leaves, spec = tree.flatten(items, batched=True)
    return tree.unflatten(spec, [leaf[0] for leaf in leaves])


def stacked(items: Callable[[int, int], Any], numbers: Sequence[int]) -> Any:
    """What gathering should give: items of these numbers as tensors one after the other, or in a list."""
    parts = [items(1, number) for number in numbers]
    if _is_sequence(parts[0]):
        return [part[0] for part in parts]
    columns = [tree.flatten(part, batched=True)[0] for part in parts]
    spec = tree.flatten(parts[0], batched=True)[1]
    leaves = [torch.cat([torch.as_tensor(leaf) for leaf in column]) for column in zip(*columns, strict=True)]
    return tree.unflatten(spec, leaves, batch=len(numbers))


def _is_sequence(items: Any) -> bool:
    return isinstance(items, list) or (isinstance(items, tuple) and not hasattr(items, "_fields"))


class StorageHistory:
    """A storage, and which item each of its rows should have.

    Args:
        shelf: what it is made of.
        contract: the rules.
        pool: threads for writes and gathers.

    Attributes:
        storage: the storage.
        rows: the numbers of the items that its rows should have.
    """

    def __init__(self, shelf: Shelf, contract: Contract, pool: ThreadPoolExecutor) -> None:
        self.storage = shelf.make_storage(shelf.capacity)
        self.rows: dict[int, int] = {}
        self._shelf = shelf
        self._contract = contract
        self._pool = pool
        self._written = self._next_row = 0
        self._kept: list[tuple[Any, Any, str]] = []
        self._frozen: list[tuple[Frozen, dict[int, int], str]] = []
        self.storage.expect(4)

    async def step(self, choose: random.Random, name: str) -> None:
        """Go on by one step, and look at everything."""
        steps: dict[str, Callable[[random.Random], Awaitable[None]]] = {
            "write": self._write,
            "gather": self._gather,
            "gather at once": self._gather_at_once,
            "freeze": self._freeze,
            "read what was frozen": self._read_frozen,
            "release": self._release,
            "clear": self._clear,
        }
        await steps[name](choose)
        await self.check_rows("rows have what was written to them last")
        for batch, copy, where in self._kept:
            self._contract.same(batch, copy, f"a batch that is kept stays as it is ({where})")

    # -- writing ------------------------------------------------------------------------------------------------------

    async def _write(self, choose: random.Random) -> None:
        count = choose.choice((1, 1, 2, 3, 4, self._shelf.capacity, self._shelf.capacity + 2))
        start, self._written = self._written, self._written + count
        is_one = count == 1 and choose.random() < 0.5
        items = self._shelf.item(start) if is_one else self._shelf.items(count, start)
        prepare = self.storage.prepare_one if is_one else self.storage.prepare
        prepared = self._prepared(prepare, items, count)
        if choose.random() < 0.3:
            await self._write(choose)  # it takes its turn after another write
            with self._contract.allowed("is_current never fails"):
                if not self.storage.is_current(prepared):
                    prepared = self._prepared(prepare, items, count)
        runs = self._placed(choose, count)
        with self._contract.allowed("what was prepared can be written, in a thread too"):
            if choose.random() < 0.5:
                self.storage.write(prepared, runs)
            else:
                await _in(self._pool, lambda: self.storage.write(prepared, runs))
        for run in runs:
            self.rows.update({run.row + i: start + run.item + i for i in range(run.count)})
        if not self._shelf.keeps_references:
            scramble_leaves(items)

    def _prepared(self, prepare: Callable[[Any], Prepared], items: Any, count: int) -> Prepared:
        with self._contract.allowed("items that fit are prepared"):
            prepared = prepare(items)
        is_sound = prepared.count == count and type(prepared.nbytes) is int and prepared.nbytes >= 0
        found = (prepared.count, prepared.nbytes)
        rule = "Prepared says how many items there are, and how many bytes"
        self._contract.require(is_sound, rule, f"{count} items and an int of bytes", found)
        return prepared

    def _placed(self, choose: random.Random, count: int) -> list[RowRange]:
        """Where a writer puts items: the next rows of a ring, or any rows; it need not keep all."""
        capacity = self._shelf.capacity
        kept = min(capacity, count if choose.random() < 0.8 else choose.randrange(1, count + 1))
        skipped = count - kept
        if choose.random() < 0.3:
            rows = choose.sample(range(capacity), kept)
            return [RowRange(row, skipped + i, 1) for i, row in enumerate(rows)]
        start, self._next_row = self._next_row, (self._next_row + kept) % capacity
        first = min(kept, capacity - start)
        runs = [RowRange(start, skipped, first), RowRange(0, skipped + first, kept - first)]
        return [run for run in runs if run.count]

    async def _release(self, choose: random.Random) -> None:
        rows = choose.sample(sorted(self.rows), len(self.rows) // 2)
        if rows:
            with self._contract.allowed("release never fails for rows that were written"):
                self.storage.release(torch.tensor(rows))
        for row in rows:
            del self.rows[row]

    async def _clear(self, choose: random.Random) -> None:
        with self._contract.allowed("clear never fails"):
            self.storage.clear()
        self.rows.clear()
        self._next_row = 0

    # -- gathering ----------------------------------------------------------------------------------------------------

    async def check_rows(self, rule: str) -> None:
        """Gather every row, and compare."""
        if self.rows:
            rows = sorted(self.rows)
            await self._check_gathered(await self._gathered(rows, *_SHAPES[0]), rows, rule)

    async def _check_gathered(self, found: Any, rows: Sequence[int], rule: str) -> None:
        expected = self._shelf.expected([self.rows[row] for row in rows])
        self._contract.same(found, expected, rule)

    async def _gather(self, choose: random.Random) -> None:
        """Gather in each form, and keep what came, or parts of it."""
        rows = self._some_rows(choose)
        for inline, parts in _SHAPES if rows else ():
            rule = f"a gather gives the rows that were asked for, in order (inline={inline}, parts={parts})"
            found = await self._gathered(rows, inline, parts)
            await self._check_gathered(found, rows, rule)
            self._keep(choose, found)
        if rows and self.storage.runs in (Runs.ANYWHERE, Runs.LOOP):
            found = self.storage.gather(torch.tensor(rows))
            await self._check_gathered(found, rows, "a gather gives the rows that were asked for, in order")
            if not self._shelf.keeps_references:
                scramble_leaves(found)  # whoever gets a batch may change it

    def _some_rows(self, choose: random.Random) -> list[int]:
        count = choose.choice((1, 2, 5, 5, 5, 3 * self._shelf.capacity))
        return choose.choices(sorted(self.rows), k=count) if self.rows else []

    async def _gather_at_once(self, choose: random.Random) -> None:
        """Several gathers begin before one has ended."""
        asked = [rows for _ in range(4) if (rows := self._some_rows(choose))]
        begun = [self._begun(rows, False, choose.choice((1, 2))) for rows in asked]
        found = await asyncio.gather(*(self._ended(data) for data in begun))
        rule = "gathers that run at once do not share memory"
        for data, rows in zip(found, asked, strict=True):
            await self._check_gathered(data, rows, rule)
        if found and not self._shelf.keeps_references:
            scramble_leaves(found[0])
        for data, rows in zip(found[1:], asked[1:], strict=True):
            await self._check_gathered(data, rows, rule)

    async def _gathered(self, rows: Sequence[int], inline: bool, parts: int) -> Any:
        return await self._ended(self._begun(rows, inline, parts))

    def _begun(self, rows: Sequence[int], inline: bool, parts: int) -> Any:
        with self._contract.allowed("rows that were written can be gathered"):
            return self.storage.begin_gather(Draw(torch.tensor(rows)), inline=inline, parts=parts)

    async def _ended(self, begun: Any) -> Any:
        with self._contract.allowed("rows that were written can be gathered"):
            if isinstance(begun, GatherJobs):
                self._contract.require(len(begun.jobs) > 0, "GatherJobs has at least one job", "a job", "none")
                # The last one first: nothing is said of their order.
                await asyncio.gather(*(_in(self._pool, job) for job in reversed(begun.jobs)))
                return begun.combine()
            return await begun if inspect.isawaitable(begun) else begun

    def _keep(self, choose: random.Random, batch: Any) -> None:
        """Keep a batch, or only a view of each of its tensors, which keeps the memory all the same."""
        kept = batch
        if choose.random() < 0.5:
            leaves, _ = tree.flatten(batch, batched=True)
            kept = [leaf[1:] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim]
        self._kept.append((kept, tree.map_leaves(_cloned, kept), f"from {self._contract.where}"))
        del self._kept[: choose.choice((0, 1, 3)) if len(self._kept) > _KEPT_BATCHES else 0]

    # -- freezing -----------------------------------------------------------------------------------------------------

    async def _freeze(self, choose: random.Random) -> None:
        with self._contract.allowed("freeze never fails"):
            frozen = self.storage.freeze()
        self._frozen.append((frozen, dict(self.rows), self._contract.where))
        del self._frozen[: len(self._frozen) - 3]
        if choose.random() < 0.5:
            self.chunks(frozen)

    def chunks(self, frozen: Frozen) -> list[dict[str, torch.Tensor]]:
        """The tensors of all chunks. What has an identity is compared with what had the same before."""
        found, contract = [], self._contract
        for chunk in frozen.chunks():
            tensors, identity = chunk.tensors, chunk.identity
            is_sound = identity is None or (isinstance(identity, str) and bool(identity))
            contract.require(is_sound, "the identity of a chunk is a text or None", "a text or None", repr(identity))
            if identity is not None:
                known = self._shelf.identities.setdefault(identity, _copied(tensors))
                contract.same(tensors, known, "chunks of the same identity have the same tensors")
            found.append(tensors)
        return found

    async def _read_frozen(self, choose: random.Random) -> None:
        """Read what was frozen in a thread, while a write goes on; twice."""
        if not self._frozen:
            return
        frozen, rows, where = choose.choice(self._frozen)
        with self._contract.allowed(f"chunks can be read in a thread beside a write ({where})"):
            reading = _in(self._pool, lambda: self.chunks(frozen))
            writing = asyncio.ensure_future(self._write(choose))
            chunks, _ = await asyncio.gather(reading, writing)
            again = self.chunks(frozen)
        rule = f"what was frozen stays as it was ({where})"
        self._contract.same(again, chunks, rule)
        await self.check_loaded(frozen.meta, chunks, rows, rule)

    async def check_loaded(
        self, meta: Any, chunks: Iterable[dict[str, torch.Tensor]], rows: dict[int, int], rule: str
    ) -> None:
        """Load rows into another storage, and compare.

        Args:
            meta: as ``freeze`` gave it out.
            chunks: as well.
            rows: which items they should have.
            rule: that is broken if they do not.
        """
        other = StorageHistory(self._shelf, self._contract, self._pool)
        await other.load(meta, chunks, rows)
        await other.check_rows(rule)

    async def load(self, meta: Any, chunks: Iterable[dict[str, torch.Tensor]], rows: dict[int, int]) -> None:
        """Load rows, as a checkpoint brings them."""
        contract, unread = self._contract, list(chunks)

        def read() -> Iterator[dict[str, torch.Tensor]]:
            while unread:
                yield _copied(unread.pop(0))

        with contract.allowed("load_rows takes what freeze gave out, in a thread"):
            plain = _through_json(meta)
            make_live = await _in(self._pool, lambda: self.storage.load_rows(plain, read()))
        contract.require(not unread, "load_rows uses all chunks up", "none to be left", f"{len(unread)} left")
        await self.check_rows("load_rows changes nothing until its result is called")
        with contract.allowed("what load_rows returns does not fail"):
            make_live()
        self.rows = dict(rows)
        self._written = 1000 + self._written
        stored = self.storage.rows_in(plain)
        highest = max(rows, default=-1)
        rule = "rows_in says how many rows there are, or None"
        contract.require(stored is None or stored > highest, rule, f"more than {highest}", stored)

    def check_columns(self) -> None:
        """Columns are the leaves of the items, if the storage has columns."""
        items = self._shelf.items(3, 0)
        if _is_sequence(items):
            return
        leaves, spec = tree.flatten(items, batched=True)
        paths = spec.paths()
        prepared = self.storage.prepare(items)
        rule = "columns are the leaves of the items"
        try:
            columns = self.storage.columns(prepared, paths)
        except SchemaError:
            return  # it has none
        for path, leaf in zip(paths, leaves, strict=True):
            values = np.asarray(leaf.float() if _lacks_numpy(leaf) else leaf)
            self._contract.same(np.ascontiguousarray(columns[path]), np.ascontiguousarray(values), rule)


def _lacks_numpy(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point and leaf.dtype.itemsize < 4


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _copied(chunk: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in chunk.items()}


def _through_json(meta: Any) -> Any:
    document, tensors = split(meta)
    return join(json.loads(json.dumps(document, allow_nan=False)), _copied(tensors))


async def _in(pool: ThreadPoolExecutor, call: Callable[[], Any]) -> Any:
    return await asyncio.get_running_loop().run_in_executor(pool, call)
