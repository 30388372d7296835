"""The storage of a user, as it is called: in an empty context and plain torch modes, as all code of a user."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from asyncbuf._runtime.shield import shielded, shielded_wait
from asyncbuf.storage.base import GatherJobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from asyncbuf.batch import Draw
    from asyncbuf.rows import RowRange
    from asyncbuf.storage.base import Prepared, Runs, Storage


class StorageCalls:
    """What is asked of a storage while items and batches come and go. Storages that are ours need no shield.

    Args:
        storage: the storage.

    Attributes:
        runs: where it gathers.
        prepare: checks a batch of items.
        prepare_one: checks one item.
        is_current: whether items may be written as they were prepared.
        write: copies prepared items into rows.
        gather: collects rows.
        gather_nbytes: bytes that gathering so many rows moves.
        begin_gather: begins to collect the rows of a draw.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.runs: Runs = storage.runs
        ours = storage.trusted
        self.prepare: Callable[[Any], Prepared] = _calls(storage.prepare, ours)
        self.prepare_one: Callable[[Any], Prepared] = _calls(storage.prepare_one, ours)
        self.is_current: Callable[[Prepared], bool] = _calls(storage.is_current, ours)
        self.write: Callable[[Prepared, Sequence[RowRange]], None] = _calls(storage.write, ours)
        self.gather: Callable[[torch.Tensor], Any] = _calls(storage.gather, ours)
        self.gather_nbytes: Callable[[int], int] = _calls(storage.gather_nbytes, ours)
        self.begin_gather: Callable[..., Any] = (
            storage.begin_gather if ours else functools.partial(_begin_gather, storage)
        )

    @property
    def needs_collate(self) -> bool:
        """Whether what it gathers is a list of items."""
        return self._storage.needs_collate

    @property
    def splits_rows(self) -> bool:
        """Whether batches have an axis of rows."""
        return self._storage.splits_rows


def _begin_gather(storage: Storage, draw: Draw, *, inline: bool, parts: int) -> Any:
    found = shielded(functools.partial(storage.begin_gather, draw, inline=inline, parts=parts))
    if isinstance(found, GatherJobs):
        jobs = [functools.partial(shielded, job) for job in found.jobs]
        return GatherJobs(jobs, functools.partial(shielded, found.combine))
    return shielded_wait(lambda: found) if inspect.isawaitable(found) else found


def _calls(method: Callable[..., Any], ours: bool) -> Callable[..., Any]:
    return method if ours else functools.partial(shielded, method)
