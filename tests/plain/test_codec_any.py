"""Any value through the codec, and any document."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from asyncbuf import CheckpointCorruptError
from asyncbuf._plain.codec import decode
from tests.plain.codec_helpers import Colour, Pair, Point, check, through_json

floats = st.floats(allow_nan=True, allow_infinity=True, width=64)
dtypes = st.one_of(
    st_numpy.boolean_dtypes(),
    st_numpy.integer_dtypes(endianness="?"),
    st_numpy.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    st_numpy.complex_number_dtypes(endianness="?"),
    st_numpy.datetime64_dtypes(endianness="?"),
    st_numpy.timedelta64_dtypes(endianness="?"),
    st_numpy.unicode_string_dtypes(endianness="?"),
)
keys = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary(max_size=4), st.sampled_from(Colour))
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    floats,
    st.complex_numbers(),
    st.text(st.characters(codec=None, categories=None, exclude_categories=())),
    st.binary(max_size=20),
    st.binary(max_size=20).map(bytearray),
    st.sampled_from(Colour),
    st_numpy.arrays(dtypes, st_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)),
    st.lists(floats, max_size=4).map(torch.tensor),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(st.sampled_from(["$tensor", "$float", "$type", "value", "grad", "a"]), inner, max_size=4),
        st.builds(Point, inner, inner),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(trees)
def test_any_tree_comes_back(value: Any) -> None:
    check(through_json(value), value)


tags = [
    "$tuple",
    "$dict",
    "$ndarray",
    "$scalar",
    "$bytes",
    "$bytearray",
    "$complex",
    "$dtype",
    "$device",
    "$type",
    "$no",
]
plain_trees = st.recursive(
    st.one_of(
        st.none(),
        st.integers(-2, 5),
        st.sampled_from(["<f4", "|b1", "<M8[s]", "float32", "cpu", "celsius", f"{__name__}.Colour", "RED", "x"]),
        st.integers(0, 8).map(lambda count: torch.zeros(count, dtype=torch.uint8)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from([*tags, "value", "dtype", "shape", "x"]), inner, max_size=3),
        st.builds(
            lambda tag, a, b, c: {tag: a, "value": a, "dtype": b, "shape": c}, st.sampled_from(tags), *3 * [inner]
        ),
    ),
    max_leaves=10,
)


@settings(max_examples=200, deadline=None)
@given(plain_trees)
def test_decode_gives_a_value_or_its_own_error(plain: Any) -> None:
    with contextlib.suppress(CheckpointCorruptError):
        decode(plain)
