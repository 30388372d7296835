"""States that somebody made up, each wrong in one way that used to pass: refused, and the message names the part."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import CheckpointError, Limiter, NotYet, ReplayBuffer, Snapshot, TensorStorage
from tests.helpers import within
from tests.resume_helpers import items_of, unchanged
from tests.snapshot.forged import EXOTIC, KINDS, State, at, used
from tests.snapshot.helpers import ITEMS, buffer_with, filled
from tests.snapshot.test_format_versions import as_version_1

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncbuf import Counters


def put(value: Any, *path: Any) -> Callable[[State], None]:
    """Write something at a place."""
    return lambda state: at(state, path[:-1]).__setitem__(path[-1], value)


def numbers(*new: int) -> Callable[[State], None]:
    """Number the tickets of the queue anew."""

    def renumber(state: State) -> None:
        for ticket, number in zip(state["prefetch"]["queue"], new, strict=True):
            ticket["number"] = number

    return renumber


def both(*changes: Callable[[State], None]) -> Callable[[State], None]:
    def change(state: State) -> None:
        for one in changes:
            one(state)

    return change


CONTENT = ("prefetch", "queue", 0, "content")
CHUNK = ("storage", "chunks", 0)
FORGED: dict[str, tuple[str, Callable[[State], Any], str]] = {
    "a write count without room": ("tensors, random", put(2**63 - 1, "writer", "write_count"), "write_count"),
    "a write count with a little room": ("tensors, random", put(2**62, "writer", "write_count"), "write_count.*62"),
    "a write count of a part of a user": ("tensors, gaps", put(2**62, "writer", "written"), "write_count"),
    "a write count below the rows": ("tensors, gaps", put(3, "writer", "written"), "expected|write_count"),
    "rows drawn without a ticket": ("tensors, random", put(0, "limiter", "drawn"), "limiter"),
    "fewer rows than tickets": ("tensors, random", put(1, "limiter", "drawn_items"), "limiter.*row of each"),
    "other tickets than drawn": ("tensors, random", put(5, "limiter", "drawn"), "limiter.*4 tickets"),
    "an endless number of tickets": ("tensors, random", put(2**62, "prefetch", "next"), "next"),
    "an endless pass": ("tensors, passes", put(2**62, "sampler", "epoch"), "epoch"),
    "a ticket that was delivered": ("tensors, random", numbers(0, 3), "first ticket.*2.*found 0|2 as the first"),
    "a reversed queue": ("tensors, random", numbers(3, 2), "ascending"),
    "a ticket twice": ("tensors, random", numbers(2, 2), "each once"),
    "a prefetched ticket of another size": ("tensors, random", put(4, "prefetch", "queue", 0, "batch_size"), "3 rows"),
    "a batch of no rows": ("tensors, random", put(0, "prefetch", "queue", 0, "batch_size"), "batch_size"),
    "a batch that says it is gathered": ("objects, random", put(0, "prefetch", "queue", 0, "step"), "lists of items"),
    "a batch that says it is nothing": ("objects, random", put(-1, "prefetch", "queue", 0, "step"), "nothing"),
    "joins that say they are a batch": ("tensors, joins", put({"other": [1]}, *CONTENT, "joined"), "combined"),
    "an item for a list of items": (
        "objects, random",
        put(torch.tensor([49]).byte(), *CHUNK, "columns"),
        "chunk",
    ),
    "an array as format": ("tensors, random", put(np.array(["x"]), "format"), "format"),
    "a tensor as format": ("tensors, random", put(torch.arange(3), "format"), "format"),
    "an array as version": ("tensors, random", put(np.array([2]), "version"), "version"),
    "an array as capacity": ("tensors, random", put(np.arange(3), "config", "capacity"), "capacity"),
    "a tensor as kind": ("tensors, random", put(torch.arange(3), "config", "sampler"), "sampler"),
    "a bool as capacity": ("tensors, random", put(True, "config", "capacity"), "capacity"),
    "a key that is no string": ("tensors, random", lambda state: state["writer"].update({1: 2}), "writer.*keys"),
    "a state for a function": ("tensors, random", lambda state: state["transforms"].append({}), "transforms"),
    "no state for a transform": ("tensors, passes", put(None, "transforms", 0), "transforms.*transform 0"),
    "a cursor beyond the rows": ("tensors, random", put(2**40, "writer", "cursor"), "cursor"),
    "a field of another name": ("tensors, random", put("x", "storage", "meta", "fields", 0, "name"), "fields"),
    "text for a tuple": (
        "objects, random",
        put({"$tuple": "abc"}, *CONTENT, "data"),
        "list",
    ),
    "a tag with more": (
        "objects, random",
        put({"$tuple": [], "x": 1}, *CONTENT, "data"),
        "entries",
    ),
    "more beside the queue": ("tensors, random", put(1, "prefetch", "more"), "more"),
}


@pytest.mark.parametrize("what", FORGED)
async def test_it_is_refused(what: str) -> None:
    kind, change, message = FORGED[what]
    state = await (await used(kind, 3)).state_dict()
    change(state)
    await refused(kind, state, message)


async def refused(kind: str, state: State, message: str) -> None:
    async with await used(kind, 1) as live:
        await live.sample()
        async with unchanged(live):
            with pytest.raises(CheckpointError, match="expected") as caught:
                await within(live.load_state_dict(state))
        assert re.search(message, str(caught.value))
        await live.sample()


TENSORS: dict[str, list[tuple[Any, ...]]] = {
    "tensors, random": [
        *((("writer", name)) for name in ("order", "numbers", "free")),
        ("rows", "valid"),
        ("generator", "state"),
        ("storage", "chunks", 0, "wide"),
        ("prefetch", "queue", 0, "content", "indices"),
        ("prefetch", "queue", 0, "content", "data", "wide"),
    ],
    "tensors, gaps": [("rows", "valid"), ("rows", "numbers")],
    "tensors, passes": [("sampler", "gone")],
    "tensors, joins": [("prefetch", "queue", 0, "content", "joins", "other")],
    "objects, random": [("storage", "chunks", 0, "columns"), ("storage", "chunks", 0, "0")],
}


@pytest.mark.parametrize("kind", TENSORS)
async def test_tensors_that_are_none(kind: str) -> None:
    good = await (await used(kind, 3)).state_dict()
    for path in TENSORS[kind]:
        value = at(good, path)
        odd = [value.to("meta"), value.float().to_sparse(), np.asarray(value), *EXOTIC]
        if path[-1] not in ("wide", "0"):  # of items, which may be anything
            odd += [value.to(torch.complex64), value.to(torch.float64), value.tolist(), None]
        for other in odd:
            state = copy.deepcopy(good)
            put(other, *path)(state)
            if other is None and path in (("rows", "valid"), ("rows", "numbers")):
                continue  # says that there are no gaps, and numbers as they come
            await refused(kind, state, "")


async def test_numbers_have_room_after_rows_were_removed() -> None:
    source = await filled()
    await source.remove([3, 4])
    state = await source.state_dict()
    state["writer"]["write_count"] = 2**62 - 1
    state["ledger"]["evicted"]["removed"] = 2**62 - 1 - ITEMS + 2
    target = buffer_with()
    await target.load_state_dict(state)
    await target.extend(items_of(30))
    assert target.write_count == 2**62 + 29
    async with target:
        assert (await target.sample()).write_count == target.write_count


async def test_a_snapshot_refuses_what_is_not_plain() -> None:
    good = await (await filled()).state_dict()
    endless: list[Any] = []
    endless.append(endless)
    for value in (endless, np.arange(3), object(), {1: 2}, (1, 2), b"x", EXOTIC[0], torch.empty(2, device="meta")):
        snapshot = Snapshot()
        with pytest.raises(CheckpointError, match="expected"):
            snapshot.load_state_dict({**good, "sampler": {"x": value}})
    wrong: list[Any] = [None, 3, [], np.arange(3), torch.arange(3), {}, {"format": good["format"]}]
    for state in wrong:
        with pytest.raises(CheckpointError, match="expected"):
            Snapshot.from_state_dict(state)


class Ratio(Limiter):
    """Writers may be ten rows ahead of what was drawn."""

    def may_write(self, counters: Counters, items: int) -> Any:
        ahead = counters.write_count + counters.admitted + items - counters.drawn_items
        return True if ahead <= 26 else NotYet(f"writers would be {ahead} rows ahead")


async def test_counters_of_draws_follow_from_the_tickets_of_version_1() -> None:
    def make() -> ReplayBuffer:
        return buffer_with(storage=TensorStorage(40), limiter=Ratio(), prefetch=1)

    async with make() as source:
        await source.extend(items_of(20))
        for _ in range(8):
            await source.sample()
        old = as_version_1(await source.state_dict())
    async with make() as target:
        await target.load_state_dict(old)
        state = await target.state_dict()
        assert (state["limiter"]["drawn"], state["limiter"]["drawn_items"]) == (9, 27)
        await within(target.extend(items_of(20)))  # would wait for seven more batches otherwise


async def test_every_kind_is_what_it_says() -> None:
    for kind in KINDS:
        state = await (await used(kind, 3)).state_dict()
        async with KINDS[kind]() as target:
            await target.load_state_dict(state)
            await within(target.sample())
