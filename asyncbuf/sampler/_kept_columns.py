"""Fields of stored items by row, for samplers that must look at them again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._plain.savable import tensor_problem
from asyncbuf._plain.state import described
from asyncbuf.errors import CheckpointCorruptError, CheckpointMismatchError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncbuf.rows import Int64Array

    Column = np.ndarray[Any, np.dtype[Any]]

# In which dtype the fields of each kind are kept.
_KEPT: dict[str, type[np.generic]] = {"b": np.bool_, "i": np.int64, "u": np.int64, "f": np.float64}
_DTYPES = (torch.bool, torch.int64, torch.float64)


class KeptColumns:
    """What was written into some fields, by row: bool, int64 or float64.

    Args:
        paths: the fields.
    """

    def __init__(self, paths: tuple[str, ...]) -> None:
        self._paths = paths
        self._columns: dict[str, Column] = {}  # [capacity, *field], from the first write on

    def check(self, offered: Mapping[str, Column]) -> None:
        """Refuse items whose fields cannot be kept beside those that are.

        Raises:
            SchemaError: a field has no numbers, or another shape than before.
        """
        for path in self._paths:
            column, known = offered[path], self._columns.get(path)
            if column.dtype.kind not in _KEPT:
                raise SchemaError(f"{path}: expected numbers, because the filter asks for them; found {column.dtype}")
            if known is not None and known.shape[1:] != column.shape[1:]:
                raise SchemaError(
                    f"{path}: expected the shape {list(known.shape[1:])} in all items, because the filter asks for it; "
                    f"found {list(column.shape[1:])}"
                )

    def values(self, columns: Mapping[str, Column]) -> dict[str, Column]:
        """The fields of items that are being written, as they are kept."""
        return {path: columns[path].astype(_KEPT[columns[path].dtype.kind]) for path in self._paths}

    def keep(self, rows: Int64Array, columns: Mapping[str, Column], capacity: int) -> None:
        """Items were written."""
        for path, values in self.values(columns).items():
            known = self._columns.get(path)
            if known is None:
                known = self._columns[path] = np.zeros((capacity, *values.shape[1:]), values.dtype)
            dtype = np.promote_types(known.dtype, values.dtype)
            if dtype != known.dtype:
                known = self._columns[path] = known.astype(dtype)
            known[rows] = values

    def together(self, rows: Int64Array, new: Mapping[str, Column], items: Int64Array) -> dict[str, Column]:
        """The fields of some stored items, and then of some that are being written: ``[items, *field]`` by path."""
        found = {path: new[path][items] for path in self._paths}
        if len(rows):
            found = {path: np.concatenate([self._columns[path][rows], values]) for path, values in found.items()}
        return found

    def clear(self) -> None:
        """Forget all."""
        self._columns = {}

    def state_dict(self, rows: Int64Array) -> dict[str, torch.Tensor]:
        """The fields of the items in some rows."""
        return {path: torch.from_numpy(column[rows]) for path, column in self._columns.items()}

    def of(self, state: Any, rows: Int64Array, capacity: int, name: str) -> KeptColumns:
        """Those of a checkpoint.

        Raises:
            CheckpointError: they are not columns of these fields and rows.
        """
        if state.keys() != (set(self._paths) if state or len(rows) else set()):
            raise CheckpointMismatchError(
                f"{name}: expected the fields {list(self._paths)}, which the filter of this buffer asks for; the "
                f"checkpoint has {sorted(map(str, state))}"
            )
        kept = KeptColumns(self._paths)
        for path, column in state.items():
            is_column = isinstance(column, torch.Tensor) and tensor_problem(column) is None
            if not is_column or column.dtype not in _DTYPES or not column.ndim or len(column) != len(rows):
                raise CheckpointCorruptError(
                    f"{name}: expected a column of {len(rows)} items at {path!r}, found {described(column)}"
                )
            kept._columns[path] = _spread(column, rows, capacity)
        return kept


def _spread(column: torch.Tensor, rows: Int64Array, capacity: int) -> Column:
    values = column.detach().cpu().numpy()
    found: Column = np.zeros((capacity, *values.shape[1:]), values.dtype)
    found[rows] = values
    return found
