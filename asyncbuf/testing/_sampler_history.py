"""A table with a sampler, and a history that follows from a seed: the same steps whatever the sampler does."""

from __future__ import annotations

import contextlib
import enum
import random
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch

from asyncbuf._plain.codec import encode
from asyncbuf._table import checks
from asyncbuf._table.table import Table
from asyncbuf.batch import Draw
from asyncbuf.errors import SchemaError
from asyncbuf.limiter import MinSize
from asyncbuf.storage._frozen import tensors_of
from asyncbuf.testing._contract import Contract, revived, scramble, scramble_leaves
from asyncbuf.testing._passes import Passes, Place
from asyncbuf.writer import RoundRobinWriter, Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncbuf.rows import Answer, Rows
    from asyncbuf.sampler import Sampler
    from asyncbuf.storage import Prepared, Storage

_STEPS = {"write": 4.0, "draw": 7.0, "hand over": 4.0, "drop": 1.0, "update priority": 2.0}
_ROUGH = {**_STEPS, "remove": 3.0}
_KINDS = (_STEPS, _ROUGH, {**_ROUGH, "clear": 1.0})
# How many items are written at once; now and then there are more of them than rows.
_WRITES = (1, 1, 1, 2, 2, 3, 5, 8)


class Setting(NamedTuple):
    """What a history is made of.

    Attributes:
        make_sampler: makes the sampler.
        items: makes items from a count and the number of the first.
        make_storage: makes a storage of so many rows.
        capacity: number of rows.
        sizes: batch sizes, the first of which most draws have.
        steps: length of the history.
        seed: decides the steps, and seeds the generator.
        make_writer: makes the writer.
    """

    make_sampler: Callable[[], Sampler]
    items: Callable[[int, int], Any]
    make_storage: Callable[[int], Storage]
    capacity: int
    sizes: Sequence[int]
    steps: int
    seed: int
    make_writer: Callable[[], Writer] = RoundRobinWriter


class Disturbance(enum.Enum):
    """What is done to a sampler beside its history. It must not show; the value is the rule that says so."""

    NOTHING = "equal samplers with equal generators draw the same"
    QUESTIONS = "questions change nothing that later draws depend on"
    ITEMS = "what is kept of columns is copied"
    STATES = "state_dict gives out memory of its own"
    DRAWS = "what becomes of a draw after its hand-over is no business of the sampler"


class _Open(NamedTuple):
    """A draw that was neither handed over nor dropped."""

    draw: Draw
    content: Any  # plain, in memory of its own
    write_count: int


