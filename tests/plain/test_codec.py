"""Values become plain data and JSON with tensors, and come back bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from asyncbuf import register_codec
from asyncbuf._disk.reader import CheckpointReader
from asyncbuf._disk.writer import CheckpointWriter
from asyncbuf._plain.codec import decode, encode, join, split
from tests.plain.codec_helpers import ARRAYS, ATOMS, CONTAINERS, SCALARS, TENSORS, Pair, Point, check, through_json


@pytest.mark.parametrize("value", ATOMS.values(), ids=ATOMS)
def test_atom_comes_back(value: Any) -> None:
    check(through_json(value), value)
    check(through_json([{"key": value}])[0]["key"], value)


@pytest.mark.parametrize(
    "value", [*ARRAYS.values(), *SCALARS.values()], ids=[*ARRAYS, *(f"scalar {s}" for s in SCALARS)]
)
def test_array_comes_back(value: Any) -> None:
    check(through_json(value), value)


@pytest.mark.parametrize("value", TENSORS.values(), ids=TENSORS)
def test_tensor_comes_back(value: torch.Tensor) -> None:
    found = through_json(value)
    check(found, value)
    assert found.is_leaf
    assert not found.is_conj()


@pytest.mark.parametrize("value", CONTAINERS.values(), ids=CONTAINERS)
def test_container_comes_back(value: Any) -> None:
    check(through_json(value), value)
    check(decode(encode(value)), value)


def test_everything_at_once_through_a_directory(tmp_path: Any) -> None:
    value = {"atoms": ATOMS, "arrays": ARRAYS, "scalars": SCALARS, "tensors": TENSORS, "containers": CONTAINERS}
    document, tensors = split(encode(value))
    with CheckpointWriter(tmp_path / "all") as writer:
        writer.write("all.safetensors", tensors)
        writer.commit(document)
    reader = CheckpointReader(tmp_path / "all")
    check(decode(join(reader.state, reader.read("all.safetensors"))), value)


def test_state_dict_passes_the_safe_mode_of_torch(tmp_path: Any) -> None:
    plain = encode({"atoms": ATOMS, "arrays": ARRAYS, "containers": CONTAINERS})
    torch.save(plain, tmp_path / "plain.pt")
    check(decode(torch.load(tmp_path / "plain.pt", weights_only=True)), decode(plain))


def test_dict_order_is_kept() -> None:
    value = {name: i for i, name in enumerate("zebra")}
    assert list(through_json(value)) == list("zebra")
    assert list(through_json({3: 0, 1: 0, 2: 0})) == [3, 1, 2]


# -- memory -----------------------------------------------------------------------------------------------------------


def test_shared_tensors_stay_shared() -> None:
    shared, equal = torch.ones(2), torch.ones(2)
    found = through_json({"a": shared, "b": [shared, (shared,)], "c": equal})
    assert found["a"] is found["b"][0] is found["b"][1][0]
    assert found["c"] is not found["a"]
    assert len(split(encode([shared, shared, equal])).tensors) == 2


def test_shared_tensor_in_dict_keys_and_types_stays_shared() -> None:
    shared = torch.ones(2)
    found = through_json(Point({1: shared}, Pair(shared, None)))
    assert found.x[1] is found.y.left


def test_encoded_has_memory_of_its_own() -> None:
    tensor, array, content = torch.ones(2), np.ones(2), bytearray(b"ab")
    plain = encode([tensor, array, content])
    tensor.fill_(9)
    array.fill(9)
    content[:] = b"zz"
    check(decode(plain), [torch.ones(2), np.ones(2), bytearray(b"ab")])


def test_encoding_does_not_touch_the_history_of_a_tensor() -> None:
    leaf = torch.ones(2, requires_grad=True)
    product = leaf * 3
    found = decode(encode(product))
    assert found.is_leaf
    assert found.requires_grad
    assert product.grad_fn is not None
    found.sum().backward()
    assert leaf.grad is None


def test_temporaries_do_not_pass_for_each_other() -> None:
    class Fresh:
        def __init__(self, number: int) -> None:
            self.number = number

    register_codec(
        Fresh, lambda fresh: torch.tensor(fresh.number), lambda plain: Fresh(int(plain)), name="test_codec.fresh"
    )
    assert [fresh.number for fresh in through_json([Fresh(i) for i in range(50)])] == list(range(50))
