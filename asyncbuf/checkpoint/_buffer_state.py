"""The parts of a buffer that have state: captured together, and made live together or not at all."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from asyncbuf._plain.codec import decode, encode
from asyncbuf._plain.state import check_plain, fields, natural, same
from asyncbuf._prefetch.tickets import Tickets
from asyncbuf._runtime.shield import shielded
from asyncbuf._runtime.summary import summary
from asyncbuf.checkpoint.snapshot import FORMAT, VERSION, Snapshot, checked, copied, parts_of
from asyncbuf.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError
from asyncbuf.storage import DatasetStorage, ListStorage
from asyncbuf.storage._frozen import ChunksRead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncbuf._prefetch.transforms import TransformChain
    from asyncbuf._table.durability import Durability
    from asyncbuf._table.table import Table
    from asyncbuf.storage._frozen import Frozen

# Every checkpoint has these. Other parts came later: where an older checkpoint lacks one, it starts as in a new buffer.
_OTHER_CAPACITY = " (load into a buffer of that capacity, and write its items into one of another)"
_ALWAYS_SAVED = {"writer", "sampler", "transforms", "generator"}

Complete: TypeAlias = "Callable[[Callable[[], None]], Snapshot]"


@dataclass(frozen=True, slots=True)
class Config:
    """What a buffer must have in common with a snapshot to take it over.

    Attributes:
        batch_size: number of items of a prefetched batch.
        depth: the prefetch depth.
    """

    batch_size: int | None
    depth: int


class Part:
    """A part with ``state_dict`` and ``load_state_dict``.

    Args:
        name: what it is called in a snapshot.
        target: the part.
        kinds: what a buffer must have in common with a snapshot for the part to be taken over.
    """

    def __init__(self, name: str, target: Any, kinds: dict[str, Any]) -> None:
        self.name = name
        self.kinds = kinds
        self._target = target

    def capture(self) -> Any:
        """The state now, as plain data in memory of its own."""
        return encode(self._target.state_dict(), self.name)

    def read(self, plain: Any) -> Any:
        """Check and decode a state. Called in a thread; changes nothing."""
        return decode(plain, self.name)

    def load(self, state: Any) -> None:
        """Take a state over. An error may leave it half done: the caller loads the one before again."""
        self._target.load_state_dict(state)


class _Transforms(Part):
    """The states of all transforms, in a list; None for one that has none."""

    def __init__(self, chain: TransformChain) -> None:
        kinds = {"transforms": len(chain.transforms), "stateful_transforms": chain.with_state}
        super().__init__("transforms", chain, kinds)
        self._transforms = chain.transforms

    def capture(self) -> Any:
        return [encode(state, f"transform {i}") for i, state in enumerate(self._target.states())]

    def read(self, plain: Any) -> Any:
        # They are not asked for their states: they may be at work.
        states = super().read(plain)
        if not isinstance(states, list) or len(states) != len(self._transforms):
            raise CheckpointCorruptError(f"transforms: expected {len(self._transforms)} states, found something else")
        stateless = [i for i, state in enumerate(states) if state is not None and i not in self._target.with_state]
        if stateless:
            raise CheckpointCorruptError(f"transforms: expected no states of {stateless}, which have none; found some")
        return states

    def load(self, state: Any) -> None:
        for i in self._target.with_state:
            transform = self._transforms[i]
            if state[i] is not None:
                transform.load_state_dict(state[i])
            elif transform.state_dict() is not None:
                raise CheckpointCorruptError(f"transforms: expected a state of transform {i}, found None")


class _Generator(Part):
    """The generator of the draws."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__("generator", generator, {})

    def capture(self) -> Any:
        return {"device": self._target.device.type, "state": self._target.get_state()}

    def read(self, plain: Any) -> Any:
        device, state = fields(super().read(plain), "generator", device=str, state=torch.Tensor)
        same(device, self._target.device.type, "kind of generator")
        try:
            torch.Generator(self._target.device).set_state(state)
        except (RuntimeError, TypeError) as error:
            raise CheckpointCorruptError(f"generator: expected the state of a generator, found {error}") from error
        return state

    def load(self, state: Any) -> None:
        self._target.set_state(state)


