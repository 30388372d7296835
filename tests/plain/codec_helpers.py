"""Types and values for the codec, and the way there and back."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import struct
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncbuf import register_codec, register_type
from asyncbuf._plain.codec import DTYPES, decode, encode, join, split


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
