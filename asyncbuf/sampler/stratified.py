"""Batches in which each class of the items has a fixed share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._plain.integers import are_distinct
from asyncbuf._plain.savable import tensor_problem
from asyncbuf._plain.state import fields, int64s, same
from asyncbuf._runtime.arguments import shown
from asyncbuf.batch import Draw
from asyncbuf.errors import CheckpointCorruptError, SchemaError
from asyncbuf.rows import NotYet
from asyncbuf.sampler._class_rows import ClassRows
from asyncbuf.sampler._shares import apportioned, checked_shares
from asyncbuf.sampler.base import Sampler

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncbuf.rows import Answer, Float64Array, Int64Array, Rows, WriteEvent

WHEN_EMPTY = ("wait", "others")
_MOST = 2**63


class StratifiedSampler(Sampler):
    """Draws from each class of the items a fixed share of the rows of every batch.

    A class is a value of a field of the items, an integer or a bool. Within a class each row is drawn uniformly, with
    replacement. The number of rows of each class follows from its share alone, without chance. What a batch cannot
    have, because no row can be divided, the next ones make up for: of all rows so far, each class has its share,
    rounded up or down. So of ten batches of 32 rows, a class with a share of 0.1 has 32 rows in all, three or four in
    each batch.

    ``batch.info["class"]`` has the class of each row, int64 ``[batch]``. Rows of a class stand together, the smallest
    class first. A draw takes the same time however much is stored.

    Args:
        class_key: path of the field, such as ``"label"`` or ``"meta/terminated"``.
        shares: share of each class, such as ``{0: 0.75, 1: 0.25}``; their sum is 1. Items of other classes are not
            drawn. None for the same share for all classes of which an item is stored, whichever they are.
        when_empty: what happens while no item of a class with a share is stored: ``"wait"``, consumers wait for one;
            ``"others"``, the other classes have its share, each in proportion to its own.

    Raises:
        TypeError, ValueError: an argument is not of the kind or in the range that is expected.
    """

    trusted: bool = True
    counts_draws: bool = False

    def __init__(self, class_key: str, shares: Mapping[int, float] | None = None, *, when_empty: str = "wait") -> None:
        if not isinstance(class_key, str):
            raise TypeError(f"class_key: expected the path of a field, found {shown(class_key)}")
        if not isinstance(when_empty, str) or when_empty not in WHEN_EMPTY:
            raise ValueError(f"when_empty: expected one of {list(WHEN_EMPTY)}, found {shown(when_empty)}")
        self._key = class_key
        self.columns: tuple[str, ...] = (class_key,)
        self._when_empty = when_empty
        self._shares = None if shares is None else _by_class(shares)
        self._take_over(self._none(0))

    def _none(self, capacity: int) -> ClassRows:
        return ClassRows(capacity, self._shares or ())

    def _take_over(self, rows: ClassRows) -> None:
        self._rows = rows
        for value in self._shares or ():
            rows.slot(value)
        self._ahead: Float64Array = np.zeros(len(rows.values))  # by slot: what is owed to a class, below 1
        self._seen = -1  # the changes of classes as of when these were found out:
        self._slots: Int64Array = np.zeros(0, np.int64)  # those that are drawn, by class
        self._parts: Float64Array = np.zeros(0)  # their shares
        self._classes: Int64Array = np.zeros(0, np.int64)

    # -- what happens to rows -----------------------------------------------------------------------------------------

    def check_write(self, event: WriteEvent) -> None:
        """Refuse items whose class is no integer."""
        column = event.columns[self._key]
        if column.size != len(column):
            shape = list(column.shape[1:])
            raise SchemaError(f"{self._key}: expected one class per item, found items of shape {shape}")
        is_large = column.dtype.kind == "u" and int(column.max(initial=0)) >= _MOST
        if column.dtype.kind not in "iub" or is_large:
            found = "numbers from 2**63 on" if is_large else column.dtype
            raise SchemaError(f"{self._key}: expected integers or bools that are classes, found {found}")

    def wrote(self, event: WriteEvent) -> None:
        """Note the classes of new rows."""
        if not self._rows.capacity:
            self._take_over(self._none(event.table.capacity))
        written = event.rows.numpy()
        self._rows.discard(written)
        if len(written):
            self._rows.add(written, event.columns[self._key].reshape(-1).astype(np.int64))

    def removed(self, indices: torch.Tensor, rows: Rows) -> None:
        """Rows without an item have no class."""
        self._rows.discard(indices.numpy())

    def clear(self) -> None:
        """Forget all rows."""
        self._rows.clear()

    # -- drawing ------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Find out which classes are drawn."""
        rows, shares = self._rows, self._shares
        if self._seen == rows.changes:
            return
        if len(self._ahead) < len(rows.values):
            self._ahead = np.append(self._ahead, np.zeros(len(rows.values) - len(self._ahead)))
        self._ahead[rows.fresh] = 0.0  # a class that has come, or has come back, is owed nothing
        rows.fresh.clear()
        found = []
        for slot in rows.slots:
            value = rows.values[slot]
            share = 1.0 if shares is None else shares.get(value, 0.0)
            if share and rows.sizes[slot]:
                found.append((value, slot, share))
        self._classes = np.array([value for value, _, _ in found], np.int64)
        self._slots = np.array([slot for _, slot, _ in found], np.int64)
        parts = np.array([share for _, _, share in found])
        self._parts = parts / parts.sum() if found else parts
        self._seen = rows.changes

    def may_draw(self, rows: Rows, batch_size: int) -> Answer:
        """Not before there is an item of each class with a share; with ``when_empty="others"``, of any."""
        self._look()
        wanted = [] if self._shares is None else [value for value, share in self._shares.items() if share]
        if self._when_empty == "wait" and len(self._classes) < len(wanted):
            missing = sorted(set(wanted) - set(self._classes.tolist()))
            return NotYet(f"no item of class {missing[0]} is stored ({len(missing)} of {len(wanted)} classes lack one)")
        return True if len(self._classes) else NotYet(f"none of {rows.size} items is of a class with a share")

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        """``batch_size`` rows, of each class its share.

        Raises:
            ValueError: no item of a class is stored.
        """
        answer = self.may_draw(rows, batch_size)
        if not answer:
            raise ValueError(f"expected items of all classes: {answer.reason}")
        slots = self._slots
        owed = self._ahead[slots] + batch_size * self._parts
        counts = apportioned(owed, self._parts, batch_size)
        self._ahead[slots] = owed - counts
        places = torch.rand(batch_size, dtype=torch.float64, generator=generator, device=generator.device)
        of_each = np.repeat(slots, counts)
        positions = (places.cpu().numpy() * self._rows.sizes.take(of_each)).astype(np.int64)
        found = self._rows.take(of_each, positions)
        return Draw(torch.from_numpy(found), {"class": torch.from_numpy(np.repeat(self._classes, counts))})

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The rows of each class by position, and what is owed to each."""
        self._look()
        rows = self._rows
        order = rows.slots
        parts = [rows.rows(slot) for slot in order]
        return {
            "shares": self._plain_shares,
            "when_empty": self._when_empty,
            "capacity": rows.capacity,
            "classes": torch.tensor([rows.values[slot] for slot in order], dtype=torch.int64),
            "sizes": torch.from_numpy(rows.sizes[order]),
            "rows": torch.from_numpy(np.concatenate([np.empty(0, np.int64), *parts])),
            "owed": torch.from_numpy(self._ahead[order]),
        }

    @property
    def _plain_shares(self) -> list[list[float]] | None:
        return None if self._shares is None else [[value, share] for value, share in self._shares.items()]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the classes that were saved."""
        name = type(self).__name__
        tensors = dict.fromkeys(("classes", "sizes", "rows", "owed"), torch.Tensor)
        kind = type(None) if self._shares is None else list
        kinds: dict[str, type] = dict(shares=kind, when_empty=str, capacity=int)
        shares, when_empty, capacity, *found = fields(state, name, **kinds, **tensors)
        same(shares, self._plain_shares, f"{name}: shares")
        same(when_empty, self._when_empty, f"{name}: when_empty")
        classes, sizes, stored = (
            int64s(tensor, f"{name}: expected {each}") for each, tensor in zip(tensors, found[:3], strict=False)
        )
        owed = found[3]
        is_column = owed.dtype is torch.float64 and owed.ndim == 1 and tensor_problem(owed) is None
        if not is_column or not len(classes) == len(sizes) == len(owed) or capacity >= 2**48:
            raise CheckpointCorruptError(f"{name}: expected a size and a float64 number for each class, found others")
        is_sound = bool((np.diff(classes) > 0).all() and (sizes >= 0).all() and sizes.sum() == len(stored))
        if not is_sound or not are_distinct(stored, capacity) or not bool((owed.abs() <= 1.0 + 1e-6).all()):
            raise CheckpointCorruptError(f"{name}: expected different rows, class by class, found others")
        rows = self._none(capacity)
        is_there = (sizes > 0) | np.isin(classes, list(self._shares or ()))
        slots = [rows.slot(value) for value in classes[is_there].tolist()]
        if len(stored):
            rows.add(stored, np.repeat(classes, sizes))
        self._take_over(rows)
        self._look()
        self._ahead[slots] = owed.detach().cpu().numpy()[is_there]

    def verify(self, rows: Rows) -> None:
        """Refuse classes of other rows than the valid ones."""
        name, known = type(self).__name__, self._rows.known
        if self._rows.capacity not in (0, rows.capacity):
            raise CheckpointCorruptError(
                f"{name}: expected classes of {rows.capacity} rows, found them of {self._rows.capacity}"
            )
        if len(known) != rows.size or not bool(rows.contains(torch.from_numpy(known)).all()):
            raise CheckpointCorruptError(
                f"{name}: expected classes of the {rows.size} valid rows, found them of {len(known)} rows"
            )


def _by_class(shares: Mapping[int, float]) -> dict[int, float]:
    """Shares by class, in the order of the classes."""
    found = checked_shares(shares, "shares", example="{0: 0.75, 1: 0.25}")
    for value in found:
        if not isinstance(value, int | np.integer) or not -_MOST <= value < _MOST:
            raise TypeError(f"shares: expected integers or bools as classes, found {shown(value)}")
    return {int(value): found[value] for value in sorted(found)}
