"""Draws with joins and with a shape, on their way through the chain."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from asyncbuf import Draw, ListStorage, RandomSampler, SchemaError, TensorStorage
from asyncbuf._prefetch.gathered import Gathered, shaped
from asyncbuf._prefetch.transforms import Partial, TransformChain
from asyncbuf._runtime.threads import Threads
from asyncbuf.rows import RowRange
from tests.prefetch.containers import Frozen, Named

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from asyncbuf import Storage


@pytest.fixture
async def threads() -> AsyncIterator[Threads]:
    made = Threads(2)
    yield made
    await made.close()


async def run(chain: TransformChain, data: Any, threads: Threads) -> Any:
    kept = [Partial(0, data)]
    await chain.run(kept[0], 0, threads, kept.append)
    assert chain.is_done(kept[-1])
    return kept[-1].data


def combine(draw: Draw, data: Any, joined: Any) -> Any:
    return {"x": data["x"], "next": joined["next"]["x"], "weight": draw.info["weight"]}


def make_draw(**more: Any) -> Draw:
    return Draw(torch.arange(4), {"weight": torch.ones(4)}, joins={"next": torch.arange(1, 5)}, **more)


def filled(storage: Storage) -> Storage:
    items: Any = {"x": torch.arange(10.0)}
    if isinstance(storage, ListStorage):
        items = [{"x": torch.tensor(float(i)), "text": str(i)} for i in range(10)]
    storage.write(storage.prepare(items), [RowRange(0, 0, 10)])
    return storage


def gathered(storage: Storage, draw: Draw) -> Gathered:
    joined = {name: storage.gather(indices.reshape(-1)) for name, indices in draw.joins.items()}
    return Gathered(draw, storage.gather(draw.indices), joined)


def in_tensors(**options: Any) -> tuple[TransformChain, Gathered]:
    storage = filled(TensorStorage(10))
    transforms = options.pop("transforms", [])
    return TransformChain(None, transforms, combine=combine, **options), gathered(storage, make_draw())


def in_list(draw: Draw, transforms: list[Callable[..., Any]], **options: Any) -> tuple[TransformChain, Gathered]:
    storage = filled(ListStorage(10))
    collate = options.pop("collate", storage.collate)
    chain = TransformChain(collate, transforms, takes_items=True, combine=options.pop("combine", combine), **options)
    return chain, gathered(storage, draw)


def add_in_place(data: Any) -> Any:
    data["x"].add_(100)
    data["next"].add_(1000)
    return data


async def add_later(data: Any) -> Any:
    await asyncio.sleep(0)
    return add_in_place(data)


# -- combine -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transforms", [[], [add_in_place], [add_later], [add_in_place, add_later, add_in_place]])
async def test_what_was_gathered_is_combined_before_the_transforms(transforms: list[Any], threads: Threads) -> None:
    chain, data = in_tensors(transforms=transforms)
    assert not chain.is_done(Partial(0, data))
    count = len(transforms)
    for _ in range(2):
        found = await run(chain, data, threads)
        assert found["x"].tolist() == [100 * count + n for n in range(4)]
        assert found["next"].tolist() == [1000 * count + n for n in range(1, 5)]
        assert found["weight"].tolist() == [1] * 4
    assert data.data["x"].tolist() == [0, 1, 2, 3]


async def test_collate_is_applied_to_each_part_before(threads: Threads) -> None:
    chain, data = in_list(make_draw(), [add_in_place])
    found = await run(chain, data, threads)
    assert found["x"].tolist() == [100, 101, 102, 103]
    assert found["next"].tolist() == [1001, 1002, 1003, 1004]


async def test_collate_fn_gets_lists_of_its_own(threads: Threads) -> None:
    def collate(items: Any) -> Any:
        items.reverse()
        return {"x": torch.stack([item["x"] for item in items])}

    chain, data = in_list(make_draw(), [], collate=collate, foreign_collate=True)
    for _ in range(2):
        found = await run(chain, data, threads)
        assert found["x"].tolist() == [3, 2, 1, 0]
        assert found["next"].tolist() == [4, 3, 2, 1]


async def test_the_device_comes_last(threads: Threads) -> None:
    chain, data = in_tensors(device="meta")
    found = await run(chain, data, threads)
    assert {value.device.type for value in found.values()} == {"meta"}


async def test_a_chain_without_steps_combines_on_the_event_loop_once_that_is_known_to_be_quick(
    threads: Threads,
) -> None:
    chain, data = in_tensors()
    assert chain.steps == ()
    assert chain.runs_here(Partial(0, {"x": torch.zeros(1)}))
    assert not chain.runs_here(Partial(0, data))
    found = chain.run_here(data, 0)
    assert chain.is_done(found)
    assert found.data["next"].tolist() == [1, 2, 3, 4]
    for _ in range(8):
        await run(chain, data, threads)
    assert chain.runs_here(Partial(0, data)) is chain._pace.is_quick


async def test_a_draw_without_joins_is_not_combined(threads: Threads) -> None:
    chain = TransformChain(None, [], combine=combine)
    storage = filled(TensorStorage(10))
    assert (await run(chain, {"x": torch.ones(1)}, threads))["x"].item() == 1
    assert list(await run(chain, gathered(storage, Draw(torch.arange(3))), threads)) == ["x"]


async def test_the_sampler_may_leave_it_to_the_default(threads: Threads) -> None:
    chain = TransformChain(None, [], combine=RandomSampler().combine)
    data = gathered(filled(TensorStorage(10)), make_draw())
    found = await run(chain, data, threads)
    assert list(found) == ["x", "next"]
    assert found["x"] is data.data["x"]  # nobody could have changed it


@pytest.mark.parametrize("ordered", [False, True])
async def test_a_second_try_combines_what_was_gathered(ordered: bool, threads: Threads) -> None:
    tries: list[int] = []

    def spoil(draw: Draw, data: Any, joined: Any) -> Any:
        draw.indices.add_(1)
        draw.info["weight"].add_(1)
        data["x"].add_(1)
        joined["next"]["x"].add_(1)
        made = combine(draw, data, joined)
        draw.info.pop("weight")  # type: ignore[attr-defined]
        tries.append(1)
        if len(tries) < 3:
            raise LookupError
        return made

    class Stateful:
        def __call__(self, data: Any) -> Any:
            return data

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    draw = make_draw()
    data = gathered(filled(TensorStorage(10)), draw)
    chain = TransformChain(None, [Stateful()] if ordered else [], combine=spoil)
    for _ in range(2):
        with pytest.raises(LookupError) as caught:
            await run(chain, data, threads)
        assert "raised in combine" in caught.value.__notes__
    found = await run(chain, data, threads)
    assert found["x"].tolist() == [1, 2, 3, 4]
    assert found["weight"].tolist() == [2] * 4
    assert draw.indices.tolist() == [0, 1, 2, 3]
    assert draw.info["weight"].tolist() == [1] * 4


async def test_wrong_functions(threads: Threads) -> None:
    async def combine_later(draw: Draw, data: Any, joined: Any) -> Any:
        return data

    async def collate_later(items: Any) -> Any:
        return items

    data = gathered(filled(TensorStorage(10)), make_draw())
    with pytest.raises(TypeError, match="combine: expected a function, because the draw has joins; found None"):
        await run(TransformChain(None, []), data, threads)
    with pytest.raises(
        TypeError, match="combine: expected data, because the draw has joins or a shape; found an await"
    ):
        await run(TransformChain(None, [], combine=combine_later), data, threads)
    with pytest.raises(TypeError, match="expected the data of a batch, found None"):
        await run(TransformChain(None, [], combine=lambda draw, data, joined: None), data, threads)
    chain = TransformChain(collate_later, [], combine=combine, foreign_collate=True)
    with pytest.raises(TypeError, match="collate_fn: expected data, because the draw has joins"):
        await run(chain, data, threads)


# -- shapes ------------------------------------------------------------------------------------------------------------


async def test_items_get_the_shape_of_the_draw_after_collate(threads: Threads) -> None:
    draw = Draw(torch.arange(6), shape=(2, 3), joins={"next": torch.arange(4).reshape(2, 2)})
    chain, data = in_list(draw, [], combine=RandomSampler().combine)
    found = await run(chain, data, threads)
    assert found["x"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["text"] == [["0", "1", "2"], ["3", "4", "5"]]
    assert found["next"]["x"].tolist() == [[0, 1], [2, 3]]
    assert found["next"]["text"] == [["0", "1"], ["2", "3"]]
    chain, data = in_list(Draw(torch.arange(6), shape=(2, 3)), [])
    assert (await run(chain, data, threads))["x"].shape == (2, 3)


async def test_what_a_collate_fn_makes_keeps_its_shape(threads: Threads) -> None:
    chain, data = in_list(Draw(torch.arange(6), shape=(2, 3)), [], collate=lambda items: items, foreign_collate=True)
    assert len(await run(chain, data, threads)) == 6


@pytest.mark.parametrize("shape", [(2, 3), (6,), (1, 6), (3, 2, 1), [2, 3]])
def test_leaves_become_views(shape: Any) -> None:
    storage = TensorStorage(10, contiguous=False)
    items = {"x": torch.arange(20.0).reshape(10, 2), "y": {"z": torch.arange(10)}}
    storage.write(storage.prepare(items), [RowRange(0, 0, 10)])
    data = storage.gather(torch.arange(6))
    found = shaped(data, shape)
    assert not data["x"].is_contiguous()
    assert found["x"].shape == (*shape, 2)
    assert found["y"]["z"].shape == (*shape,)
    assert found["x"].data_ptr() == data["x"].data_ptr()
    assert found["x"].reshape(6, 2).equal(data["x"])


def test_shapes_of_other_leaves_and_containers() -> None:
    data = [
        np.arange(6),
        Named(torch.arange(6), list("abcdef")),  # type: ignore[arg-type]
        Frozen(torch.arange(6), list("abcdef")),  # type: ignore[arg-type]
        [None] * 6,
        TensorDict({"x": torch.zeros(6, 2), "text": NonTensorData("a", batch_size=[6])}, batch_size=[6]),
        TensorDict({"x": torch.zeros(6, 2)}, batch_size=[6, 2]),
    ]
    found: list[Any] = shaped(data, (2, 3))
    nested: Any
    array, named, frozen, nothing, tensordict, deeper = found
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert type(named) is Named
    assert named.x.shape == (2, 3)
    text: Any = named.text
    assert text == [["a", "b", "c"], ["d", "e", "f"]]
    assert type(frozen) is Frozen
    assert frozen.x.shape == (2, 3)
    assert nothing == [[None] * 3] * 2
    assert tensordict.batch_size == torch.Size([2, 3])
    assert tensordict["x"].shape == (2, 3, 2)
    assert deeper.batch_size == torch.Size([2, 3, 2])
    nested = shaped(list("abcdefgh"), (2, 2, 2))
    assert nested == [[["a", "b"], ["c", "d"]], [["e", "f"], ["g", "h"]]]
    assert shaped(torch.zeros(0, 2), (0, 3)).shape == (0, 3, 2)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.zeros(5), r"expected a leading axis of 6 rows to be split into \[2, 3\], found 5"),
        (torch.tensor(1), "found no axis"),
        ({"x": np.zeros(7)}, "found 7"),
        ({"x": TensorDict({}, batch_size=[5])}, "found 5"),
        ({"x": TensorDict({}, batch_size=[])}, "found no axis"),
        ({"x": 3}, r"expected a leaf with an axis of 6 rows to be split into \[2, 3\], found a int"),
        (["a"] * 5, "found a str"),
    ],
    ids=["tensor", "scalar", "array", "tensordict", "tensordict without axes", "number", "list"],
)
def test_what_cannot_be_split(data: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        shaped(data, (2, 3))
