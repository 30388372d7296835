"""The contract of storages holds for those of the package, and catches those that break it."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncbuf import CompressedStorage, ListStorage, RaggedStorage, Storage, TensorStorage
from asyncbuf.testing import check_storage, varied_items
from tests.contracts.broken_storages import BROKEN, ArrayStorage, Awaits, plain_items
from tests.resume_helpers import InThreads, list_items, list_of_tensordicts, tensordict_of
from tests.storage.mapped_helpers import in_files
from tests.storage.ragged_items import PADS, RAGGED, expected_batch, ragged_item, ragged_list

if TYPE_CHECKING:
    from collections.abc import Callable


def big_items(count: int, start: int) -> dict[str, Any]:
    """Items with leaves that get smaller and one that does not."""
    number = torch.arange(start, start + count)
    noise = torch.stack(
        [torch.randn(1000, generator=torch.Generator().manual_seed(int(n))) for n in number] or [torch.empty(0)]
    )
    return {
        **varied_items(count, start),
        "flat": number[:, None, None].to(torch.bfloat16).repeat(1, 40, 30),
        "noise": noise,
    }


SOUND: dict[str, tuple[Callable[[int], Storage], Callable[[int, int], Any], dict[str, Any]]] = {
    "tensor": (TensorStorage, varied_items, {"misfits": [{"number": torch.arange(3)}, varied_items(0, 0), 3]}),
    "tensor-strided": (lambda capacity: TensorStorage(capacity, contiguous=False), varied_items, {}),
    "tensor-threads": (InThreads, varied_items, {}),
    "tensor-tensordict": (TensorStorage, tensordict_of, {}),
    "memmap": (in_files, varied_items, {"misfits": [{"number": torch.arange(3)}, varied_items(0, 0), 3]}),
    "memmap-tensordict": (in_files, tensordict_of, {}),
    "compressed": (CompressedStorage, big_items, {"misfits": [{"number": torch.arange(3)}, big_items(0, 0), 3]}),
    "compressed-zlib": (lambda capacity: CompressedStorage(capacity, codec="zlib"), big_items, {}),
    "compressed-small": (CompressedStorage, varied_items, {}),
    "list": (ListStorage, list_items, {"keeps_references": True, "misfits": [[], "text", 3, {"a": 1}]}),
    "list-tensordict": (ListStorage, list_of_tensordicts, {"keeps_references": True}),
    **{
        f"ragged-{layout}": (
            functools.partial(RaggedStorage, ragged=RAGGED, layout=layout, pad_value=PADS),
            ragged_list,
            {
                "expected": lambda numbers, layout=layout: expected_batch([*map(ragged_item, numbers)], layout),
                "misfits": [[], 3, "text", {}, {"number": torch.arange(2)}, [{"number": 1}], [ragged_item(1), None]],
            },
        )
        for layout in ("padded", "packed")
    },
    "array": (ArrayStorage, plain_items, {}),
    "array-awaits": (Awaits, plain_items, {}),
}


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize(
    ("seeds", "steps"),
    [(range(2), 30), pytest.param(range(24), 100, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
    ids=["few", "many"],
)
async def test_sound_storages_pass(seeds: range, steps: int, name: str) -> None:
    make_storage, items, settings = SOUND[name]
    await check_storage(make_storage, items, seeds=seeds, steps=steps, **settings)


@pytest.mark.parametrize(("kind", "rule"), BROKEN, ids=[kind.__name__ for kind, _ in BROKEN])
def test_a_broken_storage_is_caught(kind: type[Storage], rule: str) -> None:
    misfits = [{"number": torch.arange(2)}]
    with pytest.raises(AssertionError, match=f"{kind.__name__} breaks the rule '.*({rule})") as caught:
        asyncio.run(check_storage(kind, plain_items, misfits=misfits))
    message = str(caught.value)
    assert "expected" in message
    assert "found" in message


def test_a_storage_that_keeps_references_has_to_say_so() -> None:
    with pytest.raises(AssertionError, match="rows have what was written"):
        asyncio.run(check_storage(ListStorage, lambda count, start: [torch.ones(3) * start for _ in range(count)]))
