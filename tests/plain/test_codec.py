"""Values become plain data and JSON with tensors, and come back bit for bit."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import json
import math
import struct
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from asyncbuf import CheckpointCorruptError, CheckpointError, register_codec, register_type
from asyncbuf._disk.directory import CheckpointReader, CheckpointWriter
from asyncbuf._plain.codec import DTYPES, decode, encode, join, split
from asyncbuf.errors import AsyncBufError


@register_type
@dataclasses.dataclass
class Point:
    x: Any
    y: Any = None


@register_type
class Pair(NamedTuple):
    left: Any
    right: Any


@register_type
class Colour(enum.Enum):
    RED = 1
    GREEN = "green"


@register_type
class Level(enum.IntEnum):
    LOW = 1


@register_type
class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Celsius:
    def __init__(self, degrees: float) -> None:
        self.degrees = degrees

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.degrees == getattr(other, "degrees", None)

    def __hash__(self) -> int:
        return hash(self.degrees)


class Kelvin(Celsius):
    pass


register_codec(Celsius, lambda value: [value.degrees], lambda plain: Celsius(plain[0]), name="celsius")


@dataclasses.dataclass
class Unregistered:
    x: int


def through_json(value: Any) -> Any:
    document, tensors = split(encode(value))
    return decode(join(json.loads(json.dumps(document, allow_nan=False)), tensors))


def bits(value: Any) -> Any:
    """Everything there is to a value, so that two are equal only if they are the same bit for bit."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().resolve_neg()
        real = torch.view_as_real(plain) if plain.is_complex() else plain
        dense = torch.empty(real.numel(), dtype=real.dtype).copy_(real.reshape(-1))
        raw = dense.view(torch.uint8).numpy().tobytes()
        return "tensor", value.dtype, tuple(value.shape), value.requires_grad, raw
    if isinstance(value, (np.ndarray, np.generic)):
        return kind, value.dtype.str, value.shape, value.tobytes()
    if kind is float:
        # There is one nan: which of its bits are set is no property of a float in Python.
        return kind, "nan" if math.isnan(value) else struct.pack("<d", value)
    if kind is complex:
        return kind, bits(value.real), bits(value.imag)
    if kind is dict:
        return kind, [(bits(key), bits(item)) for key, item in value.items()]
    if kind in (list, tuple):
        return kind, [bits(item) for item in value]
    if isinstance(value, Pair):
        return kind, [bits(item) for item in value]
    if isinstance(value, Point):
        return kind, bits(value.x), bits(value.y)
    return kind, value


def check(found: Any, expected: Any) -> None:
    assert bits(found) == bits(expected)


ATOMS = {
    "none": None,
    "true": True,
    "false": False,
    "int": -7,
    "big int": 10**100,
    "negative big int": -(2**200) + 1,
    "zero": 0.0,
    "negative zero": -0.0,
    "smallest float": 5e-324,
    "largest float": 1.7976931348623157e308,
    "tenth": 0.1,
    "nan": math.nan,
    "inf": math.inf,
    "negative inf": -math.inf,
    "str": "a/b $x \x00 \n é 😀",
    "empty str": "",
    "lone surrogate": "\ud800",
    "looks like a tag": "$tensor",
    "bytes": b"\x00\xff",
    "empty bytes": b"",
    "bytearray": bytearray(b"\x80"),
    "complex": complex(math.nan, -0.0),
    "complex inf": complex(-math.inf, 1.5),
    "dtype": torch.bfloat16,
    "device": torch.device("cuda:1"),
    "enum": Colour.GREEN,
    "int enum": Level.LOW,
    "flag": Access.WRITE,
    "registered class": Celsius(3.5),
}

