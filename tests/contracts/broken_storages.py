"""A plain storage of arrays, and others that break one rule each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf import Draw, GatherJobs, Prepared, RowRange, Runs, SchemaError, Storage
from asyncbuf.storage import Chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from asyncbuf.storage import Frozen

Rows = dict[str, np.ndarray[Any, Any]]


def plain_items(count: int, start: int) -> dict[str, torch.Tensor]:
    number = torch.arange(start, start + count)
    value = number[:, None].to(torch.float32).repeat(1, 2)
    value[:, 1] = torch.nan
    return {"number": number, "value": value}


class ArrayStorage(Storage):
    """Flat dicts of tensors as one array for each key."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.arrays: Rows = {}

    def prepare(self, items: Any) -> Prepared:
        if not isinstance(items, dict) or not items:
            raise SchemaError(f"expected a dict of tensors, found {items!r}")
        arrays = {key: np.asarray(value) for key, value in items.items()}
        counts = {len(array) for array in arrays.values() if array.ndim}
        if len(counts) != 1 or 0 in counts or not all(array.ndim for array in arrays.values()):
            raise SchemaError(f"expected one number of items, found {counts}")
        known = {key: (array.dtype, array.shape[1:]) for key, array in self.arrays.items()}
        found = {key: (array.dtype, array.shape[1:]) for key, array in arrays.items()}
        if known and found != known:
            raise SchemaError(f"expected {known}, found {found}")
        return Prepared(counts.pop(), sum(array.nbytes for array in arrays.values()), arrays)

    def prepare_one(self, item: Any) -> Prepared:
        return self.prepare({key: torch.as_tensor(value)[None] for key, value in item.items()})

    def write(self, prepared: Prepared, runs: Sequence[RowRange]) -> None:
        for key, array in prepared.payload.items():
            if key not in self.arrays:
                self.arrays[key] = np.zeros((self.capacity, *array.shape[1:]), array.dtype)
            for run in runs:
                self.arrays[key][run.row : run.row + run.count] = array[run.item : run.item + run.count]

    def gather(self, indices: torch.Tensor) -> Any:
        return {key: torch.from_numpy(array[indices.numpy()]) for key, array in self.arrays.items()}

    def gather_nbytes(self, count: int) -> int:
        return 0

    def state_dict(self) -> dict[str, Any]:
        return {"arrays": {key: torch.from_numpy(array.copy()) for key, array in self.arrays.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        arrays = {key: tensor.numpy().copy() for key, tensor in state["arrays"].items()}
        self.arrays = arrays

    def clear(self) -> None:
        pass


# -- writing ----------------------------------------------------------------------------------------------------------


class WrongCount(ArrayStorage):
    def prepare_one(self, item: Any) -> Prepared:
        return Prepared(0, 0, super().prepare_one(item).payload)


class WritesInPrepare(ArrayStorage):
    def prepare(self, items: Any) -> Prepared:
        prepared = super().prepare(items)
        if self.arrays:
            self.write(prepared, [RowRange(0, 0, 1)])
        return prepared


class RefusesInOtherWords(ArrayStorage):
    def prepare(self, items: Any) -> Prepared:
        return super().prepare({"number": items["number"], "value": items["value"]})


class TakesAnything(ArrayStorage):
    def prepare(self, items: Any) -> Prepared:
        try:
            return super().prepare(items)
        except SchemaError:
            return Prepared(1, 0, {})


class KeepsWhatItGot(ArrayStorage):
    """Keeps the arrays of the caller."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.got: dict[int, tuple[Rows, int]] = {}

    def write(self, prepared: Prepared, runs: Sequence[RowRange]) -> None:
        for run in runs:
            self.got.update({run.row + i: (prepared.payload, run.item + i) for i in range(run.count)})

    def gather(self, indices: torch.Tensor) -> Any:
        items = [self.got[row] for row in indices.tolist()]
        return {key: torch.from_numpy(np.stack([rows[key][i] for rows, i in items])) for key in items[0][0]}


class ForgetsTheSecondRun(ArrayStorage):
    def write(self, prepared: Prepared, runs: Sequence[RowRange]) -> None:
        super().write(prepared, runs[:1])


class TiedToItsPreparation(ArrayStorage):
    """Items that were prepared before the first write are lost, and it does not say so."""

    def prepare(self, items: Any) -> Prepared:
        prepared = super().prepare(items)
        prepared.basis = bool(self.arrays)
        return prepared

    def write(self, prepared: Prepared, runs: Sequence[RowRange]) -> None:
        if self.arrays and not prepared.basis:
            raise KeyError("prepared before the first write")
        super().write(prepared, runs)


class Rounds(ArrayStorage):
    def write(self, prepared: Prepared, runs: Sequence[RowRange]) -> None:
        payload = {key: np.nan_to_num(array) for key, array in prepared.payload.items()}
        super().write(Prepared(prepared.count, 0, payload), runs)


class ReleasesTooMuch(ArrayStorage):
    def release(self, rows: torch.Tensor) -> None:
        for array in self.arrays.values():
            array[: int(rows.max()) + 1] = 0


# -- gathering --------------------------------------------------------------------------------------------------------


class GathersWindows(ArrayStorage):
    """Neighbouring rows are not copied."""

    def gather(self, indices: torch.Tensor) -> Any:
        rows = indices.tolist()
        if rows != list(range(rows[0], rows[0] + len(rows))):
            return super().gather(indices)
        return {key: torch.from_numpy(array[rows[0] : rows[-1] + 1]) for key, array in self.arrays.items()}


class OneMemoryForAll(ArrayStorage):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.out: dict[Any, torch.Tensor] = {}

    def gather(self, indices: torch.Tensor) -> Any:
        found = super().gather(indices)
        for key, tensor in found.items():
            memory = self.out.setdefault((key, tensor.shape), torch.empty_like(tensor))
            found[key] = memory.copy_(tensor)
        return found


class InWhateverOrder(ArrayStorage):
    """Puts parts together in the order in which they are done."""

    def begin_gather(self, draw: Draw, *, inline: bool, parts: int) -> Any:
        if inline or len(draw.indices) < parts:
            return self.gather(draw.indices)
        done: list[Any] = []
        jobs = [lambda part=part: done.append(self.gather(part)) for part in draw.indices.chunk(parts)]
        return GatherJobs(jobs, lambda: {key: torch.cat([part[key] for part in done]) for key in done[0]})


class SharesJobs(ArrayStorage):
    """Gathers that run at once write into one place."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.found: Any = None

    def begin_gather(self, draw: Draw, *, inline: bool, parts: int) -> Any:
        if inline:
            return self.gather(draw.indices)
        return GatherJobs([lambda: setattr(self, "found", self.gather(draw.indices))], lambda: self.found)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()


class Shrinks(ArrayStorage):
    def gather_nbytes(self, count: int) -> int:
        return -count


# -- states -----------------------------------------------------------------------------------------------------------


class Live:
    """Reads rows when they are asked for."""

    def __init__(self, storage: ArrayStorage, identity: str | None = None) -> None:
        self.meta: dict[str, Any] = {}
        self._storage = storage
        self._identity = identity

    def chunks(self) -> Iterator[Chunk]:
        yield Chunk(self._identity, self._tensors)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {key: torch.from_numpy(array.copy()) for key, array in self._storage.arrays.items()}


class FrozenIsLive(ArrayStorage):
    def freeze(self) -> Frozen:
        return Live(self)

    def load_rows(self, meta: Any, chunks: Iterator[dict[str, torch.Tensor]]) -> Callable[[], None]:
        arrays = {key: tensor.numpy() for chunk in chunks for key, tensor in chunk.items()}
        return lambda: setattr(self, "arrays", arrays)


class LoadsAtOnce(ArrayStorage):
    def load_rows(self, meta: Any, chunks: Iterator[dict[str, torch.Tensor]]) -> Callable[[], None]:
        super().load_rows(meta, chunks)()
        return lambda: None


class IgnoresDamage(FrozenIsLive):
    """Freezes a copy, and takes whatever comes back."""

    def freeze(self) -> Frozen:
        copy = ArrayStorage(self.capacity)
        copy.arrays = {key: array.copy() for key, array in self.arrays.items()}
        return Live(copy)


class NeverChanges(FrozenIsLive):
    """Freezes a copy, and says that its one chunk is always the same."""

    def freeze(self) -> Frozen:
        copy = ArrayStorage(self.capacity)
        copy.arrays = {key: array.copy() for key, array in self.arrays.items()}
        return Live(copy, "all rows" if self.arrays else None)


class SharesItsState(ArrayStorage):
    def state_dict(self) -> dict[str, Any]:
        return {"arrays": {key: torch.from_numpy(array) for key, array in self.arrays.items()}}


class SavesLess(ArrayStorage):
    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["arrays"] = {key: tensor.nan_to_num() for key, tensor in state["arrays"].items()}
        return state


class LoadsHalf(ArrayStorage):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.arrays = {}
        for key, tensor in state["arrays"].items():
            self.arrays[key] = tensor.numpy().copy()


class RowsInIsShort(ArrayStorage):
    def rows_in(self, meta: Any) -> int | None:
        return 1


class LosesRowsInAPickle(ArrayStorage):
    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "arrays": {key: array * 0 for key, array in self.arrays.items()}}


class SaysRunsInWords(ArrayStorage):
    runs = "in a thread"  # type: ignore[assignment]


class Awaits(ArrayStorage):
    """Sound: gathers asynchronously."""

    runs = Runs.AWAIT

    def begin_gather(self, draw: Draw, *, inline: bool, parts: int) -> Any:
        async def gather() -> Any:
            return self.gather(draw.indices)

        return gather()


# Each with words of the rule that it breaks.
BROKEN: list[tuple[type[Storage], str]] = [
    (WrongCount, "Prepared says how many"),
    (WritesInPrepare, "rows have what was written|prepare changes nothing"),
    (RefusesInOtherWords, "prepare refuses with SchemaError"),
    (TakesAnything, "prepare refuses what does not fit"),
    (KeepsWhatItGot, "rows have what was written"),
    (ForgetsTheSecondRun, "rows have what was written"),
    (TiedToItsPreparation, "what was prepared can be written"),
    (Rounds, "rows have what was written"),
    (ReleasesTooMuch, "rows have what was written"),
    (GathersWindows, "rows have what was written|a batch that is kept"),
    (OneMemoryForAll, "a batch that is kept|do not share memory"),
    (InWhateverOrder, "in order|run at once"),
    (SharesJobs, "do not share memory"),
    (Shrinks, "gather_nbytes grows"),
    (FrozenIsLive, "what was frozen stays"),
    (LoadsAtOnce, "load_rows changes nothing until"),
    (NeverChanges, "chunks of the same identity"),
    (IgnoresDamage, "load_rows refuses chunks"),
    (SharesItsState, "memory of its own|what was frozen stays"),
    (SavesLess, "what was frozen stays|load_state_dict brings"),
    (LoadsHalf, "all of a state or nothing"),
    (RowsInIsShort, "rows_in says"),
    (LosesRowsInAPickle, "a pickled storage"),
    (SaysRunsInWords, "runs is one of Runs"),
]
