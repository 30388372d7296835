"""Checks of what parts of a user return, and of rows and priorities that callers hand in."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._plain.state import natural
from asyncbuf._runtime.summary import summary
from asyncbuf.batch import Draw
from asyncbuf.errors import CheckpointCorruptError
from asyncbuf.rows import Placement

if TYPE_CHECKING:
    from asyncbuf.rows import Int64Array, Rows


def draw(found: Draw, rows: Rows, name: str, *, combines: bool) -> None:
    """See that a sampler returned valid rows.

    Args:
        found: what it returned.
        rows: what there is to draw from.
        name: name of its class.
        combines: whether it has ``combine``, without which nobody would see what was joined.

    Raises:
        TypeError, ValueError, IndexError: it returned something else.
    """
    if not isinstance(found, Draw):
        raise TypeError(f"{name}.draw: expected a Draw, found {type(found).__name__}")
    indices = found.indices
    if not isinstance(indices, torch.Tensor) or indices.dtype is not torch.int64 or indices.ndim != 1:
        raise TypeError(f"{name}.draw: expected indices as an int64 tensor with one axis, found {indices!r}")
    count = indices.numel()
    if count == 0:
        raise IndexError(f"{name}.draw: expected at least one index, found none")
    _valid(indices, rows, f"{name}.draw")
    if found.shape is not None and int(np.prod(found.shape)) != count:
        raise ValueError(f"{name}.draw: expected a shape of {count} rows in all, found {found.shape}")
    if found.lengths is not None and int(found.lengths.sum()) != count:
        raise ValueError(f"{name}.draw: expected lengths of {count} rows in all, found {found.lengths.tolist()}")
    if found.joins and not combines:
        raise TypeError(
            f"{name}: expected combine(draw, data, joined) beside draws with the joins {list(found.joins)}, found none "
            "(`return {**data, **joined}` puts each join beside the fields of the batch)"
        )
    for join, joined in found.joins.items():
        if not isinstance(joined, torch.Tensor) or joined.dtype is not torch.int64:
            raise TypeError(f"{name}.draw: expected the join {join!r} as an int64 tensor, found {joined!r}")
        _valid(joined, rows, f"{name}.draw, join {join!r}")


def _valid(indices: torch.Tensor, rows: Rows, name: str) -> None:
    if rows.contains(indices).all():
        return
    if rows.valid is None:
        raise IndexError(
            f"{name}: expected rows 0 to {rows.size - 1}, found {int(indices.min())} to {int(indices.max())}"
        )
    missing = indices[~rows.contains(indices)]
    raise IndexError(
        f"{name}: expected valid rows (rows.at(positions) has them, for positions 0 to {rows.size - 1}), found "
        f"{missing.tolist()[:8]}, which were removed or never written"
    )


def placement(found: Placement, count: int, capacity: int, name: str) -> None:
    """See that a writer returned different rows of the storage, and items that there are.

    Raises:
        TypeError, ValueError, IndexError: it returned something else.
    """
    if not isinstance(found, Placement):
        raise TypeError(f"{name}.place: expected a Placement, found {type(found).__name__}")
    for start, stop, limit, what in [
        *((run.row, run.row + run.count, capacity, "rows") for run in found.runs),
        *((run.item, run.item + run.count, count, "items") for run in found.runs),
    ]:
        if not 0 <= start < stop <= limit:
            raise IndexError(f"{name}.place: expected {what} from 0 to {limit - 1}, found {start} to {stop - 1}")
    runs = sorted(found.runs, key=lambda run: run.row)
    for run, following in itertools.pairwise(runs):
        if run.row + run.count > following.row:
            raise ValueError(f"{name}.place: expected different rows, found row {following.row} twice")


def write_count(found: int, expected: int, name: str) -> None:
    """See that a writer counts what was handed in: item numbers follow from that.

    Raises:
        ValueError: it counts otherwise.
    """
    if found != expected:
        raise ValueError(
            f"{name}.commit: expected a write_count of {expected}, grown by Placement.offered, found {found}"
        )


def row_numbers(indices: Any, capacity: int, name: str) -> Int64Array:
    """Rows that a caller hands in: int64 ``[rows]``.

    Raises:
        TypeError: they are not integers.
        IndexError: one is not a row of the storage.
    """
    where = _tensor(indices, name, "a batch, or rows as integers")
    if where.numel() == 0:
        return np.empty(0, np.int64)
    if where.dtype is not torch.int64:
        if where.dtype is torch.bool:
            raise TypeError(f"{name}: expected integers, found {where.dtype} (mask.nonzero() has the rows of a mask)")
        if where.dtype.is_floating_point or where.dtype.is_complex:
            raise TypeError(f"{name}: expected integers, found {where.dtype}")
        where = where.to(torch.int64)
    rows: Int64Array = where.numpy().reshape(-1)
    if rows.view(np.uint64).max() >= capacity:  # a negative number is a large one
        raise IndexError(f"{name}: expected rows 0 to {capacity - 1}, found {rows.min()} to {rows.max()}")
    return rows


def _tensor(value: Any, name: str, expected: str) -> torch.Tensor:
    if type(value) is torch.Tensor and value.is_cpu and not value.requires_grad:
        return value
    try:
        return torch.as_tensor(value, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"{name}: expected {expected}, found {summary(value)}") from error


_NUMPY_FLOATS = (torch.float16, torch.float32, torch.float64)


def priorities(priority: Any, count: int, *, is_batch: bool) -> torch.Tensor:
    """Priorities that a caller hands in for so many rows: one for each, ``[rows]``.

    Raises:
        TypeError: they are no numbers.
        ValueError: they are more or fewer, or one is not finite.
    """
    value = _tensor(priority, "priority", "numbers")
    if value.dtype not in _NUMPY_FLOATS:
        if value.dtype is torch.bool or value.is_complex():
            raise TypeError(f"priority: expected real numbers, found {value.dtype}")
        if value.is_floating_point():
            value = value.to(torch.float32)
    if value.shape != (count,):
        fits_all = value.ndim == 0 if is_batch else value.numel() == 1
        if fits_all and count != 1:
            value = value.reshape(1).expand(count)
        if value.numel() != count:
            whose = "row of the batch" if is_batch else "index"
            raise ValueError(f"priority: expected {count} values, one per {whose}, found {value.numel()}")
        value = value.reshape(-1)
    if not (is_finite := np.isfinite(value.numpy())).all():
        odd = np.flatnonzero(~is_finite)
        raise ValueError(
            f"priority: expected finite values, found {len(odd)} of {count} that are nan or infinite, the first at "
            f"position {odd[0]} (no priority was changed)"
        )
    return value


def versions(version: Any, count: int) -> Int64Array:
    """Versions that a caller hands in for so many items: of each, int64 ``[items]``, or one for all, ``[]``.

    Raises:
        TypeError: they are no integers.
        ValueError: they are more or fewer, or one is not from 0 to 2**53.
    """
    value = _tensor(version, "version", "integers")
    if value.dtype is torch.bool or value.is_floating_point() or value.is_complex():
        raise TypeError(f"version: expected an integer, or one for each item, found {value.dtype}")
    found: Int64Array = value.to(torch.int64).numpy().copy()
    if found.ndim and found.shape != (count,):
        raise ValueError(f"version: expected one for all items, or {count}, found {list(found.shape)}")
    if found.size and not 0 <= int(found.min()) <= int(found.max()) <= 2**53:
        raise ValueError(f"version: expected numbers from 0, found {found.reshape(-1)[:4].tolist()}")
    return found


def stored_rows(write_count: Any, size: int, stop: int, stored: int) -> None:
    """Refuse a writer that was just loaded and does not go with the rows in storage.

    Args:
        write_count: number of items that it has placed.
        size: number of valid rows.
        stop: the row behind the last valid one.
        stored: number of rows that the storage has.

    Raises:
        CheckpointCorruptError: they contradict each other.
    """
    natural(int(write_count), "writer: expected write_count", least=size)
    if stop > stored:
        raise CheckpointCorruptError(f"writer: expected a size of at most {stored}, the rows in storage, found {stop}")
