"""Which rows hold the members of which group."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from asyncbuf._plain.integers import are_distinct
from asyncbuf._plain.state import fields, int64s
from asyncbuf.errors import CheckpointCorruptError
from asyncbuf.sampler._line import Line
from asyncbuf.sampler._row_set import row_type

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from asyncbuf.rows import BoolArray, Int64Array
    from asyncbuf.sampler._row_set import RowArray

_NONE = np.empty(0, np.int64)
# Up to so many items.
_FEW = 32


class Stage(enum.IntEnum):
    """How far the item of a row is."""

    FREE = 0  # there is none
    OPEN = 1  # its group is not complete
    WAITING = 2  # its group may be drawn
    DRAWN = 3  # its group was drawn, and is not handed over
    LEAVING = 4  # its group will not be handed out


class Arrival(NamedTuple):
    """How items that are written come into groups.

    Attributes:
        order: the items, those of one key after the other: int64 ``[items]``; so are those below, in this order.
        position: which member of its group each is, from 0 on.
        before: row of the member before each that is stored already; -1 for all others.
        keys: the keys, each once.
        ends: places in the order of the last item of each of these keys.
        completing: places in the order of the items that complete a group.
    """

    order: Int64Array
    position: Int64Array
    before: Int64Array
    keys: list[int]
    ends: Int64Array
    completing: Int64Array


class GroupRows:
    """The groups of a table. Each member knows the row of the one before it, and a group is known by its last row.

    Args:
        size: members of a complete group.
        capacity: number of rows of the table; 0 if that is not known.

    Attributes:
        capacity: number of rows.
        numbers: by row, the number of its item, and 1: int64 ``[capacity]``. 0 if there is none, or it is leaving.
        keys: by row, the key of its group: int64 ``[capacity]``.
        stages: by row: int8 ``[capacity]``.
        open: of each group that is not complete, by key, the row of its last member.
        waiting: number of groups that may be drawn.
    """

    def __init__(self, size: int, capacity: int) -> None:
        self._size = size
        self.capacity = capacity
        self.numbers: Int64Array = np.zeros(capacity, np.int64)
        self.keys: Int64Array = np.zeros(capacity, np.int64)
        self.stages: np.ndarray[Any, np.dtype[np.int8]] = np.zeros(capacity, np.int8)
        self._position: RowArray = np.zeros(capacity, np.int32)  # by row: which member of its group it is
        self._before: RowArray = np.zeros(capacity, row_type(capacity))  # by row: that of the member before it
        self._last: RowArray = np.zeros(capacity, row_type(capacity))  # of members of complete groups
        self.open: dict[int, int] = {}
        self.waiting = 0
        self._line = Line()  # of complete groups, in the order in which they became so
        self._returned: list[Int64Array] = []  # of dropped tickets: last rows and what those had in numbers, [2, n]
        self._leaving: list[RowArray] = []

    # -- members ------------------------------------------------------------------------------------------------------

    def chains(self, lasts: Int64Array) -> Int64Array:
        """The rows of the members of some groups, one group after the other, each in order: int64 ``[members]``."""
        left = self._position.take(lasts).astype(np.int64) + 1
        places = np.cumsum(left) - 1
        found = np.empty(int(left.sum()), np.int64)
        rows = lasts
        while len(rows):
            found[places] = rows
            goes_on = left > 1
            rows, places, left = self._before.take(rows[goes_on]), places[goes_on] - 1, left[goes_on] - 1
        return found

    def _members(self, lasts: Int64Array) -> Int64Array:
        """As ``chains``, of complete groups: int64 ``[groups, size]``."""
        found = np.empty((len(lasts), self._size), np.int64)
        rows: RowArray = lasts
        for place in range(self._size - 1, -1, -1):
            found[:, place] = rows
            rows = self._before.take(rows)
        return found

    def open_lasts(self) -> Int64Array:
        """The last rows of the groups that are not complete, that which was written first before the others."""
        lasts = np.fromiter(self.open.values(), np.int64, len(self.open))
        return lasts[self.numbers.take(lasts).argsort()]

    def open_among(self, rows: Int64Array) -> list[int]:
        """The keys of the groups that are not complete and have a member in some rows."""
        if not len(self.stages):
            return []
        found = rows[self.stages.take(rows) == Stage.OPEN]
        return np.unique(self.keys.take(found)).tolist() if len(found) else []

    def arrival(self, keys: Int64Array, gone: Iterable[int] = ()) -> Arrival:
        """How items come into groups, changing nothing.

        Args:
            keys: the key of each, int64 ``[items]``.
            gone: keys whose groups do not count.
        """
        if len(keys) <= _FEW:
            return self._arrival_of_few(keys.tolist(), set(gone))
        order = keys.argsort(kind="stable")
        ordered = keys[order]
        is_first = np.ones(len(keys), np.bool_)
        np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
        firsts = np.flatnonzero(is_first)
        ends = np.append(firsts[1:], len(keys)) - 1
        distinct: list[int] = ordered[firsts].tolist()
        missing = set(gone)
        lasts = np.array([-1 if key in missing else self.open.get(key, -1) for key in distinct], np.int64)
        before = np.full(len(keys), -1)
        before[firsts] = lasts
        held = np.zeros(len(distinct), np.int64)
        held[lasts >= 0] = self._position.take(lasts[lasts >= 0]) + 1
        position = np.arange(len(keys)) + np.repeat(held - firsts, ends - firsts + 1)
        position %= self._size
        return Arrival(order, position, before, distinct, ends, np.flatnonzero(position == self._size - 1))

    def _arrival_of_few(self, keys: list[int], gone: set[int]) -> Arrival:
        """As ``arrival``: of few items, one by one, which takes less time."""
        size = self._size
        order = sorted(range(len(keys)), key=keys.__getitem__)
        distinct: list[int] = []
        position, before, ends, completing = [], [], [], []
        place = 0
        for number, item in enumerate(order):
            key, last = keys[item], -1
            if not distinct or key != distinct[-1]:
                distinct.append(key)
                ends.append(number)
                last = -1 if key in gone else self.open.get(key, -1)
                place = 0 if last < 0 else self._position.item(last) + 1
            ends[-1] = number
            before.append(last)
            position.append(place)
            place += 1
            if place == size:
                completing.append(number)
                place = 0
        arrays = (np.array(numbers, np.int64) for numbers in (order, position, before, ends, completing))
        ordered, positions, befores, last_places, complete = arrays
        return Arrival(ordered, positions, befores, distinct, last_places, complete)

    # -- what happens to rows -----------------------------------------------------------------------------------------

    def join(
        self,
        rows: Int64Array,
        numbers: Int64Array,
        keys: Int64Array,
        verdicts: Mapping[int, bool],
        arrival: Arrival | None = None,
    ) -> list[int]:
        """Items were written, into rows that were forgotten.

        Args:
            rows: their rows; this and the next two are int64 ``[items]``.
            numbers: their numbers.
            keys: the keys of their groups.
            verdicts: of each group that is complete now, by the number of its last member, whether it may be drawn;
                without one it may.
            arrival: what ``arrival`` says of them, if that is known. Not used afterwards.

        Returns:
            The keys of those that may not, which are leaving.
        """
        if not len(rows):
            return []
        arrival = arrival or self.arrival(keys)
        ordered = rows[arrival.order]
        before = arrival.before
        is_new = before < 0
        is_new[:1] = False
        before[is_new] = ordered[np.flatnonzero(is_new) - 1]
        self.numbers[rows] = numbers + 1
        self.keys[rows] = keys
        self.stages[rows] = Stage.OPEN
        self._position[ordered] = arrival.position
        self._before[ordered] = np.maximum(before, 0)
        is_full = arrival.position[arrival.ends] == self._size - 1
        for key, row, full in zip(arrival.keys, ordered[arrival.ends].tolist(), is_full.tolist(), strict=True):
            if full:
                self.open.pop(key, None)
            else:
                self.open[key] = row
        return self._completed(ordered[arrival.completing], verdicts) if len(arrival.completing) else []

    def _completed(self, lasts: Int64Array, verdicts: Mapping[int, bool]) -> list[int]:
        lasts = lasts[self.numbers.take(lasts).argsort()]
        members = self._members(lasts)
        passes = np.ones(len(lasts), np.bool_)
        if verdicts:
            passes[:] = [verdicts[number - 1] for number in self.numbers.take(lasts).tolist()]
        refused: list[int] = self.keys.take(lasts[~passes]).tolist()
        if refused:
            self._leave(members[~passes].reshape(-1))
            lasts, members = lasts[passes], members[passes]
        self.stages[members] = Stage.WAITING
        self._last[members] = lasts[:, None]
        self._line.push(lasts, self.numbers)
        self.waiting += len(lasts)
        return refused

    def _leave(self, rows: RowArray) -> None:
        self.numbers[rows] = 0
        self.stages[rows] = Stage.LEAVING
        self._leaving.append(rows)

    def taken_leave(self) -> Int64Array:
        """The rows whose items are leaving, of which nobody was told: int64."""
        if not self._leaving:
            return _NONE
        rows = np.concatenate(self._leaving).astype(np.int64)
        self._leaving = []
        found: Int64Array = rows[self.stages.take(rows) == Stage.LEAVING]
        return found

    def forget(self, rows: Int64Array) -> list[int]:
        """Rows have other items now, or none. The other members of their groups leave, unless the group was drawn.

        Returns:
            The keys of the groups that are lost by that.
        """
        stages = self.stages.take(rows)
        if not stages.any():
            return []
        complete = np.unique(self._last.take(rows[stages == Stage.WAITING])).astype(np.int64)
        self.waiting -= len(complete)
        opened = [self.open.pop(key) for key in self.open_among(rows)]
        lost = np.concatenate([complete, np.array(opened, np.int64)])
        lost = lost[self.numbers.take(lost).argsort()]
        keys: list[int] = self.keys.take(lost).tolist()
        if keys:
            self._leave(self.chains(lost))
        self.numbers[rows] = 0
        self.stages[rows] = Stage.FREE
        return keys

    def lose(self, keys: Sequence[int]) -> None:
        """Members of these keys are not kept: the groups of which they would have been leave."""
        lasts = [self.open.pop(key) for key in keys if key in self.open]
        if lasts:
            self._leave(self.chains(np.array(lasts)))

    # -- drawing ------------------------------------------------------------------------------------------------------

    def take(self, count: int) -> Int64Array:
        """Draw the groups that are first in line, at most ``waiting``: the rows of members, int64 ``[n, size]``."""
        parts = [self._take_returned(count)] if self._returned else []
        count -= sum(map(len, parts))
        if count:
            parts.append(self._line.take_first(count, self.numbers))
        lasts = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self.waiting -= len(lasts)
        members = self._members(lasts)
        self.stages[members] = Stage.DRAWN
        return members

    def _take_returned(self, count: int) -> Int64Array:
        lasts, numbers = np.concatenate(self._returned, axis=1)
        is_there = self.numbers.take(lasts) == numbers
        lasts, numbers = lasts[is_there], numbers[is_there]
        order = numbers.argsort()
        lasts, numbers = lasts[order], numbers[order]
        self._returned = [np.stack([lasts[count:], numbers[count:]])] if len(lasts) > count else []
        found: Int64Array = lasts[:count]
        return found

    def give_back(self, rows: Int64Array, is_there: BoolArray) -> list[int]:
        """Groups that were drawn are not handed over: they are first in line, but for those that lack members.

        Args:
            rows: of their members, int64 ``[groups, size]``.
            is_there: which of them are still there, bool ``[groups, size]``.

        Returns:
            The keys of the groups that are lost, because some of their members are gone.
        """
        is_whole = is_there.all(axis=1)
        whole, lasts = rows[is_whole], rows[is_whole, -1]
        self.stages[whole] = Stage.WAITING
        self._position[whole] = np.arange(self._size)
        self._before[whole[:, 1:]] = whole[:, :-1]
        self._last[whole] = lasts[:, None]
        self.waiting += len(lasts)
        self._returned.append(np.stack([lasts, self.numbers.take(lasts)]))
        is_part = is_there.any(axis=1) & ~is_whole
        keys = [int(self.keys[row[there][0]]) for row, there in zip(rows[is_part], is_there[is_part], strict=True)]
        if keys:
            self._leave(rows[is_part][is_there[is_part]])
        return keys

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The members of all groups, those that are not complete first; items that were drawn, or are leaving."""
        complete = np.unique(self._last[self.stages == Stage.WAITING]).astype(np.int64)
        lasts = np.concatenate([self.open_lasts(), complete[self.numbers.take(complete).argsort()]])
        rows, drawn = self.chains(lasts), np.flatnonzero(self.stages == Stage.DRAWN)
        columns = {
            "lengths": self._position.take(lasts).astype(np.int64) + 1,
            "keys": self.keys.take(lasts),
            "rows": rows,
            "numbers": self.numbers.take(rows) - 1,
            "drawn": drawn,
            "drawn_numbers": self.numbers.take(drawn) - 1,
            "drawn_keys": self.keys.take(drawn),
            "leaving": np.flatnonzero(self.stages == Stage.LEAVING),
        }
        state: dict[str, Any] = {name: torch.from_numpy(column) for name, column in columns.items()}
        return {"capacity": self.capacity, "waiting": self.waiting, **state}

    @classmethod
    def of(cls, size: int, state: Any, name: str) -> GroupRows:
        """The groups of a checkpoint.

        Raises:
            CheckpointCorruptError: there are no such groups.
        """
        names = ("lengths", "keys", "rows", "numbers", "drawn", "drawn_numbers", "drawn_keys", "leaving")
        kinds: dict[str, type] = dict(capacity=int, waiting=int)
        capacity, waiting, *tensors = fields(state, name, **kinds, **dict.fromkeys(names, torch.Tensor))
        saved = {
            each: int64s(tensor, f"{name}: expected {each}").copy() for each, tensor in zip(names, tensors, strict=True)
        }
        _check_saved(saved, size, capacity, waiting, name)
        try:
            groups = cls(size, capacity)
        except (MemoryError, ValueError) as error:
            raise CheckpointCorruptError(f"{name}: expected a capacity that fits memory, found {capacity}") from error
        groups._take_over(saved, waiting)
        return groups

    def _take_over(self, saved: dict[str, Int64Array], waiting: int) -> None:
        lengths, rows = saved["lengths"], saved["rows"]
        ends = np.cumsum(lengths) - 1
        lasts = rows[ends]
        is_complete = np.repeat(np.arange(len(lengths)) >= len(lengths) - waiting, lengths)
        position = np.arange(len(rows)) - np.repeat(ends - lengths + 1, lengths)
        self.numbers[rows] = saved["numbers"] + 1
        self.keys[rows] = np.repeat(saved["keys"], lengths)
        self.stages[rows] = np.where(is_complete, Stage.WAITING, Stage.OPEN)
        self._position[rows] = position
        self._before[rows[1:]] = rows[:-1]
        self._last[rows] = np.repeat(lasts, lengths)
        split = len(lengths) - waiting
        self.open = dict(zip(saved["keys"][:split].tolist(), lasts[:split].tolist(), strict=True))
        self.waiting = waiting
        # Those that became complete before one that was drawn must stay before it, if that one comes back.
        complete, drawn = lasts[split:], saved["drawn"]
        is_early = self.numbers.take(complete) <= saved["drawn_numbers"].max(initial=-1)
        early = complete[is_early]
        if len(early):
            self._returned.append(np.stack([early, self.numbers.take(early)]))
        self._line.push(complete[~is_early], self.numbers)
        self.numbers[drawn], self.keys[drawn] = saved["drawn_numbers"] + 1, saved["drawn_keys"]
        self.stages[drawn] = Stage.DRAWN
        self.stages[saved["leaving"]] = Stage.LEAVING
        if len(saved["leaving"]):
            self._leaving.append(saved["leaving"])


