"""The methods of a buffer that change what is stored. They only check and delegate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import torch

from asyncbuf._ingest.claims import KeyClaim, checked_key
from asyncbuf._ingest.n_step_adder import NStepAdder
from asyncbuf._runtime.arguments import instance_of
from asyncbuf.sampler._tracker import ItemKeys
from asyncbuf.sampler.n_step import NStep

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from asyncbuf._assembly import Assembly
    from asyncbuf._ingest.write_path import WritePath
    from asyncbuf._table.deliveries import Key
    from asyncbuf._table.gate import HistoryGate
    from asyncbuf._table.table import Table
    from asyncbuf.batch import Batch


class WriteMethods:
    """The part of a buffer that takes items in and lets them go."""

    _parts: Assembly
    _table: Table
    _writes: WritePath
    _gate: HistoryGate
    _prepare: Callable[[Any], Any]
    _prepare_one: Callable[[Any], Any]

    def _turn(self, *, within_frozen: bool = False) -> Awaitable[None]:
        raise NotImplementedError

    @overload
    async def extend(
        self, items: Any, *, priority: Any = None, table: str | None = None, version: Any = None, key: None = None
    ) -> torch.Tensor: ...
    @overload
    async def extend(
        self, items: Any, *, priority: Any = None, table: str | None = None, version: Any = None, key: Key
    ) -> bool: ...
    async def extend(
        self,
        items: Any,
        *,
        priority: Any = None,
        table: str | None = None,
        version: Any = None,
        key: Key | None = None,
    ) -> torch.Tensor | bool:
        """Write items: all of them or, with an error, none.

        A call that is cancelled while it waits for its turn has written none. Once a thread copies them, which it does
        with more than 1 MiB, all of them are written before the call ends as cancelled. With a key it may simply be
        made again.

        Args:
            items: a tree whose leaves have shape ``[items, *item]``, which are copied; for ``ListStorage`` a sequence
                of items, which are kept as they are. Of more items than the capacity the last ones stay.
            priority: for a sampler with priorities, those of the items: float ``[items]``, or one number for all. None
                leaves them to the sampler.
            table: with a ``TableWriter``, name of the table that the items go into.
            version: with ``staleness``, the versions of the model that made the items: ints ``[items]``, or one for
                all. None for the current one, or that in the field ``version_key``. Items that are too old do not stay.
            key: what the whole write is known by, a str or an int of 64 bits. If it is among the last ``key_window``
                keys that were written, nothing is written, and ``stats().ledger.duplicates`` counts it.

        Returns:
            The rows of the items that stay, in order: int64 ``[min(items, capacity)]``. With a key instead: whether it
            was new, so that the items were written.

        Raises:
            SchemaError: keys, shapes or dtypes differ from those of the items before, or there is no item.
            BufferClosedError: the buffer was closed, or ``finish`` was called.
            BufferFailedError: the background work ended.
            TypeError, ValueError: there is no such table, or the key is none.
        """
        await self._turn()
        if key is not None:
            return await self._write_once(self._prepare, items, key, priority, table, version)
        placement = await self._writes.write(self._prepare, items, priority, table, version=version)
        return torch.from_numpy(placement.rows)

    @overload
    async def add(
        self, item: Any, *, priority: Any = None, table: str | None = None, version: Any = None, key: None = None
    ) -> int | None: ...
    @overload
    async def add(
        self, item: Any, *, priority: Any = None, table: str | None = None, version: Any = None, key: Key
    ) -> bool: ...
    async def add(
        self,
        item: Any,
        *,
        priority: Any = None,
        table: str | None = None,
        version: Any = None,
        key: Key | None = None,
    ) -> int | bool | None:
        """Write one item, whose leaves have no leading axis; otherwise as ``extend``.

        Returns:
            Its row; None if the writer does not keep it. With a key instead: whether it was new.
        """
        await self._turn()
        if key is not None:
            return await self._write_once(self._prepare_one, item, key, priority, table, version)
        runs = (await self._writes.write(self._prepare_one, item, priority, table, version=version)).runs
        return runs[0].row if runs else None

    async def _write_once(
        self, prepare: Callable[[Any], Any], items: Any, key: Any, priority: Any, table: str | None, version: Any
    ) -> bool:
        """Write what has a key: whether it was new."""
        claim = KeyClaim(self._table.deliveries, self._table.tally, checked_key(key))
        return await self._writes.write_once(claim, prepare, items, priority, table, version)

    def adder(
        self,
        returns: NStep,
        *,
        end_key: str | Sequence[str] | None = None,
        trajectory_key: str | None = None,
        table: str | None = None,
    ) -> NStepAdder:
        """Make what writes items with n-step returns into this buffer.

        Args:
            returns: the number of steps, the discount and the fields.
            end_key: path of the field that is true for the last item of a trajectory, or several such, as in
                ``("terminated", "truncated")``.
            trajectory_key: path of an integer field that tells trajectories apart, or environments.
            table: name of the table that the items go into, for a writer with tables.

        Raises:
            TypeError, ValueError: an argument is not of the kind that is expected.
        """
        instance_of(returns, NStep, "returns", example="NStep(3, gamma=0.99)", arguments="n, gamma")
        if table is not None:
            self._table.check_into(table)
        keys = ItemKeys(end_key, trajectory_key)
        return NStepAdder(returns, keys, self._prepare, self._writes, self._turn, table)

    async def finish(self) -> None:
        """Say that no more items will come. Whoever waits for data that cannot come any more is told at once.

        ``extend`` and ``add`` raise from here on, those that wait too. Batches can be had as long as enough items are
        stored.
        """
        await self._turn()
        await self._gate.apply(self._parts.finish, exclusive=False)

    async def empty(self) -> None:
        """Forget every item, and the tickets drawn from them; ``write_count`` and the numbers of tickets go on."""
        await self._turn()
        await self._gate.apply(self._parts.clear, exclusive=True)

    async def remove(self, batch_or_indices: Batch[Any] | Any) -> int:
        """Remove items before they are overwritten. Their rows are free for the next items.

        Batches that were drawn before still have them. A pass goes on without those that it has not come to.

        Args:
            batch_or_indices: a batch, of which rows that were replaced since it was drawn are left out; or rows,
                integers ``[n]``, of which those without an item are left out. Each counts once.

        Returns:
            How many items were removed.

        Raises:
            TypeError: the rows are not integers.
            IndexError: one is not a row of the storage.
        """
        await self._turn()
        return await self._writes.remove(batch_or_indices)

    async def update_priority(self, batch_or_indices: Batch[Any] | Any, priority: Any) -> None:
        """Tell the sampler new priorities; samplers without priorities ignore them.

        Rows that were replaced or removed since the batch was drawn are left out, and counted in
        ``stats().stale_priorities``. That needs the batch, or the very tensor ``batch.indices``: it is not known when
        other rows were drawn.

        Args:
            batch_or_indices: a batch; or rows, as in ``batch.indices``: integers ``[n]``.
            priority: float ``[n]``, in the order of the rows, or one number for all.

        Raises:
            TypeError, ValueError, IndexError: they do not fit each other or the storage.
        """
        await self._turn()
        await self._writes.update_priority(batch_or_indices, priority)
