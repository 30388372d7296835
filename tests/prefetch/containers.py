"""Containers that a collate function may return, each around one tensor that can be taken out again."""

from __future__ import annotations

import collections
import dataclasses
import threading
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, tensorclass


class Named(NamedTuple):
    x: Any
    text: str = "text"


@dataclasses.dataclass
class Data:
    x: Any
    text: str = "text"
    made: int = dataclasses.field(default=3, init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    text: str = "text"


@tensorclass
class Tensors:
    x: torch.Tensor
    text: str = "text"


class UserDict(collections.UserDict[str, Any]):
    """As the batches of a well-known tokenizer."""


class AttributeDict(dict[str, Any]):
    """Its keys are attributes, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Synchronised(collections.OrderedDict[str, Any]):
    """Keeps every item a second time, as an attribute."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        vars(self)[key] = value


class OwnMapping(MutableMapping[str, Any]):
    """Keeps its items where a shallow copy would share them."""

    def __init__(self, **items: Any) -> None:
        self.store = {"items": items}

    def __getitem__(self, key: str) -> Any:
        return self.store["items"][key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.store["items"][key] = value

    def __delitem__(self, key: str) -> None:
        del self.store["items"][key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.store["items"])

    def __len__(self) -> int:
        return len(self.store["items"])


class ReadOnly(Mapping[str, Any]):
    """Can only be made by its constructor: it holds a lock, which nobody can copy."""

    def __init__(self, items: Any) -> None:
        self._items = dict(items)
        self._lock = threading.Lock()

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class OwnSequence(Sequence[Any]):
    def __init__(self, *values: Any) -> None:
        self._values = values

    def __getitem__(self, index: Any) -> Any:
        return self._values[index]

    def __len__(self) -> int:
        return len(self._values)


class OwnTuple(tuple[Any, ...]):
    pass


class OwnList(list[Any]):
    pass


def packed(x: torch.Tensor) -> Any:
    return torch.nn.utils.rnn.PackedSequence(x, torch.tensor([len(x)]))


def tensors(x: torch.Tensor) -> Any:
    make: Any = Tensors
    return make(x, batch_size=[len(x)])


def by_key(value: Any) -> Any:
    return value["x"]


def by_index(value: Any) -> Any:
    return value[0]


def by_name(value: Any) -> Any:
    return value.x


def only_one(value: Any) -> Any:
    return next(iter(value))


Way = tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any]]
CONTAINERS: dict[str, Way] = {
    "dict": (lambda x: {"x": x, "text": "text"}, by_key),
    "defaultdict": (lambda x: collections.defaultdict(list, x=x), by_key),
    "OrderedDict": (lambda x: collections.OrderedDict(x=x), by_key),
    "UserDict": (lambda x: UserDict(x=x, text="text"), by_key),
    "dict with attributes": (lambda x: AttributeDict(x=x, text="text"), by_name),
    "dict that keeps attributes": (lambda x: Synchronised(x=x, text="text"), by_name),
    "mutable mapping": (lambda x: OwnMapping(x=x, text="text"), by_key),
    "mapping": (lambda x: ReadOnly({"x": x, "text": "text"}), by_key),
    "mapping proxy": (lambda x: types.MappingProxyType({"x": x}), by_key),
    "list": (lambda x: [x, "text", 1], by_index),
    "list of its own": (lambda x: OwnList([x, "text"]), by_index),
    "tuple": (lambda x: (x, "text"), by_index),
    "tuple of its own": (lambda x: OwnTuple([x, "text"]), by_index),
    "named tuple": (lambda x: Named(x), by_name),
    "sequence": (lambda x: OwnSequence(x, "text"), by_index),
    "deque": (lambda x: collections.deque([x, "text"], maxlen=4), by_index),
    "set": (lambda x: {x}, only_one),
    "frozenset": (lambda x: frozenset([x]), only_one),
    "dataclass": (lambda x: Data(x), by_name),
    "frozen dataclass": (lambda x: Frozen(x), by_name),
    "TensorDict": (lambda x: TensorDict({"x": x}, batch_size=[len(x)], names=["rows"]), by_key),
    "tensorclass": (tensors, by_name),
    "PackedSequence": (packed, lambda value: value.data),
    "nested": (lambda x: {"a": [(Named({"x": x}),)]}, lambda value: value["a"][0][0].x["x"]),
}