def _check_saved(saved: dict[str, Int64Array], size: int, capacity: int, waiting: int, name: str) -> None:
    """See that groups of a checkpoint can be.

    Raises:
        CheckpointCorruptError: they cannot.
    """
    lengths, keys, rows, numbers, drawn, drawn_numbers, drawn_keys, leaving = saved.values()
    counts = {(len(lengths), len(rows), len(drawn), len(drawn))}
    if {(len(keys), len(numbers), len(drawn_numbers), len(drawn_keys))} != counts or waiting > len(lengths):
        raise CheckpointCorruptError(f"{name}: expected as many keys as groups and numbers as rows, found others")
    split = len(lengths) - waiting
    opened, complete = lengths[:split], lengths[split:]
    is_sound = ((opened > 0) & (opened < size)).all() and (complete == size).all() and lengths.sum() == len(rows)
    if not is_sound or len(np.unique(keys[:split])) < split:
        raise CheckpointCorruptError(
            f"{name}: expected groups of up to {size} items, each of another key; found others"
        )
    used, known = np.concatenate([rows, drawn, leaving]), np.concatenate([numbers, drawn_numbers])
    if not are_distinct(used, capacity) or not are_distinct(known, 2**62):
        raise CheckpointCorruptError(f"{name}: expected different rows and item numbers, found others")
    ends = np.cumsum(lengths) - 1
    goes_on = np.ones(len(rows), np.bool_)
    goes_on[ends] = False
    ascends = np.diff(numbers) > 0
    if not ascends[goes_on[:-1]].all() or not (np.diff(numbers[ends[split:]]) > 0).all():
        raise CheckpointCorruptError(f"{name}: expected members and complete groups in their order, found others")
