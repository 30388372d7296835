"""What is serialised takes about its own bytes: a batch, a field of one, a row, a storage and a buffer."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import io
import multiprocessing
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from asyncbuf import Batch, ListStorage, ReplayBuffer, RowRange, TensorStorage

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 512
ROWS = 600


def saved(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return file.tell()


def pickled(value: Any) -> int:
    return len(pickle.dumps(value))


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value.values())


def deep(value: Any) -> int:
    """Bytes of memory that a deep copy holds."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(copy.deepcopy(value)))


def shared(value: Any) -> int:
    """Bytes of shared memory that tensors take in a queue between processes."""
    return sum(
        tensor.share_memory_().untyped_storage().nbytes()  # type: ignore[no-untyped-call]
        for tensor in tensors_in(value)
    )


def converted(value: Any) -> int:
    return len(pickle.dumps([tensor.numpy() for tensor in tensors_in(value)]))


WAYS = {"torch.save": saved, "pickle": pickled, "deepcopy": deep, "shared memory": shared, "numpy": converted}


def items(count: int = ROWS) -> dict[str, Any]:
    return {
        "obs": torch.randn(count, 17),
        "next_obs": torch.randn(count, 17),
        "action": torch.randn(count, 6),
        "half": torch.randn(count, 6).bfloat16(),
        "reward": torch.randn(count),
        "done": torch.zeros(count, dtype=torch.bool),
        "image": torch.zeros(count, 3, 20, 20, dtype=torch.uint8),
    }


async def batch_of(storage: TensorStorage) -> Batch[Any]:
    buffer = ReplayBuffer(storage, batch_size=BATCH)
    await buffer.extend(items())
    async with buffer:
        return await buffer.sample()


@pytest.mark.parametrize("way", WAYS)
async def test_data_of_a_batch(way: str) -> None:
    data = (await batch_of(TensorStorage(ROWS))).data
    if way == "numpy":
        del data["half"]
    nbytes = sum(tensor.nbytes for tensor in data.values())
    assert WAYS[way](data) <= 1.05 * nbytes + 6000


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["obs", "reward", "done", "image"])
async def test_field_of_a_batch(name: str, way: str) -> None:
    field = (await batch_of(TensorStorage(ROWS))).data[name]
    assert WAYS[way](field) <= field.nbytes + 1700


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("way", [saved, pickled])
async def test_batch(way: Callable[[Any], int], contiguous: bool) -> None:
    batch = await batch_of(TensorStorage(ROWS, contiguous=contiguous))
    nbytes = sum(tensor.nbytes for tensor in batch.data.values()) + batch.indices.nbytes
    assert way(batch) <= 1.05 * nbytes + 8000
    found = pickle.loads(pickle.dumps(batch))
    assert all(torch.equal(found[name], tensor) for name, tensor in batch.data.items())


async def test_windows_into_one_block_are_what_contiguous_avoids() -> None:
    # What the docstring of TensorStorage says of contiguous=False.
    reward = (await batch_of(TensorStorage(ROWS, contiguous=False)))["reward"]
    assert saved(reward) > 10 * reward.nbytes


def test_tensor_storage_pickles_its_rows() -> None:
    storage = TensorStorage(10 * ROWS)
    storage.write(storage.prepare(items()), [RowRange(0, 0, ROWS)])
    nbytes = sum(tensor.nbytes for tensor in items().values())
    assert pickled(storage) <= 1.05 * nbytes + 3000


# -- items that are views ---------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    one: Any
    two: Any


@dataclasses.dataclass
class Step:
    obs: torch.Tensor
    number: int


KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda row: row,
    "dict": lambda row: {"x": row, "n": 1},
    "nested": lambda row: {"x": [(row, 5)]},
    "part": lambda row: {"x": row[3:200]},
    "parameter": lambda row: {"x": torch.nn.Parameter(row)},
    "half": lambda row: row.bfloat16()[:100],
    "named tuple": lambda row: Pair(row, 1),
    "dataclass": lambda row: Step(row, 1),
    "TensorDict": lambda row: TensorDict({"x": row}, []),
    "TensorDict with text": lambda row: TensorDict({"x": row, "text": NonTensorData("words")}, []),
}


def views_in(kind: str) -> list[Any]:
    rollout = torch.arange(300 * 256.0).reshape(300, 256)
    return [KINDS[kind](row) for row in rollout]


def listed(items: list[Any]) -> ListStorage:
    storage = ListStorage(1000)
    storage.write(storage.prepare(items), [RowRange(0, 0, len(items))])
    return storage


def tensor_in(item: Any) -> Any:
    """The tensor of an item of ``KINDS``."""
    if isinstance(item, torch.Tensor):
        return item
    if isinstance(item, (Pair, Step)):
        return item[0] if isinstance(item, Pair) else item.obs
    found = item["x"]
    return found[0][0] if isinstance(found, list) else found


@pytest.mark.parametrize("way", [saved, pickled])
@pytest.mark.parametrize("kind", KINDS)
def test_list_storage_pickles_the_rows_that_its_items_view(kind: str, way: Callable[[Any], int]) -> None:
    items = views_in(kind)
    storage = listed(items)
    nbytes = sum(tensor_in(item).nbytes for item in items)
    most = 3000 if kind.startswith("TensorDict") else 1000  # what pickle says of each item beside its bytes
    assert way(storage) <= 1.05 * nbytes + most * len(items)
    for found in (pickle.loads(pickle.dumps(storage)), copy.deepcopy(storage)):
        for row in (0, 299):
            [item] = found.gather(torch.tensor([row]))
            assert type(item) is type(items[row])
            assert type(tensor_in(item)) is type(tensor_in(items[row]))
            assert torch.equal(tensor_in(item), tensor_in(items[row]))


