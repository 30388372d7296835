"""Memory of batches: used again when nobody can see it, and never before."""

from __future__ import annotations

import copy
import functools
import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.dlpack import from_dlpack

from asyncbuf import Draw, GatherJobs, PrefetchError, ReplayBuffer, RowRange, TensorStorage
from asyncbuf._runtime.threads import COPIERS
from tests.helpers import SECONDS, crossed

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = 64
EVERY = torch.arange(ROWS)
RUN = [RowRange(0, 0, ROWS)]


def filled(value: int = 1, *, batches: int = 4, contiguous: bool = False) -> TensorStorage:
    storage = TensorStorage(ROWS, contiguous=contiguous)
    storage.expect(batches)
    write(storage, value)
    return storage


def items(value: int) -> dict[str, Any]:
    return {
        "small": torch.full((ROWS, 5), float(value)),
        "half": torch.full((ROWS, 3), value, dtype=torch.bfloat16),
        "flag": torch.full((ROWS,), bool(value % 2)),
        "large": torch.full((ROWS, 600), value, dtype=torch.int64),
    }


def write(storage: TensorStorage, value: int) -> None:
    storage.write(storage.prepare(items(value)), RUN)


def gather(storage: TensorStorage, count: int = 32) -> dict[str, torch.Tensor]:
    data: dict[str, torch.Tensor] = storage.gather(torch.randint(ROWS, (count,)))
    return data


def values_of(tensor: torch.Tensor) -> list[float]:
    return sorted(set(tensor.float().flatten().tolist()))