ARRAYS = {
    "0-dim": np.array(5),
    "empty": np.zeros((0, 3), np.float32),
    "empty inner": np.zeros((2, 0)),
    "bool": np.array([True, False]),
    "float16": np.array([1.5, np.nan], np.float16),
    "longdouble": np.array([1, 3], np.longdouble) / 3,
    "complex64": np.array([1 + 2j], np.complex64),
    "complex128": np.array([complex(np.nan, -0.0)]),
    "big-endian": np.array([1, -2], ">i4"),
    "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "reversed": np.arange(10)[::-3],
    "broadcast": np.broadcast_to(np.arange(3), (2, 3)),
    "datetime": np.array(["2020-01-01", "NaT"], "M8[ns]"),
    "datetime of 25 seconds": np.array(["2020-01-01"], "M8[25s]"),
    "timedelta": np.array([1, -5], "m8[us]"),
    "strings": np.array(["a", "bé", ""]),
    "empty strings": np.array([""], "U1"),
    "byte strings": np.array([b"a", b"bc"]),
    "negative zero": np.array([-0.0, 0.0]),
    "nan payload": np.array([0x7FF8000000000123], np.uint64).view(np.float64),
}

SCALARS = {
    "bool": np.bool_(True),
    "int8": np.int8(-3),
    "uint64": np.uint64(2**64 - 1),
    "float32": np.float32("nan"),
    "float64": np.float64(-0.0),
    "longdouble": np.longdouble(1) / 3,
    "complex64": np.complex64(1 - 2j),
    "str": np.str_("añ"),
    "empty str": np.str_(""),
    "bytes": np.bytes_(b"ab"),
    "datetime": np.datetime64("2020-01-01T00:00:00", "ms"),
    "not a time": np.datetime64("NaT"),
    "generic timedelta": np.timedelta64(3),
}


def tensor_of(dtype: torch.dtype, *, count: int = 6) -> torch.Tensor:
    """Random bits; two's complement of every dtype is fair, but a bool is 0 or 1."""
    if dtype is torch.bool:
        return torch.arange(count) % 2 == 0
    if dtype.is_complex:
        return torch.view_as_complex(torch.arange(2.0 * count).reshape(-1, 2)).to(dtype)
    size = torch.empty((), dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator).view(dtype)


# What torch computes with. The others (quantized, sub-byte and "bits" types) are either refused or below.
COMMON = [
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "bfloat16", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
]

TENSORS = {
    "0-dim": torch.tensor(2.5),
    "0-dim bool": torch.tensor(True),
    "empty": torch.empty(0, 3),
    "strided": torch.arange(12.0).reshape(3, 4).t(),
    "every second": torch.arange(10)[::2],
    "expanded": torch.ones(3).expand(2, 3),
    "conj view": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "neg view": torch.tensor([1 + 2j]).conj().imag,
    "leaf": torch.ones(2, requires_grad=True),
    "non-leaf": torch.ones(2, requires_grad=True) * 3,
    "complex leaf": torch.ones(2, dtype=torch.complex64, requires_grad=True),
    **{name: tensor_of(DTYPES[name]) for name in COMMON},
}

CONTAINERS = {
    "empty list": [],
    "empty tuple": (),
    "empty dict": {},
    "nested": [1, (2, [3, {"a": (None,)}])],
    "int keys": {0: "a", -1: "b"},
    "mixed keys": {1: 2, "a": 3, None: 4, 1.5: 5, (1, ("b",)): 6, b"x": 7, Colour.RED: 8},
    "nan key": {math.inf: 1},
    "true and one": {True: "a", 2: "b"},
    "dollar keys": {"$tensor": "0", "grad": True},
    "dollar key second": {"a": 1, "$float": "nan"},
    "decoy tags": [{"$type": "celsius", "value": [1.0]}, {"$dict": []}, {"$tuple": 3}, {"$unknown": None}],
    "named tuple": Pair(1, Pair((2,), {"x": torch.ones(1)})),
    "dataclass": Point([1, 2], Point(torch.zeros(2), Colour.RED)),
    "float below": {"a": [math.nan, {"b": math.inf}]},
}


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


# -- refused ----------------------------------------------------------------------------------------------------------


class SubList(list[int]):
    pass


