"""Items with sequences in them: what they consist of, and how they are taken apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from asyncbuf._plain import tree
from asyncbuf._runtime.summary import summary
from asyncbuf.errors import SchemaError
from asyncbuf.storage._leaf import Field, as_bits, fit, scalar
from asyncbuf.storage._ragged_values import Packed, Padded, Separate, bits_of, is_open

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from asyncbuf.rows import Int64Array
    from asyncbuf.storage._arena import Sequences

    Array = np.ndarray[Any, Any]


class Group(NamedTuple):
    """Ragged fields that have the same lengths.

    Attributes:
        name: of the group; empty if it is the only one and has none.
        paths: of the fields.
    """

    name: str
    paths: tuple[str, ...]

    @property
    def lengths(self) -> str:
        """The key of the lengths in a batch."""
        return f"{self.name}_lengths" if self.name else "lengths"

    @property
    def offsets(self) -> str:
        """The key of the offsets in a batch."""
        return f"{self.name}_offsets" if self.name else "offsets"


class Structure(NamedTuple):
    """What every item consists of.

    Attributes:
        spec: the tree of an item.
        leaves: by leaf of the tree, its number among ``fixed``, or, from -1 downwards, among ``ragged``.
        fixed: the leaves of a fixed shape, and the lengths of each group behind them.
        ragged: the sequences, group by group; the shape is that of one token.
    """

    spec: tree.Spec
    leaves: tuple[int, ...]
    fixed: tuple[Field, ...]
    ragged: tuple[Field, ...]

    def __str__(self) -> str:
        """The fields in words."""
        ragged = [f"{field} for each token" for field in self.ragged]
        return ", ".join([*map(str, self.fixed), *ragged])


class Items(NamedTuple):
    """Items that were taken apart.

    Attributes:
        structure: what each consists of.
        arrays: bits of the fixed leaves, ``[items, *item]``, and lengths, int64 ``[items]``.
        sequences: by ragged field.
        tokens: by group, number of tokens.
    """

    structure: Structure
    arrays: list[Array]
    sequences: list[Sequences]
    tokens: list[int]


class Taker:
    """Takes items apart.

    Args:
        groups: which fields are ragged.
        max_length: how long a sequence may be; None for any.
    """

    def __init__(self, groups: Sequence[Group], max_length: int | None) -> None:
        self.groups = tuple(groups)
        self._max_length = max_length
        self._paths = [path for group in groups for path in group.paths]
        self._numbers = {path: number for number, path in enumerate(self._paths)}
        self._reserved = {key: group for group in groups for key in (group.lengths, group.offsets)}
        self._plan: _Plan | None = None

    # -- one item, or a list of them ----------------------------------------------------------------------------------

    def several(self, known: Structure | None, items: Sequence[Any]) -> Items:
        """Take a list of items apart."""
        if not len(items):
            raise SchemaError("expected at least one item, found none")
        if len(items) == 1:
            return self.one(known, items[0])
        spec = None if known is None else known.spec
        rows = []
        for number, item in enumerate(items):
            try:
                spec, leaves = self._leaves(spec, item)
            except SchemaError as error:
                raise SchemaError(f"item {number}: {error}") from error
            rows.append(leaves)
        assert spec is not None
        return self._items(known, spec, [list(column) for column in zip(*rows, strict=True)])

    def one(self, known: Structure | None, item: Any) -> Items:
        """Take one item apart."""
        if known is not None and (found := self._plainly(known, item)) is not None:
            return found
        spec, leaves = self._leaves(None if known is None else known.spec, item)
        return self._items(known, spec, [[leaf] for leaf in leaves])

    def _plainly(self, known: Structure, item: Any) -> Items | None:
        """The short way for a flat dict of tensors and arrays of the very dtypes; None for anything else."""
        plan = self._plan
        if plan is None or plan.structure is not known:
            plan = self._plan = _plan_of(known)
        if type(item) is not dict or not item or len(item) != len(plan.leaves):
            return None
        arrays: list[Array] = [_NOTHING] * len(known.fixed)
        sequences: list[Array] = [_NOTHING] * len(known.ragged)
        for key, number, dtype, shape in plan.leaves:
            leaf: Any = item.get(key)
            if type(leaf) is torch.Tensor:
                try:
                    leaf = leaf.numpy()
                except (RuntimeError, TypeError):  # another device, a gradient, a dtype that numpy lacks
                    return None
            elif type(leaf) is not np.ndarray and (number < 0 or (leaf := scalar(leaf, dtype)) is None):
                return None
            if leaf.dtype is not dtype:
                return None
            if number >= 0:
                if leaf.shape != shape:
                    return None
                arrays[number] = leaf[None]
            elif not leaf.ndim or leaf.shape[1:] != shape:
                return None
            else:
                sequences[~number] = leaf
        tokens, number, place = [], 0, len(arrays) - len(self.groups)
        for group in self.groups:
            length = len(sequences[number])
            if length > (length if self._max_length is None else self._max_length):
                return None
            for _ in group.paths:
                if len(sequences[number]) != length:
                    return None
                number += 1
            arrays[place] = np.array([length])
            place += 1
            tokens.append(length)
        return Items(known, arrays, [Separate([each]) for each in sequences], tokens)

    def _leaves(self, spec: tree.Spec | None, item: Any) -> tuple[tree.Spec, list[Any]]:
        """The leaves of one item; a sequence is one leaf, whatever it consists of."""
        if type(item) is dict and spec is not None and (keys := tree.flat_keys(spec)) is not None:
            # The common case: what is no leaf is found later.
            leaves = [item[key] for key in keys if key in item]
            if len(leaves) == len(item) == len(keys):
                return spec, leaves
        if not isinstance(item, dict):
            raise SchemaError(f"expected an item as a dict, found {summary(item)}")
        if taken := [key for key in self._reserved if key in item]:
            raise SchemaError(
                f"expected an item without {taken}, which a batch has of its own: name the group of its fields, as in "
                f'ragged={{"name": {list(self._reserved[taken[0]].paths)}}}'
            )
        spec, leaves = _flattened(spec, _closed(item, self._paths), batched=False)
        return spec, [leaf.value if type(leaf) is _Sequence else leaf for leaf in leaves]

    def _items(self, known: Structure | None, spec: tree.Spec, columns: list[list[Any]]) -> Items:
        structure = self._found(spec, columns) if known is None else known
        arrays: list[Array] = [_NOTHING] * len(structure.fixed)
        lists: list[list[Array]] = [[]] * len(structure.ragged)
        for number, column in zip(structure.leaves, columns, strict=True):
            if number >= 0:
                arrays[number] = _column(structure.fixed[number], column)
            else:
                field = structure.ragged[~number]
                lists[~number] = [bits_of(field, leaf, _where(i, column)) for i, leaf in enumerate(column)]
        lengths = [np.fromiter(map(len, each), np.int64, len(each)) for each in lists]
        return self._checked(structure, arrays, lengths, [Separate(each) for each in lists])

    def _found(self, spec: tree.Spec, columns: list[list[Any]]) -> Structure:
        """The structure of the first items."""
        paths, places = spec.paths(), []
        fixed: list[Field] = []
        ragged: list[Field | None] = [None] * len(self._paths)
        for path, column in zip(paths, columns, strict=True):
            if (number := self._numbers.get(path)) is None:
                places.append(len(fixed))
                fixed.append(_field_of(column[0], path))
            else:
                places.append(~number)
                ragged[number] = _token_of(column, path)
        return self._structure(spec, places, fixed, ragged)

    def _structure(
        self, spec: tree.Spec, places: list[int], fixed: list[Field], ragged: Sequence[Field | None]
    ) -> Structure:
        missing = [path for path, field in zip(self._paths, ragged, strict=True) if field is None]
        if missing:
            raise SchemaError(f"expected items with the sequences {self._paths}, found none at {missing}: {spec}")
        lengths = [Field(group.lengths, torch.int64, ()) for group in self.groups]
        found = tuple(field for field in ragged if field is not None)
        return Structure(spec, tuple(places), (*fixed, *lengths), found)

    def _checked(
        self, structure: Structure, arrays: list[Array], lengths: list[Int64Array], sequences: list[Sequences]
    ) -> Items:
        """Items whose groups agree in length."""
        number, tokens = 0, []
        for place, group in enumerate(self.groups):
            first = lengths[number]
            for other in range(number + 1, number + len(group.paths)):
                if not np.array_equal(first, lengths[other]):
                    self._differ(group, other - number, first, lengths[other])
            if self._max_length is not None and len(first) and first.max() > self._max_length:
                item = int(first.argmax())
                raise SchemaError(
                    f"{group.paths[0]}: expected at most {self._max_length} tokens, which is max_length, found "
                    f"{first[item]} in item {item}"
                )
            arrays[len(arrays) - len(self.groups) + place] = first
            tokens.append(int(first.sum()))
            number += len(group.paths)
        return Items(structure, arrays, sequences, tokens)

    def _differ(self, group: Group, member: int, first: Int64Array, other: Int64Array) -> None:
        item = int(np.flatnonzero(first != other)[0]) if len(first) == len(other) else 0
        raise SchemaError(
            f"{group.paths[member]}: expected {first[item]} tokens in item {item}, as in {group.paths[0]}, found "
            f"{other[item] if len(other) else 0} (fields that differ in length go into groups of their own: "
            'ragged={"prompt": ["prompt"], "answer": ["answer", "logprobs"]})'
        )

    # -- columns ------------------------------------------------------------------------------------------------------

    def columns(self, known: Structure | None, items: dict[Any, Any]) -> Items:
        """Take items apart that come as one dict: each sequence as a list of them, padded, packed or jagged."""
        given = {key: items[key] for key in self._reserved if key in items}
        items = {key: value for key, value in items.items() if key not in self._reserved}
        spec, leaves = _flattened(None if known is None else known.spec, _closed(items, self._paths), batched=True)
        paths = spec.paths()
        count, where = self._count(leaves, paths, given)
        fixed: list[Field] = []
        arrays: list[Array] = []
        places: list[int] = []
        ragged: list[tuple[Field, Sequences, Int64Array] | None] = [None] * len(self._paths)
        for place, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
            number = self._numbers.get(path)
            if number is None:
                field = None if known is None else known.fixed[known.leaves[place]]
                places.append(len(fixed))
                arrays.append(_batch(field, leaf, path, count, where))
                fixed.append(_field_of_batch(leaf, path) if field is None else field)
            else:
                field = None if known is None else known.ragged[number]
                places.append(~number)
                ragged[number] = self._sequences(field, leaf, path, count, given)
        structure = known
        if structure is None:
            structure = self._structure(spec, places, fixed, [None if found is None else found[0] for found in ragged])
        found = [each for each in ragged if each is not None]
        arrays += [_NOTHING] * len(self.groups)
        return self._checked(structure, arrays, [each[2] for each in found], [each[1] for each in found])

    def _count(self, leaves: list[Any], paths: list[str], given: Mapping[str, Any]) -> tuple[int, str]:
        """How many items there are, and which leaf says so."""
        if not leaves:
            raise SchemaError("expected items with at least one leaf, found none")
        for path, leaf in zip(paths, leaves, strict=True):
            if path not in self._numbers:
                shape = tuple(getattr(leaf, "shape", ()))
                if not shape:
                    raise SchemaError(f"{path}: expected a leading axis of items, found {summary(leaf)}")
                count, where = shape[0], path
                break
        else:
            lists = [leaf.value for leaf in leaves if isinstance(leaf.value, list | tuple)]
            nested = [leaf.value for leaf in leaves if getattr(leaf.value, "is_nested", False)]
            keys = [(key, len(value)) for key, value in given.items() if hasattr(value, "__len__")]
            if lists or nested:
                count, where = len((lists or nested)[0]), paths[0]
            elif keys:
                key, count = keys[0]
                where, count = key, count - (key == self._reserved[key].offsets)
            else:
                raise SchemaError(
                    f"{paths[0]}: expected a list of sequences, or lengths of items at {list(self._reserved)} beside "
                    f"it; found {summary(leaves[0].value)}"
                )
        if count < 1:
            raise SchemaError("expected at least one item, found none")
        return count, where

    def _sequences(
        self, field: Field | None, leaf: _Sequence, path: str, count: int, given: Mapping[str, Any]
    ) -> tuple[Field, Sequences, Int64Array]:
        """One ragged field of all items."""
        value = leaf.value
        group = next(group for group in self.groups if path in group.paths)
        if getattr(value, "is_nested", False):
            value = list(value.unbind())
        if isinstance(value, list | tuple):
            column = list(value)
            if len(column) != count:
                raise SchemaError(f"{path}: expected {count} sequences, as there are items, found {len(column)}")
            token = _token_of(column, path) if field is None else field
            separate = [bits_of(token, one, f"item {i}: ") for i, one in enumerate(column)]
            return token, Separate(separate), np.fromiter(map(len, separate), np.int64, count)
        bits, dtype, _ = as_bits(value, path)
        axes = 1 if group.offsets in given else 2
        if bits.ndim < axes:
            raise SchemaError(f"{path}: expected {axes} leading axes, items and tokens, found {list(bits.shape)}")
        token = Field(path, dtype, bits.shape[axes:]) if field is None else field
        bits = fit(token, bits, dtype, False)
        if bits.shape[axes:] != token.shape:
            raise SchemaError(f"{path}: expected tokens of shape {list(token.shape)}, found {list(bits.shape[axes:])}")
        if group.offsets in given:
            packed = Packed(bits, _integers(given[group.offsets], group.offsets, count + 1), group.offsets)
            return token, packed, packed.lengths
        if group.lengths not in given:
            raise SchemaError(
                f"{path}: expected a list of sequences, or their lengths at {group.lengths!r} beside a padded tensor; "
                f"found {summary(value)} without"
            )
        padded = Padded(bits, _integers(given[group.lengths], group.lengths, count), path)
        return token, padded, padded.lengths


class _Plan(NamedTuple):
    """What makes items of a structure quick to take apart.

    Attributes:
        structure: the structure.
        leaves: of a flat dict: key, number as in ``Structure.leaves``, dtype (None if numpy lacks it) and shape.
    """

    structure: Structure
    leaves: tuple[tuple[Hashable, int, np.dtype[Any] | None, tuple[int, ...]], ...]


def _plan_of(structure: Structure) -> _Plan:
    keys, fields = tree.flat_keys(structure.spec), []
    for key, number in zip(keys or (), structure.leaves, strict=keys is not None):
        field = structure.fixed[number] if number >= 0 else structure.ragged[~number]
        fields.append((key, number, None if field.is_carried else field.bits, field.shape))
    return _Plan(structure, tuple(fields))


class _Sequence:
    """Stands in a tree for a sequence, which may be a list and is a leaf all the same."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


