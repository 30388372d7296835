"""What can never be saved is found before it is stored."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from asyncbuf import CheckpointError, register_codec, register_type
from asyncbuf._plain.codec import encode
from asyncbuf._plain.savable import MisfitError, check_savable
from tests.helpers import lines_of
from tests.plain.codec_helpers import ARRAYS, ATOMS, CONTAINERS, SCALARS, TENSORS, Celsius, Pair, Point, Unregistered

if TYPE_CHECKING:
    from collections.abc import Callable

GOOD = {**ATOMS, **ARRAYS, **SCALARS, **TENSORS, **CONTAINERS}


@pytest.mark.parametrize("value", GOOD.values(), ids=GOOD)
def test_what_can_be_saved_passes(value: Any) -> None:
    encode(value)
    check_savable(value)
    check_savable({"a": [value, (value, {1: value})]})


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def endless() -> list[Any]:
    value: list[Any] = []
    value.append({"a": (value,)})
    return value


NEVER: dict[str, tuple[Callable[[], Any], str]] = {
    "object array": (lambda: np.array(["a", None], dtype=object), "dtype object"),
    "structured array": (lambda: np.zeros(2, "i4,f8"), "dtype"),
    "void": (lambda: np.void(b"ab"), "dtype"),
    "array with a mask": (lambda: np.ma.masked_array([1, 2], [True, False]), "mask"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse_coo"),
    "sparse rows": (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
    "quantized": (quantized, "qint8"),
    "meta": (lambda: torch.zeros(3, device="meta"), "meta device"),
    "meta parameter": (lambda: torch.nn.Parameter(torch.zeros(3, device="meta")), "meta device"),
    "bits": (lambda: torch.zeros(3, dtype=torch.uint8).view(torch.bits8), "bits8"),
    "endless": (endless, "levels"),
}
PLACES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "alone": (lambda bad: bad, "the item"),
    "dict": (lambda bad: {"x": 1, "bad": bad}, "bad"),
    "list": (lambda bad: ["a", [2, bad]], "1/1"),
    "long list of numbers": (lambda bad: [*range(500), bad, 7], "500"),
    "tuple": (lambda bad: (None, bad), "1"),
    "named tuple": (lambda bad: Pair(1, {"y": bad}), "right/y"),
    "dataclass": (lambda bad: Point(1, [bad]), "y/0"),
    "ordered dict": (lambda bad: collections.OrderedDict(a=bad), "a"),
    "TensorDict": (lambda bad: TensorDict({"in": {"text": NonTensorData({"z": bad})}}, []), "data/in/data/text/data/z"),
}


@pytest.mark.filterwarnings("ignore:.*quantize", "ignore:.*sparse", "ignore:.*Sparse", "ignore:.*torch.ao")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", NEVER)
def test_what_can_never_be_saved_is_found_with_its_place(kind: str, place: str) -> None:
    (make, problem), (put, where) = NEVER[kind], PLACES[place]
    value = put(make())
    with pytest.raises(MisfitError, match=problem) as caught:
        check_savable(value)
    told = caught.value.told()
    assert told.startswith((f"{where}: expected", f"{where}/")) or kind == "endless"
    if place == "TensorDict" and kind == "endless":
        return
    with pytest.raises(CheckpointError):
        encode(value)


class Later:
    pass


UNKNOWN = {"object": object(), "set": {1}, "class of my own": Later(), "dataclass": Unregistered(1), "function": len}


@pytest.mark.parametrize("value", UNKNOWN.values(), ids=UNKNOWN)
def test_what_may_be_registered_later_passes(value: Any) -> None:
    check_savable({"a": [value]})


def test_type_that_is_registered_after_it_was_looked_at() -> None:
    @dataclasses.dataclass
    class Step:
        x: Any

    bad = Step(np.array([None]))
    check_savable(bad)
    register_type(Step, name="test_savable.Step")
    with pytest.raises(MisfitError, match="dtype object"):
        check_savable(bad)


def test_codec_of_a_user_is_not_asked() -> None:
    class Costly:
        pass

    def encode_it(value: Any) -> Any:
        raise AssertionError("called")

    register_codec(Costly, encode_it, lambda plain: Costly(), name="test_savable.Costly")
    check_savable([Costly(), Celsius(1.0)])


def test_masked_array_with_a_codec_passes() -> None:
    class Masked(np.ma.MaskedArray[Any, Any]):
        pass

    register_codec(Masked, list, lambda plain: Masked(plain), name="test_savable.Masked")
    check_savable(Masked([1, 2]))


def test_registered_value_that_lacks_a_field() -> None:
    broken = Point(1, 2)
    del broken.x
    with pytest.raises(MisfitError, match="taken apart"):
        check_savable([broken])


def test_as_deep_as_can_be_saved() -> None:
    for levels in (99, 100, 101, 102):
        value: Any = 1
        for _ in range(levels):
            value = [value]
        fits = True
        try:
            encode(value)
        except CheckpointError:
            fits = False
        if fits:
            check_savable(value)
        else:
            with pytest.raises(MisfitError, match="levels"):
                check_savable(value)


def test_lists_of_tokens_cost_little() -> None:
    item = {"tokens": [[1] * 512 for _ in range(8)], "logp": [[-0.5] * 512 for _ in range(8)]}
    # A walk over each number takes more than 8,192, and ten times as long.
    assert lines_of(lambda: check_savable(item)) < 500
