"""A random order of the numbers 0 to n - 1 that is fixed by one seed, and of which any part can be had at once.

Short orders are drawn by ``torch.randperm``. A long one would block the event loop and have to be stored, so it is
*computed*: a Feistel network turns each position into an index, which is a bijection whatever its round function is
(Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", SIAM J. Comput. 17(2),
1988). One of its halves has some bits; to the other, a number below *a*, rounds add modulo *a*. So its range is hardly
larger than n, and the few positions that leave n walk on along their cycle until they are back in it (Black and
Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, for both). Mitchell et al., "Bandwidth-Optimal Random
Shuffling for GPUs" (ACM TOPC, 2022), measure the statistical quality of shuffles made this way.
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
_HALF = np.uint64(32)
# Orders of kind 1 have bits in both halves, and walk on from up to half of their range. Passes of older checkpoints do.
KINDS = OLD_KIND, LATEST_KIND = 1, 2

U64 = np.ndarray[Any, np.dtype[np.uint64]]


class Permutation:
    """The random order.

    Args:
        length: n, at least 1.
        seed: 63 bits that fix the order.
        kind: one of ``KINDS``, which also fixes it.

    Attributes:
        length: n.
        kind: the kind.
    """

    def __init__(self, length: int, seed: int, kind: int = LATEST_KIND) -> None:
        self.length = length
        self.kind = kind
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
        # High halves are below that.
        self._highs = np.uint64(-(-length >> (bits // 2)) if kind == LATEST_KIND else 1 << (bits - bits // 2))
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
        mixed, spare = np.empty_like(values), np.empty_like(values)
        for i in range(0, _ROUNDS, 2):
            _mix(low, self._keys[i], mixed, spare)
            self._move(high, mixed, spare, np.add, np.subtract)
            low ^= np.bitwise_and(_mix(high, self._keys[i + 1], mixed, spare), self._low_mask, out=mixed)
        return (high << self._low) | low

    def _inverse(self, values: U64) -> U64:
        high, low = values >> self._low, values & self._low_mask
        mixed, spare = np.empty_like(values), np.empty_like(values)
        for i in reversed(range(0, _ROUNDS, 2)):
            low ^= np.bitwise_and(_mix(high, self._keys[i + 1], mixed, spare), self._low_mask, out=mixed)
            _mix(low, self._keys[i], mixed, spare)
            self._move(high, mixed, spare, np.subtract, np.add)
        return (high << self._low) | low

    def _move(self, high: U64, mixed: U64, spare: U64, there: np.ufunc, back: np.ufunc) -> None:
        """Add a number to the high halves modulo how many there are, or take it away; in place."""
        if self.kind == OLD_KIND:
            high ^= np.bitwise_and(mixed, self._highs - np.uint64(1), out=mixed)
            return
        # The upper 32 bits, as a share of all that they can be: below 2**32 high halves, a product has 64 bits.
        mixed >>= _HALF
        mixed *= self._highs
        mixed >>= _HALF
        there(high, mixed, out=high)
        # Of both, that which is no more than the range is the smaller one: the other has wrapped around, or is beyond.
        np.minimum(high, back(high, self._highs, out=spare), out=high)


def _mix(values: U64, key: np.uint64, mixed: U64, spare: U64) -> U64:
    """The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014) over value and key, in memory that is given."""
    np.add(values, key, out=mixed)
    mixed ^= np.right_shift(mixed, np.uint64(30), out=spare)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= np.right_shift(mixed, np.uint64(27), out=spare)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= np.right_shift(mixed, np.uint64(31), out=spare)
    return mixed