_NOTHING = np.empty(0)
_NO_DTYPE = (
    "{path}: expected a tensor, an array or at least one number in the first items, which decide the dtype; found an "
    "empty list (torch.tensor([], dtype=torch.int64) has one)"
)


def _closed(node: Any, paths: Sequence[str]) -> Any:
    """A copy of the dicts in a tree, with what is at some paths closed."""
    if not isinstance(node, dict):
        return node
    made = {}
    for key, child in node.items():
        name = str(key)
        below = [path[len(name) + 1 :] for path in paths if path.startswith(f"{name}/")]
        made[key] = _Sequence(child) if name in paths else _closed(child, below) if below else child
    return made


def _flattened(spec: tree.Spec | None, opened: Any, *, batched: bool) -> tuple[tree.Spec, list[Any]]:
    if spec is not None:
        return spec, tree.flatten_like(spec, opened, batched=batched)
    leaves, spec = tree.flatten(opened, batched=batched)
    return spec, leaves


def _where(item: int, column: Sequence[Any]) -> str:
    return f"item {item}: " if len(column) > 1 else ""


def _field_of(leaf: Any, path: str) -> Field:
    bits, dtype, guessed = as_bits(leaf, path)
    if guessed and dtype is torch.uint64:
        raise SchemaError(f"{path}: expected an integer of 64 bits, found {leaf}")
    return Field(path, dtype, bits.shape)