def test_many_small_tensors_take_little_more_than_their_bytes() -> None:
    storage = listed([{"x": torch.zeros(8), "n": torch.tensor(3)} for _ in range(1000)])
    assert pickled(storage) / 1000 <= 40 + 150


def test_what_is_one_tensor_stays_one() -> None:
    goal, row = torch.ones(1000), torch.zeros(5, 100)[2]
    storage = listed([{"goal": goal, "x": row}, {"goal": goal, "x": row}, goal])
    for found in (pickle.loads(pickle.dumps(storage)), copy.deepcopy(storage)):
        one, two, three = found.gather(torch.arange(3))
        assert one["goal"] is two["goal"] is three
        assert one["x"] is two["x"]
        assert one["goal"].data_ptr() != goal.data_ptr()
    assert pickled(storage) <= 4000 + 400 + 1500


def test_containers_that_are_shared_or_contain_themselves() -> None:
    part: list[Any] = [torch.zeros(3)]
    part.append(part)
    storage = ListStorage(2)
    storage._items = [part, part]  # such items are refused, because they cannot be saved
    one, two = pickle.loads(pickle.dumps(storage))._items
    assert one is two


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.ones(3).expand(2, 3),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.ones(2, requires_grad=True),
        torch.ones(2, requires_grad=True) * 3,
        torch.tensor([True, False]),
        torch.arange(3).to(torch.float8_e4m3fn),
        torch.arange(3).to(torch.uint16),
    ],
    ids=["0-dim", "empty", "strided", "expanded", "conj", "leaf", "non-leaf", "bool", "float8", "uint16"],
)
def test_tensors_of_any_kind_come_back(tensor: torch.Tensor, protocol: int) -> None:
    [found] = pickle.loads(pickle.dumps(listed([{"x": tensor}]), protocol)).gather(torch.tensor([0]))
    back = found["x"]
    assert (back.dtype, back.shape, back.requires_grad) == (tensor.dtype, tensor.shape, tensor.requires_grad)
    assert torch.equal(back.detach().to(torch.complex128), tensor.detach().resolve_conj().to(torch.complex128))
    assert back.is_leaf
    with torch.no_grad():
        back.zero_()  # in memory that may be written


def test_attributes_of_a_tensor_come_back() -> None:
    tensor = torch.ones(3)
    tensor.mark = "here"  # type: ignore[attr-defined]
    [found] = pickle.loads(pickle.dumps(listed([tensor]))).gather(torch.tensor([0]))
    assert found.mark == "here"


def test_a_copy_holds_the_items_themselves() -> None:
    item = {"x": torch.ones(3)}
    storage = listed([item])
    twin = copy.copy(storage)
    storage.clear()
    assert twin.gather(torch.tensor([0]))[0] is item


async def test_buffer_of_views_pickles_in_about_their_bytes() -> None:
    rollout = torch.zeros(300, 256)
    buffer = ReplayBuffer(ListStorage(1000), batch_size=4)
    await buffer.extend([{"x": row} for row in rollout])
    assert pickled(buffer) <= 1.2 * rollout.nbytes


async def test_snapshot_of_views_holds_their_bytes() -> None:
    rollout = torch.zeros(300, 256)
    buffer = ReplayBuffer(ListStorage(1000), batch_size=4)
    await buffer.extend([{"x": row} for row in rollout])
    state = await buffer.state_dict()
    assert saved(state) <= 1.2 * rollout.nbytes + 300 * 400
    assert pickled(await buffer.snapshot()) <= 1.2 * rollout.nbytes + 300 * 500


def _sizes(queue: Any, back: Any) -> None:
    """In another process: what memory the tensors that come out of a queue hold."""
    data = queue.get(timeout=60)
    back.put({name: (tensor.untyped_storage().nbytes(), float(tensor.float().sum())) for name, tensor in data.items()})


@pytest.mark.loops_in_turn  # it starts a process
async def test_queue_between_processes_shares_the_bytes_of_each_field() -> None:
    context = multiprocessing.get_context("spawn")
    queue, back = torch.multiprocessing.get_context("spawn").Queue(), context.Queue()
    data = (await batch_of(TensorStorage(ROWS))).data
    del data["half"]
    expected = {name: (tensor.nbytes, float(tensor.float().sum())) for name, tensor in data.items()}
    process = context.Process(target=_sizes, args=(queue, back))
    process.start()
    try:
        queue.put(data)
        found = await asyncio.to_thread(back.get, timeout=60)
    finally:
        process.join(60)
    assert found == expected


async def test_memory_that_went_to_another_process_is_not_used_again() -> None:
    storage = TensorStorage(ROWS)
    storage.expect(2)
    storage.write(storage.prepare(items()), [RowRange(0, 0, ROWS)])
    data = storage.gather(torch.arange(BATCH))
    reward = data["reward"].clone()
    data["reward"].share_memory_()
    kept = data["reward"]
    del data
    for _ in range(5):
        storage.gather(torch.arange(BATCH) * 0)
    assert torch.equal(kept, reward)