class BufferState:
    """All parts of a buffer that have state, each named once.

    Args:
        table: storage, writer, sampler and generator.
        chain: the transforms.
        config: the settings of the buffer.

    Attributes:
        is_ordered: whether there are transforms with a state, which see the tickets in order.
    """

    def __init__(self, table: Table, chain: TransformChain, config: Config) -> None:
        self.table = table
        self.config = config
        self.steps = len(chain.steps)
        self.is_ordered = bool(chain.ordered)
        # What can be made again is not saved. A transform with a state has counted its batches, and sees none twice.
        self._saves_batches = self.is_ordered or not table.storage.is_fixed
        self._transforms = _Transforms(chain)
        self.parts: list[Part] = [
            *(
                Part(name, part, {name: type(part).__name__} if name in _ALWAYS_SAVED else {})
                for name, part in table.components()
            ),
            self._transforms,
            _Generator(table.generator),
        ]
        self.fresh = {part.name: shielded(part.capture) for part in self.parts if part.name not in _ALWAYS_SAVED}

    @property
    def kinds(self) -> dict[str, Any]:
        """What a snapshot must have in common with the buffer, whatever its settings."""
        kinds = {"storage": type(self.table.storage).__name__}
        for part in self.parts:
            kinds |= part.kinds
        return kinds

    def capture(self, tickets: Tickets) -> Complete:
        """Take a snapshot, in one step: called in a turn of the history in which nothing is being written or gathered.

        Args:
            tickets: the tickets of the same moment.

        Returns:
            A function that completes it by copying the tickets, to be called in a thread. It calls its argument after
            each ticket, which must not be handed over before that.

        Raises:
            CheckpointError: a part holds something that cannot be saved.
        """
        taken = self.take()
        self.take_transforms(taken)
        return lambda copied: taken.snapshot(tickets, copied)

    def take(self) -> Taken:
        """Take the rows and every part but the transforms, as ``capture`` does."""
        head = {
            "format": FORMAT,
            "version": VERSION,
            "config": {
                **self.kinds,
                "capacity": self.table.storage.capacity,
                "batch_size": self.config.batch_size,
            },
        }
        parts = {part.name: None if part is self._transforms else shielded(part.capture) for part in self.parts}
        frozen = shielded(self.table.storage.freeze)
        return Taken(head, parts, frozen, _committed(self.table.durability), saves_batches=self._saves_batches)

    def take_transforms(self, taken: Taken) -> None:
        """Take the states of the transforms, none of which may be at work that has one."""
        taken.parts[self._transforms.name] = shielded(self._transforms.capture)


class Taken:
    """What was taken of a buffer at one point of the history, beside its tickets.

    Attributes:
        parts: the states of its parts by name.
    """

    def __init__(
        self,
        head: dict[str, Any],
        parts: dict[str, Any],
        frozen: Frozen,
        committed: Callable[[], None],
        *,
        saves_batches: bool,
    ) -> None:
        self.parts = parts
        self._committed = committed
        self._head = head
        self._frozen = frozen
        self._saves_batches = saves_batches

    def snapshot(self, tickets: Tickets, copied: Callable[[], None]) -> Snapshot:
        """All of it, with copies of the tickets.

        Args:
            tickets: those of the same moment.
            copied: called after each.
        """
        queue = tickets if self._saves_batches else tickets.without_data()
        return Snapshot({**self._head, **self.parts, "prefetch": queue.plain(copied)}, self._frozen, self._committed)


def _committed(durability: Durability) -> Callable[[], None]:
    """What tells a buffer, from any thread, that a checkpoint of this very moment is committed."""
    mark, loop = durability.mark(), asyncio._get_running_loop()

    def committed() -> None:
        try:
            if loop is not None:
                loop.call_soon_threadsafe(durability.committed, mark)
                return
        except RuntimeError:  # the event loop was closed: nobody waits in it
            pass
        durability.committed(mark)

    return committed