def _field_of_batch(leaf: Any, path: str) -> Field:
    bits, dtype, _ = as_bits(leaf, path)
    return Field(path, dtype, bits.shape[1:])


def _token_of(column: Sequence[Any], path: str) -> Field:
    """What a token is, by the first sequence that says so."""
    for i, leaf in enumerate(column):
        if not is_open(leaf):
            bits, dtype = bits_of(None, leaf, f"{path}: {_where(i, column)}")
            return Field(path, dtype, bits.shape[1:])
    raise SchemaError(_NO_DTYPE.format(path=path))


def _column(field: Field, column: Sequence[Any]) -> Array:
    """A fixed leaf of some items: bits ``[items, *item]``."""
    if len(column) == 1:
        return _fixed(field, column[0], "")[None]
    array = np.empty((len(column), *field.shape), field.bits)
    for i, leaf in enumerate(column):
        array[i] = _fixed(field, leaf, f"item {i}: ")
    return array


def _fixed(field: Field, leaf: Any, where: str) -> Array:
    try:
        bits = fit(field, *as_bits(leaf, field.path))
    except SchemaError as error:
        raise SchemaError(f"{where}{error}") from error
    if bits.shape != field.shape:
        raise SchemaError(
            f"{where}{field.path}: expected the shape {list(field.shape)}, found {list(bits.shape)} (fields whose "
            "length differs are named in RaggedStorage(ragged=...))"
        )
    return bits


def _batch(field: Field | None, leaf: Any, path: str, count: int, where: str) -> Array:
    """A fixed leaf of all items."""
    bits, dtype, guessed = as_bits(leaf, path)
    if bits.ndim == 0 or bits.shape[0] != count:
        found = bits.shape[0] if bits.ndim else "no axis"
        raise SchemaError(f"{path}: expected {count} items along the leading axis, as in {where}, found {found}")
    if field is None:
        return bits
    bits = fit(field, bits, dtype, guessed)
    if bits.shape[1:] != field.shape:
        raise SchemaError(f"{path}: expected items of shape {list(field.shape)}, found {list(bits.shape[1:])}")
    return bits


def _integers(value: Any, key: str, count: int) -> Int64Array:
    bits, _, _ = as_bits(value, key)
    if bits.dtype.kind not in "iu" or bits.shape != (count,):
        raise SchemaError(f"{key}: expected {count} integers, found {summary(value)}")
    return bits.astype(np.int64)
