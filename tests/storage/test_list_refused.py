"""Items that a list storage refuses, because no batch or checkpoint could be made with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from asyncbuf import ListStorage, ReplayBuffer, SchemaError

if TYPE_CHECKING:
    from pathlib import Path

OBJECTS = np.array(["a", None, [1, 2]], dtype=object)


def untouched(items: Any) -> Any:
    return items


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"text": OBJECTS}, "text: expected an array of numbers, text or times, found one of dtype object"),
        ({"a": {"b": [1, OBJECTS]}}, "a/b/1: expected an array of numbers"),
        (OBJECTS, "the item: expected an array"),
        ({"x": torch.eye(2).to_sparse()}, "x: expected a dense tensor of a common dtype, found torch.sparse_coo"),
        ({"x": torch.zeros(2, device="meta")}, "x: expected a tensor with data, found one on the meta device"),
        ({"x": np.ma.masked_array([1.0], [True])}, "x: expected a plain array, found one with a mask"),
    ],
    ids=["object array", "deep", "alone", "sparse", "meta", "mask"],
)
def test_never_savable_is_refused_at_once(item: Any, message: str) -> None:
    storage = ListStorage(3)
    with pytest.raises(SchemaError) as caught:
        storage.prepare_one(item)
    assert str(caught.value).startswith(message)
    with pytest.raises(SchemaError) as caught:
        storage.prepare([{"fine": 1}, item])
    expected = message.replace("the item", "item 1") if message.startswith("the item") else f"item 1/{message}"
    assert str(caught.value).startswith(expected)


async def test_a_refused_item_changes_nothing(tmp_path: Path) -> None:
    buffer = ReplayBuffer(ListStorage(10), batch_size=2, collate_fn=untouched)
    await buffer.extend([{"tokens": torch.arange(3)}] * 5)
    for attempt in (buffer.add({"tokens": OBJECTS}), buffer.extend([{"tokens": torch.arange(3)}, {"tokens": OBJECTS}])):
        with pytest.raises(SchemaError, match="tokens: expected an array"):
            await attempt
    assert len(buffer) == 5
    await buffer.save(tmp_path / "it")


async def test_text_in_a_tensordict_is_saved(tmp_path: Path) -> None:
    def buffer() -> ReplayBuffer:
        generator = torch.Generator().manual_seed(0)
        return ReplayBuffer(ListStorage(10), batch_size=3, collate_fn=untouched, generator=generator)

    source, target = buffer(), buffer()
    for text in ("one", "two", "three"):
        await source.add(TensorDict({"tokens": torch.arange(len(text)), "prompt": NonTensorData(text)}, []))
    await source.save(tmp_path / "it")
    await target.load(tmp_path / "it")
    async with source, target:
        expected, found = (await source.sample()).data, (await target.sample()).data
    assert [item["prompt"] for item in found] == [item["prompt"] for item in expected]
    assert all(torch.equal(one["tokens"], other["tokens"]) for one, other in zip(found, expected, strict=True))


async def test_rows_of_a_mapped_file_are_saved(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.arange(12.0).reshape(4, 3))
    source = ReplayBuffer(ListStorage(10), batch_size=4, collate_fn=untouched)
    await source.extend([{"x": row} for row in np.load(tmp_path / "rows.npy", mmap_mode="r")])
    await source.save(tmp_path / "it")
    target = ReplayBuffer(ListStorage(10), batch_size=4, collate_fn=untouched)
    await target.load(tmp_path / "it")
    rows = target._storage.gather(torch.arange(4))
    assert [type(row["x"]) for row in rows] == [np.ndarray] * 4
    assert np.array_equal([row["x"] for row in rows], np.arange(12.0).reshape(4, 3))


# -- where batches are made by stacking -------------------------------------------------------------------------------

NEVER_STACKED: dict[str, tuple[Any, str]] = {
    "none": ({"goal": None}, "goal: expected a tensor, array, number or string, found NoneType; a collate_fn"),
    "object": ({"a": {"b": object()}}, "a/b: expected a tensor, array, number or string, found object"),
    "complex": ([1, 2j], "1: expected a tensor, array, number or string, found complex"),
    "array of text": ({"s": np.array(["a"])}, "s: expected numbers, found a numpy value of dtype <U1"),
    "times": ({"t": np.zeros(1, "M8[s]")}, "t: expected numbers, found a numpy value of dtype datetime64"),
    "text in a TensorDict": (TensorDict({"p": NonTensorData("x")}, []), "p: expected a tensor, array, number or"),
}
STACKED: dict[str, Any] = {
    "numbers": {"a": 1, "b": 0.5, "c": True, "d": np.float32(1)},
    "text": {"s": "a", "b": b"a"},
    "arrays": (np.zeros(3), torch.zeros(2)),
    "tokens": {"tokens": [1] * 600},
    "nested": {"a": [({"b": torch.zeros(1)},)]},
    "TensorDict": TensorDict({"x": torch.zeros(3), "in": {"y": torch.ones(1)}}, []),
}


@pytest.mark.parametrize(("item", "message"), NEVER_STACKED.values(), ids=NEVER_STACKED)
def test_never_stacked_is_refused_where_batches_are_stacked(item: Any, message: str) -> None:
    storage = ListStorage(3)
    storage.prepare_one(item)
    with pytest.raises((SchemaError, TypeError)):
        storage.collate([item, item])
    storage.will_collate(True)
    with pytest.raises(SchemaError) as caught:
        storage.prepare_one(item)
    assert str(caught.value).startswith(message)
    with pytest.raises(SchemaError) as caught:
        storage.prepare([item])
    assert str(caught.value).startswith(f"item 0/{message}")


@pytest.mark.parametrize("item", STACKED.values(), ids=STACKED)
def test_what_can_be_stacked_is_taken(item: Any) -> None:
    storage = ListStorage(3)
    storage.will_collate(True)
    storage.prepare_one(item)
    storage.prepare([item, item])
    storage.collate([item, item])


async def test_a_buffer_says_whether_it_stacks() -> None:
    storage = ListStorage(9)
    buffer = ReplayBuffer(storage, batch_size=2)
    await buffer.extend([{"goal": 1}] * 4)
    with pytest.raises(SchemaError, match="goal: expected a tensor, array, number or string, found NoneType"):
        await buffer.add({"goal": None})
    async with buffer:
        assert (await buffer.sample())["goal"].tolist() == [1, 1]
    del buffer
    another = ReplayBuffer(storage, batch_size=2, collate_fn=untouched)
    await another.add({"goal": None})


def test_shapes_may_differ_where_batches_of_one_can_be_made() -> None:
    storage = ListStorage(3)
    storage.will_collate(True)
    storage.prepare([{"x": torch.zeros(3)}, {"x": torch.zeros(4)}])


def test_endless_item_is_refused() -> None:
    item: list[Any] = [torch.zeros(1)]
    item.append(item)
    storage = ListStorage(3)
    with pytest.raises(SchemaError, match="expected at most 100 levels"):
        storage.prepare_one(item)
