"""The contract of a storage: what is written is gathered bit for bit, and what was handed out stays as it is."""

from __future__ import annotations

import functools
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from asyncbuf.errors import SchemaError
from asyncbuf.storage import Runs
from asyncbuf.testing._contract import Contract, check_arguments, check_malformed, is_picklable, revived, scramble
from asyncbuf.testing._storage_history import Shelf, StorageHistory, stacked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from asyncbuf.storage import Storage

_STEPS = {
    "write": 4.0,
    "gather": 3.0,
    "gather at once": 1.0,
    "freeze": 1.0,
    "read what was frozen": 1.0,
    "release": 0.5,
    "clear": 0.3,
}


def varied_items(count: int, start: int) -> dict[str, Any]:
    """Items of many dtypes that follow from their numbers alone, NaN and -0.0 among them.

    Args:
        count: how many.
        start: number of the first.

    Returns:
        A batch of items: ``number`` int64 ``[count]``, ``value`` float32 ``[count, 3]``, ``done`` bool ``[count]``,
        ``deep/pixels`` uint8 ``[count, 2, 2]`` and ``deep/half`` bfloat16 ``[count]``.
    """
    number = torch.arange(start, start + count)
    value = number[:, None].to(torch.float32).repeat(1, 3)
    value[:, 1] = torch.where(number % 2 == 0, torch.nan, -0.0)
    pixels = (number[:, None, None] * 7 % 251).to(torch.uint8).repeat(1, 2, 2)
    deep = {"pixels": pixels, "half": number.to(torch.bfloat16) / 3}
    return {"number": number, "value": value, "done": number % 3 == 0, "deep": deep}


async def check_storage(
    make_storage: Callable[[int], Storage],
    items: Callable[[int, int], Any] = varied_items,
    *,
    expected: Callable[[Sequence[int]], Any] | None = None,
    misfits: Sequence[Any] = (),
    keeps_references: bool = False,
    capacity: int = 12,
    seeds: Iterable[int] = range(4),
    steps: int = 40,
) -> None:
    """Try hard to break a storage of your own.

    Writes items as any writer may place them, gathers in every form (at once, in threads, several together), keeps
    batches and views of them, freezes and reads while writes go on, loads, pickles, and compares bit for bit::

        async def test_my_storage() -> None:
            await check_storage(MyStorage, misfits=[{"number": 3}])

    Args:
        make_storage: makes a storage of so many rows.
        items: ``items(count, start)`` makes ``count`` items from item number ``start`` on, as ``extend`` takes them. An
            item follows from its number alone. The default has fields of many dtypes.
        expected: what gathering must give, from the numbers of the items: ``expected(numbers)``. By default the items
            leaf by leaf as tensors, one after the other; of a list of items, a list.
        misfits: what ``prepare`` must refuse with ``SchemaError`` once ``items`` are known.
        keeps_references: whether items are kept as they are, as by ``ListStorage``. Then it is not checked that
            changes to what was handed in or out do not show.
        capacity: number of rows, at least 4.
        seeds: one history for each.
        steps: length of a history.

    Raises:
        AssertionError: a rule is broken. The message names it, the step, what was expected and what was found.
        TypeError, ValueError: an argument is of another kind, or out of range.
    """
    check_arguments(make_storage=make_storage, items=items, capacity=capacity, steps=steps)
    if expected is None:
        expected = functools.partial(stacked, items)
    shelf = Shelf(make_storage, items, expected, keeps_references, capacity, {})
    contract = Contract(type(make_storage(capacity)).__name__)
    with ThreadPoolExecutor(4) as pool:
        await _check_new(shelf, contract, pool, misfits)
        for seed in seeds:
            choose = random.Random(seed)
            history = StorageHistory(shelf, contract, pool)
            for step in range(steps):
                name = "write" if step == 0 else choose.choices(list(_STEPS), list(_STEPS.values()))[0]
                contract.where = f"seed {seed}, step {step}, {name}"
                with contract.local():
                    await history.step(choose, name)
            contract.where = f"seed {seed}, after the last step"
            await _check_end(history, shelf, contract, pool)


async def _check_new(shelf: Shelf, contract: Contract, pool: ThreadPoolExecutor, misfits: Sequence[Any]) -> None:
    """Rules that no history is needed for."""
    history = StorageHistory(shelf, contract, pool)
    storage = history.storage
    contract.require(storage.capacity == shelf.capacity, "capacity is as asked for", shelf.capacity, storage.capacity)
    contract.require(isinstance(storage.runs, Runs), "runs is one of Runs", "one of Runs", storage.runs)
    with contract.allowed("a storage without items can be frozen, cleared and loaded"):
        frozen = storage.freeze()
        storage.clear()
    await history.check_loaded(frozen.meta, history.chunks(frozen), {}, "a storage without items can be loaded")
    await history.step(random.Random(0), "write")
    _check_sizes(storage, contract)
    history.check_columns()
    await _check_misfits(history, shelf, contract, misfits)


