"""Memory of batches: each field dense and alone, or a window into the records, and scratch memory that goes round."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncbuf import Draw, GatherJobs, RowRange, TensorStorage
from asyncbuf.storage import _layout as layout
from asyncbuf.storage._leaf import Field

ROWS = 50

FIELDS = st.lists(
    st.tuples(
        st.sampled_from([torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128]),
        st.sampled_from([(), (1,), (3,), (17,), (2, 3), (0,), (128,), (700,)]),
    ),
    min_size=1,
    max_size=9,
)


def items_of(fields: list[tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        f"{i}": torch.randint(0, 2, (ROWS, *shape), generator=generator).to(dtype)
        for i, (dtype, shape) in enumerate(fields)
    }


def storage_of(items: dict[str, torch.Tensor], *, batches: int = 2, contiguous: bool = True) -> TensorStorage:
    storage = TensorStorage(ROWS, contiguous=contiguous)
    storage.expect(batches)
    storage.write(storage.prepare(items), [RowRange(0, 0, ROWS)])
    return storage


def gathered(storage: TensorStorage, indices: torch.Tensor, parts: int) -> Any:
    begun = storage.begin_gather(Draw(indices), inline=parts == 0, parts=max(1, parts))
    if not isinstance(begun, GatherJobs):
        return begun
    for job in begun.jobs:
        job()
    return begun.combine()


@given(FIELDS, st.integers(1, 20), st.integers(0, 4), st.booleans())
@settings(max_examples=100, deadline=None)
def test_fields_of_any_kind_are_gathered(
    fields: list[tuple[torch.dtype, tuple[int, ...]]], count: int, parts: int, contiguous: bool
) -> None:
    items = items_of(fields)
    storage = storage_of(items, contiguous=contiguous)
    for seed in range(4):
        indices = torch.randint(ROWS, (count,), generator=torch.Generator().manual_seed(seed))
        data = gathered(storage, indices, parts)
        assert list(data) == list(items)
        for name, tensor in items.items():
            assert data[name].dtype is tensor.dtype
            assert torch.equal(data[name], tensor[indices])
            if contiguous:
                assert data[name].is_contiguous()
                assert data[name].untyped_storage().nbytes() == data[name].nbytes
                assert data[name].data_ptr() % data[name].element_size() == 0 or not data[name].nbytes


def test_fields_of_one_size_are_copied_together() -> None:
    fields = [
        Field("a", torch.float32, (4,)),
        Field("done", torch.bool, ()),
        Field("b", torch.float32, (2, 2)),
        Field("c", torch.int64, (2,)),
        Field("empty", torch.float32, (0,)),
        Field("reward", torch.float32, ()),
        Field("large", torch.float32, (1000,)),
    ]
    plan = layout.plan(fields, layout.PACKED_DENSE_BYTES)
    assert [(group.nbytes, group.members) for group in plan.groups] == [(16, (3, 0, 2)), (4, (5,)), (1, (1,))]
    assert [plan.offset(i) for group in plan.groups for i in group.members] == [0, 16, 32, 48, 52]
    assert [group.offset for group in plan.groups] == [0, 48, 52]


@pytest.mark.parametrize(("width", "blocks"), [(128, 1), (129, 3)])
def test_border_of_what_is_packed(width: int, blocks: int) -> None:
    fields = [Field("a", torch.float32, (width,)), Field("b", torch.float32, (width,)), Field("c", torch.float32, ())]
    assert len(layout.plan(fields, layout.PACKED_DENSE_BYTES).records) == blocks
    assert len(layout.plan(fields).records) == 1


@pytest.mark.parametrize("batches", [0, 2])
def test_scratch_memory_goes_to_the_next_batch(batches: int) -> None:
    storage = storage_of(items_of([(torch.float32, (3,)), (torch.bool, ())]), batches=batches)
    assert storage._rows is not None
    pools = storage._rows.slots._pools
    kept = []
    for _ in range(20):
        kept.append(storage.gather(torch.arange(8)))
        # Only slots that are let go hand theirs over.
        assert len(pools[8].slots) <= batches
        assert len(pools[8].scratch) <= 1
    assert len({data["0"].data_ptr() for data in kept}) == 20


def test_threads_that_gather_at_once_never_share_scratch_memory() -> None:
    numbers = torch.arange(ROWS)
    storage = storage_of({"a": numbers[:, None].repeat(1, 9), "b": numbers.float(), "c": numbers.to(torch.uint8)})
    wrong: list[Any] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        kept = []
        for step in range(2000):
            indices = torch.randint(ROWS, (16,), generator=generator)
            data = gathered(storage, indices, step % 3)
            kept.append((data, indices))
            if len(kept) > seed:  # some let go of each batch at once, some keep more than there are slots for
                found, expected = kept.pop(0)
                same = found["a"][:, 4].equal(expected) and found["c"].equal(expected.to(torch.uint8))
                if not (same and found["b"].equal(expected.float())):
                    wrong.append((found, expected))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