def addresses(data: dict[str, torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in data.values()]


@pytest.mark.parametrize("contiguous", [False, True])
def test_memory_of_a_batch_that_is_gone_is_used_again(contiguous: bool) -> None:
    storage = filled(contiguous=contiguous)
    seen = set()
    for value in range(1, 50):
        write(storage, value)
        data = gather(storage)
        seen.add(tuple(addresses(data)))
        for name, expected in items(value).items():
            assert data[name].equal(expected[:32])
        del data
    assert len(seen) <= 2


@pytest.mark.parametrize("contiguous", [False, True])
def test_who_keeps_batches_gets_other_memory(contiguous: bool) -> None:
    storage = filled(contiguous=contiguous)
    kept = []
    for value in range(1, 40):
        write(storage, value)
        kept.append(gather(storage))
    assert len({tuple(addresses(data)) for data in kept}) == len(kept)
    for value, data in enumerate(kept, 1):
        for name, expected in items(value).items():
            assert data[name].equal(expected[:32])


class Doubling(torch.autograd.Function):
    """Saves what it gets for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor
        (x,) = ctx.saved_tensors
        return grad * x


class Graph:
    """A graph that needs the values of a tensor for its backward pass; nothing else holds the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.weight = torch.ones(tensor.shape, dtype=torch.float32, requires_grad=True)
        self.loss = (self.weight * tensor.to(torch.float32)).sum()

    def values(self) -> torch.Tensor:
        grad: torch.Tensor
        (grad,) = torch.autograd.grad(self.loss, self.weight, retain_graph=True)
        return grad


class InputGraph:
    """A graph over the tensor itself, as for gradients with regard to the observations."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.result = Doubling.apply(tensor.requires_grad_()) if tensor.is_floating_point() else tensor  # type: ignore[no-untyped-call]
        self.leaf = tensor if tensor.is_floating_point() else None

    def values(self) -> torch.Tensor:
        if self.leaf is None:
            found: torch.Tensor = self.result
            return found
        grad: torch.Tensor
        (grad,) = torch.autograd.grad(self.result.sum(), self.leaf, retain_graph=True)
        return grad


class Capsule:
    """What another framework holds."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.capsule = tensor.__dlpack__()

    def values(self) -> torch.Tensor:
        tensor: torch.Tensor = from_dlpack(self.capsule)
        self.capsule = tensor.__dlpack__()
        return tensor


def raw_storage(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    storage, offset = tensor.untyped_storage(), tensor.storage_offset()
    dtype, shape, stride = tensor.dtype, tensor.shape, tensor.stride()
    return lambda: torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


def array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    carried: torch.Tensor = tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor
    found: np.ndarray[Any, Any] = carried.numpy()
    return found


def kept_as(
    make: Callable[[torch.Tensor], Any], back: Callable[[Any, torch.dtype], torch.Tensor] = lambda kept, _: kept
) -> Callable[[torch.Tensor], Callable[[], torch.Tensor]]:
    """Make something of a tensor and keep that alone; it can still be looked at."""

    def keep(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        kept, dtype = make(tensor), tensor.dtype
        return lambda: back(kept, dtype)

    return keep


def from_array(kept: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.asarray(kept)).view(dtype)


WAYS: dict[str, Callable[[torch.Tensor], Callable[[], torch.Tensor]]] = {
    "field": kept_as(lambda tensor: tensor),
    "slice": kept_as(lambda tensor: tensor[3:5]),
    "row": kept_as(lambda tensor: tensor[7]),
    "transpose": kept_as(lambda tensor: tensor.movedim(0, -1)),
    "one of many": kept_as(lambda tensor: tensor.unbind()[31]),
    "detached": kept_as(lambda tensor: tensor.detach()),
    "data": kept_as(lambda tensor: tensor.data),
    "bytes": kept_as(lambda tensor: tensor[..., None].view(torch.uint8), lambda kept, dtype: kept.view(dtype)),
    "parameter": kept_as(lambda tensor: torch.nn.Parameter(tensor, requires_grad=False)),
    "in a container": kept_as(lambda tensor: [{"a": tensor}], lambda kept, _: kept[0]["a"]),
    "copied container": kept_as(lambda tensor: copy.copy([tensor]), lambda kept, _: kept[0]),
    "graph": lambda tensor: Graph(tensor).values,
    "graph over it": lambda tensor: InputGraph(tensor).values,
    "capsule": lambda tensor: Capsule(tensor).values,
    "raw storage": raw_storage,
    "array": kept_as(array, from_array),
    "slice of an array": kept_as(lambda tensor: array(tensor)[2:4], from_array),
    "memoryview": kept_as(lambda tensor: array(tensor)[1:3].data, from_array),
}


@pytest.mark.parametrize(
    ("way", "name", "contiguous"), crossed(list(WAYS), ["small", "half", "flag", "large"], [False, True], one_in=2)
)
def test_whatever_can_be_seen_stays_as_it_is(way: str, name: str, contiguous: bool) -> None:
    storage = filled(1, contiguous=contiguous)
    for _ in range(6):
        gather(storage)  # there is memory to use again
    data = gather(storage)
    kept = WAYS[way](data[name])
    del data
    before = kept().clone()
    assert values_of(before.float()) == [1.0]
    write(storage, 2)
    for _ in range(20):
        assert values_of(gather(storage)["large"]) == [2]
    assert kept().equal(before)
    # Once it is gone, its memory may go round again.
    del kept
    seen = {tuple(addresses(gather(storage))) for _ in range(20)}
    assert len(seen) <= 4


def test_one_field_keeps_the_others() -> None:
    # Small fields share memory: all of it stays for one of them.
    storage = filled(1)
    flag = gather(storage)["flag"]
    write(storage, 2)
    for _ in range(10):
        gather(storage)
    assert flag.all()


def test_shared_memory_of_a_batch_stays() -> None:
    storage = filled(1)
    shared = gather(storage)["small"].share_memory_()  # type: ignore[no-untyped-call]
    write(storage, 2)
    for _ in range(10):
        assert values_of(gather(storage)["small"]) == [2.0]
    assert shared.is_shared()
    assert values_of(shared) == [1.0]


def test_what_was_done_to_a_tensor_does_not_show_on_the_next() -> None:
    storage = filled(1)
    for _ in range(6):
        data = gather(storage)
        small = data["small"]
        assert not small.requires_grad
        assert small.shape == (32, 5)
        assert small._version == 0
        assert not hasattr(small, "mark")
        assert small.is_leaf
        small.add_(1)
        small.mark = "here"  # type: ignore[attr-defined]
        small.unsqueeze_(0)
        small.requires_grad_()
        data["flag"].logical_not_()
        del data, small


def test_changing_one_field_does_not_disturb_the_graph_of_another() -> None:
    data = gather(filled(3))
    weight = torch.ones(5, requires_grad=True)
    loss = (data["small"] * weight).sum()
    data["half"].mul_(2)
    data["flag"].fill_(False)
    loss.backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert weight.grad.tolist() == [96.0] * 5


def test_memory_is_let_go_beyond_what_is_expected() -> None:
    storage = filled(batches=2)
    kept = [gather(storage) for _ in range(10)]
    dead = [weakref.ref(data["small"].untyped_storage()) for data in kept]
    del kept
    gather(storage)
    assert not any(ref() for ref in dead)
    assert storage._rows is not None
    assert len(storage._rows.slots._pools[32].slots) <= 2


def test_memory_of_other_batch_sizes_is_let_go() -> None:
    storage = filled()
    for count in range(1, 60):
        gather(storage, count)
    assert storage._rows is not None
    assert len(storage._rows.slots._pools) <= 4
    assert gather(storage, 59)["small"].shape == (59, 5)


def test_a_storage_by_itself_keeps_nothing() -> None:
    storage = TensorStorage(ROWS)
    write(storage, 1)
    kept = [gather(storage) for _ in range(3)]
    assert len({tuple(addresses(data)) for data in kept}) == 3


def test_threads_that_gather_at_once_never_share_memory() -> None:
    storage = filled(1, batches=6)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for _ in range(2000):
            indices = torch.randint(ROWS, (16,), generator=generator)
            kept.append((storage.gather(indices)["large"][:, 0], indices))
            if len(kept) > 3:
                found, expected = kept.pop(0)
                if not found.equal(expected):
                    wrong.append((found, expected))

    storage.write(
        storage.prepare({**items(1), "large": EVERY[:, None].repeat(1, 600)}),
        [RowRange(0, 0, ROWS)],
    )
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("contiguous", [False, True])
async def test_contiguous(contiguous: bool) -> None:
    buffer = ReplayBuffer(TensorStorage(ROWS, contiguous=contiguous), batch_size=16)
    await buffer.extend(items(3))
    async with buffer:
        batch = await buffer.sample()
    assert batch["small"].is_contiguous() == contiguous
    assert batch["half"].is_contiguous() == contiguous
    assert values_of(batch["small"]) == [3.0]
    assert values_of(batch["half"]) == [3.0]
    # A field that lies between others is a window into the memory of all of them.
    nbytes = batch["small"].untyped_storage().nbytes()
    assert (nbytes == 16 * 5 * 4) == contiguous


async def test_both_ways_give_the_same_stream() -> None:
    streams = []
    for contiguous in (False, True):
        buffer = ReplayBuffer(
            TensorStorage(ROWS, contiguous=contiguous),
            batch_size=16,
            prefetch=2,
            generator=torch.Generator().manual_seed(0),
        )
        await buffer.extend({"x": torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1)), "n": EVERY})
        async with buffer:
            streams.append([(await buffer.sample()).data for _ in range(20)])
    for one, other in zip(*streams, strict=True):
        assert one["x"].equal(other["x"])
        assert one["n"].equal(other["n"])


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("count", [1, 2, 7, 32])
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_parts_make_the_same_batch(parts: int, count: int, contiguous: bool) -> None:
    storage = TensorStorage(ROWS, contiguous=contiguous)
    storage.expect(2)
    storage.write(storage.prepare({"x": EVERY, "half": EVERY.bfloat16(), "large": EVERY[:, None].repeat(1, 600)}), RUN)
    indices = torch.randint(ROWS, (count,))
    for _ in range(3):
        copies, combined = storage.begin_gather(Draw(indices), inline=False, parts=parts)
        assert 1 <= len(copies) <= min(parts, count)
        for part in reversed(copies):
            part()
        data = combined()
        expected = storage.gather(indices)
        assert data.keys() == expected.keys()
        for name, tensor in expected.items():
            assert data[name].equal(tensor)
            assert data[name].dtype is tensor.dtype
            assert data[name].data_ptr() != tensor.data_ptr()


def test_memory_that_is_being_copied_into_is_nobody_elses() -> None:
    storage = filled()
    data = gather(storage)
    taken = addresses(data)
    del data
    copies, combined = storage.begin_gather(Draw(EVERY[:32]), inline=False, parts=2)
    write(storage, 2)
    assert addresses(gather(storage)) != taken  # the parts have it, though nothing was copied yet
    for part in copies:
        part()
    data = combined()
    assert addresses(data) == taken
    assert values_of(data["small"]) == [2]


def test_a_gather_of_a_subclass_is_used_for_parts_too() -> None:
    class Negative(TensorStorage):
        def gather(self, indices: torch.Tensor) -> Any:
            return {"x": -super().gather(indices)["x"]}

    storage = Negative(ROWS)
    storage.write(storage.prepare({"x": EVERY}), RUN)
    copies, combined = storage.begin_gather(Draw(EVERY[:8]), inline=False, parts=4)
    assert len(copies) == 1
    copies[0]()
    assert combined()["x"].equal(-EVERY[:8])


async def test_large_batches_are_gathered_by_several_threads_into_the_same_memory() -> None:
    width = 1 << 20
    seen, names = [], set()

    class Watched(TensorStorage):
        def begin_gather(self, draw: Draw, *, inline: bool, parts: int) -> Any:
            copies, combined = super().begin_gather(draw, inline=inline, parts=parts)

            def watched(part: Callable[[], object]) -> None:
                names.add(threading.current_thread().name)
                barrier.wait(SECONDS)
                part()

            barrier = threading.Barrier(len(copies))
            return GatherJobs([functools.partial(watched, part) for part in copies], combined)

    buffer = ReplayBuffer(Watched(8), batch_size=8, generator=torch.Generator().manual_seed(1))
    numbers = torch.arange(8)
    await buffer.extend({"x": numbers[:, None].expand(8, width).to(torch.uint8)})
    gc.disable()
    try:
        async with buffer:
            for _ in range(6):
                batch = await buffer.sample()
                assert batch["x"].equal(batch.indices[:, None].expand(8, width).to(torch.uint8))
                seen.append(batch["x"].data_ptr())
                del batch
    finally:
        gc.enable()
    assert len(set(seen)) <= 2  # the thread that ended last may not have let go yet
    assert len(names) == COPIERS
    assert not any(name.startswith("asyncbuf") for name in (thread.name for thread in threading.enumerate()))


async def test_a_part_that_fails_fails_the_batch_and_is_tried_again() -> None:
    class Failing(TensorStorage):
        failures = 3
        ended = 0

        def gather_nbytes(self, count: int) -> int:
            return 1 << 30

        def begin_gather(self, draw: Draw, *, inline: bool, parts: int) -> Any:
            copies, combined = super().begin_gather(draw, inline=inline, parts=3)

            def checked(i: int) -> None:
                copies[i]()
                if i == 0 and self.failures:
                    self.failures -= 1
                    raise ValueError("a part")
                self.ended += 1

            return GatherJobs([functools.partial(checked, i) for i in range(len(copies))], combined)

    storage = Failing(ROWS)
    buffer = ReplayBuffer(storage, batch_size=6, generator=torch.Generator().manual_seed(1))
    await buffer.extend({"x": EVERY})
    async with buffer:
        for _ in range(3):
            with pytest.raises(PrefetchError, match="a part"):
                await buffer.sample()
        await buffer.extend({"x": torch.tensor([0])})  # nothing is held any more
        batch = await buffer.sample()
        assert batch.number == 0
        assert batch["x"].equal(batch.indices)
        assert storage.ended == 3 * 2 + 3