class History:
    """A table with a sampler.

    Args:
        setting: what it is made of.
        contract: the rules.
        disturbance: what is done beside the history.
        is_strict: whether every rule is checked at every step; if not, only what the sampler draws is found out.

    Attributes:
        sampler: the sampler.
        draws: number of draws so far.
    """

    def __init__(
        self,
        setting: Setting,
        contract: Contract,
        disturbance: Disturbance = Disturbance.NOTHING,
        *,
        is_strict: bool = False,
    ) -> None:
        self.sampler = setting.make_sampler()
        self.sampler.check(setting.capacity, setting.sizes[0])  # as a buffer does
        self.draws = 0
        self._setting = setting
        self._contract = contract
        self._disturbance = disturbance
        self._is_strict = is_strict
        self._generator = torch.Generator().manual_seed(setting.seed)
        with contract.allowed("the factory makes a new sampler each time"):
            self._table = Table(
                setting.make_storage(setting.capacity), setting.make_writer(), self.sampler, MinSize(1), self._generator
            )
        self._number = self._written = 0
        self._open: list[_Open] = []
        self._passes = Passes(contract)
        self._open_for: set[int] = set()  # batch sizes for which may_draw was true since the rows changed
        self._operations: dict[str, Callable[[random.Random], Any]] = {
            "write": self._write,
            "draw": self._draw,
            "hand over": self._hand_over_one,
            "drop": self._drop,
            "update priority": self._update_priority,
            "remove": self._remove,
            "clear": self._clear,
        }

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self) -> Any:
        """Go on by one step: what came of it, as plain data."""
        choose = random.Random(f"{self._setting.seed}/{self._number}")
        kinds = _KINDS[self._setting.seed % len(_KINDS)]
        name = choose.choices(list(kinds), list(kinds.values()))[0]
        # Every history begins with a table that has no rows.
        name = ("draw", "write")[self._number] if self._number < 2 else name
        self._contract.where = f"seed {self._setting.seed}, step {self._number}, {name}"
        if self._disturbance is Disturbance.QUESTIONS:
            self._ask_everything()
        if self._disturbance is Disturbance.STATES:
            scramble(self.sampler.state_dict())
        with self._contract.local() if self._is_strict else contextlib.nullcontext():
            outcome = self._operations[name](choose)
        self._number += 1
        return {"step": name, "outcome": outcome}

    def _write(self, choose: random.Random) -> Any:
        setting = self._setting
        return self._write_items(choose.choice((*_WRITES, setting.capacity + 3)))

    def _write_items(self, count: int) -> Any:
        table, contract = self._table, self._contract
        items = self._setting.items(count, self._written)
        prepared = table.storage.prepare(items)
        self._see_columns(prepared)
        placement = table.place(count)
        before = self._state_if("check_write")
        try:
            event = table.check_write(placement, prepared)
        except ValueError as error:
            contract.same(self._state_if("check_write"), before, "a write that is refused changes nothing")
            return f"refused: {error}"
        except Exception as error:
            raise contract.broken("check_write refuses with a ValueError", "a ValueError", repr(error)) from error
        contract.same(self._state_if("check_write"), before, "check_write changes nothing")
        table.storage.write(prepared, placement.runs)
        table.commit(placement)
        with contract.allowed("wrote and written never fail"):
            table.wrote(placement, event)
        self._written += count
        self._changed(placement.rows.tolist())
        if self._disturbance is Disturbance.ITEMS:
            scramble_leaves(items)
        return placement.rows.tolist()

    def _see_columns(self, prepared: Prepared) -> None:
        """See that the items have what the sampler asks for: else every write would be taken for refused."""
        columns = self.sampler.columns
        if not columns:
            return
        try:
            self._table.storage.columns(prepared, columns)
        except SchemaError as error:
            rule = "items have the leaves that Sampler.columns names"
            expected = f"{list(columns)} (misspelt, or hand in items= that have them)"
            raise self._contract.broken(rule, expected, repr(error)) from error

    def _state_if(self, hook: str) -> Any:
        return self._contract.state(self.sampler) if self._is_strict and hook in self.sampler.hooks else None

    def _changed(self, rows: list[int]) -> None:
        self._open_for.clear()
        self._passes.gone(rows)

    def _draw(self, choose: random.Random) -> Any:
        sizes = self._setting.sizes
        size = sizes[0] if choose.random() < 0.75 else choose.choice(list(sizes))
        return self._draw_rows(size)

    def _draw_rows(self, size: int) -> Any:
        rows = self._table.rows
        answer = self.may_draw(size)
        if not answer:
            return f"not yet: {answer.reason}"
        if not rows.size:
            return "no rows"
        place = Place.of(self.sampler, size)
        draw = self._drawn(rows, size)
        if draw is None:
            return "refused"
        if self._is_strict:
            self._check(draw, rows, size, place)
        self.draws += 1
        content = self._content(draw)
        self._open.append(_Open(draw, content, rows.write_count))
        return content

    def may_draw(self, size: int) -> Answer:
        """Ask the sampler whether a batch can be drawn."""
        sampler, rows, contract = self.sampler, self._table.rows, self._contract
        asks = self._is_strict and "may_draw" in sampler.hooks
        watched = contract.unchanged(sampler, "may_draw changes nothing") if asks else contextlib.nullcontext()
        with watched, contract.allowed("may_draw never fails"):
            answers = [sampler.may_draw(rows, size) for _ in range(2 if asks else 1)]
        answer = contract.answer(answers[0], "may_draw")
        contract.require(answers[-1] == answer, "may_draw answers the same when asked again", answer, answers[-1])
        if asks and not sampler.counts_draws:
            stays = bool(answer) or size not in self._open_for
            rule = "with counts_draws=False, may_draw stays true until rows or priorities change"
            contract.require(stays, rule, True, answer)
        if answer:
            self._open_for.add(size)
        return answer

    def _drawn(self, rows: Rows, size: int) -> Draw | None:
        """A draw; None if the sampler says that there is no such batch."""
        sampler, contract = self.sampler, self._contract
        before = contract.state(sampler) if self._is_strict else None
        generator = self._generator.get_state()
        try:
            return sampler.draw(rows, size, self._generator)
        except ValueError as error:
            promised = "may_draw" in sampler.hooks
            contract.require(not promised, "a draw that may_draw allows succeeds", f"a draw of {size}", repr(error))
            if self._is_strict:
                now = (contract.state(sampler), self._generator.get_state())
                contract.same(now, (before, generator), "a draw that is refused changes nothing")
            return None
        except Exception as error:
            rule = "a draw succeeds, or is refused with a ValueError"
            raise contract.broken(rule, f"a draw of {size}", repr(error)) from error

    def _check(self, draw: Draw, rows: Rows, size: int, place: Place) -> None:
        contract = self._contract
        with contract.allowed("a draw has valid rows, and what it says of them fits"):
            checks.draw(draw, rows, contract.part, combines="combine" in self.sampler.hooks)
        drawn = draw.indices.numel()
        contract.require(drawn <= size, "a draw has at most batch_size rows", f"at most {size}", drawn)
        valid = rows.at(torch.arange(rows.size)).tolist()
        self._passes.drew(draw, size, rows, valid, place, Place.of(self.sampler, size))

    def _content(self, draw: Draw) -> Any:
        content = {name: dict(value) if name in ("info", "joins") else value for name, value in draw._asdict().items()}
        with self._contract.allowed("what a draw says can be saved"):
            return encode(content, "draw")

    def _hand_over_one(self, choose: random.Random) -> Any:
        if not self._open:
            return None
        # Calls with other batch sizes are served from queues of their own: not always in the order of the draws.
        return self._hand_over(0 if len(self._open) == 1 or choose.random() < 0.8 else 1)

    def _hand_over(self, position: int) -> Any:
        contract, sampler = self._contract, self.sampler
        draw, content, write_count = self._open.pop(position)
        contract.same(self._content(draw), content, "a draw stays as it was until it is handed over")
        if "handed_over" not in sampler.hooks:
            self._spoil(draw)
            return None
        with contract.allowed("handed_over never fails"):
            leaving = sampler.handed_over(draw)
        if leaving is None:
            self._spoil(draw)
            return None
        is_int64 = isinstance(leaving, torch.Tensor) and leaving.dtype is torch.int64
        contract.require(is_int64, "handed_over returns None or int64 rows", "None or an int64 tensor", repr(leaving))
        strange = sorted(set(leaving.tolist()) - set(draw.indices.tolist()))
        contract.require(not strange, "handed_over returns rows of its draw", draw.indices.tolist(), f"also {strange}")
        left = leaving.tolist()
        self._spoil(draw)
        return left, self._remove_rows(left, write_count)

    def _spoil(self, draw: Draw) -> None:
        if self._disturbance is Disturbance.DRAWS:
            for tensor in (draw.indices, *draw.info.values()):
                scramble(tensor)

    def _remove_rows(self, rows: list[int], write_count: int | None = None) -> int:
        before = self._table.rows
        with self._contract.allowed("removed never fails"):
            count = self._table.remove(torch.tensor(rows, dtype=torch.int64).numpy(), write_count)
        if self._table.rows is not before:
            self._changed([row for row in rows if not self._table.rows.contains(torch.tensor([row])).item()])
        return count

    def _drop(self, choose: random.Random) -> None:
        for _ in range(choose.choice((1, 1, len(self._open)))):
            if self._open:
                self._drop_draw(self._open.pop(0).draw)

    def _drop_draw(self, draw: Draw) -> None:
        with self._contract.allowed("dropped never fails"):
            self._table.dropped(draw)

    def _some_rows(self, choose: random.Random, most: int) -> torch.Tensor:
        rows = self._table.rows
        positions = choose.sample(range(rows.size), min(most, rows.size))
        return rows.at(torch.tensor(positions, dtype=torch.int64))

    def _update_priority(self, choose: random.Random) -> Any:
        if self._open and choose.random() < 0.6:
            draw, _, write_count = choose.choice(self._open)
            where, since = draw.indices, write_count
        else:
            where, since = self._some_rows(choose, 3), self._table.write_count
        dtype = choose.choice((torch.float32, torch.float64))
        priority = torch.tensor([choose.random() + 0.01 for _ in range(len(where))], dtype=dtype)
        with self._contract.allowed("update_priority never fails for positive priorities"):
            self._table.update_priority(where, priority, since)
        self._open_for.clear()
        return where.tolist()

    def _remove(self, choose: random.Random) -> Any:
        most = self._table.size if choose.random() < 0.1 else choose.randrange(1, 2 + self._setting.capacity // 3)
        rows = self._some_rows(choose, most).tolist()
        return rows, self._remove_rows(rows)

    def _clear(self, choose: random.Random) -> None:
        with self._contract.allowed("clear never fails"):
            self._table.clear()
        self._changed(list(range(self._setting.capacity)))
        while self._open:
            self._drop_draw(self._open.pop(0).draw)

    def _ask_everything(self) -> None:
        """Questions that a buffer may ask at any time, and a write that does not come about."""
        table, sampler = self._table, self.sampler
        for size in self._setting.sizes:
            sampler.may_draw(table.rows, size)
            Place.of(sampler, size)
        sampler.state_dict()
        with self._contract.allowed("verify takes the state of the sampler itself"):
            sampler.verify(table.rows)
        with contextlib.suppress(ValueError):
            table.check_write(table.place(2), table.storage.prepare(self._setting.items(2, self._written)))

    # -- in the end ---------------------------------------------------------------------------------------------------

    def check_end(self) -> None:
        """When all draws are settled and all items are new, a batch can be drawn; so it is after removals."""
        contract, size = self._contract, self._setting.sizes[0]
        self._passes.check_whole()
        contract.where = f"seed {self._setting.seed}, after the last step"
        while self._open:
            self._hand_over(0)
        if not self._refill(self._setting.capacity):
            return  # the sampler takes no more: there is nothing to be said
        rule = "with all draws settled and all rows new, a batch can be drawn"
        contract.require(bool(self.may_draw(size)), rule, True, self.may_draw(size))
        if "dropped" in self.sampler.hooks:
            self._check_dropped(size)
        contract.where = f"seed {self._setting.seed}, after the last step, with every other row removed"
        self._remove_rows(list(range(0, self._setting.capacity, 2)))
        self._draw_rows(size)
        contract.where = f"seed {self._setting.seed}, after the last step, with new items after clear()"
        self._clear(random.Random(0))
        if self._refill(size):
            self._draw_rows(size)

    def _refill(self, count: int) -> bool:
        """Write items one by one: whether the sampler took all of them."""
        return not any(isinstance(self._write_items(1), str) for _ in range(count))

    def _check_dropped(self, size: int) -> None:
        while len(self._open) < self._setting.capacity and self.may_draw(size):
            self._draw_rows(size)
        while self._open:
            self._drop_draw(self._open.pop().draw)
        rule = "rows of draws that were dropped can be drawn again"
        self._contract.require(bool(self.may_draw(size)), rule, True, self.may_draw(size))

    # -- saving -------------------------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """Everything, for ``resumed``."""
        frozen = self._table.storage.freeze()
        return {
            "parts": {name: self._contract.state(part) for name, part in self._table.components()},
            "rows": (frozen.meta, list(tensors_of(frozen))),
            "generator": self._generator.get_state(),
            "open": list(self._open),
            "numbers": (self._number, self._written),
        }

    @classmethod
    def resumed(
        cls,
        setting: Setting,
        contract: Contract,
        saved: dict[str, Any],
        disturbance: Disturbance = Disturbance.NOTHING,
    ) -> Self:
        """A history that goes on where another one was saved, with a sampler of its own."""
        history = cls(setting, contract, disturbance)
        contract.resume(history._table, saved["rows"], saved["parts"], setting.capacity)
        history._generator.set_state(saved["generator"])
        history._open = [
            _Open(_draw_of(revived(content)), content, write_count) for _, content, write_count in saved["open"]
        ]
        history._number, history._written = saved["numbers"]
        return history


def _draw_of(content: dict[str, Any]) -> Draw:
    return Draw.of(*content.values())
