"""The contract of a sampler: histories of everything that may happen to it, resumed anywhere, and whole buffers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from asyncbuf._plain.codec import encode
from asyncbuf.buffer import ReplayBuffer
from asyncbuf.errors import BufferClosedError
from asyncbuf.storage import TensorStorage
from asyncbuf.testing._contract import Contract, check_arguments, check_malformed, is_picklable
from asyncbuf.testing._leases import check_leases
from asyncbuf.testing._sampler_history import Disturbance, History, Setting
from asyncbuf.testing.compare import assert_same_batch
from asyncbuf.testing.resume import WAYS, assert_exact_resume
from asyncbuf.writer import RoundRobinWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from asyncbuf.batch import Batch
    from asyncbuf.sampler import Sampler
    from asyncbuf.storage import Storage
    from asyncbuf.writer import Writer

# Batches of a whole buffer, and depths and workers of its prefetching.
_BATCHES = 12
_PREFETCHING = ((0, 1), (1, 1), (3, 1), (2, 3))
# At how many steps of a history malformed states are loaded.
_MALFORMED = 4
# How many steps a resumed history goes on, and at which steps it goes on to the end.
_AHEAD, _WHOLE = 8, 12


def numbered_items(count: int, start: int) -> dict[str, torch.Tensor]:
    """Items that follow from their numbers alone: ``number`` int64, ``value`` float32, ``done`` bool (one in five).

    Args:
        count: how many.
        start: number of the first.

    Returns:
        A batch of items, each leaf ``[count]``.
    """
    number = torch.arange(start, start + count)
    return {"number": number, "value": (number % 7).to(torch.float32) / 4, "done": number % 5 == 4}


async def check_sampler(
    make_sampler: Callable[[], Sampler],
    *,
    items: Callable[[int, int], Any] = numbered_items,
    make_storage: Callable[[int], Storage] = TensorStorage,
    make_writer: Callable[[], Writer] = RoundRobinWriter,
    capacity: int = 24,
    batch_size: int = 4,
    other_batch_sizes: Sequence[int] = (1, 7),
    seeds: Iterable[int] = range(6),
    steps: int = 60,
    seconds: float = 30.0,
) -> None:
    """Try hard to break a sampler of your own.

    Plays histories of writes (past the end of the ring, too), draws, hand-overs, drops, priority updates, removals and
    ``clear``, checks the rules of ``Sampler`` at every step, resumes at every step, and runs whole buffers::

        async def test_my_sampler() -> None:
            await check_sampler(lambda: MySampler(24), capacity=24)

    Args:
        make_sampler: makes a new sampler, always the same.
        items: ``items(count, start)`` makes ``count`` items from item number ``start`` on, as ``extend`` takes them.
            They have the leaves that ``Sampler.columns`` names, and an item follows from its number alone.
        make_storage: makes a storage of so many rows for these items.
        make_writer: makes a writer for so many rows.
        capacity: number of rows; six batches or more, so that a buffer has rows to prefetch.
        batch_size: number of rows of most draws.
        other_batch_sizes: of the others; those that ``Sampler.check`` refuses are left out.
        seeds: one history for each. Of three in a row, the first removes no rows, the second does, the third calls
            ``clear`` as well.
        steps: length of a history.
        seconds: how long a whole buffer may take for a batch.

    Raises:
        AssertionError: a rule is broken. The message names it, the step, what was expected and what was found.
        TypeError, ValueError: an argument is of another kind, or out of range.
        ValueError: the sampler itself says that there is no such batch in so many rows.
    """
    check_arguments(
        make_sampler=make_sampler,
        items=items,
        make_storage=make_storage,
        make_writer=make_writer,
        capacity=capacity,
        batch_size=batch_size,
        steps=steps,
        seconds=seconds,
    )
    sampler = make_sampler()
    sampler.check(capacity, batch_size)
    contract = Contract(type(sampler).__name__)
    sizes = [batch_size, *(size for size in other_batch_sizes if _is_possible(sampler, capacity, size))]
    draws = 0
    for seed in seeds:
        setting = Setting(make_sampler, items, make_storage, capacity, sizes, steps, seed, make_writer)
        draws += _check_history(setting, contract)
    check_leases(Setting(make_sampler, items, make_storage, capacity, [batch_size], steps, 0, make_writer), contract)
    contract.where = "in all histories together"
    contract.require(draws > 0, "may_draw is true at some time", "a draw", "none")
    await _check_buffers(
        _Buffers(make_sampler, items, make_storage, make_writer, capacity, batch_size, seconds), contract
    )


def _is_possible(sampler: Sampler, capacity: int, batch_size: int) -> bool:
    try:
        sampler.check(capacity, batch_size)
    except ValueError:
        return False
    return True


# -- histories --------------------------------------------------------------------------------------------------------


def _check_history(setting: Setting, contract: Contract) -> int:
    """Check every rule on one history: how many draws it had."""
    history = History(setting, contract, is_strict=True)
    points, outcomes = [], []
    handed_out: list[tuple[str, Any, Any]] = []
    for _ in range(setting.steps):
        points.append(history.saved())
        outcomes.append(history.step())
        state = history.sampler.state_dict()
        handed_out.append((contract.where, state, encode(state)))
    end = contract.state(history.sampler)
    history.check_end()
    for where, state, before in handed_out:
        contract.where = f"{where}, looked at again after the last step"
        contract.same(encode(state), before, Disturbance.STATES.value)
    for disturbance in Disturbance:
        _compare(History(setting, contract, disturbance), outcomes, end, contract, disturbance.value)
    _check_resumed(setting, contract, points, outcomes, end)
    return history.draws


def _compare(history: History, outcomes: Sequence[Any], end: Any, contract: Contract, rule: str) -> None:
    """See that a history goes the way of another one, and ends as it does."""
    for expected in outcomes:
        found = history.step()
        contract.same(found, expected, rule)
    contract.same(contract.state(history.sampler), end, rule, "the state at the end differs (no draw did)")


def _check_resumed(
    setting: Setting, contract: Contract, points: Sequence[Any], outcomes: Sequence[Any], end: Any
) -> None:
    """Resume at every step, and load malformed states at some."""
    rule = "a sampler that takes over a state goes on as the one that gave it out"
    ends = [*(saved["parts"]["sampler"] for saved in points), end]
    for number, saved in enumerate(points):
        contract.where = f"seed {setting.seed}, resumed at step {number}"
        resumed = History.resumed(setting, contract, saved)
        contract.same(contract.state(resumed.sampler), ends[number], rule)
        stop = len(points) if number % _WHOLE == 0 else min(number + _AHEAD, len(points))
        where = f"{rule} (resumed at step {number})"
        _compare(resumed, outcomes[number:stop], ends[stop], contract, where)
    for number in range(0, len(points), max(1, len(points) // _MALFORMED)):
        contract.where = f"seed {setting.seed}, step {number}"
        resumed = History.resumed(setting, contract, points[number])
        check_malformed(contract, resumed.sampler, end)
        _compare(resumed, outcomes[number:], end, contract, "load_state_dict takes all of a state or nothing")


# -- whole buffers ----------------------------------------------------------------------------------------------------


class _Buffers(NamedTuple):
    """What buffers are made of."""

    make_sampler: Callable[[], Sampler]
    items: Callable[[int, int], Any]
    make_storage: Callable[[int], Storage]
    make_writer: Callable[[], Writer]
    capacity: int
    batch_size: int
    seconds: float

    def make(self, depth: int = 2, workers: int = 1) -> ReplayBuffer:
        return ReplayBuffer(
            self.make_storage(self.capacity),
            sampler=self.make_sampler(),
            writer=self.make_writer(),
            batch_size=self.batch_size,
            prefetch=depth,
            workers=workers,
            generator=torch.Generator().manual_seed(0),
        )

    async def made(self) -> ReplayBuffer:
        return await self.filled(self.make())

    async def filled(self, buffer: ReplayBuffer) -> ReplayBuffer:
        """Several writes, which a writer may put into several tables."""
        for start in range(0, self.capacity, self.batch_size):
            await buffer.extend(self.items(min(self.batch_size, self.capacity - start), start))
        return buffer

    async def feed(self, buffer: ReplayBuffer, step: int, batch: Batch) -> None:
        await buffer.update_priority(batch, 1.0 + (batch.indices % 3).to(torch.float64))
        # As many as a batch has: a sampler that consumes its rows does not run out.
        await buffer.extend(self.items(self.batch_size, self.capacity + step * self.batch_size))

    async def stream(self, depth: int, workers: int) -> list[Batch]:
        """The first batches of a buffer that gets no more items."""
        buffer = await self.filled(self.make(depth, workers))
        await buffer.finish()
        batches: list[Batch] = []
        async with buffer:
            try:
                while len(batches) < _BATCHES:
                    batches.append(await asyncio.wait_for(buffer.sample(), self.seconds))
            except BufferClosedError:
                pass
        return batches


async def _check_buffers(buffers: _Buffers, contract: Contract) -> None:
    sampler = buffers.make_sampler()
    contract.where = "a whole buffer"
    with contract.allowed("a buffer with it gives batches"):
        streams = [await buffers.stream(depth, workers) for depth, workers in _PREFETCHING]
    contract.require(bool(streams[0]), "a buffer with it gives batches", "a batch of a full buffer", "none")
    if "handed_over" not in sampler.hooks:
        _check_streams(streams, contract)
    ways = WAYS if is_picklable(sampler) else WAYS[:3]
    contract.where = "a whole buffer with prefetch=2, among writes and priority updates"
    with contract.kept("a buffer with it resumes exactly"):
        await assert_exact_resume(
            buffers.made, steps=6, at=(0, 2, 5), ways=ways, feed=buffers.feed, hops=1, seconds=buffers.seconds
        )


def _check_streams(streams: Sequence[Sequence[Batch]], contract: Contract) -> None:
    """Without writes in between, and if it does not listen to hand-overs, the stream does not depend on the depth."""
    rule = "the stream does not depend on prefetch and workers"
    for (depth, workers), stream in zip(_PREFETCHING, streams, strict=True):
        contract.where = f"a whole buffer with prefetch={depth}, workers={workers}"
        contract.require(len(stream) == len(streams[0]), rule, f"{len(streams[0])} batches", len(stream))
        with contract.kept(rule):
            for found, expected in zip(stream, streams[0], strict=True):
                assert_same_batch(found, expected, f"batch {expected.number}")
