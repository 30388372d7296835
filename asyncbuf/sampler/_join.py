"""What a ``JoinedSampler`` asks of that which it joins to its draws."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncbuf._plain.codec import dtype_name
from asyncbuf._runtime.summary import summary
from asyncbuf.errors import CheckpointCorruptError, SchemaError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncbuf.batch import Draw
    from asyncbuf.rows import BoolArray, Int64Array, Rows, WriteEvent
    from asyncbuf.sampler._spans import Links


class JoinedRows:
    """The rows of a draw, and what is joined to them.

    Args:
        rows: the rows that were drawn, int64 ``[rows]``.

    Attributes:
        rows: the rows.
        last: of each row, the one whose next observation belongs to it: the row itself, or with n-step returns a later
            one of its trajectory. int64 ``[rows]``.
        joins: further rows by name, int64 ``[rows]`` or ``[rows, ...]``.
        info: what is said of each row, ``[rows, ...]``.
    """

    def __init__(self, rows: Int64Array) -> None:
        self.rows = rows
        self.last = rows
        self.joins: dict[str, Int64Array] = {}
        self.info: dict[str, torch.Tensor] = {}


class Join(ABC):
    """Something that a batch has beside the rows that were drawn: n-step returns, stacks of frames, other goals.

    Attributes:
        columns: paths of the fields of an item that it must know of each row.
        is_quick: whether ``combine`` only puts tensors together, and calls no function of the user.
        needs_spans: whether ``draw`` needs ``links.spans``.
    """

    columns: tuple[str, ...] = ()
    is_quick: bool = True
    needs_spans: bool = False

    def follows(self, joins: Sequence[Join]) -> None:
        """Refuse joins ahead of this one that it does not go with.

        Raises:
            ValueError: there is such a join.
        """

    @abstractmethod
    def draw(self, links: Links, drawn: JoinedRows, generator: torch.Generator) -> None:
        """Say which rows to join to those that were drawn.

        Args:
            links: which rows follow each other.
            drawn: the rows, and what the joins before this one have added.
            generator: the only source of randomness.
        """

    @abstractmethod
    def combine(self, draw: Draw, data: Any, joined: Mapping[str, Any]) -> Any:
        """Make one tree of a batch and what was joined to it.

        Args:
            draw: the draw.
            data: the batch, leaves ``[*shape, *item]``; may be changed, but not its leaves.
            joined: a tree for each join, leaves ``[*shape of its rows, *item]``.
        """

    def check_write(self, event: WriteEvent) -> None:
        """Refuse items that lack something, or have it in another form than expected."""

    def wrote(self, event: WriteEvent) -> None:
        """Note of rows what is needed of them."""

    def state_dict(self, is_stored: BoolArray) -> dict[str, Any]:
        """What is known of the first rows, in memory of its own.

        Args:
            is_stored: which of them have an item: bool ``[rows]``. Nothing is known of the others.
        """
        return {}

    def parsed(self, state: Any, name: str) -> Any:
        """What ``state_dict`` gave out, checked, for ``take_over``.

        Raises:
            CheckpointError: it does not fit.
        """
        if state != {}:
            raise CheckpointCorruptError(f"{name}: expected no state, found some")
        return None

    def take_over(self, parsed: Any) -> None:
        """Go on with what was parsed."""

    def verify(self, stop: int, rows: Rows, name: str) -> None:
        """Refuse a state that was just loaded and does not go with the rows.

        Args:
            stop: the row behind the last one that is linked.
            rows: those of the table.
            name: of the sampler, for messages.

        Raises:
            CheckpointCorruptError: it does not.
        """


class Column:
    """The values of one field by row. Their shape is that of the first items.

    Args:
        path: path of the field.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.values: np.ndarray[Any, Any] | None = None

    def check(self, event: WriteEvent) -> None:
        """Refuse values of another shape than those before.

        Raises:
            SchemaError: they have one.
        """
        column = event.offered[self.path]
        if self.values is not None and column.shape[1:] != self.values.shape[1:]:
            raise SchemaError(
                f"{self.path}: expected items of shape {list(self.values.shape[1:])}, found {list(column.shape[1:])}"
            )

    def wrote(self, event: WriteEvent) -> None:
        """Note the values of rows."""
        columns, rows = event.columns[self.path], event.rows.numpy()
        if self.values is None:
            self.values = np.zeros((event.table.capacity, *columns.shape[1:]), columns.dtype)
        elif self.values.dtype != columns.dtype:  # items of a list may be 0 at first, and 0.5 later
            self.values = self.values.astype(np.promote_types(self.values.dtype, columns.dtype), copy=False)
        self.values[rows] = columns

    def verify(self, stop: int, rows: Rows, name: str) -> None:
        """Refuse values of other rows than there are.

        Raises:
            CheckpointCorruptError: they are.
        """
        known = 0 if self.values is None else len(self.values)
        if known not in (0, rows.capacity) or known < stop:
            raise CheckpointCorruptError(f"{name}: expected {self.path} of {rows.capacity} rows, found {known}")

    def take(self, rows: Int64Array) -> np.ndarray[Any, Any]:
        """The values of rows: ``[*rows, *item]``."""
        assert self.values is not None
        return self.values.take(rows, axis=0)

    def state(self, is_stored: BoolArray) -> dict[str, Any]:
        """The values of the first rows, 0 for those without an item, and for how many there is room."""
        values = self.values
        if values is None:
            return {"capacity": 0, "values": None}
        found = values[: len(is_stored)].copy()
        found[~is_stored[: len(found)]] = 0
        return {"capacity": len(values), "values": torch.from_numpy(found)}

    def parsed(self, state: Any, name: str) -> np.ndarray[Any, Any] | None:
        """What ``state`` gave out.

        Raises:
            CheckpointCorruptError: it is something else.
        """
        if not isinstance(state, dict) or state.keys() != {"capacity", "values"}:
            raise CheckpointCorruptError(f"{name}: expected the values of {self.path}, found something else")
        capacity, values = state["capacity"], state["values"]
        if values is None and capacity == 0:
            return None
        is_plain = isinstance(values, torch.Tensor) and values.layout is torch.strided and values.device.type == "cpu"
        is_room = type(capacity) is int and capacity < 2**48
        if (
            not isinstance(values, torch.Tensor)
            or not is_plain
            or not values.ndim
            or not is_room
            or len(values) > capacity
        ):
            raise CheckpointCorruptError(f"{name}: expected a tensor of values of {self.path}, found something else")
        try:
            saved: np.ndarray[Any, Any] = values.detach().numpy()
        except (TypeError, RuntimeError) as error:
            raise CheckpointCorruptError(
                f"{name}: expected numbers as values of {self.path}, found {dtype_name(values.dtype)}"
            ) from error
        if self.values is not None and saved.shape[1:] != self.values.shape[1:]:
            raise CheckpointCorruptError(
                f"{name}: expected values of {self.path} of shape {list(self.values.shape[1:])}, found "
                f"{list(saved.shape[1:])}"
            )
        found = np.zeros((capacity, *saved.shape[1:]), saved.dtype)
        found[: len(saved)] = saved
        return found


def taken(data: Any, path: str) -> Any:
    """The leaf or tree at a path of nested dicts.

    Raises:
        SchemaError: there is none.
    """
    found = data
    for key in path.split("/"):
        if not hasattr(found, "keys") or key not in found.keys():  # noqa: SIM118 (a TensorDict has no other way)
            raise SchemaError(f"expected items with the field {path!r}, which is joined; found {summary(data)}")
        found = found[key]
    return found


def put(data: Any, path: str, value: Any) -> None:
    """Put something at a path of nested dicts. Those on the way become copies, which share their leaves.

    Raises:
        SchemaError: there is a leaf on the way.
    """
    *ways, last = path.split("/")
    for key in ways:
        if key in data.keys() and not hasattr(data[key], "keys"):  # noqa: SIM118
            raise SchemaError(f"expected items with room for {path!r}, found a leaf at {key!r} in {summary(data)}")
        data[key] = data[key].copy() if key in data.keys() else {}  # noqa: SIM118
        data = data[key]
    data[last] = value
