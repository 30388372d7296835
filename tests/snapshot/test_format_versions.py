"""Format versions: version 1 is read, a later one is refused, and version 2 is checked."""

from __future__ import annotations

import copy
import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointVersionError,
    ListStorage,
    SamplerWithoutReplacement,
    Snapshot,
)
from asyncbuf._prefetch.entry import Entry
from asyncbuf._prefetch.gathered import Gathered
from asyncbuf._prefetch.tickets import PAYLOAD_VERSION, SavedTicket, Tickets
from asyncbuf._prefetch.transforms import Partial
from asyncbuf.batch import Draw, Ticket
from asyncbuf.checkpoint.snapshot import VERSION
from asyncbuf.testing import difference
from tests.resume_helpers import Average, check_stream, items_of, list_items, noisy, take, unchanged
from tests.snapshot.helpers import ITEMS, State, buffer_with, filled

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from asyncbuf import ReplayBuffer

LATER_PARTS = ("rows", "limiter", "ledger", "deliveries", "reservations")
LATER_CONTENT = ("lengths", "joins", "joined")


def as_version_1(state: State) -> State:
    """What the first release would have written."""
    old = copy.deepcopy({name: value for name, value in state.items() if name not in LATER_PARTS})
    old["version"] = old["prefetch"]["version"] = 1
    for name in ("delivered", "dropped"):
        del old["prefetch"][name]
    for ticket in old["prefetch"]["queue"]:
        del ticket["write_count"], ticket["shape"]
        for name in LATER_CONTENT:
            del ticket["content"][name]
    return old


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "passes": lambda: {"sampler": SamplerWithoutReplacement(), "prefetch": 4},
    "stateful": lambda: {"transform": [Average(), noisy]},
    "list": lambda: {"storage": ListStorage(ITEMS)},
    "no depth": lambda: {"prefetch": 0},
}


@pytest.mark.parametrize("kind", KINDS)
async def test_version_1_is_read(kind: str) -> None:
    async with buffer_with(**KINDS[kind]()) as source:
        await source.extend(list_items(ITEMS) if kind == "list" else items_of(ITEMS))
        await take(source, 2)
        await source.skip()
        old = as_version_1(await source.state_dict())
        stats = source.stats()
        expected = await take(source, 5)
    async with buffer_with(**KINDS[kind](), seed=9) as target:
        await target.load_state_dict(old)
        after = target.stats()
        # It is not known how many were dropped.
        assert (after.drawn, after.queued, after.dropped) == (stats.drawn, stats.queued, 0)
        assert after.delivered == stats.drawn - stats.queued
        await check_stream(target, expected)


async def test_tickets_of_version_1_are_dated_with_the_last_write() -> None:
    async with await filled() as source:
        await source.sample()
        await source.extend(items_of(3, 100))
        state = await source.state_dict()
    assert [ticket["write_count"] for ticket in state["prefetch"]["queue"]] == [ITEMS] * 2
    target = buffer_with()
    await target.load_state_dict(as_version_1(state))
    async with target:
        assert [batch.write_count for batch in await take(target, 3)] == [ITEMS + 3] * 3
        await target.load_state_dict(state)
        assert [batch.write_count for batch in await take(target, 3)] == [ITEMS, ITEMS, ITEMS + 3]


async def test_parts_that_version_1_lacks_start_fresh() -> None:
    async with await filled() as source:
        await source.sample()
        old = as_version_1(await source.state_dict())
        expected = await take(source, 4)
    target = await filled(seed=9)
    fresh = await buffer_with().state_dict()
    async with target:
        await take(target, 3)
        await target.remove([1, 2, 3])
        assert (await target.state_dict())["rows"]["valid"] is not None
        async with pickle.loads(pickle.dumps(await _closed_twin(target))) as twin:
            for buffer in (target, twin):
                await buffer.load_state_dict(old)
                state = await buffer.state_dict()
                # All but the counters of draws, which are known from the tickets.
                fresh["limiter"].update(drawn=3, drawn_items=9)
                for part in LATER_PARTS:
                    assert difference(state[part], fresh[part]) is None
                assert len(buffer) == ITEMS
                await check_stream(buffer, expected)


async def _closed_twin(buffer: ReplayBuffer) -> ReplayBuffer:
    async with buffer.frozen():
        return copy.deepcopy(buffer)


