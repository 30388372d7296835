"""A class with a codec of its own is made by that alone, whatever a structure in a file says."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

from asyncbuf import CheckpointCorruptError, CheckpointError, ReplayBuffer, TensorStorage, register_codec, register_type
from asyncbuf._plain.tree import flatten
from asyncbuf._plain.treespec import spec_from_plain, spec_to_plain

calls: list[Any] = []


class Command:
    def __init__(self, *arguments: Any, **named: Any) -> None:
        calls.append((arguments, named))


@dataclasses.dataclass
class Job:
    x: Any

    def __post_init__(self) -> None:
        calls.append(self.x)


class Name(NamedTuple):
    x: Any


class Old(dict[str, Any]):
    pass


def never(plain: Any) -> Any:
    raise ValueError("this kind is never loaded")


for cls in (Command, Job, Name, Old):
    register_codec(cls, lambda value: None, never, name=f"test_bypassed.{cls.__name__}")


@register_type
@dataclasses.dataclass
class Fine:
    x: Any


KINDS = ["namedtuple", "dataclass", "dict", "list", "tuple", "tensordict", "tensorclass"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["Command", "Job", "Name", "Old"])
@pytest.mark.parametrize("keys", [[], ["x"]], ids=["bare", "x"])
async def test_no_structure_makes_it(kind: str, name: str, keys: list[str]) -> None:
    pytest.importorskip("tensordict")
    buffer = ReplayBuffer(TensorStorage(8), batch_size=2)
    await buffer.extend({"x": torch.arange(4)})
    state = await buffer.state_dict()
    node = {"kind": kind, "type": f"test_bypassed.{name}", "keys": keys, "children": [None] * len(keys), "aux": None}
    state["storage"]["meta"]["structure"]["children"] = [node]
    if not keys:
        state["storage"]["meta"]["structure"] |= {"keys": ["x", "y"], "children": [None, node]}
    calls.clear()
    other = ReplayBuffer(TensorStorage(8), batch_size=2)
    if name == "Old" and kind == "dict":
        return  # a dict, whatever the class: it makes none
    with pytest.raises(CheckpointCorruptError, match="structure of an item"):
        await other.load_state_dict(state)
    assert not calls


@pytest.mark.parametrize("value", [Job(torch.ones(2)), Name(torch.ones(2))], ids=["dataclass", "namedtuple"])
async def test_what_would_be_refused_is_not_saved(value: Any) -> None:
    with pytest.raises(CheckpointError, match="a codec of its own"):
        spec_to_plain(flatten({"a": value}, batched=False)[1])


def test_registered_types_are_made_field_by_field() -> None:
    spec = flatten({"a": Fine(1)}, batched=False)[1]
    assert spec_from_plain(spec_to_plain(spec)) == spec
    plain = spec_to_plain(spec)
    plain["children"][0]["kind"] = "namedtuple"
    with pytest.raises(CheckpointCorruptError, match="as a dataclass, found it as a namedtuple"):
        spec_from_plain(plain)
