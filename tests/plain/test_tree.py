"""Trees: taken apart, compared, and put together again."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
from collections import OrderedDict, namedtuple
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict, tensorclass

from asyncbuf import CheckpointMismatchError, Container, SchemaError, register_container, register_type
from asyncbuf._plain import tree
from asyncbuf._plain.treespec import spec_from_plain, spec_to_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence


class Point(NamedTuple):
    x: Any
    y: Any


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Step:
    obs: Any
    reward: Any


@dataclasses.dataclass
class Other:
    obs: Any
    reward: Any


@dataclasses.dataclass
class Derived:
    value: Any
    double: Any = dataclasses.field(init=False, default=None)


@tensorclass
class Transition:  # type: ignore[misc, unused-ignore]
    obs: torch.Tensor


class Box:
    """A container of two values and a label, which is part of the structure."""

    def __init__(self, label: str, first: Any, second: Any) -> None:
        self.label = label
        self.first = first
        self.second = second


class SmallBox(Box):
    pass


def _flatten_box(box: Box, batched: bool) -> tuple[tuple[Hashable, ...], Sequence[Any], Hashable]:
    return ("first", "second"), [box.first, box.second], box.label


def _unflatten_box(kind: Any, keys: tuple[Any, ...], children: Sequence[Any], aux: Any, batch: int | None) -> Box:
    box = kind(aux, *children)
    assert isinstance(box, Box)
    return box


BOX = Container("tests.Box", _flatten_box, _unflatten_box)
register_container(Box, BOX)


def same(one: Any, other: Any) -> bool:
    """Whether two trees have the same containers in the same order, of the same types, around the same leaf objects."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (Step, Other)):
        return same(one.obs, other.obs) and same(one.reward, other.reward)
    if isinstance(one, Box):
        return one.label == other.label and same(one.first, other.first) and same(one.second, other.second)
    return one is other


def outline(value: Any) -> Any:
    """The structure of a tree in plain values, equal where trees differ in their leaves and the order of keys only."""
    if isinstance(value, dict):
        return "dict", frozenset((key, outline(child)) for key, child in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(outline, value))
    if isinstance(value, Step):
        return Step, outline(value.obs), outline(value.reward)
    if isinstance(value, Box):
        return Box, value.label, outline(value.first), outline(value.second)
    return "leaf"


def turned(value: Any) -> Any:
    """The same tree, the keys of its dicts in the opposite order."""
    if isinstance(value, dict):
        return {key: turned(value[key]) for key in reversed(value)}
    if isinstance(value, Point):
        return Point(*map(turned, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(turned, value))
    if isinstance(value, Step):
        return Step(turned(value.obs), turned(value.reward))
    if isinstance(value, Box):
        return Box(value.label, turned(value.first), turned(value.second))
    return value


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.dictionaries(st.sampled_from(["a", "b", "c", 0, 1]), children, max_size=3),
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.builds(Point, children, children),
        st.builds(Step, children, children),
        st.builds(Box, st.sampled_from(["one", "two"]), children, children),
    )


LEAVES = st.builds(object)
TREES = st.recursive(LEAVES, _containers, max_leaves=8)


@given(TREES)
@settings(max_examples=80, deadline=None)
def test_random_tree_comes_back(value: Any) -> None:
    leaves, spec = tree.flatten(value, batched=False)
    assert same(tree.unflatten(spec, leaves), value)
    assert len(spec.paths()) == len(leaves)


@given(TREES)
@settings(max_examples=50, deadline=None)
def test_flatten_like_finds_the_leaves_whatever_the_order_of_keys(value: Any) -> None:
    leaves, spec = tree.flatten(value, batched=False)
    found = tree.flatten_like(spec, turned(value), batched=False)
    assert len(found) == len(leaves)
    assert all(one is other for one, other in zip(found, leaves, strict=True))
    # Of the tree as it is, the leaves are found without the help of flatten_like.
    assert same(tree.unflatten(spec, found), value)