class RestorePlan:
    """A snapshot that was read, checked and decoded for one buffer, and can be made live in one step.

    Making it may take long and belongs in a thread; it changes nothing that is live.

    Args:
        snapshot: the snapshot.
        live: the parts that will take it over.
        elastic: whether another prefetch depth and batch size are accepted.
        moves: whether the snapshot is used for nothing else, so that its memory may be taken over.

    Raises:
        CheckpointError: the snapshot is damaged, too new, or belongs to another kind of buffer.
    """

    def __init__(self, snapshot: Snapshot, live: BufferState, *, elastic: bool, moves: bool) -> None:
        self._live = live
        try:
            self._read(snapshot, elastic=elastic, moves=moves)
        except CheckpointError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise CheckpointCorruptError(f"snapshot: expected the state of a buffer, found {error!r}") from error

    def _read(self, snapshot: Snapshot, *, elastic: bool, moves: bool) -> None:
        self._is_committed = snapshot.is_committed
        live, storage = self._live, self._live.table.storage
        state, rows = snapshot.contents
        state, meta = checked(state), rows.meta
        check_plain(state, "snapshot")
        check_plain(meta, "storage")
        if not moves:
            state, meta = copied(state), copied(meta)
        self._match(state, elastic=elastic)
        self._has_tickets = "prefetch" in state
        self._counts_tickets = self._has_tickets and "limiter" not in state  # of the first release
        self._saved_batch_size: int | None = state["config"]["batch_size"]
        self._states = [
            (part, part.read(state[part.name] if part.name in state else copied(live.fresh[part.name])))
            for part in live.parts
        ]
        self.tickets = Tickets(0, live.config.depth, 0, [])
        if "prefetch" in state:
            self.tickets = Tickets.from_plain(
                state["prefetch"],
                live.config.depth,
                steps=live.steps,
                capacity=storage.capacity,
                batch_size=self._saved_batch_size,
                are_items=isinstance(storage, DatasetStorage | ListStorage) and storage.needs_collate,
                elastic=elastic,
            )
        self._row_count = storage.rows_in(meta)
        self._chunks = ChunksRead(rows)
        self._make_rows_live = storage.load_rows(meta, map(_checked_chunk, self._chunks.tensors()))

    def _match(self, state: dict[str, Any], *, elastic: bool) -> None:
        """Compare parts, kinds and settings."""
        live, config = self._live, state.get("config")
        there, known = parts_of(state), [part.name for part in live.parts]
        if unknown := sorted(map(str, set(there) - set(known))):
            raise CheckpointMismatchError(f"snapshot: expected the parts {known}, found others beside them: {unknown}")
        # A part that is not in the snapshot has no kind there.
        later = {
            kind for part in live.parts if part.name in live.fresh and part.name not in there for kind in part.kinds
        }
        expected = {name: kind for name, kind in live.kinds.items() if name not in later}
        if not isinstance(config, dict) or config.keys() != {*expected, "capacity", "batch_size"}:
            raise CheckpointCorruptError(f"snapshot: expected the kinds of its parts, found {config!r}")
        for name, kind in expected.items():
            same(config[name], kind, name)
        same(config["capacity"], live.table.storage.capacity, "capacity", _OTHER_CAPACITY)
        batch_size = config["batch_size"]
        if batch_size is not None:
            natural(batch_size, "snapshot: expected batch_size", least=1)
        if not elastic:
            same(batch_size, live.config.batch_size, "batch_size (elastic=True accepts another)")
        if missing := sorted(set(known) - set(there) - live.fresh.keys()):
            raise CheckpointCorruptError(f"snapshot: expected the parts {known}, found none of {missing}")

    def adopt(self) -> Tickets:
        """Make it live: all of it or, with an error, none.

        Returns:
            The tickets that go with it.
        """
        before = [(part, shielded(part.capture)) for part, _ in self._states]
        reservations = self._live.table.reservations
        open_before = reservations.kept()
        try:
            for part, state in self._states:
                with _named(part.name):
                    shielded(part.load, state)
            with _named("snapshot"):
                tickets = shielded(self._verified)
            shielded(self._make_rows_live)
            shielded(self._live.table.storage.loaded_chunks, self._chunks.identities)
        except BaseException:
            for part, old in before:
                shielded(part.load, part.read(old))
            reservations.put_back(open_before)
            self._live.table.changed()
            raise
        reservations.let_go(open_before)
        self._live.table.durability.restored(is_durable=self._is_committed)
        return tickets

    def _verified(self) -> Tickets:
        """The tickets, if they, the rows and the states of the parts go together."""
        table = self._live.table
        if self._counts_tickets:
            table.limits.count_again(self.tickets.number, self._saved_batch_size or 0)
        elif not self._has_tickets:
            # Numbers go on, and with them the seeds of transforms. Which of the tickets were delivered is not known.
            drawn = table.limits.drawn
            self.tickets = replace(self.tickets, number=drawn, delivered=drawn)
            table.tally.dropped = {}
        elif table.limits.drawn != self.tickets.number:
            raise CheckpointCorruptError(
                f"limiter: expected {self.tickets.number} tickets drawn, as in the queue, found {table.limits.drawn}"
            )
        table.verify(table.storage.capacity if self._row_count is None else self._row_count)
        table.tally.verify_dropped(self.tickets.dropped)
        return self.tickets.drawn_from(table.writer.write_count)


def _checked_chunk(chunk: Any) -> dict[str, torch.Tensor]:
    check_plain(chunk, "storage")
    if not isinstance(chunk, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in chunk.values()):
        raise CheckpointCorruptError(f"storage: expected a chunk of named tensors, found {summary(chunk)}")
    return chunk


@contextmanager
def _named(part: str) -> Iterator[None]:
    """What a part of the user raises in the block becomes an error that names the part.

    Raises:
        CheckpointError: it was raised, or stands for what was.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointMismatchError(f"{part}: expected a state that it takes, found {error!r}") from error
