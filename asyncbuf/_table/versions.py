"""Which version of the model each stored item is of."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from asyncbuf._plain.state import fields, int64s
from asyncbuf._runtime.shield import shielded
from asyncbuf.batch import Draw
from asyncbuf.errors import CheckpointCorruptError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncbuf.rows import Int64Array, Placement, Rows
    from asyncbuf.staleness import Staleness

# The version of a row without an item: never too old.
_NONE = 2**62
_MOST = 2**53
_logger = logging.getLogger("asyncbuf")


class Coming(NamedTuple):
    """The versions and numbers of items that are to be written.

    Attributes:
        versions: of each item, int64 ``[items]``, or one for all.
        newest: the highest of them.
        oldest: the lowest of them.
        ids: the numbers of the items: int64 ``[items]``; None if nobody asks.
    """

    versions: Int64Array | int
    newest: int
    oldest: int
    ids: Int64Array | None = None


class Versions:
    """The current version, and those of the stored items.

    Args:
        policy: how old they may be.
        capacity: number of rows.

    Attributes:
        columns: paths of the fields that it must know of what is written.
        version: the current version.
        refused: number of items that were too old to be written.
    """

    def __init__(self, policy: Staleness, capacity: int) -> None:
        self._policy = policy
        self._capacity = capacity
        self.version = self.refused = 0
        self._of_row = np.full(capacity, _NONE)
        self._ids = np.zeros(capacity if policy.id_key is not None else 0, np.int64)
        self._newest = 0  # no item that was ever stored is newer
        self._oldest: int = _NONE  # no stored item is older; it may be that none is as old
        self.columns = tuple(key for key in (policy.version_key, policy.id_key) if key is not None)

    @property
    def least(self) -> int:
        """The lowest version that is not too old."""
        return -_NONE if self._policy.max_age is None else self.version - self._policy.max_age

    # -- what happens to rows -----------------------------------------------------------------------------------------

    def coming(self, said: Any, columns: Mapping[str, Any]) -> Coming:
        """What a write brings.

        Args:
            said: what came with the items: int64 ``[items]`` or ``[]``; None if nothing did.
            columns: the fields of the items.

        Raises:
            SchemaError: a field is no integer, or the numbers are several for an item.
        """
        if said is None and not self.columns:
            return Coming(self.version, self.version, self.version)
        policy, versions, ids = self._policy, said, None
        if versions is None and policy.version_key is not None:
            found = _integers(columns[policy.version_key], policy.version_key)
            if found.size and not 0 <= int(found.min()) <= int(found.max()) <= _MOST:
                odd = found[(found < 0) | (found > _MOST)]
                raise SchemaError(f"{policy.version_key}: expected versions from 0 to 2**53, found {odd[:4].tolist()}")
            versions = found.reshape(len(found), -1).min(axis=1, initial=_NONE)
        if policy.id_key is not None:
            ids = _integers(columns[policy.id_key], policy.id_key)
            if ids.size != len(ids):
                raise SchemaError(f"{policy.id_key}: expected one number per item, found {list(ids.shape[1:])}")
            ids = ids.reshape(-1)
        if versions is None:
            return Coming(self.version, self.version, self.version, ids)
        return Coming(versions, int(versions.max(initial=-_NONE)), int(versions.min(initial=_NONE)), ids)

    def refuses(self, coming: Coming, count: int) -> bool:
        """Whether a write is for nothing, because all of its items are too old. Those are counted, and told."""
        if coming.newest >= self.least:
            return False
        self.refused += count
        if coming.ids is not None:
            self._tell(coming.ids)
        return True

    def wrote(self, coming: Coming, placement: Placement) -> None:
        """Items of a write are in their rows now."""
        versions, ids, runs = coming.versions, coming.ids, placement.runs
        if ids is None and isinstance(versions, int) and len(runs) == 1:
            first = runs[0]
            self._of_row[first.row : first.row + first.count] = versions
        else:
            rows, items = placement.rows, placement.items
            self._of_row[rows] = versions if isinstance(versions, int) or not versions.ndim else versions[items]
            if ids is not None:
                self._ids[rows] = ids[items]
        self._oldest, self._newest = min(self._oldest, coming.oldest), max(self._newest, coming.newest)

    def removed(self, rows: Int64Array) -> None:
        """Rows have left."""
        self._of_row[rows] = _NONE

    def clear(self) -> None:
        """Every row has left."""
        self._of_row.fill(_NONE)
        self._oldest = _NONE

    def too_old(self) -> Int64Array:
        """The rows whose items are too old: int64 ``[rows]``."""
        least = self.least
        if self._oldest >= least:
            return np.empty(0, np.int64)
        is_old = self._of_row < least
        self._oldest = int(self._of_row.min(initial=_NONE, where=~is_old))
        return np.flatnonzero(is_old)

    def tell(self, rows: Int64Array) -> None:
        """Tell of items that leave because they are too old."""
        if len(self._ids):
            self._tell(self._ids[rows])

    def _tell(self, ids: Int64Array) -> None:
        if self._policy.on_evict is None or not len(ids):
            return
        try:
            shielded(self._policy.on_evict, ids.tolist())
        except Exception:
            _logger.exception("on_evict raised; the items have left all the same: %s", ids[:8].tolist())

    # -- draws --------------------------------------------------------------------------------------------------------

    def told(self, draw: Draw, rows: Int64Array) -> Draw:
        """A draw that says of which versions its rows are, and how old."""
        versions = self._of_row[rows]
        if draw.shape is not None:
            versions = versions.reshape(draw.shape)
        return self._with(draw, versions)

    def told_again(self, draw: Draw) -> Draw:
        """A draw that was told before, with the ages of now."""
        versions = draw.info.get("version")
        return self._with(draw, versions.numpy()) if isinstance(versions, torch.Tensor) else draw

    def _with(self, draw: Draw, versions: Int64Array) -> Draw:
        ages = self.version - versions
        if self._newest > self.version:
            ages = np.maximum(ages, 0)
        said = {"version": torch.from_numpy(versions), "age": torch.from_numpy(ages)}
        return Draw(draw.indices, {**draw.info, **said} if draw.info else said, *draw[2:])

    def is_too_old(self, draw: Draw) -> bool:
        """Whether a draw has a row whose item is too old now."""
        versions = draw.info.get("version")
        if not isinstance(versions, torch.Tensor):  # drawn by a buffer without versions
            return self.least > 0
        return bool(versions.numel()) and int(versions.min()) < self.least

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The current version; those of the rows, up to the last one with an item, and the numbers of their items."""
        stop = int(np.flatnonzero(self._of_row != _NONE).max(initial=-1)) + 1
        return {
            "version": self.version,
            "refused": self.refused,
            "versions": torch.from_numpy(self._of_row[:stop].copy()),
            "ids": torch.from_numpy(self._ids[:stop].copy()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the version that was saved."""
        version, refused, versions, ids = fields(
            state, "versions", version=int, refused=int, versions=torch.Tensor, ids=torch.Tensor
        )
        versions, ids = int64s(versions, "versions: expected versions"), int64s(ids, "versions: expected ids")
        if len(versions) > self._capacity or len(ids) not in (0, len(versions)):
            raise CheckpointCorruptError(
                f"versions: expected those of at most {self._capacity} rows, found {len(versions)} and {len(ids)}"
            )
        if version >= _NONE or versions.max(initial=0) > _NONE or versions.min(initial=0) <= -_NONE:
            raise CheckpointCorruptError("versions: expected numbers below 2**62, found larger ones")
        self.clear()
        self.version, self.refused = version, refused
        self._of_row[: len(versions)] = versions
        self._oldest = int(self._of_row.min(initial=_NONE))
        self._newest = int(self._of_row.max(initial=0, where=self._of_row < _NONE))
        if len(self._ids):
            self._ids.fill(-1)
            self._ids[: len(ids)] = ids

    def verify(self, rows: Rows) -> None:
        """Refuse versions of other rows than the valid ones. Where none are known, all are of the current version."""
        valid = np.zeros(self._capacity, np.bool_)
        valid[rows.at(torch.arange(rows.size, device="cpu")).numpy()] = True
        known = self._of_row != _NONE
        if not known.any():
            self._of_row[valid] = self._oldest = self.version
        elif not np.array_equal(known, valid):
            raise CheckpointCorruptError(
                f"versions: expected those of the {rows.size} valid rows, found {np.count_nonzero(known)} others"
            )


def _integers(column: Any, path: str) -> Int64Array:
    if column.dtype.kind not in "iu":
        raise SchemaError(f"{path}: expected integers, because Staleness asks for them; found {column.dtype}")
    found: Int64Array = column.astype(np.int64)
    return found
