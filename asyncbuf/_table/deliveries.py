"""Which writes came before: keys of a window, and how far each producer is."""

from __future__ import annotations

import json
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._plain.state import fields, int64s
from asyncbuf.errors import CheckpointCorruptError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncbuf.rows import Rows

Key = str | int

# So many keys are made plain together, once and for all: a snapshot of 100,000 of them only copies bytes.
_BLOCK = 1024
DEFAULT_WINDOW = 100_000
LEAST_INT, MOST_INT = -(2**63), 2**63 - 1


class Deliveries:
    """The keys of the last writes that had one, and the next number of each producer. All in turns of the history.

    Args:
        window: how many keys are kept, those written last.
        written: says how many items have been written.

    Attributes:
        next_numbers: the next number of each producer.
        refused: how many numbers were used up by writes that were too old.
    """

    def __init__(self, window: int, written: Callable[[], int]) -> None:
        self._window = window
        self._written = written
        # By key, how many items had been written when it was; and the keys in the order in which they came.
        self._positions: dict[Key, int] = {}
        self._order: deque[Key] = deque()
        # The same keys as bytes, in blocks of so many each; those that follow the last block are not made plain yet.
        self._blocks: deque[_Block] = deque()
        self._gone = 0  # how many keys of the first block have left the window
        self._loose: list[Key] = []
        self.next_numbers: dict[str, int] = {}
        self.refused = 0

    # -- keys ---------------------------------------------------------------------------------------------------------

    def has(self, key: Key) -> bool:
        """Whether a key is in the window."""
        return key in self._positions

    def position(self, key: Key) -> int | None:
        """How many items had been written when those of a key were, these included; None if it is not known."""
        return self._positions.get(key)

    def take(self, key: Key) -> None:
        """A key was written just now, which was not in the window."""
        self._positions[key] = self._written()
        self._order.append(key)
        self._loose.append(key)
        if len(self._loose) >= _BLOCK:
            self._blocks.append(self._block(self._loose))
            self._loose = []
        if len(self._order) > self._window:
            self._forget_oldest()

    def _block(self, keys: Sequence[Key]) -> _Block:
        return _Block(len(keys), *_plain(keys, [self._positions[key] for key in keys]))

    def _forget_oldest(self) -> None:
        del self._positions[self._order.popleft()]
        if not self._blocks:
            del self._loose[0]
            return
        self._gone += 1
        if self._gone == self._blocks[0].count:
            self._blocks.popleft()
            self._gone = 0

    # -- producers ----------------------------------------------------------------------------------------------------

    def next_number(self, producer: str) -> int:
        """The number that the next write of a producer has."""
        return self.next_numbers.get(producer, 0)

    def took(self, producer: str) -> None:
        """The next number of a producer was written."""
        self.next_numbers[producer] = self.next_numbers.get(producer, 0) + 1

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Keys as JSON texts of lists, as bytes, with their positions; the next number of each producer."""
        blocks = [(block.text, block.positions) for block in self._blocks]
        if self._loose:
            blocks.append(_plain(self._loose, [self._positions[key] for key in self._loose]))
        return {
            "keys": [text for text, _ in blocks],
            "positions": [positions for _, positions in blocks],
            "gone": self._gone,
            "refused": self.refused,
            "producers": [_text(list(self.next_numbers))] if self.next_numbers else [],
            "numbers": [torch.tensor(list(self.next_numbers.values()))] if self.next_numbers else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the keys that are within the window here, and the producers."""
        texts, positions, gone, refused, producers, numbers = fields(
            state, "deliveries", keys=list, positions=list, gone=int, refused=int, producers=list, numbers=list
        )
        blocks = _blocks(texts, positions)
        keys = [key for found, _ in blocks for key in found]
        where = np.concatenate([np.empty(0, np.int64), *(block.positions.numpy() for _, block in blocks)])
        if gone > len(keys) or len({*keys[gone:]}) != len(keys) - gone or not all(map(is_key, keys)):
            raise CheckpointCorruptError("deliveries: expected different keys, each a text or an int, found others")
        if (np.diff(where) < 0).any() or (len(where) and where[0] < 1):
            raise CheckpointCorruptError("deliveries: expected ascending positions of keys, found others")
        names = [name for found, _ in _blocks(producers, numbers) for name in found]
        nexts = [number for _, block in _blocks(producers, numbers) for number in block.positions.tolist()]
        if len({*names}) != len(names) or not all(isinstance(name, str) for name in names) or min(nexts, default=1) < 1:
            raise CheckpointCorruptError("deliveries: expected different producers with their next numbers")
        first = max(gone, len(keys) - self._window)
        kept = keys[first:]
        self._positions = dict(zip(kept, where[first:].tolist(), strict=True))
        self._order = deque(kept)
        self._blocks, self._gone, self._loose = deque(block for _, block in blocks), first, []
        while self._blocks and self._gone >= self._blocks[0].count:
            self._gone -= self._blocks.popleft().count
        if self._blocks and self._blocks[-1].count < _BLOCK:
            last = self._blocks.pop().count
            self._loose = kept[-last:] if self._blocks else kept
            self._gone = self._gone if self._blocks else 0
        self.next_numbers, self.refused = dict(zip(names, nexts, strict=True)), refused

    def verify(self, rows: Rows) -> None:
        """Refuse keys of items that were not written.

        Raises:
            CheckpointCorruptError: there are some.
        """
        last = self._positions[self._order[-1]] if self._order else 0
        if last > rows.write_count or sum(self.next_numbers.values()) > rows.write_count + self.refused:
            raise CheckpointCorruptError(
                f"deliveries: expected keys and numbers of at most {rows.write_count} items written, found more"
            )


