"""Columns that are not what was written: values, or an error of the package, and never more memory than is there."""

from __future__ import annotations

import copy
import json
import random
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from asyncbuf import CheckpointCorruptError, CheckpointVersionError
from asyncbuf._plain.column_leaves import DOCUMENT
from asyncbuf._plain.columns import to_columns
from asyncbuf._plain.columns_back import from_columns
from tests.plain.codec_helpers import Celsius, Colour, Pair, Point

if TYPE_CHECKING:
    from collections.abc import Callable

Chunk = dict[str, torch.Tensor]


def chunk_of(document: Any, **tensors: torch.Tensor) -> Chunk:
    content = json.dumps(document).encode()
    return {DOCUMENT: torch.frombuffer(bytearray(content), dtype=torch.uint8), **tensors}


def document_of(chunk: Chunk) -> Any:
    return json.loads(chunk[DOCUMENT].numpy().tobytes())


def column(node: Any, count: int, **tensors: torch.Tensor) -> Chunk:
    return chunk_of({"version": 1, "items": count, "column": node}, **tensors)


def read(chunk: Chunk) -> list[Any]:
    return from_columns(chunk, "storage")


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def uint8(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


FLOATS = torch.ones(3, dtype=torch.float64)
HUGE = 2**62
CASES: dict[str, Chunk] = {
    "no document": {"0": FLOATS},
    "document of numbers": {DOCUMENT: FLOATS},
    "no json": {DOCUMENT: uint8(1, 2, 3)},
    "no utf-8": {DOCUMENT: uint8(0xFF, 0xFE)},
    "deep json": {DOCUMENT: torch.frombuffer(bytearray(b"[" * 100_000), dtype=torch.uint8)},
    "list": chunk_of([]),
    "no version": chunk_of({"items": 0, "column": None}),
    "version of a bool": chunk_of({"version": True, "items": 0, "column": None}),
    "version 0": chunk_of({"version": 0, "items": 0, "column": None}),
    "version of tomorrow": chunk_of({"version": 2, "items": 0, "column": None}),
    "more in the document": chunk_of({"version": 1, "items": 0, "column": None, "x": 1}),
    "negative items": column(None, -1),
    "no column": column(None, 3),
    "column of nothing": column({"none": "0"}, 0, **{"0": uint8()}),
    "unknown kind": column({"set": "0"}, 3, **{"0": FLOATS}),
    "kind of a list": column([{"float": "0"}], 3, **{"0": FLOATS}),
    "empty kind": column({}, 3),
    "more keys": column({"float": "0", "int": "1"}, 3, **{"0": FLOATS}),
    "missing tensor": column({"float": "1"}, 3, **{"0": FLOATS}),
    "name that is none": column({"float": ["0"]}, 3, **{"0": FLOATS}),
    "the document as a tensor": column({"none": DOCUMENT}, 3),
    "a tensor too many": column({"float": "0"}, 3, **{"0": FLOATS, "1": FLOATS}),
    "a tensor twice": column({"list": {"int": "0"}, "lengths": "0"}, 2, **{"0": int64(1, 1)}),
    "too few": column({"float": "0"}, 4, **{"0": FLOATS}),
    "too many": column({"float": "0"}, 2, **{"0": FLOATS}),
    "another dtype": column({"float": "0"}, 3, **{"0": FLOATS.float()}),
    "another shape": column({"float": "0"}, 3, **{"0": FLOATS[:, None]}),
    "expanded": column({"none": "0"}, 10**12, **{"0": torch.zeros(1, dtype=torch.uint8).expand(10**12)}),
    "no bool": column({"bool": "0"}, 2, **{"0": uint8(1, 2)}),
    "int of words": column({"int": {"str": "0", "lengths": "1"}}, 1, **{"0": uint8(120, 121), "1": int64(2)}),
    "int of ints": column({"int": {"int": "0"}}, 1, **{"0": int64(1)}),
    "int of deep ints": column({"int": {"int": {"int": "0"}}}, 1, **{"0": int64(1)}),
    "complex alone": column({"complex": "0"}, 3, **{"0": FLOATS}),
    "negative length": column({"str": "0", "lengths": "1"}, 2, **{"0": uint8(97), "1": int64(2, -1)}),
    "lengths too short": column({"str": "0", "lengths": "1"}, 1, **{"0": uint8(97, 97), "1": int64(1)}),
    "lengths too long": column({"bytes": "0", "lengths": "1"}, 1, **{"0": uint8(97), "1": int64(2)}),
    "lengths that overflow": column({"str": "0", "lengths": "1"}, 4, **{"0": uint8(), "1": int64(*[HUGE] * 4)}),
    "half a character": column({"str": "0", "lengths": "1"}, 2, **{"0": uint8(0xC3, 0xA9), "1": int64(1, 1)}),
    "scalar of no dtype": column({"scalar": "0", "dtype": "O"}, 1, **{"0": uint8(*[1] * 8)}),
    "scalar of two dtypes": column({"scalar": "0", "dtype": "f4,f4"}, 1, **{"0": uint8(*[1] * 8)}),
    "scalar of nothing": column({"scalar": "0", "dtype": "<U0"}, 9, **{"0": uint8()}),
    "scalar of a dtype that is none": column({"scalar": "0", "dtype": "<f3"}, 1, **{"0": uint8(1, 2, 3)}),
    "half a scalar": column({"scalar": "0", "dtype": "<f4"}, 1, **{"0": uint8(1, 2, 3)}),
    "empty tensors without marks": column({"tensor": "0"}, 9, **{"0": torch.empty(9, 0)}),
    "very many empty tensors": column({"tensor": "0"}, 10**12, **{"0": torch.empty(10**12, 0)}),
    "marks too few": column({"tensor": "0", "marks": "1"}, 9, **{"0": torch.empty(9, 0), "1": uint8(0)}),
    "marks for nothing": column({"tensor": "0", "marks": "1"}, 3, **{"0": FLOATS, "1": uint8(0, 0, 0)}),
    "tensor without an axis": column({"tensor": "0"}, 1, **{"0": torch.tensor(1)}),
    "gradient of ints": column({"tensor": "0", "grad": True}, 1, **{"0": int64(1)}),
    "gradient of 1": column({"tensor": "0", "grad": 1}, 3, **{"0": FLOATS}),
    "sizes without axes": column({"tensor": "0", "sizes": "1"}, 3, **{"0": FLOATS, "1": int64(3)}),
    "axes without sizes": column({"tensor": "0", "ndim": "1"}, 1, **{"0": FLOATS, "1": int64(1)}),
    "negative size": column(
        {"tensor": "0", "ndim": "1", "sizes": "2"}, 1, **{"0": FLOATS, "1": int64(2), "2": int64(-1, -3)}
    ),
    "too many axes": column(
        {"tensor": "0", "ndim": "1", "sizes": "2"}, 1, **{"0": FLOATS, "1": int64(99), "2": int64(*[1] * 99)}
    ),
    "shapes of another size": column(
        {"tensor": "0", "ndim": "1", "sizes": "2"}, 1, **{"0": FLOATS, "1": int64(1), "2": int64(4)}
    ),
    "shapes that overflow": column(
        {"tensor": "0", "ndim": "1", "sizes": "2"}, 1, **{"0": FLOATS, "1": int64(3), "2": int64(HUGE, HUGE, 0)}
    ),
    "array of no dtype": column({"array": "0", "dtype": 3, "shape": []}, 1, **{"0": uint8(1)}),
    "array without a shape": column({"array": "0", "dtype": "|u1"}, 1, **{"0": uint8(1)}),
    "array of a negative shape": column({"array": "0", "dtype": "|u1", "shape": [-1]}, 1, **{"0": uint8(1)}),
    "array of a shape of bools": column({"array": "0", "dtype": "|u1", "shape": [True]}, 1, **{"0": uint8(1)}),
    "array of many axes": column({"array": "0", "dtype": "|u1", "shape": [1] * 65}, 1, **{"0": uint8(1)}),
    "arrays of a huge shape": column({"array": "0", "dtype": "|u1", "shape": [HUGE, 4]}, 1, **{"0": uint8(1)}),
    "arrays of nothing": column({"array": "0", "dtype": "|u1", "shape": [0, HUGE]}, 10**12, **{"0": uint8()}),
    "arrays of nothing, huge": column(
        {"array": "0", "dtype": "|u1", "shape": [0, HUGE, HUGE], "marks": "1"}, 1, **{"0": uint8(), "1": uint8(0)}
    ),
    "array of a shape and of shapes": column(
        {"array": "0", "dtype": "|u1", "shape": [1], "ndim": "1", "sizes": "2"},
        1,
        **{"0": uint8(1), "1": int64(1), "2": int64(1)},
    ),
    "again of nothing": column({"again": "0"}, 1, **{"0": int64(0)}),
    "again of the next": column(
        {"dict": [{"again": "0"}, {"tensor": "1"}], "keys": {"str": "2", "lengths": "3"}},
        1,
        **{"0": int64(0), "1": FLOATS[:1], "2": uint8(97, 98), "3": int64(1, 1)},
    ),
    "elements of nothing": column({"list": None, "lengths": "0"}, 1, **{"0": int64(10**12)}),
    "very many nones": column({"list": {"none": "1"}, "lengths": "0"}, 1, **{"0": int64(10**12), "1": uint8(0)}),
    "very many empty dicts": column(
        {"list": {"dict": [], "keys": None, "marks": "1"}, "lengths": "0"}, 1, **{"0": int64(10**12), "1": uint8(0)}
    ),
    "dicts without keys or marks": column({"dict": [], "keys": None}, 10**12),
    "columns that are no list": column({"dict": {"float": "0"}, "keys": None}, 3, **{"0": FLOATS}),
    "more keys than columns": column(
        {"dict": [{"float": "0"}], "keys": {"int": "1"}}, 3, **{"0": FLOATS, "1": int64(1, 2)}
    ),
    "a key twice": column(
        {"dict": [{"float": "0"}, {"float": "1"}], "keys": {"int": "2"}},
        3,
        **{"0": FLOATS, "1": FLOATS, "2": int64(1, 1)},
    ),
    "a key that is a list": column(
        {"dict": [{"float": "0"}], "keys": {"list": None, "lengths": "1"}}, 3, **{"0": FLOATS, "1": int64(0)}
    ),
    "a key of a map twice": column(
        {"map": {"float": "0"}, "keys": {"int": "1"}, "lengths": "2"},
        1,
        **{"0": FLOATS, "1": int64(1, 1, 2), "2": int64(3)},
    ),
    "map of fewer keys": column(
        {"map": {"float": "0"}, "keys": {"int": "1"}, "lengths": "2"}, 1, **{"0": FLOATS, "1": int64(1), "2": int64(3)}
    ),
    "unknown type": column({"type": "os.system", "value": {"none": "0"}}, 1, **{"0": uint8(0)}),
    "type of a number": column({"type": 3, "value": {"none": "0"}}, 1, **{"0": uint8(0)}),
    "codec that fails": column({"type": "celsius", "value": {"none": "0"}}, 1, **{"0": uint8(0)}),
    "dtype that is none": column({"dtype": {"str": "0", "lengths": "1"}}, 1, **{"0": uint8(97), "1": int64(1)}),
    "device that is none": column({"device": {"str": "0", "lengths": "1"}}, 1, **{"0": uint8(97), "1": int64(1)}),
    "dtype of numbers": column({"dtype": {"int": "0"}}, 1, **{"0": int64(1)}),
    "mixed beyond": column({"mixed": "0", "columns": [{"float": "1"}]}, 3, **{"0": uint8(0, 0, 1), "1": FLOATS}),
    "mixed without columns": column({"mixed": "0", "columns": []}, 3, **{"0": uint8(0, 0, 0)}),
    "mixed below": column({"mixed": "0", "columns": [None] * 300}, 1, **{"0": torch.tensor([-1], dtype=torch.int32)}),
    "sparse": column({"float": "0"}, 3, **{"0": FLOATS.to_sparse()}),
    "meta": column({"float": "0"}, 3, **{"0": FLOATS.to("meta")}),
}


@pytest.mark.parametrize("chunk", CASES.values(), ids=CASES)
def test_what_was_never_written_is_refused(chunk: Chunk) -> None:
    start = time.perf_counter()
    tracemalloc.start()
    try:
        with pytest.raises((CheckpointCorruptError, CheckpointVersionError), match=r"^storage: .*expected"):
            read(chunk)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - start < 5


def test_deep_columns() -> None:
    for kind in ("list", "tuple"):
        node: Any = {"none": "0"}
        tensors = {"0": uint8(0)}
        for level in range(400):
            node = {kind: node, "lengths": str(level + 1)}
            tensors[str(level + 1)] = int64(1)
        with pytest.raises(CheckpointCorruptError, match="expected"):
            read(column(node, 1, **tensors))


# -- at random --------------------------------------------------------------------------------------------------------

GOAL = torch.arange(3.0)
ITEMS: list[list[Any]] = [
    [{"x": torch.full((2,), float(i)), "n": i, "text": f"é{i}", "ok": i % 2 == 0} for i in range(8)],
    [[1, 2.5, None, "x", b"y", 3 + 1j, True], [2**70, -1], []],
    [Point(i, Pair(float(i), [i])) for i in range(4)],
    [{"goal": GOAL, "same": [GOAL, torch.zeros(i)], i: Colour.RED} for i in range(4)],
    [np.float32(1), np.arange(3, dtype=">i4"), np.zeros((0, 2)), np.array(["a", "bc"]), np.datetime64("2020", "D")],
    [torch.ones(2, requires_grad=True), torch.zeros(0, 3), torch.tensor(1), torch.bfloat16, torch.device("cpu")],
    [Celsius(1.5), {}, (), {"a": {}}, {1: {2: {3: bytearray(b"z")}}}],
]
WORDS = ["0", "1", "2", "float", "int", "list", "celsius", "<f4", "|b1", "<U0", "<M8[s]", "none", DOCUMENT]


def nodes_of(node: Any) -> list[Any]:
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [node, *(each for child in inner for each in nodes_of(child))]


def change_document(chunk: Chunk, rng: random.Random) -> None:
    try:
        document = document_of(chunk)
    except (ValueError, KeyError):  # it was changed already
        return
    nodes = [node for node in nodes_of(document) if isinstance(node, (dict, list)) and node]
    node = rng.choice(nodes)
    place = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
    new: list[Callable[[], Any]] = [
        lambda: rng.choice([None, True, -1, 0, 1, 2, 2**40, 2**70, 1.5, [], {}]),
        lambda: rng.choice(WORDS),
        lambda: copy.deepcopy(rng.choice(nodes)),
        lambda: {rng.choice(WORDS): copy.deepcopy(node[place])},
    ]
    if rng.random() < 0.2:
        del node[place]
    elif rng.random() < 0.2 and isinstance(node, dict):
        node[rng.choice(["marks", "grad", "ndim", "sizes", "shape", *WORDS])] = rng.choice(new)()
    else:
        node[place] = rng.choice(new)()
    chunk[DOCUMENT] = chunk_of(document)[DOCUMENT]


def change_tensor(chunk: Chunk, rng: random.Random) -> None:
    names = [name for name in chunk if name != DOCUMENT]
    if not names:
        return
    name = rng.choice(names)
    tensor = chunk[name].detach()
    flat = tensor.reshape(-1)
    number = rng.choice([0, 1, -1, 2, 255, 2**31, 2**62, -(2**63)])
    other = flat.clone()
    if len(other) and not other.is_complex():
        where = rng.randrange(len(other))
        other[where] = other[where] if other.dtype is torch.bool else torch.tensor(number).to(other.dtype)
    chunk[name] = rng.choice(
        [
            other.reshape(tensor.shape),
            flat[:-1],
            torch.cat([flat, flat[:1]]),
            tensor[None],
            tensor.to(rng.choice([torch.float32, torch.float64, torch.uint8, torch.int64, torch.int32])),
            torch.empty(rng.choice([(0,), (0, 3), (10**6, 0)]), dtype=tensor.dtype),
            flat[:1].expand(10**7) if len(flat) else flat,
            chunk[rng.choice(names)],
        ]
    )


def change_names(chunk: Chunk, rng: random.Random) -> None:
    names = list(chunk)
    one, other = rng.choice(names), rng.choice(names)
    if rng.random() < 0.3:
        del chunk[one]
    elif rng.random() < 0.3:
        chunk[str(rng.randrange(30))] = chunk[one]
    else:
        chunk[one], chunk[other] = chunk[other], chunk[one]


def mutate(count: int, seed: int) -> int:
    """How many of the changed chunks were read all the same."""
    rng = random.Random(seed)
    chunks = [to_columns(items, lambda _: None) for items in ITEMS]
    taken = 0
    for _ in range(count):
        chunk = dict(rng.choice(chunks))
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            rng.choice([change_document, change_document, change_tensor, change_tensor, change_names])(chunk, rng)
        try:
            read(chunk)
        except (CheckpointCorruptError, CheckpointVersionError):
            continue
        taken += 1
    return taken


def test_changed_at_random() -> None:
    tracemalloc.start()
    try:
        start = time.perf_counter()
        taken = mutate(500, 0)
        seconds = time.perf_counter() - start
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()
    assert 0 < taken < 250
    assert seconds < 30


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_changed_at_random_at_length(seed: int) -> None:
    assert 0 < mutate(3000, seed) < 1500