@given(TREES, st.integers(0, 7), TREES)
@settings(max_examples=100, deadline=None)
def test_flatten_like_takes_equal_structures_only(expected: Any, place: int, other: Any) -> None:
    _, spec = tree.flatten(expected, batched=False)
    number = itertools.count()
    found = tree.map_leaves(lambda leaf: other if next(number) == place else leaf, expected)
    if outline(expected) == outline(found):
        assert len(tree.flatten_like(spec, found, batched=False)) == len(spec.paths())
    else:
        with pytest.raises(SchemaError):
            tree.flatten_like(spec, found, batched=False)


@given(TREES)
@settings(max_examples=50, deadline=None)
def test_specs_of_equal_structures_are_equal(value: Any) -> None:
    leaves, spec = tree.flatten(value, batched=False)
    assert spec == tree.flatten(copy.copy(value), batched=False)[1]
    assert hash(spec) == hash(tree.flatten(value, batched=False)[1])
    restored = pickle.loads(pickle.dumps(spec))
    assert restored == spec
    assert same(tree.unflatten(restored, leaves), value)
    assert all(map(lambda a, b: a is b, tree.flatten_like(restored, value, batched=False), leaves))


@pytest.mark.parametrize(
    ("value", "kind", "keys", "text"),
    [
        ({"obs": 1, "action": 2}, "dict", ("obs", "action"), "dict(obs, action)"),
        ({}, "dict", (), "dict()"),
        ([1, 2], "list", (0, 1), "list(0, 1)"),
        ((1, 2), "tuple", (0, 1), "tuple(0, 1)"),
        (Point(1, 2), "namedtuple", ("x", "y"), "namedtuple(x, y)"),
        (Step(1, 2), "dataclass", ("obs", "reward"), "dataclass(obs, reward)"),
        (Box("one", 1, 2), "tests.Box", ("first", "second"), "tests.Box(first, second)"),
        (TensorDict({"a": 1, "b": 2}), "tensordict", ("a", "b"), "tensordict(a, b)"),
        (7, "leaf", (), "leaf"),
        (None, "leaf", (), "leaf"),
        ("text", "leaf", (), "leaf"),
        ({1, 2}, "leaf", (), "leaf"),
        (Step, "leaf", (), "leaf"),
    ],
    ids=str,
)
def test_kinds(value: Any, kind: str, keys: tuple[Hashable, ...], text: str) -> None:
    leaves, spec = tree.flatten(value, batched=False)
    assert (spec.kind, spec.keys, str(spec)) == (kind, keys, text)
    if kind == "leaf":
        assert leaves == [value]
    else:
        assert leaves == [1, 2][: len(keys)]


def test_nested_structure_in_words() -> None:
    _, spec = tree.flatten({"obs": {"pixels": 1, "state": (2, 3)}, "done": 4}, batched=False)
    assert str(spec) == "dict(obs: dict(pixels, state: tuple(0, 1)), done)"
    assert spec.paths() == ["obs/pixels", "obs/state/0", "obs/state/1", "done"]


def test_path_of_a_lone_leaf() -> None:
    assert tree.LEAF.paths() == ["."]
    assert tree.LEAF.paths("obs") == ["obs"]


def test_subclasses_of_dict_list_and_tuple_come_back_plain() -> None:
    value = {"size": torch.Size([2, 3]), "ordered": OrderedDict(b=1, a=2)}
    leaves, spec = tree.flatten(value, batched=False)
    assert leaves == [2, 3, 1, 2]
    assert same(tree.unflatten(spec, leaves), {"size": (2, 3), "ordered": {"b": 1, "a": 2}})


def test_subclass_of_dict_fits_where_a_dict_did() -> None:
    _, spec = tree.flatten({"a": 1, "b": 2}, batched=False)
    assert tree.flatten_like(spec, OrderedDict(b=4, a=3), batched=False) == [3, 4]


