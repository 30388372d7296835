"""Items with sequences for tests, which follow from their numbers alone, and what gathering them must give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

RAGGED = ("tokens", "deep/marks")
GROUPS = {"prompt": ["tokens"], "answer": ["deep/marks", "deep/halves"]}
PADS = {"tokens": -100}


def length_of(number: int) -> int:
    """How many tokens an item has: 0 for some."""
    return number * 7 % 11 * (number % 4 > 0)


def ragged_item(number: int) -> dict[str, Any]:
    """An item; ``tokens`` is a list or a tensor, ``marks`` has two numbers for each token."""
    count = length_of(number)
    tokens = torch.arange(number, number + count)
    marks = (tokens[:, None] * torch.tensor([3, 5]) % 251).to(torch.uint8)
    return {
        "number": torch.tensor(number),
        "tokens": tokens.tolist() if number % 3 == 2 and count else tokens,
        "deep": {"marks": marks, "half": torch.tensor(number / 3, dtype=torch.bfloat16)},
    }


def ragged_list(count: int, start: int = 0) -> list[Any]:
    """Items in a list."""
    return [ragged_item(number) for number in range(start, start + count)]


def grouped_list(count: int, start: int = 0) -> list[Any]:
    """Items of two groups."""
    items = []
    for number in range(start, start + count):
        item = ragged_item(number)
        other = (number * 5 + 2) % 7
        marks = torch.full((other, 2), number % 200, dtype=torch.uint8)
        halves = torch.arange(other, dtype=torch.bfloat16) + number % 8
        items.append({**item, "deep": {"marks": marks, "halves": halves}})
    return items


def columns_of(count: int, start: int = 0) -> dict[str, Any]:
    """Items as one dict, with sequences in lists."""
    items = ragged_list(count, start)
    return {
        "number": torch.stack([item["number"] for item in items]),
        "tokens": [item["tokens"] for item in items],
        "deep": {
            "marks": [item["deep"]["marks"] for item in items],
            "half": torch.stack([item["deep"]["half"] for item in items]),
        },
    }


def padded(sequences: Sequence[Any], pad: float = 0) -> torch.Tensor:
    """Sequences with something behind them."""
    tensors = [torch.as_tensor(each) for each in sequences]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=pad)


def expected_batch(items: Sequence[Any], layout: str) -> dict[str, Any]:
    """What a storage of ``RAGGED`` with pad values ``PADS`` gathers of some items."""
    tokens = [torch.as_tensor(item["tokens"]) for item in items]
    marks = [item["deep"]["marks"] for item in items]
    lengths = torch.tensor([len(each) for each in tokens], dtype=torch.int64)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    if layout == "padded":
        values = [padded(tokens, -100), padded(marks)]
    else:
        values = [torch.cat(tokens), torch.cat(marks)]
        if layout == "jagged":
            values = [torch.nested.nested_tensor_from_jagged(each, offsets) for each in values]
    return {
        "number": torch.stack([item["number"] for item in items]),
        "tokens": values[0],
        "deep": {"marks": values[1], "half": torch.stack([item["deep"]["half"] for item in items])},
        "lengths": lengths,
        **({"offsets": offsets} if layout == "packed" else {}),
    }
