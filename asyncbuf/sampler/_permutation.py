"""A random order of the numbers 0 to n - 1 that is fixed by one seed, and of which any part can be had at once.

Short orders are drawn by ``torch.randperm``. A long one would block the event loop and have to be stored, so it is
*computed*: a Feistel network turns each position into an index, which is a bijection whatever its round function is
(Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", SIAM J. Comput. 17(2),
1988); positions that leave the range walk on along their cycle until they are back in it (Black and Rogaway, "Ciphers
with arbitrary finite domains", CT-RSA 2002). Mitchell et al., "Bandwidth-Optimal Random Shuffling for GPUs" (ACM TOPC,
2022), measure the statistical quality of shuffles made this way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_SHORT = 1 << 16
_ROUNDS = 10
_CHUNK = 1 << 13

U64 = np.ndarray[Any, np.dtype[np.uint64]]


class Permutation:
    """The random order.

    Args:
        length: n, at least 1.
        seed: 63 bits that fix the order.
    """

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self._short: torch.Tensor | None = None
        self._positions: np.ndarray[Any, np.dtype[np.int64]] | None = None
        if length <= _SHORT:
            # The generator of the CPU looks at the lower 32 bits of a seed only.
            folded = (seed ^ (seed >> 32)) & 0xFFFFFFFF
            generator = torch.Generator().manual_seed(folded)
            self._short = torch.randperm(length, generator=generator, device="cpu")
            return
        bits = (length - 1).bit_length()
        self._low = np.uint64(bits // 2)
        self._low_mask = np.uint64((1 << (bits // 2)) - 1)
        self._high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
        self._keys = np.random.SeedSequence(seed).generate_state(_ROUNDS, np.uint64)
        self._chunk_start = -1
        self._chunk = np.empty(0, np.int64)

    def __getitem__(self, positions: slice) -> torch.Tensor:
        """The indices at ``start <= position < stop``: int64 ``[stop - start]``."""
        if self._short is not None:
            return self._short[positions].clone()
        start, stop = positions.start, min(positions.stop, self.length)
        parts = [np.empty(0, np.int64)]
        while start < stop:
            chunk_start = start - start % _CHUNK
            if chunk_start != self._chunk_start:
                # Many small batches share one computation; it is not part of any saved state.
                self._chunk = self._at(np.arange(chunk_start, min(chunk_start + _CHUNK, self.length), dtype=np.uint64))
                self._chunk_start = chunk_start
            part = self._chunk[start - chunk_start : stop - chunk_start]
            parts.append(part)
            start += len(part)
        return torch.from_numpy(np.concatenate(parts))

    def positions_of(self, indices: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Where some indices are: int64, the inverse of ``self[positions]``."""
        if self._short is None:
            return self._walk(self._inverse, indices.astype(np.uint64))
        if self._positions is None:
            self._positions = np.empty(self.length, np.int64)
            self._positions[self._short.numpy()] = np.arange(self.length)
        found: np.ndarray[Any, np.dtype[np.int64]] = self._positions[indices]
        return found

    def _at(self, positions: U64) -> np.ndarray[Any, np.dtype[np.int64]]:
        return self._walk(self._bijection, positions)

    def _walk(self, step: Callable[[U64], U64], start: U64) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Go on along the cycle of each value until it is in the range."""
        values = step(start)
        outside = np.flatnonzero(values >= self.length)
        while outside.size:
            values[outside] = step(values[outside])
            outside = outside[values[outside] >= self.length]
        return values.astype(np.int64)

    def _bijection(self, values: U64) -> U64:
        high, low = values >> self._low, values & self._low_mask
        for i in range(0, _ROUNDS, 2):
            high = high ^ (_mixed(low, self._keys[i]) & self._high_mask)
            low = low ^ (_mixed(high, self._keys[i + 1]) & self._low_mask)
        return (high << self._low) | low

    def _inverse(self, values: U64) -> U64:
        high, low = values >> self._low, values & self._low_mask
        for i in reversed(range(0, _ROUNDS, 2)):
            low = low ^ (_mixed(high, self._keys[i + 1]) & self._low_mask)
            high = high ^ (_mixed(low, self._keys[i]) & self._high_mask)
        return (high << self._low) | low


def _mixed(values: U64, key: np.uint64) -> U64:
    """The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014) over value and key."""
    mixed = values + key
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed
