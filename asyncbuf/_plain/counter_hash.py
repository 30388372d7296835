"""Random numbers by their position: SplitMix64, of which any output can be had at once.

The n-th output of the generator of Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA
2014), is a hash of ``start + (n + 1) * golden gamma``. So there is no state to save, and many are computed at once. The
start is a hash of the seed, so that neighbouring seeds have nothing in common.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from asyncbuf._plain.integers import Int64Array

_GAMMA = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

U64 = np.ndarray[Any, np.dtype[np.uint64]]


class CounterHash:
    """The random numbers of one seed.

    Args:
        seed: from 0 to 2**63 - 1.
    """

    def __init__(self, seed: int) -> None:
        self._start = _mixed(seed + _GAMMA)

    def at(self, number: int) -> int:
        """The random number at one position from 0 on: 64 bits."""
        return _mixed(self._start + (number + 1) * _GAMMA)

    def of(self, numbers: Int64Array) -> U64:
        """Those at many positions, the same as by ``at``: uint64 ``[n]``."""
        z: U64 = numbers.astype(np.uint64)
        z += np.uint64(1)
        z *= np.uint64(_GAMMA)
        z += np.uint64(self._start)
        for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
            z ^= z >> np.uint64(shift)
            z *= np.uint64(multiplier)
        z ^= z >> np.uint64(31)
        return z


def _mixed(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * _MULTIPLIERS[0]) & _MASK
    z = ((z ^ (z >> 27)) * _MULTIPLIERS[1]) & _MASK
    return z ^ (z >> 31)