def test_unflatten_wants_as_many_leaves_as_there_are() -> None:
    _, spec = tree.flatten({"a": 1, "b": 2}, batched=False)
    with pytest.raises(ValueError, match="shorter"):
        tree.unflatten(spec, [1])


def test_unflatten_makes_fresh_containers() -> None:
    value = {"a": [1], "b": 2}
    copied = tree.map_leaves(lambda leaf: leaf, value)
    copied["a"].append(3)
    copied["c"] = 4
    assert value == {"a": [1], "b": 2}


def test_map_leaves() -> None:
    value = {"a": [1, 2], "b": Step(3, (4, Point(5, 6))), "c": Box("one", 7, 8)}
    mapped = tree.map_leaves(lambda leaf: leaf * 10, value)
    assert outline(mapped) == outline(value)
    assert tree.flatten(mapped, batched=False)[0] == [10, 20, 30, 40, 50, 60, 70, 80]
    assert tree.flatten(value, batched=False)[0] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert tree.map_leaves(str, 5) == "5"


def test_map_leaves_keeps_the_leading_axes_of_a_tensordict() -> None:
    value = TensorDict({"a": torch.ones(3, 2), "b": {"c": torch.zeros(3, 4, 5)}}, batch_size=[3])
    value["b"].batch_size = torch.Size([3, 4])
    mapped = tree.map_leaves(lambda leaf: leaf + 1, value)
    assert mapped.batch_size == torch.Size([3])
    assert mapped["b"].batch_size == torch.Size([3, 4])
    assert torch.equal(mapped["a"], torch.full((3, 2), 2.0))
    assert torch.equal(mapped["b", "c"], torch.ones(3, 4, 5))


DIFFERENCES = {
    "missing key": (
        {"a": 1, "b": 2},
        {"a": 1},
        "keys differ at the top: expected ['a', 'b'], found ['a'] (missing ['b'], unknown [])",
    ),
    "no key at all": (
        {"a": 1, "b": 2},
        {},
        "keys differ at the top: expected ['a', 'b'], found [] (missing ['a', 'b'], unknown [])",
    ),
    "unknown key": (
        {"a": 1},
        {"a": 1, "b": 2},
        "keys differ at the top: expected ['a'], found ['a', 'b'] (missing [], unknown ['b'])",
    ),
    "other key": (
        {"a": 1, "b": 2},
        {"a": 1, "c": 2},
        "keys differ at the top: expected ['a', 'b'], found ['a', 'c'] (missing ['b'], unknown ['c'])",
    ),
    "nested key": (
        {"obs": {"x": [1, {"y": 2}]}},
        {"obs": {"x": [1, {"z": 2}]}},
        "keys differ at obs/x/1: expected ['y'], found ['z'] (missing ['y'], unknown ['z'])",
    ),
    "longer list": ([1], [1, 2], "keys differ at the top: expected [0], found [0, 1] (missing [], unknown [1])"),
    "list for dict": ({"a": 1}, [1], "structure differs at the top: expected dict, found list of type list"),
    "tuple for list": ([1], (1,), "structure differs at the top: expected list, found tuple of type tuple"),
    "leaf for list": ({"a": [1]}, {"a": 1}, "structure differs at a: expected list, found leaf of type int"),
    "list for leaf": ({"a": 1}, {"a": [1]}, "structure differs at a: expected leaf, found list of type list"),
    "dict for leaf": (1, {"a": 1}, "structure differs at the top: expected leaf, found dict of type dict"),
    "other namedtuple": (
        Point(1, 2),
        Pair(1, 2),
        "structure differs at the top: expected namedtuple of type Point, found namedtuple of type Pair",
    ),
    "other dataclass": (
        (Step(1, 2),),
        (Other(1, 2),),
        "structure differs at 0: expected dataclass of type Step, found dataclass of type Other",
    ),
    "other registered type": (
        Box("one", 1, 2),
        SmallBox("one", 1, 2),
        "structure differs at the top: expected tests.Box of type Box, found tests.Box of type SmallBox",
    ),
    "other aux": (
        {"box": Box("one", 1, 2)},
        {"box": Box("two", 1, 2)},
        "tests.Box at box differs: expected one, found two",
    ),
    "dict for TensorDict": (
        TensorDict({"a": 1}),
        {"a": 1},
        "structure differs at the top: expected tensordict, found dict of type dict",
    ),
    "TensorDict for dict": (
        {"a": 1},
        TensorDict({"a": 1}),
        "structure differs at the top: expected dict, found tensordict of type TensorDict",
    ),
    "other batch size": (
        TensorDict({"a": torch.zeros(2, 3)}, batch_size=[2]),
        TensorDict({"a": torch.zeros(2, 3)}, batch_size=[2, 3]),
        "tensordict at the top differs: expected (2,), found (2, 3)",
    ),
}


