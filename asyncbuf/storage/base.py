"""What the buffer asks of a storage."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from asyncbuf._plain.codec import decode, encode
from asyncbuf._runtime.arguments import count
from asyncbuf.errors import CheckpointCorruptError, SchemaError
from asyncbuf.storage._frozen import Frozen, InMemoryRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    import torch

    from asyncbuf.batch import Draw
    from asyncbuf.rows import Float64Array, Int64Array, RowRange


@dataclass(slots=True)
class Prepared:
    """Items that were checked and may be written.

    Attributes:
        count: number of items.
        nbytes: bytes that writing them moves.
        payload: what the storage that prepared them wants to find again.
        basis: what they were checked against, for ``Storage.is_current``.
        priority: the priorities that came with them, float64 ``[items]``; None if none did.
        written: called in the step in which they are in the table; None for nothing to do. Not for storages.
        table: name of the table that they go into; None if none was said.
        version: the versions of the model that made them, int64 ``[items]`` or ``[]``; None if none was said.
    """

    count: int
    nbytes: int
    payload: Any
    basis: Any = None
    priority: Float64Array | None = None
    written: Callable[[], None] | None = None
    table: str | None = None
    version: Int64Array | None = None


class Runs(enum.Enum):
    """Where a storage gathers rows.

    Attributes:
        ANYWHERE: on the event loop or in a thread, whichever is faster.
        LOOP: on the event loop, whatever the size, for a storage whose objects belong to one thread.
        THREAD: in a thread, whatever the size, for a storage that may block.
        AWAIT: asynchronously; ``begin_gather`` returns an awaitable, and ``gather`` is not called.
    """

    ANYWHERE = "on the event loop or in a thread, whichever is faster"
    LOOP = "on the event loop"
    THREAD = "in a thread"
    AWAIT = "asynchronously: begin_gather returns an awaitable"


class GatherJobs(NamedTuple):
    """A gather that threads do.

    Attributes:
        jobs: functions, to be called each once, in any thread and beside each other; at least one.
        combine: called on the event loop when all have ended well; returns what ``gather`` would.
    """

    jobs: Sequence[Callable[[], object]]
    combine: Callable[[], Any]


class Storage(ABC):
    """Where items live. Knows rows and nothing of the order in which they are written or read.

    The buffer calls the methods on its event loop, with these exceptions: it calls ``write`` in a thread when
    ``Prepared.nbytes`` says that much is copied, it gathers where ``runs`` says, and it calls ``load_rows`` and
    ``Frozen.chunks`` in a thread. Gathers may run beside each other. ``write`` never runs beside a gather or another
    ``write``.

    Attributes:
        runs: where rows are gathered. An attribute of the class, or set by its constructor.
        is_fixed: whether a row always has what it had at first, even once it was removed. A checkpoint then has no data
            of prefetched batches, and their rows are gathered again.
        trusted: whether its methods may be called in the context and the torch modes of whoever happens to call. Not
            inherited: a subclass says so itself.

    Args:
        capacity: number of rows.

    Raises:
        TypeError: the capacity is not an int.
        ValueError: the capacity is not positive.
    """

    runs: Runs = Runs.ANYWHERE
    is_fixed: ClassVar[bool] = False
    trusted: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A subclass may do otherwise: what its base declares does not hold for it."""
        super().__init_subclass__(**kwargs)
        if "trusted" not in vars(cls):
            cls.trusted = False

    def __init__(self, capacity: int) -> None:
        self._capacity = count(capacity, "capacity", 1)

    @property
    def capacity(self) -> int:
        """Number of rows."""
        return self._capacity

    @abstractmethod
    def prepare(self, items: Any) -> Prepared:
        """Check a batch of items (leading axis: items) against what is stored.

        Raises:
            SchemaError: the items do not fit; nothing has changed.
        """

    @abstractmethod
    def prepare_one(self, item: Any) -> Prepared:
        """Check one item, without a leading axis; otherwise as ``prepare``."""

    def is_current(self, prepared: Prepared) -> bool:
        """Whether items may be written as they were prepared.

        They wait for their turn in between, and another write, or a restore, may decide the structure of an item
        meanwhile. Where it did, they are prepared again.
        """
        return True

    @abstractmethod
    def write(self, prepared: Prepared, runs: Sequence[RowRange]) -> None:
        """Copy prepared items into rows. What the caller does to its items afterwards does not show."""

    @abstractmethod
    def gather(self, indices: torch.Tensor) -> Any:
        """Collect rows into fresh memory.

        Args:
            indices: int64 ``[batch]``, on the CPU, each from 0 to ``capacity - 1`` and written before.

        Returns:
            A tree whose leaves have shape ``[batch, *item]``, or what ``collate`` turns into one.
        """

    def begin_gather(self, draw: Draw, *, inline: bool, parts: int) -> Any:
        """Begin to collect the rows of a draw. Nothing is written until it has ended.

        The buffer calls this on its event loop, for every gather that it does not do there by ``gather``. This one
        gathers at once or lets one thread do it, as ``runs`` says. A storage that can do better should: several jobs
        share the work of a large gather, and an awaitable lets one wait for another machine.

        Args:
            draw: its ``indices`` are as in ``gather``; ``lengths`` may tell of ragged groups.
            inline: whether the buffer would rather have it done at once, on the event loop. Binds a storage that runs
                ``ANYWHERE``; another one does it where it runs.
            parts: how many threads may share the work, from 1.

        Returns:
            What ``gather`` returns; or ``GatherJobs`` for threads; or an awaitable of what ``gather`` returns, which is
            awaited once, in a task of its own.

        Raises:
            TypeError: a storage that runs ``AWAIT`` has no ``begin_gather`` of its own.
        """
        if self.runs is Runs.AWAIT:
            raise TypeError(f"{type(self).__name__} runs AWAIT: expected a begin_gather of its own, found none")
        if self.runs is Runs.LOOP or (inline and self.runs is Runs.ANYWHERE):
            return self.gather(draw.indices)
        found: list[Any] = []
        return GatherJobs([lambda: found.append(self.gather(draw.indices))], lambda: found[0])

    def columns(self, prepared: Prepared, paths: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
        """Leaves of prepared items, for a sampler that asked for them.

        Args:
            prepared: the items.
            paths: leaf paths, such as ``obs/step``.

        Returns:
            Arrays ``[items, ...]`` by path.

        Raises:
            SchemaError: an item has no such leaf, or one that is no number or tensor.
        """
        raise SchemaError(f"{type(self).__name__}: expected columns(), which gives {list(paths)} of items; found none")

    def expect(self, batches: int) -> None:
        """Be told how many batches will be in use at once, for a storage that keeps memory for them."""

    def will_collate(self, whether: bool) -> None:
        """Be told whether batches will be made by ``collate``, because there is no ``collate_fn``.

        Meanwhile a storage may refuse items of which ``collate`` could not make a batch.

        Args:
            whether: whether they will.
        """

    def collate(self, gathered: Any) -> Any:
        """Turn what ``gather`` returned into batched tensors, where no ``collate_fn`` was given."""
        return gathered

    @property
    def needs_collate(self) -> bool:
        """Whether ``collate`` does any work."""
        return False

    @property
    def splits_rows(self) -> bool:
        """Whether every leaf of a batch has a leading axis of rows, which draws with a shape or joins need."""
        return True

    @abstractmethod
    def gather_nbytes(self, count: int) -> int:
        """Bytes that gathering ``count`` rows moves."""

    def weigh(self, prepared: Prepared) -> int:
        """Bytes of items that will be written, for a limiter that counts them; roughly, where that takes long."""
        return prepared.nbytes

    def weigh_rows(self, rows: torch.Tensor) -> int:
        """Bytes of each of some stored items, on average: int64 ``[rows]``, at least one. After a restore."""
        return self.gather_nbytes(len(rows)) // len(rows)

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The contents as plain data (see ``asyncbuf._plain.codec.encode``), in memory of their own."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the contents.

        Raises:
            CheckpointError: the state does not fit; nothing has changed.
        """

    def freeze(self) -> Frozen:
        """The contents as they are now, to be read later while writes go on. Called on the event loop.

        This one copies everything at once. A storage that can do better should.
        """
        return InMemoryRows(encode(self.state_dict()))

    def load_rows(self, meta: Any, chunks: Iterator[dict[str, torch.Tensor]]) -> Callable[[], None]:
        """Take in what ``freeze`` gave out, without touching the contents yet. Called in a thread.

        Args:
            meta: plain data.
            chunks: named tensors, to be used up.

        Returns:
            A function that makes the new contents the live ones, and should not fail.

        Raises:
            CheckpointError: it does not fit.
        """
        state = decode(meta)
        for _ in chunks:
            raise CheckpointCorruptError(f"expected no chunks for {type(self).__name__}, found some")
        return lambda: self.load_state_dict(state)

    def loaded_chunks(self, identities: Sequence[str | None]) -> None:
        """Be told what stands for the chunks that were loaded, once they are live.

        A storage whose ``freeze`` would now give the very same chunks may give them these identities for as long as
        nothing is written into them, so that the next checkpoint need not write them again. May not fail.

        Args:
            identities: of each chunk, in order; None where that is not known.
        """

    def rows_in(self, meta: Any) -> int | None:
        """How many rows are in what ``freeze`` gave out; None if that cannot be told."""
        return None

    def release(self, rows: torch.Tensor) -> None:
        """Rows were removed, int64 ``[rows]``: what is in them is not gathered again, and may be let go."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every item. The structure of an item stays known."""