def _check_sizes(storage: Storage, contract: Contract) -> None:
    sizes = [storage.gather_nbytes(count) for count in (1, 2, 4)]
    is_sound = all(type(size) is int and size >= 0 for size in sizes) and sizes == sorted(sizes)
    contract.require(is_sound, "gather_nbytes grows with the number of rows", "ascending ints", sizes)


async def _check_misfits(history: StorageHistory, shelf: Shelf, contract: Contract, misfits: Sequence[Any]) -> None:
    """What does not fit is refused, and changes nothing; nor does what fits, before it is written."""
    rule = "prepare changes nothing"
    with contract.unchanged(history.storage, rule):
        for number, wrong in enumerate(misfits):
            contract.where = f"misfit {number}"
            try:
                history.storage.prepare(wrong)
            except SchemaError:
                pass
            except Exception as error:
                raise contract.broken("prepare refuses with SchemaError", "SchemaError", repr(error)) from error
            else:
                raise contract.broken("prepare refuses what does not fit", "SchemaError", "no error")
        contract.where = "items that are prepared and not written"
        history.storage.prepare(shelf.items(2, 500))
        history.storage.prepare_one(shelf.item(500))
        strange: Any
        for strange in (None, 3, "text", {}, shelf.items(0, 0)):
            try:
                history.storage.prepare(strange)
            except Exception:  # a storage may take anything
                continue
    await history.check_rows(rule)


async def _check_end(history: StorageHistory, shelf: Shelf, contract: Contract, pool: ThreadPoolExecutor) -> None:
    storage, rows = history.storage, dict(history.rows)
    await _check_states(history, shelf, contract, pool)
    frozen = storage.freeze()
    chunks = history.chunks(frozen)
    is_named = all(
        isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu"
        for chunk in chunks
        for tensor in chunk.values()
    )
    contract.require(is_named, "chunks are named tensors on the CPU", "dicts of tensors", [type(c) for c in chunks])
    await _check_damage(history, contract, frozen.meta, chunks)
    # Into the storage itself, which has other rows by then.
    await history.step(random.Random(0), "write")
    await history.load(frozen.meta, chunks, rows)
    await history.check_rows("load_rows replaces the contents")
    if is_picklable(shelf.make_storage(shelf.capacity)):
        other = StorageHistory(shelf, contract, pool)
        with contract.allowed("a storage can be pickled whatever is in it"):
            other.storage = pickle.loads(pickle.dumps(storage))
        other.rows = dict(history.rows)
        await other.check_rows("a pickled storage has the same rows")
        # Both go on, each with items of its own: their chunks must not be taken for each other.
        for one, seed in ((history, 1), (other, 2)):
            await one.step(random.Random(seed), "write")
            one.chunks(one.storage.freeze())


async def _check_states(history: StorageHistory, shelf: Shelf, contract: Contract, pool: ThreadPoolExecutor) -> None:
    plain = contract.state(history.storage)
    scramble(history.storage.state_dict())
    await history.check_rows("state_dict gives out memory of its own")
    other = StorageHistory(shelf, contract, pool)
    with contract.allowed("load_state_dict takes what state_dict gave out"):
        other.storage.load_state_dict(revived(plain))
    other.rows = dict(history.rows)
    await other.check_rows("load_state_dict brings every row back")
    check_malformed(contract, other.storage, plain)
    await other.check_rows("load_state_dict takes all of a state or nothing")


async def _check_damage(history: StorageHistory, contract: Contract, meta: Any, chunks: Sequence[Any]) -> None:
    """A checkpoint with damage changes nothing, and chunks that are missing are noticed."""
    if not chunks:
        return
    worse = [{f"{name}?": tensor for name, tensor in chunks[0].items()}, *chunks[1:]]
    for what, some in [("without the last chunk", chunks[:-1]), ("with other names in a chunk", worse)]:
        contract.where = f"load_rows {what}"
        try:
            history.storage.load_rows(meta, iter(some))
        except Exception:
            await history.check_rows("load_rows changes nothing until its result is called")
        else:
            raise contract.broken("load_rows refuses chunks that are not all there", "an error", "none")