class _Block:
    """Keys as bytes.

    Attributes:
        count: number of keys.
        text: a list of them in JSON, as uint8 ``[bytes]``.
        positions: int64 ``[count]``.
    """

    __slots__ = ("count", "positions", "text")

    def __init__(self, count: int, text: torch.Tensor, positions: torch.Tensor) -> None:
        self.count = count
        self.text = text
        self.positions = positions


def is_key(value: Any) -> bool:
    """Whether it is a text, or an int of 64 bits."""
    return type(value) is str or (type(value) is int and LEAST_INT <= value <= MOST_INT)


def _plain(keys: Sequence[Key], positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return _text(keys), torch.from_numpy(np.array(positions, np.int64))


def _text(values: Sequence[Key]) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(values, separators=(",", ":")).encode()), dtype=torch.uint8)


def _blocks(texts: list[Any], numbers: list[Any]) -> list[tuple[list[Any], _Block]]:
    """What ``_plain`` was made of, and made into, block by block."""
    blocks = []
    if len(texts) != len(numbers):
        raise CheckpointCorruptError(f"deliveries: expected as many blocks of numbers as of texts ({len(texts)})")
    for text, tensor in zip(texts, numbers, strict=True):
        if not isinstance(text, torch.Tensor) or text.dtype is not torch.uint8 or text.ndim != 1:
            raise CheckpointCorruptError("deliveries: expected a text as uint8 [bytes], found something else")
        try:
            values = json.loads(text.numpy().tobytes())
        except (ValueError, RecursionError) as error:
            raise CheckpointCorruptError(f"deliveries: expected a list in JSON, found {error}") from error
        count = len(int64s(tensor, "deliveries: expected numbers"))
        if not isinstance(values, list) or len(values) != count or not count:
            raise CheckpointCorruptError(f"deliveries: expected {count} values in a list, found others")
        if not {*map(type, values)} <= {str, int}:
            raise CheckpointCorruptError("deliveries: expected texts and ints, found others")
        blocks.append((values, _Block(count, text.clone(), tensor.clone())))
    return blocks