async def test_a_part_that_was_always_there_must_be_there() -> None:
    state = await (await filled()).state_dict()
    for part in ("writer", "sampler", "transforms", "generator"):
        less = {name: value for name, value in state.items() if name != part}
        with pytest.raises(CheckpointCorruptError, match=part):
            await buffer_with().load_state_dict(less)


async def test_a_part_that_is_not_known_is_refused(tmp_path: Path) -> None:
    source = await filled()
    state = {**await source.state_dict(), "teleporter": {"beam": torch.ones(2)}}
    async with await filled(12, seed=9) as target:
        await target.sample()
        async with unchanged(target):
            with pytest.raises(CheckpointMismatchError, match=r"found others beside them: \['teleporter'\]"):
                await target.load_state_dict(state)
            await Snapshot.from_state_dict(state).save(tmp_path / "it")
            with pytest.raises(CheckpointMismatchError, match="teleporter"):
                await target.load(tmp_path / "it")


async def test_what_is_written_has_the_version_that_old_releases_refuse(tmp_path: Path) -> None:
    source = await filled()
    state = await source.state_dict()
    assert (VERSION, PAYLOAD_VERSION) == (state["version"], state["prefetch"]["version"]) == (3, 2)
    await source.save(tmp_path / "it")
    document = json.loads((tmp_path / "it" / "manifest.json").read_text())["body"]["state"]["buffer"]
    assert (document["version"], document["prefetch"]["version"]) == (3, 2)


@pytest.mark.parametrize("version", [0, 4, -1, True, None, "2", 2.0])
async def test_other_versions_are_refused(version: Any) -> None:
    state = await (await filled()).state_dict()
    async with await filled(12, seed=9) as target:
        await target.sample()
        async with unchanged(target):
            with pytest.raises(CheckpointVersionError, match="from 1 to 3"):
                await target.load_state_dict({**state, "version": version})
            with pytest.raises(CheckpointVersionError, match="from 1 to 2"):
                await target.load_state_dict({**state, "prefetch": {**state["prefetch"], "version": version}})


# -- tickets of version 2 ---------------------------------------------------------------------------------------------


def draw() -> Draw:
    """A draw that says everything."""
    return Draw(
        torch.tensor([3, 1, 4, 1, 5, 9]),
        {"weight": torch.rand(6)},
        epoch=2,
        last=True,
        shape=(2, 3),
        lengths=torch.tensor([1, 0, 5]),
        joins={"next": torch.tensor([[4], [2], [5], [2], [6], [0]])},
    )


def ticket_of(step: int | None) -> SavedTicket:
    drawn = draw()
    rows = {"x": torch.rand(6)}
    data: Any = None
    if step == 0:
        data = Gathered(drawn, rows, {"next": {"x": torch.rand(6, 1)}})
    elif step != -1:
        data = rows
    return SavedTicket(Ticket(7, drawn, 2**62, 11), 6, True, step, data)


def content_of(ticket: SavedTicket) -> Any:
    """Everything that is saved of a ticket, as a tree."""
    number, drawn, seed, write_count = ticket.ticket
    data = ticket.data
    joined = dict(data.joined) if isinstance(data, Gathered) else None
    rest = (drawn.epoch, drawn.last, drawn.shape, drawn.lengths, dict(drawn.joins))
    return {
        "draw": [number, seed, write_count, drawn.indices, dict(drawn.info), *rest],
        "made": [ticket.batch_size, ticket.is_main, ticket.step, data.data if joined is not None else data, joined],
    }


@pytest.mark.parametrize("step", [None, -1, 0, 1])
def test_a_ticket_keeps_everything(step: int | None) -> None:
    ticket = ticket_of(step)
    plain = ticket.plain()
    json.dumps(torch.utils._pytree.tree_map(lambda leaf: None if isinstance(leaf, torch.Tensor) else leaf, plain))
    again = SavedTicket.from_plain(plain, PAYLOAD_VERSION, 10)
    assert difference(content_of(again), content_of(ticket)) is None
    assert type(again.data) is type(ticket.data)
    for copied in (ticket.cloned(), pickle.loads(pickle.dumps(ticket.cloned()))):
        assert difference(content_of(copied), content_of(ticket)) is None
    if step == 0:
        assert again.data.draw is again.ticket.draw
        ticket.data.joined["next"]["x"].zero_()
        assert difference(content_of(again), content_of(ticket)) is not None


