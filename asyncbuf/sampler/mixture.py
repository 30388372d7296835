"""Batches out of several tables: offline with online data, or whatever else is kept apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from asyncbuf._plain.load_all import load_all
from asyncbuf._plain.savable import tensor_problem
from asyncbuf._plain.state import fields, same
from asyncbuf._runtime.arguments import instance_of, shown
from asyncbuf.errors import CheckpointCorruptError
from asyncbuf.rows import NotYet
from asyncbuf.sampler._merged import Drawn, merged, parted
from asyncbuf.sampler._proportional import ProportionalSampler
from asyncbuf.sampler._shares import apportioned, checked_shares
from asyncbuf.sampler._table_part import TablePart, local
from asyncbuf.sampler.base import Sampler
from asyncbuf.sampler.random import RandomSampler
from asyncbuf.sampler.trajectories import TrajectorySampler

if TYPE_CHECKING:
    from asyncbuf.batch import Draw
    from asyncbuf.rows import Answer, Float64Array, Int64Array, Rows, WriteEvent

Fractions = Mapping[str, float] | Callable[[int], Mapping[str, float]]

ORDERS = ("deterministic", "random")
WHEN_EMPTY = ("wait", "others")
_EXAMPLE = '{"offline": 0.5, "online": 0.5}'
# Fractions add up to 1, but for their rounding.
_TOLERANCE = 1e-6
_OPTIONAL = ("check_write", "handed_over", "dropped", "leaving", "finished", "group_priority")


class _Plan(NamedTuple):
    """What the next draw is to be.

    Attributes:
        batch_size: number of its rows.
        units: number of its units: of slices, or of rows.
        parts: the fraction of each table, 0 for those that take no part.
        counts: units of each table, -1 for those that take no part; for a random order, as many as it could get.
        rows: rows of each table.
        unit: rows of a unit.
    """

    batch_size: int
    units: int
    parts: Float64Array
    counts: Int64Array
    rows: list[int]
    unit: int


class MixtureSampler(Sampler):
    """Draws a fraction of each batch from each table of a ``TableWriter``, by a sampler of its own.

    Such as half of it from offline and half from online data (Ball et al., Efficient Online Reinforcement Learning with
    Offline Data, 2023)::

        tables = {"offline": 1_000_000, "online": 100_000}
        sampler = MixtureSampler({"offline": RandomSampler(), "online": PrioritizedSampler()})
        buffer = ReplayBuffer(TensorStorage(1_100_000), writer=TableWriter(tables), sampler=sampler, batch_size=256)

    With ``order="deterministic"`` the number of rows of each table follows from the fractions alone. What a batch
    cannot have, because no row can be divided, the next ones make up for: of all rows so far, each table has its
    fraction, rounded up or down. With ``"random"`` each row is of a table by chance. Rows of a table stand together, in
    the order of the tables.

    The sampler of a table works as in a buffer of its own: it sees the writes, removals, priorities and tickets of that
    table only, and its rows count from 0. Where it draws slices, so do those of all other tables, of the same length,
    and the fractions are fractions of slices. Where its pass ends, the next one begins within the batch; ``epoch()``
    is not for mixtures.

    ``batch.info["table"]`` is the position of the table of each row (of each slice), in the order of the tables: int64.
    What samplers say of their rows is put together if all say it, or if it is a tensor with a value for each row or
    slice: rows of the others then have NaN, -1 (0 if unsigned) or False, but 1 as their ``weights``. Anything else is
    in ``batch.info["offline/name"]``.

    Args:
        samplers: the sampler of each table; or short for ``RandomSampler()`` in all tables, their fractions.
        fractions: fraction of each table; their sum is 1. Or a function of the number of draws so far that gives them,
            such as ``lambda draws: {"offline": (p := max(0.1, 1 - draws / 1e5)), "online": 1 - p}``. None for equal
            ones.
        order: whether the number of rows of each table is ``"deterministic"`` or ``"random"``.
        when_empty: what happens while a table with a fraction has no item, or its sampler waits: ``"wait"``, consumers
            wait, too; ``"others"``, the other tables have its fraction, each in proportion to its own. With
            ``order="random"``, a sampler waits until it could fill a whole batch alone.

    Raises:
        TypeError, ValueError: an argument is not of the kind or in the range that is expected.
    """

    trusted: bool = True

    def __init__(
        self,
        samplers: Mapping[str, Sampler] | Mapping[str, float],
        fractions: Fractions | None = None,
        *,
        order: str = "deterministic",
        when_empty: str = "wait",
    ) -> None:
        self._samplers, given = _checked_samplers(samplers)
        if given is not None and fractions is not None:
            raise ValueError("fractions: expected none beside those in place of samplers, found both")
        for name, value, known in (("order", order, ORDERS), ("when_empty", when_empty, WHEN_EMPTY)):
            if not isinstance(value, str) or value not in known:
                raise ValueError(f"{name}: expected one of {list(known)}, found {shown(value)}")
        self._order, self._when_empty = order, when_empty
        self._draws = 0
        self._parts: list[TablePart] = []
        self._ahead: Float64Array = np.zeros(len(self._samplers))  # what is owed to each table, below 1
        self._plan: _Plan | None = None
        self._whole: dict[int, _Plan] = {}  # by batch size: plans that leave nothing owed, if nothing is
        equal = dict.fromkeys(self._samplers, 1.0 / len(self._samplers))
        self.fractions = given or equal if fractions is None else fractions
        everyone = list(self._samplers.values())
        self.columns: tuple[str, ...] = tuple(dict.fromkeys(path for each in everyone for path in each.columns))
        asked = {hook for hook in _OPTIONAL if any(hook in sampler.hooks for sampler in everyone)}
        vars(self)["hooks"] = type(self).hooks - (set(_OPTIONAL) - asked)
        if not all(sampler.trusted for sampler in everyone):
            vars(self)["trusted"] = False

    # -- settings -----------------------------------------------------------------------------------------------------

    @property
    def fractions(self) -> Mapping[str, float]:
        """The fractions of the next draw. May be set to others or to a function, as in the constructor."""
        return dict(zip(self._samplers, self._shares().tolist(), strict=True))

    @fractions.setter
    def fractions(self, fractions: Fractions) -> None:
        schedule = fractions if callable(fractions) else None
        found = self._checked(fractions(self._draws) if callable(fractions) else fractions)
        self._schedule, self._fixed = schedule, found
        self._plan, self._whole = None, {}

    def _checked(self, fractions: Any) -> Float64Array:
        found = checked_shares(fractions, "fractions", example=_EXAMPLE)
        if found.keys() != self._samplers.keys():
            raise ValueError(f"fractions: expected the tables {list(self._samplers)}, found {shown(list(found))}")
        return np.array([found[name] for name in self._samplers])

    def _shares(self) -> Float64Array:
        return self._fixed if self._schedule is None else self._checked(self._schedule(self._draws))

    @property
    def samplers(self) -> Mapping[str, Sampler]:
        """The sampler of each table."""
        return dict(self._samplers)

    # -- what happens to rows -----------------------------------------------------------------------------------------

    def use_tables(self, tables: Mapping[str, range]) -> None:
        """Take the rows of the tables from the writer.

        Raises:
            ValueError: the writer has other tables.
        """
        if set(tables) != set(self._samplers):
            raise ValueError(
                f"sampler: expected a TableWriter with the tables {list(self._samplers)}, as in writer=TableWriter("
                f"{{{next(iter(self._samplers))!r}: 1000, ...}}); found {shown(list(tables)) if tables else 'none'}"
            )
        if self._parts and all(part.held == tables[part.name] for part in self._parts):
            return
        if any(not part.is_new for part in self._parts):
            raise ValueError("sampler: expected the tables that it has drawn from, found others of the same names")
        self._parts = [TablePart(name, sampler, tables[name]) for name, sampler in self._samplers.items()]

    def _part_of(self, event: WriteEvent) -> TablePart:
        return next(part for part in self._parts if part.name == event.into)

    def check_write(self, event: WriteEvent) -> None:
        """Ask the sampler of the table."""
        self._part_of(event).check_write(event)

    def wrote(self, event: WriteEvent) -> None:
        """Tell the sampler of the table."""
        self._plan = None
        self._part_of(event).wrote(event)

    def removed(self, indices: torch.Tensor, rows: Rows) -> None:
        """Tell the samplers whose rows left."""
        self._plan = None
        for part in self._parts:
            if len(own := local(indices, part)):
                part.removed(own)

    def clear(self) -> None:
        """Tell all samplers."""
        self._plan = None
        for part in self._parts:
            part.clear()

    def update_priority(self, indices: torch.Tensor, priority: torch.Tensor, rows: Rows) -> None:
        """Tell the samplers of the rows.

        Raises:
            ValueError: one refuses its priorities.
        """
        self._plan = None
        found = []
        for part in self._parts:
            is_own = (indices >= part.start) & (indices < part.held.stop)
            if bool(is_own.any()):
                found.append((part, indices[is_own] - part.start, priority[is_own]))
        for part, _, values in found:
            if isinstance(part.sampler, ProportionalSampler):
                part.sampler.checked(values.numpy(), "priority")  # before any sampler has changed
        for part, own, values in found:
            part.sampler.update_priority(own, values, part.rows)

    def group_priority(self, indices: Any, priority: Any) -> tuple[Any, Any]:
        """Ask the sampler of each slice.

        Raises:
            TypeError, ValueError: one refuses its priorities.
        """
        if not isinstance(indices, torch.Tensor) or indices.ndim != 2:
            return indices, priority
        values = torch.as_tensor(priority, device="cpu").detach()
        if values.ndim and values.numel() % len(indices):
            raise ValueError(f"priority: expected values for {len(indices)} slices, found {list(values.shape)}")
        by_slice = values.reshape(len(indices), -1) if values.ndim else None
        rows, numbers = [], []
        for part in self._parts:
            is_own = (indices[:, 0] >= part.start) & (indices[:, 0] < part.held.stop)
            if "group_priority" not in part.sampler.hooks or not bool(is_own.any()):
                continue
            own = values if by_slice is None else by_slice[is_own].reshape(-1)
            if by_slice is not None and by_slice.shape[1] > 1:
                own = by_slice[is_own]
            found, grouped = part.sampler.group_priority(indices[is_own] - part.start, own)
            found = torch.as_tensor(found).reshape(-1)
            rows.append(found + part.start)
            numbers.append(torch.as_tensor(grouped).reshape(-1).expand(len(found)))
        if not rows:
            return torch.empty(0, dtype=torch.int64), torch.empty(0)
        return torch.cat(rows), torch.cat(numbers)

    # -- drawing ------------------------------------------------------------------------------------------------------

    def check(self, capacity: int, batch_size: int) -> None:
        """Refuse what a sampler can never draw, and slices of different lengths."""
        for name, sampler in self._samplers.items():
            try:
                sampler.check(capacity, batch_size)
            except ValueError as error:
                raise ValueError(f"table {name!r}: {error}") from error
        units = {name: sampler.draw_unit for name, sampler in self._samplers.items()}
        if len(set(units.values())) > 1:
            raise ValueError(f"samplers: expected slices of the same length in all tables, found {units}")

    def may_draw(self, rows: Rows, batch_size: int) -> Answer:
        """Not before the samplers of all tables with a fraction can; with ``when_empty="others"``, of any."""
        plan = self._planned(batch_size)
        return plan if isinstance(plan, NotYet) else True

    def _planned(self, batch_size: int) -> _Plan | NotYet:
        plan = self._plan
        if plan is None or plan.batch_size != batch_size:
            found = self._found_plan(batch_size)
            if isinstance(found, NotYet):
                return found
            plan = self._plan = found
        return plan

    def _found_plan(self, batch_size: int) -> _Plan | NotYet:
        plan = self._whole.get(batch_size)  # as for halves of an even number: nothing is to be computed
        if plan is not None:
            for part, count in zip(self._parts, plan.rows, strict=True):
                if count and not part.may_draw(count):
                    break
            else:
                return plan
        plan_or_not = self._computed_plan(batch_size)
        if isinstance(plan_or_not, _Plan) and self._is_whole(plan_or_not):
            self._whole[batch_size] = plan_or_not
        return plan_or_not

    def _is_whole(self, plan: _Plan) -> bool:
        if self._order == "random" or self._schedule is not None or self._ahead.any():
            return False
        return np.array_equal(plan.units * plan.parts, plan.counts) and bool((plan.counts > 0).all())

    def _computed_plan(self, batch_size: int) -> _Plan | NotYet:
        shares, unit = self._shares(), next(iter(self._samplers.values())).draw_unit
        units = batch_size // unit
        counts = np.where(shares > 0, 0, -1)  # of tables that take part, units; -1 of the others
        while True:
            parts = np.where(counts >= 0, shares, 0.0)
            if self._order == "random":  # as many as a table could get
                counts = np.where(counts >= 0, units, -1)
            else:
                parts /= parts.sum()
                owed = np.where(counts >= 0, self._ahead + units * parts, 0.0)
                counts = np.where(counts >= 0, apportioned(owed, parts, units), -1)
            missing: list[tuple[int, NotYet]] = []
            for i in np.flatnonzero(counts >= 0).tolist():
                answer = self._parts[i].may_draw(counts.item(i) * unit)
                if isinstance(answer, NotYet):
                    missing.append((i, answer))
            if not missing:
                return _Plan(batch_size, units, parts, counts, (np.maximum(counts, 0) * unit).tolist(), unit)
            counts[[i for i, _ in missing]] = -1
            if self._when_empty == "wait" or not shares[counts >= 0].any():
                return missing[0][1]

    def draw(self, rows: Rows, batch_size: int, generator: torch.Generator) -> Draw:
        """Of each table its fraction.

        Raises:
            ValueError: a sampler waits.
        """
        plan = self._planned(batch_size)
        if isinstance(plan, NotYet):
            raise ValueError(f"expected tables that can all be drawn from: {plan.reason}")
        counts = plan.rows
        if self._order == "random":
            counts = (_by_chance(plan.parts / plan.parts.sum(), plan.units, generator) * plan.unit).tolist()
        elif self._whole.get(batch_size) is not plan:
            self._ahead += plan.units * plan.parts - np.maximum(plan.counts, 0)
            self._whole.clear()
        self._draws += 1
        self._plan = None
        drawn = [
            Drawn(i, part.name, part.start, draw)
            for i, (part, count) in enumerate(zip(self._parts, counts, strict=True))
            if count
            for draw in part.draw(count, generator)
        ]
        return merged(drawn)

    def handed_over(self, draw: Draw) -> torch.Tensor | None:
        """Tell the samplers of the tables: the rows that leave them."""
        self._plan = None
        leaving = []
        for part, own in self._taken_apart(draw):
            if "handed_over" in part.sampler.hooks and (rows := part.sampler.handed_over(own)) is not None:
                leaving.append(rows + part.start)
        return torch.cat(leaving) if leaving else None

    def dropped(self, draw: Draw) -> None:
        """Tell the samplers of the tables."""
        self._plan = None
        for part, own in self._taken_apart(draw):
            if "dropped" in part.sampler.hooks:
                part.sampler.dropped(own)

    def leaving(self) -> torch.Tensor | None:
        """The rows that the samplers of the tables let go."""
        leaving = [
            rows + part.start
            for part in self._parts
            if "leaving" in part.sampler.hooks and (rows := part.sampler.leaving()) is not None
        ]
        return torch.cat(leaving) if leaving else None

    def finished(self) -> None:
        """Tell the samplers of the tables."""
        self._plan = None
        for part in self._parts:
            if "finished" in part.sampler.hooks:
                part.sampler.finished()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The fractions, what is owed to each table, number of draws; rows and sampler of each table."""
        fractions = None if self._schedule is not None else torch.from_numpy(self._fixed.copy())
        return {
            "order": self._order,
            "when_empty": self._when_empty,
            "fractions": fractions,
            "draws": self._draws,
            "owed": torch.from_numpy(self._ahead.copy()),
            "tables": {part.name: part.state_dict() for part in self._parts},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on in all tables; with the saved fractions, too, unless they are a function."""
        name = type(self).__name__
        is_function = isinstance(state, dict) and state.get("fractions") is None
        same(is_function, self._schedule is not None, f"{name}: whether fractions are a function")
        kinds: dict[str, type] = dict(
            order=str,
            when_empty=str,
            fractions=type(None) if is_function else torch.Tensor,
            draws=int,
            owed=torch.Tensor,
            tables=dict,
        )
        order, when_empty, fractions, draws, owed, tables = fields(state, name, **kinds)
        same(order, self._order, f"{name}: order")
        same(when_empty, self._when_empty, f"{name}: when_empty")
        shares = None if fractions is None else self._saved(fractions, 0.0)
        if shares is not None and abs(float(shares.sum()) - 1.0) > _TOLERANCE:
            raise CheckpointCorruptError(f"{name}: expected fractions whose sum is 1, found {shares.tolist()}")
        ahead = self._saved(owed, -len(self._samplers))
        states = fields(tables, f"{name}: tables", **dict.fromkeys((part.name for part in self._parts), dict))
        load_all(self._parts, states)
        self._fixed = self._fixed if shares is None else shares
        self._ahead, self._draws, self._plan, self._whole = ahead, draws, None, {}

    def _saved(self, numbers: torch.Tensor, least: float) -> Float64Array:
        """A number for each table out of a checkpoint, in memory of its own."""
        is_column = numbers.dtype is torch.float64 and tensor_problem(numbers) is None
        if (
            not is_column
            or numbers.shape != (len(self._samplers),)
            or not bool(((numbers >= least) & (numbers <= len(self._samplers))).all())
        ):
            raise CheckpointCorruptError(f"{type(self).__name__}: expected a number for each table, found others")
        found: Float64Array = numbers.detach().cpu().numpy().copy()
        return found

    def verify(self, rows: Rows) -> None:
        """Refuse tables with other rows than the valid ones, and let all samplers look at theirs."""
        name = type(self).__name__
        size, written = sum(part.rows.size for part in self._parts), sum(part.rows.write_count for part in self._parts)
        if (size, written) != (rows.size, rows.write_count):
            raise CheckpointCorruptError(
                f"{name}: expected {rows.size} rows and a write_count of {rows.write_count}, found {size} and {written}"
            )
        for part in self._parts:
            part.verify(rows)

    def _taken_apart(self, draw: Draw) -> list[tuple[TablePart, Draw]]:
        in_order = sorted(self._parts, key=lambda part: part.start)
        starts, names = [part.start for part in in_order], [part.name for part in in_order]
        return [(in_order[i], own) for i, own in parted(draw, starts, names)]


def _by_chance(parts: Float64Array, units: int, generator: torch.Generator) -> Int64Array:
    """How many of so many units each table gets, if each unit is one of it with a chance."""
    places = torch.rand(units, dtype=torch.float64, generator=generator, device=generator.device).cpu().numpy()
    last = int(np.flatnonzero(parts)[-1])
    tables = np.minimum(np.cumsum(parts).searchsorted(places, side="right"), last)
    found: Int64Array = np.bincount(tables, minlength=len(parts))
    return found


def _checked_samplers(samplers: Any) -> tuple[dict[str, Sampler], dict[str, float] | None]:
    """The sampler of each table; and the fractions, if those were given in place of samplers."""
    if not isinstance(samplers, Mapping) or not samplers:
        raise TypeError(
            "samplers: expected a dict with the sampler of each table, or with fractions such as "
            f"{_EXAMPLE}; found {shown(samplers)}"
        )
    for name in samplers:
        if not isinstance(name, str) or not name:
            raise TypeError(f"samplers: expected names of tables as keys, found {shown(name)}")
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in samplers.values()):
        return {name: RandomSampler() for name in samplers}, checked_shares(samplers, "fractions", example=_EXAMPLE)
    for name, sampler in samplers.items():
        where = f'samplers["{name}"]'
        instance_of(sampler, Sampler, where, example="RandomSampler()")
        if "combine" in sampler.hooks or "use_tables" in sampler.hooks:
            kind = "joins" if "combine" in sampler.hooks else "tables"
            raise ValueError(f"{where}: expected a sampler without {kind}, found a {type(sampler).__name__}")
        if isinstance(sampler, TrajectorySampler) and sampler.padded:
            raise ValueError(
                f"{where}: expected trajectories of TrajectorySampler(..., padded=False), found padded ones"
            )
    if len({id(sampler) for sampler in samplers.values()}) < len(samplers):
        raise ValueError("samplers: expected a sampler of its own for each table, found one twice")
    return dict(samplers), None
