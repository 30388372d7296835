"""The contract of a limiter: honest answers from counters alone, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from asyncbuf.buffer import ReplayBuffer
from asyncbuf.errors import BufferClosedError
from asyncbuf.limiter import Limiter
from asyncbuf.rows import Counters
from asyncbuf.sampler import RandomSampler
from asyncbuf.staleness import Staleness
from asyncbuf.storage import TensorStorage
from asyncbuf.testing._contract import Contract, check_arguments, check_malformed, revived
from asyncbuf.testing.samplers import numbered_items

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from asyncbuf.rows import Answer
    from asyncbuf.sampler import Sampler

_WRITERS, _CONSUMERS, _WRITES = 3, 2, 10
_ITEM_NBYTES = 16


async def check_limiter(
    make_limiter: Callable[[], Limiter],
    *,
    make_sampler: Callable[[], Sampler] = RandomSampler,
    capacity: int = 16,
    batch_size: int = 4,
    write_sizes: Iterable[int] = (1, 2, 3),
    seeds: Iterable[int] = range(6),
    steps: int = 120,
    seconds: float = 30.0,
) -> None:
    """Try hard to break a limiter of your own.

    Asks at every step of histories of writes and draws, and runs whole buffers with writers and consumers that give up
    at random moments::

        async def test_my_limiter() -> None:
            await check_limiter(lambda: MyLimiter(ratio=2.0))

    Args:
        make_limiter: makes a new limiter, always the same.
        make_sampler: makes the sampler of the whole buffers. A limiter that relies on rows leaving needs one whose
            ``handed_over`` returns rows. Items have the fields of ``check_sampler``.
        capacity: number of rows.
        batch_size: number of rows of a draw.
        write_sizes: how many items are written at once. With the smallest, somebody must always be able to go on.
        seeds: one history and one buffer for each.
        steps: length of a history.
        seconds: how long a whole buffer may take.

    Raises:
        AssertionError: a rule is broken. The message names it, the step, what was expected and what was found.
        TypeError, ValueError: an argument is of another kind, or out of range.
        ValueError: the limiter itself says that there is never a batch in so many rows.
    """
    check_arguments(
        make_limiter=make_limiter,
        make_sampler=make_sampler,
        capacity=capacity,
        batch_size=batch_size,
        steps=steps,
        seconds=seconds,
    )
    limiter = make_limiter()
    limiter.check(capacity)
    limiter.check_batch(batch_size)
    contract = Contract(type(limiter).__name__)
    setting = _Setting(
        make_limiter,
        make_sampler,
        capacity,
        batch_size,
        tuple(sorted(write_sizes)),
        seconds,
        limiter.counts_bytes,
        limiter.counts_overwrites,
        limiter.needs_versions,
    )
    contract.same(contract.state(make_limiter()), contract.state(limiter), "the factory makes equal limiters")
    for seed in seeds:
        _check_history(setting, seed, steps, contract)
    contract.where = "load_state_dict"
    check_malformed(contract, make_limiter(), contract.state(limiter))
    for seed in seeds:
        contract.where = f"a whole buffer, seed {seed}"
        await _Run(setting, seed, contract).run()


class _Setting(NamedTuple):
    """What is checked, and with what."""

    make_limiter: Callable[[], Limiter]
    make_sampler: Callable[[], Sampler]
    capacity: int
    batch_size: int
    write_sizes: tuple[int, ...]
    seconds: float
    counts_bytes: bool
    counts_overwrites: bool
    needs_versions: bool

    def written(self, counters: Counters, items: int) -> Counters:
        """The counters after a write."""
        size = min(self.capacity, counters.size + items)
        nbytes = size * _ITEM_NBYTES if self.counts_bytes else 0
        return _unread(counters._replace(size=size, write_count=counters.write_count + items, nbytes=nbytes))

    def offered(self, counters: Counters, items: int) -> Counters:
        """The counters for ``may_write``."""
        each = _ITEM_NBYTES if self.counts_bytes else 0
        # Of a ring whose oldest items were drawn first.
        free = self.capacity - counters.unread
        overwrites = max(0, counters.admitted + items - free) if self.counts_overwrites else 0
        return counters._replace(
            admitted_nbytes=counters.admitted * each,
            offered_nbytes=items * each,
            overwrites=min(overwrites, counters.unread),
        )

    def drawn(self, counters: Counters) -> Counters:
        """The counters after a draw, and after the version that it makes, if the limiter counts versions."""
        drawn_items = counters.drawn_items + self.batch_size
        version = counters.version + self.needs_versions
        return _unread(counters._replace(drawn=counters.drawn + 1, drawn_items=drawn_items, version=version))


def _unread(counters: Counters) -> Counters:
    unread = min(counters.size, max(0, counters.write_count - counters.drawn_items))
    return counters._replace(unread=unread)


# -- histories --------------------------------------------------------------------------------------------------------


def _check_history(setting: _Setting, seed: int, steps: int, contract: Contract) -> None:
    choose = random.Random(seed)
    asked = _Asked(setting, contract)
    counters = Counters(0, setting.capacity, 0, 0, 0, 0, setting.batch_size)
    for step in range(steps):
        contract.where = f"seed {seed}, step {step}, {counters}"
        with contract.local():
            asked.check(counters)
        items = choose.choice(setting.write_sizes)
        # Writers are ahead for some time, then consumers are.
        if choose.random() < (0.8 if step // 20 % 2 == 0 else 0.2):
            if asked.may_write(counters, items):
                counters = setting.written(counters, items)
        elif asked.may_draw(counters, setting.batch_size) and counters.size:
            counters = setting.drawn(counters)


class _Asked:
    """A limiter that is asked, and another one that was not asked before."""

    def __init__(self, setting: _Setting, contract: Contract) -> None:
        self._limiter = setting.make_limiter()
        self._setting = setting
        self._contract = contract

    def may_draw(self, counters: Counters, items: int) -> Answer:
        with self._contract.allowed("may_draw never fails"):
            answer = self._limiter.may_draw(counters, items)
        return self._contract.answer(answer, "may_draw")

    def may_write(self, counters: Counters, items: int) -> Answer | None:
        """The answer; None if so many items can never be written."""
        try:
            answer = self._limiter.may_write(self._setting.offered(counters, items), items)
        except ValueError:
            return None
        except Exception as error:
            rule = "may_write answers, or refuses with a ValueError"
            raise self._contract.broken(rule, "a ValueError", repr(error)) from error
        return self._contract.answer(answer, "may_write")

    def check(self, counters: Counters) -> None:
        """Ask everything."""
        with self._contract.unchanged(self._limiter, "questions change nothing"):
            self._check_repeatable(counters)
            self._check_monotone(counters)
            self._check_declared(counters)
        self._check_progress(counters)

    def _answers(self, counters: Counters) -> list[Any]:
        setting = self._setting
        return [
            self.may_draw(counters, setting.batch_size),
            self.may_draw(counters, 1),
            *(self.may_write(counters, items) for items in setting.write_sizes),
        ]

    def _check_repeatable(self, counters: Counters) -> None:
        answers = self._answers(counters)
        other = _Asked(self._setting, self._contract)
        with self._contract.allowed("load_state_dict takes what state_dict gave out"):
            other._limiter.load_state_dict(revived(self._contract.state(self._limiter)))
        for found in (self._answers(counters), other._answers(counters)):
            rule = "answers follow from the counters and the state alone"
            self._contract.require(found == answers, rule, answers, found)

    def _check_monotone(self, counters: Counters) -> None:
        setting, size = self._setting, self._setting.batch_size
        more, less = setting.written(counters, 1), setting.drawn(counters)
        draw = self.may_draw(counters, size)
        steps: list[tuple[str, Any, Any]] = [
            ("an item more hinders no draw", draw, self.may_draw(more, size)),
            ("a smaller batch is no harder to draw", draw, self.may_draw(counters, 1)),
        ]
        for items in setting.write_sizes:
            now = self.may_write(counters, items)
            waiting = self.may_write(counters._replace(admitted=counters.admitted + 1), items)
            steps += [
                ("a draw more hinders no write", now, self.may_write(less, items)),
                ("fewer items are no harder to write", now, self.may_write(counters, 1)),
                ("items that were admitted help no write", waiting, now),
            ]
        for rule, before, after in steps:
            self._contract.require(before is not True or after is True, rule, True, after)

    def _check_declared(self, counters: Counters) -> None:
        setting, limiter, require = self._setting, self._limiter, self._contract.require
        for items in setting.write_sizes:
            answer = self.may_write(counters, items)
            rule = "with holds_writers=False, may_write is always true"
            require(answer is True or limiter.holds_writers, rule, True, answer)
        after = self.may_draw(setting.drawn(counters), setting.batch_size)
        stays = not self.may_draw(counters, setting.batch_size) or bool(after)
        rule = "with counts_draws=False, may_draw stays true until items are written or removed"
        require(stays or limiter.counts_draws, rule, True, after)

    def _check_progress(self, counters: Counters) -> None:
        write = self.may_write(counters, self._setting.write_sizes[0])
        draw = self.may_draw(counters, self._setting.batch_size)
        goes_on = write is True or (bool(draw) and counters.size > 0)
        found = f"may_write: {write}, may_draw: {draw}"
        self._contract.require(goes_on, "somebody can always go on", "a write or a draw", found)


# -- whole buffers ----------------------------------------------------------------------------------------------------


def _watched(limiter: Limiter, log: list[Counters]) -> Limiter:
    """A limiter that answers as another one does, and writes down with which counters writes were admitted."""

    class Watched(Limiter):
        counts_draws = limiter.counts_draws
        holds_writers = limiter.holds_writers
        needs_rows_to_leave = limiter.needs_rows_to_leave
        needs_batch_size = limiter.needs_batch_size
        counts_bytes = limiter.counts_bytes
        counts_unread = limiter.counts_unread
        counts_overwrites = limiter.counts_overwrites
        needs_versions = limiter.needs_versions

        def may_write(self, counters: Counters, items: int) -> Answer:
            answer = limiter.may_write(counters, items)
            if answer:
                log.append(counters)
            return answer

        def may_draw(self, counters: Counters, items: int) -> Answer:
            return limiter.may_draw(counters, items)

        def check(self, capacity: int) -> None:
            limiter.check(capacity)

        def check_batch(self, batch_size: int) -> None:
            limiter.check_batch(batch_size)

    return Watched()


class _Run:
    """A buffer, writers and consumers, of which some give up."""

    def __init__(self, setting: _Setting, seed: int, contract: Contract) -> None:
        self._setting = setting
        self._contract = contract
        self._choose = random.Random(seed)
        self._log: list[Counters] = []
        self._offered = self._written = self._taken = 0
        self._is_over = False
        self._buffer = ReplayBuffer(
            TensorStorage(setting.capacity),
            sampler=setting.make_sampler(),
            limiter=_watched(setting.make_limiter(), self._log),
            batch_size=setting.batch_size,
            prefetch=self._choose.choice((0, 2)),
            generator=torch.Generator().manual_seed(seed),
            staleness=Staleness() if setting.needs_versions else None,
        )

    async def run(self) -> None:
        buffer, contract = self._buffer, self._contract
        rule = "writers and consumers of a buffer with it come to their end"
        async with buffer:
            consumers = [asyncio.create_task(self._consume()) for _ in range(_CONSUMERS)]
            writers = [asyncio.create_task(self._write(_WRITES)) for _ in range(_WRITERS)]
            end = asyncio.create_task(self._end(writers, consumers))
            try:
                # Not by asyncio.timeout, which cancels before anybody can ask what is waited for.
                await asyncio.wait({end}, timeout=self._setting.seconds)
                if not end.done():
                    raise contract.broken(rule, "an end", buffer.why_blocked())
                end.result()
            except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError) as error:
                raise contract.broken(rule, "no error", repr(error)) from error
            finally:
                for task in (end, *writers, *consumers):
                    task.cancel()
                await asyncio.gather(end, *writers, *consumers, return_exceptions=True)
        stats = buffer.stats()
        rule = "every item whose write returned is written once, and no other is"
        contract.require(stats.write_count == self._written, rule, self._written, stats.write_count)
        rule = "every batch that was handed over was taken"
        contract.require(stats.delivered == self._taken, rule, self._taken, stats.delivered)

    async def _end(self, writers: Sequence[asyncio.Task[None]], consumers: Sequence[asyncio.Task[None]]) -> None:
        """Wait for the writers, write once more, and wait for the consumers."""
        await asyncio.gather(*writers)
        await self._last_write()
        self._is_over = True
        await self._buffer.finish()
        await asyncio.gather(*consumers)

    async def _write(self, count: int) -> None:
        for _ in range(count):
            items = self._choose.choice(self._setting.write_sizes)
            start, self._offered = self._offered, self._offered + items
            if await self._perhaps(self._buffer.extend(numbered_items(items, start))) is not None:
                self._written += items

    async def _last_write(self) -> None:
        """When nobody else writes any more, nothing is admitted that is not written."""
        items = self._setting.write_sizes[0]
        await self._buffer.extend(numbered_items(items, self._offered))
        self._written += items
        if self._log:
            found = self._log[-1].admitted
            rule = "writers that gave up leave nothing admitted"
            self._contract.require(found == 0, rule, 0, found)

    async def _consume(self) -> None:
        try:
            while not self._is_over:
                if await self._perhaps(self._buffer.sample()) is not None:
                    self._taken += 1
                    if self._setting.needs_versions:
                        await self._buffer.advance_version()
        except BufferClosedError:
            pass

    async def _perhaps(self, call: Coroutine[Any, Any, Any]) -> Any:
        """What a call returns; None if it was given up after some turns of the loop."""
        task = asyncio.create_task(call)
        if self._choose.random() < 0.3:
            for _ in range(self._choose.randrange(4)):
                await asyncio.sleep(0)
            task.cancel()
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()
        return None if task.cancelled() else task.result()
