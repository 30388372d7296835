"""What samplers share that know of each row which item it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from asyncbuf.errors import CheckpointCorruptError

if TYPE_CHECKING:
    from asyncbuf.rows import BoolArray, Int64Array, Rows


def verify_items(name: str, numbers: Int64Array, is_known: BoolArray, rows: Rows) -> None:
    """Refuse other items than those of the table.

    Args:
        name: of the sampler, for messages.
        numbers: by row, the number of its item, and 1: int64 ``[capacity]``, or ``[0]`` before the first write.
        is_known: by row, whether the sampler knows of an item there.
        rows: those of the table.

    Raises:
        CheckpointCorruptError: they are others.
    """
    if len(numbers) not in (0, rows.capacity) or numbers.max(initial=0) > rows.write_count:
        raise CheckpointCorruptError(
            f"{name}: expected items of {rows.capacity} rows, with numbers below {rows.write_count}; found others"
        )
    known = np.flatnonzero(is_known)
    if len(known) != rows.size or not bool(rows.contains(torch.from_numpy(known)).all()):
        raise CheckpointCorruptError(
            f"{name}: expected the items of the {rows.size} valid rows, found those of {len(known)} rows"
        )
