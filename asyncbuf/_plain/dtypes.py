"""Names of torch dtypes in plain data."""

from __future__ import annotations

from typing import Any

import torch

from asyncbuf.errors import CheckpointCorruptError


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: Any) -> torch.dtype:
    """The way back.

    Raises:
        CheckpointCorruptError: there is no such dtype.
    """
    dtype = DTYPES.get(name)
    if dtype is None:
        raise CheckpointCorruptError(f"expected a torch dtype, found {name!r}")
    return dtype


DTYPES: dict[str, torch.dtype] = {
    dtype_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
