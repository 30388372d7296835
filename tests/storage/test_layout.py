"""Where the fields of a row lie."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncbuf.storage import _layout as layout
from asyncbuf.storage._leaf import Field
from asyncbuf.storage._row_memory import columns

if TYPE_CHECKING:
    from collections.abc import Sequence

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.float8_e5m2,
    torch.bfloat16,
    torch.float32,
    torch.int64,
    torch.complex128,
]
SHAPES = st.one_of(
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.sampled_from([(127,), (128,), (129,), (256,), (257,), (2048,), (2049,), (9, 300)]),
)
FIELDS = st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1, max_size=8).map(
    lambda drawn: [Field(str(i), dtype, shape) for i, (dtype, shape) in enumerate(drawn)]
)


def spans(fields: Sequence[Field], plan: layout.Layout, block: int) -> list[tuple[int, int]]:
    """First byte and the byte after the last one of each field that takes any, in order."""
    return sorted(
        (offset(plan, i), offset(plan, i) + field.nbytes)
        for i, (field, place) in enumerate(zip(fields, plan.places, strict=True))
        if place.block == block and field.nbytes
    )


def offset(plan: layout.Layout, number: int) -> int:
    """Bytes from the start of its record to a field."""
    place = plan.places[number]
    members = plan.records[place.block].fields
    assert members is not None
    return members[place.name][1]


@given(FIELDS)
@settings(max_examples=60, deadline=None)
def test_fields_of_any_kind_find_a_place(fields: list[Field]) -> None:
    plan = layout.plan(fields)
    assert len(plan.places) == len(fields)
    assert {place.block for place in plan.places} == set(range(len(plan.records)))
    for number, (field, place) in enumerate(zip(fields, plan.places, strict=True)):
        assert offset(plan, number) % field.bits.itemsize == 0
        assert plan.records[place.block].itemsize % field.bits.itemsize == 0
    for block, record in enumerate(plan.records):
        taken = spans(fields, plan, block)
        assert all(start >= 0 and stop <= record.itemsize for start, stop in taken)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(taken))
        # No more is given away than a padding of less than one element.
        widest = max(one.bits.itemsize for one, place in zip(fields, plan.places, strict=True) if place.block == block)
        assert record.itemsize - sum(stop - start for start, stop in taken) < widest
    assert plan.nbytes == sum(record.itemsize for record in plan.records)


@given(FIELDS)
@settings(max_examples=40, deadline=None)
def test_small_fields_share_a_block_and_large_ones_do_not(fields: list[Field]) -> None:
    plan = layout.plan(fields)
    small = {place.block for field, place in zip(fields, plan.places, strict=True) if field.nbytes <= 2048}
    large = [place.block for field, place in zip(fields, plan.places, strict=True) if field.nbytes > 2048]
    assert small <= {0}
    assert len(set(large)) == len(large)
    assert not small & set(large)


def test_widest_elements_come_first_and_larger_fields_before_smaller_ones() -> None:
    fields = [
        Field("done", torch.bool, ()),
        Field("pixels", torch.uint8, (3,)),
        Field("reward", torch.float32, ()),
        Field("step", torch.int64, ()),
        Field("action", torch.float32, (2,)),
    ]
    plan = layout.plan(fields)
    assert [record.itemsize for record in plan.records] == [24]
    assert [offset(plan, number) for number in range(5)] == [23, 20, 16, 0, 8]


def test_a_lone_small_field_is_not_padded() -> None:
    assert layout.plan([Field("x", torch.uint8, (5,))]).nbytes == 5
    assert layout.plan([Field("x", torch.uint8, (5,)), Field("y", torch.uint8, ())]).nbytes == 6


def test_border_between_small_and_large() -> None:
    plan = layout.plan(
        [
            Field("large", torch.uint8, (2049,)),
            Field("small", torch.uint8, (2048,)),
            Field("huge", torch.float64, (1000,)),
            Field("tiny", torch.float64, ()),
        ]
    )
    assert [record.itemsize for record in plan.records] == [2056, 2049, 8000]
    assert [place.block for place in plan.places] == [1, 0, 2, 0]
    assert [offset(plan, number) for number in range(4)] == [0, 8, 0, 0]


@given(FIELDS, st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_views_show_each_field_and_nothing_else(fields: list[Field], rows: int) -> None:
    plan = layout.plan(fields)
    blocks = [layout.allocate(rows, record) for record in plan.records]
    generator = np.random.default_rng(0)
    written = []
    for field, column in zip(fields, columns(blocks, plan), strict=True):
        assert column.shape == (rows, *field.shape)
        assert column.dtype == field.bits
        # 0 and 1 only: other bytes are no valid bools.
        values = generator.integers(0, 2, rows * field.nbytes, np.uint8).view(field.bits).reshape(column.shape)
        column[...] = values
        written.append(values)
    for field, column, values in zip(fields, columns(blocks, plan), written, strict=True):
        assert column.tobytes() == values.tobytes()
        tensor = field.typed(torch.from_numpy(column))
        assert tensor.shape == (rows, *field.shape)
        assert tensor.dtype is field.dtype
        if not field.nbytes:
            continue
        # contiguous() would leave the strides of axes of length 1 as they are, which no view of bytes takes.
        dense = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        assert dense.reshape(-1).view(torch.uint8).numpy().tobytes() == values.tobytes()
        assert tensor.data_ptr() == column.ctypes.data


@pytest.mark.parametrize(("capacity", "size"), [(1, 1), (7, 24), (5, 0)])
def test_new_rows_are_zeroed_and_can_be_written(capacity: int, size: int) -> None:
    [record] = layout.plan([Field("x", torch.uint8, (size,))]).records
    rows = layout.allocate(capacity, record)
    [column] = columns([rows], layout.plan([Field("x", torch.uint8, (size,))]))
    assert column.shape == (capacity, size)
    assert not column.any()
    column[...] = 255
    assert column.sum() == 255 * capacity * size


def test_allocations_do_not_share_memory() -> None:
    [record] = layout.plan([Field("x", torch.uint8, (8,))]).records
    one, other = layout.allocate(4, record), layout.allocate(4, record)
    one["f0"] = 1
    assert not other["f0"].any()


@pytest.mark.parametrize(
    ("field", "nbytes", "text"),
    [
        (Field("obs/pixels", torch.uint8, (3, 4)), 12, "obs/pixels: uint8 [3, 4]"),
        (Field("x", torch.bfloat16, (5,)), 10, "x: bfloat16 [5]"),
        (Field("x", torch.complex128, ()), 16, "x: complex128 []"),
        (Field("x", torch.float32, (0, 7)), 0, "x: float32 [0, 7]"),
        (Field("x", torch.uint8, (1 << 20, 1 << 20)), 1 << 40, "x: uint8 [1048576, 1048576]"),
    ],
    ids=["uint8", "bfloat16", "complex128", "empty", "terabyte"],
)
def test_field(field: Field, nbytes: int, text: str) -> None:
    assert field.nbytes == nbytes
    assert str(field) == text