@pytest.mark.parametrize(("expected", "found", "message"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_difference_is_named(expected: Any, found: Any, message: str) -> None:
    _, spec = tree.flatten(expected, batched=False)
    with pytest.raises(SchemaError) as caught:
        tree.flatten_like(spec, found, batched=False)
    assert str(caught.value).startswith(message)  # what to do may follow


def test_registered_subclass_comes_back_as_itself() -> None:
    leaves, spec = tree.flatten(SmallBox("one", 1, 2), batched=False)
    back = tree.unflatten(spec, leaves)
    assert type(back) is SmallBox
    assert (back.label, back.first, back.second) == ("one", 1, 2)


def test_container_that_does_not_keep_its_type() -> None:
    class Base:
        def __init__(self, value: Any) -> None:
            self.value = value

    class Special(Base):
        pass

    kinds: list[object] = []

    def unflatten(kind: Any, keys: Any, children: Sequence[Any], aux: Any, batch: int | None) -> Base:
        kinds.append(kind)
        return Base(children[0])

    container = Container("tests.Base", lambda value, batched: (("value",), [value.value], None), unflatten, False)
    register_container(Base, container)
    leaves, spec = tree.flatten(Special(5), batched=False)
    back = tree.unflatten(spec, leaves)
    assert type(back) is Base
    assert back.value == 5
    assert kinds == [None]
    assert tree.flatten_like(spec, Base(6), batched=False) == [6]


def test_registration_counts_for_types_that_were_seen_before() -> None:
    class Late:
        value = 3

    late = Late()
    assert tree.flatten(late, batched=False) == ([late], tree.LEAF)
    container = Container(
        "tests.Late", lambda value, batched: ((0,), [value.value], None), lambda *_: Late(), keeps_type=False
    )
    register_container(Late, container)
    assert tree.flatten(late, batched=False)[0] == [3]


def test_registered_container_goes_before_dataclass() -> None:
    @dataclasses.dataclass
    class Known:
        value: Any
        note: str

    container = Container(
        "tests.Known",
        lambda value, batched: (("value",), [value.value], value.note),
        lambda kind, keys, children, aux, batch: kind(children[0], aux),
    )
    register_container(Known, container)
    leaves, spec = tree.flatten(Known(1, "note"), batched=False)
    assert leaves == [1]
    assert tree.unflatten(spec, [2]) == Known(2, "note")


@pytest.mark.parametrize("base", [dict, list, tuple, Point], ids=lambda base: base.__name__)
def test_registered_subclass_of_a_built_in_container(base: type) -> None:
    class Special(base):  # type: ignore[misc]
        pass

    name = f"tests.Special{base.__name__}"
    container = Container(
        name, lambda value, batched: (("whole",), [42], None), lambda kind, *_: kind(), keeps_type=True
    )
    register_container(Special, container)
    value = Special(1, 2) if base is Point else Special()
    leaves, spec = tree.flatten(value, batched=False)
    assert (leaves, spec.kind) == ([42], name)


@pytest.mark.parametrize("name", ["dict", "list", "tuple", "namedtuple", "dataclass", "leaf", "tests.Box"])
def test_container_name_that_is_taken(name: str) -> None:
    class New:
        pass

    with pytest.raises(ValueError, match=f"container name '{name}' is taken: expected a name not in .*'tests.Box'"):
        register_container(New, Container(name, _flatten_box, _unflatten_box))
    assert tree.flatten(New(), batched=False)[1] is tree.LEAF


def test_container_may_be_registered_again() -> None:
    class Twice:
        pass

    def container(value: Any) -> Container:
        return Container("tests.Twice", lambda _, batched: ((0,), [value], None), lambda *_: Twice())

    register_container(Twice, container(1))
    assert tree.flatten(Twice(), batched=False)[0] == [1]
    register_container(Twice, container(2))
    assert tree.flatten(Twice(), batched=False)[0] == [2]


def test_containers_are_told_of_the_batch_axis() -> None:
    seen: list[tuple[str, object]] = []

    class Told:
        pass

    def flatten(value: Any, batched: bool) -> tuple[tuple[Hashable, ...], Sequence[Any], Hashable]:
        seen.append(("flatten", batched))
        return (0,), [1], None

    def unflatten(kind: Any, keys: Any, children: Any, aux: Any, batch: int | None) -> Told:
        seen.append(("unflatten", batch))
        return Told()

    register_container(Told, Container("tests.Told", flatten, unflatten))
    leaves, spec = tree.flatten({"a": [Told()]}, batched=True)
    tree.flatten_like(spec, {"a": [Told()]}, batched=False)
    tree.unflatten(spec, leaves, batch=9)
    tree.unflatten(spec, leaves)
    assert seen == [("flatten", True), ("flatten", False), ("unflatten", 9), ("unflatten", None)]


def test_dataclass_with_a_field_that_its_constructor_does_not_take() -> None:
    # Either it is refused before anything is stored, or it comes back: it must not fail when it is put together.
    value = Derived(1)
    try:
        leaves, spec = tree.flatten(value, batched=False)
    except SchemaError:
        return
    assert tree.unflatten(spec, leaves) == value


def test_tensordict_batch_axis_is_no_part_of_the_structure() -> None:
    batch = TensorDict(
        {"a": torch.zeros(5, 2), "b": TensorDict({"c": torch.zeros(5, 3, 4)}, batch_size=[5, 3])}, batch_size=[5]
    )
    leaves, spec = tree.flatten(batch, batched=True)
    assert spec == tree.flatten(batch[0], batched=False)[1]
    assert spec.paths() == ["a", "b/c"]
    found = tree.flatten_like(spec, batch, batched=True)
    assert all(map(torch.equal, found, leaves))
    back = tree.unflatten(spec, [leaf[:2] for leaf in leaves], batch=2)
    assert isinstance(back, TensorDict)
    assert back.batch_size == torch.Size([2])
    assert back["b"].batch_size == torch.Size([2, 3])
    assert torch.equal(back["b", "c"], torch.zeros(2, 3, 4))
    item = tree.unflatten(spec, [leaf[0] for leaf in leaves])
    assert item.batch_size == torch.Size([])
    assert item["b"].batch_size == torch.Size([3])


def test_tensordict_keys_in_another_order() -> None:
    _, spec = tree.flatten({"td": TensorDict({"a": 1, "b": 2})}, batched=False)
    assert tree.flatten_like(spec, {"td": TensorDict({"b": 4, "a": 3})}, batched=False) == [3, 4]


def test_tensordict_subclass_comes_back_plain() -> None:
    class Mine(TensorDict):  # type: ignore[misc, unused-ignore]
        pass

    leaves, spec = tree.flatten(Mine({"a": 1}), batched=False)
    assert spec == tree.flatten(TensorDict({"a": 1}), batched=False)[1]
    assert type(tree.unflatten(spec, leaves)) is TensorDict


@pytest.mark.parametrize(
    "make",
    [
        lambda: TensorDict({"a": torch.zeros(2), "note": NonTensorData("text", batch_size=[2])}, batch_size=[2]),
        lambda: TensorDict({"a": torch.zeros(2), "note": "text"}, batch_size=[2]),
    ],
    ids=["NonTensorData", "str"],
)
def test_text_in_a_tensordict_is_a_leaf(make: Callable[[], TensorDict]) -> None:
    value = make()
    leaves, spec = tree.flatten(value, batched=True)
    assert spec.paths() == ["a", "note"]
    assert leaves[1] is value.get("note")
    back = tree.unflatten(spec, leaves, batch=2)
    assert back["note"] == "text"
    assert back.batch_size == torch.Size([2])


def test_stacked_text_is_a_leaf() -> None:
    rows = [TensorDict({"a": torch.zeros(3), "note": NonTensorData(text)}, []) for text in ("one", "two")]
    leaves, spec = tree.flatten(torch.stack(rows), batched=True)
    assert spec.paths() == ["a", "note"]
    assert leaves[1].tolist() == ["one", "two"]


def test_tensorclass_keeps_its_batch_axis() -> None:
    make: Any = Transition
    batch = make(obs=torch.zeros(5, 2), batch_size=[5])
    leaves, spec = tree.flatten(batch, batched=True)
    back = tree.unflatten(spec, [leaf[:2] for leaf in leaves], batch=2)
    assert back.batch_size == torch.Size([2])


def test_deep_tree() -> None:
    value: Any = 1
    for i in itertools.islice(itertools.cycle("ab"), 200):
        value = {i: value} if i == "a" else [value]
    leaves, spec = tree.flatten(value, batched=False)
    assert leaves == [1]
    assert same(tree.unflatten(spec, leaves), value)


@pytest.mark.parametrize(("keys", "children"), [(("a", "a"), [1, 2]), (("a", "b"), [1]), (("a",), [1, 2])])
def test_container_whose_keys_and_children_do_not_match(keys: tuple[str, ...], children: list[int]) -> None:
    class Broken:
        pass

    name = f"tests.Broken{keys}{children}"
    register_container(Broken, Container(name, lambda value, batched: (keys, children, None), lambda *_: Broken()))
    message = rf"expected one key per child, each once, found \[.*\] for {len(children)} children"
    with pytest.raises(SchemaError, match=message):
        tree.flatten(Broken(), batched=False)
    spec = tree.Spec(name, Broken, keys, (tree.LEAF,) * len(keys))
    with pytest.raises(SchemaError, match=message):
        tree.flatten_like(spec, Broken(), batched=False)


# -- classes that change between a save and a load ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["namedtuple", "dataclass"])
def test_fields_in_another_order_find_their_names(kind: str) -> None:
    classes: Any = {
        "namedtuple": (NamedTuple("Old", [("x", Any), ("y", Any)]), NamedTuple("New", [("y", Any), ("x", Any)])),
        "dataclass": tuple(dataclasses.make_dataclass("Old", names) for names in (["x", "y"], ["y", "x"])),
    }
    old, new = classes[kind]
    leaves, spec = tree.flatten(old(x=1, y=2), batched=False)
    back = tree.unflatten(dataclasses.replace(spec, type=new), leaves)
    assert (type(back), back.x, back.y) == (new, 1, 2)


@pytest.mark.parametrize("kind", ["namedtuple", "dataclass"])
@pytest.mark.parametrize("names", [["x"], ["x", "y", "z"], ["x", "w"]])
def test_other_fields_in_a_saved_structure_are_refused(kind: str, names: list[str]) -> None:
    make: Any = namedtuple if kind == "namedtuple" else dataclasses.make_dataclass
    cls = make("Point", ["x", "y"])
    name = f"tests.{kind}{names}"
    register_type(cls, name=name)
    plain = spec_to_plain(tree.flatten(cls(1, 2), batched=False)[1])
    assert spec_from_plain(plain).type is cls
    plain |= {"keys": names, "children": [None] * len(names)}
    with pytest.raises(CheckpointMismatchError, match=r"expected the fields \['x', 'y'\], found"):
        spec_from_plain(plain)