REFUSED = {
    "set": ({"a": [1, {2}]}, "/a/1"),
    "object": ([None, (object(),)], "/1/0"),
    "unregistered dataclass": ({"deep": {"er": Unregistered(1)}}, "/deep/er"),
    "unregistered subclass": ([Kelvin(1.0)], "/0"),
    "list subclass": ({"a": SubList([1])}, "/a"),
    "function": ({"a": len}, "/a"),
    "class": ({"a": int}, "/a"),
    "generator": ({"a": torch.Generator()}, "/a"),
    "memoryview": ({"a": memoryview(b"x")}, "/a"),
    "sparse": ({"a": torch.eye(2).to_sparse()}, "/a"),
    "object array": ({"a": np.array([object()])}, "/a"),
    "structured array": ({"a": np.zeros(2, "i4,f8")}, "/a"),
    "void": ({"a": np.void(b"ab")}, "/a"),
    "value below an int key": ({7: object()}, "/7"),
    "key": ({object(): 1}, "the value"),
    "in a dataclass": ({"a": Point(1, object())}, "/a/y"),
}


@pytest.mark.parametrize(("value", "path"), REFUSED.values(), ids=REFUSED)
def test_refused_with_its_path(value: Any, path: str) -> None:
    with pytest.raises(CheckpointError, match=r"expected .* found") as caught:
        encode(value)
    assert str(caught.value).startswith(f"{path}:")


def test_path_begins_with_what_the_caller_says() -> None:
    with pytest.raises(CheckpointError, match=r"^sampler/a/0: "):
        encode({"a": [object()]}, "sampler")


def cyclic_list() -> Any:
    value: list[Any] = [1]
    value.append({"deep": value})
    return value


def cyclic_dict() -> Any:
    value: dict[Any, Any] = {}
    value[1] = (value,)
    return value


def cyclic_dataclass() -> Any:
    value = Point(1)
    value.y = [value]
    return value


@pytest.mark.parametrize(
    ("make", "path"),
    [(cyclic_list, "/1/deep"), (cyclic_dict, "/1/0"), (cyclic_dataclass, "/y/0")],
    ids=["list", "dict", "dataclass"],
)
def test_cycle_is_refused_with_its_path(make: Any, path: str) -> None:
    with pytest.raises(CheckpointError, match="contains itself") as caught:
        encode(make())
    assert str(caught.value).startswith(f"{path}:")


def test_same_container_twice_is_no_cycle() -> None:
    part = [1]
    assert through_json([part, part, {"a": part}]) == [[1], [1], {"a": [1]}]


# -- what does not come back as it was --------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [Access.READ | Access.WRITE, Access(0)], ids=["both", "none"])
def test_composite_flag_comes_back(value: Access) -> None:
    check(through_json(value), value)


@pytest.mark.parametrize("value", [collections.OrderedDict(b=1, a=(2,)), torch.Size([2, 3])], ids=["ordered", "size"])
def test_type_comes_back(value: Any) -> None:
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "value",
    [collections.Counter("aab"), collections.defaultdict(list, a=[1])],
    ids=["counter", "defaultdict"],
)
def test_dict_subclass_comes_back_or_is_refused(value: Any) -> None:
    try:
        plain = encode(value)
    except CheckpointError:
        return
    assert type(decode(plain)) is type(value)


def test_masked_array_comes_back_or_is_refused() -> None:
    value = np.ma.masked_array([1, 2], [False, True])
    try:
        found = decode(encode(value))
    except CheckpointError:
        return
    assert isinstance(found, np.ma.MaskedArray)


def test_deep_value_comes_back_or_is_refused() -> None:
    value: list[Any] = []
    for _ in range(5_000):
        value = [value]
    try:
        through_json(value)
    except CheckpointError:
        return


def test_int_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(CheckpointError, match="expected"):
        through_json(10**5_000)


# -- not what encode returns ------------------------------------------------------------------------------------------