@pytest.mark.parametrize("step", [None, -1, 0, 1])
def test_an_entry_becomes_a_ticket_and_an_entry_again(step: int | None) -> None:
    saved = ticket_of(step)
    entry = saved.entry()
    assert isinstance(entry, Entry)
    if step is not None and step >= 0:
        assert entry.progress == Partial(step, saved.data)
    again = SavedTicket.of(entry, 6, is_main=True)
    assert difference(content_of(again), content_of(saved)) is None
    if step is None:
        assert entry.batch is not None
        assert entry.batch.indices.shape == (2, 3)
        assert entry.batch.write_count == 11


WRONG: dict[str, tuple[Callable[[State], None], str]] = {
    "write_count": (lambda plain: plain.update(write_count=-2), "write_count of batch 7"),
    "no write_count": (lambda plain: plain.update(write_count=None), "write_count of batch 7"),
    "write_count missing": (lambda plain: plain.pop("write_count"), "expected a ticket of"),
    "shape of others": (lambda plain: plain.update(shape=[2, 2]), "shape of 6 rows"),
    "shape of nothing": (lambda plain: plain.update(shape=[]), "shape of 6 rows"),
    "negative shape": (lambda plain: plain.update(shape=[-2, -3]), "shape of 6 rows"),
    "shape of floats": (lambda plain: plain.update(shape=[2.0, 3]), "shape of 6 rows"),
    "shape as a number": (lambda plain: plain.update(shape=6), "shape of 6 rows"),
    "lengths too many": (lambda plain: plain["content"].update(lengths=torch.tensor([4, 4])), "groups of 6 rows"),
    "negative length": (lambda plain: plain["content"].update(lengths=torch.tensor([7, -1])), "groups of 6 rows"),
    "lengths of floats": (lambda plain: plain["content"].update(lengths=torch.tensor([6.0])), "groups of 6 rows"),
    "lengths with axes": (lambda plain: plain["content"].update(lengths=torch.tensor([[6]])), "groups of 6 rows"),
    "joins beyond": (lambda plain: plain["content"]["joins"].update(next=torch.tensor([10])), "rows 0 to 9"),
    "joins below": (lambda plain: plain["content"]["joins"].update(next=torch.tensor([-1])), "rows 0 to 9"),
    "joins of floats": (lambda plain: plain["content"]["joins"].update(next=torch.rand(6)), "int64 joins"),
    "joins as a list": (lambda plain: plain["content"].update(joins=[]), "the joins|int64 joins"),
    "other joins": (lambda plain: plain["content"].update(joins={"prev": torch.tensor([1])}), "the joins"),
    "joined as a list": (lambda plain: plain["content"].update(joined=[1]), "the joins"),
    "joined missing": (lambda plain: plain["content"].pop("joined"), "the content of batch 7"),
    "more content": (lambda plain: plain["content"].update(more=1), "the content of batch 7"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_ticket_that_contradicts_itself_is_refused(what: str) -> None:
    mutate, message = WRONG[what]
    plain = ticket_of(0).plain()
    mutate(plain)
    with pytest.raises(CheckpointCorruptError, match=message):
        SavedTicket.from_plain(plain, PAYLOAD_VERSION, 10)


def test_tickets_go_with_what_was_written() -> None:
    tickets = Tickets(8, 1, 0, [ticket_of(-1)], 7, 0)
    assert tickets.drawn_from(11).queue[0].ticket.write_count == 11
    with pytest.raises(CheckpointCorruptError, match="drawn from at most 10 items, found 11"):
        tickets.drawn_from(10)
    # Its rows are still to be gathered: row 9 must have been written.
    early = [ticket_of(-1)]
    early[0] = SavedTicket(early[0].ticket._replace(write_count=9), 6, True, -1, None)
    with pytest.raises(CheckpointCorruptError, match="rows 0 to 8"):
        Tickets(8, 1, 0, early, 7, 0).drawn_from(11)
    made = SavedTicket(early[0].ticket, 6, True, None, {"x": torch.rand(6)})
    assert Tickets(8, 1, 0, [made], 7, 0).drawn_from(11).queue[0] is not None


async def test_rows_that_were_never_written_change_nothing() -> None:
    async with await filled(5) as source:
        await source.sample()
        state = await source.state_dict()
    ticket = state["prefetch"]["queue"][0]
    ticket["step"], ticket["content"]["data"] = -1, None
    ticket["content"]["indices"] = torch.tensor([1, 6, 12])
    for wrong in (state, as_version_1(state)):
        async with await filled(12, seed=9) as target:
            await target.sample()
            async with unchanged(target):
                with pytest.raises(CheckpointCorruptError, match="rows 0 to 4"):
                    await target.load_state_dict(wrong)
