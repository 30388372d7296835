"""Copies of large tensors and arrays that are made later, in a thread."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

# What is copied at once: so much altogether takes less than a thread.
_AT_ONCE_BYTES = 1024 * 1024


class LateCopies:
    """Stands in for copying: gives out memory now, and fills it when ``make`` is called.

    Only what is on the CPU is late. Copies on other devices are made at once, because they do not hold up the caller
    and belong into its stream.
    """

    def __init__(self) -> None:
        self._jobs: list[Callable[[], object]] = []
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._room = _AT_ONCE_BYTES
        self._is_stopped = False

    def __bool__(self) -> bool:
        """Whether there is something left to copy."""
        return bool(self._jobs)

    def tensor(self, source: torch.Tensor) -> torch.Tensor | None:
        """Memory for a copy of a tensor without history; None if it should be copied at once."""
        if source.device.type != "cpu" or self._is_small(source.nbytes):
            return None
        # Not torch.empty, which fills the memory where algorithms must be deterministic.
        memory = np.empty(source.numel() * source.element_size(), np.uint8)
        copy = torch.from_numpy(memory).view(source.dtype).view(source.shape)
        source = source.detach().as_subclass(torch.Tensor)
        if not source.is_inference():  # nobody can tell whether such a one changed
            self._versions.append((source, source._version))
        # Filled by another name: by its own, it may require a gradient by then.
        self._jobs.append(functools.partial(copy.detach().copy_, source))
        return copy

    def array(self, source: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
        """Memory for the bytes of an array in C order, uint8 ``[bytes]``; None if it should be copied at once."""
        if self._is_small(source.nbytes):
            return None
        copy = np.empty(source.shape, source.dtype)
        self._jobs.append(functools.partial(np.copyto, copy, source))
        return copy.reshape(-1).view(np.uint8)

    def _is_small(self, nbytes: int) -> bool:
        if nbytes > self._room:
            return False
        self._room -= nbytes
        return True

    def make(self) -> None:
        """Make all copies. May take long; torch and numpy give the interpreter's lock away meanwhile."""
        for job in self._jobs:
            if self._is_stopped:
                return
            job()
        self._jobs.clear()

    def stop(self) -> None:
        """Let ``make`` end early, from another thread. What was given out is worth nothing then."""
        self._is_stopped = True

    @property
    def are_sound(self) -> bool:
        """Whether no tensor was changed since memory for it was given out, as far as torch knows."""
        return all(source._version == version for source, version in self._versions)