CORRUPT = {
    "unknown tag": {"$what": 1},
    "unknown type": {"$type": "os.system", "value": "true"},
    "type of another kind": {"$type": 3, "value": None},
    "no value": {"$type": "celsius"},
    "no list": {"$tuple": 3},
    "no pairs": {"$dict": [[1, 2, 3]]},
    "unhashable key": {"$dict": [[[1], 2]]},
    "complex of one": {"$complex": [1.0, 2.0, 3.0]},
    "dtype that is none": {"$dtype": "sys"},
    "device that is none": {"$device": "nowhere"},
    "bytes without a tensor": {"$bytes": "abc"},
    "object array": {"$ndarray": torch.zeros(8, dtype=torch.uint8), "dtype": "|O", "shape": [1]},
    "structured array": {"$ndarray": torch.zeros(8, dtype=torch.uint8), "dtype": "f4,f4", "shape": [1]},
    "array of another size": {"$ndarray": torch.zeros(8, dtype=torch.uint8), "dtype": "<f8", "shape": [2]},
    "array of negative size": {"$ndarray": torch.zeros(8, dtype=torch.uint8), "dtype": "<f8", "shape": [-1]},
    "array that is huge": {"$ndarray": torch.zeros(8, dtype=torch.uint8), "dtype": "<f8", "shape": [2**60]},
    "array of floats": {"$ndarray": torch.zeros(8), "dtype": "<f4", "shape": [8]},
    "scalar of two": {"$scalar": torch.zeros(8, dtype=torch.uint8), "dtype": "<f4"},
    "unknown member": {"$type": f"{__name__}.Colour", "value": "BLUE"},
    "unknown field": {"$type": f"{__name__}.Point", "value": {"x": 1, "z": 2}},
    "missing field": {"$type": f"{__name__}.Pair", "value": {"left": 1}},
    "set": {1, 2},
    "object": object(),
}


@pytest.mark.parametrize("plain", CORRUPT.values(), ids=CORRUPT)
def test_corrupt_is_refused(plain: Any) -> None:
    for nested in (plain, [plain], {"a": plain}):
        with pytest.raises(CheckpointCorruptError, match="expected"):
            decode(nested)


def test_name_is_looked_up_among_registered_types_only() -> None:
    with pytest.raises(CheckpointCorruptError, match=r"found 'builtins.eval'.*known are .*celsius.*register_type"):
        decode({"$type": "builtins.eval", "value": "1"}, "model")


@pytest.mark.parametrize(
    "document",
    [{"$tensor": "x"}, {"$tensor": None}, {"$tensor": ["0"]}, {"$float": "1.0"}, {"$float": None}, {"$float": []}],
    ids=str,
)
def test_join_refuses(document: Any) -> None:
    with pytest.raises(CheckpointCorruptError, match="expected"):
        join([{"a": document}], {"0": torch.zeros(1)})


def test_join_refuses_a_gradient_of_integers() -> None:
    with pytest.raises(CheckpointCorruptError, match="expected"):
        join({"$tensor": "0", "grad": True}, {"0": torch.zeros(1, dtype=torch.int64)})


# -- registering ------------------------------------------------------------------------------------------------------


def test_taken_name_is_refused() -> None:
    class Other:
        pass

    with pytest.raises(ValueError, match="celsius"):
        register_codec(Other, str, lambda plain: Other(), name="celsius")


def test_registering_again_is_fine() -> None:
    assert register_type(Point) is Point
    check(through_json(Point(1, 2)), Point(1, 2))


def test_register_type_wants_a_known_kind() -> None:
    with pytest.raises(TypeError, match="dataclass, named tuple or enum"):
        register_type(Celsius)


def test_subclasses_only_where_they_are_wanted() -> None:
    class Base:
        pass

    class Derived(Base):
        pass

    register_codec(Base, lambda value: 1, lambda plain: Base(), name="test_codec.base", subclasses=True)
    assert type(through_json(Derived())) is Base


# -- TensorDict -------------------------------------------------------------------------------------------------------


def test_tensordict_comes_back() -> None:
    tensordict = pytest.importorskip("tensordict")
    inner = tensordict.TensorDict({"x": torch.arange(6).reshape(2, 3)}, batch_size=[2, 3])
    shared = torch.ones(2)
    value = {"td": tensordict.TensorDict({"inner": inner, "a": shared}, batch_size=[2]), "a": shared}
    found = through_json(value)
    assert type(found["td"]) is tensordict.TensorDict
    assert found["td"].batch_size == torch.Size([2])
    assert found["td"]["inner"].batch_size == torch.Size([2, 3])
    check(found["td"]["inner", "x"], inner["x"])
    assert found["td"]["a"] is found["a"]


def test_tensordict_with_something_else_in_it_is_refused() -> None:
    tensordict = pytest.importorskip("tensordict")
    with pytest.raises(AsyncBufError, match="text"):
        encode(tensordict.TensorDict({"text": "words"}, batch_size=[]))


# -- anything ---------------------------------------------------------------------------------------------------------

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
