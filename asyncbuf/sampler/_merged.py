"""Draws of several tables made one, and taken apart again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from asyncbuf.batch import Draw

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Drawn(NamedTuple):
    """A draw of one table.

    Attributes:
        table: position of the table.
        name: its name.
        start: its first row in the storage.
        draw: with rows that are counted from that one.
    """

    table: int
    name: str
    start: int
    draw: Draw

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but rows."""
        draw = self.draw
        return not draw.info and draw.shape is None and draw.lengths is None

    @property
    def groups(self) -> int:
        """Number of slices, or of ragged groups, or of rows where there are neither."""
        draw = self.draw
        if draw.shape is not None:
            return draw.shape[0]
        return (draw.indices if draw.lengths is None else draw.lengths).shape[0]


def merged(parts: Sequence[Drawn]) -> Draw:
    """One draw of the rows of several, one after the other.

    Raises:
        TypeError: their rows are not laid out in the same way.
    """
    indices = torch.cat([part.draw.indices + part.start if part.start else part.draw.indices for part in parts])
    groups = [part.groups for part in parts]
    tables = np.empty(sum(groups), np.int64)
    stop = 0
    for part, count in zip(parts, groups, strict=True):
        tables[stop : (stop := stop + count)] = part.table
    if all(part.is_plain for part in parts):
        return Draw(indices, {"table": torch.from_numpy(tables)})
    shapes = {None if part.draw.shape is None else part.draw.shape[1:] for part in parts}
    if len(shapes) > 1 or len({part.draw.lengths is None for part in parts}) > 1:
        told = {part.name: part.draw.shape or ("ragged" if part.draw.lengths is not None else "rows") for part in parts}
        raise TypeError(f"expected draws of the same shape from all tables, found {told}")
    rest = shapes.pop()
    shape = None if rest is None else (sum(groups), *rest)
    lengths = [part.draw.lengths for part in parts if part.draw.lengths is not None]
    info = {**_info(parts), "table": torch.from_numpy(tables)}
    return Draw(indices, info, shape=shape, lengths=torch.cat(lengths) if lengths else None)


def _info(parts: Sequence[Drawn]) -> dict[str, Any]:
    """What the samplers say of their rows: together where that is possible, and table by table where it is not."""
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for part in parts for key in part.draw.info):
        values = [part.draw.info.get(key) for part in parts]
        shapes = {_shape(value, part) for value, part in zip(values, parts, strict=True) if value is not None}
        if len(shapes) == 1 and (shape := shapes.pop()) is not None:
            merged[key] = _joined(key, values, parts, *shape)
        else:
            merged |= {
                f"{part.name}/{key}": value for value, part in zip(values, parts, strict=True) if value is not None
            }
    return merged


def _shape(value: Any, part: Drawn) -> tuple[bool, tuple[int, ...]] | None:
    """Whether there is a value for each row, not for each group, and the shape of each; None if it is neither."""
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return None
    if len(value) == part.groups:
        return False, tuple(value.shape[1:])
    return (True, tuple(value.shape[1:])) if len(value) == len(part.draw.indices) else None


def _joined(
    key: str, values: Sequence[Any], parts: Sequence[Drawn], by_row: bool, shape: tuple[int, ...]
) -> torch.Tensor:
    dtype = next(value.dtype for value in values if value is not None)
    filled = []
    for value, part in zip(values, parts, strict=True):
        if value is None:
            count = len(part.draw.indices) if by_row else part.groups
            value = torch.full((count, *shape), _fill(key, dtype), dtype=dtype, device="cpu")
        filled.append(value)
    return torch.cat(filled)


def _fill(key: str, dtype: torch.dtype) -> Any:
    """What stands for the rows of a sampler that says nothing of them."""
    if dtype.is_floating_point or dtype.is_complex:
        return 1.0 if key == "weights" else torch.nan
    return False if dtype is torch.bool or not dtype.is_signed else -1


def parted(draw: Draw, starts: Sequence[int], names: Sequence[str]) -> Iterator[tuple[int, Draw]]:
    """The way back: for each table of which there are rows, its position and its part of a draw.

    Args:
        draw: what ``merged`` made.
        starts: the first row of each table, ascending.
        names: of the tables.
    """
    tables = np.searchsorted(starts, draw.indices.numpy(), side="right") - 1
    firsts = [0, *(np.flatnonzero(np.diff(tables)) + 1).tolist()]
    size = 1 if draw.shape is None else int(np.prod(draw.shape[1:]))
    ends = None if draw.lengths is None else draw.lengths.cumsum(0).numpy()
    for first, stop in zip(firsts, [*firsts[1:], len(tables)], strict=True):
        table = int(tables[first])
        if ends is None:
            groups = slice(first // size, stop // size)
        else:
            groups = slice(*np.searchsorted(ends, [first, stop], side="right").tolist())
        total = len(draw.indices) // size if ends is None else len(ends)
        info = dict(_part_of(draw, slice(first, stop), groups, total, names[table]))
        yield (
            table,
            Draw(
                draw.indices[first:stop] - starts[table],
                info,
                shape=None if draw.shape is None else ((stop - first) // size, *draw.shape[1:]),
                lengths=None if draw.lengths is None else draw.lengths[groups],
            ),
        )


def _part_of(draw: Draw, rows: slice, groups: slice, total: int, name: str) -> Iterator[tuple[str, Any]]:
    for key, value in draw.info.items():
        if key.startswith(f"{name}/"):
            yield key[len(name) + 1 :], value
        elif isinstance(value, torch.Tensor) and value.ndim and key != "table":
            yield key, value[groups if len(value) == total else rows]
